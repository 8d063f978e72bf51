"""Timing events of steps on one device."""

from __future__ import annotations

from typing import Any, NamedTuple

_STEPS_KEPT = 8  # more than a training loop runs ahead of its GPU


class Span(NamedTuple):
    """Copies in one direction, one behind the other.

    Attributes:
        began: timing events, the last of which to happen is when the first copy could start.
        ended: timing event behind the last copy.
        nbytes: of all of them.
    """

    began: tuple[Any, ...]
    ended: Any
    nbytes: int

    def ms(self) -> float:
        """Milliseconds that it took. All its events have happened."""
        return min(float(event.elapsed_time(self.ended)) for event in self.began)


class StepMarks(NamedTuple):
    """Timing events of one step on one device; they are recorded as the step is enqueued and read much later.

    Attributes:
        began: on the caller's stream, when the step was called.
        computed: behind its last kernel.
        prefetched: copies into the window.
        to_device: copies of streamed state.
        to_host: write-backs.
        window_bytes: GPU bytes of the window.
        host_ms: host time from the call to the last operation, and of the prefetches before it.
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
        """True once the device has completed all of it."""
        return bool(self.computed.query()) and all(span.ended.query() for span in (*self.to_device, *self.to_host))


class StepLog:
    """The last steps of one device, by their number. Never waits for the device."""

    def __init__(self) -> None:
        """No step yet."""
        self._steps: dict[int, list[StepMarks]] = {}

    def add(self, number: int, marks: StepMarks) -> None:
        """Takes down a step, or a part of one, that was just enqueued.

        Args:
            number: of the step; parts of one step have the same, later steps greater ones.
            marks: its events.
        """
        self._steps.setdefault(number, []).append(marks)
        if len(self._steps) > _STEPS_KEPT:
            del self._steps[min(self._steps)]

    def numbers(self) -> set[int]:
        """Steps that are known."""
        return set(self._steps)

    def parts(self, number: int) -> list[StepMarks]:
        """A step, in the order of its parts; empty if this device had no part in it."""
        return self._steps.get(number, [])
