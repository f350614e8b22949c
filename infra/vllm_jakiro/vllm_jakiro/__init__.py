"""Register Jakiro's drafts with vLLM, which calls `register` in each of its processes."""

__version__ = "0.4.0"  # which pipeline/features/engines/vllm.py expects
ARCHITECTURES = ("EagleJakiroForCausalLM", "JakiroForCausalLMEagle3")  # in EAGLE-1's frame and in EAGLE-3's


def register() -> None:
    """Register the architectures by name, which imports no torch."""
    from vllm import ModelRegistry

    supported = ModelRegistry.get_supported_archs()
    for name in ARCHITECTURES:
        if name not in supported:
            ModelRegistry.register_model(name, f"vllm_jakiro.models:{name}")
