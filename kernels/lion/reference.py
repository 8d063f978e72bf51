"""The fused Lion step in plain torch: specification of the kernel, and the step on the CPU."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from fused_offload.kernels.formats import Rounding, Stored, decode, encode_, rounding_thresholds
from fused_offload.kernels.reference import BLOCK_NUMEL, fma_, load_params, round_fp32, scratch, store_params_


class LionScalars(NamedTuple):
    """Hyperparameters of one launch, all rounded to float32.

    Attributes:
        lr: learning rate, or a one-element tensor on the parameters' device that the kernel reads.
        beta1: weight of the momentum in the update.
        one_minus_beta1: ``1 - beta1``, subtracted in float32.
        beta2: decay of the momentum.
        one_minus_beta2: ``1 - beta2``, subtracted in float32.
        weight_decay: decoupled weight decay.
        step: number of the step, counted from 1; affects stochastic rounding.
        rounding_seed: seed of stochastic rounding, in [0, 2^31).
    """

    lr: float | torch.Tensor
    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    weight_decay: float
    step: int = 1
    rounding_seed: int = 0


def lion_scalars(
    *,
    lr: float | torch.Tensor,
    betas: tuple[float, float],
    weight_decay: float,
    step: int,
    rounding_seed: int = 0,
) -> LionScalars:
    """Rounds hyperparameters to float32.

    Args:
        lr: learning rate; a tensor is passed on for the kernel to read.
        betas: weight of the momentum in the update, and its decay.
        weight_decay: decoupled weight decay.
        step: number of this step, counted from 1.
        rounding_seed: seed of stochastic rounding, in [0, 2^31).

    Returns:
        The scalars of one launch.
    """
    beta1, beta2 = (np.float32(beta) for beta in betas)
    return LionScalars(
        lr=lr if isinstance(lr, torch.Tensor) else round_fp32(lr),
        beta1=float(beta1),
        one_minus_beta1=float(np.float32(1) - beta1),
        beta2=float(beta2),
        one_minus_beta2=float(np.float32(1) - beta2),
        weight_decay=round_fp32(weight_decay),
        step=step,
        rounding_seed=rounding_seed,
    )


class LionState(NamedTuple):
    """Stored state of consecutive elements, and the parts of it that are not set yet.

    Attributes:
        exp_avg: momentum.
        master_param: master weights, their 16-bit remainder, or None if the parameter is its own
            master.
        init_exp_avg: take the momentum as zero instead of reading it.
        init_master: take the parameter as the master instead of reading it.
    """

    exp_avg: Stored
    master_param: Stored | None
    init_exp_avg: bool = False
    init_master: bool = False

    def narrow(self, start: int, numel: int) -> LionState:
        """Elements ``[start, start + numel)``; ``start`` is a multiple of `SCALE_GROUP`."""
        master = self.master_param
        return self._replace(
            exp_avg=self.exp_avg.narrow(start, numel),
            master_param=None if master is None else master.narrow(start, numel),
        )


def lion_step_(
    param: torch.Tensor,
    grad: torch.Tensor,
    state: LionState,
    scalars: LionScalars,
    *,
    grad_scale: float | None = None,
    counter: int = 0,
) -> None:
    """One Lion step on CPU (Chen et al. 2023, Algorithm 2), block by block.

    With ``fma`` a multiply-add rounded once, per element in float32::

        u = sign(fma(m, beta1, g * (1 - beta1)))
        u = fma(p, weight_decay, u)
        p = fma(-lr, u, p)
        m = fma(m, beta2, g * (1 - beta2))

    The sign of zero is zero, the sign of NaN is NaN.

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
    state: LionState,
    scalars: LionScalars,
    grad_scale: float | None,
    counter: int,
) -> None:
    numel = param.numel()
    p, g, m, update, term = (buffer[:numel] for buffer in scratch.fp32)

    load_params(param, state.master_param, p, is_initial=state.init_master)
    g.copy_(grad)
    if grad_scale is not None:
        g.div_(grad_scale)
    if state.init_exp_avg:
        m.zero_()
    else:
        decode(state.exp_avg, m)

    average = fma_(m, scalars.beta1, torch.mul(g, scalars.one_minus_beta1, out=term), out=term)
    torch.sign(average, out=update).masked_fill_(average.isnan(), torch.nan)
    fma_(p, scalars.weight_decay, update, out=update)
    assert isinstance(scalars.lr, float)
    fma_(update, -scalars.lr, p, out=p)
    fma_(m, scalars.beta2, torch.mul(g, scalars.one_minus_beta2, out=term), out=m)

    threshold = None
    if state.exp_avg.format.stochastic:
        threshold, _ = rounding_thresholds(Rounding(scalars.rounding_seed, scalars.step, counter), numel, param.device)
    encode_(state.exp_avg, m, threshold)
    store_params_(param, state.master_param, p)
