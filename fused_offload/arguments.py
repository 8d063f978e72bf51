"""Checks of the constructor's arguments and of what groups hold at a step."""

from __future__ import annotations

from typing import Any

import torch

from .kernels.forms import BF16, FP16, FP16_NONZERO, FP32, Form

MASTER_FORMS = {torch.float32: FP32, torch.float16: FP16}
EXP_AVG_FORMS = {torch.float32: FP32, torch.bfloat16: BF16, torch.float16: FP16}
EXP_AVG_SQ_FORMS: dict[torch.dtype, Form] = {**EXP_AVG_FORMS, torch.float16: FP16_NONZERO}


def check_modes(
    *,
    amsgrad: bool,
    capturable: bool,
    master_weights: bool,
    master_weight_dtype: torch.dtype,
    exp_avg_dtype: torch.dtype,
    exp_avg_sq_dtype: torch.dtype,
    numerics: str,
) -> None:
    """Raises for modes that do not exist.

    Raises:
        RuntimeError: for a mode that TransformerEngine's FusedAdam refuses too, or that is not there yet.
        ValueError: for unknown numerics.
    """
    if amsgrad:
        raise RuntimeError("FusedOffloadAdam does not support the AMSGrad variant.")
    if capturable:
        raise RuntimeError(
            "FusedOffloadAdam does not support capturable=True yet: a captured CUDA graph of the step comes with its "
            "own option. Leave it False; lr tensors and a gradient scaler's signals are read on the device already."
        )
    if master_weights and master_weight_dtype not in MASTER_FORMS:
        raise RuntimeError(f"FusedOffloadAdam only supports fp32/fp16 master weights, but got {master_weight_dtype}.")
    for name, dtype in (("exp_avg_dtype", exp_avg_dtype), ("exp_avg_sq_dtype", exp_avg_sq_dtype)):
        if dtype == torch.uint8:
            raise RuntimeError(f"FusedOffloadAdam does not support {name}=torch.uint8 yet; use bf16 or fp16.")
        if dtype not in EXP_AVG_FORMS:
            raise RuntimeError(f"FusedOffloadAdam only supports fp32/fp16/bf16 {name}, but got {dtype}.")
    if numerics not in ("ieee", "te"):
        raise ValueError(f"Invalid numerics: {numerics!r}, it should be 'ieee' or 'te'")


def check_hyperparameters(group: dict[str, Any], *, lr_required: bool = False) -> None:
    """Raises for hyperparameters that no step can use, in torch's wording.

    Args:
        group: a parameter group.
        lr_required: whether ``lr`` may not be None; schedulers may set it between construction and the first step.

    Raises:
        ValueError: names the hyperparameter and its value.
    """
    lr, eps, betas, weight_decay = group["lr"], group["eps"], group["betas"], group["weight_decay"]
    if lr is None:
        if lr_required:
            raise ValueError("Invalid learning rate: None, set group['lr'] before the first step")
    elif isinstance(lr, torch.Tensor):
        if lr.numel() != 1:
            raise ValueError("Tensor lr must be 1-element")
        if lr.device.type == "cpu" and not 0.0 <= lr.item():
            raise ValueError(f"Invalid learning rate: {lr.item()}")
    elif not 0.0 <= lr:
        raise ValueError(f"Invalid learning rate: {lr}")
    if isinstance(eps, torch.Tensor) or not 0.0 <= eps:
        raise ValueError(f"Invalid epsilon value: {eps}")
    if len(betas) != 2:
        raise ValueError(f"Invalid betas: {betas!r}, it should be two numbers")
    for index, beta in enumerate(betas):
        if isinstance(beta, torch.Tensor) or not 0.0 <= beta < 1.0:
            raise ValueError(f"Invalid beta parameter at index {index}: {beta}")
    if isinstance(weight_decay, torch.Tensor) or weight_decay != weight_decay:
        raise ValueError(f"Invalid weight_decay value: {weight_decay}")
