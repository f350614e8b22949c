"""Tells vLLM of Jakiro's drafts; it calls `register` in every process of its own."""

__version__ = "0.3.0"  # which pipeline/features/engines/vllm.py expects
ARCHITECTURES = ("EagleJakiroForCausalLM", "JakiroForCausalLMEagle3")  # behind EAGLE-1's frame and EAGLE-3's


def register() -> None:
    """Registers them by name: nothing of torch is imported here."""
    from vllm import ModelRegistry

    known = ModelRegistry.get_supported_archs()
    for name in ARCHITECTURES:
        if name not in known:
            ModelRegistry.register_model(name, f"vllm_jakiro.models:{name}")
