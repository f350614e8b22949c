"""A run is one typed recipe: a TOML file (or the resolved recipe.json beside an artifact).

Guarantees: every key is known (otherwise the nearest valid name is suggested), every default has its home here,
and the hash of what a stage depends on travels with everything that stage writes.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Union

from pydantic import Discriminator, Tag, model_validator

from pipeline.basics.section import Name, Section
from pipeline.decoding.config import TreeConfig
from pipeline.decoding.method import Method
from pipeline.drafts import DRAFTS, DraftConfig, kind_of
from pipeline.drafts.lookup.corpus import corpus_sha256
from pipeline.drafts.small_model import SmallModelConfig
from pipeline.features.schema import FP8
from pipeline.lm.config import TargetConfig
from pipeline.recipe.checks import complaints
from pipeline.recipe.sections import Outline, TrainConfig
from pipeline.recipe.start import marked

# One draft's settings, by its kind (and frame): each draft's own file has them.
_DRAFTS: Any = Union[tuple(Annotated[config, Tag(kind)] for kind, (config, *_) in DRAFTS.items())]  # noqa: UP007
if TYPE_CHECKING:
    AnyDraft = DraftConfig
else:
    AnyDraft = Annotated[_DRAFTS, Discriminator(kind_of)]


class Recipe(Outline):
    draft: dict[Name, AnyDraft]

    @model_validator(mode="after")
    def _consistent(self):
        for complaint in complaints(self):
            raise ValueError(complaint)
        return self

    def resolved(self, method: str) -> Method:
        """A method, complete. Raises ValueError where its sources cannot fill its tree."""
        given = self.eval.methods.get(method, Method())
        draft = given.draft or method
        return given.resolved(self.draft[draft], draft, self.eval.tree)

    @property
    def methods(self) -> dict[str, Method]:
        """All but the tuned ones, complete: each draft by itself, then those of ``eval.methods``."""
        return {name: self.resolved(name) for name in {**dict.fromkeys(sorted(self.draft)), **self.eval.methods}}

    def tree(self, method: str) -> TreeConfig:
        return self.resolved(method).resolved_tree

    def corpora(self, *drafts: str) -> tuple[str, ...]:
        """SHA-256 of the texts that these copy from, but for the one that is decoded. Raises PipelineError for one that
        cannot be read.
        """
        named = [self.draft[name].corpus for name in drafts]
        return tuple(corpus_sha256(path) for path in named if path is not None)

    @property
    def trained(self) -> list[str]:
        """The drafts that have weights."""
        return [name for name, config in sorted(self.draft.items()) if config.trained]

    @property
    def to_train(self) -> list[str]:
        """Those of them that this recipe trains."""
        return [name for name in self.trained if name not in self.published]

    @property
    def fed(self) -> bool:
        """Whether the states are made while training reads them."""
        return self.features.keep == "window" and bool(self.to_train)

    @property
    def _dumped_for(self) -> list[AnyDraft]:
        """The drafts whose wants the dump holds: a published one is not trained from it."""
        return [config for name, config in self.draft.items() if name not in self.published]

    @property
    def tunable(self) -> list[str]:
        """The methods that eval/tune.py chooses a tree for: every draft, and those with secondary sources."""
        return sorted([*self.draft, *(name for name, method in self.eval.methods.items() if method.secondary)])

    @property
    def stored_dtype(self) -> str:
        """The dtype that the features are stored in: four states a token are worth half their size."""
        wants = any(config.auxiliary for config in self._dumped_for)
        return self.features.stored_dtype or (FP8 if wants else "bfloat16")

    def auxiliary_layers(self, target_layers: int) -> list[int]:
        """The auxiliary layers of a target with so many layers: those that the recipe names or, unless it does, those
        that its drafts want.
        """
        if self.features.auxiliary_layers is not None:
            return self.features.auxiliary_layers
        return sorted({n for config in self._dumped_for for n in config.needs(target_layers).auxiliary})

    @property
    def hash(self) -> str:
        return digest(self.settings)

    @property
    def settings(self) -> dict[str, Any]:
        """What the figures of a run depend on, by section."""
        sections = {key: getattr(self, key) for key in type(self).model_fields}
        settings = {key: value.affecting("figures") for key, value in sections.items() if isinstance(value, Section)}
        drafts = {name: self.settings_of(name) for name in self.draft}
        return self.affecting("figures") | settings | {"draft": drafts}

    def settings_of(self, draft: str) -> dict[str, Any]:
        """A draft's settings for hashes and artifacts: its start by content. Raises PipelineError where that is
        missing.
        """
        config = self.draft[draft].public()
        return config.to_json() | ({"start": marked(config.start)} if config.start else {})

    @property
    def _engine(self) -> dict[str, str]:
        """The engine of the target's own answers, whose random numbers are others."""
        return {"engine": self.target.engine} if self.target.engine != "transformers" else {}

    @property
    def regenerate_settings(self) -> dict[str, Any]:
        """What the target's own answers depend on, by section."""
        sections = {"data": self.data, "regenerate": self.regenerate}
        settings = {name: section.affecting("regenerated") for name, section in sections.items()}
        return {"target": self.target.identity() | self._engine, **settings, "seed": self.seed}

    @property
    def regenerate_hash(self) -> str:
        return digest(self.regenerate_settings)

    @property
    def worker_gpus(self) -> float | None:
        """GPUs of one worker of the dump; None: one where a node has any. On a CPU an engine's parallel parts take
        none.
        """
        parallel = self.target.tensor_parallel if self.target.device != "cpu" else 1
        return float(parallel) if parallel > 1 else self.features.gpus_per_worker

    @property
    def wanted_layers(self) -> list[int | str]:
        """The auxiliary layers as the recipe names them or, unless it does, as its drafts do: numbers, or words for
        them.
        """
        if self.features.auxiliary_layers is not None:
            return list(self.features.auxiliary_layers)
        return in_order(layer for config in self._dumped_for for layer in config.auxiliary)

    @property
    def dump_settings(self) -> dict[str, Any]:
        """What the feature shards depend on, by section. Who wrote them, where, and in which batches is not part of it:
        that changes rounding at most, and a dump whose batches were too large goes on with smaller ones.
        """
        features = self.features.affecting("dump")
        features["auxiliary_layers"] = self.wanted_layers  # which of a target's a word is, its fingerprint says
        features["stored_dtype"] = self.stored_dtype
        settings = {"target": self.target.identity(), "data": self.data.affecting("dump"), "features": features}
        if self.data.answers == "source":
            return settings
        settings["data"]["answers"] = self.data.answers
        return settings | self._engine | {"regenerate": self.regenerate.affecting("dump"), "seed": self.seed}

    def dump_hash_with(self, layers: list[int | str]) -> str:
        """Return the hash of this recipe's dump, had it these auxiliary layers."""
        settings = self.dump_settings
        return digest(settings | {"features": settings["features"] | {"auxiliary_layers": layers}})

    @property
    def dump_hash(self) -> str:
        return self.features.dump or digest(self.dump_settings)

    def answers_hash_of(self, dump: str) -> str:
        """What the target's answers to calibration prompts depend on, in the dump of this hash: they can be given anew
        without the rest of it.
        """
        return digest([dump, self.data.calibration_prompts, self.features.answer_tokens])

    @property
    def answers_hash(self) -> str:
        return self.answers_hash_of(self.dump_hash)

    def training(self, draft: str) -> TrainConfig:
        """What one draft is trained with."""
        rate = self.train.learning_rates.get(draft, self.train.learning_rate)
        return self.train.model_copy(update={"learning_rate": rate, "learning_rates": {}})

    def train_hash(self, draft: str) -> str:
        """What one draft's weights depend on. Who shares a global batch and how, schedules of I/O and what only watches
        are not, nor its decoding tree and when it is validated, unless the estimated tau decides which weights are
        kept. Of a published draft: what it is, and where it is from.
        """
        if draft in self.published:
            return digest({"published": self.published[draft].model_dump(), "draft": self.draft[draft].to_json()})
        dump = self.answers_hash if self.is_watched(draft) else self.dump_hash
        settings = {"tree": None, **self.training_settings(draft)}
        return digest({"dump": dump, "seed": self.seed, "draft": self.settings_of(draft), **settings})

    def is_watched(self, draft: str) -> bool:
        """Whether the estimated tau decides which weights of a draft are kept."""
        return self.training(draft).keep == "best" or self.training(draft).patience is not None

    def training_settings(self, draft: str) -> dict[str, Any]:
        """What one draft's weights depend on, beside its own settings, the features and the seed."""
        settings = self.training(draft).affecting("weights")
        if not self.is_watched(draft):
            return {"train": {key: value for key, value in settings.items() if key != "validate_every"}}
        tree = self.eval.methods.get(draft, Method()).tree or self.eval.tree
        return {"train": settings, "tree": tree.to_json()}

    def with_features(self, **changes: Any) -> "Recipe":
        """A copy with other keys of [features]; not validated."""
        return self.model_copy(update={"features": self.features.model_copy(update=changes)})

    @property
    def run_dir(self) -> Path:
        return Path(self.output).expanduser()

    @property
    def features_dir(self) -> Path:
        return self.run_dir / "features"

    @property
    def regenerated_dir(self) -> Path:
        return self.run_dir / "regenerated"

    def draft_dir(self, draft: str) -> Path:
        return self.run_dir / "drafts" / draft

    @property
    def shards_dir(self) -> Path:
        """Where a trainer's node reads the features."""
        return Path(self.train.shards) if self.train.shards else self.features_dir

    @property
    def copies(self) -> bool:
        """Whether a trainer's node reads copies of its own."""
        return self.shards_dir.resolve() != self.features_dir.resolve()

    def resume_dir(self, draft: str) -> Path:
        """Where a training's resume states are, which all of its nodes see."""
        return Path(self.train.resume) / draft if self.train.resume else self.draft_dir(draft) / "resume"

    @property
    def eval_dir(self) -> Path:
        return self.run_dir / "eval"

    @property
    def small_models(self) -> dict[str, TargetConfig]:
        """Drafts that are somebody's models, as a target would be asked for."""
        keys = ("model", "revision", "trust_remote_code")
        found = {name: one for name, one in self.draft.items() if isinstance(one, SmallModelConfig)}
        return {name: TargetConfig(**{key: getattr(one, key) for key in keys}) for name, one in found.items()}

    @property
    def tuned_file(self) -> Path:
        """The trees that eval/tune.py chose."""
        return self.eval_dir / "tuned.json"

    @property
    def release_dir(self) -> Path:
        return self.run_dir / "release"


def in_order(layers: Iterable[int | str]) -> list[int | str]:
    """Return auxiliary layers once each, numbers first."""
    return sorted(set(layers), key=lambda layer: (isinstance(layer, str), layer))


def digest(value: Any) -> str:
    """Sixteen hex digits of the SHA-256 of the canonical JSON of `value`."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
