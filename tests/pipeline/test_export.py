"""Drafts in the formats of engines: names, shapes and settings are listed, and an import gives the same bytes."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM

from pipeline.__main__ import main
from pipeline.artifacts import checkpoint
from pipeline.artifacts.imported import import_draft
from pipeline.basics.errors import PipelineError
from pipeline.decoding.config import LoadedMethod, Method, TreeConfig, chain
from pipeline.decoding.generate import Sampling, decode_plain, decode_speculative
from pipeline.drafts.eagle import EagleConfig
from pipeline.drafts.eagle3 import Eagle3Config, Eagle3FrameConfig
from pipeline.drafts.gumiho import GumihoConfig
from pipeline.drafts.hydra import HydraConfig
from pipeline.drafts.jakiro import ExpertsConfig, JakiroConfig, JakiroOnEagle3Config
from pipeline.drafts.parallel.dflash import IN_TRANSFORMERS, DFlashConfig
from pipeline.drafts.parallel.dspark import DSparkConfig
from pipeline.drafts.parallel.medusa import MedusaConfig
from pipeline.drafts.parallel.p_eagle import PEagleConfig
from pipeline.drafts.parts.names import PLUG_IN
from pipeline.drafts.small_model import SmallLlamaConfig
from pipeline.lm.config import TargetConfig
from pipeline.lm.model import Target, fingerprint
from pipeline.recipe.recipe import Recipe
from pipeline.serving.export import export, list_tested_engines
from tests.kit import call, flip, recipe_tree, save_tiny_target, write_sharegpt
from tests.pipeline.families import LLAMA_3, YARN, save
from tests.pipeline.layouts import with_settings
from tests.pipeline.taught import NEVER, greedy, make_draft, prompt_of, taught, write_release

LAYER = {
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
    "post_attention_layernorm.weight",
}
EAGLE = {f"layers.0.{name}" for name in LAYER} | {"fc.weight"}  # exactly the tensors that vLLM's loader expects
EAGLE_3 = {f"midlayer.{name}" for name in LAYER | {"input_layernorm.weight", "hidden_norm.weight"}} | {
    "fc.weight",
    "norm.weight",
    "lm_head.weight",
}
PROJECTIONS = {f"experts.{place}.{name}_proj.weight" for place in range(2) for name in ("gate", "up", "down")}
EXPERTS = PROJECTIONS | {"gate.weight"}


def with_experts(names: set[str], *extra: str) -> set[str]:
    """Return the names with the experts' tensors in place of the MLP's."""
    layer = next(name for name in names if ".mlp." in name).partition(".mlp.")[0]
    return {name for name in names if ".mlp." not in name} | {f"{layer}.mlp_moe.{name}" for name in EXPERTS | {*extra}}


REDUCED = EAGLE_3 | {"d2t", "t2d"}
DFLASH = {"fc.weight", "hidden_norm.weight", "norm.weight"} | {
    f"layers.{number}.{name}"
    for number in range(2)
    for name in LAYER | {"input_layernorm.weight", "self_attn.q_norm.weight", "self_attn.k_norm.weight"}
}
P_EAGLE = REDUCED | {f"layers.1.{name}" for name in LAYER | {"input_layernorm.weight"}} | {"mask_hidden"}
QWEN = {f"midlayer.self_attn.{name}.weight" for name in ("q_norm", "k_norm")} | {
    f"midlayer.self_attn.{name}_proj.bias" for name in "qkvo"
}
DFLASH_CONFIG = DFlashConfig(layers=2, block=4, mask_token=259)
DSPARK_CONFIG = DSparkConfig(layers=2, block=3, rank=8, window=64, mask_token=259)
P_EAGLE_CONFIG = PEagleConfig(layers=2, depths=3, vocabulary=100, mask_token=259)
QWEN_CONFIG = Eagle3Config(qk_norm=True, attention_bias=True, window=64)
EAGLE_3_1_CONFIG = Eagle3Config(vocabulary=100, fc_norm=True, norm_output=True, norm_before_residual=True)
SPECULATORS_CONFIG = Eagle3Config(norm_before_fc=True, norm_output=True, norm_before_residual=True, window=64)
WITH_SCALARS = JakiroConfig(contrast="scalar", expert_width=24)
ON_EAGLE_3 = JakiroOnEagle3Config(frame="eagle-3", vocabulary=100, contrast="none")
FC_NORMS = {f"fc_norm.{place}.weight" for place in range(3)}
MARKOV = {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight"}
MUSE = DFLASH - {*IN_TRANSFORMERS} | {*IN_TRANSFORMERS.values()}
BY_LAYER = {name.replace("midlayer.", "layers.0.") for name in REDUCED}
OUR_ARCHITECTURES = "EagleJakiroForCausalLM", "JakiroForCausalLMEagle3"
GUMIHO = EAGLE | {f"layers.1.{name}" for name in LAYER | {"input_layernorm.weight"}}
GUMIHO |= {
    f"mlp.{number}.{place}.{'0' if place == 0 else 'linear'}.{part}"
    for number in range(5)
    for place in range(6)
    for part in ("weight", "bias")
}
HYDRA = {f"layers.0.{name}" for name in LAYER | {"input_layernorm.weight"}} | {"norm.weight"}
HYDRA |= {f"heads.{k}.{n}.linear.{part}" for k in range(3) for n in range(2) for part in ("weight", "bias")}
HYDRA |= {f"heads.{k}.0.res_connection.{part}" for k in range(3) for part in ("weight", "bias")}
HYDRA |= {f"token_heads.{k}.weight" for k in range(3)}
CASES = {  # settings, engine -> architecture, names
    "eagle to vllm": (EagleConfig(window=64), "vllm", "LlamaForCausalLM", EAGLE),
    "eagle to sglang": (EagleConfig(), "sglang", "LlamaForCausalLMEagle", EAGLE | {"fc.bias"}),
    "eagle3 to vllm": (Eagle3Config(), "vllm", "LlamaForCausalLMEagle3", EAGLE_3),
    "p-eagle to vllm": (P_EAGLE_CONFIG, "vllm", "LlamaForCausalLMEagle3", P_EAGLE),
    "dspark to vllm": (DSPARK_CONFIG, "vllm", "Qwen3DSparkModel", DFLASH | MARKOV),
    "dflash to vllm": (DFLASH_CONFIG, "vllm", "DFlashDraftModel", DFLASH),
    "causal dflash to vllm": (replace(DFLASH_CONFIG, causal=True, window=64), "vllm", "DFlashDraftModel", DFLASH),
    "causal dflash to sglang": (replace(DFLASH_CONFIG, causal=True), "sglang", "DFlashDraftModel", DFLASH),
    "dflash to sglang": (DFLASH_CONFIG, "sglang", "DFlashDraftModel", DFLASH),
    "dflash to transformers": (DFLASH_CONFIG, "transformers", "MuseGlimmerAssistantModel", MUSE),
    "jakiro to vllm": (
        JakiroConfig(vocabulary=100),
        "vllm",
        OUR_ARCHITECTURES[0],
        with_experts(EAGLE) | {"draft_token_ids"},
    ),
    "jakiro with scalars to vllm": (
        WITH_SCALARS,
        "vllm",
        OUR_ARCHITECTURES[0],
        with_experts(EAGLE, "contrast_scalars"),
    ),
    "jakiro on EAGLE-3's frame to vllm": (
        ON_EAGLE_3,
        "vllm",
        OUR_ARCHITECTURES[1],
        with_experts(EAGLE_3) | {"d2t", "t2d"},
    ),
    "gumiho to vllm": (
        GumihoConfig(vocabulary=100),
        "vllm",
        "EagleGumihoForCausalLM",
        GUMIHO | {"draft_token_ids"},
    ),
    "hydra to vllm": (HydraConfig(heads=3, blocks=2), "vllm", "EagleHydraForCausalLM", HYDRA),
    "eagle3.1 to vllm": (EAGLE_3_1_CONFIG, "vllm", "LlamaForCausalLMEagle3", REDUCED | FC_NORMS),
    "eagle3 of speculators to vllm": (
        SPECULATORS_CONFIG,
        "vllm",
        "LlamaForCausalLMEagle3",
        EAGLE_3 | {"input_norm.weight"},
    ),
    "eagle3 with Qwen3's attention to vllm": (QWEN_CONFIG, "vllm", "Eagle3Qwen3ForCausalLM", EAGLE_3 | QWEN),
    "eagle3 to sglang": (Eagle3Config(vocabulary=100), "sglang", "LlamaForCausalLMEagle3", REDUCED),
    "eagle3 to speculators": (Eagle3Config(vocabulary=100), "speculators", "Eagle3Speculator", BY_LAYER),
}


@pytest.fixture(scope="module")
def deep_target(tmp_path_factory):
    """A target of eight layers, so that three auxiliary layers differ from the last."""
    folder = save_tiny_target(tmp_path_factory.mktemp("deep"), layers=8)
    return Target(TargetConfig(model=str(folder), device="cpu"), "float32"), folder


@pytest.fixture
def recipe(deep_target, tmp_path):
    return Recipe.model_validate(recipe_tree(deep_target[1], write_sharegpt(tmp_path / "data.json"), tmp_path / "run"))


@pytest.fixture
def released(recipe, deep_target, tmp_path):
    """A factory: released(settings) -> the folder of a release with random weights."""

    def factory(settings, method=None):
        target = deep_target[0]
        draft = make_draft(target, target.embed_head(fingerprint(recipe.target)), settings)
        method = method or Method(draft="jakiro", tree=settings.resolve(chain(3)))
        return write_release(tmp_path / "release", draft, recipe, "jakiro", method)

    return factory


@pytest.fixture
def imported(recipe, tmp_path):
    """A factory: imported(folder, settings) -> the draft's folder that an import of it wrote."""

    def factory(folder, settings, name="back"):
        import_recipe = with_settings(recipe, settings.to_json(), output=str(tmp_path / name))
        import_draft(folder, import_recipe, "theirs")
        return import_recipe.paths.draft("theirs")

    return factory


@pytest.mark.parametrize("case", CASES)
def test_names_and_settings_are_the_engines_and_an_import_gives_the_same_bytes(released, imported, tmp_path, case):
    settings, engine, architecture, names = CASES[case]
    release, out = released(settings), tmp_path / "out"
    lines = export(release, engine, out, "me/target")
    config, weights = json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")
    assert str(out) in lines[0] and str(out) in lines[-1]
    assert config["architectures"] == [architecture] and set(weights) == names
    layer = config.get("transformer_layer_config", config)
    layers = settings.layers if isinstance(settings, DFlashConfig | PEagleConfig) else 1
    layers = 2 if isinstance(settings, GumihoConfig) else layers
    assert (layer["num_hidden_layers"], layer["hidden_size"], layer["vocab_size"]) == (layers, 32, 260)
    assert [f"torch.{layer['torch_dtype']}"] == sorted(
        {str(x.dtype) for x in weights.values() if x.is_floating_point()}
    )
    assert layer["rope_theta"] == layer["rope_parameters"]["rope_theta"] == 10000.0 and layer["rope_scaling"] is None
    slides = {"layer_types": ["sliding_attention"] * layers, "sliding_window": 64, "use_sliding_window": True}
    window = getattr(settings, "window", None)
    if engine == "transformers":  # its default is a window
        assert layer.pop("layer_types") == ["full_attention"] * layers
    assert {key: layer.get(key) for key in slides} == (slides if window else dict.fromkeys(slides))
    if window and isinstance(settings, EagleConfig):
        assert config["target_layer_count"] == 8
    if "d2t" in weights:
        ids = torch.arange(100) + weights["d2t"]
        assert weights["t2d"].nonzero()[:, 0].tolist() == ids.tolist() == sorted(set(ids.tolist()))
        assert config["draft_vocab_size"] == len(weights["lm_head.weight"]) == 100
    if isinstance(settings, ExpertsConfig):  # what the plug-in reads
        rows = settings.experts + (2 if settings.contrast == "router" else 0)
        experts_per_token, width = settings.experts_per_token, settings.expert_width or 32
        expected = (settings.experts, experts_per_token, rows, settings.vocabulary, width)
        keys = "num_experts", "num_experts_per_tok", "gate_rows", "reduced_vocabulary", "intermediate_size"
        assert tuple(config[key] for key in keys) == expected
        levels = 1 if settings.contrast == "none" else 2
        assert (config["contrast"], config["parallel"]) == (settings.contrast, levels)
    if architecture.removeprefix("Eagle")[:6] in ("Jakiro", "Gumiho", "HydraF"):
        assert PLUG_IN in lines[1] and "vllm serve" in lines[2]
    if isinstance(settings, DFlashConfig):
        inner = config if engine == "transformers" else config["dflash_config"]
        assert (inner["mask_token_id"], inner["target_layer_ids"], config["block_size"]) == (
            259,
            [1, 5],
            settings.block,
        )
        assert engine == "transformers" or inner["causal"] is settings.causal
        assert config.get("is_causal", False) is settings.causal
        launched = {
            "vllm": f'"method": "{settings.kind}", "model": "{out}", "num_speculative_tokens": 3}}',
            "sglang": f"--speculative-algorithm DFLASH --speculative-draft-model-path {out} "
            "--speculative-num-draft-tokens 4",
            "transformers": f'assistant_model=AutoModel.from_pretrained({str(out)!r}), speculation_type="dflash"',
        }
        assert launched[engine] in lines[-1]
    if isinstance(settings, PEagleConfig):
        assert config["pard_token"] == 259 and '"method": "eagle3", "parallel_drafting": true' in lines[-1]
    if isinstance(settings, Eagle3FrameConfig):
        ids = config if engine == "speculators" else config["eagle_config"]
        assert ids["eagle_aux_hidden_state_layer_ids"] == ([1, 3, 4] if engine == "sglang" else [2, 4, 5])
        for key in ("norm_before_residual", "norm_output", "norm_before_fc", "fc_norm"):
            assert config[key] == getattr(settings, key)
        assert layer["attention_bias"] == settings.attention_bias
        assert layer["model_type"] == ("qwen3" if settings.qk_norm else "llama")
    released_weights = load_file(release / "model.safetensors")
    back = load_file(imported(out, settings_of(settings, weights)) / "model.safetensors")
    assert set(released_weights) | ({"fc.bias"} & set(weights)) == set(back)
    for name, tensor in released_weights.items():
        assert torch.equal(back[name], tensor) and back[name].dtype == tensor.dtype, name


@pytest.mark.parametrize(
    ("settings", "architecture"),
    [
        (EagleConfig(), "EaglePromptLookupForCausalLM"),
        (Eagle3Config(), "PromptLookupForCausalLMEagle3"),
        (JakiroConfig(), OUR_ARCHITECTURES[0]),
        (ON_EAGLE_3, OUR_ARCHITECTURES[1]),
        (GumihoConfig(), "EagleGumihoForCausalLM"),
    ],
)
@pytest.mark.parametrize("own", [True, False], ids=["of the release", "asked for"])
def test_vllm_looks_the_prompt_up_too(released, imported, tmp_path, settings, architecture, own):
    """The draft drafts as deep as in the release's tree. A chain has as many tokens as that tree below its root, or 8
    where the tree had no copied ones.
    """
    tree = TreeConfig(depth=3, top_k=2, nodes=7)
    method = Method(draft="jakiro", tree=settings.resolve(tree), secondary=["prompt-lookup"] if own else [])
    release, out = released(settings, method), tmp_path / "out"
    lines = export(release, "vllm", out, prompt_lookup=not own)
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == [architecture] and config["prompt_lookup"] == 3
    assert PLUG_IN in lines[1]
    assert (
        '"disable_padded_drafter_batch": true' in lines[2]
        and f'"num_speculative_tokens": {6 if own else 8}}}' in lines[2]
    )
    export(release, "vllm", tmp_path / "plain", prompt_lookup=False)
    assert ("prompt_lookup" in json.loads((tmp_path / "plain/config.json").read_text())) is own
    imported(out, settings)


@pytest.mark.parametrize(
    ("settings", "engine"), [(P_EAGLE_CONFIG, "vllm"), (QWEN_CONFIG, "vllm"), (EagleConfig(), "sglang")]
)
def test_prompt_lookup_that_an_engine_does_not_have_is_refused(released, tmp_path, settings, engine):
    with pytest.raises(PipelineError, match="has no prompt lookup for drafts of kind"):
        export(released(settings), engine, tmp_path / "out", prompt_lookup=True)
    assert not (tmp_path / "out").exists()


def test_sglang_counts_the_layers_of_gpt_oss_as_vllm_does(released, imported, tmp_path):
    """SGLang does so since its pull request 32334; the target is recognised by its config.json, or its name."""
    settings, folder = Eagle3Config(), tmp_path / "target"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt_oss"}))
    release = released(settings)
    for number, target in enumerate(("openai/gpt-oss-20b", str(folder))):
        out = tmp_path / f"out-{number}"
        export(release, "sglang", out, target)
        config = json.loads((out / "config.json").read_text())
        places = config, config["eagle_config"]
        assert [place["eagle_aux_hidden_state_layer_ids"] for place in places] == [[2, 4, 5]] * 2
        imported(out, settings, f"back-{number}")


def settings_of(settings, weights):
    """Return the settings of the imported draft: an import reads SGLang's bias as one."""
    return EagleConfig(fc_bias=True) if "fc.bias" in weights else settings


def test_medusa_is_written_as_its_authors_release_it_and_an_import_gives_the_same_bytes(released, imported, tmp_path):
    settings, out = MedusaConfig(heads=3, blocks=2), tmp_path / "out"
    release = released(settings)
    lines = export(release, "vllm", out)
    config, weights = json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")
    blocks = {f"{head}.{place}.linear.{part}" for head in range(3) for place in range(2) for part in ("weight", "bias")}
    assert set(weights) == blocks | {f"{head}.2.weight" for head in range(3)}
    assert config == {
        **{"architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": 32, "vocab_size": 260},
        **{"medusa_num_heads": 3, "medusa_num_layers": 2, "medusa_fc_bias": True},
    }
    assert '"method": "medusa"' in lines[-1] and '"num_speculative_tokens": 3' in lines[-1]
    original, back = (load_file(folder / "model.safetensors") for folder in (release, imported(out, settings)))
    assert original.keys() == back.keys() and all(torch.equal(back[name], tensor) for name, tensor in original.items())


def test_a_small_llama_is_written_as_the_language_model_that_it_is(released, tmp_path):
    """The bytes of its weights stay the same for every reader: vLLM, transformers, a recipe's kind = "small-model"."""
    release, out = released(SmallLlamaConfig(width=32, layers=3, mlp_width=48)), tmp_path / "out"
    lines = export(release, "vllm", out)
    assert '"method": "draft_model"' in lines[-1]
    original, model = load_file(release / "model.safetensors"), AutoModelForCausalLM.from_pretrained(out)
    assert type(model).__name__ == "LlamaForCausalLM"
    back = {f"lm.{name}": tensor for name, tensor in model.state_dict().items()}
    assert original.keys() == back.keys() and all(torch.equal(back[name], tensor) for name, tensor in original.items())
    draft = checkpoint.load(release, checkpoint.read_config(release).target["fingerprint"])
    tokens = torch.tensor([prompt_of(0)])
    assert torch.equal(model(tokens).logits, draft.lm(tokens).logits)


def test_transformers_own_generate_takes_a_block_draft_in_as_many_passes_as_ours(tmp_path):
    config = save(tmp_path / "target", "llama-3.1", num_hidden_layers=8)
    tree = recipe_tree(config.model, write_sharegpt(tmp_path / "data.json", 4), tmp_path / "run")
    target, prompt = Target(config, "float32"), prompt_of(3)
    embed_head, answer = target.embed_head(fingerprint(config)), greedy(target, prompt, 40)
    draft = taught(target, embed_head, DFlashConfig(layers=2, block=6, mask_token=259), prompt, answer, steps=60)
    expected = decode_speculative(target, LoadedMethod(draft, chain(5, 5)), prompt, Sampling(40, NEVER))
    method, out = Method(draft="jakiro", tree=chain(5, 5)), tmp_path / "out"
    release = write_release(tmp_path / "release", draft, Recipe.model_validate(tree), "jakiro", method)
    export(release, "transformers", out)
    assert list(list_tested_engines(release)) == ["vLLM 0.32.0", "transformers 5.23"]
    model, passes = AutoModelForCausalLM.from_pretrained(config.model), []
    model.register_forward_pre_hook(lambda *_: passes.append(1))
    ids, assistant = torch.tensor([prompt]), AutoModel.from_pretrained(out)
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 40, "do_sample": False, "eos_token_id": None}
    tokens = model.generate(ids, **settings, assistant_model=assistant, speculation_type="dflash")
    assert tokens[0].tolist() == [*prompt, *answer] == [*prompt, *expected.tokens]
    assert len(passes) == 1 + expected.acceptance.passes < 15  # the prompt's own


@pytest.mark.parametrize("engine", ["vllm", "sglang", "speculators"])
@pytest.mark.parametrize("rope", [LLAMA_3, YARN], ids=["llama3", "yarn"])
def test_scaled_rope_and_layers_that_are_no_engines_default_are_written_out(tmp_path, rope, engine):
    """`make serve-test` shows that engines read them (infra/serving/tiny.py)."""
    config = save(tmp_path / "target", "llama-3.1", rope_parameters=rope, num_hidden_layers=24)
    tree = recipe_tree(config.model, write_sharegpt(tmp_path / "data.json", 4), tmp_path / "run")
    recipe, target = Recipe.model_validate(tree), Target(config, "float32")
    draft = make_draft(target, target.embed_head(fingerprint(config)), Eagle3Config(auxiliary_layers=[1, 10, 20]))
    release = write_release(tmp_path / "release", draft, recipe, "eagle", recipe.resolve_method("eagle"))
    export(release, engine, tmp_path / "out", "me/target")
    written = json.loads((tmp_path / "out/config.json").read_text())
    layer = written.get("transformer_layer_config", written)
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    assert layer["rope_theta"] == rope["rope_theta"] and layer["rope_scaling"].items() >= scaling.items()
    assert layer["rope_parameters"].items() >= rope.items() and layer["max_position_embeddings"] == 256
    ids = [0, 9, 19] if engine == "sglang" else [1, 10, 20]
    places = [written] if engine == "speculators" else [written["eagle_config"]]
    places += [written] if engine == "vllm" else []  # llama.cpp's converter reads this one, and else its default
    assert all(place["eagle_aux_hidden_state_layer_ids"] == ids for place in places)


def test_the_embeddings_scale_is_in_fc_and_the_chain_is_the_same(released, imported, recipe, deep_target, tmp_path):
    target = deep_target[0]
    embed_head, release = target.embed_head(fingerprint(recipe.target)), released(EagleConfig(embedding_scale=10.0))
    export(release, "vllm", tmp_path / "out")
    original, exported = (
        load_file(folder / "model.safetensors")["fc.weight"] for folder in (release, tmp_path / "out")
    )
    assert torch.equal(exported[:, :32], 10 * original[:, :32]) and torch.equal(exported[:, 32:], original[:, 32:])
    folders = release, imported(tmp_path / "out", EagleConfig())
    for tree in ({"depth": 3, "top_k": 1, "nodes": 4}, {"depth": 3, "top_k": 4, "nodes": 12}):
        results = []
        for folder in folders:
            draft = checkpoint.load(folder, embed_head.fingerprint)
            draft.bind(embed_head)
            method = LoadedMethod(draft, checkpoint.TreeConfig(**tree))
            results.append(decode_speculative(target, method, prompt_of(0), Sampling(24, NEVER)))
        assert results[0].acceptance == results[1].acceptance
        assert results[1].tokens == decode_plain(target, prompt_of(0), Sampling(24, NEVER)).tokens


@pytest.mark.parametrize(
    ("settings", "engine", "message"),
    [
        (JakiroConfig(), "sglang", "sglang cannot load drafts of kind jakiro: export to vllm"),
        (JakiroConfig(), "gguf", "gguf cannot load drafts of kind jakiro: export to vllm"),
        (EagleConfig(), "gguf", "gguf cannot load drafts of kind eagle: export to vllm or sglang"),
        (Eagle3Config(norm_output=True), "gguf", "llama.cpp has no EAGLE-3.1"),
        (Eagle3Config(fc_norm=True), "gguf", "llama.cpp has no EAGLE-3.1"),
        (Eagle3Config(), "gguf", "add --llama-cpp CHECKOUT"),
        (EagleConfig(fc_bias=True), "vllm", "vLLM has no bias there"),
        (EagleConfig(), "speculators", "speculators cannot load drafts of kind eagle: export to vllm or sglang"),
        (Eagle3Config(auxiliary_layers=[1, 2]), "vllm", "engines fuse 3 layers"),
        (Eagle3Config(auxiliary_layers=[1, 2, 8]), "vllm", "none follows layer 8"),
        (Eagle3Config(norm_before_residual=True), "sglang", "SGLang adds the plain feature"),
        (Eagle3Config(norm_before_fc=True), "sglang", "norm_before_fc=True: sglang has no such draft"),
        (Eagle3Config(attention_bias=True), "sglang", "attention_bias=True: sglang has no such draft"),
        (Eagle3Config(qk_norm=True), "gguf", "qk_norm=True: gguf has no such draft"),
        (Eagle3Config(window=64), "gguf", "window=64: gguf has no such draft"),
        (EagleConfig(window=64), "sglang", "window=64: sglang has no such draft"),
        (JakiroOnEagle3Config(frame="eagle-3", contrast="none", qk_norm=True), "vllm", "Llama's attention"),
        (Eagle3Config(norm_before_fc=True), "gguf", "add --llama-cpp CHECKOUT"),
        (Eagle3Config(), "speculators", "give --target OWNER/NAME"),
        (DFlashConfig(), "speculators", "speculators cannot load drafts of kind dflash: export to vllm"),
        (
            Eagle3Config(),
            "transformers",
            r"transformers cannot load drafts of kind eagle3: its generate\(\) takes the release",
        ),
        (DFlashConfig(window=64), "sglang", "window=64: sglang has no such draft"),
        (DFlashConfig(causal=True), "transformers", "causal=True: transformers has no such draft"),
        (DSparkConfig(rank=4), "sglang", "sglang cannot load drafts of kind dspark: export to vllm"),
        (DSparkConfig(rank=4, vocabulary=100), "vllm", "vocabulary=100: vLLM requires the target's full vocabulary"),
        (PEagleConfig(), "sglang", "sglang cannot load drafts of kind p-eagle: export to vllm"),
        (MedusaConfig(), "sglang", "sglang cannot load drafts of kind medusa: export to vllm"),
        (
            SmallLlamaConfig(width=32, vocabulary=100),
            "vllm",
            "vocabulary=100: vLLM requires the target's full vocabulary",
        ),
        (MedusaConfig(own_head=False), "vllm", "own_head=False: vLLM's heads are their own"),
        (HydraConfig(prefix=False), "vllm", "prefix=false: vLLM requires a draft with a layer of attention"),
        (HydraConfig(vocabulary=100), "vllm", "vocabulary=100: vLLM requires the target's full vocabulary"),
        (GumihoConfig(fc_bias=True), "vllm", "vLLM has no bias there"),
    ],
)
def test_what_an_engine_cannot_take_is_refused_and_nothing_is_written(released, tmp_path, settings, engine, message):
    with pytest.raises(PipelineError, match=message):
        export(released(settings), engine, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command_writes_a_new_folder_only_and_of_whole_weights(released, tmp_path, capsys):
    release, out = released(EagleConfig()), tmp_path / "out"
    arguments = ["export", str(release), "--to", "vllm", "--out", str(out)]
    call(main, *arguments)
    assert '"method": "eagle"' in capsys.readouterr().out
    before = (out / "model.safetensors").read_bytes()
    with pytest.raises(PipelineError, match="exists already"):
        call(main, *arguments)
    assert (out / "model.safetensors").read_bytes() == before
    flip(release / "model.safetensors")
    with pytest.raises(PipelineError, match=r"not the file that config\.json describes"):
        call(main, *arguments[:-1], str(tmp_path / "other"))
    assert not (tmp_path / "other").exists()


CONVERTER = """
import argparse, json, pathlib, sys
parser = argparse.ArgumentParser()
for name in ("--outfile", "--outtype", "--target-model-dir"):
    parser.add_argument(name)
parser.add_argument("model", type=pathlib.Path)
arguments = parser.parse_args()
assert (pathlib.Path(arguments.target_model_dir) / "config.json").is_file()
if json.loads((arguments.model / "config.json").read_text())["norm_before_residual"]:
    sys.exit("a converter's own words")
names = sorted(path.name for path in arguments.model.iterdir())
pathlib.Path(arguments.outfile).write_text(" ".join([arguments.outtype, *names]))
"""


@pytest.fixture
def llama_cpp(tmp_path):
    """A checkout with a converter that only writes down its arguments."""
    folder = tmp_path / "llama.cpp"
    folder.mkdir()
    (folder / "convert_hf_to_gguf.py").write_text(CONVERTER)
    return folder


def test_gguf_is_what_llama_cpps_converter_makes_of_it(released, deep_target, llama_cpp, tmp_path):
    out = tmp_path / "out"
    lines = export(released(Eagle3Config(vocabulary=100)), "gguf", out, str(deep_target[1]), llama_cpp)
    assert (out / "draft.gguf").read_text() == "f32 config.json model.safetensors"
    assert [path.name for path in out.iterdir()] == ["draft.gguf"] and "--spec-type draft-eagle3" in lines[-1]
    assert not list(tmp_path.glob(".out*"))


def test_a_converter_that_fails_is_told_and_leaves_nothing(released, deep_target, llama_cpp, tmp_path):
    release, target = released(Eagle3Config(norm_before_residual=True)), str(deep_target[1])
    for target_name, converter, complaint in (
        (target, llama_cpp, "a converter's own words"),
        (target, tmp_path, r"holds no convert_hf_to_gguf\.py"),
        (None, llama_cpp, "pass target=FOLDER"),
        ("me/target", llama_cpp, "no folder on this machine"),
    ):
        with pytest.raises(PipelineError, match=complaint):
            export(release, "gguf", tmp_path / "out", target_name, converter)
    assert not list(tmp_path.glob("*out*")) and not list(tmp_path.glob(".out*"))
