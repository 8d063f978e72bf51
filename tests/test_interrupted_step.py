"""An exception anywhere in a step: nobody else's numbers change, and the optimizer goes on only
where it is whole.

On a simulated device, whose streams run in any legal order.
"""

from __future__ import annotations

import contextlib
import copy
import dis
import functools
import gc
import itertools
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import Snapshot, assert_same_snapshot, snapshot

pytest.importorskip("triton")

import simulated_device
from simulated_device import SCHEDULES, Memory, Schedule, Signal, SimulatedDevice

import fused_offload
from fused_offload import FusedOffloadAdam, OffloadConfig
from fused_offload.memory.staging_ring import ENQUEUE_LOCK
from fused_offload.model_hooks import backward_step
from fused_offload.params import placement
from fused_offload.params.placement import Placement
from fused_offload.plan import planner
from fused_offload.plan.window_blocks import blocks_of
from fused_offload.stream import queues
from fused_offload.stream.queues import DeviceQueues

CHUNK_BYTES = 2048
SIZES = ((200,), (1,), (100,))
PARTS = range(16)
"""Shares of the large form, for as many workers."""
PACKAGE = os.path.dirname(fused_offload.__file__)


class Interrupt(BaseException):
    """As KeyboardInterrupt, which nothing may take for an ordinary error."""


class Trainer:
    """One optimizer on a stream of its own, and the step that is interrupted.

    Attributes:
        optimizer: the optimizer.
    """

    def __init__(self, sim: SimulatedDevice, seed: int, kind: str) -> None:
        self._sim, self._kind = sim, kind
        self._generator = torch.Generator().manual_seed(seed)
        self._stream = torch.cuda.Stream()
        options: dict[str, Any] = {"chunk_bytes": CHUNK_BYTES, "depth": 2}
        if kind == "zero_copy":
            options = {"transport": "zero_copy"}
        if kind == "window":
            options["window_bytes"] = 4000
        with torch.cuda.stream(self._stream):
            self.params = [torch.nn.Parameter(self._random(*size)) for size in SIZES]
            if kind == "host":
                HOSTED.extend(self.params)
            config = OffloadConfig(**options)
            self.optimizer = FusedOffloadAdam(self.params, master_weights=True, weight_decay=0.1, offload=config)
            if kind == "parts":
                self.optimizer.step_in_backward(torch.nn.ParameterList(self.params))

    def _random(self, *size: int) -> torch.Tensor:
        values = torch.randn(size, generator=self._generator)
        if self._kind != "host":
            return self._sim.to_device(values)
        self._sim.add(Memory(values.data_ptr(), values.nbytes, None, values))  # page-locked
        return values

    def prepared(self) -> Callable[[], None]:
        """A step whose gradients are there."""
        with torch.cuda.stream(self._stream):
            if self._kind == "parts":
                weights = [self._random(*size) for size in SIZES]
                parts = [(param * weight).sum() for param, weight in zip(self.params, weights, strict=True)]
                loss = torch.stack(parts).sum()
            else:
                for param, size in zip(self.params, SIZES, strict=True):
                    param.grad = self._random(*size)
            if self._kind == "amp":
                for name, value in (("grad_scale", 2.0), ("found_inf", 0.0)):
                    setattr(self.optimizer, name, self._sim.to_device(torch.full((1,), value)).as_subclass(Signal))

        def step() -> None:
            with torch.cuda.stream(self._stream):
                if self._kind == "parts":
                    loss.backward()
                if self._kind == "window":
                    self.optimizer.prefetch()
                self.optimizer.step()

        return step

    def step(self) -> None:
        self.prepared()()

    def checkpoint(self) -> Callable[[], None]:
        """Saves parameters, state and what the next gradients are made from; returns what loads
        them.
        """
        saved, chosen = copy.deepcopy(self.optimizer.state_dict()), self._generator.get_state()
        with torch.cuda.stream(self._stream):
            values = [param.detach().clone() for param in self.params]

        def restore() -> None:
            self._generator.set_state(chosen)
            with torch.cuda.stream(self._stream), torch.no_grad():
                for param, value in zip(self.params, values, strict=True):
                    param.grad = None
                    param.copy_(value)
                self.optimizer.load_state_dict(saved)

        return restore

    def snapshot(self) -> Snapshot:
        with torch.cuda.stream(self._stream):
            seen = snapshot(self.optimizer)
            self._stream.synchronize()
        return seen


LATE = [schedule for schedule in SCHEDULES if schedule.order[1] == 2]
"""Schedules that run the stream of the interrupted optimizer as late as they may."""

KINDS = ("copy", "zero_copy", "window", "parts", "amp", "host")

HOSTED: list[torch.Tensor] = []
"""Parameters in host memory that the device steps."""


def placed(param: torch.Tensor) -> Placement:
    return Placement(torch.device("cpu"), on_host=any(param is one for one in HOSTED))


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "blocks_of", lambda extents: blocks_of(extents, CHUNK_BYTES))
    monkeypatch.setattr(backward_step, "PART_BYTES", 1000)
    monkeypatch.setattr(queues, "TURN_BYTES", 1000)


@contextlib.contextmanager
def simulated(schedule: Schedule) -> Iterator[SimulatedDevice]:
    gc.disable()  # or finalizers run in the middle of an operation
    try:
        sim = SimulatedDevice(schedule)
        with pytest.MonkeyPatch.context() as patch, simulated_device.installed(sim, patch):
            patch.setattr(placement, "placement_of", placed)
            yield sim
            HOSTED.clear()
            sim.run_all()
            assert not sim.faults, sim.faults[0]
            gc.collect(0)
    finally:
        gc.enable()


Interrupting = Callable[[SimulatedDevice, Callable[[], None]], bool]
"""Runs a step, interrupts it if it can, and says whether it did."""


def play(kind: str, schedule: Schedule, interrupting: Interrupting | None) -> tuple[list[Snapshot], bool, bool]:
    """A step of each of two optimizers that share a ring, a second of one that may be interrupted,
    one of the other.

    Returns:
        What is compared: the other one, the first before and after its step, which is taken again
        from a checkpoint if it failed; whether the step was interrupted; whether it was taken
        completely.
    """
    with simulated(schedule) as sim:
        one, other = Trainer(sim, 1, kind), Trainer(sim, 2, "copy")
        one.step()
        other.step()
        before = one.snapshot()
        restore = one.checkpoint()
        step = one.prepared()
        was_interrupted = False
        if interrupting is None:
            step()
        else:
            was_interrupted = interrupting(sim, step)
        other.step()
        seen = [other.snapshot(), before]
        assert free_for_others()
        failure = one.optimizer._stepper.failure
        if failure is not None:
            with pytest.raises(RuntimeError, match="failed half-way"):
                one.optimizer.step()
            with pytest.raises(RuntimeError, match="failed half-way"):
                one.optimizer.state_dict()
            restore()
            one.step()
        if failure is not None or kind != "parts" or not was_interrupted:
            seen.append(one.snapshot())
        for trainer in (one, other):
            trainer.optimizer.close()
        del one, other, step, trainer
        gc.collect(0)
        assert not DeviceQueues._of_device
        return seen, was_interrupted, failure is None


def free_for_others() -> bool:
    """Whether another thread can enqueue work."""
    results = []

    def take() -> None:
        results.append(ENQUEUE_LOCK.acquire(blocking=False))
        if results[0]:
            ENQUEUE_LOCK.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return results[0]


class AtCall:
    """Raises at one of the calls that reach the driver, before or behind it."""

    def __init__(self, number: int, *, behind: bool = False) -> None:
        self.number, self.behind, self.seen = number, behind, 0

    def __call__(self, sim: SimulatedDevice, step: Callable[[], None]) -> bool:
        put = sim.put

        def interrupted(stream: Any, work: Any) -> None:
            is_here = self.seen == self.number
            self.seen += 1
            if is_here and not self.behind:
                raise Interrupt
            put(stream, work)
            if is_here:
                raise Interrupt

        sim.put = interrupted  # type: ignore[method-assign]
        try:
            step()
        except Interrupt:
            return True
        finally:
            sim.put = put  # type: ignore[method-assign]
        return False


@functools.cache
def where_signals_come(code: types.CodeType) -> frozenset[int]:
    """Offsets before which CPython runs signal handlers: behind calls, and where functions and
    rounds of loops begin.

    It runs none elsewhere, for example while a ``with`` statement ends and has not called
    ``__exit__`` yet.
    """
    instructions = list(dis.get_instructions(code))
    behind = {two.offset for one, two in itertools.pairwise(instructions) if one.opname.startswith(("CALL", "RESUME"))}
    rounds = {one.argval for one in instructions if one.opname.startswith(("JUMP_BACKWARD", "JUMP_ABSOLUTE"))}
    return frozenset(behind | rounds | {0})


class AtBytecode:
    """Raises before one bytecode of the package, as a signal handler does."""

    def __init__(self, number: int) -> None:
        self.number, self.seen = number, 0

    def __call__(self, sim: SimulatedDevice, step: Callable[[], None]) -> bool:
        def trace(frame: Any, event: str, _: Any) -> Any:
            if not frame.f_code.co_filename.startswith(PACKAGE):
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            if event == "opcode" and frame.f_lasti in where_signals_come(frame.f_code):
                self.seen += 1
                if self.seen > self.number:
                    sys.settrace(None)
                    raise Interrupt
            return trace

        before = sys.gettrace()
        # Python 3.12 looks at this only where tracing is switched on.
        sys._getframe().f_trace_opcodes = True
        sys.settrace(trace)
        try:
            step()
        except Interrupt:
            return True
        finally:
            sys.settrace(before)
        return False


def check(kind: str, schedule: Schedule, interrupting: Interrupting) -> bool:
    """Compares with steps that nothing interrupted; says whether this one was interrupted."""
    expected = undisturbed(kind)
    seen, was_interrupted, is_whole = play(kind, schedule, interrupting)
    assert_same_snapshot(seen[0], expected[0])
    assert_same_snapshot(seen[1], expected[1])
    if len(seen) == 3:
        # All of the step, or nothing of it.
        assert_same_snapshot(seen[2], expected[2] if seen[2].steps == expected[2].steps else expected[1])
    assert was_interrupted or is_whole
    return was_interrupted


_undisturbed: dict[str, list[Snapshot]] = {}


def undisturbed(kind: str) -> list[Snapshot]:
    if kind not in _undisturbed:
        _undisturbed[kind] = play(kind, SCHEDULES[0], None)[0]
    return _undisturbed[kind]


class Counted:
    """What an interrupt of a high number counts."""

    def __init__(self) -> None:
        self.totals: dict[tuple[str, type], int] = {}

    def __call__(self, kind: str, make: type[AtCall] | type[AtBytecode]) -> int:
        """How many places there are to interrupt a step at."""
        if (kind, make) not in self.totals:
            interrupting = make(sys.maxsize)
            assert not check(kind, SCHEDULES[0], interrupting)
            assert interrupting.seen > 10
            self.totals[kind, make] = interrupting.seen
        return self.totals[kind, make]


counted = Counted()


@pytest.mark.parametrize("behind", [False, True], ids=["before", "behind"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_call_that_raises(kind: str, behind: bool) -> None:
    for number in spread(counted(kind, AtCall), 6):
        assert check(kind, LATE[number % len(LATE)], AtCall(number, behind=behind))


@pytest.mark.parametrize("kind", KINDS)
def test_a_signal_between_two_bytecodes(kind: str) -> None:
    for number in spread(counted(kind, AtBytecode), 10):
        check(kind, LATE[number % len(LATE)], AtBytecode(number))


def test_nothing_writes_parameters_in_host_memory_behind_a_failed_step() -> None:
    """Whoever loads a checkpoint writes them on the host, at once."""
    for number in range(counted("host", AtCall)):
        with simulated(LATE[number % len(LATE)]) as sim:
            trainer = Trainer(sim, 1, "host")
            trainer.step()
            assert AtCall(number)(sim, trainer.prepared())
            with torch.no_grad():
                for param in trainer.params:
                    param.fill_(7.0)
            sim.run_all()
            assert all(bool((param == 7.0).all()) for param in trainer.params), number
            trainer.optimizer.close()
            del trainer
            gc.collect(0)


@pytest.mark.large
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("behind", [False, True], ids=["before", "behind"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_call_that_raises(kind: str, behind: bool, part: int) -> None:
    for number in range(part, counted(kind, AtCall), len(PARTS)):
        assert check(kind, LATE[number % len(LATE)], AtCall(number, behind=behind))


@pytest.mark.large
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_signal_between_any_two_bytecodes(kind: str, part: int) -> None:
    for number in range(part, counted(kind, AtBytecode), len(PARTS)):
        check(kind, LATE[number % len(LATE)], AtBytecode(number))


def spread(total: int, count: int) -> range:
    """Numbers below a total, as many as asked for, at equal distances."""
    return range(0, total, max(1, total // count))
