"""Two ways of the same work, to be compared: a dump and its bare forward, a training step and its bare model."""

import time
from pathlib import Path

import torch

from pipeline.artifacts.features import feature_spec
from pipeline.basics.accelerator import now
from pipeline.drafts import objective_of
from pipeline.features.batch import Batch
from pipeline.features.shards import FeatureStore
from pipeline.lm.model import load_embed_head, resolve_device
from pipeline.recipe.recipe import Recipe
from preprocess.dump.task import ShardTask
from preprocess.dump.worker import FeatureWorker, length_sorted_batches
from train.engine.engine import Engine
from train.input.data import Batches
from train.loop import new_draft


class Dumping:
    """Both over the same tasks."""

    def __init__(self, recipe: Recipe, folder: Path, tasks: list[ShardTask]):
        self._tasks, self._device = tasks, resolve_device(recipe.target.device)
        self._worker = FeatureWorker(recipe, folder, feature_spec(recipe))
        self._worker.ready()
        self._batch_tokens = recipe.features.batch_tokens

    def dump(self) -> None:
        """Forward, transfer, writing, hashing."""
        for task in self._tasks:
            self._worker.work(task)

    def bare(self) -> None:
        """The forward of the same batches, in the thread that the dump computes in: each thread has its own pool of
        OpenMP threads.
        """
        self._worker._computing.submit(self._forwards).result()

    def _forwards(self) -> None:
        for task in self._tasks:
            for batch in length_sorted_batches(task.documents, self._batch_tokens):
                self._worker._forward(batch)
        now(self._device)  # waits


class Training:
    """One rank of a draft's training. `bare`: forward, loss and backward on random features that lie ready; else whole
    steps: reading and collating ahead, forward, loss, backward, clipping, AdamW.
    """

    def __init__(self, recipe: Recipe, name: str, folder: Path, bare: bool):
        self._bare, config = bare, recipe.train
        store = FeatureStore(recipe.shards_dir, "train", feature_spec(recipe))
        draft = new_draft(recipe, name, load_embed_head(recipe.target), store)
        self._objective = objective_of(draft.config, config.mask)
        self._batches = Batches(store, config, self._objective, draft.needs, recipe.seed, 0, 1)
        steps, loss = self._batches.order.steps, self._objective.loss
        self._engine = Engine(draft, loss, config, self._batches.accumulation, steps, folder, name)
        draft.move_embed_head(self._engine.device, self._engine.dtype)
        self._draft = draft
        self.tokens, self.waited = 0, 0.0  # of the last turn: what it trained, and seconds that it waited for batches

    def turn(self, steps: int) -> float:
        """Seconds of the steps, behind one that sets the reader off."""
        ready = self._batches.from_step(0, self._engine.device)
        if self._bare:
            batches = [next(ready) for _ in range(steps + 1)]
            ready = iter([(step, [self._random(batch) for batch in some]) for step, some in batches])
        for number in range(steps + 1):
            if number == 1:
                self.tokens, self.waited, begin = 0, 0.0, now(self._engine.device)
            asked = time.perf_counter()
            _, batches = next(ready)
            self.waited += (time.perf_counter() - asked) * (number > 0)
            self._forward_backward(batches) if self._bare else self._engine.advance(batches)
            self.tokens += sum(batch.tokens_BT.numel() for batch in batches)
        return now(self._engine.device) - begin

    def step_bytes(self, steps: int) -> int:
        """What steps add on an accelerator to what lies there, behind one that brought the optimizer's moments."""
        self.turn(1)
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        self.turn(steps)
        return torch.accelerator.max_memory_allocated() - before

    def _random(self, batch: Batch) -> Batch:
        batch = batch.to(self._engine.device, self._engine.dtype)
        batch.hidden_BTD, batch.labels_BTD = torch.randn_like(batch.hidden_BTD), torch.randn_like(batch.labels_BTD)
        return batch

    def _forward_backward(self, batches: list[Batch]) -> None:
        for batch in batches:
            self._objective.loss(self._draft, batch)[0].backward()
        for parameter in self._draft.parameters():
            parameter.grad = None
