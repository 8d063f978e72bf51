"""Timing events of steps on one device."""

from __future__ import annotations

from typing import Any, NamedTuple

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


class StepMarks(NamedTuple):
    """Timing events of one step on one device, recorded with its operations and read much later.

    Attributes:
        began: event on the caller's stream when the step was called.
        computed: event behind the step's last kernel.
        prefetched: copies into the window.
        to_device: copies of streamed state to the device.
        to_host: write-backs.
        window_bytes: GPU bytes of the window.
        host_ms: host time from the call to the last enqueued operation, and of the prefetches
            before the step.
    """

    began: Any
    computed: Any
    prefetched: tuple[Span, ...]
    to_device: tuple[Span, ...]
    to_host: tuple[Span, ...]
    window_bytes: int
    host_ms: float = 0.0

    @property
    def has_ended(self) -> bool:
        """True once the device has completed the step."""
        return bool(self.computed.query()) and all(span.ended.query() for span in (*self.to_device, *self.to_host))


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
