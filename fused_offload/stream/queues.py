"""Copy streams and ring of a device, and the calls that enqueue copies and events on them."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

import torch

from fused_offload.memory import cuda_driver
from fused_offload.memory.staging_ring import ENQUEUE_LOCK, RingNeed, Slot, StagingRing

from .copies import Copy

TURN_BYTES = 64 * 2**20
"""Bytes after which copies of one direction continue on the other stream of that direction."""


class CopyStreams:
    """Two streams that take turns with the copies of one direction.

    [Note: turns] A GPU runs the copies of one direction one after another, and those of one stream
    without a break. A small copy on another stream, such as that of ``loss.item()``, would wait for
    all of them. If two streams take turns, it waits for one piece only. A stream that takes over
    waits for the other one first. So what is enqueued on the current stream is behind all copies of
    the direction, and an event of it covers them.

    Attributes:
        both: the streams.
        current: stream of the next copy.
        resting: the other stream.
        left: bytes until ``resting`` takes over.
    """

    def __init__(self, first: torch.cuda.Stream, second: torch.cuda.Stream) -> None:
        """Begins with the first stream."""
        self.both = self.current, self.resting = first, second
        self.left = TURN_BYTES


class DeviceQueues:
    """Copy streams and ring of one device, shared by all optimizers of the process.

    They are freed with the last optimizer.

    Attributes:
        device: a CUDA device.
        ring: the device's staging ring.
        h2d: streams of copies to the device.
        d2h: streams of copies to the host.
        passing: event of `CudaOps.wait_stream`, used under `ENQUEUE_LOCK` only.
    """

    _of_device: ClassVar[weakref.WeakValueDictionary[torch.device, DeviceQueues]] = weakref.WeakValueDictionary()

    @classmethod
    def of(cls, device: torch.device) -> DeviceQueues:
        """The queues of a device."""
        queues = cls._of_device.get(device)
        if queues is None:
            queues = cls._of_device[device] = cls(device)
        return queues

    def __init__(self, device: torch.device) -> None:
        """Creates the streams."""
        self.device = device
        self.ring = StagingRing(device)
        streams = [torch.cuda.Stream(device) for _ in range(4)]
        self.h2d = CopyStreams(*streams[::2])
        self.d2h = CopyStreams(*streams[1::2])
        self.passing = torch.cuda.Event()
        self._is_open = False

    def begin(self) -> None:
        """Marks the queues as open; the caller holds `ENQUEUE_LOCK` and calls `end` when done.

        [Note: interrupted runs] An exception leaves the queues open. Some of the enqueued work then
        has no event that later readers wait for. So the next caller of `begin`, of any optimizer,
        waits for the whole device first.
        """
        if self._is_open:
            torch.cuda.synchronize(self.device)
        self._is_open = True

    def end(self) -> None:
        """Marks the queues as closed: everything is enqueued, with its events."""
        self._is_open = False

    def settle(self) -> None:
        """Waits for the device if an exception left the queues open."""
        with ENQUEUE_LOCK:
            self.begin()
            self.end()

    def require(self, user: Any, need: RingNeed) -> None:
        """Grows the ring if a user needs a larger one; see `StagingRing.grow`."""
        if not self.ring.note_need(user, need):
            return
        if self.ring.slots or self.ring.work is not None:
            torch.cuda.synchronize(self.device)  # [Note: lifetime]
        self.ring.grow(user)
        # The allocator may reuse memory that work on the current stream still reads.
        current = torch.cuda.current_stream(self.device)
        self.h2d.current.wait_stream(current)
        if self.ring.work is not None:
            self.ring.work.written_back = CudaOps(self).record(current)

    def release(self) -> None:
        """Waits for the device, then frees the ring's memory."""
        with ENQUEUE_LOCK:
            torch.cuda.synchronize(self.device)  # [Note: lifetime]
            self.ring.release()


def current_queue(device: torch.device) -> int:
    """Raw handle of the current stream of a CUDA device."""
    return torch.cuda.current_stream(device).cuda_stream


class CurrentStreams:
    """The current streams of some devices, to be made current again in code that runs elsewhere."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        """Remembers the current streams of some CUDA devices."""
        self._streams = [torch.cuda.current_stream(device) for device in devices]

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Makes the remembered streams current within a ``with`` block."""
        with contextlib.ExitStack() as stack:
            for stream in self._streams:
                stack.enter_context(torch.cuda.stream(stream))
            yield


class CudaOps:
    """`StreamOps` on a real device; each call makes its own, for its current stream."""

    def __init__(self, queues: DeviceQueues) -> None:
        """Uses the caller's current stream as the compute stream."""
        self.compute = torch.cuda.current_stream(queues.device)
        self._queues = queues

    @property
    def h2d(self) -> torch.cuda.Stream:
        """The stream of the next copy to the device."""
        return self._queues.h2d.current

    @property
    def d2h(self) -> torch.cuda.Stream:
        """The stream of the next copy to the host."""
        return self._queues.d2h.current

    def record(
        self, stream: torch.cuda.Stream, event: torch.cuda.Event | None = None, *, timing: bool = False
    ) -> torch.cuda.Event:
        """Records an event, by default a new one."""
        if event is None:
            event = torch.cuda.Event(enable_timing=timing)
        event.record(stream)
        return event

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        """Makes a stream wait for an event."""
        event.wait(stream)

    def wait_stream(self, stream: torch.cuda.Stream, other: torch.cuda.Stream) -> None:
        """Makes a stream wait for everything on another one.

        The driver looks at an event when it is asked to wait for it, so one event serves all.
        """
        event = self._queues.passing
        event.record(other)
        event.wait(stream)

    def copy_to_device(self, slot: Slot, copies: Sequence[Copy]) -> None:
        """Enqueues copies from slabs to a slot."""
        base = slot.memory.data_ptr()
        for host, offset, nbytes, stream in self._in_turns(copies, self._queues.h2d):
            cuda_driver.copy_to_device_async(base + offset, host, nbytes, stream)

    def copy_to_host(self, slot: Slot, copies: Sequence[Copy]) -> None:
        """Enqueues copies from a slot to slabs."""
        base = slot.memory.data_ptr()
        for host, offset, nbytes, stream in self._in_turns(copies, self._queues.d2h):
            cuda_driver.copy_to_host_async(host, base + offset, nbytes, stream)

    def _in_turns(self, copies: Sequence[Copy], streams: CopyStreams) -> Iterator[tuple[int, int, int, int]]:
        """Pieces of copies as host address, offset in the slot, bytes, and raw handle of the stream.

        See [Note: turns].
        """
        left, stream = streams.left, streams.current.cuda_stream
        for host, offset, nbytes in copies:
            while nbytes > left:
                if left == TURN_BYTES:
                    yield host, offset, left, stream
                    host, offset, nbytes = host + left, offset + left, nbytes - left
                self.wait_stream(streams.resting, streams.current)
                streams.current, streams.resting = streams.resting, streams.current
                left, stream = TURN_BYTES, streams.current.cuda_stream
            yield host, offset, nbytes, stream
            left -= nbytes
        streams.left = left
