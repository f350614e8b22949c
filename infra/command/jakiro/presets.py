"""The hyper-parameters of the papers, by draft: infra/templates/presets.toml. Imports no torch."""

import json
import tomllib
from typing import Any

import jakiro
from pipeline.basics.section import Section
from pipeline.recipe.sections import TrainConfig

TABLE = jakiro.HOME / "infra/templates/presets.toml"
NAMES = ("paper", "laptop")  # a quarter of an hour on a CPU
FEW_ROWS = 16  # a step


class Preset(Section):
    """A draft with the hyper-parameters of its paper; keys missing in `train` and `tree` are a recipe's defaults."""

    about: str
    settings: dict[str, Any]  # of the draft
    data: dict[str, Any]  # the default, if the user names none
    llama_2: dict[str, Any] = {}  # more settings, for targets of LLaMA's first two generations
    long: dict[str, Any] = {}  # more settings, for trainings as long as the paper's
    train: dict[str, Any] = {}
    tree: dict[str, Any] = {}

    @property
    def packs(self) -> bool:
        """Return whether rows hold several dialogues: where a rank takes few rows a step, the one with the longest
        makes all others wait (of 16 dialogues on 8 GPUs, a third of the time). Full rows are equally long.
        """
        return self.training.global_batch <= FEW_ROWS

    @property
    def training(self) -> TrainConfig:
        """Return the paper's training settings. `micro_batch` is in no paper: it is the most that a rank takes."""
        return TrainConfig(**{"micro_batch": 2, "zero_stage": 1, **self.train})


def load_presets() -> dict[str, Preset]:
    """Return the drafts that `jakiro new` writes recipes for, by name."""
    table = tomllib.loads(TABLE.read_text())
    return {
        name: Preset(**{**draft, "data": {**table["data"], **draft.get("data", {})}})
        for name, draft in table["draft"].items()
    }


def format_toml(value: Any) -> str:
    """Format a value as TOML, as recipes spell it."""
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {format_toml(inner)}' for key, inner in value.items())} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(format_toml, value))}]"
    if isinstance(value, float):
        return repr(value).replace("e-0", "e-")
    if isinstance(value, int) and abs(value) >= 10_000:
        return f"{value:_}"
    return json.dumps(value)
