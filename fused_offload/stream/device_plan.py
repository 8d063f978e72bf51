"""What a device's pipeline works out once for a plan: addresses, copies, kernels' arguments, bytes."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from fused_offload.config import OffloadConfig
from fused_offload.kernels.launch import programs_of
from fused_offload.memory.staging_ring import RingNeed, Slot, StagingRing
from fused_offload.params.tracker import Updates
from fused_offload.plan.chunks import Chunk
from fused_offload.plan.planner import ChunkKind, StepPlan, extent_streaming
from fused_offload.plan.window_blocks import WindowBlock
from fused_offload.rules.base import BoundState, UpdateRule
from fused_offload.state.layout import Layout, slot_bytes

from .address_table import AddressTable
from .copies import ChunkTransfer, Copy, block_write_back, bytes_of, chunk_transfer
from .schedule import LoadedBlock


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

    def __init__(self, plan: StepPlan, chunks: list[Chunk], rule: UpdateRule, updates: Updates, config: OffloadConfig):
        self.table = AddressTable(plan, chunks, updates, programs_of)
        self.kinds: list[ChunkKind] = []
        self.transfers: list[ChunkTransfer | None] = []
        self.window_copies: dict[int, tuple[Copy, ...]] = {}  # write-back of the chunks in the window, by index
        in_host_memory: list[ChunkTransfer] = []  # what copies would move for the chunks that need none
        for index, chunk in enumerate(chunks):
            kind = chunk.kind
            assert isinstance(kind, ChunkKind)
            phase = rule.phases[kind.phase]
            self.kinds.append(kind)
            self.transfers.append(chunk_transfer(chunk, kind, phase) if kind.origin is None else None)
            if kind.block is not None:
                self.window_copies[index] = block_write_back(kind.block, chunk, phase)
            elif kind.max_programs is not None:
                in_host_memory.append(chunk_transfer(chunk, kind, phase))
        self.copied, self.mapped = _Moved.by(self.transfers), _Moved.by(in_host_memory)
        streamed = {kind.extent for kind in self.kinds if kind.origin is None}
        self.need = ring_need(config, ((extent.layout, extent.numel) for extent in streamed))
        self.compiled_for: Any = None  # arguments that the kernels of this plan were compiled for
        # By slot, weakly: a ring that is released or grown takes its slots' views with it.
        self._states: weakref.WeakKeyDictionary[Slot, dict[Any, BoundState]] = weakref.WeakKeyDictionary()

    def state(
        self,
        index: int,
        slot_index: int,
        rule: UpdateRule,
        ring: StagingRing,
        window: Mapping[WindowBlock, LoadedBlock],
    ) -> BoundState:
        """State of a chunk as the kernel takes it; full chunks of a kind share the same views."""
        kind, transfer = self.kinds[index], self.transfers[index]
        if kind.block is not None:
            return rule.bind(kind.block.place.carve(window[kind.block].slot.memory), kind.initial)
        if transfer is None:
            return rule.bind(kind.extent.stored, kind.initial)
        slot = ring.slots[slot_index]
        views = self._states.setdefault(slot, {})
        key = (kind, transfer.place.numel)
        if key not in views:
            views[key] = rule.bind(transfer.place.carve(slot.memory), kind.initial)
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
