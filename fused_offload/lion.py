"""FusedOffloadLion: the arguments of Lion."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from fused_offload.rules.arguments import (
    EXP_AVG_FORMATS,
    check_rounding,
    check_stored_dtypes,
    shown_rounding,
    warn_if_nothing_rounds,
)
from fused_offload.rules.lion import LionRule

from .config import OffloadConfig
from .optimizer import OffloadOptimizer


class FusedOffloadLion(OffloadOptimizer):
    """Lion (Chen et al. 2023) whose state lives in host memory.

    The paper is "Symbolic Discovery of Optimization Algorithms". The update is the sign of an
    average of gradients, so the state is one momentum, half of Adam's. Takes the arguments of the
    public Lion implementations. The arithmetic is that of `kernels.lion.reference.lion_step_`.

    Gradients are only read: under a gradient scaler, unscaled gradients are not written back.

    Args:
        params: parameters (float32, bfloat16 or float16) or groups of them, dense in memory, one
            device a group.
        lr: learning rate, a float or a one-element tensor on the CPU or on the parameters' device,
            which the kernel reads without a synchronisation. The authors advise a third to a tenth
            of AdamW's.
        betas: weight of the momentum in the update, and its decay, in [0, 1).
        weight_decay: decoupled weight decay. The authors advise three to ten times AdamW's.
        master_weights: keep ``master_param``, the copy of each parameter that updates apply to.
        master_weight_dtype: dtype of the masters, float32 or float16 (block-scaled).
        exp_avg_dtype: stored dtype of the momentum: float32, bfloat16, float16 (block-scaled) or
            uint8 (block-scaled and stochastically rounded, docs/eight_bit.md).
        use_decoupled_grad: read gradients from ``param.decoupled_grad`` instead of ``param.grad``.
        store_param_remainders: keep float32 masters of bfloat16 parameters as 16 bits beside the
            parameter. Nothing is lost; the parameter is then the master rounded half away from
            zero.
        stochastic_rounding: round a bfloat16 momentum to either neighbour, to the nearer one more
            often. An 8-bit momentum is always rounded so.
        rounding_seed: seed of that rounding, in [0, 2^31). The same seed and steps give the same
            bits, whatever the chunks; a resumed run goes on with the same numbers.
        offload: share of state in host memory, and its transfer.

    Raises:
        ValueError: for hyperparameters out of range and parameters given twice.
        TypeError: for parameters that cannot be updated, and for arguments of another type.
        RuntimeError: for dtypes that are not supported.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float | torch.Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        stochastic_rounding: bool = False,
        rounding_seed: int = 0,
        offload: OffloadConfig = OffloadConfig(),  # noqa: B008 - immutable
    ) -> None:
        check_stored_dtypes(type(self).__name__, EXP_AVG_FORMATS, exp_avg_dtype=exp_avg_dtype)
        check_rounding(stochastic_rounding, rounding_seed)
        warn_if_nothing_rounds(stochastic_rounding, exp_avg_dtype=exp_avg_dtype)
        self.exp_avg_dtype = exp_avg_dtype
        self.stochastic_rounding = stochastic_rounding
        self.rounding_seed = rounding_seed
        super().__init__(
            params,
            {"lr": lr, "betas": betas, "weight_decay": weight_decay},
            offload=offload,
            master_weights=master_weights,
            master_weight_dtype=master_weight_dtype,
            store_param_remainders=store_param_remainders,
            use_decoupled_grad=use_decoupled_grad,
        )

    def _rule(self) -> LionRule:
        check_rounding(self.stochastic_rounding, self.rounding_seed)
        return LionRule(
            exp_avg_dtype=self.exp_avg_dtype,
            stochastic_rounding=self.stochastic_rounding,
            rounding_seed=self.rounding_seed,
        )

    def _shown_settings(self) -> dict[str, str]:
        return shown_rounding(self.stochastic_rounding, self.rounding_seed)
