"""Plain copies both ways at once: what the link gives to whoever asks for nothing but bytes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch

from fused_offload.memory import cuda_driver


class Copy(NamedTuple):
    """Bytes that lie at one address on the host and at another on the GPU."""

    host_address: int
    device_address: int
    nbytes: int


def cut(host: torch.Tensor, device: torch.Tensor, copy_bytes: int) -> list[Copy]:
    """Copies of at most ``copy_bytes`` that together cover two uint8 tensors of one size, in
    order.
    """
    assert host.numel() == device.numel()
    return [
        Copy(host.data_ptr() + start, device.data_ptr() + start, min(copy_bytes, host.numel() - start))
        for start in range(0, host.numel(), copy_bytes)
    ]


class CopyStreams:
    """One stream for each direction."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.h2d = torch.cuda.Stream(device)
        self.d2h = torch.cuda.Stream(device)

    def enqueue(self, to_device: Sequence[Copy], to_host: Sequence[Copy]) -> None:
        """Enqueues copies, taking turns between the directions so that neither waits for the host
        to get to it.
        """
        h2d, d2h = self.h2d.cuda_stream, self.d2h.cuda_stream
        with torch.cuda.device(self.device):
            for down, up in zip_longest(to_device, to_host):
                if down is not None:
                    cuda_driver.copy_to_device_async(down.device_address, down.host_address, down.nbytes, h2d)
                if up is not None:
                    cuda_driver.copy_to_host_async(up.host_address, up.device_address, up.nbytes, d2h)

    def time_ms(self, to_device: Sequence[Copy], to_host: Sequence[Copy]) -> float:
        """Enqueues copies and waits.

        Returns the time until the last direction is done, by CUDA events.
        """
        torch.cuda.synchronize(self.device)
        current = torch.cuda.current_stream(self.device)
        start = _event(current)
        self.h2d.wait_event(start)
        self.d2h.wait_event(start)
        self.enqueue(to_device, to_host)
        ends = [_event(self.h2d), _event(self.d2h)]
        torch.cuda.synchronize(self.device)
        return max(start.elapsed_time(end) for end in ends)


def _event(stream: Any) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


class PlainDuplex:
    """Copies an optimizer's slabs both ways at once, in one size of copy and without any order
    between the directions.

    A mirror of the slabs on the GPU is the other end of both directions. So every byte that arrives
    on the host is the one that was there: the state stays as it is. The write-back runs half a slab
    ahead of the prefetch, so that neither direction finds in a cache what the other just left
    there.
    """

    def __init__(self, slabs: Sequence[torch.Tensor], device: torch.device, copy_sizes: Sequence[int]) -> None:
        mirrors = [torch.empty(slab.numel(), dtype=torch.uint8, device=device) for slab in slabs]
        self._slabs, self._mirrors = slabs, mirrors  # the copies know addresses only
        self._streams = CopyStreams(device)
        # No copy may cross from one registration of host memory into another, so each slab is cut
        # by itself. Cut ahead of time: making thousands of tuples is not the link's work.
        self._copies = {
            nbytes: [copy for slab, mirror in zip(slabs, mirrors, strict=True) for copy in cut(slab, mirror, nbytes)]
            for nbytes in copy_sizes
        }

    def refresh(self) -> None:
        """Takes over what the slabs hold now; due whenever a step wrote them."""
        self._streams.enqueue(self._copies[max(self._copies)], [])
        torch.cuda.synchronize(self._streams.device)

    def run(self, copy_bytes: int) -> None:
        """Copies everything once each way, in copies of one of the sizes, and waits."""
        copies = self._copies[copy_bytes]
        half = len(copies) // 2
        self._streams.enqueue(copies, copies[half:] + copies[:half])
        torch.cuda.synchronize(self._streams.device)

    def run_one_way(self, copy_bytes: int, *, to_device: bool) -> None:
        """Copies everything once in one direction, in copies of one of the sizes, and waits."""
        copies = self._copies[copy_bytes]
        self._streams.enqueue(*((copies, []) if to_device else ([], copies)))
        torch.cuda.synchronize(self._streams.device)


def host_slabs(optimizer: Any) -> list[torch.Tensor]:
    """The host memory of an optimizer's state, as bytes."""
    return [extent.slab.bytes for extent in optimizer._store.extents() if extent.slab is not None]
