"""The order of copies to the device, kernels and copies to the host on their queues.

Queues and events are of any kind, so that the order can be checked without a device. The titled notes are in
`pipeline.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from fused_offload.memory.staging_ring import Slot
from fused_offload.plan.window_blocks import WindowBlock

from .copies import ChunkTransfer, Copy, block_transfer, bytes_of

Event = Any


class StreamOps(Protocol):
    """Operations of a device: three in-order queues, events between them, copies.

    Attributes:
        compute: the caller's current stream.
        h2d: copies from slabs to slots.
        d2h: copies from slots to slabs.
    """

    compute: Any
    h2d: Any
    d2h: Any

    def record(self, stream: Any) -> Event:
        """An event that completes with everything enqueued on ``stream`` so far."""

    def wait(self, stream: Any, event: Event) -> None:
        """Holds back what is enqueued on ``stream`` from now on until ``event`` completes."""

    def copy_to_device(self, slot: Slot, copies: Sequence[Copy]) -> None:
        """Enqueues copies on ``h2d``."""

    def copy_to_host(self, slot: Slot, copies: Sequence[Copy]) -> None:
        """Enqueues copies on ``d2h``."""


class StreamedChunk(NamedTuple):
    """One chunk, ready to go.

    Attributes:
        transfer: its copies.
        launch: enqueues its kernel on the compute stream, on the state in a slot of this index.
        before: calls that enqueue other work on the compute stream, before that kernel.
    """

    transfer: ChunkTransfer
    launch: Callable[[int], None]
    before: Sequence[Callable[[], Any]] = ()


class LoadedBlock(NamedTuple):
    """A block of the window on the GPU, or on its way there.

    Attributes:
        block: the state.
        slot: its memory.
        loaded: event after which it is there.
        nbytes: bytes that are copied into it.
    """

    block: WindowBlock
    slot: Slot
    loaded: Event
    nbytes: int


class WindowChunk(NamedTuple):
    """One launch on state in the window, ready to go.

    Attributes:
        loaded: the block that it works on.
        launch: enqueues its kernel on the compute stream.
        to_host: copies of the state that it writes.
    """

    loaded: LoadedBlock
    launch: Callable[[], None]
    to_host: tuple[Copy, ...]


def load_block(block: WindowBlock, slot: Slot, ops: StreamOps, written: Event | None) -> LoadedBlock:
    """Enqueues the prefetch of one block.

    Args:
        block: the state.
        slot: its memory, allocated on the compute stream.
        ops: queues of the device.
        written: last write-back of that state, or None.
    """
    ops.wait(ops.h2d, ops.record(ops.compute))  # [Note: window memory]
    if written is not None:
        ops.wait(ops.h2d, written)  # [Note: next step reads what this one wrote]
    copies = block_transfer(block)
    ops.copy_to_device(slot, copies)
    return LoadedBlock(block, slot, ops.record(ops.h2d), bytes_of(copies))


def launch_window(chunks: Sequence[WindowChunk], ops: StreamOps) -> None:
    """Enqueues the kernels of some chunks of the window."""
    for chunk in chunks:
        ops.wait(ops.compute, chunk.loaded.loaded)
        chunk.launch()


def write_back_window(
    chunks: Iterable[WindowChunk], ops: StreamOps, written: Callable[[WindowBlock, Event], None]
) -> None:
    """Enqueues the write-back of chunks of the window, behind everything else: see [Note: window last].

    Args:
        chunks: chunks whose kernels are enqueued.
        ops: queues of the device.
        written: called with each chunk's block and the event of its write-back, right after it is enqueued.
    """
    computed = None
    for chunk in chunks:
        if computed is None:
            computed = ops.record(ops.compute)
            ops.wait(ops.d2h, computed)
        ops.copy_to_host(chunk.loaded.slot, chunk.to_host)
        written(chunk.loaded.block, ops.record(ops.d2h))


def stream_chunks(
    chunks: Sequence[StreamedChunk],
    slots: Sequence[Slot],
    ops: StreamOps,
    previous: Event | None,
    window: Sequence[WindowChunk] = (),
) -> Event | None:
    """Enqueues prefetch, kernel and write-back of every chunk, and between them the kernels of the window.

    Args:
        chunks: chunks in order.
        slots: the ring's slots.
        ops: queues of the device.
        previous: last write-back of what the chunks read, or None.
        window: chunks whose state is on the GPU or on its way there. Their kernels run while others wait for the link.

    Returns:
        Event of the last write-back, or None if there is no chunk.
    """
    written_back = None
    if chunks and previous is not None:
        ops.wait(ops.h2d, previous)  # [Note: next step reads what this one wrote]
    for index, chunk in enumerate(chunks):
        slot = slots[index % len(slots)]
        if slot.written_back is not None:
            ops.wait(ops.h2d, slot.written_back)  # [Note: slot reuse]
        ops.copy_to_device(slot, chunk.transfer.to_device)
        loaded = ops.record(ops.h2d)

        for enqueue in chunk.before:
            enqueue()
        ops.wait(ops.compute, loaded)
        chunk.launch(index % len(slots))
        computed = ops.record(ops.compute)

        ops.wait(ops.d2h, computed)
        ops.copy_to_host(slot, chunk.transfer.to_host)
        written_back = slot.written_back = ops.record(ops.d2h)
        if window:
            launch_window(window[index * len(window) // len(chunks) : (index + 1) * len(window) // len(chunks)], ops)
    if not chunks:
        launch_window(window, ops)
    return written_back


def launch_in_host_memory(launches: Sequence[Callable[[], None]], ops: StreamOps, previous: Event | None) -> Event:
    """Enqueues kernels that read and write slabs themselves.

    Args:
        launches: each enqueues one kernel on the compute stream.
        ops: queues of the device.
        previous: last write-back of what they read, or None.

    Returns:
        Event after which they and every write-back before them are complete.
    """
    if previous is not None:
        ops.wait(ops.compute, previous)  # [Note: next step reads what this one wrote]
    for launch in launches:
        launch()
    ops.wait(ops.d2h, ops.record(ops.compute))
    return ops.record(ops.d2h)
