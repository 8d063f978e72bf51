"""A rule of two phases with an operation on whole parameters between them, and the same in plain
torch.

The update is the momentum divided by its root mean square: the first phase moves the momentum, the
operation needs all of it, and the second phase moves the masters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch

from fused_offload import OffloadConfig
from fused_offload.kernels.formats import BF16, FP32, REMAINDER, Format, Stored, decode, encode_
from fused_offload.kernels.reference import load_params, round_fp32, store_params_
from fused_offload.optimizer import OffloadOptimizer
from fused_offload.params.dense import flat
from fused_offload.rules.base import MASTER_PARAM, Phase, UpdateRule, WholeOperation

PARTS = 5
"""Pieces of work of the operation."""


class Values(NamedTuple):
    lr: float
    decay: float
    step: int


class State(NamedTuple):
    momentum: Stored | None
    master_param: Stored | None
    init_momentum: bool
    init_master: bool

    def narrow(self, start: int, numel: int) -> State:
        momentum, master = self.momentum, self.master_param
        return self._replace(
            momentum=None if momentum is None else momentum.narrow(start, numel),
            master_param=None if master is None else master.narrow(start, numel),
        )


def first_phase(
    param: torch.Tensor,
    grad: torch.Tensor,
    state: State,
    values: Values,
    *,
    grad_scale: float | None,
    counter: int,
    array: torch.Tensor,
    scalar: float,
) -> None:
    """Momentum in, momentum out; the array is the momentum. A decay of 1 leaves the state as it
    is.
    """
    assert state.momentum is not None
    momentum = torch.zeros(param.numel())
    if not state.init_momentum:
        decode(state.momentum, momentum)
    if values.lr:  # else the step is skipped
        momentum = momentum * values.decay + grad.float() / (grad_scale or 1.0)
    encode_(state.momentum, momentum, None)
    array.copy_(momentum)


def second_phase(
    param: torch.Tensor,
    grad: torch.Tensor,
    state: State,
    values: Values,
    *,
    grad_scale: float | None,
    counter: int,
    array: torch.Tensor,
    scalar: float,
) -> None:
    """Master in, parameter and master out."""
    master = load_params(param, state.master_param, torch.empty(param.numel()), is_initial=state.init_master)
    if values.lr:
        master = master - array * scalar
    store_params_(param, state.master_param, master)


def scratch_bytes(param: torch.Tensor) -> int:
    return 4 * param.numel() + 512


def parts(param: torch.Tensor, array: torch.Tensor, scratch: torch.Tensor, values: Values) -> list[Callable[[], Any]]:
    """Divides the array by its root mean square."""
    square = scratch[512 : 512 + 4 * param.numel()].view(torch.float32)
    array = array.as_strided(square.shape, (1,))
    mean = scratch[:4].view(torch.float32)
    return [
        partial(torch.mul, array, array, out=square),
        partial(torch.mean, square, 0, out=mean[0]),
        partial(torch.sqrt, mean, out=mean),
        partial(torch.clamp, mean, min=1e-6, out=mean),
        partial(torch.div, array, mean, out=array),
    ]


def scalar_of(shape: torch.Size, values: Values) -> float:
    """Learning rate over the parameter's first dimension."""
    return values.lr / shape[0]


OPERATION = WholeOperation(torch.float32, scratch_bytes, parts, scalar_of)


def nothing(*_: Any) -> None:
    """Compilation of what is never launched."""


def no_launch(*_: Any) -> None:
    raise AssertionError("there is no kernel")


@dataclass(frozen=True, kw_only=True)
class ToyRule(UpdateRule):
    """The rule."""

    momentum_format: Format = FP32

    keys: ClassVar[tuple[str, ...]] = ("momentum",)
    settings: ClassVar[tuple[str, ...]] = ("lr", "decay")
    foreign_settings: ClassVar[frozenset[str]] = frozenset()
    phases: ClassVar[tuple[Phase, ...]] = (
        Phase(frozenset({"momentum"}), frozenset({"momentum"}), first_phase, nothing, no_launch, OPERATION),
        Phase(frozenset({MASTER_PARAM}), frozenset({MASTER_PARAM}), second_phase, nothing, no_launch),
    )

    @property
    def formats(self) -> dict[str, Format]:
        return {"momentum": self.momentum_format}

    def check_group(self, group: Mapping[str, Any], *, lr_required: bool = False) -> None:
        pass

    def bind(self, stored: Mapping[str, Stored], initial: Set[str]) -> State:
        return State(stored.get("momentum"), stored.get(MASTER_PARAM), "momentum" in initial, MASTER_PARAM in initial)

    def step_values(self, group: Mapping[str, Any], step: int) -> Values:
        return Values(round_fp32(group["lr"]), round_fp32(group["decay"]), step)

    def compiled_values(self, values: Values) -> tuple[Any, ...]:
        return ()


class Toy(OffloadOptimizer):
    """The optimizer."""

    def __init__(
        self,
        params: Any,
        lr: float = 0.1,
        decay: float = 0.9,
        *,
        momentum_format: Format = FP32,
        offload: OffloadConfig = OffloadConfig(),  # noqa: B008 - immutable
        **options: Any,
    ) -> None:
        self.momentum_format = momentum_format
        super().__init__(params, {"lr": lr, "decay": decay}, offload=offload, **options)

    def _rule(self) -> ToyRule:
        return ToyRule(momentum_format=self.momentum_format)


class Plain:
    """The same steps without an engine: whole parameters, one after the other."""

    def __init__(self, params: Sequence[torch.Tensor], *, momentum_format: Format, master: Format | None) -> None:
        self.params = params
        self.state = [
            State(
                Stored(momentum_format, torch.empty(param.numel(), dtype=momentum_format.dtype)),
                None if master is None else Stored(master, torch.empty(param.numel(), dtype=master.dtype)),
                init_momentum=True,
                init_master=True,
            )
            for param in params
        ]

    def step(
        self, grads: Sequence[torch.Tensor | None], *, lr: float = 0.1, decay: float = 0.9, grad_scale: float = 1.0
    ) -> None:
        values = Values(round_fp32(lr), round_fp32(decay), 0)
        for index, (param, grad) in enumerate(zip(self.params, grads, strict=True)):
            if grad is None:
                continue
            flat_param, flat_grad, array = flat(param), flat(grad), torch.empty(param.numel())
            beside: dict[str, Any] = {
                "grad_scale": grad_scale,
                "counter": 0,
                "array": array,
                "scalar": round_fp32(scalar_of(param.shape, values)),
            }
            first_phase(flat_param, flat_grad, self.state[index], values, **beside)
            scratch = torch.empty(scratch_bytes(param), dtype=torch.uint8)
            for part in parts(param, array.as_strided(param.shape, param.stride()), scratch, values):
                part()
            second_phase(flat_param, flat_grad, self.state[index], values, **beside)
            self.state[index] = self.state[index]._replace(init_momentum=False, init_master=False)


FORMATS: dict[str, tuple[torch.dtype, Format, Format | None, dict[str, Any]]] = {
    "fp32": (torch.float32, FP32, None, {}),
    "fp32_master": (torch.float32, FP32, FP32, {"master_weights": True}),
    "bf16": (torch.bfloat16, BF16, None, {}),
    "master": (torch.bfloat16, FP32, FP32, {"master_weights": True}),
    "remainder": (torch.bfloat16, BF16, REMAINDER, {"master_weights": True, "store_param_remainders": True}),
}
"""Dtype of the parameters, formats of momentum and masters, and the arguments that ask for them."""
