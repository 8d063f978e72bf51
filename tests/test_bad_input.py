"""What cannot be used is refused by name, in torch's wording, before anything changes."""

from __future__ import annotations

import copy
import dataclasses
import math
import mmap
import warnings
from collections.abc import Callable
from typing import Any

import helpers
import numpy as np
import pytest
import torch
from helpers import param_of, randn, unchanged
from torch import nn

import fused_offload.state.store
import fused_offload.step.devices
from fused_offload import FusedOffloadAdam, OffloadConfig
from fused_offload.rules.adam import AdamRule

device = helpers.device


def make(device: str, **options: Any) -> tuple[FusedOffloadAdam, list[nn.Parameter]]:
    """Two groups of two parameters, three steps old."""
    params = [param_of(randn(size, index, device)) for index, size in enumerate((300, 5, 40, 129))]
    options = {"lr": 1e-2, "offload": OffloadConfig(chunk_bytes=1), **options}
    optimizer = FusedOffloadAdam([{"params": params[:2]}, {"params": params[2:], "lr": 0.5}], **options)
    for step in range(3):
        give_grads(optimizer, params, step)
        optimizer.step()
    return optimizer, params


def give_grads(optimizer: FusedOffloadAdam, params: list[nn.Parameter], step: int) -> None:
    for index, param in enumerate(params):
        grad = randn(param.shape, 100 * step + index, param.device.type).to(param.dtype)
        if optimizer.use_decoupled_grad:
            param.decoupled_grad = grad
        else:
            param.grad = grad


def assert_step_refused(optimizer: FusedOffloadAdam, error: type[Exception], message: str) -> None:
    """Also the second time: nothing of the refused step may be remembered as done."""
    with unchanged(optimizer):
        for _ in range(2):
            with pytest.raises(error, match=message):
                optimizer.step()


# -- hyperparameters -------------------------------------------------------------------------------

BAD_HYPERPARAMETERS: list[tuple[str, Any, type[Exception], str]] = [
    ("lr", -1e-3, ValueError, "Invalid learning rate: -0.001"),
    ("lr", math.nan, ValueError, "Invalid learning rate: nan"),
    ("lr", torch.tensor(-1.0), ValueError, "Invalid learning rate: -1.0"),
    ("lr", torch.ones(2), ValueError, "Tensor lr must be 1-element"),
    ("lr", "fast", TypeError, "Invalid learning rate: 'fast', it should be a number or a one-element tensor"),
    ("eps", None, TypeError, "Invalid epsilon value: None, it should be a number"),
    ("betas", 0.9, TypeError, r"Invalid betas: 0\.9, it should be two numbers"),
    ("betas", "ab", TypeError, "Invalid betas: 'ab', it should be two numbers"),
    ("betas", (0.9, "x"), TypeError, "Invalid beta parameter at index 1: 'x', it should be a number"),
    ("weight_decay", "0.1", TypeError, r"Invalid weight_decay value: '0\.1', it should be a number"),
    ("eps", -1e-8, ValueError, "Invalid epsilon value: -1e-08"),
    ("eps", math.nan, ValueError, "Invalid epsilon value: nan"),
    ("betas", (1.0, 0.999), ValueError, r"Invalid beta parameter at index 0: 1\.0"),
    ("betas", (-0.1, 0.999), ValueError, r"Invalid beta parameter at index 0: -0\.1"),
    ("betas", (0.9, 1.0), ValueError, r"Invalid beta parameter at index 1: 1\.0"),
    ("betas", (0.9, math.nan), ValueError, "Invalid beta parameter at index 1: nan"),
    ("betas", (0.9,), ValueError, "Invalid betas"),
    ("betas", (torch.tensor(0.9), 0.999), ValueError, "Invalid beta parameter at index 0"),
    ("weight_decay", math.nan, ValueError, "Invalid weight_decay value: nan"),
    ("weight_decay", torch.tensor(0.1), ValueError, "Invalid weight_decay value"),
]
BAD_HYPERPARAMETERS += [
    *[
        (name, value, ValueError, "Invalid")
        for name in ("lr", "eps", "weight_decay")
        for value in (math.inf, 1e39, 10**400)
    ],
    ("lr", torch.tensor(math.inf), ValueError, "Invalid learning rate: inf"),
    ("lr", torch.tensor(1j), ValueError, "should hold a real number"),
    ("lr", torch.ones((), device="meta"), ValueError, "should hold a real number"),
    ("betas", (0.9, 1 - 1e-9), ValueError, r"index 1: 0\.999999999, which is 1 in float32"),
    ("betas", {0: 0.9, 1: 0.99}, TypeError, "Invalid betas"),
    ("bias_correction", "no", TypeError, "Invalid bias_correction: 'no', it should be a bool"),
    ("bias_correction", None, TypeError, "Invalid bias_correction"),
]
each_bad_hyperparameter = pytest.mark.parametrize(("name", "value", "error", "message"), BAD_HYPERPARAMETERS)


@each_bad_hyperparameter
def test_constructor_refuses(device: str, name: str, value: Any, error: type[Exception], message: str) -> None:
    param = param_of(torch.ones(3, device=device))
    with pytest.raises(error, match=message):
        FusedOffloadAdam([param], **{name: value})
    with pytest.raises(error, match=message):
        FusedOffloadAdam([{"params": [param], name: value}])


@each_bad_hyperparameter
def test_new_group_is_refused(device: str, name: str, value: Any, error: type[Exception], message: str) -> None:
    optimizer, _ = make(device)
    param = param_of(torch.ones(3, device=device))
    with unchanged(optimizer), pytest.raises(error, match=message):
        optimizer.add_param_group({"params": [param], name: value})
    assert len(optimizer.param_groups) == 2


@pytest.mark.parametrize("group", [0, 1])
@each_bad_hyperparameter
def test_step_refuses(device: str, name: str, value: Any, error: type[Exception], message: str, group: int) -> None:
    """Also where only the last group is wrong: none before it was stepped."""
    optimizer, params = make(device)
    good = optimizer.param_groups[group][name]
    optimizer.param_groups[group][name] = value
    give_grads(optimizer, params, 9)
    assert_step_refused(optimizer, error, message)
    optimizer.param_groups[group][name] = good
    optimizer.step()
    assert [group["step"] for group in optimizer.param_groups] == [4, 4]


@each_bad_hyperparameter
def test_load_refuses_hyperparameters(device: str, name: str, value: Any, error: type[Exception], message: str) -> None:
    """Also in the last group only: no group and no value before it is taken over."""
    optimizer, params = make(device)
    saved = optimizer.state_dict()
    saved["state"] = {index: {key: torch.ones_like(v) for key, v in e.items()} for index, e in saved["state"].items()}
    saved["param_groups"][0]["lr"] = 0.75
    saved["param_groups"][1][name] = value
    with unchanged(optimizer), pytest.raises(error, match=message):
        optimizer.load_state_dict(saved)
    give_grads(optimizer, params, 9)
    optimizer.step()


# -- step counts -----------------------------------------------------------------------------------

BAD_STEPS = [
    -1,
    2**31 + 1,
    6.9e9,
    math.inf,
    -math.inf,
    math.nan,
    1.5,
    "5",
    True,
    None,
    [3],
    torch.tensor(-1.0),
    torch.tensor(math.nan),
    torch.tensor([1.0, 2.0]),
    torch.tensor(1j),
    torch.ones((), device="meta"),
]
WAYS_OF_A_STEP: dict[str, Callable[[FusedOffloadAdam, Any], Any]] = {
    "entry": lambda optimizer, step: optimizer.state[optimizer.param_groups[1]["params"][0]].update(step=step),
    "new group": lambda optimizer, step: optimizer.add_param_group(
        {"params": [param_of(torch.ones(3, device=optimizer.param_groups[0]["params"][0].device))], "step": step}
    ),
    "group of a state dict": lambda optimizer, step: optimizer.load_state_dict(with_step(optimizer, group=step)),
    "parameter of a state dict": lambda optimizer, step: optimizer.load_state_dict(with_step(optimizer, param=step)),
}


def with_step(optimizer: FusedOffloadAdam, **steps: Any) -> dict[str, Any]:
    saved = copy.deepcopy(optimizer.state_dict())
    for entry in saved["state"].values():
        for value in entry.values():
            value.fill_(0.5)
    if "group" in steps:
        saved["param_groups"][1]["step"] = steps["group"]
    else:
        saved["state"][3]["step"] = steps["param"]
    return saved


@pytest.mark.parametrize("exp_avg_dtype", [torch.float32, torch.uint8])
@pytest.mark.parametrize("step", BAD_STEPS, ids=str)
def test_what_is_no_step_count(device: str, step: Any, exp_avg_dtype: torch.dtype) -> None:
    optimizer, params = make(device, exp_avg_dtype=exp_avg_dtype)
    give_grads(optimizer, params, 9)
    for name, write in WAYS_OF_A_STEP.items():
        if step is None and "state dict" in name:
            continue  # as torch's own layout has none in a group
        where = {"group of a state dict": " in group 1", "parameter of a state dict": " beside a parameter of group 1"}
        message = rf"Invalid step{where.get(name, '')}: .* a whole number from 0 to"
        with unchanged(optimizer), pytest.raises(ValueError, match=message):
            write(optimizer, step)
    optimizer.param_groups[1]["step"] = step  # nobody sees it until the step
    before = [param.detach().clone() for param in params]
    for _ in range(2):
        with pytest.raises(ValueError, match=r"Invalid step: .* a whole number from 0 to"):
            optimizer.step()
    assert all(torch.equal(param, values) for param, values in zip(params, before, strict=True))
    assert optimizer.param_groups[0]["step"] == 3
    optimizer.param_groups[1]["step"] = 3
    optimizer.step()


@pytest.mark.parametrize("exp_avg_dtype", [torch.float32, torch.uint8])
@pytest.mark.parametrize("step", [0, 2**31, 2.0**31, torch.tensor(2.0**31), np.int64(2**31), np.float32(7), 2**24 + 1])
def test_every_step_count_in_range_trains(device: str, step: Any, exp_avg_dtype: torch.dtype) -> None:
    for write in WAYS_OF_A_STEP.values():
        optimizer, params = make(device, exp_avg_dtype=exp_avg_dtype)
        give_grads(optimizer, params, 9)
        write(optimizer, step)
        assert optimizer.param_groups[-1]["step"] == step
        for group in optimizer.param_groups:
            group["step"] = min(int(group["step"]), 2**31 - 1)
        optimizer.step()
        optimizer.synchronize()
        assert all(param.isfinite().all() for param in params)


def test_lr_may_be_set_later(device: str) -> None:
    """Schedules of some trainers fill it in; without that, the step says so."""
    param = param_of(torch.ones(3, device=device))
    optimizer = FusedOffloadAdam([param], lr=None)
    param.grad = torch.ones(3, device=device)
    assert_step_refused(optimizer, ValueError, "Invalid learning rate: None")
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.step()
    assert param.tolist() == [0.5] * 3


# -- modes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"amsgrad": True}, RuntimeError, "AMSGrad variant. Leave amsgrad False"),
        ({"capturable": True}, RuntimeError, "capturable"),
        ({"exp_avg_dtype": torch.int8}, RuntimeError, "exp_avg_dtype"),
        ({"exp_avg_sq_dtype": torch.float8_e4m3fn}, RuntimeError, "exp_avg_sq_dtype"),
        *[
            ({name: value}, TypeError, f"Invalid {name}: {value!r}, it should be a bool")
            for name in ("amsgrad", "adam_w_mode", "capturable", "master_weights", "use_decoupled_grad")
            for value in ("yes", None, 1)
        ],
        ({"store_param_remainders": "yes"}, TypeError, "Invalid store_param_remainders: 'yes'"),
        *[
            ({name: value}, TypeError, f"Invalid {name}: {value!r}, it should be a torch.dtype, such as torch.bfloat16")
            for name in ("exp_avg_dtype", "exp_avg_sq_dtype", "master_weight_dtype")
            for value in ("bf16", None)
        ],
        ({"stochastic_rounding": 1}, TypeError, "stochastic_rounding"),
        ({"rounding_seed": 1.5}, TypeError, "rounding_seed"),
        ({"rounding_seed": -1}, ValueError, "rounding_seed"),
        ({"rounding_seed": 2**31}, ValueError, "rounding_seed"),
        ({"exp_avg_dtype": torch.float64}, RuntimeError, "exp_avg_dtype"),
        ({"exp_avg_sq_dtype": torch.int16}, RuntimeError, "exp_avg_sq_dtype"),
        ({"master_weights": True, "master_weight_dtype": torch.bfloat16}, RuntimeError, "master weights"),
        ({"numerics": "fast"}, ValueError, "Invalid numerics: 'fast'"),
        ({"offload": 0.5}, TypeError, "OffloadConfig"),
        ({"offload": None}, TypeError, "OffloadConfig"),
        ({"maximize": True}, TypeError, "'maximize': leave the argument out; to maximize, minimize the negated loss"),
        ({"maximize": False}, TypeError, "'maximize': leave the argument out; to maximize, minimize the negated loss"),
        ({"foreach": None}, TypeError, "'foreach': there is one fused kernel .* leave the argument out"),
        ({"fused": True}, TypeError, "'fused': the update is always one fused kernel; leave the argument out"),
        (
            {"differentiable": True},
            TypeError,
            "'differentiable': the kernel has no backward; use an optimizer of torch.optim",
        ),
        ({"decoupled_weight_decay": True}, TypeError, "'decoupled_weight_decay': use adam_w_mode"),
        ({"learning_rate": 0.1}, TypeError, "unexpected keyword argument 'learning_rate'$"),
    ],
)
def test_unsupported_modes(device: str, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        FusedOffloadAdam([param_of(torch.ones(3, device=device))], **options)


def test_a_step_in_a_capture_of_the_users(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, params = make(device)
    give_grads(optimizer, params, 9)
    with monkeypatch.context() as capturing:
        capturing.setattr(torch.cuda, "is_available", lambda: True)
        capturing.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert_step_refused(optimizer, RuntimeError, "cannot be captured in a CUDA graph")
    optimizer.step()


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [("numerics", "fast", ValueError), ("rounding_seed", -1, ValueError), ("rounding_seed", "x", TypeError)],
)
def test_modes_set_later(device: str, name: str, value: Any, error: type[Exception]) -> None:
    """Wrappers set attributes of a running optimizer; a step reads them, and takes no more than the
    constructor.
    """
    optimizer, params = make(device)
    give_grads(optimizer, params, 9)
    good = getattr(optimizer, name)
    setattr(optimizer, name, value)
    assert_step_refused(optimizer, error, f"Invalid {name}: {value!r}")
    setattr(optimizer, name, good)
    optimizer.step()
    assert [group["step"] for group in optimizer.param_groups] == [4, 4]


@pytest.mark.parametrize(
    ("option", "error", "message"),
    [
        ("maximize", TypeError, "minimize the negated loss"),
        ("fused", TypeError, "leave the argument out"),
        ("differentiable", TypeError, "no backward"),
        ("amsgrad", RuntimeError, "AMSGrad"),
    ],
)
def test_options_of_a_group_that_would_do_nothing(
    device: str, option: str, error: type[Exception], message: str
) -> None:
    """Groups made for torch's AdamW hold all its options; one that is off asks for nothing."""
    optimizer, _ = make(device)
    params = [param_of(torch.ones(3, device=device))]
    with unchanged(optimizer), pytest.raises(error, match=message):
        optimizer.add_param_group({"params": params, option: True})
    optimizer.add_param_group({"params": params, option: False})
    assert len(optimizer.param_groups) == 3


def test_rounding_that_would_do_nothing(device: str) -> None:
    params = [torch.nn.Parameter(torch.ones(2, device=device))]
    with pytest.warns(UserWarning, match="stochastic_rounding=True changes nothing") as caught:
        FusedOffloadAdam(params, stochastic_rounding=True, exp_avg_sq_dtype=torch.float16)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FusedOffloadAdam(params, stochastic_rounding=True, exp_avg_sq_dtype=torch.bfloat16)


def test_te_numerics_on_the_cpu() -> None:
    params = [param_of(torch.ones(3)) for _ in range(2)]
    for given in (params, [{"params": params[0]}], [("weight", params[0])]):
        with pytest.raises(RuntimeError, match="on the CPU use numerics='ieee'"):
            FusedOffloadAdam(given, numerics="te")
    optimizer = FusedOffloadAdam([params[0]])
    optimizer.numerics = "te"  # as wrappers set it
    with unchanged(optimizer), pytest.raises(RuntimeError, match="on the CPU use numerics='ieee'"):
        optimizer.add_param_group({"params": [params[1]]})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"fraction": -0.1}, ValueError, "Invalid fraction: -0.1"),
        ({"fraction": 1.1}, ValueError, "Invalid fraction: 1.1"),
        ({"fraction": math.nan}, ValueError, "Invalid fraction: nan"),
        ({"fraction": True}, ValueError, "Invalid fraction: True"),
        ({"fraction": "1"}, ValueError, "Invalid fraction: '1'"),
        ({"chunk_bytes": 0}, ValueError, "Invalid chunk_bytes: 0"),
        ({"chunk_bytes": -1}, ValueError, "Invalid chunk_bytes: -1"),
        ({"chunk_bytes": 1e6}, ValueError, "Invalid chunk_bytes: 1000000.0"),
        ({"depth": 0}, ValueError, "Invalid depth: 0"),
        ({"depth": True}, ValueError, "Invalid depth: True"),
        ({"pin": 1}, TypeError, "Invalid pin: 1"),
        ({"graph": 1}, TypeError, "Invalid graph: 1"),
        ({"chunk_bytes": "8 Mio"}, ValueError, "Invalid chunk_bytes: '8 Mio' is not .* such as 50331648 or 48MiB"),
        ({"chunk_bytes": "0"}, ValueError, "Invalid chunk_bytes: it should be larger than 0"),
        ({"chunk_bytes": "48"}, ValueError, "Invalid chunk_bytes: '48' is 48 bytes; .* a unit, as in 48MiB"),
        ({"chunk_bytes": None}, ValueError, "Invalid chunk_bytes: None, .* such as '48MiB', '8GiB' or 'auto'"),
        ({"chunk_bytes": 10**18}, ValueError, "Invalid chunk_bytes: 1000000000000000000, "),
        ({"window_bytes": "-1GiB"}, ValueError, "Invalid window_bytes: '-1GiB' is not .*; or give auto"),
        ({"window_bytes": np.array([1, 2])}, ValueError, "Invalid window_bytes: array"),
        ({"window_bytes": torch.tensor(1)}, ValueError, "Invalid window_bytes: tensor"),
        ({"depth": "3"}, ValueError, "Invalid depth: '3', .* such as 3, or 'auto'"),
        ({"depth": np.array([1, 2])}, ValueError, "Invalid depth: array"),
        ({"depth": 10**18}, ValueError, "Invalid depth: 1000000000000000000, "),
        ({"transport": np.array(["copy", "auto"])}, ValueError, "Invalid transport: array"),
        ({"pin": np.True_}, TypeError, r"Invalid pin: .*True.*, it should be True or False"),
        ({"transport": "rdma"}, ValueError, "Invalid transport: 'rdma'"),
        ({"transport": "zero_copy", "pin": False}, ValueError, "needs pin=True"),
        ({"transport": "zero_copy", "depth": 2}, ValueError, "leave chunk_bytes and depth out"),
        ({"transport": "zero_copy", "zero_copy_programs": 0}, ValueError, "Invalid zero_copy_programs: 0"),
        ({"zero_copy_programs": 8}, ValueError, "belongs to transport='zero_copy'"),
        ({"buffers": 3}, TypeError, "buffers"),
    ],
)
def test_offload_config(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        OffloadConfig(**options)


@pytest.mark.parametrize(
    ("options", "plain"),
    [
        ({"chunk_bytes": "48MiB", "window_bytes": "8GiB"}, {"chunk_bytes": 48 * 2**20, "window_bytes": 8 * 2**30}),
        ({"chunk_bytes": " Auto ", "window_bytes": "AUTO"}, {"chunk_bytes": "auto", "window_bytes": "auto"}),
        ({"chunk_bytes": "1.5 kB", "window_bytes": "0"}, {"chunk_bytes": 1500, "window_bytes": 0}),
        ({"chunk_bytes": np.int32(2**30), "depth": np.uint8(200)}, {"chunk_bytes": 2**30, "depth": 200}),
        ({"fraction": np.float32(0.5), "window_bytes": np.int16(7)}, {"fraction": 0.5, "window_bytes": 7}),
        ({"transport": "zero_copy", "zero_copy_programs": np.int8(100)}, {"zero_copy_programs": 100}),
        ({"transport": "zero_copy", "depth": np.str_("auto")}, {"depth": "auto"}),
        ({"fraction": True + 0, "chunk_bytes": 10**18 - 1}, {"fraction": 1.0, "chunk_bytes": 10**18 - 1}),
    ],
)
def test_offload_config_holds_plain_numbers(options: dict[str, Any], plain: dict[str, Any]) -> None:
    """NumPy's overflow: 200 chunks in flight of 2^30 bytes are no number of 8 or of 32 bits."""
    config = OffloadConfig(**options)
    for name, value in plain.items():
        assert getattr(config, name) == value
        assert type(getattr(config, name)) is type(value)
    assert dataclasses.replace(config) == config


def test_offload_config_is_frozen_and_by_keyword() -> None:
    config = OffloadConfig(fraction=0, chunk_bytes=1, depth=1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.fraction = 0.5  # type: ignore[misc]
    with pytest.raises(TypeError):
        OffloadConfig(0.5)  # type: ignore[misc]


# -- parameters ------------------------------------------------------------------------------------


def sparse_param() -> torch.Tensor:
    return torch.ones(4).to_sparse().requires_grad_()


BAD_PARAMS: list[tuple[str, Callable[[], Any], type[Exception], str]] = [
    ("placeholder", lambda: [None], TypeError, "Parameter 0 of parameter group 0 should be a tensor, but got NoneType"),
    ("number", lambda: [1.0], TypeError, "should be a tensor, but got float"),
    ("name", lambda: "weights", TypeError, "should be a tensor"),
    ("a bare tensor", lambda: torch.ones(3), TypeError, "params argument given to the optimizer"),
    ("a set", lambda: [{"params": {nn.Parameter(torch.ones(3))}}], TypeError, "ordered collections"),
    ("nothing", list, ValueError, "optimizer got an empty parameter list"),
    ("float64", lambda: [nn.Parameter(torch.ones(3).double())], TypeError, "float64"),
    ("complex", lambda: [nn.Parameter(torch.ones(3, dtype=torch.complex64))], TypeError, "complex64"),
    ("integer", lambda: [torch.ones(3, dtype=torch.int32)], TypeError, "int32"),
    ("uint8", lambda: [torch.ones(3, dtype=torch.uint8)], TypeError, "uint8"),
    ("meta", lambda: [nn.Parameter(torch.ones(3, device="meta"))], RuntimeError, "are on meta"),
    (
        "mixed devices",
        lambda: [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, device="meta"))],
        RuntimeError,
        "on one device, but they are on cpu, meta",
    ),
    ("non-leaf", lambda: [nn.Parameter(torch.ones(3)) * 2], ValueError, "can't optimize a non-leaf Tensor"),
    ("sparse", lambda: [sparse_param()], RuntimeError, "a place in memory for each"),
    ("expanded", lambda: [torch.ones(1).expand(3).requires_grad_()], RuntimeError, "a place in memory for each"),
    (
        "overlapping",
        lambda: [torch.ones(6).as_strided((2, 3), (2, 1)).requires_grad_()],
        RuntimeError,
        "a place in memory for each",
    ),
    ("twice", lambda: [nn.Parameter(torch.ones(3))] * 2, ValueError, "appear more than once"),
]


@pytest.mark.parametrize(
    ("params", "error", "message"), [row[1:] for row in BAD_PARAMS], ids=[row[0] for row in BAD_PARAMS]
)
def test_bad_params(device: str, params: Callable[[], Any], error: type[Exception], message: str) -> None:
    """Refused by the constructor, alone or as the last group, and by a running optimizer."""
    with pytest.raises(error, match=message):
        FusedOffloadAdam(params())
    bad = params()
    if not isinstance(bad, list) or not bad or isinstance(bad[0], dict):
        return
    message = message.replace("group 0", "group 2")
    optimizer, _ = make(device)
    with unchanged(optimizer), pytest.raises(error, match=message):
        optimizer.add_param_group({"params": bad})
    assert len(optimizer.param_groups) == 2
    optimizer.step()


@pytest.mark.parametrize("module", [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))])
def test_a_module_instead_of_its_parameters(module: nn.Module) -> None:
    with pytest.raises(TypeError, match=r"the module \w+\. Pass its parameters: .*module\.parameters\(\)"):
        FusedOffloadAdam(module)


def test_state_of_what_is_no_parameter(device: str) -> None:
    optimizer, _ = make(device)
    with unchanged(optimizer):
        with pytest.raises(TypeError, match="kept by parameter, but got 'name' as a key"):
            optimizer.state["name"]
        with pytest.raises(TypeError, match="kept by parameter, but got 'name' as a key"):
            optimizer.state["name"] = {"exp_avg": torch.zeros(3)}


def test_param_in_two_groups(device: str) -> None:
    optimizer, params = make(device)
    with (
        unchanged(optimizer),
        pytest.raises(ValueError, match="some parameters appear in more than one parameter group"),
    ):
        optimizer.add_param_group({"params": [params[0]]})
    optimizer.param_groups[1]["params"].append(params[0])  # behind the optimizer's back
    assert_step_refused(optimizer, RuntimeError, "Some parameters share memory")
    optimizer.param_groups[1]["params"].pop()
    optimizer.step()


@pytest.mark.parametrize("offset", [0, 1, 255])
def test_params_that_share_memory(device: str, offset: int) -> None:
    buffer = torch.ones(600, device=device)
    first, second = buffer[:256].requires_grad_(), buffer[offset : offset + 300].requires_grad_()
    optimizer = FusedOffloadAdam([{"params": [second]}, {"params": [first]}])
    first.grad, second.grad = torch.ones_like(first), torch.ones_like(second)
    assert_step_refused(optimizer, RuntimeError, "Some parameters share memory")
    second.grad = None
    optimizer.step()  # one of them alone is well defined
    neighbour = buffer[256:600].requires_grad_()
    beside = FusedOffloadAdam([buffer[:256].requires_grad_(), neighbour])
    for param in beside.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)
    beside.step()  # touching is not sharing


@pytest.mark.parametrize("repaired", [True, False])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.bfloat16(), "is torch.bfloat16 of shape"),
        (lambda data: data[:100].clone(), "shape"),
        (lambda data: data.view(15, 20), "shape"),
        (lambda data: torch.cat([data, data]), "shape"),
    ],
    ids=["dtype", "smaller", "reshaped", "larger"],
)
def test_param_changed_in_place(
    device: str, change: Callable[[torch.Tensor], torch.Tensor], message: str, repaired: bool
) -> None:
    """``param.data = ...`` of another dtype or shape no longer fits the state, whether noticed now
    or steps later.
    """
    optimizer, params = make(device)
    kept = params[0].data
    params[0].grad = None
    params[0].data = change(kept)
    optimizer.step()  # nothing is asked of it
    params[0].grad = torch.ones_like(params[0])
    assert_step_refused(optimizer, RuntimeError, message)
    if repaired:
        params[0].grad = None
        params[0].data = kept
        params[0].grad = torch.ones_like(params[0])
    else:
        optimizer.state.pop(params[0])
    optimizer.step()
    assert optimizer.state[params[0]]["exp_avg"].shape == params[0].shape


def test_param_of_another_dtype_at_the_same_address(device: str) -> None:
    memory = torch.zeros(300, dtype=torch.int16, device=device)
    param = nn.Parameter(memory.view(torch.bfloat16))
    optimizer = FusedOffloadAdam([param], master_weights=True)
    for _ in range(3):
        param.grad = torch.ones_like(param)
        optimizer.step()
    param.data = memory.view(torch.float16)
    param.grad = torch.ones_like(param)
    assert_step_refused(optimizer, RuntimeError, "is torch.float16")


def test_state_view_emptied(device: str) -> None:
    """``state[...].data = torch.empty(0)``, as walkers that free memory do, is refused until it is
    brought back.
    """
    optimizer, params = make(device)
    view = optimizer.state[params[0]]["exp_avg"]
    kept = view.data
    expected = kept.clone()
    give_grads(optimizer, params, 9)
    before = [param.detach().clone() for param in params]
    view.data = torch.empty(0)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"exp_avg should have shape \(300,\), but got \(0,\)"):
            optimizer.step()
    assert [group["step"] for group in optimizer.param_groups] == [3, 3]
    assert all(torch.equal(param, old) for param, old in zip(params, before, strict=True))
    view.data = kept
    assert torch.equal(optimizer.state[params[0]]["exp_avg"], expected)
    optimizer.step()
    assert not torch.equal(optimizer.state[params[0]]["exp_avg"], expected)


# -- gradients -------------------------------------------------------------------------------------

BAD_GRADS: list[tuple[str, Callable[[torch.Tensor], Any], type[Exception], str]] = [
    ("sparse", lambda p: torch.ones_like(p).to_sparse(), RuntimeError, "Sparse gradients are not supported"),
    ("complex", lambda p: torch.ones_like(p, dtype=torch.complex64), TypeError, "complex64"),
    ("float64", lambda p: torch.ones_like(p, dtype=torch.float64), TypeError, "float64"),
    ("integer", lambda p: torch.ones_like(p, dtype=torch.int32), TypeError, "int32"),
    (
        "too long",
        lambda p: torch.ones(p.numel() + 1, device=p.device),
        RuntimeError,
        r"shape of its parameter \(129,\)",
    ),
    ("reshaped", lambda p: torch.ones(1, p.numel(), device=p.device), RuntimeError, r"got \(1, 129\)"),
    ("a number's", lambda p: torch.ones((), device=p.device), RuntimeError, "shape of its parameter"),
    (
        "on meta",
        lambda p: torch.ones_like(p, device="meta"),
        RuntimeError,
        "Expected all tensors to be on the same device",
    ),
    ("no tensor", lambda p: 1.0, TypeError, "float"),
    ("the parameter", lambda p: p.detach(), RuntimeError, "A gradient shares memory with a parameter"),
]


@pytest.mark.parametrize(
    ("grad", "error", "message"), [row[1:] for row in BAD_GRADS], ids=[row[0] for row in BAD_GRADS]
)
def test_bad_gradients(device: str, grad: Callable[[torch.Tensor], Any], error: type[Exception], message: str) -> None:
    """Of the last parameter of the last group, so that everything before it could have been stepped
    already.
    """
    optimizer, params = make(device, use_decoupled_grad=True)
    give_grads(optimizer, params, 9)
    params[-1].decoupled_grad = grad(params[-1])
    assert_step_refused(optimizer, error, message)
    give_grads(optimizer, params, 9)
    optimizer.step()
    assert [group["step"] for group in optimizer.param_groups] == [4, 4]


@pytest.mark.parametrize("offset", [0, 100, 171])
def test_gradient_inside_another_param(device: str, offset: int) -> None:
    optimizer, params = make(device)
    give_grads(optimizer, params, 9)
    params[-1].grad = params[0].detach()[offset : offset + 129]
    assert_step_refused(optimizer, RuntimeError, "A gradient shares memory with a parameter")


def test_gradient_beside_its_param(device: str) -> None:
    """Both may lie in one buffer, and a gradient that has to be copied first may be made of the
    parameter itself.
    """
    buffer = randn(600, 1, device)
    param = buffer[:300].requires_grad_()
    optimizer = FusedOffloadAdam([param], use_decoupled_grad=True)
    for grad in (buffer[300:], param.detach()[:1].expand(300)):
        oracle = helpers.Oracle(param, helpers.FormatsCase())
        optimizer.state.pop(param, None)
        optimizer.param_groups[0]["step"] = 0
        param.decoupled_grad = grad
        oracle.step(grad.clone(), optimizer.param_groups[0], 1)
        optimizer.step()
        oracle.check(optimizer, param, "beside:")


def test_sparse_embedding(device: str) -> None:
    model = nn.Embedding(10, 3, sparse=True).to(device)
    optimizer = FusedOffloadAdam(model.parameters())
    model(torch.tensor([1, 2], device=device)).sum().backward()
    assert_step_refused(optimizer, RuntimeError, "sparse=False")


def test_first_step_refused_leaves_no_state(device: str) -> None:
    param = param_of(torch.ones(3, device=device))
    optimizer = FusedOffloadAdam([param], use_decoupled_grad=True)
    param.decoupled_grad = torch.ones(4, device=device)
    assert_step_refused(optimizer, RuntimeError, "shape")
    assert not any(entry.storage.bound for entry in optimizer.state.values())
    assert sum(optimizer.memory_report().host_bytes.values()) == 0
    assert optimizer.state_dict()["state"] == {}


# -- step arguments --------------------------------------------------------------------------------


def test_unknown_arguments_of_step(device: str) -> None:
    optimizer, params = make(device)
    give_grads(optimizer, params, 9)
    with unchanged(optimizer), pytest.raises(TypeError, match="unexpected keyword argument 'scale'"):
        optimizer.step(scale=2.0)
    with unchanged(optimizer), pytest.raises(TypeError, match="unexpected keyword argument 'grads'"):
        optimizer.step(grads=[], output_params=[])


# -- host memory -----------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", ["machine", "cgroup"])
def test_too_little_host_memory(device: str, limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names what is needed and what is left, before it allocates."""
    param = param_of(torch.ones(1_000_000, device=device))
    optimizer = FusedOffloadAdam([param])
    param.grad = torch.ones_like(param)
    maps = []
    with monkeypatch.context() as patch:
        patch.setattr("fused_offload.memory.host_limits.available_host_bytes", lambda: (3_000_000, limit))
        patch.setattr(mmap, "mmap", lambda *args, **kwargs: maps.append(args))
        assert_step_refused(optimizer, RuntimeError, rf"needs 0\.008 GB .* only 0\.003 GB are left \(.*{limit}")
    assert not maps
    optimizer.step()
    assert optimizer.param_groups[0]["step"] == 1


# -- closed, and failed half-way -------------------------------------------------------------------


def test_closed_optimizer(device: str) -> None:
    optimizer, params = make(device)
    exp_avg = optimizer.state[params[0]]["exp_avg"]
    expected = exp_avg.clone()
    state_dict = optimizer.state_dict()
    give_grads(optimizer, params, 9)
    before = [param.detach().clone() for param in params]
    optimizer.close()
    optimizer.close()
    for use in (
        optimizer.step,
        optimizer.state_dict,
        optimizer.torch_state_dict,
        lambda: optimizer.load_state_dict(state_dict),
        lambda: optimizer.initialize_state(params[0]),
        lambda: optimizer.set_scaled_state(params[0], "exp_avg", torch.zeros(300)),
        lambda: optimizer.state[params[0]].update(exp_avg=torch.zeros(300)),
    ):
        with pytest.raises(RuntimeError, match="was closed"):
            use()
    assert all(torch.equal(param, old) for param, old in zip(params, before, strict=True))
    assert torch.equal(exp_avg, expected)
    report = optimizer.memory_report()
    assert sum(report.host_bytes.values()) + sum(report.resident_bytes.values()) + report.param_numel == 0
    optimizer.zero_grad()


def test_close_before_the_first_step(device: str) -> None:
    optimizer = FusedOffloadAdam([param_of(torch.ones(3, device=device))])
    optimizer.close()
    with pytest.raises(RuntimeError, match="was closed"):
        optimizer.step()


def test_step_that_fails_half_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters and state no longer belong together: nothing works until a checkpoint is
    loaded.
    """
    optimizer, params = make("cpu")
    state_dict = {
        "state": {
            index: {key: value.clone() for key, value in entry.items()}
            for index, entry in optimizer.state_dict()["state"].items()
        },
        "param_groups": optimizer.state_dict()["param_groups"],
    }
    weights = [param.detach().clone() for param in params]
    give_grads(optimizer, params, 9)
    run_chunk, calls = fused_offload.stream.cpu_backend.run_chunk, []

    def run_two_chunks(*args: Any) -> None:
        calls.append(args)
        if len(calls) > 2:
            raise OSError("bus error")
        run_chunk(*args)

    with monkeypatch.context() as patch:
        patch.setattr(fused_offload.stream.cpu_backend, "run_chunk", run_two_chunks)
        with pytest.raises(OSError, match="bus error"):
            optimizer.step()
    for use in (optimizer.step, optimizer.state_dict, optimizer.torch_state_dict):
        with pytest.raises(RuntimeError, match=r"failed half-way \(OSError: bus error\)"):
            use()
    with torch.no_grad():
        for param, weight in zip(params, weights, strict=True):
            param.copy_(weight)
    optimizer.load_state_dict(state_dict)
    optimizer.step()
    undisturbed, twins = make("cpu")
    give_grads(undisturbed, twins, 9)
    undisturbed.step()
    helpers.assert_same_snapshot(helpers.snapshot(optimizer), helpers.snapshot(undisturbed))


@pytest.mark.filterwarnings("error")
def test_graph_is_accepted_and_does_nothing() -> None:
    with pytest.warns(DeprecationWarning, match="has no effect any more") as warned:
        config = OffloadConfig(graph=True, pin=False, window_bytes=1)
    assert [warning.filename for warning in warned] == [__file__]
    assert dataclasses.replace(config) == OffloadConfig(pin=False, window_bytes=1)


def test_a_rule_with_several_phases_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AdamRule, "phases", AdamRule.phases * 2)
    with pytest.raises(RuntimeError, match="FusedOffloadAdam has an update rule with 2 phases"):
        FusedOffloadAdam([torch.nn.Parameter(torch.ones(3))])
