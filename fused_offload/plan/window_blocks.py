"""Window blocks: runs of state that can be on the GPU between prefetch and write-back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fused_offload.state.layout import ArrayPlace, block_place, chunk_numel
from fused_offload.state.storage import Extent

from .chunks import Segment

BLOCK_BYTES = 256 * 2**20
"""State bytes of a block. Each takes one launch, and frees its memory behind its write-back."""


class WindowBlock(NamedTuple):
    """A run of consecutive state that is moved as one.

    The blocks of an extent do not depend on the size of the window. So a block's prefetch has to
    wait for the last write-back of the same block only.

    Attributes:
        extent: storage of the state.
        start: first element in the extent.
        numel: number of elements, a multiple of `ALIGNMENT`.
        nbytes: GPU bytes of the block.
    """

    extent: Extent
    start: int
    numel: int
    nbytes: int

    @property
    def place(self) -> ArrayPlace:
        """Place of each key in the block's memory."""
        return block_place(self.extent.layout, self.numel)


def blocks_of(extents: Iterable[Extent], block_bytes: int = BLOCK_BYTES) -> list[WindowBlock]:
    """All blocks of the extents whose state is in host memory, in order.

    Those of quantised parameters hold whole ones; a parameter that is larger than a block is in
    none.

    Args:
        extents: the optimizer's extents.
        block_bytes: most state bytes of a block.
    """
    blocks = []
    for extent in extents:
        if extent.layout.resident:
            continue
        limit = chunk_numel(block_bytes, extent.layout.alignment_bytes)
        if extent.layout.is_quantised:
            runs = _whole_params(extent, limit)
        else:
            runs = [(start, min(start + limit, extent.numel)) for start in range(0, extent.numel, limit)]
        blocks += [
            WindowBlock(extent, start, stop - start, block_place(extent.layout, stop - start).nbytes)
            for start, stop in runs
        ]
    return blocks


def _whole_params(extent: Extent, limit: int) -> list[tuple[int, int]]:
    """Runs of whole parameters of at most ``limit`` elements; a larger parameter is in none."""
    runs: list[tuple[int, int]] = []
    start = 0
    for stop in [*extent.param_starts[1:], extent.numel]:
        if runs and runs[-1][1] == start and stop - runs[-1][0] <= limit:
            runs[-1] = runs[-1][0], stop
        elif stop - start <= limit:
            runs.append((start, stop))
        start = stop
    return runs


class Cut(NamedTuple):
    """Part of a segment whose state is in one window block, or in none.

    Attributes:
        segment: index of the segment.
        offset: first element within the segment.
        numel: number of elements.
        block: the block, or None.
    """

    segment: int
    offset: int
    numel: int
    block: WindowBlock | None


def cut_at_blocks(index: int, extent: Extent, segment: Segment, blocks: Sequence[WindowBlock]) -> list[Cut]:
    """Cuts a segment where blocks begin and end.

    Args:
        index: index of the segment.
        extent: storage of the segment's state.
        segment: the segment.
        blocks: blocks of the window, sorted by start within each extent.
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
