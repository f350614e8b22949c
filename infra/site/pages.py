"""The pages of the site that are generated from the code when MkDocs builds it: the options of each command, the keys
of a recipe, the kinds of drafts, the error messages, the code's docstrings.
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

# Words are not broken, and wide content scrolls. On a phone, the cells of a row (of up to three, or of a key) form a
# column.
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


def format_code(text: Any) -> str:
    return f"`{' '.join(str(text).split())}`"


def format_type(annotation: str) -> str:
    """Format a type for users: Annotated[int, Field(ge=0)] as int (ge=0), Literal['a', 'b'] as 'a' | 'b'."""
    annotation = re.sub(r"^(?:Runtime|Measured|Cut|Job)\[(.*)\]$", r"\1", annotation)
    plain = re.sub(r"Annotated\[(.+), Field\((.*?)\)\]", r"\1 (\2)", annotation)
    plain = re.sub(r"Annotated\[(\w+), [^]]*\]", r"\1", plain)
    return re.sub(r"Literal\[(.*?)\]", lambda match: match[1].replace(", ", " | "), plain)


def table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [" | ".join(heads), " | ".join("---" for _ in heads), *(" | ".join(row) for row in rows)]
    return "\n".join(f"| {line} |" for line in lines) + "\n"


def read_keys(section: type) -> list[tuple[str, str, str, str]]:
    """Read (key, type, default, comment) of each key from the class's source, keys of its bases first."""
    keys: dict[str, tuple[str, str, str, str]] = {}
    for base in reversed(section.__mro__):
        if not base.__module__.startswith("pipeline."):
            continue
        source = inspect.getsource(base)
        lines = source.splitlines()
        [tree] = ast.parse(inspect.cleandoc(source) if source.startswith(" ") else source).body
        for node in tree.body:
            if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
                continue
            kind = ast.unparse(node.annotation)
            if node.target.id.startswith("_") or kind.startswith("ClassVar"):
                continue
            above = lines[node.lineno - 2].strip()
            trailing = [line.partition("  # ")[2] for line in lines[node.lineno - 1 : node.end_lineno]]
            above = above.removeprefix("# ") if above.startswith("# ") else ""
            comment = " ".join(filter(None, [above, *trailing])).replace("|", "\\|")
            comment = comment or keys.get(node.target.id, ("", "", "", ""))[3]  # of the base's key
            default = ast.unparse(node.value) if node.value else "required"
            keys[node.target.id] = (
                format_code(node.target.id),
                format_code(format_type(kind)),
                format_code(default),
                comment,
            )
    return list(keys.values())


COLUMNS = ("key", "type", "default", "what it is")


def keys_table(rows: list[tuple[str, ...]]) -> str:
    """Return a table of keys, which narrow windows show as a column."""
    return f'<div class="keys" markdown>\n\n{table(COLUMNS, rows)}\n</div>\n'


INTRODUCTION = """# The keys of a recipe

A recipe is a TOML file. `--set section.key=value` overrides a key of it. An unknown key is refused with the nearest
valid name. `[draft.NAME]`: [the kinds of drafts](drafts.md).

## The run
"""
NESTED_SECTIONS = {
    "eval.tree": sections.TreeConfig,
    "eval.methods.NAME": sections.Method,
    "eval.benchmarks.NAME": sections.BenchmarkConfig,
}


def format_section(name: str, section: type) -> str:
    return f"## `[{name}]`\n\n{inspect.getdoc(section) or ''}\n\n{keys_table(read_keys(section))}"


def recipe_page() -> str:
    fields = {name: field.annotation for name, field in recipe.Recipe.model_fields.items()}
    section_types = {
        name: kind for name, kind in fields.items() if inspect.isclass(kind) and hasattr(kind, "model_fields")
    }
    top_level = [row for row in read_keys(recipe.Recipe) if row[0].strip("`") not in section_types]
    parts = [
        INTRODUCTION,
        keys_table(top_level),
        *(format_section(*section) for section in [*section_types.items(), *NESTED_SECTIONS.items()]),
    ]
    return "\n".join(parts)


def drafts_page() -> str:
    parts = [
        "# The kinds of drafts\n\n`[draft.NAME]` in a recipe has a `kind`, and these keys. How they compare: "
        "[results](../results/comparison.md).\n"
    ]
    for name, kind in DRAFTS.items():
        about = inspect.getdoc(sys.modules[kind.config.__module__]) or ""
        parts.append(f"## {name}\n\n{about}\n\n{keys_table(read_keys(kind.config))}")
    return "\n".join(parts)


def capture_help(name: str) -> str:
    """Return the output of `jakiro NAME --help`."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        jakiro.start_command(name, ["--help"])
    return printed.getvalue()


def options_page() -> str:
    parts = ["# The options of every command\n"]
    for name, command in jakiro.COMMANDS.items():
        does = command.summary[0].upper() + command.summary[1:]
        parts.append(f"## {name}\n\n{does}.\n\n```text\n{capture_help(name)}```\n")
    return "\n".join(parts)


def parse_sources() -> Iterator[tuple[Path, ast.Module]]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT), ast.parse(path.read_text())


def message_text(node: ast.expr) -> str | None:
    """Return the text of a message; a value that is filled in stands in braces, by its name if it has one."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            part.value if isinstance(part, ast.Constant) else placeholder_text(part.value) for part in node.values
        )
    return None


def placeholder_text(value: ast.expr) -> str:
    name = value.attr if isinstance(value, ast.Attribute) else getattr(value, "id", "")
    return f"{{{name.strip('_').replace('_', ' ').lower()}}}" if name else "{...}"


ERRORS = ("PipelineError", "ValueError", "Unusable")


def errors_page() -> str:
    parts = [
        "# Errors by message\n\nSearch for some words of yours. Values that are filled in stand in braces. A message "
        "says what happened, what was expected and what to do.\n"
    ]
    for path, tree in parse_sources():
        lines = []
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ERRORS and node.args:
                text = message_text(node.args[0])
                if text and len(text) > 20:
                    lines.append(f"- {format_code(text.replace('`', chr(39)))}")
        if lines:
            parts.append(f"## {path}\n\n" + "\n".join(dict.fromkeys(lines)) + "\n")
    return "\n".join(parts)


def code_page() -> str:
    parts = ["# The code\n\nEach file with its docstring and its public names.\n"]
    for path, tree in parse_sources():
        names = []
        for node in tree.body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                summary = (ast.get_docstring(node) or "").partition("\n\n")[0]
                names += [(format_code(node.name), " ".join(summary.split()).replace("|", "\\|"))] if summary else []
        if about := ast.get_docstring(tree):
            names_table = f"\n{table(('name', 'what it is'), names)}" if names else ""
            parts.append(f"## {path}\n\n```text\n{about}\n```\n{names_table}")
    return "\n".join(parts)


def start_page() -> str:
    """Return the README, with links relative to docs/."""
    text = (ROOT / "README.md").read_text()
    text = re.sub(r"\((docs/)([^)]*)\)", r"(\2)", text)
    return re.sub(r"\(((?:CONTRIBUTING|CHANGELOG)\.md)\)", lambda match: f"({match[1].lower()})", text)


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
    """Add the pages of results to the navigation, each under its heading."""
    pages = sorted((Path(config.docs_dir) / RESULTS).glob("*.md"))
    for entry in config.nav:
        if list(entry.values()) == [[RESULTS]]:
            entry[next(iter(entry))] = [f"{RESULTS}/{path.name}" for path in pages]
    return config


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    files.remove(files.get_file_from_path("README.md"))  # the list of pages, which the site shows at the side
    for name, make in PAGES.items():
        files.append(File.generated(config, name, content=make()))
    return files
