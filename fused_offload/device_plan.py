"""What a device's pipeline works out once for a plan: addresses, copies, kernels' arguments, bytes."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from .config import OffloadConfig
from .kernels import adam
from .kernels.reference import AdamState
from .plan import Chunk
from .planner import ChunkKind, StepPlan, extent_streaming
from .schedule import LoadedBlock
from .staging import RingNeed, Slot, StagingRing
from .storage import Layout, slot_bytes
from .table import AddressTable
from .transfers import ChunkTransfer, Copy, block_write_back, bytes_of, chunk_transfer, slot_state
from .updates import Updates
from .window import WindowBlock


class _Moved(NamedTuple):
    """Bytes of state that cross the link.

    Attributes:
        to_device: what kernels read.
        to_host: what they write.
    """

    to_device: int
    to_host: int

    @classmethod
    def by(cls, transfers: Iterable[ChunkTransfer | None]) -> _Moved:
        """All bytes of some transfers."""
        known = [transfer for transfer in transfers if transfer is not None]
        return cls(
            sum(bytes_of(transfer.to_device) for transfer in known),
            sum(bytes_of(transfer.to_host) for transfer in known),
        )


class DevicePlan:
    """What the pipeline works out once per plan and device."""

    def __init__(self, plan: StepPlan, chunks: list[Chunk], updates: Updates, config: OffloadConfig) -> None:
        self.table = AddressTable(plan, chunks, updates, adam.programs_of)
        self.kinds: list[ChunkKind] = []
        self.transfers: list[ChunkTransfer | None] = []
        self.window_copies: dict[int, tuple[Copy, ...]] = {}  # write-back of the chunks in the window, by index
        in_host_memory: list[ChunkTransfer] = []  # what copies would move for the chunks that need none
        for index, chunk in enumerate(chunks):
            kind = chunk.kind
            assert isinstance(kind, ChunkKind)
            self.kinds.append(kind)
            self.transfers.append(chunk_transfer(chunk, kind) if kind.origin is None else None)
            if kind.block is not None:
                self.window_copies[index] = block_write_back(kind.block, chunk)
            elif kind.max_programs is not None:
                in_host_memory.append(chunk_transfer(chunk, kind))
        self.copied, self.mapped = _Moved.by(self.transfers), _Moved.by(in_host_memory)
        streamed = {kind.extent for kind in self.kinds if kind.origin is None}
        self.need = ring_need(config, ((extent.layout, extent.numel) for extent in streamed))
        self.compiled_for: Any = None  # arguments that the kernels of this plan were compiled for
        # By slot, weakly: a ring that is released or grown takes its slots' views with it.
        self._states: weakref.WeakKeyDictionary[Slot, dict[Any, AdamState]] = weakref.WeakKeyDictionary()

    def state(
        self, index: int, slot_index: int, ring: StagingRing, window: Mapping[WindowBlock, LoadedBlock]
    ) -> AdamState:
        """State of a chunk as the kernel takes it; full chunks of a kind share the same views."""
        kind, transfer = self.kinds[index], self.transfers[index]
        if kind.block is not None:
            return slot_state(window[kind.block].slot, kind.block.place, kind)
        if transfer is None:
            return kind.extent.state(init_moments=kind.init_moments, init_master=kind.init_master)
        slot = ring.slots[slot_index]
        views = self._states.setdefault(slot, {})
        key = (kind, transfer.place.numel)
        if key not in views:
            views[key] = slot_state(slot, transfer.place, kind)
        return views[key]


def ring_need(config: OffloadConfig, extents: Iterable[tuple[Layout, int]]) -> RingNeed | None:
    """What streaming extents, given by layout and elements, needs of the ring; None if nothing does."""
    needs = []
    for layout, numel in extents:
        chunk_bytes, depth, programs = extent_streaming(config, layout, numel)
        if programs is None:
            needs.append(RingNeed(depth, slot_bytes(layout, numel, chunk_bytes)))
    if not needs:
        return None
    return RingNeed(max(need.depth for need in needs), max(need.slot_bytes for need in needs))
