"""A released draft in the formats that engines load: vLLM's, SGLang's, speculators', llama.cpp's and transformers'.

    python -m pipeline export RELEASE --to vllm|sglang|speculators|transformers --out FOLDER
    python -m pipeline export RELEASE --to gguf --out FOLDER --llama-cpp CHECKOUT

The `NAMES` in a draft's file list the engines that load it, and their names of its tensors. All engines draft chains
(SGLang also grows trees from these weights). A draft that an engine cannot load is refused with the reason. `jakiro
import` reads the exported folder, except GGUF and small Llamas: a recipe calls these, as any language model, kind =
"small-model". GGUF is made by llama.cpp's own converter, from a checkout of llama.cpp or the source package of
llama-cpp-python.
"""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from pipeline.artifacts import checkpoint
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import read_json, write_json
from pipeline.decoding.pools import CHAIN
from pipeline.drafts import DRAFTS, DraftConfig, TrainedDraft, kind_key
from pipeline.drafts.native.mtp import Mtp, MtpConfig
from pipeline.drafts.parts.names import GPT_OSS, PLUG_IN, Export, FileFormat, Names
from pipeline.lm.model import locate_target
from pipeline.serving.head import write_target
from pipeline.serving.load import target_of

LOOKUP, LOOKUP_CHAIN = "prompt-lookup", 8
PLUG_IN_VARIABLES = {"VLLM_USE_V2_MODEL_RUNNER": "0"}  # Runner V2, the default on GPUs, does not have V1's proposer
METRICS = "PROMETHEUS_MULTIPROC_DIR"  # a new folder: with it vLLM's /metrics also has the plug-in's counts
GGUF, DRAFT_GGUF = "gguf", "draft.gguf"
TRANSFORMERS = "transformers"
# Engines that `make serve-test` or the tests have run.
TESTED_VERSIONS = {"vllm": "vLLM 0.32.0", GGUF: "llama.cpp b10434", TRANSFORMERS: "transformers 5.23"}
CONVERTER = "convert_hf_to_gguf.py"
MAX_LOG_WORDS = 40  # last words of the converter's log in an error


def export(
    release: Path,
    engine: str,
    out: Path,
    target: str | None = None,
    llama_cpp: Path | None = None,
    prompt_lookup: bool = False,
) -> list[str]:
    """Write the folder `out`; return lines for the user. `target`: the verifier's Hub id, which speculators' form
    names; for GGUF and an MTP head its folder, where the release does not know it. `llama_cpp`: the checkout that
    GGUF requires. `prompt_lookup`: also for a release whose method has none.

    Raise PipelineError for a damaged release, a draft that the engine cannot load, and an `out` that exists.
    """
    saved = checkpoint.read_config(release)
    saved = add_lookup(saved) if prompt_lookup else saved
    if prompt_lookup and not has_lookup(saved, engine):
        kind = kind_key(saved.config)
        raise PipelineError(f"{engine} has no prompt lookup for drafts of kind {kind}: leave --prompt-lookup out")
    if out.exists():
        raise PipelineError(f"{out} exists already: remove it, or name another folder")
    draft = checkpoint.load(release, saved.target["fingerprint"])
    config, weights = _convert_draft(draft, saved, engine, target)
    if engine == GGUF:
        if llama_cpp is None:
            raise PipelineError("--to gguf runs llama.cpp's own converter: add --llama-cpp CHECKOUT")
        folder = _target_folder(release, target)
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as temporary:
        building = Path(temporary) / "form"
        building.mkdir()
        if isinstance(draft, Mtp):
            write_target(draft, saved.target["fingerprint"], target_of(release, target), building)
        else:
            checkpoint.write_weights(building / checkpoint.WEIGHTS, weights)
            write_json(building / checkpoint.CONFIG, config)
        if llama_cpp is not None and engine == GGUF:
            form, building = building, Path(temporary) / GGUF
            building.mkdir()
            convert(llama_cpp, form, building / DRAFT_GGUF, folder)
        building.replace(out)
    return [f"{engine}: {out}", *describe_left_out(saved, engine), *_launch(saved, engine, out)]


def list_tested_engines(release: Path) -> dict[str, list[str]]:
    """Return, for each engine that loads this draft and was tested with one of its kind, the commands to serve it."""
    saved, out, commands = checkpoint.read_config(release), Path("exported"), {}
    draft = checkpoint.load(release, saved.target["fingerprint"])
    for engine, version in TESTED_VERSIONS.items():
        try:
            _convert_draft(draft, saved, engine, None)
        except PipelineError:
            continue
        if _form_of(saved.config, engine)[1].is_tried:
            needs_target = engine == GGUF or isinstance(draft, Mtp)
            extra_arguments = " --llama-cpp CHECKOUT" * (engine == GGUF) + " --target TARGET_FOLDER" * needs_target
            command = f"jakiro export PATH/TO/THIS/FOLDER --to {engine} --out {out}{extra_arguments}"
            commands[version] = [command, *_launch(saved, engine, out)]
    return commands


def add_lookup(saved: checkpoint.CheckpointConfig) -> checkpoint.CheckpointConfig:
    """Return the settings of a release whose method also looks the prompt up, in chains of LOOKUP_CHAIN tokens at least
    where it did not before.
    """
    method, tree = saved.method, saved.tree
    if method.secondary:
        return saved
    wider = replace(tree, nodes=max(tree.nodes, 1 + LOOKUP_CHAIN))
    return replace(saved, method=replace(method, secondary=[LOOKUP], tree=wider))


def has_lookup(saved: checkpoint.CheckpointConfig, engine: str) -> bool:
    """Return whether the exported draft also looks the prompt up, as the release's method does. No engine has the
    corpus of a method.
    """
    has_norms = getattr(saved.config, "qk_norm", False)  # of another layer than the plug-in's
    return bool(saved.method.secondary and _form_of(saved.config, engine)[1].with_lookup and not has_norms)


def describe_left_out(saved: checkpoint.CheckpointConfig, engine: str) -> list[str]:
    """Return a line about prompt lookup if the release's method has it, but the exported draft does not."""
    left_out = saved.method.secondary and not has_lookup(saved, engine)
    return [f"exported without prompt lookup, which {engine} does not have here"] if left_out else []


def vllm_method(config: DraftConfig, looks_up: bool = False) -> dict[str, Any]:
    """Return the fields of vLLM's speculative config, without the draft's folder and the number of draft tokens."""
    return dict(DRAFTS[kind_key(config)].names.method) | ({"disable_padded_drafter_batch": True} if looks_up else {})


def chain_length(saved: checkpoint.CheckpointConfig, engine: str) -> int:
    """Return the draft tokens of a round in the engine, at most."""
    names, tree = _form_of(saved.config, engine)[0], saved.tree
    if has_lookup(saved, engine):
        return max(tree.depth, min(tree.nodes - 1, CHAIN))
    return saved.config.levels if names.is_block else tree.depth  # type: ignore[attr-defined]


def required_plug_in(saved: checkpoint.CheckpointConfig, engine: str) -> str:
    """Return the folder, from the project's root, of the plug-in that the engine requires for a draft; empty if it
    requires none. Raise PipelineError for a draft that the engine cannot load.
    """
    return _form_of(saved.config, engine)[1].plug_in or (PLUG_IN if has_lookup(saved, engine) else "")


def _form_of(config: DraftConfig, engine: str) -> tuple[Names, FileFormat]:
    """Return the names and the form. Raise PipelineError where the engine has no such draft, or not these settings."""
    kind = kind_key(config)
    names = DRAFTS[kind].names
    engines = [name for name, form in names.forms.items() if form.architecture]
    if engine not in engines:
        remedy = f"export to {' or '.join(engines)}" if engines else "no engine loads one"
        remedy = "its generate() takes the release (custom_generate)" if engine == TRANSFORMERS else remedy
        raise PipelineError(f"{engine} cannot load drafts of kind {kind}: {remedy}")
    form = names.forms[engine]
    for key, words in form.unsupported.items():
        if (value := getattr(config, key)) != getattr(type(config), key):
            raise PipelineError(f"{key}={value}: {words or f'{engine} has no such draft; export to vllm'}")
    return names, form


def _convert_draft(
    draft: TrainedDraft, saved: checkpoint.CheckpointConfig, engine: str, target: str | None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return config.json and the weights. Raise PipelineError for a draft that the engine cannot load."""
    names, form = _form_of(saved.config, engine)
    weights = {name: tensor for name, tensor in draft.state_dict().items() if name not in names.not_exported}
    name = target or saved.target["model"]
    looks_up = has_lookup(saved, engine)
    architecture, levels = form.with_lookup if looks_up else form.architecture, saved.tree.parallel or 1
    settings = Export(engine, architecture, name, _family(target, name), saved.tree.depth, levels)
    config = names.engine_config(draft, weights, settings)
    config |= {"prompt_lookup": saved.tree.depth} if looks_up else {}
    return config, {form.tensors(parameter, draft.config): tensor for parameter, tensor in weights.items()}


def _family(target: str | None, name: str) -> str:
    """Return a target's model_type: from the config.json of the folder `target`, else gpt-oss' from its name."""
    config = Path(target or "") / "config.json"
    if target and config.is_file():
        return read_json(config).get("model_type", "")
    return GPT_OSS if "gpt-oss" in name.lower() else ""


def _target_folder(release: Path, target: str | None) -> Path:
    """Return the folder with the target's config and tokenizer."""
    folder = Path(locate_target(target_of(release, target)).name)
    if not (folder / "config.json").is_file():
        raise PipelineError(f"the target is {folder}, which is no folder on this machine: name its folder in --target")
    return folder


def find_converter(llama_cpp: Path) -> Path:
    """Return the path of llama.cpp's converter. Raise PipelineError if the folder is no checkout of llama.cpp."""
    program = llama_cpp / CONVERTER
    if not program.is_file():
        raise PipelineError(f"{llama_cpp} holds no {CONVERTER}: --llama-cpp requires a checkout of llama.cpp")
    return program


def convert(llama_cpp: Path, model: Path, out: Path, target: Path | None = None, packages: Iterable[Path] = ()) -> None:
    """Write the file `out` in float32 from a folder of transformers' form. `target`: for a draft, its target's folder;
    `packages`: folders with further Python packages (the converter requires sentencepiece).

    Raise PipelineError where the converter is missing or fails; then there is no file.
    """
    program, building = find_converter(llama_cpp), out.with_name(f".{out.name}.tmp")
    command = [sys.executable, str(program), str(model), "--outfile", str(building), "--outtype", "f32"]
    command += ["--target-model-dir", str(target)] if target is not None else []
    search_path = [llama_cpp / "gguf-py", *packages, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, search_path))}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if result.returncode or not building.is_file():
        building.unlink(missing_ok=True)
        raise PipelineError(f"llama.cpp's converter failed: {' '.join(result.stderr.split()[-MAX_LOG_WORDS:])}")
    building.replace(out)


# -- launch lines -----------------------------------------------------------------------------------------------------


def format_speculative_config(method: dict[str, Any], draft: Path | None, guesses: int) -> str:
    """Return vLLM's `--speculative-config` as JSON. `draft`: its folder, unless the target's own files hold it."""
    model = {} if draft is None else {"model": str(draft)}
    return json.dumps({**method, **model, "num_speculative_tokens": guesses})


LAUNCH_COMMANDS = {
    "vllm": "vllm serve {target} --speculative-config {config}",
    "sglang": (
        "python -m sglang.launch_server --model-path {target} --speculative-algorithm {algorithm} "
        "--speculative-draft-model-path {out} {chain}--speculative-num-draft-tokens {tokens}"
    ),
    GGUF: "llama-server -m {target} -md {gguf} --spec-type draft-eagle3 --spec-draft-n-max {guesses}",
    TRANSFORMERS: (
        "tokens = model.generate(**inputs, assistant_model=AutoModel.from_pretrained({folder}), "
        'speculation_type="dflash", do_sample=False)'
    ),
    "speculators": "vllm serve {out}",
}


def _launch(saved: checkpoint.CheckpointConfig, engine: str, out: Path) -> list[str]:
    plug_in = required_plug_in(saved, engine)
    command = format_launch_command(saved, engine, out)
    if not plug_in:
        return [command]
    variables = " ".join(f"{name}={value}" for name, value in PLUG_IN_VARIABLES.items())
    return [f"pip install {plug_in}    # once, into vLLM's environment", f"{variables} {command}"]


def format_launch_command(
    saved: checkpoint.CheckpointConfig, engine: str, out: Path, target: str | None = None, guesses: int | None = None
) -> str:
    """Return the command that serves the draft exported to `out`, as a shell reads it. `target`: its folder, file or
    Hub id; default: a placeholder. `guesses`: draft tokens a pass; default: `chain_length`.

    Raise PipelineError for a draft that the engine cannot load, and for more guesses than a block has.
    """
    names, _ = _form_of(saved.config, engine)
    trained, looks_up = chain_length(saved, engine), has_lookup(saved, engine)
    guesses = trained if guesses is None else guesses
    if guesses < 1 or (names.is_block and guesses > trained):
        most = f" to {trained}, the guesses of its block" if names.is_block else " on"
        raise PipelineError(f"{guesses} guesses a pass of a draft of kind {kind_key(saved.config)}: expected 1{most}")
    is_head = isinstance(saved.config, MtpConfig)
    placeholder = "TARGET.gguf" if engine == GGUF else "TARGET"
    return LAUNCH_COMMANDS[engine].format(
        target=shlex.quote(str(out) if is_head else target or placeholder),
        out=shlex.quote(str(out)),
        folder=repr(str(out)),
        gguf=shlex.quote(str(out / DRAFT_GGUF)),
        config=shlex.quote(
            format_speculative_config(vllm_method(saved.config, looks_up), None if is_head else out, guesses)
        ),
        algorithm=names.method["method"].upper(),
        chain="" if names.is_block else f"--speculative-num-steps {guesses} --speculative-eagle-topk 1 ",
        tokens=guesses + 1,
        guesses=guesses,
    )
