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
from fused_offload.profiles.profile import SharedLink
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


def measure_shared_link(devices: Sequence[torch.device], report: Report) -> tuple[list[SharedLink], str | None]:
    """Measures copies both ways on 2, 4, 8, ... and all of some GPUs at once.

    Args:
        devices: the GPUs; the first ones are measured in every case.
        report: progress callback.

    Returns:
        The speeds by ascending number of GPUs, and the error that ended the measurement, or None.
    """
    counts = [2**power for power in range(1, len(devices).bit_length()) if 2**power < len(devices)]
    counts += [len(devices)] if len(devices) > 1 else []
    measured: list[SharedLink] = []
    for count in counts:
        report("GPUs at once", len(measured), len(counts))
        try:
            measured.append(SharedLink(count, duplex_gbps(devices[:count])))
        except (RuntimeError, OSError) as error:  # a lost GPU, or too little memory
            why = str(error).partition("\n")[0] or type(error).__name__
            return measured, f"{count} GPUs at once: {why}"
    if counts:
        report("GPUs at once", len(counts), len(counts))
    return measured, None


def duplex_gbps(devices: Sequence[torch.device]) -> float:
    """Speed of copies both ways at once, each way and GPU, while all of some GPUs copy.

    Every copy of a run moves other memory, as in a step: a host's cache must not answer for it.

    Args:
        devices: the GPUs.
    """
    with _speed_of_copies(devices, _LINK_BYTES) as gbps:
        return gbps(16 * MIB, True, True)


@contextlib.contextmanager
def _speed_of_copies(devices: Sequence[torch.device], most_bytes: int) -> Iterator[Callable[[int, bool, bool], float]]:
    """Context with a function that measures the speed of copies, in GB/s each way and GPU.

    The function takes the bytes of a copy, and whether to copy to the GPUs and from them. Copies go
    through ``most_bytes`` of memory for each direction.
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
                for index in range(_LINK_BYTES // nbytes):
                    begin = index % (most_bytes // nbytes) * nbytes
                    for queues, host, memory in pairs:
                        gpu, other = memory.data_ptr(), most_bytes + begin
                        if down:
                            cuda_driver.copy_to_device_async(
                                gpu + begin, host + begin, nbytes, queues.h2d.current.cuda_stream
                            )
                        if up:
                            cuda_driver.copy_to_host_async(
                                host + other, gpu + other, nbytes, queues.d2h.current.cuda_stream
                            )
                for queues, _, _ in pairs:
                    queues.h2d.current.synchronize()
                    queues.d2h.current.synchronize()

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
