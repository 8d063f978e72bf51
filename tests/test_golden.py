"""Trajectories recorded from TransformerEngine's FusedAdam on an H100, see golden/README.md."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors import safe_open

from fused_offload import FusedOffloadAdam
from fused_offload.kernels.formats import join_remainder

GOLDEN = Path(__file__).parent / "golden" / "te_fused_adam_2.20.2_h100.safetensors"
RECORDED_STEPS = (1, 2, 10)
MAX_UPDATE = 1.25
"""Bound on |m / bias_correction1| / (sqrt(v / bias_correction2) + eps) at betas (0.9, 0.95): where
a and b are the weights of m and v on past gradients, it is at most sqrt(sum(a^2 / b)), at most 1.17
here; the rest is for rounding.
"""

EIGHT_BIT = "bf16_master32_mfp8"
FP16_MOMENTS = ("bf16_master16_mfp16", "bf16_master32_mfp16")
SCALED_PER_TENSOR = (*FP16_MOMENTS, EIGHT_BIT)


class Case(NamedTuple):
    """One recorded trajectory.

    Attributes:
        name: name in the file.
        kwargs: constructor arguments of the run, hyperparameters included.
        lrs: learning rate of each step.
        tensors: everything recorded, without the case's name.
    """

    name: str
    kwargs: dict[str, Any]
    lrs: list[float]
    tensors: dict[str, torch.Tensor]

    @property
    def decoupled(self) -> bool:
        return bool(self.kwargs.get("use_decoupled_grad", False))

    @property
    def adam_w_mode(self) -> bool:
        return bool(self.kwargs.get("adam_w_mode", True))


def argument(text: str) -> Any:
    return getattr(torch, text.removeprefix("torch.")) if text.startswith("torch.") else text == "True"


def case_names() -> list[str]:
    with safe_open(GOLDEN, "pt") as file:
        return sorted(file.metadata())


def load(name: str) -> Case:
    with safe_open(GOLDEN, "pt") as file:
        about = json.loads(file.metadata()[name])
        hyper = json.loads(about["hp"])
        lrs = hyper.pop("lrs")
        kwargs = hyper | {key: argument(text) for key, text in json.loads(about["kwargs"]).items()}
        keys = [key for key in file.keys() if key.startswith(f"{name}/")]  # noqa: SIM118 - not a dictionary
        tensors = {key.removeprefix(f"{name}/"): file.get_tensor(key) for key in keys}
    return Case(name, kwargs, lrs, tensors)


UNSCALED = [name for name in case_names() if name not in SCALED_PER_TENSOR]


class Run:
    """One parameter trained on a case's gradients."""

    def __init__(self, case: Case, device: str, numerics: str) -> None:
        self.case = case
        self.param = torch.nn.Parameter(case.tensors["param.0"].to(device, copy=True))
        self.optimizer = FusedOffloadAdam([self.param], numerics=numerics, **case.kwargs)

    def steps(self) -> Iterator[int]:
        """Takes all recorded steps, and yields the number of each one when it is done."""
        for step, lr in enumerate(self.case.lrs, start=1):
            grad = self.case.tensors[f"grad.{step}"].to(self.param.device)
            if self.case.decoupled:
                self.param.decoupled_grad = grad  # type: ignore[attr-defined]
            else:
                self.param.grad = grad
            self.optimizer.param_groups[0]["lr"] = lr
            self.optimizer.step()
            yield step

    def state(self, key: str) -> torch.Tensor:
        return self.optimizer.get_unscaled_state(self.param, key).cpu()

    def applied_to(self) -> torch.Tensor:
        """The float32 value that the next update starts from, where there is one; else the
        parameter.
        """
        param = self.param.detach().cpu()
        if not self.case.kwargs.get("master_weights"):
            return param
        master = self.state("master_param")
        return join_remainder(param, master) if master.dtype == torch.int16 else master

    def recorded(self, key: str, step: int) -> torch.Tensor:
        return self.case.tensors[f"{key}.{step}"]

    def recorded_applied_to(self, step: int) -> torch.Tensor:
        param = self.recorded("param", step)
        if not self.case.kwargs.get("master_weights"):
            return param
        master = self.recorded("master_param", step)
        return join_remainder(param, master) if master.dtype == torch.int16 else master


def ulp(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Distance of neighbouring numbers of a dtype around ``values``."""
    info = torch.finfo(dtype)
    _, exponent = np.frexp(values.double().abs().clamp(min=info.smallest_normal).numpy())
    return torch.from_numpy(np.ldexp(info.eps, exponent - 1))


class FastMathBound:
    """How far TE's fast math may lead a parameter and its moments away from correctly rounded
    operations.

    div.approx is within 2 ulp and sqrt.approx within 1, so three of the one and one of the other
    leave the update within 8 ulp, relatively 2^-20, and the parameter within one ulp more. Fused
    multiply-adds round alike, so the moments of AdamW differ in nothing but subnormals, which fast
    math flushes to zero. Under L2 the parameter's error e enters the gradient; m / bias_correction1
    and sqrt(v / bias_correction2) are a weighted mean and a weighted 2-norm of gradients, so either
    is off by at most ``weight_decay * e``, and the update by
    ``(1 + update) * weight_decay * e / den``.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.l2_decay = 0.0 if run.case.adam_w_mode else float(run.case.kwargs["weight_decay"])
        self.param = torch.zeros(run.param.numel(), dtype=torch.float64)
        self.largest_grad = torch.zeros_like(self.param)
        self.before = run.param.detach().double().abs()

    def advance(self, step: int) -> None:
        """Takes the step that ``run`` just took into account."""
        case, after = self.run.case, self.run.applied_to()
        grad = case.tensors[f"grad.{step}"].double().abs() + self.l2_decay * self.before
        self.largest_grad = torch.maximum(self.largest_grad, grad)
        bias_correction2 = 1 - case.kwargs["betas"][1] ** step if case.kwargs.get("bias_correction", True) else 1.0
        den = (self.run.state("exp_avg_sq").double() / bias_correction2).sqrt() + case.kwargs["eps"]
        from_decay = ((1 + MAX_UPDATE) * self.l2_decay * self.param / den).clamp(max=2 * MAX_UPDATE)
        magnitude = torch.maximum(self.before, after.double().abs()) + case.lrs[step - 1] * MAX_UPDATE
        rounding = ulp(magnitude, after.dtype)
        self.param = self.param + case.lrs[step - 1] * (MAX_UPDATE * 2.0**-20 + from_decay) + rounding
        self.before = after.double().abs()

    def exp_avg(self) -> torch.Tensor:
        """Zero without L2; with it, what the gradients may differ by, and that each step may round
        differently.
        """
        return self.l2_decay * self.param + (2.0**-21 * self.largest_grad if self.l2_decay else 0.0)

    def exp_avg_sq(self) -> torch.Tensor:
        """As `exp_avg`, for squares."""
        largest = self.largest_grad
        return 2 * largest * self.l2_decay * self.param + (2.0**-21 * largest**2 if self.l2_decay else 0.0)


def assert_within(actual: torch.Tensor, expected: torch.Tensor, allowed: torch.Tensor, what: str) -> None:
    error = (actual.double() - expected.double()).abs()
    worst = (error - allowed).argmax()
    assert (error <= allowed).all(), f"{what}: {error[worst]} off, allowed {allowed[worst]}"


@pytest.mark.parametrize("name", UNSCALED)
def test_ieee_numerics_follow_te_as_closely_as_fast_math_allows(name: str) -> None:
    run = Run(load(name), "cpu", "ieee")
    bound = FastMathBound(run)
    for step in run.steps():
        bound.advance(step)
        if step not in RECORDED_STEPS:
            continue
        assert_within(run.applied_to(), run.recorded_applied_to(step), bound.param, f"updated value, step {step}")
        param, recorded = run.param.detach(), run.recorded("param", step)
        assert_within(param, recorded, bound.param + ulp(recorded, param.dtype), f"param, step {step}")
        exp_avg_sq = run.recorded("exp_avg_sq", step)
        flushed = step * 2.0**-126 * (exp_avg_sq.abs() < step * 2.0**-126)
        assert_within(run.state("exp_avg"), run.recorded("exp_avg", step), bound.exp_avg(), f"exp_avg, step {step}")
        assert_within(run.state("exp_avg_sq"), exp_avg_sq, bound.exp_avg_sq() + flushed, f"exp_avg_sq, step {step}")


@pytest.mark.parametrize("name", UNSCALED)
def test_the_bound_on_fast_math_is_tight(name: str) -> None:
    # Another formula (eps inside the root, an operation in half precision) moves parameters much
    # further than this.
    run = Run(load(name), "cpu", "ieee")
    bound = FastMathBound(run)
    for step in run.steps():
        bound.advance(step)
    typical_ulp = ulp(run.applied_to(), run.applied_to().dtype).median()
    assert bound.param.median() <= sum(run.case.lrs) * MAX_UPDATE * 2.0**-19 + 20 * typical_ulp


def float64_run(case: Case) -> Iterator[tuple[int, torch.Tensor, dict[str, torch.Tensor]]]:
    """torch's AdamW in float64 on a case's gradients: each step's number, parameter and state."""
    param = torch.nn.Parameter(case.tensors["param.0"].double())
    hyper = {key: case.kwargs[key] for key in ("lr", "eps", "weight_decay")}
    optimizer = torch.optim.AdamW([param], betas=tuple(case.kwargs["betas"]), **hyper)
    for step, lr in enumerate(case.lrs, start=1):
        param.grad = case.tensors[f"grad.{step}"].double()
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        yield step, param.detach(), optimizer.state[param]


def rms_and_max(actual: torch.Tensor, exact: torch.Tensor) -> tuple[float, float]:
    error = (actual.double() - exact).abs()
    return error.square().mean().sqrt().item(), error.max().item()


@pytest.mark.parametrize("name", SCALED_PER_TENSOR)
def test_block_scales_lead_parameters_no_further_astray_than_te(name: str) -> None:
    # TE scales a whole tensor, so where one gradient is large, small second moments become zero and
    # updates explode.
    case = load(name)
    run = Run(case, "cpu", "ieee")
    for _, (step, exact, _) in zip(run.steps(), float64_run(case), strict=True):
        if step not in RECORDED_STEPS:
            continue
        for ours, key in ((run.param.detach(), "param"), (run.state("master_param"), "master_param")):
            errors, te_errors = rms_and_max(ours, exact), rms_and_max(run.recorded(key, step), exact)
            assert errors[0] <= te_errors[0]
            assert errors[1] <= te_errors[1]


@pytest.mark.parametrize("name", FP16_MOMENTS)
def test_block_scaled_moments_keep_the_precision_of_their_format(name: str) -> None:
    # Not compared with TE's, whose scale makes the largest element of a tensor, and with it any
    # root mean square of this data, exact. Ours: half an fp16 ulp each step, and where that is
    # subnormal one step of the block, at most 2^-38 of its largest element. Earlier errors decay
    # like the moments themselves.
    case = load(name)
    run = Run(case, "cpu", "ieee")
    allowed = {"exp_avg": torch.zeros(2053).double(), "exp_avg_sq": torch.zeros(2053).double()}
    for _, (step, _, exact) in zip(run.steps(), float64_run(case), strict=True):
        for (key, bound), beta in zip(allowed.items(), case.kwargs["betas"], strict=True):
            magnitude = exact[key].abs() + beta * bound
            blocks = torch.nn.functional.pad(magnitude, (0, -magnitude.numel() % 128)).view(-1, 128)
            one_step = 2.0**-38 * blocks.amax(dim=1).repeat_interleave(128)[: magnitude.numel()]
            allowed[key] = beta * bound + 2.0**-11 * magnitude * (1 + 2.0**-10) + one_step
            assert_within(run.state(key), exact[key], allowed[key], f"{key}, step {step}")


def test_8_bit_moments_recorded_from_te_go_on_here() -> None:
    # TE's checkpoints hold the unscaled values, whatever it stores.
    case = load(EIGHT_BIT)
    assert case.kwargs["exp_avg_dtype"] == torch.uint8
    run = Run(case, "cpu", "ieee")
    for key in ("exp_avg", "exp_avg_sq"):
        recorded = run.recorded(key, 2)
        run.optimizer.set_scaled_state(run.param, key, recorded)
        blocks = torch.nn.functional.pad(recorded, (0, -recorded.numel() % 128)).view(-1, 128)
        largest = blocks.abs().amax(dim=1).repeat_interleave(128)[: recorded.numel()]
        # Half of the largest step: 2 / 127 of the block's largest first moment, a 16th of a second
        # moment, or what lies below the window, 2^-31 of the block's largest.
        allowed = largest * 2 / 127 if key == "exp_avg" else recorded / 16 + largest * 2.0**-31
        assert_within(run.state(key), recorded, allowed, key)


def test_every_case_is_accounted_for() -> None:
    assert len(case_names()) == 16
    assert len(UNSCALED) == 13
    assert set(SCALED_PER_TENSOR) < set(case_names())


@pytest.mark.gpu
@pytest.mark.parametrize("name", UNSCALED)
def test_te_numerics_reproduce_te_bit_for_bit(name: str) -> None:
    run = Run(load(name), "cuda", "te")
    keys = ["exp_avg", "exp_avg_sq"] + ["master_param"] * bool(run.case.kwargs.get("master_weights"))
    for step in run.steps():
        if step not in RECORDED_STEPS:
            continue
        found = {key: run.state(key) for key in keys} | {"param": run.param.detach().cpu()}
        for key, tensor in found.items():
            recorded = run.recorded(key, step)
            assert tensor.dtype == recorded.dtype
            as_integers = torch.int32 if tensor.element_size() == 4 else torch.int16
            differing = int((tensor.view(as_integers) != recorded.view(as_integers)).sum())
            assert differing == 0, f"{differing} elements of {key} differ after step {step}"
