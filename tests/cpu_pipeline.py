"""Sends parameters on the CPU through the GPU's pipeline, for tests on machines without a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Iterator
from typing import Any

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
        "synchronize": lambda device=None: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    for name in ("copy_to_device_async", "copy_to_host_async"):
        monkeypatch.setattr(
            cuda_driver, name, lambda target, source, nbytes, stream: ctypes.memmove(target, source, nbytes)
        )
    monkeypatch.setattr(cuda_driver, "register_host_memory", lambda *_: None)
    monkeypatch.setattr(cuda_driver, "unregister_host_memory", lambda *_: None)
    monkeypatch.setattr(engine, "_CPU", torch.device("meta"))
    monkeypatch.setattr(adam, "compile_step", lambda *arguments: None)
    yield
    gc.collect()  # what is page-locked so far is given back the same way
