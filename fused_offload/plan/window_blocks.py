"""Which state may sit on the GPU between prefetch and write-back: blocks of the extents, in a fixed order."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

from fused_offload.state.layout import ArrayPlace, block_place, chunk_numel
from fused_offload.state.storage import Extent

from .chunks import Segment

BLOCK_BYTES = 256 * 2**20
"""State bytes of a block. One launch serves a block, and each is given back as soon as it is written to the host."""


class WindowBlock(NamedTuple):
    """A run of consecutive state that is moved as one.

    Blocks of an extent are always the same, however large the window is, so that a block's last write-back is all that
    its next prefetch has to wait for.

    Attributes:
        extent: storage.
        start: first element.
        numel: elements, a multiple of the alignment.
    """

    extent: Extent
    start: int
    numel: int

    @property
    def nbytes(self) -> int:
        """GPU bytes that it takes."""
        return self.place.nbytes

    @property
    def place(self) -> ArrayPlace:
        """Where each key lies in the block's memory."""
        return block_place(self.extent.layout, self.numel)


def blocks_of(extents: Iterable[Extent], block_bytes: int = BLOCK_BYTES) -> list[WindowBlock]:
    """All blocks of the extents that stream, in their order.

    Args:
        extents: storage.
        block_bytes: state bytes of a block.
    """
    blocks = []
    for extent in extents:
        if extent.layout.resident:
            continue
        limit = chunk_numel(block_bytes, extent.layout.block_bytes)
        starts = range(0, extent.numel, limit)
        blocks += [WindowBlock(extent, start, min(limit, extent.numel - start)) for start in starts]
    return blocks


class WriteBacks:
    """Which event says that state on the host is complete, per block of the window and for all that streams.

    Relies on write-backs completing in the order they are enqueued. An event is whatever the device gives.

    Attributes:
        last: event of the last write-back of all, or None.
    """

    def __init__(self) -> None:
        """Nothing was written yet."""
        self.last: Any = None
        self._streamed: Any = None  # of everything that has no event of its own
        self._of_block: dict[Hashable, Any] = {}
        self._some_block_was_written = False
        self._before_parts: list[Any] | None = None

    def in_parts(self, open_: bool) -> None:
        """Says that what is read from now on was not written since, or that it may have been.

        Args:
            open_: whether steps are parts of one, which share no state: each waits only for what was written before
                the first of them.
        """
        if not open_:
            self._before_parts = None
        elif self._before_parts is None:
            self._before_parts = self.of_streamed(())

    def of_block(self, block: Hashable) -> Any:
        """What to wait for before a block is read, or None."""
        return self._of_block.get(block, self._streamed)

    def of_streamed(self, window: Collection[Hashable]) -> list[Any]:
        """What to wait for before everything that is not in the window is read."""
        if self._before_parts is not None:
            return self._before_parts
        events = [self._streamed, *(event for block, event in self._of_block.items() if block not in window)]
        return [event for event in events if event is not None]

    def of_host_memory(self, window: Collection[Hashable]) -> list[Any]:
        """What to wait for before kernels work on host memory that is not in the window.

        Only blocks are ever copied there: an extent's transport does not change from step to step. So nothing without a
        window, and a kernel is not held up by write-backs of other extents.
        """
        return self.of_streamed(window) if self._some_block_was_written else []

    def note_streamed(self, event: Any, window: Collection[Hashable]) -> None:
        """Takes down the last write-back of a step's streamed chunks.

        Args:
            event: the event.
            window: the step's window, which is written back behind it.
        """
        # Enqueued behind all write-backs of earlier steps, so it stands for those of blocks that are not in the window.
        self._of_block = {block: event for block, event in self._of_block.items() if block in window}
        self._streamed = self.last = event

    def note_block(self, block: Hashable, event: Any) -> None:
        """Takes down the write-back of a block."""
        self._of_block[block] = self.last = event
        self._some_block_was_written = True


class Cut(NamedTuple):
    """Part of a segment that lies in one block, or in none.

    Attributes:
        segment: which segment.
        offset: first element within the segment.
        numel: elements.
        block: the block, or None.
    """

    segment: int
    offset: int
    numel: int
    block: WindowBlock | None


def cut_at_blocks(index: int, extent: Extent, segment: Segment, blocks: Sequence[WindowBlock]) -> list[Cut]:
    """Cuts a segment where blocks begin and end.

    Args:
        index: which segment it is.
        extent: its storage.
        segment: the segment.
        blocks: blocks that are on the GPU, by ascending start within their extents.
    """
    cuts, position, end = [], segment.start, segment.start + segment.numel
    for block in blocks:
        if block.extent is not extent or block.start >= end or block.start + block.numel <= position:
            continue
        if block.start > position:
            cuts.append(Cut(index, position - segment.start, block.start - position, None))
            position = block.start
        stop = min(end, block.start + block.numel)
        cuts.append(Cut(index, position - segment.start, stop - position, block))
        position = stop
    if position < end:
        cuts.append(Cut(index, position - segment.start, end - position, None))
    return cuts
