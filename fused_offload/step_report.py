"""What a step moved across the link, how fast, and for how long it held the caller's stream."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

_STEPS_KEPT = 8  # more than a training loop runs ahead of its GPU


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One step, with the prefetch before it and the write-back behind it. GB is 1e9 bytes.

    Attributes:
        exposed_ms: from the step's beginning on the caller's stream to its last kernel: what training waited for. The
            kernels themselves are part of it, as they are where all state is on the GPU.
        bytes_to_device: state that was prefetched or streamed in.
        bytes_to_host: state that was written back.
        to_device_gbps: those bytes over the time in which they were under way, or None if there were none. Under
            backward and forward passes the time includes what the copies wait for each other and for memory.
        to_host_gbps: the same towards the host.
        window_bytes: GPU bytes of the window when the step began.
        prefetched_share: how much of ``bytes_to_device`` was prefetched, 0 to 1.
        link_share: the greater of both speeds over what plain copies in both directions at once reach, as
            ``fused-offload tune`` measured it; None where it did not, or nothing was moved.
    """

    exposed_ms: float
    bytes_to_device: int
    bytes_to_host: int
    to_device_gbps: float | None
    to_host_gbps: float | None
    window_bytes: int
    prefetched_share: float
    link_share: float | None = None

    def __str__(self) -> str:
        """One line for a log."""
        parts = [f"{self.exposed_ms:.1f} ms exposed"]
        for direction, nbytes, gbps in (
            ("in", self.bytes_to_device, self.to_device_gbps),
            ("out", self.bytes_to_host, self.to_host_gbps),
        ):
            speed = "" if gbps is None else f" at {gbps:.1f} GB/s"
            parts.append(f"{nbytes / 1e9:.3f} GB {direction}{speed}")
        if self.link_share is not None:
            parts.append(f"{self.link_share:.0%} of the link")
        parts.append(f"{self.prefetched_share:.0%} prefetched, window {self.window_bytes / 1e9:.3f} GB")
        return ", ".join(parts)


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
        began: on the caller's stream, before the step's first kernel.
        computed: behind its last kernel.
        prefetched: copies into the window.
        to_device: copies of streamed state.
        to_host: write-backs.
        window_bytes: GPU bytes of the window.
    """

    began: Any
    computed: Any
    prefetched: tuple[Span, ...]
    to_device: tuple[Span, ...]
    to_host: tuple[Span, ...]
    window_bytes: int

    @property
    def has_ended(self) -> bool:
        """Whether the device is through with all of it."""
        return bool(self.computed.query()) and all(span.ended.query() for span in (*self.to_device, *self.to_host))


def report_of(parts: Sequence[StepMarks], link_gbps: float | None) -> StepReport:
    """Reads the events of a step on one device, which must have happened.

    Args:
        parts: the step, or what it was enqueued in, one part after the other.
        link_gbps: speed of plain copies each way, both ways at once, or None if unknown.
    """
    prefetched = [span for part in parts for span in part.prefetched]
    arriving = prefetched + [span for part in parts for span in part.to_device]
    leaving = [span for part in parts for span in part.to_host]
    to_device = _bytes(arriving)
    speeds = [_gbps(arriving), _gbps(leaving)]
    known = [speed for speed in speeds if speed is not None]
    return StepReport(
        exposed_ms=sum(part.began.elapsed_time(part.computed) for part in parts),
        bytes_to_device=to_device,
        bytes_to_host=_bytes(leaving),
        to_device_gbps=speeds[0],
        to_host_gbps=speeds[1],
        window_bytes=max(part.window_bytes for part in parts),
        prefetched_share=_bytes(prefetched) / to_device if to_device else 0.0,
        link_share=max(known) / link_gbps if known and link_gbps else None,
    )


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


def combined(reports: Sequence[StepReport]) -> StepReport | None:
    """One step on several devices, which run at the same time: bytes and speeds add up, the longest time counts."""
    if len(reports) <= 1:
        return reports[0] if reports else None
    to_device = sum(report.bytes_to_device for report in reports)
    shares = [report.link_share for report in reports if report.link_share is not None]
    prefetched = sum(report.prefetched_share * report.bytes_to_device for report in reports)
    return StepReport(
        exposed_ms=max(report.exposed_ms for report in reports),
        bytes_to_device=to_device,
        bytes_to_host=sum(report.bytes_to_host for report in reports),
        to_device_gbps=_sum(report.to_device_gbps for report in reports),
        to_host_gbps=_sum(report.to_host_gbps for report in reports),
        window_bytes=sum(report.window_bytes for report in reports),
        prefetched_share=prefetched / to_device if to_device else 0.0,
        link_share=min(shares, default=None),
    )


def _bytes(spans: Iterable[Span]) -> int:
    return sum(span.nbytes for span in spans)


def _gbps(spans: Sequence[Span]) -> float | None:
    ms = sum(span.ms() for span in spans if span.nbytes)
    return _bytes(spans) / ms / 1e6 if ms > 0 else None


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
