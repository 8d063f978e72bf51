"""Order of two phases with an operation on whole parameters between them, and its work memory. Pure Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from .chunks import Chunk

_WORK_ALIGNMENT = 512  # bytes; as torch's allocator


class Operation(NamedTuple):
    """The operation on one parameter, in the order of a step.

    Attributes:
        segment: index of the parameter in the plan's input.
        position: chunks of the step that come before it.
        beside: further chunks that do not wait for it, whose kernels go between its parts.
        offset: bytes from the start of the work memory to the parameter's array.
    """

    segment: int
    position: int
    beside: int
    offset: int = 0


class WorkMemory(NamedTuple):
    """GPU memory of the operations of a step.

    Attributes:
        scratch: first byte of the scratch of whichever operation runs.
        nbytes: bytes in total.
    """

    scratch: int = 0
    nbytes: int = 0


def in_order(first: Sequence[Chunk], second: Sequence[Chunk]) -> tuple[list[Chunk], list[Operation]]:
    """Orders the chunks of two phases around the operations between them.

    An operation follows the first phase of its parameter, and the second phase follows it. Beside an operation run the
    second phase of the parameter before and the first phase of the parameter behind. So the link is busy while an
    operation runs, and arrays of two parameters are in use at a time.

    Args:
        first: chunks of the first phase.
        second: chunks of the second phase, their segments in the same order.

    Returns:
        All chunks, and an operation for each segment.
    """
    complete = {piece.segment: number for number, chunk in enumerate(first) for piece in chunk.pieces}
    places = {segment: place for place, segment in enumerate(complete)}
    chunks: list[Chunk] = []
    operations: list[Operation] = []
    taken = followed = 0  # chunks of either phase

    def take(segment: int) -> None:
        nonlocal taken
        stop = complete[segment] + 1
        chunks.extend(first[taken:stop])
        taken = max(taken, stop)

    segments = list(complete)
    for place, segment in enumerate(segments):
        take(segment)
        position = len(chunks)
        while followed < len(second) and places[second[followed].pieces[-1].segment] < place:
            chunks.append(second[followed])
            followed += 1
        for following in segments[place + 1 : place + 2]:
            take(following)
        operations.append(Operation(segment, position, len(chunks) - position))
    return chunks + list(second[followed:]), operations


def placed(
    chunks: Sequence[Chunk], operations: Sequence[Operation], array_bytes: Callable[[int], int], scratch_bytes: int
) -> tuple[list[Operation], WorkMemory]:
    """Gives each operation the place of its array, free from the first chunk that fills it to the last that reads it.

    Kernels and operations run on one stream, so memory is free again behind the last of them that uses it.

    Args:
        chunks: chunks in order.
        operations: operations between them.
        array_bytes: bytes of a segment's array.
        scratch_bytes: most bytes that an operation needs beside the arrays.
    """
    begins: dict[int, int] = {}
    ends: dict[int, int] = {}
    for number, chunk in enumerate(chunks):
        for piece in chunk.pieces:
            begins.setdefault(piece.segment, number)
            ends[piece.segment] = number
    in_use: list[tuple[int, int, int]] = []  # first byte, end, last chunk; by their place
    found, most = [], 0
    for operation in operations:  # in the order in which their arrays are filled
        in_use = [(start, stop, last) for start, stop, last in in_use if last >= begins[operation.segment]]
        nbytes = _aligned(array_bytes(operation.segment))
        offset = 0
        for start, stop, _ in in_use:
            if offset + nbytes <= start:
                break
            offset = stop
        in_use = sorted([*in_use, (offset, offset + nbytes, ends[operation.segment])])
        most = max(most, offset + nbytes)
        found.append(operation._replace(offset=offset))
    return found, WorkMemory(most, most + _aligned(scratch_bytes))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _WORK_ALIGNMENT) * _WORK_ALIGNMENT
