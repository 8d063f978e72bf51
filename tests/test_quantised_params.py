"""Parameters whose class stands for other tensors: what is refused by name, and what fails first.

Real quantised classes are TransformerEngine's, which needs a GPU to be imported:
tests/test_quantised_gpu.py.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import Snapshot, assert_same_snapshot, bits, param_of, unchanged
from torch import nn

pytest.importorskip("triton")

import quantised_stand_ins as stand_ins
from quantised_stand_ins import CLASSES, Current, Delayed, Quantised, config
from simulated_device import SCHEDULES, SimulatedDevice
from test_simulated_device import Device, run
from two_phases import Toy

from fused_offload import FusedOffloadAdam, FusedOffloadLion, OffloadConfig
from fused_offload.params.quantised import plain_values

HINTS = {
    "somebody.tensors": "Pass plain tensors, and quantise what they hold",
    "transformer_engine.pytorch.tensor": "outside of quantized_model_init",
}


@pytest.fixture(autouse=True)
def fresh_notes() -> None:
    Quantised.calls.clear()
    Quantised.fails = None


def stand_in_class(module: str) -> type[torch.Tensor]:
    """A class of one byte an element that says it is bfloat16 and cannot quantise."""

    class Packed(torch.Tensor):
        _data: torch.Tensor

        @staticmethod
        def __new__(cls, data: torch.Tensor, requires_grad: bool = False) -> Any:
            made = torch.Tensor._make_wrapper_subclass(
                cls, data.shape, dtype=torch.bfloat16, device=data.device, requires_grad=requires_grad
            )
            made._data = data
            return made

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.detach.default:
                return cls(args[0]._data)
            raise NotImplementedError(func)

    Packed.__module__ = module
    return Packed


def packed(module: str = "somebody.tensors", *, frozen: bool = False) -> Any:
    return nn.Parameter(stand_in_class(module)(torch.zeros(4, 8, dtype=torch.uint8)), requires_grad=not frozen)


def quantised(cls: type[Quantised] = Current, shape: Any = (4, 8), **options: Any) -> Any:
    return stand_ins.param_of(cls, torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape), **options)


def running(*extra: Any, **options: Any) -> tuple[FusedOffloadAdam, nn.Parameter]:
    param = param_of(torch.ones(300))
    options = {"lr": 1e-2, "master_weights": True, "offload": OffloadConfig(chunk_bytes=1), **options}
    optimizer = FusedOffloadAdam([param, *extra], **options)
    for each in (param, *extra):
        each.grad = torch.ones(each.shape, dtype=each.dtype)
    optimizer.step()
    return optimizer, param


# -- classes that cannot quantise ------------------------------------------------------------------


@pytest.mark.parametrize("module", list(HINTS))
def test_refused_by_name_with_what_to_do(module: str) -> None:
    optimizer, plain = running()
    message = f"Parameter {{}} of parameter group {{}} is a Packed, .*{HINTS[module]}"
    with pytest.raises(TypeError, match=message.format(1, 0)):
        FusedOffloadAdam([plain, packed(module)], master_weights=True)
    with unchanged(optimizer), pytest.raises(TypeError, match=message.format(0, 1)):
        optimizer.add_param_group({"params": [packed(module)]})
    assert len(optimizer.param_groups) == 1
    late = packed(module)
    late.grad = None
    optimizer.param_groups[0]["params"].append(late)  # behind the optimizer's back
    before = plain.detach().clone()
    for _ in range(2):
        with pytest.raises(TypeError, match=message.format(1, 0)):
            optimizer.step()
    assert torch.equal(plain, before)
    assert optimizer.param_groups[0]["step"] == 1


def test_frozen_ones_are_to_be_left_out() -> None:
    """As beside adapters; a frozen base in 4 or 8 bits is often a plain tensor of bytes."""
    of_bytes = nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)
    for param, message in (
        (packed(frozen=True), "is a Packed, .* It is frozen, so leave it out"),
        (of_bytes, "parameter 0 of parameter group 0 has torch.uint8. It is frozen, so leave it out"),
        (quantised().requires_grad_(False), "is a Current, .* It is frozen, so leave it out"),
    ):
        with pytest.raises(TypeError, match=message):
            FusedOffloadAdam([param])


def test_class_of_a_bad_dtype_is_named() -> None:
    class Params4bit(nn.Parameter):
        pass

    with pytest.raises(TypeError, match=r"has torch.uint8 \(Params4bit\)"):
        FusedOffloadAdam([Params4bit(torch.zeros(4, dtype=torch.uint8), requires_grad=False)])


def test_shards_of_such_a_class_are_refused() -> None:
    class Sharded(torch.Tensor):  # has of a DTensor what it is told by
        _local_tensor = packed()
        _spec = SimpleNamespace(placements=())

    with pytest.raises(TypeError, match="Parameter 0 of parameter group 0 is a Packed"):
        FusedOffloadAdam([Sharded(torch.zeros(4, 8))])


@pytest.mark.parametrize("grad", ["packed", "quantised"])
def test_gradients_are_refused_too(grad: str) -> None:
    given = packed() if grad == "packed" else quantised()
    for param in (param_of(torch.ones(4, 8)), quantised()):
        optimizer = FusedOffloadAdam([param], master_weights=True)
        optimizer.use_decoupled_grad = True
        param.decoupled_grad = torch.ones(4, 8)
        optimizer.step()
        param.decoupled_grad = given.detach()
        name = type(given).__name__
        for _ in range(2):
            with unchanged(optimizer), pytest.raises(TypeError, match=f"A gradient in parameter group 0 is a {name}"):
                optimizer.step()


def test_subclasses_with_memory_of_their_own_are_stepped() -> None:
    class Named(nn.Parameter):
        pass

    params = [Named(torch.ones(300)), nn.Parameter(torch.ones(300))]
    optimizer = FusedOffloadAdam(params, lr=1e-2)
    for param in params:
        param.grad = torch.full((300,), 0.5)
    optimizer.step()
    assert torch.equal(params[0], params[1])
    assert not torch.equal(params[1], torch.ones(300))


# -- quantised parameters that cannot be stepped ---------------------------------------------------


def broken(**attributes: Any) -> Any:
    param = quantised()
    for name, value in attributes.items():
        setattr(param, name, value)
    return param


class OfTransformerEngine(Current):
    pass


OfTransformerEngine.__module__ = "transformer_engine.pytorch.tensor.float8_tensor"

UNUSABLE = {
    "no quantizer": (lambda: broken(_quantizer=None), "a Current without a quantizer, as after unpickling"),
    "transformed": (lambda: broken(_quantizer=SimpleNamespace(with_rht=True)), "a Current whose quantizer transforms"),
    "no rowwise values": (
        lambda: broken(get_usages=lambda: {"rowwise": False, "columnwise": True}),
        "a Current without rowwise values",
    ),
    "on the CPU": (lambda: quantised(OfTransformerEngine), "a OfTransformerEngine on the CPU"),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_unusable_ones_are_refused_by_name(case: str) -> None:
    make, message = UNUSABLE[case]
    optimizer, plain = running()
    with pytest.raises(TypeError, match=f"Parameter 1 of parameter group 0 is {message}"):
        FusedOffloadAdam([plain, make()], master_weights=True)
    with unchanged(optimizer), pytest.raises(TypeError, match=f"Parameter 0 of parameter group 1 is {message}"):
        optimizer.add_param_group({"params": [make()]})


class Sharded(torch.Tensor):
    """Has of a DTensor what it is told by."""

    _local_tensor: Any
    _spec: Any


def sharded(local: Any, ranks: int) -> Any:
    made: Any = torch.zeros(4, 8).as_subclass(Sharded)
    made._local_tensor = local
    made._spec = SimpleNamespace(placements=(), mesh=SimpleNamespace(size=lambda *_: ranks, device_type="cpu"))
    return made


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("agrees", [False, True])
def test_empty_shards_of_parameters_that_agree_on_a_scale_are_refused(ranks: int, agrees: bool) -> None:
    local: Any = Delayed(torch.zeros(0, 8))
    if agrees:
        local._quantizer.with_amax_reduction = False  # FSDP2 sets the group later
    param = sharded(local, ranks)
    if agrees and ranks > 1:
        with pytest.raises(TypeError, match="group 0 is a Delayed of which this rank holds no element"):
            FusedOffloadAdam([param], master_weights=True)
    else:
        FusedOffloadAdam([param], master_weights=True)


@pytest.mark.parametrize("way", ["at construction", "later"])
@pytest.mark.parametrize("kind", CLASSES)
def test_masters_are_required(kind: str, way: str) -> None:
    message = f"a {CLASSES[kind].__name__}, a quantised parameter, which .* master_weights=True"
    param = quantised(CLASSES[kind])
    for optimizer_class in (FusedOffloadAdam, FusedOffloadLion):
        if way == "at construction":
            with pytest.raises(TypeError, match=f"Parameter 0 of parameter group 0 is {message}"):
                optimizer_class([param])
            continue
        plain = param_of(torch.ones(3))
        optimizer = optimizer_class([plain])
        optimizer.param_groups[0]["params"].append(param)
        plain.grad, param.grad = torch.ones(3), torch.ones(4, 8).bfloat16()
        before = [part.clone() for part in param.internals()]
        for _ in range(2):
            with pytest.raises(RuntimeError, match=f"A parameter of group 0 is {message}"):
                optimizer.step()
        assert torch.equal(plain, torch.ones(3))
        assert all(map(torch.equal, before, param.internals()))


def test_rules_of_two_phases_step_none() -> None:
    with pytest.raises(TypeError, match=r"Parameter 0 of parameter group 0 is a Current, .* two phases does not step"):
        Toy([quantised()], master_weights=True)


def test_steps_in_the_backward_pass_agree_on_no_scales() -> None:
    param = quantised(Delayed)
    optimizer = FusedOffloadAdam([param], master_weights=True)
    optimizer.step_in_backward(nn.ParameterList([param])).detach()
    param._quantizer.with_amax_reduction = True
    with pytest.raises(RuntimeError, match=r"agree with other ranks on a scale .* Call step"):
        optimizer.step_in_backward(nn.ParameterList([param]))


def test_state_stays_with_requantised_data() -> None:
    """A parameter of the same shape, dtype and kind takes it over; another kind takes its values."""
    param, again, plain = quantised(), quantised(), param_of(torch.ones(4, 8).bfloat16())
    optimizer, _ = running(param)
    optimizer.param_groups[0]["params"][1] = again
    entry = optimizer.state[again] = optimizer.state.pop(param)
    assert optimizer.state[again] is entry
    again.grad = torch.ones(4, 8).bfloat16()
    optimizer.step()
    master = entry["master_param"].clone()
    optimizer.state[plain] = optimizer.state.pop(again)
    assert torch.equal(optimizer.state[plain]["master_param"], master)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: param_of(torch.ones(4, 8).bfloat16()), "is plain now .* was made for a quantised one"),
        (lambda: quantised(dtype=torch.float16), "is torch.float16 of shape"),
        (lambda: quantised(shape=(32,)), "of shape"),
    ],
    ids=["plain", "another dtype", "another shape"],
)
def test_parameters_that_become_another_kind_are_refused(make: Any, message: str) -> None:
    param = quantised()
    optimizer, plain = running(param)
    other = make()
    param.grad = plain.grad = None
    torch.utils.swap_tensors(param, other)
    param.grad, plain.grad = torch.ones(param.shape, dtype=param.dtype), torch.ones(300)
    before = plain.detach().clone()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=message):
            optimizer.step()
    assert torch.equal(plain, before)
    param.grad = None
    torch.utils.swap_tensors(param, other)
    param.grad = torch.ones(4, 8).bfloat16()
    optimizer.step()


@pytest.mark.parametrize("shape", [(8, 4), (32,)])
def test_gradients_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    param = quantised()
    optimizer, _ = running(param)
    optimizer.use_decoupled_grad = True
    param.decoupled_grad = torch.ones(shape)
    with unchanged(optimizer), pytest.raises(RuntimeError, match="A gradient should have the shape of its parameter"):
        optimizer.step()


# -- what fails on the way -------------------------------------------------------------------------


def parts(params: list[Any]) -> list[torch.Tensor]:
    return [bits(part) for param in params for part in param.internals()]


def trained(device: Device, kind: str, *, steps: int = 2, **options: Any) -> tuple[list[Any], FusedOffloadAdam]:
    shapes = ((300,), (40, 50), (3, 3))
    generator = torch.Generator().manual_seed(0)
    params = [
        stand_ins.param_of(CLASSES[kind], device.tensor(torch.randn(shape, generator=generator)), index)
        for index, shape in enumerate(shapes)
    ]
    optimizer = FusedOffloadAdam(params, lr=1e-2, master_weights=True, offload=config(**options))
    for _ in range(steps):
        step(device, params, optimizer)
    return params, optimizer


def set_grads(device: Device, params: list[Any]) -> None:
    for param in params:
        param.grad = device.tensor(torch.linspace(-1, 2, param.numel()).view(param.shape).bfloat16())


def step(device: Device, params: list[Any], optimizer: FusedOffloadAdam) -> None:
    set_grads(device, params)
    optimizer.step()


def settled(device: Device, params: list[Any], optimizer: FusedOffloadAdam) -> Snapshot:
    taken = device.snapshot(optimizer)
    return taken._replace(params=parts(params))


def failing(device: Device, kind: str, label: int) -> list[Snapshot]:
    """A call of quantize_ that fails: the step has failed, until a load succeeds."""
    params, optimizer = trained(device, kind)
    saved = copy.deepcopy(optimizer.state_dict())
    Quantised.calls.clear()
    Quantised.fails = label
    with pytest.raises(torch.OutOfMemoryError, match="mine"):
        step(device, params, optimizer)
    assert [call.label for call in Quantised.calls] == list(range(label + 1))
    Quantised.fails = None
    for call in (optimizer.step, optimizer.state_dict):
        with pytest.raises(RuntimeError, match=r"failed half-way .OutOfMemoryError: mine"):
            call()
    optimizer.load_state_dict(saved)
    step(device, params, optimizer)
    return [settled(device, params, optimizer)]


@pytest.mark.parametrize("label", [0, 1, 2])
@pytest.mark.parametrize("kind", CLASSES)
def test_a_call_that_fails_fails_the_step_until_a_load(kind: str, label: int) -> None:
    run(lambda device: failing(device, kind, label), SCHEDULES[label])


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_memory_that_is_not_there_changes_nothing(kind: str, fraction: float, monkeypatch: pytest.MonkeyPatch) -> None:
    allocate = SimulatedDevice.allocate

    def out_of_memory(self: SimulatedDevice, nbytes: int) -> torch.Tensor:
        if nbytes >= 8000:
            raise torch.OutOfMemoryError("mine")
        return allocate(self, nbytes)

    def scenario(device: Device) -> list[Snapshot]:
        params, optimizer = trained(device, kind, fraction=fraction)
        set_grads(device, params)
        if device.sim is not None:
            before = settled(device, params, optimizer)
            with monkeypatch.context() as small:
                small.setattr(SimulatedDevice, "allocate", out_of_memory)
                with pytest.raises(RuntimeError, match=r"needs 8192 bytes .* largest quantised parameter"):
                    optimizer.step()
            assert_same_snapshot(settled(device, params, optimizer), before)
        optimizer.step()
        assert optimizer.memory_report().step_bytes == (8192 if device.sim is not None else 0)
        return [settled(device, params, optimizer)]

    run(scenario, SCHEDULES[0])


def test_a_missing_copy_in_the_other_order_is_made_before_anything_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    def scenario(device: Device) -> list[Snapshot]:
        params, optimizer = trained(device, "delayed")
        params[1].columnwise = None
        set_grads(device, params)
        if device.sim is not None:
            before = settled(device, params, optimizer)
            with monkeypatch.context() as small:
                small.setattr(Delayed, "update_usage", lambda self, **_: stand_ins.out_of_memory())
                with pytest.raises(torch.OutOfMemoryError):
                    optimizer.step()
            assert_same_snapshot(settled(device, params, optimizer), before)
        optimizer.step()
        assert [param.made_columnwise for param in params] == [0, int(device.sim is not None), 0]
        return [settled(device, params, optimizer)]

    run(scenario, SCHEDULES[0])


# -- masters ---------------------------------------------------------------------------------------


def test_a_prefetch_of_masters_that_are_not_there_is_dropped() -> None:
    """It brings what the step fills in anew: at the first one, and behind a load without masters."""

    def scenario(device: Device) -> list[Snapshot]:
        params, optimizer = trained(device, "blockwise", steps=0, window_bytes=2**20)
        for param in params:
            optimizer.initialize_state(param)
        for number in range(2):
            optimizer.prefetch()
            assert (optimizer.window_bytes() > 0) == (device.sim is not None)
            if device.sim is not None:
                device.sim.run_all()
            step(device, params, optimizer)
            if number == 0:
                saved = copy.deepcopy(optimizer.state_dict())
                for entry in saved["state"].values():
                    del entry["master_param"]
                optimizer.load_state_dict(saved)
        return [settled(device, params, optimizer)]

    for schedule in SCHEDULES:
        run(scenario, schedule)


FORMATS = {"fp32": {}, "fp16": {"master_weight_dtype": torch.float16}}


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("kind", CLASSES)
def test_reloading_keeps_masters_that_round_to_the_parameter(kind: str, formats: str) -> None:
    generator = torch.Generator().manual_seed(0)
    param = stand_ins.param_of(CLASSES[kind], torch.randn(200, 300, generator=generator))
    optimizer = FusedOffloadAdam([param], lr=1e-2, master_weights=True, **FORMATS[formats])
    for _ in range(3):
        param.grad = torch.randn(200, 300, generator=generator).bfloat16()
        optimizer.step()
    with unchanged(optimizer):
        optimizer.reload_model_params()
    with torch.no_grad():
        param.quantize_(torch.randn(200, 300, generator=generator) + 3)
    optimizer.reload_model_params()
    master = optimizer.get_unscaled_state(param, "master_param")
    values = plain_values(param)
    assert ((master - values).abs() <= values.abs() * 2**-4 + 3e-3).all()
    assert ((master - values).abs() <= values.abs() * 2**-11).float().mean() > 0.9


def test_the_first_master_is_the_dequantised_parameter() -> None:
    for cls in CLASSES.values():
        param = quantised(cls, (30, 40))
        wanted = plain_values(param).clone()
        optimizer = FusedOffloadAdam([param], lr=1e-2, master_weights=True)
        optimizer.initialize_state(param, True)  # remainders have no meaning here
        assert torch.equal(optimizer.state[param]["master_param"], wanted)
        assert optimizer.state[param]["master_param"].dtype == torch.float32
