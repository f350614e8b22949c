"""The dtype "auto" of a recipe: bfloat16 where the device computes it natively, else float32.

A run resolves it once and keeps the result in its folder, so that a resume on another machine goes on in it.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.basics.errors import PipelineError
from pipeline.basics.files import read_json, write_json

if TYPE_CHECKING:
    from pipeline.recipe.recipe import Recipe

AUTO = "auto"
SECTIONS = ("target", "train", "eval")  # that have a key `dtype`
KEPT = "dtypes.json"  # of a run
EMULATED = 1.5  # times as long as float32, from which on a recipe's bfloat16 is worth a warning
NATIVE = ("bfloat16", "float32")


def resolve_dtypes(recipe: "Recipe", keep: bool) -> "Recipe":
    """Return a copy without "auto". `keep`: write what it became to the run's folder.

    Raises PipelineError where the run keeps something else than dtypes.
    """
    sections = [name for name in SECTIONS if getattr(recipe, name).dtype == AUTO]
    if not sections:
        return recipe
    kept = kept_dtypes(recipe.paths.run)
    dtypes = {name: kept.get(name) or native_dtype(recipe.target.device) for name in sections}
    if keep and not dtypes.items() <= kept.items():
        write_json(recipe.paths.run / KEPT, kept | dtypes)
    return recipe.model_copy(
        update={name: getattr(recipe, name).model_copy(update={"dtype": dtype}) for name, dtype in dtypes.items()}
    )


def native_dtype(device: str) -> str:
    """The faster of bfloat16 and float32 on this machine's `target.device`; bfloat16 where that device is elsewhere."""
    return NATIVE[(bfloat16_cost(device) or 0) > 1]


def bfloat16_cost(device: str) -> float | None:
    """The time of a product in bfloat16 over that in float32; None where this machine has no such device."""
    from pipeline.basics import accelerator  # torch, which a recipe without "auto" does not need

    try:
        return accelerator.bfloat16_cost(accelerator.resolve_device(device))
    except PipelineError:
        return None


def kept_dtypes(run: Path) -> dict[str, str]:
    """The dtypes by section that a run began with; none where it did not begin."""
    path = run / KEPT
    if not path.exists():
        return {}
    kept = read_json(path)
    if not set(kept) <= set(SECTIONS) or any(dtype not in NATIVE for dtype in kept.values()):
        raise PipelineError(f"{path}: expected one of {NATIVE} for each of {SECTIONS}; remove it to choose again")
    return kept


def describe_dtypes(recipe: "Recipe") -> str:
    """A line on what the run computes in, and why that is fast or slow here."""
    dtypes = ", ".join(f"{name} {getattr(recipe, name).dtype}" for name in SECTIONS)
    return f"dtypes: {dtypes}; {describe_bfloat16(recipe.target.device)}"


def warn_of_emulation(recipe: "Recipe") -> str | None:
    """A warning where a section computes in bfloat16 and the device emulates that."""
    slow = [name for name in SECTIONS if getattr(recipe, name).dtype == "bfloat16"]
    cost = (slow and bfloat16_cost(recipe.target.device)) or 0
    if cost < EMULATED:
        return None
    keys = " and ".join(f"{name}.dtype" for name in slow)
    return f"WARNING: bfloat16 takes {cost:.1f} times as long as float32 here: set {keys} to 'auto' or 'float32'"


def describe_bfloat16(device: str) -> str:
    """What bfloat16 costs on this machine's device."""
    cost = bfloat16_cost(device)
    if cost is None:
        return f"target.device={device!r} is not here"
    return f"bfloat16 is {'native' if cost <= 1 else 'emulated'} here ({cost:.2g} times float32's time)"
