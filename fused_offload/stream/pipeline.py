"""Runs a plan through the ring. Only this module and `queues.py` have streams and events.

::

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

[Note: host readers synchronise] ``state``, ``state_dict``, ``load_state_dict`` and ``get_unscaled_state`` call
`Pipeline.wait` before they touch a slab.

[Note: lifetime] Slabs and slots outlive every copy: slots belong to the ring, which is released only after both copy
streams are idle, and slabs wait for the device before they are unregistered. So slots need no ``record_stream``, and a
steady step without a window allocates nothing.

[Note: half a step] After an exception anywhere in a step the numbers of other optimizers stay right: the next user of
the device's queues waits for all that is under way ([Note: interrupted runs] in `queues.py`). The optimizer itself is
marked as failed from its first change to its last (`Stepper.run`), and takes no further step before state is loaded.

[Note: grads are inputs] The kernel never writes a gradient.

[Note: all or nothing] Whatever can fail (checks, the ring, the table's memory, compiling and loading) happens in
`Pipeline.prepare`, before the first launch.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from fused_offload.config import OffloadConfig
from fused_offload.kernels.launch import ScalerSignals
from fused_offload.memory.forks import keep_in_children
from fused_offload.memory.staging_ring import ENQUEUE_LOCK, Slot
from fused_offload.plan.planner import StepPlan
from fused_offload.plan.window_blocks import WindowBlock, WriteBacks
from fused_offload.state.layout import Layout

from .copies import bytes_of
from .device_plan import DevicePlan, ring_need
from .launches import Launches
from .queues import CudaOps, DeviceQueues
from .schedule import (
    Event,
    LoadedBlock,
    StreamedChunk,
    WindowChunk,
    launch_in_host_memory,
    load_block,
    stream_chunks,
    write_back_window,
)
from .skip_counter import SkipCounter
from .step_inputs import ScalerInputs, StepInputs
from .step_upload import UploadBuffer
from .timing import Span, StepLog, StepMarks


class PreparedStep(NamedTuple):
    """A step of which everything that can fail is done.

    Attributes:
        plan: the device's plan.
        launch: ``(chunk index, slot index)``, enqueues that chunk's kernel.
        params: parameters that the step changes.
        found_inf: signal to count a skip by, or None.
    """

    plan: DevicePlan
    launch: Callable[[int, int], None]
    params: list[torch.Tensor]
    found_inf: torch.Tensor | None


class Pipeline:
    """Steps of one optimizer on one device.

    Attributes:
        queues: what it shares with other optimizers.
        skips: counts steps that the device skipped.
        log: timing events of the last steps.
    """

    def __init__(self, device: torch.device, config: OffloadConfig) -> None:
        """Takes no GPU memory yet."""
        self.queues = DeviceQueues.of(device)
        self.skips = SkipCounter(device)
        self.log = StepLog()
        self._config = config
        self._upload = UploadBuffer(device)
        self._compiled: set[Any] = set()
        self._window: dict[WindowBlock, LoadedBlock] = {}
        self._write_backs = WriteBacks()
        self._computed: torch.cuda.Event | None = None
        self._is_enqueueing = False
        self._warned_small_window = False
        self._prefetched: list[Span] = []
        self._prefetch_began: torch.cuda.Event | None = None
        self._prefetch_ended: torch.cuda.Event | None = None
        self._prefetch_seconds: float | None = None
        keep_in_children(self)

    @property
    def window(self) -> tuple[WindowBlock, ...]:
        """Blocks that are on the GPU or on their way there."""
        return tuple(self._window)

    def prefetch(self, blocks: Sequence[WindowBlock]) -> None:
        """Enqueues the prefetch of blocks that are not on their way yet; ends early where GPU memory does.

        Args:
            blocks: what to load, in order.
        """
        missing = [block for block in blocks if block not in self._window]
        if not missing:
            return
        with ENQUEUE_LOCK, torch.cuda.device(self.queues.device):
            self.queues.begin()
            ops = CudaOps(self.queues)
            ops.wait(ops.h2d, ops.record(ops.compute))  # the time that the device needs to get here is not its own
            began = ops.record(ops.h2d, timing=True)
            if not self._window:
                self._prefetch_began, self._prefetch_ended = began, None
            nbytes = 0
            for block in missing:
                memory = self._window_memory(block.nbytes)
                if memory is None:
                    break
                memory.record_stream(self.queues.h2d)
                loaded = load_block(block, Slot(memory), ops, self._write_backs.of_block(block))
                self._window[block] = loaded
                nbytes += loaded.nbytes
            self._prefetch_ended = ops.record(ops.h2d, timing=True)
            self._prefetched.append(Span((began,), self._prefetch_ended, nbytes))
            self.queues.end()

    def in_parts(self, open_: bool) -> None:
        """Says that steps from now on share no state, or that they may again; see `WriteBacks.in_parts`.

        Args:
            open_: whether they are parts of one step.
        """
        self._write_backs.in_parts(open_)

    def prefetch_seconds(self) -> float | None:
        """How long the last prefetch took from its first to its last copy, once that is known."""
        began, ended = self._prefetch_began, self._prefetch_ended
        if began is not None and ended is not None and ended.query():
            self._prefetch_seconds = began.elapsed_time(ended) / 1e3
        return self._prefetch_seconds

    def _window_memory(self, nbytes: int) -> torch.Tensor | None:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=self.queues.device)
        except torch.OutOfMemoryError:
            if not self._warned_small_window:
                self._warned_small_window = True
                warnings.warn(
                    "Out of GPU memory while growing the window of optimizer state: what did not fit is streamed in "
                    "the step, which takes longer. Set a smaller OffloadConfig(window_bytes=...).",
                    stacklevel=2,
                )
            return None

    def cancel_prefetch(self) -> None:
        """Drops the window; state on the host is what it was."""
        self._window.clear()
        self._prefetched.clear()

    def reserve(self, extents: Sequence[tuple[Layout, int]]) -> None:
        """Takes the ring that steps are going to need.

        Args:
            extents: layout and elements of each extent that streams.

        Raises:
            RuntimeError: if the GPU has too little memory; see `StagingRing.grow`.
        """
        need = ring_need(self._config, extents)
        if need is not None:
            with ENQUEUE_LOCK, torch.cuda.device(self.queues.device):
                self.queues.begin()
                self.queues.require(self, need)
                self.queues.end()

    def prepare(self, plan: StepPlan, inputs: StepInputs) -> PreparedStep:
        """Does everything of a step that can fail. The caller has begun a run of the queues, which ends behind `run`.

        Args:
            plan: the step's plan.
            inputs: the step's inputs, with tensors on this device.
        """
        device = self.queues.device
        device_plan = plan.derived.get(device)
        if device_plan is None:
            device_plan = plan.derived[device] = DevicePlan(
                plan, plan.chunks_of(device), inputs.rule, inputs.updates, self._config
            )
        if device_plan.need is not None:
            self.queues.require(self, device_plan.need)
        aligned = device_plan.table.fill(inputs.updates)
        ops = CudaOps(self.queues)
        if self._computed is not None:  # the table of the previous step may still be read, on another current stream
            ops.wait(ops.compute, self._computed)
        found_inf = inputs.scaler.found_inf
        table, skip_rows = self._upload.send(
            device_plan.table,
            inputs.skip_rows if found_inf is not None else {},
            ops.compute.cuda_stream,
            lambda: ops.record(ops.compute),
        )
        launches = Launches(device_plan, inputs, table, aligned, self._signals(inputs.scaler, skip_rows))

        def launch(index: int, slot_index: int) -> None:
            launches.launch(index, device_plan.state(index, slot_index, inputs.rule, self.queues.ring, self._window))

        if device_plan.compiled_for != launches.compiled_for:
            for index in range(len(device_plan.kinds)):
                state = device_plan.state(index, 0, inputs.rule, self.queues.ring, self._window)
                launches.compile(index, state, self._compiled)
            device_plan.compiled_for = launches.compiled_for
        return PreparedStep(device_plan, launch, inputs.updates.params, found_inf)

    def _signals(self, scaler: ScalerInputs, skip_rows: Mapping[int, torch.Tensor]) -> dict[int | None, ScalerSignals]:
        """Signals of each group; under None those of all groups where no step is skipped on the device."""
        if scaler.found_inf is None:
            return {None: ScalerSignals(scaler.grad_scale)}
        return {
            group: ScalerSignals(*scaler, self.skips.on_device(), rows, self.skips.known)
            for group, rows in skip_rows.items()
        }

    def _enqueue(
        self,
        step: PreparedStep,
        ops: CudaOps,
        previous: Sequence[Event],
        previous_blocks: Sequence[Event],
        window: Sequence[WindowChunk],
    ) -> tuple[Event | None, tuple[torch.cuda.Event, ...]]:
        """Enqueues all kernels of a step and the copies of its chunks.

        Args:
            step: the step.
            ops: queues of the device.
            previous: last write-backs of what streamed chunks read.
            previous_blocks: last write-backs of what zero-copy kernels read.
            window: chunks of the window.

        Returns:
            Event of the last write-back, or None if there was none; timing events behind the chunks' copies, to the
            device and to the host.
        """
        plan = step.plan
        streamed = [
            StreamedChunk(transfer, partial(step.launch, index))
            for index, transfer in enumerate(plan.transfers)
            if transfer is not None
        ]
        written_back = stream_chunks(streamed, self.queues.ring.slots, ops, previous, window)
        copies_ended = tuple(ops.record(stream, timing=True) for stream in (ops.h2d, ops.d2h))
        in_host_memory = [
            partial(step.launch, index, 0) for index, kind in enumerate(plan.kinds) if kind.max_programs is not None
        ]
        if in_host_memory:
            written_back = launch_in_host_memory(in_host_memory, ops, previous_blocks)
        for index, kind in enumerate(plan.kinds):
            if kind.extent.layout.resident:
                step.launch(index, 0)
        return written_back, copies_ended

    def run(self, step: PreparedStep, number: int) -> None:
        """Enqueues a prepared step.

        Args:
            step: the step, or a part of one.
            number: of the step, for its report.
        """
        self._is_enqueueing = True  # and stays so if this raises
        # Kernels write through raw addresses; autograd must still notice that saved parameters change.
        torch.autograd.graph.increment_version(step.params)
        self.log.add(number, self._run(step))
        if step.found_inf is not None:
            ops = CudaOps(self.queues)
            self.skips.count(step.found_inf, lambda: ops.record(ops.compute))
            self._computed = ops.record(ops.compute)
        self._is_enqueueing = False

    def _run(self, step: PreparedStep) -> StepMarks:
        plan = step.plan
        ops = CudaOps(self.queues)
        window = [self._window_chunk(step, index, ops) for index in plan.window_copies]
        window_bytes = sum(block.nbytes for block in self._window)
        previous = self._write_backs.of_streamed(self._window)
        began = ops.record(ops.compute, timing=True)
        copies_began = ops.record(ops.h2d, timing=True)
        previous_blocks = self._write_backs.of_host_memory(self._window)
        written_back, copies_ended = self._enqueue(step, ops, previous, previous_blocks, window)
        computed = self._computed = ops.record(ops.compute, timing=True)
        copied = Span((began, copies_began), copies_ended[0], plan.copied.to_device)
        mapped = Span((began,), computed, plan.mapped.to_device)
        to_host = (
            Span((began,), copies_ended[1], plan.copied.to_host),
            Span((began,), computed, plan.mapped.to_host),
            *self._write_back(written_back, window, ops, computed),
        )
        marks = StepMarks(began, computed, tuple(self._prefetched), (copied, mapped), to_host, window_bytes)
        self._prefetched.clear()
        return marks

    def _window_chunk(self, step: PreparedStep, index: int, ops: CudaOps) -> WindowChunk:
        block = step.plan.kinds[index].block
        assert block is not None
        loaded = self._window[block]
        for stream in (ops.compute, ops.d2h):
            loaded.slot.memory.record_stream(stream)  # [Note: window memory]
        return WindowChunk(loaded, lambda: step.launch(index, 0), step.plan.window_copies[index])

    def _write_back(
        self, streamed: Any, window: list[WindowChunk], ops: CudaOps, computed: torch.cuda.Event
    ) -> tuple[Span, ...]:
        """Writes the window back, giving each block's memory away behind its own copies, and remembers the events.

        Args:
            streamed: event of the last write-back of streamed chunks, or None.
            window: chunks of the window; emptied.
            ops: queues of the device.
            computed: event behind all kernels.

        Returns:
            The copies of the window, if it has any.
        """
        if streamed is not None:
            self._write_backs.note_streamed(streamed, self._window)
        pending = Counter(chunk.loaded.block for chunk in window)
        for block in self._window.keys() - pending.keys():
            del self._window[block]  # none of its parameters had a gradient

        def written(block: WindowBlock, event: Any) -> None:
            self._write_backs.note_block(block, event)
            pending[block] -= 1
            if not pending[block]:
                del self._window[block]

        if not window:
            return ()
        nbytes = sum(bytes_of(chunk.to_host) for chunk in window)
        began = computed, ops.record(ops.d2h, timing=True)
        window.reverse()
        write_back_window((window.pop() for _ in range(len(window))), ops, written)
        return (Span(began, ops.record(ops.d2h, timing=True), nbytes),)

    def wait(self) -> None:
        """Drops the window, and waits on the host until all state of this optimizer is written back."""
        self.cancel_prefetch()
        self.queues.settle()
        if self._is_enqueueing:  # a step failed half-way
            self.skips.recount()
            self._is_enqueueing = False
        if self._write_backs.last is not None:
            self._write_backs.last.synchronize()  # [Note: host readers synchronise]
        if self._computed is not None:
            self._computed.synchronize()  # resident state is read by the host too, and skips are counted before this
