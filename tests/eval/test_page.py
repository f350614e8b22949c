"""report.html: what it shows, whose prompts it never shows, and how a real browser lays it out."""

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from eval.measure.harness import PLAIN, EvalTask, Record
from eval.measure.prompts import Prompt
from eval.measure.tasks import Job
from eval.release.page import page, samples
from pipeline.artifacts.reports import Row
from pipeline.basics.files import write_text
from pipeline.decoding.accept import Acceptance
from pipeline.decoding.config import TreeConfig
from pipeline.decoding.generate import Generation
from pipeline.decoding.method import Method
from pipeline.lm.chat import pieces_of
from pipeline.recipe.recipe import Recipe
from tests.kit import byte_tokenizer, recipe_tree

TEXT = "an <b>answer</b>"
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
def job(recipe) -> Job:
    methods = {name: Method(draft=name, tree=TreeConfig()) for name in ("jakiro", "eagle")}
    prompts = [Prompt(f"q{number}", "", (f"question {number} of <i>",)) for number in range(2)]
    tasks = [EvalTask(name, prompt, t) for name in recipe.eval.benchmarks for t in (0.0, 1.0) for prompt in prompts]
    return Job(recipe, methods, {}, tasks, "key")


def records(job: Job) -> list[Record]:
    tokens = byte_tokenizer().encode(TEXT)
    counts = Acceptance()
    counts.add_pass(len(tokens) - 1, len(tokens))
    depths = [0, *range(1, len(tokens))]
    answer = Generation(tokens, acceptance=counts, depths=depths)
    places = [(u.benchmark, u.prompt.question_id, 0, u.temperature) for u in job.tasks]
    return [Record(*place, method, 0, answer) for place in places for method in (PLAIN, *job.methods)]


def test_samples_are_of_the_released_draft_and_of_public_prompts_only(job):
    found = samples(job, records(job), byte_tokenizer())
    assert [(one["benchmark"], one["method"], one["temperature"]) for one in found] == [("humaneval", "jakiro", 0.0)]
    assert found[0]["question"] == "question 0 of <i>" and "".join(text for text, _ in found[0]["pieces"]) == TEXT
    assert [depth for _, depth in found[0]["pieces"]] == list(range(len(TEXT)))


def test_letters_of_several_tokens_wait_for_their_last():
    tokens = byte_tokenizer().encode("an é, <b>")
    pieces = pieces_of(byte_tokenizer(), tokens)
    assert len(pieces) == len(tokens) and "".join(pieces) == "an é, <b>" and pieces[3:5] == ["", "é"]


def test_an_answer_without_depths_is_no_sample(job):
    old = [replace(one, generation=replace(one.generation, depths=[])) for one in records(job)]
    assert samples(job, old, byte_tokenizer()) == []


@pytest.fixture
def written(job, tmp_path) -> Path:
    """The page of a report with two methods."""
    gate = {"drawn": False, "identical": 9, "checked": 10, "near_ties": 1}
    rows = []
    for method, speed, lossless in (("jakiro", 1.5, 1), ("eagle", None, 0)):
        what = {"benchmark": "humaneval", "temperature": 0.0}
        rows.append(Row("decoded", method, "tau", 2.5, interval=[2.25, 2.75], details={"prompts": 10}, **what))
        rows.append(Row("decoded", method, "speedup", speed, **what))
        rows += [Row("decoded", method, f"accepted at depth {n}", 0.5 / (2 - n % 2), **what) for n in range(1, 19)]
        rows.append(Row("decoded", method, "lossless", lossless, details=gate, **what))
    measured = {"samples": samples(job, records(job), byte_tokenizer())}
    plot = tmp_path / "tau_and_speed.png"
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=(12, 4))
    figure.savefig(plot)
    plt.close(figure)
    facts = {"name": "tiny-" + "x" * 90, "kind": "jakiro", "target_name": "me/target", "parameters": 12345}
    facts |= {"method": "jakiro", "alone": "jakiro", "article": "a", "faster": "`eagle` was faster."}
    facts |= {"tree": "deep", "hardware": "a GPU & more", "dtype": "float32", "recipe_hash": "0", "code_revision": "a"}
    write_text(tmp_path / "report.html", page(measured, rows, facts, [plot]))
    return tmp_path / "report.html"


def test_the_page_needs_nothing_else_and_text_is_text(written):
    text = written.read_text()
    assert not re.search(r"""(src|href)=["'](?!data:)|url\(|@import|<script""", text)
    assert (
        "&lt;" in text
        and "<b>" not in text
        and "<i>" not in text
        and "a GPU &amp; more" in text
        and "secret" not in text
    )
    assert text.count('class="released"') == 1 and "<td>withheld</td>" in text and "<td>NO</td>" in text
    assert "9 of 10 identical, 1 near ties" in text and "2.50 [2.25, 2.75]" in text and "12,345" in text
    assert "<td>1.50x noise</td>" in text and "marked as noise proves nothing" in text  # there is no interval
    assert "<p>eagle was faster.</p>" in text and "A jakiro draft for" in text
    assert text.count("<mark") == 5 + len(TEXT) - 1  # the legend's, and all tokens but the first


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
    quiet += [
        "--disable-background-networking",
        f"--user-data-dir={tmp_path / 'profile'}",
        f"--window-size={width},900",
    ]
    command = [BROWSER, *quiet]
    dom = subprocess.run([*command, "--dump-dom", looked.as_uri()], capture_output=True, text=True, timeout=120)
    found = re.search(r'data-look="(-?\d+) (\d+) (rgb\([^)]*\)) (\d+)"', dom.stdout)
    assert found, dom.stderr[-500:]
    assert found.groups() == ("0", "1200", "rgb(205, 236, 207)", "8")
    shot = tmp_path / "shot.png"
    subprocess.run([*command, f"--screenshot={shot}", written.as_uri()], capture_output=True, timeout=120, check=True)
    assert shot.read_bytes().startswith(b"\x89PNG")
