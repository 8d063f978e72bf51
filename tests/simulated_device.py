"""A CUDA device, simulated on the CPU: streams run in any legal order, and memory is reused as
early as it may be.

The package's own pipeline runs on it, on parameters in ordinary memory. With a `Schedule` work is
deferred: a stream holds operations until the host waits for them, or the schedule lets the device
go ahead. Without one, everything runs at once and in order, and memory is not looked at.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import functools
import itertools
import random
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

from fused_offload.kernels.launch import ScalerSignals
from fused_offload.memory import cuda_driver
from fused_offload.memory.staging_ring import StagingRing
from fused_offload.state import storage
from fused_offload.state.storage import Extent
from fused_offload.step import devices
from fused_offload.step.clipping import HostGrad
from fused_offload.step.stepper import Stepper
from fused_offload.stream.launches import Launches
from fused_offload.stream.operations import order_of_work
from fused_offload.stream.prefetch import Window
from fused_offload.stream.queues import DeviceQueues
from fused_offload.stream.skip_counter import SkipCounter
from fused_offload.stream.step_upload import UploadBuffer

_ALIGNMENT = 512
_GPU = torch.device("cuda", 0)


class Schedule(NamedTuple):
    """How the device uses the freedom that waits and events leave it.

    Attributes:
        order: stream n runs before others as far as it can if ``order[n % 3]`` is the smallest; of
            equal ones the younger goes first. The caller's stream is the first; then come those of
            the copies.
        eagerness: how likely the device goes ahead while the host enqueues, 0 to 1.
        seed: of the random choices.
    """

    order: tuple[int, ...]
    eagerness: float
    seed: int


SCHEDULES = [
    Schedule(order, eagerness, seed)
    for seed, (order, eagerness) in enumerate(
        itertools.product(((1, 2, 0), (2, 0, 1), (0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)), (0.0, 0.3))
    )
]


class Token:
    """One recording of an event."""

    def __init__(self) -> None:
        self.done_at: int | None = None


class Stream:
    """A queue of operations; a `Token` in it holds back what is behind it."""

    def __init__(self, sim: SimulatedDevice, device: Any = None, priority: int = 0) -> None:
        self.queue: deque[Any] = deque()
        self._sim = sim
        self.rank = sim.rank(len(sim.streams))
        sim.streams.append(self)
        self.cuda_stream = len(sim.streams)

    def wait_event(self, event: Event) -> None:
        if event.token is not None:
            self._sim.put(self, event.token)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self._sim)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def query(self) -> bool:
        return not self.queue


class Event:
    """Completes when the device reaches it; one that was never recorded holds nothing back."""

    def __init__(self, sim: SimulatedDevice, enable_timing: bool = False, **_: Any) -> None:
        self._sim = sim
        self._enable_timing = enable_timing
        self.token: Token | None = None

    def record(self, stream: Stream | None = None) -> None:
        stream, before, token = stream or self._sim.current, self.token, Token()

        def complete() -> None:
            token.done_at = self._sim.clock

        self.token = token
        try:
            self._sim.put(stream, complete)
        except BaseException:
            if token.done_at is None and complete not in stream.queue:
                self.token = before  # the call did not reach the device
            raise

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self._sim.current).wait_event(self)

    def synchronize(self) -> None:
        token = self.token
        if token is not None:
            self._sim.run_until(lambda: token.done_at is not None)

    def query(self) -> bool:
        self._sim.go_ahead()
        return self.token is None or self.token.done_at is not None

    def elapsed_time(self, other: Event) -> float:
        times = [event.token.done_at if event.token is not None else None for event in (self, other)]
        if not (self._enable_timing and other._enable_timing) or None in times:
            raise RuntimeError("Both events must be created with enable_timing=True, be recorded, and have happened")
        return float(times[1] - times[0]) + 1.0  # type: ignore[operator]


class Memory:
    """Memory that the device may use; addresses are never given out twice.

    Attributes:
        address: first byte.
        nbytes: size.
        is_live: whether its owner has it, in the order of the stream that it was allocated on.
        stream: stream that it was allocated on, or None for page-locked memory of the host.
        used_by: streams that it was recorded for.
    """

    def __init__(self, address: int, nbytes: int, stream: Stream | None, keep: Any = None) -> None:
        self.address, self.nbytes, self.stream = address, nbytes, stream
        self.is_live = stream is None
        self.used_by: set[Stream] = set()
        self._keep = keep


class View(NamedTuple):
    """A tensor's memory, without keeping it alive, as kernels know it."""

    address: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> View:
        return cls(tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())

    @property
    def nbytes(self) -> int:
        if 0 in self.shape:
            return 0
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        return (last + 1) * self.dtype.itemsize

    def tensor(self) -> torch.Tensor:
        if not self.nbytes:
            return torch.empty(self.shape, dtype=self.dtype)
        memory = (ctypes.c_char * self.nbytes).from_address(self.address)
        return torch.frombuffer(memory, dtype=self.dtype).as_strided(self.shape, self.stride)


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Values of a function of all parts of a tuple and of the tuples in it.

    Of a test with many small chunks, pytrees, which know more kinds, took a quarter of the time.
    """
    if isinstance(value, (list, dict)):
        raise TypeError("arguments of a kernel are tuples")
    if isinstance(value, View) or not isinstance(value, tuple):
        return function(value)
    parts = [_mapped(function, part) for part in value]
    return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)


class Interrupt(Exception):
    """Comes while work is enqueued."""


class DeviceFault(AssertionError):
    """The device used memory that was not there, or not any more."""


class SimulatedDevice:
    """Streams, memory and kernels of one device.

    Attributes:
        schedule: order in which deferred work runs, or None to run everything at once.
        streams: all streams; the first is the default stream.
        current: the stream that work goes to.
        clock: operations run so far.
        is_running: whether an operation runs now, as opposed to the host's code.
        faults: wrong uses of memory so far.
        calls_left: copies and kernels that are still enqueued before one raises `Interrupt`, or
            None.
    """

    def __init__(self, schedule: Schedule | None = None) -> None:
        self.schedule = schedule
        self.streams: list[Stream] = []
        self.clock = 0
        self.is_running = False
        self.faults: list[str] = []
        self.calls_left: int | None = None
        self._rng = random.Random(schedule.seed if schedule else 0)
        self._memories: list[Memory] = []
        self._addresses: list[int] = []
        self._dropped: list[Memory] = []  # by the garbage collector, at any time
        self._given_back: list[tuple[Memory, list[Token]]] = []
        self.current = Stream(self)

    # -- time --------------------------------------------------------------------------------------

    def rank(self, number: int) -> float:
        """Place of a new stream among those that may run."""
        return self.schedule.order[number % 3] - number / 1000 if self.schedule else number

    def put(self, stream: Stream, work: Any) -> None:
        """Enqueues an operation, or a token to wait for."""
        if self.is_running:
            raise AssertionError("the device cannot enqueue work")
        self._reuse()
        stream.queue.append(work)
        if self.schedule is None:
            self.run_all()
        else:
            self.go_ahead()

    def go_ahead(self) -> None:
        """Lets the device do something while the host is busy, if the schedule says so."""
        if self.schedule and self._rng.random() < self.schedule.eagerness:
            with self._on_the_device():
                for _ in range(self._rng.choice((1, 4, 40))):
                    if not self._run_one():
                        break

    def run_until(self, condition: Callable[[], bool]) -> None:
        """Runs operations until something is true."""
        with self._on_the_device():
            while not condition():
                # A finalizer, which comes at any time, may have run what was left.
                if not self._run_one() and not condition():
                    raise AssertionError("deadlock: every stream waits")

    def run_all(self) -> None:
        """Runs everything."""
        self.run_until(lambda: not any(stream.queue for stream in self.streams))

    def _run_one(self) -> bool:
        for stream in sorted(self.streams, key=lambda stream: stream.rank):
            if stream.queue and not (isinstance(stream.queue[0], Token) and stream.queue[0].done_at is None):
                work = stream.queue.popleft()
                if not isinstance(work, Token):
                    self._run(work)
                return True
        return False

    @contextlib.contextmanager
    def _on_the_device(self) -> Iterator[None]:
        before, self.is_running = self.is_running, True
        try:
            with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
                yield
        finally:
            self.is_running = before

    def _run(self, work: Callable[[], None]) -> None:
        self.clock += 1
        try:
            work()
        except DeviceFault as fault:
            self.faults.append(str(fault))

    # -- memory ------------------------------------------------------------------------------------

    def add(self, memory: Memory) -> None:
        """Makes memory known."""
        index = bisect.bisect(self._addresses, memory.address)
        self._addresses.insert(index, memory.address)
        self._memories.insert(index, memory)

    def remove(self, address: int) -> None:
        """Forgets page-locked memory."""
        index = bisect.bisect(self._addresses, address) - 1
        if index >= 0 and self._addresses[index] == address:
            del self._addresses[index], self._memories[index]

    def find(self, address: int) -> Memory | None:
        """The memory that an address lies in."""
        index = bisect.bisect(self._addresses, address) - 1
        if index >= 0 and address < self._addresses[index] + self._memories[index].nbytes:
            return self._memories[index]
        return None

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in the device's own memory."""
        memory = self.find(tensor.data_ptr())
        return memory is not None and memory.stream is not None

    def check(self, address: int, nbytes: int, what: str) -> None:
        """Raises DeviceFault unless the device may use some memory now."""
        if self.schedule is None or not nbytes:
            return
        memory = self.find(address)
        if memory is None or address + nbytes > memory.address + memory.nbytes:
            raise DeviceFault(f"{what} uses {nbytes} bytes that nobody allocated")
        if not memory.is_live:
            raise DeviceFault(f"{what} uses memory that is somebody else's by now, or still is")

    def allocate(self, nbytes: int) -> torch.Tensor:
        """``[nbytes]`` uint8 of the device's own memory, from the current stream's pool, filled
        with NaN.
        """
        room = np.empty(nbytes + _ALIGNMENT, np.uint8)
        start = -room.ctypes.data % _ALIGNMENT
        base = room[start : start + nbytes]
        memory = Memory(base.ctypes.data, nbytes, self.current, base)
        handle = (ctypes.c_char * nbytes).from_buffer(base)
        weakref.finalize(handle, self._dropped.append, memory).atexit = False
        self.add(memory)

        def hand_over() -> None:
            memory.is_live = True
            base.fill(0xFF)

        # Work that was enqueued before may still use it for something else.
        self.put(self.current, hand_over)
        with torch.inference_mode(False):
            return torch.frombuffer(handle, dtype=torch.uint8)

    def _reuse(self) -> None:
        """Hands dropped memory to others, behind the streams that it was recorded for, as torch's
        allocator does.
        """
        while self._dropped:
            memory = self._dropped.pop()
            tokens = []
            for stream in memory.used_by - {memory.stream}:
                token = Token()

                def complete(token: Token = token) -> None:
                    token.done_at = self.clock

                stream.queue.append(complete)
                tokens.append(token)
            self._given_back.append((memory, tokens))
        for item in self._given_back[:]:
            memory, tokens = item
            if all(token.done_at is not None for token in tokens):
                self._given_back.remove(item)
                assert memory.stream is not None
                memory.stream.queue.append(functools.partial(setattr, memory, "is_live", False))

    def to_device(self, values: torch.Tensor) -> torch.Tensor:
        """A copy of host values in the device's memory, on the current stream."""
        values = values.detach().clone()
        if not values.numel():
            return values
        tensor = self.allocate(values.numel() * values.itemsize).view(values.dtype).view(values.shape)
        view = View.of(tensor)
        self.put(self.current, lambda: view.tensor().copy_(values))
        return tensor

    # -- what the package calls --------------------------------------------------------------------

    def _count_call(self) -> None:
        if self.calls_left is not None:
            self.calls_left -= 1
            if self.calls_left < 0:
                self.calls_left = None
                raise Interrupt

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> int:
        """The driver's asynchronous copies."""
        self._count_call()

        def run() -> None:
            self.check(target, nbytes, "a copy")
            self.check(source, nbytes, "a copy")
            ctypes.memmove(target, source, nbytes)

        self.put(self.streams[stream - 1], run)
        return 0

    def launch(self, launches: Launches, index: int, slot_index: int) -> None:
        """The kernel of one chunk, by its specification."""
        rows, phases = launches._plan.table.chunks[index], launches._inputs.rule.phases
        phase = phases[launches._plan.kinds[index].phase]
        state = launches._plan.state(index, slot_index, launches._inputs.rule, launches._ring, launches._window)
        table, arguments = launches._table[index], (state, *launches._shared(index))
        self._count_call()
        views = _mapped(lambda value: View.of(value) if isinstance(value, torch.Tensor) else value, (table, arguments))

        def tensor(value: Any) -> Any:
            if not isinstance(value, View):
                return value
            self.check(value.address, value.nbytes, "a kernel")
            return value.tensor()

        def run() -> None:
            table, arguments = _mapped(tensor, views)
            self._run_phase(phases, phase.reference, table[: rows.rows], *arguments)

        self.put(self.current, run)

    def _run_phase(
        self, phases: Any, reference: Any, table: torch.Tensor, state: Any, scalars: Any, kind: Any, amp: ScalerSignals
    ) -> None:
        if isinstance(scalars.lr, torch.Tensor):
            scalars = scalars._replace(lr=scalars.lr.item())
        skip, writes = False, True
        if amp.found_inf is not None:
            assert amp.skips is not None
            assert amp.skip_rows is not None
            skip = bool(amp.found_inf.item() != 0)
            row = int(amp.skips.item()) - amp.skips_before
            if not 0 <= row < len(amp.skip_rows):
                raise DeviceFault(f"a kernel reads row {row} of {len(amp.skip_rows)}")
            corrections = [name for name in scalars._fields if name.startswith("bias_correction")]
            by_skips = dict(zip(corrections, amp.skip_rows[row].tolist(), strict=False))
            scalars = scalars._replace(**by_skips, step=max(1, scalars.step - row))
        if skip:  # state that no step wrote gets its initial value: a step of nothing
            writes = any(value is True for value in state)  # init_...
            writes = writes or (kind.param_dtype == torch.float32 and state.master_param is not None)
            of_nothing = {
                "lr": 0.0,
                "beta1": 1.0,
                "one_minus_beta1": 0.0,
                "beta2": 1.0,
                "one_minus_beta2": 0.0,
                "weight_decay": 0.0,
                "decay": 1.0,
            }
            scalars = scalars._replace(**{name: of_nothing[name] for name in of_nothing if name in scalars._fields})
        scale = None if amp.grad_scale is None else amp.grad_scale.item()
        for _, param_address, grad_address, start, numel, counter, *beside in table.tolist():
            views = [
                View(address, dtype, (numel,), (1,))
                for address, dtype in ((param_address, kind.param_dtype), (grad_address, kind.grad_dtype))
            ]
            more: dict[str, Any] = {}
            if beside:
                assert phases[0].then is not None
                views.append(View(beside[0], phases[0].then.dtype, (numel,), (1,)))
                array, scalar = views[2].tensor(), float(np.int32(beside[1]).view(np.float32))
                more = {"array": torch.zeros_like(array) if skip else array, "scalar": scalar}
            for view in views:
                self.check(view.address, view.nbytes, "a kernel")
            if writes:
                param, grad = (view.tensor() for view in views[:2])
                grad = torch.zeros_like(grad) if skip else grad
                part = state.narrow(start, numel)
                reference(param, grad, part, scalars, grad_scale=scale, counter=counter, **more)


class _Driver:
    """The driver's library as far as the package calls it to page-lock and to copy."""

    def __init__(self, sim: SimulatedDevice) -> None:
        self._sim = sim
        self.cuMemcpyHtoDAsync_v2 = self.cuMemcpyDtoHAsync_v2 = sim.copy

    def cuMemHostRegister_v2(self, address: int, nbytes: int, flags: int) -> int:
        self._sim.add(Memory(address, nbytes, None))
        return 0

    def cuMemHostUnregister(self, address: int) -> int:
        self._sim.remove(address)
        return 0


class _Torch:
    """torch, as a module that allocates on the device sees it."""

    def __init__(self, sim: SimulatedDevice) -> None:
        self._sim = sim

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *size: Any, dtype: torch.dtype | None = None, device: Any = None) -> torch.Tensor:
        plain = torch.empty(*size, dtype=dtype, device=device)
        if not isinstance(device, torch.device) or not plain.numel():
            return plain
        return self._sim.allocate(plain.numel() * plain.itemsize).view(plain.dtype).view(plain.shape)

    def full(self, size: Any, value: Any, *, dtype: torch.dtype, device: Any) -> torch.Tensor:
        return self.empty(size, dtype=dtype, device=device).fill_(value)

    def zeros(self, *size: Any, dtype: torch.dtype, device: Any) -> torch.Tensor:
        return self.empty(*size, dtype=dtype, device=device).zero_()


class _DeferredOperations(TorchDispatchMode):
    """Defers torch's operations on the device's memory to the current stream, as they are on a
    GPU.
    """

    def __init__(self, sim: SimulatedDevice) -> None:
        super().__init__()
        self._sim = sim

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        sim, kwargs = self._sim, kwargs or {}
        if not any(map(self._is_ours, args)) and not any(map(self._is_ours, kwargs.values())):
            return func(*args, **kwargs)
        schema = func._schema
        written = [argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments]
        if not any(written) and any(returned.alias_info is not None for returned in schema.returns):
            return func(*args, **kwargs)  # a view
        if func is torch.ops.aten.copy_.default:
            return self._copy(*args, **kwargs)
        if any(written):
            self._defer(func, args, kwargs)
            names = [argument.name for argument in schema.arguments]
            given = dict(zip(names, args, strict=False)) | kwargs
            results = [given[name] for name, is_written in zip(names, written, strict=True) if is_written]
            return results[0] if len(schema.returns) == 1 else tuple(results) or None
        result = func(*args, **kwargs)  # for its shape
        if not isinstance(result, torch.Tensor):
            sim.current.synchronize()
            return func(*args, **kwargs)
        target = sim.to_device(result) if result.numel() else result
        if result.numel():
            self._defer(lambda out, *args, **kwargs: out.copy_(func(*args, **kwargs)), (target, *args), kwargs)
        return target

    def _is_ours(self, argument: Any) -> bool:
        if isinstance(argument, torch.Tensor):
            return self._sim.owns(argument)
        return isinstance(argument, list | tuple) and any(map(self._is_ours, argument))

    def _copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        sim = self._sim
        is_async = non_blocking and all(sim.find(tensor.data_ptr()) is not None for tensor in (target, source))
        self._defer(lambda out, value: out.copy_(value), (target, source), {}, snapshots=not is_async)
        if not sim.owns(target) and not is_async:
            sim.current.synchronize()
        return target

    def _defer(self, func: Any, args: Any, kwargs: Any, *, snapshots: bool = True) -> None:
        """Enqueues an operation. Only the device's memory is not kept alive; values of the host are
        those of now.
        """
        sim, first = self._sim, True

        def described(value: Any) -> Any:
            nonlocal first
            is_first, first = first, False
            if not isinstance(value, torch.Tensor):
                return value
            if sim.owns(value):
                return View.of(value)
            return value if is_first or not snapshots else value.clone()

        def tensor(value: Any) -> Any:
            if not isinstance(value, View):
                return value
            sim.check(value.address, value.nbytes, "an operation")
            return value.tensor()

        views = tree_map(described, (args, kwargs))

        def run() -> None:
            args, kwargs = tree_map(tensor, views, is_leaf=lambda value: isinstance(value, View))
            func(*args, **kwargs)

        sim.put(sim.current, run)


class Signal(torch.Tensor):
    """A gradient scaler's signal that says that it is on a GPU, so that the host does not read
    it.
    """

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return _GPU

    def cpu(self) -> torch.Tensor:  # type: ignore[override]
        """Its value, once the device has come to it."""
        torch.cuda.current_stream().synchronize()
        return self.as_subclass(torch.Tensor).clone()


@contextlib.contextmanager
def installed(sim: SimulatedDevice, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sends parameters on the CPU through the GPU's pipeline, on a simulated device.

    Args:
        sim: the device.
        patch: what puts it in the place of torch's and of the driver.
    """

    @contextlib.contextmanager
    def stream(stream: Stream) -> Iterator[None]:
        before, sim.current = sim.current, stream
        try:
            yield
        finally:
            sim.current = before

    for name, value in {
        "Stream": functools.partial(Stream, sim),
        "Event": functools.partial(Event, sim),
        "current_stream": lambda device=None: sim.current,
        "device": lambda device: contextlib.nullcontext(),
        "stream": stream,
        "synchronize": lambda device=None: sim.run_all(),
        "mem_get_info": lambda device=None: (2**40, 2**40),
        "memory_stats_as_nested_dict": lambda device=None: {},
    }.items():
        patch.setattr(torch.cuda, name, value)
    patch.setattr(torch.Tensor, "record_stream", lambda self, stream: _record_stream(sim, self, stream))
    driver = _Driver(sim)
    patch.setattr(cuda_driver, "_driver", lambda: driver)
    for module in (devices, storage):
        patch.setattr(module, "_CPU", torch.device("meta"))
    patch.setattr(DeviceQueues, "_of_device", weakref.WeakValueDictionary())
    if sim.schedule is not None:
        patch.setattr(Launches, "launch", lambda self, index, slot=0: sim.launch(self, index, slot))
        patch.setattr(Stepper, "on_one_gpu", lambda self: True)
        make = Extent.__init__
        patch.setattr(Extent, "__init__", lambda *args, pin: make(*args, pin=True))
        for owner in (Window, StagingRing, UploadBuffer, SkipCounter, Extent, HostGrad, order_of_work):
            patch.setattr(sys.modules[owner.__module__], "torch", _Torch(sim))
    with _DeferredOperations(sim) if sim.schedule is not None else contextlib.nullcontext():
        yield


def _record_stream(sim: SimulatedDevice, tensor: torch.Tensor, stream: Stream) -> None:
    memory = sim.find(tensor.data_ptr())
    if memory is not None:
        memory.used_by.add(stream)
