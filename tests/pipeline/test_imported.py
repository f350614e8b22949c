"""Released checkpoints become ours: names and shapes of the authors, SpecForge and speculators, random weights."""

import json
import re
import sys
from collections import OrderedDict
from pathlib import Path

import jinja2
import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.__main__ import main
from pipeline.artifacts import checkpoint
from pipeline.artifacts.foreign import read_weights
from pipeline.artifacts.imported import import_draft
from pipeline.basics.errors import PipelineError
from pipeline.decoding.generate import Sampling, plain, speculative
from pipeline.decoding.method import LoadedMethod
from pipeline.lm.model import fingerprint
from pipeline.recipe.recipe import Recipe
from tests.kit import ROOT, call
from tests.pipeline.taught import NEVER, prompt_of

DFLASH = {"kind": "dflash", "layers": 2, "block": 4, "auxiliary_layers": [1, 2], "mask_token": 258}
BLOCKS = {  # beside shapes; that places see their whole block is what speculators' default is not
    **{"block_size": 4, "aux_hidden_state_layer_ids": [1, 2], "mask_token_id": 258, "num_hidden_layers": 2},
    **{"layer_types": ["sliding_attention"] * 2, "sliding_window": 24, "sliding_window_non_causal": True},
}
UNWINDOWED = {key: value for key, value in BLOCKS.items() if key not in ("layer_types", "sliding_window")}
LAYOUTS = {  # a draft's settings; our name -> theirs; what else is there; what config.json says beside shapes
    "eagle": ({"kind": "eagle", "fc_bias": True}, lambda n: n, {"embed_tokens.weight": (260, 32)}),
    "eagle-2 with inv_freq": (
        {"kind": "eagle"},
        lambda n: n,
        {"embed_tokens.weight": (260, 32), "layers.0.self_attn.rotary_emb.inv_freq": (4,)},
    ),
    "jakiro": ({"kind": "jakiro", "fc_bias": True}, lambda n: n, {"embed_tokens.weight": (260, 32)}),
    "gumiho": (
        {"kind": "gumiho", "fc_bias": True},
        lambda n: re.sub(r"^mlp\.mlp\.(\d\.)(0\.0\.)?", lambda at: f"mlp.{at[1]}{'0.linear.' if at[2] else ''}", n),
        {"embed_tokens.weight": (260, 32)},
    ),
    "eagle-3 of its authors": ({"kind": "eagle3", "vocabulary": 64}, lambda n: n, {}),
    "eagle-3 of speculators": (
        {"kind": "eagle3", "vocabulary": 64, "norm_before_residual": True},
        lambda n: n.replace("midlayer.", "layers.0."),
        {"embed_tokens.weight": (260, 32)},
        {"speculators_model_type": "eagle3"},  # norm_before_residual is then true where it is not given
    ),
    "p-eagle of speculators": (
        {"kind": "p-eagle", "layers": 2, "depths": 3, "vocabulary": 64, "mask_token": 258},
        lambda n: n.replace("midlayer.", "layers.0."),
        {"embed_tokens.weight": (260, 32)},
        {"speculators_model_type": "peagle", "mask_token_id": 258, "embed_requires_grad": True},
    ),
    "dflash of speculators": (
        DFLASH | {"window": 24, "vocabulary": 64},
        lambda n: n,
        {"lm_head.weight": (64, 32)},
        BLOCKS | {"speculators_model_type": "dflash", "sample_from_anchor": False, "projector_type": "dflash"},
    ),
    "dspark of speculators": (
        DFLASH | {"kind": "dspark", "rank": 8, "window": 24},
        lambda n: n,
        {"lm_head.weight": (260, 32), "confidence_head.proj.weight": (1, 40), "confidence_head.proj.bias": (1,)},
        BLOCKS
        | {"speculators_model_type": "dspark", "sample_from_anchor": True, "enable_confidence_head": True}
        | {"markov_rank": 8, "markov_head_type": "vanilla", "confidence_head_with_markov": True},
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_released_checkpoint_becomes_ours_to_the_bit(released, loaded_target, embed_head, layout):
    settings, renamed, more, *config = LAYOUTS[layout]
    recipe, folder, ours = released(settings, renamed, more, **(config[0] if config else {}))
    said = import_draft(folder, recipe, "theirs")
    draft = checkpoint.load(recipe.draft_dir("theirs"), fingerprint(recipe.target))
    assert draft.state_dict().keys() == ours.keys()
    assert all(torch.equal(x, ours[name]) for name, x in draft.state_dict().items())
    assert draft.shapes["rms_norm_eps"] == 1e-5 and draft.shapes["rope_parameters"]["rope_theta"] == 5000.0
    for name in more:
        assert any(line.startswith(f"dropped {name}: ") for line in said)
    assert len(said) >= 1 + len(more) + (2 if "vocabulary" in settings else 0)
    draft.bind(embed_head)
    method = LoadedMethod(draft, recipe.tree("theirs"))
    for sampling in (Sampling(16, NEVER), Sampling(16, NEVER, temperature=1.0, seed=1)):
        got = speculative(loaded_target, method, prompt_of(1), sampling)
        assert got.tokens == plain(loaded_target, prompt_of(1), sampling).tokens


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sliding_window_non_causal": False}, r"causal=True: set draft\.theirs\.causal"),
        ({"sliding_window_non_causal": False, "sliding_window": 100_000}, r"causal=True: set draft\.theirs\.causal"),
        ({"sliding_window_non_causal": None}, "no sliding_window_non_causal: whether blocks are causal is not known"),
        ({"causal": True}, "causal=True, sliding_window_non_causal=True: whether blocks are causal is not known"),
        (
            {"is_causal": False, "dflash_config": {"causal": True}},
            "is_causal=False, causal=True, sliding_",
        ),
        ({"is_causal": "no"}, "is_causal='no', and only False or True is computed here"),
        ({"sample_from_anchor": True}, "sample_from_anchor=True, and only False is computed here"),
        ({"projector_type": "domino"}, "projector_type='domino'"),
        ({"shift_label": True}, "shift_label=True"),
        ({"aux_hidden_state_layer_ids": [2]}, r"set draft.theirs.auxiliary_layers \(it is \[1, 2\]\)"),
        ({"aux_hidden_state_layer_ids": [0, 1]}, r"names the outputs of layers \[0, 1\]"),
    ],
)
def test_what_a_block_of_speculators_computes_otherwise_is_refused(released, change, said):
    config = BLOCKS | {"speculators_model_type": "dflash"} | change
    recipe, folder, _ = released(DFLASH | {"window": 24}, **config)
    with pytest.raises(PipelineError, match=said):
        import_draft(folder, recipe, "theirs")


def test_another_head_than_the_targets_is_refused(released):
    recipe, folder, _ = released(DFLASH | {"vocabulary": 64}, more={"lm_head.weight": (64, 32)}, **UNWINDOWED)
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"lm_head.weight": weights["lm_head.weight"] + 1}, folder / "model.safetensors")
    with pytest.raises(PipelineError, match="is not the target's head"):
        import_draft(folder, recipe, "theirs")


def medusas(name):
    kind, head, rest = name.split(".", 2)
    return f"{head}.2.{rest}" if kind == "lm_heads" else f"{head}.{rest}"  # behind two blocks


def hydras(name):
    kind, head, rest = name.split(".", 2)
    if kind == "lm_heads":
        return f"hydra_lm_head.{head}.1.{rest}"
    if kind == "heads":
        block, rest = rest.split(".", 1)
        return f"hydra_mlp.{head}.{2 * int(block) + 1}.{rest}"
    where = "norm" if head == "norm" else "layers.0"
    return f"prefix_embeding_layer.{where}.{rest}"


def plain_hydras(name):
    """No dropout before a block or an LM head."""
    kind, rest = name.split(".", 1)
    return f"{'hydra_lm_head' if kind == 'lm_heads' else 'hydra_mlp'}.{rest}"


UNREAD = "prefix_embeding_layer.embed_tokens.weight"  # its authors train on hidden states: it stays as it began
EMBEDDING = {"input_embed_fn.weight": (260, 32)}  # the target's, which their class registers and so saves


@pytest.mark.parametrize(
    ("settings", "renamed", "more", "config", "file"),
    [
        (
            {"kind": "medusa", "heads": 3, "blocks": 2},
            medusas,
            {},
            {"medusa_num_heads": 2, "medusa_num_layers": 2},  # the released configs say 2, and the weights have 5
            "medusa_lm_head.pt",
        ),
        (
            {"kind": "hydra", "heads": 3, "blocks": 4, "head_bias": True},
            hydras,
            {UNREAD: (260, 32), "prefix_embeding_layer.layers.0.self_attn.rotary_emb.inv_freq": (4,)} | EMBEDDING,
            {"hydra_num_heads": 3, "hydra_num_layers": 4},
            "hydra_lm_head.pt",
        ),
        (
            {"kind": "hydra", "heads": 3, "blocks": 2, "head_bias": True, "prefix": False},
            plain_hydras,
            EMBEDDING,
            {"hydra_num_heads": 3, "hydra_num_layers": 2},
            "hydra_lm_head.pt",
        ),
    ],
    ids=["medusa", "hydra++", "hydra"],
)
def test_heads_whose_config_has_no_shapes_take_the_targets(
    released, loaded_target, embed_head, settings, renamed, more, config, file
):
    recipe, folder, ours = released(settings, renamed, more)
    (folder / "config.json").write_text(json.dumps(config))
    true = recipe.draft["theirs"]
    wrong = {"heads": 4, "blocks": 1, "head_bias": not true.head_bias}
    if settings["kind"] == "hydra":
        wrong["prefix"] = not true.prefix
    for key, value in wrong.items():
        other = {"draft": {"theirs": settings | {key: value}}, "output": str(folder / key)}
        with pytest.raises(PipelineError, match=rf"{key}={getattr(true, key)}: set draft.theirs.{key}"):
            import_draft(folder, Recipe.model_validate(recipe.model_dump(mode="json") | other), "theirs")
    if settings["kind"] == "hydra":
        (folder / "config.json").write_text(json.dumps(config | {"hidden_state_offset": 1}))
        with pytest.raises(PipelineError, match=r"an earlier layer .hidden_state_offset=1.*offset 0"):
            import_draft(folder, recipe, "theirs")
        (folder / "config.json").write_text(json.dumps(config | {"hidden_state_offset": 0}))
    torch.save(load_file(folder / "model.safetensors"), folder / file)
    (folder / "model.safetensors").unlink()
    said = import_draft(folder, recipe, "theirs")
    assert (f"dropped {UNREAD}: nothing here reads it" in said) == (UNREAD in more)
    draft = checkpoint.load(recipe.draft_dir("theirs"), fingerprint(recipe.target))
    assert draft.state_dict().keys() == ours.keys()
    assert all(torch.equal(x, ours[name]) for name, x in draft.state_dict().items())
    draft.bind(embed_head)
    got = speculative(loaded_target, LoadedMethod(draft, recipe.tree("theirs")), prompt_of(1), Sampling(16, NEVER))
    assert got.tokens == plain(loaded_target, prompt_of(1), Sampling(16, NEVER)).tokens


@pytest.mark.parametrize(
    ("settings", "more", "complaint"),
    [
        ({"kind": "eagle"}, {"fc.bias": (32,)}, "no place for fc.bias"),
        ({"kind": "eagle"}, {"layers.0.self_attn.q_proj.bias": (32,)}, "no place for layers.0.self_attn.q_proj.bias"),
        (
            {"kind": "jakiro"},
            {"layers.0.mlp_moe.experts.0.fc1.weight": (48, 32)},
            "no place for .*experts.0.fc1.weight",
        ),
    ],
)
def test_what_has_no_place_is_refused_by_its_name(released, settings, more, complaint):
    recipe, folder, _ = released(settings, more=more)
    with pytest.raises(PipelineError, match=complaint):
        import_draft(folder, recipe, "theirs")
    assert not (recipe.draft_dir("theirs") / checkpoint.CONFIG).exists()


def test_a_tensor_of_another_shape_or_none_is_refused_by_its_name(released):
    recipe, folder, _ = released({"kind": "eagle"}, lambda n: "layers.0.mlp.other.weight" if "up_proj" in n else n)
    with pytest.raises(
        PipelineError, match=r"no place for layers.0.mlp.other.weight; layers.0.mlp.up_proj.weight missing"
    ):
        import_draft(folder, recipe, "theirs")
    settings = {"draft": {"theirs": {"kind": "eagle", "mlp_width": 9}}}
    wide = Recipe.model_validate(recipe.model_dump(mode="json") | settings)
    with pytest.raises(PipelineError, match=r"gate_proj.weight is \[64, 32\], expected \[9, 32\]"):
        import_draft(folder, wide, "theirs")


def test_another_targets_draft_is_refused(released):
    recipe, folder, _ = released({"kind": "eagle"}, hidden_size=64)
    with pytest.raises(PipelineError, match=r"hidden_size is 64.* trained for another target"):
        import_draft(folder, recipe, "theirs")


class Touching:
    """What a pickle can do that is no weights."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_a_pickle_that_does_more_is_refused_and_does_nothing(released, tmp_path):
    recipe, folder, _ = released({"kind": "eagle"})
    (folder / "model.safetensors").unlink()
    torch.save({"fc.weight": Touching(tmp_path / "touched")}, folder / "pytorch_model.bin")
    with pytest.raises(PipelineError, match=r"pytorch_model.bin cannot be read as weights alone"):
        import_draft(folder, recipe, "theirs")
    assert not (tmp_path / "touched").exists()


def endless():
    """A value that takes no room and whose hash takes 2 ** 60 steps."""
    value = ()
    for _ in range(60):
        value = (value, value)
    return value


class Calling:
    """A call that torch allows in a pickle of weights."""

    def __init__(self, called, *arguments):
        self.call = called, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        (torch.zeros(1).expand(20_000_000_000), r"its tensors come to 80000000000 bytes, expected at most 4 times"),
        (torch.zeros(1, dtype=torch.bool).expand(9999), r"its tensors come to 9999 bytes, expected at most 4 times"),
        (Calling(bytearray, 4_000_000_000), r"it needs more memory than weights of its size do"),
        (Calling(OrderedDict, [(endless(), 1)]), r"it took more than 1 seconds of CPU time"),
    ],
)
def test_a_pickle_that_asks_for_more_than_its_size_is_refused(tmp_path, monkeypatch, value, complaint):
    monkeypatch.setattr("pipeline.artifacts.foreign.SECONDS", 1)
    torch.save({"w": value}, tmp_path / "model.ckpt")
    with pytest.raises(PipelineError, match=rf"model.ckpt cannot be read as weights alone: {complaint}"):
        read_weights([tmp_path / "model.ckpt"])


@pytest.mark.parametrize(
    ("script", "complaint"),
    [("exec sleep 60", r"it took more than 0\.5 seconds, far"), ("kill -KILL $$", r"was ended by SIGKILL: it is")],
)
def test_a_reading_that_ends_without_a_message_gets_one(tmp_path, monkeypatch, script, complaint):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    torch.save({"w": torch.zeros(1)}, tmp_path / "model.ckpt")
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr("pipeline.artifacts.foreign.SECONDS", 1)
    monkeypatch.setattr("pipeline.artifacts.foreign.PATIENCE", 0.5)
    with pytest.raises(PipelineError, match=rf"model.ckpt cannot be read as weights alone: .*{complaint}"):
        read_weights([tmp_path / "model.ckpt"])


def test_tensors_that_share_their_storage_are_read_from_a_pickle(tmp_path):
    weight = torch.rand(40, 50)
    torch.save({"embedding": weight, "head": weight}, tmp_path / "model.ckpt")
    found = read_weights([tmp_path / "model.ckpt"])
    assert all(torch.equal(found[name], weight) for name in ("embedding", "head"))


def test_a_relative_path_is_read_where_the_command_runs_not_in_the_checkout(tmp_path, monkeypatch):
    checkout, here = tmp_path / "checkout", tmp_path / "here"
    for number, folder in enumerate((checkout, here)):
        folder.mkdir()
        torch.save({"w": torch.tensor([number])}, folder / "model.ckpt")
    (checkout / "pipeline").symlink_to(ROOT / "pipeline")
    monkeypatch.setattr("pipeline.artifacts.foreign.ROOT", checkout)
    monkeypatch.chdir(here)
    assert read_weights([Path("model.ckpt")])["w"].item() == 1


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_folder_without_a_checkpoint_is_refused(released, missing):
    recipe, folder, _ = released({"kind": "eagle"})
    (folder / missing).unlink()
    with pytest.raises(PipelineError, match="holds no"):
        import_draft(folder, recipe, "theirs")


def test_a_draft_that_is_there_is_not_overwritten(released):
    recipe, folder, _ = released({"kind": "eagle"})
    import_draft(folder, recipe, "theirs")
    with pytest.raises(PipelineError, match="holds a draft already"):
        import_draft(folder, recipe, "theirs")


def test_the_command_says_what_it_did(released, tmp_path, capsys):
    recipe, folder, _ = released({"kind": "eagle"}, more={"embed_tokens.weight": (260, 32)})
    file = tmp_path / "recipe.json"
    file.write_text(json.dumps(recipe.model_dump(mode="json")))
    call(main, "import", str(folder), "--recipe", str(file))
    printed = capsys.readouterr().out
    assert "dropped embed_tokens.weight: it is the target's embedding" in printed and "theirs: in " in printed


def test_the_card_of_an_imported_draft_says_where_its_weights_are_from(released):
    recipe, folder, _ = released({"kind": "eagle"})
    import_draft(folder, recipe, "theirs")
    saved = checkpoint.read_config(recipe.draft_dir("theirs"))
    assert saved.training_said == "imported from released"
    text = (ROOT / "eval/release/card.md.jinja").read_text()
    begin = text.index('{% elif "imported" in training %}')
    part = text[begin : text.index("{% else %}", begin)].replace("elif", "if", 1) + "{% endif %}"
    body = jinja2.Environment(undefined=jinja2.StrictUndefined).from_string(part)
    assert saved.training["imported"]["sha256"] in body.render(training=saved.training)


def test_an_embedding_of_its_own_is_refused(released):
    recipe, folder, _ = released({"kind": "eagle"}, more={"model.embed_tokens.weight": (260, 32)})
    with pytest.raises(PipelineError, match=r"model.embed_tokens.weight is not the target's embedding"):
        import_draft(folder, recipe, "theirs")


def test_a_checkpoint_whose_ids_do_not_ascend_is_refused(released, embed_head):
    recipe, folder, _ = released({"kind": "eagle3", "vocabulary": 64})
    import_draft(folder, recipe, "theirs")
    own = recipe.draft_dir("theirs")
    draft = checkpoint.load(own, fingerprint(recipe.target))
    draft.bind(embed_head)
    draft.set_vocabulary(draft.token_ids_U.flip(0))
    checkpoint.save(own, draft, draft.state_dict(), recipe, "theirs", {})
    with pytest.raises(PipelineError, match="draft_token_ids do not ascend"):
        checkpoint.load(own, fingerprint(recipe.target))


@pytest.mark.parametrize(("more", "token"), [(9, 261), (-1, -1)])
def test_ids_beyond_the_target_are_refused(released, more, token):
    recipe, folder, _ = released({"kind": "eagle3", "vocabulary": 64})
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"d2t": weights["d2t"] + more}, folder / "model.safetensors")
    with pytest.raises(PipelineError, match=f"d2t leads to token {token}, but the target has 260"):
        import_draft(folder, recipe, "theirs")
