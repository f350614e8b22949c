"""MTP heads of many families, tiny and random: read out of the target's files, trained, decoded, written back."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashMLA, LongcatFlashMLP

from eval.measure.tasks import load_drafts
from pipeline.artifacts import checkpoint
from pipeline.artifacts.features import feature_spec
from pipeline.artifacts.imported import import_draft
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import sha256
from pipeline.decoding.config import LoadedMethod, Method, TreeConfig, chain
from pipeline.decoding.generate import Sampling, decode_plain, decode_speculative
from pipeline.decoding.replay import count_acceptance
from pipeline.drafts import build, make_objective
from pipeline.drafts.native.families import HEADS, to_file_names
from pipeline.drafts.native.files import read_head
from pipeline.drafts.native.mtp import Mtp, MtpConfig
from pipeline.drafts.parts.layers import draft_shapes
from pipeline.features.batch import collate, collate_packed
from pipeline.features.positions import count_positions
from pipeline.features.schema import TextRow
from pipeline.features.shards import FeatureStore
from pipeline.lm.attention import additive_mask, causal_mask
from pipeline.lm.config import TargetConfig
from pipeline.lm.model import Target, fingerprint, load_embed_head
from pipeline.recipe.load import load_recipe
from pipeline.recipe.recipe import Recipe
from pipeline.serving.export import export
from tests.kit import ROOT, change_sealed, dump_here, recipe_tree, save_tiny_target, write_recipe, write_sharegpt
from tests.pipeline.families import MIXTURE
from tests.pipeline.heads import WEIGHTS, add_tensors, change_json, save_with_head
from tests.pipeline.taught import NEVER, prompt_of, teach, write_release
from tests.train.runs import train_here
from train.start import new_draft, read_start

SETTINGS = {
    "hy_v3": MIXTURE,
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 1, "moe_layer_end_index": 1},
}
PROMPT, ANSWER = prompt_of(0), 40
NORMS = "input_layernorm.weight post_attention_layernorm.weight"
MLP = "mlp.gate_proj.weight mlp.up_proj.weight mlp.down_proj.weight"
EXPERTS = " ".join(f"mlp.experts.N.{name}_proj.weight" for name in ("gate", "up", "down"))
SHARED = EXPERTS.replace("experts.N", "shared_experts")
ROUTER = "mlp.gate.weight mlp.gate.e_score_correction_bias"
HEADS_OF_ATTENTION = " ".join(f"self_attn.{name}_proj.weight" for name in "qkvo")
BIASES = " ".join(f"self_attn.{name}_proj.bias" for name in "qkv")
QK_NORMS = "self_attn.q_norm.weight self_attn.k_norm.weight"
LATENT = "q_a_proj q_a_layernorm q_b_proj kv_a_proj_with_mqa kv_a_layernorm kv_b_proj o_proj"
LATENT = " ".join(f"self_attn.{name}.weight" for name in LATENT.split())
INDEXER = "k_norm.bias k_norm.weight weights_proj.weight wk.weight wq_b.weight"
INDEXER = " ".join(f"self_attn.indexer.{name}" for name in INDEXER.split())
JOINT = "enorm.weight hnorm.weight eh_proj.weight"
QWEN = "fc.weight pre_fc_norm_embedding.weight pre_fc_norm_hidden.weight norm.weight"
QWEN_EXPERTS = f"{EXPERTS} mlp.gate.weight mlp.shared_expert_gate.weight {SHARED.replace('experts', 'expert')}"
DEEPSEEK_NAMES = f"{JOINT} shared_head.norm.weight {NORMS} {LATENT} {EXPERTS} {SHARED} {ROUTER}"
# What precedes the names in the files, the names outside of the layer, and those in it: those of vLLM 0.32's loaders,
# for targets of two layers (bailing_hybrid has four).
IN_FILES = {
    "deepseek_v3": ("model.layers.2.", "", "", DEEPSEEK_NAMES),
    "deepseek_v32": ("model.layers.2.", "", "", f"{DEEPSEEK_NAMES} {INDEXER}"),
    "glm4_moe": (
        *("model.layers.2.", "", ""),
        f"{JOINT} shared_head.norm.weight {NORMS} {HEADS_OF_ATTENTION} {EXPERTS} {SHARED} {ROUTER}",
    ),
    "glm4_moe_lite": ("model.layers.2.", "", "", DEEPSEEK_NAMES),
    "glm_moe_dsa": ("model.layers.2.", "", "", f"{DEEPSEEK_NAMES} {INDEXER}"),
    "ernie4_5_moe": (
        *("model.", "mtp_emb_norm.0.weight mtp_hidden_norm.0.weight mtp_linear_proj.0.weight"),
        *("mtp_block.0.", f"{NORMS} {HEADS_OF_ATTENTION} {MLP}"),
    ),
    "longcat_flash": (
        *("model.mtp.", "norm.weight", "layers.0."),
        f"enorm.m.weight hnorm.m.weight eh_proj.weight {NORMS} {LATENT} {MLP.replace('mlp', 'transformer_layer.mlp')}",
    ),
    "hy_v3": (
        *("model.layers.2.", "", "", f"{JOINT} final_layernorm.weight {NORMS} {HEADS_OF_ATTENTION} {QK_NORMS} "),
        f"{EXPERTS} {EXPERTS.replace('experts.N', 'shared_mlp')} mlp.router.gate.weight mlp.expert_bias",
    ),
    "bailing_hybrid": (
        *("model.layers.4.", "", "", f"{JOINT} final_layernorm.weight {NORMS} {EXPERTS} {SHARED} mlp.gate.weight "),
        "mlp.gate.expert_bias "
        + " ".join(
            f"attention.{name}.weight"
            for name in ["q_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "g_proj", "dense"]
        ),
    ),
    "qwen3_next": ("mtp.", QWEN, "layers.0.", f"{NORMS} {HEADS_OF_ATTENTION} {QK_NORMS} {QWEN_EXPERTS}"),
    "qwen3_5_text": ("mtp.", QWEN, "layers.0.", f"{NORMS} {HEADS_OF_ATTENTION} {QK_NORMS} {MLP}"),
    "qwen3_5_moe_text": ("mtp.", QWEN, "layers.0.", f"{NORMS} {HEADS_OF_ATTENTION} {QK_NORMS} {QWEN_EXPERTS}"),
    "mimo": (
        *("model.mtp_layers.0.", "", "", f"{NORMS} {HEADS_OF_ATTENTION} {BIASES} {MLP} input_proj.weight "),
        "token_layernorm.weight hidden_layernorm.weight final_layernorm.weight",
    ),
}


def load_head(config: TargetConfig, settings: MtpConfig) -> tuple[Target, Mtp]:
    target = Target(config, "float32")
    draft = build(settings, draft_shapes(target.config))
    assert isinstance(draft, Mtp)
    draft.bind(target.embed_head(fingerprint(config)))
    read_head(draft, config)
    return target, draft


FAMILIES = [*HEADS, "qwen3_5"]  # the last one as it is downloaded, within its multimodal model
# Their attention and MLP are those of other families.
LONG = ["glm_moe_dsa", "qwen3_5_text", "qwen3_5_moe_text"]


@pytest.mark.parametrize("family", [pytest.param(x, marks=[pytest.mark.long] * (x in LONG)) for x in FAMILIES])
def test_a_head_is_read_trained_and_decodes_losslessly(tmp_path, family):
    config, saved = save_with_head(tmp_path, family, **SETTINGS.get(family, {}))
    target, draft = load_head(config, saved.config)
    weights = draft.state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in saved.state_dict().items())

    sampling = Sampling(ANSWER, NEVER)
    answer = decode_plain(target, PROMPT, sampling).tokens
    guesses = LoadedMethod(teach(draft, target, PROMPT, answer), chain(3))
    decoded = decode_speculative(target, guesses, PROMPT, sampling)
    states = target.states([*PROMPT, *answer], draft.needs.auxiliary)
    estimate = count_acceptance(guesses, states, [*PROMPT, *answer], len(PROMPT))

    assert decoded.tokens == answer
    assert decoded.acceptance.tau > 2, "it learns the answer"
    assert (estimate.passes, estimate.tokens) == (decoded.acceptance.passes, decoded.acceptance.tokens)
    if target.verifies == "tree":
        tree = LoadedMethod(draft, draft.config.resolve(TreeConfig(depth=3, top_k=3, nodes=12)))
        assert decode_speculative(target, tree, PROMPT, sampling).tokens == answer


@pytest.mark.parametrize("family", HEADS)
def test_the_names_in_the_files_are_those_that_engines_read(tmp_path, family):
    _, saved = save_with_head(tmp_path, family, **SETTINGS.get(family, {}))
    form = saved.form.names_in_files(saved.shapes["target_layers"])
    names = {
        re.sub(r"experts\.\d+", "experts.N", name) for name in to_file_names(saved.decoder, form, saved.state_dict())
    }
    root, outside, layer, *inside = IN_FILES[family]
    expected = {root + name for name in outside.split()} | {root + layer + name for name in "".join(inside).split()}
    assert names == expected
    assert {re.sub(r"experts\.\d+", "experts.N", name) for name in load_file(tmp_path / WEIGHTS)} >= names


@pytest.mark.parametrize("family", ["glm4_moe", "mimo"])
def test_a_head_has_the_targets_own_head_width(tmp_path, family):
    """Also where the width is not the hidden size over the heads, and the configuration does not declare it."""
    config, saved = save_with_head(tmp_path, family, head_dim=32)
    own_layer = dict(Target(config, "float32").decoder.layers[1].named_parameters())
    for name, tensor in saved.decoder.layers[0].named_parameters():
        assert tensor.shape == own_layer[name].shape, name


@pytest.mark.parametrize("family", ["bailing_hybrid", "deepseek_v3", "qwen3_next", "hy_v3"])
def test_a_heads_experts_are_as_many_as_the_targets(tmp_path, family):
    config, saved = save_with_head(tmp_path, family, **SETTINGS.get(family, {}))
    own_layer = dict(Target(config, "float32", verify=False).decoder.layers[-1].named_parameters())
    experts = {name: tensor.shape for name, tensor in saved.decoder.layers[0].named_parameters() if "experts" in name}
    assert experts == {name: own_layer[name].shape for name in experts}
    settings, text = saved.decoder.config, Target(config, "float32", verify=False).config
    for key in ("num_experts_per_tok", "n_group", "norm_topk_prob", "routed_scaling_factor", "rms_norm_eps"):
        assert not hasattr(settings, key) or getattr(settings, key) == getattr(text, key), key


def test_a_router_keeps_its_bias_in_float32(tmp_path):
    """In a bfloat16 target: experts are chosen by small differences of large numbers."""
    folder = tmp_path / "target"
    config, saved = save_with_head(folder, "deepseek_v3")
    bias = torch.tensor([8.031, 8.02, 8.04, 8.01])
    halves = {name: tensor.bfloat16() for name, tensor in load_file(folder / WEIGHTS).items()}
    key = "model.layers.2.mlp.gate.e_score_correction_bias"
    add_tensors(folder, halves | {key: bias})
    _, draft = load_head(config, saved.config)
    cast = draft.to(torch.bfloat16)
    assert {tensor.dtype for tensor in cast.parameters()} == {torch.bfloat16}
    form = draft.form.names_in_files(2)
    written = to_file_names(cast.decoder, form, cast.state_dict())
    assert torch.equal(written[key], bias)
    assert all(torch.equal(tensor, halves[name]) for name, tensor in written.items() if name != key)


def test_experts_that_the_files_hold_as_one_tensor_are_read_and_written_so(tmp_path):
    config, saved = save_with_head(tmp_path, "qwen3_5_moe_text")
    form, experts = saved.form.names_in_files(4), "mtp.layers.0.mlp.experts."
    joint = to_file_names(saved.decoder, form, saved.state_dict(), [f"{experts}gate_up_proj"])
    add_tensors(tmp_path, joint, without=(experts,))
    _, draft = load_head(config, saved.config)
    assert all(torch.equal(tensor, draft.state_dict()[name]) for name, tensor in saved.state_dict().items())
    assert {name for name in joint if "experts." in name} == {f"{experts}gate_up_proj", f"{experts}down_proj"}


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32", "qwen3_5_text"])
def test_packed_rows_and_recomputed_activations_change_no_loss_and_no_gradient(tmp_path, family):
    config, saved = save_with_head(tmp_path, family)
    target, draft = load_head(config, saved.config)
    objective = make_objective(draft.config)
    rows = []
    for number, length in enumerate((9, 14)):
        tokens = torch.tensor(prompt_of(number, length))
        mask = (torch.arange(length) >= 3).to(torch.uint8)
        states_TD = target.capture(tokens[None])[0].clone()
        rows.append(TextRow("", tokens.int().numpy(), mask.numpy(), states_TD, states_TD[:, :0]))
    positions = [objective.positions(row.input_ids, row.loss_mask) for row in rows]
    totals = count_positions(positions)
    apart, packed = collate(rows, objective, totals), collate_packed([rows], iter(positions), totals)

    def loss_and_gradient(batch, recompute: bool) -> tuple[torch.Tensor, torch.Tensor]:
        draft.zero_grad()
        draft.recompute = recompute
        loss, _ = objective.loss(draft, batch)
        loss.backward()
        return loss.detach(), draft.eh_proj.weight.grad.clone()

    expected_loss, expected_gradient = loss_and_gradient(apart, False)
    for batch, recompute in ((apart, True), (packed, False), (packed, True)):
        loss, gradient = loss_and_gradient(batch, recompute)
        assert torch.allclose(loss, expected_loss, rtol=1e-5)
        assert torch.allclose(gradient, expected_gradient, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_a_step_is_that_of_transformers_own_mtp_model(tmp_path, family):
    """Of which vLLM differs in two ways: the first embedding is 0, and GLM's next state is not normed."""
    config, saved = save_with_head(tmp_path, family)
    target, draft = load_head(config, saved.config)
    model = target.model
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{target.config.num_hidden_layers}\..*"]
    theirs = MtpModel.from_pretrained(model).eval()
    tokens = torch.tensor([PROMPT])
    states_BTD = target.capture(tokens[:, :-1])
    positions = torch.arange(1, tokens.shape[1])[None]

    with torch.inference_mode():
        expected = theirs.forward_layer(0, states_BTD, positions, None, input_ids=tokens[:, 1:])
        computed = draft.head_input(draft.trunk(states_BTD, tokens[:, 1:], positions, None, None))

    assert torch.allclose(computed, expected, atol=1e-5)
    with torch.inference_mode():
        first = draft.trunk(states_BTD, tokens[:, 1:], positions - 1, None, None)
    differs = not torch.allclose(draft.head_input(first), expected, atol=1e-3)
    assert differs == draft.form.zeroes_first, "positions are relative; only the embedding at position 0 is not"


@torch.inference_mode()
def test_a_step_of_qwens_head_by_hand(tmp_path):
    """Of vLLM's qwen3_5_mtp.py: norms multiply by 1 + w, and a gate of the queries' size scales the attention."""
    config, saved = save_with_head(tmp_path, "qwen3_5_text")
    target, draft = load_head(config, saved.config)
    text, tensors = target.config, load_file(tmp_path / WEIGHTS)
    heads, groups, width = text.num_attention_heads, text.num_key_value_heads, text.head_dim
    tokens, count = torch.tensor(PROMPT), len(PROMPT) - 1
    states_TD = target.capture(tokens[None, :-1])[0]

    def weight(name: str) -> torch.Tensor:
        return tensors[f"mtp.{name}.weight"]

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + text.rms_norm_eps) * (1 + weight(name))

    def rotate(x_THW: torch.Tensor) -> torch.Tensor:
        rotated = int(width * text.rope_parameters["partial_rotary_factor"])
        frequencies = text.rope_parameters["rope_theta"] ** -(torch.arange(0, rotated, 2) / rotated)
        angles = (torch.arange(count)[:, None] * frequencies)[:, None]
        a, b, rest = x_THW.split([rotated // 2, rotated // 2, width - rotated], dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)

    embedded_TD = target.embedding_VD[tokens[1:]]
    halves = [norm(embedded_TD, "pre_fc_norm_embedding"), norm(states_TD, "pre_fc_norm_hidden")]
    x_TD = torch.cat(halves, dim=-1) @ weight("fc").T
    y_TD, layer = norm(x_TD, "layers.0.input_layernorm"), "layers.0.self_attn."
    query, gate = (y_TD @ weight(f"{layer}q_proj").T).view(count, heads, 2 * width).chunk(2, dim=-1)
    key, value = ((y_TD @ weight(f"{layer}{name}_proj").T).view(count, groups, width) for name in "kv")
    query, key = rotate(norm(query, f"{layer}q_norm")), rotate(norm(key, f"{layer}k_norm"))
    key, value = (x.repeat_interleave(heads // groups, dim=1) for x in (key, value))
    scores = torch.einsum("thw,shw->hts", query, key) * width**-0.5
    scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), -torch.inf)
    attended = torch.einsum("hts,shw->thw", scores.softmax(-1), value) * gate.sigmoid()
    x_TD = x_TD + attended.reshape(count, -1) @ weight(f"{layer}o_proj").T
    y_TD = norm(x_TD, "layers.0.post_attention_layernorm")
    inner = F.silu(y_TD @ weight("layers.0.mlp.gate_proj").T) * (y_TD @ weight("layers.0.mlp.up_proj").T)
    expected_TD = norm(x_TD + inner @ weight("layers.0.mlp.down_proj").T, "norm")

    u = draft.trunk(states_TD[None], tokens[None, 1:], torch.arange(count)[None], None, None)
    assert torch.allclose(draft.head_input(u)[0], expected_TD, atol=2e-5)


def test_training_begins_with_the_targets_head_and_evaluation_takes_it_as_it_is(tmp_path):
    """Of MiMo's family, whose head reads states before the final norm: the dump stores them."""
    folder = tmp_path / "target"
    config, saved = save_with_head(folder, "mimo")
    tree = recipe_tree(folder, write_sharegpt(tmp_path / "data.json"), tmp_path / "run")
    mtp = {"kind": "mtp", "before_norm": True}
    tree["draft"] = {"mtp": mtp, "as-it-is": mtp | {"trained": False}}
    tree["publish"]["draft"], tree["train"]["dtype"] = "mtp", "float32"
    path = write_recipe(tree, tmp_path / "recipe")
    recipe = load_recipe(path)
    dump_here(recipe)
    trained = tmp_path / "trained"
    train_here((path, recipe.paths.features), trained, draft="mtp")

    recipe = load_recipe(path, [f"output={trained}"])
    facts = checkpoint.read_config(recipe.paths.draft("mtp")).training
    lines = [json.loads(line) for line in (recipe.paths.draft("mtp") / checkpoint.METRICS).read_text().splitlines()]
    first, *_, last = [line for line in lines if line["kind"] == "validation"]
    assert first["step"] == 0 and last["loss"] < first["loss"]
    assert facts["initial"]["estimated_tau"] == round(first["estimated_tau"], 5)
    assert "start" not in facts

    drafts = load_drafts(recipe, Target(config, "float32"), ["as-it-is", "mtp"])
    as_it_is, after = (drafts[name].state_dict() for name in ("as-it-is", "mtp"))
    assert all(torch.equal(tensor, as_it_is[name]) for name, tensor in saved.state_dict().items())
    assert not torch.equal(as_it_is["eh_proj.weight"], after["eh_proj.weight"])


@torch.inference_mode()
def test_a_step_of_longcats_head_with_longcats_own_attention(tmp_path):
    """Its layer has one attention and one dense MLP, where the target's layers have two of each."""
    config, saved = save_with_head(tmp_path, "longcat_flash")
    target, draft = load_head(config, saved.config)
    assert saved.decoder.config.intermediate_size == target.config.ffn_hidden_size
    attention, layer = LongcatFlashMLA(target.decoder.config, 0), draft.decoder.layers[0]
    attention.load_state_dict(layer.self_attn.state_dict())
    mlp = LongcatFlashMLP(target.config, target.config.ffn_hidden_size)
    mlp.load_state_dict(layer.mlp.state_dict())
    tokens, count = torch.tensor([PROMPT]), len(PROMPT) - 1
    states_BTD, positions = target.capture(tokens[:, :-1]), torch.arange(count)[None]
    embedded_BTD = target.embedding_VD[tokens[:, 1:]]
    x_BTD = draft.eh_proj(torch.cat([draft.enorm(embedded_BTD), draft.hnorm(states_BTD)], dim=-1))
    mask = additive_mask(causal_mask(0, count, x_BTD.device), torch.float32)[None, None]
    rope = target.decoder.rotary_emb(x_BTD, positions)
    x_BTD = x_BTD + attention(layer.input_layernorm(x_BTD), position_embeddings=rope, attention_mask=mask)[0]
    x_BTD = x_BTD + mlp(layer.post_attention_layernorm(x_BTD))
    u = draft.trunk(states_BTD, tokens[:, 1:], positions, None, None)
    assert torch.allclose(u, x_BTD, atol=1e-5)


def test_the_page_lists_every_family():
    page = (ROOT / "docs/your-own-target.md").read_text()
    table = page.partition("| family (`model_type`) |")[2].partition("\n\n")[0]
    listed = [re.sub(r"\(.*\)", "", row.split("|")[1]) for row in table.splitlines()[2:]]
    assert sorted(name.strip() for names in listed for name in names.split(",")) == sorted(HEADS)


def release_of(folder, family):
    """Return a target, its head as it is, and the head's release."""
    config, saved = save_with_head(folder / "target", family)
    _, draft = load_head(config, saved.config)
    draft.requires_grad_(False)
    tree = recipe_tree(folder / "target", write_sharegpt(folder / "data.json"), folder / "run")
    tree["draft"] = {"mtp": {"kind": "mtp", "before_norm": saved.config.before_norm}}
    tree["publish"]["draft"] = "mtp"
    write_release(folder / "release", draft, Recipe.model_validate(tree), "mtp", Method(draft="mtp", tree=chain(3)))
    return config, draft, folder / "release"


def test_the_steps_weights_fall_and_sum_to_one():
    terms = MtpConfig(ttt_steps=3, decay=0.5).terms(0)
    assert [term.weights["classification"] for term in terms] == [4 / 7, 2 / 7, 1 / 7]


@pytest.mark.parametrize("family", ["mimo", "qwen3_next", "deepseek_v3"])
def test_a_release_is_written_into_the_targets_files_and_back(tmp_path, family):
    """Untrained, the same tensors; trained, only the head's differ."""
    _, draft, release = release_of(tmp_path, family)
    folder, out = tmp_path / "target", tmp_path / "out"
    (folder / ".cache").mkdir()
    lines = export(release, "vllm", out, str(folder))
    assert lines[-1] == (
        f"vllm serve {out} --speculative-config '" + json.dumps({"method": "mtp", "num_speculative_tokens": 3}) + "'"
    )
    original, written = load_file(folder / WEIGHTS), load_file(out / WEIGHTS)
    assert written.keys() == original.keys()
    assert all(torch.equal(tensor, written[name]) for name, tensor in original.items())
    assert {path.name for path in out.iterdir()} == {path.name for path in folder.iterdir() if path.is_file()}
    assert all(path.is_symlink() for path in out.iterdir() if path.name != WEIGHTS)

    for parameter in draft.parameters():
        parameter.add_(1.0)
    checkpoint.write_weights(release / WEIGHTS, draft.state_dict())
    change_sealed(release / checkpoint.CONFIG, lambda raw: raw.update(weights_sha256=sha256(release / WEIGHTS)))
    export(release, "vllm", tmp_path / "trained", str(folder))
    after, form = load_file(tmp_path / "trained" / WEIGHTS), draft.form.names_in_files(draft.shapes["target_layers"])
    head = to_file_names(draft.decoder, form, draft.state_dict())
    assert {name for name in original if not torch.equal(original[name], after[name])} <= head.keys()
    _, again = load_head(TargetConfig(model=str(tmp_path / "trained"), device="cpu"), draft.config)
    assert all(torch.equal(tensor, draft.state_dict()[name]) for name, tensor in again.state_dict().items())
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "trained") is not None


def test_of_a_sharded_target_only_the_heads_shards_are_written(tmp_path):
    config, draft, release = release_of(tmp_path, "deepseek_v3")
    folder = tmp_path / "target"
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(folder / WEIGHTS).items()}
    names = sorted(tensors)
    shards = {f"model-{n + 1:05}-of-00003.safetensors": names[n::3] for n in range(2)}
    head = [name for name in names if name.startswith("model.layers.2.")]
    shards = {name: [key for key in keys if key not in head] for name, keys in shards.items()}
    rest = [key for key in names if key not in {k for keys in shards.values() for k in keys}]
    shards["model-00003-of-00003.safetensors"] = rest
    for name, keys in shards.items():
        save_file({key: tensors[key] for key in keys}, folder / name, metadata={"format": "pt"})
    (folder / WEIGHTS).unlink()
    index = {"metadata": {}, "weight_map": {key: name for name, keys in shards.items() for key in keys}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    _, draft = load_head(config, draft.config)
    draft.requires_grad_(False)
    checkpoint.write_weights(release / WEIGHTS, draft.state_dict())
    change_sealed(
        release / checkpoint.CONFIG,
        lambda raw: (
            raw.update(weights_sha256=sha256(release / WEIGHTS)),
            raw["target"].update(fingerprint=fingerprint(config)),
        ),
    )
    export(release, "vllm", tmp_path / "out", str(folder))
    assert [path.name for path in sorted((tmp_path / "out").glob("*.safetensors")) if not path.is_symlink()] == [
        "model-00003-of-00003.safetensors"
    ]
    written = load_file(tmp_path / "out" / "model-00003-of-00003.safetensors")
    assert all(
        torch.equal(tensor, tensors[name]) and tensor.dtype == torch.bfloat16 for name, tensor in written.items()
    )
    assert (tmp_path / "out" / "model.safetensors.index.json").is_symlink()


def test_a_released_head_is_loaded_by_its_own_settings(tmp_path):
    config, draft, release = release_of(tmp_path, "deepseek_v3")
    loaded = checkpoint.load(release, fingerprint(config))
    assert all(torch.equal(tensor, draft.state_dict()[name]) for name, tensor in loaded.state_dict().items())
    assert checkpoint.read_config(release).borrowed == ["embedding", "head"]


# -- bad input ---------------------------------------------------------------------------------------------------------


def refusal(config: TargetConfig, settings: MtpConfig) -> str:
    with pytest.raises(PipelineError) as caught:
        load_head(config, settings)
    return str(caught.value)


def test_a_target_of_an_unknown_family_is_refused(tmp_path):
    message = refusal(TargetConfig(model=str(save_tiny_target(tmp_path)), device="cpu"), MtpConfig())
    assert "no names of one are known for this target's family" in message
    assert "qwen3_next" in message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1e9}}, "at most 1"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "expected one of"),
        ({"rope_parameters": "default"}, "expected an object"),
        ({"hidden_size": [1] * 5000}, "layer.settings.hidden_size"),
        ({"n_routed_experts": 1 << 40}, "does not fit|layer.settings"),
        ({"hidden_act": "exec"}, "exec"),
    ],
)
def test_a_strangers_layer_computes_nothing_else(tmp_path, changes, message):
    """Of its keys only those of one layer with full attention count; the others are bounded."""
    config, _, release = release_of(tmp_path, "deepseek_v3")
    change_sealed(release / checkpoint.CONFIG, lambda raw: raw["shapes"]["layer"]["settings"].update(changes))
    with pytest.raises(PipelineError, match=message):
        checkpoint.load(release, fingerprint(config))


def test_a_strangers_layer_is_one_layer_with_full_attention(tmp_path):
    config, draft, release = release_of(tmp_path, "qwen3_next")
    many = {"num_hidden_layers": 3000, "layer_types": ["linear_attention"] * 1000, "vocab_size": 1 << 40}
    many |= {"_attn_implementation": "kernels-community/x", "auto_map": {"AutoModel": "x.Y"}}
    change_sealed(release / checkpoint.CONFIG, lambda raw: raw["shapes"]["layer"]["settings"].update(many))
    loaded = checkpoint.load(release, fingerprint(config))
    assert all(torch.equal(tensor, draft.state_dict()[name]) for name, tensor in loaded.state_dict().items())
    assert loaded.decoder.config.layer_types == ["full_attention"]
    assert loaded.decoder.config._attn_implementation == draft.decoder.config._attn_implementation


def test_a_vocabulary_without_training_is_refused():
    with pytest.raises(ValueError, match="vocabulary is chosen in training"):
        MtpConfig(trained=False, vocabulary=64)


def test_files_without_a_head_with_half_of_one_and_with_two_are_refused(tmp_path):
    config, saved = save_with_head(tmp_path, "deepseek_v3")
    head = {name: tensor for name, tensor in load_file(tmp_path / WEIGHTS).items() if ".layers.2." in name}

    second = {name.replace(".layers.2.", ".layers.3."): tensor for name, tensor in head.items()}
    add_tensors(tmp_path, second)
    assert "has several MTP layers (model.layers.3.*)" in refusal(config, saved.config)

    add_tensors(tmp_path, {}, without=("model.layers.3.", "model.layers.2.self_attn.o_proj"))
    message = refusal(config, saved.config)
    assert "its MTP head is incomplete or quantised: the files lack model.layers.2.self_attn.o_proj.weight" in message

    add_tensors(tmp_path, {}, without=("model.layers.2.",))
    assert "comes without an MTP head" in refusal(config, saved.config)


def test_a_quantised_head_and_one_with_its_own_output_layer_are_refused(tmp_path):
    config, saved = save_with_head(tmp_path, "deepseek_v3")
    copies = load_file(tmp_path / WEIGHTS)
    add_tensors(tmp_path, {"model.layers.2.shared_head.head.weight": copies["lm_head.weight"]})
    load_head(config, saved.config)  # a copy of the target's is what these files usually hold
    add_tensors(tmp_path, {"model.layers.2.shared_head.head.weight": copies["lm_head.weight"] + 1})
    assert "model.layers.2.shared_head.head.weight differs from lm_head.weight" in refusal(config, saved.config)
    add_tensors(tmp_path, {}, without=("model.layers.2.shared_head.head",))
    weights = load_file(tmp_path / WEIGHTS)
    add_tensors(tmp_path, {"model.layers.2.eh_proj.weight": weights["model.layers.2.eh_proj.weight"][:4]})
    assert "model.layers.2.eh_proj.weight has the shape [4, 64], by config.json it has [32, 64]" in refusal(
        config, saved.config
    )
    add_tensors(tmp_path, {"model.layers.2.eh_proj.weight": torch.zeros(32, 64, dtype=torch.float8_e4m3fn)})
    assert "its MTP head is quantised: model.layers.2.eh_proj.weight is F8_E4M3" in refusal(config, saved.config)
    add_tensors(tmp_path, {"model.layers.2.eh_proj.qweight": torch.ones(1)}, without=("model.layers.2.eh_proj.weight",))
    message = refusal(config, saved.config)
    assert "the files lack model.layers.2.eh_proj.weight" in message
    assert "hold model.layers.2.eh_proj.qweight, which is unknown" in message


def test_a_head_that_reads_other_states_is_refused(tmp_path):
    config, _ = save_with_head(tmp_path, "mimo")
    assert "reads the target's states before its final norm: set before_norm = true" in refusal(config, MtpConfig())


def test_an_exported_folder_is_no_draft_to_import(tmp_path):
    config, _, release = release_of(tmp_path, "mimo")
    export(release, "vllm", tmp_path / "out", config.model)
    tree = recipe_tree(tmp_path / "target", tmp_path / "data.json", tmp_path / "other")
    tree["draft"], tree["publish"]["draft"] = {"mtp": {"kind": "mtp", "before_norm": True}}, "mtp"
    with pytest.raises(PipelineError, match=r"name the exported folder in target\.model"):
        import_draft(tmp_path / "out", Recipe.model_validate(tree), "mtp")


def test_a_release_of_a_head_starts_a_training_of_the_same_layer_alone(tmp_path):
    """A fine-tune's files often lack the head; the release of the base's head takes its place."""
    _, draft, release = release_of(tmp_path, "mimo")
    add_tensors(tmp_path / "target", {}, without=("model.mtp_layers.",))
    tree = recipe_tree(tmp_path / "target", tmp_path / "data.json", tmp_path / "other")
    start = {"start": str(release), "start_differs": ["target"]}
    tree["draft"], tree["publish"]["draft"] = {"mtp": {"kind": "mtp", "before_norm": True} | start}, "mtp"
    recipe = Recipe.model_validate(tree)
    dump_here(recipe)
    store = FeatureStore(recipe.paths.features, "train", feature_spec(recipe))
    embed_head = load_embed_head(recipe.target)
    started = new_draft(recipe, "mtp", embed_head, store, read_start(recipe, "mtp", embed_head, store.spec))
    assert all(torch.equal(tensor, draft.state_dict()[name]) for name, tensor in started.state_dict().items())

    change_sealed(release / checkpoint.CONFIG, lambda raw: raw["shapes"]["layer"]["settings"].update(rms_norm_eps=0.1))
    with pytest.raises(PipelineError, match="layer is"):
        read_start(recipe, "mtp", embed_head, store.spec)
    eagle = Recipe.model_validate(tree | {"draft": {"mtp": {"kind": "eagle"} | start}})
    with pytest.raises(PipelineError, match="kind is 'mtp' there and 'eagle' here"):
        read_start(eagle, "mtp", embed_head, store.spec)


def test_an_export_needs_the_target_that_it_was_trained_for(tmp_path):
    _, _, release = release_of(tmp_path, "mimo")
    change_json(tmp_path / "target" / "config.json", rms_norm_eps=0.5)
    with pytest.raises(PipelineError, match="name the target in --target that it was trained for"):
        export(release, "vllm", tmp_path / "out", str(tmp_path / "target"))
    assert not (tmp_path / "out").exists()
