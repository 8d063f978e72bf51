"""Rules of two phases: any chunks, on any device, give the bits of whole parameters, one after the
other.
"""

from __future__ import annotations

import copy
import itertools
from functools import partial
from typing import Any

import pytest
import torch
from helpers import Snapshot, assert_same_bits, assert_same_snapshot

pytest.importorskip("triton")

import two_phases
from simulated_device import SCHEDULES, Interrupt, SimulatedDevice
from test_simulated_device import Device, run
from two_phases import FORMATS, Plain, Toy

from fused_offload import OffloadConfig
from fused_offload.plan.chunks import Chunk, Segment, make_plan
from fused_offload.plan.operations import Operation, WorkMemory, in_order, placed
from fused_offload.rules.base import UpdateRule
from fused_offload.stream.operations import order_of_work

SHAPES = ((300,), (40, 50), (1,), (128,), (7, 129), (900,), (5, 3))
CHUNKS = {"small": 512, "odd": 128 * 4 * 5 + 3, "whole": 2**30}


def tensors(seed: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """One of each shape; the second in another memory order."""
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    made[1] = made[1].t().contiguous().t()
    return made


def make(params: list[torch.Tensor], formats: str, **options: Any) -> Toy:
    _, momentum, _, arguments = FORMATS[formats]
    config = OffloadConfig(**{"depth": 2, **options})
    return Toy([torch.nn.Parameter(p) for p in params], momentum_format=momentum, offload=config, **arguments)


def params_of(optimizer: Toy) -> list[torch.nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


# -- the CPU's loop --------------------------------------------------------------------------------


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("chunk_bytes", CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize("formats", FORMATS)
def test_any_chunks_give_the_bits_of_whole_parameters(formats: str, chunk_bytes: int, fraction: float) -> None:
    dtype, momentum, master, _ = FORMATS[formats]
    optimizer = make(tensors(0, dtype), formats, chunk_bytes=chunk_bytes, fraction=fraction)
    plain = Plain(tensors(0, dtype), momentum_format=momentum, master=master)
    for number in range(4):
        grads: list[torch.Tensor | None] = [*tensors(1 + number, dtype)]
        if number in (1, 2):
            grads[number] = None
        for param, grad in zip(params_of(optimizer), grads, strict=True):
            param.grad = grad
        lr = 0.1 / (1 + number)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.grad_scale, optimizer.found_inf = torch.full((1,), 4.0), torch.full((1,), float(number == 1))  # type: ignore[attr-defined]
        optimizer.step()
        if number != 1:
            plain.step(grads, lr=lr, grad_scale=4.0)
    for index, (param, wanted) in enumerate(zip(params_of(optimizer), plain.params, strict=True)):
        assert_same_bits(param, wanted, f"parameter {index}")
        for key, stored in (
            ("momentum", plain.state[index].momentum),
            ("master_param", plain.state[index].master_param),
        ):
            if stored is not None:
                value = optimizer.state[param].peek(key)
                assert_same_bits(value.as_strided((value.numel(),), (1,)), stored.data, f"{key} of {index}")


# -- the pipeline, on a simulated device -----------------------------------------------------------


def steps(device: Device, formats: str, **options: Any) -> list[Snapshot]:
    """Steps with gradients missing and a learning rate that changes, then some of which the device
    skips one.
    """
    dtype = FORMATS[formats][0]
    optimizer = make([device.copied(param) for param in tensors(0, dtype)], formats, **options)
    for number in range(6):
        for index, grad in enumerate(tensors(1 + number, dtype)):
            params_of(optimizer)[index].grad = None if index == number else device.copied(grad)
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + number)
        if number > 2:
            optimizer.grad_scale = device.signal(2.0)  # type: ignore[attr-defined]
            optimizer.found_inf = device.signal(float(number == 4))  # type: ignore[attr-defined]
        optimizer.step()
    return [device.snapshot(optimizer)]


CASES = list(itertools.product(FORMATS, CHUNKS.values(), (0.0, 0.5, 1.0)))


@pytest.mark.parametrize(("number", "case"), list(enumerate(CASES)), ids=str)
def test_any_legal_order_gives_the_same_bits(number: int, case: tuple[str, int, float]) -> None:
    formats, chunk_bytes, fraction = case
    for turn in range(3):
        schedule = SCHEDULES[(3 * number + turn) % len(SCHEDULES)]
        run(partial(steps, formats=formats, chunk_bytes=chunk_bytes, fraction=fraction), schedule)


def interrupted(device: Device, calls: int) -> list[Snapshot]:
    """A step that ends after so many copies and kernels; then another optimizer, and a load."""
    one, other = (
        make([device.copied(param) for param in tensors(seed, torch.float32)], "fp32_master", chunk_bytes=2048)
        for seed in (0, 50)
    )

    def give_grads(seed: int) -> None:
        for optimizer in (one, other):
            for param, grad in zip(params_of(optimizer), tensors(seed, torch.float32), strict=True):
                param.grad = device.copied(grad)

    give_grads(1)
    one.step()
    other.step()
    saved = copy.deepcopy(one.state_dict())
    weights = [param.detach().clone() for param in params_of(one)]
    give_grads(2)
    if device.sim is not None:
        device.sim.calls_left = calls
        with pytest.raises(Interrupt):
            one.step()
        with pytest.raises(RuntimeError, match="failed half-way"):
            one.step()
    other.step()
    one.load_state_dict(saved)
    with torch.no_grad():
        for param, weight in zip(params_of(one), weights, strict=True):
            param.copy_(weight)
    one.step()
    return [device.snapshot(one), device.snapshot(other)]


@pytest.mark.parametrize("calls", [1, 2, 3, 5, 8, 12, 17, 23, 30])
def test_an_interrupt_at_any_call_fails_the_step_until_a_load(calls: int) -> None:
    """Between any two copies and kernels: the optimizer refuses to go on, others and a load are
    right.
    """
    run(partial(interrupted, calls=calls), SCHEDULES[calls % len(SCHEDULES)])


def test_a_part_of_an_operation_that_fails_fails_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = make(tensors(0, torch.float32), "fp32", chunk_bytes=512)
    for param in params_of(optimizer):
        param.grad = torch.ones_like(param)
    optimizer.step()

    monkeypatch.setattr(Toy, "_rule", lambda self: RULE_THAT_FAILS)
    with pytest.raises(KeyError, match="mine"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="failed half-way"):
        optimizer.step()


class _RuleThatFails(two_phases.ToyRule):
    @property
    def phases(self) -> Any:  # type: ignore[override]
        def parts(*_: Any) -> Any:
            def fail() -> None:
                raise KeyError("mine")

            return [fail]

        first, second = two_phases.ToyRule.phases
        return first._replace(then=two_phases.OPERATION._replace(parts=parts)), second


RULE_THAT_FAILS = _RuleThatFails()


def test_memory_that_is_not_there_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    allocate = SimulatedDevice.allocate

    def out_of_memory(self: SimulatedDevice, nbytes: int) -> torch.Tensor:
        if nbytes > 3000:  # the ring has two slots of a kilobyte
            raise torch.OutOfMemoryError("mine")
        return allocate(self, nbytes)

    def scenario(device: Device) -> list[Snapshot]:
        params = [device.copied(param) for param in tensors(0, torch.float32)]
        optimizer = make(params, "fp32", chunk_bytes=1024)
        for param, grad in zip(params_of(optimizer), tensors(1, torch.float32), strict=True):
            param.grad = device.copied(grad)
            optimizer.initialize_state(param)
        if device.sim is not None:
            before = device.snapshot(optimizer)
            with monkeypatch.context() as small:
                small.setattr(SimulatedDevice, "allocate", out_of_memory)
                small.setattr(torch.cuda, "mem_get_info", lambda device=None: (3000, 2**40))
                with pytest.raises(
                    RuntimeError, match=r"and \d+ bytes of work memory.* Free GPU memory first: a smaller ring"
                ):
                    optimizer.step()
            assert_same_snapshot(device.snapshot(optimizer), before)
            assert optimizer.memory_report().work_bytes == 0
        optimizer.step()
        assert (optimizer.memory_report().work_bytes > 3000) == (device.sim is not None)
        optimizer.release_gpu_memory()
        assert optimizer.memory_report().work_bytes == 0
        return [device.snapshot(optimizer)]

    run(scenario, SCHEDULES[0])


@pytest.mark.parametrize(
    ("formats", "bytes_to_device", "bytes_to_host"),
    [("fp32", 4, 4), ("fp32_master", 4, 8), ("bf16", 2, 2), ("master", 8, 8), ("remainder", 4, 4)],
)
def test_chunks_move_the_keys_of_their_phase_alone(formats: str, bytes_to_device: int, bytes_to_host: int) -> None:
    """Bytes and slots are those of a phase; without masters the second phase moves nothing."""
    numel = sum(-(-torch.Size(shape).numel() // 128) * 128 for shape in SHAPES)

    def scenario(device: Device) -> list[Snapshot]:
        dtype = FORMATS[formats][0]
        optimizer = make([device.copied(param) for param in tensors(0, dtype)], formats, chunk_bytes=1024)
        for _ in range(2):
            for param, grad in zip(params_of(optimizer), tensors(1, dtype), strict=True):
                param.grad = device.copied(grad)
            optimizer.step()
        seen = device.snapshot(optimizer)
        if device.sim is not None:
            torch.cuda.synchronize()
            report = optimizer.last_step_report()
            assert report is not None
            assert report.bytes_to_device == numel * bytes_to_device
            assert report.bytes_to_host == numel * bytes_to_host
            assert optimizer.memory_report().ring_bytes == 2 * 1024
        return [seen]

    run(scenario, SCHEDULES[0])


# -- order and work memory -------------------------------------------------------------------------


def chunks_of(*numels: int, capacity: int, kind: str, largest_first: bool = False) -> tuple[Chunk, ...]:
    starts = itertools.accumulate(-(-numel // 128) * 128 for numel in (0, *numels))
    segments = [Segment(kind, start, numel) for start, numel in zip(starts, numels, strict=False)]
    return make_plan(segments, lambda kind: capacity, keep_whole=True, largest_first=largest_first)


def test_a_parameter_that_is_cut_shares_no_chunk() -> None:
    chunks = chunks_of(100, 200, 700, 100, 300, kind="a", capacity=384)
    assert [[(piece.segment, piece.offset, piece.numel) for piece in chunk.pieces] for chunk in chunks] == [
        [(0, 0, 100), (1, 0, 200)],
        [(2, 0, 384)],
        [(2, 384, 316)],
        [(3, 0, 100)],
        [(4, 0, 300)],
    ]
    assert [chunk.numel for chunk in chunks] == [384, 384, 384, 128, 384]


def test_chunks_of_a_parameter_that_is_cut_are_of_one_size() -> None:
    """A small one behind a full one would leave most of a slot empty, and the link idle."""
    chunks = chunks_of(1100, capacity=1024, kind="a")
    assert [[(piece.offset, piece.numel) for piece in chunk.pieces] for chunk in chunks] == [[(0, 640)], [(640, 460)]]
    assert [[(part.start, part.numel) for part in chunk.ranges] for chunk in chunks] == [[(0, 640)], [(640, 512)]]


def test_parameters_of_one_size_fill_chunks_wherever_they_lie() -> None:
    chunks = chunks_of(*[100, 1000] * 3, capacity=384, kind="a", largest_first=True)
    assert [[piece.segment for piece in chunk.pieces] for chunk in chunks] == [[1]] * 3 + [[3]] * 3 + [[5]] * 3 + [
        [0, 2, 4]
    ]
    assert [(part.numel, part.slot_start) for part in chunks[-1].ranges] == [(128, 0), (128, 128), (128, 256)]


def test_neighbours_run_beside_an_operation() -> None:
    first, second = (chunks_of(256, 256, 256, kind=kind, capacity=128) for kind in "ab")
    chunks, operations = in_order(first, second)
    assert operations == [Operation(0, 2, 2), Operation(1, 4, 4), Operation(2, 8, 2)]
    assert [(chunk.kind, chunk.pieces[0].segment) for chunk in chunks] == [
        *[("a", 0)] * 2,
        *[("a", 1)] * 2,
        *[("b", 0)] * 2,
        *[("a", 2)] * 2,
        *[("b", 1)] * 2,
        *[("b", 2)] * 2,
    ]


def test_large_parameters_come_first() -> None:
    """In both phases, and whichever chunks they share."""
    first, second = (chunks_of(100, 300, 128, 500, 900, 120, kind=kind, capacity=384) for kind in "ab")
    chunks, operations = in_order(first, second)
    assert [operation.segment for operation in operations] == [4, 3, 1, 2, 5, 0]
    assert [(chunk.kind, chunk.pieces[0].segment, chunk.pieces[0].offset) for chunk in chunks] == [
        *[("a", 4, 0), ("a", 4, 384), ("a", 4, 768)],
        *[("a", 3, 0), ("a", 3, 256)],
        *[("b", 4, 0), ("b", 4, 384), ("b", 4, 768)],
        *[("a", 1, 0), ("b", 3, 0), ("b", 3, 256), ("a", 2, 0), ("b", 1, 0), ("a", 5, 0)],
        *[("b", 2, 0), ("a", 0, 0), ("b", 5, 0), ("b", 0, 0)],
    ]


def test_kinds_take_turns_among_parameters_of_one_size() -> None:
    """So that operations of streamed parameters alternate with those of resident ones."""
    streamed, resident = (chunks_of(*[256] * count, kind=kind, capacity=128) for kind, count in (("s", 4), ("r", 2)))
    resident = tuple(
        chunk._replace(pieces=tuple(piece._replace(segment=piece.segment + 4) for piece in chunk.pieces))
        for chunk in resident
    )
    both = (*streamed, *resident)
    chunks, operations = in_order(both, both)
    assert [operation.segment for operation in operations] == [0, 4, 1, 2, 5, 3]
    assert sorted(map(id, chunks)) == sorted(map(id, both + both))


@pytest.mark.parametrize("capacity", [128, 384, 2**20])
def test_collective_operations_follow_the_parameters_whatever_the_chunks(capacity: int) -> None:
    numels = (100, 300, 128, 500, 900, 120)
    first, second = (chunks_of(*numels, kind=kind, capacity=capacity) for kind in "ab")
    _, operations = in_order(first, second, largest_first=False)
    assert [operation.segment for operation in operations] == list(range(len(numels)))


def test_small_parameters_share_chunks_and_wait_for_each_other() -> None:
    first = chunks_of(128, 128, 128, kind="a", capacity=256)
    second = chunks_of(128, 128, 128, kind="b", capacity=384)
    chunks, operations = in_order(first, second)
    assert operations == [Operation(0, 1, 0), Operation(1, 1, 1), Operation(2, 2, 0)]
    assert [chunk.kind for chunk in chunks] == ["a", "a", "b"]


@pytest.mark.parametrize("capacity", [128, 256, 1024, 2**20])
@pytest.mark.parametrize("seed", range(5))
def test_arrays_in_use_never_overlap(seed: int, capacity: int) -> None:
    numels = torch.randint(1, 2000, (20,), generator=torch.Generator().manual_seed(seed)).tolist()
    chunks, operations = in_order(*(chunks_of(*numels, kind=kind, capacity=capacity) for kind in "ab"))
    operations, work = placed(chunks, operations, lambda segment: 2 * numels[segment], 1000)
    assert sorted(operation.segment for operation in operations) == list(range(20))
    offset_of = {operation.segment: operation.offset for operation in operations}
    use: dict[int, list[int]] = {}
    for number, chunk in enumerate(chunks):
        for piece in chunk.pieces:
            use.setdefault(piece.segment, []).append(number)
    for one, other in itertools.combinations(use, 2):
        if max(min(use[one]), min(use[other])) <= min(max(use[one]), max(use[other])):
            stops = [offset_of[segment] + 2 * numels[segment] for segment in (one, other)]
            assert stops[0] <= offset_of[other] or stops[1] <= offset_of[one]
    assert max(offset_of[segment] + 2 * numels[segment] for segment in use) <= work.scratch <= work.nbytes - 1000
    for operation in operations:  # between the first phase of its parameter and the second
        kinds = [chunks[number].kind for number in use[operation.segment]]
        numbers = dict(zip(use[operation.segment], kinds, strict=True))
        assert all((kind == "a") == (number < operation.position) for number, kind in numbers.items())
        assert all(number >= operation.position + operation.beside for number, kind in numbers.items() if kind == "b")


def test_equal_parameters_take_the_memory_of_two() -> None:
    chunks, operations = in_order(*(chunks_of(*[1024] * 9, kind=kind, capacity=256) for kind in "ab"))
    _, work = placed(chunks, operations, lambda segment: 2048, 100)
    assert work == WorkMemory(2 * 2048, 2 * 2048 + 512)


def test_chunks_are_spread_over_the_parts() -> None:
    log: list[Any] = []
    parts = [lambda number=number: log.append(f"part {number}") for number in range(6)]
    for item in order_of_work(5, [Operation(0, 1, 2)], lambda operation: parts):
        log.append(item) if isinstance(item, int) else item()
    assert log == [0, "part 0", "part 1", 1, "part 2", "part 3", 2, "part 4", "part 5", 3, 4]


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["formats", "check_group", "bind", "step_values", "compiled_values"])
def test_a_rule_has_all_that_rules_do_not_share(missing: str) -> None:
    """Otherwise it would check or compute nothing, without a word."""
    members = {name: value for name, value in vars(two_phases.ToyRule).items() if not name.startswith("__")}
    del members[missing]
    incomplete = type("Incomplete", (UpdateRule,), members)
    with pytest.raises(TypeError, match=f"abstract method '?{missing}"):
        incomplete()


def test_what_two_phases_cannot_do_is_refused_at_construction() -> None:
    param = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match=r"Toy moves its state in two passes.*window_bytes"):
        Toy([param], offload=OffloadConfig(window_bytes=1000))
    with pytest.raises(ValueError, match="Toy moves its state in two passes through the staging ring"):
        Toy([param], offload=OffloadConfig(transport="zero_copy"))
    optimizer = Toy([param])
    assert optimizer.offload.transport == "copy"
    model = torch.nn.ParameterList([param])
    with pytest.raises(RuntimeError, match=r"Toy works on whole parameters .* call step"):
        optimizer.step_in_backward(model)


def test_phases_that_the_engine_does_not_run_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    param = torch.nn.Parameter(torch.ones(3))
    first, second = two_phases.ToyRule.phases
    monkeypatch.setattr(two_phases.ToyRule, "phases", (first, first, second))
    with pytest.raises(RuntimeError, match="an update rule with 3 phases; it should have one, or two"):
        Toy([param])
    monkeypatch.setattr(two_phases.ToyRule, "phases", (first, second._replace(reads=first.reads)))
    with pytest.raises(RuntimeError, match="moves momentum in both of its phases"):
        Toy([param])
