"""The code that the three stages share: recipes, the two contracts (feature shard, draft checkpoint), drafts, decoding.

Only running/workers.py imports Ray; nothing here imports DeepSpeed. Stages import it; it imports no stage.

Shape letters, used as suffixes of tensor names (``hidden_BTD``):

    B dialogues      T positions       D hidden size       V target vocabulary   U draft vocabulary
    E experts        K kept experts    S tree depth        W nodes of one level  N tree nodes, root included
    C cached draft inputs              M trained rows of a batch                 P prefix length
    A places of a replayed text        L levels that one forward answers         H heads, I their size

Second meanings, where the first makes no sense: S states of a token (``states_TSD``: the last one, then the auxiliary
layers'), K auxiliary layers (``auxiliary_TKD``) or children of a node (``tokens_AWK``), C candidates (``tokens_AC``), L
states of a row of dialogues (``final_BLD``).

Index conventions (position i of a dialogue t_0 .. t_{L-1}):

    f_i     the target's hidden state at position i after its final norm, so head(f_i) are the logits of t_{i+1}
    input i the pair (f_i, t_{i+1});  horizon h of a branch: its output at i predicts f_{i+h}, hence t_{i+1+h}
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.serving.load import LoadedRelease


def load(folder: str | Path, **options: Any) -> "LoadedRelease":
    """Load a release on its target, to `generate` with. `pipeline.serving.load.load` documents the options."""
    # Imported here, since importing a part of the package must not import the rest.
    from pipeline.serving.load import load as load_release

    return load_release(folder, **options)
