"""A release's `custom_generate/`: this project's own decoding, as files that transformers loads in one line.

Generated, never edited: the modules that decoding with this draft needs, copied with their imports made relative, and
a generate.py with the release's settings. They need torch, transformers and safetensors, and no checkout.
"""

import ast
import re
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pipeline.artifacts import checkpoint
from pipeline.artifacts.provenance import revision
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import ROOT, write_text
from pipeline.drafts import DRAFTS, kind_of

FOLDER, ENTRY, REQUIREMENTS = checkpoint.CODE, "generate.py", "requirements.txt"
DECODE = "pipeline.serving.drop_in"
ALLOWED = {"torch", "transformers", "safetensors", "numpy"}  # numpy comes with transformers
_IMPORT = re.compile(r"^(\s*)from (pipeline(?:\.\w+)+) import", re.MULTILINE)
_TYPES = re.compile(r"^if TYPE_CHECKING:\n(?:    .*\n)+\n*", re.MULTILINE)

_ENTRY = '''"""Speculative decoding with the draft of this folder's release:

    model.generate(**inputs, custom_generate="FOLDER or OWNER/NAME", trust_remote_code=True)

Generated at commit {commit}: the modules beside this file are that commit's, their imports made relative.
"""

{imports}

SHAPES = {shapes}
CONFIG = {config}
METHOD = {method}


RELEASED = Released(
    make=lambda: {draft}(CONFIG, SHAPES),
    method=lambda draft: METHOD.load({{{name!r}: draft{secondary}}}),
    weights="{file}",
    weights_sha256="{weights}",
    vocabulary=SHAPES["vocab_size"],
    width=SHAPES["hidden_size"],
    layers=SHAPES["target_layers"],
)


def generate(model, **arguments):
    """What `model.generate` calls with all that it was given."""
    return decode(model, RELEASED, **arguments)
'''


def bundle(release: Path) -> None:
    """Writes `custom_generate/` for the checkpoint in a release folder."""
    saved = checkpoint.read_config(release)
    draft: Any = DRAFTS[kind_of(saved.config)][1]
    others: list[tuple[str, Any]] = [(name, DRAFTS[kind_of(config)][1]) for name, config in saved.secondary.items()]
    named: dict[str, set[str]] = {DECODE: {"Released", "decode"}}
    for kind in [draft, *dict(others).values(), *_classes([saved.config, saved.method, saved.secondary])]:
        named.setdefault(kind.__module__, set()).add(kind.__name__)
    modules = _closure(list(named))
    folder = release / FOLDER
    folder.mkdir(exist_ok=True)
    for module, text in modules.items():
        write_text(folder / f"{_flat(module)}.py", _relative(text))
    imports = [f"from .{_flat(module)} import {', '.join(sorted(names))}" for module, names in sorted(named.items())]
    entry = _ENTRY.format(
        commit=revision(),
        imports="\n".join(imports),
        shapes=saved.shapes,
        config=repr(saved.config),
        method=repr(saved.method),
        draft=draft.__name__,
        name=saved.method.draft,
        secondary="".join(f", {name!r}: {kind.__name__}({saved.secondary[name]!r}, SHAPES)" for name, kind in others),
        file=checkpoint.WEIGHTS,
        weights=saved.weights_sha256,
    )
    ast.parse(entry)
    write_text(folder / ENTRY, entry)
    lines = [f"transformers>={version('transformers')}", "torch", "safetensors"]
    write_text(folder / REQUIREMENTS, "".join(f"{line}\n" for line in lines))


def _classes(value: Any) -> set[type]:
    """This project's classes whose values occur in a setting: its text in generate.py names them."""
    if isinstance(value, list | tuple | set):
        return set().union(*map(_classes, value)) if value else set()
    if isinstance(value, dict):
        return _classes(list(value.values()))
    if type(value).__module__.startswith("pipeline."):
        return {type(value)} | _classes(list(vars(value).values()))
    return set()


def _flat(module: str) -> str:
    """pipeline.decoding.tree -> decoding_tree: the loader of transformers wants all in one folder."""
    return "_".join(module.split(".")[1:])


def _file(module: str) -> Path:
    return (ROOT / module.replace(".", "/")).with_suffix(".py")


def _relative(text: str) -> str:
    """A module's text as it stands in the bundle: without what is for the type checker alone."""
    return _IMPORT.sub(lambda found: f"{found[1]}from .{_flat(found[2])} import", _TYPES.sub("", text))


def _closure(wanted: list[str]) -> dict[str, str]:
    """Those modules and all that they import, with their text. Raises PipelineError for one that imports what a user of
    transformers need not have.
    """
    found: dict[str, str] = {}
    while wanted:
        module = wanted.pop()
        if module in found:
            continue
        text = _file(module).read_text()
        found[module] = text
        for node in ast.walk(ast.parse(_TYPES.sub("", text))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [one.name for one in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                top = name.split(".")[0]
                if top == "pipeline":
                    wanted.append(name)
                elif top not in ALLOWED and top not in sys.stdlib_module_names:
                    raise PipelineError(f"{module} imports {top}: a release's code must do without")
    return dict(sorted(found.items()))
