"""The part of a step plan on one device: address table, copies, kernel arguments, bytes."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fused_offload.config import OffloadConfig
from fused_offload.memory.staging_ring import RingNeed, Slot, StagingRing
from fused_offload.params.tracker import Updates
from fused_offload.plan.operations import Operation, WorkMemory
from fused_offload.plan.planner import ChunkKind, StepPlan, extent_streaming, kind_of
from fused_offload.plan.window_blocks import WindowBlock
from fused_offload.rules.base import BoundState, Phase, UpdateRule
from fused_offload.state.layout import GRAD, PARAM, Layout, slot_bytes

from .address_table import AddressTable
from .copies import ChunkTransfer, Copy, block_write_back, bytes_of, chunk_transfer
from .host_params import HostParams
from .operations import Parts, operation_of, parts_of, stand_in_for_params
from .schedule import LoadedBlock
from .step_inputs import StepInputs


class _Moved(NamedTuple):
    """Bytes that cross the link.

    Attributes:
        to_device: bytes that kernels read.
        to_host: bytes that kernels write.
    """

    to_device: int
    to_host: int

    @classmethod
    def by(cls, transfers: Collection[ChunkTransfer]) -> _Moved:
        """Total bytes of some transfers."""
        return cls(
            sum(bytes_of(transfer.to_device) for transfer in transfers),
            sum(bytes_of(transfer.to_host) for transfer in transfers),
        )


class DevicePlan:
    """The part of a step plan on one device, with everything that is the same in each of its steps.

    Attributes:
        table: addresses of parameters and gradients.
        host_params: parameters and gradients in host memory that pass through the ring.
        kinds: kind of each chunk.
        alike: for each chunk, index of the first one of its kind and size.
        transfers: copies of each chunk that streams, by its index.
        in_window: index of each chunk in the window, its block, and the copies of its write-back.
        in_host_memory: indices of the zero-copy chunks, whose kernels work on host memory.
        resident: indices of chunks whose state stays on the device, or whose phase moves no state.
        operations: operations between the chunks.
        work: size and scratch of those operations' work memory.
        quantises: True if the operations make quantised parameters, in memory of the step alone.
        copied: bytes that the streamed chunks move, with those of parameters and gradients.
        mapped: bytes that the kernels of zero-copy chunks move.
        need: ring and work memory that the plan needs, or None.
        compiled_for: arguments that the kernels were compiled for; see `Launches.compiled_for`.
    """

    def __init__(
        self, plan: StepPlan, device: torch.device, rule: UpdateRule, updates: Updates, config: OffloadConfig
    ) -> None:
        chunks = plan.chunks_on[device]
        self.operations, self.work = plan.operations.get(device, []), plan.work.get(device, WorkMemory())
        self.quantises = bool(self.operations) and stand_in_for_params(rule)
        self.kinds: list[ChunkKind] = []
        self.transfers: dict[int, ChunkTransfer] = {}
        self.in_window: list[tuple[int, WindowBlock, tuple[Copy, ...]]] = []
        self.in_host_memory: list[int] = []
        self.resident: set[int] = set()
        mapped = []  # transfers that zero-copy chunks would need with copies
        for index, chunk in enumerate(chunks):
            kind = kind_of(chunk)
            phase = rule.phases[kind.phase]
            self.kinds.append(kind)
            if kind.block is not None:
                self.in_window.append((index, kind.block, block_write_back(kind.block, chunk, phase)))
            elif kind.max_programs is not None:
                self.in_host_memory.append(index)
                mapped.append(chunk_transfer(chunk, kind, phase))
            elif kind.extent.layout.resident or not kind.extent.layout.only(phase.keys).keys:
                self.resident.add(index)
            else:
                self.transfers[index] = chunk_transfer(chunk, kind, phase)
        first: dict[Any, int] = {}
        self.alike = [first.setdefault((chunk.kind, chunk.numel), index) for index, chunk in enumerate(chunks)]
        self.host_params = HostParams(chunks, self.transfers)
        self.table = AddressTable(
            plan,
            chunks,
            updates,
            self.host_params,
            self.operations,
            operation_of(rule).dtype.itemsize,
            in_place_of_params=self.quantises,
        )
        state, self.mapped = _Moved.by(self.transfers.values()), _Moved.by(mapped)
        self.copied = _Moved(*map(sum, zip(state, (self.host_params.to_device, self.host_params.to_host), strict=True)))
        streamed = {(self.kinds[index].extent, self.kinds[index].grad_dtype) for index in self.transfers}
        extents = ((extent.layout, extent.numel, grad_dtype) for extent, grad_dtype in streamed)
        self.need = ring_need(config, extents, rule.phases, 0 if self.quantises else self.work.nbytes)
        self.compiled_for: Any = None
        # Weak, so that views of a slot do not outlive the ring's memory.
        self._states: weakref.WeakKeyDictionary[Slot, dict[int, BoundState]] = weakref.WeakKeyDictionary()
        self._parts: weakref.WeakKeyDictionary[Slot, dict[int, tuple[Any, Parts]]] = weakref.WeakKeyDictionary()

    def state(
        self,
        index: int,
        slot_index: int,
        rule: UpdateRule,
        ring: StagingRing,
        window: Mapping[WindowBlock, LoadedBlock],
    ) -> BoundState:
        """State of a chunk, bound for its kernel.

        Args:
            index: index of the chunk.
            slot_index: slot of a chunk that streams; unused for others.
            rule: the update rule.
            ring: the device's ring.
            window: loaded window blocks.
        """
        kind, transfer = self.kinds[index], self.transfers.get(index)
        if kind.block is not None:
            return rule.bind(kind.block.place.carve(window[kind.block].slot.memory), kind.initial)
        if transfer is None:
            return rule.bind(rule.phases[kind.phase].of(kind.extent.stored), kind.initial)
        slot = ring.slots[slot_index]
        views, first = self._states.get(slot), self.alike[index]
        if views is None:
            views = self._states[slot] = {}
        if first not in views:
            views[first] = rule.bind(transfer.place.carve(slot.memory), kind.initial)
        return views[first]

    def grads_in_slot(self, index: int, slot: Slot) -> torch.Tensor:
        """Gradients of a chunk that come from host memory, in the slot they are copied to."""
        place = self.transfers[index].place
        start, stop = place.spans[GRAD]
        return place.stored(GRAD, slot.memory[start:stop]).data

    def parts(self, operation: Operation, work: Slot, inputs: StepInputs) -> Parts:
        """The calls that enqueue an operation, kept until work memory or compiled values change.

        Args:
            operation: one of `operations`.
            work: the work memory.
            inputs: the step's inputs.
        """
        known = self._parts.setdefault(work, {})
        compiled = inputs.rule.compiled_values(inputs.values[inputs.updates.groups[operation.segment]])
        made_for, parts = known.get(operation.segment, (None, ()))
        if made_for != compiled:
            parts = parts_of(operation, self.work, work.memory, inputs)
            known[operation.segment] = compiled, parts
        return parts


def ring_need(
    config: OffloadConfig,
    extents: Iterable[tuple[Layout, int, torch.dtype]],
    phases: Sequence[Phase],
    work_bytes: int,
) -> RingNeed | None:
    """The ring that a rule's steps need, with their work memory, or None if they need neither.

    Args:
        config: the caller's configuration.
        extents: layout, number of elements and dtype of the gradients of each extent that streams.
        phases: the rule's phases.
        work_bytes: bytes of the work memory.
    """
    needs = []
    for layout, numel, grad_dtype in extents:
        chunk_bytes, depth, programs = extent_streaming(config, layout, numel)
        for moved in (layout.in_slot(grad_dtype).only(phase.keys | {PARAM, GRAD}) for phase in phases):
            if programs is None and moved.keys:
                needs.append(RingNeed(depth, slot_bytes(moved, numel, chunk_bytes)))
    if not needs and not work_bytes:
        return None
    return RingNeed(
        max((need.depth for need in needs), default=0), max((need.slot_bytes for need in needs), default=0), work_bytes
    )
