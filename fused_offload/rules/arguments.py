"""Checks of the constructor's arguments, and of what groups hold at a step and after a load."""

from __future__ import annotations

import math
import reprlib
import warnings
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch

from fused_offload.kernels.adam.reference import round_fp32
from fused_offload.kernels.formats import BF16, BF16_STOCHASTIC, FP16, FP16_NONZERO, FP32, LOG8, ROOT8, Format
from fused_offload.params.dense import has_data, has_own_memory

MAX_STEP = 2**31
shown = reprlib.repr  # of any value: repr of what is nested too deeply raises
_LARGEST = torch.finfo(torch.float32).max  # what a kernel gets is float32

MASTER_FORMATS = {torch.float32: FP32, torch.float16: FP16}
EXP_AVG_FORMATS = {torch.float32: FP32, torch.bfloat16: BF16, torch.float16: FP16, torch.uint8: ROOT8}
EXP_AVG_SQ_FORMATS = {torch.float32: FP32, torch.bfloat16: BF16, torch.float16: FP16_NONZERO, torch.uint8: LOG8}


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
    if stochastic_rounding:
        formats = {key: BF16_STOCHASTIC if format is BF16 else format for key, format in formats.items()}
    return formats


_NO_AMSGRAD = "FusedOffloadAdam does not support the AMSGrad variant. Leave amsgrad False, or use torch.optim.AdamW."


def check_switches(**switches: Any) -> None:
    """Raises TypeError for an argument that should be a bool and is none."""
    for name, value in switches.items():
        if not isinstance(value, (bool, np.bool_)):
            raise TypeError(f"Invalid {name}: {value!r}, it should be a bool")


def check_dtypes(**dtypes: Any) -> None:
    """Raises TypeError for an argument that should be a dtype and is none."""
    for name, dtype in dtypes.items():
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"Invalid {name}: {dtype!r}, it should be a torch.dtype, such as torch.bfloat16")


def check_master_dtype(master_weight_dtype: torch.dtype, optimizer: str = "FusedOffloadAdam") -> None:
    """Raises for a dtype that master weights cannot have.

    Raises:
        TypeError: for what is no dtype.
        RuntimeError: for a dtype that is not supported.
    """
    check_dtypes(master_weight_dtype=master_weight_dtype)
    if master_weight_dtype not in MASTER_FORMATS:
        raise RuntimeError(f"{optimizer} only supports fp32/fp16 master weights, but got {master_weight_dtype}.")


def check_modes(
    *,
    amsgrad: bool,
    capturable: bool,
    exp_avg_dtype: torch.dtype,
    exp_avg_sq_dtype: torch.dtype,
    numerics: str,
) -> None:
    """Raises for modes that do not exist.

    Raises:
        TypeError: for a dtype that is none.
        RuntimeError: for a mode that TransformerEngine's FusedAdam refuses too, or that is not there yet.
        ValueError: for unknown numerics.
    """
    check_dtypes(exp_avg_dtype=exp_avg_dtype, exp_avg_sq_dtype=exp_avg_sq_dtype)
    if amsgrad:
        raise RuntimeError(_NO_AMSGRAD)
    if capturable:
        raise RuntimeError(
            "FusedOffloadAdam does not support capturable=True. Leave it False: lr tensors and a gradient scaler's "
            "signals are read on the device already, and step() is called outside of CUDA graphs."
        )
    for name, dtype in (("exp_avg_dtype", exp_avg_dtype), ("exp_avg_sq_dtype", exp_avg_sq_dtype)):
        if dtype not in EXP_AVG_FORMATS:
            raise RuntimeError(f"FusedOffloadAdam only supports fp32/fp16/bf16/uint8 {name}, but got {dtype}.")
    check_numerics(numerics, ())


def check_rounding(stochastic_rounding: Any, rounding_seed: Any) -> None:
    """Raises for what is no switch and no seed.

    Raises:
        TypeError: for another type.
        ValueError: for a seed out of range.
    """
    check_switches(stochastic_rounding=stochastic_rounding)
    if isinstance(rounding_seed, bool) or not isinstance(rounding_seed, int):
        raise TypeError(f"Invalid rounding_seed: {rounding_seed!r}, it should be an integer")
    if not 0 <= rounding_seed < 2**31:
        raise ValueError(f"Invalid rounding_seed: {rounding_seed}, it should be in [0, 2**31)")


def warn_if_nothing_rounds(stochastic_rounding: bool, *moment_dtypes: torch.dtype) -> None:
    """One warning where ``stochastic_rounding`` changes nothing."""
    if stochastic_rounding and not {torch.bfloat16, torch.uint8} & set(moment_dtypes):
        warnings.warn(
            "stochastic_rounding=True changes nothing: it is for moments in bfloat16 (exp_avg_dtype, exp_avg_sq_dtype)",
            stacklevel=3,
        )


_HALF_STEP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Half the distance to the next number, of numbers just above a power of two and in units of these: the largest."""
_UNBIASED = {torch.bfloat16: "stochastic_rounding=True", torch.float16: "torch.bfloat16 with stochastic_rounding=True"}


def standing_average(decays: Mapping[str, float], formats: Mapping[str, Format]) -> str | None:
    """Warning for an average that is rounded to the nearest and decays by less than half a step of its dtype.

    Args:
        decays: decay of each average by state key.
        formats: stored format of each state key.

    Returns:
        What is wrong and what to do, or None.
    """
    for key, beta in decays.items():
        format = formats[key]
        if format.stochastic or 1 - beta >= _HALF_STEP.get(format.dtype, 0.0):
            continue
        return (
            f"{key} in {format.dtype} is rounded to the nearest and stands still with a decay of {beta:.6g}: it loses "
            f"{1 - beta:.2g} of its value a step, and what is less than half the distance to the next number, up to "
            f"{_HALF_STEP[format.dtype]:.2g}, is rounded away. Use {_UNBIASED[format.dtype]}, "
            f"{key}_dtype=torch.uint8 or torch.float32, or a smaller beta."
        )
    return None


_INSTEAD = {
    "foreach": "there is one fused kernel for all parameters; leave the argument out",
    "fused": "the update is always one fused kernel; leave the argument out",
    "maximize": "leave the argument out; to maximize, minimize the negated loss",
    "differentiable": "the kernel has no backward; use torch.optim.AdamW to differentiate through steps",
    "decoupled_weight_decay": "use adam_w_mode",
}


def refuse_unknown(arguments: Mapping[str, Any]) -> None:
    """Raises for arguments that do not exist here, those of ``torch.optim.AdamW`` among them.

    Raises:
        TypeError: names the first one and, for torch's, says what to do.
    """
    for name in arguments:
        message = f"FusedOffloadAdam got an unexpected keyword argument {name!r}"
        raise TypeError(f"{message}: {_INSTEAD[name]}" if name in _INSTEAD else message)


def check_group_options(group: Mapping[str, Any]) -> None:
    """Raises for options of ``torch.optim.AdamW`` that a group turns on and that would have no effect here.

    Raises:
        TypeError: names the option and says what to do.
        RuntimeError: for modes that TransformerEngine's FusedAdam refuses too.
    """
    refuse_unknown({name: group[name] for name in _INSTEAD if group.get(name)})
    if group.get("amsgrad"):
        raise RuntimeError(_NO_AMSGRAD)


def check_numerics(numerics: str, params: Sequence[torch.Tensor]) -> None:
    """Raises for parameters that cannot be stepped with ``numerics``.

    Raises:
        ValueError: for unknown numerics.
        RuntimeError: for the bits of an NVIDIA GPU where there is none.
    """
    if numerics not in ("ieee", "te"):
        raise ValueError(f"Invalid numerics: {numerics!r}, it should be 'ieee' or 'te'")
    if numerics == "te" and any(param.device.type == "cpu" for param in params):
        raise RuntimeError("numerics='te' reproduces an NVIDIA GPU's fast math; on the CPU use numerics='ieee'")


def check_hyperparameters(group: Mapping[str, Any], *, lr_required: bool = False) -> None:
    """Raises for hyperparameters and step counts that no step can use, in torch's wording.

    Args:
        group: a parameter group.
        lr_required: whether ``lr`` may not be None; schedulers may set it between construction and the first step.

    Raises:
        TypeError: for what is no number.
        ValueError: names the hyperparameter and its value.
    """
    lr, eps, betas, weight_decay = group["lr"], group["eps"], group["betas"], group["weight_decay"]
    if lr is None:
        if lr_required:
            raise ValueError("Invalid learning rate: None, set group['lr'] before the first step")
    elif isinstance(lr, torch.Tensor):
        if lr.numel() != 1:
            raise ValueError("Tensor lr must be 1-element")
        if lr.is_complex() or not has_data(lr):
            raise ValueError("Invalid learning rate: a tensor lr should hold a real number")
        if lr.device.type == "cpu" and not 0.0 <= lr.item() <= _LARGEST:
            raise ValueError(f"Invalid learning rate: {lr.item()}")
    elif not 0.0 <= _number(lr, "learning rate", "a number or a one-element tensor") <= _LARGEST:
        raise ValueError(f"Invalid learning rate: {lr}")
    if isinstance(eps, torch.Tensor) or not 0.0 <= _number(eps, "epsilon value") <= _LARGEST:
        raise ValueError(f"Invalid epsilon value: {eps}")
    if isinstance(betas, (str, bytes, Mapping)) or not (hasattr(betas, "__len__") and hasattr(betas, "__getitem__")):
        raise TypeError(f"Invalid betas: {shown(betas)}, it should be two numbers")
    if len(betas) != 2:
        raise ValueError(f"Invalid betas: {shown(betas)}, it should be two numbers")
    for index, beta in enumerate(betas):
        if isinstance(beta, torch.Tensor) or not 0.0 <= _number(beta, f"beta parameter at index {index}") < 1.0:
            raise ValueError(f"Invalid beta parameter at index {index}: {beta}")
        if round_fp32(beta) == 1.0:
            raise ValueError(f"Invalid beta parameter at index {index}: {beta}, which is 1 in float32")
    if isinstance(weight_decay, torch.Tensor) or not abs(_number(weight_decay, "weight_decay value")) <= _LARGEST:
        raise ValueError(f"Invalid weight_decay value: {weight_decay}")
    corrected = group.get("bias_correction", True)
    if not isinstance(corrected, (bool, int, np.bool_)):
        raise TypeError(f"Invalid bias_correction: {shown(corrected)}, it should be a bool")
    checked_step(group.get("step", 0))


def checked_step(step: Any) -> int:
    """A step count as an int.

    Args:
        step: a number, or a tensor with one element.

    Raises:
        ValueError: unless it is a whole number from 0 to 2^31.
    """
    if isinstance(step, torch.Tensor) and has_own_memory(step) and not has_data(step):
        raise ValueError("Invalid step: a tensor without data, it should be a whole number from 0 to 2**31")
    try:
        count = int(step)
        whole = not isinstance(step, (str, bytes, bool)) and bool(count == step)
    except Exception:  # of whatever was given instead of a number
        count, whole = -1, False
    if not (whole and 0 <= count <= MAX_STEP):
        raise ValueError(f"Invalid step: {shown(step)}, it should be a whole number from 0 to 2**31")
    return count


def _number(value: Any, what: str, wanted: str = "a number") -> float:
    if not isinstance(value, Real):
        raise TypeError(f"Invalid {what}: {shown(value)}, it should be {wanted}")
    try:
        return float(value)
    except OverflowError:
        return math.inf
