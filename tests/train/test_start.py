"""A training that starts from another draft's weights: which it takes, what it refuses, what it records."""

import json
import shutil
from pathlib import Path

import jinja2
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from pipeline.artifacts import checkpoint
from pipeline.artifacts.provenance import write_provenance
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import sha256
from pipeline.drafts.parts.layers import SHAPE_FIELDS
from pipeline.features.shards import FeatureStore, Manifest
from pipeline.lm.model import load_embed_head
from pipeline.recipe.identity import dump_hash, run_hash, train_hash
from pipeline.recipe.load import load_recipe
from pipeline.recipe.recipe import Recipe
from pipeline.running import markdown
from tests.kit import ROOT, change_sealed, dump_here, flip, recipe_tree, write_recipe, write_sharegpt
from tests.train.runs import largest_difference, lines_of, run_training, stopped_here, train_here
from tests.train.test_training import ZERO_3
from train.start import new_draft, read_start

KINDS = {
    "jakiro": {"kind": "jakiro", "vocabulary": 64},
    "eagle3": {"kind": "eagle3", "vocabulary": 64, "ttt_steps": 2},
    "whole": {"kind": "eagle3", "ttt_steps": 2},
    "medusa": {"kind": "medusa", "heads": 3, "vocabulary": 64, "head_bias": True},
    "small": {"kind": "small-llama", "width": 32, "mlp_width": 48},
}
ROWS = {"jakiro": [], "eagle3": ["lm_head.weight"], "whole": ["lm_head.weight"]}  # tensors of a row a token
ROWS["medusa"] = [f"lm_heads.{n}.{part}" for n in range(3) for part in ("weight", "bias")]


@pytest.fixture(scope="module")
def tuned(tiny_target, tmp_path_factory) -> Path:
    """Another fine-tune of the tiny target: a low-rank update, merged."""
    folder = tmp_path_factory.mktemp("tuned") / "target"
    shutil.copytree(tiny_target, folder)
    weights = load_file(folder / "model.safetensors")
    random = torch.Generator().manual_seed(0)
    for name, weight in weights.items():
        if name.endswith("proj.weight"):
            a, b = (torch.randn(size, 2, generator=random) for size in weight.shape)
            weight += 0.05 * a @ b.T
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def onward(tuned, tmp_path_factory) -> tuple[Path, Path]:
    """(recipe file, features) of the fine-tune."""
    folder = tmp_path_factory.mktemp("onward")
    tree = recipe_tree(tuned, write_sharegpt(folder / "data.json"), folder / "run")
    tree["draft"] = KINDS
    tree["publish"]["draft"] = "jakiro"
    tree["features"]["auxiliary_layers"] = [1, 2]
    path = write_recipe(tree, folder / "recipe")
    recipe = load_recipe(path)
    dump_here(recipe)
    return path, recipe.paths.features


@pytest.fixture(scope="module")
def bases(onward, tiny_target, tmp_path_factory) -> Path:
    """Drafts of the base target with random weights in bfloat16; each a folder of its name."""
    recipe = load_recipe(onward[0], [f"target.model={tiny_target}", f"output={tmp_path_factory.mktemp('bases')}"])
    store = store_of(load_recipe(onward[0]))
    for number, name in enumerate(KINDS):
        draft = new_draft(recipe, name, load_embed_head(recipe.target), store).to(torch.bfloat16)
        draft.initialise(100 + number)
        if draft.token_ids_U is not None:
            draft.set_vocabulary(torch.arange(30, 158, 2))
        facts = {"template": "", "template_mark": store.spec.template, "trained_tokens": 5, "parameters": 1}
        checkpoint.save(recipe.paths.draft(name), draft, draft.state_dict(), recipe, name, facts)
    return recipe.paths.run / "drafts"


def store_of(recipe: Recipe) -> FeatureStore:
    return FeatureStore(recipe.paths.features, "train", Manifest.load(recipe.paths.features).spec)


def begun(onward, start: Path | str, name: str, *overrides: str, differs: str = "['target']"):
    """(the draft at step 0, the start's facts, the draft without a start)."""
    start_overrides = [f"draft.{name}.start={start}", f"draft.{name}.start_differs={differs}"]
    plain, recipe = load_recipe(onward[0], list(overrides)), load_recipe(onward[0], [*overrides, *start_overrides])
    store, embed_head = store_of(recipe), load_embed_head(recipe.target)
    started = read_start(recipe, name, embed_head, store.spec)
    draft = new_draft(recipe, name, embed_head, store, started)
    return draft, started.facts, new_draft(plain, name, embed_head, store)


@pytest.mark.parametrize("name", KINDS)
def test_step_0_has_the_starts_weights_and_vocabulary_to_the_byte(onward, bases, tmp_path, name):
    draft, facts, cold = begun(onward, bases / name, name)
    checkpoint.write_weights(tmp_path / "x", draft.to(torch.bfloat16).state_dict())
    assert sha256(tmp_path / "x") == facts["sha256"] == sha256(bases / name / checkpoint.WEIGHTS)
    assert facts["differs"] == ["target"] and facts["tokens_kept"] == facts["tokens"] == draft.vocabulary_size
    assert draft.config == cold.config and draft.shapes == cold.shapes  # what it begins with is no part of it
    assert draft.embed_head.head.linear.weight.shape == cold.embed_head.head.linear.weight.shape


@pytest.mark.parametrize(
    ("name", "start", "size"),
    [
        ("jakiro", "jakiro", 40),
        ("eagle3", "eagle3", 40),
        ("eagle3", "eagle3", 100),
        ("whole", "eagle3", None),
        ("eagle3", "whole", None),
        ("medusa", "medusa", 100),
    ],
)
def test_another_vocabulary_moves_a_heads_rows_by_their_tokens(onward, bases, name, start, size):
    overrides = [f"draft.{name}.vocabulary={size}"] if size else []
    draft, facts, cold = begun(onward, bases / start, name, *overrides)
    got, fresh, start_weights = draft.state_dict(), cold.state_dict(), load_file(bases / start / checkpoint.WEIGHTS)
    all_ids = torch.arange(260)
    ids = fresh.get("draft_token_ids", all_ids).tolist()
    places = {token: place for place, token in enumerate(start_weights.get("draft_token_ids", all_ids).tolist())}
    assert got.get("draft_token_ids", all_ids).tolist() == ids
    for tensor in set(got) - {"draft_token_ids", *ROWS[name]}:
        assert torch.equal(got[tensor], start_weights[tensor].float())
    for tensor in ROWS[name]:
        for row, token in zip(got[tensor], ids, strict=True):
            expected = (
                start_weights[tensor][places[token]].float() if token in places else fresh[tensor][ids.index(token)]
            )
            assert torch.equal(row, expected)
    assert facts["tokens_kept"] == len(places.keys() & set(ids)) and facts["tokens"] == len(ids)
    assert 0 < facts["tokens_kept"] < max(len(ids), len(places))


def test_a_draft_in_an_engines_layout_is_a_start_too(onward, bases, tmp_path):
    """SpecForge's layout records no target: nothing has to be allowed."""
    start_weights = load_file(bases / "eagle3" / checkpoint.WEIGHTS)
    shapes = checkpoint.read_config(bases / "eagle3").shapes
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/config.json").write_text(json.dumps({key: shapes[key] for key in SHAPE_FIELDS}))
    offsets = start_weights["draft_token_ids"] - torch.arange(64)
    weights = {key: x for key, x in start_weights.items() if key != "draft_token_ids"} | {"d2t": offsets}
    save_file(weights, tmp_path / "theirs/model.safetensors")
    for size in (64, 100):
        draft, facts, _ = begun(onward, tmp_path / "theirs", "eagle3", f"draft.eagle3.vocabulary={size}", differs="[]")
        got = draft.state_dict()
        equal_keys = {
            key
            for key, x in got.items()
            if x.shape == start_weights[key].shape and torch.equal(x, start_weights[key].float())
        }
        assert set(got) - equal_keys == (set() if size == 64 else {"draft_token_ids", "lm_head.weight"})
        assert facts["from"] == "theirs" and "target" not in facts and facts["differs"] == []


def test_what_differs_is_named_at_once_and_allowed_by_name(onward, bases, tmp_path):
    shutil.copytree(bases / "eagle3", tmp_path / "draft")
    change_sealed(tmp_path / "draft/config.json", lambda raw: raw["training"].update(template_mark="f" * 16))
    more = ["draft.eagle3.objective=acceptance", "draft.eagle3.auxiliary_layers=[2]"]
    with pytest.raises(PipelineError) as error:
        begun(onward, tmp_path / "draft", "eagle3", *more, differs="[]")
    for words in (
        "auxiliary_layers is [1, 2] there and [2] here",
        "objective is 'soft-ce' there and 'acceptance' here",
    ):
        assert words in str(error.value)
    assert 'start_differs = ["auxiliary_layers", "objective", "target", "template"]' in str(error.value)
    with pytest.raises(PipelineError, match=r"template_mark is 'f{16}' there"):
        begun(onward, tmp_path / "draft", "eagle3", more[0], differs="['target', 'objective']")
    three = "['target', 'objective', 'template']"
    draft, facts, _ = begun(onward, tmp_path / "draft", "eagle3", more[0], differs=three)
    assert facts["differs"] == ["objective", "target", "template"] and draft.config.objective == "acceptance"
    with pytest.raises(PipelineError, match=r"eagle3.start does not fit: .*fc.weight"):  # allowed, but of other shapes
        begun(onward, tmp_path / "draft", "eagle3", more[1], differs="['target', 'template', 'auxiliary_layers']")
    with pytest.raises(PipelineError, match=r"medusa.start does not fit: .*lm_heads.3.weight"):
        more = ["draft.medusa.heads=4", "draft.medusa.vocabulary=40"]
        begun(onward, bases / "medusa", "medusa", *more, differs="['target', 'heads']")
    with pytest.raises(PipelineError, match=r"names 'targte': expected any of .*target, teacher, template"):
        begun(onward, bases / "eagle3", "eagle3", differs="['targte']")
    with pytest.raises(PipelineError, match="kind is 'eagle3' there and 'jakiro' here"):
        begun(onward, bases / "eagle3", "jakiro")


@pytest.mark.parametrize(
    ("sets", "complaint"),
    [
        (["draft.jakiro.start=/nowhere"], "start='/nowhere': expected a draft's folder"),
        (["draft.jakiro.start=they/draft@main"], "the commit in 40 hex digits"),
        (["draft.jakiro.start_differs=['target']"], "but it has no start"),
        (["draft.copy={kind='prompt-lookup', start='x'}"], "this recipe does not train it"),
    ],
)
def test_a_start_that_is_none_is_refused(onward, sets, complaint):
    with pytest.raises(PipelineError, match=complaint):
        assert run_hash(load_recipe(onward[0], sets))


def test_a_folder_counts_by_its_content_and_its_place_stays_private(onward, bases, tmp_path):
    def of(folder: Path | str) -> Recipe:
        return load_recipe(onward[0], [f"draft.jakiro.start={folder}", "draft.jakiro.start_differs=['target']"])

    shutil.copytree(bases / "jakiro", tmp_path / "moved")
    first, moved = of(bases / "jakiro"), of(tmp_path / "moved")
    assert train_hash(first, "jakiro") == train_hash(moved, "jakiro") and run_hash(first) == run_hash(moved)
    assert dump_hash(first) == dump_hash(load_recipe(onward[0]))  # one dump for warm and cold
    write_provenance(tmp_path / "written", moved)
    assert str(tmp_path) not in (tmp_path / "written/recipe.json").read_text()
    written_start = load_recipe(tmp_path / "written/recipe.json").draft["jakiro"].start
    assert train_hash(of(written_start), "jakiro") == train_hash(moved, "jakiro")
    with pytest.raises(PipelineError, match=r"start='content:.*expected a draft's folder"):
        begun(onward, written_start, "jakiro")
    change_sealed(tmp_path / "moved/config.json", lambda raw: raw["shapes"].update(rms_norm_eps=0.5))
    hashes = {train_hash(first, "jakiro"), train_hash(moved, "jakiro"), train_hash(load_recipe(onward[0]), "jakiro")}
    flip(tmp_path / "moved/model.safetensors")
    assert len({*hashes, train_hash(moved, "jakiro")}) == 4
    with pytest.raises(PipelineError, match="SHA-256 differs"):
        begun(onward, tmp_path / "moved", "jakiro")


def test_a_commit_of_the_hub_is_fetched_and_the_card_says_so(onward, bases, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    shutil.copytree(bases / "jakiro", tmp_path / "models--they--draft/snapshots" / ("a" * 40))
    _, facts, _ = begun(onward, f"they/draft@{'a' * 40}", "jakiro")
    assert facts["from"] == "they/draft" and facts["revision"] == "a" * 40
    card = (ROOT / "eval/release/card.md.jinja").read_text()
    begin = card.index('{% if "start" in training %}')
    part = card[begin : card.index("\n{% endif %}", begin)] + "{% endif %}"
    body = (
        jinja2.Environment(undefined=jinja2.StrictUndefined)
        .from_string(part)
        .render(training={"start": facts | {"target": "x`\n\n# Owned <script>"}}, plain=markdown.escape_markdown)
    )
    assert f"weights of they/draft, revision `{'a' * 40}`, a draft of x\\` \\# Owned &lt;script&gt;, whose file" in body
    assert f"`{facts['sha256']}`; what differed there: target. It has 64 of this draft's 64 tokens." in body


SAME_VOCABULARY = "draft.jakiro.vocabulary=128"  # as the undisturbed draft's


def begins_with(base: Path) -> tuple[str, ...]:
    return SAME_VOCABULARY, f"draft.jakiro.start={base}", "draft.jakiro.start_differs=['target']"


@pytest.mark.real
def test_a_trained_draft_goes_on_for_a_fine_tune_of_its_target(onward, undisturbed, tmp_path):
    """The draft is ahead of a cold one at every validation; a stop changes no byte."""
    base = undisturbed / "drafts/jakiro"
    begins = begins_with(base)
    warm, cold, stopped = (tmp_path / name for name in ("warm", "cold", "stopped"))
    train_here(onward, warm, *begins)
    train_here(onward, cold, SAME_VOCABULARY)
    curves = [[line["loss"] for line in lines_of(output, "validation")] for output in (warm, cold)]
    print(f"validation loss, warm and cold: {curves}")
    assert len(curves[0]) == 4, "the weights that it starts from are validated before the first step"
    assert len(curves[1]) == 3 and all(first < second for first, second in zip(curves[0][1:], curves[1], strict=True))
    stopped_here(onward, stopped, *begins, saves=2)
    train_here(onward, stopped, *begins)
    assert len({sha256(output / "drafts/jakiro" / checkpoint.WEIGHTS) for output in (warm, stopped)}) == 1
    folder = warm / "drafts/jakiro"
    facts = checkpoint.read_config(folder).training["start"]
    assert facts["sha256"] == sha256(base / checkpoint.WEIGHTS) and facts["tokens_kept"] == facts["tokens"] == 128
    assert json.loads((folder / "provenance.json").read_text())["start"] == facts
    ids = [load_file(path / checkpoint.WEIGHTS)["draft_token_ids"] for path in (folder, base)]
    assert torch.equal(*ids)


@pytest.mark.real
@pytest.mark.long
def test_two_ranks_under_zero_3_go_on_with_the_loss_of_one(onward, undisturbed, tmp_path):
    begins = begins_with(undisturbed / "drafts/jakiro")
    train_here(onward, tmp_path / "one", *begins)
    done = run_training(onward, tmp_path / "two", *begins, *ZERO_3, ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert largest_difference(tmp_path / "one", tmp_path / "two") < 1e-5
