"""The dtype "auto" of a recipe: bfloat16 where the device computes it natively, else float32.

A run resolves it once and keeps the result in its folder, so that a resume on another machine uses the same dtype.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.basics.errors import PipelineError
from pipeline.basics.files import read_json, write_json

if TYPE_CHECKING:
    from pipeline.recipe.recipe import Recipe

AUTO = "auto"
SECTIONS = ("target", "train", "eval")  # sections with a key `dtype`
FILE_NAME = "dtypes.json"  # in the run's folder
EMULATED = 1.5  # bfloat16 that takes at least this many times as long as float32 gives a warning
NATIVE = ("bfloat16", "float32")


def resolve_dtypes(recipe: "Recipe", keep: bool) -> "Recipe":
    """Return a copy with every "auto" resolved. `keep`: write the result to the run's folder.

    Raises PipelineError if the run's file holds anything but dtypes.
    """
    sections = [name for name in SECTIONS if getattr(recipe, name).dtype == AUTO]
    if not sections:
        return recipe
    saved = read_dtypes(recipe.paths.run)
    dtypes = {name: saved.get(name) or native_dtype(recipe.target.device) for name in sections}
    if keep and not dtypes.items() <= saved.items():
        write_json(recipe.paths.run / FILE_NAME, saved | dtypes)
    return recipe.model_copy(
        update={name: getattr(recipe, name).model_copy(update={"dtype": dtype}) for name, dtype in dtypes.items()}
    )


def native_dtype(device: str) -> str:
    """Return the faster of bfloat16 and float32 on `target.device`; bfloat16 if this machine has no such device."""
    return NATIVE[(bfloat16_cost(device) or 0) > 1]


def bfloat16_cost(device: str) -> float | None:
    """Return the time of a product in bfloat16 over that in float32; None if this machine has no such device."""
    from pipeline.basics import accelerator  # imports torch, which a recipe without "auto" does not need

    try:
        return accelerator.bfloat16_cost(accelerator.resolve_device(device))
    except PipelineError:
        return None


def read_dtypes(run: Path) -> dict[str, str]:
    """Return the dtypes, by section, that a run started with; an empty dict if it has not started."""
    path = run / FILE_NAME
    if not path.exists():
        return {}
    dtypes = read_json(path)
    if not set(dtypes) <= set(SECTIONS) or any(dtype not in NATIVE for dtype in dtypes.values()):
        raise PipelineError(f"{path}: expected one of {NATIVE} for each of {SECTIONS}; remove it to choose again")
    return dtypes


def describe_dtypes(recipe: "Recipe") -> str:
    """Return a line with the run's dtypes and the speed of bfloat16 on this machine."""
    dtypes = ", ".join(f"{name} {getattr(recipe, name).dtype}" for name in SECTIONS)
    return f"dtypes: {dtypes}; {describe_bfloat16(recipe.target.device)}"


def warn_of_emulation(recipe: "Recipe") -> str | None:
    """Return a warning if a section computes in bfloat16 and the device emulates it, else None."""
    slow = [name for name in SECTIONS if getattr(recipe, name).dtype == "bfloat16"]
    cost = (slow and bfloat16_cost(recipe.target.device)) or 0
    if cost < EMULATED:
        return None
    keys = " and ".join(f"{name}.dtype" for name in slow)
    return f"WARNING: bfloat16 takes {cost:.1f} times as long as float32 here: set {keys} to 'auto' or 'float32'"


def describe_bfloat16(device: str) -> str:
    """Return a phrase on the speed of bfloat16 on this machine's device."""
    cost = bfloat16_cost(device)
    if cost is None:
        return f"this machine has no target.device={device!r}"
    return f"bfloat16 is {'native' if cost <= 1 else 'emulated'} here ({cost:.2g} times float32's time)"
