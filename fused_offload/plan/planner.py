"""Makes the plan of a step from its updates, and remembers recent plans."""

from __future__ import annotations

import dataclasses
import itertools
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch

from fused_offload.config import OffloadConfig
from fused_offload.params.dtensors import local_of
from fused_offload.params.tracker import Updates
from fused_offload.rules.base import MASTER_PARAM, Phase
from fused_offload.state.layout import Layout, align, chunk_numel
from fused_offload.state.param_state import ParamState
from fused_offload.state.storage import Extent
from fused_offload.state.store import PlannedPlace

from .chunks import Chunk, Piece, Segment, chunks_of_kind, make_plan
from .operations import Operation, WorkMemory, behind, in_order, placed
from .transfer_settings import Streaming, streaming_of
from .window_blocks import Cut, WindowBlock, blocks_of, cut_at_blocks

_PLANS_KEPT = 8  # models with idle experts alternate between a few sets of gradients


class ChunkKind(NamedTuple):
    """Properties that all segments of one chunk share.

    Attributes:
        extent: storage of the state.
        group: index of the parameter group.
        grad_dtype: dtype of the gradients.
        initial: state keys that are taken at their initial value instead of being read.
        phase: index of the rule's phase.
        block: window block that holds the state, or None if it streams or is resident.
        max_programs: most programs of a kernel that works on the state in host memory itself (zero
            copy); None if the kernel finds the state on the GPU.
    """

    extent: Extent
    group: int
    grad_dtype: torch.dtype
    initial: frozenset[str]
    phase: int = 0
    block: WindowBlock | None = None
    max_programs: int | None = None

    @property
    def origin(self) -> int | None:
        """First element of the extent in the memory that the kernel works on; None for a slot."""
        if self.block is not None:
            return self.block.start
        return 0 if self.extent.layout.resident or self.max_programs is not None else None


@dataclasses.dataclass(eq=False)
class StepPlan:
    """Chunks of one step.

    Attributes:
        chunks_on: chunks of the parameters on each device, in the order of their kernels. With one
            phase, streamed and zero-copy chunks come first, then chunks in the window, then
            resident ones, then those of quantised parameters. A piece's segment is an index into
            the step's updates.
        starts: first element of each update's state in its extent.
        initial: parameters' state that this step is the first to write.
        operations: operations between two phases on each device, or behind quantised parameters,
            in order.
        work: work memory of those operations on each device.
        derived: what `stream` computes from the plan and keeps with it: a `DevicePlan` per CUDA
            device.
    """

    chunks_on: dict[torch.device, list[Chunk]]
    starts: list[int]
    initial: list[ParamState]
    operations: dict[torch.device, list[Operation]] = dataclasses.field(default_factory=dict)
    work: dict[torch.device, WorkMemory] = dataclasses.field(default_factory=dict)
    derived: dict[torch.device, Any] = dataclasses.field(default_factory=dict)


class _TwoPhases(NamedTuple):
    """As the fields of `StepPlan`."""

    chunks_on: dict[torch.device, list[Chunk]]
    operations: dict[torch.device, list[Operation]]
    work: dict[torch.device, WorkMemory]


class Planner:
    """Makes plans and lists window blocks; keeps the most recent plans, by their inputs."""

    def __init__(self, config: OffloadConfig) -> None:
        """Starts without plans."""
        self._config = config
        self._plans: OrderedDict[Hashable, StepPlan] = OrderedDict()
        self._blocks: list[WindowBlock] | None = None
        self._block_ends: list[int] = []
        self._version = -1

    def plan(
        self,
        updates: Updates,
        entries: list[ParamState],
        phases: Sequence[Phase],
        version: int,
        window: Sequence[WindowBlock] = (),
    ) -> StepPlan:
        """The plan of one step.

        Args:
            updates: parameters with gradients.
            entries: state of each update; all have storage.
            phases: the rule's phases, the same in every call.
            version: number that changes when a parameter gets other storage, or when values become
                initial again.
            window: blocks that are on the GPU or on their way there.
        """
        self._keep_only(version)
        key = (updates.signature, tuple(window))
        plan = self._plans.get(key)
        if plan is None or plan.initial:  # the step of that plan may have written initial state
            plan = self._make(updates, entries, phases, window)
            self._plans[key] = plan
            if len(self._plans) > _PLANS_KEPT:
                self._plans.popitem(last=False)
        self._plans.move_to_end(key)
        return plan

    def blocks_within(self, window_bytes: int, extents: Callable[[], list[Extent]], version: int) -> list[WindowBlock]:
        """As many of the first window blocks as fit into a window.

        Model hooks ask many times in a backward pass, so all blocks are listed once for a version.

        Args:
            window_bytes: GPU bytes of the window.
            extents: returns the optimizer's extents.
            version: as in `plan`.
        """
        self._keep_only(version)
        if self._blocks is None:
            self._blocks = blocks_of(extents())
            self._block_ends = list(itertools.accumulate(block.nbytes for block in self._blocks))
        return self._blocks[: bisect_right(self._block_ends, window_bytes)]

    def _keep_only(self, version: int) -> None:
        if version != self._version:
            self.forget()
            self._version = version

    def forget(self) -> None:
        """Drops all plans and blocks, which hold references to storage."""
        self._plans.clear()
        self._blocks = None

    def _make(
        self, updates: Updates, entries: list[ParamState], phases: Sequence[Phase], window: Sequence[WindowBlock]
    ) -> StepPlan:
        kinds: dict[Hashable, ChunkKind] = {}
        segments, cuts = [], []
        for index, (entry, numel, group, grad_dtype) in enumerate(
            zip(entries, updates.numels.tolist(), updates.groups, updates.grad_dtypes, strict=True)
        ):
            extent = entry.extent
            assert extent is not None
            key = extent, group, grad_dtype, entry.initial
            kind = kinds.get(key)
            if kind is None:
                programs = None if extent.layout.resident else self._streaming(extent).programs
                # The master of a quantised parameter is filled in before its first step.
                initial_keys = entry.initial - {MASTER_PARAM} if extent.layout.is_quantised else entry.initial
                kind = kinds[key] = ChunkKind(extent, group, grad_dtype, initial_keys, max_programs=programs)
            whole = Segment(kind, entry.start, numel)
            if not window:
                segments.append(whole)
                continue
            for cut in cut_at_blocks(index, extent, whole, window):
                cuts.append(cut)
                here = kind if cut.block is None else kind._replace(block=cut.block, max_programs=None)
                segments.append(Segment(here, entry.start + cut.offset, cut.numel))
        starts, initial = [entry.start for entry in entries], [entry for entry in entries if entry.initial]
        if len(phases) == 2:
            chunks_on, operations, work = self._in_two_phases(segments, updates.params, phases)
            return StepPlan(chunks_on, starts, initial, operations, work)
        quantised: list[int] = []
        if any(kind.extent.layout.is_quantised for kind in kinds.values()):
            quantised = [index for index, segment in enumerate(segments) if _is_quantised(segment)]
        chunks = make_plan(segments, self._capacity, without=quantised)
        # Kernels on state that is on the GPU need no copy. They go last: copies start at once.
        ordered = sorted(chunks, key=_copy_first)
        ordered += self._of_quantised(segments, quantised)
        if window:
            ordered = [_of_updates(chunk, cuts) for chunk in ordered]
        plan = StepPlan(_by_device(ordered), starts, initial)
        for device, on_device in plan.chunks_on.items() if quantised else ():
            found = behind(on_device, _is_quantised, torch.float32.itemsize)
            if found[0]:
                plan.operations[device], plan.work[device] = found
        return plan

    def _of_quantised(self, segments: Sequence[Segment], indices: Sequence[int]) -> list[Chunk]:
        """Chunks of quantised parameters, of which each holds whole ones or a part of exactly one.

        They are quantised in the order of the groups, whatever chunks they lie in and wherever
        their state is: ranks that agree on scales have to come to the same parameter.
        """
        largest = align(max((segments[index].numel for index in indices), default=0))

        def limit(kind: ChunkKind) -> int:
            streamed = chunk_numel(self._streaming(kind.extent).chunk_bytes, kind.extent.layout.alignment_bytes)
            return streamed if kind.origin is None else max(streamed, largest)

        chunks: list[Chunk] = []
        for kind, run in itertools.groupby(indices, key=lambda index: segments[index].kind):
            chunks += chunks_of_kind(kind, list(run), segments, limit(kind), keep_whole=True)
        return chunks

    def _in_two_phases(
        self, segments: Sequence[Segment], params: Sequence[torch.Tensor], phases: Sequence[Phase]
    ) -> _TwoPhases:
        """Chunks of both phases of some parameters, and the operations between them, by device."""
        operation = phases[0].then
        assert operation is not None
        found = _TwoPhases({}, {}, {})
        capacity, largest_first = partial(self._part_capacity, phases), not operation.is_collective
        first, second = (
            _by_device(make_plan(_in_phase(segments, number), capacity, keep_whole=True, largest_first=largest_first))
            for number in range(2)
        )
        for device, chunks in first.items():
            ordered, operations = in_order(chunks, second[device], largest_first=largest_first)
            scratch = max(operation.scratch_bytes(params[one.segment]) for one in operations)
            found.chunks_on[device] = ordered
            found.operations[device], found.work[device] = placed(
                ordered, operations, lambda index: segments[index].numel * operation.dtype.itemsize, scratch
            )
        return found

    def work_memory(
        self, places: Sequence[PlannedPlace], groups: Sequence[int], phases: Sequence[Phase]
    ) -> dict[torch.device, WorkMemory]:
        """Work memory of a step in which all parameters have gradients of their dtype.

        Args:
            places: parameters and the places of their state.
            groups: index of each parameter's group.
            phases: the rule's phases.
        """
        if len(phases) == 1 or not places:
            return {}
        kinds: dict[Hashable, ChunkKind] = {}
        params = [local_of(place.param) for place in places]
        segments = []
        for param, (_, extent, start), group in zip(params, places, groups, strict=True):
            kind = ChunkKind(cast(Extent, extent), group, param.dtype, frozenset())
            segments.append(Segment(kinds.setdefault((extent, group), kind), start, param.numel()))
        return self._in_two_phases(segments, params, phases).work

    def _streaming(self, extent: Extent) -> Streaming:
        return extent_streaming(self._config, extent.layout, extent.numel)

    def _capacity(self, kind: Any) -> int | None:
        if kind.origin is not None:
            return None
        in_slot = kind.extent.layout.in_slot(kind.grad_dtype)
        return chunk_numel(self._streaming(kind.extent).chunk_bytes, in_slot.alignment_bytes)

    def _part_capacity(self, phases: Sequence[Phase], kind: Any) -> int:
        """Most elements of a chunk in each of two phases.

        One number for both, so that their chunks hold the same parameters: an array is in use until
        the last parameter of its chunk in the second phase is done. Chunks of a phase that moves no
        keys have that limit too, since it bounds the work memory.
        """
        layout = kind.extent.layout
        moved = max(layout.only(phase.keys).alignment_bytes for phase in phases)
        return chunk_numel(self._streaming(kind.extent).chunk_bytes, moved)


def _in_phase(segments: Sequence[Segment], phase: int) -> list[Segment]:
    """The segments with the number of a phase in their kinds."""
    kinds: dict[int, ChunkKind] = {}
    found = []
    for segment in segments:
        here = kinds.get(id(segment.kind))
        if here is None:
            here = kinds[id(segment.kind)] = kind_of(segment)._replace(phase=phase)
        found.append(Segment(here, segment.start, segment.numel))
    return found


def _by_device(chunks: Iterable[Chunk]) -> dict[torch.device, list[Chunk]]:
    found: dict[torch.device, list[Chunk]] = {}
    for chunk in chunks:
        found.setdefault(kind_of(chunk).extent.layout.device, []).append(chunk)
    return found


def extent_streaming(config: OffloadConfig, layout: Layout, numel: int) -> Streaming:
    """Transfer settings of an extent of ``numel`` elements.

    State of quantised parameters, and of those in host memory, always streams through the ring.
    """
    if layout.params_on_host or layout.is_quantised:
        config = dataclasses.replace(config, transport="copy", zero_copy_programs="auto")
    return streaming_of(config, layout.device, layout.state_bytes(numel))


def _of_updates(chunk: Chunk, cuts: Sequence[Cut]) -> Chunk:
    """The chunk with pieces of updates in the place of pieces of cuts."""
    pieces = tuple(
        Piece(cuts[segment].segment, cuts[segment].offset + offset, numel, slot_start)
        for segment, offset, numel, slot_start in chunk.pieces
    )
    return chunk._replace(pieces=pieces)


def kind_of(part: Segment | Chunk) -> ChunkKind:
    """Kind of a segment or chunk of a planner."""
    assert isinstance(part.kind, ChunkKind)
    return part.kind


def _copy_first(chunk: Chunk) -> tuple[bool, bool]:
    """Sort key that puts chunks in the window behind those that stream, and resident ones last."""
    kind = kind_of(chunk)
    return kind.extent.layout.resident, kind.block is not None


def _is_quantised(part: Segment | Chunk) -> bool:
    return kind_of(part).extent.layout.is_quantised
