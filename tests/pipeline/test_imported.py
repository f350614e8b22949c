"""Import of released checkpoints: names and shapes of the authors, SpecForge and speculators, with random weights."""

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
from pipeline.artifacts.imported import import_draft
from pipeline.artifacts.unpickle import read_weights
from pipeline.basics.errors import PipelineError
from pipeline.decoding.config import LoadedMethod
from pipeline.decoding.generate import Sampling, decode_plain, decode_speculative
from pipeline.lm.model import fingerprint
from tests.kit import ROOT, call
from tests.pipeline.layouts import BLOCKS, DFLASH, EAGLE, EAGLE_3, P_EAGLE, assert_imported, with_settings
from tests.pipeline.taught import NEVER, prompt_of

REDUCED = EAGLE_3 | {"vocabulary": 64}
EMBEDDED = {"embed_tokens.weight": (260, 32)}
INV_FREQ = {"layers.0.self_attn.rotary_emb.inv_freq": (4,)}
CONFIDENCE = {"confidence_head.proj.weight": (1, 40), "confidence_head.proj.bias": (1,)}
EAGLE_3_OF_SPECULATORS = {"speculators_model_type": "eagle3"}  # norm_before_residual is true where it is not given
P_EAGLE_OF_SPECULATORS = {"speculators_model_type": "peagle", "mask_token_id": 258, "embed_requires_grad": True}
DFLASH_OF_SPECULATORS = BLOCKS | {"speculators_model_type": "dflash", "sample_from_anchor": False}
DSPARK_OF_SPECULATORS = BLOCKS | {
    **{"speculators_model_type": "dspark", "sample_from_anchor": True, "enable_confidence_head": True},
    **{"markov_rank": 8, "markov_head_type": "vanilla", "confidence_head_with_markov": True},
}


def same_name(name):
    return name


def by_layer(name):
    return name.replace("midlayer.", "layers.0.")


def gumihos(name):
    return re.sub(r"^mlp\.mlp\.(\d\.)(0\.0\.)?", lambda at: f"mlp.{at[1]}{'0.linear.' if at[2] else ''}", name)


@pytest.mark.parametrize(
    ("settings", "renamed", "more", "config"),  # our name -> theirs; what else is there; what it says beside shapes
    [
        (EAGLE | {"fc_bias": True}, same_name, EMBEDDED, {}),
        (EAGLE, same_name, EMBEDDED | INV_FREQ, {}),
        ({"kind": "jakiro", "fc_bias": True}, same_name, EMBEDDED, {}),
        ({"kind": "gumiho", "fc_bias": True}, gumihos, EMBEDDED, {}),
        (REDUCED, same_name, {}, {}),
        (REDUCED | {"norm_before_residual": True}, by_layer, EMBEDDED, EAGLE_3_OF_SPECULATORS),
        (P_EAGLE | {"vocabulary": 64}, by_layer, EMBEDDED, P_EAGLE_OF_SPECULATORS),
        (
            DFLASH | {"window": 24, "vocabulary": 64},
            same_name,
            {"lm_head.weight": (64, 32)},
            DFLASH_OF_SPECULATORS | {"projector_type": "dflash"},
        ),
        (
            DFLASH | {"kind": "dspark", "rank": 8, "window": 24},
            same_name,
            {"lm_head.weight": (260, 32)} | CONFIDENCE,
            DSPARK_OF_SPECULATORS,
        ),
    ],
)
def test_a_released_checkpoint_becomes_ours_to_the_bit(
    released, loaded_target, embed_head, settings, renamed, more, config
):
    recipe, folder, weights = released(settings, renamed, more, **config)
    lines = import_draft(folder, recipe, "theirs")
    draft = checkpoint.load(recipe.paths.draft("theirs"), fingerprint(recipe.target))
    assert draft.state_dict().keys() == weights.keys()
    assert all(torch.equal(x, weights[name]) for name, x in draft.state_dict().items())
    assert draft.shapes["rms_norm_eps"] == 1e-5 and draft.shapes["rope_parameters"]["rope_theta"] == 5000.0
    for name in more:
        assert any(line.startswith(f"dropped {name}: ") for line in lines)
    assert len(lines) >= 1 + len(more) + (2 if "vocabulary" in settings else 0)
    draft.bind(embed_head)
    method = LoadedMethod(draft, recipe.tree("theirs"))
    for sampling in (Sampling(16, NEVER), Sampling(16, NEVER, temperature=1.0, seed=1)):
        got = decode_speculative(loaded_target, method, prompt_of(1), sampling)
        assert got.tokens == decode_plain(loaded_target, prompt_of(1), sampling).tokens


# -- tensors ----------------------------------------------------------------------------------------------------------


def change_weights(folder, change):
    """Write the folder's weights again, with the changes that `change` returns; None removes a tensor."""
    weights = load_file(folder / "model.safetensors")
    weights |= change(weights)
    save_file({name: x.contiguous() for name, x in weights.items() if x is not None}, folder / "model.safetensors")


def filled(weights, place, value):
    """Return the offsets with one of them changed."""
    return {"d2t": weights["d2t"].index_fill(0, torch.tensor([place]), value)}


UP, UP_1 = "midlayer.mlp.up_proj.weight", "layers.0.mlp.up_proj.weight"
QUERY_BIAS = "layers.0.self_attn.q_proj.bias"
EXPERT = "layers.0.mlp_moe.experts.0.fc1.weight"
SMALL = {"kind": "jakiro", "vocabulary": 64}  # whose head is the target's


@pytest.mark.parametrize(
    ("settings", "change", "complaint"),
    [
        (REDUCED, lambda w: {"t2d": w["t2d"].roll(1)}, "t2d names 64 tokens, but d2t 64 others"),
        (REDUCED, lambda w: {"t2d": FULL_VOCABULARY["t2d"]}, "t2d names 260 tokens, but d2t 64 others"),
        (REDUCED, lambda w: filled(w, 1, 4), "t2d names 64 tokens, but d2t 64 others"),
        (REDUCED, lambda w: {"d2t": None}, "t2d names 64 tokens, but there is no d2t"),
        (EAGLE_3, lambda w: {"t2d": torch.tensor(True)}, "t2d names 1 tokens, but there is no d2t"),
        (REDUCED, lambda w: filled(w, 1, -1), "d2t leads to token 0 and then to 0"),
        (REDUCED, lambda w: filled(w, 0, 5), "d2t leads to token 5 and then to 4"),
        (REDUCED, lambda w: {"d2t": w["d2t"] + 9}, "d2t leads to token 261, but the target has 260"),
        (REDUCED, lambda w: {"d2t": w["d2t"] - 1}, "d2t leads to token -1, but the target has 260"),
        (REDUCED, lambda w: {"draft_token_ids": torch.arange(256, 0, -4)}, "ids leads to token 256 and then to 252"),
        (EAGLE_3, lambda w: {"layers.0.mlp.up_proj.weight": 2 * w[UP]}, rf"are both {UP}, and differ"),
        ({"kind": "jakiro"}, lambda w: {EXPERT: torch.ones(48, 32)}, "Unexpected key.*experts.0.fc1.weight"),
        (EAGLE, lambda w: {"fc.bias": torch.ones(32)}, "Unexpected key.*fc.bias"),
        (EAGLE, lambda w: {QUERY_BIAS: torch.ones(32)}, f"Unexpected key.*{QUERY_BIAS}"),
        (EAGLE, lambda w: {"other": w[UP_1], UP_1: None}, f"Missing key.*{UP_1}.*Unexpected key.*other"),
        (
            EAGLE,
            lambda w: {"model.embed_tokens.weight": torch.randn(260, 32)},
            r"model.embed_tokens.weight differs from the",
        ),
        (SMALL, lambda w: {"lm_head.weight": torch.randn(64, 32)}, "lm_head.weight differs from the target's head"),
    ],
)
def test_tensors_that_are_not_the_drafts_are_refused_by_name(released, settings, change, complaint):
    recipe, folder, _ = released(settings)
    change_weights(folder, change)
    with pytest.raises(PipelineError, match=complaint):
        import_draft(folder, recipe, "theirs")
    assert not (recipe.paths.draft("theirs") / checkpoint.CONFIG).exists()


BIAS = "midlayer.self_attn.o_proj.bias"
FULL_VOCABULARY = {"d2t": torch.zeros(260, dtype=torch.long), "t2d": torch.ones(260, dtype=torch.bool)}


@pytest.mark.parametrize(
    ("settings", "config", "change", "line"),
    [
        (
            EAGLE_3,
            {},
            lambda w: FULL_VOCABULARY,
            "dropped d2t: every token of the target is one of the draft's",
        ),  # of SpecForge
        (
            EAGLE_3,
            {},
            lambda w: {"model.norm.weight": w["norm.weight"].clone()},
            r"dropped .*norm.weight: the same as ",
        ),
        (EAGLE_3 | {"attention_bias": True}, {"qkv_bias": True}, lambda w: {BIAS: None}, f"made {BIAS}: zeros, as the"),
    ],
)
def test_tensors_that_say_nothing_more_are_dropped_or_made(released, settings, config, change, line):
    recipe, folder, weights = released(settings, **config)
    change_weights(folder, change)
    assert any(re.match(line, text) for text in import_draft(folder, recipe, "theirs"))
    assert_imported(recipe, weights | ({BIAS: torch.zeros(32)} if BIAS in weights else {}))


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


MEDUSA = {"kind": "medusa", "heads": 3, "blocks": 2}
HYDRA = {"kind": "hydra", "heads": 3, "blocks": 2, "head_bias": True, "prefix": False}
HYDRA_2 = {"kind": "hydra", "heads": 3, "blocks": 4, "head_bias": True}
PREFIX = {UNREAD: (260, 32), "prefix_embeding_layer.layers.0.self_attn.rotary_emb.inv_freq": (4,)}


@pytest.mark.parametrize(
    ("settings", "renamed", "more", "config"),
    [
        (MEDUSA, medusas, {}, {"medusa_num_heads": 2, "medusa_num_layers": 2}),  # as released: the weights have 5
        (HYDRA_2, hydras, PREFIX | EMBEDDING, {"hydra_num_heads": 3, "hydra_num_layers": 4}),
        (HYDRA, plain_hydras, EMBEDDING, {"hydra_num_heads": 3, "hydra_num_layers": 2}),
    ],
    ids=["medusa", "hydra++", "hydra"],
)
def test_heads_whose_config_has_no_shapes_take_the_targets(
    released, loaded_target, embed_head, settings, renamed, more, config
):
    recipe, folder, weights = released(settings, renamed, more)
    (folder / "config.json").write_text(json.dumps(config))
    kind, true = settings["kind"], recipe.draft["theirs"]
    wrong = {"heads": 4, "blocks": 1, "head_bias": not true.head_bias}
    wrong |= {"prefix": not true.prefix} if kind == "hydra" else {}
    for key, value in wrong.items():
        second = with_settings(recipe, settings | {key: value}, output=str(folder / key))
        with pytest.raises(PipelineError, match=rf"{key}={getattr(true, key)}: set draft.theirs.{key}"):
            import_draft(folder, second, "theirs")
    if kind == "hydra":
        (folder / "config.json").write_text(json.dumps(config | {"hidden_state_offset": 1}))
        with pytest.raises(PipelineError, match=r"an earlier layer .hidden_state_offset=1.*offset 0"):
            import_draft(folder, recipe, "theirs")
        (folder / "config.json").write_text(json.dumps(config | {"hidden_state_offset": 0}))
    torch.save(load_file(folder / "model.safetensors"), folder / f"{kind}_lm_head.pt")
    (folder / "model.safetensors").unlink()
    lines = import_draft(folder, recipe, "theirs")
    assert (f"dropped {UNREAD}: nothing here reads it" in lines) == (UNREAD in more)
    assert_imported(recipe, weights)
    draft = checkpoint.load(recipe.paths.draft("theirs"), fingerprint(recipe.target))
    draft.bind(embed_head)
    got = decode_speculative(
        loaded_target, LoadedMethod(draft, recipe.tree("theirs")), prompt_of(1), Sampling(16, NEVER)
    )
    assert got.tokens == decode_plain(loaded_target, prompt_of(1), Sampling(16, NEVER)).tokens


# -- files ------------------------------------------------------------------------------------------------------------


def sharded(folder, weights, stem="model", ending="safetensors", write=save_file):
    """Write the weights in two files, and an index."""
    (folder / "model.safetensors").unlink()
    files = {name: f"part-{1 + n % 2}.{ending}" for n, name in enumerate(weights)}
    for file in set(files.values()):
        write({name: weights[name] for name in weights if files[name] == file}, folder / file)
    (folder / f"{stem}.{ending}.index.json").write_text(json.dumps({"weight_map": files}))


def pickled(folder, content):
    (folder / "model.safetensors").unlink()
    torch.save(content, folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("write", "files"),
    [
        (sharded, 2),
        (lambda folder, weights: sharded(folder, weights, "pytorch_model", "bin", torch.save), 2),
        (lambda folder, weights: pickled(folder, {"state_dict": weights, "epoch": 3}), 1),
    ],
    ids=["index", "index of pickles", "a trainer's pickle"],
)
def test_weights_are_read_from_files_as_others_write_them(released, write, files):
    recipe, folder, weights = released(REDUCED)
    write(folder, load_file(folder / "model.safetensors"))
    import_draft(folder, recipe, "theirs")
    assert_imported(recipe, weights)
    sums = checkpoint.read_config(recipe.paths.draft("theirs")).training["imported"]["sha256"]
    assert len(sums.split(", ")) == files


def with_index(content):
    def write(folder, weights):
        sharded(folder, weights)
        (folder / "model.safetensors.index.json").write_text(json.dumps(content))

    return write


def one_part_twice(folder, weights):
    sharded(folder, weights)
    (folder / "part-1.safetensors").write_bytes((folder / "part-2.safetensors").read_bytes())


ALONE = "pytorch_model.bin cannot be read as weights alone"


@pytest.mark.parametrize(
    ("write", "complaint"),
    [
        (lambda folder, _: (folder / "config.json").unlink(), "holds no config.json"),
        (lambda folder, _: (folder / "model.safetensors").unlink(), "holds none of model.safetensors, "),
        (with_index({"weight_map": {"fc.weight": "../part-1.safetensors"}}), "expected names of files next to it"),
        (with_index({"weight_map": {"fc.weight": "no.bin"}}), "holds no no.bin, which"),
        (with_index([1]), "is a JSON list, expected an object"),
        (one_part_twice, "which another file of its index holds, too"),
        (lambda folder, w: pickled(folder, w | {"epoch": 3}), f"{ALONE}: 'epoch' holds a value of type int, expected"),
        (
            lambda folder, w: pickled(folder, {"model": {"w": w}}),
            f"{ALONE}: 'model' holds a value of type dict, expect",
        ),
        (lambda folder, w: pickled(folder, [*w.values()]), f"{ALONE}: it holds a value of type list, expected tensors"),
    ],
)
def test_files_that_are_no_checkpoint_are_refused(released, write, complaint):
    recipe, folder, _ = released(EAGLE)
    write(folder, load_file(folder / "model.safetensors"))
    with pytest.raises(PipelineError, match=complaint):
        import_draft(folder, recipe, "theirs")


def endless():
    """Return a small value whose hash takes 2 ** 60 steps."""
    value = ()
    for _ in range(60):
        value = (value, value)
    return value


class Calling:
    """A call in a pickle; torch allows some among weights."""

    def __init__(self, called, *arguments):
        self.call = called, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        (lambda path: Calling(open, str(path), "w"), ""),
        (torch.zeros(1).expand(20_000_000_000), r"its tensors come to 80000000000 bytes, expected at most 4 times"),
        (torch.zeros(1, dtype=torch.bool).expand(9999), r"its tensors come to 9999 bytes, expected at most 4 times"),
        (Calling(bytearray, 4_000_000_000), r"it needs more memory than weights of its size do"),
        (Calling(OrderedDict, [(endless(), 1)]), r"it took more than 1 seconds of CPU time"),
    ],
)
def test_a_pickle_that_does_more_or_asks_for_more_than_its_size_is_refused(tmp_path, monkeypatch, value, complaint):
    # Seconds of CPU time: one for a pickle that never ends. A busy machine computes the others more slowly.
    monkeypatch.setattr("pipeline.artifacts.unpickle.SECONDS", 1 if "seconds of CPU time" in complaint else 10)
    monkeypatch.setattr("pipeline.artifacts.unpickle.PATIENCE", 300)  # a busy machine imports torch for long
    torch.save({"w": value(tmp_path / "touched") if callable(value) else value}, tmp_path / "model.ckpt")
    with pytest.raises(PipelineError, match=rf"model.ckpt cannot be read as weights alone: {complaint}"):
        read_weights([tmp_path / "model.ckpt"])
    assert not (tmp_path / "touched").exists()


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
    monkeypatch.setattr("pipeline.artifacts.unpickle.SECONDS", 1)
    monkeypatch.setattr("pipeline.artifacts.unpickle.PATIENCE", 0.5)
    with pytest.raises(PipelineError, match=rf"model.ckpt cannot be read as weights alone: .*{complaint}"):
        read_weights([tmp_path / "model.ckpt"])


def test_tensors_that_share_their_storage_are_read_from_a_pickle(tmp_path):
    weight = torch.rand(40, 50)
    torch.save({"embedding": weight, "head": weight}, tmp_path / "model.ckpt")
    tensors = read_weights([tmp_path / "model.ckpt"])
    assert all(torch.equal(tensors[name], weight) for name in ("embedding", "head"))


def test_a_relative_path_is_read_where_the_command_runs_not_in_the_checkout(tmp_path, monkeypatch):
    checkout, current = tmp_path / "checkout", tmp_path / "here"
    for number, folder in enumerate((checkout, current)):
        folder.mkdir()
        torch.save({"w": torch.tensor([number])}, folder / "model.ckpt")
    (checkout / "pipeline").symlink_to(ROOT / "pipeline")
    monkeypatch.setattr("pipeline.artifacts.unpickle.ROOT", checkout)
    monkeypatch.chdir(current)
    assert read_weights([Path("model.ckpt")])["w"].item() == 1


def test_a_draft_that_is_there_is_not_overwritten(released):
    recipe, folder, _ = released(EAGLE)
    import_draft(folder, recipe, "theirs")
    with pytest.raises(PipelineError, match="holds a draft already"):
        import_draft(folder, recipe, "theirs")


def test_the_command_says_what_it_did(released, tmp_path, capsys):
    recipe, folder, _ = released(EAGLE, more={"embed_tokens.weight": (260, 32)})
    file = tmp_path / "recipe.json"
    file.write_text(json.dumps(recipe.model_dump(mode="json")))
    call(main, "import", str(folder), "--recipe", str(file))
    printed = capsys.readouterr().out
    assert "dropped embed_tokens.weight: it is the target's embedding" in printed and "theirs: in " in printed


def test_the_card_of_an_imported_draft_says_where_its_weights_are_from(released):
    recipe, folder, _ = released(EAGLE)
    import_draft(folder, recipe, "theirs")
    saved = checkpoint.read_config(recipe.paths.draft("theirs"))
    assert saved.training_summary == "imported from released"
    text = (ROOT / "eval/release/card.md.jinja").read_text()
    begin = text.index('{% elif "imported" in training %}')
    part = text[begin : text.index("{% else %}", begin)].replace("elif", "if", 1) + "{% endif %}"
    body = jinja2.Environment(undefined=jinja2.StrictUndefined).from_string(part)
    assert saved.training["imported"]["sha256"] in body.render(training=saved.training)
