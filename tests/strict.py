"""A make-believe accelerator that refuses what a real one refuses, and counts what a real one would be waited for.

Its tensors keep their numbers on the CPU, so every result is the CPU's. Code that never met a GPU runs whole on a
device that is not the CPU:

    with rehearsal() as seen:
        ...                          # torch.accelerator finds `DEVICE`; whatever mixes devices raises `Mixed`
    seen.waits, seen.copies          # by (what, file:line): waits for the device, copies to it that block

What it cannot show: kernels and how they round, streams and what is overwritten too early, several devices, NCCL,
memory, compiled code and CUDA graphs, and whatever asks for CUDA by name.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode

NAME, MEMORY = "strict", 80 << 30  # bytes, as it says
ROOT = Path(__file__).resolve().parent.parent
PROJECT_FOLDERS = tuple(str(folder) for folder in ROOT.iterdir() if folder.is_dir() and not folder.name.startswith("."))
# Whose result's shape, or whose result itself, the host needs; in inference mode operators made of others come whole.
ASKS = {"_local_scalar_dense", "nonzero", "masked_select", "unique_dim", "_unique2", "unique_consecutive", "equal"}
ASKS |= {"bincount", "repeat_interleave.Tensor", "item", "is_nonzero", "argwhere", "nonzero_numpy", "allclose"}
ASKS |= {"one_hot", "repeat_interleave.self_Tensor", "unique_consecutive"}
INDEXES = {"index", "index_put", "index_put_", "_index_put_impl_"}


class Mixed(RuntimeError):
    """Two devices in one operator."""


@dataclass
class Events:
    """The events of a rehearsal, by (event, file:line)."""

    waits: Counter = field(default_factory=Counter)
    copies: Counter = field(default_factory=Counter)  # to the device, for which the host stands still
    pinned: dict[int, Tensor] = field(default_factory=dict)  # by address, kept so that no other tensor takes it
    generators: list[torch.Generator] = field(default_factory=list)  # of the device
    bytes_to_host: int = 0  # of all copies to the host

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self.pinned


_now: list[Events] = []  # the rehearsal that is on, if one is


def _note(kind: str, event: str) -> None:
    if _now:
        getattr(_now[-1], kind)[event, _place()] += 1


def _place() -> str:
    """The line of this project that asked."""
    frame: Any = sys._getframe(1)
    while frame and (frame.f_code.co_filename == __file__ or not frame.f_code.co_filename.startswith(PROJECT_FOLDERS)):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).relative_to(ROOT)}:{frame.f_lineno}" if frame else "elsewhere"


class _Device:
    """torch's module of the device, `torch.strict`."""

    def is_available(self) -> bool:
        return bool(_now)

    def device_count(self) -> int:
        return len(_now)

    def current_device(self) -> int:
        return 0

    def is_initialized(self) -> bool:
        return True

    def manual_seed_all(self, seed: int) -> None: ...

    def _is_in_bad_fork(self) -> bool:
        return False

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_Device())
DEVICE = torch.device(NAME, 0)


def _is_ours(device: Any) -> bool:
    return device is not None and not isinstance(device, int) and torch.device(device).type == NAME


class Strict(torch.Tensor):
    """A tensor of the device; `raw` holds its numbers."""

    raw: Tensor

    @staticmethod
    def __new__(cls, raw: Tensor):
        wrapper = torch.Tensor._make_wrapper_subclass(
            cls, raw.size(), strides=raw.stride(), storage_offset=raw.storage_offset(), dtype=raw.dtype, device=DEVICE
        )
        wrapper.raw = raw.detach()
        return wrapper

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Strict({self.raw})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "numpy":
            raise Mixed(f"numpy() of a tensor of the device at {_place()}")
        if name == "tolist":
            _note("waits", "tolist")
            return args[0].raw.tolist()
        if name == "new_tensor":
            _note("copies", "new_tensor")
            return Strict(args[0].raw.new_tensor(*args[1:], **kwargs))
        if func is F.scaled_dot_product_attention:
            return _attend(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():  # what comes to the host is a plain tensor
            if torch.is_inference_mode_enabled() and name not in ("__get__", "__set__"):
                args, kwargs = _mapped(_inferring, (args, kwargs))
            return func(*args, **kwargs)


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operator on the numbers; what it returns is the device's where its tensors were or where it says so."""
    names = [argument.name for argument in func._schema.arguments]
    if "device" in names[: len(args)]:  # given by place
        args, kwargs = args[:1], {**dict(zip(names[1:], args[1:], strict=False)), **kwargs}
    name = func._schema.name.removeprefix("aten::")
    overload = f"{name}.{func._overloadname}"
    tensors = [x for x in _leaves((args, kwargs)) if isinstance(x, Tensor)]
    on_device = [x for x in tensors if isinstance(x, Strict)]
    on_host = [x for x in tensors if not isinstance(x, Strict)]
    if name == "copy_":
        return _copied(*args, **kwargs)
    if name in ("_to_copy", "to"):
        _moved(args[0], kwargs)
    elif on_device and on_host and name != "_has_compatible_shallow_copy_type":
        _require_one(name, args, on_host)
    if on_device and (name in ASKS or overload in ASKS):
        _note("waits", name)
    if name in INDEXES and on_device and _by_mask(name, args):
        _note("waits", "boolean index")
    stays = bool(on_device) if kwargs.get("device") is None else _is_ours(kwargs["device"])
    generator = kwargs.get("generator")
    own_seeds = (
        [generator_.initial_seed() for generator_ in _now[-1].generators] if _now else []
    )  # an operator gets another object
    if stays and generator is not None and generator.initial_seed() not in own_seeds:
        raise Mixed(f"{name} on the device with a generator of {generator.device.type} at {_place()}")
    raw_kwargs = _mapped(_raw, kwargs)
    if _is_ours(kwargs.get("device")):
        raw_kwargs["device"] = torch.device("cpu")
    raw_kwargs.pop("pin_memory", None)
    raw_args = _mapped(_raw, args)
    if name == "histc" and not raw_args[0].is_floating_point():  # a GPU counts whole numbers, a CPU does not
        return Strict(func(raw_args[0].double(), *raw_args[1:], **raw_kwargs).to(raw_args[0].dtype))
    out = func(*raw_args, **raw_kwargs)
    first = args[0] if args and isinstance(args[0], Strict) else None
    if func._schema.is_mutable and "out" not in kwargs and first is not None:
        return first  # in place
    if isinstance(kwargs.get("out"), Strict):
        return kwargs["out"]
    return _mapped(lambda x: Strict(x) if isinstance(x, Tensor) else x, out) if stays else out


def _leaves(x: Any) -> list[Any]:
    """Return the tensors among an operator's arguments; torch's own tree utilities take most of a rehearsal's time."""
    if isinstance(x, tuple | list):
        return [leaf for item in x for leaf in _leaves(item)]
    return _leaves(list(x.values())) if isinstance(x, dict) else [x]


def _mapped(change: Callable[[Any], Any], x: Any) -> Any:
    if isinstance(x, tuple | list) and not isinstance(x, torch.Size):
        return type(x)([_mapped(change, item) for item in x])
    return {key: _mapped(change, item) for key, item in x.items()} if isinstance(x, dict) else change(x)


def _inferring(x: Any) -> Any:
    """Return a view of a wrapper in inference mode: torch makes none from outside, so one of the same numbers is made
    inside.
    """
    return Strict(x.raw) if isinstance(x, Strict) and not x.is_inference() else x


def _raw(x: Any) -> Any:
    return x.raw if isinstance(x, Strict) else x


def _require_one(name: str, args: Any, on_host: list[Tensor]) -> None:
    """Numbers without a dimension go along with a kernel; an index of the host's is copied, which blocks."""
    if name in INDEXES:
        if not isinstance(args[0], Strict):
            raise Mixed(f"{name}: a tensor of the host, indexed by one of the device, at {_place()}")
        values = [x for x in args[2:3] if isinstance(x, Tensor) and not isinstance(x, Strict) and x.dim()]
        if not values:
            _note("copies", "an index")
            return
    if any(x.dim() for x in on_host):
        raise Mixed(f"{name} of both devices at {_place()}: shapes of the host's {[tuple(x.shape) for x in on_host]}")


def _by_mask(name: str, args: Any) -> bool:
    masks = [i for i in args[1] if isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8)]
    return bool(masks) and (name == "index" or args[2].numel() > 1)  # one number is filled in, which asks nothing


def _moved(source: Tensor, kwargs: dict[str, Any]) -> None:
    from_device, to_device = isinstance(source, Strict), _is_ours(kwargs.get("device") or source.device)
    if from_device and not to_device:
        _count_bytes(source)
    if (
        from_device and not to_device and not kwargs.get("non_blocking")
    ):  # else torch lands it in pinned memory, and goes on
        _note("waits", "copy to the host")
    if to_device and not from_device:
        _arrived(source, bool(kwargs.get("non_blocking")))


def _count_bytes(source: Tensor) -> None:
    if _now:
        _now[-1].bytes_to_host += source.numel() * source.element_size()


def _arrived(source: Tensor, non_blocking: bool) -> None:
    if not (non_blocking and _now and _now[-1].is_pinned(source)):
        _note("copies", "copy")


def _copied(to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if isinstance(to, Strict) and not isinstance(source, Strict):
        _arrived(source, non_blocking)
    if isinstance(source, Strict) and not isinstance(to, Strict):
        _count_bytes(source)
        if not (non_blocking and _now[-1].is_pinned(to)):
            _note("waits", "copy to the host")
    _raw(to).copy_(_raw(source))
    return to


class _Attention(torch.autograd.Function):
    """The CPU's own kernel, forward and backward: which one a device would take is asked before any dispatch."""

    @staticmethod
    def forward(ctx, options: dict[str, Any], mask: Tensor | None, *qkv: Tensor):
        with torch.enable_grad():
            raw = [x.raw.detach().requires_grad_(True) for x in qkv]
            out = F.scaled_dot_product_attention(*raw, attn_mask=None if mask is None else _raw(mask), **options)
        ctx.out, ctx.raw = out, raw
        return Strict(out.detach())

    @staticmethod
    def backward(ctx, slope: Tensor):
        return None, None, *map(Strict, torch.autograd.grad(ctx.out, ctx.raw, _raw(slope)))


def _attend(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    for x in (query, key, value, attn_mask):
        if x is not None and not isinstance(x, Strict):
            raise Mixed(f"attention over tensors of both devices at {_place()}")
    options = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    if torch.is_inference_mode_enabled():
        raw = [x.raw for x in (query, key, value)]
        return Strict(F.scaled_dot_product_attention(*raw, attn_mask=_raw(attn_mask), **options))
    return _Attention.apply(options, attn_mask, query, key, value)


# -- where no tensor of the device takes part: what makes one ----------------------------------------------------------


class _Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        leaves = _leaves((args, kwargs))
        uses_device = any(isinstance(x, Strict) or (isinstance(x, torch.device) and x.type == NAME) for x in leaves)
        return _run(func, args, kwargs) if uses_device else func(*args, **kwargs)


class _Functions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and _is_ours(kwargs.get("device")):
            if isinstance(args[0], Strict):
                return args[0]
            made = func(*args, **{k: v for k, v in kwargs.items() if k != "device"})
            if made.numel():
                _note("copies", func.__name__)
            return Strict(made)
        return func(*args, **kwargs)


# Without a mode, as in another thread, torch calls these.
_library = torch.library.Library("aten", "IMPL")


def _copy_from(source: Tensor, to: Tensor, non_blocking: bool = False) -> Tensor:
    return _copied(to, source, non_blocking)


def _empty(size, *, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    return Strict(torch.empty(size, dtype=dtype))


def _empty_strided(size, stride, *, dtype=None, layout=None, device=None, pin_memory=None):
    return Strict(torch.empty_strided(size, stride, dtype=dtype))


_library.impl("_copy_from", _copy_from, "PrivateUse1")
_library.impl("empty.memory_format", _empty, "PrivateUse1")
_library.impl("empty_strided", _empty_strided, "PrivateUse1")


class Event:
    """Stands in for torch's, which such a device has not: all has been done when it is recorded."""

    def __init__(self, *_: Any, **options: Any): ...

    def record(self, *_: Any) -> None: ...

    def synchronize(self) -> None:
        _note("waits", "an event")


@contextmanager
def rehearsal() -> Iterator[Events]:
    """Run with the device as this process's accelerator, other threads included, except for `torch.tensor(device=)`."""
    events = Events()

    def pin_memory(tensor: Tensor, *_: Any) -> Tensor:
        if isinstance(tensor, Strict):
            raise Mixed(f"pin_memory() of a tensor of the device at {_place()}")
        pinned = tensor.clone()
        events.pinned[pinned.untyped_storage().data_ptr()] = pinned
        return pinned

    def make_generator(device: Any = "cpu") -> torch.Generator:
        made = generator_class("cpu" if _is_ours(device) else device)
        if _is_ours(device):
            events.generators.append(made)
        return made

    generator_class, stand_ins = torch.Generator, {"current_stream": lambda *_: None}
    stand_ins |= {"synchronize": lambda *_: _note("waits", "synchronize")}
    stand_ins |= {"get_memory_info": lambda *_: (MEMORY, MEMORY)}
    with ExitStack() as stack:
        for name, stand_in in stand_ins.items():
            stack.enter_context(mock.patch.object(torch.accelerator, name, stand_in))
        stack.enter_context(mock.patch.object(torch, "Generator", make_generator))
        stack.enter_context(mock.patch.object(torch, "Event", Event))
        stack.enter_context(mock.patch.object(torch.Tensor, "pin_memory", pin_memory))
        stack.enter_context(mock.patch.object(torch.Tensor, "is_pinned", lambda tensor, *_: events.is_pinned(tensor)))
        _now.append(events)
        try:
            with _Dispatch(), _Functions():
                yield events
        finally:
            _now.pop()
