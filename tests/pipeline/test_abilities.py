"""What targets of many families can do, tiny and random: read texts, verify chains, verify trees."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig

from eval.measure.prompts import BenchmarkPrompt
from eval.tune import list_trees
from infra.plan.memory import count_state_bytes
from pipeline.basics.errors import PipelineError
from pipeline.decoding.config import LoadedMethod, TreeConfig, chain
from pipeline.decoding.contract import RoundInput
from pipeline.decoding.generate import Sampling, decode_plain, decode_speculative
from pipeline.decoding.pools import CandidatePool, merge
from pipeline.decoding.replay import count_acceptance
from pipeline.decoding.sources import Sources
from pipeline.decoding.tree import Tree, build_tree
from pipeline.drafts.parts.layers import draft_shapes
from pipeline.drafts.prompt_lookup import PromptLookup, PromptLookupConfig
from pipeline.lm.ability import cache_argument, find_tree_obstacle
from pipeline.lm.attention import UNLIMITED, declared_positions
from pipeline.lm.cache import ChainCache, state_bytes
from pipeline.lm.model import Target
from pipeline.lm.states import Needs
from pipeline.recipe.load import load_recipe
from pipeline.recipe.recipe import Recipe
from pipeline.recipe.trees import require_verifiable
from tests.eval.test_harness import harness_of, measured
from tests.kit import ROOT, dump_here, write_recipe, write_sharegpt
from tests.pipeline.brief import make_small_recipe, train_briefly
from tests.pipeline.families import CHAINS, MORE_TREES, MULTIMODAL, READ_ALONE, family_config, save
from tests.pipeline.taught import NEVER, prompt_of

LENGTH, DEPTH, WRONG = 24, 3, 5
STREAMS = ("deepseek_v4",)  # several states a token between layers
SUPPORT = SimpleNamespace(resolve=lambda tree: tree, max_level=lambda tree: tree.depth)


@pytest.fixture(scope="module")
def dialogues(tmp_path_factory):
    return write_sharegpt(tmp_path_factory.mktemp("source") / "data.json", count=16)


@dataclass
class GuessingDraft:
    """A draft that knows the answer, and guesses each of its tokens with probability 0.6. In a tree the right token is
    the second of two siblings.
    """

    prompt: list[int]
    answer: list[int]
    siblings: bool
    name, needs, config = "oracle", Needs(), SUPPORT

    def open(self) -> torch.Generator:
        return torch.Generator().manual_seed(1)

    def propose(self, state: torch.Generator, inputs: RoundInput, tree: TreeConfig, draws, timer: Callable) -> Tree:
        place = len(inputs.tokens) - len(self.prompt)
        following = [*self.answer, *[WRONG] * DEPTH][place : place + DEPTH]
        guesses = [token if torch.rand(1, generator=state) < 0.6 else WRONG for token in following]
        tokens, parents = guesses, [*range(DEPTH)]
        if self.siblings:
            tokens = [token for guess in guesses for token in (WRONG + 1, guess)]
            parents = [0, 0, *(parent for level in range(1, DEPTH) for parent in (2 * level, 2 * level))]
        return build_tree(inputs.tokens[-1], tokens, parents, inputs.states_TSD.device)


def require_the_models_states(target: Target, prompt: list[int], family: str) -> None:
    layers = [] if family in STREAMS else [1, 2]
    states = target.states(prompt, layers)
    hidden = target.model(torch.tensor([prompt]), output_hidden_states=True).hidden_states
    assert torch.equal(states.final_ND, hidden[-1][0])
    if layers:
        first = 0 if "mamba" in family else 1  # Mamba does not return the embeddings
        assert torch.equal(states.auxiliary_NSD[:, 0], hidden[first][0])
    else:
        with pytest.raises(PipelineError, match=r"the output of layer 1 has the shape .* expected one state"):
            target.states(prompt, [1])


@pytest.mark.parametrize("family", READ_ALONE)
def test_a_target_that_forgets_the_text_before_a_chain_is_read_alone(family, dialogues, tmp_path):
    config = save(tmp_path, family)
    require_the_models_states(Target(config, "float32", verify=False), prompt_of(1, 37), family)
    with pytest.raises(PipelineError, match="this architecture ignores a rejected token's removal"):
        Target(config, "float32")
    recipe = make_small_recipe(config, dialogues, tmp_path / "run")
    with pytest.raises(PipelineError, match=r"with which no draft tokens can be verified here. Dump and train for it"):
        require_verifiable(recipe)


@pytest.mark.parametrize("family", [*MORE_TREES, *CHAINS, *MULTIMODAL])
def test_states_and_answers_are_the_models_own(family, tmp_path):
    """The states of layers and of the end are those that the model returns; plain decoding's tokens, and those of a
    verified tree or chain, are `generate`'s.
    """
    target, prompt = Target(save(tmp_path, family), "float32"), prompt_of(1, 37)
    ids = torch.tensor([prompt])
    require_the_models_states(target, prompt, family)
    options = {"max_new_tokens": LENGTH, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    answer = target.model.generate(ids, **options)[0, len(prompt) :].tolist()
    sampling = Sampling(LENGTH, NEVER)
    assert decode_plain(target, prompt, sampling).tokens == answer
    siblings = target.verifies == "tree"
    tree = TreeConfig(depth=DEPTH, top_k=2, nodes=1 + 2 * DEPTH) if siblings else chain(DEPTH)
    decoded = decode_speculative(target, LoadedMethod(GuessingDraft(prompt, answer, siblings), tree), prompt, sampling)
    assert decoded.tokens == answer and 1.5 < decoded.acceptance.tau < 3


@pytest.mark.parametrize("family", ["qwen3_5", "deepseek_v32", "lfm2", "qwen2_5_vl"])
def test_a_draft_of_its_states_decodes_as_training_estimates(family, dialogues, tmp_path):
    """From the dump to the gate: a draft that is trained on the stored states has, along the target's answers, the
    acceptance that is counted from the stored answers' states; its chain's answers are plain decoding's.
    """
    config = save(tmp_path / "target", family)
    recipe = make_small_recipe(config, dialogues, tmp_path / "run")
    dump_here(recipe)
    target = Target(config, "float32")
    method, sampling = LoadedMethod(train_briefly(recipe, target, "jakiro"), chain(DEPTH)), Sampling(LENGTH, NEVER)
    accepted = Counter()
    for place in range(4):
        prompt = prompt_of(place, 9)
        plain = decode_plain(target, prompt, sampling).tokens
        decoded = decode_speculative(target, method, prompt, sampling)
        assert decoded.tokens == plain
        text = [*prompt, *plain]
        counted = count_acceptance(method, target.states(text), text, len(prompt))
        assert counted == decoded.acceptance
        accepted += Counter(counted.accepted)
    assert sum(accepted.values()) > 0


@pytest.mark.long
def test_the_gate_lets_chains_round_as_plain_decoding_does(dialogues, tmp_path, monkeypatch):
    """A chain's sums are rounded otherwise than a step's, in float32 on a CPU as well: the drift decides. A verifier
    that keeps a rejected token in its states is seen.
    """
    config = save(tmp_path / "target", "qwen3_5")
    recipe, target = make_small_recipe(config, dialogues, tmp_path / "run"), Target(config, "float32")
    dump_here(recipe)
    jakiro, lookup = (
        train_briefly(recipe, target, "jakiro"),
        PromptLookup(PromptLookupConfig(), draft_shapes(target.config)),
    )
    tree = TreeConfig(depth=DEPTH, siblings="none")
    drafts = {
        "jakiro": LoadedMethod(jakiro, tree),
        "lookup": LoadedMethod(lookup, tree),
        "both": LoadedMethod(Sources(jakiro, {"lookup": lookup}), replace(tree, nodes=8)),
    }
    made = harness_of(recipe, target, drafts, max_new_tokens=24)
    prompts = [BenchmarkPrompt(str(n), "", (f"Question {n}?",)) for n in range(4)]
    for temperature in (0.0, 1.0):  # a chain of best candidates: plain decoding's tokens at any temperature
        for name in drafts:
            gate = measured(made, prompts, [temperature])[1]["bench", name, temperature]
            assert gate.passed and not gate.drawn and gate.identical == gate.checked == 4
            assert gate.rounds > 0  # also greedily: such an answer is not its own proof
    for method in drafts.values():
        prompt = prompt_of(2, 9) * 3
        text = [*prompt, *decode_plain(target, prompt, Sampling(LENGTH, NEVER)).tokens]
        decoded = decode_speculative(target, method, prompt, Sampling(LENGTH, NEVER))
        assert count_acceptance(method, target.states(text), text, len(prompt)) == decoded.acceptance
    monkeypatch.setattr(ChainCache, "keep", lambda cache, prefix, path=(): setattr(cache, "length", prefix + len(path)))
    assert not measured(made, prompts, [0.0])[1]["bench", "jakiro", 0.0].passed


def test_the_tuner_considers_chains_alone():
    config = SimpleNamespace(parallel_choices=lambda depth: [1], max_nodes=lambda tree: tree.depth + 1)
    for siblings, verifies in (("none", "tree"), ("best", "chain")):
        tree = TreeConfig(depth=2, top_k=1, nodes=3, siblings=siblings)
        method = SimpleNamespace(draft=SimpleNamespace(config=config), tree=tree)
        trees = list_trees(method, 16, 20, verifies)
        assert [(tree.depth, tree.top_k, tree.nodes) for tree in trees] == [(n, 1, n + 1) for n in range(1, 17)]


def test_two_chains_of_two_sources_give_the_better_one():
    """The draft's chain is likelier at first, the copied one further on: the length decides."""
    drafted = CandidatePool([7, 8], [0, 1], [0.0, 0.0]), [0.6, 0.1]
    copied = CandidatePool([5, 6, 9], [0, 1, 2], [0.0] * 3), [0.4, 0.4, 0.4]
    merged = merge([drafted, copied])
    assert merged.likeliest(2, chain=True) == ([7], [0])
    assert merged.likeliest(3, chain=True) == ([5, 6], [0, 1])
    assert merged.likeliest(9, chain=True) == ([5, 6, 9], [0, 1, 2])


@pytest.fixture
def chain_recipe(tiny_recipe, tmp_path) -> Callable[..., Recipe]:
    """Return a function that loads the tiny recipe, with more settings, for a target that verifies chains."""
    config, tree = save(tmp_path / "target", "lfm2"), tiny_recipe.model_dump(mode="json")
    tree["target"]["model"], tree["eval"]["methods"] = config.model, {}
    path = write_recipe(tree, tmp_path / "recipe")
    return lambda *sets: load_recipe(path, sets)


def test_a_tree_is_refused_with_the_line_that_works(chain_recipe):
    with pytest.raises(PipelineError, match=r"eval.tree: the tree of \w+ has siblings.* it has conv layers") as refusal:
        require_verifiable(chain_recipe())
    key, line = re.search(r"Set (\S+) = (\{[^}]*\}), or eval.tree = \"auto\"", str(refusal.value)).groups()
    for setting in (f"{key}={line}", "eval.tree=auto"):
        recipe = chain_recipe(setting)
        require_verifiable(recipe)
        assert all(method.is_chain for method in recipe.methods.values())
    assert chain_recipe("eval.tree=auto").eval.tree.depth == 6
    with pytest.raises(PipelineError, match=r"eval.methods.wide.tree: the tree of wide has siblings"):
        require_verifiable(chain_recipe("eval.tree=auto", "eval.methods.wide={draft='eagle', tree={depth=2}}"))
    assert chain_recipe("eval.tree={siblings='none', nodes=2}").eval.tree.depth == 1
    with pytest.raises(PipelineError, match=r"draft.skipper runs through the target's blocks"):
        require_verifiable(chain_recipe("eval.tree=auto", "draft.skipper={kind='skipper'}"))


def test_auto_is_the_default_tree_for_a_target_that_verifies_trees(tiny_recipe, tmp_path):
    tree = tiny_recipe.model_dump(mode="json")
    tree["eval"] |= {"tree": "auto", "methods": {}}
    assert load_recipe(write_recipe(tree, tmp_path / "recipe")).eval.tree == TreeConfig()


def test_the_page_lists_every_family_with_what_it_verifies():
    page, listed = (ROOT / "docs/your-own-target.md").read_text(), {"trees": set(), "chains": set(), "nothing": set()}
    for row in re.findall(r"^\| (trees|chains|nothing) \|(.*)\|$", page, re.MULTILINE):
        listed[row[0]] |= set(row[1].rpartition("|")[2].strip().split(", "))
    chains = {name for name in MULTIMODAL if find_tree_obstacle(family_config(name))}
    assert listed["trees"] == {*MORE_TREES, *MULTIMODAL} - chains
    assert listed["chains"] == {*CHAINS, *chains} and listed["nothing"] == {*READ_ALONE}


@pytest.mark.parametrize("family", ["minimax", "qwen3_next", "lfm2", "falcon_h1"])
def test_a_plan_counts_the_states_that_are_copied(family, tmp_path):
    config, counts = save(tmp_path, family), {}
    for dtype in ("bfloat16", "float32"):
        target = Target(config, dtype, verify=False)
        output = target.decoder(input_ids=torch.zeros(1, 2, dtype=torch.long), use_cache=True)
        counts[dtype] = state_bytes(output[cache_argument(target.decoder)])
    assert count_state_bytes(config, "bfloat16") == counts["bfloat16"] > 0
    assert counts["float32"] <= count_state_bytes(config, "float32") <= 2 * counts["float32"]


def test_a_configuration_without_positions_is_read(tmp_path):
    config = AutoConfig.for_model("mamba", hidden_size=32, num_hidden_layers=2, vocab_size=260)
    assert not hasattr(config, "max_position_embeddings") and declared_positions(config) == UNLIMITED
    assert draft_shapes(config)["max_position_embeddings"] == UNLIMITED


def test_abilities_are_those_of_the_configuration():
    assert not any(find_tree_obstacle(family_config(family)) for family in MORE_TREES)
    assert all(find_tree_obstacle(family_config(family)) for family in [*CHAINS, *READ_ALONE])
