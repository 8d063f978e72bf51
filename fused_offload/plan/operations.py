"""Order and work memory of the operations on whole parameters. Pure Python.

They go between two phases of a rule, or behind the only one, where quantised parameters are made
from what it wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from .chunks import Chunk

_WORK_ALIGNMENT = 512  # bytes, as in torch's allocator


class Operation(NamedTuple):
    """The operation on one parameter, in the order of a step.

    Attributes:
        segment: index of the parameter in the plan's input.
        position: number of chunks of the step before it.
        beside: number of following chunks that do not depend on it; their kernels go between its
            parts.
        offset: bytes from the start of the work memory to the parameter's array.
    """

    segment: int
    position: int
    beside: int
    offset: int = 0


class WorkMemory(NamedTuple):
    """GPU memory of the operations of a step.

    Attributes:
        scratch: first byte of the scratch memory, which all operations share in turn.
        nbytes: bytes in total.
    """

    scratch: int = 0
    nbytes: int = 0


def in_order(
    first: Sequence[Chunk], second: Sequence[Chunk], *, largest_first: bool = True
) -> tuple[list[Chunk], list[Operation]]:
    """Orders the chunks of two phases around the operations between them.

    A parameter's operation runs between its first and its second phase. Meanwhile the second phase
    of the previous parameter and the first phase of the next one run beside it. So the link is busy
    during an operation, and the arrays of two parameters are in use at a time. Large parameters
    come first, since only copies are left behind the last operation.

    Args:
        first: chunks of the first phase.
        second: chunks of the second phase.
        largest_first: whether large parameters come first, or all as they are in ``first``.

    Returns:
        All chunks, and one operation per segment.
    """
    if largest_first:
        first = _largest_first(first)
    complete = {piece.segment: number for number, chunk in enumerate(first) for piece in chunk.pieces}
    places = {segment: place for place, segment in enumerate(complete)}
    last_place = {id(chunk): max(places[piece.segment] for piece in chunk.pieces) for chunk in second}
    second = sorted(second, key=lambda chunk: last_place[id(chunk)])
    chunks: list[Chunk] = []
    operations: list[Operation] = []
    taken = followed = 0  # chunks of the first and of the second phase that are in `chunks`

    def take(segment: int) -> None:
        nonlocal taken
        stop = complete[segment] + 1
        chunks.extend(first[taken:stop])
        taken = max(taken, stop)

    segments = list(complete)
    for place, segment in enumerate(segments):
        take(segment)
        position = len(chunks)
        while followed < len(second) and last_place[id(second[followed])] < place:
            chunks.append(second[followed])
            followed += 1
        for following in segments[place + 1 : place + 2]:
            take(following)
        operations.append(Operation(segment, position, len(chunks) - position))
    return chunks + second[followed:], operations


def _largest_first(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Chunks by the size of their largest segment; those of one segment stay together, in order.

    Kinds take turns among segments of one size. So operations whose chunks stream alternate with
    those of resident ones, and the link is busy during both.
    """
    numels: dict[int, int] = {}
    runs: list[list[Chunk]] = []  # of chunks that a segment spans
    for chunk in chunks:
        if not runs or runs[-1][-1].pieces[-1].segment != chunk.pieces[0].segment:
            runs.append([])
        runs[-1].append(chunk)
        for piece in chunk.pieces:
            numels[piece.segment] = numels.get(piece.segment, 0) + piece.numel
    alike: dict[tuple[int, int], list[int]] = {}  # runs by size and kind
    for number, run in enumerate(runs):
        size = max(numels[piece.segment] for chunk in run for piece in chunk.pieces)
        alike.setdefault((size, id(run[0].kind)), []).append(number)
    keys = {
        number: (-size, (rank + 0.5) / len(numbers))
        for (size, _), numbers in alike.items()
        for rank, number in enumerate(numbers)
    }
    return [chunk for number in sorted(keys, key=lambda number: (keys[number], number)) for chunk in runs[number]]


def behind(
    chunks: Sequence[Chunk], among: Callable[[Chunk], bool], itemsize: int
) -> tuple[list[Operation], WorkMemory]:
    """An operation behind the last chunk of each parameter, in the order of the chunks.

    A chunk of such parameters holds whole ones, or a part of exactly one. So the array of one chunk
    or of one parameter is in use at a time, and the parameters of a chunk lie in it as in a slot.

    Args:
        chunks: chunks in order.
        among: tells the chunks of parameters with an operation.
        itemsize: bytes of an element.

    Returns:
        The operations, and memory for the largest array.
    """
    found: dict[int, Operation] = {}
    most = 0
    for number, chunk in enumerate(chunks):
        for segment, offset, numel, slot_start in chunk.pieces if among(chunk) else ():
            start = found[segment].offset if offset else slot_start * itemsize
            found[segment] = Operation(segment, number + 1, 0, start)
            most = max(most, start + (offset + numel) * itemsize)
    return list(found.values()), WorkMemory(most, _aligned(most))


def placed(
    chunks: Sequence[Chunk], operations: Sequence[Operation], array_bytes: Callable[[int], int], scratch_bytes: int
) -> tuple[list[Operation], WorkMemory]:
    """Assigns each operation's array a place in the work memory.

    An array keeps its place from the first chunk that fills it to the last chunk that reads it.
    Kernels and operations run on one stream, so the place can be reused right behind that chunk.

    Args:
        chunks: chunks in order.
        operations: operations between them.
        array_bytes: returns the bytes of a segment's array.
        scratch_bytes: largest scratch memory of an operation.

    Returns:
        The operations with their offsets, and the work memory that they need.
    """
    begins: dict[int, int] = {}
    ends: dict[int, int] = {}
    for number, chunk in enumerate(chunks):
        for piece in chunk.pieces:
            begins.setdefault(piece.segment, number)
            ends[piece.segment] = number
    in_use: list[tuple[int, int, int]] = []  # first byte, end, last chunk; sorted
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
