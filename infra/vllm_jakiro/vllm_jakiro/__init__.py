"""Register our drafts with vLLM, which calls `register` in each of its processes."""

__version__ = "0.5.1"  # which pipeline/features/engines/vllm.py expects
ARCHITECTURES = {  # by the module
    "models": (
        *("EagleJakiroForCausalLM", "EaglePromptLookupForCausalLM"),  # in EAGLE-1's frame
        *("JakiroForCausalLMEagle3", "PromptLookupForCausalLMEagle3"),  # in EAGLE-3's
    ),
    "heads": ("EagleGumihoForCausalLM", "EagleHydraForCausalLM"),
}


def register() -> None:
    """Register the architectures by name, which imports no torch."""
    from vllm import ModelRegistry

    supported = ModelRegistry.get_supported_archs()
    for module, names in ARCHITECTURES.items():
        for name in names:
            if name not in supported:
                ModelRegistry.register_model(name, f"vllm_jakiro.{module}:{name}")
