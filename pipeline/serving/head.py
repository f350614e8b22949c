"""A trained MTP head in its target's own files, as engines load it: `vllm serve FOLDER` with the method "mtp".

The folder holds links to the target's files. Only the shards with tensors of the head are written: with the draft's
tensors, in the dtype of those that they replace. Names and shards stay, and so the index does.
"""

from fnmatch import fnmatch
from pathlib import Path

from huggingface_hub import snapshot_download
from safetensors import safe_open

from pipeline.artifacts.checkpoint import write_weights
from pipeline.basics.errors import PipelineError
from pipeline.drafts.native.families import to_file_names
from pipeline.drafts.native.mtp import Mtp
from pipeline.lm.config import TargetConfig
from pipeline.lm.model import fingerprint, local_folder, locate_target, weight_files

# The files of a model that an engine may read: weights, settings, tokenizer, template, code.
LINKED = ("*.safetensors", "*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja", "*.py")


def write_target(draft: Mtp, target_fingerprint: str, target: TargetConfig, out: Path) -> None:
    """Fill the folder `out`. Raise PipelineError for another target than the draft's, or one without the head."""
    digest = fingerprint(target)
    if digest != target_fingerprint:
        raise PipelineError(
            f"the draft is of a target with the fingerprint {target_fingerprint}, and {target.model} has {digest}: "
            "name the target in --target that it was trained for"
        )
    form, files = draft.form.names_in_files(draft.shapes["target_layers"]), weight_files(locate_target(target))
    tensors = to_file_names(draft.decoder, form, draft.state_dict(), files)
    if missing := sorted(tensors.keys() - files.keys()):
        raise PipelineError(f"target {target.model!r}: its files lack {missing[0]}, which the head would replace")
    replaced = {files[name].name for name in tensors}
    for path in sorted(_download(target).iterdir()):
        if path.name in replaced:
            _replace_tensors(path, out / path.name, tensors)
        elif path.is_file() and any(fnmatch(path.name, pattern) for pattern in LINKED):
            (out / path.name).symlink_to(path.resolve())


def _download(target: TargetConfig) -> Path:
    """Return the folder with the target's files."""
    name = locate_target(target).name
    return local_folder(name) or Path(
        snapshot_download(name, revision=target.revision, allow_patterns=list(LINKED), ignore_patterns=["*/*"])
    )


def _replace_tensors(path: Path, copy: Path, tensors: dict) -> None:
    with safe_open(path, "pt") as opened:
        written = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    for name in written.keys() & tensors.keys():
        written[name] = tensors[name].to(written[name].dtype)
    write_weights(copy, written)
