"""DeepSpeed, and nothing else of it anywhere: building the engine, one optimiser step, resume state."""

import math
import os
import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from transformers import get_scheduler

from pipeline.basics.errors import PipelineError
from pipeline.basics.files import sync, write_sealed
from pipeline.drafts import TrainedDraft, parameter_count
from pipeline.features.batch import Batch
from pipeline.lm.model import DTYPES
from pipeline.recipe.sections import TrainConfig
from pipeline.running.cores import asked_threads, cores
from train.engine import resume
from train.engine.config import deepspeed_config
from train.engine.ranks import LOOPBACK, fail_together, meet_on_host, place_on_host, start_pulse
from train.engine.resume import BEST, FORMAT, RESUME, digests, read_state, require_whole, tag_of, written_by
from train.engine.universal import convert

# For a rank that does not answer. One that died ends the others through the launcher, or by its pulse on another host.
PATIENCE = timedelta(minutes=30)
_SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "constant_with_warmup"}


def start_distributed() -> None:
    """Joins the launcher's process group (a single process makes its own); sets CPU threads to what the user's
    OMP_NUM_THREADS says, else to this rank's share of the cores.
    """
    if not dist.is_initialized():
        # DeepSpeed would compile its shared-memory all-reduce first, which serves inference only: a training killed
        # while it compiles leaves a lock that every later one waits for without end, and each rank leaves 69 MB in
        # /dev/shm for good.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        if "RANK" not in os.environ:  # no launcher
            alone = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": LOOPBACK, "MASTER_PORT": 0}
            os.environ.update({key: str(value) for key, value in alone.items()})
        device, number = get_accelerator(), int(os.environ["LOCAL_RANK"])
        device.set_device(number)  # objects travel by the current one
        bound = device.device_name() == "cuda" and os.environ["WORLD_SIZE"] != "1"  # as DeepSpeed does
        backend = device.communication_backend_name()
        meet_on_host(backend, torch.device("cuda", number) if bound else None, PATIENCE)
        deepspeed.init_distributed(backend, timeout=PATIENCE)  # takes over a group that is there
        if place_on_host()[1] < dist.get_world_size():
            start_pulse()
    if get_accelerator().device_name() == "cpu":
        torch.set_num_threads(asked_threads() or max(1, cores() // place_on_host()[1]))


def read_tensors_alone() -> None:
    """From now on torch runs no code of a pickle, though DeepSpeed asks it to (`weights_only=False`): it knows, beside
    tensors, the classes of DeepSpeed's own states alone.
    """
    os.environ.pop("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", None)
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    torch.serialization.add_safe_globals([ZeroStageEnum, LossScaler, DynamicLossScaler, fragment_address])


def require_dtype(dtype: str) -> None:
    """Raises PipelineError where this machine's device does not compute in `dtype`."""
    device = get_accelerator()
    known = {"float32": True, "bfloat16": device.is_bf16_supported(), "float16": device.is_fp16_supported()}
    if not known[dtype]:
        others = " or ".join(repr(name) for name, possible in known.items() if possible)
        raise PipelineError(
            f"train.dtype={dtype!r}, which {device.device_name()} does not compute in here: use {others}"
        )


Loss = Callable[[TrainedDraft, Batch], tuple[torch.Tensor, dict[str, dict[str, torch.Tensor]]]]


class _Training(torch.nn.Module):
    """What DeepSpeed calls: its forward is the loss, and the raw sums by term."""

    def __init__(self, draft: TrainedDraft, loss: Loss):
        super().__init__()
        self.draft, self.loss = draft, loss

    def forward(self, batch: Batch) -> tuple[torch.Tensor, dict[str, dict[str, torch.Tensor]]]:
        return self.loss(self.draft, batch)


class Engine:
    """A draft under DeepSpeed."""

    def __init__(
        self,
        draft: TrainedDraft,
        loss: Loss,
        config: TrainConfig,
        accumulation: int,
        steps: int,
        folder: Path,
        train_hash: str,
    ):
        """`loss`: an objective's. Continues from the resume state in `folder`, if there is one; then `step` and
        `progress` say where that is.

        Raises PipelineError for the state of another recipe.
        """
        self._folder, self._train_hash, self._config = folder, train_hash, config
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        state = self._found_state()
        self._files = state["files"] if state else {}
        universal = bool(state) and bool(config.zero_stage) and state["ranks"] != self.ranks
        require_dtype(config.dtype)
        optimizer = torch.optim.AdamW(
            draft.parameters(),
            lr=config.learning_rate,
            betas=config.betas,
            weight_decay=config.weight_decay,
        )
        if config.dtype == "float32" and not config.zero_stage:  # everywhere else DeepSpeed looks
            optimizer.register_step_pre_hook(self._drop_broken_gradient)
        if config.warms_up_throughout(steps):
            raise PipelineError(
                f"train.warmup_steps={config.warmup_steps}, but the whole run has {steps} steps: lower it, or train "
                "longer"
            )
        schedule = get_scheduler(
            _SCHEDULES[config.schedule], optimizer, num_warmup_steps=config.warmup_steps, num_training_steps=steps
        )
        settings = deepspeed_config(config, accumulation, parameter_count(draft))
        if universal:
            settings["checkpoint"] = {**settings.get("checkpoint", {}), "load_universal": True}
        self._engine, *_ = deepspeed.initialize(
            model=_Training(draft, loss),
            optimizer=optimizer,
            lr_scheduler=schedule,
            config=settings,
            dist_init_required=False,
        )
        self._draft, self._accumulation = draft, accumulation
        self.device, self.dtype = self._engine.device, DTYPES[config.dtype]
        self.overflowed = False  # the last step's gradient, in float16
        self._dropped = False  # the last step's gradient
        self.step, self.progress = (state["step"], state["progress"]) if state else (0, {})
        if state:
            self._load(self._universal(state["tag"]) if universal else state["tag"])

    def advance(self, batches: list[Batch]) -> dict[str, dict[str, float]]:
        """One optimiser step over this rank's micro-batches; returns the raw loss sums of all ranks, by branch.

        Each micro-batch's loss is its sum over the global batch's count; DeepSpeed divides by accumulation and ranks,
        which is multiplied back here, so that the gradient is that of one large batch. Raises PipelineError where a
        loss or gradient is not finite (once a step: nothing is saved before).
        """
        pooled: dict[str, dict[str, torch.Tensor]] = {}
        self._engine.train()
        self.step, self._dropped = self.step + 1, False
        for batch in batches:
            batch = batch.to(self.device, self.dtype)
            loss, sums = self._engine(batch)
            self._engine.backward(loss * (self.ranks * self._accumulation))
            self._engine.step()
            add_sums(pooled, sums)
        totals = self.total(pooled)
        if not all(math.isfinite(value) for parts in totals.values() for value in parts.values()):
            raise self._not_finite("; ".join(self._blamed(batches, pooled)))
        self._look_at_gradient()
        return totals

    def _finite_everywhere(self, loss: torch.Tensor) -> bool:
        bad = (~loss.detach().isfinite()).to(torch.int32)
        dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        return not bad.item()

    def _blamed(self, batches: list[Batch], sums: dict[str, dict[str, torch.Tensor]]) -> list[str]:
        """What is not finite in these micro-batches of every rank, by dialogue. Raises PipelineError where it is the
        draft's weights.
        """
        if not all(self.gathered(self.weights_finite())):
            raise self._not_finite("the draft's weights, after an earlier step")
        mine = [
            f"the stored features of dialogue {' or '.join(ids)}"
            for batch in batches
            for ids, *states in zip(batch.documents, *batch.states, strict=True)
            if not all(state.isfinite().all() for state in states)
        ]
        named = ", ".join(doc_id for batch in batches for ids in batch.documents for doc_id in ids)
        wrong = [(b, name) for b, parts in sums.items() for name, value in parts.items() if not value.isfinite()]
        mine = mine or [f"the {name} loss of branch {branch!r} on dialogues {named}" for branch, name in wrong]
        return [line for lines in self.gathered(mine) for line in lines] or ["the loss"]

    def _drop_broken_gradient(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Before a step of AdamW's own, with a gradient that is the same on all ranks; without one it changes
        nothing.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if not torch.nn.utils.get_total_norm([p.grad for p in parameters]).isfinite():
            self._dropped = True
            for parameter in parameters:
                parameter.grad = None

    def _look_at_gradient(self) -> None:
        """Where a gradient is not finite no step is taken. In float16 that is how the loss scale is found; else it is a
        fault.
        """
        fine = self._engine.was_step_applied() and not self._dropped
        if not fine and self._config.dtype != "float16":
            raise self._not_finite("a gradient")
        self.overflowed = not fine

    def _not_finite(self, what: str) -> PipelineError:
        return PipelineError(
            f"step {self.step}: not finite: {what}. Features: dump that shard again (jakiro verify). "
            "Else lower train.learning_rate, or train in bfloat16 or float32 if this was float16. Run again to resume "
            "from the last saved state"
        )

    def weights_finite(self) -> bool:
        """Of this rank's share."""
        shares = (getattr(p, "ds_tensor", p) for p in self._draft.parameters())
        return all(bool(share.detach().isfinite().all()) for share in shares)

    @torch.no_grad()
    def measure(self, batch: Batch) -> dict[str, dict[str, torch.Tensor]]:
        self._engine.eval()
        return self._engine(batch.to(self.device, self.dtype))[1]

    def total(self, pooled: dict[str, dict[str, torch.Tensor]]) -> dict[str, dict[str, float]]:
        """Sums over all ranks, in an order that does not depend on their dictionaries'."""
        names = [(b, name) for b, parts in sorted(pooled.items()) for name in sorted(parts)]
        flat = torch.stack([pooled[b][name].double() for b, name in names])
        dist.all_reduce(flat)
        out: dict[str, dict[str, float]] = {}
        for (b, name), value in zip(names, flat.tolist(), strict=True):
            out.setdefault(b, {})[name] = value
        return out

    def gathered(self, mine: Any) -> list[Any]:
        """Every rank's, in the order of ranks."""
        found: list = [None] * self.ranks
        dist.all_gather_object(found, mine)
        return found

    def barrier(self) -> None:
        dist.barrier()

    def learning_rate(self) -> float:
        return self._engine.get_lr()[0]

    @torch.no_grad()
    def fill(self, copy: TrainedDraft) -> None:
        """Gives the draft's `copy` its whole weights, on every rank; all take part. They are the very tensors that
        train where a rank holds these whole; under ZeRO-3 they are gathered, one after the other, into storage of the
        copy's own.
        """
        if self._config.zero_stage < 3:
            copy.load_state_dict(self._draft.state_dict(keep_vars=True), assign=True)
            return
        if next(copy.parameters()).is_meta:
            copy.to(self.dtype).to_empty(device=self.device)
        self._engine.empty_partition_cache()  # nothing is on its way when it is gathered
        kept = copy.state_dict()
        for name, parameter in self._draft.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter]):
                kept[name].copy_(parameter)
        for name, buffer in self._draft.named_buffers():
            kept[name].copy_(buffer)

    # -- resume state: DeepSpeed's own files, private to the run's folder, never published -------------------------

    def save_resume(self, progress: dict[str, Any]) -> None:
        """Saves what is needed to go on from here; then points `resume.json` at it; then removes the one before.

        Raises PipelineError where the weights are not finite: the state before is kept.
        """
        folder, tag = self._folder, tag_of(self.step)
        if not self._finite_everywhere(torch.tensor(0.0 if self.weights_finite() else math.nan, device=self.device)):
            raise PipelineError(
                f"step {self.step}: the draft's weights are not finite any more. Lower train.learning_rate, or train "
                "in bfloat16 or float32 if this was float16, in another output folder; the resume state before it is "
                "kept"
            )
        if self.rank == 0:  # of a save that was broken off, perhaps by another number of ranks
            shutil.rmtree(folder / tag, ignore_errors=True)
        self.barrier()
        try:
            self._engine.save_checkpoint(str(folder), tag=tag, save_latest=False)
            sync(folder / tag)
            mine = digests(folder, written_by(folder / tag, self.rank, self.ranks))
        except (OSError, RuntimeError) as error:  # torch.save wraps a full disk in a RuntimeError
            raise PipelineError(
                f"the resume state of step {self.step} cannot be written to {folder}: {error}. The state before it is "
                "kept: make room and run again"
            ) from None
        files = {name: digest for share in self.gathered(mine) for name, digest in share.items()}
        if self.rank == 0:
            best = BEST.format(step=progress["best"]["step"]) if progress.get("best") else None
            if best and (folder / best).exists():
                known = best in self._files
                files |= {best: self._files[best]} if known else digests(folder, [folder / best])
            self._files = files
            state = {
                "format": FORMAT,
                "tag": tag,
                "step": self.step,
                "ranks": self.ranks,
                "train_hash": self._train_hash,
                "progress": progress,
                "files": files,
            }
            write_sealed(folder / RESUME, state)
            for old in [*folder.glob("step-*"), *folder.glob("universal-*")]:
                if old.name != tag:
                    shutil.rmtree(old)
            for old in folder.glob(BEST.replace("{step:07d}", "*")):
                if old.name != best:
                    old.unlink()
        self.barrier()

    def _found_state(self) -> dict[str, Any] | None:
        """What `resume.json` says. Raises PipelineError for the state of other settings, or one that is not whole any
        more.
        """
        folder = self._folder
        with fail_together():
            state = read_state(folder)
        tags = self.gathered(state and state["tag"])
        if len(set(tags)) > 1:
            raise PipelineError(
                f"the ranks see different resume states in {folder} ({', '.join(map(str, tags))}): `output` has to be "
                "one folder that all nodes see"
            )
        if state is None:
            return None
        if state["train_hash"] != self._train_hash:
            raise PipelineError(
                f"{folder} holds the resume state of a run with other settings. Use the recipe it was started with, or "
                "another output folder"
            )
        with fail_together():
            require_whole(folder, state["files"])
            read_tensors_alone()
            resume.require_tensors_alone(folder, state["tag"])
        return state

    def _load(self, tag: str) -> None:
        ids_U = None if self._draft.token_ids_U is None else self._draft.token_ids_U.tolist()
        loaded, _ = self._engine.load_checkpoint(str(self._folder), tag=tag)
        what = "cannot be loaded" if loaded is None else "has another vocabulary than the dump's texts give by now"
        if loaded is None or (ids_U is not None and ids_U != self._draft.token_ids_U.tolist()):
            raise PipelineError(f"{self._folder / tag} {what}; remove {self._folder} to train from the start")

    def _universal(self, tag: str) -> str:
        """ZeRO splits the state by rank; for another number of ranks DeepSpeed's own tool takes it apart by
        parameter.
        """
        made = self._folder / f"universal-{tag}"
        if self.rank == 0:
            shutil.rmtree(made, ignore_errors=True)
            convert(self._folder / tag, made, self.ranks)
        self.barrier()
        return made.name


def add_sums(pooled: dict, sums: dict) -> None:
    """Adds one forward's sums (by branch, then by name) to `pooled`."""
    for branch, parts in sums.items():
        mine = pooled.setdefault(branch, {})
        for name, value in parts.items():
            mine[name] = mine[name] + value if name in mine else value
