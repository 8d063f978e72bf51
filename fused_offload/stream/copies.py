"""Copies of a chunk's state between slabs and GPU memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from fused_offload.kernels.formats import SCALE_GROUP
from fused_offload.plan.chunks import Chunk, CopyRange
from fused_offload.plan.planner import ChunkKind
from fused_offload.plan.window_blocks import WindowBlock
from fused_offload.rules.base import MASTER_PARAM, Phase
from fused_offload.state.layout import GRAD, PARAM, ArrayPlace, Layout
from fused_offload.state.storage import Extent


class Copy(NamedTuple):
    """One contiguous copy.

    Attributes:
        host_address: address in a slab.
        slot_offset: bytes from the start of the slot.
        nbytes: number of bytes.
    """

    host_address: int
    slot_offset: int
    nbytes: int


class ChunkTransfer(NamedTuple):
    """All copies of one streamed chunk's state.

    Attributes:
        to_device: state that the kernel reads.
        to_host: state that the kernel writes.
        place: byte offsets of each key in the slot; also of `PARAM` and `GRAD` if they pass through
            it.
    """

    to_device: tuple[Copy, ...]
    to_host: tuple[Copy, ...]
    place: ArrayPlace


def chunk_transfer(chunk: Chunk, kind: ChunkKind, phase: Phase) -> ChunkTransfer:
    """The copies of one chunk in one phase of the rule.

    State at its initial value is not read, and neither is the master of a float32 parameter, which
    is its own master.
    """
    layout = kind.extent.layout
    moved = {key: format for key, format in layout.keys if key in phase.reads | phase.writes}
    in_slot = layout.in_slot(kind.grad_dtype).only({*moved, PARAM, GRAD})
    place = ArrayPlace(in_slot.formats, chunk.numel)
    copies = {key: _key_copies(kind.extent, key, place, chunk.ranges) for key in moved}
    read = _keys_read(layout) & phase.reads - kind.initial
    return ChunkTransfer(
        tuple(copy for key in moved if key in read for copy in copies[key]),
        tuple(copy for key in moved if key in phase.writes for copy in copies[key]),
        place,
    )


def _keys_read(layout: Layout) -> set[str]:
    """Keys of a layout that a step may read."""
    return {key for key, _ in layout.keys if key != MASTER_PARAM or layout.reads_master}


def block_transfer(block: WindowBlock) -> tuple[Copy, ...]:
    """The copies that bring a whole block of state to the GPU.

    Which parameters will have gradients is not known yet. As for chunks, the master of a float32
    parameter is not read.
    """
    layout, place = block.extent.layout, block.place
    whole = (CopyRange(block.start, block.numel, 0),)
    read = _keys_read(layout)
    return tuple(copy for key, _ in layout.keys if key in read for copy in _key_copies(block.extent, key, place, whole))


def block_write_back(block: WindowBlock, chunk: Chunk, phase: Phase) -> tuple[Copy, ...]:
    """The copies to the slabs of what one phase of a chunk wrote in a window block."""
    ranges = tuple(CopyRange(start, numel, start - block.start) for start, numel, _ in chunk.ranges)
    keys = [key for key, _ in block.extent.layout.keys if key in phase.writes]
    return tuple(copy for key in keys for copy in _key_copies(block.extent, key, block.place, ranges))


def _key_copies(extent: Extent, key: str, place: ArrayPlace, ranges: tuple[CopyRange, ...]) -> list[Copy]:
    stored = extent.stored[key]
    copies = []
    for start, numel, slot_start in ranges:
        size = stored.format.element_bytes
        copies.append(Copy(stored.data.data_ptr() + start * size, place.data[key] + slot_start * size, numel * size))
        if stored.scale is not None:
            copies.append(
                Copy(
                    stored.scale.data_ptr() + start // SCALE_GROUP * 4,
                    place.scale[key] + slot_start // SCALE_GROUP * 4,
                    numel // SCALE_GROUP * 4,
                )
            )
    return copies


def bytes_of(copies: Iterable[Copy]) -> int:
    """Total bytes of some copies."""
    return sum(copy.nbytes for copy in copies)
