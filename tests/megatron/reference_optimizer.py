"""The specification of a step as a plain inner optimizer: whole parameters, resident state, no
chunks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fused_offload.kernels.adam.reference import AdamScalars, AdamState, adam_scalars, adam_step_
from fused_offload.kernels.formats import (
    BF16,
    FP32,
    LOG8,
    REMAINDER,
    ROOT8,
    SCALE_GROUP,
    Format,
    Stored,
    decode,
    encode_,
    rounding_counter,
)

_MOMENT_FORMATS = {torch.float32: (FP32, FP32), torch.bfloat16: (BF16, BF16), torch.uint8: (ROOT8, LOG8)}
_KEYS = ("exp_avg", "exp_avg_sq", "master_param")


class StoredFormats(NamedTuple):
    """Stored formats of the optimizer state."""

    moments: torch.dtype = torch.float32
    remainders: bool = False

    def master(self, param_dtype: torch.dtype) -> Format:
        return REMAINDER if self.remainders and param_dtype == torch.bfloat16 else FP32


def _stored(format: Format, kept: torch.Tensor) -> Stored:
    if not format.scaled:
        return Stored(format, kept)
    stored = Stored(format, torch.empty(kept.shape, dtype=format.dtype), torch.empty(-(-kept.numel() // SCALE_GROUP)))
    encode_(stored, kept)
    return stored


class ReferenceAdam(torch.optim.Optimizer):
    """Takes HybridDeviceOptimizer's place in tests; gradients come in ``decoupled_grad``."""

    stored_formats = StoredFormats()

    @classmethod
    def with_stored_formats(cls, stored_formats: StoredFormats) -> type[ReferenceAdam]:
        """A class, since Megatron asks for one and builds it twice from its own arguments."""
        return type("ReferenceAdam", (cls,), {"stored_formats": stored_formats})

    def __init__(self, params: Any, *, lr: float, weight_decay: float, betas: Any, eps: float, **ignored: Any) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps})

    def _state_of(self, param: torch.Tensor) -> AdamState:
        """State as it is stored; ``state`` holds the elements, of 8-bit formats values, which
        encode to the same.
        """
        stored_formats = (*_MOMENT_FORMATS[self.stored_formats.moments], self.stored_formats.master(param.dtype))
        is_new = not self.state[param]
        if is_new:
            for key, format in zip(_KEYS, stored_formats, strict=True):
                dtype = torch.float32 if format.scaled else format.dtype
                self.state[param][key] = torch.zeros(param.numel(), dtype=dtype)
        stored = [_stored(format, self.state[param][key]) for key, format in zip(_KEYS, stored_formats, strict=True)]
        return AdamState(*stored, init_moments=is_new, init_master=is_new)

    def _next_scalars(self, group: dict[str, Any]) -> AdamScalars:
        """Counts a step of a group."""
        group["step"] = group.get("step", 0) + 1
        return adam_scalars(
            lr=group["lr"],
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            step=group["step"],
            bias_corrected=True,
            adam_w_mode=True,
        )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        number = 0
        for group in self.param_groups:
            scalars = self._next_scalars(group)
            for param in group["params"]:
                state, grad = self._state_of(param), param.decoupled_grad.reshape(-1)
                adam_step_(param, grad, state, scalars, counter=rounding_counter(number, 0))
                number += 1
                for key, stored in zip(_KEYS, state[:3], strict=True):
                    if stored.format.scaled:
                        decode(stored, self.state[param][key])
