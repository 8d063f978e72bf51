"""The kernel launches of one step on one device, and their compilation before the first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from fused_offload.kernels.launch import LaunchKind, ScalerSignals
from fused_offload.memory.staging_ring import Slot, StagingRing
from fused_offload.plan.operations import Operation
from fused_offload.plan.window_blocks import WindowBlock

from .device_plan import DevicePlan
from .operations import Parts, order_of_work
from .schedule import LoadedBlock, StreamedChunk
from .step_inputs import StepInputs


class Launches:
    """The launches of one step on one device."""

    def __init__(
        self,
        plan: DevicePlan,
        inputs: StepInputs,
        table: Sequence[torch.Tensor],
        aligned: Sequence[bool],
        signals: Mapping[int | None, ScalerSignals],
        ring: StagingRing,
        window: Mapping[WindowBlock, LoadedBlock],
        work: Slot | None = None,
    ) -> None:
        """Keeps the arguments that all launches share.

        Args:
            plan: the device's plan.
            inputs: the step's inputs on this device.
            table: the address table on this device, from each chunk's first row on.
            aligned: result of `AddressTable.fill`.
            signals: a gradient scaler's signals by group, or for all groups under None.
            ring: the device's ring.
            window: loaded window blocks.
            work: work memory of the plan's operations.
        """
        self._plan = plan
        self._inputs = inputs
        self._table = table
        self._aligned = aligned
        self._signals = signals
        self._ring = ring
        self._window = window
        self.work = work
        self._shared_by_alike: dict[tuple[int, bool], tuple[Any, LaunchKind, ScalerSignals]] = {}

    def launch(self, index: int, slot_index: int = 0) -> None:
        """Enqueues the kernel of one chunk.

        Args:
            index: index of the chunk.
            slot_index: slot of a chunk that streams; unused for others.
        """
        state = self._plan.state(index, slot_index, self._inputs.rule, self._ring, self._window)
        rows = self._plan.table.chunks[index]
        phase = self._inputs.rule.phases[self._plan.kinds[index].phase]
        phase.launch(self._table[index], rows.rows, rows.programs, state, *self._shared(index))

    def on_compute_stream(
        self, in_order: Mapping[int, Callable[[], Any]]
    ) -> tuple[list[StreamedChunk], list[Callable[[], Any]]]:
        """The order of work on the compute stream, without zero-copy kernels.

        Args:
            in_order: calls that enqueue the kernels of chunks in the window, by their index, where
                these have a place in the order.

        Returns:
            The chunks that stream. Operations and kernels of resident chunks are the calls that
            each chunk has ``before`` its kernel.
            The calls that go behind the last chunk that streams.
        """
        chunks: list[StreamedChunk] = []
        waiting: list[Callable[[], Any]] = []
        for item in order_of_work(len(self._plan.kinds), self._plan.operations, self._parts_of):
            if not isinstance(item, int):
                waiting.append(item)
            elif item in self._plan.transfers:
                params, launch = self._plan.host_params.copies(item), partial(self.launch, item)
                if params is not None and self._inputs.grad_factors:
                    launch = partial(self._launch_scaled, item)
                chunks.append(StreamedChunk(self._plan.transfers[item], launch, tuple(waiting), params))
                waiting.clear()
            elif item in self._plan.resident:
                waiting.append(partial(self.launch, item))
            elif item in in_order:
                waiting.append(in_order[item])
        return chunks, waiting

    def _launch_scaled(self, index: int, slot_index: int) -> None:
        """`launch`, behind the multiplication of the gradients in the slot."""
        grads = self._plan.grads_in_slot(index, self._ring.slots[slot_index])
        for factor in self._inputs.grad_factors:
            grads.mul_(factor)
        self.launch(index, slot_index)

    def _parts_of(self, operation: Operation) -> Parts:
        assert self.work is not None
        return self._plan.parts(operation, self.work, self._inputs)

    def _shared(self, index: int) -> tuple[Any, LaunchKind, ScalerSignals]:
        """Values, kind and signals of one chunk's launch, which compilation takes too."""
        alike = self._plan.alike[index], self._aligned[index]
        known = self._shared_by_alike.get(alike)
        if known is not None:
            return known
        kind = self._plan.kinds[index]
        launch_kind = LaunchKind(
            kind.extent.layout.written_dtype,
            kind.grad_dtype,
            self._inputs.rule.numerics,
            self._aligned[index],
            kind.max_programs,
        )
        signals = self._signals[kind.group] if kind.group in self._signals else self._signals[None]
        known = self._shared_by_alike[alike] = self._inputs.values[kind.group], launch_kind, signals
        return known

    @property
    def compiled_for(self) -> Any:
        """Arguments that the kernels of all chunks are compiled for, apart from the plan's."""
        rule, scaler = self._inputs.rule, self._inputs.scaler
        by_group = [(group, rule.compiled_values(values)) for group, values in self._inputs.values.items()]
        return list(self._aligned), rule.numerics, by_group, scaler.found_inf is None, scaler.grad_scale is None

    def compile(self, known: set[Any]) -> None:
        """Compiles and loads the kernels of all chunks.

        Args:
            known: arguments of kernels that are compiled already; new ones are added.
        """
        needed = self.compiled_for
        if self._plan.compiled_for != needed:
            for index in range(len(self._plan.kinds)):
                self._compile(index, known)
            self._plan.compiled_for = needed

    def _compile(self, index: int, known: set[Any]) -> None:
        rule, chunk = self._inputs.rule, self._plan.kinds[index]
        values, kind, signals = self._shared(index)
        key = (
            (chunk.extent.layout.keys, chunk.initial, chunk.phase, rule.compiled_values(values), kind),
            (signals.grad_scale is None, signals.found_inf is None),
        )
        if key not in known:
            state = self._plan.state(index, 0, rule, self._ring, self._window)
            rule.phases[chunk.phase].compile(self._table[index], state, values, kind, signals)
            known.add(key)
