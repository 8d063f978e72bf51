"""Timing events of steps on one device."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from .queues import CudaOps

_STEPS_KEPT = 8  # more than a training loop runs ahead of its GPU


class Span(NamedTuple):
    """Consecutive copies in one direction.

    Attributes:
        began: timing events; the first copy can start when all of them have happened.
        ended: timing event behind the last copy.
        nbytes: bytes of all copies.
    """

    began: tuple[Any, ...]
    ended: Any
    nbytes: int

    def ms(self) -> float:
        """Milliseconds from the start of the first copy to the end of the last; all have ended."""
        return min(float(event.elapsed_time(self.ended)) for event in self.began)


class Hold(NamedTuple):
    """What a call costs the caller's stream and the host.

    The stream pays for the kernels and waits of the call, and for host time where it is idle. A
    prefetch puts nothing between its events, so a busy stream passes them together.

    Attributes:
        began: timing event on the caller's stream, enqueued first.
        ended: the same, enqueued last.
        host_ms: host time of the call.
    """

    began: Any
    ended: Any
    host_ms: float

    def ms(self) -> float:
        """Milliseconds for which the stream was held up; both events have happened."""
        return float(self.began.elapsed_time(self.ended))


class Call(NamedTuple):
    """A call that is still enqueueing work.

    Attributes:
        began: timing event on the caller's stream.
        host_began: host time in seconds.
    """

    began: Any
    host_began: float

    @classmethod
    def begin(cls, ops: CudaOps) -> Call:
        """Records the beginning."""
        return cls(ops.record(ops.compute, timing=True), time.perf_counter())

    def end(self, ops: CudaOps) -> Hold:
        """Records the end."""
        ended = ops.record(ops.compute, timing=True)
        return Hold(self.began, ended, (time.perf_counter() - self.host_began) * 1e3)


class Prefetch(NamedTuple):
    """One call that enqueued copies into the window.

    Attributes:
        copies: the copies.
        hold: the call.
    """

    copies: Span
    hold: Hold


class StepMarks(NamedTuple):
    """Timing events of one step on one device, recorded with its operations and read much later.

    Attributes:
        hold: the step on this device, from its call to its last kernel or copy there.
        prefetched: prefetches for the step.
        to_device: copies of streamed state to the device.
        to_host: write-backs.
        window_bytes: GPU bytes of the window.
    """

    hold: Hold
    prefetched: tuple[Prefetch, ...]
    to_device: tuple[Span, ...]
    to_host: tuple[Span, ...]
    window_bytes: int

    @property
    def has_ended(self) -> bool:
        """True once the device has completed the step."""
        holds = [self.hold] + [prefetch.hold for prefetch in self.prefetched]
        ends = [hold.ended for hold in holds] + [span.ended for span in (*self.to_device, *self.to_host)]
        return all(event.query() for event in ends)


class StepLog:
    """The last steps of one device, by step number. Never waits for the device."""

    def __init__(self) -> None:
        """Starts empty."""
        self._steps: dict[int, list[StepMarks]] = {}

    def add(self, number: int, marks: StepMarks) -> None:
        """Adds a step, or a part of one, that was just enqueued.

        Args:
            number: number of the step; the same for all its parts, greater for later steps.
            marks: events of the step or part.
        """
        self._steps.setdefault(number, []).append(marks)
        if len(self._steps) > _STEPS_KEPT:
            del self._steps[min(self._steps)]

    def numbers(self) -> set[int]:
        """Numbers of the steps in the log."""
        return set(self._steps)

    def parts(self, number: int) -> list[StepMarks]:
        """The parts of a step, in order; empty if this device took no part in the step."""
        return self._steps.get(number, [])
