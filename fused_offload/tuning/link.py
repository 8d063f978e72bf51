"""Measures the link: copies to GPUs, from them and both ways at once, by size of a copy."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
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
        h2d_gbps: speed to the GPU alone.
        d2h_gbps: speed from the GPU alone.
        duplex_gbps: speed each way, both ways at once.
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
    rates = []
    with _speed_of_copies([device], max(COPY_MIB) * MIB) as gbps:
        for done, mib in enumerate(COPY_MIB):
            report("link", done, len(COPY_MIB))
            speeds = (gbps(mib * MIB, down, up) for down, up in ((True, False), (False, True), (True, True)))
            rates.append(LinkRate(mib, *speeds))
    report("link", len(COPY_MIB), len(COPY_MIB))
    return rates


def duplex_gbps(devices: Sequence[torch.device]) -> float:
    """Speed of copies both ways at once, each way and GPU, while all of some GPUs copy.

    Args:
        devices: the GPUs.
    """
    with _speed_of_copies(devices, 16 * MIB) as gbps:
        return gbps(16 * MIB, True, True)


@contextlib.contextmanager
def _speed_of_copies(devices: Sequence[torch.device], most_bytes: int) -> Iterator[Callable[[int, bool, bool], float]]:
    """Context with a function that measures the speed of copies, in GB/s each way and GPU.

    The function takes the bytes of a copy, and whether to copy to the GPUs and from them.
    """
    with contextlib.ExitStack() as stack:
        pairs = []
        for device in devices:
            stack.enter_context(torch.cuda.device(device))
            slab = PinnedSlab(2 * most_bytes, pin=True, numa_node=numa.preferred_node(device), device=device)
            stack.callback(slab.close)
            memory = torch.empty(2 * most_bytes, dtype=torch.uint8, device=device)
            pairs.append((DeviceQueues.of(device), slab.bytes.data_ptr(), memory))

        def gbps(nbytes: int, down: bool, up: bool) -> float:
            def copy() -> None:
                for _ in range(_LINK_BYTES // nbytes):
                    for queues, host, memory in pairs:
                        gpu, half = memory.data_ptr(), most_bytes
                        if down:
                            cuda_driver.copy_to_device_async(gpu, host, nbytes, queues.h2d.cuda_stream)
                        if up:
                            cuda_driver.copy_to_host_async(host + half, gpu + half, nbytes, queues.d2h.cuda_stream)
                for queues, _, _ in pairs:
                    queues.h2d.synchronize()
                    queues.d2h.synchronize()

            return _LINK_BYTES // nbytes * nbytes / _wall_ms(copy) / 1e6

        yield gbps


def _wall_ms(run: Callable[[], Any]) -> float:
    """Median time of some runs that wait for their copies, after one warm-up run."""
    run()
    samples = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        samples.append((time.perf_counter() - start) * 1e3)
    return median(samples)
