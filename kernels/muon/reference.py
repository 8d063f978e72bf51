"""The phases of a Muon step in plain torch: specification of the kernels, and the CPU step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from fused_offload.kernels.formats import Stored, decode, encode_
from fused_offload.kernels.reference import BLOCK_NUMEL, fma_, load_params, round_fp32, scratch, store_params_


class Interpolation(NamedTuple):
    """Weight of torch's ``lerp``, rounded to float32.

    Attributes:
        weight: share of the end.
        rest: ``1 - weight``, subtracted in float32.
    """

    weight: float
    rest: float

    @classmethod
    def by(cls, weight: float) -> Interpolation:
        """Rounds a weight."""
        rounded = np.float32(weight)
        return cls(float(rounded), float(np.float32(1) - rounded))

    @property
    def is_small(self) -> bool:
        """True if torch computes from the start instead of the end, which is more exact."""
        return abs(self.weight) < 0.5


class NewtonSchulz(NamedTuple):
    """Settings of the Newton-Schulz iteration.

    Attributes:
        coefficients: coefficients of ``x``, of its third and of its fifth power.
        eps: smallest norm that a matrix is divided by.
        steps: number of iterations.
    """

    coefficients: tuple[float, float, float]
    eps: float
    steps: int


class MuonScalars(NamedTuple):
    """Hyperparameters of one step.

    Attributes:
        lr: learning rate in float64, or a one-element tensor on the parameters' device that the
            kernel reads.
        decay: factor of the parameters, ``1 - lr * weight_decay``, or with Megatron's numerics
            ``-lr * weight_decay``, whose product with them is added; in float64 and then rounded to
            float32. Unused with a tensor.
        weight_decay: decoupled weight decay, rounded to float32.
        average: interpolation of the momentum to the gradient.
        look_ahead: interpolation of the gradient to the momentum, or None without Nesterov's.
        newton_schulz: settings of the iteration, or None if another package runs it.
        adjust_lr_fn: scale of the learning rate by the shape of a matrix, see `lr_ratio`.
        step: number of the step, counted from 1; nothing depends on it.
        numerics: ``"torch"``, or ``"megatron"`` for the arithmetic of emerging-optimizers, which
            Megatron-Core uses: updates in float32, and decay as a multiply-add.
    """

    lr: float | torch.Tensor
    decay: float
    weight_decay: float
    average: Interpolation
    look_ahead: Interpolation | None
    newton_schulz: NewtonSchulz | None
    adjust_lr_fn: str | None = None
    step: int = 1
    numerics: str = "torch"


def muon_scalars(
    *,
    lr: float | torch.Tensor,
    weight_decay: float,
    momentum: float,
    nesterov: bool,
    newton_schulz: NewtonSchulz | None,
    adjust_lr_fn: str | None,
    step: int,
    numerics: str = "torch",
) -> MuonScalars:
    """Rounds hyperparameters as torch does.

    Args:
        lr: learning rate; a tensor is passed on for the kernel to read.
        weight_decay: decoupled weight decay.
        momentum: decay of the momentum.
        nesterov: interpolate between gradient and momentum.
        newton_schulz: settings of the iteration.
        adjust_lr_fn: key of `lr_ratio`.
        step: number of this step, counted from 1.
        numerics: ``"torch"`` or ``"megatron"``.
    """
    decay = 1.0
    if not isinstance(lr, torch.Tensor):
        decay = round_fp32(1 - lr * weight_decay if numerics == "torch" else -weight_decay * lr)
    return MuonScalars(
        lr=lr if isinstance(lr, torch.Tensor) else float(lr),
        decay=decay,
        weight_decay=round_fp32(weight_decay),
        average=Interpolation.by(1 - momentum),
        look_ahead=Interpolation.by(momentum) if nesterov else None,
        newton_schulz=newton_schulz,
        adjust_lr_fn=adjust_lr_fn,
        step=step,
        numerics=numerics,
    )


ADJUSTMENTS = (None, "original", "match_rms_adamw", "spectral_unclamped")
"""Values of ``adjust_lr_fn``; torch has the last one since 2.14."""


def lr_ratio(shape: Sequence[int], adjust_lr_fn: str | None) -> float:
    """Factor of the learning rate for a matrix, in float64.

    Args:
        shape: rows and columns, at least 1.
        adjust_lr_fn: one of `ADJUSTMENTS`; None is ``"original"``.
    """
    rows, columns = shape
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    if adjust_lr_fn == "spectral_unclamped":
        return math.sqrt(rows / columns)
    return math.sqrt(max(1, rows / columns))


def update_scale(shape: Sequence[int], scalars: MuonScalars) -> float:
    """Float32 factor of a matrix's update: minus learning rate times `lr_ratio`.

    If the learning rate is a tensor, minus `lr_ratio`; the kernel multiplies it by the tensor.
    """
    ratio = 1.0 if scalars.numerics == "megatron" else lr_ratio(shape, scalars.adjust_lr_fn)
    return round_fp32(-ratio if isinstance(scalars.lr, torch.Tensor) else -(scalars.lr * ratio))


class MuonState(NamedTuple):
    """Stored state of consecutive elements in one phase, and the parts of it that are not set yet.

    Attributes:
        momentum: momentum; None in the second phase.
        master_param: master weights or their 16-bit remainder; None if the parameter is its own
            master, and in the first phase.
        init_momentum: take the momentum as zero instead of reading it.
        init_master: take the parameter as the master instead of reading it.
    """

    momentum: Stored | None
    master_param: Stored | None
    init_momentum: bool = False
    init_master: bool = False

    def narrow(self, start: int, numel: int) -> MuonState:
        """Elements ``[start, start + numel)``; ``start`` is a multiple of `SCALE_GROUP`."""
        momentum, master = self.momentum, self.master_param
        return self._replace(
            momentum=None if momentum is None else momentum.narrow(start, numel),
            master_param=None if master is None else master.narrow(start, numel),
        )


def momentum_phase_(
    param: torch.Tensor,
    grad: torch.Tensor,
    state: MuonState,
    scalars: MuonScalars,
    *,
    array: torch.Tensor,
    scalar: float,
    grad_scale: float | None = None,
    counter: int = 0,
) -> None:
    """First phase on CPU: the momentum, and the update that Newton-Schulz will orthogonalise.

    With torch's ``lerp`` in float32, a multiply-add rounded once, per element::

        m = stored(lerp(m, g, 1 - momentum))
        u = bfloat16(lerp(g, m, momentum))      with Nesterov's momentum, else bfloat16(m)

    Args:
        param: not read.
        grad: ``[numel]`` float32, bfloat16 or float16, contiguous, only read.
        state: stored momentum of ``numel`` elements, updated in place.
        scalars: hyperparameters.
        array: ``[numel]`` bfloat16, or float32 with Megatron's numerics, written.
        scalar: not read.
        grad_scale: divides the gradients first, or None.
        counter: not read.
    """
    momentum = state.momentum
    assert momentum is not None
    for start in range(0, grad.numel(), BLOCK_NUMEL):
        numel = min(BLOCK_NUMEL, grad.numel() - start)
        g, m, gap, out = (buffer[:numel] for buffer in scratch.fp32[:4])
        g.copy_(grad[start : start + numel])
        if grad_scale is not None:
            g.div_(grad_scale)
        part = momentum.narrow(start, numel)
        if state.init_momentum:
            m.zero_()
        else:
            decode(part, m)
        encode_(part, _lerp(m, g, scalars.average, gap, out))
        update = decode(part, m)
        if scalars.look_ahead is not None:
            update = _lerp(g, m, scalars.look_ahead, gap, out)
        array[start : start + numel].copy_(update)


def _lerp(
    start: torch.Tensor, end: torch.Tensor, by: Interpolation, gap: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """``start + weight * (end - start)``, from the nearer end, as ATen's ``Lerp.h`` with fma."""
    torch.sub(end, start, out=gap)
    return fma_(gap, by.weight, start, out=out) if by.is_small else fma_(gap, -by.rest, end, out=out)


def update_phase_(
    param: torch.Tensor,
    grad: torch.Tensor,
    state: MuonState,
    scalars: MuonScalars,
    *,
    array: torch.Tensor,
    scalar: float,
    grad_scale: float | None = None,
    counter: int = 0,
) -> None:
    """Second phase on CPU: the parameters, from the orthogonal update.

    With ``fma`` a multiply-add rounded once, per element in float32::

        p = p * (1 - lr * weight_decay)      rounded to a 16-bit parameter that is its own master
        p = fma(p, -lr * weight_decay, p)    instead, with Megatron's numerics
        p = fma(o, scalar, p)

    Args:
        param: ``[numel]`` float32, bfloat16 or float16, contiguous, updated in place.
        grad: not read.
        state: stored masters of ``numel`` elements, updated in place.
        scalars: hyperparameters.
        array: ``[numel]``, the orthogonal update, of the dtype as in `momentum_phase_`.
        scalar: factor of the update, see `update_scale`.
        grad_scale: not read.
        counter: not read.
    """
    decay = scalars.decay
    if isinstance(scalars.lr, torch.Tensor):
        lr = np.float32(scalars.lr.item())
        decay = float(lr * np.float32(scalars.weight_decay))
        decay = -decay if scalars.numerics == "megatron" else float(np.float32(1) - np.float32(decay))
        scalar = float(lr * np.float32(scalar))
    for start in range(0, param.numel(), BLOCK_NUMEL):
        numel = min(BLOCK_NUMEL, param.numel() - start)
        p, o = (buffer[:numel] for buffer in scratch.fp32[:2])
        part, of_block = param[start : start + numel], state.narrow(start, numel)
        load_params(part, of_block.master_param, p, is_initial=state.init_master)
        if scalars.numerics == "megatron":
            fma_(p, decay, p, out=p)
        else:
            p.mul_(decay)
        if state.master_param is None and param.dtype != torch.float32:
            p.copy_(p.to(param.dtype))
        o.copy_(array[start : start + numel])
        store_params_(part, of_block.master_param, fma_(o, scalar, p, out=p))
