"""DeepSpeed, and nothing else of it anywhere: building the engine, one optimiser step, resume state."""

import os
import shutil
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from transformers import get_scheduler

from pipeline.batch import Batch
from pipeline.drafts import Draft
from pipeline.errors import PipelineError
from pipeline.files import read_json, write_json
from pipeline.sections import TrainConfig
from pipeline.target import DTYPES

RESUME = "resume.json"  # the only truth about which resume state is whole
_SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "constant_with_warmup"}


def start_distributed() -> None:
    """Joins the launcher's process group (a single process makes its own); sets CPU threads to this rank's share."""
    if not dist.is_initialized():
        # DeepSpeed would compile its shared-memory all-reduce first, which serves inference only: a training killed
        # while it compiles leaves a lock that every later one waits for without end, and each rank leaves 69 MB in
        # /dev/shm for good.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed()
    if get_accelerator().device_name() == "cpu":
        local = int(os.environ.get("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1")))
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local))


def deepspeed_config(config: TrainConfig, accumulation: int) -> dict[str, Any]:
    """DeepSpeed's own configuration, derived from the recipe here and nowhere else."""
    half = config.dtype != "float32"
    if half and accumulation > 1 and config.zero_stage == 0:
        raise PipelineError(
            f"train.zero_stage=0 would add the gradients of {accumulation} micro-batches up in {config.dtype}; set "
            "train.zero_stage=1, which adds them in float32 (or train.dtype='float32', or more ranks)"
        )
    derived = {
        "train_micro_batch_size_per_gpu": config.micro_batch,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": config.clip_norm,
        "steps_per_print": 1 << 30,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": config.zero_stage, "stage3_gather_16bit_weights_on_model_save": True},
        "bf16": {"enabled": config.dtype == "bfloat16"},
        "fp16": {"enabled": config.dtype == "float16"},
    }
    if half and config.zero_stage:
        derived["data_types"] = {"grad_accum_dtype": "fp32"}
    return _merge(derived, config.deepspeed, "train.deepspeed")


def _merge(base: dict, over: dict, where: str) -> dict:
    """`over` beside `base`. Raises PipelineError when it changes what is derived from the recipe's own keys."""
    out = dict(base)
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            out[key] = _merge(base[key], value, f"{where}.{key}")
        elif key in base and value != base[key]:
            raise PipelineError(
                f"{where}.{key}={value!r} contradicts {base[key]!r}, which follows from the recipe's own keys of [train]: set "
                "those (micro_batch, global_batch, clip_norm, dtype, zero_stage) instead"
            )
        else:
            out[key] = value
    return out


class Engine:
    """A draft under DeepSpeed."""

    def __init__(self, draft: Draft, config: TrainConfig, accumulation: int, steps: int, train_hash: str):
        optimizer = torch.optim.AdamW(
            draft.parameters(), lr=config.learning_rate, betas=config.betas, weight_decay=config.weight_decay
        )
        if config.warmup_steps >= steps and config.schedule != "constant":
            raise PipelineError(
                f"train.warmup_steps={config.warmup_steps}, but the whole run has {steps} steps: lower it, or train longer"
            )
        schedule = get_scheduler(
            _SCHEDULES[config.schedule], optimizer, num_warmup_steps=config.warmup_steps, num_training_steps=steps
        )
        self._engine, *_ = deepspeed.initialize(
            model=draft,
            optimizer=optimizer,
            lr_scheduler=schedule,
            config=deepspeed_config(config, accumulation),
            dist_init_required=False,
        )
        self._draft, self._config, self._train_hash = draft, config, train_hash
        self._accumulation = accumulation
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.device, self.dtype = self._engine.device, DTYPES[config.dtype]

    def step(self, batches: list[Batch]) -> dict[str, dict[str, torch.Tensor]]:
        """One optimiser step over this rank's micro-batches; returns its raw loss sums, by branch.

        Each micro-batch's loss is its sum over the global batch's count; DeepSpeed divides by accumulation and ranks,
        which is multiplied back here, so that the gradient is that of one large batch.
        """
        pooled: dict[str, dict[str, torch.Tensor]] = {}
        self._engine.train()
        for batch in batches:
            loss, sums = self._engine(batch.to(self.device, self.dtype))
            self._engine.backward(loss * (self.ranks * self._accumulation))
            self._engine.step()
            add_sums(pooled, sums)
        return pooled

    @torch.no_grad()
    def measure(self, batch: Batch) -> dict[str, dict[str, torch.Tensor]]:
        self._engine.eval()
        return self._engine(batch.to(self.device, self.dtype))[1]

    def total(self, pooled: dict[str, dict[str, torch.Tensor]]) -> dict[str, dict[str, float]]:
        """Sums over all ranks."""
        names = [(b, name) for b, parts in sorted(pooled.items()) for name in sorted(parts)]
        flat = torch.stack([pooled[b][name].double() for b, name in names])
        dist.all_reduce(flat)
        out: dict[str, dict[str, float]] = {}
        for (b, name), value in zip(names, flat.tolist(), strict=True):
            out.setdefault(b, {})[name] = value
        return out

    def barrier(self) -> None:
        dist.barrier()

    def learning_rate(self) -> float:
        return self._engine.get_lr()[0]

    def weights(self) -> dict[str, torch.Tensor]:
        """The full state dict on rank 0; every rank takes part (ZeRO-3 gathers)."""
        if self._config.zero_stage == 3:
            return self._engine._zero3_consolidated_16bit_state_dict() or {}
        return self._draft.state_dict()

    # -- resume state: DeepSpeed's own files, private to the run's folder, never published -------------------------

    def save_resume(self, folder: Path, step: int, progress: dict[str, Any]) -> None:
        """Saves after `step` steps; then points `resume.json` at it; then removes the one before."""
        tag = f"step-{step:07d}"
        try:
            self._engine.save_checkpoint(str(folder), tag=tag, save_latest=False)
        except (OSError, RuntimeError) as error:  # torch.save wraps a full disk in a RuntimeError
            raise PipelineError(
                f"the resume state of step {step} cannot be written to {folder}: {error}. The state before it is kept: make "
                "room and run again"
            ) from None
        self.barrier()
        if self.rank == 0:
            state = {
                "tag": tag,
                "step": step,
                "ranks": self.ranks,
                "train_hash": self._train_hash,
                "progress": progress,
            }
            write_json(folder / RESUME, state)
            for old in folder.glob("step-*"):
                if old.name != tag:
                    shutil.rmtree(old)
        self.barrier()

    def resume(self, folder: Path) -> tuple[int, dict[str, Any]]:
        """(finished steps, progress); (0, {}) when there is nothing to resume. Raises PipelineError for a foreign state."""
        if not (folder / RESUME).exists():
            return 0, {}
        state = read_json(folder / RESUME)
        if state["train_hash"] != self._train_hash:
            raise PipelineError(
                f"{folder} holds the resume state of a run with other settings (hash {state['train_hash']}, this run has "
                f"{self._train_hash}). Use the recipe it was started with, or another output folder"
            )
        if self._config.zero_stage and state["ranks"] != self.ranks:
            raise PipelineError(
                f"{folder} was saved by {state['ranks']} ranks under ZeRO-{self._config.zero_stage}, which splits its state by "
                f"rank; this run has {self.ranks}. Resume with {state['ranks']} ranks, or start over in another output folder"
            )
        loaded, _ = self._engine.load_checkpoint(str(folder), tag=state["tag"])
        if loaded is None:
            raise PipelineError(f"{folder / state['tag']} cannot be loaded; remove {folder} to train from the start")
        return state["step"], state["progress"]


def add_sums(pooled: dict, sums: dict) -> None:
    """Adds one forward's sums (by branch, then by name) to `pooled`."""
    for branch, parts in sums.items():
        mine = pooled.setdefault(branch, {})
        for name, value in parts.items():
            mine[name] = mine[name] + value if name in mine else value
