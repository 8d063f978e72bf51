"""Speed of the link between CPU and GPU, and the share that a step uses. Needs a CUDA GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from rich.table import Table

from fused_offload import FusedOffloadAdam

# Large enough for the link, small enough for both directions to start at once.
COPY_BYTES = 16 * 2**20
COPIES = 32  # together more than a CPU's cache holds, as the state is
REPEATS = 5


def median_seconds(work: Callable[[], None]) -> float:
    """Median wall-clock time of ``work``, from an idle GPU to an idle GPU."""
    seconds = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def duplex_bytes_per_s(device: torch.device) -> float:
    """Bytes a second, each way, of pinned copies in both directions at once."""
    host = [torch.empty((COPIES, COPY_BYTES), dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    gpu = [torch.empty((COPIES, COPY_BYTES), dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.cuda.Stream(device), torch.cuda.Stream(device)]

    def copy_both_ways() -> None:
        for index in range(COPIES):
            with torch.cuda.stream(streams[0]):
                gpu[0][index].copy_(host[0][index], non_blocking=True)
            with torch.cuda.stream(streams[1]):
                host[1][index].copy_(gpu[1][index], non_blocking=True)

    return COPY_BYTES * COPIES / median_seconds(copy_both_ways)


def step_seconds(optimizer: FusedOffloadAdam) -> float:
    """Time of a step alone, with its write-back. Changes the parameters: call it after training."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.zeros_like(param)

    def step() -> None:
        optimizer.step()
        optimizer.synchronize()

    step()
    return median_seconds(step)


def link_table(optimizer: FusedOffloadAdam, device: torch.device) -> Table:
    """Speed of a step against the link, and the GPU memory that the state would take."""
    report = optimizer.memory_report()
    optimizer.synchronize()
    trained = optimizer.last_step_report()
    moved = sum(report.host_bytes.values())
    seconds, link = step_seconds(optimizer), duplex_bytes_per_s(device)
    table = Table(title="One optimizer step by itself", show_header=False)
    table.add_row("state moved, each way", f"{moved / 1e9:.3f} GB")
    table.add_row("time, write-back included", f"{seconds * 1e3:.1f} ms")
    table.add_row("speed, each way", f"{moved / seconds / 1e9:.1f} GB/s")
    table.add_row("plain copies both ways at once", f"{link / 1e9:.1f} GB/s each way")
    table.add_row("share of the link", f"{moved / seconds / link:.0%}")
    if trained is not None:
        table.add_row("last step of training: held up for", f"{trained.exposed_ms:.1f} ms")
        table.add_row(
            "last step of training: speed in, out", f"{_speed(trained.to_device_gbps)}, {_speed(trained.to_host_gbps)}"
        )
    table.add_row("GPU memory for the optimizer: staging", f"{report.ring_bytes / 1e9:.3f} GB")
    table.add_row("GPU memory that a resident optimizer would need", f"{moved / 1e9:.3f} GB")
    return table


def _speed(gbps: float | None) -> str:
    return "nothing moved" if gbps is None else f"{gbps:.1f} GB/s"
