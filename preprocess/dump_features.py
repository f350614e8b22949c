"""Dump the target's hidden states over the recipe's dialogues.

python preprocess/dump_features.py RECIPE                                    (starts Ray on this machine)
ray job submit --working-dir . -- python preprocess/dump_features.py RECIPE  (on a cluster)
"""

import signal
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # the checkout, not this folder
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # an interrupted import prints nothing

from pipeline.running import entry
from preprocess.dump.driver import dump

if __name__ == "__main__":
    entry.run_job("dump", __doc__, dump)
