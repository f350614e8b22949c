"""A released draft in the formats that engines load: vLLM's, SGLang's, speculators', llama.cpp's and transformers'.

    python -m pipeline export RELEASE --to vllm|sglang|speculators|transformers --out FOLDER
    python -m pipeline export RELEASE --to gguf --out FOLDER --llama-cpp CHECKOUT

The `NAMES` in a draft's file say which engines take it, and what these call its tensors. All draft chains (SGLang grows
trees of its own from these weights). What an engine cannot take is refused with the reason. `jakiro import` reads what
was written, but for GGUF and small Llamas: a recipe calls these, as any language model, kind = "small-model". GGUF is
made by llama.cpp's own converter, out of a checkout of llama.cpp or the source package of llama-cpp-python.
"""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from pipeline.artifacts import checkpoint
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import read_json, write_json
from pipeline.drafts import DRAFTS, DraftConfig, kind_of
from pipeline.drafts.parts.names import GPT_OSS, Export, Form, Names
from pipeline.lm.model import source
from pipeline.serving.load import target_of

GGUF, DRAFT_GGUF = "gguf", "draft.gguf"
TRANSFORMERS = "transformers"
# By `make serve-test`, by tests.
TRIED = {"vllm": "vLLM 0.32.0", GGUF: "llama.cpp b10434", TRANSFORMERS: "transformers 5.23"}
CONVERTER = "convert_hf_to_gguf.py"
LAST = 40  # words of its log that an error shows


def export(
    release: Path, engine: str, out: Path, target: str | None = None, llama_cpp: Path | None = None
) -> list[str]:
    """Writes the folder `out`; returns lines for the user. `target`: the verifier's Hub id, which speculators' form
    names; for GGUF its folder, where the release does not know it. `llama_cpp`: the checkout that GGUF takes.

    Raises PipelineError for a damaged release, a draft that the engine cannot take, and an `out` that is there already.
    """
    saved = checkpoint.read_config(release)
    if out.exists():
        raise PipelineError(f"{out} is there already: remove it, or name another folder")
    config, weights = _formed(release, saved, engine, target)
    if engine == GGUF:
        if llama_cpp is None:
            raise PipelineError("--to gguf runs llama.cpp's own converter: say --llama-cpp CHECKOUT")
        folder = _target_folder(release, target)
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as temporary:
        building = Path(temporary) / "form"
        building.mkdir()
        checkpoint.write_weights(building / checkpoint.WEIGHTS, weights)
        write_json(building / checkpoint.CONFIG, config)
        if llama_cpp is not None and engine == GGUF:
            form, building = building, Path(temporary) / GGUF
            building.mkdir()
            convert(llama_cpp, form, building / DRAFT_GGUF, folder)
        building.replace(out)
    return [f"{engine}: {out}", *_launch(saved, engine, out)]


def tried(release: Path) -> dict[str, list[str]]:
    """Each engine that takes this draft and was tried with one of its kind: how to serve it there."""
    saved, out, found = checkpoint.read_config(release), Path("exported"), {}
    for engine, version in TRIED.items():
        try:
            _formed(release, saved, engine, None)
        except PipelineError:
            continue
        if _form_of(saved.config, engine)[1].is_tried:
            more = " --llama-cpp CHECKOUT --target TARGET_FOLDER" if engine == GGUF else ""
            command = f"jakiro export PATH/TO/THIS/FOLDER --to {engine} --out {out}{more}"
            found[version] = [command, *_launch(saved, engine, out)]
    return found


def method_of(config: DraftConfig) -> dict[str, Any]:
    """What vLLM's speculative config says of it, beside its folder and the number of guesses."""
    return dict(DRAFTS[kind_of(config)].names.method)


def _form_of(config: DraftConfig, engine: str) -> tuple[Names, Form]:
    """Raises PipelineError where the engine has no such draft, or not with these settings."""
    kind = kind_of(config)
    names = DRAFTS[kind].names
    engines = [name for name, form in names.forms.items() if form.architecture]
    if engine not in engines:
        there = f"export to {' or '.join(engines)}" if engines else "no engine loads one"
        there = "its generate() takes the release (custom_generate)" if engine == TRANSFORMERS else there
        raise PipelineError(f"{engine} is given no {kind}: {there}")
    form = names.forms[engine]
    for key, words in form.lacks.items():
        if (value := getattr(config, key)) != getattr(type(config), key):
            raise PipelineError(f"{key}={value}: {words or f'{engine} has no such draft; export to vllm'}")
    return names, form


def _formed(
    release: Path, saved: checkpoint.Saved, engine: str, target: str | None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return config.json and the weights. Raises PipelineError for what the engine cannot take."""
    draft = checkpoint.load(release, saved.target["fingerprint"])
    names, form = _form_of(saved.config, engine)
    weights = {name: tensor for name, tensor in draft.state_dict().items() if name not in names.not_exported}
    name = target or saved.target["model"]
    aim = Export(engine, form.architecture, name, _family(target, name), saved.tree.depth)
    config = names.engine_config(draft, weights, aim)
    return config, {form.tensors(mine, draft.config): tensor for mine, tensor in weights.items()}


def _family(target: str | None, name: str) -> str:
    """Return a target's model_type: by the config.json of the folder `target`, else gpt-oss' by its name."""
    config = Path(target or "") / "config.json"
    if target and config.is_file():
        return read_json(config).get("model_type", "")
    return GPT_OSS if "gpt-oss" in name.lower() else ""


def _target_folder(release: Path, target: str | None) -> Path:
    """Where the target's config and tokenizer lie."""
    folder = Path(source(target_of(release, target)).name)
    if not (folder / "config.json").is_file():
        raise PipelineError(f"the target is {folder}, which is no folder here: say --target with one that holds it")
    return folder


def convert(llama_cpp: Path, model: Path, out: Path, target: Path | None = None, packages: Iterable[Path] = ()) -> None:
    """Writes the file `out` in float32 from a folder of transformers' form. `target`: its target's folder, of a draft;
    `packages`: folders that Python finds more packages in (the converter wants sentencepiece).

    Raises PipelineError where the converter is missing or fails; then there is no file.
    """
    program, building = llama_cpp / CONVERTER, out.with_name(f".{out.name}.tmp")
    if not program.is_file():
        raise PipelineError(f"{llama_cpp} holds no {CONVERTER}: --llama-cpp wants a checkout of llama.cpp")
    command = [sys.executable, str(program), str(model), "--outfile", str(building), "--outtype", "f32"]
    command += ["--target-model-dir", str(target)] if target is not None else []
    found = [llama_cpp / "gguf-py", *packages, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, found))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode or not building.is_file():
        building.unlink(missing_ok=True)
        raise PipelineError(f"llama.cpp's converter failed: {' '.join(done.stderr.split()[-LAST:])}")
    building.replace(out)


# -- launch lines -----------------------------------------------------------------------------------------------------


def speculation(method: dict[str, Any], draft: Path, guesses: int) -> str:
    """vLLM's `--speculative-config`."""
    return json.dumps({**method, "model": str(draft), "num_speculative_tokens": guesses})


LAUNCH = {
    "vllm": "vllm serve TARGET --speculative-config {config}",
    "sglang": (
        "python -m sglang.launch_server --model-path TARGET --speculative-algorithm {algorithm} "
        "--speculative-draft-model-path {out} {chain}--speculative-num-draft-tokens {tokens}"
    ),
    GGUF: "llama-server -m TARGET.gguf -md {gguf} --spec-type draft-eagle3 --spec-draft-n-max {guesses}",
    TRANSFORMERS: (
        "tokens = model.generate(**inputs, assistant_model=AutoModel.from_pretrained({folder}), "
        'speculation_type="dflash", do_sample=False)'
    ),
    "speculators": "vllm serve {out}",
}


def _launch(saved: checkpoint.Saved, engine: str, out: Path) -> list[str]:
    names, form = _form_of(saved.config, engine)
    first = [f"pip install {form.plug_in}    # once, into vLLM's environment"] if form.plug_in else []
    guesses = saved.config.levels if names.is_block else saved.tree.depth  # type: ignore[attr-defined]
    line = LAUNCH[engine].format(
        out=shlex.quote(str(out)),
        folder=repr(str(out)),
        gguf=shlex.quote(str(out / DRAFT_GGUF)),
        config=shlex.quote(speculation(method_of(saved.config), out, guesses)),
        algorithm=names.method["method"].upper(),
        chain="" if names.is_block else f"--speculative-num-steps {guesses} --speculative-eagle-topk 1 ",
        tokens=guesses + 1,
        guesses=guesses,
    )
    return [*first, line]
