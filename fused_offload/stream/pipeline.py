"""The pipeline of one device: chunks of a step on their way through the ring.

::

    before the first chunk, H2D stream: wait until earlier steps have written back what this one reads
    grads --> for chunk i, slot s = i mod depth
                prefetch    H2D stream:     wait slot.written_back; copy slab -> slot
                compute     current stream: wait prefetch; one kernel reads gradients, updates parameters and slot
                write-back  D2H stream:     wait compute; copy slot -> slab

Our own streams carry copies only. Kernels run on the caller's current stream: gradients that are freed after the step
are safe, and parameters are final for whatever the caller enqueues next. Nothing here waits on the host.

With the zero-copy transport there is no ring: one kernel for each kind reads and writes the slabs themselves.

[Note: slot reuse] A slot is overwritten only after its own ``written_back``. The event stays with the slot, so this
holds across steps and across optimizers that share the ring.

[Note: next step reads what this one wrote] Before state is copied to the device, the H2D stream waits for the last
write-back of that state, and of no other: a block of the window that was written back as one has an event of its own,
everything else was written back when the last streamed chunk was, since the D2H stream is in order. Zero-copy kernels
wait for blocks on the stream that they run on, and the D2H stream waits for them, so that the same events stand for
what they wrote.

[Note: window last] Blocks of the window are written back behind all streamed chunks. Their copies have a whole forward
pass to hide under; in front of the streamed chunks' they would hold up slots, and with them the step.

[Note: window memory] A block's memory is allocated on the current stream, which has to be that of the forward pass: the
only pool that activations return to. So the H2D stream waits for what that stream did before. The memory is dropped as
soon as its write-back is enqueued, and is marked as used by the copy streams: the allocator hands it out again when
they are done with it.

[Note: work memory] Operations between two phases, and the kernels that fill and read their arrays, run on the caller's
stream in an order that the plan knows, so parameters of one step share memory without events. The next step may run on
another stream, and for another optimizer: it waits for the last kernel of the step before.

[Note: host readers synchronise] ``state``, ``state_dict``, ``load_state_dict`` and ``get_unscaled_state`` call
`Pipeline.wait` before they touch a slab.

[Note: lifetime] Slabs and slots outlive every copy: slots belong to the ring, which is released only after both copy
streams are idle, and slabs wait for the device before they are unregistered. So slots need no ``record_stream``, and a
steady step without a window allocates nothing.

[Note: half a step] After an exception anywhere in a step the numbers of other optimizers stay right: the next user of
the device's queues waits for all that is under way ([Note: interrupted runs] in `queues.py`). The optimizer itself is
marked as failed from its first change to its last (`Stepper.step`), and takes no further step before state is loaded.

[Note: grads are inputs] The kernel never writes a gradient.

[Note: all or nothing] Whatever can fail (checks, the ring, the table's memory, compiling and loading) happens in
`Pipeline.prepare`, before the first launch.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from fused_offload.config import OffloadConfig
from fused_offload.kernels.launch import ScalerSignals
from fused_offload.memory.forks import keep_in_children
from fused_offload.memory.staging_ring import ENQUEUE_LOCK
from fused_offload.plan.planner import StepPlan
from fused_offload.rules.base import Phase
from fused_offload.state.layout import Layout

from .address_table import Arrays
from .device_plan import DevicePlan, ring_need
from .launches import Launches
from .operations import scalars_of
from .prefetch import Window
from .queues import CudaOps, DeviceQueues
from .schedule import launch_in_host_memory, stream_chunks
from .skip_counter import SkipCounter
from .step_inputs import ScalerInputs, StepInputs
from .step_upload import UploadBuffer
from .timing import Span, StepLog, StepMarks
from .write_backs import WriteBacks


class PreparedStep(NamedTuple):
    """A step on one device that has nothing left to fail.

    Attributes:
        plan: the device's plan.
        launches: launches of its chunks.
        params: parameters that the step changes.
        found_inf: signal to count a skip by, or None.
    """

    plan: DevicePlan
    launches: Launches
    params: list[torch.Tensor]
    found_inf: torch.Tensor | None


class Pipeline:
    """Steps of one optimizer on one device.

    Attributes:
        queues: copy streams and ring, shared with other optimizers.
        window: prefetched state.
        write_backs: events of completed state.
        skips: counts steps that the device skipped.
        log: timing events of the last steps.
        prefetch_host_seconds: host time of the prefetches for the next step.
    """

    def __init__(self, device: torch.device, config: OffloadConfig) -> None:
        """Takes no GPU memory yet."""
        self.queues = DeviceQueues.of(device)
        self.write_backs = WriteBacks()
        self.window = Window(self.queues, self.write_backs)
        self.skips = SkipCounter(device)
        self.log = StepLog()
        self._config = config
        self._upload = UploadBuffer(device)
        self._compiled: set[Any] = set()
        self._computed: torch.cuda.Event | None = None
        self._called: tuple[torch.cuda.Event, float] | None = None
        self.prefetch_host_seconds = 0.0
        self._is_enqueueing = False
        keep_in_children(self)

    def reserve(self, extents: Sequence[tuple[Layout, int]], phases: Sequence[Phase]) -> None:
        """Takes the ring that steps are going to need.

        Args:
            extents: layout and elements of each extent that streams.
            phases: phases of the rule.

        Raises:
            RuntimeError: if the GPU has too little memory; see `StagingRing.grow`.
        """
        need = ring_need(self._config, extents, phases)
        if need is not None:
            with ENQUEUE_LOCK, torch.cuda.device(self.queues.device):
                self.queues.begin()
                self.queues.require(self, need)
                self.queues.end()

    def note_call(self) -> None:
        """Notes the beginning of a step, or of a part of one, on the current stream and on the host."""
        current = torch.cuda.current_stream(self.queues.device)
        self._called = CudaOps(self.queues).record(current, timing=True), time.perf_counter()

    def prepare(self, plan: StepPlan, inputs: StepInputs) -> PreparedStep:
        """Does everything of a step that can fail.

        The caller has begun a run of the queues, which ends behind `enqueue`.

        Args:
            plan: the step's plan.
            inputs: the step's inputs, with tensors on this device.
        """
        device = self.queues.device
        device_plan = plan.derived.get(device)
        if device_plan is None:
            device_plan = plan.derived[device] = DevicePlan(plan, device, inputs.rule, inputs.updates, self._config)
        if device_plan.need is not None:
            self.queues.require(self, device_plan.need)
        arrays = None
        if device_plan.operations:
            assert self.queues.ring.work is not None
            address = self.queues.ring.work.memory.data_ptr()
            arrays = Arrays(address, scalars_of(device_plan.operations, inputs))
        aligned = device_plan.table.fill(inputs.updates, arrays)
        ops = CudaOps(self.queues)
        if self._computed is not None:  # the table of the previous step may still be read, on another current stream
            ops.wait(ops.compute, self._computed)
        table, skip_rows = self._upload.send(
            device_plan.table, inputs.skip_rows, ops.compute.cuda_stream, partial(ops.record, ops.compute)
        )
        signals = self._signals(inputs.scaler, skip_rows)
        launches = Launches(device_plan, inputs, table, aligned, signals, self.queues.ring, self.window.blocks)
        launches.compile(self._compiled)
        return PreparedStep(device_plan, launches, inputs.updates.params, inputs.scaler.found_inf)

    def _signals(self, scaler: ScalerInputs, skip_rows: Mapping[int, torch.Tensor]) -> dict[int | None, ScalerSignals]:
        """Signals of each group; under None those of all groups where no step is skipped on the device."""
        if scaler.found_inf is None:
            return {None: ScalerSignals(scaler.grad_scale)}
        return {
            group: ScalerSignals(*scaler, self.skips.on_device(), rows, self.skips.known)
            for group, rows in skip_rows.items()
        }

    def enqueue(self, step: PreparedStep, number: int) -> None:
        """Enqueues a prepared step.

        Args:
            step: the step, or a part of one.
            number: of the step, for its report.
        """
        self._is_enqueueing = True  # and stays so if this raises
        # Kernels write through raw addresses; autograd must still notice that saved parameters change.
        torch.autograd.graph.increment_version(step.params)
        plan, launch, ops = step.plan, step.launches.launch, CudaOps(self.queues)
        ring = self.queues.ring
        if plan.operations:
            assert ring.work is not None
            if ring.work.written_back is not None:
                ops.wait(ops.compute, ring.work.written_back)  # [Note: work memory]
        in_window = self.window.chunks(plan.in_window, launch, ops)
        window_bytes = self.window.nbytes
        began = ops.record(ops.compute, timing=True)
        called, host_began = self._called or (began, time.perf_counter())
        self._called = None
        copies_began = ops.record(ops.h2d, timing=True)
        streamed, behind = step.launches.on_compute_stream()
        written_back = stream_chunks(streamed, ring.slots, ops, self.write_backs.before_copies, in_window)
        ring.rotate(len(streamed))  # the next step, or part of this one, begins with the slot that was free first
        loaded, stored = ops.record(ops.h2d, timing=True), ops.record(ops.d2h, timing=True)
        if plan.in_host_memory:
            launches = [partial(launch, index) for index in plan.in_host_memory]
            written_back = launch_in_host_memory(launches, ops, self.write_backs.before_kernels)
        for enqueue in behind:
            enqueue()
        computed = self._computed = ops.record(ops.compute, timing=True)
        if plan.operations and ring.work is not None:
            ring.work.written_back = computed
        if written_back is not None:
            self.write_backs.note_streamed(written_back, self.window.blocks)
        from_window = self.window.write_back(in_window, ops, computed)
        to_device = (
            Span((began, copies_began), loaded, plan.copied.to_device),
            Span((began,), computed, plan.mapped.to_device),
        )
        to_host = (
            Span((began,), stored, plan.copied.to_host),
            Span((began,), computed, plan.mapped.to_host),
            *from_window,
        )
        prefetched = self.window.take_copies()
        host_ms = (time.perf_counter() - host_began + self.prefetch_host_seconds) * 1e3
        self.prefetch_host_seconds = 0.0
        self.log.add(number, StepMarks(called, computed, prefetched, to_device, to_host, window_bytes, host_ms))
        if step.found_inf is not None:
            self.skips.count(step.found_inf, partial(ops.record, ops.compute))
            self._computed = ops.record(ops.compute)
        self._is_enqueueing = False

    def wait(self) -> None:
        """Drops the window, and waits on the host until all state of this optimizer is written back."""
        self.window.cancel()
        self.queues.settle()
        if self._is_enqueueing:  # a step failed half-way
            self.skips.recount()
            self._is_enqueueing = False
        if self.write_backs.last is not None:
            self.write_backs.last.synchronize()  # [Note: host readers synchronise]
        if self._computed is not None:
            self._computed.synchronize()  # resident state is read by the host too, and skips are counted before this
