"""A run is one typed recipe: a TOML file (or the resolved recipe.json next to an artifact).

Guarantees: every key is known (otherwise the nearest valid name is suggested), and every default is set in this folder.
identity.py has the settings that results depend on.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Union

from pydantic import Discriminator, Tag, model_validator

from pipeline.basics.section import Name
from pipeline.decoding.config import Method, TreeConfig
from pipeline.drafts import DRAFTS, DraftConfig, kind_key
from pipeline.drafts.small_model import SmallModelConfig
from pipeline.features.schema import FP8
from pipeline.lm.config import TargetConfig
from pipeline.recipe.checks import complaints
from pipeline.recipe.sections import Outline, TrainConfig

# One draft's settings, by its kind (and frame): each draft's own file defines them.
_DRAFTS: Any = Union[tuple(Annotated[config, Tag(kind)] for kind, (config, *_) in DRAFTS.items())]  # noqa: UP007
if TYPE_CHECKING:
    AnyDraft = DraftConfig
else:
    AnyDraft = Annotated[_DRAFTS, Discriminator(kind_key)]


@dataclass(frozen=True)
class Paths:
    """The paths of a run's files, and the folder where a trainer's node reads the features."""

    run: Path
    shards: Path

    @classmethod
    def of(cls, output: str, shards: str | None) -> "Paths":
        """Return the paths of a run in `output`. `shards`: a folder on each node's own disk for copies of the shards;
        None: they are read from the run's folder.
        """
        run = Path(output).expanduser()
        return cls(run, Path(shards) if shards else run / "features")

    @property
    def features(self) -> Path:
        return self.run / "features"

    @property
    def copies(self) -> bool:
        """True if a trainer's node reads its own copies of the shards."""
        return self.shards.resolve() != self.features.resolve()

    @property
    def regenerated(self) -> Path:
        return self.run / "regenerated"

    def draft(self, name: str) -> Path:
        return self.run / "drafts" / name

    def resume(self, draft: str) -> Path:
        return self.draft(draft) / "resume"

    @property
    def eval(self) -> Path:
        return self.run / "eval"

    @property
    def tuned(self) -> Path:
        """The trees that eval/tune.py chose."""
        return self.eval / "tuned.json"

    @property
    def release(self) -> Path:
        return self.run / "release"


class Recipe(Outline):
    draft: dict[Name, AnyDraft]

    @model_validator(mode="after")
    def _consistent(self):
        for complaint in complaints(self):
            raise ValueError(complaint)
        return self

    @property
    def paths(self) -> Paths:
        return Paths.of(self.output, self.train.shards)

    # -- methods ---------------------------------------------------------------------------------------------------

    def resolve_method(self, method: str) -> Method:
        """Return a method with all defaults filled in. Raises ValueError if its sources cannot fill its tree."""
        entry = self.eval.methods.get(method, Method())
        draft = entry.draft or method
        return entry.resolve(self.draft[draft], draft, self.eval.tree)

    @property
    def methods(self) -> dict[str, Method]:
        """All methods but the tuned ones, with defaults filled in: each draft alone, then those of ``eval.methods``."""
        return {name: self.resolve_method(name) for name in {**dict.fromkeys(sorted(self.draft)), **self.eval.methods}}

    def tree(self, method: str) -> TreeConfig:
        return self.resolve_method(method).resolved_tree

    @property
    def tunable(self) -> list[str]:
        """The methods that eval/tune.py chooses a tree for: every draft, and those with secondary sources."""
        return sorted([*self.draft, *(name for name, method in self.eval.methods.items() if method.secondary)])

    # -- drafts ----------------------------------------------------------------------------------------------------

    @property
    def trained(self) -> list[str]:
        """The drafts that have weights."""
        return [name for name, config in sorted(self.draft.items()) if config.trained]

    @property
    def to_train(self) -> list[str]:
        """The drafts that this recipe trains."""
        return [name for name in self.trained if name not in self.published]

    def training(self, draft: str) -> TrainConfig:
        """Return the training settings of one draft, with its own learning rate."""
        rate = self.train.learning_rates.get(draft, self.train.learning_rate)
        return self.train.model_copy(update={"learning_rate": rate, "learning_rates": {}})

    # -- the dump --------------------------------------------------------------------------------------------------

    @property
    def dumped_for(self) -> list[AnyDraft]:
        """The drafts whose features the dump holds: all but published ones, which are not trained."""
        return [config for name, config in self.draft.items() if name not in self.published]

    @property
    def stored_dtype(self) -> str:
        """The dtype that the features are stored in; by default float8 if a draft needs auxiliary layers, since a token
        then has several states.
        """
        reads_layers = any(config.auxiliary for config in self.dumped_for)
        return self.features.stored_dtype or (FP8 if reads_layers else "bfloat16")

    def auxiliary_layers(self, target_layers: int) -> list[int]:
        """Return the auxiliary layers for a target with `target_layers` layers: those that the recipe names or, by
        default, those that its drafts need.
        """
        if self.features.auxiliary_layers is not None:
            return self.features.auxiliary_layers
        return sorted({n for config in self.dumped_for for n in config.needs(target_layers).auxiliary})

    @property
    def fed(self) -> bool:
        """True if the states are computed while training reads them."""
        return self.features.keep == "window" and bool(self.to_train)

    @property
    def worker_gpus(self) -> float | None:
        """GPUs of one worker of the dump; None: one if a node has any. On a CPU an engine's parallel parts use none."""
        parallel = self.target.tensor_parallel if self.target.device != "cpu" else 1
        return float(parallel) if parallel > 1 else self.features.gpus_per_worker

    @property
    def small_models(self) -> dict[str, TargetConfig]:
        """The drafts that are existing models, each with a target's settings for loading it."""
        keys = ("model", "revision", "trust_remote_code")
        return {
            name: TargetConfig(**{key: getattr(config, key) for key in keys})
            for name, config in self.draft.items()
            if isinstance(config, SmallModelConfig)
        }

    def with_features(self, **changes: Any) -> "Recipe":
        """Return a copy with these keys of [features] changed; not validated."""
        return self.model_copy(update={"features": self.features.model_copy(update=changes)})
