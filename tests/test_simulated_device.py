"""Every wait, event and mark of used memory is needed: without any one of them, steps on a
simulated device go wrong.

The scenarios run on `simulated_device`, and are compared with the same steps of the CPU's loop.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import gc
import importlib
import inspect
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from helpers import Snapshot, assert_same_snapshot, snapshot

pytest.importorskip("triton")

import simulated_device
from simulated_device import SCHEDULES, Memory, Schedule, Signal, SimulatedDevice
from two_phases import Toy

from fused_offload import FusedOffloadAdam, OffloadConfig
from fused_offload.memory import cuda_driver
from fused_offload.memory.staging_ring import ENQUEUE_LOCK, StagingRing
from fused_offload.model_hooks import backward_step
from fused_offload.optimizer import OffloadOptimizer
from fused_offload.params import placement
from fused_offload.params.placement import Placement
from fused_offload.plan import planner
from fused_offload.plan.window_blocks import blocks_of
from fused_offload.state import storage
from fused_offload.step import clipping
from fused_offload.stream import pipeline, queues, step_upload
from fused_offload.stream import skip_counter as skips
from fused_offload.stream.pipeline import Pipeline
from fused_offload.stream.prefetch import Window
from fused_offload.stream.queues import CudaOps, DeviceQueues
from fused_offload.stream.schedule import StreamedChunk
from fused_offload.stream.skip_counter import SkipCounter
from fused_offload.stream.step_upload import UploadBuffer
from fused_offload.stream.write_backs import WriteBacks

CHUNK_BYTES = 2048
SIZES = ((300,), (1,), (25, 11), (200,))


class Device:
    """What a scenario needs of a device: the simulated one, or none."""

    def __init__(self, sim: SimulatedDevice | None) -> None:
        self.sim = sim
        self._generator = torch.Generator().manual_seed(1)

    def tensor(self, values: torch.Tensor) -> torch.Tensor:
        return values if self.sim is None else self.sim.to_device(values)

    def copied(self, values: torch.Tensor) -> torch.Tensor:
        """`tensor` of values in another memory order, which they keep."""
        in_order = values.detach().as_strided((values.numel(),), (1,))
        return self.tensor(in_order).as_strided(values.shape, values.stride())

    def random(self, *size: int) -> torch.Tensor:
        return self.tensor(torch.randn(size, generator=self._generator))

    def signal(self, value: float) -> torch.Tensor:
        made = self.tensor(torch.full((1,), value))
        return made if self.sim is None else made.as_subclass(Signal)

    def page_locked(self, values: torch.Tensor) -> torch.Tensor:
        """A copy of values in host memory that the device may read and write."""
        values = values.detach().clone()
        if self.sim is not None:
            self.sim.add(Memory(values.data_ptr(), values.nbytes, None, values))
        return values

    def on_host(self, is_hosted: Callable[[torch.Tensor], bool]) -> Any:
        """Makes the package step some parameters on the device whose memory is on the host."""
        if self.sim is None:
            return contextlib.nullcontext()
        patch, device = pytest.MonkeyPatch(), torch.device("cpu")
        patch.setattr(placement, "placement_of", lambda param: Placement(device, on_host=is_hosted(param)))
        return contextlib.closing(types.SimpleNamespace(close=patch.undo))

    def params(self, sizes: Any = SIZES) -> list[torch.nn.Parameter]:
        return [torch.nn.Parameter(self.random(*size)) for size in sizes]

    def stream(self, *, waits: bool = True) -> Any:
        """A stream of the caller's own; as a rule it waits for what the current one has to do."""
        if self.sim is None:
            return contextlib.nullcontext()
        stream = torch.cuda.Stream()
        if waits:
            stream.wait_stream(torch.cuda.current_stream())
        return stream

    def on(self, stream: Any) -> Any:
        return stream if self.sim is None else torch.cuda.stream(stream)

    def set_grads(self, optimizer: OffloadOptimizer, without: int | None = None) -> None:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        for index, param in enumerate(params):
            grad = self.tensor(torch.randn(param.shape, generator=self._generator).to(param.dtype))
            param.grad = None if index == without else grad

    def snapshot(self, optimizer: OffloadOptimizer) -> Snapshot:
        seen = snapshot(optimizer)
        if self.sim is not None:
            torch.cuda.current_stream().synchronize()
        return seen

    def step_interrupted(self, optimizer: FusedOffloadAdam, calls: int) -> None:
        """A step that ends after so many copies and kernels."""
        self.set_grads(optimizer)
        if self.sim is not None:
            self.sim.calls_left = calls
            with pytest.raises(simulated_device.Interrupt):
                optimizer.step()

    def step(self, optimizer: OffloadOptimizer, without: int | None = None) -> None:
        self.set_grads(optimizer, without)
        optimizer.step()


def make(params: Any, *, depth: int = 2, formats: Any = None, **options: Any) -> FusedOffloadAdam:
    staging = {} if "transport" in options else {"chunk_bytes": CHUNK_BYTES, "depth": depth}
    config = OffloadConfig(**{**staging, **options})
    return FusedOffloadAdam(params, weight_decay=0.1, offload=config, **(formats or {}))


def streamed(device: Device) -> list[Snapshot]:
    """Steps with different gradients, and groups of their own learning rates."""
    params = device.params()
    optimizer = make([{"params": params[:2]}, {"params": params[2:], "lr": 1e-2}])
    for number in range(4):
        device.step(optimizer, without=1 if number == 2 else None)
    return [device.snapshot(optimizer)]


def deep_ring(device: Device) -> list[Snapshot]:
    """More slots than chunks, so that a step's chunks go through other slots than those of the step
    before.
    """
    optimizer = make(device.params(), depth=16)
    for _ in range(4):
        device.step(optimizer)
    return [device.snapshot(optimizer)]


def resident(device: Device) -> list[Snapshot]:
    """State that stays on the device, read in between on another stream than the step's."""
    optimizer = make(device.params(), fraction=0.5, formats={"master_weights": True})
    seen = []
    for _ in range(3):
        device.step(optimizer)
        with device.on(device.stream(waits=False)):
            seen.append(device.snapshot(optimizer)._replace(params=[]))
    return [*seen, device.snapshot(optimizer)]


def resident_without_gradients(device: Device) -> list[Snapshot]:
    """State that a step without gradients makes on the device, read and stepped on another stream than that step's."""
    params = device.params()
    optimizer = make(params[:2], fraction=0.0)
    device.step(optimizer)
    optimizer.add_param_group({"params": params[2:]})
    optimizer.zero_grad()
    with device.on(device.stream(waits=False)):
        optimizer.step()
    seen = device.snapshot(optimizer)
    device.step(optimizer)
    return [seen, device.snapshot(optimizer)]


def state_read_and_written(device: Device) -> list[Snapshot]:
    """State read and written between steps, as `optimizer.state` and as a state dict; a ring given
    back.
    """
    params = device.params()
    optimizer = make(params)
    device.step(optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    device.step(optimizer)
    optimizer.state[params[0]]["exp_avg"].mul_(0.5)
    device.step(optimizer)
    seen = [device.snapshot(optimizer)]
    optimizer.release_gpu_memory()
    device.step(optimizer)
    optimizer.load_state_dict(saved)
    device.step(optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    device.step(optimizer)
    return [*seen, device.snapshot(optimizer)]


def two_optimizers(device: Device) -> list[Snapshot]:
    """One ring for two optimizers on two streams of the caller, which grows for the second."""
    first, second = device.stream(), device.stream()
    with device.on(first):
        one = make(device.params())
        device.step(one)
    with device.on(second):
        other = make(device.params(((900,), (40,))), depth=3, chunk_bytes=2 * CHUNK_BYTES)
    for _ in range(2):
        with device.on(first):
            device.step(one)
        with device.on(second):
            device.step(other)
    with device.on(second):
        seen = [device.snapshot(other)]
    with device.on(first):
        return [*seen, device.snapshot(one)]


def ring_grows(device: Device) -> list[Snapshot]:
    """The first step of parameters whose chunks are larger, and whose state is there already."""
    params = device.params(((100,), (600,)))
    params[0] = torch.nn.Parameter(device.tensor(torch.ones(100, dtype=torch.bfloat16)))
    optimizer = make(params)
    for number in range(4):
        device.step(optimizer, without=None if number == 3 else 1)
    return [device.snapshot(optimizer)]


def ring_given_back(device: Device) -> list[Snapshot]:
    """The ring is given back right behind a step, and the caller's stream reuses its memory."""
    optimizer = make(device.params())
    for _ in range(3):
        device.step(optimizer)
        optimizer.release_gpu_memory()
        device.random(500)
    return [device.snapshot(optimizer)]


def streams_in_turn(device: Device) -> list[Snapshot]:
    """One optimizer that is stepped on several streams, each of which waits for the one before."""
    optimizer = make(device.params())
    for number in range(4):
        with device.on(device.stream()):
            device.step(optimizer, without=number % 3)
            seen = device.snapshot(optimizer) if number == 3 else None
    assert seen is not None
    return [seen]


def window(device: Device) -> list[Snapshot]:
    """Blocks of state on the GPU between activations, all that streams beside them, and a prefetch
    that is dropped.
    """
    params = device.params()
    optimizer = make(params, window_bytes=5000)
    device.step(optimizer)
    for number in range(4):
        activations = [device.random(400) for _ in range(3)]
        del activations
        optimizer.prefetch()
        device.random(300).mul_(2)
        if number == 1:
            optimizer.cancel_prefetch()
            assert not optimizer.window_bytes()
            device.random(300).mul_(2)
            optimizer.prefetch()
        device.step(optimizer, without=0 if number == 2 else None)
        optimizer.last_step_report()
    seen = device.snapshot(optimizer)
    optimizer.last_step_report()
    if device.sim is not None:
        device.random(300)
        torch.cuda.synchronize()
        report = optimizer.last_step_report()  # of events that have all happened
        assert report is not None
        assert 0 < report.prefetched_share < 1
        assert report.bytes_to_device == report.bytes_to_host
        for _ in range(100):
            device.random(1)
        optimizer.prefetch()
        torch.cuda.synchronize()
        assert optimizer.window_seconds(1.0) < 0.1  # earlier work of the stream does not count
    return [seen]


def window_of_a_younger_stream(device: Device) -> list[Snapshot]:
    """Blocks that are dropped while both streams of a direction have their copies.

    The caller's stream is younger than those, so that a schedule may put it before each of them.
    """
    optimizer = make(device.params(), window_bytes=5000)
    device.step(optimizer)
    with device.on(device.stream()):
        for _ in range(3):
            optimizer.prefetch()
            optimizer.cancel_prefetch()
            device.random(300).mul_(2)
            optimizer.prefetch()
            device.step(optimizer)
            device.random(300).mul_(2)
        return [device.snapshot(optimizer)]


def window_zero_copy(device: Device) -> list[Snapshot]:
    """A window beside kernels that work on host memory."""
    optimizer = make(device.params(), window_bytes=5000, transport="zero_copy")
    device.step(optimizer)
    for number in range(4):
        if number != 2:
            with device.on(device.stream(waits=False)):
                optimizer.prefetch()
        device.step(optimizer)
    return [device.snapshot(optimizer)]


def zero_copy(device: Device) -> list[Snapshot]:
    """Kernels that work on host memory, which the host reads and writes, too."""
    params = device.params()
    optimizer = make(params, transport="zero_copy")
    seen = []
    for _ in range(3):
        device.step(optimizer)
        seen.append(device.snapshot(optimizer))
        optimizer.state[params[0]]["exp_avg"].mul_(0.5)
    return seen


def skipped(device: Device) -> list[Snapshot]:
    """Steps of which the device alone knows that they are skipped, more of them than the host may
    be ahead.
    """
    optimizer = make(device.params(), formats={"master_weights": True})
    seen = []
    for number in range(8):
        optimizer.grad_scale = device.signal(2.0**number)  # type: ignore[attr-defined]
        optimizer.found_inf = device.signal(float(number in (0, 2, 3, 4, 5, 6)))  # type: ignore[attr-defined]
        device.step(optimizer)
        if number == 1:
            seen.append(device.snapshot(optimizer))
    optimizer.grad_scale = optimizer.found_inf = None  # type: ignore[attr-defined]
    device.step(optimizer)
    return [*seen, device.snapshot(optimizer)]


def skipped_on_two_streams(device: Device) -> list[Snapshot]:
    """Skips counted on several streams."""
    optimizer = make(device.params())
    for number in range(4):
        with device.on(device.stream()):
            optimizer.grad_scale = device.signal(2.0)  # type: ignore[attr-defined]
            optimizer.found_inf = device.signal(float(number == 1))  # type: ignore[attr-defined]
            device.step(optimizer)
            seen = device.snapshot(optimizer) if number == 3 else None
    assert seen is not None
    return [seen]


def growing(device: Device) -> list[Snapshot]:
    """Parameters are added on another stream, for which the table of addresses grows as well as the
    state.
    """
    optimizer = make(device.params())
    with contextlib.ExitStack() as streams:
        for number in range(3):
            streams.enter_context(device.on(device.stream()))
            if number == 2:
                optimizer.add_param_group({"params": device.params(((1,),) * 90)})
            device.step(optimizer)
        return [device.snapshot(optimizer)]


def in_parts(device: Device) -> list[Snapshot]:
    """Parameters stepped during the backward pass, which frees each gradient."""
    params = device.params()
    model = torch.nn.ParameterList(params)
    optimizer = make(params)
    optimizer.step_in_backward(model)
    for _ in range(3):
        weights = [device.random(*param.shape) for param in params]
        torch.stack([(param * weight).sum() for param, weight in zip(params, weights, strict=True)]).sum().backward()
        device.random(300).mul_(2)
        optimizer.step()
    return [device.snapshot(optimizer)]


def interrupted(device: Device) -> list[Snapshot]:
    """A step that is interrupted between copies and kernels; then others take the ring, and state
    is loaded.
    """
    seen = []
    for calls in (6, 7, 8):
        params = device.params()
        one, other = make(params), make(device.params())
        for optimizer in (one, other):
            device.step(optimizer)
        saved = copy.deepcopy(one.state_dict())
        device.step_interrupted(one, calls)
        if calls != 7:
            device.step(other)
        one.load_state_dict(saved)
        with torch.no_grad():
            for param in params:
                param.fill_(1.0)
        device.step(one)
        device.step(other)
        seen += [device.snapshot(one), device.snapshot(other)]
    return seen


def two_phases(device: Device) -> list[Snapshot]:
    """A rule of two phases with an operation between them, beside another optimizer on another
    stream.

    The work memory is used by both streams, grows for the second, and is given back.
    """
    seen = []
    one, other = device.stream(), device.stream()
    with device.on(one):
        first = Toy(device.params(), offload=OffloadConfig(chunk_bytes=CHUNK_BYTES, depth=2, fraction=0.5))
        device.step(first)
    with device.on(other):
        second = Toy(device.params(((40, 20), (30,))), offload=OffloadConfig(chunk_bytes=CHUNK_BYTES, depth=2))
    for _ in range(2):
        with device.on(other):
            device.step(second)
        with device.on(one):
            device.step(first, without=1)
    with device.on(one):
        seen.append(device.snapshot(first))
        first.release_gpu_memory()
        device.random(2000)
        device.step(first)
        seen.append(device.snapshot(first))
    with device.on(other):
        return [*seen, device.snapshot(second)]


def memory_that_another_stream_took(device: Device) -> list[Snapshot]:
    """Resident state: no copy stands between the stream that takes the work memory and the step's."""
    optimizer = Toy(device.params(), offload=OffloadConfig(fraction=0.0))
    for _ in range(2):  # later steps take no memory for addresses, which would wait for the device
        device.step(optimizer)
    device.set_grads(optimizer)
    other = device.stream()
    optimizer.release_gpu_memory()
    optimizer.reserve_gpu_memory()
    with device.on(other):
        optimizer.step()
        return [device.snapshot(optimizer)]


def closed(device: Device) -> list[Snapshot]:
    """Optimizers that are closed, or dropped, right behind a step."""
    seen = []
    for closes in (True, False):
        params = device.params()
        optimizer = make(params)
        device.step(optimizer)
        device.step(optimizer)
        if closes:
            optimizer.close()
            seen.append(Snapshot([param.detach().clone() for param in params], [], [], []))
        del optimizer
        gc.collect(0)
        seen.append(Snapshot([param.detach().clone() for param in params], [], [], []))
    return seen


def params_on_host(device: Device) -> list[Snapshot]:
    """Parameters and gradients in host memory, which others copy on streams of their own right before and after steps.

    Some gradients are clipped, some parameters are on the device.
    """
    with device.on_host(lambda param: param.shape != (25, 11)):
        hosted = [torch.nn.Parameter(device.page_locked(torch.linspace(-1, 1, numel))) for numel in (300, 1, 200)]
        optimizer = make([{"params": hosted}, {"params": device.params(((25, 11),))}], formats={"master_weights": True})
        theirs, seen = device.stream(waits=False), []
        for number in range(4):
            device.set_grads(optimizer)
            with device.on(theirs):
                for param in hosted:
                    param.grad = device.page_locked(torch.full_like(param, torch.nan))
                    param.grad.copy_(device.random(*param.shape), non_blocking=True)
            if number == 2:
                hosted[1].grad = None
            if number % 2:
                norm = optimizer.clip_grad_norm_(0.5, foreach=False)
                seen.append(Snapshot([norm.clone()], [], [], []))
            optimizer.step()
            for param in hosted:
                if param.grad is not None:
                    param.grad.fill_(torch.nan)
            seen.append(Snapshot([param.detach().clone() for param in hosted], [], [], []))
            with device.on(theirs):
                unsharded = [
                    device.tensor(torch.zeros(param.shape)).copy_(param, non_blocking=True) for param in hosted
                ]
                seen.append(Snapshot([param.clone() for param in unsharded], [], [], []))
        if device.sim is not None:
            theirs.synchronize()
        return [*seen, device.snapshot(optimizer)]


Scenario = Callable[[Device], list[Snapshot]]
SCENARIOS: list[Scenario] = [
    streamed,
    window,
    skipped,
    two_optimizers,
    zero_copy,
    deep_ring,
    resident,
    resident_without_gradients,
    ring_given_back,
    ring_grows,
    window_of_a_younger_stream,
    window_zero_copy,
    state_read_and_written,
    streams_in_turn,
    skipped_on_two_streams,
    in_parts,
    interrupted,
    two_phases,
    memory_that_another_stream_took,
    closed,
    growing,
    params_on_host,
]


@pytest.fixture(scope="module", autouse=True)
def small_pieces() -> Iterator[None]:
    """Sizes at which a few hundred elements take several chunks, blocks, parts and outcomes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "blocks_of", lambda extents: blocks_of(extents, CHUNK_BYTES))
        patch.setattr(skips, "MAX_PENDING", 3)
        patch.setattr(backward_step, "PART_BYTES", 1000)
        patch.setattr(queues, "TURN_BYTES", 1000)
        for name, nbytes in (("_LEAST_BYTES", 4096), ("_SLAB_BYTES", 8192), ("_MOST_BYTES", 8192)):
            patch.setattr(step_upload, name, nbytes)
        yield


@functools.cache
def expected(scenario: Scenario) -> list[Snapshot]:
    return scenario(Device(None))


class WentWrongError(AssertionError):
    pass


def run(scenario: Scenario, schedule: Schedule) -> None:
    """Raises WentWrongError if the simulated device does not do what the CPU's loop does."""
    wanted = expected(scenario)
    problem = None
    gc.disable()  # or finalizers run in the middle of an operation
    sim = SimulatedDevice(schedule)
    with pytest.MonkeyPatch.context() as patch, simulated_device.installed(sim, patch):
        try:
            for actual, snapshot_ in zip(scenario(Device(sim)), wanted, strict=True):
                assert_same_snapshot(actual, snapshot_)
            sim.run_all()
        except Exception:
            problem = traceback.format_exc()
        gc.collect(0)  # what this run made, page-locked memory among it
    gc.enable()
    if sim.faults:
        problem = sim.faults[0]
    if problem is not None:
        raise WentWrongError(f"{schedule}: {problem}")


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_any_legal_order_gives_the_same_bits(scenario: Scenario) -> None:
    for schedule in SCHEDULES:
        run(scenario, schedule)


def test_parts_of_a_step_do_not_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    waited_for = []
    stream_chunks = pipeline.stream_chunks

    def noted(chunks: Any, slots: Any, ops: Any, previous: Any, *window: Any) -> Any:
        waited_for.append(previous)
        return stream_chunks(chunks, slots, ops, previous, *window)

    monkeypatch.setattr(pipeline, "stream_chunks", noted)
    run(in_parts, SCHEDULES[0])
    assert len(waited_for) > 3
    assert len(set(waited_for)) == 3  # one for each step: what was written before its first part


def another_way_to_stream(device: Device) -> list[Snapshot]:
    """As tuning changes it; the ring of the way before is given back, though another optimizer is
    on the device.
    """
    optimizer, other = make(device.params()), make(device.params())
    device.step(other)
    seen = []
    for options in ({"transport": "zero_copy"}, {"chunk_bytes": CHUNK_BYTES, "depth": 3}, {"transport": "zero_copy"}):
        device.step(optimizer)
        seen.append(device.snapshot(optimizer))
        optimizer._stepper.reconfigure(OffloadConfig(**options))
        device.step(optimizer)
        ring = optimizer.memory_report().ring_bytes
        assert (ring > 0) == (device.sim is not None and "depth" in options)
    return [*seen, device.snapshot(optimizer)]


def test_a_way_to_stream_leaves_nothing_to_the_next() -> None:
    run(another_way_to_stream, SCHEDULES[0])


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_event_that_streams_share_is_used_under_the_lock(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or another thread could record it again before the wait."""
    original = CudaOps.wait_stream

    def wait_stream(self: CudaOps, stream: Any, other: Any) -> None:
        assert ENQUEUE_LOCK._is_owned()  # type: ignore[attr-defined]
        original(self, stream, other)

    monkeypatch.setattr(CudaOps, "wait_stream", wait_stream)
    run(scenario, SCHEDULES[0])


def test_a_step_makes_as_many_events_whatever_its_chunks() -> None:
    def events(chunk_bytes: int) -> int:
        sim = SimulatedDevice(SCHEDULES[0])
        with pytest.MonkeyPatch.context() as patch, simulated_device.installed(sim, patch):
            device = Device(sim)
            optimizer = make(device.params(), chunk_bytes=chunk_bytes)
            for _ in range(2):
                device.step(optimizer)
            made: list[int] = []
            event = torch.cuda.Event
            patch.setattr(torch.cuda, "Event", lambda *args, **kwargs: made.append(1) or event(*args, **kwargs))
            device.step(optimizer)
            optimizer.close()
        return len(made)

    assert events(CHUNK_BYTES) == events(8 * CHUNK_BYTES)


# -- the same with one wait less -------------------------------------------------------------------

RECORDS = {"record", "record_event"}
WAITS = {"wait", "wait_event", "wait_stream", "synchronize", "record_stream"}
ORDERED_BY = (Pipeline, Window, DeviceQueues, StreamedChunk, UploadBuffer, WriteBacks, SkipCounter, StagingRing)
ORDERED_BY_HOST = (clipping, cuda_driver, storage)
MODULES = sorted({owner.__module__ for owner in ORDERED_BY} | {module.__name__ for module in ORDERED_BY_HOST})


LATEST = [schedule for schedule in SCHEDULES if not schedule.eagerness]
"""Schedules of devices that do nothing before the host waits for it: these show what a missing wait
does.
"""


class CallSite(NamedTuple):
    """A call in the package that orders work, or marks memory as used.

    Attributes:
        module: full name of the module.
        line: line of the call.
        column: its column.
        text: the call.
    """

    module: str
    line: int
    column: int
    text: str

    def __str__(self) -> str:
        return f"{self.module.removeprefix('fused_offload.')}:{self.line}:{self.column} {self.text}"


def name_of(call: ast.AST) -> str | None:
    if not isinstance(call, ast.Call):
        return None
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", None)


def tree_of(module: str) -> ast.Module:
    return ast.parse(inspect.getsource(importlib.import_module(module)))


def call_sites() -> list[CallSite]:
    found = []
    for module in MODULES:
        for node in ast.walk(tree_of(module)):
            if isinstance(node, ast.Call) and name_of(node) in RECORDS | WAITS:
                found.append(CallSite(module, node.lineno, node.col_offset, ast.unparse(node)))
    return found


class Without(ast.NodeTransformer):
    """Takes a call out; an event in its place was never recorded."""

    def __init__(self, site: CallSite) -> None:
        self._site = site

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if (node.lineno, node.col_offset, name_of(node)) != self._key():
            return node
        text = "__import__('torch').cuda.Event(enable_timing=True)" if name_of(node) in RECORDS else "None"
        return ast.fix_missing_locations(ast.copy_location(ast.parse(text, mode="eval").body, node))

    def _key(self) -> tuple[int, int, str | None]:
        return self._site.line, self._site.column, name_of(ast.parse(self._site.text, mode="eval").body)


def functions_of(namespace: Any, module: str) -> Iterator[types.FunctionType]:
    """All functions of a module and methods of its classes, whatever wraps them."""
    for value in list(vars(namespace).values()):
        if isinstance(value, type) and value.__module__ == module and value is not namespace:
            yield from functions_of(value, module)
        parts = (value.fget, value.fset) if isinstance(value, property) else (value,)
        for part in parts:
            function = getattr(part, "__func__", part)
            function = getattr(function, "__wrapped__", function)
            if isinstance(function, types.FunctionType) and function.__module__ == module:
                yield function


def codes_of(code: types.CodeType) -> Iterator[types.CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from codes_of(constant)


@contextlib.contextmanager
def without(site: CallSite) -> Iterator[None]:
    """Takes one call out of the function that it is in."""
    module = importlib.import_module(site.module)
    tree = Without(site).visit(tree_of(site.module))
    changed = compile(tree, str(module.__file__), "exec", dont_inherit=True)
    codes = {(code.co_name, code.co_firstlineno): code for code in codes_of(changed)}
    swapped = []
    for function in functions_of(module, site.module):
        code = codes.get((function.__code__.co_name, function.__code__.co_firstlineno))
        if code is not None and code != function.__code__:
            swapped.append((function, function.__code__))
            function.__code__ = code
    assert len(swapped) == 1, f"{site} is not in a function of its own"
    try:
        yield
    finally:
        [(function, code)] = swapped
        function.__code__ = code


def goes_unnoticed(site: CallSite) -> bool:
    with without(site):
        for schedule in LATEST:
            for scenario in SCENARIOS:
                try:
                    run(scenario, schedule)
                except WentWrongError:
                    return False
    return True


@pytest.mark.parametrize("site", call_sites(), ids=str)
def test_every_wait_is_needed(site: CallSite) -> None:
    assert not goes_unnoticed(site), f"nothing goes wrong without {site}"
