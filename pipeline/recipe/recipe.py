"""A run is one typed recipe: a TOML file (or the resolved recipe.json beside an artifact).

Guarantees: every key is known (otherwise the nearest valid name is suggested), every default has its home here,
and the hash of what a stage depends on travels with everything that stage writes.
"""

import argparse
import dataclasses
import difflib
import hashlib
import json
import os
import tomllib
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field, ValidationError, model_validator

from pipeline.basics.errors import PipelineError
from pipeline.basics.files import SEAL, checked
from pipeline.basics.public import scrubbed
from pipeline.basics.section import Name, Section
from pipeline.basics.settings import Settings
from pipeline.decoding.config import TreeConfig
from pipeline.drafts import DRAFTS
from pipeline.features.schema import FP8
from pipeline.recipe.sections import (
    AnyDraft,
    DataConfig,
    EvalConfig,
    FeaturesConfig,
    MethodConfig,
    PublishConfig,
    RegenerateConfig,
    TrainConfig,
)
from pipeline.target.config import TargetConfig

_HANDED_OVER, _VARIABLE = "@environment", "JAKIRO_OVERRIDES"
_AS_NAME = "a name is letters, digits, '.', '_' and '-', beginning with a letter or digit"


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

    @model_validator(mode="after")
    def _consistent(self):
        if not self.draft:
            raise ValueError("no draft: add a section [draft.NAME] with kind = 'jakiro'")
        if self.publish.draft not in self.draft:
            raise ValueError(f"publish.draft={self.publish.draft!r} is not one of the drafts {sorted(self.draft)}")
        if not self.draft[self.publish.draft].trained:
            raise ValueError(f"publish.draft={self.publish.draft!r} is not trained: there are no weights to release")
        if self.target.device == "spread":
            asked = {"features": self.features, **({"eval": self.eval} if self.eval.workers > 1 else {})}
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
        try:
            self.train.accumulation(self.train.ranks or 1)
        except PipelineError as error:
            raise ValueError(str(error)) from None
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
        return self

    def _require_method(self, name: str, method: MethodConfig) -> None:
        """Raises ValueError when a method's draft is not there or cannot grow its tree."""
        draft = method.draft or name
        if name == PLAIN or (name in self.draft and draft != name):
            raise ValueError(f"eval.methods.{name}: that name is taken; choose another")
        if draft not in self.draft:
            raise ValueError(f"eval.methods.{name}.draft={draft!r} is not one of the drafts {sorted(self.draft)}")
        try:
            self.draft[draft].settle(method.tree or self.eval.tree)
        except ValueError as error:
            raise ValueError(f"eval.methods.{name}: {error}") from None

    def tree(self, method: str) -> TreeConfig:
        """A method's tree, settled by its draft."""
        given = self.eval.methods.get(method)
        return self.draft[(given and given.draft) or method].settle(self._given_tree(method))

    def _given_tree(self, method: str) -> TreeConfig:
        given = self.eval.methods.get(method)
        return (given and given.tree) or self.eval.tree

    @property
    def trained(self) -> list[str]:
        """The drafts that are trained."""
        return [name for name, config in sorted(self.draft.items()) if config.trained]

    @property
    def methods(self) -> dict[str, str]:
        """Every method's draft, but for the tuned ones: each draft by itself, then those of ``eval.methods``."""
        named = {name: method.draft or name for name, method in self.eval.methods.items()}
        return {name: name for name in sorted(self.draft)} | named

    @property
    def stored_dtype(self) -> str:
        """Of the features: four states a token are worth half their size."""
        return self.features.stored_dtype or (FP8 if self.auxiliary_layers(DEEPEST) else "bfloat16")

    def auxiliary_layers(self, target_layers: int) -> list[int]:
        """Of a target with so many: those that the recipe names or, unless it does, those that its drafts want."""
        if self.features.auxiliary_layers is not None:
            return self.features.auxiliary_layers
        return sorted({n for config in self.draft.values() for n in config.needs(target_layers).auxiliary})

    @property
    def hash(self) -> str:
        """Hash of everything but what the run is called, where it lies and how many measure it."""
        measuring = {"workers", "gpus_per_worker", "hang_seconds"}
        apart: Any = {"name": True, "output": True, "features": {"store"}, "train": WHERE, "eval": measuring}
        return digest(self.model_dump(mode="json", exclude=apart))

    @property
    def regenerate_hash(self) -> str:
        """What the target's own answers depend on."""
        target = self.target.model_dump(mode="json", exclude={"device"})
        data = self.data.model_dump(
            mode="json", include={"source", "subset", "split", "revision", "languages", "near_duplicates", "max_length"}
        )
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

    def train_hash(self, draft: str) -> str:
        """What one draft's weights depend on. Who shares a global batch and how, schedules of I/O and what only watches
        are not, nor its decoding tree and when it is validated, unless the estimated tau decides which weights are
        kept.
        """
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
        watched = self.train.keep == "best" or self.train.patience is not None
        train = self.train.model_dump(mode="json", exclude=apart if watched else {*apart, "validate_every"})
        config = self.draft[draft].to_json()
        tree = self._given_tree(draft).to_json() if watched else None
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
    def tuned_file(self) -> Path:
        """The trees that eval/tune.py chose."""
        return self.eval_dir / "tuned.json"

    @property
    def release_dir(self) -> Path:
        return self.run_dir / "release"


def digest(value: Any) -> str:
    """Sixteen hex digits of the SHA-256 of the canonical JSON of `value`."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def load_recipe(path: str | Path, overrides: list[str] | None = None) -> Recipe:
    """Reads a recipe and applies ``section.key=value`` overrides (values in TOML syntax, bare words are strings)."""
    path = Path(path)
    if path.is_dir():
        raise PipelineError(f"recipe {path} is a folder: expected a TOML file, or a resolved recipe.json")
    if not path.exists():
        shipped = sorted(str(p) for p in Path("infra/recipes").glob("*.toml"))
        raise PipelineError(f"recipe {path} does not exist; the ones that come with the project: {', '.join(shipped)}")
    try:
        text = path.read_text(encoding="utf-8")
        tree = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except UnicodeDecodeError as error:
        raise PipelineError(
            f"recipe {path} cannot be parsed: byte {error.start} is not UTF-8 ({error.reason}). Save it as UTF-8 "
            f"(iconv -f LATIN1 -t UTF-8)"
        ) from None
    except (tomllib.TOMLDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise PipelineError(f"recipe {path} cannot be parsed: {error}") from None
    if not isinstance(tree, dict):
        raise PipelineError(f"recipe {path} is a JSON {type(tree).__name__}, expected an object with sections")
    if SEAL in tree:  # the one beside an artifact
        tree = checked(
            tree, f"recipe {path}", f"Give the recipe itself; or, if you changed it on purpose, remove its {SEAL!r}"
        )
    for override in overrides or []:
        _apply(tree, override)
    try:
        return Recipe.model_validate(tree)
    except ValidationError as error:
        raise PipelineError(f"recipe {path}:\n" + "\n".join(f"  {_explain(e)}" for e in error.errors())) from None


def add_recipe_arguments(parser) -> None:
    """The command line that every entry shares."""
    parser.add_argument("recipe", help="a recipe, for instance infra/recipes/demo.toml")
    add_override_argument(parser)


def add_override_argument(parser) -> None:
    parser.add_argument(
        "--set", dest="overrides", metavar="section.key=value", action=_Overrides, default=[], help="override one key"
    )


class _Overrides(argparse.Action):
    """Adds one override, or in its place those that the command which started this one handed over."""

    def __call__(self, _parser, namespace, value, _option=None) -> None:
        namespace.overrides = [*namespace.overrides, *(_taken_over() if value == _HANDED_OVER else [value])]


def hand_over(recipe_path: str, overrides: list[str]) -> tuple[list[str], dict[str, str]]:
    """(arguments, environment) that give another command of the project this recipe. The overrides may hold
    credentials, so they travel in the environment: command lines are shown in process lists and written to launchers'
    logs.
    """
    if not overrides:
        return [recipe_path], dict(os.environ)
    return [recipe_path, *override_arguments([_HANDED_OVER])], {**os.environ, _VARIABLE: json.dumps(overrides)}


def override_arguments(overrides: Iterable[str]) -> list[str]:
    """The overrides as a user types them."""
    return [part for override in overrides for part in ("--set", override)]


def _taken_over() -> list[str]:
    """What `hand_over` gave; no process that this one starts sees it."""
    text = os.environ.pop(_VARIABLE, None)
    if text is None:
        raise PipelineError(f"--set {_HANDED_OVER} is for commands that another one starts, with {_VARIABLE} set")
    return json.loads(text)


def _apply(tree: dict, override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator:
        raise PipelineError(f"--set {scrubbed(override, override)!r}: expected section.key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *parents, last = key.strip().split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
        if not isinstance(tree, dict):
            raise PipelineError(f"--set {scrubbed(override, override)!r}: {parent} is a value, not a section")
    tree[last] = value


def _explain(error: Any) -> str:
    location = error["loc"]
    shown = location[:2] + location[3:] if location[:1] == ("draft",) else location  # without the tag of the union
    where = ".".join(str(part) for part in shown)
    if error["type"].startswith("union_tag"):
        settings = error["input"] if isinstance(error["input"], dict) else {}
        got = ", ".join(f"{key}={settings[key]!r}" for key in ("kind", "frame") if key in settings)
        return f"{where}: {got or 'no key kind'}: expected {', '.join(map(repr, DRAFTS))}"
    if error["type"] not in ("extra_forbidden", "unexpected_keyword_argument"):
        got = "" if error["type"] in ("missing", "value_error") else f" (got {error['input']!r})"
        what = _AS_NAME if error["type"] == "string_pattern_mismatch" else error["msg"].removeprefix("Value error, ")
        return scrubbed(f"{where or 'recipe'}: {what}{got}", *_texts(error["input"]))
    known = _fields_at(location[:-1])
    near = difflib.get_close_matches(str(location[-1]), known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"valid keys: {', '.join(known)}"
    return f"{where}: unknown key {location[-1]!r}; {hint}"


def _texts(value: Any) -> list[str]:
    """All that may be addresses in a value, as they stand there and as they are shown in it."""
    if isinstance(value, str):
        return [value, repr(value)[1:-1]]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [text for one in inner for text in _texts(one)]


def _fields_at(location: tuple) -> list[str]:
    """Field names of the section that a pydantic error location points into."""
    section: Any = Recipe
    parts = list(location)
    while parts:
        annotation = _annotations(section)[parts.pop(0)]
        if typing.get_origin(annotation) is dict and parts:
            parts.pop(0)  # the name in a table of sections
        inner = _sections_in(annotation)
        section = inner[0] if len(inner) == 1 else DRAFTS[parts.pop(0)][0]
    return sorted(_annotations(section))


def _annotations(section: Any) -> dict[str, Any]:
    if issubclass(section, BaseModel):
        return {name: field.annotation for name, field in section.model_fields.items()}
    hints = typing.get_type_hints(section)
    return {field.name: hints[field.name] for field in dataclasses.fields(section)}


def _sections_in(annotation: Any) -> list[Any]:
    plain_class = isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias)
    if plain_class and issubclass(annotation, BaseModel | Settings):
        return [annotation]
    return [section for part in typing.get_args(annotation) for section in _sections_in(part)]
