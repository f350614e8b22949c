"""The words of the code: identifiers name things, docstrings begin with a verb or a noun, a class name exists once."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE, TESTS = ("pipeline", "preprocess", "train", "eval", "infra"), ("tests",)
# Pronouns, participles and adverbs, which name nothing. (`done` is a future's, `rest` a protocol.)
VAGUE = """
    found one given mine said told asked here there own owns whole known kept wanted seen gone others other theirs ours
    which what why how much many some such same apart aside behind beside beyond ends marks unit settled says say knows
    tells ears mouth deaf crowd enough
"""
# A docstring that begins with one of these describes, and names neither an action nor a thing.
OPENERS = "what of by how whether where why who whose which from with to in on at for as than that"
# A function begins with a verb, or with a noun that it returns: neither with one of these, nor is it one participle.
# (`of` names a second constructor, `to`, `as`, `with` and `without` are a conversion's standard words.)
ADVERBS = "over through until before after now since ahead either too more by at are behind beside other each about"
PARTICIPLES = """
    broken chosen copied drawn ended failed finished found given held hidden kept known left lost made merged needed
    opened packed parsed processed resolved restricted scaled seen sent sorted spent stored taken trimmed used verified
    written
"""
# Words for which papers and engines have others: after, next to, again.
OLD_WORDS = r"\b(behind|beside|anew|thereof|whereof)\b"
DOCUMENTED = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module


@cache
def trees(folders: tuple[str, ...]) -> dict[Path, ast.Module]:
    paths = (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")) if not path.is_symlink())
    return {path: ast.parse(path.read_text()) for path in paths}


def names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield every name that a module defines, with its line: variables, attributes, parameters, functions, classes."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name, node.lineno
            case ast.arg():
                yield node.arg, node.lineno
            case ast.Name(ctx=ast.Store()):
                yield node.id, node.lineno
            case ast.Attribute(ctx=ast.Store()):
                yield node.attr, node.lineno


def is_vague(name: str) -> bool:
    return name.strip("_").lower() in VAGUE.split()


def opens_badly(docstring: str) -> bool:
    return docstring.split()[0].strip("`\"'.,:").lower() in OPENERS.split()


@pytest.mark.parametrize("folders", [SOURCE, TESTS])
def test_identifiers_name_things(folders):
    places = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path, tree in trees(folders).items()
        for name, line in names(tree)
        if is_vague(name)
    ]
    lines = sum(path.read_text().count("\n") for path in trees(folders))
    assert len(places) <= lines / 1000, "\n".join(places)


@pytest.mark.parametrize("folders", [SOURCE, TESTS])
def test_docstrings_begin_with_a_verb_or_a_noun(folders):
    nodes = [(path, node) for path, tree in trees(folders).items() for node in ast.walk(tree)]
    docstrings = [
        (f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}", text)
        for path, node in nodes
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node))
    ]
    places = [f"{place}: {text.splitlines()[0]}" for place, text in docstrings if opens_badly(text)]
    assert len(places) <= 0.03 * len(docstrings), "\n".join(places)


@pytest.mark.parametrize("folders", [SOURCE, TESTS])
def test_a_public_class_name_exists_once(folders):
    nodes = chain.from_iterable(map(ast.walk, trees(folders).values()))
    classes = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef) and not node.name.startswith("_"))
    assert not [name for name, count in classes.items() if count > 1]


def is_no_verb(name: str) -> bool:
    word = name.strip("_").lower()
    return word in PARTICIPLES.split() or word.split("_")[0] in ADVERBS.split()


@cache
def functions(folders: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return (place, name) of every function that is called: a property is a noun, or an adjective."""
    nodes = [(path, node) for path, tree in trees(folders).items() for node in ast.walk(tree)]
    return [
        (f"{path.relative_to(ROOT)}:{node.lineno}", node.name)
        for path, node in nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and not any("property" in ast.unparse(decorator) for decorator in node.decorator_list)
    ]


def test_functions_are_verbs():
    """Rule of the source alone: a test's fixtures are named after the things that they return."""
    assert not [place for place, name in functions(SOURCE) if is_no_verb(name)]
    assert len(functions(SOURCE)) > 1000


def test_texts_use_the_words_of_papers():
    """Texts of the source, of cards and of pages; the results' pages are read by people alone."""
    files = [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs/tutorials").glob("*.md"), ROOT / "README.md"]
    files += [path for folder in SOURCE for path in (ROOT / folder).rglob("*.jinja")] + [*trees(SOURCE)]
    assert not [str(path) for path in files if re.search(OLD_WORDS, path.read_text())]


@pytest.mark.parametrize(
    ("name", "is_odd"), [("_opened", True), ("over_ids", True), ("open_set", False), ("now", True)]
)
def test_a_participle_is_no_verb(name, is_odd):
    assert is_no_verb(name) is is_odd


@pytest.mark.parametrize(
    ("source", "vague"),
    [
        ("found = 1", {"found"}),
        ("def f(rows, given=None): pass", {"given"}),
        ("class C:\n    def told(self): self._kept = 1", {"told", "_kept"}),
        ("for one in rows: print(other)", {"one"}),  # `other` is read there, and defined elsewhere
        ("rows = sum(row for row in table)", set()),
    ],
)
def test_names_of_every_kind_are_looked_at(source, vague):
    assert {name for name, _ in names(ast.parse(source)) if is_vague(name)} == vague
