"""Reading and estimating in training, on a make-believe accelerator (tests/strict.py)."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pipeline.basics.accelerator import WIDTH_STEP, pad_width
from pipeline.decoding.generate import Sampling, decode_speculative
from pipeline.drafts import make_objective
from pipeline.drafts.parallel.dflash import DFlashConfig, block_ranges, pad_anchors
from pipeline.drafts.parallel.p_eagle import PEagle, PEagleConfig, lay_out_inputs
from pipeline.drafts.parts.attention.ranges import range_mask
from pipeline.features.positions import Horizons
from pipeline.features.schema import FP8, FeatureSpec, TextRow, row_dtype
from pipeline.features.shards import FeatureStore, write_features
from pipeline.lm.states import Needs
from pipeline.recipe.sections import TrainConfig
from tests.kit import labels_of, mask_of
from tests.pipeline.taught import NEVER, VARIANTS, grown, make_draft, prompt_of
from tests.strict import DEVICE, rehearsal
from train.acceptance import estimate_acceptance
from train.engine.engine import TrainingEngine
from train.input.data import Batches

WIDTH, LAYERS = 8, (1, 3)


def store_of(folder, stored_dtype: str, auxiliary: bool) -> FeatureStore:
    spec = FeatureSpec(
        target="t", tokenizer="k", template="c", recipe="r", stored_dtype=stored_dtype, hidden_size=WIDTH,
        auxiliary_layers=" ".join(map(str, LAYERS)) if auxiliary else "",
    )  # fmt: skip
    generator, rows, dtype = torch.Generator().manual_seed(0), [], row_dtype(stored_dtype)
    for number, length in enumerate((9, 5, 12, 3, 7, 7, 4, 10)):
        states = torch.randn(length, 1 + len(LAYERS), WIDTH, generator=generator).to(dtype)
        mask = np.ones(length, np.uint8)
        more = states[:, 1:] if auxiliary else None
        rows.append(TextRow(f"doc{number}", np.full(length, number, np.int32), mask, states[:, 0], more))
    write_features(folder, spec, {"train": [rows]})
    return FeatureStore(folder, "train", spec)


def reader(store: FeatureStore, **changes) -> Batches:
    settings = {"epochs": 2, "global_batch": 8, "micro_batch": 4, "dtype": "bfloat16", "noise": 0, **changes}
    needs = Needs(auxiliary=LAYERS if store.spec.auxiliary else ())
    return Batches(store, TrainConfig(**settings), Horizons([1, 2]), needs, 5, 0, 1)


def unpadded(padded, want) -> torch.Tensor:
    """Return a device's tensor (B, T, ...) without the padding that makes its width a multiple."""
    assert padded.raw.shape[1] == WIDTH_STEP
    return padded.raw[:, : want.shape[1]]


@pytest.mark.parametrize("packed", [None, 24])
@pytest.mark.parametrize("auxiliary", [False, True])
@pytest.mark.parametrize("stored_dtype", ["float32", "bfloat16", FP8])
def test_what_is_read_for_the_device_is_what_the_cpu_reads(tmp_path, stored_dtype, auxiliary, packed):
    """Float8 is copied to the device as it is stored, and is decoded there, to the bit; the reader's thread copies it
    without blocking.
    """
    store = store_of(tmp_path / "features", stored_dtype, auxiliary)
    changes = {"pack_tokens": packed, "global_batch": 2, "micro_batch": 1} if packed else {}
    loader = reader(store, **changes)
    with rehearsal() as device_log:
        for (_, cpu_batches), (_, device_batches) in zip(loader.from_step(0), loader.from_step(0, DEVICE), strict=True):
            for want, got in zip(cpu_batches, device_batches, strict=True):
                assert (got.final_BLD.dtype == torch.float8_e4m3fn) == (stored_dtype == FP8)
                got, want = got.to(DEVICE, torch.bfloat16), want.to(torch.device("cpu"), torch.bfloat16)
                names = ("hidden_BTD", "auxiliary_BTSD", "tokens_BT", "begins_BT", "before_BT")
                both = [(labels_of(got), labels_of(want)), *((getattr(got, n), getattr(want, n)) for n in names)]
                for got_value, want_value in both:
                    assert got_value is want_value is None or torch.equal(unpadded(got_value, want_value), want_value)
        assert not device_log.waits and not device_log.copies


def test_few_widths_occur_on_the_device(tmp_path):
    """cuDNN plans anew for each, and one whose keys are 64 more than a multiple of 128 has a gradient that can be NaN.
    Rows have all lengths of ShareGPT's range, and nearly every micro-batch has another one.
    """
    spec = replace(store_of(tmp_path / "small", "float32", False).spec)
    lengths = np.random.default_rng(0).lognormal(5.5, 0.9, 600).astype(int).clip(8, 2048)
    rows = [
        TextRow(f"doc{n}", np.full(length, 7, np.int32), np.ones(length, np.uint8), torch.zeros(length, WIDTH), None)
        for n, length in enumerate(lengths.tolist())
    ]
    write_features(tmp_path / "features", spec, {"train": [rows]})
    store = FeatureStore(tmp_path / "features", "train", spec)
    loader = reader(store, global_batch=4, micro_batch=2, epochs=1)

    def widths(device: torch.device) -> set[int]:
        steps = range(loader.order.steps)
        return {batch.tokens_BT.shape[1] for step in steps for batch in loader.micro_batches(step, device)}

    with rehearsal():
        padded = widths(DEVICE)
    assert len(widths(torch.device("cpu"))) > 150 and len(padded) <= 2048 // WIDTH_STEP
    assert all(width % WIDTH_STEP == 0 for width in padded)


@pytest.mark.parametrize("kind", [DFlashConfig(block=4, anchors=16), PEagleConfig(depths=3)])
def test_few_shapes_of_attention_occur_in_drafts_that_lay_out_their_inputs(kind):
    """On the device the numbers of queries and keys of p-eagle's and dflash's pieces are multiples, too."""
    pairs = {torch.device("cpu"): set(), DEVICE: set()}
    objective = make_objective(kind)
    with rehearsal():
        for length in range(20, 400, 7):
            ids, mask = np.full(length, 7, np.int32), np.ones(length, np.uint8)
            positions = objective.positions(ids, mask, (length,))
            for device, seen in pairs.items():
                width = pad_width(length - 1, device)
                if isinstance(kind, PEagleConfig):
                    tokens = torch.zeros(1, width, dtype=torch.long, device=device)
                    layout_R2, _ = lay_out_inputs(SimpleNamespace(tokens_BT=tokens, positions=positions))
                    draft = SimpleNamespace(config=kind)
                    mask = PEagle._mask(draft, np.zeros(len(layout_R2), np.int64), layout_R2, width, device)
                else:
                    inputs_A = pad_anchors(positions[1].inputs.numpy(), kind.block, device)
                    ranges_R4 = block_ranges(np.zeros_like(inputs_A), inputs_A, width, kind.block)
                    mask = range_mask(ranges_R4, width, width + len(ranges_R4), device)
                for piece in mask.pieces:
                    parts = [part.stop - part.start for part in (piece.queries, piece.context, piece.further)]
                    seen.add((parts[0], parts[1] + parts[2]))
    on_cpu, on_device = pairs.values()
    assert len(on_cpu) > 40 and len(on_device) <= 9
    assert not any(keys % 128 == 64 for _, keys in on_device)


def test_validation_is_read_for_the_device_likewise(tmp_path):
    store = store_of(tmp_path / "features", FP8, True)
    config = TrainConfig(global_batch=6, micro_batch=2, dtype="bfloat16", noise=0.5)
    with rehearsal() as device_log:
        for rank in range(3):
            share = Batches(store, config, Horizons([1]), Needs(auxiliary=LAYERS), 0, rank, 3)
            both = zip(share.validation(store, 0), share.validation(store, 0, DEVICE), strict=True)
            for number, (want, got) in enumerate(both):
                assert want.final_BLD.dtype == torch.bfloat16 and not got.noise
                got = got.to(DEVICE, torch.bfloat16)
                assert torch.equal(unpadded(got.hidden_BTD, want.hidden_BTD), want.hidden_BTD)
                assert torch.equal(unpadded(got.auxiliary_BTSD, want.auxiliary_BTSD), want.auxiliary_BTSD)
                assert mask_of(got, 1).any() == (number == 0 or rank == 0)  # the others have nothing left
        assert not device_log.waits and not device_log.copies


def test_noise_on_the_device_depends_on_the_dialogue_and_the_epoch_alone(tmp_path):
    store = store_of(tmp_path / "features", "float32", False)

    def offsets(step: int, **changes) -> dict[str, torch.Tensor]:
        noise_of, changes = {}, {"dtype": "float32", **changes}
        noisy, clean = (reader(store, noise=noise, **changes).micro_batches(step, DEVICE) for noise in (0.5, 0))
        for batch, plain in zip(noisy, clean, strict=True):
            batch, plain = (item.to(DEVICE, torch.float32) for item in (batch, plain))
            assert torch.equal(labels_of(batch).raw, labels_of(plain).raw)
            offset_BTD = batch.hidden_BTD.raw - plain.hidden_BTD.raw
            for b, names in enumerate(batch.documents):
                begins_T = plain.begins_BT.raw[b] if plain.begins_BT is not None else torch.zeros(offset_BTD.shape[1])
                lengths = {f"doc{n}": length - 1 for n, length in enumerate((9, 5, 12, 3, 7, 7, 4, 10))}
                for name, begin in zip(names, begins_T.unique().tolist(), strict=False):
                    noise_of[name] = offset_BTD[b, int(begin) : int(begin) + lengths[name]]
                    noise_of[name + " end"] = offset_BTD[b, sum(lengths[item] for item in names) :]
        return noise_of

    with rehearsal() as device_log:
        first, again, later = offsets(0), offsets(0, micro_batch=2), offsets(1)
        in_one_row = offsets(0, pack_tokens=64, global_batch=1, micro_batch=1)
        assert not device_log.waits and not device_log.copies
    for number in range(8):
        noise_BD = first[f"doc{number}"]
        assert torch.equal(noise_BD, again[f"doc{number}"]) and not torch.equal(noise_BD, later[f"doc{number}"])
        torch.testing.assert_close(noise_BD, in_one_row[f"doc{number}"])
        assert 0.3 < noise_BD.abs().max() <= 0.5 and len(noise_BD.unique()) > noise_BD.numel() / 2
        assert not first[f"doc{number} end"].any()  # what pads gets none


@pytest.mark.parametrize(
    ("name", "tree"), [("jakiro", {"depth": 3, "top_k": 3, "nodes": 9}), ("eagle3", {"paths": "eagle-1"})]
)
def test_the_estimate_of_tau_is_the_cpus_and_that_of_the_validation_copys_weights(
    loaded_target, embed_head, name, tree
):
    """The estimate works as in training: a copy on the device gets the draft's weights, and is replayed along stored
    answers.
    """
    draft = make_draft(loaded_target, replace(embed_head, decoder=None), VARIANTS[name])
    prompt = prompt_of(3)
    answer = decode_speculative(loaded_target, grown(draft, **tree), prompt, Sampling(16, NEVER)).tokens
    states = loaded_target.states(prompt + answer, draft.needs.auxiliary)
    mask = np.array([0] * len(prompt) + [1] * len(answer), np.uint8)
    row = TextRow("one", np.array(prompt + answer, np.int32), mask, states.final_ND, states.auxiliary_NSD)

    class StoredAnswers:
        spec = SimpleNamespace(auxiliary_numbers=list(draft.needs.auxiliary))

        def __len__(self) -> int:
            return 1

        def row(self, number: int) -> TextRow:
            return row

    want = estimate_acceptance(draft, {"tree": grown(draft, **tree)}, StoredAnswers(), 0, 1)
    with rehearsal():
        draft.to(DEVICE)
        draft.move_embed_head(DEVICE, torch.float32)
        copy = draft.validation_copy()
        TrainingEngine.copy_weights_to(SimpleNamespace(_config=TrainConfig(zero_stage=1), _draft=draft), copy)
        assert copy.device == DEVICE
        assert estimate_acceptance(copy, {"tree": grown(copy, **tree)}, StoredAnswers(), 0, 1) == want
