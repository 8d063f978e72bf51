"""The order of copies to the device, kernels and copies to the host on their queues.

Everything goes through `StreamOps`, so that tests check the order without a GPU. The titled notes
are in `pipeline.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from fused_offload.memory.staging_ring import Slot
from fused_offload.plan.window_blocks import WindowBlock

from .copies import ChunkTransfer, Copy, block_transfer, bytes_of
from .host_params import ParamCopies

Event = Any


class StreamOps(Protocol):
    """Calls that enqueue work on a device: three in-order queues, events between them, copies.

    Attributes:
        compute: the caller's current stream.
    """

    compute: Any

    @property
    def h2d(self) -> Any:
        """Stream of the next copy from a slab to a slot, behind all earlier ones."""

    @property
    def d2h(self) -> Any:
        """Stream of the next copy from a slot to a slab, behind all earlier ones."""

    def record(self, stream: Any, event: Event | None = None, *, timing: bool = False) -> Event:
        """An event that completes with everything enqueued on ``stream`` so far.

        Args:
            stream: the stream.
            event: an event to use again; waits that were enqueued for it stay as they are.
            timing: make a new event one that has a time.
        """

    def wait(self, stream: Any, event: Event) -> None:
        """Makes work that is enqueued on ``stream`` from now on wait for ``event``."""

    def wait_stream(self, stream: Any, other: Any) -> None:
        """`wait` for everything enqueued on ``other`` so far."""

    def copy_to_device(self, slot: Slot, copies: Sequence[Copy]) -> None:
        """Enqueues copies on ``h2d``."""

    def copy_to_host(self, slot: Slot, copies: Sequence[Copy]) -> None:
        """Enqueues copies on ``d2h``."""


class StreamedChunk(NamedTuple):
    """One streamed chunk, ready to be enqueued.

    Attributes:
        transfer: the chunk's copies.
        launch: enqueues the chunk's kernel on the compute stream, given the index of its slot.
        before: calls that enqueue other work on the compute stream, before that kernel.
        params: copies of parameters and gradients in host memory, or None.
    """

    transfer: ChunkTransfer
    launch: Callable[[int], None]
    before: Sequence[Callable[[], Any]] = ()
    params: ParamCopies | None = None

    @property
    def bytes_to_device(self) -> int:
        """Bytes that are copied to the device."""
        return bytes_of(self.transfer.to_device) + (0 if self.params is None else bytes_of(self.params.to_device))


class Streamed(NamedTuple):
    """Events of a step's streamed chunks.

    Attributes:
        filled: timing event behind the first copies to each slot, or None if no chunk streams.
            Copies behind it wait for kernels of this step, those before it do not.
        written_back: event behind all write-backs, or None likewise.
        params_written: event behind those of parameters, or None if all are on the device.
    """

    filled: Event | None
    written_back: Event | None
    params_written: Event | None


class LoadedBlock(NamedTuple):
    """A window block that is on the GPU or on its way there.

    Attributes:
        block: the block.
        slot: the block's GPU memory.
        loaded: event of its last copy.
        nbytes: bytes that are copied.
    """

    block: WindowBlock
    slot: Slot
    loaded: Event
    nbytes: int


class WindowChunk(NamedTuple):
    """One chunk in the window, ready to be enqueued.

    Attributes:
        loaded: the block that holds its state.
        launch: enqueues the chunk's kernel on the compute stream.
        to_host: copies of the state that the kernel writes.
    """

    loaded: LoadedBlock
    launch: Callable[[], None]
    to_host: tuple[Copy, ...]


def load_block(block: WindowBlock, slot: Slot, ops: StreamOps, written: Event | None) -> LoadedBlock:
    """Enqueues the prefetch of one block.

    Args:
        block: the block.
        slot: memory of the block, allocated on the compute stream.
        ops: queues of the device.
        written: event of the block's last write-back, or None.
    """
    ops.wait_stream(ops.h2d, ops.compute)  # [Note: window memory]
    if written is not None:
        ops.wait(ops.h2d, written)  # [Note: next step reads what this one wrote]
    copies = block_transfer(block)
    ops.copy_to_device(slot, copies)
    return LoadedBlock(block, slot, ops.record(ops.h2d), bytes_of(copies))


def launch_window(chunks: Sequence[WindowChunk], ops: StreamOps) -> None:
    """Enqueues the kernels of some chunks in the window."""
    for chunk in chunks:
        ops.wait(ops.compute, chunk.loaded.loaded)
        chunk.launch()


def write_back_window(
    chunks: Iterable[WindowChunk], ops: StreamOps, written: Callable[[WindowBlock, Event], None]
) -> None:
    """Enqueues the write-back of chunks in the window, behind everything else.

    See [Note: window last].

    Args:
        chunks: chunks whose kernels are enqueued.
        ops: queues of the device.
        written: called with a chunk's block and the event of its write-back, right after each
            write-back is enqueued.
    """
    ops.wait_stream(ops.d2h, ops.compute)
    for chunk in chunks:
        ops.copy_to_host(chunk.loaded.slot, chunk.to_host)
        written(chunk.loaded.block, ops.record(ops.d2h))


def stream_chunks(
    chunks: Sequence[StreamedChunk],
    slots: Sequence[Slot],
    ops: StreamOps,
    previous: Event | None,
    window: Sequence[WindowChunk] = (),
) -> Streamed:
    """Enqueues prefetch, kernel and write-back of every chunk, and the kernels of the window.

    Kernels of the window go between the others, to run while these wait for the link.

    Args:
        chunks: chunks in order.
        slots: the ring's slots.
        ops: queues of the device.
        previous: last write-back of the state that the chunks read, or None.
        window: chunks in the window.
    """
    filled = params_written = None
    if chunks and previous is not None:
        ops.wait(ops.h2d, previous)  # [Note: next step reads what this one wrote]
    for index, (transfer, launch, before, params) in enumerate(chunks):
        turn = index % len(slots)
        slot = slots[turn]
        if slot.written_back is not None:
            ops.wait(ops.h2d, slot.written_back)  # [Note: slot reuse]
        ops.copy_to_device(slot, transfer.to_device)
        if params is not None:
            ops.copy_to_device(slot, params.to_device)
        if index + 1 == min(len(slots), len(chunks)):
            filled = ops.record(ops.h2d, timing=True)

        for enqueue in before:
            enqueue()
        ops.wait_stream(ops.compute, ops.h2d)
        launch(turn)

        ops.wait_stream(ops.d2h, ops.compute)
        if params is not None:
            ops.copy_to_host(slot, params.to_host)
            params_written = ops.record(ops.d2h)
        ops.copy_to_host(slot, transfer.to_host)
        slot.written_back = ops.record(ops.d2h, slot.written_back)
        if window:
            launch_window(window[index * len(window) // len(chunks) : (index + 1) * len(window) // len(chunks)], ops)
    if not chunks:
        launch_window(window, ops)
    return Streamed(filled, ops.record(ops.d2h) if chunks else None, params_written)


def launch_in_host_memory(launches: Sequence[Callable[[], None]], ops: StreamOps, previous: Event | None) -> Event:
    """Enqueues zero-copy kernels, which read and write the slabs themselves.

    Args:
        launches: calls that enqueue one kernel each on the compute stream.
        ops: queues of the device.
        previous: last write-back of the state that the kernels read, or None.

    Returns:
        Event after which these kernels and all earlier write-backs are complete.
    """
    if previous is not None:
        ops.wait(ops.compute, previous)  # [Note: next step reads what this one wrote]
    for launch in launches:
        launch()
    ops.wait_stream(ops.d2h, ops.compute)
    return ops.record(ops.d2h)
