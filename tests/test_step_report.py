"""What the report of a step says, from events at known times."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fused_offload import FusedOffloadAdam
from fused_offload.step_report import Span, StepLog, StepMarks, combined


class At:
    """An event at a time in milliseconds, which has happened or not."""

    def __init__(self, ms: float, happened: bool = True) -> None:
        self.ms = ms
        self.happened = happened

    def query(self) -> bool:
        return self.happened

    def elapsed_time(self, later: At) -> float:
        assert self.happened
        assert later.happened
        return later.ms - self.ms


def span(began: float | tuple[float, ...], ended: float, nbytes: int) -> Span:
    times = began if isinstance(began, tuple) else (began,)
    return Span(tuple(At(ms) for ms in times), At(ended), nbytes)


def marks(**changed: Any) -> StepMarks:
    """From 100 to 110 ms, 30 MB in of which 10 were prefetched, 30 MB out."""
    fields = {
        "began": At(100),
        "computed": At(110),
        "prefetched": (span(50, 51, 10_000_000),),
        "to_device": (span((100, 90), 104, 20_000_000),),
        "to_host": (span(100, 105, 20_000_000), span(110, 111, 10_000_000)),
        "window_bytes": 11_000_000,
    }
    return StepMarks(**{**fields, **changed})


def test_bytes_speeds_and_shares() -> None:
    report = marks().report(link_gbps=10.0)
    assert report.exposed_ms == 10
    assert (report.bytes_to_device, report.bytes_to_host) == (30_000_000, 30_000_000)
    assert report.to_device_gbps == pytest.approx(30 / 5)  # copies wait for the later of the events before them
    assert report.to_host_gbps == pytest.approx(30 / 6)
    assert report.window_bytes == 11_000_000
    assert report.prefetched_share == pytest.approx(1 / 3)
    assert report.link_share == pytest.approx(0.6)
    assert str(report) == (
        "10.0 ms exposed, 0.030 GB in at 6.0 GB/s, 0.030 GB out at 5.0 GB/s, 60% of the link, 33% prefetched, "
        "window 0.011 GB"
    )


def test_nothing_moved() -> None:
    report = marks(prefetched=(), to_device=(span(100, 100, 0),), to_host=(), window_bytes=0).report(10.0)
    assert (report.to_device_gbps, report.to_host_gbps, report.link_share) == (None, None, None)
    assert report.prefetched_share == 0
    assert str(report) == "10.0 ms exposed, 0.000 GB in, 0.000 GB out, 0% prefetched, window 0.000 GB"


def test_the_last_step_that_has_ended_is_reported_without_waiting() -> None:
    log = StepLog()
    assert log.last() is None
    computed, written = At(110, happened=False), At(120, happened=False)
    first, second = marks(computed=computed), marks(to_host=(Span((At(100),), written, 1),))
    log.add(first)
    log.add(second)
    assert log.last() is None
    computed.happened = True
    assert log.last() is first  # the write-back of the second is under way
    written.happened = True
    assert log.last() is second
    unfinished = [marks(computed=At(0, happened=False)) for _ in range(100)]
    for step in unfinished:
        log.add(step)
    assert log.last() is second  # and the unfinished ones take no more and more memory
    assert len(log._pending) < 10


def test_several_devices_work_at_the_same_time() -> None:
    one, other = marks().report(10.0), marks(computed=At(130), prefetched=()).report(20.0)
    both = combined([one, other])
    assert both is not None
    assert both.exposed_ms == 30
    assert both.bytes_to_device == 50_000_000
    assert both.to_device_gbps == pytest.approx(6 + 5)
    assert both.prefetched_share == pytest.approx(10 / 50)
    assert both.link_share == min(one.link_share or 0, other.link_share or 0)
    assert combined([one]) is one
    assert combined([]) is None


def test_on_the_cpu_nothing_moves() -> None:
    param = torch.nn.Parameter(torch.ones(8))
    optimizer = FusedOffloadAdam([param])
    param.grad = torch.ones(8)
    optimizer.step()
    assert optimizer.last_step_report() is None
