"""Placing a target's weights on a device, and the required precision of its head there: the logic, on a CPU."""

import pytest
import torch

from pipeline.basics.errors import PipelineError
from pipeline.lm.config import TargetConfig
from pipeline.lm.model import Target, load_embed_head, placement_options
from pipeline.lm.states import EmbeddingAndHead, LMHead
from pipeline.lm.verifier import rounding_bound


@pytest.fixture
def gpus(monkeypatch):
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr("torch.accelerator.current_device_index", lambda: 3)


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("cpu", {}),
        ("auto", {"device_map": {"": torch.device("cuda:3")}}),
        ("cuda", {"device_map": {"": torch.device("cuda:3")}}),
        ("spread", {"device_map": "auto"}),
    ],
)
def test_transformers_is_told_where_weights_go(tiny_target, gpus, monkeypatch, device, expected):
    """Loaded on the CPU and moved, eight workers would need eight copies in the host's memory."""
    config, requested = TargetConfig(model=str(tiny_target), device=device), {}
    assert placement_options(config) == expected

    def stop(_, **options):
        requested.update(options)
        raise OSError("far enough")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", stop)
    with pytest.raises(PipelineError, match="far enough"):
        Target(config, "bfloat16")
    assert {key: value for key, value in requested.items() if key == "device_map"} == expected


def test_without_a_gpu_nothing_is_placed(tiny_target):
    assert placement_options(TargetConfig(model=str(tiny_target))) == {}
    with pytest.raises(PipelineError, match="torch sees no accelerator"):
        placement_options(TargetConfig(model=str(tiny_target), device="spread"))


def test_the_ends_are_mapped_from_the_file_until_they_are_moved(tiny_target):
    """No copy in host memory for each of a node's ranks; "meta" stands for a GPU."""
    embed_head = load_embed_head(TargetConfig(model=str(tiny_target), device="cpu"))
    copies = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, arguments=(), options=None):
            out = function(*arguments, **(options or {}))
            if isinstance(out, torch.Tensor) and out.device.type == "cpu" and out.numel() >= 260 * 32:
                copies.append(function)
            return out

    with Watch():
        moved = embed_head.to(torch.device("meta"), torch.bfloat16)
    assert moved.head.linear.weight.is_meta and moved.embedding_VD.is_meta and not copies
    again = embed_head.to(torch.device("cpu"), torch.float32)
    assert torch.equal(again.head.linear.weight, embed_head.head.linear.weight)
    assert again.head.linear.weight.data_ptr() != embed_head.head.linear.weight.data_ptr()


def test_a_heads_effects_move_with_it():
    head = LMHead(torch.ones(4, 2), torch.ones(4), scale=0.5, softcap=3.0)
    moved = EmbeddingAndHead(torch.ones(4, 2), head, "mark").to(torch.device("cpu"), torch.bfloat16).head
    hidden = torch.tensor([[1.0, -2.0]])
    assert moved.linear.bias.dtype == torch.bfloat16 and not moved.linear.weight.requires_grad
    assert torch.equal(moved(hidden.bfloat16()), head(hidden).bfloat16())


# -- the split into decoder and head ---------------------------------------------------------------------------------


def test_rounding_is_allowed_for_where_there_is_any():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert rounding_bound(torch.float32, cpu) == 0
    assert rounding_bound(torch.bfloat16, cpu) == rounding_bound(torch.bfloat16, gpu) == 4 * 2**-7
    assert rounding_bound(torch.float16, gpu) == 4 * 2**-10
    assert rounding_bound(torch.float32, gpu) == 64 * 2**-23


class Moved(torch.nn.Module):
    """A head whose first logit is off by so much."""

    def __init__(self, head: LMHead, by: float):
        super().__init__()
        self._head, self._by = head, by

    def forward(self, hidden):
        logits = self._head(hidden).float()
        logits[..., 0] += self._by
        return logits


@pytest.mark.parametrize(("dtype", "below", "above"), [("float32", 0.0, 1e-4), ("bfloat16", 0.9, 1.1)])
def test_a_head_that_is_off_by_more_than_rounding_is_refused(tiny_target, dtype, below, above):
    """The bound is exact in float32 on a CPU, and otherwise in units of the allowed rounding."""
    target = Target(TargetConfig(model=str(tiny_target), device="cpu"), dtype)
    with torch.inference_mode():
        largest = target.head(target.capture(torch.arange(8)[None])).abs().max().item()
    allowed, head = rounding_bound(target.dtype, target.device) * largest or 1, target.head
    target.head = Moved(head, below * allowed)
    target._require_split("tiny")
    target.head = Moved(head, above * allowed)
    with pytest.raises(PipelineError, match=r"its logits are not head\(last hidden state\) \(largest difference"):
        target._require_split("tiny")
    target.head = Moved(head, float("nan"))
    with pytest.raises(PipelineError, match="largest difference nan"):
        target._require_split("tiny")
