"""Runs a plan on whatever devices its parameters live on."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fused_offload.config import OffloadConfig
from fused_offload.memory.staging_ring import ENQUEUE_LOCK
from fused_offload.plan.planner import StepPlan, extent_of
from fused_offload.plan.window_blocks import WindowBlock
from fused_offload.profiles import profile_files as profiles
from fused_offload.state.layout import Layout
from fused_offload.stream.cpu_backend import run_chunk
from fused_offload.stream.step_inputs import StepInputs

from .profiler_ranges import phase
from .step_report import StepReport, combined, report_of

if TYPE_CHECKING:
    from fused_offload.stream.pipeline import Pipeline
    from fused_offload.stream.queues import CurrentStreams

_CPU = torch.device("cpu")


class Engine:
    """Runs plans: on CUDA devices by a pipeline each, on the CPU by a loop.

    Attributes:
        pipelines: pipeline of each CUDA device, made when the first parameter on it is stepped.
    """

    def __init__(self, config: OffloadConfig) -> None:
        """Takes no memory yet."""
        self._config = config
        self.pipelines: dict[torch.device, Pipeline] = {}
        self._steps = 0
        self._in_parts = self._step_is_open = False
        self._reported = 0
        self._report: StepReport | None = None

    def run(self, plan: StepPlan, inputs: StepInputs, launching: Callable[[], None]) -> None:
        """Enqueues one step.

        Args:
            plan: the step's plan.
            inputs: the step's inputs.
            launching: called when everything that can fail is done, right before the first change.
        """
        devices = sorted({extent_of(chunk).layout.device for chunk in plan.chunks} - {_CPU}, key=str)
        with ENQUEUE_LOCK:
            prepared = []
            for device in devices:
                pipeline = self._pipeline(device)
                with torch.cuda.device(device), phase("prepare"):
                    pipeline.queues.begin()
                    step = pipeline.prepare(plan, inputs.on(device))
                prepared.append((pipeline, step))
            launching()
            if not self._step_is_open:
                self._steps += 1
            self._step_is_open = self._in_parts
            for pipeline, step in prepared:
                with torch.cuda.device(pipeline.queues.device), phase("stream"):
                    pipeline.run(step, self._steps)
                # The next step, or the next part of this one, begins with the slot that was free first.
                pipeline.queues.ring.rotate(sum(transfer is not None for transfer in step.plan.transfers))
                pipeline.queues.end()
        cpu_chunks = plan.chunks_of(_CPU)
        if cpu_chunks:
            inputs = inputs.on(_CPU)
        for chunk in cpu_chunks:
            with phase("cpu_chunk"):
                run_chunk(chunk, plan, inputs)

    def _pipeline(self, device: torch.device) -> Pipeline:
        if device not in self.pipelines:
            from fused_offload.stream.pipeline import Pipeline  # needs Triton, which parameters on the CPU do not

            self.pipelines[device] = Pipeline(device, self._config)
        return self.pipelines[device]

    def reserve(self, extents: Sequence[tuple[Layout, int]]) -> None:
        """Takes the staging for state that streams; see `Pipeline.reserve`.

        Args:
            extents: layout and elements of each extent.
        """
        streamed = [(layout, n) for layout, n in extents if not layout.resident and layout.device != _CPU]
        for device in sorted({layout.device for layout, _ in streamed}, key=str):
            self._pipeline(device).reserve([(layout, n) for layout, n in streamed if layout.device == device])

    def compute_queue(self, device: torch.device) -> Hashable:
        """The queue of a device in which a step would run its kernels now."""
        if device == _CPU:
            return None
        from fused_offload.stream.queues import CudaOps

        return CudaOps(self._pipeline(device).queues).compute.cuda_stream

    def current_streams(self) -> CurrentStreams:
        """The current streams of the devices in use."""
        from fused_offload.stream.queues import CurrentStreams

        return CurrentStreams(self.pipelines)

    def in_parts(self, open_: bool) -> None:
        """Says that plans which are run from now on share no state, or that they may again.

        Args:
            open_: whether they are parts of one step.
        """
        self._in_parts = open_
        if not open_:
            self._step_is_open = False
        for pipeline in self.pipelines.values():
            pipeline.in_parts(open_)

    def window(self) -> tuple[WindowBlock, ...]:
        """Blocks of state that are on a GPU or on their way there."""
        return tuple(block for pipeline in self.pipelines.values() for block in pipeline.window)

    def prefetch(self, blocks: Sequence[WindowBlock]) -> None:
        """Starts to load blocks of state; see `Pipeline.prefetch`.

        Args:
            blocks: what to load, in order.
        """
        with phase("prefetch"):
            for device in dict.fromkeys(block.extent.layout.device for block in blocks):
                if device == _CPU:
                    continue
                self._pipeline(device).prefetch([block for block in blocks if block.extent.layout.device == device])

    def prefetch_seconds(self) -> float | None:
        """How long the last prefetch took from its first to its last copy, once that is known."""
        known = [
            seconds for pipeline in self.pipelines.values() if (seconds := pipeline.prefetch_seconds()) is not None
        ]
        return max(known, default=None)

    def allocated_bytes(self) -> int:
        """GPU bytes that are allocated on the devices in use."""
        return sum(stats["allocated_bytes"]["all"]["current"] for stats in self._allocators())

    def allocation_retries(self) -> int:
        """How often torch's allocator ran out of memory on the devices in use, and waited for some."""
        return sum(stats["num_alloc_retries"] for stats in self._allocators())

    def _allocators(self) -> list[dict[str, Any]]:
        # As torch keeps them: torch.cuda.memory_allocated sorts all of them into a flat dictionary first.
        stats = [torch.cuda.memory_stats_as_nested_dict(device) for device in self.pipelines]
        return [known for known in stats if known]

    def last_step_report(self) -> StepReport | None:
        """The last step that all devices are through with, or None."""
        logs = {device: pipeline.log for device, pipeline in self.pipelines.items()}
        numbers = {number for log in logs.values() for number in log.numbers() if number > self._reported}
        if self._step_is_open:
            numbers.discard(self._steps)  # more parts follow
        for number in sorted(numbers, reverse=True):
            steps = {device: log.parts(number) for device, log in logs.items() if log.parts(number)}
            if all(part.has_ended for parts in steps.values() for part in parts):
                self._report = combined([report_of(parts, _link_gbps(device)) for device, parts in steps.items()])
                self._reported = number
                break
        return self._report

    def cancel_prefetch(self) -> None:
        """Drops what was prefetched."""
        for pipeline in self.pipelines.values():
            pipeline.cancel_prefetch()

    def pending_skips(self) -> int:
        """Steps of which the host does not know yet whether the device skipped them."""
        return max((pipeline.skips.pending for pipeline in self.pipelines.values()), default=0)

    def wait_for_skips(self) -> None:
        """Waits on the host until the outcome of every step is known; `known_skips` takes them in."""
        for pipeline in self.pipelines.values():
            pipeline.skips.wait()

    def known_skips(self) -> int:
        """Number of skipped steps that the host knows of, without waiting unless it is far ahead.

        Devices only skip on their own where all parameters are on one.
        """
        return sum(pipeline.skips.learn(room=True) for pipeline in self.pipelines.values())

    def last_was_skipped(self) -> bool:
        """Whether the device skipped the last step of which the host knows the outcome."""
        return any(pipeline.skips.last_was_skipped for pipeline in self.pipelines.values())

    def wait(self) -> None:
        """Waits on the host until all state is written back."""
        with phase("wait"):
            for pipeline in self.pipelines.values():
                pipeline.wait()

    def release(self) -> None:
        """Gives the staging of all devices back."""
        for pipeline in self.pipelines.values():
            pipeline.cancel_prefetch()
            pipeline.queues.release()

    def close(self) -> None:
        """Waits and drops everything on the devices."""
        self.wait()
        self.pipelines.clear()

    def ring_bytes(self) -> int:
        """GPU staging bytes of the devices in use."""
        return sum(pipeline.queues.ring.nbytes for pipeline in self.pipelines.values())


def _link_gbps(device: torch.device) -> float | None:
    profile = profiles.of(device)
    return None if profile is None else profile.duplex_gbps
