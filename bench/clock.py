"""Timing: what is on the clock, and how often."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

T = TypeVar("T")


class StepTime(NamedTuple):
    """Wall-clock time of one step.

    Attributes:
        total_ms: from an idle GPU until parameters and state are final and the GPU is idle again.
        host_ms: until `step` returned to its caller.
    """

    total_ms: float
    host_ms: float


def synchronize(device: torch.device) -> None:
    """Waits until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_step(step: Callable[[], Any], device: torch.device, finish: Callable[[], Any] | None = None) -> StepTime:
    """Times one step.

    Args:
        step: the step.
        device: device of the parameters.
        finish: waits for what the step left under way, such as the write-back of state.
    """
    synchronize(device)
    start = time.perf_counter()
    step()
    returned = time.perf_counter()
    if finish is not None:
        finish()
    synchronize(device)
    return StepTime((time.perf_counter() - start) * 1e3, (returned - start) * 1e3)


def wall_ms(run: Callable[[], Any], device: torch.device) -> float:
    """Wall-clock time of work that is waited for."""
    return time_step(run, device).total_ms


def mark(device: torch.device) -> Any:
    """This moment on the device's current stream, or on the host's clock for a CPU."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def ms_between(begin: Any, end: Any) -> float:
    """Milliseconds from one `mark` to another, which has happened."""
    return (end - begin) * 1e3 if isinstance(begin, float) else float(begin.elapsed_time(end))


def measure(
    benchmark: Any,
    run: Callable[[], T],
    *,
    rounds: int,
    warmup_rounds: int = 0,
    setup: Callable[[], Any] | None = None,
) -> list[T]:
    """Lets pytest-benchmark repeat ``run`` and keeps what each timed round returns.

    pytest-benchmark's own table times ``run`` from outside; rows are made from what ``run``
    measured itself, by the clock that suits it (CUDA events, or wall-clock time around a step).

    Args:
        benchmark: pytest-benchmark's fixture.
        run: one repetition.
        rounds: timed repetitions.
        warmup_rounds: repetitions before them.
        setup: runs before each repetition: what ``run`` is compared with, so that both see the same
            state of the link.
    """
    results: list[T] = []

    def prepare() -> None:
        if setup is not None:
            setup()

    benchmark.pedantic(
        lambda: results.append(run()), setup=prepare, rounds=rounds, warmup_rounds=warmup_rounds, iterations=1
    )
    return results[-rounds:]
