"""The drafts, one file for each paper, and the table `DRAFTS`, through which all other code finds them."""

from collections.abc import Callable
from typing import Any, NamedTuple

from pipeline.basics.parse import parse_settings
from pipeline.decoding.contract import Source
from pipeline.drafts import eagle, eagle3, gumiho, hydra, jakiro, small_model
from pipeline.drafts.eagle import Eagle, EagleConfig
from pipeline.drafts.eagle3 import Eagle3, Eagle3Config, TrainingTimeTestObjective
from pipeline.drafts.gumiho import Gumiho, GumihoConfig
from pipeline.drafts.hydra import Hydra, HydraConfig
from pipeline.drafts.jakiro import (
    ExpertsObjective,
    ExpertsOnEagle3Objective,
    Jakiro,
    JakiroConfig,
    JakiroOnEagle3,
    JakiroOnEagle3Config,
)
from pipeline.drafts.native import mtp
from pipeline.drafts.native.mtp import Mtp, MtpConfig
from pipeline.drafts.native.skipper import Skipper, SkipperConfig, SkipperObjective
from pipeline.drafts.parallel import dflash, dspark, medusa, p_eagle
from pipeline.drafts.parallel.anchors import BlockObjective
from pipeline.drafts.parallel.dflash import DFlash, DFlashConfig
from pipeline.drafts.parallel.dspark import DSpark, DSparkConfig
from pipeline.drafts.parallel.medusa import Medusa, MedusaConfig
from pipeline.drafts.parallel.p_eagle import PEagle, PEagleConfig, PEagleObjective
from pipeline.drafts.parts.base import DraftConfig
from pipeline.drafts.parts.module import DraftModule, TrainedDraft
from pipeline.drafts.parts.names import Names
from pipeline.drafts.parts.objective import Objective
from pipeline.drafts.prompt_lookup import PromptLookup, PromptLookupConfig
from pipeline.drafts.small_model import SmallLlama, SmallLlamaConfig, SmallModel, SmallModelConfig


class Kind(NamedTuple):
    """One kind of draft: its settings, its class, its training objective and its names in other engines."""

    config: type[DraftConfig]
    make: Callable[..., Any]
    objective: type[Objective] = Objective
    names: Names = Names()


# The key is the `kind` of the settings and, if the kind has several frames, the frame.
DRAFTS: dict[str, Kind] = {
    "dflash": Kind(DFlashConfig, DFlash, BlockObjective, dflash.NAMES),
    "dspark": Kind(DSparkConfig, DSpark, BlockObjective, dspark.NAMES),
    "eagle": Kind(EagleConfig, Eagle, names=eagle.NAMES),
    "eagle3": Kind(Eagle3Config, Eagle3, TrainingTimeTestObjective, eagle3.NAMES),
    "gumiho": Kind(GumihoConfig, Gumiho, names=gumiho.NAMES),
    "hydra": Kind(HydraConfig, Hydra, names=hydra.NAMES),
    "jakiro": Kind(JakiroConfig, Jakiro, ExpertsObjective, jakiro.NAMES),
    "jakiro on eagle-3": Kind(JakiroOnEagle3Config, JakiroOnEagle3, ExpertsOnEagle3Objective, jakiro.NAMES_ON_EAGLE3),
    "medusa": Kind(MedusaConfig, Medusa, names=medusa.NAMES),
    "mtp": Kind(MtpConfig, Mtp, names=mtp.NAMES),
    "p-eagle": Kind(PEagleConfig, PEagle, PEagleObjective, p_eagle.NAMES),
    "prompt-lookup": Kind(PromptLookupConfig, PromptLookup),
    "skipper": Kind(SkipperConfig, Skipper, SkipperObjective),
    "small-llama": Kind(SmallLlamaConfig, SmallLlama, names=small_model.NAMES),
    "small-model": Kind(SmallModelConfig, SmallModel),
}


def kind_key(settings: Any) -> str:
    """Return the key of `DRAFTS` for settings, given as a dictionary or as a `DraftConfig`."""
    kind, frame = (
        settings.get(key) if isinstance(settings, dict) else getattr(settings, key, None) for key in ("kind", "frame")
    )
    return str(kind) if frame is None else f"{kind} on {frame}"


def load_settings(raw: dict[str, Any]) -> DraftConfig:
    """Return a draft's settings from the dictionary that an artifact holds.

    Raises KeyError for a kind that this version does not know, and ValueError for invalid settings.
    """
    return parse_settings(DRAFTS[kind_key(raw)].config, raw)


def make(config: DraftConfig, shapes: dict[str, Any]) -> Source:
    """Return a draft in the shapes of its target (`layers.shapes_of`); weights to be trained are not initialised."""
    return DRAFTS[kind_key(config)].make(config, shapes)


def make_untrained(config: DraftConfig, shapes: dict[str, Any], tokenizer: Callable[[], Any]) -> Source:
    """Return an untrained draft. If it has a corpus, read that with the tokenizer that `tokenizer` loads.

    Raises PipelineError if the corpus cannot be read.
    """
    draft = make(config, shapes)
    if isinstance(draft, PromptLookup):
        draft.read(tokenizer)
    return draft


def build(config: DraftConfig, shapes: dict[str, Any]) -> TrainedDraft:
    """Return a draft to be trained. The settings for the start of its training are left out of it."""
    draft = make(config.without_start(), shapes)
    assert isinstance(draft, TrainedDraft)
    return draft


def make_objective(config: DraftConfig) -> Objective:
    """Return the training objective for a draft with these settings."""
    return DRAFTS[kind_key(config)].objective(config)


def parameter_count(draft: DraftModule) -> int:
    """Return the number of the draft's own parameters."""
    return sum(parameter.numel() for parameter in draft.parameters())
