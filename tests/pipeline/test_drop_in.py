"""The one line in transformers: a release's own code gives the text of plain `generate`, without this project."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.artifacts import checkpoint
from pipeline.artifacts.provenance import RECIPE
from pipeline.basics.errors import PipelineError
from pipeline.decoding.config import Method, TreeConfig
from pipeline.decoding.generate import Sampling, decode_speculative
from pipeline.drafts.prompt_lookup import PromptLookupConfig
from pipeline.recipe.recipe import Recipe
from pipeline.serving import bundle as bundling
from pipeline.serving.bundle import ENTRY, FOLDER, bundle
from tests.kit import command_environment, recipe_tree, write_sharegpt
from tests.pipeline.taught import NEVER, VARIANTS, greedy, prompt_of, taught

COUNT = 24
TREE = TreeConfig(depth=2, top_k=4, nodes=9, parallel=1)
ALONE = Method(draft="jakiro", tree=TREE)
HYBRID = replace(ALONE, secondary=["prompt-lookup"])
METHODS = {  # draft and method
    "eagle": HYBRID,
    "jakiro": HYBRID,
    **dict.fromkeys(("eagle3, reduced", "sparse on eagle-3", "gumiho", "medusa", "hydra++", "small-llama"), ALONE),
    **dict.fromkeys(("dflash, reduced", "dspark, reduced", "p-eagle, reduced"), ALONE),
}
ABSENT_PACKAGES = ("pipeline", "pydantic", "pyarrow", "ray", "deepspeed", "datasets", "jinja2", "scipy")
# The script of a user who has transformers and the release, but not this project.
USER = f"""
import copy, json, sys
sys.modules |= dict.fromkeys({ABSENT_PACKAGES})
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers import StoppingCriteria, StoppingCriteriaList

model_folder, release, prompts = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
model, tokenizer = AutoModelForCausalLM.from_pretrained(model_folder), AutoTokenizer.from_pretrained(model_folder)
results = {{}}

def both(ids, **settings):
    ids = torch.tensor([ids])
    torch.manual_seed(1)
    mine = {{name: value for name, value in settings.items() if name not in ("custom_generate", "revision", "token")}}
    plainly = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **mine)
    settings = {{"custom_generate": release, "trust_remote_code": True}} | settings
    drafted = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **settings)
    return plainly.tolist(), drafted.tolist()
"""


def released(tmp_path: Path, recipe, draft, method: Method) -> Path:
    """Write a release's folder with the files that decoding needs."""
    source, folder = tmp_path / "draft", tmp_path / "release"
    checkpoint.save(source, draft, draft.state_dict(), recipe, "jakiro", {})
    folder.mkdir()
    secondary = {name: PromptLookupConfig() for name in method.secondary}
    checkpoint.export(source, folder, method, secondary, source / RECIPE)
    bundle(folder)
    checkpoint.seal_files(folder)
    return folder


def as_a_user(folder: Path, release: Path, target: Path, prompts: list[list[int]], body: str, **environ: str) -> dict:
    """Return `results` after USER and `body` ran in a folder and a cache of their own."""
    environment = command_environment() | {"HF_MODULES_CACHE": str(folder / "modules"), "PYTHONPATH": ""} | environ
    command = [sys.executable, "-c", USER + body + "\nprint(json.dumps(results))", target, release, json.dumps(prompts)]
    done = subprocess.run(list(map(str, command)), cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def answered(loaded_target, tiny_target, embed_head, tmp_path_factory) -> dict[str, list]:
    """Return, by draft: our answers, each with that of plain `generate`, the one with the draft, and the number of
    forwards that it took. One user's process makes them all.
    """
    tmp_path = tmp_path_factory.mktemp("ways")
    recipe = Recipe.model_validate(recipe_tree(tiny_target, write_sharegpt(tmp_path / "data.json"), tmp_path / "run"))
    prompts, expected = [prompt_of(seed) * 2 for seed in range(3)], {}
    for number, way in enumerate(METHODS):
        answer = greedy(loaded_target, prompts[0], COUNT)
        draft = taught(loaded_target, embed_head, VARIANTS[way], prompts[0], answer)
        tree = TREE if draft.config.levels_of(1) else replace(TREE, parallel=TREE.depth)
        (tmp_path / str(number)).mkdir()
        folder = released(tmp_path / str(number), recipe, draft, replace(METHODS[way], tree=tree))
        method = checkpoint.read_config(folder).load_method(draft)
        expected[way] = [
            decode_speculative(loaded_target, method, prompt, Sampling(COUNT, NEVER)) for prompt in prompts
        ]
        assert expected[way][0].acceptance.tau > 1.5  # it is a draft
    results = as_a_user(
        tmp_path, tmp_path, tiny_target, prompts,
        f"""
forwards, results["answers"] = [], []
model.model.register_forward_hook(lambda *_: forwards.append(1))
for number in range({len(METHODS)}):
    release = f"{{sys.argv[2]}}/{{number}}/release"
    both(prompts[0], max_new_tokens=2)
    results["answers"].append([])
    for prompt in prompts:
        forwards.clear()
        plainly, drafted = both(prompt, max_new_tokens={COUNT}, eos_token_id=None)
        results["answers"][-1].append([plainly, drafted, len(forwards) - {COUNT}])  # plain decoding's first
""",
    )  # fmt: skip
    return {
        way: list(zip(expected[way], generated, strict=True))
        for way, generated in zip(METHODS, results["answers"], strict=True)
    }


@pytest.mark.parametrize("way", METHODS)
def test_its_answer_is_plain_generates_in_as_many_rounds_as_ours(answered, way):
    for seed, (expected, (plainly, drafted, forwards)) in enumerate(answered[way]):
        assert drafted == plainly == [prompt_of(seed) * 2 + expected.tokens]
        assert forwards == 1 + expected.acceptance.passes


def test_what_generate_honours_is_honoured_and_the_rest_is_refused(
    loaded_target, tiny_target, tiny_recipe, embed_head, tmp_path
):
    prompt = prompt_of(0)
    draft = taught(loaded_target, embed_head, VARIANTS["eagle"], prompt, greedy(loaded_target, prompt, COUNT))
    folder = released(tmp_path, tiny_recipe, draft, ALONE)
    results = as_a_user(
        tmp_path, folder, tiny_target, [prompt],
        """
class Third(StoppingCriteria):
    def __call__(self, ids, scores, **kwargs):
        return torch.tensor([ids.shape[1] >= len(prompts[0]) + 3])

class Heard:
    def __init__(self): self.got, self.ended = [], False
    def put(self, value): self.got += value.flatten().tolist()
    def end(self): self.ended = True

ids = prompts[0]
usual = both(ids, max_new_tokens=12)[0][0]
word = tokenizer.decode(usual[len(ids) + 4 : len(ids) + 6])
results["pairs"] = {
    "default length": both(ids),
    "max_length": both(ids, max_length=len(ids) + 7),
    "a stop id": both(ids, max_new_tokens=12, eos_token_id=[usual[len(ids) + 5], 999]),
    "a criterion": both(ids, max_new_tokens=12, stopping_criteria=StoppingCriteriaList([Third()])),
    "a stop string": both(ids, max_new_tokens=12, stop_strings=[word], tokenizer=tokenizer),
    "a penalty": both(ids, max_new_tokens=12, repetition_penalty=1.4),
    "one token to choose from": both(ids, max_new_tokens=12, do_sample=True, top_k=1),
    "a tiny top-p": both(ids, max_new_tokens=12, do_sample=True, top_p=1e-6, temperature=0.7),
}
drawn = {"max_new_tokens": 12, "do_sample": True, "temperature": 1.5, "top_k": 0}
results["drawn"] = [both(ids, **drawn)[1] for _ in range(2)]
heard = Heard()
one_line = {"custom_generate": release, "trust_remote_code": True}
inputs = {"input_ids": torch.tensor([ids]), "max_new_tokens": 12, "pad_token_id": 0}
whole = model.generate(**inputs, **one_line, streamer=heard)
results["heard"] = [heard.got, whole[0].tolist(), heard.ended]
padded = {"input_ids": torch.tensor([[0, 0, *ids]]), "attention_mask": torch.tensor([[0, 0, *[1] * len(ids)]])}
for name, settings in {
    "padded": {"max_new_tokens": 12}, "padded to a length": {"max_length": len(ids) + 9},
    "no mask": {"pad_token_id": 0},
}.items():
    given = padded if name != "no mask" else {"input_ids": padded["input_ids"]}
    settings = {"pad_token_id": 0, "return_dict_in_generate": True} | settings
    found = [model.generate(**given, **settings, **more).sequences.tolist() for more in ({}, one_line)]
    results["pairs"][name] = found
    copy.deepcopy(model)  # nothing of a draft hinders it
generous = {"max_length": model.config.max_position_embeddings, "eos_token_id": None}
results["to the end"] = both(ids, **generous)
results["refused"] = {}
for name, wrong in {
    "beams": {"num_beams": 2}, "several": {"num_return_sequences": 2, "do_sample": True}, "min_p": {"min_p": 0.1},
    "scores": {"output_scores": True}, "processor": {"logits_processor": [print]}, "unknown": {"pixels": 3},
    "shorter": {"max_length": 3, "max_new_tokens": None}, "string": {"stop_strings": ["a"]},
    "batch": {"input_ids": torch.tensor([ids, ids])}, "hidden": {"attention_mask": torch.zeros(1, len(ids))},
    "negative": {"negative_prompt_ids": torch.tensor([ids])}, "full": {"input_ids": torch.tensor([ids * 90])},
    "draft": {"draft": "/nowhere"}, "damaged": {},
}.items():
    if name in ("draft", "damaged"):
        del model._opened_drafts
    if name == "damaged":
        with open(f"{release}/model.safetensors", "r+b") as file:
            file.seek(-1, 2)
            file.write(b"?")
    try:
        model.generate(**(inputs | one_line | wrong))
    except Exception as error:
        results["refused"][name] = str(error)
other = LlamaForCausalLM(LlamaConfig(**(model.config.to_dict() | {"num_hidden_layers": 3, "layer_types": None})))
try:
    other.generate(**inputs, **one_line)
except Exception as error:
    results["refused"]["target"] = str(error)
""",
    )  # fmt: skip
    for case, (plainly, drafted) in results["pairs"].items():
        assert drafted == plainly, case
    (plainly,), (drafted,) = results["to the end"]
    assert drafted == plainly[: len(drafted)] and len(plainly) - len(drafted) == TREE.depth
    assert len({len(plainly[0]) for plainly, _ in results["pairs"].values()}) > 3  # they do something
    assert results["drawn"][0] == results["drawn"][1]  # torch.manual_seed repeats them
    streamed, sequence, ended = results["heard"]
    assert streamed == sequence and ended
    for name, words in {
        "beams": "num_beams=2 is not supported with a draft",
        "several": "num_return_sequences=2 is not supported",
        "min_p": "min_p=0.1 is not supported",
        "scores": "output_scores=True is not supported",
        "processor": "logits_processor is not supported",
        "unknown": "pixels is not supported",
        "shorter": "max_length=3, but the prompt has 12 tokens already",
        "string": "stop_strings requires tokenizer=",
        "batch": "a batch of 2 prompts",
        "hidden": "attention_mask hides the whole prompt",
        "negative": "negative_prompt_ids is not supported with a draft",
        "full": "fills the target's 1024 positions",
        "draft": "/nowhere",
        "damaged": "holds other weights than this code was made for",
        "target": "a draft works with its own target only",
    }.items():
        assert words in results["refused"][name], name


def test_a_release_of_the_hub_and_a_second_tree_for_the_same_weights(
    loaded_target, tiny_target, tiny_recipe, embed_head, tmp_path
):
    """The first comes from a repository's snapshot in the cache, by name, revision and token; the second is another
    release of the same weights.
    """
    prompt, commit = prompt_of(0), "a" * 40
    draft = taught(loaded_target, embed_head, VARIANTS["eagle3, reduced"], prompt, greedy(loaded_target, prompt, COUNT))
    folder = released(tmp_path, tiny_recipe, draft, ALONE)
    place = tmp_path / "hub/models--me--draft"
    shutil.copytree(folder, place / "snapshots" / commit)
    (place / "refs").mkdir()
    (place / "refs/main").write_text(commit)
    small = TreeConfig(depth=1, top_k=1, nodes=2, parallel=1)
    (tmp_path / "other").mkdir()
    second = released(tmp_path / "other", tiny_recipe, draft, replace(ALONE, tree=small))
    method = checkpoint.read_config(folder).load_method(draft)
    expected = [
        decode_speculative(loaded_target, replace(method, tree=tree), prompt, Sampling(COUNT, NEVER))
        for tree in (TREE, small)
    ]
    assert expected[0].acceptance.passes < expected[1].acceptance.passes
    results = as_a_user(
        tmp_path, folder, tiny_target, [prompt],
        f"""
settings = {{"max_new_tokens": {COUNT}, "eos_token_id": None}}
forwards, results["answers"], results["forwards"] = [], [], []
hub = {{"custom_generate": "me/draft", "revision": "main", "token": "hf_x"}}
for place in (hub, {{"custom_generate": "{second}"}}):
    both(prompts[0], max_new_tokens=2, **place)
    hook = model.model.register_forward_hook(lambda *_: forwards.append(1))
    plainly, drafted = both(prompts[0], **settings, **place)
    hook.remove()
    results["answers"].append([plainly, drafted])
    results["forwards"].append(len(forwards) - {COUNT})
    forwards.clear()
results["hooks"] = sum(len(layer._forward_hooks) for layer in model.model.layers)
""",
        HF_HUB_CACHE=str(tmp_path / "hub"),
    )  # fmt: skip
    for (plainly, drafted), answer in zip(results["answers"], expected, strict=True):
        assert drafted == plainly == [prompt + answer.tokens]
    assert results["forwards"] == [1 + answer.acceptance.passes for answer in expected] and results["hooks"] == 0


def test_one_letter_of_a_releases_code_or_template_is_seen(
    loaded_target, tiny_target, tiny_recipe, embed_head, tmp_path
):
    """A change would give other answers; a user trusts the code only as it was released."""
    draft = taught(loaded_target, embed_head, VARIANTS["eagle"], prompt_of(0), [1, 2, 3, 4], steps=1)
    folder = released(tmp_path, tiny_recipe, draft, ALONE)
    (folder / checkpoint.TEMPLATE).write_text("{{ messages }}")
    checkpoint.seal_files(folder)
    changed = [f"{FOLDER}/{ENTRY}", f"{FOLDER}/decoding_accept.py", checkpoint.TEMPLATE]
    results = as_a_user(
        tmp_path, folder, tiny_target, [prompt_of(0)],
        f"""
from pathlib import Path
settings = {{"max_new_tokens": 4, "eos_token_id": None}}
results["before"] = both(prompts[0], **settings)
results["refused"] = []
for name in {changed}:
    path = Path(release) / name
    whole = path.read_text()
    path.write_text(whole.replace("e", "E", 1))
    model._opened_drafts.methods.clear()
    try:
        both(prompts[0], **settings)
    except Exception as error:
        results["refused"].append(str(error))
    path.write_text(whole)
model._opened_drafts.methods.clear()
results["after"] = both(prompts[0], **settings)
""",
    )  # fmt: skip
    assert results["refused"] == [
        f"{folder}: {name} was changed after the release was made: download it again" for name in changed
    ]
    assert results["before"] == results["after"] and results["before"][0] == results["before"][1]


def test_a_release_carries_no_module_that_transformers_users_lack():
    with pytest.raises(PipelineError, match=r"pipeline\.features\.schema imports pyarrow"):
        bundling._collect_modules(["pipeline.features.schema"])


def test_the_bundle_is_this_projects_own_code(loaded_target, tiny_recipe, embed_head, tmp_path):
    """Each module is the project's, except for its imports."""
    draft = taught(loaded_target, embed_head, VARIANTS["eagle"], prompt_of(0), [1, 2, 3, 4], steps=1)
    folder = released(tmp_path, tiny_recipe, draft, ALONE)
    files = {path.name: path.read_text() for path in (folder / FOLDER).iterdir()}
    assert "decoding_generate.py" in files and "drafts_eagle.py" in files and "drafts_jakiro.py" not in files
    original = (bundling.ROOT / "pipeline/decoding/generate.py").read_text().splitlines()
    bundled = files["decoding_generate.py"].splitlines()
    differing = [(a, b) for a, b in zip(original, bundled, strict=True) if a != b]
    assert differing and all(a.startswith("from pipeline.") and b.startswith("from .") for a, b in differing)
    assert not any("pipeline." in line for text in files.values() for line in text.splitlines() if "import" in line)
    assert str(tmp_path) not in "".join(files.values()) and files[ENTRY].count("SHAPES") > 2
