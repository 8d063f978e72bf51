"""What the report of a step says, from events at known times."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from test_tune import PROFILE

from fused_offload import FusedOffloadAdam, OffloadConfig
from fused_offload.plan import planner
from fused_offload.plan.window_blocks import blocks_of
from fused_offload.profiles import profile_files as profiles
from fused_offload.profiles.profile_files import Found
from fused_offload.step.devices import Devices
from fused_offload.step.step_report import combined, report_of
from fused_offload.stream.timing import Hold, Prefetch, Span, StepLog, StepMarks
from fused_offload.stream.write_backs import WriteBacks

if TYPE_CHECKING:
    from simulated_device import SimulatedDevice


class At:
    """An event at a time in milliseconds, which has happened or not."""

    def __init__(self, ms: float, happened: bool = True) -> None:
        self.ms = ms
        self.happened = happened

    def query(self) -> bool:
        return self.happened

    def elapsed_time(self, later: At) -> float:
        assert self.happened
        assert later.happened
        return later.ms - self.ms


def span(began: float | tuple[float, ...], ended: float, nbytes: int) -> Span:
    times = began if isinstance(began, tuple) else (began,)
    return Span(tuple(At(ms) for ms in times), At(ended), nbytes)


def marks(began: float = 100, ended: float = 110, happened: bool = True, **changed: Any) -> StepMarks:
    """By default from 100 to 110 ms, 30 MB in of which 10 were prefetched without delay, 30 MB out."""
    fields = {
        "hold": Hold(At(began), At(ended, happened), 3.0),
        "prefetched": (Prefetch(span(50, 51, 10_000_000), Hold(At(49), At(49), 1.0)),),
        "to_device": (span((100, 90), 104, 20_000_000),),
        "to_host": (span(100, 105, 20_000_000), span(110, 111, 10_000_000)),
        "window_bytes": 11_000_000,
    }
    return StepMarks(**{**fields, **changed})


def test_bytes_speeds_and_shares() -> None:
    report = report_of([marks()], 10.0)
    assert report.exposed_ms == 10
    assert (report.bytes_to_device, report.bytes_to_host) == (30_000_000, 30_000_000)
    # Copies wait for the later of the events before them.
    assert report.to_device_gbps == pytest.approx(30 / 5)
    assert report.to_host_gbps == pytest.approx(30 / 6)
    assert report.window_bytes == 11_000_000
    assert report.prefetched_share == pytest.approx(1 / 3)
    assert report.link_share == pytest.approx(0.6)
    assert str(report) == (
        "10.0 ms exposed, host 4.0 ms, 0.030 GB in at 6.0 GB/s, 0.030 GB out at 5.0 GB/s, 60% of the link, "
        "33% prefetched, window 0.011 GB"
    )


def test_nothing_moved() -> None:
    step = marks(prefetched=(), to_device=(span(100, 100, 0),), to_host=(), window_bytes=0)
    report = report_of([step], 10.0)
    assert (report.to_device_gbps, report.to_host_gbps, report.link_share) == (None, None, None)
    assert report.prefetched_share == 0
    assert str(report) == "10.0 ms exposed, host 3.0 ms, 0.000 GB in, 0.000 GB out, 0% prefetched, window 0.000 GB"


def test_parts_of_a_step_add_up() -> None:
    part, other = marks(), marks(200, 205, prefetched=(), window_bytes=0)
    report = report_of([part, other], None)
    assert report.exposed_ms == 15
    assert report.host_ms == 7
    assert (report.bytes_to_device, report.bytes_to_host) == (50_000_000, 60_000_000)
    assert report.to_device_gbps == pytest.approx(50 / 9)
    assert report.prefetched_share == pytest.approx(10 / 50)
    assert report.window_bytes == 11_000_000


def test_prefetches_count_too() -> None:
    prefetched = tuple(Prefetch(span(50, 60, 1), Hold(At(began), At(began + 2), 7.0)) for began in (20, 40))
    report = report_of([marks(prefetched=prefetched), marks(200, 205, prefetched=())], None)
    assert report.exposed_ms == 10 + 2 + 2 + 5
    assert report.host_ms == 3 + 7 + 7 + 3


class FakePipeline:
    def __init__(self) -> None:
        self.log = StepLog()
        self.write_backs = WriteBacks()


def exposed(devices: Devices) -> float | None:
    report = devices.last_step_report()
    return None if report is None else report.exposed_ms


def test_the_newest_step_that_all_its_devices_are_through_with() -> None:
    devices, one, other = Devices(OffloadConfig()), FakePipeline(), FakePipeline()
    devices.pipelines = {torch.device("cuda", 0): one, torch.device("cuda", 1): other}  # type: ignore[dict-item]
    assert exposed(devices) is None
    slow = At(150, happened=False)
    one.log.add(1, marks(ended=101))
    other.log.add(1, marks(ended=102))
    one.log.add(2, marks(ended=103))
    other.log.add(2, marks(ended=104, to_host=(Span((At(100),), slow, 1),)))
    assert exposed(devices) == 2  # the write-back of the second is under way on one of them
    slow.happened = True
    assert exposed(devices) == 4
    waiting = At(60, happened=False)  # on another stream than that of the step
    one.log.add(3, marks(ended=105, prefetched=(Prefetch(span(50, 51, 1), Hold(At(60), waiting, 0.0)),)))
    assert exposed(devices) == 4
    waiting.happened = True  # and the other had no gradients
    assert exposed(devices) == 5
    for number in range(4, 100):
        one.log.add(number, marks(happened=False))
    assert exposed(devices) == 5  # and steps that have not ended take no more and more memory
    assert len(one.log.numbers()) < 10


def test_the_link_of_each_device_is_shared_with_the_others_that_stepped(monkeypatch: pytest.MonkeyPatch) -> None:
    devices, one, other = Devices(OffloadConfig()), FakePipeline(), FakePipeline()
    devices.pipelines = {torch.device("cuda", 0): one, torch.device("cuda", 1): other}  # type: ignore[dict-item]
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    monkeypatch.setattr(profiles, "of_device", lambda index: Found(PROFILE, "made up"))
    one.log.add(1, marks())
    first = devices.last_step_report()
    assert first is not None
    assert first.link_share == pytest.approx(6 / 47)
    one.log.add(2, marks())
    other.log.add(2, marks())
    second = devices.last_step_report()
    assert second is not None
    assert second.link_share == pytest.approx(6 / 36)


def test_a_step_in_parts_is_reported_when_its_last_part_is_there() -> None:
    devices, pipeline = Devices(OffloadConfig()), FakePipeline()
    devices.pipelines = {torch.device("cuda", 0): pipeline}  # type: ignore[dict-item]
    devices.begin_step(has_more_parts=True)
    pipeline.log.add(1, marks())
    assert exposed(devices) is None
    pipeline.log.add(1, marks())
    devices.begin_step(has_more_parts=False)
    assert exposed(devices) == 20


def test_several_devices_work_at_the_same_time() -> None:
    one, other = report_of([marks()], 10.0), report_of([marks(ended=130, prefetched=())], 20.0)
    both = combined([one, other])
    assert both.exposed_ms == 30
    assert both.bytes_to_device == 50_000_000
    assert both.to_device_gbps == pytest.approx(6 + 5)
    assert both.prefetched_share == pytest.approx(10 / 50)
    assert both.link_share == min(one.link_share or 0, other.link_share or 0)
    assert combined([one]) is one


def test_on_the_cpu_nothing_moves() -> None:
    param = torch.nn.Parameter(torch.ones(8))
    optimizer = FusedOffloadAdam([param])
    param.grad = torch.ones(8)
    optimizer.step()
    assert optimizer.last_step_report() is None


def simulations(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedDevice]:
    """A simulated device for each schedule, one after the other, on which the package runs meanwhile."""
    pytest.importorskip("triton")
    import simulated_device

    for schedule in simulated_device.SCHEDULES:
        sim = simulated_device.SimulatedDevice(schedule)
        with simulated_device.installed(sim, monkeypatch):
            yield sim


@pytest.fixture
def stepped(monkeypatch: pytest.MonkeyPatch) -> Iterator[FusedOffloadAdam]:
    """An optimizer on a simulated device, with a window and a step behind it."""
    for sim in itertools.islice(simulations(monkeypatch), 1):
        param = torch.nn.Parameter(sim.to_device(torch.ones(300)))
        param.grad = sim.to_device(torch.ones(300))
        optimizer = FusedOffloadAdam([param], offload=OffloadConfig(window_bytes=2**20))
        optimizer.step()
        yield optimizer
        torch.cuda.synchronize()
        optimizer.close()


def logged(optimizer: FusedOffloadAdam, monkeypatch: pytest.MonkeyPatch) -> list[StepMarks]:
    """Filled with the marks of each further step."""
    (pipeline,) = optimizer._stepper.devices.pipelines.values()
    seen: list[StepMarks] = []
    monkeypatch.setattr(pipeline.log, "add", lambda number, marks: seen.append(marks))
    return seen


def test_the_time_of_a_step_begins_with_its_call(stepped: FusedOffloadAdam, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = logged(stepped, monkeypatch)
    (pipeline,) = stepped._stepper.devices.pipelines.values()
    observe = stepped._stepper._tracker.observe
    calls: list[Any] = []

    def slow(*args: Any) -> Any:
        time.sleep(0.05)  # of the host; the event before it is that of the call
        calls.append(pipeline._call)
        return observe(*args)

    monkeypatch.setattr(stepped._stepper._tracker, "observe", slow)
    stepped.step()
    assert seen[0].hold.host_ms > 50
    assert seen[0].hold.began is calls[0].began


def test_a_call_ends_with_the_last_thing_that_it_enqueues(
    stepped: FusedOffloadAdam, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fused_offload.memory import cuda_driver
    from fused_offload.stream.queues import CudaOps

    enqueued: list[Any] = []
    record = CudaOps.record

    def note(ops: CudaOps, stream: Any, event: Any = None, **timing: Any) -> Any:
        event = record(ops, stream, event, **timing)
        enqueued.append((stream, event))
        return event

    def copy(name: str, enqueue: Any, *args: Any) -> None:
        time.sleep(0.01)
        enqueue(*args)
        enqueued.append(name)

    monkeypatch.setattr(CudaOps, "record", note)
    for name in ("copy_to_device_async", "copy_to_host_async"):
        monkeypatch.setattr(cuda_driver, name, partial(copy, name, getattr(cuda_driver, name)))
    seen = logged(stepped, monkeypatch)
    stepped.prefetch()
    stepped.step()

    ((prefetch,), step) = seen[0].prefetched, seen[0].hold
    assert prefetch.hold.host_ms > 20
    assert step.host_ms > 20
    caller = torch.cuda.current_stream()
    places = [
        enqueued.index((caller, event)) for event in (prefetch.hold.began, prefetch.hold.ended, step.began, step.ended)
    ]
    assert places == sorted(places)
    of_prefetch, of_step = enqueued[places[0] : places[1]], enqueued[places[2] : places[3]]
    assert of_prefetch.count("copy_to_device_async") == 2  # both moments
    assert of_step.count("copy_to_host_async") == enqueued.count("copy_to_host_async") > 0
    stepped.step()
    assert seen[1].prefetched == ()


@pytest.mark.parametrize("chunks", [1, 3, 5])
def test_copies_that_run_ahead_of_the_caller_have_a_speed(chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for sim in simulations(monkeypatch):
        param = torch.nn.Parameter(sim.to_device(torch.ones(chunks * 100)))
        param.grad = sim.to_device(torch.ones(chunks * 100))
        optimizer = FusedOffloadAdam([param], offload=OffloadConfig(chunk_bytes=2048, depth=3))
        optimizer.step()
        seen = logged(optimizer, monkeypatch)
        optimizer.step()
        torch.cuda.synchronize()
        spans = [span for span in (*seen[0].to_device, *seen[0].to_host) if span.nbytes]
        assert sum(span.nbytes for span in seen[0].to_device) > 0
        assert all(span.ms() > 0 for span in spans), sim.schedule
        optimizer.close()


def test_a_prefetch_that_fails_leaves_nothing_behind(
    stepped: FusedOffloadAdam, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fused_offload.memory import cuda_driver
    from fused_offload.stream import prefetch

    def raising(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(planner, "blocks_of", partial(blocks_of, block_bytes=1024))
    copy, copies = cuda_driver.copy_to_device_async, []

    def failing(*args: Any) -> None:
        copies.append(args)
        if len(copies) == 4:  # the second of the second block
            raise RuntimeError("a copy that the driver refuses")
        copy(*args)

    monkeypatch.setattr(cuda_driver, "copy_to_device_async", failing)
    with pytest.raises(RuntimeError, match="refuses"):
        stepped.prefetch()
    with monkeypatch.context() as interrupted:
        interrupted.setattr(prefetch, "Prefetch", raising)
        with pytest.raises(KeyboardInterrupt):
            stepped.prefetch()
    seen = logged(stepped, monkeypatch)
    assert stepped.window_bytes() == 0
    stepped.step()
    assert seen[0].window_bytes == 0
    assert seen[0].prefetched == ()
    assert sum(span.nbytes for span in seen[0].to_device) == sum(span.nbytes for span in seen[0].to_host) > 0


def test_prefetches_that_find_no_memory_are_not_kept(
    stepped: FusedOffloadAdam, monkeypatch: pytest.MonkeyPatch
) -> None:
    (pipeline,) = stepped._stepper.devices.pipelines.values()
    monkeypatch.setattr(pipeline.window, "_memory", lambda nbytes: None)
    seen = logged(stepped, monkeypatch)
    for _ in range(3):
        stepped.prefetch()
    stepped.step()
    assert seen[0].prefetched == ()


def test_the_report_of_the_last_step_outlives_the_optimizers_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for sim in simulations(monkeypatch):
        small, large = (torch.nn.Parameter(sim.to_device(torch.ones(numel))) for numel in (300, 900))
        optimizer = FusedOffloadAdam([small, large])
        reported = []
        for param, wait in ((small, torch.cuda.synchronize), (large, optimizer.close)):
            param.grad = sim.to_device(torch.ones_like(param.detach()))
            optimizer.step()
            wait()
            report = optimizer.last_step_report()
            assert report is not None
            reported.append(report.bytes_to_host)
        assert reported[0] < reported[1], sim.schedule
