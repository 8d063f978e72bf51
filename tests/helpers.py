"""What several test modules share: devices, data, bitwise comparison, a float64 step and an
independent oracle.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch

from fused_offload import FusedOffloadAdam
from fused_offload.kernels.adam.reference import AdamState, adam_scalars, adam_step_
from fused_offload.kernels.formats import (
    BF16,
    FP16,
    FP16_NONZERO,
    FP32,
    LOG8,
    REMAINDER,
    ROOT8,
    Format,
    Stored,
    decode,
    encode_,
    rounding_counter,
)
from fused_offload.optimizer import OffloadOptimizer
from fused_offload.params.quantised import plain_values

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the workers share the cores, and most tensors here are small

DEVICES = ["cuda"] if torch.cuda.is_available() else ["cpu"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def only_error(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a command printed, on the standard error output, because it refused."""
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    return captured.err


@pytest.fixture(scope="session", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """Modules take it over by ``device = helpers.device``."""
    return request.param


# -- data ------------------------------------------------------------------------------------------


def randn(
    shape: int | Sequence[int], seed: int, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Normal values that depend on the seed alone, not on the device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device=device, dtype=dtype)


def param_of(values: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(values.clone(memory_format=torch.preserve_format))


def set_grad(param: torch.Tensor, values: torch.Tensor | None) -> None:
    """Sets ``.grad``, also to values of another dtype, as hooks that accumulate in float32 do."""
    param.grad = None
    if values is not None:
        param.grad = torch.zeros_like(param)
        param.grad.data = values


# -- bitwise comparison ----------------------------------------------------------------------------


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU whose equality is that of bits; only NaNs count as one, whatever their sign
    and payload.
    """
    values = plain_values(tensor).cpu().contiguous()
    if not values.dtype.is_floating_point:
        return values.clone()
    values = torch.where(values.isnan(), torch.full_like(values, math.nan), values)
    return values.view(torch.int16 if values.dtype.itemsize == 2 else torch.int32).clone()


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype}, not {expected.dtype}"
    assert actual.shape == expected.shape, f"{what}: {tuple(actual.shape)}, not {tuple(expected.shape)}"
    different = bits(actual) != bits(expected)
    if different.any():
        first = tuple(different.nonzero()[0].tolist())
        raise AssertionError(
            f"{what}: {int(different.sum())} of {different.numel()} elements differ, first at {first}: "
            f"{actual[first].item()!r}, not {expected[first].item()!r}"
        )


class Snapshot(NamedTuple):
    """Bits of everything that a step may change; taken without any effect on the optimizer."""

    params: list[torch.Tensor]
    state: list[dict[str, torch.Tensor]]
    steps: list[int]
    groups: list[dict[str, Any]]


def _state_bits(optimizer: OffloadOptimizer, param: torch.Tensor) -> dict[str, torch.Tensor]:
    entry = optimizer.state[param] if param in optimizer.state else None
    if entry is None or not entry.storage.bound or entry.storage.extent is None:
        return {}
    stored = {key: entry.storage.stored(key) for key in entry}
    found = {key: bits(entry.peek(key)) for key in entry}
    return found | {f"{key} scale": bits(value.scale) for key, value in stored.items() if value.scale is not None}


def snapshot(optimizer: OffloadOptimizer) -> Snapshot:
    optimizer.synchronize()
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return Snapshot(
        [bits(param) for param in params],
        [_state_bits(optimizer, param) for param in params],
        [int(group.get("step", 0)) for group in optimizer.param_groups],
        [{k: v for k, v in group.items() if k not in ("params", "step")} for group in optimizer.param_groups],
    )


def assert_same_snapshot(actual: Snapshot, expected: Snapshot) -> None:
    assert actual.steps == expected.steps
    assert actual.groups == expected.groups
    for index, (a, b) in enumerate(zip(actual.params, expected.params, strict=True)):
        assert torch.equal(a, b), f"parameter {index} differs"
    for index, (a_state, b_state) in enumerate(zip(actual.state, expected.state, strict=True)):
        assert a_state.keys() == b_state.keys()
        for key in a_state:
            assert torch.equal(a_state[key], b_state[key]), f"{key} of parameter {index} differs"


@contextmanager
def unchanged(optimizer: OffloadOptimizer) -> Iterator[None]:
    """Asserts that the block changes no bit of parameters and state, and no step count."""
    before = snapshot(optimizer)
    yield
    assert_same_snapshot(snapshot(optimizer), before)


@contextmanager
def no_host_sync(device: str) -> Iterator[None]:
    """Makes CUDA raise where the host would wait for it; nothing on the CPU."""
    if device == "cpu":
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


# -- a float64 step, from the textbook -------------------------------------------------------------


class Step64(NamedTuple):
    """Result of one step in float64, and how far a float32 step may be from it, element by
    element.
    """

    param: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    param_tol: torch.Tensor
    exp_avg_tol: torch.Tensor
    exp_avg_sq_tol: torch.Tensor

    def check(self, param: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor) -> None:
        for name, actual, expected, tolerance in (
            ("exp_avg", exp_avg, self.exp_avg, self.exp_avg_tol),
            ("exp_avg_sq", exp_avg_sq, self.exp_avg_sq, self.exp_avg_sq_tol),
            ("param", param, self.param, self.param_tol),
        ):
            error = (actual.detach().cpu().double() - expected).abs()
            bad = ~(error <= tolerance)
            assert not bad.any(), (
                f"{name}: error {error[bad].max().item():.3e}, allowed {tolerance[bad].min().item():.3e}"
            )


def step64(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    *,
    step: int,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    adam_w_mode: bool = True,
    bias_correction: bool = True,
) -> Step64:
    """One step of Adam (L2) or AdamW in float64.

    Tolerances: in float32 ``1 - beta`` is off by up to 1.3e-5 relative at beta2 = 0.999, which half
    of enters the update, hence 2e-5 for exp_avg_sq and lr * 2e-5 for the parameter; exp_avg is a
    sum of two terms, each within 1e-6.
    """
    beta1, beta2 = betas
    p, g, m, v = (tensor.detach().cpu().double() for tensor in (param, grad, exp_avg, exp_avg_sq))
    if not adam_w_mode:
        g = g + weight_decay * p
    m_tol = 1e-6 * ((beta1 * m).abs() + ((1 - beta1) * g).abs()) + 2.0**-149
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    correction1 = 1 - beta1**step if bias_correction else 1.0
    correction2 = 1 - beta2**step if bias_correction else 1.0
    root = (v / correction2).sqrt() + eps
    update = m / correction1 / root
    decay = weight_decay * p if adam_w_mode else torch.zeros_like(p)
    new_param = p - lr * (update + decay)
    ulp = 2.0**-23 * torch.maximum(p.abs(), new_param.abs()) + 2.0**-149
    update_tol = m_tol / correction1 / root + 2e-5 * (update.abs() + decay.abs())
    return Step64(new_param, m, v, lr * update_tol + ulp, m_tol, 2e-5 * v + 2.0**-149)


# -- an independent oracle: whole parameters, one state each, no chunks ----------------------------

MASTER_FORMATS: dict[str, Format | None] = {"none": None, "fp32": FP32, "fp16": FP16, "remainder": REMAINDER}
EXP_AVG_FORMATS = {torch.float32: FP32, torch.bfloat16: BF16, torch.float16: FP16, torch.uint8: ROOT8}
EXP_AVG_SQ_FORMATS = {torch.float32: FP32, torch.bfloat16: BF16, torch.float16: FP16_NONZERO, torch.uint8: LOG8}


class FormatsCase(NamedTuple):
    """Stored formats as tests choose them; ``master`` is a key of `MASTER_FORMATS`."""

    exp_avg: torch.dtype = torch.float32
    exp_avg_sq: torch.dtype = torch.float32
    master: str = "none"

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of the optimizer."""
        return {
            "exp_avg_dtype": self.exp_avg,
            "exp_avg_sq_dtype": self.exp_avg_sq,
            "master_weights": self.master != "none",
            "master_weight_dtype": torch.float16 if self.master == "fp16" else torch.float32,
            "store_param_remainders": self.master == "remainder",
        }

    def master_format(self, param_dtype: torch.dtype) -> Format | None:
        if self.master == "remainder" and param_dtype != torch.bfloat16:
            return FP32  # only bfloat16 parameters are the high half of their master
        return MASTER_FORMATS[self.master]


def _empty_stored(format: Format, numel: int) -> Stored:
    scale = torch.zeros(-(-numel // 128)) if format.scaled else None
    return Stored(format, torch.zeros(numel, dtype=format.dtype), scale)


def in_memory_order(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """``[numel]`` elements on the CPU in the order in which ``like`` lies in memory."""
    order = sorted(range(like.dim()), key=lambda dim: (-like.stride(dim), dim))
    return tensor.detach().permute(order).reshape(-1).cpu()


class Oracle:
    """One parameter and its state on the CPU; every step is one call of the reference on all of
    it.
    """

    def __init__(self, param: torch.Tensor, formats: FormatsCase, number: int = 0) -> None:
        """``number`` counts the optimizer's parameters: with 8-bit moments random numbers depend on
        it.
        """
        self.laid_out = param.detach()
        self.param = in_memory_order(param, param).clone()
        self.counter = rounding_counter(number, 0)
        master = formats.master_format(param.dtype)
        numel = self.param.numel()
        self.state = AdamState(
            _empty_stored(EXP_AVG_FORMATS[formats.exp_avg], numel),
            _empty_stored(EXP_AVG_SQ_FORMATS[formats.exp_avg_sq], numel),
            None if master is None else _empty_stored(master, numel),
            init_moments=True,
            init_master=True,
        )

    def step(
        self,
        grad: torch.Tensor,
        group: Mapping[str, Any],
        step: int,
        *,
        adam_w_mode: bool = True,
        grad_scale: float | None = None,
    ) -> None:
        """One step; the elements of ``grad`` count in their order, which is that of the parameter
        in memory.
        """
        lr = group["lr"]
        scalars = adam_scalars(
            lr=lr.item() if isinstance(lr, torch.Tensor) else lr,
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            step=step,
            bias_corrected=group["bias_correction"],
            adam_w_mode=adam_w_mode,
        )
        grad = grad.cpu().reshape(-1)
        adam_step_(self.param, grad, self.state, scalars, grad_scale=grad_scale, counter=self.counter)
        self.state = self.state._replace(init_moments=False, init_master=False)

    def save_and_load(self) -> None:
        """What a checkpoint does to state: values leave their stored format as float32 and come
        back.

        A master that no step has written yet is saved as the parameter, and is the master from then
        on.
        """
        master = self.state.master_param
        if self.state.init_master and master is not None and master.format is not REMAINDER:
            encode_(master, self.param.float())
        for stored in self.state[:3]:
            if stored is not None and stored.format.scaled:
                encode_(stored, decode(stored))
        self.state = self.state._replace(init_moments=False, init_master=False)

    def check(self, optimizer: FusedOffloadAdam, param: torch.Tensor, what: str) -> None:
        """Asserts that the optimizer has the same bits."""
        assert_same_bits(in_memory_order(param, param), self.param, f"{what} parameter")
        if param not in optimizer.state or not optimizer.state[param].storage.bound:
            assert self.state.init_moments, f"{what} has no state"
            return
        entry = optimizer.state[param]
        for key, stored in zip(("exp_avg", "exp_avg_sq", "master_param"), self.state[:3], strict=True):
            assert (key in entry) == (stored is not None)
            if stored is None or (key == "master_param" and self.state.init_master):
                continue
            assert_same_bits(in_memory_order(entry.peek(key), param), stored.data, f"{what} {key}")
            if stored.scale is not None and stored.data.numel():
                assert_same_bits(entry.storage.stored(key).scale.cpu(), stored.scale, f"{what} {key} scale")
