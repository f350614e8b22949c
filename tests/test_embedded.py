"""The embedded default, for real: the 135M target, its template, and the smoke recipe from dump to release."""

import hashlib
import json

import pytest
import torch

from eval.main import main as evaluate
from pipeline.artifacts.curves import METRICS, read_metrics
from pipeline.artifacts.features import feature_spec
from pipeline.artifacts.reports import read_rows
from pipeline.basics import embedded
from pipeline.drafts import build, make_objective
from pipeline.drafts.parts.layers import draft_shapes
from pipeline.features.batch import collate
from pipeline.features.positions import count_positions
from pipeline.features.shards import ANSWERS, FeatureStore
from pipeline.lm.chat import Unusable, encode
from pipeline.lm.config import TargetConfig
from pipeline.lm.model import load_config, load_embed_head, load_tokenizer
from pipeline.recipe.load import load_recipe
from pipeline.recipe.sections import DataConfig
from preprocess.dump.plan import DumpPlan
from preprocess.sources.dialogues import clean
from preprocess.sources.read import TornTail, read_records
from tests.kit import ROOT, call, dump_here, override_arguments
from tests.train.runs import train_here
from train import acceptance

pytestmark = pytest.mark.real
SMOKE = ROOT / "infra/recipes/smoke.toml"
TARGET = TargetConfig(model="embedded:smollm2-135m-instruct", device="cpu")


def test_the_converted_target_has_no_quantisation_left():
    folder = embedded.model_folder("smollm2-135m-instruct")
    config = json.loads((folder / "config.json").read_text())
    assert config["dtype"] == "float32"
    assert not [key for key in config if "quant" in key or "gguf" in key or "name_or_path" in key]
    assert not list(folder.glob("*.bin")) and not list(folder.glob("*.gguf"))
    assert "Paris" in json.loads((folder / "converted.json").read_text())["checked"]


def test_the_ends_are_read_without_the_rest_of_the_target():
    embed_head = load_embed_head(TARGET)
    assert embed_head.embedding_VD.shape == (49152, 576)
    assert torch.equal(embed_head.head.linear.weight, embed_head.embedding_VD)  # tied


def test_the_template_masks_the_answers_only():
    tokenizer = load_tokenizer(TARGET)
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!\n    indented"},
        {"role": "user", "content": "Bye"},
        {"role": "assistant", "content": "See you."},
    ]
    (encoded,) = encode(tokenizer, messages, 1000)
    text = tokenizer.decode(encoded.input_ids)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    answers = tokenizer.decode(encoded.input_ids[encoded.loss_mask.astype(bool)])
    assert answers == "Hello!\n    indented<|im_end|>See you.<|im_end|>"


def test_the_embedded_dialogues_are_read_to_their_torn_end():
    tail, usable, reasons = TornTail(), 0, {}
    for record in read_records(DataConfig(source="embedded:sharegpt"), tail):
        try:
            clean(record, "reject")
            usable += 1
        except Unusable as reason:
            reasons[str(reason)] = reasons.get(str(reason), 0) + 1
    assert tail.torn_after == 17_671
    assert usable + sum(reasons.values()) == 17_671
    assert reasons == {"blank_turn": 70, "no_exchange": 277, "repeated_role": 31}


@pytest.mark.long
def test_the_demos_plan_is_the_one_that_its_figures_are_of():
    """The same dialogues on the same sides, token for token, and the same questions."""
    recipe, state = load_recipe(ROOT / "infra/recipes/demo.toml"), hashlib.sha256()
    plan = DumpPlan(recipe, load_tokenizer(recipe.target))
    for task in plan.tasks():
        ids = [document.doc_id for document in task.documents]
        state.update(f"{task.split} {task.index} {task.fingerprint} {ids}".encode())
    prompts = [{key: value for key, value in prompt.items() if key != "exchanges"} for prompt in plan.prompts]
    state.update(json.dumps(prompts).encode())
    assert (plan.accepted["train"], plan.accepted["validation"]) == (573, 24)
    assert state.hexdigest()[:16] == "aaa614bdec27f72e"


def test_there_are_164_coding_prompts():
    prompts = embedded.human_eval_prompts()
    assert len(prompts) == len({prompt["question_id"] for prompt in prompts}) == 164


@pytest.fixture(scope="module")
def smoke_run(tmp_path_factory):
    """The smoke recipe's run folder: every stage's own work, in this process. As commands: tests/test_run.py."""
    folder = tmp_path_factory.mktemp("smoke")
    sets = [f"output={folder}", "eval.temperatures=[0.0]"]
    recipe = load_recipe(SMOKE, sets)
    dump_here(recipe)
    for draft in recipe.to_train:
        train_here((SMOKE, recipe.paths.features), folder, *sets, draft=draft)
    call(evaluate, str(SMOKE), *override_arguments(sets))
    return folder


def test_the_smoke_recipe_from_dump_to_release(smoke_run):
    """fp32 greedy answers of both drafts equal plain decoding's on the real target; the draft has learnt next to
    nothing.
    """
    greedy = [row.details for row in read_rows(smoke_run / "release") if row.figure == "lossless"]
    assert len(greedy) == 4 and all(gate["identical"] == gate["checked"] == 1 for gate in greedy)
    assert load_recipe(SMOKE).publish.draft == "jakiro"
    assert (smoke_run / "release/README.md").read_text().startswith("---\n")
    for draft in ("jakiro", "eagle"):
        lines = read_metrics(smoke_run / "drafts" / draft / METRICS)
        (last,) = [line for line in lines if line["kind"] == "decoded"]
        assert last["estimated_tau"] == pytest.approx(last["decoded_tau"], rel=0.02)
        assert (smoke_run / "drafts" / draft / "training.png").exists()


def test_the_estimate_of_tau_is_what_decoding_the_same_prompts_gives(smoke_run):
    """Use a draft that predicts some tokens: it was trained on the stored answers themselves."""
    name = "jakiro"
    recipe = load_recipe(SMOKE, [f"output={smoke_run}", f"draft.{name}.vocabulary=256"])
    answers = FeatureStore(recipe.paths.features, ANSWERS, feature_spec(recipe))
    rows = [answers.row(number) for number in range(len(answers))]
    draft = build(recipe.draft[name], draft_shapes(load_config(TARGET)))
    draft.initialise(0)
    marked_tokens = {token for row in rows for token in row.input_ids[row.loss_mask.astype(bool)].tolist()}
    draft.set_vocabulary(
        torch.tensor(
            sorted([*marked_tokens, *[t for t in range(400) if t not in marked_tokens][: 256 - len(marked_tokens)]])
        )
    )
    draft.bind(load_embed_head(TARGET))
    objective = make_objective(draft.config)
    totals = count_positions([objective.positions(row.input_ids, row.loss_mask) for row in rows])
    batch = collate(rows, objective, totals).to(torch.device("cpu"), torch.float32)
    optimizer = torch.optim.AdamW(draft.parameters(), lr=2e-3)
    for _ in range(40):
        optimizer.zero_grad()
        objective.loss(draft, batch)[0].backward()
        optimizer.step()
    draft.eval().requires_grad_(False)
    watched = acceptance.tree_and_chain(draft, recipe.tree(name))
    estimated = acceptance.estimate_acceptance(draft, watched, answers, 0, 1)
    for shape, method in watched.items():
        decoded = acceptance.Decoder(recipe, answers, draft, method.tree).tau(draft.state_dict(), quiet=True)
        print(f"{name}, {shape}: estimated tau {estimated[shape].tau:.4f}, decoded {decoded:.4f}")
        assert decoded > 1.3 and estimated[shape].tau == pytest.approx(decoded, rel=0.02)
