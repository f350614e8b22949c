"""Tests of the site: it builds without a warning, its reference and commands agree with the code, it fits windows."""

import functools
import html
import http.server
import json
import re
import subprocess
import sys
import threading
from dataclasses import fields
from pathlib import Path

import pytest

import jakiro
from pipeline.decoding.config import Method, TreeConfig
from pipeline.drafts import DRAFTS
from pipeline.recipe.recipe import Recipe
from pipeline.recipe.sections import BenchmarkConfig
from tests.eval.test_page import BROWSER
from tests.kit import ROOT, command_environment

PAGES = [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs/tutorials").glob("*.md"), ROOT / "README.md"]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    build += ["--config-file", str(ROOT / "infra/site/mkdocs.yml")]
    done = subprocess.run(build, capture_output=True, text=True, env=command_environment(NO_MKDOCS_2_WARNING="1"))
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stdout + done.stderr
    return folder


def text(site: Path, page: str) -> str:
    return re.sub(r"<[^>]+>", "", (site / page).read_text())


def test_the_reference_matches_the_code(site):
    recipe, drafts, options = (text(site, f"reference/{name}.html") for name in ("recipe", "drafts", "options"))
    for name, field in Recipe.model_fields.items():
        keys = getattr(field.annotation, "model_fields", {name: None})
        assert all(key in recipe for key in keys), name
    assert all(kind in drafts for kind in DRAFTS) and "auxiliary_layers" in drafts
    assert all(f"usage: jakiro {name}" in options for name in jakiro.COMMANDS)
    errors = (site / "reference/errors.html").read_text()
    messages = [html.unescape(message) for message in re.findall(r"<li><code>(.*?)</code>", errors)]
    assert any("holds no draft checkpoint" in message for message in messages) and len(messages) > 300
    assert not [
        message for message in messages if re.search(r"\{[^{}]*[('=!][^{}]*\}", message)
    ]  # no Python, but names
    searched = json.loads((site / "search/search_index.json").read_text())["docs"]
    locations = {entry["location"].partition("#")[0] for entry in searched}
    assert {"tutorials/laptop.html", "reference/recipe.html", "results/experts.html"} <= locations


def test_options_in_pages_exist(site):
    options = text(site, "reference/options.html")
    options_of = {name: set() for name in jakiro.COMMANDS}
    for part in options.split("usage: jakiro ")[1:]:
        options_of[part.split()[0]] |= set(re.findall(r"--[a-z][\w-]*", part))
    for page in PAGES:
        for block in re.findall(r"```\w*\n(.*?)```", page.read_text(), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                if command := re.match(r"(?:\.venv/bin/)?jakiro ([a-z-]+)(.*)", line.partition("  #")[0]):
                    used = set(re.findall(r"(?<!\S)--[a-z][\w-]*", command[2]))
                    assert used <= options_of[command[1]], f"{page.name}: {line}"


def test_every_key_of_a_recipe_has_a_comment(site):
    page = (site / "reference/recipe.html").read_text()
    rows = re.findall(r"<tr>\s*<td><code>(\w+)</code></td>\s*(?:<td>.*?</td>\s*){2}<td>(.*?)</td>", page, re.DOTALL)
    kinds = [field.annotation for field in Recipe.model_fields.values()]
    sections = [kind for kind in kinds if hasattr(kind, "model_fields")]
    keys = [name for name, field in Recipe.model_fields.items() if field.annotation not in sections]
    keys += [key for section in (*sections, BenchmarkConfig) for key in section.model_fields]
    keys += [field.name for section in (TreeConfig, Method) for field in fields(section)]
    assert sorted(key for key, _ in rows) == sorted(keys)
    assert not [key for key, words in rows if not words.strip()]


# Frames, as a browser's own window is not as narrow as a phone.
FRAME = '<iframe src="{page}" style="border:0;width:{width}px;height:900px"></iframe>'
MEASURE = """<script>addEventListener("load", () => {
  document.title = JSON.stringify([...document.querySelectorAll("iframe")].map(frame => {
    const page = frame.contentDocument, tables = [...page.querySelectorAll("article table")];
    const few = tables.filter(one => one.closest(".keys") || one.querySelectorAll("th").length < 4);
    const cells = few.flatMap(one => [...one.querySelectorAll("td")]);
    const hidden = cells.filter(one => one.getBoundingClientRect().right > frame.clientWidth);
    const broken = [...page.querySelectorAll("article td code")].filter(one =>
      page.defaultView.getComputedStyle(one).wordBreak != "normal");
    return [page.documentElement.scrollWidth, tables.length, hidden.length, broken.length];
  }));
});</script>"""
WITH_TABLES = ["commands.html", "serving.html", "reference/recipe.html"]


@pytest.mark.long
@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
def test_pages_fit_a_phones_window_and_a_wide_one_and_show_all_cells_of_small_tables(site):
    """No page is wider than the window: wide tables and commands scroll by themselves. Words are not broken."""
    shown = [(page, width) for page in [*WITH_TABLES, "index.html", "tutorials/laptop.html"] for width in (500, 1300)]
    shown += [(page, 400) for page in WITH_TABLES]
    (site / "probe.html").write_text("".join(FRAME.format(page=page, width=width) for page, width in shown) + MEASURE)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=9000", "--dump-dom"]
        command.append(f"http://127.0.0.1:{server.server_port}/probe.html")
        done = subprocess.run(command, capture_output=True, text=True)
        server.shutdown()
    measured = json.loads(re.search("<title>(.*)</title>", done.stdout)[1])
    for (page, width), (needed, tables, hidden, broken) in zip(shown, measured, strict=True):
        if width == 400:
            assert tables and not hidden and not broken, page
        else:
            assert needed <= width, f"{page} at {width}: {needed}"
