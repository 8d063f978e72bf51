"""Turns a step's updates into chunks, and remembers the plans of recent steps."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from fused_offload.config import OffloadConfig
from fused_offload.params.tracker import Updates
from fused_offload.state.layout import Layout, chunk_numel
from fused_offload.state.param_state import ParamState
from fused_offload.state.storage import Extent

from .chunks import Chunk, Piece, Segment, make_plan
from .transfer_settings import Streaming, streaming_of
from .window_blocks import Cut, WindowBlock, cut_at_blocks

_PLANS_KEPT = 8  # models with idle experts alternate between a few sets of gradients


class ChunkKind(NamedTuple):
    """Properties that all segments of one chunk share.

    Attributes:
        extent: storage of the state.
        group: index of the parameter group.
        grad_dtype: dtype of the gradients.
        initial: state keys that are at their initial value everywhere.
        phase: index of the rule's phase.
        block: part of the window that holds the state, or None if it streams or is resident.
        max_programs: programs of a kernel that works on the state where it is, in host memory; None where the state is
            on the GPU by then.
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
        """Element of the extent at which the memory begins that the kernel works on, or None for a slot of its own."""
        if self.block is not None:
            return self.block.start
        return 0 if self.extent.layout.resident or self.max_programs is not None else None


@dataclass(eq=False)
class StepPlan:
    """Chunks of one step.

    Attributes:
        chunks: streamed chunks and those that are updated in host memory, then those in the window, then what is
            resident; a piece's segment is an index into the step's updates.
        starts: first element of each update in its extent.
        initial: entries whose state this step is the first to write.
        derived: `DevicePlan` of each device; lives as long as the plan.
        chunks_on: chunks of parameters on each device, in order.
    """

    chunks: tuple[Chunk, ...]
    starts: list[int]
    initial: list[ParamState]
    derived: dict[torch.device, Any] = field(default_factory=dict)
    chunks_on: dict[torch.device, list[Chunk]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Sorts the chunks by device."""
        for chunk in self.chunks:
            self.chunks_on.setdefault(extent_of(chunk).layout.device, []).append(chunk)


class Planner:
    """Makes plans and keeps the most recent ones, by what they were made from."""

    def __init__(self, config: OffloadConfig) -> None:
        """Keeps the configuration."""
        self._config = config
        self._plans: OrderedDict[Hashable, StepPlan] = OrderedDict()
        self._version = -1

    def plan(
        self,
        updates: Updates,
        entries: list[ParamState],
        version: int,
        window: Sequence[WindowBlock] = (),
    ) -> StepPlan:
        """The plan of one step.

        Args:
            updates: parameters with gradients.
            entries: state of each update, with its storage.
            version: changes whenever storage of any entry did, or values became initial again.
            window: blocks whose state is on the GPU already.
        """
        if version != self._version:
            self.forget()
            self._version = version
        key = (updates.signature, tuple(window))
        plan = self._plans.get(key)
        if plan is None or plan.initial:  # what was initial need not be so any more
            plan = self._make(updates, entries, window)
            self._plans[key] = plan
            if len(self._plans) > _PLANS_KEPT:
                self._plans.popitem(last=False)
        self._plans.move_to_end(key)
        return plan

    def forget(self) -> None:
        """Drops all plans, and with them their references to storage."""
        self._plans.clear()

    def _make(self, updates: Updates, entries: list[ParamState], window: Sequence[WindowBlock]) -> StepPlan:
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
                kind = kinds[key] = ChunkKind(extent, group, grad_dtype, entry.initial, max_programs=programs)
            whole = Segment(kind, entry.start, numel)
            if not window:
                segments.append(whole)
                continue
            for cut in cut_at_blocks(index, extent, whole, window):
                cuts.append(cut)
                here = kind if cut.block is None else kind._replace(block=cut.block, max_programs=None)
                segments.append(Segment(here, entry.start + cut.offset, cut.numel))
        chunks = make_plan(segments, self._capacity)
        if window:
            chunks = tuple(_of_updates(chunk, cuts) for chunk in chunks)
        # What is on the GPU goes last: its kernels need no copy, so the link starts with the first chunk that does.
        ordered = sorted(chunks, key=lambda chunk: (extent_of(chunk).layout.resident, block_of(chunk) is not None))
        initial = [entry for entry in entries if entry.initial]
        return StepPlan(tuple(ordered), [entry.start for entry in entries], initial)

    def _streaming(self, extent: Extent) -> Streaming:
        return extent_streaming(self._config, extent.layout, extent.numel)

    def _capacity(self, kind: Any) -> int | None:
        if kind.origin is not None:
            return None
        return chunk_numel(self._streaming(kind.extent).chunk_bytes, kind.extent.layout.alignment_bytes)


def extent_streaming(config: OffloadConfig, layout: Layout, numel: int) -> Streaming:
    """Transfer settings of an extent of ``numel`` elements."""
    return streaming_of(config, layout.device, layout.state_bytes(numel))


def _of_updates(chunk: Chunk, cuts: Sequence[Cut]) -> Chunk:
    """A chunk whose pieces name updates, of one whose pieces name parts of updates."""
    pieces = tuple(
        Piece(cuts[segment].segment, cuts[segment].offset + offset, numel, slot_start)
        for segment, offset, numel, slot_start in chunk.pieces
    )
    return chunk._replace(pieces=pieces)


def block_of(chunk: Chunk) -> WindowBlock | None:
    """Part of the window that holds a chunk's state, or None."""
    kind = chunk.kind
    assert isinstance(kind, ChunkKind)
    return kind.block


def extent_of(chunk: Chunk) -> Extent:
    """Storage of a chunk's state."""
    kind = chunk.kind
    assert isinstance(kind, ChunkKind)
    return kind.extent
