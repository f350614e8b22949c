"""Make the target's states for a training while it runs, shard by shard in the order of its reading, and remove read
ones (features.keep = "window"). `jakiro run` starts it next to training, after the dump has written the texts.

python preprocess/feed.py RECIPE    (starts Ray on this machine; ends when training does)
"""

import signal
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # the checkout, not this folder
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # an interrupted import prints nothing

from pipeline.running import entry
from preprocess.dump.feeder import feed

if __name__ == "__main__":
    entry.run_job("feed", __doc__, feed)
