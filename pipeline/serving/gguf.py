"""GGUF by llama.cpp's own converter, out of a checkout of llama.cpp or the source package of llama-cpp-python."""

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from pipeline.basics.errors import PipelineError

CONVERTER = "convert_hf_to_gguf.py"
LAST = 40  # words of its log that an error shows


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
