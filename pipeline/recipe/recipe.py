"""A run is one typed recipe: a TOML file (or the resolved recipe.json beside an artifact).

Guarantees: every key is known (otherwise the nearest valid name is suggested), every default has its home here,
and the hash of what a stage depends on travels with everything that stage writes.
"""

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, model_validator

from pipeline.basics.errors import PipelineError
from pipeline.basics.section import Name, Section
from pipeline.decoding.config import TreeConfig
from pipeline.decoding.contract import TreeSupport
from pipeline.decoding.sources import SettledTogether
from pipeline.drafts.lookup.corpus import corpus_sha256
from pipeline.drafts.small_model import SmallModelConfig
from pipeline.features.schema import FP8
from pipeline.lm.config import TargetConfig
from pipeline.recipe.sections import (
    AnyDraft,
    DataConfig,
    EvalConfig,
    FeaturesConfig,
    MethodConfig,
    PublishConfig,
    PublishedConfig,
    RegenerateConfig,
    TrainConfig,
)


def _folder(value: str) -> str:
    if not value.strip() or not value.isprintable():
        raise ValueError(f"{value!r} names no folder: give one, such as runs/mine")
    return value


PLAIN = "plain"  # decoding without a draft: the name of every measurement's baseline
DEEPEST = 1 << 20  # layers: of no target in particular
WHERE = {"shards", "resume"}  # keys of [train] that say where, not what


class Recipe(Section):
    name: Name
    output: Annotated[str, AfterValidator(_folder)]  # of the run
    seed: Annotated[int, Field(ge=0)] = 0
    target: TargetConfig
    data: DataConfig
    regenerate: RegenerateConfig = RegenerateConfig()
    features: FeaturesConfig = FeaturesConfig()
    draft: dict[Name, AnyDraft]  # one or several, trained on the same shards and measured side by side
    train: TrainConfig = TrainConfig()
    eval: EvalConfig
    publish: PublishConfig
    # drafts that are fetched, not trained
    published: Annotated[dict[Name, PublishedConfig], Field(default_factory=dict)]

    @model_validator(mode="after")
    def _consistent(self):
        self._require_drafts()
        self._require_devices()
        self._require_training()
        self._require_evaluation()
        return self

    def _require_drafts(self) -> None:
        """Raises ValueError where a section [draft.NAME] is missing, or learns what the mask does not train."""
        if not self.draft:
            raise ValueError("no draft: add a section [draft.NAME] with kind = 'jakiro'")
        if self.publish.draft not in self.draft:
            raise ValueError(f"publish.draft={self.publish.draft!r} is not one of the drafts {sorted(self.draft)}")
        if not self.draft[self.publish.draft].trained:
            raise ValueError(f"publish.draft={self.publish.draft!r} is not trained: there are no weights to release")
        for name in self.published:
            if name not in self.draft or not self.draft[name].trained:
                raise ValueError(f"published.{name} is no draft with weights: add its section [draft.{name}]")
        hard = [name for name in self.draft if getattr(self.draft[name], "objective", None) == "hard-ce"]
        if hard and self.train.mask == "legacy":
            raise ValueError(
                f"train.mask='legacy' trains positions without a next token, of which draft.{hard[0]}.objective="
                "'hard-ce' learns: set train.mask='predicted'"
            )
        whole = [name for name in self.draft if self.draft[name].runs_the_target]
        if whole and self.train.mask == "legacy":
            raise ValueError(
                f"train.mask='legacy' trains a dialogue's last input, whose next token draft.{whole[0]} does not read: "
                "set train.mask='predicted'"
            )

    def _require_devices(self) -> None:
        """Raises ValueError where target and workers do not agree on the GPUs that one has."""
        whole = [name for name in self.draft if self.draft[name].runs_the_target]
        if whole and self.target.device == "spread":
            raise ValueError(
                f"target.device='spread', but draft.{whole[0]} runs through the target's blocks, which have to be on "
                "one device"
            )
        if self.target.device == "spread":
            asked: dict[str, Any] = {
                "features": self.features,
                **({"eval": self.eval} if self.eval.workers > 1 else {}),
            }
            for section, config in asked.items():
                if (config.gpus_per_worker or 0) < 1:
                    raise ValueError(
                        f"target.device='spread', but {section}.gpus_per_worker gives a worker no GPUs of its own: "
                        "say how many"
                    )
        if (self.features.gpus_per_worker or 0) > 1 and self.target.device != "spread":
            raise ValueError(
                f"features.gpus_per_worker={self.features.gpus_per_worker:g}, but target.device={self.target.device!r} "
                f"uses one: set target.device='spread'"
            )

    def _require_training(self) -> None:
        """Raises ValueError where [train] asks for what the other sections do not give."""
        try:
            self.train.accumulation(self.train.ranks or 1)
        except PipelineError as error:
            raise ValueError(str(error)) from None
        if unknown := sorted(self.train.learning_rates.keys() - set(self.to_train)):
            raise ValueError(
                f"train.learning_rates.{unknown[0]}: no draft of that name is trained; expected one of "
                f"{', '.join(self.to_train)}"
            )
        if not self.data.calibration_prompts:
            for key, plain in (("keep", "last"), ("patience", None), ("decode", "never")):
                if getattr(self.train, key) != plain:
                    raise ValueError(
                        f"train.{key}={getattr(self.train, key)!r} goes by the answers to calibration prompts, but "
                        "data.calibration_prompts=0"
                    )
        if self.train.decode != "never" and self.target.device == "spread":
            raise ValueError(
                f"train.decode={self.train.decode!r} loads the target beside the training of rank 0, but "
                "target.device='spread' wants all GPUs"
            )
        if self.train.pack_tokens and self.train.pack_tokens < self.data.max_length - 1:
            raise ValueError(
                f"train.pack_tokens={self.train.pack_tokens} has no room for a dialogue of "
                f"data.max_length={self.data.max_length} tokens"
            )

    def _require_evaluation(self) -> None:
        """Raises ValueError where a method or a benchmark cannot be measured."""
        if self.eval.compile and self.target.device == "spread":
            raise ValueError(
                "eval.compile=true, but target.device='spread': a spread target cannot be compiled into one graph"
            )
        for name in (*self.draft, *self.eval.methods):
            if name.endswith("-tuned"):
                raise ValueError(
                    f"{name!r}: names that end in -tuned are those of eval/tune.py's trees; choose another"
                )
        for name, method in ({name: MethodConfig() for name in self.draft} | self.eval.methods).items():
            self._require_method(name, method)
        for name, benchmark in self.eval.benchmarks.items():
            if benchmark.source == "heldout" and (benchmark.prompts or 0) > self.data.heldout_prompts:
                raise ValueError(
                    f"eval.benchmarks.{name}.prompts={benchmark.prompts} is more than data.heldout_prompts="
                    f"{self.data.heldout_prompts}, which the dump keeps"
                )

    def _require_method(self, name: str, method: MethodConfig) -> None:
        """Raises ValueError when a method's draft is not there or cannot grow its tree."""
        draft = method.draft or name
        if name == PLAIN or (name in self.draft and draft != name):
            raise ValueError(f"eval.methods.{name}: that name is taken; choose another")
        if draft not in self.draft:
            raise ValueError(f"eval.methods.{name}.draft={draft!r} is not one of the drafts {sorted(self.draft)}")
        if name in self.draft and method.together:
            raise ValueError(
                f"eval.methods.{name}: a draft of that name stands alone; give the method with 'beside' a name of its "
                f"own, with draft = {name!r}"
            )
        for other in method.beside:
            known = other in self.draft and self.draft[other].stands_beside
            if not known or method.beside.count(other) > 1:
                raise ValueError(
                    f"eval.methods.{name}.beside={other!r}: expected drafts of the recipe that take no forwards, "
                    "each once: add a section [draft.prompt-lookup] with kind = 'prompt-lookup'"
                )
        if method.together and not self.draft[draft].trained:
            raise ValueError(f"eval.methods.{name}.draft={draft!r} is not trained: nothing stands beside it")
        try:
            self._settled(method, draft)
        except ValueError as error:
            raise ValueError(f"eval.methods.{name}: {error}") from None

    def _settled(self, method: MethodConfig, draft: str) -> TreeConfig:
        config: TreeSupport = self.draft[draft]
        if method.together:
            config = SettledTogether(config)
        return config.resolve(method.tree or self.eval.tree)

    def tree(self, method: str) -> TreeConfig:
        """A method's tree, settled by its draft."""
        given = self.method(method)
        return self._settled(given, given.draft or method)

    def method(self, name: str) -> MethodConfig:
        """One of `methods`; a draft by itself has no section of its own."""
        return self.eval.methods.get(name, MethodConfig())

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
    def _dumped_for(self) -> list[AnyDraft]:
        """The drafts whose wants the dump holds: a published one is not trained from it."""
        return [config for name, config in self.draft.items() if name not in self.published]

    @property
    def tunable(self) -> list[str]:
        """The methods that eval/tune.py chooses a tree for: every draft, and those with others beside them."""
        return sorted([*self.draft, *(name for name, method in self.eval.methods.items() if method.together)])

    @property
    def methods(self) -> dict[str, str]:
        """Every method's draft, but for the tuned ones: each draft by itself, then those of ``eval.methods``."""
        named = {name: method.draft or name for name, method in self.eval.methods.items()}
        return {name: name for name in sorted(self.draft)} | named

    @property
    def stored_dtype(self) -> str:
        """Of the features: four states a token are worth half their size."""
        wants = any(config.needs(DEEPEST).auxiliary for config in self._dumped_for)
        return self.features.stored_dtype or (FP8 if wants else "bfloat16")

    def auxiliary_layers(self, target_layers: int) -> list[int]:
        """Of a target with so many: those that the recipe names or, unless it does, those that its drafts want."""
        if self.features.auxiliary_layers is not None:
            return self.features.auxiliary_layers
        return sorted({n for config in self._dumped_for for n in config.needs(target_layers).auxiliary})

    @property
    def hash(self) -> str:
        """Hash of everything but what the run is called, where it and its corpora lie, and how many measure it."""
        measuring = {"workers", "gpus_per_worker", "hang_seconds"}
        apart: Any = {"name": True, "output": True, "features": {"store"}, "train": WHERE, "eval": measuring}
        drafts = {name: config.public().to_json() for name, config in self.draft.items()}
        return digest(self.model_dump(mode="json", exclude=apart) | {"draft": drafts})

    @property
    def regenerate_hash(self) -> str:
        """What the target's own answers depend on."""
        target = self.target.model_dump(mode="json", exclude={"device"})
        asked = {
            "source",
            "subset",
            "split",
            "revision",
            "repeated",
            "group",
            "languages",
            "near_duplicates",
            "max_length",
        }
        data = self.data.model_dump(mode="json", include=asked)
        answers = self.regenerate.model_dump(mode="json", exclude={"batch"})
        return digest({"target": target, "data": data, "regenerate": answers, "seed": self.seed})

    @property
    def dump_hash(self) -> str:
        """What the feature shards depend on. Who wrote them, where, and in which batches is not part of it: that
        changes rounding at most, and a dump whose batches were too large goes on with smaller ones.
        """
        how = {"workers", "planners", "cpus_per_worker", "gpus_per_worker", "batch_tokens", "store", "hang_seconds"}
        features = self.features.model_dump(mode="json", exclude={*how, "answer_tokens"})
        # Which of a target's layers a default is, its fingerprint says.
        features |= {"stored_dtype": self.stored_dtype, "auxiliary_layers": self.auxiliary_layers(DEEPEST)}
        data = self.data.model_dump(mode="json", exclude={"calibration_prompts"})
        target = self.target.model_dump(mode="json", exclude={"device"})
        return digest({"target": target, "data": data, "features": features})

    @property
    def answers_hash(self) -> str:
        """What the target's answers to calibration prompts depend on: they can be given anew without the rest of the
        dump.
        """
        return digest([self.dump_hash, self.data.calibration_prompts, self.features.answer_tokens])

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
        apart = {
            *WHERE,
            "ranks",
            "micro_batch",
            "checkpoint_every",
            "verify_checksums",
            "recompute",
            "decode",
            "tracker",
        }
        settings = self.training(draft)
        watched = settings.keep == "best" or settings.patience is not None
        apart |= {"learning_rates"} if watched else {"learning_rates", "validate_every"}
        train = settings.model_dump(mode="json", exclude=apart)
        config = self.draft[draft].to_json()
        tree = (self.method(draft).tree or self.eval.tree).to_json() if watched else None
        dump = self.answers_hash if watched else self.dump_hash
        return digest({"dump": dump, "seed": self.seed, "draft": config, "tree": tree, "train": train})

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


def digest(value: Any) -> str:
    """Sixteen hex digits of the SHA-256 of the canonical JSON of `value`."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
