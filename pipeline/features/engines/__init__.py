"""The engines behind `FeatureSource`: the target in this process (here.py), in vLLM's own environment (vllm.py), or
behind a server that only answers (server.py).
"""

from collections.abc import Callable, Sequence

import transformers

from pipeline.features.engines.here import TransformersSource
from pipeline.features.engines.server import ServerSource
from pipeline.features.engines.vllm import VllmSource, told_version
from pipeline.features.source import FeatureSource, SourceIdentity
from pipeline.lm.config import TargetConfig


def identity_of(config: TargetConfig, layers: Sequence[int]) -> SourceIdentity:
    """Of the source that `open_source` gives, without loading it; the version is "" where the engine is not installed
    on this machine.
    """
    version = transformers.__version__ if config.engine == "transformers" else ""
    if config.engine == "vllm":
        version = told_version(config)
    return SourceIdentity(config.engine, version, config.dtype, tuple(layers))


def open_source(config: TargetConfig, layers: Sequence[int] = ()) -> FeatureSource:
    """Loads the target. Raises PipelineError."""
    made: dict[str, Callable[..., FeatureSource]]
    made = {"transformers": TransformersSource, "vllm": VllmSource, "server": ServerSource}
    return made[config.engine](config, identity_of(config, layers))
