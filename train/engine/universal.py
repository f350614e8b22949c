"""Conversion of a resume state to any number of ranks, by DeepSpeed's own tool. It runs in a process that loads no code
of a pickle: this module, with the tool's arguments.
"""

import runpy
import subprocess
import sys
from pathlib import Path

from pipeline.basics.errors import PipelineError
from pipeline.basics.files import ROOT

TOOL = "deepspeed.checkpoint.ds_to_universal"


def convert(state: Path, output: Path, ranks: int) -> None:
    """Write the folder `output`. Raise PipelineError if the tool fails."""
    command = [sys.executable, "-m", "train.engine.universal", "--inject_missing_state"]
    workers = ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    folders = ["--input_folder", str(state.resolve()), "--output_folder", str(output.resolve())]
    process = subprocess.run([*command, *workers, *folders], capture_output=True, text=True, check=False, cwd=ROOT)
    if process.returncode:
        last = (process.stderr.strip().splitlines() or ["no message"])[-1]
        raise PipelineError(
            f"{state} was saved by another number of ranks and cannot be converted for {ranks}: {last}. Resume with as "
            "many ranks as before, or start over in another output folder"
        )


if __name__ == "__main__":
    from train.engine.engine import restrict_pickles  # which itself imports this module

    restrict_pickles()
    runpy.run_module(TOOL, run_name="__main__", alter_sys=True)
