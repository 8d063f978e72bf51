"""One measured thing as one row of the results file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row. README.md says what each field means; what does not apply is None.

    Attributes:
        name: ``suite/case``, unique in a results file.
        params: what the case was run with.
        numel: parameters.
        rounds: timed repetitions.
        median_ms: their median; ratios and rates are made from it.
        min_ms: the shortest.
        max_ms: the longest.
        bytes_to_device: bytes that crossed the link to the GPU.
        bytes_to_host: bytes that crossed the link to the host.
        gbps_to_device: GB/s (1e9 bytes) of them.
        gbps_to_host: GB/s of them.
        memory_bytes: GPU memory read and written.
        memory_tbps: TB/s (1e12 bytes) of it.
        ratio_to_copies: time over that of the same chunks copied without kernels.
        ratio_to_link: time over that of the best plain duplex copy of the same bytes.
        ratio_to_peer: time over that of what ``params["peer"]`` names.
        extra_gpu_bytes: GPU memory beyond parameters and gradients at the peak.
        host_ms: median time until ``step()`` returned.
        note: how the case differs from the others.
    """

    name: str
    params: dict[str, Any] = field(default_factory=dict)
    numel: int | None = None
    rounds: int
    median_ms: float
    min_ms: float
    max_ms: float
    bytes_to_device: int | None = None
    bytes_to_host: int | None = None
    gbps_to_device: float | None = None
    gbps_to_host: float | None = None
    memory_bytes: int | None = None
    memory_tbps: float | None = None
    ratio_to_copies: float | None = None
    ratio_to_link: float | None = None
    ratio_to_peer: float | None = None
    extra_gpu_bytes: int | None = None
    host_ms: float | None = None
    note: str = ""


def make_row(name: str, samples_ms: Sequence[float], **fields: Any) -> Row:
    """A row of timed repetitions; rates follow from the bytes among ``fields``."""
    middle_ms = median(samples_ms)
    for byte_count, rate, unit in (
        ("bytes_to_device", "gbps_to_device", 1e9),
        ("bytes_to_host", "gbps_to_host", 1e9),
        ("memory_bytes", "memory_tbps", 1e12),
    ):
        if fields.get(byte_count) is not None:
            fields[rate] = fields[byte_count] / unit / (middle_ms / 1e3)
    return Row(
        name=name,
        rounds=len(samples_ms),
        median_ms=middle_ms,
        min_ms=min(samples_ms),
        max_ms=max(samples_ms),
        **fields,
    )


class Rows:
    """The rows of a session."""

    def __init__(self) -> None:
        self._rows: dict[str, Row] = {}

    def add(self, benchmark: Any, row: Row) -> None:
        """Keeps a row, also with pytest-benchmark's own record of the test."""
        assert row.name not in self._rows, f"two rows are called {row.name}"
        self._rows[row.name] = row
        benchmark.extra_info[row.name] = asdict(row)

    def as_json(self) -> list[dict[str, Any]]:
        """Rows in the order of their measurement."""
        return [asdict(row) for row in self._rows.values()]
