"""Gradient scalers: scales, skipped steps, and gradients that are only read."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import helpers
import pytest
import torch
from helpers import Oracle, assert_same_bits, bits, no_host_sync, param_of, randn, unchanged
from torch import nn

from fused_offload import FusedOffloadAdam, OffloadConfig
from fused_offload.params import placement
from fused_offload.params.placement import Placement

device = helpers.device

SCALE = 2.0**10


def make(
    device: str, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[FusedOffloadAdam, list[nn.Parameter]]:
    params = [param_of(randn(size, index, device, dtype)) for index, size in enumerate((300, 5))]
    return FusedOffloadAdam(params, lr=1e-2, weight_decay=0.1, **options), params


def make_scaler(device: str, **options: Any) -> torch.amp.GradScaler:
    scaler = torch.amp.GradScaler(device, init_scale=SCALE, **options)
    scaler.scale(torch.ones((), device=device))  # makes the scale tensor, as scaling a loss does
    return scaler


def give_grads(params: list[nn.Parameter], step: int, *, scale: float = SCALE, bad: float | None = None) -> None:
    for index, param in enumerate(params):
        param.grad = randn(param.shape, 10 * step + index, param.device.type, param.dtype) * scale
    if bad is not None:
        params[-1].grad[2] = bad


def oracle_steps(device: str, options: dict[str, Any], steps: list[int], formats: helpers.FormatsCase) -> list[Oracle]:
    """What parameters and state are after these steps, with gradients that were never scaled."""
    optimizer, params = make(device, **options)
    oracles = [Oracle(param, formats) for param in params]
    for number, step in enumerate(steps, start=1):
        give_grads(params, step, scale=1.0)
        for oracle, param in zip(oracles, params, strict=True):
            oracle.step(param.grad, optimizer.param_groups[0], number)
    return oracles


@contextmanager
def unchanged_values(tensors: list[torch.Tensor]) -> Iterator[None]:
    before = [bits(tensor) for tensor in tensors]
    yield
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(bits(tensor), old)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_skipped_step_changes_nothing_and_is_not_counted(device: str, bad: float) -> None:
    """Also the very first step, which has no state yet; the next clean step is the first."""
    optimizer, params = make(device)
    scaler = make_scaler(device)
    give_grads(params, 0, bad=bad)
    with unchanged_values(params):
        scaler.step(optimizer)
        scaler.update()
    optimizer.synchronize()
    assert optimizer.param_groups[0].get("step", 0) == 0
    for entry in optimizer.state.values():
        assert not any(entry.peek(key).any() for key in entry)
    assert scaler.get_scale() == SCALE / 2, "the scaler saw the skip"
    give_grads(params, 1, scale=SCALE / 2)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == SCALE / 2
    optimizer.synchronize()
    assert optimizer.param_groups[0]["step"] == 1
    for oracle, param in zip(oracle_steps(device, {}, [1], helpers.FormatsCase()), params, strict=True):
        oracle.check(optimizer, param, "after one clean step:")


@pytest.mark.parametrize("master", ["none", "fp32", "remainder"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_third_of_six_steps_is_bad(device: str, dtype: torch.dtype, master: str) -> None:
    """Five steps are counted and the result is that of a run that never saw the third."""
    formats = helpers.FormatsCase(master=master)
    options = {"dtype": dtype, **formats.arguments()}
    optimizer, params = make(device, offload=OffloadConfig(chunk_bytes=1), **options)
    found_inf = torch.zeros((), device=device)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(SCALE, device=device), found_inf
    for step in range(1, 7):
        give_grads(params, step, bad=math.nan if step == 3 else None)
        found_inf.fill_(1.0 if step == 3 else 0.0)
        if step in (1, 2):  # memory, compilation
            optimizer.step()
        else:
            with no_host_sync(device):
                optimizer.step()
    optimizer.synchronize()
    assert optimizer.param_groups[0]["step"] == 5
    for oracle, param in zip(oracle_steps(device, options, [1, 2, 4, 5, 6], formats), params, strict=True):
        oracle.check(optimizer, param, "after five clean steps:")


def test_gradients_are_unscaled_but_never_written(device: str) -> None:
    optimizer, params = make(device)
    scaler = make_scaler(device)
    give_grads(params, 1)
    with unchanged_values([param.grad for param in params]):
        scaler.step(optimizer)
    oracles = oracle_steps(device, {}, [1], helpers.FormatsCase())
    for oracle, param in zip(oracles, params, strict=True):
        oracle.check(optimizer, param, "with a scaler:")


@pytest.mark.parametrize("scale", [3.0, 1.1, 65536.0, 1e-3])
def test_scale_divides_in_fp32(device: str, scale: float) -> None:
    """Also scales that are no powers of two: the gradient is divided, not multiplied by a rounded
    reciprocal.
    """
    optimizer, params = make(device)
    oracles = [Oracle(param, helpers.FormatsCase()) for param in params]
    give_grads(params, 1, scale=scale)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(scale, device=device), torch.zeros((), device=device)
    optimizer.step()
    exact = torch.tensor(scale).item()
    for oracle, param in zip(oracles, params, strict=True):
        oracle.step((param.grad.double() / exact).float(), optimizer.param_groups[0], 1)
        oracle.check(optimizer, param, f"scale {scale}:")


def test_unscale_before_clipping(device: str) -> None:
    """After unscale_() the gradients count as they are: not divided again, clipped, and still
    checked.
    """
    optimizer, params = make(device)
    plain, plain_params = make(device)
    scaler = make_scaler(device)
    for step in range(1, 4):
        give_grads(params, step)
        give_grads(plain_params, step, scale=1.0)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(params, 0.5)
        nn.utils.clip_grad_norm_(plain_params, 0.5)
        with unchanged_values([param.grad for param in params]):
            scaler.step(optimizer)
        scaler.update()
        plain.step()
    for param, other in zip(params, plain_params, strict=True):
        assert_same_bits(param, other, "parameter")
    give_grads(params, 4, bad=math.inf)
    scaler.unscale_(optimizer)
    with unchanged(optimizer):
        scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == SCALE / 2


@pytest.mark.parametrize("unscaled", [False, True])
def test_scaler_as_argument(device: str, unscaled: bool) -> None:
    """``step(grad_scaler=...)``, as scalers of older torch versions and some trainers call it."""
    optimizer, params = make(device)
    scaler = make_scaler(device)
    for step in range(1, 5):
        give_grads(params, step, bad=math.nan if step == 2 else None, scale=scaler.get_scale())
        if unscaled:
            scaler.unscale_(optimizer)
        with unchanged_values([param.grad for param in params]):
            optimizer.step(grad_scaler=scaler)
        scaler.update()
    assert scaler.get_scale() == SCALE / 2
    optimizer.synchronize()
    assert optimizer.param_groups[0]["step"] == 3
    for oracle, param in zip(oracle_steps(device, {}, [1, 3, 4], helpers.FormatsCase()), params, strict=True):
        oracle.check(optimizer, param, "after three clean steps:")


@pytest.mark.parametrize("as_argument", [False, True])
def test_disabled_scaler(device: str, as_argument: bool) -> None:
    optimizer, params = make(device)
    scaler = torch.amp.GradScaler(device, enabled=False)
    give_grads(params, 1, scale=1.0)
    if as_argument:
        optimizer.step(grad_scaler=scaler)
    else:
        scaler.step(optimizer)
    scaler.update()
    for oracle, param in zip(oracle_steps(device, {}, [1], helpers.FormatsCase()), params, strict=True):
        oracle.check(optimizer, param, "without scaling:")


def test_schedule_waits_for_the_first_real_step(device: str) -> None:
    """A trainer can see the skip in the scale, and keep its schedule in step with the optimizer."""
    optimizer, params = make(device)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: 1.0 / (1 + count))
    scaler = make_scaler(device)
    for step in range(1, 6):
        give_grads(params, step, bad=math.inf if step in (1, 3) else None, scale=scaler.get_scale())
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() >= before:
            scheduler.step()
    optimizer.synchronize()
    assert optimizer.param_groups[0]["step"] == scheduler.last_epoch == 3


@pytest.mark.parametrize("as_argument", [False, True])
def test_optimizer_without_gradients(device: str, as_argument: bool) -> None:
    """One of two optimizers may be idle, such as that of an expert without tokens."""
    idle, idle_params = make(device)
    busy, busy_params = make(device)
    scaler = make_scaler(device)
    give_grads(busy_params, 1)
    with unchanged_values([*idle_params]):
        if as_argument:
            idle.step(grad_scaler=scaler)
        else:
            scaler.step(idle)
    scaler.step(busy)
    scaler.update()
    for oracle, param in zip(oracle_steps(device, {}, [1], helpers.FormatsCase()), busy_params, strict=True):
        oracle.check(busy, param, "the busy one:")


@pytest.mark.parametrize("as_argument", [False, True])
def test_scaler_cannot_check_decoupled_gradients(device: str, as_argument: bool) -> None:
    optimizer, params = make(device, use_decoupled_grad=True)
    for param in params:
        param.decoupled_grad = torch.full_like(param, math.inf)
    scaler = make_scaler(device)
    step = functools.partial(optimizer.step, grad_scaler=scaler) if as_argument else lambda: scaler.step(optimizer)
    with unchanged(optimizer), pytest.raises(RuntimeError, match="did not check the gradients"):
        step()


def test_two_optimizers_one_scaler(device: str) -> None:
    """torch skips each optimizer by its own gradients."""
    good, good_params = make(device)
    bad, bad_params = make(device)
    scaler = make_scaler(device)
    give_grads(good_params, 1)
    give_grads(bad_params, 1, bad=math.inf)
    with unchanged_values([*bad_params]):
        scaler.step(bad)
    scaler.step(good)
    scaler.update()
    assert scaler.get_scale() == SCALE / 2
    for optimizer, count in ((good, 1), (bad, 0)):
        optimizer.synchronize()
        assert optimizer.param_groups[0].get("step", 0) == count


def test_training_with_a_scaler_follows_training_without(device: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to(device)
    twin = copy.deepcopy(model)
    optimizer = FusedOffloadAdam(model.parameters(), lr=1e-2)
    plain = FusedOffloadAdam(twin.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler(device, init_scale=SCALE)
    for step in range(10):
        inputs = randn((32, 8), step, device)
        for network, opt in ((model, optimizer), (twin, plain)):
            opt.zero_grad()
            loss = (network(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            (scaler.scale(loss) if opt is optimizer else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        plain.step()
    # Scaling by a power of two is exact, up to float32 underflow, which does not occur here.
    for param, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert_same_bits(param, other, "parameter")


@pytest.mark.parametrize("change", ["group", "count"])
def test_skips_that_the_host_learns_late(device: str, change: str) -> None:
    """A step that the device skipped is not taken off the count of a group that was added or set
    since.
    """
    optimizer, params = make(device)
    give_grads(params, 1, scale=1.0)
    optimizer.step()
    optimizer.grad_scale, optimizer.found_inf = torch.ones((), device=device), torch.ones((), device=device)
    optimizer.step()
    optimizer.found_inf = torch.zeros((), device=device)
    if change == "group":
        late = param_of(randn(200, 9, device))
        late.grad = randn(200, 10, device)
        optimizer.add_param_group({"params": [late]})
        optimizer.step()
        optimizer.synchronize()
        assert [group["step"] for group in optimizer.param_groups] == [2, 1]
    else:
        optimizer.state[params[0]]["step"] = 7
        optimizer.step()
        optimizer.synchronize()
        assert optimizer.param_groups[0]["step"] == 8


@pytest.mark.parametrize(
    ("devices", "expected"),
    [((), False), (("cpu",), False), (("cuda:0",), True), (("cuda:0", "cuda:1"), False), (("cpu", "cuda:0"), False)],
)
def test_one_gpu_skips_on_its_own(devices: tuple[str, ...], expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stepper = make("cpu")[0]._stepper
    params = [torch.ones(index + 1) for index in range(len(devices))]
    placements = {len(param): Placement(torch.device(name), False) for param, name in zip(params, devices, strict=True)}
    monkeypatch.setattr(placement, "placement_of", lambda param: placements[len(param)])
    monkeypatch.setattr(stepper, "_tracker", SimpleNamespace(params=params, generation=1))
    assert stepper.on_one_gpu() == expected


class FlagOnAGpu(torch.Tensor):
    """A flag on the CPU that says it is on a GPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda _: torch.device("cuda"))

    def cpu(self) -> torch.Tensor:
        return torch.tensor(self.item())


@pytest.mark.parametrize("skipped", [True, False])
def test_a_skip_is_counted_by_ranks_without_gradients(
    device: str, skipped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where another rank's gradients overflowed: no kernel runs here that could count it."""
    optimizer, params = make(device)
    flag = torch.tensor(float(skipped), device=device)
    if device == "cpu":
        flag = flag.as_subclass(FlagOnAGpu)
        monkeypatch.setattr(optimizer._stepper, "on_one_gpu", lambda: True)
    optimizer.found_inf = flag
    optimizer.step()
    optimizer.synchronize()
    assert optimizer.param_groups[0].get("step", 0) == (not skipped)
    del optimizer.found_inf
    give_grads(params, 0)
    optimizer.step()
    assert optimizer.param_groups[0]["step"] == 2 - skipped
