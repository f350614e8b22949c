"""Twenty fp32 steps, shared out in every way: a table of how far each loss curve is from the first.

python -m tests.train.equality        (five minutes; the table of docs/results/training-notes.md)
"""

import sys
import tempfile
from pathlib import Path

from tests.kit import save_tiny_target
from tests.train.runs import dump_for, largest_difference, run_training

GLOBAL_BATCH = 8


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        dumped = dump_for(save_tiny_target(folder / "target"), folder)
        reference = None
        print("| ranks | accumulation | ZeRO-0 | ZeRO-2 | ZeRO-3 |\n|---|---|---|---|---|")
        for ranks in (1, 2):
            for accumulation in (1, 2, 4):
                cells = []
                for stage in (0, 2, 3):
                    output = folder / f"{ranks}-{accumulation}-{stage}"
                    sets = [f"train.micro_batch={GLOBAL_BATCH // (ranks * accumulation)}", f"train.zero_stage={stage}"]
                    done = run_training(dumped, output, *sets, ranks=ranks)
                    if done.returncode:
                        sys.exit(done.stdout + done.stderr)
                    reference = reference or output
                    same = output == reference
                    cells.append("the reference" if same else f"{largest_difference(reference, output):.1e}")
                print(f"| {ranks} | {accumulation} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
