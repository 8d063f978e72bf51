"""Streaming on a real GPU: any chunking gives the bits of the resident run, and races would
show.
"""

from __future__ import annotations

import functools
import time

import pytest
import torch
from gpu_training import FORMATS, Outcome, assert_same, differs, train

from fused_offload import FusedOffloadAdam, OffloadConfig

pytestmark = pytest.mark.gpu

MIB = 2**20
RESIDENT = OffloadConfig(fraction=0.0)
CONFIGS = [
    *(OffloadConfig(chunk_bytes=size) for size in (MIB, 8 * MIB, 24 * MIB, 48 * MIB, 5 * MIB + 77, 2**40)),
    *(OffloadConfig(chunk_bytes=MIB, depth=depth) for depth in (1, 2, 4)),
    OffloadConfig(chunk_bytes=8 * MIB, fraction=0.3),
    OffloadConfig(chunk_bytes=MIB, fraction=0.3, depth=2),
    *(OffloadConfig(transport="zero_copy", zero_copy_programs=programs) for programs in (1, 64, 10_000)),
    OffloadConfig(transport="zero_copy", fraction=0.3),
]
STREAMS = ("compute", "h2d", "d2h")
DELAY_CYCLES = 10_000_000  # about 5 ms, longer than the copy of a 4 MiB chunk by far


@functools.cache
def resident(formats: str, steps: int = 20) -> Outcome:
    return train(formats, RESIDENT, steps=steps)


def name(config: OffloadConfig) -> str:
    if config.transport == "zero_copy":
        return f"zero_copy-{config.zero_copy_programs}-{config.fraction}"
    assert config.chunk_bytes != "auto"
    return f"{config.chunk_bytes / MIB:.2f}MiB-x{config.depth}-{config.fraction}"


@pytest.mark.parametrize("config", CONFIGS, ids=name)
@pytest.mark.parametrize("formats", FORMATS)
def test_streamed_equals_resident(formats: str, config: OffloadConfig) -> None:
    assert_same(train(formats, config), resident(formats))


@pytest.mark.parametrize("formats", FORMATS)
def test_small_chunks_of_many_sizes(formats: str) -> None:
    """Chunks of one block of 128 elements, and segments that end anywhere in a chunk."""
    sizes = ((1,), (127,), (128,), (129,), (3 * 1024 + 17,), (1023,))
    config = OffloadConfig(chunk_bytes=1)
    assert_same(train(formats, config, sizes=sizes), train(formats, RESIDENT, sizes=sizes))


def delay(monkeypatch: pytest.MonkeyPatch, slow: str, dropped: str | None = None) -> None:
    """Puts a delay kernel in front of everything on one stream; drops all waits of another one."""
    from fused_offload.stream import pipeline, prefetch, queues

    class SlowOps(pipeline.CudaOps):
        def _sleep(self, name: str) -> None:
            if name == slow:
                with torch.cuda.stream(getattr(self, name)):
                    torch.cuda._sleep(DELAY_CYCLES)

        def _hold(self, stream, wait) -> None:  # type: ignore[no-untyped-def]
            if dropped is not None and stream is getattr(self, dropped):
                return
            wait()
            if stream is self.compute:
                self._sleep("compute")

        def wait(self, stream, event) -> None:  # type: ignore[no-untyped-def]
            self._hold(stream, functools.partial(super().wait, stream, event))

        def wait_stream(self, stream, other) -> None:  # type: ignore[no-untyped-def]
            self._hold(stream, functools.partial(super().wait_stream, stream, other))

        def copy_to_device(self, slot, copies) -> None:  # type: ignore[no-untyped-def]
            self._sleep("h2d")
            super().copy_to_device(slot, copies)

        def copy_to_host(self, slot, copies) -> None:  # type: ignore[no-untyped-def]
            self._sleep("d2h")
            super().copy_to_host(slot, copies)

    for module in (pipeline, prefetch):
        monkeypatch.setattr(module, "CudaOps", SlowOps)
    monkeypatch.setattr(queues, "TURN_BYTES", MIB + 512)


@pytest.mark.parametrize("slow", STREAMS)
@pytest.mark.parametrize("formats", ["fp32", "fp16"])
def test_a_slow_stream_changes_no_bit(formats: str, slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = resident(formats, 6)
    delay(monkeypatch, slow)
    assert_same(train(formats, OffloadConfig(chunk_bytes=4 * MIB), steps=6), expected)


@pytest.mark.parametrize(("dropped", "slow"), [("h2d", "d2h"), ("compute", "h2d"), ("d2h", "compute")])
def test_without_its_waits_a_slow_stream_changes_bits(dropped: str, slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The delays above do provoke the races that the events prevent."""
    expected = resident("fp32", 6)
    delay(monkeypatch, slow, dropped)
    assert differs(train("fp32", OffloadConfig(chunk_bytes=4 * MIB), steps=6), expected)


@pytest.mark.parametrize("direction", ["to_device", "to_host"])
def test_a_copy_of_another_stream_comes_in_between(direction: str) -> None:
    """A training loop copies batches and reads losses while state is under way."""
    param = torch.nn.Parameter(torch.zeros(100_000_000, device="cuda", dtype=torch.bfloat16))
    optimizer = FusedOffloadAdam([param], offload=OffloadConfig(window_bytes=2**40))
    here = torch.zeros(MIB, dtype=torch.uint8, device="cuda")
    there = torch.zeros(MIB, dtype=torch.uint8, pin_memory=True)
    shares = []
    for _ in range(5):
        param.grad = torch.zeros_like(param)
        optimizer.prefetch()
        if direction == "to_host":
            torch.cuda.synchronize()
            optimizer.step()
        torch.cuda.current_stream().synchronize()
        began = time.perf_counter()
        target, source = (here, there) if direction == "to_device" else (there, here)
        target.copy_(source, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        waited = time.perf_counter() - began
        torch.cuda.synchronize()
        shares.append(waited / (time.perf_counter() - began))
        if direction == "to_device":
            optimizer.step()
    optimizer.close()
    assert min(shares[1:]) < 0.3, shares  # without turns it waits for all of it
