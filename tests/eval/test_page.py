"""report.html: its content, the prompts that it never shows, and its layout in a real browser."""

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

from eval.measure import report
from eval.measure.harness import PLAIN, EvalTask, Record
from eval.measure.prompts import BenchmarkPrompt
from eval.measure.tasks import EvalJob
from eval.release.card import render_page
from pipeline.artifacts.reports import ResultRow
from pipeline.basics.files import write_text
from pipeline.decoding.accept import Acceptance
from pipeline.decoding.config import Method, TreeConfig
from pipeline.decoding.generate import Generation
from pipeline.recipe.recipe import Recipe
from tests.kit import byte_tokenizer, recipe_tree

TEXT = "an é <b>answer</b>"  # "é" is two tokens
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture
def recipe(tmp_path) -> Recipe:
    """A public benchmark, a user's own prompts, a copy of a public one that may be another, and held-out dialogues."""
    tree = recipe_tree(tmp_path / "target", tmp_path / "data.json", tmp_path / "run")
    named = {"humaneval": {"source": "embedded:humaneval"}, "own": {"source": "/secret/own.jsonl"}}
    named |= {"mt-bench": {"source": "benchmark:mt-bench", "path": "/secret/copy"}, "heldout": {"source": "heldout"}}
    tree["eval"] |= {"benchmarks": named, "temperatures": [0.0, 1.0]}
    return Recipe.model_validate(tree)


@pytest.fixture
def job(recipe) -> EvalJob:
    methods = {name: Method(draft=name, tree=TreeConfig()) for name in ("jakiro", "eagle")}
    prompts = [BenchmarkPrompt(f"q{number}", "", (f"question {number} of <i>",)) for number in range(2)]
    tasks = [EvalTask(name, prompt, t) for name in recipe.eval.benchmarks for t in (0.0, 1.0) for prompt in prompts]
    return EvalJob(recipe, methods, {}, tasks, "key")


def records(job: EvalJob) -> list[Record]:
    tokens = byte_tokenizer().encode(TEXT)
    counts = Acceptance()
    counts.add_pass(len(tokens) - 1, len(tokens))
    depths = [0, *range(1, len(tokens))]
    answer = Generation(tokens, acceptance=counts, depths=depths)
    places = [(u.benchmark, u.prompt.question_id, 0, u.temperature) for u in job.tasks]
    return [Record(*place, method, 0, answer) for place in places for method in (PLAIN, *job.methods)]


def test_samples_are_of_the_released_draft_and_of_public_prompts_only(job):
    (sample,) = report.select_samples(job, records(job), byte_tokenizer())
    assert (sample["benchmark"], sample["method"], sample["temperature"]) == ("humaneval", "jakiro", 0.0)
    assert sample["question"] == "question 0 of <i>" and "".join(text for text, _ in sample["pieces"]) == TEXT
    assert [depth for _, depth in sample["pieces"]] == list(range(len(TEXT) + 1))
    assert [text for text, _ in sample["pieces"]][3:5] == ["", "é"]  # a letter of two tokens waits for its last
    old = [replace(record, generation=replace(record.generation, depths=[])) for record in records(job)]
    assert report.select_samples(job, old, byte_tokenizer()) == []


@pytest.fixture
def written(job, tmp_path) -> Path:
    """The page of a report with two methods."""
    gate = {"drawn": False, "identical": 9, "checked": 10, "near_ties": 1, "rounds": 0}
    counts = {"prompts": 10, "answers": 10, "answers_in_circles": 0}
    rows = []
    for method, speed, lossless in (("jakiro", 1.5, 1), ("eagle", None, 0)):
        place = {"benchmark": "humaneval", "temperature": 0.0}
        rows.append(ResultRow("decoded", method, "tau", 2.5, interval=[2.25, 2.75], details=counts, **place))
        rows.append(ResultRow("decoded", method, "speedup", speed, **place))
        rows += [
            ResultRow("decoded", method, f"accepted at depth {n}", 0.5 / (2 - n % 2), **place) for n in range(1, 19)
        ]
        rows.append(ResultRow("decoded", method, "lossless", lossless, details=gate, **place))
    plot = tmp_path / "tau_and_speed.png"
    figure = plt.figure(figsize=(12, 4))
    figure.savefig(plot)
    plt.close(figure)
    provenance = {"hardware": "a GPU & more", "code_revision": "a"}
    measured = {"provenance": provenance, "samples": report.select_samples(job, records(job), byte_tokenizer())}
    facts = {"recipe": job.recipe, "recipe_hash": "0" * 16, "training": {"parameters": 12345}, "measured": measured}
    facts |= {"trees": {"jakiro": "deep"}}
    facts |= {"name": "tiny-" + "x" * 90, "kind": "jakiro", "article": "a", "target_name": "me/target"}
    facts |= {"method": "jakiro", "alone": "jakiro", "faster": "`eagle` was faster.", "explanation": "tau = ..."}
    write_text(tmp_path / "report.html", render_page(facts, rows, [plot]))
    return tmp_path / "report.html"


def test_the_page_needs_nothing_else_and_text_is_text(written):
    text = written.read_text()
    assert not re.search(r"""(src|href)=["'](?!data:)|url\(|@import|<script""", text)
    assert not re.search("<b>|<i>|secret", text) and "&lt;" in text and "a GPU &amp; more" in text
    assert text.count('class="released"') == 1 and "<td>withheld</td>" in text and "<td>NO</td>" in text
    assert "9 of 10 identical, 1 near ties" in text and "2.50 [2.25, 2.75]" in text and "12,345" in text
    assert "<td>1.50x noise</td>" in text and "marked as noise proves nothing" in text  # there is no interval
    assert "<p>eagle was faster.</p>" in text and "A jakiro draft for" in text
    assert text.count("<mark") == 5 + len(TEXT)  # the legend's, and all tokens but the first


LOOK = """<script>
const mark = document.querySelector(".answer:not(.question) mark"), image = document.querySelector("img");
document.body.dataset.look = [document.documentElement.scrollWidth - innerWidth, image.naturalWidth,
  getComputedStyle(mark).backgroundColor, document.querySelectorAll("tr.released td").length].join(" ");
</script></body>"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_shows_it_on_a_wide_window_and_a_phones(written, tmp_path, width):
    """Nothing is wider than the window, the plot is there, guesses are coloured; and a picture to look at."""
    policy = re.compile(r"<meta http-equiv[^>]*>")
    looked = tmp_path / "looked.html"
    looked.write_text(policy.sub("", written.read_text()).replace("</body>", LOOK))
    quiet = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"]
    quiet += ["--disable-background-networking", f"--user-data-dir={tmp_path / 'profile'}"]
    command = [BROWSER, *quiet, f"--window-size={width},900"]
    dom = subprocess.run([*command, "--dump-dom", looked.as_uri()], capture_output=True, text=True, timeout=120)
    match = re.search(r'data-look="(-?\d+) (\d+) (rgb\([^)]*\)) (\d+)"', dom.stdout)
    assert match, dom.stderr[-500:]
    assert match.groups() == ("0", "1200", "rgb(205, 236, 207)", "8")
    shot = tmp_path / "shot.png"
    subprocess.run([*command, f"--screenshot={shot}", written.as_uri()], capture_output=True, timeout=120, check=True)
    assert shot.read_bytes().startswith(b"\x89PNG")
