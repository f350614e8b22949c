"""The papers' table from reports."""

from eval.studies.table import markdown, rows_of


def entry(benchmark, draft, speedup, tau, temperature=0.0):
    return {
        "benchmark": benchmark,
        "temperature": temperature,
        "draft": draft,
        "speedup": speedup,
        "speedup_interval": None if speedup is None else [speedup - 0.1, speedup + 0.1],
        "tau": tau,
        "tau_interval": [tau - 0.2, tau + 0.2],
        "tau_legacy": tau + 0.1,
    }


def report(name, *entries):
    return {"name": name, "target": f"T{name}", "provenance": {"hardware": "one"}, "results": list(entries)}


def test_rows_are_targets_and_methods_and_means_are_over_their_benchmarks():
    first = report("7b", entry("a", "jakiro", 2.0, 3.0), entry("b", "jakiro", 3.0, 4.0), entry("a", "eagle", 1.5, 2.0))
    second = report("13b", entry("a", "jakiro", 2.5, 3.5, 1.0))
    rows = rows_of([first, second])
    assert [(row["temperature"], row["run"], row["method"]) for row in rows] == [
        (0.0, "7b", "eagle"),
        (0.0, "7b", "jakiro"),
        (1.0, "13b", "jakiro"),
    ]
    assert (rows[1]["mean_speedup"], rows[1]["mean_tau"], rows[1]["mean_tau_legacy"]) == (2.5, 3.5, 3.6)
    assert rows[0]["mean_tau"] is None  # eagle was not measured on b: its mean would be another one
    lines = markdown(rows).splitlines()
    assert lines[0].startswith("| T | run | target | method | a: speed-up | a: tau (legacy count) | b: speed-up |")
    assert lines[3] == (
        "| 0 | 7b | T7b | jakiro | 2.00 [1.90, 2.10]x | 3.00 [2.80, 3.20] (3.10) | 3.00 [2.90, 3.10]x | 4.00 [3.80, "
        "4.20] (4.10) | 2.50x | 3.50 (3.60) |"
    )
    assert lines[2].endswith("| - | - | - | - |")
    assert lines[-1].startswith("Measured on: 13b: one; 7b: one") or lines[-1].startswith(
        "Measured on: 7b: one; 13b: one"
    )


def test_a_withheld_speed_withholds_the_mean():
    rows = rows_of([report("7b", entry("a", "jakiro", None, 3.0), entry("b", "jakiro", 3.0, 4.0))])
    assert rows[0]["mean_speedup"] is None and rows[0]["mean_tau"] == 3.5
    assert "| withheld | 3.00" in markdown(rows) and "| - | 3.50 (3.60) |" in markdown(rows)
