"""The engines that implement `FeatureSource`: the target in this process (in_process.py), in vLLM's own environment
(vllm.py), or on a server that only answers (server.py).
"""

from collections.abc import Callable, Sequence

import transformers

from pipeline.features.engines.in_process import TransformersSource
from pipeline.features.engines.server import ServerSource
from pipeline.features.engines.vllm import VllmSource, recorded_version
from pipeline.features.source import FeatureSource, SourceIdentity
from pipeline.lm.config import TargetConfig


def source_identity(config: TargetConfig, layers: Sequence[int]) -> SourceIdentity:
    """Return the identity of the source that `open_source` returns, without loading it. The version is "" if the engine
    is not installed on this machine.
    """
    version = transformers.__version__ if config.engine == "transformers" else ""
    if config.engine == "vllm":
        version = recorded_version(config)
    return SourceIdentity(config.engine, version, config.dtype, tuple(layers))


def open_source(config: TargetConfig, layers: Sequence[int] = ()) -> FeatureSource:
    """Load the target. Raises PipelineError."""
    made: dict[str, Callable[..., FeatureSource]]
    made = {"transformers": TransformersSource, "vllm": VllmSource, "server": ServerSource}
    return made[config.engine](config, source_identity(config, layers))
