"""Tests of the README and the pages of docs/: they are short enough, and their links lead to existing files."""

import re
import tomllib

import pytest

import jakiro
from pipeline.recipe.recipe import Recipe
from tests.kit import ROOT

README = ROOT / "README.md"
RESULTS = sorted((ROOT / "docs/results").glob("*.md"))  # of past commits: their commands are those of a tag
GUIDES = [README, *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [*GUIDES, *RESULTS]


def test_the_readme_is_read_in_a_minute():
    lines = README.read_text().splitlines()
    assert len(lines) <= 120
    assert not [line for line in lines if len(line) > 120]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_existing_files(page):
    for link in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        if "://" not in link:
            assert (page.parent / link).exists(), f"{page.name} links to {link}"
    for link, anchor in re.findall(r"\]\(([\w./-]*)#([^)]+)\)", page.read_text()):
        heads = re.findall(r"^#+ (.*)", (page.parent / link if link else page).read_text(), re.M)
        assert anchor in {re.sub(r"[^\w -]", "", head).lower().replace(" ", "-") for head in heads}, f"{page}: {anchor}"


def test_tests_of_make_check_exist():
    text = (ROOT / "Makefile").read_text()
    matches = re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?", text)
    assert len(matches) >= 3 and {path for path, _ in matches} >= {"tests/test_layout.py", "tests/test_run.py"}
    for path, test in matches:
        assert f"def {test}" in (ROOT / path).read_text(), f"{path}::{test}"


def test_every_page_is_in_the_index():
    index = (ROOT / "docs/README.md").read_text()
    for page in PAGES:
        assert page.name == "README.md" or f"]({page.relative_to(ROOT / 'docs')})" in index


@pytest.mark.parametrize("page", RESULTS, ids=lambda page: page.name)
def test_a_page_of_results_says_where_its_commands_are_to_be_found(page):
    """The code changes; measurements are repeated at the tag or commit that the page names."""
    assert re.search(r"^(Commands|Measured) .*`?([0-9a-f]{7})\b", page.read_text(), re.M), page.name


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_named_files_exist(page):
    text = page.read_text()
    for name in re.findall(
        r"\b((?:pipeline|preprocess|train|eval|tests|infra)/[\w./-]*\.(?:py|toml|sbatch|json))\b", text
    ):
        assert (ROOT / name).exists(), f"{page.name}: {name}"


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_named_commands_of_jakiro_exist(page):
    for code in re.findall(r"```.*?```|`[^`]+`", page.read_text(), re.DOTALL):
        for name in re.findall(r"(?:^|[`/:;] ?|&& |-- )jakiro ([a-z][\w-]*)", code, re.M):
            assert name in jakiro.COMMANDS, f"{page.name}: jakiro {name}"


def test_each_guarantee_names_a_test():
    tests = " ".join(
        re.findall(r"^def (test_\w+)", "\n".join(p.read_text() for p in ROOT.glob("tests/**/test_*.py")), re.M)
    )
    claims = (
        (ROOT / "docs/scope.md")
        .read_text()
        .partition("| what goes wrong elsewhere |")[2]
        .partition("\n\n")[0]
        .splitlines()[2:]
    )
    assert len(claims) >= 10
    for claim in claims:
        name = re.search(r"`(\w+)` \|$", claim)
        assert name and name[1] in tests, claim


def test_the_readmes_recipe_is_one():
    [recipe] = re.findall(r"```toml\n(.*?)```", README.read_text(), re.DOTALL)
    assert Recipe.model_validate(tomllib.loads(recipe)).draft["eagle"].kind == "eagle"


def test_the_demos_minutes_agree():
    """The README and docs/results/demo.md describe the same run."""
    words = r"(\d+) minutes: (\d+) for the dump, (\d+) for training, (\d+) for measuring"
    pages = (README, ROOT / "docs/results/demo.md")
    minutes = [tuple(map(int, re.search(words, page.read_text()).groups())) for page in pages]
    assert minutes[0] == minutes[1] and abs(minutes[0][0] - sum(minutes[0][1:])) < 2


def test_pictures_are_small():
    for picture in [*(ROOT / "docs").rglob("*.png"), *(ROOT / "docs").rglob("*.svg")]:
        assert picture.stat().st_size < 200_000, picture.name
