"""The pages of the site that are made from the code, when MkDocs builds it: the options of each command, the keys of a
recipe, the kinds of drafts, the messages of errors, the code's own docstrings.
"""

import ast
import contextlib
import inspect
import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "infra/command")]

import jakiro
from pipeline.drafts import DRAFTS
from pipeline.recipe import recipe, sections

FOLDERS = ("pipeline", "preprocess", "train", "eval", "infra")
RESULTS = "results"

# Words stay whole, and what is wide scrolls. On a phone the cells of a row, up to three or a key's, stand in a column.
STYLE = """
.md-grid { max-width: 72rem; }
.md-typeset table:not([class]) { overflow-wrap: normal; }
.md-typeset table:not([class]) :is(td, th) code { word-break: normal; }
@media (min-width: 45em) {
  .md-typeset table:not([class]) td:first-child code, .keys td:nth-child(3) code { white-space: nowrap; }
}
@media (max-width: 44.99em) {
  .md-typeset table:not([class], .keys *):has(th:nth-child(4)) :is(td, th) { min-width: 7rem; }
  .md-typeset :is(.keys table, table:not([class], :has(th:nth-child(4)))) {
    &, tbody, tr, td { display: block; min-width: 0; }
    thead { display: none; }
    tr { border-top: .05rem solid var(--md-default-fg-color--lightest); padding: .4rem 0; }
    td { border: 0; padding: .1rem .6rem; overflow-wrap: anywhere; }
    td code { white-space: normal; overflow-wrap: anywhere; }
    td:empty { display: none; }
  }
  .md-typeset .keys td:nth-child(3)::before { content: "default: "; }
}
"""


def code(text: Any) -> str:
    return f"`{' '.join(str(text).split())}`"


def kind_said(annotation: str) -> str:
    """A type as a user reads it: Annotated[int, Field(ge=0)] is int (ge=0), Literal['a', 'b'] is 'a' | 'b'."""
    annotation = re.sub(r"^(?:Runtime|Measured|Cut|Job)\[(.*)\]$", r"\1", annotation)
    plain = re.sub(r"Annotated\[(.+), Field\((.*?)\)\]", r"\1 (\2)", annotation)
    plain = re.sub(r"Annotated\[(\w+), [^]]*\]", r"\1", plain)
    return re.sub(r"Literal\[(.*?)\]", lambda found: found[1].replace(", ", " | "), plain)


def table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [" | ".join(heads), " | ".join("---" for _ in heads), *(" | ".join(row) for row in rows)]
    return "\n".join(f"| {line} |" for line in lines) + "\n"


def keys_of(section: type) -> list[tuple[str, str, str, str]]:
    """(key, type, default, comment) as the class's source has them, those of its bases first."""
    found: dict[str, tuple[str, str, str, str]] = {}
    for one in reversed(section.__mro__):
        if not one.__module__.startswith("pipeline."):
            continue
        source = inspect.getsource(one)
        lines = source.splitlines()
        [tree] = ast.parse(inspect.cleandoc(source) if source.startswith(" ") else source).body
        for node in tree.body:
            if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
                continue
            kind = ast.unparse(node.annotation)
            if node.target.id.startswith("_") or kind.startswith("ClassVar"):
                continue
            above = lines[node.lineno - 2].strip()
            behind = [line.partition("  # ")[2] for line in lines[node.lineno - 1 : node.end_lineno]]
            above = above.removeprefix("# ") if above.startswith("# ") else ""
            comment = " ".join(filter(None, [above, *behind])).replace("|", "\\|")
            comment = comment or found.get(node.target.id, ("", "", "", ""))[3]  # of the base's key
            default = ast.unparse(node.value) if node.value else "required"
            found[node.target.id] = (code(node.target.id), code(kind_said(kind)), code(default), comment)
    return list(found.values())


HEADS = ("key", "type", "default", "what it is")


def keys_table(rows: list[tuple[str, ...]]) -> str:
    """Return a table of keys, which narrow windows show in another form."""
    return f'<div class="keys" markdown>\n\n{table(HEADS, rows)}\n</div>\n'


INTRODUCTION = """# The keys of a recipe

A recipe is a TOML file. `--set section.key=value` overrides a key of it. An unknown key is refused with the nearest
valid name. `[draft.NAME]`: [the kinds of drafts](drafts.md).

## The run
"""
WITHIN = {
    "eval.tree": sections.TreeConfig,
    "eval.methods.NAME": sections.Method,
    "eval.benchmarks.NAME": sections.BenchmarkConfig,
}


def section_of(name: str, section: type) -> str:
    return f"## `[{name}]`\n\n{inspect.getdoc(section) or ''}\n\n{keys_table(keys_of(section))}"


def recipe_page() -> str:
    fields = {name: field.annotation for name, field in recipe.Recipe.model_fields.items()}
    whole = {name: kind for name, kind in fields.items() if inspect.isclass(kind) and hasattr(kind, "model_fields")}
    rest = [row for row in keys_of(recipe.Recipe) if row[0].strip("`") not in whole]
    parts = [INTRODUCTION, keys_table(rest), *(section_of(*one) for one in [*whole.items(), *WITHIN.items()])]
    return "\n".join(parts)


def drafts_page() -> str:
    parts = [
        "# The kinds of drafts\n\n`[draft.NAME]` in a recipe has a `kind`, and these keys. How they compare: "
        "[results](../results/comparison.md).\n"
    ]
    for name, kind in DRAFTS.items():
        about = inspect.getdoc(sys.modules[kind.config.__module__]) or ""
        parts.append(f"## {name}\n\n{about}\n\n{keys_table(keys_of(kind.config))}")
    return "\n".join(parts)


def help_of(name: str) -> str:
    """What `jakiro NAME --help` prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        jakiro.begin(name, ["--help"])
    return printed.getvalue()


def options_page() -> str:
    parts = ["# The options of every command\n"]
    for name, command in jakiro.COMMANDS.items():
        does = command.does[0].upper() + command.does[1:]
        parts.append(f"## {name}\n\n{does}.\n\n```text\n{help_of(name)}```\n")
    return "\n".join(parts)


def sources() -> Iterator[tuple[Path, ast.Module]]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT), ast.parse(path.read_text())


def message(node: ast.expr) -> str | None:
    """The text of a message; what is filled in stands in braces, by its name where it has one."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(one.value if isinstance(one, ast.Constant) else placeholder(one.value) for one in node.values)
    return None


def placeholder(value: ast.expr) -> str:
    name = value.attr if isinstance(value, ast.Attribute) else getattr(value, "id", "")
    return f"{{{name.strip('_').replace('_', ' ').lower()}}}" if name else "{...}"


REFUSALS = ("PipelineError", "ValueError", "Unusable")


def errors_page() -> str:
    parts = [
        "# Errors by message\n\nSearch for some words of yours. What is filled in stands in braces. It says what "
        "was met, what is expected and what to do.\n"
    ]
    for path, tree in sources():
        found = []
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in REFUSALS and node.args:
                told = message(node.args[0])
                if told and len(told) > 20:
                    found.append(f"- {code(told.replace('`', chr(39)))}")
        if found:
            parts.append(f"## {path}\n\n" + "\n".join(dict.fromkeys(found)) + "\n")
    return "\n".join(parts)


def code_page() -> str:
    parts = ["# The code\n\nEach file with what it says of itself, and its public names.\n"]
    for path, tree in sources():
        names = []
        for node in tree.body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                said = (ast.get_docstring(node) or "").partition("\n\n")[0]
                names += [(code(node.name), " ".join(said.split()).replace("|", "\\|"))] if said else []
        if about := ast.get_docstring(tree):
            known = f"\n{table(('name', 'what it is'), names)}" if names else ""
            parts.append(f"## {path}\n\n```text\n{about}\n```\n{known}")
    return "\n".join(parts)


def start_page() -> str:
    """The README, whose links are as from docs/."""
    text = (ROOT / "README.md").read_text()
    text = re.sub(r"\((docs/)([^)]*)\)", r"(\2)", text)
    return re.sub(r"\(((?:CONTRIBUTING|CHANGELOG)\.md)\)", lambda found: f"({found[1].lower()})", text)


PAGES = {
    "index.md": start_page,
    "contributing.md": lambda: (ROOT / "CONTRIBUTING.md").read_text().replace("(docs/", "("),
    "changelog.md": lambda: (ROOT / "CHANGELOG.md").read_text(),
    "style.css": lambda: STYLE,
    "reference/options.md": options_page,
    "reference/recipe.md": recipe_page,
    "reference/drafts.md": drafts_page,
    "reference/errors.md": errors_page,
    "reference/code.md": code_page,
}


def on_config(config: Any) -> Any:
    """The pages of results, each under its heading."""
    found = sorted((Path(config.docs_dir) / RESULTS).glob("*.md"))
    for entry in config.nav:
        if list(entry.values()) == [[RESULTS]]:
            entry[next(iter(entry))] = [f"{RESULTS}/{path.name}" for path in found]
    return config


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    files.remove(files.get_file_from_path("README.md"))  # the list of pages: here it is at the side
    for name, make in PAGES.items():
        files.append(File.generated(config, name, content=make()))
    return files
