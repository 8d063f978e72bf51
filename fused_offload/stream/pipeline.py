"""The pipeline of one device: chunks of a step on their way through the ring.

docs/design.md, section 6, shows the order of copies, kernels and events. The invariants:

[Note: slot reuse] A slot is overwritten only after its own ``written_back``. The event stays with
the slot, so this holds across steps and across optimizers that share the ring.

[Note: next step reads what this one wrote] Before state is copied to the device, the H2D stream
waits for the last write-back of that state only. A window block has an event of its own. All other
state is written back with the last streamed chunk, since the D2H stream is in order. Zero-copy
kernels wait for window blocks on the compute stream. The D2H stream waits for these kernels, so the
same events cover what they wrote.

[Note: window last] Window blocks are written back behind all streamed chunks. Their copies run
under the next forward pass. In front of the streamed chunks they would delay the reuse of slots,
and with it the step.

[Note: window memory] A block's memory is allocated on the current stream. This has to be the stream
of the forward pass, whose memory pool is the only one that activations return to. So the H2D stream
waits for earlier work of that stream. The memory is marked as used by the copy streams, and dropped
as soon as its write-back is enqueued. The allocator reuses it when these streams are done with it.

[Note: work memory] Operations between two phases, and the kernels that fill and read their arrays,
run on the caller's stream in the plan's order. So parameters of one step share work memory without
events. The next step may run on another stream, or belong to another optimizer: it waits for the
last kernel of the previous step.

[Note: quantised parameters] Kernels write exact float32 values into memory of the step, in the
parameter's place, and its class quantises them behind the last of its chunks. The memory is as
large as the largest such parameter: one is open at a time, so their chunks have one order, those in
the window included. It is allocated on the caller's stream and dropped with the step. So it needs
no event, and between steps activations take its place. A call that fails, for instance for lack of
memory, leaves the step half done.

[Note: host readers synchronise] ``state``, ``state_dict``, ``load_state_dict`` and
``get_unscaled_state`` call `Pipeline.wait` before they touch a slab. State that stays on the device
has no event before its first step: the host waits until it is zero-filled (`Extent`).

[Note: lifetime] Slabs and slots outlive every copy: slots belong to the ring, which is released
only after both copy streams are idle, and slabs wait for the device before they are unregistered.
So slots need no ``record_stream``, and a steady step without a window allocates nothing.

[Note: half a step] An exception anywhere in a step does not corrupt other optimizers: the next user
of the device's queues waits for the whole device ([Note: interrupted runs] in `queues.py`). The
optimizer itself counts as failed from the first change of a step to the last (`Stepper.step`), and
refuses further steps until state is loaded.

[Note: grads are inputs] The kernel never writes a gradient.

[Note: parameters in host memory] Others copy gradients there, and parameters from there, on
streams that are not known here (FSDP's ``CPUOffloadPolicy``). So the host waits for the device
before the first copy of such a step, and at the end of the step until its parameters are back.
Whoever reads them next, on the host or by a copy, finds the new ones. A slot brings parameters back
before its state, which may still be under way when the step ends.

[Note: all or nothing] Checks, the ring, the table's memory, compiling and loading happen in
`Pipeline.prepare`, before the first launch. A copy or launch that the driver refuses later leaves
half a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from fused_offload.config import OffloadConfig
from fused_offload.kernels.launch import ScalerSignals
from fused_offload.memory.forks import keep_in_children
from fused_offload.memory.staging_ring import ENQUEUE_LOCK, Slot
from fused_offload.params.quantised import prepare_to_quantise
from fused_offload.plan.planner import StepPlan
from fused_offload.rules.base import Phase
from fused_offload.state.layout import Layout

from .address_table import Arrays
from .device_plan import DevicePlan, ring_need
from .launches import Launches
from .operations import scalars_of, step_memory
from .prefetch import Window
from .queues import CudaOps, DeviceQueues
from .schedule import launch_in_host_memory, launch_window, stream_chunks
from .skip_counter import SkipCounter
from .step_inputs import ScalerInputs, StepInputs
from .step_upload import UploadBuffer
from .timing import Call, Span, StepLog, StepMarks
from .write_backs import WriteBacks


class PreparedStep(NamedTuple):
    """Result of `Pipeline.prepare`: a step on one device, ready to be enqueued.

    Attributes:
        plan: the device's plan.
        ops: queues of the device.
        launches: launches of its chunks.
        params: parameters that the step changes.
        found_inf: one-element tensor, nonzero if the step is skipped, or None.
    """

    plan: DevicePlan
    ops: CudaOps
    launches: Launches
    params: list[torch.Tensor]
    found_inf: torch.Tensor | None


class Pipeline:
    """Steps of one optimizer on one device.

    Attributes:
        queues: copy streams and ring, shared with other optimizers.
        window: prefetched state.
        write_backs: events of the write-backs.
        skips: counter of the steps that the device skipped.
        log: timing events of the last steps.
        step_bytes: GPU memory that the last step took for quantised parameters and gave back.
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
        self._params_written: torch.cuda.Event | None = None
        self._steps_host_params = False
        self._call: Call | None = None
        self.step_bytes = 0
        self._is_enqueueing = False
        keep_in_children(self)

    def reserve(self, extents: Sequence[tuple[Layout, int]], phases: Sequence[Phase], work_bytes: int) -> None:
        """Allocates the ring and the work memory that steps will need.

        Args:
            extents: layout and elements of each extent that streams.
            phases: phases of the rule.
            work_bytes: bytes of the work memory.

        Raises:
            RuntimeError: if the GPU has too little memory; see `StagingRing.grow`.
        """
        sizes = [(layout, numel, layout.param_dtype) for layout, numel in extents]
        need = ring_need(self._config, sizes, phases, work_bytes)
        if need is not None:
            with ENQUEUE_LOCK, torch.cuda.device(self.queues.device):
                self.queues.begin()
                self.queues.require(self, need)
                self.queues.end()

    def note_call(self) -> None:
        """Records the beginning of a step or a part, on the current stream and on the host."""
        self._call = Call.begin(CudaOps(self.queues))

    def prepare(self, plan: StepPlan, inputs: StepInputs) -> PreparedStep:
        """Does all of a step that can fail.

        The caller has called `DeviceQueues.begin`, and calls `DeviceQueues.end` after `enqueue`.

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
        work = self._work_memory(device_plan, inputs)
        arrays = None
        if work is not None:
            arrays = Arrays(work.memory.data_ptr(), scalars_of(device_plan.operations, inputs))
        slots = tuple([slot.memory.data_ptr() for slot in self.queues.ring.slots]) if device_plan.host_params else ()
        aligned = device_plan.table.fill(inputs.updates, arrays, slots)
        ops = CudaOps(self.queues)
        # Kernels of the previous step may still read its table, on another current stream.
        if self._computed is not None:
            ops.wait(ops.compute, self._computed)
        table, skip_rows = self._upload.send(
            device_plan.table, inputs.skip_rows, ops.compute.cuda_stream, partial(ops.record, ops.compute)
        )
        signals = self._signals(inputs.scaler, skip_rows)
        launches = Launches(device_plan, inputs, table, aligned, signals, self.queues.ring, self.window.blocks, work)
        launches.compile(self._compiled)
        self._steps_host_params = bool(device_plan.host_params)
        if device_plan.host_params:
            torch.cuda.synchronize(device)  # [Note: parameters in host memory]
        return PreparedStep(device_plan, ops, launches, inputs.updates.params, inputs.scaler.found_inf)

    def _work_memory(self, plan: DevicePlan, inputs: StepInputs) -> Slot | None:
        """Work memory of the step's operations, or None."""
        self.step_bytes = plan.work.nbytes if plan.quantises else 0
        if plan.quantises:
            for operation in plan.operations:
                prepare_to_quantise(inputs.updates.params[operation.segment])
            return Slot(step_memory(plan.work.nbytes, self.queues.device))  # [Note: quantised parameters]
        return self.queues.ring.work if plan.operations else None

    def _signals(self, scaler: ScalerInputs, skip_rows: Mapping[int, torch.Tensor]) -> dict[int | None, ScalerSignals]:
        """Signals by group, or for all groups under None if the device skips no steps."""
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
            number: number of the step, for its report.
        """
        self._is_enqueueing = True  # and stays so if this raises
        # Kernels write to raw addresses, so autograd is told that the parameters change.
        torch.autograd.graph.increment_version(step.params)
        plan, launch, ops = step.plan, step.launches.launch, step.ops
        ring = self.queues.ring
        work = step.launches.work
        if work is not None and work.written_back is not None:
            ops.wait(ops.compute, work.written_back)  # [Note: work memory]
        in_window = self.window.chunks(plan.in_window, launch, ops)
        window_bytes = self.window.nbytes
        began = ops.record(ops.compute, timing=True)
        call, self._call = self._call or Call.begin(ops), None
        copies_began = ops.record(ops.h2d, timing=True)
        in_order = {}
        if plan.quantises:
            in_order = {
                index: partial(launch_window, [chunk], ops)
                for (index, *_), chunk in zip(plan.in_window, in_window, strict=True)
            }
        chunks, behind = step.launches.on_compute_stream(in_order)
        previous, between = self.write_backs.before_copies, () if in_order else in_window
        filled, written_back, self._params_written = stream_chunks(chunks, ring.slots, ops, previous, between)
        filling = sum(chunk.bytes_to_device for chunk in chunks[: len(ring.slots)])
        ring.rotate(len(chunks))  # the next step or part begins with the slot that is free first
        loaded, stored = ops.record(ops.h2d, timing=True), ops.record(ops.d2h, timing=True)
        if plan.in_host_memory:
            launches = [partial(launch, index) for index in plan.in_host_memory]
            written_back = launch_in_host_memory(launches, ops, self.write_backs.before_kernels)
        for enqueue in behind:
            enqueue()
        computed = self._computed = ops.record(ops.compute, timing=True)
        if work is not None:
            work.written_back = computed
        if written_back is not None:
            self.write_backs.note_streamed(written_back, self.window.blocks)
        from_window = self.window.write_back(in_window, ops, computed)
        to_device = (
            Span((copies_began,), filled or copies_began, filling),
            Span((began, filled or copies_began), loaded, plan.copied.to_device - filling),
            Span((began,), computed, plan.mapped.to_device),
        )
        to_host = (
            Span((began,), stored, plan.copied.to_host),
            Span((began,), computed, plan.mapped.to_host),
            *from_window,
        )
        if step.found_inf is not None:
            self.skips.count(step.found_inf, partial(ops.record, ops.compute))
            self._computed = ops.record(ops.compute)
        prefetched = self.window.take_prefetches()
        self.log.add(number, StepMarks(call.end(ops), prefetched, to_device, to_host, window_bytes))
        self._is_enqueueing = False

    def wait_for_params(self) -> None:
        """Waits on the host until the last step's parameters are there; see [Note: parameters in host memory]."""
        if self._params_written is not None:
            self._params_written.synchronize()

    def settle_params(self) -> None:
        """Waits until the device is through with a failed step of parameters in host memory.

        Whoever loads a checkpoint writes them from the host, which no stream waits for.
        """
        if self._steps_host_params:
            self.queues.settle()
            self.wait_for_params()

    def wait(self) -> None:
        """Drops the window, and waits until all state of this optimizer is written back."""
        self.window.cancel()
        self.queues.settle()
        if self._is_enqueueing:  # a step failed while it was enqueued
            self.skips.recount()
            self._is_enqueueing = False
        if self.write_backs.last is not None:
            self.write_backs.last.synchronize()  # [Note: host readers synchronise]
        if self._computed is not None:
            self._computed.synchronize()  # covers resident state and the count of skips
