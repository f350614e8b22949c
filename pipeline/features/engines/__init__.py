"""The engines behind `FeatureSource`: the target in this process (here.py), or in vLLM's own environment (vllm.py)."""

from collections.abc import Sequence

import transformers

from pipeline.features.engines.here import TransformersSource
from pipeline.features.engines.vllm import VllmSource, version_of
from pipeline.features.source import FeatureSource, SourceIdentity
from pipeline.lm.config import TargetConfig


def identity_of(config: TargetConfig, layers: Sequence[int]) -> SourceIdentity:
    """Of the source that `open_source` gives, without loading it. Raises PipelineError for an environment without the
    engine.
    """
    version = version_of(str(config.engine_python)) if config.engine == "vllm" else transformers.__version__
    return SourceIdentity(config.engine, version, config.dtype, tuple(layers))


def open_source(config: TargetConfig, layers: Sequence[int] = ()) -> FeatureSource:
    """Loads the target. Raises PipelineError."""
    made: type[TransformersSource] | type[VllmSource]
    made = VllmSource if config.engine == "vllm" else TransformersSource
    return made(config, identity_of(config, layers))
