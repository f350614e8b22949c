"""Tests that the pages, the README and each command's help agree with the code: commands parse, keys, kinds, engines,
tests and files exist, and a default that a page quotes is the code's.
"""

import argparse
import ast
import importlib
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from pydantic import BaseModel

from pipeline.basics.errors import PipelineError
from pipeline.decoding.config import DEFAULTS
from pipeline.drafts import DRAFTS
from pipeline.drafts.eagle3 import DECAY, Eagle3Config
from pipeline.drafts.native.families import HEADS
from pipeline.drafts.native.mtp import MtpConfig
from pipeline.drafts.parallel.p_eagle import MIN_KEEP_RATE
from pipeline.drafts.prompt_lookup import LONGEST
from pipeline.features.schema import VERSION
from pipeline.lm.config import TargetConfig
from pipeline.recipe.load import add_recipe_arguments, load_recipe
from pipeline.recipe.recipe import Recipe
from pipeline.recipe.sections import TrainConfig
from pipeline.serving.export import LAUNCH_COMMANDS
from tests.kit import ROOT
from tests.pipeline.families import CHAINS, FAMILIES, MORE_TREES, MULTIMODAL, READ_ALONE
from tests.test_docs import GUIDES, PAGES

DEMO = ROOT / "infra/recipes/demo.toml"
ROOMS = ("pipeline", "preprocess", "train", "eval", "infra")
SHOWN = re.compile(rf"(?:\bpython3? (?:-m )?|\bdeepspeed (?:--\w+ \S+ )*)((?:{'|'.join(ROOMS)})\b[\w./]*)(.*)")
STANDS_FOR = {"R": "1", "N": "1", "ENGINE": "vllm", "PART": "costs", "...": "1"}


def code_pieces(text: str) -> tuple[list[str], list[str]]:
    """Return the lines of code blocks, and the pieces of code within sentences."""
    text = re.sub(r"\\\n\s*", " ", text)
    blocks = re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
    rest = re.sub(r"```\w*\n.*?```", "", text, flags=re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()] + re.findall(r"^    \S.*", rest, re.MULTILINE)
    return lines, [" ".join(piece.split()) for piece in re.findall(r"`([^`]+)`", rest)]


class ParsedArguments(Exception):
    """Raised with the parsed arguments, before the command does anything."""


@pytest.fixture
def parse(monkeypatch):
    """Return a function that parses a command's arguments by its own parser. It raises ValueError for refused ones."""

    def parse_args(parser, args=None, namespace=None):
        raise ParsedArguments(parser.parse_known_args(args))

    def refuse(parser, message):
        raise ValueError(message)

    def parse(module: str, words: list[str]) -> argparse.Namespace:
        monkeypatch.setattr("sys.argv", [module, *words])
        monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
        monkeypatch.setattr(argparse.ArgumentParser, "error", refuse)
        package = (ROOT / module.replace(".", "/") / "__main__.py").exists()
        loaded = importlib.import_module(f"{module}.__main__" if package else module)
        try:
            if hasattr(loaded, "main"):
                loaded.main()
            add_recipe_arguments(parser := argparse.ArgumentParser())  # `entry.run_job`
            parser.parse_args()
        except ParsedArguments as parsed:
            arguments, unknown = parsed.args[0]
            if unknown:
                raise ValueError(f"unknown: {unknown}") from None
            return arguments
        raise AssertionError(f"{module} parses nothing")

    return parse


def find_command(line: str) -> tuple[str, list[str]] | None:
    """Return (module, words) of the command of this project that a line shows, if any."""
    match = SHOWN.search(line)
    if not match:
        return None
    words = [STANDS_FOR.get(word, word) for word in shlex.split(match[2], comments=True) if not word.startswith("$")]
    return match[1].removesuffix(".py").strip("./").replace("/", "."), words


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_commands_of_a_page_parse(page, parse):
    lines, pieces = code_pieces(page.read_text())
    for line, is_line in [*((line, True) for line in lines), *((piece, False) for piece in pieces)]:
        if not (shown_command := find_command(line)):
            continue
        try:
            arguments = parse(*shown_command)
        except ValueError as error:
            assert not is_line and "required" in str(error), f"{line}: {error}"
            continue
        recipe = Path(getattr(arguments, "recipe", None) or "RECIPE")
        overrides = [
            override.replace("NAME", "jakiro")
            for override in getattr(arguments, "overrides", [])
            if "$" not in override
        ]
        try:
            load_recipe(ROOT / recipe if (ROOT / recipe).is_file() else DEMO, overrides)
        except PipelineError as error:
            raise AssertionError(f"{line}: {error}") from None


def test_commands_in_help_texts_parse(parse):
    """A module's docstring is the beginning of its --help."""
    count = 0
    for path in sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        for line in re.findall(r"^\s*((?:python|deepspeed|ray|DS_).*)", text, re.MULTILINE):
            if shown_command := find_command(re.sub(r"[\[\]]| \.\.\.", "", re.split(r" {2,}", line)[0])):
                parse(shown_command[0], [word.split("|")[0] for word in shown_command[1]])
                count += 1
    assert count == 28


# -- keys ------------------------------------------------------------------------------------------------------------


def fields(section: Any) -> dict[str, Any]:
    model_fields = section.model_fields if isinstance(section, type) and issubclass(section, BaseModel) else {}
    return {name: field.annotation for name, field in model_fields.items()} or dict(
        getattr(section, "__annotations__", {})
    )


def is_key(name: str) -> bool:
    """Return whether a recipe can have the key; below a section of user-defined names every key counts."""
    section: Any = Recipe
    for part in name.split("."):
        if part not in fields(section):
            return False
        section = fields(section)[part]
        if get_origin(section) is dict or not fields(section):  # a name of the user's comes next, or a value
            return True
        section = next((argument for argument in get_args(section) if fields(argument)), section)
    return True


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_keys_named_by_a_page_exist(page):
    for piece in code_pieces(page.read_text())[1]:
        for name in re.findall(
            rf"^((?:{'|'.join(Recipe.model_fields)})\.[a-z_.]+)(?<!\.py)(?<!\.yaml)(?= ?=|$)", piece
        ):
            module = ROOT / name.replace(".", "/")
            if not (module.with_suffix(".py").exists() or module.parent.with_suffix(".py").exists() or module.exists()):
                assert is_key(name), f"{page.name}: {piece}"


def merged(tree: dict, more: dict) -> dict:
    both = {k: merged(tree[k], more[k]) for k in tree.keys() & more.keys() if isinstance(tree[k], dict)}
    return tree | more | both


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_the_toml_of_a_page_is_valid(page):
    for block in re.findall(r"```toml\n(.*?)```", page.read_text(), re.DOTALL):
        ways = re.findall(r"^tree = .*", block, re.MULTILINE) if block.startswith("tree = ") else []
        for text in [f"eval.methods.jakiro.{way}" for way in ways] or [block]:
            more = tomllib.loads(text.replace("40 hex digits", "0" * 40))
            demo = tomllib.loads(DEMO.read_text())
            tree = {key: demo[key] for key in ("name", "output", "target", "publish")}
            tree["data"] = {"source": demo["data"]["source"]}
            tree["draft"] = {name: draft for name, draft in demo["draft"].items() if name not in more.get("draft", {})}
            tree["eval"] = {"benchmarks": demo["eval"]["benchmarks"]}
            Recipe.model_validate(merged(tree, more))


def test_named_kinds_and_engines_exist():
    table = (ROOT / "docs/training.md").read_text().partition("| `kind` |")[2].partition("\n\n")[0]
    named = re.findall(r"^\| `([\w-]+)`(?: with `frame = \"([\w-]+)\"`)? \|", table, re.MULTILINE)
    assert {f"{kind} on {frame}" if frame else kind for kind, frame in named} == set(DRAFTS)
    serving, commands = ((ROOT / f"docs/{name}.md").read_text() for name in ("serving", "commands"))
    head = serving.partition("## In engines")[2].partition("| `eagle` |")[0].lower()
    assert all(engine in head for engine in LAUNCH_COMMANDS)
    [line] = re.findall(r"^\| `export .*", commands, re.MULTILINE)
    assert all(engine in line for engine in LAUNCH_COMMANDS)
    for page in PAGES:
        for name in re.findall(r"--to (\w+)", page.read_text()):
            assert name in LAUNCH_COMMANDS, f"{page.name}: --to {name}"
        assert "no export to" not in page.read_text(), page.name


def test_each_folder_of_the_code_is_listed():
    listed = (ROOT / "docs/commands.md").read_text().partition("## What is where")[2]
    for folder in {path.parent for room in ROOMS[:4] for path in (ROOT / room).glob("*/*.py")}:
        assert f"`{folder.relative_to(ROOT)}/`" in listed, folder


# -- figures and names -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("page", "pattern", "value"),
    [
        ("README.md", r"has to divide global_batch, which is (\d+)", TrainConfig().global_batch),
        (
            "docs/scope.md",
            r"(\d+) families, tiny",
            sum(map(len, (FAMILIES, MORE_TREES, CHAINS, READ_ALONE, MULTIMODAL))),
        ),
        ("docs/scope.md", r"of (\d+) \| heads of several", len(HEADS)),
        ("docs/your-own-target.md", r"ttt_steps = (\d+)", MtpConfig().ttt_steps),
        ("docs/your-own-target.md", r"decay = ([\d.]+)", MtpConfig().decay),
        ("docs/data.md", r"`target.template_date`\s\((\S+) unless you set it\)", TargetConfig(model="x").template_date),
        (
            "docs/trees.md",
            r"tree = \{ (depth = .*?) \} +# dynamic",
            ", ".join(f"{k} = {v}" for k, v in DEFAULTS.items()),
        ),
        ("docs/trees.md", r"The longest run of at most (\d+) tokens", LONGEST),
        ("docs/training.md", r"ttt_steps = (\d+)", Eagle3Config().ttt_steps),
        ("docs/training.md", r"loss weighs ([\d.]+) of the one before", DECAY),
        ("docs/training.md", r"weighs ([\d.]+)\^s", DECAY),
        ("docs/training.md", r"share max\([\d.]+\^s, ([\d.]+)\)", MIN_KEEP_RATE),
        ("docs/training.md", r"global_batch = (\d+)", TrainConfig().global_batch),
        ("docs/training.md", r"micro_batch = (\d+)", TrainConfig().micro_batch),
        ("docs/feature-shards.md", r"Feature shards, version (\d+)", VERSION),
        ("docs/results/training-notes.md", r"The default stays the papers' ([\d.]+)\.", TrainConfig().noise),
    ],
)
def test_a_default_that_a_page_quotes_is_the_codes(page, pattern, value):
    match = re.search(pattern, (ROOT / page).read_text())
    assert match and match[1] == str(value), f"{page}: {pattern}"


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_tests_and_make_targets_named_by_a_page_exist(page):
    text = page.read_text()
    names = re.findall(r"^def (test_\w+)", "\n".join(p.read_text() for p in ROOT.glob("tests/**/test_*.py")), re.M)
    for name, cut in re.findall(r"\b(test_\w+)\b(?!\.py)(\.\.\.)?", text):
        assert name in names or (cut and any(test.startswith(name) for test in names)), f"{page.name}: {name}"
    for target in re.findall(r"(?:^|`|\n)make ([\w-]+)", text):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M), f"{page.name}: make {target}"


@pytest.mark.parametrize(
    "page", ["README", "docs/README", "docs/results/experts", "docs/results/ablations", "docs/results/demo"]
)
def test_claims_about_experts_name_their_scale(page):
    sentences = re.split(r"(?<=[.?;])\s|\n\n|\n(?=[-#|])", (ROOT / f"{page}.md").read_text())
    answer = r"(mixture of experts|experts pay|form of experts|number of experts)(?! *\W* if)"
    claims = [
        claim for claim in sentences if re.search(answer, claim, re.I) and re.search(r"\b(no|not|level|pay)\b", claim)
    ]
    assert claims
    for claim in claims:
        assert re.search(r"trained\s+tokens", claim) and "135M" in claim, claim
