"""A release's `custom_generate/`: this project's own decoding, as files that transformers loads in one line.

The files are generated, never edited: the modules that decoding with this draft needs, copied with their imports made
relative, and a generate.py with the release's settings. They need torch, transformers and safetensors, but no checkout.
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
from pipeline.drafts import DRAFTS, kind_key

FOLDER, ENTRY, REQUIREMENTS = checkpoint.CODE, "generate.py", "requirements.txt"
DECODE_MODULE = "pipeline.serving.drop_in"
ALLOWED_PACKAGES = {"torch", "transformers", "safetensors", "numpy"}  # numpy comes with transformers
_IMPORT = re.compile(r"^(\s*)from (pipeline(?:\.\w+)+) import", re.MULTILINE)
_TYPES = re.compile(r"^if TYPE_CHECKING:\n(?:    .*\n)+\n*", re.MULTILINE)

_ENTRY = '''"""Speculative decoding with the draft of this folder's release:

    model.generate(**inputs, custom_generate="FOLDER or OWNER/NAME", trust_remote_code=True)

Generated at commit {commit}: the modules next to this file are that commit's, with relative imports.
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
    """Decode for `model.generate`, which passes all of its arguments."""
    return decode(model, RELEASED, **arguments)
'''


def bundle(release: Path) -> None:
    """Write `custom_generate/` for the checkpoint in a release folder."""
    saved = checkpoint.read_config(release)
    draft: Any = DRAFTS[kind_key(saved.config)][1]
    secondary: list[tuple[str, Any]] = [(name, DRAFTS[kind_key(config)][1]) for name, config in saved.secondary.items()]
    class_names: dict[str, set[str]] = {DECODE_MODULE: {"Released", "decode"}}
    for kind in [draft, *dict(secondary).values(), *_collect_classes([saved.config, saved.method, saved.secondary])]:
        class_names.setdefault(kind.__module__, set()).add(kind.__name__)
    modules = _collect_modules(list(class_names))
    folder = release / FOLDER
    folder.mkdir(exist_ok=True)
    for module, text in modules.items():
        write_text(folder / f"{_flat_name(module)}.py", _make_imports_relative(text))
    imports = [
        f"from .{_flat_name(module)} import {', '.join(sorted(names))}" for module, names in sorted(class_names.items())
    ]
    entry = _ENTRY.format(
        commit=revision(),
        imports="\n".join(imports),
        shapes=saved.shapes,
        config=repr(saved.config),
        method=repr(saved.method),
        draft=draft.__name__,
        name=saved.method.draft,
        secondary="".join(
            f", {name!r}: {kind.__name__}({saved.secondary[name]!r}, SHAPES)" for name, kind in secondary
        ),
        file=checkpoint.WEIGHTS,
        weights=saved.weights_sha256,
    )
    ast.parse(entry)
    write_text(folder / ENTRY, entry)
    lines = [f"transformers>={version('transformers')}", "torch", "safetensors"]
    write_text(folder / REQUIREMENTS, "".join(f"{line}\n" for line in lines))


def _collect_classes(value: Any) -> set[type]:
    """Return this project's classes whose values occur in a setting: its text in generate.py names them."""
    if isinstance(value, list | tuple | set):
        return set().union(*map(_collect_classes, value)) if value else set()
    if isinstance(value, dict):
        return _collect_classes(list(value.values()))
    if type(value).__module__.startswith("pipeline."):
        return {type(value)} | _collect_classes(list(vars(value).values()))
    return set()


def _flat_name(module: str) -> str:
    """Turn pipeline.decoding.tree into decoding_tree: the loader of transformers requires all files in one folder."""
    return "_".join(module.split(".")[1:])


def _module_file(module: str) -> Path:
    return (ROOT / module.replace(".", "/")).with_suffix(".py")


def _make_imports_relative(text: str) -> str:
    """Return a module's text with relative imports, and without the imports for the type checker."""
    return _IMPORT.sub(lambda match: f"{match[1]}from .{_flat_name(match[2])} import", _TYPES.sub("", text))


def _collect_modules(pending: list[str]) -> dict[str, str]:
    """Return the text of the pending modules and of all modules of this project that they import. Raise PipelineError
    where one imports a package that a user of transformers may lack.
    """
    texts: dict[str, str] = {}
    while pending:
        module = pending.pop()
        if module in texts:
            continue
        text = _module_file(module).read_text()
        texts[module] = text
        for node in ast.walk(ast.parse(_TYPES.sub("", text))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                package = name.split(".")[0]
                if package == "pipeline":
                    pending.append(name)
                elif package not in ALLOWED_PACKAGES and package not in sys.stdlib_module_names:
                    raise PipelineError(f"{module} imports {package}: the code of a release must not need it")
    return dict(sorted(texts.items()))
