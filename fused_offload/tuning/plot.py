"""Draws what `fused-offload tune` measured. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fused_offload.config import MIB

from .measure import Swept, Tuning


def draw(tuning: Tuning, path: Path) -> None:
    """Writes one picture: the link, and the steps of each size.

    Args:
        tuning: what was measured.
        path: file, of any format that matplotlib knows by its ending.
    """
    from matplotlib.figure import Figure  # not pyplot: nothing is shown, so no display is looked for

    figure = Figure(figsize=(5 * (1 + len(tuning.swept)), 4), layout="constrained")
    axes = figure.subplots(1, 1 + len(tuning.swept), squeeze=False)[0]
    _draw_link(axes[0], tuning)
    for axis, swept in zip(axes[1:], tuning.swept, strict=True):
        _draw_steps(axis, swept)
    figure.suptitle(f"{tuning.profile.key.gpu}, {tuning.profile.measured}")
    figure.savefig(path, dpi=150)


def _draw_link(axis: Any, tuning: Tuning) -> None:
    sizes = [rate.copy_mib for rate in tuning.link]
    axis.plot(sizes, [rate.h2d_gbps for rate in tuning.link], "o-", label="host to device")
    axis.plot(sizes, [rate.d2h_gbps for rate in tuning.link], "s-", label="device to host")
    axis.plot(sizes, [rate.duplex_gbps for rate in tuning.link], "^-", label="each way, both at once")
    axis.set(title="The link", xlabel="MiB a copy", ylabel="GB/s", xscale="log", ylim=(0, None))
    axis.legend()


def _draw_steps(axis: Any, swept: Swept) -> None:
    copies = [one for one in swept.timed if one.streaming.programs is None]
    for depth in sorted({one.streaming.depth for one in copies}):
        line = sorted((one.streaming.chunk_bytes / MIB, one.ms) for one in copies if one.streaming.depth == depth)
        axis.plot([size for size, _ in line], [ms for _, ms in line], "o-", label=f"depth {depth}")
    best = min((one for one in swept.timed if one.streaming.programs is not None), key=lambda one: one.ms)
    axis.axhline(best.ms, linestyle="--", color="grey", label=best.label)
    axis.set(
        title=f"A step of {swept.state_bytes / 1e9:.2f} GB each way", xlabel="MiB a chunk", ylabel="ms", xscale="log"
    )
    axis.legend()
