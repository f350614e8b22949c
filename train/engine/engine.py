"""The only module that uses DeepSpeed: building the engine, one optimiser step, resume states."""

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
from pipeline.drafts import TrainedDraft, parameter_count
from pipeline.features.batch import Batch
from pipeline.lm.model import DTYPES
from pipeline.recipe.sections import TrainConfig
from pipeline.running.cores import count_cores, read_omp_threads
from train.engine import resume
from train.engine.config import deepspeed_config
from train.engine.ranks import LOOPBACK, fail_together, join_on_loopback, local_rank_and_size, start_heartbeats
from train.engine.resume import format_tag, read_state, require_intact
from train.engine.universal import convert
from train.engine.writer import StateWriter

# For a rank that does not answer. A rank that died ends the others through the launcher or, on another host, by its
# missing heartbeats.
COLLECTIVE_TIMEOUT = timedelta(minutes=30)
_SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "constant_with_warmup"}


def start_distributed() -> None:
    """Join the launcher's process group (a single process makes its own). Set the number of CPU threads to the user's
    OMP_NUM_THREADS, else to this rank's share of the cores.
    """
    if not dist.is_initialized():
        # DeepSpeed would compile its shared-memory all-reduce first, which serves inference only: a training killed
        # while it compiles leaves a lock that every later one waits for without end, and each rank leaves 69 MB in
        # /dev/shm for good.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        if "RANK" not in os.environ:  # no launcher
            single_process = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": LOOPBACK, "MASTER_PORT": 0}
            os.environ.update({key: str(value) for key, value in single_process.items()})
        device, number = get_accelerator(), int(os.environ["LOCAL_RANK"])
        device.set_device(number)  # objects are sent by the current device
        is_bound = device.device_name() == "cuda" and os.environ["WORLD_SIZE"] != "1"  # as DeepSpeed does
        backend = device.communication_backend_name()
        join_on_loopback(backend, torch.device("cuda", number) if is_bound else None, COLLECTIVE_TIMEOUT)
        deepspeed.init_distributed(backend, timeout=COLLECTIVE_TIMEOUT)  # takes over a group that exists
        if local_rank_and_size()[1] < dist.get_world_size():
            start_heartbeats()
    if get_accelerator().device_name() == "cpu":
        torch.set_num_threads(read_omp_threads() or max(1, count_cores() // local_rank_and_size()[1]))


def restrict_pickles() -> None:
    """Make torch run no code of a pickle from now on, although DeepSpeed asks it to (`weights_only=False`): it loads
    tensors and the classes of DeepSpeed's own states, nothing else.
    """
    os.environ.pop("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", None)
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    torch.serialization.add_safe_globals([ZeroStageEnum, LossScaler, DynamicLossScaler, fragment_address])


def require_dtype(dtype: str) -> None:
    """Raise PipelineError if this machine's device does not compute in `dtype`."""
    device = get_accelerator()
    supported = {"float32": True, "bfloat16": device.is_bf16_supported(), "float16": device.is_fp16_supported()}
    if not supported[dtype]:
        alternatives = " or ".join(repr(name) for name, is_supported in supported.items() if is_supported)
        raise PipelineError(
            f"train.dtype={dtype!r}, which {device.device_name()} does not support on this machine: use {alternatives}"
        )


Loss = Callable[[TrainedDraft, Batch], tuple[torch.Tensor, dict[str, dict[str, torch.Tensor]]]]


class _LossModule(torch.nn.Module):
    """The module that DeepSpeed calls: its forward returns the loss, and the raw sums by term."""

    def __init__(self, draft: TrainedDraft, loss: Loss):
        super().__init__()
        self.draft, self.loss = draft, loss

    def forward(self, batch: Batch) -> tuple[torch.Tensor, dict[str, dict[str, torch.Tensor]]]:
        return self.loss(self.draft, batch)


class TrainingEngine:
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
        """Continue from the resume state in `folder`, if there is one; `step` and `progress` are then those of the
        state. `loss` is that of an objective.

        Raise PipelineError for the state of another recipe.
        """
        self._folder, self._train_hash, self._config = folder, train_hash, config
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        state = self._read_resume_state()
        universal = bool(state) and bool(config.zero_stage) and state["ranks"] != self.ranks
        require_dtype(config.dtype)
        optimizer = torch.optim.AdamW(
            draft.parameters(),
            lr=config.learning_rate,
            betas=config.betas,
            weight_decay=config.weight_decay,
            fused=get_accelerator().device_name() == "cuda" or None,
        )
        if config.dtype == "float32" and not config.zero_stage:  # in all other cases DeepSpeed checks
            optimizer.register_step_pre_hook(self._drop_nonfinite_gradient)
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
            model=_LossModule(draft, loss),
            optimizer=optimizer,
            lr_scheduler=schedule,
            config=settings,
            dist_init_required=False,
        )
        self._draft, self._accumulation = draft, accumulation
        self.device, self.dtype = self._engine.device, DTYPES[config.dtype]
        self._writer = StateWriter(folder, train_hash, state["files"] if state else {}, self.device)
        self._engine.checkpoint_engine.save = self._writer.save
        self.overflowed = False  # the last step's gradient, in float16
        self._dropped = False  # the last step's gradient
        self.step, self.progress = (state["step"], state["progress"]) if state else (0, {})
        if state:
            self._load_state(self._convert_state(state["tag"]) if universal else state["tag"])

    def advance(self, batches: list[Batch]) -> dict[str, dict[str, float]]:
        """Take one optimiser step over this rank's micro-batches. Return the raw loss sums of all ranks, by branch.

        Each micro-batch's loss is its sum over the global batch's count; DeepSpeed divides by accumulation and ranks,
        so the loss is multiplied by both here, and the gradient is that of one large batch. Raise PipelineError if a
        loss or gradient is not finite (checked once a step, before anything is saved).
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
        totals = self.sum_over_ranks(pooled)
        if not all(math.isfinite(value) for parts in totals.values() for value in parts.values()):
            raise self._nonfinite_error("; ".join(self._find_nonfinite(batches, pooled)))
        self._check_gradient()
        return totals

    def _is_finite_on_all_ranks(self, loss: torch.Tensor) -> bool:
        has_nonfinite = (~loss.detach().isfinite()).to(torch.int32)
        dist.all_reduce(has_nonfinite, op=dist.ReduceOp.MAX)
        return not has_nonfinite.item()

    def _find_nonfinite(self, batches: list[Batch], sums: dict[str, dict[str, torch.Tensor]]) -> list[str]:
        """Return what is not finite in these micro-batches of every rank, by dialogue. Raise PipelineError if it is the
        draft's weights.
        """
        if not all(self.gather_objects(self.has_finite_weights())):
            raise self._nonfinite_error("the draft's weights, after an earlier step")
        causes = [
            f"the stored features of dialogue {' or '.join(ids)}"
            for batch in batches
            for ids, *states in zip(batch.documents, *batch.states, strict=True)
            if not all(state.isfinite().all() for state in states)
        ]
        all_ids = ", ".join(doc_id for batch in batches for ids in batch.documents for doc_id in ids)
        nonfinite_losses = [
            (b, name) for b, parts in sums.items() for name, value in parts.items() if not value.isfinite()
        ]
        causes = causes or [
            f"the {name} loss of branch {branch!r} on dialogues {all_ids}" for branch, name in nonfinite_losses
        ]
        return [line for lines in self.gather_objects(causes) for line in lines] or ["the loss"]

    def _drop_nonfinite_gradient(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Drop a gradient that is not finite, before a step of AdamW itself. The gradient is the same on all ranks;
        without one the step changes nothing.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if not torch.nn.utils.get_total_norm([p.grad for p in parameters]).isfinite():
            self._dropped = True
            for parameter in parameters:
                parameter.grad = None

    def _check_gradient(self) -> None:
        """Check that the step was taken: it is not if a gradient is not finite. In float16 that is how the loss scale
        is found; otherwise raise PipelineError.
        """
        is_finite = self._engine.was_step_applied() and not self._dropped
        if not is_finite and self._config.dtype != "float16":
            raise self._nonfinite_error("a gradient")
        self.overflowed = not is_finite

    def _nonfinite_error(self, cause: str) -> PipelineError:
        return PipelineError(
            f"step {self.step}: not finite: {cause}. Features: dump that shard again (jakiro verify). "
            "Else lower train.learning_rate, or train in bfloat16 or float32 if this was float16. Run again to resume "
            "from the last saved state"
        )

    def has_finite_weights(self) -> bool:
        """Return whether this rank's share of the weights is finite."""
        shares = (getattr(p, "ds_tensor", p) for p in self._draft.parameters())
        return all(bool(share.detach().isfinite().all()) for share in shares)

    @torch.no_grad()
    def measure(self, batch: Batch) -> dict[str, dict[str, torch.Tensor]]:
        self._engine.eval()
        return self._engine(batch.to(self.device, self.dtype))[1]

    def sum_over_ranks(self, pooled: dict[str, dict[str, torch.Tensor]]) -> dict[str, dict[str, float]]:
        """Return the sums over all ranks, added in an order that does not depend on their dictionaries."""
        names = [(b, name) for b, parts in sorted(pooled.items()) for name in sorted(parts)]
        flat = torch.stack([pooled[b][name].double() for b, name in names])
        dist.all_reduce(flat)
        totals: dict[str, dict[str, float]] = {}
        for (b, name), value in zip(names, flat.tolist(), strict=True):
            totals.setdefault(b, {})[name] = value
        return totals

    def gather_objects(self, value: Any) -> list[Any]:
        """Return the value of every rank, in the order of ranks."""
        values: list = [None] * self.ranks
        dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        dist.barrier()

    def learning_rate(self) -> float:
        return self._engine.get_lr()[0]

    @torch.no_grad()
    def copy_weights_to(self, copy: TrainedDraft) -> None:
        """Give the draft's `copy` its complete weights, on every rank; all ranks take part. If each rank holds the
        complete weights, the copy shares the tensors that train; under ZeRO-3 they are gathered, one after the other,
        into the copy's own storage.
        """
        if self._config.zero_stage < 3:
            copy.load_state_dict(self._draft.state_dict(keep_vars=True), assign=True)
            return
        if next(copy.parameters()).is_meta:
            copy.to(self.dtype).to_empty(device=self.device)
        self._engine.empty_partition_cache()  # no gather is in flight when the next one starts
        copy_state = copy.state_dict()
        for name, parameter in self._draft.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter]):
                copy_state[name].copy_(parameter)
        for name, buffer in self._draft.named_buffers():
            copy_state[name].copy_(buffer)

    # -- resume state: DeepSpeed's own files, private to the run's folder, never published -------------------------

    def save_resume(self, progress: dict[str, Any]) -> None:
        """Copy what is needed to continue from here, and begin to write it; `finish_resume` makes `resume.json` name
        it. Wait for the state before it, if that is still being written. Raise PipelineError if the weights are not
        finite: the previous state is kept.
        """
        self.finish_resume()
        folder, tag = self._folder, format_tag(self.step)
        if not self._is_finite_on_all_ranks(
            torch.tensor(0.0 if self.has_finite_weights() else math.nan, device=self.device)
        ):
            raise PipelineError(
                f"step {self.step}: the draft's weights are not finite any more. Lower train.learning_rate, or train "
                "in bfloat16 or float32 if this was float16, in another output folder; the resume state before it is "
                "kept"
            )
        if self.rank == 0:  # left by an interrupted save, perhaps of another number of ranks
            shutil.rmtree(folder / tag, ignore_errors=True)
        self.barrier()
        self._engine.save_checkpoint(str(folder), tag=tag, save_latest=False)  # its files go to the writer
        self._writer.start(self.step, progress)

    def finish_resume(self, wait: bool = True) -> None:
        """Finish the state that is being written, if there is one (`StateWriter.finish`)."""
        self._writer.finish(wait)

    def _read_resume_state(self) -> dict[str, Any] | None:
        """Return the content of `resume.json`, None if there is none. Raise PipelineError for the state of other
        settings, or one whose files are damaged.
        """
        folder = self._folder
        with fail_together():
            state = read_state(folder)
        tags = self.gather_objects(state and state["tag"])
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
            require_intact(folder, state["files"])
            restrict_pickles()
            resume.require_safe_pickles(folder, state["tag"])
        return state

    def _load_state(self, tag: str) -> None:
        ids_U = None if self._draft.token_ids_U is None else self._draft.token_ids_U.tolist()
        loaded, _ = self._engine.load_checkpoint(str(self._folder), tag=tag)
        if self.device.type == "cuda":  # fused AdamW counts there; of a converted state the count is on the CPU
            optimizer = getattr(self._engine.optimizer, "optimizer", self._engine.optimizer)
            for moments in optimizer.state.values():
                moments["step"] = torch.as_tensor(moments["step"], dtype=torch.float32, device=self.device)
        problem = "cannot be loaded" if loaded is None else "has another vocabulary than the dump's texts give by now"
        if loaded is None or (ids_U is not None and ids_U != self._draft.token_ids_U.tolist()):
            raise PipelineError(f"{self._folder / tag} {problem}; remove {self._folder} to train from the start")

    def _convert_state(self, tag: str) -> str:
        """Convert the state for another number of ranks: ZeRO splits it by rank, DeepSpeed's own tool by parameter.
        Return the folder's name.
        """
        universal = self._folder / f"universal-{tag}"
        if self.rank == 0:
            shutil.rmtree(universal, ignore_errors=True)
            convert(self._folder / tag, universal, self.ranks)
        self.barrier()
        return universal.name


def add_sums(pooled: dict, sums: dict) -> None:
    """Add one forward's sums (by branch, then by name) to `pooled`."""
    for branch, parts in sums.items():
        branch_sums = pooled.setdefault(branch, {})
        for name, value in parts.items():
            branch_sums[name] = branch_sums[name] + value if name in branch_sums else value
