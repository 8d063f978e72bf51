"""Measures copies over the link: to the GPU, from it and both at once, by size of a copy."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch

from fused_offload.memory import cuda_driver, numa
from fused_offload.memory.pinned import PinnedSlab
from fused_offload.profiles.units import MIB
from fused_offload.stream.queues import DeviceQueues

COPY_MIB = (1, 4, 16, 48)
ROUNDS = 3
_LINK_BYTES = 192 * MIB  # each way, of one measurement

Report = Callable[[str, int, int], None]
"""Progress callback: name of the phase, measurements done, measurements in all."""


class LinkRate(NamedTuple):
    """Speeds of copies of one size, in GB/s.

    Attributes:
        copy_mib: size of a copy, MiB.
        h2d_gbps: to the GPU alone.
        d2h_gbps: from the GPU alone.
        duplex_gbps: each way, both at once.
    """

    copy_mib: int
    h2d_gbps: float
    d2h_gbps: float
    duplex_gbps: float


def measure_link(device: torch.device, report: Report) -> list[LinkRate]:
    """Measures copies between page-locked memory and the GPU, by size of a copy.

    Args:
        device: the GPU.
        report: progress callback.
    """
    queues = DeviceQueues.of(device)
    nbytes = max(COPY_MIB) * MIB
    slab = PinnedSlab(2 * nbytes, pin=True, numa_node=numa.preferred_node(device), device=device)
    try:
        memory = torch.empty(2 * nbytes, dtype=torch.uint8, device=device)
        host, gpu = slab.bytes.data_ptr(), memory.data_ptr()

        def copy(size: int, *, down: bool, up: bool) -> None:
            for _ in range(_LINK_BYTES // size):
                if down:
                    cuda_driver.copy_to_device_async(gpu, host, size, queues.h2d.cuda_stream)
                if up:
                    cuda_driver.copy_to_host_async(host + nbytes, gpu + nbytes, size, queues.d2h.cuda_stream)

        rates = []
        for done, mib in enumerate(COPY_MIB):
            report("link", done, len(COPY_MIB))
            directions = [(True, False), (False, True), (True, True)]
            times = [_wall_ms(lambda: copy(mib * MIB, down=down, up=up)) for down, up in directions]  # noqa: B023
            moved = _LINK_BYTES // (mib * MIB) * mib * MIB
            rates.append(LinkRate(mib, *(moved / ms / 1e6 for ms in times)))
        report("link", len(COPY_MIB), len(COPY_MIB))
        return rates
    finally:
        slab.close()


def duplex_gbps(devices: Sequence[torch.device]) -> float:
    """Speed of copies both ways at once, each way and GPU, while all of some GPUs copy.

    Args:
        devices: the GPUs.
    """
    nbytes = 16 * MIB
    with contextlib.ExitStack() as stack:
        pairs = []
        for device in devices:
            stack.enter_context(torch.cuda.device(device))
            slab = PinnedSlab(2 * nbytes, pin=True, numa_node=numa.preferred_node(device), device=device)
            stack.callback(slab.close)
            memory = torch.empty(2 * nbytes, dtype=torch.uint8, device=device)
            pairs.append((DeviceQueues.of(device), slab.bytes.data_ptr(), memory))

        def copy() -> None:
            for _ in range(_LINK_BYTES // nbytes):
                for queues, host, memory in pairs:
                    gpu = memory.data_ptr()
                    cuda_driver.copy_to_device_async(gpu, host, nbytes, queues.h2d.cuda_stream)
                    cuda_driver.copy_to_host_async(host + nbytes, gpu + nbytes, nbytes, queues.d2h.cuda_stream)
            for queues, _, _ in pairs:
                queues.h2d.synchronize()
                queues.d2h.synchronize()

        return _LINK_BYTES // nbytes * nbytes / _wall_ms(copy) / 1e6


def _wall_ms(run: Callable[[], Any]) -> float:
    """Median time of synchronous runs, after one warm-up run."""
    run()
    samples = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        samples.append((time.perf_counter() - start) * 1e3)
    return median(samples)
