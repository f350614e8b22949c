"""What a training step costs beside the bare model, and beside the direct way to write its loss.

    python -m train.studies.bench RECIPE [--draft NAME] [--steps 6] [--repeats 5]

Three ways through the same rows of the recipe's dump, in one process, taking turns, a turn being --steps steps of one
rank:

    step     ours: reading and collating ahead, forward, loss on trained positions in chunks, backward, clipping, AdamW
    bare     forward, the same loss and backward on random features of the same shapes that lie ready; no optimizer
    direct   as step, but with the loss written down as in the papers' code: logits of every branch and of its own
             teacher at every position, (B, T, V) tensors, then a mask

Ratios are of tokens per second; their intervals are over repeats. "waiting" is the share of a step in which the next
batch was not there yet. Peak memory is what steps of each way add, in a process of its own, to weights and moments,
beside what train.estimate's formula says of a step. The last line is JSON.
"""

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from pipeline.artifacts.features import feature_spec
from pipeline.artifacts.provenance import ROOT, hardware
from pipeline.basics.accelerator import now, sent
from pipeline.basics.errors import PipelineError
from pipeline.drafts import TrainedDraft
from pipeline.drafts.parts.losses import Prediction
from pipeline.features.batch import Batch
from pipeline.features.shards import FeatureStore
from pipeline.lm.model import load_embed_head
from pipeline.recipe.load import add_recipe_arguments, hand_over, load_recipe
from pipeline.recipe.recipe import Recipe
from pipeline.running import entry
from train.engine.engine import Engine, start_distributed
from train.estimate import ranks_of, step_bytes
from train.input.data import Batches
from train.input.features import bring
from train.loop import new_draft

WAYS = ("step", "bare", "direct")


def direct_loss(draft: TrainedDraft, batch: Batch) -> tuple[torch.Tensor, dict]:
    """What `TrainedDraft.loss` computes, written down directly; for drafts that `require_direct` lets through."""
    total, sums = torch.zeros((), device=batch.tokens_BT.device), {}
    head, inputs = draft.embed_head.head, batch.tokens_BT.shape[1]
    found: dict[str, Prediction] = draft.predictions(batch)
    for name, term in draft.terms(0).items():
        horizon = term.horizon
        hidden_BTD = found[name].features[0][:, : inputs + 1 - horizon]
        label_BTD = batch.labels_BTD[:, horizon - 1 :]
        mask_BT = sent(batch.trained[horizon][:, : inputs + 1 - horizon], label_BTD.device)
        logits_BTV, teacher_BTV = head(hidden_BTD).float(), head(label_BTD).float()
        cross_BT = -(teacher_BTV.softmax(-1) * logits_BTV.log_softmax(-1)).sum(-1)
        smooth_BT = F.smooth_l1_loss(hidden_BTD.float(), label_BTD.float(), reduction="none").mean(-1)
        sums[name] = {
            "regression": (smooth_BT * mask_BT).sum(),
            "classification": (cross_BT * mask_BT).sum(),
            "agree": ((logits_BTV.argmax(-1) == teacher_BTV.argmax(-1)) & mask_BT).sum(),
            "positions": mask_BT.sum(),
        }
        weighted = sum(weight * sums[name][part] for part, weight in term.weights.items())
        total = total + weighted / max(batch.totals[horizon], 1)
    return total, {b: {name: value.detach() for name, value in parts.items()} for b, parts in sums.items()}


def require_direct(draft: TrainedDraft) -> None:
    """Raises PipelineError for a draft whose loss has no direct form here."""
    terms = draft.terms(0).values()
    if draft.own_heads or any(term.features != 1 or term.objective != "soft-ce" for term in terms):
        raise PipelineError(
            f"the bench has no direct form of the loss of {draft.name}: it has a head of its own, a mixture, a "
            "penalty or another objective than 'soft-ce'. Give --draft another one"
        )


class Way:
    """One way to train, ready to take turns."""

    def __init__(self, recipe: Recipe, name: str, way: str, folder: Path):
        self._way, config = way, recipe.train
        store = FeatureStore(recipe.shards_dir, "train", feature_spec(recipe))
        draft = new_draft(recipe, name, load_embed_head(recipe.target), store)
        require_direct(draft)
        if way == "direct":
            draft.loss = partial(direct_loss, draft)
        self._batches = Batches(store, config, draft, recipe.seed, 0, 1)
        self._engine = Engine(draft, config, self._batches.accumulation, self._batches.steps, folder / way, way)
        draft.move_embed_head(self._engine.device, self._engine.dtype)
        self._draft = draft
        self.tokens, self.waited = 0, 0.0

    def _synthetic(self, batch: Batch) -> Batch:
        batch = batch.to(self._engine.device, self._engine.dtype)
        batch.hidden_BTD, batch.labels_BTD = torch.randn_like(batch.hidden_BTD), torch.randn_like(batch.labels_BTD)
        return batch

    def turn(self, first: int, steps: int) -> float:
        """Seconds of the steps from `first` on, behind one that sets the reader off."""
        ready = self._batches.from_step(first, self._engine.device)
        if self._way == "bare":
            ready = ((step, [self._synthetic(b) for b in batches]) for step, batches in ready)
            ready = iter([next(ready) for _ in range(steps + 1)])
        for number in range(steps + 1):
            if number == 1:
                self.tokens, self.waited, begin = 0, 0.0, now(self._engine.device)
            asked = time.perf_counter()
            _, batches = next(ready)
            if number:
                self.waited += time.perf_counter() - asked
            self._forward_backward(batches) if self._way == "bare" else self._engine.advance(batches)
            self.tokens += sum(batch.tokens_BT.numel() for batch in batches)
        return now(self._engine.device) - begin

    def _forward_backward(self, batches: list[Batch]) -> None:
        for batch in batches:
            self._draft.loss(batch)[0].backward()
        for parameter in self._draft.parameters():
            parameter.grad = None

    def peak_mb(self, steps: int) -> float:
        """What `steps` steps add to this process while they run, behind one that brought the optimizer's moments."""
        self.turn(0, 1)
        if self._engine.device.type != "cpu":
            torch.accelerator.reset_peak_memory_stats()
            before = torch.accelerator.memory_allocated()
            self.turn(0, steps)
            return (torch.accelerator.max_memory_allocated() - before) / 1e6
        ctypes.CDLL(None).malloc_trim(0)  # what loading has freed is not to be filled unseen
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
        before = _resident("VmRSS")
        self.turn(0, steps)
        return (_resident("VmHWM") - before) / 1e6


def _resident(which: str) -> int:
    """Bytes, of Linux's account of this process."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(which))
    return int(line.split()[1]) * 1024


def of_one_rank(recipe: Recipe) -> Recipe:
    """The recipe with one rank's share of the global batch."""
    train = recipe.train
    share = train.global_batch // ranks_of(train)
    return recipe.model_copy(
        update={"train": train.model_copy(update={"global_batch": share, "ranks": 1, "warmup_steps": 0})}
    )


def peak_of(arguments, name: str, way: str) -> float:
    """Measured in a process of its own."""
    handed, environment = hand_over(arguments.recipe, arguments.overrides)
    command = [sys.executable, "-m", "train.studies.bench", *handed, "--draft", name, "--steps", "3", "--peak-of", way]
    alone = {key: value for key, value in environment.items() if key not in ("RANK", "MASTER_PORT")}
    done = subprocess.run(command, cwd=ROOT, env=alone, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PipelineError(f"the process that measures the memory of {way!r} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def interval(ratios: np.ndarray) -> list[float]:
    """95%, by the bootstrap over repeats."""
    drawn = np.random.default_rng(0).choice(ratios, (2000, len(ratios))).mean(1)
    return [round(float(x), 3) for x in np.percentile(drawn, [2.5, 97.5])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_recipe_arguments(parser)
    parser.add_argument("--draft", help="default: the one that is published")
    parser.add_argument("--steps", type=int, default=6, help="of one turn")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peak-of", choices=WAYS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    recipe = of_one_rank(load_recipe(arguments.recipe, arguments.overrides))
    name = arguments.draft or recipe.publish.draft
    if name not in recipe.to_train:
        parser.error(f"--draft {name}: the recipe has {', '.join(recipe.to_train)}")
    bring(recipe, feature_spec(recipe))
    start_distributed()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.peak_of:
            print(json.dumps(Way(recipe, name, arguments.peak_of, Path(folder)).peak_mb(arguments.steps)))
        else:
            report(arguments, recipe, name, Path(folder))


def report(arguments, recipe: Recipe, name: str, folder: Path) -> None:
    ways = {way: Way(recipe, name, way, folder) for way in WAYS}
    for way in ways.values():
        way.turn(0, 2)  # warms up
    speeds, waits = {way: [] for way in WAYS}, []
    for repeat in range(arguments.repeats):
        for number in range(len(WAYS)):
            way = WAYS[(number + repeat) % len(WAYS)]
            seconds = ways[way].turn(
                repeat * arguments.steps % max(ways[way]._batches.steps - arguments.steps, 1), arguments.steps
            )
            speeds[way].append(ways[way].tokens / seconds)
            if way == "step":
                waits.append(ways[way].waited / seconds)
    rates = {way: np.array(found) for way, found in speeds.items()}
    formula = step_bytes(recipe, ways["step"]._draft) / 1e6
    ratios = {other: rates["step"] / rates[other] for other in ("bare", "direct")}
    del ways
    peaks = {way: round(peak_of(arguments, name, way)) for way in ("step", "direct")}
    print(
        f"{name}, {recipe.train.dtype}, {recipe.train.micro_batch} rows a forward, on {hardware(recipe.target.device)}"
    )
    for way in WAYS:
        print(f"{way:<7} {rates[way].mean():,.0f} tokens/s")
    for other, found in ratios.items():
        print(f"step over {other}: {found.mean():.3f} {interval(found)}")
    print(f"waiting for data: {np.mean(waits):.2%} of a step")
    print(
        f"peak memory of a step: step {peaks['step']} MB, direct {peaks['direct']} MB; the formula says "
        f"{formula:,.0f} MB"
    )
    figures = {f"step_over_{other}": round(float(found.mean()), 4) for other, found in ratios.items()}
    intervals = {f"step_over_{other}_interval": interval(found) for other, found in ratios.items()}
    memory = {"peak_mb": peaks["step"], "direct_peak_mb": peaks["direct"], "formula_mb": round(formula)}
    print(json.dumps({**figures, **intervals, "data_wait_share": round(float(np.mean(waits)), 5), **memory}))


if __name__ == "__main__":
    os.environ.setdefault("DS_LOG_LEVEL", "error")
    entry.run(main)
