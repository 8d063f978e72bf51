"""The specification of a step as a plain inner optimizer: whole parameters, resident state, no chunks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fused_offload.kernels.forms import BF16, FP32, REMAINDER, Form, Stored
from fused_offload.kernels.reference import AdamState, adam_scalars, adam_step_

_MOMENT_FORMS = {torch.float32: FP32, torch.bfloat16: BF16}


class Forms(NamedTuple):
    """How optimizer state is stored."""

    moments: torch.dtype = torch.float32
    remainders: bool = False

    def master(self, param_dtype: torch.dtype) -> Form:
        return REMAINDER if self.remainders and param_dtype == torch.bfloat16 else FP32


class ReferenceAdam(torch.optim.Optimizer):
    """Takes HybridDeviceOptimizer's place in tests; gradients come in ``decoupled_grad``."""

    forms = Forms()

    @classmethod
    def with_forms(cls, forms: Forms) -> type[ReferenceAdam]:
        """A class, since Megatron asks for one and builds it twice from its own arguments."""
        return type("ReferenceAdam", (cls,), {"forms": forms})

    def __init__(self, params: Any, *, lr: float, weight_decay: float, betas: Any, eps: float, **ignored: Any) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps})

    def _state_of(self, param: torch.Tensor) -> AdamState:
        moment, master = _MOMENT_FORMS[self.forms.moments], self.forms.master(param.dtype)
        is_new = not self.state[param]
        if is_new:
            for key, form in (("exp_avg", moment), ("exp_avg_sq", moment), ("master_param", master)):
                self.state[param][key] = torch.zeros(param.numel(), dtype=form.dtype)
        state = self.state[param]
        return AdamState(
            Stored(moment, state["exp_avg"], None),
            Stored(moment, state["exp_avg_sq"], None),
            Stored(master, state["master_param"], None),
            init_moments=is_new,
            init_master=is_new,
        )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            scalars = adam_scalars(
                lr=group["lr"],
                betas=group["betas"],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                step=group["step"],
                bias_corrected=True,
                adam_w_mode=True,
            )
            for param in group["params"]:
                adam_step_(param, param.decoupled_grad.reshape(-1), self._state_of(param), scalars)
