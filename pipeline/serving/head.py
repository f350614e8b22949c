"""A trained MTP head in its target's own files, as engines load it: `vllm serve FOLDER` with the method "mtp".

The folder holds links to the target's files. Only the files with tensors of the head are written: with the draft's
tensors, in the dtype of those that they replace.
"""

from pathlib import Path

from huggingface_hub import snapshot_download
from safetensors import safe_open
from safetensors.torch import save_file

from pipeline.basics.errors import PipelineError
from pipeline.drafts.native.families import to_file_names
from pipeline.drafts.native.mtp import Mtp
from pipeline.lm.config import TargetConfig
from pipeline.lm.model import fingerprint, local_folder, locate_target, weight_files


def write_target(draft: Mtp, target_fingerprint: str, target: TargetConfig, out: Path) -> None:
    """Write the folder `out`. Raise PipelineError for another target than the draft's, or one without the head."""
    if (digest := fingerprint(target)) != target_fingerprint:
        raise PipelineError(
            f"the draft is of a target with the fingerprint {target_fingerprint}, and {target.model} has {digest}: "
            "name the target in --target that it was trained for"
        )
    form = draft.form.names_in_files(draft.shapes["target_layers"])
    tensors, files = to_file_names(draft.decoder, form, draft.state_dict()), weight_files(locate_target(target))
    if missing := sorted(tensors.keys() - files.keys()):
        raise PipelineError(f"target {target.model!r}: its files lack {missing[0]}, which the head would replace")
    replaced = {files[name].name for name in tensors}
    folder = _download(target)
    for path in sorted(folder.rglob("*")):
        copy = out / path.relative_to(folder)
        if path.is_dir():
            copy.mkdir(parents=True, exist_ok=True)
        elif path.name in replaced:
            _replace_tensors(path, copy, tensors)
        else:
            copy.symlink_to(path.resolve())


def _download(target: TargetConfig) -> Path:
    """Return the folder with all files of the target."""
    name = locate_target(target).name
    return local_folder(name) or Path(snapshot_download(name, revision=target.revision))


def _replace_tensors(path: Path, copy: Path, tensors: dict) -> None:
    with safe_open(path, "pt") as opened:
        written = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        for name in written.keys() & tensors.keys():
            written[name] = tensors[name].detach().to(written[name].dtype).contiguous()
        save_file(written, copy, metadata=opened.metadata())
