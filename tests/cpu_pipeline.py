"""Sends parameters on the CPU through the GPU's pipeline, for tests on machines without a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch

from fused_offload import cuda_driver, engine
from fused_offload.kernels import adam


class FakeEvent:
    def __init__(self, enable_timing: bool = False) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 1.0


class FakeStream:
    cuda_stream = 0

    def __init__(self, device: Any = None) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def synchronize(self) -> None: ...


class FakeGraph:
    """Takes down copies and launches with their arguments instead of doing them, and does them when it is replayed."""

    capturing: ClassVar[FakeGraph | None] = None
    captures: ClassVar[int] = 0
    replays: ClassVar[int] = 0

    def __init__(self) -> None:
        self.work: list[Callable[[], Any]] = []

    def capture_begin(self, capture_error_mode: str) -> None:
        assert FakeGraph.capturing is None
        FakeGraph.capturing = self
        FakeGraph.captures += 1

    def capture_end(self) -> None:
        FakeGraph.capturing = None

    def replay(self) -> None:
        FakeGraph.replays += 1
        for work in self.work:
            work()


def capturable(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that a graph takes down while one is being captured."""

    def run_or_capture(*args: Any, **kwargs: Any) -> None:
        if FakeGraph.capturing is not None:
            FakeGraph.capturing.work.append(lambda: function(*args, **kwargs))
        else:
            function(*args, **kwargs)

    return run_or_capture


@pytest.fixture(autouse=True)
def pipeline_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """On queues that run everything at once, in order. Modules take it over by its name."""
    stream = FakeStream()
    for name, value in {
        "Stream": FakeStream,
        "Event": FakeEvent,
        "current_stream": lambda device=None: stream,
        "device": lambda device: contextlib.nullcontext(),
        "stream": lambda stream: contextlib.nullcontext(),
        "CUDAGraph": FakeGraph,
        "synchronize": lambda device=None: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    copy = capturable(lambda target, source, nbytes, stream: ctypes.memmove(target, source, nbytes))
    monkeypatch.setattr(cuda_driver, "copy_to_device_async", copy)
    monkeypatch.setattr(cuda_driver, "copy_to_host_async", copy)
    monkeypatch.setattr(adam, "adam_step_", capturable(adam.adam_step_))
    monkeypatch.setattr(cuda_driver, "register_host_memory", lambda address, nbytes: None)
    monkeypatch.setattr(cuda_driver, "unregister_host_memory", lambda address: None)
    monkeypatch.setattr(engine, "_CPU", torch.device("meta"))
    monkeypatch.setattr(adam, "compile_step", lambda *arguments: None)
    yield
    gc.collect()  # what is page-locked so far is given back the same way
