"""Plots of the measurements of `fused-offload tune`, for which matplotlib is needed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fused_offload.profiles.units import MIB

from .candidates import gigabytes
from .measure import Swept, Tuning

_COLUMNS = 3


def draw(tuning: Tuning, path: Path) -> None:
    """Writes one picture: the link, and the steps of each size.

    Args:
        tuning: the measurements.
        path: file; its ending selects matplotlib's format.
    """
    from matplotlib.figure import Figure  # unlike pyplot it needs no display

    drawn = 1 + len(tuning.swept)
    rows = -(-drawn // _COLUMNS)
    figure = Figure(figsize=(5 * _COLUMNS, 4 * rows), layout="constrained")
    link, *steps = figure.subplots(rows, _COLUMNS, squeeze=False).flat
    _draw_link(link, tuning)
    for axis, swept in zip(steps, tuning.swept, strict=False):
        _draw_steps(axis, swept)
    for axis in steps[drawn - 1 :]:
        axis.set_axis_off()
    figure.suptitle(f"{tuning.profile.key.gpu}, {tuning.profile.measured}")
    figure.savefig(path, dpi=150)


def _draw_link(axis: Any, tuning: Tuning) -> None:
    sizes = [rate.copy_mib for rate in tuning.link]
    axis.plot(sizes, [rate.h2d_gbps for rate in tuning.link], "o-", label="host to device")
    axis.plot(sizes, [rate.d2h_gbps for rate in tuning.link], "s-", label="device to host")
    axis.plot(sizes, [rate.duplex_gbps for rate in tuning.link], "^-", label="each way, both at once")
    axis.set(title="The link", ylabel="GB/s", ylim=(0, None))
    _mib_axis(axis, sizes, "MiB a copy")
    axis.legend()


def _draw_steps(axis: Any, swept: Swept) -> None:
    copies = [one for one in swept.timed if one.streaming.programs is None]
    for depth in sorted({one.streaming.depth for one in copies}):
        line = sorted((one.streaming.chunk_bytes / MIB, one.ms) for one in copies if one.streaming.depth == depth)
        axis.plot([size for size, _ in line], [ms for _, ms in line], "o-", label=f"depth {depth}")
    best = min((one for one in swept.timed if one.streaming.programs is not None), key=lambda one: one.ms)
    axis.axhline(best.ms, linestyle="--", color="grey", label=best.label)
    axis.set(title=f"A step of {gigabytes(swept.state_bytes)} each way", ylabel="ms")
    _mib_axis(axis, {one.streaming.chunk_bytes / MIB for one in copies}, "MiB a chunk")
    axis.legend()


def _mib_axis(axis: Any, sizes: Iterable[float], name: str) -> None:
    """Labels a logarithmic axis with the sizes instead of powers of ten."""
    axis.set_xscale("log", base=2)
    axis.set_xticks(sorted(sizes), [f"{size:g}" for size in sorted(sizes)], minor=False)
    axis.set_xticks([], minor=True)
    axis.set_xlabel(name)
