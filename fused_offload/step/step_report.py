"""Reports of steps: bytes and speed on the link, and time on the caller's stream."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fused_offload.stream.timing import Span, StepMarks


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One step, with the prefetch before it and the write-back behind it. GB is 1e9 bytes.

    Attributes:
        exposed_ms: time for which ``step()`` and the prefetches before it hold up the caller's
            stream. It includes the step's kernels, which also run if all state is on the GPU. It
            includes host time if the stream was idle, as after reading the gradient norm. Not in
            it: updates on the CPU, waiting for parameters in host memory, prefetches that were
            cancelled, host time of model hooks around a prefetch, later waits for write-backs, and
            what copies slow down in other kernels.
        bytes_to_device: state that was prefetched or streamed to the device, and parameters and
            gradients that came from host memory.
        bytes_to_host: state that was written back, and parameters that went to host memory.
        to_device_gbps: ``bytes_to_device`` over the time that these copies took, or None if there
            were none. Under backward and forward passes the time includes waits of the copies for
            each other and for memory.
        to_host_gbps: ``bytes_to_host`` over the time that these copies took, or None.
        window_bytes: GPU bytes of the window when the step began.
        prefetched_share: share of ``bytes_to_device`` that was prefetched, 0 to 1.
        link_share: the greater of both speeds, as a share of the speed of plain copies both ways
            at once that ``fused-offload tune`` measured, while as many GPUs of the host copied as
            step there, or the next larger number that it measured. GPUs that step are this
            optimizer's, times ``LOCAL_WORLD_SIZE`` where ``torch.distributed`` is initialised. None
            without that measurement, for several ranks without ``LOCAL_WORLD_SIZE``, or if nothing
            was moved.
        host_ms: host time of ``step()`` and of the prefetches before it, exposed or not.
    """

    exposed_ms: float
    bytes_to_device: int
    bytes_to_host: int
    to_device_gbps: float | None
    to_host_gbps: float | None
    window_bytes: int
    prefetched_share: float
    link_share: float | None = None
    host_ms: float = 0.0

    def __str__(self) -> str:
        """One line for a log."""
        parts = [f"{self.exposed_ms:.1f} ms exposed, host {self.host_ms:.1f} ms"]
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


def report_of(parts: Sequence[StepMarks], link_gbps: float | None) -> StepReport:
    """Report of a step on one device, whose events must have happened.

    Args:
        parts: the step's parts, in order.
        link_gbps: speed of plain copies each way, both ways at once, or None if unknown.
    """
    prefetches = [prefetch for part in parts for prefetch in part.prefetched]
    prefetched = [prefetch.copies for prefetch in prefetches]
    arriving = prefetched + [span for part in parts for span in part.to_device]
    leaving = [span for part in parts for span in part.to_host]
    holds = [prefetch.hold for prefetch in prefetches] + [part.hold for part in parts]
    to_device = _bytes(arriving)
    speeds = [_gbps(arriving), _gbps(leaving)]
    known = [speed for speed in speeds if speed is not None]
    return StepReport(
        exposed_ms=sum(hold.ms() for hold in holds),
        bytes_to_device=to_device,
        bytes_to_host=_bytes(leaving),
        to_device_gbps=speeds[0],
        to_host_gbps=speeds[1],
        window_bytes=max(part.window_bytes for part in parts),
        prefetched_share=_bytes(prefetched) / to_device if to_device else 0.0,
        link_share=max(known) / link_gbps if known and link_gbps else None,
        host_ms=sum(hold.host_ms for hold in holds),
    )


def combined(reports: Sequence[StepReport]) -> StepReport:
    """Report of one step on several devices: sums of bytes and speeds, and the longest times."""
    if len(reports) == 1:
        return reports[0]
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
        host_ms=max(report.host_ms for report in reports),
    )


def _bytes(spans: Iterable[Span]) -> int:
    return sum(span.nbytes for span in spans)


def _gbps(spans: Sequence[Span]) -> float | None:
    ms = sum(span.ms() for span in spans if span.nbytes)
    return _bytes(spans) / ms / 1e6 if ms > 0 else None


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
