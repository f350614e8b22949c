"""Our own decoding with the chains that engines draft: the answers and counts that `parity.py` compares with theirs."""

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from infra.serving.engines import EngineAnswer
from pipeline.artifacts import checkpoint
from pipeline.artifacts.provenance import RECIPE as RECIPE_FILE
from pipeline.basics.errors import PipelineError
from pipeline.decoding.config import LoadedMethod, Method, TreeConfig, chain
from pipeline.decoding.generate import Generation, Sampling, decode_plain, decode_speculative
from pipeline.decoding.replay import count_acceptance
from pipeline.drafts import DraftConfig, make
from pipeline.drafts.parts.layers import draft_shapes
from pipeline.drafts.prompt_lookup import PromptLookupConfig
from pipeline.drafts.small_model import SmallLlamaConfig, SmallModel, SmallModelConfig
from pipeline.features.engines import open_source
from pipeline.features.source import GenerationPrompt
from pipeline.lm.model import Target, fingerprint, load_reader
from pipeline.lm.states import States
from pipeline.recipe.recipe import Recipe
from pipeline.serving.export import LOOKUP, LOOKUP_CHAIN

CHAIN, TOKENS = 3, 40
# Draft tokens of a chain, by the draft's name, if not CHAIN.
CHAINS = {"jakiro-scalar": 2, "gumiho": 5, "hydra": 4, "hydra-shared": 4}
WITH_LOOKUP = f" + {LOOKUP}"


def draft_of(method: str) -> str:
    return method.removesuffix(WITH_LOOKUP)


def method_of(name: str, config: DraftConfig) -> Method:
    """Return a method of this name: the draft's chain, its last tokens from one forward where the draft does so; or the
    better one of it and of copied tokens.
    """
    draft = draft_of(name)
    depth = CHAINS.get(draft, CHAIN)
    if name != draft:
        tree = TreeConfig(depth=depth, siblings="none", nodes=1 + LOOKUP_CHAIN)
        return Method(secondary=[LOOKUP]).resolve(config, draft, tree)
    return Method().resolve(config, name, chain(depth))


@dataclass
class LocalAnswer:
    """An answer of our own decoding."""

    generation: Generation
    drafted: list[int]  # draft tokens of each pass

    @property
    def tokens(self) -> list[int]:
        return self.generation.tokens

    @property
    def seconds(self) -> float:
        return self.generation.seconds


class LocalDecoding:
    """Answers of our own decoding, plain and with each method's chain."""

    def __init__(self, recipe: Recipe, prompts: list[list[int]]):
        self.target, self.fingerprint = Target(recipe.target, "float32"), fingerprint(recipe.target)
        self.sampling, self.prompts = Sampling(TOKENS, frozenset(self.target.stop_ids())), prompts
        self.plain_answers = [LocalAnswer(decode_plain(self.target, ids, self.sampling), []) for ids in self.prompts]
        self._config = recipe.target

    def method(self, release: Path, exported: Path) -> LoadedMethod:
        saved, placement = checkpoint.read_config(release), (self.target.device, self.target.dtype)
        if isinstance(saved.config, SmallLlamaConfig):  # it reads the full text, like any language model
            self.target.tokenizer.save_pretrained(exported)
            small = make(SmallModelConfig(model=str(exported)), draft_shapes(self.target.config))
            assert isinstance(small, SmallModel)
            reader_config = self._config.model_copy(update={"model": str(exported), "revision": None})
            small.attach_model(*load_reader(reader_config, *placement), self.target.tokenizer)
            return LoadedMethod(small, small.config.resolve(chain(CHAIN)))
        draft = checkpoint.load(release, self.fingerprint).to(*placement)
        draft.bind(self.target.embed_head(self.fingerprint))
        return saved.load_method(draft)

    def decode_chains(self, method: LoadedMethod) -> list[LocalAnswer]:
        """Decode all prompts with the draft's chain. Raise PipelineError if an answer differs from plain decoding's."""
        answers = []
        for ids in self.prompts:
            answer = LocalAnswer(Generation([]), [])
            count = lambda _, tree, __, drafted=answer.drafted: drafted.append(len(tree.tokens) - 1)  # noqa: E731
            answer.generation = decode_speculative(self.target, method, ids, self.sampling, count)
            answers.append(answer)
        if [answer.tokens for answer in answers] != [answer.tokens for answer in self.plain_answers]:
            raise PipelineError(f"our chain of {method.draft.name} gives other answers than plain decoding")
        return answers

    def estimate(self, method: LoadedMethod, python: str) -> tuple[list[EngineAnswer], list[LocalAnswer]]:
        """Return vLLM's answers and, from the states of the same pass, the acceptance estimated in training."""
        layers, options = method.draft.needs.auxiliary, {"enforce_eager": True, "max_model_len": 2048}
        settings = {"engine": "vllm", "engine_python": python, "engine_options": options, "dtype": "float32"}
        vllm, answers, estimates = open_source(self._config.model_copy(update=settings), layers), [], []
        for ids in self.prompts:
            begin = time.perf_counter()
            (answer,) = vllm.answers([GenerationPrompt(ids)], self.sampling, capture=True)
            answers.append(EngineAnswer(answer.tokens, 0, 0, len(answer.tokens) - 1, time.perf_counter() - begin))
            assert isinstance(answer.states_TSD, Tensor)
            states = States(answer.states_TSD[:, 0], answer.states_TSD[:, 1:], layers)
            counts = count_acceptance(method, states, [*ids, *answer.tokens], len(ids))
            generation = Generation(answer.tokens, acceptance=counts, untrimmed_tokens=counts.tokens)
            estimates.append(LocalAnswer(generation, [CHAIN] * counts.passes))
        vllm.close()
        return answers, estimates


def make_release(recipe: Recipe, name: str, folder: Path) -> Path:
    """Export the method's trained draft in the form of a release, without figures."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    draft = draft_of(name)
    trained = recipe.paths.draft(draft)
    method = method_of(name, recipe.draft[draft])
    sources: dict[str, DraftConfig] = {LOOKUP: PromptLookupConfig()} if method.secondary else {}
    checkpoint.export(trained, folder, method, sources, trained / RECIPE_FILE)
    return folder
