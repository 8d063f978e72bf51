"""What one step does: segments cut into chunks. Pure Python, no tensors."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

ALIGNMENT = 128
"""Elements. Segments start at multiples of it and are cut at multiples of it."""


class Segment(NamedTuple):
    """The part of one parameter that is updated.

    Attributes:
        kind: what segments of one chunk have in common: their storage, their group, their gradients' dtype.
        start: first element in the storage, a multiple of `ALIGNMENT`.
        numel: elements, at least 1.
    """

    kind: Hashable
    start: int
    numel: int


class Piece(NamedTuple):
    """The part of one segment that lies in one chunk.

    Attributes:
        segment: index of the segment in the plan's input.
        offset: first element within the segment, a multiple of `ALIGNMENT`.
        numel: elements.
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
        numel: elements, padding between segments included, a multiple of `ALIGNMENT`.
        slot_start: first element within the chunk's slot.
    """

    start: int
    numel: int
    slot_start: int


class Chunk(NamedTuple):
    """What is moved and updated at a time: one launch.

    Attributes:
        kind: the kind of its segments.
        pieces: by ascending storage.
        ranges: what is copied, covering the pieces.
        numel: elements that the chunk takes in a slot.
    """

    kind: Hashable
    pieces: tuple[Piece, ...]
    ranges: tuple[CopyRange, ...]
    numel: int


def align(numel: int) -> int:
    """``numel`` rounded up to a multiple of `ALIGNMENT`."""
    return -(-numel // ALIGNMENT) * ALIGNMENT


def chunk_numel(chunk_bytes: int, block_bytes: int) -> int:
    """Elements of a chunk of at most ``chunk_bytes``, at least one block.

    Args:
        chunk_bytes: state bytes that a chunk may move in one direction.
        block_bytes: state bytes of `ALIGNMENT` elements.
    """
    return max(1, chunk_bytes // block_bytes) * ALIGNMENT


def make_plan(segments: Sequence[Segment], capacity: Callable[[Hashable], int | None]) -> tuple[Chunk, ...]:
    """Cuts segments into chunks.

    A chunk never mixes kinds, so one launch has one set of hyperparameters and stored forms. Kinds come in the order
    of their first segment, segments of a kind by their place in storage.

    Args:
        segments: what is updated; segments of one kind do not overlap in storage.
        capacity: elements that a chunk of a kind may take, a multiple of `ALIGNMENT`, or None for no limit.

    Returns:
        Chunks that together cover every element of every segment once.
    """
    by_kind: dict[Hashable, list[int]] = {}
    for index, segment in enumerate(segments):
        by_kind.setdefault(segment.kind, []).append(index)
    chunks: list[Chunk] = []
    for kind, indices in by_kind.items():
        indices.sort(key=lambda index: segments[index].start)
        chunks.extend(_chunks_of_kind(kind, indices, segments, capacity(kind)))
    return tuple(chunks)


def _chunks_of_kind(
    kind: Hashable, indices: Sequence[int], segments: Sequence[Segment], limit: int | None
) -> list[Chunk]:
    chunks: list[Chunk] = []
    pieces: list[Piece] = []
    ranges: list[CopyRange] = []
    used = 0

    def close_chunk() -> None:
        nonlocal used
        if pieces:
            chunks.append(Chunk(kind, tuple(pieces), tuple(ranges), used))
        pieces.clear()
        ranges.clear()
        used = 0

    for index in indices:
        _, start, numel = segments[index]
        offset = 0
        while offset < numel:
            if limit is not None and used >= limit:
                close_chunk()
            room = numel if limit is None else limit - used
            taken = min(numel - offset, room)
            pieces.append(Piece(index, offset, taken, used))
            width = align(taken)
            if ranges and ranges[-1].start + ranges[-1].numel == start + offset:
                ranges[-1] = ranges[-1]._replace(numel=ranges[-1].numel + width)
            else:
                ranges.append(CopyRange(start + offset, width, used))
            used += width
            offset += taken
    close_chunk()
    return chunks
