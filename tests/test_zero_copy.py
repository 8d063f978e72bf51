"""The zero-copy transport: the bits of the resident run, bounded launches, no staging."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import assert_same_snapshot, snapshot

pytest.importorskip("triton")

import cpu_pipeline

from fused_offload import FusedOffloadAdam, OffloadConfig
from fused_offload.config import DEFAULT_CHUNK_BYTES, DEFAULT_DEPTH, DEFAULT_PROGRAMS
from fused_offload.kernels.adam import launch as adam
from fused_offload.plan import window_blocks
from fused_offload.plan.transfer_settings import Streaming, streaming_of
from fused_offload.profiles.units import MIB

pipeline_on_the_cpu = cpu_pipeline.pipeline_on_the_cpu

SIZES = ((30, 41), (127,), (1,), (0,))
FORMATS: dict[str, dict[str, Any]] = {
    "remainder_bf16": {
        "master_weights": True,
        "store_param_remainders": True,
        "exp_avg_dtype": torch.bfloat16,
        "exp_avg_sq_dtype": torch.bfloat16,
    },
    "fp16": {"master_weights": True, "exp_avg_dtype": torch.float16, "exp_avg_sq_dtype": torch.float16},
    "uint8": {"master_weights": True, "exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8},
}


@pytest.fixture
def grids(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Programs of every launch."""
    launched: list[int] = []
    kernel = adam.adam_kernel

    class Watched:
        def __getitem__(self, grid: tuple[int]) -> Any:
            launched.append(grid[0])
            return kernel[grid]

        def __getattr__(self, name: str) -> Any:
            return getattr(kernel, name)

    monkeypatch.setattr(adam, "adam_kernel", Watched())
    return launched


def train(formats: str, config: OffloadConfig, *, prefetched: bool = False) -> FusedOffloadAdam:
    """Three steps; one parameter has no gradient in one of them."""
    generator = torch.Generator().manual_seed(1)
    params = [torch.nn.Parameter(torch.randn(size, generator=generator).bfloat16()) for size in SIZES]
    optimizer = FusedOffloadAdam(params, weight_decay=0.1, offload=config, **FORMATS[formats])
    for step in range(3):
        for index, param in enumerate(params):
            grad = torch.randn(param.shape, generator=generator).bfloat16()
            param.grad = None if (index, step) == (1, 1) else grad
        if prefetched and step:
            optimizer.prefetch()
            assert optimizer._stepper.devices.window()
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("formats", FORMATS)
def test_zero_copy_equals_resident_and_copies(formats: str, grids: list[int]) -> None:
    resident = snapshot(train(formats, OffloadConfig(fraction=0.0)))
    grids.clear()
    optimizer = train(formats, OffloadConfig(transport="zero_copy", zero_copy_programs=3))
    assert grids == [3, 3, 3]  # one launch a step, of 4, 3 and 4 blocks
    assert optimizer.memory_report().ring_bytes == 0
    assert sum(optimizer.memory_report().host_bytes.values()) > 0
    assert_same_snapshot(snapshot(optimizer), resident)
    copied = train(formats, OffloadConfig(transport="copy", chunk_bytes=4096))
    assert copied.memory_report().ring_bytes > 0
    assert_same_snapshot(snapshot(copied), resident)


@pytest.mark.parametrize("zero_copy", [False, True])
def test_half_in_the_window(zero_copy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is prefetched is stepped on the GPU, whatever happens to the rest."""
    blocks_of = window_blocks.blocks_of
    monkeypatch.setattr("fused_offload.plan.planner.blocks_of", lambda extents: blocks_of(extents, 6 * 1024))
    config = OffloadConfig(window_bytes=7_000, transport="zero_copy" if zero_copy else "copy")
    expected = snapshot(train("remainder_bf16", OffloadConfig(fraction=0.0)))
    assert_same_snapshot(snapshot(train("remainder_bf16", config, prefetched=True)), expected)


def test_extents_may_differ_in_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    small = Streaming(programs=1)

    def by_size(config: OffloadConfig, device: torch.device, state_bytes: int) -> Streaming:
        return small if state_bytes < 10_000 else Streaming(chunk_bytes=8 * 1024)

    monkeypatch.setattr("fused_offload.plan.planner.streaming_of", by_size)

    def step_both(config: OffloadConfig) -> FusedOffloadAdam:
        params = [torch.nn.Parameter(torch.ones(1200).bfloat16()), torch.nn.Parameter(torch.ones(300))]
        optimizer = FusedOffloadAdam(params, master_weights=True, offload=config)
        for _ in range(2):
            for param in params:
                param.grad = torch.full_like(param, 0.1)
            optimizer.step()
        return optimizer

    mixed = step_both(OffloadConfig())
    [plan] = mixed._stepper.planner._plans.values()
    assert {chunk.kind.max_programs for chunks in plan.chunks_on.values() for chunk in chunks} == {None, 1}  # type: ignore[attr-defined]
    assert_same_snapshot(snapshot(mixed), snapshot(step_both(OffloadConfig(fraction=0.0))))


def test_staging_is_reserved_for_the_extents_that_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_size(config: OffloadConfig, device: torch.device, state_bytes: int) -> Streaming:
        return Streaming(programs=1) if state_bytes > 10_000 else Streaming(chunk_bytes=1024, depth=2)

    monkeypatch.setattr("fused_offload.plan.planner.streaming_of", by_size)
    large, small = (torch.nn.Parameter(torch.ones(numel)) for numel in (4000, 300))
    optimizer = FusedOffloadAdam([large])
    large.grad, small.grad = torch.ones_like(large), torch.ones_like(small)
    optimizer.step()
    optimizer.add_param_group({"params": [small]})  # an extent of the same layout
    optimizer.reserve_gpu_memory()
    reserved = optimizer.memory_report().ring_bytes
    optimizer.step()
    assert reserved == optimizer.memory_report().ring_bytes > 0


CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("state_bytes", "mib"), [(0, 8), (60 * 10**6, 8), (143 * MIB, 8), (240 * 10**6, 14), (767 * MIB, 47), (10**12, 48)]
)
def test_small_state_streams_in_small_chunks_by_default(state_bytes: int, mib: int) -> None:
    assert streaming_of(OffloadConfig(), CPU, state_bytes) == Streaming(mib * MIB, DEFAULT_DEPTH, None)
    assert streaming_of(OffloadConfig(depth=5), CPU, state_bytes) == Streaming(mib * MIB, 5, None)


def test_defaults_without_a_profile() -> None:
    assert streaming_of(OffloadConfig(), CPU, 10**9) == Streaming(DEFAULT_CHUNK_BYTES, DEFAULT_DEPTH, None)
    assert streaming_of(OffloadConfig(chunk_bytes=5, depth=4), CPU, 10**9) == Streaming(5, 4, None)
    zero_copy = OffloadConfig(transport="zero_copy")
    assert streaming_of(zero_copy, CPU, 10**9).programs == DEFAULT_PROGRAMS
    assert streaming_of(OffloadConfig(transport="zero_copy", zero_copy_programs=7), CPU, 1).programs == 7
