"""Estimates of tau while training: how far the draft's tree, and a chain of the same depth, would be accepted along the
target's own answers.

The answers are the target's greedy ones to calibration prompts, which the dump stored with their features. A tree of
best candidates accepts the target's own tokens as far as it holds them, whatever verifies it; so the estimate counts,
from true features where decoding has true ones and from the draft's own elsewhere, what decoding these prompts counts.
`Decoder` decodes them, to confirm the estimate.
"""

from collections.abc import Callable
from functools import partial

import torch

from pipeline.basics.progress import Progress
from pipeline.decoding.accept import Acceptance
from pipeline.decoding.config import LoadedMethod, TreeConfig, chain
from pipeline.decoding.generate import Sampling, decode_speculative
from pipeline.decoding.replay import count_acceptance
from pipeline.drafts import TrainedDraft, make_untrained
from pipeline.features.schema import FeatureSpec, TextRow
from pipeline.features.shards import FeatureStore
from pipeline.lm.model import Target, load_tokenizer
from pipeline.lm.states import States
from pipeline.recipe.recipe import Recipe
from pipeline.running.cores import count_cores, read_omp_threads

TREE, CHAIN = "tree", "chain"
METHOD_PREFIX = "of "  # before the name of one of the recipe's methods


def tree_and_chain(draft: TrainedDraft, tree: TreeConfig) -> dict[str, LoadedMethod]:
    """Return the draft with its tree, and with the tree's chain."""
    return {
        TREE: LoadedMethod(draft, tree),
        CHAIN: LoadedMethod(draft, chain(tree.depth, tree.parallel, tree.candidates)),
    }


def load_hybrids(recipe: Recipe, name: str, draft: TrainedDraft) -> dict[str, LoadedMethod]:
    """Return the recipe's methods in which this draft has secondary sources."""
    tokenizer, hybrids_by_name = partial(load_tokenizer, recipe.target), {}
    for key, method in recipe.methods.items():
        if method.draft == name and method.secondary:
            sources = {
                source: make_untrained(recipe.draft[source], draft.shapes, tokenizer) for source in method.secondary
            }
            hybrids_by_name[f"{METHOD_PREFIX}{key}"] = method.load({name: draft, **sources})
    return hybrids_by_name


def estimate_acceptance(
    draft: TrainedDraft,
    methods: dict[str, LoadedMethod],
    answers: FeatureStore,
    rank: int,
    ranks: int,
    on_answer: Callable[[], None] = lambda: None,
) -> dict[str, Acceptance]:
    """Count the acceptance along this rank's share of the answers, by method. The draft, which all methods share, holds
    complete weights. `on_answer` is called after each answer.
    """
    counts = {name: Acceptance() for name in methods}
    for number in range(rank, len(answers), ranks):
        row = answers.row(number)
        states, tokens = stored_states(row, answers.spec).to(draft.device, draft.dtype), row.input_ids.tolist()
        begin = int(row.loss_mask.argmax())
        for name, method in methods.items():
            counts[name].merge(count_acceptance(method, states, tokens, begin))
        on_answer()
    return counts


def stored_states(row: TextRow, spec: FeatureSpec) -> States:
    """Return the stored states of a dialogue, as a forward of the target returns them."""
    return States(row.hidden_TD, row.auxiliary_TKD, tuple(spec.auxiliary_numbers))


def to_metrics(counts_by_method: dict[str, Acceptance]) -> dict[str, float]:
    """Return the figures for metrics.jsonl: taus, and the acceptance at each depth given the depth before it."""
    metrics = {"estimated_tau": counts_by_method[TREE].tau, "estimated_chain_tau": counts_by_method[CHAIN].tau}
    for name, counts in counts_by_method.items():
        if name in (TREE, CHAIN):
            metrics |= {
                f"{name}_acceptance_{depth}": rate for depth, rate in enumerate(counts.rate_by_depth(), start=1)
            }
        else:
            metrics[f"estimated_tau_of_{name.removeprefix(METHOD_PREFIX)}"] = counts.tau
    return metrics


class Decoder:
    """The target, loaded next to the training: decodes the calibration prompts as evaluation does."""

    def __init__(self, recipe: Recipe, answers: FeatureStore, draft: TrainedDraft, tree: TreeConfig):
        """Load the target; make a copy of `draft`, which trains, with its own weights in the target's dtype."""
        self._target = Target(recipe.target, recipe.target.dtype)
        self._answers = answers
        self._sampling = Sampling(recipe.features.answer_tokens, frozenset(self._target.stop_ids()))
        self._draft = draft.validation_copy().to(self._target.dtype).to_empty(device=self._target.device)
        self._method, self._fingerprint = LoadedMethod(self._draft, tree), draft.embed_head.fingerprint

    def tau(self, weights: dict[str, torch.Tensor], quiet: bool) -> float:
        """Return tau of greedy decoding with the draft's tree and these weights, cast to the target's dtype. On a CPU
        it uses the cores of the ranks that wait meanwhile, unless the user sets OMP_NUM_THREADS. `quiet`: show no
        progress bar.
        """
        threads = torch.get_num_threads()
        torch.set_num_threads(read_omp_threads() or count_cores())
        try:
            self._draft.load_state_dict(weights)
            self._draft.bind(self._target.embed_head(self._fingerprint))
            return self._decode_prompts(quiet).tau
        finally:
            torch.set_num_threads(threads)

    def _decode_prompts(self, quiet: bool) -> Acceptance:
        counts = Acceptance()
        with Progress("decode", len(self._answers), "prompts", quiet=quiet) as progress:
            for number in range(len(self._answers)):
                row = self._answers.row(number)
                prompt = row.input_ids[: int(row.loss_mask.argmax())].tolist()
                counts.merge(decode_speculative(self._target, self._method, prompt, self._sampling).acceptance)
                progress.advance(1, tau=f"{counts.tau:.2f}")
        return counts
