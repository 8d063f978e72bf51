"""Stands in for CUDA, so that an unmodified megatron-core trains on the CPU over gloo.

Only for processes that run nothing else: it replaces functions of torch for good. Megatron asks for
device "cuda" in factory calls, for streams, events and random states of a GPU, and for the type
strings of CUDA tensors; all of them get what a CPU has. ``is_cuda`` stays false, so what hangs on
it takes the branch for tensors on the host.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

_CPU = torch.device("cpu")
_WATCHED = torch.device("cpu", 0)
"""The same device, told apart from what is asked for on the CPU."""
_TAKING_A_DEVICE = {
    torch: (
        *("tensor", "as_tensor", "arange", "empty", "zeros", "ones", "full", "rand", "randn", "randint"),
        *("empty_like", "zeros_like", "ones_like", "full_like"),
    ),
    torch.Tensor: ("to", "new_empty", "new_zeros", "new_ones", "new_tensor"),
}
_TYPE_NAMES = {
    torch.float64: "Double",
    torch.float32: "Float",
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
    torch.int64: "Long",
    torch.int32: "Int",
    torch.int16: "Short",
    torch.uint8: "Byte",
    torch.bool: "Bool",
}


def _is_cuda(device: Any) -> bool:
    return (
        isinstance(device, int)
        or (isinstance(device, str) and device.startswith("cuda"))
        or (isinstance(device, torch.device) and device.type == "cuda")
    )


_watchers: list[list[int]] = []


def _placed(tensor: torch.Tensor) -> torch.Tensor:
    for sizes in _watchers:
        sizes.append(tensor.nbytes)
    return tensor


def _on_cpu(function: Any) -> Any:
    """Puts on the CPU what is asked for on a GPU by the keyword ``device``."""

    @functools.wraps(function)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if not _is_cuda(device) and device != _WATCHED:
            return function(*args, **kwargs)
        kwargs["device"] = _CPU
        return _placed(function(*args, **kwargs))

    return on_cpu


@contextlib.contextmanager
def placed_on_gpu() -> Iterator[list[int]]:
    """Collects the bytes of all tensors that a GPU would get meanwhile."""
    sizes: list[int] = []
    current_device, torch.cuda.current_device = torch.cuda.current_device, lambda: _WATCHED
    _watchers.append(sizes)
    try:
        yield sizes
    finally:
        _watchers.remove(sizes)
        torch.cuda.current_device = current_device


class _Stream:
    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def query(self) -> bool:
        return True


class _Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, *args: Any) -> None: ...

    def wait(self, *args: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class _Properties(NamedTuple):
    major: int = 9
    minor: int = 0
    multi_processor_count: int = 1


def _do_not_compile(model: Any = None, **kwargs: Any) -> Any:
    """Compiling Megatron's small fused functions would take longer than all training here, and
    needs a compiler.
    """
    return model if model is not None else lambda function: function


def install() -> None:
    """Replaces torch's functions; call it before Megatron is imported, since that copies some of
    them.
    """
    if torch.cuda.is_available():
        raise RuntimeError("this machine has a GPU, and the stand-in would hide it: set CUDA_VISIBLE_DEVICES=''")
    for name in ("transformer_engine", "apex"):
        sys.modules[name] = None  # type: ignore[assignment] - where they are installed they need a GPU
    cuda, stream = torch.cuda, _Stream()
    cuda.current_device = lambda: _CPU
    torch.accelerator.is_available = lambda *args, **kwargs: False  # data loaders page-lock nothing
    cuda.device_count = lambda: 1
    cuda.current_stream = cuda.default_stream = lambda *args: stream
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = lambda *args: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *args: torch.set_rng_state(state)
    cuda.get_device_properties = lambda *args: _Properties()
    cuda.get_device_capability = lambda *args: (9, 0)
    cuda.set_device = lambda device: None
    cuda.synchronize = lambda *args: None
    cuda.empty_cache = lambda: None
    cuda.nvtx.range_push = lambda message: None
    cuda.nvtx.range_pop = lambda: None

    cast = torch.Tensor.type
    torch.Tensor.type = lambda self, *args, **kwargs: (
        cast(self, *args, **kwargs) if args or kwargs else f"torch.cuda.{_TYPE_NAMES[self.dtype]}Tensor"
    )
    torch.Tensor.cuda = lambda self, *args, **kwargs: _placed(self)
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
    torch.Tensor.record_stream = lambda self, stream: None
    torch.compile = _do_not_compile
    for owner, names in _TAKING_A_DEVICE.items():
        for name in names:
            setattr(owner, name, _on_cpu(getattr(owner, name)))


def install_in_megatron() -> None:
    """Gives Megatron the CPU's random state, and a queue without the server process that it starts
    for checkpoints.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    filesystem_async._results_queue = queue.Queue()
