"""A resume state for any number of ranks, by DeepSpeed's own tool, in a process that runs no code of a pickle: it is
this module, with the tool's arguments.
"""

import runpy
import subprocess
import sys
from pathlib import Path

from pipeline.basics.errors import PipelineError
from pipeline.basics.files import ROOT

TOOL = "deepspeed.checkpoint.ds_to_universal"


def convert(state: Path, made: Path, ranks: int) -> None:
    """Writes the folder `made`. Raises PipelineError where the tool cannot."""
    command = [sys.executable, "-m", "train.engine.universal", "--inject_missing_state"]
    workers = ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    folders = ["--input_folder", str(state.resolve()), "--output_folder", str(made.resolve())]
    done = subprocess.run([*command, *workers, *folders], capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise PipelineError(
            f"{state} was saved by another number of ranks and cannot be converted for {ranks}: {last}. Resume with as "
            "many ranks as before, or start over in another output folder"
        )


if __name__ == "__main__":
    from train.engine.engine import read_tensors_alone  # which itself imports this module

    read_tensors_alone()
    runpy.run_module(TOOL, run_name="__main__", alter_sys=True)
