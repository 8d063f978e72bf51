"""Checks of arguments that only Adam has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fused_offload.kernels.formats import BF16, FP16_NONZERO, FP32, LOG8, Format
from fused_offload.params import placement

from .arguments import (
    EXP_AVG_FORMATS,
    check_average_dtypes,
    check_betas,
    check_dtypes,
    check_learning_rate,
    check_number,
    checked_step,
    refuse_options,
    rounded_format,
    shown,
)

EXP_AVG_SQ_FORMATS = {torch.float32: FP32, torch.bfloat16: BF16, torch.float16: FP16_NONZERO, torch.uint8: LOG8}
"""Stored format of an average of squares, by its dtype."""

ADAM_ARGUMENTS = {"decoupled_weight_decay": "use adam_w_mode"}
"""Arguments that only torch's Adam and AdamW have, and their replacements."""

_NO_AMSGRAD = "{} does not support the AMSGrad variant. Leave amsgrad False, or use torch.optim.AdamW."


def moment_formats(
    exp_avg_dtype: torch.dtype, exp_avg_sq_dtype: torch.dtype, *, stochastic_rounding: bool
) -> dict[str, Format]:
    """Stored format of both moments.

    Args:
        exp_avg_dtype: dtype of the first moment.
        exp_avg_sq_dtype: dtype of the second moment.
        stochastic_rounding: whether bfloat16 is rounded stochastically.
    """
    formats = {"exp_avg": EXP_AVG_FORMATS[exp_avg_dtype], "exp_avg_sq": EXP_AVG_SQ_FORMATS[exp_avg_sq_dtype]}
    return {key: rounded_format(format, stochastic_rounding=stochastic_rounding) for key, format in formats.items()}


def check_modes(
    *,
    amsgrad: bool,
    capturable: bool,
    exp_avg_dtype: torch.dtype,
    exp_avg_sq_dtype: torch.dtype,
    numerics: str,
    optimizer: str,
) -> None:
    """Raises for modes that are not supported.

    Raises:
        TypeError: for an argument that is no dtype.
        RuntimeError: for a mode that is not supported; TransformerEngine's FusedAdam refuses most
            of them, too.
        ValueError: for unknown numerics.
    """
    check_dtypes(exp_avg_dtype=exp_avg_dtype, exp_avg_sq_dtype=exp_avg_sq_dtype)
    if amsgrad:
        raise RuntimeError(_NO_AMSGRAD.format(optimizer))
    if capturable:
        raise RuntimeError(
            f"{optimizer} does not support capturable=True. Leave it False: lr tensors and a gradient scaler's "
            "signals are read on the device already, and step() is called outside of CUDA graphs."
        )
    check_average_dtypes(optimizer, exp_avg_dtype=exp_avg_dtype, exp_avg_sq_dtype=exp_avg_sq_dtype)
    check_numerics(numerics, ())


def check_group_options(group: Mapping[str, Any], optimizer: str) -> None:
    """Raises for options of torch's Adam and AdamW that a group turns on without effect here.

    Raises:
        TypeError: names the option and says what to do.
        RuntimeError: for modes that TransformerEngine's FusedAdam refuses too.
    """
    refuse_options(group, optimizer, ADAM_ARGUMENTS)
    if group.get("amsgrad"):
        raise RuntimeError(_NO_AMSGRAD.format(optimizer))


def check_numerics(numerics: str, params: Sequence[torch.Tensor]) -> None:
    """Raises for parameters that cannot be stepped with ``numerics``.

    Raises:
        ValueError: for unknown numerics.
        RuntimeError: for ``"te"`` with parameters on the CPU.
    """
    if numerics not in ("ieee", "te"):
        raise ValueError(f"Invalid numerics: {numerics!r}, it should be 'ieee' or 'te'")
    if numerics == "te" and any(placement.placement_of(param).device.type == "cpu" for param in params):
        raise RuntimeError("numerics='te' reproduces an NVIDIA GPU's fast math; on the CPU use numerics='ieee'")


def check_hyperparameters(group: Mapping[str, Any], *, lr_required: bool = False) -> None:
    """Raises for hyperparameters and step counts that no step can use, in torch's wording.

    Args:
        group: a parameter group.
        lr_required: whether ``lr`` may not be None.

    Raises:
        TypeError: for a value that is no number.
        ValueError: names the hyperparameter and its value.
    """
    check_learning_rate(group["lr"], required=lr_required)
    check_number(group["eps"], "epsilon value", nonnegative=True)
    check_betas(group["betas"])
    check_number(group["weight_decay"], "weight_decay value")
    corrected = group.get("bias_correction", True)
    if not isinstance(corrected, (bool, int, np.bool_)):
        raise TypeError(f"Invalid bias_correction: {shown(corrected)}, it should be a bool")
    checked_step(group.get("step", 0))
