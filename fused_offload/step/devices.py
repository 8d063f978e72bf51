"""The devices of one optimizer's parameters, and everything that combines them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch

from fused_offload.config import OffloadConfig
from fused_offload.memory.host_limits import ranks_of_host
from fused_offload.plan.operations import WorkMemory
from fused_offload.plan.planner import StepPlan
from fused_offload.plan.window_blocks import WindowBlock
from fused_offload.profiles import profile_files as profiles
from fused_offload.rules.base import Phase
from fused_offload.state.layout import Layout
from fused_offload.stream.cpu_backend import work_on_cpu
from fused_offload.stream.pipeline import Pipeline, PreparedStep
from fused_offload.stream.queues import CurrentStreams, current_queue
from fused_offload.stream.step_inputs import StepInputs

from .profiler_ranges import profiler_range
from .step_report import StepReport, combined, report_of

_CPU = torch.device("cpu")
_NO_MEMORY = torch.empty(0, dtype=torch.uint8, device=_CPU)


class Devices:
    """Pipelines of CUDA devices, and the CPU.

    Attributes:
        pipelines: pipeline of each CUDA device, made when it is first needed.
    """

    def __init__(self, config: OffloadConfig) -> None:
        """Takes no memory yet."""
        self.pipelines: dict[torch.device, Pipeline] = {}
        self._config = config
        self._cpu_work = _NO_MEMORY
        self._steps = 0
        self._step_is_open = False
        self._reported = 0
        self._report: StepReport | None = None

    def _pipeline(self, device: torch.device) -> Pipeline:
        pipeline = self.pipelines.get(device)
        if pipeline is None:
            pipeline = self.pipelines[device] = Pipeline(device, self._config)
        return pipeline

    # -- steps -------------------------------------------------------------------------------------

    def prepare(self, plan: StepPlan, inputs: StepInputs) -> list[tuple[Pipeline, PreparedStep]]:
        """Does all of a step that can fail.

        The caller holds `ENQUEUE_LOCK` until `enqueue` has returned.

        Args:
            plan: the step's plan.
            inputs: the step's inputs.
        """
        prepared = []
        for device in sorted(plan.chunks_on.keys() - {_CPU}, key=str):
            pipeline = self._pipeline(device)
            with torch.cuda.device(device), profiler_range("prepare"):
                pipeline.queues.begin()
                prepared.append((pipeline, pipeline.prepare(plan, inputs.on(device))))
        needed = plan.work.get(_CPU, WorkMemory()).nbytes
        if needed > self._cpu_work.numel():
            self._cpu_work = torch.empty(needed, dtype=torch.uint8, device=_CPU)
        return prepared

    def begin_step(self, *, has_more_parts: bool) -> None:
        """Begins a step, or the next part of an open one.

        Args:
            has_more_parts: keep the step open for another part.
        """
        if not self._step_is_open:
            self._steps += 1
            for pipeline in self.pipelines.values():
                pipeline.write_backs.begin_step()
        self._step_is_open = has_more_parts

    def end_step(self) -> None:
        """Closes an open step that gets no further part."""
        self._step_is_open = False

    def enqueue(self, prepared: Sequence[tuple[Pipeline, PreparedStep]]) -> None:
        """Enqueues a step on CUDA devices.

        Args:
            prepared: result of `prepare`.
        """
        for pipeline, step in prepared:
            with torch.cuda.device(pipeline.queues.device), profiler_range("stream"):
                pipeline.enqueue(step, self._steps)
            pipeline.queues.end()

    def wait_for_params(self) -> None:
        """Waits on the host until the parameters of the last step are final there; see `Pipeline.wait_for_params`."""
        for pipeline in self.pipelines.values():
            pipeline.wait_for_params()

    def settle_params(self) -> None:
        """Waits, behind a failed step, until nothing writes parameters in host memory any more."""
        for pipeline in self.pipelines.values():
            pipeline.settle_params()

    def run_on_cpu(self, plan: StepPlan, inputs: StepInputs) -> None:
        """Updates the parameters on the CPU.

        Args:
            plan: the step's plan.
            inputs: the step's inputs.
        """
        if _CPU not in plan.chunks_on:
            return
        for run in work_on_cpu(plan, inputs.on(_CPU), self._cpu_work):
            with profiler_range("cpu_chunk"):
                run()

    def compute_queue(self, device: torch.device) -> Hashable:
        """The stream that a step would run its kernels on now, for comparison; None on the CPU."""
        return None if device == _CPU else current_queue(device)

    def current_streams(self) -> CurrentStreams:
        """The caller's current streams on the devices in use."""
        return CurrentStreams(self.pipelines)

    def pending_skips(self) -> int:
        """Number of pending steps."""
        return max([pipeline.skips.pending for pipeline in self.pipelines.values()], default=0)

    def last_step_report(self) -> StepReport | None:
        """The latest completed step, or None."""
        logs = {device: pipeline.log for device, pipeline in self.pipelines.items()}
        numbers = {number for log in logs.values() for number in log.numbers() if number > self._reported}
        if self._step_is_open:
            numbers.discard(self._steps)  # more parts follow
        for number in sorted(numbers, reverse=True):
            steps = {device: log.parts(number) for device, log in logs.items() if log.parts(number)}
            if all(part.has_ended for parts in steps.values() for part in parts):
                link_gbps = {device: _link_gbps(device, len(steps)) for device in steps}
                self._report = combined([report_of(parts, link_gbps[device]) for device, parts in steps.items()])
                self._reported = number
                break
        return self._report

    # -- GPU memory --------------------------------------------------------------------------------

    def reserve(
        self,
        extents: Sequence[tuple[Layout, int]],
        phases: Sequence[Phase],
        work: Mapping[torch.device, WorkMemory],
    ) -> None:
        """Allocates the rings for state that streams, and work memory; see `Pipeline.reserve`.

        Args:
            extents: layout and number of elements of each extent.
            phases: phases of the rule.
            work: work memory of the operations on each device.
        """
        streamed = [(layout, n) for layout, n in extents if not layout.resident]
        for device in sorted(({layout.device for layout, _ in streamed} | work.keys()) - {_CPU}, key=str):
            here = [(layout, n) for layout, n in streamed if layout.device == device]
            self._pipeline(device).reserve(here, phases, work.get(device, WorkMemory()).nbytes)

    def note_call(self) -> None:
        """Records the beginning of a step or a part, for its report."""
        for pipeline in self.pipelines.values():
            pipeline.note_call()

    def prefetch(self, blocks: Sequence[WindowBlock]) -> None:
        """Enqueues the prefetch of blocks; see `Window.prefetch`.

        Args:
            blocks: blocks to load, in order.
        """
        with profiler_range("prefetch"):
            for device in dict.fromkeys(block.extent.layout.device for block in blocks):
                if device == _CPU:
                    continue
                here = [block for block in blocks if block.extent.layout.device == device]
                self._pipeline(device).window.prefetch(here)

    def window(self) -> tuple[WindowBlock, ...]:
        """Blocks that are on a GPU or on their way there."""
        return tuple([block for pipeline in self.pipelines.values() for block in pipeline.window.blocks])

    def prefetch_seconds(self) -> float | None:
        """Time from the first to the last copy of the last prefetch that has completed, or None."""
        seconds = [pipeline.window.seconds() for pipeline in self.pipelines.values()]
        return max([known for known in seconds if known is not None], default=None)

    def cancel_prefetch(self) -> None:
        """Discards prefetched blocks."""
        for pipeline in self.pipelines.values():
            pipeline.window.cancel()

    def allocators(self) -> list[dict[str, Any]]:
        """Statistics of torch's allocator on the devices in use that have any."""
        # As nested dictionaries: torch needs longer to make flat ones.
        stats = [torch.cuda.memory_stats_as_nested_dict(device) for device in self.pipelines]
        return [known for known in stats if known]

    def ring_bytes(self) -> int:
        """Bytes of the rings of the devices in use."""
        return sum(pipeline.queues.ring.nbytes for pipeline in self.pipelines.values())

    def work_bytes(self) -> int:
        """Bytes of work memory on the devices in use."""
        return sum(pipeline.queues.ring.work_bytes for pipeline in self.pipelines.values())

    def step_bytes(self) -> int:
        """GPU memory that the last step took and gave back."""
        return sum(pipeline.step_bytes for pipeline in self.pipelines.values())

    def wait(self) -> None:
        """Waits until all state is written back."""
        with profiler_range("wait"):
            for pipeline in self.pipelines.values():
                pipeline.wait()

    def release(self) -> None:
        """Frees the rings and windows of all devices."""
        for pipeline in self.pipelines.values():
            pipeline.window.cancel()
            pipeline.queues.release()
        self._cpu_work = _NO_MEMORY

    def close(self) -> None:
        """Waits, and drops the pipelines of all devices; the report of the last step stays."""
        self.wait()
        for device in self.pipelines:
            torch.cuda.synchronize(device)  # the report reads events behind all that `wait` waits for
        self.last_step_report()
        self.pipelines.clear()


def _link_gbps(device: torch.device, devices: int) -> float | None:
    """Measured speed of plain copies while all GPUs of this host step; see `StepReport.link_share`.

    Args:
        device: the device.
        devices: number of devices of this rank.
    """
    profile, ranks = profiles.of(device), _ranks_of_host()
    if profile is None or ranks is None:
        return None
    link = profile.link_of(ranks * devices)
    return link.gbps if link.gpus >= ranks * devices else None


def _ranks_of_host() -> int | None:
    """Number of ranks of this job on this host, or None if the launcher does not say it."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return 1
    return ranks_of_host() or (1 if torch.distributed.get_world_size() == 1 else None)
