"""The segments of one step, and the chunks they are cut into. Pure Python."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from typing import NamedTuple

from fused_offload.state.layout import ALIGNMENT, align


class Segment(NamedTuple):
    """The part of one parameter that is updated.

    Attributes:
        kind: storage, group and gradient dtype, which all segments of a chunk share.
        start: first element in the storage, a multiple of `ALIGNMENT`.
        numel: number of elements, at least 1.
    """

    kind: Hashable
    start: int
    numel: int


class Piece(NamedTuple):
    """The part of one segment that lies in one chunk.

    Attributes:
        segment: index of the segment in the plan's input.
        offset: first element within the segment, a multiple of `ALIGNMENT`.
        numel: number of elements.
        slot_start: first element within the chunk's slot, a multiple of `ALIGNMENT`.
    """

    segment: int
    offset: int
    numel: int
    slot_start: int


class CopyRange(NamedTuple):
    """Consecutive storage that one chunk moves.

    Attributes:
        start: first element in the storage.
        numel: number of elements with the padding between segments, a multiple of `ALIGNMENT`.
        slot_start: first element within the chunk's slot.
    """

    start: int
    numel: int
    slot_start: int


class Chunk(NamedTuple):
    """Segments that are moved together and updated by one launch.

    Attributes:
        kind: the kind of its segments.
        pieces: parts of segments, in the order of their kind's segments.
        ranges: storage to copy; covers the pieces.
        numel: elements that the chunk takes in a slot.
    """

    kind: Hashable
    pieces: tuple[Piece, ...]
    ranges: tuple[CopyRange, ...]
    numel: int


def make_plan(
    segments: Sequence[Segment],
    capacity: Callable[[Hashable], int | None],
    *,
    keep_whole: bool = False,
    largest_first: bool = False,
    without: Collection[int] = (),
) -> tuple[Chunk, ...]:
    """Cuts segments into chunks.

    A chunk never mixes kinds, so one launch has one set of hyperparameters and stored formats.
    Kinds are in the order of their first segment, segments of a kind in the order of their storage.

    Args:
        segments: parts of parameters to update; those of one kind do not overlap in storage.
        capacity: most elements of a chunk of a kind, a multiple of `ALIGNMENT`; None for no limit.
        keep_whole: cut only segments that are larger than a chunk, into chunks of their own and of
            equal size. With unequal ones the link waits for slots.
        largest_first: take large segments of a kind first, those of one size in that order.
        without: indices of segments to leave out.

    Returns:
        Chunks that together cover every element of every other segment exactly once.
    """
    by_kind: dict[Hashable, list[int]] = {}
    last, indices = None, []
    left_out = set(without)
    for index, segment in enumerate(segments):
        if index in left_out:
            continue
        if segment.kind is not last:  # neighbours are mostly of one kind, which is slow to hash
            last, indices = segment.kind, by_kind.setdefault(segment.kind, [])
        indices.append(index)
    chunks: list[Chunk] = []
    for kind, indices in by_kind.items():
        indices.sort(key=lambda index: (-segments[index].numel if largest_first else 0, segments[index].start))
        chunks.extend(chunks_of_kind(kind, indices, segments, capacity(kind), keep_whole=keep_whole))
    return tuple(chunks)


def chunks_of_kind(
    kind: Hashable, indices: Sequence[int], segments: Sequence[Segment], limit: int | None, *, keep_whole: bool
) -> list[Chunk]:
    """Cuts segments of one kind into chunks, in the given order.

    Args:
        kind: the kind.
        indices: indices of the segments, in order.
        segments: all segments.
        limit: elements that a chunk may take, or None.
        keep_whole: as in `make_plan`.
    """
    chunks: list[Chunk] = []
    pieces: list[Piece] = []
    ranges: list[CopyRange] = []
    used = 0
    range_start = range_end = range_slot_start = 0  # of the range that the next piece may continue

    def close_range() -> None:
        if range_end > range_start:
            ranges.append(CopyRange(range_start, range_end - range_start, range_slot_start))

    def close_chunk() -> None:
        nonlocal used, range_start, range_end
        close_range()
        if pieces:
            chunks.append(Chunk(kind, tuple(pieces), tuple(ranges), used))
        pieces.clear()
        ranges.clear()
        used = range_start = range_end = 0

    for index in indices:
        _, start, numel = segments[index]
        offset, most = 0, limit
        if keep_whole and limit is not None and numel > limit - used:
            close_chunk()
            if numel > limit:
                most = align(-(-numel // -(-numel // limit)))
        while offset < numel:
            if most is not None and used >= most:
                close_chunk()
            taken = numel - offset
            if most is not None and taken > most - used:
                taken = most - used
            pieces.append(Piece(index, offset, taken, used))
            if range_end != start + offset or range_end == range_start:
                close_range()
                range_start = range_end = start + offset
                range_slot_start = used
            width = -(-taken // ALIGNMENT) * ALIGNMENT  # align() would cost a call per piece
            range_end += width
            used += width
            offset += taken
        if keep_whole and limit is not None and numel > limit:
            close_chunk()
    close_chunk()
    return chunks
