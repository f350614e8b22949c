"""MTP heads of many families, tiny and random: read out of the target's files, trained, decoded, written back."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from eval.measure.tasks import load_drafts
from pipeline.artifacts import checkpoint
from pipeline.basics.errors import PipelineError
from pipeline.decoding.config import LoadedMethod, Method, TreeConfig, chain
from pipeline.decoding.generate import Sampling, decode_plain, decode_speculative
from pipeline.decoding.replay import count_acceptance
from pipeline.drafts import build
from pipeline.drafts.native.families import HEADS, to_file_names
from pipeline.drafts.native.files import read_head
from pipeline.drafts.native.mtp import Mtp, MtpConfig
from pipeline.drafts.parts.layers import draft_shapes
from pipeline.lm.config import TargetConfig
from pipeline.lm.model import Target, fingerprint
from pipeline.recipe.load import load_recipe
from pipeline.recipe.recipe import Recipe
from pipeline.serving.export import export
from tests.kit import ROOT, dump_here, recipe_tree, save_tiny_target, write_recipe, write_sharegpt
from tests.pipeline.families import MIXTURE
from tests.pipeline.heads import WEIGHTS, add_tensors, change_json, save_with_head
from tests.pipeline.taught import NEVER, prompt_of, teach, write_release
from tests.train.runs import train_here

SETTINGS = {
    "hy_v3": MIXTURE,
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 1, "moe_layer_end_index": 1},
}
PROMPT, ANSWER = prompt_of(0), 40


def load_head(config: TargetConfig, settings: MtpConfig) -> tuple[Target, Mtp]:
    target = Target(config, "float32")
    draft = build(settings, draft_shapes(target.config))
    assert isinstance(draft, Mtp)
    draft.bind(target.embed_head(fingerprint(config)))
    read_head(draft, config)
    return target, draft


@pytest.mark.parametrize("family", HEADS)
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
        computed = draft.head_input(draft._trunk(states_BTD, tokens[:, 1:], positions, None, None))

    assert torch.allclose(computed, expected, atol=1e-5)
    with torch.inference_mode():
        first = draft._trunk(states_BTD, tokens[:, 1:], positions - 1, None, None)
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

    u = draft._trunk(states_TD[None], tokens[None, 1:], torch.arange(count)[None], None, None)
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
    assert facts["before"]["estimated_tau"] == round(first["estimated_tau"], 5)
    assert "start" not in facts

    drafts = load_drafts(recipe, Target(config, "float32"), ["as-it-is", "mtp"])
    as_it_is, after = (drafts[name].state_dict() for name in ("as-it-is", "mtp"))
    assert all(torch.equal(tensor, as_it_is[name]) for name, tensor in saved.state_dict().items())
    assert not torch.equal(as_it_is["eh_proj.weight"], after["eh_proj.weight"])


def test_the_page_lists_every_family():
    page = (ROOT / "docs/your-own-target.md").read_text()
    table = page.partition("| family (`model_type`) |")[2].partition("\n\n")[0]
    listed = [re.sub(r"\(.*\)", "", row.split("|")[1]) for row in table.splitlines()[2:]]
    assert sorted(name.strip() for names in listed for name in names.split(",")) == sorted(HEADS)


def test_the_steps_weights_fall_and_sum_to_one():
    terms = MtpConfig(ttt_steps=3, decay=0.5).terms(0)
    assert [term.weights["classification"] for term in terms] == [4 / 7, 2 / 7, 1 / 7]


@pytest.mark.parametrize("family", ["mimo", "qwen3_next", "deepseek_v3"])
def test_a_release_is_written_into_the_targets_files_and_back(tmp_path, family):
    """Untrained, the same bytes; trained, only the head's tensors differ."""
    folder = tmp_path / "target"
    config, saved = save_with_head(folder, family)
    _, draft = load_head(config, saved.config)
    draft.requires_grad_(False)
    tree = recipe_tree(folder, write_sharegpt(tmp_path / "data.json"), tmp_path / "run")
    tree["draft"] = {"mtp": {"kind": "mtp", "before_norm": saved.config.before_norm}}
    tree["publish"]["draft"] = "mtp"
    recipe = Recipe.model_validate(tree)
    method = Method(draft="mtp", tree=chain(3))

    write_release(tmp_path / "release", draft, recipe, "mtp", method)
    lines = export(tmp_path / "release", "vllm", tmp_path / "out", str(folder))
    assert lines[-1] == (
        f"vllm serve {tmp_path / 'out'} --speculative-config '"
        + json.dumps({"method": "mtp", "num_speculative_tokens": 3})
        + "'"
    )
    assert (tmp_path / "out" / WEIGHTS).read_bytes() == (folder / WEIGHTS).read_bytes()
    assert {path.name for path in (tmp_path / "out").iterdir()} == {path.name for path in folder.iterdir()}
    assert all(path.is_symlink() for path in (tmp_path / "out").iterdir() if path.name != WEIGHTS)

    for parameter in draft.parameters():
        parameter.add_(1.0)
    shutil.rmtree(tmp_path / "release")
    write_release(tmp_path / "release", draft, recipe, "mtp", method)
    export(tmp_path / "release", "vllm", tmp_path / "trained", str(folder))
    before, after = load_file(folder / WEIGHTS), load_file(tmp_path / "trained" / WEIGHTS)
    form = draft.form.names_in_files(draft.shapes["target_layers"])
    assert {name for name in before if not torch.equal(before[name], after[name])} <= {
        *to_file_names(draft.decoder, form, draft.state_dict())
    }
    _, again = load_head(TargetConfig(model=str(tmp_path / "trained"), device="cpu"), saved.config)
    assert all(torch.equal(tensor, draft.state_dict()[name]) for name, tensor in again.state_dict().items())
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "trained") is not None


def test_a_released_head_is_loaded_by_its_own_settings(tmp_path):
    config, saved = save_with_head(tmp_path / "target", "deepseek_v3")
    _, draft = load_head(config, saved.config)
    draft.requires_grad_(False)
    tree = recipe_tree(tmp_path / "target", write_sharegpt(tmp_path / "data.json"), tmp_path / "run")
    tree["draft"], tree["publish"]["draft"] = {"mtp": {"kind": "mtp"}}, "mtp"
    write_release(tmp_path / "release", draft, Recipe.model_validate(tree), "mtp", Method(draft="mtp", tree=chain(3)))
    loaded = checkpoint.load(tmp_path / "release", fingerprint(config))
    assert all(torch.equal(tensor, draft.state_dict()[name]) for name, tensor in loaded.state_dict().items())
    assert checkpoint.read_config(tmp_path / "release").borrowed == ["embedding", "head"]


# -- bad input ---------------------------------------------------------------------------------------------------------


def refusal(config: TargetConfig, settings: MtpConfig) -> str:
    with pytest.raises(PipelineError) as caught:
        load_head(config, settings)
    return str(caught.value)


def test_a_target_of_an_unknown_family_is_refused(tmp_path):
    message = refusal(TargetConfig(model=str(save_tiny_target(tmp_path)), device="cpu"), MtpConfig())
    assert "no names of one are known for this target's family" in message
    assert "qwen3_next" in message


def test_files_without_a_head_with_half_of_one_and_with_two_are_refused(tmp_path):
    config, saved = save_with_head(tmp_path, "deepseek_v3")
    head = {name: tensor for name, tensor in load_file(tmp_path / WEIGHTS).items() if ".layers.2." in name}

    second = {name.replace(".layers.2.", ".layers.3."): tensor for name, tensor in head.items()}
    add_tensors(tmp_path, second)
    assert "has several MTP layers (model.layers.3.*)" in refusal(config, saved.config)

    add_tensors(tmp_path, {}, without=("model.layers.3.", "model.layers.2.self_attn.o_proj"))
    message = refusal(config, saved.config)
    assert "its MTP head is incomplete: the files lack model.layers.2.self_attn.o_proj.weight" in message

    add_tensors(tmp_path, {}, without=("model.layers.2.",))
    assert "comes without an MTP head" in refusal(config, saved.config)


def test_a_quantised_head_and_one_with_its_own_output_layer_are_refused(tmp_path):
    config, saved = save_with_head(tmp_path, "deepseek_v3")
    copies = load_file(tmp_path / WEIGHTS)
    add_tensors(tmp_path, {"model.layers.2.shared_head.head.weight": copies["lm_head.weight"]})
    load_head(config, saved.config)  # a copy of the target's is what these files usually hold
    add_tensors(tmp_path, {"model.layers.2.shared_head.head.weight": copies["lm_head.weight"] + 1})
    assert "model.layers.2.shared_head.head.weight differs from lm_head.weight" in refusal(config, saved.config)
    add_tensors(tmp_path, {"model.layers.2.self_attn.o_proj.weight_scale_inv": torch.ones(1)})
    assert "its MTP head is quantised" in refusal(config, saved.config)


def test_a_head_that_reads_other_states_is_refused(tmp_path):
    config, _ = save_with_head(tmp_path, "mimo")
    assert "reads the target's states before its final norm: set before_norm = true" in refusal(config, MtpConfig())


def test_an_export_needs_the_target_that_it_was_trained_for(tmp_path):
    config, saved = save_with_head(tmp_path / "target", "mimo")
    _, draft = load_head(config, saved.config)
    draft.requires_grad_(False)
    tree = recipe_tree(tmp_path / "target", write_sharegpt(tmp_path / "data.json"), tmp_path / "run")
    tree["draft"], tree["publish"]["draft"] = {"mtp": {"kind": "mtp", "before_norm": True}}, "mtp"
    write_release(tmp_path / "release", draft, Recipe.model_validate(tree), "mtp", Method(draft="mtp", tree=chain(3)))
    change_json(tmp_path / "target" / "config.json", rms_norm_eps=0.5)
    with pytest.raises(PipelineError, match="name the target in --target that it was trained for"):
        export(tmp_path / "release", "vllm", tmp_path / "out", str(tmp_path / "target"))
    assert not (tmp_path / "out").exists()
