"""The fused Adam step in plain torch: specification of the kernel, and the step on the CPU."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from fused_offload.kernels.formats import Rounding, Stored, decode, encode_, rounding_thresholds
from fused_offload.kernels.reference import BLOCK_NUMEL, fma_, load_params, round_fp32, scratch, store_params_


class AdamScalars(NamedTuple):
    """Hyperparameters of one launch, all rounded to float32.

    Attributes:
        lr: learning rate, or a one-element tensor on the parameters' device that the kernel reads.
        beta1: decay of the first moment.
        one_minus_beta1: ``1 - beta1``, subtracted in float32.
        beta2: decay of the second moment.
        one_minus_beta2: ``1 - beta2``, subtracted in float32.
        eps: added to the denominator.
        weight_decay: decoupled decay, or L2 if not ``adam_w_mode``.
        bias_correction1: ``1 - beta1**step``, or 1.
        bias_correction2: ``1 - beta2**step``, or 1.
        adam_w_mode: decoupled weight decay (AdamW) if true, else L2.
        step: number of the step, counted from 1; affects stochastic rounding.
        rounding_seed: seed of stochastic rounding, in [0, 2^31).
    """

    lr: float | torch.Tensor
    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    eps: float
    weight_decay: float
    bias_correction1: float
    bias_correction2: float
    adam_w_mode: bool
    step: int = 1
    rounding_seed: int = 0


def bias_correction(beta: float, step: int) -> float:
    """``1 - beta**step`` of the float32 beta, computed in float64 and rounded to float32."""
    return round_fp32(1.0 - round_fp32(beta) ** step)


def adam_scalars(
    *,
    lr: float | torch.Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    bias_corrected: bool,
    adam_w_mode: bool,
    rounding_seed: int = 0,
) -> AdamScalars:
    """Rounds hyperparameters to float32, as TransformerEngine's FusedAdam does for its kernel.

    Args:
        lr: learning rate; a tensor is passed on for the kernel to read.
        betas: decay of the first and the second moment.
        eps: added to the denominator.
        weight_decay: weight decay factor.
        step: number of this step, counted from 1.
        bias_corrected: divide by the bias corrections.
        adam_w_mode: decoupled weight decay if true, else L2.
        rounding_seed: seed of stochastic rounding, in [0, 2^31).

    Returns:
        The scalars of one launch.
    """
    beta1, beta2 = (np.float32(beta) for beta in betas)
    return AdamScalars(
        lr=lr if isinstance(lr, torch.Tensor) else round_fp32(lr),
        beta1=float(beta1),
        one_minus_beta1=float(np.float32(1) - beta1),
        beta2=float(beta2),
        one_minus_beta2=float(np.float32(1) - beta2),
        eps=round_fp32(eps),
        weight_decay=round_fp32(weight_decay),
        bias_correction1=bias_correction(betas[0], step) if bias_corrected else 1.0,
        bias_correction2=bias_correction(betas[1], step) if bias_corrected else 1.0,
        adam_w_mode=bool(adam_w_mode),  # TransformerEngine's 1 and 0 would compile another kernel
        step=step,
        rounding_seed=rounding_seed,
    )


class AdamState(NamedTuple):
    """Stored state of consecutive elements, and the parts of it that are not set yet.

    Attributes:
        exp_avg: first moment.
        exp_avg_sq: second moment.
        master_param: master weights, their 16-bit remainder, or None if the parameter is its own
            master.
        init_moments: take both moments as zero instead of reading them.
        init_master: take the parameter as the master instead of reading it.
    """

    exp_avg: Stored
    exp_avg_sq: Stored
    master_param: Stored | None
    init_moments: bool = False
    init_master: bool = False

    def narrow(self, start: int, numel: int) -> AdamState:
        """Elements ``[start, start + numel)``; ``start`` is a multiple of `SCALE_GROUP`."""
        master = self.master_param
        return self._replace(
            exp_avg=self.exp_avg.narrow(start, numel),
            exp_avg_sq=self.exp_avg_sq.narrow(start, numel),
            master_param=None if master is None else master.narrow(start, numel),
        )


def adam_step_(
    param: torch.Tensor,
    grad: torch.Tensor,
    state: AdamState,
    scalars: AdamScalars,
    *,
    grad_scale: float | None = None,
    counter: int = 0,
) -> None:
    """One Adam or AdamW step on CPU, block by block.

    With ``fma`` a multiply-add rounded once, per element in float32::

        L2:     g = fma(p, weight_decay, g)
        m = fma(m, beta1, g * (1 - beta1))      v = fma(v, beta2, (g * (1 - beta2)) * g)
        u = (m / bias_correction1) / (sqrt(v / bias_correction2) + eps)
        AdamW:  u = fma(p, weight_decay, u)
        p = fma(-lr, u, p)

    This is the operation order of TransformerEngine's ``multi_tensor_adam``. The parameter is
    updated from the unrounded m and v, which are rounded only when they are stored.

    Args:
        param: ``[numel]`` float32, bfloat16 or float16, contiguous, updated in place.
        grad: ``[numel]`` of any of these dtypes, contiguous, only read.
        state: stored state of ``numel`` elements, updated in place.
        scalars: hyperparameters.
        grad_scale: divides the gradients first, or None.
        counter: `formats.rounding_counter` of the first element; only used by stochastic formats.
    """
    lr = scalars.lr
    if isinstance(lr, torch.Tensor):
        scalars = scalars._replace(lr=round_fp32(lr.item()))
    for start in range(0, param.numel(), BLOCK_NUMEL):
        numel = min(BLOCK_NUMEL, param.numel() - start)
        block = slice(start, start + numel)
        _step_block_(param[block], grad[block], state.narrow(start, numel), scalars, grad_scale, counter + start)


def _step_block_(
    param: torch.Tensor,
    grad: torch.Tensor,
    state: AdamState,
    scalars: AdamScalars,
    grad_scale: float | None,
    counter: int,
) -> None:
    numel = param.numel()
    p, g, m, v, term = (buffer[:numel] for buffer in scratch.fp32)
    wide = scratch.fp64[0][:numel]

    load_params(param, state.master_param, p, is_initial=state.init_master)
    g.copy_(grad)
    if grad_scale is not None:
        g.div_(grad_scale)
    if not scalars.adam_w_mode:
        fma_(p, scalars.weight_decay, g, out=g)

    if state.init_moments:
        m.zero_()
        v.zero_()
    else:
        decode(state.exp_avg, m)
        decode(state.exp_avg_sq, v)
    fma_(m, scalars.beta1, torch.mul(g, scalars.one_minus_beta1, out=term), out=m)
    fma_(v, scalars.beta2, torch.mul(g, scalars.one_minus_beta2, out=term).mul_(g), out=v)
    thresholds: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    if state.exp_avg.format.stochastic or state.exp_avg_sq.format.stochastic:
        thresholds = rounding_thresholds(Rounding(scalars.rounding_seed, scalars.step, counter), numel, param.device)
    encode_(state.exp_avg, m, thresholds[0])
    encode_(state.exp_avg_sq, v, thresholds[1])

    wide.copy_(v.div_(scalars.bias_correction2)).sqrt_()
    v.copy_(wide).add_(scalars.eps)
    update = m.div_(scalars.bias_correction1).div_(v)
    if scalars.adam_w_mode:
        fma_(p, scalars.weight_decay, update, out=update)
    assert isinstance(scalars.lr, float)
    fma_(update, -scalars.lr, p, out=p)
    store_params_(param, state.master_param, p)
