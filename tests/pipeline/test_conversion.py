"""The states of an engine, converted where they are: the bits of a shard, and the bytes that cross to the host."""

import time

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from infra.vllm_jakiro.vllm_jakiro import convert
from infra.vllm_jakiro.vllm_jakiro.convert import Conversion, to_host
from pipeline.features.engines.vllm import describe_target, select_layers
from pipeline.features.schema import Float8States, quantise, row_dtype, stored_columns
from pipeline.lm.config import TargetConfig
from pipeline.lm.model import load_final_norm
from tests.strict import DEVICE, rehearsal

FLOAT8 = "float8_e4m3fn"
LAST = 9  # the last layer's number


def make_norm(width: int, dtype: torch.dtype, device: str | torch.device = "cpu") -> nn.Module:
    norm = LlamaRMSNorm(width, eps=1e-5)
    norm.weight.data = torch.linspace(0.5, 1.5, width)
    return norm.to(device, dtype).requires_grad_(False)


def make_raw(tokens: int, layers: int, width: int, dtype: torch.dtype) -> Tensor:
    """States of several magnitudes, as the engine keeps them; one token's are 0."""
    raw_TSD = torch.randn(tokens, layers, width, generator=torch.Generator().manual_seed(2))
    raw_TSD *= torch.logspace(-3, 3, tokens)[:, None, None]
    raw_TSD[1] = 0
    return raw_TSD.to(dtype)


@torch.inference_mode()
def convert_by_steps(raw_TSD: Tensor, norm: nn.Module, places: list[int]) -> list[Tensor]:
    """Return the columns of a float8 shard from all states at once: normed, stacked, rounded, quantised."""
    states_TSD = torch.stack([norm(raw_TSD[:, -1]), *(raw_TSD[:, place] for place in places)], dim=1)
    states_TSD = states_TSD.to(row_dtype(FLOAT8))
    parts = [states_TSD[:, 0]] + ([states_TSD[:, 1:]] if places else [])
    return stored_columns(Float8States([quantise(part) for part in parts]))


def bytes_of(tensors: list[Tensor]) -> list[bytes]:
    return [tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes() for tensor in tensors]


@pytest.mark.parametrize("block", [1, 900, 1 << 20])
@pytest.mark.parametrize("auxiliary", [(), (2,), (2, 5, LAST), (5, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_converted_states_have_the_bits_of_a_shard(monkeypatch, dtype, auxiliary, block):
    monkeypatch.setattr(convert, "CPU_BLOCK", block)
    layers = select_layers(auxiliary, LAST)
    raw_TSD = make_raw(37, len(layers["layers"]), 64, dtype)
    norm, places = make_norm(64, dtype), layers["places"]
    conversion = Conversion(norm, places)
    converted = Float8States.from_columns(conversion.convert(raw_TSD, 37, float8=True))
    assert bytes_of(stored_columns(converted)) == bytes_of(convert_by_steps(raw_TSD, norm, places))
    plain = conversion.convert(raw_TSD, 37, float8=False)["states"]
    assert torch.equal(plain, torch.stack([norm(raw_TSD[:, -1]), *(raw_TSD[:, place] for place in places)], dim=1))
    last_is_zero = torch.cat([raw_TSD, torch.zeros_like(raw_TSD[:1])])  # the norm of 0 is 0
    longer = Float8States.from_columns(conversion.convert(raw_TSD, 38, float8=True))
    assert bytes_of(stored_columns(longer)) == bytes_of(convert_by_steps(last_is_zero, norm, places))
    assert not conversion.convert(raw_TSD, 38, float8=False)["states"][37].any()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("layer", [0, 1])
def test_a_scale_shows_that_a_state_is_not_finite(value, layer):
    raw_TSD = make_raw(5, 2, 64, torch.float32)
    conversion = Conversion(make_norm(64, torch.float32), [0])
    assert Float8States.from_columns(conversion.convert(raw_TSD, 5, float8=True)).is_finite
    raw_TSD[3, layer, 7] = value
    assert not Float8States.from_columns(conversion.convert(raw_TSD, 5, float8=True)).is_finite


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_engine_builds_the_targets_own_norm(tiny_target, loaded_target, tmp_path, dtype):
    config = TargetConfig(model=str(tiny_target), dtype=dtype, device="cpu")
    name, weights = load_final_norm(config, dtype)
    save_file(weights, tmp_path / "weights")
    settings = {**describe_target(config), **select_layers([1], 2), "norm": name, "weights": str(tmp_path / "weights")}
    norm = Conversion.load(settings, torch.device("cpu")).norm
    hidden_TD = torch.randn(9, 32).to(getattr(torch, dtype))
    assert torch.equal(norm(hidden_TD), loaded_target.decoder.norm.to(getattr(torch, dtype))(hidden_TD))


@pytest.mark.parametrize("float8", [True, False], ids=["float8", "bfloat16"])
def test_float8_bytes_cross_to_the_host_and_no_copy_blocks(float8):
    """Counted for four states of 8,192, as EAGLE-3 reads of a 70B target. Nothing of the states crosses otherwise: a
    copy that blocks is a wait.
    """
    tokens, width, dtype = 24, 8192, torch.bfloat16
    layers = select_layers([2, 4, 6], LAST)
    raw_TSD = make_raw(tokens, 4, width, dtype)
    want = Conversion(make_norm(width, dtype), layers["places"]).convert(raw_TSD, tokens, float8)
    with rehearsal() as counts:
        conversion = Conversion(make_norm(width, dtype, DEVICE), layers["places"])
        on_device = raw_TSD.to(DEVICE)
        counts.waits.clear()
        counts.copies.clear()
        got, event = to_host(conversion.convert(on_device, tokens, float8))
        assert not counts.waits and not counts.copies and event is not None
    print(f"{counts.read.total() / tokens:,.0f} bytes a token cross to the host")
    assert counts.read.total() == tokens * (4 * (width + 4) if float8 else 4 * width * 2)
    assert got.keys() == want.keys()
    assert bytes_of([got[name] for name in want]) == bytes_of(list(want.values()))


def test_the_dumps_process_does_no_arithmetic_on_float8_states():
    """Its time a token is that of a check of the scales; the words stay where the file's memory is."""
    tokens, norm, places = 2048, make_norm(8192, torch.bfloat16), [0, 1, 2]
    raw_TSD = make_raw(tokens, 4, 8192, torch.bfloat16)
    file = Conversion(norm, places).convert(raw_TSD, tokens, float8=True)

    def take() -> list[Tensor]:
        states = Float8States.from_columns(file)
        assert states.is_finite
        return stored_columns(states)

    seconds, columns = {}, list[Tensor]()
    for name, run in {"in the dump": lambda: convert_by_steps(raw_TSD, norm, places), "by the engine": take}.items():
        columns = run()  # which also frees the last columns
        begin = time.perf_counter()
        columns = run()
        seconds[name] = time.perf_counter() - begin
        print(f"four states of 8,192 converted {name}: {1e6 * seconds[name] / tokens:.2f} µs a token in the dump")
    addresses = [column.untyped_storage().data_ptr() for column in columns]
    assert addresses == [file[name].untyped_storage().data_ptr() for name in file]
