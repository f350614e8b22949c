"""The plug-in's drafting in vLLM, with a stand-in for vLLM's proposer: forwards, rows, probabilities, chains. `make
serve-test` compares the counts of the real one with ours.
"""

import math
import re
import subprocess
import sys
from collections import defaultdict
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from pipeline.basics.files import ROOT
from pipeline.decoding import pools
from pipeline.decoding.contract import RoundInput
from pipeline.decoding.sources import Sources
from pipeline.drafts.prompt_lookup import PromptLookup, PromptLookupConfig

WIDTH, VOCABULARY = 4, 6
PACKAGE = ROOT / "infra/vllm_jakiro"


class StandIn:
    """vLLM's proposer of EAGLE drafts, as far as ours uses it."""

    def __init__(self, model, probabilistic=False, padded=True):
        self.model, self._enable_probabilistic_draft_probs = model, probabilistic
        self.speculative_config = SimpleNamespace(disable_padded_drafter_batch=not padded)
        self.arange, self.asked, self.num_speculative_tokens = torch.arange(16), [], 3

    def initialize_attn_backend(self, *_):
        return "initialised"

    def dummy_run(self, *_):
        self.asked.append(self.num_speculative_tokens)

    def prepare_next_token_ids_cpu(self, sampled, requests, batch, *_):
        return torch.tensor([tokens[-1] if tokens else 0 for tokens in sampled])

    def set_inputs_first_pass(self, *_, **__):
        return 9, torch.tensor([3, 7]), None

    def build_per_group_and_layer_attn_metadata(self):
        """vLLM's proposer calls this once before each forward."""

    def _greedy_sample(self, hidden):
        return self.model.compute_logits(hidden).argmax(-1)

    def _sample_draft_tokens(self, hidden, _):
        if not self._enable_probabilistic_draft_probs:
            return self._greedy_sample(hidden), None
        return hidden.argmax(-1), hidden.softmax(-1)

    def propose(self, count, *, sampling_metadata, **_):
        self.asked.append(count)
        self.num_speculative_tokens = count
        self.set_inputs_first_pass()
        for _ in range(max(count, 1)):
            self.build_per_group_and_layer_attn_metadata()
        outputs = [self._sample_draft_tokens(torch.eye(VOCABULARY)[[n, n + 1]], None) for n in range(count)]
        self._last_draft_probs = torch.stack([probs for _, probs in outputs], 1) if outputs[0][1] is not None else None
        return torch.stack([tokens for tokens, _ in outputs], dim=1)


class StandInCounter:
    def __init__(self, counts, name):
        self._counts, self._name = counts, name

    def labels(self, source):
        return StandInCounter(self._counts, f"{self._name} {source}")

    def inc(self, count=1):
        self._counts[self._name] += count


@pytest.fixture
def proposer(monkeypatch):
    """The plug-in's module `proposer` with the stand-in."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("vllm", "vllm_jakiro")]:
        monkeypatch.delitem(sys.modules, name)
    rank = SimpleNamespace(number=0)
    for name, names in {
        "vllm": {},
        "vllm.distributed": {"get_tensor_model_parallel_rank": lambda: rank.number},
        "vllm.v1": {},
        "vllm.v1.spec_decode": {},
        "vllm.v1.spec_decode.eagle": {"EagleProposer": type("EagleProposer", (StandIn,), {})},
    }.items():
        module = ModuleType(name)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.syspath_prepend(str(PACKAGE))
    counts = defaultdict(int)
    monkeypatch.setattr("prometheus_client.Counter", lambda name, *_: StandInCounter(counts, name))
    import vllm_jakiro.proposer as module

    module.counts, module.rank = counts, rank
    module.install(SimpleNamespace(use_v2_model_runner=False))
    yield module
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm_jakiro"]:
        monkeypatch.delitem(sys.modules, name)


@pytest.fixture
def make(proposer):
    """A factory: make(forwards of a count, prompt lookup, ...) -> a proposer of vLLM's whose model is loaded."""

    class StandInDraft(proposer.FurtherTokens):
        def __init__(self, forwards, lookup):
            self.count_forwards, self.calls, self.places = forwards, [], []
            self.config = SimpleNamespace(prompt_lookup=lookup)

        def compute_logits(self, hidden):
            self.places.append(self.place)
            return hidden

        def predict_next(self, rows, tokens):
            self.calls.append((rows.tolist(), tokens.tolist()))
            return torch.eye(VOCABULARY)[[5 - tokens.shape[1], 0]]

    def factory(forwards, lookup=None, **options):
        base = sys.modules["vllm.v1.spec_decode.eagle"].EagleProposer
        made = base(StandInDraft(forwards, lookup), **options)
        assert made.initialize_attn_backend() == "initialised" and type(made) is proposer.Proposer
        return made

    return factory


def test_a_proposer_of_another_draft_stays_vllms_own(proposer):
    base = sys.modules["vllm.v1.spec_decode.eagle"].EagleProposer
    made = base(SimpleNamespace())
    made.initialize_attn_backend()
    assert type(made) is base


def test_a_runner_without_this_proposer_is_refused(proposer):
    with pytest.raises(ValueError, match="VLLM_USE_V2_MODEL_RUNNER=0"):
        proposer.install(SimpleNamespace(use_v2_model_runner=True))


def test_a_model_in_a_wrapper_is_recognised(make, proposer):
    base, inner = sys.modules["vllm.v1.spec_decode.eagle"].EagleProposer, make(lambda count: 1).model

    class Wrapper:
        unwrap = staticmethod(lambda: inner)

        def __getattr__(self, name):
            return getattr(inner, name)

    made = base(Wrapper())
    made.initialize_attn_backend()
    assert type(made) is proposer.Proposer
    for _ in range(2):  # the second round begins at the chain's first place again, although no forward of Python runs
        made.propose(3, sampling_metadata=None)
    assert inner.places == [0, 1, 2] * 2


def test_a_rank_without_a_request_runs_as_many_forwards(make):
    made = make(lambda count: count - 1)
    made.dummy_run(1)
    assert made.asked == [2] and made.num_speculative_tokens == 3


def test_the_last_token_comes_from_the_last_forward(make, proposer):
    made = make(lambda count: count - 1)
    assert made.propose(3, sampling_metadata=None).tolist() == [[0, 1, 3], [1, 2, 0]]
    assert made.asked == [2] and made.num_speculative_tokens == 3
    assert proposer.counts == {"jakiro_draft_rounds": 1, "jakiro_draft_forwards": 2}
    assert made.model.calls == [([0, 1], [[0, 1], [1, 2]])]


def test_two_tokens_of_one_forward_are_of_the_rows_that_it_sampled(make):
    made = make(lambda count: count - 1)
    assert made.propose(2, sampling_metadata=None).shape == (2, 2)
    assert made.asked == [1] and made.model.calls == [([3, 7], [[0], [1]])]


def test_each_further_token_sees_those_before(make):
    made = make(lambda count: min(count, 2))
    assert made.propose(4, sampling_metadata=None).tolist() == [[0, 1, 3, 2], [1, 2, 0, 0]]
    assert made.asked == [2] and [len(tokens[0]) for _, tokens in made.model.calls] == [2, 3]
    assert made.model.places == [0, 0, 2, 3]


def test_the_probabilities_of_drawn_tokens_go_along(make):
    made = make(lambda count: count - 1, probabilistic=True)
    tokens = made.propose(3, sampling_metadata=None)
    probs = made._last_draft_probs
    assert probs.shape == (2, 3, VOCABULARY) and torch.equal(probs.argmax(-1), tokens)
    assert torch.equal(probs[:, 2], torch.eye(VOCABULARY)[[3, 0]].softmax(-1))


def test_the_likeliest_tokens_are_those_of_the_drafts_own_logits(make):
    assert make(lambda count: count).model.get_top_tokens(torch.eye(VOCABULARY)[[4, 2]]).tolist() == [4, 2]


def ask(made, texts, sampled, limit, verified=(), computed=()):
    """One round, after these tokens were sampled for the requests of these texts. `verified`: their draft tokens;
    `computed`: how much of each text was computed before.
    """
    width = max(map(len, texts.values()))
    rows = np.array([[*text, *[-1] * (width - len(text))] for text in texts.values()])
    batch = SimpleNamespace(
        req_ids=list(texts),
        token_ids_cpu=rows,
        num_tokens_no_spec=[len(text) for text in texts.values()],
        num_computed_tokens_cpu=computed or [0] * len(texts),
        spec_token_ids=verified or [[]] * len(texts),
    )
    made.prepare_next_token_ids_cpu(sampled, dict.fromkeys(texts), batch, {})
    return made.propose(limit, sampling_metadata=None)


def test_each_request_gets_the_better_chain_of_its_draft_and_its_text(make, proposer):
    """The second text repeats itself, so its copy is longer and likelier than the draft's two tokens; the third is in a
    part of its prefill.
    """
    made = make(lambda count: count, lookup=2, padded=False)
    repeated = [50, 51, 52, 53, 54, 55, 50, 51, 52]
    chains = ask(made, {"a": [10, 11, 12], "b": repeated}, [[12], [52]], 5)
    assert chains == [[0, 1], [53, 54, 55, 50, 51]]
    assert made.asked == [2]
    verified = [chains[1], []]
    chains = ask(made, {"b": [*repeated, 53, 54, 9], "c": [1, 2]}, [[53, 54, 9], []], 5, verified)
    assert chains == [[0, 1], []]
    assert token_counts(proposer) == {"jakiro_proposed_tokens copy": 5, "jakiro_accepted_tokens copy": 2}


def token_counts(proposer):
    return {name: count for name, count in proposer.counts.items() if "tokens" in name}


@pytest.mark.parametrize(
    ("verified", "sampled", "counts"),
    [
        ([53, 54, 55], [53, 54, 55, 9], {"proposed": 3, "accepted": 3}),  # the scheduler cut the proposal
        ([], [53], {}),  # and dropped it
        ([0, 0, 0, 0, 0], [53], {}),  # vLLM verified others: near the longest text it does not draft
    ],
)
def test_only_verified_draft_tokens_are_counted(make, proposer, verified, sampled, counts):
    made = make(lambda count: count, lookup=2, padded=False)
    text = [50, 51, 52, 53, 54, 55, 50, 51, 52]
    ask(made, {"a": text, "b": [7, 8]}, [[52], [8]], 5)
    ask(made, {"a": [*text, *sampled], "b": [7, 8, 9]}, [sampled, [9]], 5, [verified, []])
    assert token_counts(proposer) == {f"jakiro_{name}_tokens copy": count for name, count in counts.items()}


def test_a_prompt_is_read_as_far_as_it_is_computed(make):
    made = make(lambda count: count, lookup=2, padded=False)
    ask(made, {"a": [1, 2, 3, 4], "b": [7, 8]}, [[], [8]], 2, computed=[3, 1])
    assert made._lookup._texts["a"].tokens == [1, 2, 3] and made._lookup._texts["b"].tokens == [7, 8]


def test_other_ranks_read_no_text(make, proposer):
    proposer.rank.number = 1
    made = make(lambda count: count, lookup=2, padded=False)
    assert ask(made, {"a": [1, 2], "b": [3, 4]}, [[2], [4]], 5) == [[], []]
    assert made.asked == [2] and made._lookup is None and not proposer.counts


@pytest.mark.parametrize("limit", [1, 2, 3, 6])
def test_the_chain_is_that_of_our_own_decoding(make, limit):
    """The stand-in's draft tokens, 0 and 1, have the same probability."""
    made, text = make(lambda count: count, lookup=2, padded=False), [0, 1, 2, 8, 0, 1, 9, 0]
    chain = ask(made, {"a": text, "b": [3, 4]}, [[0], [4]], limit)[0]
    log_p = torch.eye(VOCABULARY)[0].log_softmax(-1).max().item()
    draft = SimpleNamespace(
        name="scripted", config=None, stepwise=False, target_vocabulary=9, accept_probability=lambda _, x: math.exp(x)
    )
    lookup = PromptLookup(PromptLookupConfig(), {"target_layers": 2, "vocab_size": 9})
    sources = Sources(draft, {"prompt-lookup": lookup})
    drafted = pools.CandidatePool([0, 1][:limit], [0, 1][:limit], [log_p, 2 * log_p][:limit])
    copied = sources.propose_copies(SimpleNamespace(secondary={"prompt-lookup": lookup.open()}), RoundInput(text, None))
    assert chain == sources.merge_pools(drafted, copied).chain_tokens(limit)


def test_a_finished_requests_text_is_dropped(make):
    made = make(lambda count: count, lookup=1, padded=False)
    ask(made, {"a": [1, 2], "b": [3, 4]}, [[2], [4]], 2)
    ask(made, {"b": [3, 4, 5], "c": [6, 7]}, [[5], [7]], 2)
    assert list(made._lookup._texts) == ["b", "c"]


@pytest.mark.parametrize(
    ("options", "message"),
    [({}, "disable_padded_drafter_batch"), ({"padded": False, "probabilistic": True}, "draft_sample_method")],
)
def test_settings_that_prompt_lookup_does_not_support_are_refused(make, options, message):
    with pytest.raises(ValueError, match=message):
        make(lambda count: count, lookup=2, **options)


LINKS = {"pools.py": "pipeline/decoding/pools.py", "residual.py": "pipeline/drafts/parallel/residual.py"}


@pytest.mark.parametrize("name", LINKS)
def test_the_plug_in_has_files_of_the_pipeline_which_import_nothing_else_of_it(name):
    link = PACKAGE / "vllm_jakiro" / name
    assert link.is_symlink() and link.resolve() == ROOT / LINKS[name]
    assert not re.search(r"^\s*(from|import) pipeline", link.read_text(), re.MULTILINE)


def test_the_pools_require_the_standard_library_alone(tmp_path):
    alone = [sys.executable, "-I", "-S", "-c", f"exec(open({str(PACKAGE / 'vllm_jakiro/pools.py')!r}).read())"]
    subprocess.run(alone, cwd=tmp_path, check=True)
