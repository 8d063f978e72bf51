"""A true torch optimizer: schedulers, hooks, groups, frozen parameters, strides, compilation,
tear-down.
"""

from __future__ import annotations

import ast
import copy
import ctypes
import gc
import inspect
import io
import pickle
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import helpers
import numpy as np
import psutil
import pytest
import torch
from helpers import (
    DTYPES,
    FormatsCase,
    Oracle,
    assert_same_bits,
    bits,
    no_host_sync,
    param_of,
    randn,
    snapshot,
    unchanged,
)
from torch import nn
from torch.optim import lr_scheduler
from torch.utils._device import _device_constructors

import fused_offload.kernels
import fused_offload.params.tracker
import fused_offload.state.store
from fused_offload import FusedOffloadAdam, OffloadConfig
from fused_offload.kernels.adam import launch as adam
from fused_offload.params.dense import addresses_of

device = helpers.device

FP32 = FormatsCase()


def make(
    device: str, shapes: tuple[Any, ...] = ((6, 5), (300,), (1,)), **options: Any
) -> tuple[FusedOffloadAdam, list[nn.Parameter]]:
    params = [param_of(randn(shape, index, device)) for index, shape in enumerate(shapes)]
    return FusedOffloadAdam(params, **{"lr": 1e-2, **options}), params


def give_grads(params: list[Any], step: int) -> None:
    for index, param in enumerate(params):
        param.grad = randn(param.shape, 1000 * step + index, param.device.type).to(param.dtype)


def torch_twin(params: list[nn.Parameter], **options: Any) -> tuple[torch.optim.AdamW, list[nn.Parameter]]:
    twins = [param_of(param.detach()) for param in params]
    return torch.optim.AdamW(twins, **{"lr": 1e-2, "weight_decay": 0.0, "foreach": False, **options}), twins


def assert_close(ours: list[Any], theirs: list[Any]) -> None:
    """Both round, in another order of operations: the default tolerance for float32."""
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.detach(), b.detach())


# -- construction ----------------------------------------------------------------------------------


def test_is_an_optimizer(device: str) -> None:
    optimizer, params = make(device)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.defaults == {
        "lr": 1e-2,
        "bias_correction": True,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
    }
    assert optimizer.param_groups[0]["params"] == params
    assert "FusedOffloadAdam" in repr(optimizer)
    assert "lr: 0.01" in repr(optimizer)


def test_repr_names_stored_formats_and_offload(device: str) -> None:
    param = nn.Parameter(torch.ones(3, device=device))
    plain = FusedOffloadAdam([param], exp_avg_sq_dtype=torch.bfloat16)
    assert "exp_avg: torch.float32\nexp_avg_sq: torch.bfloat16\nnumerics: ieee\n" in repr(plain)
    optimizer = FusedOffloadAdam(
        [param], master_weights=True, store_param_remainders=True, offload=OffloadConfig(fraction=0.5)
    )
    assert "master_param: torch.float32, as 16-bit remainder beside a torch.bfloat16 parameter\n" in repr(optimizer)
    assert f"offload: {OffloadConfig(fraction=0.5)}\n)" in repr(optimizer)


def test_signature_is_that_of_transformer_engine() -> None:
    """Names, order, kinds and defaults; our own arguments come last and by keyword."""
    expected = [
        ("params", inspect.Parameter.empty),
        ("lr", 1e-3),
        ("betas", (0.9, 0.999)),
        ("eps", 1e-8),
        ("weight_decay", 0.0),
        ("amsgrad", False),
    ]
    keyword = [
        ("bias_correction", True),
        ("adam_w_mode", True),
        ("capturable", False),
        ("master_weights", False),
        ("master_weight_dtype", torch.float32),
        ("exp_avg_dtype", torch.float32),
        ("exp_avg_sq_dtype", torch.float32),
        ("use_decoupled_grad", False),
        ("store_param_remainders", False),
        ("set_grad_none", None),
    ]
    found = list(inspect.signature(FusedOffloadAdam).parameters.values())
    positional = [(p.name, p.default) for p in found if p.kind is p.POSITIONAL_OR_KEYWORD]
    by_keyword = [(p.name, p.default) for p in found if p.kind is p.KEYWORD_ONLY]
    assert positional == expected
    assert by_keyword[: len(keyword)] == keyword
    assert [name for name, _ in by_keyword[len(keyword) :]] == [
        "numerics",
        "stochastic_rounding",
        "rounding_seed",
        "offload",
    ]
    torch_names = list(inspect.signature(torch.optim.AdamW).parameters)[:6]
    assert [name for name, _ in positional] == torch_names


def test_named_parameters(device: str) -> None:
    model = nn.Linear(3, 2).to(device)
    optimizer = FusedOffloadAdam(model.named_parameters(), lr=1e-2)
    assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]
    give_grads([*model.parameters()], 0)
    optimizer.step()
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == ["weight", "bias"]


def test_without_other_optimizer_libraries() -> None:
    """Imports and steps where apex, TransformerEngine, DeepSpeed and Megatron cannot be
    imported.
    """
    program = (
        "import sys\n"
        "for name in ('apex', 'transformer_engine', 'deepspeed', 'megatron', 'amp_C'):\n"
        "    sys.modules[name] = None\n"
        "import torch\n"
        "from fused_offload import FusedOffloadAdam\n"
        "param = torch.nn.Parameter(torch.ones(3))\n"
        "optimizer = FusedOffloadAdam([param], lr=0.5)\n"
        "param.grad = torch.ones(3)\n"
        "optimizer.step()\n"
        "assert param.tolist() == [0.5] * 3, param\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("failing", ["betas", "params", "allocation"])
def test_failed_construction_shows_only_its_own_error(
    device: str, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No finalizer adds an error of its own, and nothing is left behind."""
    ignored: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    param = param_of(torch.ones(3, device=device))
    param.grad = torch.ones(3, device=device)
    alive = weakref.ref(param)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if failing == "betas":
            with pytest.raises(ValueError, match="Invalid beta parameter at index 0: 2"):
                FusedOffloadAdam([param], betas=(2, 0))
        elif failing == "params":
            with pytest.raises(TypeError, match="placeholders"):
                FusedOffloadAdam([param, None])
        else:
            optimizer = FusedOffloadAdam([param])
            with monkeypatch.context() as patch:
                patch.setattr("mmap.mmap", lambda *args, **kwargs: (_ for _ in ()).throw(OSError(12, "no memory left")))
                with unchanged(optimizer), pytest.raises(RuntimeError, match="no memory left"):
                    optimizer.step()
            optimizer.step()  # and it works once there is memory
            assert optimizer.param_groups[0]["step"] == 1
            del optimizer
        del param
        gc.collect()
    assert not ignored
    assert alive() is None


# -- schedulers ------------------------------------------------------------------------------------

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, [lambda e: 0.9**e, lambda e: 1.0 / (1 + e)]),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda e: 0.95),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 7),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [5, 20]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 9),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=10),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 25, 2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 30),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 8),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-4, 1e-2, step_size_up=6, cycle_momentum=True),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=31),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=2),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 4), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=10), lr_scheduler.CosineAnnealingLR(o, 20)], [10]
    ),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 1e-4, anneal_epochs=10),
}


@pytest.mark.parametrize("tensor_lr", [False, True], ids=["float lr", "tensor lr"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers(device: str, name: str, tensor_lr: bool) -> None:
    """30 steps: the same lr and betas in every group as torch's AdamW, and the same parameters."""
    built = []
    params = [param_of(randn(size, index, device)) for index, size in enumerate((300, 5))]
    for optimizer_class in (FusedOffloadAdam, torch.optim.AdamW):
        copies = [param_of(param.detach()) for param in params]
        groups = [
            {"params": [param], "lr": torch.tensor(lr) if tensor_lr else lr}
            for param, lr in zip(copies, (1e-2, 3e-3), strict=True)
        ]
        options: dict[str, Any] = {} if optimizer_class is FusedOffloadAdam else {"foreach": False}
        optimizer = optimizer_class(groups, weight_decay=0.1, **options)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The epoch parameter", category=UserWarning)
            built.append((optimizer, SCHEDULERS[name](optimizer), copies))
    seen = set()
    for step in range(30):
        settings = []
        for optimizer, scheduler, copies in built:
            give_grads(copies, step)
            settings.append([(float(group["lr"]), group["betas"]) for group in optimizer.param_groups])
            optimizer.step()
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="The epoch parameter", category=UserWarning)
                scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
        assert settings[0] == settings[1], f"step {step}"
        seen.update(settings[0])
    assert len(seen) > 2, "the schedule changes something"
    if name in ("OneCycleLR", "CyclicLR"):
        assert len({betas for _, betas in seen}) > 5
    assert_close(built[0][2], built[1][2])


def test_schedule_resumes(device: str) -> None:
    """A scheduler's initial_lr survives a save, so that the next one finds it."""
    optimizer, params = make(device)
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda e: 0.5**e)
    give_grads(params, 0)
    optimizer.step()
    scheduler.step()
    resumed, _ = make(device)
    resumed.load_state_dict(optimizer.state_dict())
    assert resumed.param_groups[0]["initial_lr"] == 1e-2
    again = lr_scheduler.LambdaLR(resumed, lambda e: 0.5**e, last_epoch=1)
    assert again.get_last_lr() == [1e-2 * 0.25]


# -- lr as a tensor, many learning rates -----------------------------------------------------------


@pytest.mark.parametrize("where", ["cpu", "params"])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_lr_tensor_is_read_at_every_step(device: str, where: str, shape: tuple[int, ...]) -> None:
    lr = torch.full(shape, 1e-2, device="cpu" if where == "cpu" else device)
    optimizer, (param,) = make(device, ((300,),), lr=lr)
    assert optimizer.param_groups[0]["lr"] is lr
    oracle = Oracle(param, FP32)
    for step in range(6):
        lr.fill_(1e-2 / (1 + step))
        give_grads([param], step)
        if step < 2:  # memory, compilation
            optimizer.step()
        else:
            with no_host_sync(device):
                optimizer.step()
        oracle.step(param.grad, optimizer.param_groups[0], step + 1)
    oracle.check(optimizer, param, "lr tensor:")


@pytest.mark.gpu
def test_parameters_on_the_cpu_wait_for_a_learning_rate_on_a_gpu() -> None:
    lr = torch.tensor(1e-2, device="cuda")
    optimizer, (param,) = make("cpu", ((300,),), lr=lr)
    oracle = Oracle(param, FP32)
    for step in range(4):
        torch.cuda._sleep(50_000_000)
        lr.fill_(1e-2 / (1 + step))
        give_grads([param], step)
        optimizer.step()
        oracle.step(param.grad, {**optimizer.param_groups[0], "lr": lr.item()}, step + 1)
    oracle.check(optimizer, param, "lr on the GPU:")


class Asked(torch.Tensor):
    """A value that notes how it is copied to another device."""

    how: ClassVar[list[Any]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.to:
            cls.how.append((kwargs or {}).get("non_blocking", False))
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_learning_rate_that_the_cpu_reads_is_waited_for() -> None:
    optimizer, _ = make("cpu", ((300,),))
    rule, lr = optimizer._rule(), torch.ones(1).as_subclass(Asked)
    Asked.how.clear()
    rule.values_on(rule.step_values(optimizer.param_groups[0], 1)._replace(lr=lr), torch.device("cpu"))
    assert Asked.how == [False]


def test_many_learning_rates(device: str) -> None:
    """200 values, extreme ones among them: each is used, and none is compiled into the kernel."""
    optimizer, (param,) = make(device, ((300,),))
    oracle = Oracle(param, FP32)
    rates = [1e-3, 1e-3, 0.0, 1.0, 16.0, 1e-45, *(1e-4 * (1 + index) for index in range(194))]

    def builds() -> int:
        return sum(len(cache[0]) for cache in getattr(adam.adam_kernel, "device_caches", {}).values())

    for step, lr in enumerate(rates, start=1):
        optimizer.param_groups[0]["lr"] = lr
        give_grads([param], step)
        optimizer.step()
        oracle.step(param.grad, optimizer.param_groups[0], step)
        if step == 2:
            compiled = builds()
    oracle.check(optimizer, param, "after 200 learning rates:")
    assert builds() == compiled


# -- hooks, closures, compilation ------------------------------------------------------------------


def test_step_hooks(device: str) -> None:
    optimizer, (param, *_) = make(device)
    calls: list[tuple[str, float]] = []
    before = param.detach().flatten()[0].item()
    handles = [
        optimizer.register_step_pre_hook(lambda *_: calls.append(("pre", param.detach().flatten()[0].item()))),
        optimizer.register_step_post_hook(lambda *_: calls.append(("post", param.detach().flatten()[0].item()))),
    ]
    give_grads([param], 0)
    optimizer.step()
    after = param.detach().flatten()[0].item()
    assert calls == [("pre", before), ("post", after)]
    assert before != after
    for handle in handles:
        handle.remove()
    optimizer.step()
    assert len(calls) == 2


def test_step_hook_may_clip(device: str) -> None:
    optimizer, params = make(device)
    twin, twins = torch_twin(params)
    optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(params, 0.1) and None)
    for step in range(3):
        give_grads(params, step)
        give_grads(twins, step)
        nn.utils.clip_grad_norm_(twins, 0.1)
        optimizer.step()
        twin.step()
    assert_close(params, twins)


def test_state_dict_hooks(device: str) -> None:
    optimizer, params = make(device)
    calls = []
    optimizer.register_state_dict_pre_hook(lambda _: calls.append("state_dict pre"))
    optimizer.register_state_dict_post_hook(lambda _, state_dict: {**state_dict, "extra": 1})
    optimizer.register_load_state_dict_pre_hook(
        lambda _, state_dict: {key: value for key, value in state_dict.items() if key != "extra"}
    )
    optimizer.register_load_state_dict_post_hook(lambda _: calls.append("load post"))
    give_grads(params, 0)
    optimizer.step()
    state_dict = optimizer.state_dict()
    assert state_dict["extra"] == 1
    optimizer.load_state_dict(state_dict)
    assert calls == ["state_dict pre", "load post"]


def test_closure_runs_once_with_gradients(device: str) -> None:
    optimizer, (param,) = make(device, ((70_001,),), offload=OffloadConfig(chunk_bytes=4096))
    calls = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (param * 2).sum()
        loss.backward()
        calls.append(torch.is_grad_enabled())
        return loss

    before = param.detach().clone()
    loss = optimizer.step(closure)
    assert calls == [True]
    assert loss.item() == pytest.approx(2 * before.double().sum().item(), rel=1e-4)
    # The first step of Adam is lr; half an ulp of the parameter (at most 4.5 here) on top.
    assert ((before - param.detach()) - 1e-2).abs().max() < 1e-6
    assert optimizer.step() is None


def test_failing_closure_changes_nothing(device: str) -> None:
    optimizer, params = make(device)
    give_grads(params, 0)
    optimizer.step()

    def closure() -> None:
        raise KeyError("from the closure")

    with unchanged(optimizer), pytest.raises(KeyError, match="from the closure"):
        optimizer.step(closure)


@pytest.mark.filterwarnings("ignore:.*[Pp]rofiler.*")
def test_compiled_step(device: str) -> None:
    """torch.compile breaks the graph at the step and runs it as it is."""
    optimizer, params = make(device)
    twin, twins = make(device)
    compiled = torch.compile(optimizer.step, backend="eager")
    for step in range(3):
        give_grads(params, step)
        give_grads(twins, step)
        compiled()
        twin.step()
    for param, other in zip(params, twins, strict=True):
        assert_same_bits(param, other, "parameter")
    assert optimizer.param_groups[0]["step"] == 3


@pytest.mark.filterwarnings("ignore:.*[Pp]rofiler.*")
def test_compiled_training_step(device: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
    twin = copy.deepcopy(model)
    optimizer, twin_optimizer = (FusedOffloadAdam(net.parameters(), lr=1e-2) for net in (model, twin))

    def train(net: nn.Module, opt: FusedOffloadAdam, inputs: torch.Tensor) -> torch.Tensor:
        loss = (net(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    compiled = torch.compile(train, backend="eager")
    for step in range(3):
        inputs = randn((16, 4), step, device)
        assert_same_bits(compiled(model, optimizer, inputs), train(twin, twin_optimizer, inputs), "loss")
    for param, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert_same_bits(param, other, "parameter")


def test_changes_are_seen_by_autograd(device: str) -> None:
    """A graph that saved a parameter must not run backward over the updated values."""
    optimizer, (param,) = make(device, ((300,),))
    loss = (param * param).sum()
    give_grads([param], 0)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# -- gradients -------------------------------------------------------------------------------------


def test_zero_grad(device: str) -> None:
    optimizer, params = make(device)
    give_grads(params, 0)
    kept = params[0].grad
    optimizer.zero_grad(set_to_none=False)
    assert params[0].grad is kept
    assert not kept.any()
    optimizer.zero_grad()
    assert all(param.grad is None for param in params)


def test_zero_grad_of_decoupled_gradients(device: str) -> None:
    """Touches what the step reads, and nothing else."""
    optimizer, params = make(device, use_decoupled_grad=True)
    give_grads(params, 0)
    for param in params:
        param.decoupled_grad = torch.ones_like(param)
    kept = params[0].decoupled_grad
    optimizer.zero_grad(set_to_none=False)
    assert params[0].decoupled_grad is kept
    assert not kept.any()
    optimizer.zero_grad()
    assert all(param.decoupled_grad is None for param in params)
    assert all(param.grad is not None and param.grad.any() for param in params)


def test_set_grad_none_is_deprecated(device: str) -> None:
    with pytest.warns(DeprecationWarning, match="set_grad_none"):
        optimizer, _ = make(device, set_grad_none=True)
    optimizer.zero_grad()
    with pytest.raises(ValueError, match="disagree"):
        optimizer.zero_grad(set_to_none=False)


def test_accumulated_gradients(device: str) -> None:
    """Four micro-batches and one step equal one big batch, up to the order of the gradient's
    sum.
    """
    torch.manual_seed(0)
    model = nn.Linear(6, 3).to(device)
    twin = copy.deepcopy(model)
    optimizer, big = (FusedOffloadAdam(net.parameters(), lr=1e-2) for net in (model, twin))
    for step in range(3):
        inputs = randn((16, 6), step, device)
        for part in inputs.split(4):
            (model(part).square().sum() / 16).backward()
        (twin(inputs).square().sum() / 16).backward()
        for opt in (optimizer, big):
            opt.step()
            opt.zero_grad()
    assert_close([*model.parameters()], [*twin.parameters()])


def test_param_without_gradient_at_first(device: str) -> None:
    """An idle expert: no gradient for three steps; the count is the group's, as in
    TransformerEngine.
    """
    optimizer, (busy, idle) = make(device, ((4,), (300,)))
    before = idle.detach().clone()
    for step in range(3):
        give_grads([busy], step)
        optimizer.step()
    assert_same_bits(idle, before, "idle parameter")
    idle.grad = randn(300, 7, device)
    give_grads([busy], 3)
    optimizer.step()
    assert optimizer.param_groups[0]["step"] == 4
    torch.testing.assert_close(optimizer.state[idle]["exp_avg"].to(device), 0.1 * idle.grad, rtol=1e-6, atol=0)
    assert not torch.equal(idle, before)


def test_gradients_come_and_go(device: str) -> None:
    """A parameter without gradient keeps every bit of parameter and state, whichever others have
    one.
    """
    optimizer, params = make(device, ((5,), (300,), (1,), (129,)), offload=OffloadConfig(chunk_bytes=1))
    oracles = [Oracle(param, FP32) for param in params]
    for step in range(1, 17):
        give_grads(params, step)
        for index, (oracle, param) in enumerate(zip(oracles, params, strict=True)):
            if step >> index & 1:
                param.grad = None
            else:
                oracle.step(param.grad, optimizer.param_groups[0], step)
        optimizer.step()
        for oracle, param in zip(oracles, params, strict=True):
            oracle.check(optimizer, param, f"step {step}:")


def test_no_gradients_at_all(device: str) -> None:
    optimizer, params = make(device)
    before = [bits(param) for param in params]
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()
    assert optimizer.param_groups[0]["step"] == 2
    assert all(torch.equal(bits(param), old) for param, old in zip(params, before, strict=True))


@pytest.mark.parametrize("position", [0, 1, 2])
def test_empty_params_hide_no_others(device: str, position: int) -> None:
    shapes: list[Any] = [(4,), (3,)]
    shapes.insert(position, (0, 5))
    optimizer, params = make(device, tuple(shapes), lr=0.1)
    before = [param.detach().clone() for param in params]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    for param, old in zip(params, before, strict=True):
        torch.testing.assert_close(param.detach(), old - 0.1)


# -- frozen parameters -----------------------------------------------------------------------------


def test_frozen_params(device: str) -> None:
    """They get no state and never change; unfreezing later works."""
    optimizer, params = make(device, ((300,), (5,), (6, 5)))
    params[1].requires_grad_(False)
    before = params[1].detach().clone()
    for step in range(3):
        give_grads([params[0], params[2]], step)
        optimizer.step()
    assert_same_bits(params[1], before, "frozen parameter")
    assert params[1] not in optimizer.state
    assert set(optimizer.state_dict()["state"]) == {0, 2}
    params[1].requires_grad_(True)
    oracle = Oracle(params[1], FP32)
    give_grads(params, 3)
    optimizer.step()
    oracle.step(params[1].grad, optimizer.param_groups[0], 4)
    oracle.check(optimizer, params[1], "unfrozen:")


def test_all_params_frozen(device: str) -> None:
    optimizer, params = make(device)
    for param in params:
        param.requires_grad_(False)
    optimizer.step()
    assert optimizer.state_dict()["state"] == {}
    assert sum(optimizer.memory_report().host_bytes.values()) == 0


# -- groups ----------------------------------------------------------------------------------------


def test_group_added_after_training_started(device: str) -> None:
    """Its own lr and dtype, its own count; what was there keeps every bit."""
    optimizer, params = make(device)
    oracles = [Oracle(param, FP32) for param in params]
    for step in range(1, 6):
        give_grads(params, step)
        optimizer.step()
        for oracle, param in zip(oracles, params, strict=True):
            oracle.step(param.grad, optimizer.param_groups[0], step)
    late = param_of(randn(200, 9, device, torch.bfloat16))
    late_oracle = Oracle(late, FP32)
    before = snapshot(optimizer)
    optimizer.add_param_group({"params": [late], "lr": 0.5})
    for old, new in zip(before.state, snapshot(optimizer).state[: len(params)], strict=True):
        assert all(torch.equal(old[key], new[key]) for key in old)
    give_grads([*params, late], 6)
    optimizer.step()
    for oracle, param in zip(oracles, params, strict=True):
        oracle.step(param.grad, optimizer.param_groups[0], 6)
        oracle.check(optimizer, param, "old group:")
    late_oracle.step(late.grad, optimizer.param_groups[1], 1)
    late_oracle.check(optimizer, late, "late group:")
    assert [group["step"] for group in optimizer.param_groups] == [6, 1]
    if device == "cuda":
        assert all(optimizer.state[param]["exp_avg"].is_pinned() for param in [*params, late])


def test_hyperparameters_edited_between_steps(device: str) -> None:
    params = [param_of(randn(size, index, device)) for index, size in enumerate((300, 5))]
    optimizer = FusedOffloadAdam([{"params": [params[0]]}, {"params": [params[1]], "lr": 0.5}])
    oracles = [Oracle(param, FP32) for param in params]
    edits: list[dict[str, Any]] = [
        {},
        {"lr": 0.25},
        {"betas": (0.5, 0.75)},
        {"eps": 1e-3},
        {"weight_decay": 0.3},
        {"bias_correction": False},
        {"step": 100},
        {"lr": 1, "betas": [0.0, 0.0]},
    ]
    for edit in edits:
        optimizer.param_groups[1].update(edit)
        give_grads(params, len(edit))
        optimizer.step()
        for oracle, group in zip(oracles, optimizer.param_groups, strict=True):
            oracle.step(group["params"][0].grad, group, group["step"])
    assert [group["step"] for group in optimizer.param_groups] == [8, 102]
    for oracle, param in zip(oracles, params, strict=True):
        oracle.check(optimizer, param, "edited group:")


def test_params_move_between_groups(device: str) -> None:
    """The state goes along; the count is that of the new group."""
    params = [param_of(randn(size, index, device)) for index, size in enumerate((300, 5, 40))]
    optimizer = FusedOffloadAdam([{"params": params[:2]}, {"params": params[2:], "lr": 0.5}])
    oracles = [Oracle(param, FP32) for param in params]

    def step_all(step: int) -> None:
        give_grads(params, step)
        optimizer.step()
        for group in optimizer.param_groups:
            for param in group["params"]:
                index = next(i for i, other in enumerate(params) if other is param)
                oracles[index].step(param.grad, group, group["step"])

    step_all(0)
    step_all(1)
    optimizer.param_groups[1]["params"].append(optimizer.param_groups[0]["params"].pop(0))
    step_all(2)
    optimizer.param_groups.reverse()
    step_all(3)
    del optimizer.param_groups[0]["params"][:]
    kept = oracles[0], oracles[2]
    step_all(4)
    for oracle, param in zip(oracles, params, strict=True):
        oracle.check(optimizer, param, "moved:")
    assert kept == (oracles[0], oracles[2])
    assert [group["step"] for group in optimizer.param_groups] == [5, 5]


@pytest.mark.parametrize("when", ["before the first step", "after two steps"])
@pytest.mark.parametrize("how", ["item", "list", "group"])
def test_params_replaced_in_the_groups(device: str, how: str, when: str) -> None:
    """Wrappers put copies or shards in place of what the optimizer was built with."""
    optimizer, params = make(device, ((300,), (5,)))
    steps = 0 if when == "before the first step" else 2
    for step in range(steps):
        give_grads(params, step)
        optimizer.step()
    clones = [param_of(param.detach()) for param in params]
    old = [param.detach().clone() for param in params]
    oracles = [Oracle(clone, FP32) for clone in clones]
    group = optimizer.param_groups[0]
    if how == "item":
        for index, clone in enumerate(clones):
            group["params"][index] = clone
    elif how == "list":
        group["params"] = clones
    else:
        optimizer.param_groups[0] = {**group, "params": clones}
    for param in params:
        optimizer.state.pop(param, None)
    for step in range(3):
        give_grads(clones, 10 + step)
        optimizer.step()
        for oracle, clone in zip(oracles, clones, strict=True):
            oracle.step(clone.grad, group, steps + step + 1)
    for oracle, clone, param, value in zip(oracles, clones, params, old, strict=True):
        oracle.check(optimizer, clone, "clone:")
        assert_same_bits(param, value, "replaced parameter")
    assert set(optimizer.state_dict()["state"]) == {0, 1}


@pytest.mark.parametrize("formats", [FP32, FormatsCase(torch.float16, torch.float16, "fp16")], ids=["fp32", "fp16"])
def test_state_moves_with_a_replaced_param(device: str, formats: FormatsCase) -> None:
    """``state[new] = state.pop(old)``, as torch's own users do it: training goes on as if nothing
    happened.
    """
    params = [param_of(randn(size, index, device)) for index, size in enumerate((300, 5))]
    optimizer = FusedOffloadAdam(params, lr=1e-2, **formats.arguments())
    oracles = [Oracle(param, formats) for param in params]
    for step in range(1, 7):
        if step == 4:
            clones = [param_of(param.detach()) for param in params]
            for index, (param, clone) in enumerate(zip(params, clones, strict=True)):
                optimizer.state[clone] = optimizer.state.pop(param)
                optimizer.param_groups[0]["params"][index] = clone
            params = clones
        give_grads(params, step)
        optimizer.step()
        for oracle, param in zip(oracles, params, strict=True):
            oracle.step(param.grad, optimizer.param_groups[0], step)
    for oracle, param in zip(oracles, params, strict=True):
        oracle.check(optimizer, param, "moved:")
    assert len(optimizer.state) == 2


def test_copied_state_is_not_shared(device: str) -> None:
    """``state[new] = state[old]`` without a pop: both parameters have state of their own from then
    on.
    """
    optimizer, (param, other) = make(device, ((300,), (300,)))
    give_grads([param], 0)
    optimizer.step()
    with torch.no_grad():
        other.copy_(param)
    optimizer.state[other] = optimizer.state[param]
    assert optimizer.state[other] is not optimizer.state[param]
    param.grad = other.grad = randn(300, 5, device)
    optimizer.step()
    assert_same_bits(other, param, "parameter")
    for key in ("exp_avg", "exp_avg_sq"):
        assert_same_bits(optimizer.state[other][key], optimizer.state[param][key], key)


def test_replaced_while_the_step_is_skipped(device: str) -> None:
    """A step that is skipped or refused after the groups were edited must not make the next one
    forget the edit.
    """
    optimizer, params = make(device, ((300,), (300,)))
    oracles = [Oracle(param, FP32) for param in params]
    for step in range(1, 4):
        give_grads(params, step)
        optimizer.step()
        for oracle, param in zip(oracles, params, strict=True):
            oracle.step(param.grad, optimizer.param_groups[0], step)
    optimizer.param_groups[0]["params"].reverse()
    optimizer.found_inf = torch.tensor(1.0)
    optimizer.step()
    del optimizer.found_inf
    optimizer.param_groups[0]["params"].reverse()
    params[0].grad = torch.ones(300, device=device)
    params[0].grad.data = torch.ones(299, device=device)
    with unchanged(optimizer), pytest.raises(RuntimeError, match="shape"):
        optimizer.step()
    give_grads(params, 4)
    optimizer.step()
    for oracle, param in zip(oracles, params, strict=True):
        oracle.step(param.grad, optimizer.param_groups[0], 4)
        oracle.check(optimizer, param, "after all:")


@pytest.mark.parametrize("empty", [[{"params": []}], [{"params": []}, {"params": [], "lr": 1.0}]])
def test_empty_groups(device: str, empty: list[dict[str, Any]]) -> None:
    """A pipeline stage without trainable parameters: everything is a no-op, and the count goes
    on.
    """
    optimizer = FusedOffloadAdam(copy.deepcopy(empty))
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda e: 0.5**e)
    for _ in range(3):
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    state_dict = optimizer.state_dict()
    assert state_dict["state"] == {}
    assert [group["step"] for group in state_dict["param_groups"]] == [3] * len(empty)
    again = FusedOffloadAdam(copy.deepcopy(empty))
    again.load_state_dict(state_dict)
    again.step()
    assert [group["step"] for group in again.param_groups] == [4] * len(empty)
    optimizer.close()


def test_rank_without_any_state(device: str) -> None:
    """Every parameter is empty: builds, steps, saves and loads."""
    optimizer, params = make(device, ((0,), (0, 3)), master_weights=True)
    for _ in range(3):
        for param in params:
            param.grad = torch.zeros_like(param)
        optimizer.step()
    assert sum(optimizer.memory_report().host_bytes.values()) == 0
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    again, _ = make(device, ((0,), (0, 3)), master_weights=True)
    again.load_state_dict(torch.load(buffer))
    again.step()
    assert again.param_groups[0]["step"] == 4


def test_bare_empty_list() -> None:
    with pytest.raises(ValueError, match="optimizer got an empty parameter list"):
        FusedOffloadAdam([])


def test_empty_and_filled_groups_count_alike(device: str) -> None:
    param = param_of(torch.ones(3, device=device))
    optimizer = FusedOffloadAdam([{"params": [param]}, {"params": []}])
    for step in range(5):
        give_grads([param], step)
        optimizer.step()
    assert [group["step"] for group in optimizer.state_dict()["param_groups"]] == [5, 5]


# -- strides ---------------------------------------------------------------------------------------


def channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous(memory_format=torch.channels_last)


PARAM_STRIDES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda t: t.contiguous(),
    "channels last": channels_last,
    "transposed": lambda t: t.transpose(1, 3).contiguous().transpose(1, 3),
}
GRAD_STRIDES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **PARAM_STRIDES,
    "expanded": lambda t: t[:, :1, :1, :1].expand(t.shape),
    "every other": lambda t: torch.stack([t, -t], dim=-1)[..., 0],
    "negative bit": lambda t: torch._neg_view(-t),
}


@pytest.mark.parametrize("grad_strides", GRAD_STRIDES)
@pytest.mark.parametrize("param_strides", PARAM_STRIDES)
def test_strides(device: str, param_strides: str, grad_strides: str) -> None:
    """Elements count by their index, whatever the order in memory."""
    shape = (4, 3, 5, 7)
    values = randn(shape, 1, device)
    param = nn.Parameter(PARAM_STRIDES[param_strides](values))
    plain = param_of(values)
    options: dict[str, Any] = {"lr": 1e-2, "use_decoupled_grad": True, "offload": OffloadConfig(chunk_bytes=1)}
    optimizer, reference = FusedOffloadAdam([param], **options), FusedOffloadAdam([plain], **options)
    for step in range(3):
        param.decoupled_grad = GRAD_STRIDES[grad_strides](randn(shape, 10 + step, device))
        before = param.decoupled_grad.clone()
        plain.decoupled_grad = param.decoupled_grad.resolve_neg().contiguous()
        optimizer.step()
        reference.step()
        assert torch.equal(param.decoupled_grad, before)
    assert param.stride() == PARAM_STRIDES[param_strides](values).stride()
    assert_same_bits(param, plain, "parameter")
    for key in ("exp_avg", "exp_avg_sq"):
        assert_same_bits(optimizer.state[param][key], reference.state[plain][key], key)


GAPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "columns": lambda memory: memory.view(10, 10)[:, ::2],
    "transposed": lambda memory: memory.view(10, 10)[:, :5].t(),
    "every other element": lambda memory: memory[::2],
    "inner block": lambda memory: memory.view(2, 5, 10)[:, 1:4, 2:9].permute(2, 0, 1),
    "scalar": lambda memory: memory.view(10, 10)[3, 7],
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "formats", [FormatsCase(), FormatsCase(torch.uint8, torch.uint8, "remainder")], ids=["fp32", "uint8"]
)
@pytest.mark.parametrize("gaps", GAPS)
def test_params_with_gaps_in_memory(device: str, gaps: str, formats: FormatsCase, dtype: torch.dtype) -> None:
    """Stepped, saved, loaded and reloaded as without gaps, bit for bit; the memory between their
    elements stays.
    """
    memory = randn(100, 0, device, dtype)
    with_gaps = GAPS[gaps](memory).requires_grad_()
    assert with_gaps._base is not None
    with_gaps = with_gaps.detach().requires_grad_()
    plain = torch.empty_like(with_gaps, requires_grad=True)
    with torch.no_grad():
        plain.copy_(with_gaps)
    others = [param_of(randn(300, 1, device, dtype)) for _ in range(2)]
    untouched = torch.ones(100, dtype=torch.bool, device=device)
    GAPS[gaps](untouched).zero_()
    before = memory[untouched].clone()
    pairs = [(with_gaps, others[0]), (plain, others[1])]
    optimizers = [FusedOffloadAdam(pair, lr=1e-2, **formats.arguments()) for pair in pairs]
    for step in range(4):
        for (param, other), optimizer in zip(pairs, optimizers, strict=True):
            param.grad = None if step == 2 else randn(param.shape, step, device).to(dtype)
            other.grad = randn(300, 10 + step, device).to(dtype)
            optimizer.step()
            if step == 1:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
                optimizer.reload_model_params()
        assert_same_bits(with_gaps, plain, f"step {step}")
        for key in optimizers[0].state[with_gaps]:
            values = [o.get_unscaled_state(p[0], key) for o, p in zip(optimizers, pairs, strict=True)]
            assert_same_bits(*values, f"{key} in step {step}")
    assert torch.equal(memory[untouched], before)


def test_params_with_gaps_that_share_memory(device: str) -> None:
    memory = torch.ones(10, device=device)
    params = [memory[::2].detach(), memory[2:8:2].detach()]
    optimizer = FusedOffloadAdam(params)
    give_grads(params, 0)
    with unchanged(optimizer), pytest.raises(RuntimeError, match="share memory"):
        optimizer.step()


def test_gradient_strides_of_size_1_dimensions(device: str) -> None:
    """They say nothing about memory, and differ between what autograd makes and the parameter."""
    param = param_of(randn((2, 1, 100), 1, device))
    plain = param_of(param.detach())
    optimizer, reference = FusedOffloadAdam([param]), FusedOffloadAdam([plain])
    grad = randn((2, 1, 100), 2, device)
    param.grad = grad.as_strided((2, 1, 100), (100, 1, 1))
    plain.grad = grad
    optimizer.step()
    reference.step()
    assert_same_bits(param, plain, "parameter")


def test_conv_model_in_channels_last(device: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)).to(device)
    model = model.to(memory_format=torch.channels_last)
    twin = copy.deepcopy(model)
    optimizer = FusedOffloadAdam(model.parameters(), lr=1e-2)
    reference = torch.optim.AdamW(twin.parameters(), lr=1e-2, weight_decay=0.0, foreach=False)
    for step in range(5):
        inputs = channels_last(randn((2, 3, 8, 8), step, device))
        for net, opt in ((model, optimizer), (twin, reference)):
            opt.zero_grad()
            net(inputs).square().mean().backward()
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            # The models drift apart by rounding; only the update is compared here.
            theirs.grad = ours.grad.clone()
        optimizer.step()
        reference.step()
    assert_close([*model.parameters()], [*twin.parameters()])


@pytest.mark.parametrize("stepped", [0, 1, 3])
@pytest.mark.parametrize(
    ("dtype", "formats"),
    [
        (torch.float32, FP32),
        (torch.bfloat16, FormatsCase(master="remainder")),
        (torch.bfloat16, FormatsCase(master="fp32")),
    ],
    ids=["fp32", "remainder", "master"],
)
def test_param_changes_its_strides(device: str, dtype: torch.dtype, formats: FormatsCase, stepped: int) -> None:
    """``model.to(memory_format=...)`` between steps, also between building the state and the first
    step.
    """
    shape = (4, 3, 5, 7)
    values = randn(shape, 1, device, dtype)
    moving, staying = param_of(values), param_of(values)
    optimizers = [FusedOffloadAdam([param], lr=1e-2, **formats.arguments()) for param in (moving, staying)]
    optimizers[0].initialize_state(moving)
    for step in range(5):
        if step == stepped:
            moving.data = channels_last(moving.data)
        grad = randn(shape, 10 + step, device, dtype)
        moving.grad, staying.grad = grad.clone(), grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert_same_bits(moving, staying, "parameter")
    assert optimizers[0].state[moving]["exp_avg"].stride() == moving.stride()
    for key in optimizers[1].state[staying]:
        assert_same_bits(optimizers[0].state[moving][key], optimizers[1].state[staying][key], key)


@pytest.mark.parametrize("away", [torch.empty(0), torch.ones(7)])
def test_param_storage_taken_away_and_brought_back(device: str, away: torch.Tensor) -> None:
    """``param.data = torch.empty(0)`` frees a model's weights for a while; the state stays
    whole.
    """
    optimizer, (param, other) = make(device, ((300,), (5,)), master_weights=True)
    oracle = Oracle(param, FormatsCase(master="fp32"))
    for step in range(1, 4):
        give_grads([param, other], step)
        optimizer.step()
        oracle.step(param.grad, optimizer.param_groups[0], step)
    kept = param.data
    param.grad = None
    param.data = away.to(device)
    give_grads([other], 4)
    optimizer.step()
    saved = optimizer.state_dict()["state"][0]
    assert saved["exp_avg"].shape == (300,)
    param.data = kept
    give_grads([param, other], 5)
    optimizer.step()
    oracle.step(param.grad, optimizer.param_groups[0], 5)
    oracle.check(optimizer, param, "brought back:")


def test_empty_param_gets_elements(device: str) -> None:
    optimizer, (param, other) = make(device, ((0,), (5,)))
    for step in range(3):
        give_grads([param, other], step)
        optimizer.step()
    param.data = randn(300, 8, device)
    oracle = Oracle(param, FP32)
    param.grad = randn(300, 9, device)
    optimizer.step()
    oracle.step(param.grad, optimizer.param_groups[0], 4)
    oracle.check(optimizer, param, "grown:")


def test_param_replaced_before_it_got_its_state(device: str) -> None:
    """Storage is laid out for all parameters when the first one asks for it; another may change
    before its turn.
    """
    optimizer, (first, second) = make(device, ((128,), (128,)))
    optimizer.initialize_state(first)
    second.data = randn(1000, 3, device)
    oracles = [Oracle(param, FP32) for param in (first, second)]
    give_grads([first, second], 0)
    optimizer.step()
    for oracle, param in zip(oracles, (first, second), strict=True):
        oracle.step(param.grad, optimizer.param_groups[0], 1)
        oracle.check(optimizer, param, "replaced:")


# -- copies, several optimizers, tear-down ---------------------------------------------------------


@pytest.mark.parametrize("copier", [copy.copy, copy.deepcopy, pickle.dumps, lambda o: torch.save(o, io.BytesIO())])
def test_copies_are_refused(device: str, copier: Callable[[Any], Any]) -> None:
    optimizer, params = make(device)
    give_grads(params, 0)
    optimizer.step()
    with unchanged(optimizer), pytest.raises(TypeError, match="state_dict"):
        copier(optimizer)
    optimizer.step()


def test_several_optimizers_in_one_process(device: str) -> None:
    """Of different formats, chunks and modes, interleaved: none knows of the others."""
    cases = [
        (torch.float32, FP32, {"adam_w_mode": True}, OffloadConfig(chunk_bytes=1)),
        (torch.float32, FP32, {"adam_w_mode": False}, OffloadConfig()),
        (torch.bfloat16, FormatsCase(torch.bfloat16, torch.float16, "remainder"), {}, OffloadConfig(fraction=0.0)),
        (torch.float16, FormatsCase(torch.float16, torch.float32, "fp16"), {}, OffloadConfig(chunk_bytes=999, depth=1)),
    ]
    built = []
    for index, (dtype, formats, mode, config) in enumerate(cases):
        param = param_of(randn(1000, index, device, dtype))
        options = {"lr": 1e-2, "weight_decay": 0.1, "offload": config, **mode, **formats.arguments()}
        built.append((FusedOffloadAdam([param], **options), param, Oracle(param, formats)))
    for step in range(1, 6):
        for optimizer, param, oracle in built:
            give_grads([param], step)
            optimizer.step()
            oracle.step(param.grad, optimizer.param_groups[0], step, adam_w_mode=optimizer.adam_w_mode)
        if step == 3:
            built.pop(0)[0].close()
    for optimizer, param, oracle in built:
        oracle.check(optimizer, param, "interleaved:")


def test_two_optimizers_share_no_lr_tensor(device: str) -> None:
    lr = torch.tensor(1e-2)
    optimizer, params = make(device, lr=lr)
    other, _ = make(device)
    give_grads(params, 0)
    optimizer.step()
    other.load_state_dict(optimizer.state_dict())
    other.param_groups[0]["lr"].fill_(0.5)
    assert optimizer.param_groups[0]["lr"].item() == pytest.approx(1e-2)


@pytest.mark.parametrize("closed", [False, True])
def test_train_delete_train_again(device: str, closed: bool) -> None:
    """Host and GPU memory are back at the baseline after every round."""
    numel = 2_000_000  # 16 MB of state
    baseline: list[tuple[int, int]] = []
    for _ in range(5):
        optimizer, params = make(device, ((numel,),))
        give_grads(params, 0)
        optimizer.step()
        if closed:
            optimizer.close()
        memory = weakref.ref(optimizer)
        del optimizer, params
        gc.collect()
        assert memory() is None
        ctypes.CDLL(None).malloc_trim(0)  # gives back what the C library keeps
        on_gpu = torch.cuda.memory_allocated() if device == "cuda" else 0
        baseline.append((psutil.Process().memory_info().rss, on_gpu))
    # The first round brings in code and allocator caches; a leaked round would add 16 MB each.
    assert baseline[-1][0] - baseline[1][0] < 8 * 2**20
    assert baseline[-1][1] == baseline[1][1]


def test_state_survives_the_optimizer(device: str) -> None:
    optimizer, (param,) = make(device, ((300,),))
    give_grads([param], 0)
    optimizer.step()
    exp_avg = optimizer.state[param]["exp_avg"]
    expected = exp_avg.clone()
    optimizer.close()
    del optimizer
    gc.collect()
    assert_same_bits(exp_avg, expected, "exp_avg")


@pytest.fixture
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("default_dtype")
def test_default_dtype_does_not_matter(device: str) -> None:
    param = param_of(randn(300, 1, device))
    oracle = Oracle(param, FP32)
    optimizer = FusedOffloadAdam([param], lr=1e-2)
    param.grad = randn(300, 2, device)
    optimizer.step()
    oracle.step(param.grad, optimizer.param_groups[0], 1)
    oracle.check(optimizer, param, "float64 default:")


@pytest.mark.parametrize("dtype", [*DTYPES, torch.uint8])
def test_default_device_does_not_matter(device: str, dtype: torch.dtype) -> None:
    """Models are often built under ``torch.device("meta")``, optimizers sometimes along with
    them.
    """
    formats = FormatsCase(dtype, dtype)
    optimizer, params = make(device, **formats.arguments())
    give_grads(params, 0)
    with torch.device("meta"):
        optimizer.step()
        state_dict = optimizer.state_dict()
        torch_state_dict = optimizer.torch_state_dict()
    oracle = Oracle(param_of(randn((6, 5), 0)), formats)
    oracle.step(params[0].grad, optimizer.param_groups[0], 1)
    oracle.check(optimizer, params[0], "meta default:")
    with torch.device("meta"):
        optimizer.load_state_dict(state_dict)
        optimizer.set_scaled_state(params[0], "exp_avg", torch.ones(params[0].shape, device="cpu"))
        optimizer.state[params[0]]["exp_avg_sq"] = torch.ones(params[0].shape, device="cpu")
    for key in ("exp_avg", "exp_avg_sq"):
        assert optimizer.get_unscaled_state(params[0], key).eq(1.0).all()
    assert state_dict["state"][0]["exp_avg"].device.type == "cpu"
    assert torch_state_dict["state"][0]["step"].item() == 1


@pytest.mark.parametrize("fraction", [0.0, 1.0])
@pytest.mark.parametrize("inside", ["initialize_state", "load_state_dict", "step"])
def test_state_made_in_inference_mode(device: str, inside: str, fraction: float) -> None:
    """Rollouts run in it, and some loaders: what is made there is written by steps outside."""
    saved, params = make(device, ((300,),))
    give_grads(params, 0)
    saved.step()
    optimizer, (param,) = make(device, ((300,),), offload=OffloadConfig(fraction=fraction))
    oracle = Oracle(param, FP32)
    give_grads([param], 0)
    with torch.inference_mode():
        if inside == "initialize_state":
            optimizer.initialize_state(param)
        elif inside == "load_state_dict":
            optimizer.load_state_dict(saved.state_dict())
        else:
            optimizer.step()
    steps = 0 if inside == "initialize_state" else 1
    if steps:
        value = param.detach().clone()
        oracle.step(param.grad, optimizer.param_groups[0], 1)
        oracle.param.copy_(value)
    give_grads([param], 1)
    optimizer.step()
    oracle.step(param.grad, optimizer.param_groups[0], steps + 1)
    oracle.check(optimizer, param, "outside again:")


def test_step_under_autocast(device: str) -> None:
    optimizer, (param,) = make(device, ((300,),))
    oracle = Oracle(param, FP32)
    give_grads([param], 0)
    with torch.autocast(device, torch.bfloat16):
        optimizer.step()
    oracle.step(param.grad, optimizer.param_groups[0], 1)
    oracle.check(optimizer, param, "under autocast:")


def test_steps_in_another_thread(device: str) -> None:
    optimizer, (param,) = make(device, ((300,),))
    oracle = Oracle(param, FP32)
    for step in range(1, 4):
        give_grads([param], step)
        thread = threading.Thread(target=optimizer.step)
        thread.start()
        thread.join()
        oracle.step(param.grad, optimizer.param_groups[0], step)
    oracle.check(optimizer, param, "in threads:")


def test_scalar_params(device: str) -> None:
    formats = FormatsCase(torch.float16, torch.float16, "fp32")
    param = param_of(torch.tensor(1.5, device=device))
    optimizer = FusedOffloadAdam([param], lr=1e-2, **formats.arguments())
    oracle = Oracle(param, formats)
    for step in range(1, 4):
        give_grads([param], step)
        optimizer.step()
        oracle.step(param.grad, optimizer.param_groups[0], step)
    oracle.check(optimizer, param, "scalar:")
    assert optimizer.state[param]["exp_avg"].shape == ()


def test_a_steady_step_asks_where_each_tensor_is_once(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With thousands of tiny parameters the step is as slow as its questions; state that nobody
    read needs none.
    """
    params = [nn.Parameter(torch.ones(5, device=device)) for _ in range(50)]
    optimizer = FusedOffloadAdam(params, master_weights=True)
    asked: list[int] = []

    def counting(tensors: Sequence[torch.Tensor]) -> np.ndarray:
        asked.append(len(tensors))
        return addresses_of(tensors)

    for step in range(4):
        if step == 2:
            for module in (fused_offload.params.tracker, fused_offload.state.store):
                monkeypatch.setattr(module, "addresses_of", counting)
        for param in params:
            param.grad = torch.full((5,), float(step + 1), device=device)
        optimizer.step()
    assert sum(asked) == 2 * (50 + 50)


def test_every_tensor_says_where_it_is() -> None:
    """No function that obeys the default device is called without a device."""
    factories = {function.__name__ for function in _device_constructors()}
    calls, missing = 0, []
    packages = (Path(fused_offload.__file__).parent, Path(fused_offload.kernels.__file__).parent)
    for path in sorted({path for package in packages for path in package.rglob("*.py")}):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {f"torch.{name}" for name in factories}:
                calls += 1
                if not any(keyword.arg == "device" for keyword in node.keywords):
                    missing.append(f"{path.name}:{node.lineno}: {ast.unparse(node)}")
    assert missing == []
    assert calls > 10
