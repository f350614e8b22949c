"""The dialogues of a step, the content of its batches, and the statistics of the texts."""

from itertools import islice

import numpy as np
import pytest
import torch

from infra.plan.share import Lengths, LengthsStore, working_share
from pipeline.basics.errors import PipelineError
from pipeline.drafts import make_objective
from pipeline.drafts.eagle3 import Eagle3Config
from pipeline.drafts.jakiro import JakiroConfig
from pipeline.drafts.parts.attention.chains import ANCHORS
from pipeline.features.positions import Horizons, trained_mask
from pipeline.features.schema import FeatureSpec, TextRow
from pipeline.features.shards import FeatureStore, write_features
from pipeline.lm.states import Needs
from pipeline.recipe.sections import DataConfig, TrainConfig
from preprocess.sources.read import TornTail, read_records
from tests.kit import labels_of, mask_of
from train.input.data import Batches
from train.input.order import Order, most_frequent_tokens, pack_rows, rows_of_rank, vocabulary_coverage

WIDTH = 4
SPEC = FeatureSpec(WIDTH, "float32", "target", "tokenizer", "template", "recipe")


def dialogue(number: int, tokens=None, mask=None) -> TextRow:
    """Return a dialogue; by default all its tokens are its own number, which identifies it in a batch."""
    generator = np.random.default_rng(number)
    length = len(tokens) if tokens is not None else int(generator.integers(3, 12))
    tokens = [number] * length if tokens is None else tokens
    mask = generator.integers(0, 2, length) if mask is None else mask
    hidden = torch.from_numpy(generator.standard_normal((length, WIDTH), dtype=np.float32))
    return TextRow(f"doc{number}", np.array(tokens, dtype=np.int32), np.array(mask, dtype=np.uint8), hidden)


def store_of(folder, rows, split="train") -> FeatureStore:
    """Spread over shards of seven rows."""
    write_features(folder, SPEC, {split: [rows[first : first + 7] for first in range(0, len(rows), 7)]})
    return FeatureStore(folder, split, SPEC)


@pytest.fixture
def store(tmp_path):
    return store_of(tmp_path, [dialogue(number) for number in range(37)])


def config(**changes) -> TrainConfig:
    return TrainConfig(**{"epochs": 3, "global_batch": 8, "micro_batch": 2, "dtype": "float32", **changes})


def batches(store, seed=5, rank=0, ranks=1, horizons=(1, 2), **changes) -> Batches:
    settings = config(**changes)
    return Batches(store, settings, Horizons(horizons), Needs(), seed, rank, ranks)


def dialogues_of(loader: Batches, step: int) -> list[int]:
    return [number for row in loader.order.rows_of(step) for number in row]


def numbers_in(batch) -> list[int]:
    return batch.tokens_BT[:, 0].tolist()


def test_the_order_needs_the_texts_alone_and_is_a_function_of_seed_and_epoch(store, tmp_path):
    for shard in tmp_path.glob("features-*"):
        shard.unlink()

    def order(seed):
        order_of_seed = Order(store, config(), seed)
        return [order_of_seed.rows_of(step) for step in range(order_of_seed.steps)]

    steps = order(5)
    assert steps == order(5) != order(6) and len(steps) == 12
    left_out = []
    for epoch in (steps[:4], steps[4:8], steps[8:]):  # 37 dialogues: five stay out of each epoch
        used = [number for rows in epoch for row in rows for number in row]
        assert len(used) == len(set(used)) == 32 and set(used) <= set(range(37))
        left_out.append(set(range(37)) - set(used))
    assert left_out[0] != left_out[1] != left_out[2] and steps[:4] != steps[4:8]
    again = Order(store, config(), 5)
    assert [again.rows_of(step) for step in (7, 2, 7)] == [steps[7], steps[2], steps[7]]
    for rows in steps:
        lengths = [len(dialogue(number).input_ids) for row in rows for number in row]
        assert lengths == sorted(lengths, reverse=True)  # the longest share a micro-batch


@pytest.fixture(scope="module")
def sharegpt():
    """The lengths of ShareGPT's dialogues in tokens, at 4.3 characters each and cut at 2,048, as one shard of texts."""
    settings = DataConfig(source="embedded:sharegpt")
    turns = [record.get("conversations", []) for record in islice(read_records(settings, TornTail()), 4000)]
    characters = np.array([size for record in turns if (size := sum(len(turn["value"]) for turn in record))])
    lengths_N = np.clip((characters / 4.3).astype(int), 8, 2048)
    return LengthsStore(Lengths(lengths_N))


@pytest.mark.parametrize(
    ("ranks", "global_batch", "micro_batch", "pack_tokens", "least", "most"),
    [
        (8, 16, 2, 2048, 0.98, 1.0),  # as recipes for GPUs are
        (8, 16, 1, 2048, 0.98, 1.0),
        (2, 16, 2, 2048, 0.98, 1.0),
        (8, 16, 2, None, 0.6, 0.75),  # as they were
        (8, 128, 1, None, 0.95, 1.0),  # as the recipes of drafts with many rows a step are
    ],
)
def test_ranks_get_equal_work(sharegpt, ranks, global_batch, micro_batch, pack_tokens, least, most):
    """The mean over ranks of a step's padded tokens, divided by the slowest rank's."""
    settings = config(global_batch=global_batch, micro_batch=micro_batch, pack_tokens=pack_tokens, epochs=1)
    share = working_share(sharegpt.texts.lengths_N, settings, ranks, torch.device("cpu"))
    order = Order(sharegpt, settings.model_copy(update={"window": 1}), 5)
    mean = slowest = 0.0
    for step in range(order.steps):
        rows, loads = order.rows_of(step), np.zeros(ranks)
        for rank in range(ranks):
            for turn in range(settings.accumulation(ranks)):
                lengths = [
                    sum(sharegpt.texts.lengths_N[number] - 1 for number in row)
                    for row in rows_of_rank(rows, turn, rank, ranks, micro_batch)
                ]
                assert len(lengths) == micro_batch
                loads[rank] += micro_batch * (pack_tokens or max(lengths))
        mean += sum(sharegpt.texts.lengths_N[number] - 1 for row in rows for number in row) / ranks
        slowest += loads.max()
    print(f"{ranks} ranks, {global_batch} rows, packed into {pack_tokens}: {mean / slowest:.3f}, a plan's {share:.3f}")
    assert least < mean / slowest <= most
    assert share == pytest.approx(mean / slowest, abs=0.02), "a plan draws from a sample"


@pytest.mark.parametrize(
    ("lengths", "ranks", "keys", "share"),
    [
        ([101], 2, {"global_batch": 4, "micro_batch": 2}, 1.0),  # 100 inputs each
        ([101], 1, {"global_batch": 4, "micro_batch": 2, "pack_tokens": 250}, 0.8),  # two fit
        ([101], 1, {"global_batch": 4, "micro_batch": 2, "pack_tokens": 400}, 1.0),
        # one rank pads 21 to 101 or not, by chance: (2 x 100 or 120 or 2 x 20) of 200, 200 or 40, each as likely
        ([21, 101], 1, {"global_batch": 2, "micro_batch": 2}, (200 + 2 * 120 + 40) / (200 + 2 * 200 + 40)),
        ([21, 101], 2, {"global_batch": 2, "micro_batch": 1}, (200 + 2 * 120 + 40) / 2 / (100 + 2 * 100 + 20)),
    ],
)
def test_the_working_share_of_simple_lengths(lengths, ranks, keys, share):
    settings = config(epochs=1, **keys)
    assert working_share(lengths, settings, ranks, torch.device("cpu")) == pytest.approx(share, abs=0.06)


# -- windows --------------------------------------------------------------------------------------------------------

ROWS = [range(first, min(first + 7, 37)) for first in range(0, 37, 7)]  # of the six shards, the last one's are two


def test_what_fits_one_window_is_in_the_order_of_one_permutation(store):
    for window in (None, 6, 100):
        steps = Order(store, config(window=window), 5)
        for epoch in range(3):
            order = np.random.default_rng((5, epoch)).permutation(37).tolist()
            for place in range(4):
                rows = sorted(number for row in steps.rows_of(4 * epoch + place) for number in row)
                assert rows == sorted(order[8 * place : 8 * place + 8])
    assert Order(store, config(), 5).window > 1e5  # 4 GB of the shards' 1 kB


@pytest.mark.parametrize("window", [1, 2, 4])
def test_an_epoch_shuffles_the_rows_of_one_window_after_the_other(store, window):
    """The expected order, computed by hand: shards in the epoch's order, cut into windows, each window's rows shuffled
    on their own.
    """
    order, orders = Order(store, config(window=window, global_batch=1), 5), []
    for epoch in range(2):
        random, want = np.random.default_rng((5, epoch)), []
        shards = random.permutation(6).tolist()
        for first in range(0, 6, window):
            rows = [number for shard in shards[first : first + window] for number in ROWS[shard]]
            want += random.permutation(rows).tolist()
        orders.append([number for step in range(37) for row in order.rows_of(37 * epoch + step) for number in row])
        assert orders[-1] == want and sorted(want) == list(range(37))
    assert orders[0] != orders[1] and [n // 7 for n in orders[0]] != [n // 7 for n in orders[1]]


@pytest.mark.parametrize("pack_tokens", [None, 20])
@pytest.mark.parametrize("window", [1, 2, 3])
def test_no_more_shards_than_two_windows_are_needed_at_once(store, window, pack_tokens):
    """The shards needed at each step: those that it or an earlier one of its epoch has read and it or a later one
    reads.
    """
    order = Order(store, config(window=window, global_batch=2, micro_batch=2, pack_tokens=pack_tokens), 5)
    assert max(map(len, order.rows)) > (pack_tokens is not None)
    assert all(len({number // 7 for number in row}) == 1 for row in order.rows)
    most, straddled = 0, 0
    for step in range(order.steps):
        epoch_ends = (step // order.steps_per_epoch + 1) * order.steps_per_epoch
        read = [{number // 7 for row in order.rows_of(later) for number in row} for later in range(step, epoch_ends)]
        assert order.reads.of_steps[step] == read[0]
        shards = np.random.default_rng((5, step // order.steps_per_epoch)).permutation(6).tolist()
        touched = sorted({shards.index(shard) // window for shard in read[0]})
        before = set().union(*order.reads.of_steps[epoch_ends - order.steps_per_epoch : step + 1])
        held = before & set().union(*read)
        assert held <= {shard for at in touched for shard in shards[at * window : (at + 1) * window]}
        assert touched in ([touched[0]], [touched[0], touched[0] + 1])
        most, straddled = max(most, len(held)), straddled + len(touched) - 1
    assert straddled and window <= most <= 2 * window


def contents(parts):
    """Return dialogue -> (features with their noise, labels, masks, totals), without the padding."""
    out = {}
    for part in parts:
        for b, number in enumerate(numbers_in(part)):
            n = len(dialogue(number).input_ids) - 1
            masks = tuple(tuple(mask_of(part, h)[b, :n].tolist()) for h in (1, 2))
            hidden, labels = part.hidden_BTD[b, :n].flatten(), labels_of(part)[b, :n].flatten()
            out[number] = tuple(hidden.tolist()), tuple(labels.tolist()), masks, tuple(part.totals.items())
    return out


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize(("ranks", "micro"), [(2, 4), (4, 2), (1, 2), (8, 1)])
def test_what_a_dialogue_trains_on_does_not_depend_on_ranks(store, ranks, micro, window):
    """Noise and totals included, to the bit; each is in one micro-batch of one rank."""
    shares = [batches(store, rank=rank, ranks=ranks, micro_batch=micro, window=window) for rank in range(ranks)]
    for step in (0, 3, 5):
        reference = batches(store, micro_batch=8, window=window)
        parts = [part for share in shares for part in share.micro_batches(step)]
        assert all(len(part.tokens_BT) == micro for part in parts)
        assert sorted(n for part in parts for n in numbers_in(part)) == sorted(dialogues_of(reference, step))
        assert contents(parts) == contents(reference.micro_batches(step)) and len(contents(parts)) == 8


@pytest.mark.parametrize(("ranks", "micro"), [(1, 2), (2, 4), (4, 2)])
def test_the_anchors_of_a_step_do_not_depend_on_ranks_or_on_where_a_training_resumes(store, ranks, micro):
    objective = make_objective(Eagle3Config(ttt_steps=3, anchors=2))

    def anchors_from(first, ranks, micro):
        """By step and dialogue."""
        drawn = {}
        for rank in range(ranks):
            loader = Batches(store, config(micro_batch=micro), objective, Needs(), 5, rank, ranks)
            for step, parts in loader.from_step(first):
                for batch in parts:
                    inputs, width = batch.positions[ANCHORS].inputs, batch.tokens_BT.shape[1]
                    for row, number in enumerate(numbers_in(batch)):
                        drawn[step, number] = inputs[inputs // width == row].remainder(width).tolist()
        return drawn

    from_start = anchors_from(0, 1, 2)
    assert anchors_from(0, ranks, micro) == from_start
    resumed = anchors_from(6, ranks, micro)
    assert resumed == {key: x for key, x in from_start.items() if key[0] >= 6} and resumed
    by_dialogue = {}
    for (_, number), inputs in from_start.items():
        by_dialogue.setdefault(number, set()).add(tuple(inputs))
    assert max(map(len, by_dialogue.values())) > 1  # drawn again at each step


@pytest.mark.parametrize("pack_tokens", [None, 20])
@pytest.mark.parametrize(("ranks", "micro"), [(1, 4), (1, 1), (2, 1)])
def test_by_dialogue_each_dialogue_of_the_global_batch_has_the_same_weight(store, ranks, micro, pack_tokens):
    """Where it has a position: the weights of a dialogue's positions add up to N / D, their number in the global batch
    over the number of dialogues that have one.
    """
    settings = config(global_batch=4, micro_batch=micro, pack_tokens=pack_tokens, weighting="dialogue")
    loaders = [Batches(store, settings, make_objective(JakiroConfig()), Needs(), 5, n, ranks) for n in range(ranks)]
    lacking, unequal = 0, 0
    for step in range(6):
        sums = {1: {}, 2: {}}
        parts = [part for loader in loaders for part in loader.micro_batches(step)]
        for part in parts:
            for horizon, positions in part.positions.items():
                number_M = part.tokens_BT.flatten()[positions.inputs]  # a dialogue's tokens are its number
                for number, weight in zip(number_M.tolist(), positions.weights.tolist(), strict=True):
                    sums[horizon].setdefault(number, []).append(weight)
        for horizon, by_number in sums.items():
            total = parts[0].totals[horizon]
            assert sum(map(len, by_number.values())) == total
            for weights in by_number.values():
                assert len(set(weights)) == 1 and sum(weights) == pytest.approx(total / len(by_number), rel=1e-6)
        lacking += len(dialogues_of(loaders[0], step)) - len(sums[2])
        unequal += len({len(weights) for weights in sums[1].values()}) > 1
    assert lacking and unequal


def test_totals_count_the_whole_global_batch(store):
    shares = [batches(store, rank=rank, ranks=2) for rank in (0, 1)]
    for step in range(shares[0].order.steps):
        parts = [part for share in shares for part in share.micro_batches(step)]
        for horizon in (1, 2):
            masks = [dialogue(number).loss_mask for number in dialogues_of(shares[0], step)]
            want = sum(int(trained_mask(mask, horizon).sum()) for mask in masks)
            assert {part.totals[horizon] for part in parts} == {want}
            assert sum(len(part.positions[horizon]) for part in parts) == want


def test_noise_differs_by_epoch_and_can_be_switched_off(store):
    noisy, clean = batches(store, noise=0.5), batches(store, noise=0)

    def offsets(step):
        got, plain = contents(noisy.micro_batches(step)), contents(clean.micro_batches(step))
        assert all(got[number][1:] == plain[number][1:] for number in got)  # labels, masks, totals
        return {number: np.array(got[number][0]) - np.array(plain[number][0]) for number in got}

    first, later = offsets(0), {}
    for step in range(4, 8):
        later |= offsets(step)
    common = first.keys() & later.keys()
    assert common and all(not np.array_equal(first[number], later[number]) for number in common)
    assert all(0.1 < np.abs(offset).max() <= 0.5 + 1e-6 for offset in first.values())
    for number, (hidden, *_) in contents(clean.micro_batches(0)).items():
        assert hidden == tuple(dialogue(number).hidden_TD[:-1].flatten().tolist())


@pytest.mark.parametrize("window", [None, 2])
def test_reading_ahead_gives_the_same_batches_from_any_step(store, window):
    """The step may lie in the middle of a window."""
    loader = batches(store, window=window)
    for first in (0, 5, 11, 12):
        got = list(loader.from_step(first))
        assert [step for step, _ in got] == list(range(first, 12))
        assert all(contents(parts) == contents(loader.micro_batches(step)) for step, parts in got)


@pytest.mark.parametrize(("window", "pack_tokens"), [(None, None), (2, None), (2, 20)])
def test_a_budget_of_tokens_ends_with_the_step_that_reaches_it(store, tmp_path, window, pack_tokens):
    """The step lies in the first epoch, at the very end of one, and in the middle of another."""
    changes = {"global_batch": 4, "window": window, "pack_tokens": pack_tokens}
    full_order = Order(store, config(**changes), 5)
    batches_of = [[n for row in full_order.rows_of(step) for n in row] for step in range(full_order.steps)]
    trained = [sum(int(dialogue(number).loss_mask.sum()) for number in batch) for batch in batches_of]
    sums, per_epoch = np.cumsum(trained).tolist(), full_order.steps_per_epoch
    assert min(trained) > 0
    for steps in (1, per_epoch, per_epoch + 1, full_order.steps - 1):
        for tokens in (sums[steps - 1] - trained[steps - 1] + 1, sums[steps - 1]):
            order = Order(store, config(**changes, tokens=tokens), 5)
            assert order.steps == steps and order.rows_of(steps - 1) == full_order.rows_of(steps - 1)
    with pytest.raises(PipelineError, match=r"train.tokens=1, but no training dialogue"):
        Order(store_of(tmp_path / "none", [dialogue(n, [n] * 5, [0] * 5) for n in range(8)]), config(tokens=1), 5)


# -- packed rows ----------------------------------------------------------------------------------------------------


def test_packed_rows_hold_every_dialogue_once_and_overflow_never(store):
    rows = pack_rows(store.texts, 20, 3, [37])
    inputs = {n: len(dialogue(n).input_ids) - 1 for n in range(37)}
    assert sorted(n for row in rows for n in row) == list(range(37))
    filled = [sum(inputs[n] for n in row) for row in rows]
    assert max(filled) <= 20 and len(rows) <= sum(inputs.values()) / 20 * 11 / 9 + 1  # first-fit decreasing's bound
    assert rows == pack_rows(store.texts, 20, 3, [37]) != pack_rows(store.texts, 20, 4, [37])


@pytest.mark.parametrize(("ranks", "micro"), [(1, 4), (2, 2), (4, 1)])
def test_packed_batches_have_one_shape_and_do_not_depend_on_ranks(store, ranks, micro):
    """All ranks get the same number of tokens in every step; what a dialogue trains on, noise included, is the same."""
    changes = {"pack_tokens": 20, "global_batch": 4, "noise": 0.3}

    def read_dialogues(ranks, micro):
        out = {}
        for rank in range(ranks):
            loader = batches(store, rank=rank, ranks=ranks, micro_batch=micro, **changes)
            for step in range(loader.order.steps):
                for part in loader.micro_batches(step):
                    assert part.tokens_BT.shape == (micro, 20)
                    for b, ids in enumerate(part.documents):
                        out[step, tuple(ids)] = [
                            part.hidden_BTD[b].tolist(), labels_of(part)[b].tolist(), part.begins_BT[b].tolist(),
                            mask_of(part, 2)[b].tolist(), part.totals,
                        ]  # fmt: skip
        return out

    assert read_dialogues(ranks, micro) == read_dialogues(1, 2)


def test_a_packed_row_holds_its_dialogues_one_behind_the_other(store):
    loader = batches(store, pack_tokens=20, global_batch=4, noise=0)
    (part, *_) = loader.micro_batches(0)
    for b, ids in enumerate(part.documents):
        begin = 0
        for doc_id in ids:
            row = dialogue(int(doc_id.removeprefix("doc")))
            inputs = slice(begin, begin + len(row.input_ids) - 1)
            assert torch.equal(part.hidden_BTD[b, inputs], row.hidden_TD[:-1])
            assert torch.equal(labels_of(part)[b, inputs], row.hidden_TD[1:])
            assert mask_of(part, 1)[b, inputs].tolist() == trained_mask(row.loss_mask, 1).tolist()
            assert part.begins_BT[b, inputs].tolist() == [begin] * (inputs.stop - begin)
            begin = inputs.stop
        assert part.begins_BT[b, begin:].tolist() == [begin] * (20 - begin)
    assert loader.order.dialogues == sum(
        len(dialogues_of(loader, step)) for step in range(loader.order.steps_per_epoch)
    )


def test_too_few_dialogues_and_one_longer_than_a_row_are_refused(tmp_path, store):
    with pytest.raises(PipelineError, match=r"pack_tokens=6, but dialogue doc\d+ has 10 inputs"):
        pack_rows(store.texts, 6, 0, [37])
    few = store_of(tmp_path, [dialogue(number) for number in range(7)])
    with pytest.raises(PipelineError, match=r"7 training dialogues do not fill one global batch of 8"):
        batches(few)
    assert batches(few, global_batch=7, micro_batch=7).order.steps_per_epoch == 1


@pytest.mark.parametrize(("ranks", "micro"), [(3, 1), (2, 8), (1, 3), (16, 1)])
def test_a_global_batch_that_cannot_be_shared_out_is_refused(store, ranks, micro):
    with pytest.raises(
        PipelineError, match=rf"global_batch=8 is no multiple of micro_batch x ranks = {micro} x {ranks}"
    ):
        batches(store, ranks=ranks, micro_batch=micro)


# -- validation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 8, 17])
@pytest.mark.parametrize(("ranks", "micro"), [(1, 4), (3, 2), (4, 1)])
def test_validation_covers_each_dialogue_once_in_equally_many_batches(store, tmp_path, count, ranks, micro):
    rows = [dialogue(number, mask=[1] * 5, tokens=[number] * 5) for number in range(count)]
    heldout = store_of(tmp_path / "heldout", rows)
    changes = {"ranks": ranks, "micro_batch": micro, "global_batch": ranks * micro}
    shares = [list(batches(store, rank=rank, **changes).validation(heldout, 0)) for rank in range(ranks)]
    assert len({len(share) for share in shares}) == 1
    dialogues = []
    for share in shares:
        for batch in share:
            assert batch.totals == {1: 1, 2: 1}
            assert len(batch.tokens_BT) <= micro
            trained_rows = mask_of(batch, 1).any(1)
            assert trained_rows.all() or not (mask_of(batch, 1).any() or mask_of(batch, 2).any())
            dialogues += torch.tensor(numbers_in(batch))[trained_rows].tolist()
    assert sorted(dialogues) == list(range(count))
    noisy, clean = (
        [
            b.to(torch.device("cpu"), torch.float32).hidden_BTD
            for b in batches(store, noise=noise).validation(heldout, 0)
        ]
        for noise in (0.5, 0.0)
    )
    assert all(torch.equal(a, b) for a, b in zip(noisy, clean, strict=True))  # which is training's alone


# -- the reduced vocabulary -----------------------------------------------------------------------------------------


@pytest.fixture
def counted(tmp_path):
    """Assistant tokens: 7 three times, 2 and 5 and 9 twice, 3 once; 1 only in questions."""
    return store_of(
        tmp_path,
        [
            dialogue(0, [1, 1, 1, 7, 9, 2], [0, 0, 0, 1, 1, 1]),
            dialogue(1, [1, 7, 5, 9, 5], [0, 1, 1, 1, 1]),
            dialogue(2, [3, 2, 7, 8], [1, 1, 1, 0]),
        ],
    )


@pytest.mark.parametrize(
    ("size", "want"),
    [
        (1, [7]),
        (3, [2, 5, 7]),  # 2, 5 and 9 tie: the smaller id goes first
        (7, [0, 1, 2, 3, 5, 7, 9]),  # those that never occur tie, too
        (12, list(range(12))),
    ],
)
def test_frequent_tokens(counted, size, want):
    got = most_frequent_tokens(counted.texts, 12, size)
    assert (got.dtype, got.tolist()) == (torch.long, want)


@pytest.mark.parametrize(("ids", "share"), [([7], 3 / 10), ([2, 7], 5 / 10), ([2, 3, 5, 7, 9], 1.0), ([1, 8], 0.0)])
def test_coverage_is_the_share_of_assistant_tokens(counted, ids, share):
    assert vocabulary_coverage(counted.texts, torch.tensor(ids)) == share
