"""A run is one typed recipe: a TOML file (or the resolved recipe.json beside an artifact).

Guarantees: every key is known (otherwise the nearest valid name is suggested), every default has its home here,
and the hash of what a stage depends on travels with everything that stage writes.
"""

import difflib
import hashlib
import json
import tomllib
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from pipeline.errors import PipelineError

Dtype = Literal["float32", "bfloat16", "float16"]
Positive = Annotated[int, Field(gt=0)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]  # becomes the name of a folder
Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class TargetConfig(Section):
    """The frozen model that the draft drafts for."""

    model: str  # Hugging Face id, local folder, or "embedded:smollm2-135m-instruct"
    revision: str | None = None
    dtype: Dtype = "bfloat16"  # of the feature dump; evaluation has its own
    device: Literal["auto", "cpu", "cuda", "spread"] = "auto"  # spread: layer by layer over all GPUs that are seen
    trust_remote_code: bool = False
    chat_template: str | None = None  # a Jinja file, for a tokenizer that comes without a template


class DataConfig(Section):
    """Which dialogues, and how they are cut and split."""

    source: str  # a path, an fsspec or hf:// address, "datasets:NAME", or "embedded:sharegpt" (forms: preprocess/sources.py)
    subset: str | None = None  # of a "datasets:" source
    split: str = "train"
    revision: str | None = None
    max_length: Positive = 2048  # tokens of a dialogue
    min_length: Positive = 1
    long: Literal["cut", "turns", "windows"] = "cut"  # what becomes of longer dialogues (preprocess/pieces.py)
    languages: list[str] = []  # ISO 639-1; empty: all
    near_duplicates: Annotated[float, Field(ge=0.5, le=1)] | None = None  # similarity from which two dialogues are one
    max_tokens: Positive | None = None  # stop accepting training dialogues beyond this many tokens
    max_dialogues: Positive | None = None
    heldout_fraction: Fraction = 0.02  # of dialogues, by hash of the id: never trained on
    validation_dialogues: Positive = 256  # held-out dialogues whose features are dumped, for validation
    heldout_prompts: Positive = 80  # held-out dialogues whose first turn may serve as an evaluation prompt


class FeaturesConfig(Section):
    """How the dump runs and what a shard holds."""

    stored_dtype: Dtype | Literal["float8_e4m3fn"] = "bfloat16"  # float8 with a scale a token: half the disk
    auxiliary_layers: list[Positive] = []  # decoder layers (from 1) whose outputs are stored, too
    rows_per_shard: Positive = 256
    batch_tokens: Positive = 8192  # padded tokens of one forward
    workers: Positive = 1
    planners: Positive = 1  # from 2 on, processes beside the driver that encode dialogues for it
    cpus_per_worker: Positive = 1
    gpus_per_worker: Annotated[float, Field(ge=0)] = 0  # more than 1 needs target.device = "spread"
    store: str | None = None  # s3://, gs://, ...: where finished shards go (pipeline/features/store.py)
    hang_seconds: Positive = 900  # without a finished batch, or a loaded target, after which a worker is given up

    @model_validator(mode="after")
    def _sound(self):
        if self.auxiliary_layers != sorted(set(self.auxiliary_layers)):
            raise ValueError(f"auxiliary_layers={self.auxiliary_layers} must be different layers in rising order")
        if self.gpus_per_worker > 1 and self.gpus_per_worker % 1:
            raise ValueError(f"gpus_per_worker={self.gpus_per_worker:g}: a part of one GPU, or whole ones")
        return self


class RegenerateConfig(Section):
    """How the target rewrites the assistant turns (preprocess/regenerate.py), with the workers of the dump."""

    temperature: Annotated[float, Field(ge=0)] = 0.0  # 0: greedy
    top_k: Positive | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_new_tokens: Positive = 512  # of one answer
    batch: Positive = 32  # dialogues that are answered together
    dialogues_per_part: Positive = 64  # of one file of the result
    max_dialogues: Positive | None = None

    @model_validator(mode="after")
    def _greedy_is_greedy(self):
        if self.temperature == 0 and (self.top_k is not None or self.top_p < 1):
            raise ValueError("top_k and top_p choose nothing at temperature 0: drop them, or set temperature")
        return self


class TreeConfig(Section):
    """A dynamic token tree (EAGLE-2). ``nodes`` counts every token that the target verifies, the root included."""

    depth: Positive = 5
    top_k: Positive = 10
    nodes: Annotated[int, Field(ge=2)] = 60
    hybrid: bool = False  # the last two levels from one draft forward (Jakiro)

    @model_validator(mode="after")
    def _reachable(self):
        most = 1 + self.top_k + self.top_k * self.top_k * (self.depth - 1)
        if self.nodes > most:
            raise ValueError(
                f"nodes={self.nodes}, but depth {self.depth} with top_k {self.top_k} scores at most {most}"
            )
        if self.nodes < self.depth + 1:
            raise ValueError(
                f"nodes={self.nodes} cannot hold a path of depth {self.depth}: use at least {self.depth + 1}"
            )
        if self.hybrid and self.depth < 2:
            raise ValueError("hybrid=true needs depth >= 2: it takes the last TWO levels from one forward")
        return self


class BranchLoss(Section):
    """Weights of one branch's two losses."""

    regression: float
    classification: float


class DraftBase(Section):
    fc_bias: bool = False
    vocabulary: Positive | None = None  # reduced draft vocabulary: the most frequent ids of the training answers
    embedding_scale: Annotated[float, Field(gt=0)] = 1.0  # multiplies e(t) on its way into fc
    next: BranchLoss = BranchLoss(regression=1.0, classification=0.1)


class EagleConfig(DraftBase):
    """EAGLE-1/2: one dense Llama layer."""

    kind: Literal["eagle"]
    mlp_width: Positive | None = None  # default: the target's
    tree: TreeConfig = TreeConfig()

    @model_validator(mode="after")
    def _no_hybrid(self):
        if self.tree.hybrid:
            raise ValueError("tree.hybrid=true needs a branch two tokens ahead; eagle has none: use kind='jakiro'")
        return self


class JakiroConfig(DraftBase):
    """Jakiro (arXiv 2502.06282): a mixture of experts in EAGLE's layer, and a contrast branch two tokens ahead."""

    kind: Literal["jakiro"]
    experts: Annotated[int, Field(ge=2)] = 2
    experts_per_token: Annotated[int, Field(ge=2)] = 2
    expert_width: Positive | None = None  # default: the hidden size, as in the released code
    contrast: Literal["router", "scalar"] = "router"
    ahead: BranchLoss = BranchLoss(regression=1.0, classification=0.05)
    tree: TreeConfig = TreeConfig(hybrid=True)

    @model_validator(mode="before")
    @classmethod
    def _hybrid_by_default(cls, values: Any):
        """Also where a tree is given without saying so."""
        if isinstance(values, dict) and isinstance(values.get("tree"), dict):
            return {**values, "tree": {"hybrid": True, **values["tree"]}}
        return values

    @model_validator(mode="after")
    def _enough_experts(self):
        if self.experts_per_token > self.experts:
            raise ValueError(f"experts_per_token={self.experts_per_token} is more than experts={self.experts}")
        return self


DraftConfig = Annotated[EagleConfig | JakiroConfig, Field(discriminator="kind")]


class TrainConfig(Section):
    """Optimisation. Defaults are the paper's, and from its code where the paper is silent."""

    epochs: Positive = 20
    global_batch: Positive = 16  # dialogues per optimiser step, over all ranks
    micro_batch: Positive = 4  # dialogues per forward of one rank
    ranks: Positive | None = None  # for `pipeline run` on one machine; default: every accelerator
    learning_rate: Annotated[float, Field(gt=0)] = 9e-5
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 1e-3
    warmup_steps: Annotated[int, Field(ge=0)] = 2000
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    clip_norm: Annotated[float, Field(gt=0)] = 0.5
    noise: Annotated[float, Field(ge=0)] = 0.1  # half-width of the uniform noise on input features
    noise_scaling: Literal["plain", "legacy"] = "plain"  # legacy: times 512 / length, as EAGLE's code
    mask: Literal["predicted", "legacy"] = "predicted"  # legacy: train where t_i, not t_{i+1+h}, is the assistant's
    dtype: Dtype = "bfloat16"
    zero_stage: Literal[0, 1, 2, 3] = 0  # from 1 on, micro-batch gradients of a half-precision run add up in float32
    checkpoint_every: Positive = 500  # steps
    validate_every: Positive = 500
    verify_checksums: bool = True
    deepspeed: dict[
        str, Any
    ] = {}  # more of DeepSpeed's configuration; what follows from the keys above is refused here


class BenchmarkConfig(Section):
    source: str  # JSONL of {question_id, category, turns}; "embedded:humaneval"; or "heldout"
    prompts: Positive | None = None  # the first so many


class EvalConfig(Section):
    """What is measured. Every method decodes the same prompts in one process, interleaved."""

    benchmarks: Annotated[dict[str, BenchmarkConfig], Field(min_length=1)]
    temperatures: Annotated[list[Annotated[float, Field(ge=0)]], Field(min_length=1)] = [0.0, 1.0]
    top_k: Positive | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_new_tokens: Positive = 512
    repeats: Positive = 3  # at temperature 0
    sampled_repeats: Positive = 3  # above it, each with its own seed
    warmups: Positive = 3
    dtype: Dtype = "bfloat16"
    pack_linears: bool = False  # CPU: pre-packed weights for target and drafts alike
    gate_rounds: Positive = 32  # rounds a benchmark and draft, whose output distribution is enumerated at T > 0


class PublishConfig(Section):
    draft: str  # which of the run's drafts
    license: str  # of the draft, as the Hub spells it; mind the target's and the data's
    language: list[str] = ["en"]


class Recipe(Section):
    name: str
    output: str  # folder of the run
    seed: Annotated[int, Field(ge=0)] = 0
    target: TargetConfig
    data: DataConfig
    regenerate: RegenerateConfig = RegenerateConfig()
    features: FeaturesConfig = FeaturesConfig()
    draft: dict[Name, DraftConfig]  # one or several, trained on the same shards and measured side by side
    train: TrainConfig = TrainConfig()
    eval: EvalConfig
    publish: PublishConfig

    @model_validator(mode="after")
    def _consistent(self):
        if not self.draft:
            raise ValueError("no draft: add a section [draft.NAME] with kind = 'jakiro' or 'eagle'")
        if self.publish.draft not in self.draft:
            raise ValueError(f"publish.draft={self.publish.draft!r} is not one of the drafts {sorted(self.draft)}")
        if self.target.device == "spread" and self.features.gpus_per_worker < 1:
            raise ValueError(
                "target.device='spread', but features.gpus_per_worker gives a dump worker no GPUs of its own: say how many"
            )
        if self.features.gpus_per_worker > 1 and self.target.device != "spread":
            raise ValueError(
                f"features.gpus_per_worker={self.features.gpus_per_worker:g}, but target.device={self.target.device!r} uses one: "
                "set target.device='spread'"
            )
        ranks = self.train.ranks or 1
        if self.train.global_batch % (self.train.micro_batch * ranks):
            raise ValueError(
                f"train.global_batch={self.train.global_batch} is no multiple of train.micro_batch={self.train.micro_batch}"
                + (f" x train.ranks={ranks}" if ranks > 1 else "")
            )
        for name, benchmark in self.eval.benchmarks.items():
            if benchmark.source == "heldout" and (benchmark.prompts or 0) > self.data.heldout_prompts:
                raise ValueError(
                    f"eval.benchmarks.{name}.prompts={benchmark.prompts} is more than data.heldout_prompts="
                    f"{self.data.heldout_prompts}, which the dump keeps"
                )
        return self

    @property
    def hash(self) -> str:
        """Hash of everything but what the run is called and where it lies."""
        return digest(self.model_dump(mode="json", exclude={"name": True, "output": True, "features": {"store"}}))

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
        """What the feature shards depend on. Who wrote them, where, and in which batches is not part of it: that changes rounding
        at most, and a dump whose batches were too large goes on with smaller ones.
        """
        how = {"workers", "planners", "cpus_per_worker", "gpus_per_worker", "batch_tokens", "store", "hang_seconds"}
        features = self.features.model_dump(mode="json", exclude=how)
        target = self.target.model_dump(mode="json", exclude={"device"})
        return digest({"target": target, "data": self.data.model_dump(mode="json"), "features": features})

    def train_hash(self, draft: str) -> str:
        """What one draft's weights depend on. Its decoding tree, the number of ranks and schedules of I/O are not."""
        schedules = {"ranks", "checkpoint_every", "validate_every", "verify_checksums"}
        train = self.train.model_dump(mode="json", exclude=schedules)
        config = self.draft[draft].model_dump(mode="json", exclude={"tree"})
        return digest({"dump": self.dump_hash, "seed": self.seed, "draft": config, "train": train})

    def with_features(self, **changes: Any) -> "Recipe":
        """A copy with other keys of [features]; not validated."""
        return self.model_copy(update={"features": self.features.model_copy(update=changes)})

    @property
    def run_dir(self) -> Path:
        return Path(self.output)

    @property
    def features_dir(self) -> Path:
        return self.run_dir / "features"

    @property
    def regenerated_dir(self) -> Path:
        return self.run_dir / "regenerated"

    def draft_dir(self, draft: str) -> Path:
        return self.run_dir / "drafts" / draft

    @property
    def eval_dir(self) -> Path:
        return self.run_dir / "eval"

    @property
    def release_dir(self) -> Path:
        return self.run_dir / "release"


def digest(value: Any) -> str:
    """Sixteen hex digits of the SHA-256 of the canonical JSON of `value`."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def load_recipe(path: str | Path, overrides: list[str] | None = None) -> Recipe:
    """Reads a recipe and applies ``section.key=value`` overrides (values in TOML syntax, bare words are strings)."""
    path = Path(path)
    if not path.is_file():
        shipped = sorted(str(p) for p in Path("infra/recipes").glob("*.toml"))
        raise PipelineError(f"recipe {path} does not exist; the ones that come with the project: {', '.join(shipped)}")
    try:
        text = path.read_text(encoding="utf-8")
        tree = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (tomllib.TOMLDecodeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise PipelineError(f"recipe {path} cannot be parsed: {error}") from None
    if not isinstance(tree, dict):
        raise PipelineError(f"recipe {path} is a JSON {type(tree).__name__}, expected an object with sections")
    for override in overrides or []:
        _apply(tree, override)
    try:
        return Recipe.model_validate(tree)
    except ValidationError as error:
        raise PipelineError(f"recipe {path}:\n" + "\n".join(f"  {_explain(e)}" for e in error.errors())) from None


def add_recipe_arguments(parser) -> None:
    """The command line that every entry shares."""
    parser.add_argument("recipe", help="a recipe, for instance infra/recipes/demo.toml")
    parser.add_argument(
        "--set", dest="overrides", metavar="section.key=value", action="append", default=[], help="override one key"
    )


def override_arguments(overrides: Iterable[str]) -> list[str]:
    """The overrides as another command is given them."""
    return [part for override in overrides for part in ("--set", override)]


def _apply(tree: dict, override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator:
        raise PipelineError(f"--set {override!r}: expected section.key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *parents, last = key.strip().split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
        if not isinstance(tree, dict):
            raise PipelineError(f"--set {override!r}: {parent} is a value, not a section")
    tree[last] = value


def _explain(error: Any) -> str:
    location = error["loc"]
    shown = location[:2] + location[3:] if location[:1] == ("draft",) else location  # without the tag of the union
    where = ".".join(str(part) for part in shown)
    if error["type"] != "extra_forbidden":
        got = "" if error["type"] in ("missing", "value_error") else f" (got {error['input']!r})"
        return f"{where or 'recipe'}: {error['msg'].removeprefix('Value error, ')}{got}"
    known = _fields_at(location[:-1])
    near = difflib.get_close_matches(str(location[-1]), known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"valid keys: {', '.join(known)}"
    return f"{where}: unknown key {location[-1]!r}; {hint}"


def _fields_at(location: tuple) -> list[str]:
    """Field names of the section that a pydantic error location points into."""
    section: type[BaseModel] = Recipe
    parts = list(location)
    while parts:
        annotation = section.model_fields[parts.pop(0)].annotation
        models = _models_in(annotation)
        if typing.get_origin(annotation) is dict and parts:
            parts.pop(0)  # the name in a table of sections
        section = models[0]
        if len(models) > 1:
            tag = parts.pop(0)
            section = next(model for model in models if tag in typing.get_args(model.model_fields["kind"].annotation))
    return sorted(section.model_fields)


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    plain_class = isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias)
    if plain_class and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in typing.get_args(annotation) for model in _models_in(part)]
