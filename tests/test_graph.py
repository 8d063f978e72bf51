"""A step that is captured and replayed gives the bits of one that is not, whatever changes between steps."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from helpers import Snapshot, assert_same_snapshot, snapshot

pytest.importorskip("triton")

import cpu_pipeline
from cpu_pipeline import FakeGraph

from fused_offload import FusedOffloadAdam, OffloadConfig

pipeline_on_the_cpu = cpu_pipeline.pipeline_on_the_cpu

SIZES = ((30, 41), (127,), (1,))
FORMS: dict[str, Any] = {"master_weights": True, "exp_avg_dtype": torch.float16}
STOCHASTIC: dict[str, Any] = {
    "exp_avg_dtype": torch.uint8,
    "exp_avg_sq_dtype": torch.bfloat16,
    "stochastic_rounding": True,
}
GRAPHS = [
    OffloadConfig(graph=True, fraction=0.9, chunk_bytes=4096, depth=2),
    OffloadConfig(graph=True, transport="zero_copy", zero_copy_programs=2),
]


def make(config: OffloadConfig, **options: Any) -> FusedOffloadAdam:
    generator = torch.Generator().manual_seed(1)
    params = [torch.nn.Parameter(torch.randn(size, generator=generator).bfloat16()) for size in SIZES]
    groups: list[dict[str, Any]] = [{"params": params[:1]}, {"params": params[1:], "lr": 3e-3}]
    return FusedOffloadAdam(groups, weight_decay=0.1, offload=config, **{**FORMS, **options})


def step(optimizer: FusedOffloadAdam, number: int, without: int | None = None) -> None:
    """A step with gradients and learning rates of its own."""
    generator = torch.Generator().manual_seed(100 + number)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for index, param in enumerate(params):
        grad = torch.randn(param.shape, generator=generator).bfloat16()
        param.grad = None if index == without else grad
    for group in optimizer.param_groups:
        group["lr"] = 1e-3 * (number + 1)
    optimizer.step()


def train(config: OffloadConfig, **options: Any) -> Snapshot:
    optimizer = make(config, **options)
    for number in range(3):
        step(optimizer, number)
    step(optimizer, 3, without=1)  # another plan
    optimizer.param_groups[1]["weight_decay"] = 0.3  # nothing that a replay could read
    for number in (4, 5):
        step(optimizer, number)
    param = optimizer.param_groups[0]["params"][0]
    before, param.data = param.data, param.data.clone()  # to another address
    for number in (6, 7):
        step(optimizer, number)
    assert not torch.equal(before, param)
    return snapshot(optimizer)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> type[FakeGraph]:
    monkeypatch.setattr(FakeGraph, "captures", 0)
    monkeypatch.setattr(FakeGraph, "replays", 0)
    return FakeGraph


@pytest.mark.parametrize("options", [{}, STOCHASTIC], ids=["fp16", "stochastic"])
@pytest.mark.parametrize("config", GRAPHS, ids=["copy", "zero_copy"])
def test_replays_are_steps(config: OffloadConfig, options: dict[str, Any], counts: type[FakeGraph]) -> None:
    expected = train(OffloadConfig(fraction=0.0), **options)
    assert counts.replays == 0
    assert_same_snapshot(train(config, **options), expected)
    # Number 0 makes the state; 1, 3, 4 and 6 are the first of their kinds, so 2, 5 and 7 are replayed.
    assert (counts.captures, counts.replays) == (3, 3)


def test_a_ring_that_moved_is_captured_again(counts: type[FakeGraph]) -> None:
    optimizer, reference = make(GRAPHS[0]), make(OffloadConfig(fraction=0.0))
    for number in range(3):
        step(optimizer, number)
        step(reference, number)
    assert (counts.captures, counts.replays) == (1, 1)
    [pipeline] = optimizer._stepper.engine.pipelines.values()
    held = [slot.memory for slot in pipeline.queues.ring.slots]  # so that the new ring lies elsewhere
    optimizer.release_gpu_memory()
    for number in range(3, 6):
        step(optimizer, number)
        step(reference, number)
    assert held
    assert (counts.captures, counts.replays) == (2, 3)
    assert_same_snapshot(snapshot(optimizer), snapshot(reference))


def test_what_cannot_be_replayed_is_refused() -> None:
    with pytest.raises(RuntimeError, match="graph=True"):
        make(OffloadConfig(graph=True)).step_in_backward(torch.nn.Linear(1, 1))


def test_captures_have_a_stream_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[Any] = []

    def stream(stream: Any) -> Any:
        used.append(stream)
        return contextlib.nullcontext()

    monkeypatch.setattr(torch.cuda, "stream", stream)
    optimizer = make(GRAPHS[0])
    for number in range(4):
        step(optimizer, number)
        optimizer.param_groups[0]["weight_decay"] *= 0.5 if number == 2 else 1
    step(optimizer, 4)
    [pipeline] = optimizer._stepper.engine.pipelines.values()
    queues = pipeline.queues
    assert used == [queues.capture] * 2
    assert len({queues.capture, queues.h2d, queues.d2h}) == 3
