"""The reference step: bit for bit its specification written again in numpy, and close to Adam in
float64.
"""

from __future__ import annotations

import itertools
import math
import threading
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import pytest
import torch

from fused_offload.kernels import reference
from fused_offload.kernels.adam.reference import AdamScalars, AdamState, adam_scalars, adam_step_, bias_correction
from fused_offload.kernels.formats import (
    BF16,
    BF16_STOCHASTIC,
    FP16,
    FP16_NONZERO,
    FP32,
    LOG8,
    REMAINDER,
    ROOT8,
    SCALE_GROUP,
    Format,
    Stored,
    decode,
    rounding_counter,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def stored_zeros(format: Format, numel: int) -> Stored:
    scale = torch.zeros(-(-numel // SCALE_GROUP)) if format.scaled else None
    return Stored(format, torch.zeros(numel, dtype=format.dtype), scale)


def new_state(numel: int, exp_avg: Format = FP32, exp_avg_sq: Format = FP32, master: Format | None = None) -> AdamState:
    return AdamState(
        stored_zeros(exp_avg, numel),
        stored_zeros(exp_avg_sq, numel),
        None if master is None else stored_zeros(master, numel),
        init_moments=True,
        init_master=True,
    )


def started(state: AdamState) -> AdamState:
    return state._replace(init_moments=False, init_master=False)


def scalars_of(
    step: int = 1,
    *,
    lr: float | torch.Tensor = 0.01,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    bias_corrected: bool = True,
    adam_w_mode: bool = True,
) -> AdamScalars:
    return adam_scalars(
        lr=lr,
        betas=betas,
        eps=eps,
        weight_decay=weight_decay,
        step=step,
        bias_corrected=bias_corrected,
        adam_w_mode=adam_w_mode,
    )


def random_grads(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Gradients over nine decades, with exact zeros and one whose square is subnormal."""
    random = torch.Generator().manual_seed(seed)
    grads = torch.randn(numel, generator=random) * 10 ** torch.empty(numel).uniform_(-7, 2, generator=random)
    grads[::13] = 0
    grads[1::17] = 1e-20
    return grads.to(dtype)


def random_params(numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(99)).to(dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


# -- the specification again, in numpy -------------------------------------------------------------


def f32(values: np.ndarray | float) -> np.ndarray:
    return np.asarray(values, np.float64).astype(np.float32).astype(np.float64)


def fma32(a: np.ndarray, b: float, c: np.ndarray) -> np.ndarray:
    """A multiply-add of float32 numbers, rounded once; float64 would lose what decides between two
    halves.
    """
    return (a.astype(np.longdouble) * b + c).astype(np.float32).astype(np.float64)


def to_bf16(values: np.ndarray) -> np.ndarray:
    """Float32 numbers, held in float64, rounded to the nearest even bfloat16."""
    pattern = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = (pattern + 0x7FFF + (pattern >> 16 & 1)) & 0xFFFF0000
    return rounded.astype(np.uint32).view(np.float32).astype(np.float64)


def to_fp16(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float16).astype(np.float64)


def to_scaled_fp16(values: np.ndarray, keep_nonzero: bool) -> np.ndarray:
    """What remains of values that are stored as fp16 with one scale per block."""
    out = np.empty_like(values)
    for start in range(0, values.size, 128):
        block = values[start : start + 128]
        _, exponent = np.frexp(np.abs(block).max())
        _, exponent = np.frexp(np.round(np.ldexp(np.abs(block).max(), 11 - exponent)) * 2.0 ** (exponent - 11))
        scale = 2.0 ** max(int(exponent) - 15, -126)
        kept = to_fp16(block / scale)
        if keep_nonzero:
            kept[(kept == 0) & (block > 0)] = 2.0**-24
        out[start : start + 128] = kept * scale
    return out


def to_remainder_param(values: np.ndarray) -> np.ndarray:
    """Bfloat16, rounded half away from zero."""
    pattern = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((pattern + 0x8000) & 0xFFFF0000).astype(np.uint32).view(np.float32).astype(np.float64)


def stored_by_hand(values: np.ndarray, format: Format) -> np.ndarray:
    if format.scaled:
        return to_scaled_fp16(values, format.keep_nonzero)
    return to_bf16(values) if format is BF16 else values


def param_by_hand(values: np.ndarray, dtype: torch.dtype, master: Format | None) -> np.ndarray:
    if master is REMAINDER:
        return to_remainder_param(values)
    return {torch.float32: f32, torch.bfloat16: to_bf16, torch.float16: to_fp16}[dtype](values)


class ByHand:
    """One parameter and its state; every operation is rounded to float32 once."""

    def __init__(self, param: torch.Tensor, formats: tuple[Format, Format, Format | None]) -> None:
        self.dtype = param.dtype
        self.formats = formats
        self.param = param.double().numpy().copy()
        self.m = np.zeros_like(self.param)
        self.v = np.zeros_like(self.param)
        self.master = self.param.copy()

    def step(self, grad: torch.Tensor, s: AdamScalars, grad_scale: float | None = None) -> None:
        exp_avg, exp_avg_sq, master = self.formats
        p = self.param if self.dtype == torch.float32 or master is None else self.master
        g = grad.double().numpy()
        if grad_scale is not None:
            g = f32(g / grad_scale)
        if not s.adam_w_mode:
            g = fma32(p, s.weight_decay, g)
        m = fma32(self.m, s.beta1, f32(g * s.one_minus_beta1))
        v = fma32(self.v, s.beta2, f32(f32(g * s.one_minus_beta2) * g))
        self.m, self.v = stored_by_hand(m, exp_avg), stored_by_hand(v, exp_avg_sq)
        den = f32(f32(np.sqrt(f32(v / s.bias_correction2))) + s.eps)
        u = f32(f32(m / s.bias_correction1) / den)
        if s.adam_w_mode:
            u = fma32(p, s.weight_decay, u)
        assert isinstance(s.lr, float)
        p = fma32(u, -s.lr, p)
        self.param = param_by_hand(p, self.dtype, master)
        self.master = p if master in (None, REMAINDER) else stored_by_hand(p, master)


def masters_of(param_dtype: torch.dtype) -> tuple[Format | None, ...]:
    return (None, FP32, FP16, REMAINDER) if param_dtype == torch.bfloat16 else (None, FP32, FP16)


def master_values(param: torch.Tensor, state: AdamState) -> torch.Tensor:
    assert state.master_param is not None
    if state.master_param.format is REMAINDER:
        return reference.join_remainder(param, state.master_param.data)
    return decode(state.master_param)


def differing(values: torch.Tensor, expected: np.ndarray) -> int:
    """Elements that are not the same, the sign of zero included."""
    return int((bits(values.float()).numpy() != expected.astype(np.float32).view(np.int32)).sum())


PARAM_MASTER_MODE = [
    pytest.param(dtype, master, adam_w, id=f"{str(dtype)[6:]}-{master and master.name}-{'adamw' if adam_w else 'l2'}")
    for dtype in DTYPES
    for master in masters_of(dtype)
    for adam_w in (True, False)
]


@pytest.mark.parametrize(("dtype", "master", "adam_w_mode"), PARAM_MASTER_MODE)
def test_bit_for_bit_the_specification(dtype: torch.dtype, master: Format | None, adam_w_mode: bool) -> None:
    numel = 301
    for grad_dtype, exp_avg, exp_avg_sq in itertools.product(DTYPES, (FP32, BF16, FP16), (FP32, BF16, FP16_NONZERO)):
        param = random_params(numel, dtype)
        by_hand = ByHand(param, (exp_avg, exp_avg_sq, master))
        state = new_state(numel, exp_avg, exp_avg_sq, master)
        for step in range(1, 5):
            grad = random_grads(numel, grad_dtype, step)
            scalars = scalars_of(step, lr=0.01 * step, betas=(0.9, 0.95), adam_w_mode=adam_w_mode)
            adam_step_(param, grad, state, scalars)
            by_hand.step(grad, scalars)
            state = started(state)
            assert differing(param, by_hand.param) == 0
            assert differing(decode(state.exp_avg), by_hand.m) == 0
            assert differing(decode(state.exp_avg_sq), by_hand.v) == 0
            if master is not None:
                assert differing(master_values(param, state), by_hand.master) == 0


def nearest_fp32(exact: Fraction) -> float:
    """The nearest float32, ties to even, from the distances to its neighbours."""
    near = np.float32(float(exact))
    neighbours = [near, np.nextafter(near, np.float32(-np.inf)), np.nextafter(near, np.float32(np.inf))]
    return float(min(neighbours, key=lambda it: (abs(Fraction(float(it)) - exact), int(it.view(np.int32)) & 1)))


@pytest.mark.parametrize("kind", ["few bits", "any bits", "subnormal"])
def test_multiply_adds_round_once(kind: str) -> None:
    # Stored moments of few bits times a decay are often half way between two numbers of float32;
    # what a small gradient adds then decides, and float64 has no place for it.
    random = np.random.default_rng(0)
    b, numel = float(np.float32(0.99)), 2000
    a = (random.integers(1, 256, numel) * 2.0 ** random.integers(-8, 8, numel)).astype(np.float32)
    c = (random.normal(size=numel) * 10.0 ** random.integers(-30, -5, numel)).astype(np.float32)
    if kind == "any bits":
        a = random.normal(size=numel).astype(np.float32)
    if kind == "subnormal":
        a, c = (a * np.float32(2.0**-140)), (c * np.float32(1e-35))
    out = reference.fma_(torch.from_numpy(a), b, torch.from_numpy(c), torch.empty(numel))
    exact = [Fraction(float(x)) * Fraction(b) + Fraction(float(z)) for x, z in zip(a, c, strict=True)]
    assert out.tolist() == [nearest_fp32(value) for value in exact]


def test_multiply_adds_of_zeros_infinities_and_nans() -> None:
    nan, inf = math.nan, math.inf
    a = torch.tensor([-0.0, 0.0, -0.0, inf, inf, nan, 1.0])
    c = torch.tensor([-0.0, -0.0, 0.0, 1.0, -inf, 1.0, -0.5])
    out = reference.fma_(a, 0.5, c, torch.empty(7))
    assert torch.signbit(out[:3]).tolist() == [True, False, False]
    assert out[3] == inf
    assert out[4:6].isnan().all()
    assert bits(out[6:]).tolist() == [0]


# -- against Adam in float64 -----------------------------------------------------------------------


class Float64Adam:
    """torch's own Adam or AdamW on a float64 copy; also the decayed sum of gradient magnitudes,
    which `m` rounds at.
    """

    def __init__(self, param: torch.Tensor, *, adam_w_mode: bool, betas: tuple[float, float], lr: float) -> None:
        self.param = torch.nn.Parameter(param.double())
        kind = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
        self.optimizer = kind([self.param], lr=lr, betas=betas, eps=1e-8, weight_decay=0.1)
        self.beta1 = betas[0]
        self.decay = 0.0 if adam_w_mode else 0.1
        self.magnitude = torch.zeros_like(self.param.detach())

    def step(self, grad: torch.Tensor) -> None:
        effective = grad.double().abs() + self.decay * self.param.detach().abs()
        self.magnitude = self.beta1 * self.magnitude + (1 - self.beta1) * effective
        self.param.grad = grad.double()
        self.optimizer.step()

    def state(self, key: str) -> torch.Tensor:
        value = self.optimizer.state[self.param][key]
        assert isinstance(value, torch.Tensor)
        return value


@pytest.mark.parametrize("adam_w_mode", [True, False], ids=["adamw", "l2"])
def test_close_to_adam_in_float64(adam_w_mode: bool) -> None:
    # float32(1 - float32(0.999)) is 1.3e-5 off, which is the error of v. In m, whose terms may
    # cancel, rounding is relative to the magnitudes that were summed.
    lr, betas, steps = 1e-3, (0.9, 0.999), 20
    param = random_params(5000, torch.float32)
    exact = Float64Adam(param, adam_w_mode=adam_w_mode, betas=betas, lr=lr)
    state = new_state(5000)
    for step in range(1, steps + 1):
        grad = torch.randn(5000, generator=torch.Generator().manual_seed(step)) + 0.1
        adam_step_(param, grad, state, scalars_of(step, lr=lr, betas=betas, adam_w_mode=adam_w_mode))
        exact.step(grad)
        state = started(state)
        m, v, p = state.exp_avg.data.double(), state.exp_avg_sq.data.double(), param.double()
        assert ((m - exact.state("exp_avg")).abs() <= 1e-6 * exact.magnitude).all()
        assert ((v - exact.state("exp_avg_sq")).abs() <= 2e-5 * exact.state("exp_avg_sq")).all()
        ulp = torch.from_numpy(np.spacing(param.abs().numpy())).double()
        assert ((p - exact.param.detach()).abs() <= step * (lr * 2e-5 + ulp)).all()


class Example(NamedTuple):
    weight_decay: float
    adam_w_mode: bool
    exp_avg: float
    exp_avg_sq: float
    param: float


EXAMPLES = [
    Example(weight_decay=0.1, adam_w_mode=False, exp_avg=0.07, exp_avg_sq=4.9e-4, param=1.99),
    Example(weight_decay=0.1, adam_w_mode=True, exp_avg=0.05, exp_avg_sq=2.5e-4, param=1.988),
    Example(weight_decay=-0.1, adam_w_mode=False, exp_avg=0.03, exp_avg_sq=9e-5, param=1.99),
]


@pytest.mark.parametrize("example", EXAMPLES, ids=["l2", "decoupled", "negative_l2"])
def test_one_step_computed_by_hand(example: Example) -> None:
    param = torch.tensor([2.0])
    state = new_state(1)
    scalars = scalars_of(weight_decay=example.weight_decay, adam_w_mode=example.adam_w_mode)
    adam_step_(param, torch.tensor([0.5]), state, scalars)
    assert state.exp_avg.data.item() == pytest.approx(example.exp_avg, rel=1e-6)
    # As above: 1.3e-5 from 1 - 0.999 in float32.
    assert state.exp_avg_sq.data.item() == pytest.approx(example.exp_avg_sq, rel=2e-5)
    assert param.item() == pytest.approx(example.param, abs=2e-7)


@pytest.mark.parametrize("eps", [1e-8, 1e-15])
def test_gradients_as_small_as_eps(eps: float) -> None:
    # At |g| = 2e-8 an eps of 1e-8 takes a third off the first update; 1e-15 takes nothing.
    param = torch.zeros(300)
    signs = torch.tensor([1.0, -1.0]).repeat(150)
    adam_step_(param, signs * 2e-8, new_state(300), scalars_of(lr=1.0, eps=eps, weight_decay=0.0))
    expected = -signs / (1 + eps / 2e-8)
    assert torch.allclose(param, expected, rtol=2e-6, atol=0)


# -- scalars ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9, 0.95, 0.999, 0.9999])
def test_bias_corrections_are_those_of_float32_betas(beta: float) -> None:
    stored_beta = Fraction(float(np.float32(beta)))
    for step in (1, 2, 3, 10, 100, 1000):
        # Rational arithmetic knows no rounding; float64 is precise enough to round to the same
        # float32.
        assert bias_correction(beta, step) == float(np.float32(float(1 - stored_beta**step)))


def test_bias_corrections_need_float64_and_the_float32_beta() -> None:
    assert bias_correction(0.999, 1) != float(np.float32(1 - 0.999))
    in_float32 = float(np.float32(1) - np.float32(0.999) ** np.float32(100))
    assert bias_correction(0.999, 100) != in_float32


def test_scalars_are_rounded_to_float32() -> None:
    scalars = scalars_of(7, lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.3)
    values = (scalars.lr, scalars.beta1, scalars.beta2, scalars.eps, scalars.weight_decay)
    assert values == tuple(float(np.float32(x)) for x in (0.1, 0.9, 0.95, 1e-8, 0.3))
    assert scalars.one_minus_beta1 == float(np.float32(1) - np.float32(0.9))
    assert scalars.one_minus_beta2 == float(np.float32(1) - np.float32(0.95))


def test_without_bias_correction() -> None:
    scalars = scalars_of(3, bias_corrected=False, weight_decay=0.0)
    assert (scalars.bias_correction1, scalars.bias_correction2) == (1.0, 1.0)
    param = torch.ones(1)
    adam_step_(param, torch.tensor([0.5]), new_state(1), scalars)
    # m / sqrt(v) = 0.1 g / sqrt(0.001 g^2)
    assert param.item() == pytest.approx(1 - 0.01 * 0.1 / np.sqrt(0.001), abs=2e-7)


@pytest.mark.parametrize("lr_dtype", [torch.float32, torch.float64])
def test_lr_as_a_tensor(lr_dtype: torch.dtype) -> None:
    as_float, as_tensor = random_params(300, torch.float32), random_params(300, torch.float32)
    grad = random_grads(300, torch.float32, 1)
    adam_step_(as_float, grad, new_state(300), scalars_of(lr=0.3))
    adam_step_(as_tensor, grad, new_state(300), scalars_of(lr=torch.tensor(0.3, dtype=lr_dtype)))
    assert torch.equal(as_float, as_tensor)


# -- what goes in and what stays -------------------------------------------------------------------


@pytest.mark.parametrize("grad_dtype", DTYPES, ids=str)
def test_gradients_are_divided_by_grad_scale(grad_dtype: torch.dtype) -> None:
    grad = random_grads(300, grad_dtype, 1)
    kept = grad.clone()
    scaled, unscaled = random_params(300, torch.float32), random_params(300, torch.float32)
    scaled_state, unscaled_state = new_state(300), new_state(300)
    adam_step_(scaled, grad, scaled_state, scalars_of(), grad_scale=3.0)
    adam_step_(unscaled, grad.float() / 3.0, unscaled_state, scalars_of())
    assert torch.equal(scaled, unscaled)
    assert torch.equal(scaled_state.exp_avg.data, unscaled_state.exp_avg.data)
    assert torch.equal(scaled_state.exp_avg_sq.data, unscaled_state.exp_avg_sq.data)
    assert torch.equal(bits(grad), bits(kept))


@pytest.mark.parametrize(("dtype", "master", "adam_w_mode"), PARAM_MASTER_MODE)
def test_zero_lr_changes_no_parameter(dtype: torch.dtype, master: Format | None, adam_w_mode: bool) -> None:
    param = random_params(300, dtype)
    param[:3] = torch.tensor([0.0, -0.0, 1.0])
    before = param.clone()
    state = new_state(300, master=master)
    for step in range(1, 4):
        # No gradient yet at all, so v is 0 where no decay is added to it: 0 / (sqrt(0) + eps) has
        # to be 0.
        adam_step_(param, torch.zeros(300), state, scalars_of(step, lr=0.0, adam_w_mode=adam_w_mode))
        state = started(state)
    if adam_w_mode:
        assert (state.exp_avg_sq.data == 0).all()
    assert torch.equal(bits(param), bits(before))
    assert not decode(state.exp_avg).isnan().any()
    assert not decode(state.exp_avg_sq).isnan().any()


def test_initial_values_are_taken_instead_of_what_is_stored() -> None:
    numel = 300
    clean, dirty = new_state(numel, BF16, FP16_NONZERO, FP32), new_state(numel, BF16, FP16_NONZERO, FP32)
    for stored in (dirty.exp_avg, dirty.exp_avg_sq, dirty.master_param):
        assert stored is not None
        stored.data.fill_(float("nan"))
    params = [random_params(numel, torch.bfloat16) for _ in range(2)]
    grad = random_grads(numel, torch.float32, 1)
    for param, state in zip(params, (clean, dirty), strict=True):
        adam_step_(param, grad, state, scalars_of())
    assert torch.equal(params[0], params[1])
    for one, other in zip(clean[:3], dirty[:3], strict=True):
        assert isinstance(one, Stored)
        assert isinstance(other, Stored)
        assert torch.equal(decode(one), decode(other))


def test_a_float32_parameter_is_its_own_master() -> None:
    param = random_params(300, torch.float32)
    alone = param.clone()
    grad = random_grads(300, torch.float32, 1)
    with_master = started(new_state(300, master=FP32))
    assert with_master.master_param is not None
    with_master.master_param.data.fill_(1e6)
    adam_step_(param, grad, with_master, scalars_of())
    adam_step_(alone, grad, started(new_state(300)), scalars_of())
    assert torch.equal(param, alone)
    assert torch.equal(with_master.master_param.data, param)


def test_nan_gradients_show_in_every_parameter_dtype() -> None:
    for dtype in DTYPES:
        for master in masters_of(dtype):
            param = random_params(4, dtype)
            grad = torch.tensor([1.0, float("nan"), 1.0, float("inf")])
            adam_step_(param, grad, new_state(4, master=master), scalars_of())
            assert param.isnan().tolist() == [False, True, False, True]


# -- narrow moments --------------------------------------------------------------------------------


def second_moment_error(format: Format, beta2: float) -> float:
    """How far second moments are from float64 after their gradients became a tenth; relative, of
    the sum.
    """
    numel, steps = 256, 800
    param, state = torch.zeros(numel), new_state(numel, FP32, format)
    exact = torch.zeros(numel, dtype=torch.float64)
    random = torch.Generator().manual_seed(0)
    scalars = scalars_of(lr=0.0, betas=(0.9, beta2))
    for step in range(1, steps + 1):
        grad = torch.randn(numel, generator=random) * (1.0 if step <= steps // 2 else 0.1)
        adam_step_(param, grad, state, scalars._replace(step=step), counter=rounding_counter(2, 0))
        state = started(state)
        exact = beta2 * exact + (1 - beta2) * grad.double() ** 2
    return abs(float(decode(state.exp_avg_sq).double().sum() / exact.sum()) - 1)


def test_bf16_second_moments_stall_unless_they_are_rounded_stochastically() -> None:
    # With beta2 = 0.999 one gradient moves a second moment by a thousandth, and bfloat16 steps by a
    # 128th to a 256th.
    assert second_moment_error(BF16, 0.999) > 0.3
    assert second_moment_error(BF16_STOCHASTIC, 0.999) < 0.01
    assert second_moment_error(LOG8, 0.999) < 0.02


NARROW = pytest.mark.parametrize("formats", [(ROOT8, LOG8), (ROOT8, BF16_STOCHASTIC)], ids=["8-bit", "8-bit-bf16"])


@NARROW
@pytest.mark.parametrize(("beta2", "eps"), [(0.95, 1e-15), (0.999, 1e-8)])
def test_updates_stay_bounded_where_gradients_end_or_differ_by_decades(
    formats: tuple[Format, Format], beta2: float, eps: float
) -> None:
    """Rows seen once, features that die beside others that live, and one in 128 gradients 10,000
    times as large.
    """
    numel = 16 * SCALE_GROUP
    random = torch.Generator().manual_seed(0)
    param, state, before = torch.zeros(numel), new_state(numel, *formats), torch.zeros(numel)
    worst = 0.0
    for step in range(1, 201):
        grad = torch.randn(numel, generator=random) * 1e-4
        if step > 20:
            grad[: 4 * SCALE_GROUP] = 0  # rows seen no more
            grad[4 * SCALE_GROUP : 8 * SCALE_GROUP : 3] = 0  # dead features
            grad[8 * SCALE_GROUP : 12 * SCALE_GROUP] *= (torch.rand(4 * SCALE_GROUP, generator=random) < 0.02).float()
        grad[12 * SCALE_GROUP :: SCALE_GROUP] *= 1e4
        scalars = scalars_of(step, lr=1.0, betas=(0.9, beta2), eps=eps, weight_decay=0.0)
        before.copy_(param)
        adam_step_(param, grad, state, scalars)
        state = started(state)
        assert param.isfinite().all()
        worst = max(worst, float((param - before).abs().max()))
    # |m| / sqrt(v) is at most sqrt(sum(a^2 / b)) for weights a and b of past gradients: 7.3 with
    # beta2 = 0.999 and 1.2 with 0.95, and in practice about 3 where gradients come rarely; the rest
    # is for rounding.
    assert 1.0 < worst < 8.0


# -- blocks and threads ----------------------------------------------------------------------------


def run_steps(numel: int, formats: tuple[Format, Format, Format | None], seed: int) -> list[torch.Tensor]:
    """Parameter and state after three steps, as stored."""
    dtype = torch.bfloat16 if formats[2] is REMAINDER else torch.float32
    param = random_params(numel, dtype)
    state = new_state(numel, *formats)
    for step in range(1, 4):
        adam_step_(param, random_grads(numel, torch.float32, seed + step), state, scalars_of(step))
        state = started(state)
    arrays = [param]
    for stored in (state.exp_avg, state.exp_avg_sq, state.master_param):
        if stored is not None:
            arrays += [stored.data] if stored.scale is None else [stored.data, stored.scale]
    return arrays


def same_bits(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(bits(a), bits(b)) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    "formats",
    [(FP32, FP32, None), (FP16, FP16_NONZERO, REMAINDER), (ROOT8, LOG8, REMAINDER)],
    ids=["fp32", "scaled", "8-bit"],
)
@pytest.mark.parametrize("numel", [1, 255, 256, 257, 3 * 256 + 17])
def test_blocks_do_not_show(
    formats: tuple[Format, Format, Format | None], numel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run_steps(numel, formats, seed=0)
    monkeypatch.setattr(reference, "BLOCK_NUMEL", 256)
    assert same_bits(run_steps(numel, formats, seed=0), whole)


def test_more_than_one_block_of_the_real_size() -> None:
    numel = reference.BLOCK_NUMEL + 1
    param, grad, state = random_params(numel, torch.float32), random_grads(numel, torch.float32, 1), new_state(numel)
    last_param, last_state = param[-1:].clone(), new_state(1)
    adam_step_(last_param, grad[-1:], last_state, scalars_of())
    adam_step_(param, grad, state, scalars_of())
    assert torch.equal(param[-1:], last_param)
    assert torch.equal(state.exp_avg_sq.data[-1:], last_state.exp_avg_sq.data)


def test_threads_do_not_share_scratch() -> None:
    numel, seeds = 100_000, (0, 100)
    serial = [run_steps(numel, (FP32, FP32, None), seed) for seed in seeds]
    results: dict[int, list[list[torch.Tensor]]] = {seed: [] for seed in seeds}
    together = threading.Barrier(len(seeds))

    def work(seed: int) -> None:
        together.wait()
        # Several rounds, since two threads need not meet in the first.
        for _ in range(5):
            results[seed].append(run_steps(numel, (FP32, FP32, None), seed))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in seeds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed, expected in zip(seeds, serial, strict=True):
        assert len(results[seed]) == 5
        assert all(same_bits(result, expected) for result in results[seed])


def test_a_first_step_under_another_default_device() -> None:
    """Scratch is made at a thread's first step, whatever mode its caller is in."""
    results: list[torch.Tensor] = []

    def work() -> None:
        param, grad = torch.ones(300), torch.full((300,), 0.5)
        state = AdamState(Stored(FP32, torch.zeros(300)), Stored(FP32, torch.zeros(300)), None)
        with torch.device("meta"), torch.inference_mode():
            adam_step_(param, grad, state, scalars_of_step(1))
        adam_step_(param, grad, state, scalars_of_step(2))
        results.append(param)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert results[0].device.type == "cpu"
    assert (results[0] < 1).all()


def scalars_of_step(step: int) -> AdamScalars:
    return adam_scalars(
        lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, step=step, bias_corrected=True, adam_w_mode=True
    )
