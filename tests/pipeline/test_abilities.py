"""What targets of many families can do, tiny and random: read texts, verify chains, verify trees."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from pipeline.basics.errors import PipelineError
from pipeline.decoding.config import LoadedMethod, TreeConfig, chain
from pipeline.decoding.contract import RoundInput
from pipeline.decoding.generate import Sampling, decode_plain, decode_speculative
from pipeline.decoding.tree import Tree, build_tree
from pipeline.lm.ability import find_tree_obstacle
from pipeline.lm.model import Target
from pipeline.lm.states import Needs
from tests.pipeline.families import CHAINS, MORE_TREES, MULTIMODAL, READ_ALONE, family_config, save
from tests.pipeline.taught import NEVER, prompt_of

LENGTH, DEPTH, WRONG = 24, 3, 5
STREAMS = ("deepseek_v4",)  # several states a token between layers
SUPPORT = SimpleNamespace(resolve=lambda tree: tree, max_level=lambda tree: tree.depth)


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
def test_a_target_that_forgets_the_text_before_a_chain_is_read_alone(family, tmp_path):
    config = save(tmp_path, family)
    require_the_models_states(Target(config, "float32", verify=False), prompt_of(1, 37), family)
    with pytest.raises(PipelineError, match="this architecture ignores a rejected token's removal"):
        Target(config, "float32")


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


def test_abilities_are_those_of_the_configuration():
    assert not any(find_tree_obstacle(family_config(family)) for family in MORE_TREES)
    assert all(find_tree_obstacle(family_config(family)) for family in [*CHAINS, *READ_ALONE])
