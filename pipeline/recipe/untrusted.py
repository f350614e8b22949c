"""The fields read from files that somebody else wrote: a release's recipe and settings, a published draft's facts.

Guarantee: only the fields defined here, each with its type and bounds, are read; anything else in such a file has no
effect. Never read: permission to run a target's code (`trust_remote_code`), an engine and its Python, paths and
addresses, numbers of processes, and settings that would weaken the losslessness check.
"""

import json
import re
from dataclasses import fields
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from pipeline.basics import embedded
from pipeline.basics.errors import PipelineError
from pipeline.basics.public import ON_HUB as ADAPTER
from pipeline.basics.section import Dtype, Scalar
from pipeline.decoding.config import Method, TreeConfig
from pipeline.drafts import DraftConfig
from pipeline.drafts.parts.layers import ROPES
from pipeline.lm.config import TargetConfig

ON_HUB = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,95}/[A-Za-z0-9][A-Za-z0-9_.-]{0,95}"
MODEL = rf"{ON_HUB}|{embedded.PREFIX}[A-Za-z0-9_.-]{{1,96}}"
FILE = r"^([A-Za-z0-9_]+/)?[A-Za-z0-9_]+[.](jinja|py|txt)$"  # a file of a release with its hash in config.json
LARGEST, WIDEST = 1 << 10, 1 << 24  # an integer of a draft's settings, and one of these:
WIDTHS = {"vocabulary", "mask_token", "window", "width", "mlp_width", "expert_width", "rank", "anchors"}
WIDTHS |= {"regression_steps"}
TREE = {"depth": 1 << 10, "top_k": 1 << 16, "nodes": 1 << 16}


def _forbid(parts: str, description: str) -> AfterValidator:
    """Return a validator that refuses texts in which the pattern `parts` occurs."""

    def check(value: str) -> str:
        if re.search(parts, value):
            raise ValueError(f"it holds {description}")
        return value

    return AfterValidator(check)


Short = Annotated[str, Field(max_length=500)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Fingerprint = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
Revision = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_./+-]{0,99}$"), _forbid(r"\.\.", "'..'")]
Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
Keyword = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,99}$")]
Count = Annotated[int, Field(ge=0, le=1 << 53)]
Size = Annotated[int, Field(ge=1, le=WIDEST)]
Real = Annotated[float, Field(ge=-1e12, le=1e12)]
Setting = Scalar | None | Annotated[list[Scalar | None], Field(max_length=LARGEST)]


class Untrusted(BaseModel):
    """A part of such a file; keys that are not fields are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True, allow_inf_nan=False)


class ReleasedTarget(Untrusted):
    """A release's target, and the settings of its chat template."""

    model: Short
    revision: Revision | None = None
    adapter: Short | None = None  # on another machine only one of the Hub is known
    template_keywords: Annotated[
        dict[Keyword, Scalar | Annotated[list[Scalar], Field(max_length=64)]], Field(max_length=32)
    ] = {}
    template_date: date = TargetConfig.model_fields["template_date"].default

    @property
    def is_on_hub(self) -> bool:
        """True if the name is an address that works on any machine, such as a Hub id."""
        return bool(re.fullmatch(MODEL, self.model))

    def config(
        self, model: str, chat_template: Path | None, device: str = "auto", trust_remote_code: bool = False
    ) -> TargetConfig:
        """Return the target's settings for loading. `chat_template`: a file whose content was checked. Raises
        ValueError.
        """
        return TargetConfig(
            model=model,
            revision=self.revision if model == self.model else None,
            adapter=self.adapter if self.adapter and ADAPTER.fullmatch(self.adapter) else None,
            template_keywords=self.template_keywords,
            template_date=self.template_date,
            chat_template=None if chat_template is None else str(chat_template),
            device=device,  # type: ignore[arg-type]
            trust_remote_code=trust_remote_code,
        )


class ReleasedBenchmark(Untrusted):
    """Prompts that every machine has, or downloads from an address in this project; never a path or a data set."""

    source: Short
    prompts: Annotated[int, Field(ge=1, le=100_000)] | None = None


class ReleasedEval(Untrusted):
    """The settings with which a release was measured."""

    benchmarks: Annotated[dict[Short, ReleasedBenchmark], Field(min_length=1, max_length=100)]
    temperatures: Annotated[list[Annotated[float, Field(ge=0, le=10)]], Field(min_length=1, max_length=100)]
    top_k: Size | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_new_tokens: Annotated[int, Field(ge=1, le=1 << 20)]
    repeats: Annotated[int, Field(ge=1, le=100)]
    dtype: Dtype
    pack_linears: bool = False
    compile: bool = False


class ReleasedPublish(Untrusted):
    license: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9 .,+_()/-]{0,99}$")]


class ReleasedRecipe(Untrusted):
    """The part of a release's recipe that another machine needs to measure its draft again."""

    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    target: ReleasedTarget
    eval: ReleasedEval
    publish: ReleasedPublish


class DecodingRecipe(Untrusted):
    """The part of a release's recipe that `load` needs."""

    class Eval(Untrusted):
        dtype: Dtype

    target: ReleasedTarget
    eval: Eval


class DraftedTarget(Untrusted):
    """The target of a draft, in its config.json."""

    model: Short
    revision: Short | None
    fingerprint: Fingerprint
    tokenizer: Fingerprint
    template: Fingerprint


def _check_rope(rope: dict[str, Any]) -> dict[str, Any]:
    """Return the RoPE settings. Raises ValueError if no draft of this project computes them."""
    numbers = [rope.get(name) for name in ("rope_theta", "factor", "original_max_position_embeddings")]
    are_positive = all(x is None or (type(x) in (int, float) and x > 0) for x in numbers)
    if rope.get("rope_type", "default") not in ROPES or not are_positive:
        raise ValueError(f"expected one of {', '.join(ROPES)} with positive numbers")
    return rope


def _check_layer(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a layer. Raises ValueError for rotary angles that no draft of this project computes."""
    rope = settings.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise ValueError("rope_parameters: expected an object")
    share = _check_rope(rope).get("partial_rotary_factor", 1.0)
    if type(share) not in (int, float) or not 0 < share <= 1:
        raise ValueError("rope_parameters: expected a partial_rotary_factor of at most 1")
    return settings


class TargetLayer(Untrusted):
    """The settings of an MTP head's layer; of them only those that its family defines for itself have an effect."""

    family: Word
    settings: Annotated[
        dict[Keyword, Setting | dict[Keyword, Setting]], Field(max_length=200), AfterValidator(_check_layer)
    ]


class Shapes(Untrusted):
    """A draft's shapes, as `pipeline.drafts.parts.layers.draft_shapes` returns them."""

    hidden_size: Size
    intermediate_size: Size | None
    num_attention_heads: Size
    num_key_value_heads: Size
    head_dim: Size
    rms_norm_eps: Annotated[float, Field(gt=0, lt=1)]
    rope_parameters: Annotated[
        dict[Word, Scalar | Annotated[list[Scalar], Field(max_length=LARGEST)] | None],
        Field(max_length=32),
        AfterValidator(_check_rope),
    ]
    max_position_embeddings: Size
    vocab_size: Size
    target_layers: Annotated[int, Field(ge=1, le=4096)]
    layer: TargetLayer | None = None  # of a draft that is the target's MTP head
    known_tokens: Size | None = None  # set if the target's vocabulary has rows that no token uses


class DraftConfigFile(Untrusted):
    """The facts about a draft in its config.json, without its settings and its method."""

    shapes: Shapes
    target: DraftedTarget
    train_hash: Fingerprint
    weights_sha256: Sha256
    metrics_sha256: Sha256 | None
    files: Annotated[dict[Annotated[str, Field(pattern=FILE)], Sha256], Field(max_length=200)] = {}


class TrainingFacts(Untrusted):
    """The facts about a draft's training that this project uses."""

    steps: Count | None = None
    epochs: Count | None = None
    dialogues: Count | None = None
    trained_tokens: Count | None = None
    vocabulary_coverage: Annotated[float, Field(ge=0, le=1)] | None = None
    template: Short | None = None
    template_mark: Fingerprint | None = None
    validation: Annotated[dict[Word, Real], Field(max_length=100)] | None = None

    def facts(self) -> dict[str, Any]:
        return self.model_dump(exclude_none=True)


Part = TypeVar("Part", bound=Untrusted)


def parse_untrusted(kind: type[Part], raw: Any, where: object, remedy: str) -> Part:
    """Return the fields of `kind` in a JSON value. Raises PipelineError that names the first field that is missing, or
    has a wrong type or size.
    """
    try:
        return kind.model_validate_json(json.dumps(raw))
    except ValidationError as error:
        wrong = error.errors()[0]
        place = ".".join(map(str, wrong["loc"])) or "it"
        raise PipelineError(
            f"{where}: {place} is not a value that a release may have ({wrong['msg']}). {remedy}"
        ) from None


def require_draft_in_bounds(config: DraftConfig, may: Literal["trained", "secondary"]) -> None:
    """Raise ValueError for settings of a draft that somebody else may not choose: a file or a model to read, or a size
    that no draft has.
    """
    fits = config.trained if may == "trained" else config.may_be_secondary
    if not fits or config.start is not None or config.corpus is not None:
        raise ValueError(f"{getattr(config, 'kind', config)!r} with a start or a corpus, or that is not {may}")
    for field in fields(config):
        value, most = getattr(config, field.name), WIDEST if field.name in WIDTHS else LARGEST
        sizes = value if isinstance(value, list) else [value]
        if len(sizes) > LARGEST or any(isinstance(size, int) and abs(size) > most for size in sizes):
            raise ValueError(f"{field.name} is larger than {most}")


def require_method_in_bounds(method: Method) -> None:
    """Raise ValueError for a tree or a number of secondary sources that is too large to be useful."""
    for name in method.sources:
        if name and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
            raise ValueError(f"{name!r} is no name of a draft")
    tree = method.tree or TreeConfig()
    for name, most in TREE.items():
        if getattr(tree, name) > most:
            raise ValueError(f"tree.{name}={getattr(tree, name)}: expected at most {most}")
    if len(method.secondary) > 8:
        raise ValueError("more secondary sources than any method has")
