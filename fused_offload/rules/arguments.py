"""Arguments that every rule has: stored dtypes, rounding, hyperparameters, and their checks."""

from __future__ import annotations

import math
import reprlib
import warnings
from collections.abc import Mapping
from numbers import Real
from typing import Any

import numpy as np
import torch

from fused_offload.kernels.formats import BF16, BF16_STOCHASTIC, FP16, FP32, ROOT8, Format
from fused_offload.kernels.reference import round_fp32
from fused_offload.params.dense import has_data, has_own_memory

MAX_STEP = 2**31
MASTER_FORMATS = {torch.float32: FP32, torch.float16: FP16}
EXP_AVG_FORMATS = {torch.float32: FP32, torch.bfloat16: BF16, torch.float16: FP16, torch.uint8: ROOT8}
"""Stored format of an average of gradients, by its dtype."""
_SHORT_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.uint8: "uint8"}

shown = reprlib.repr  # of any value: repr of what is nested too deeply raises
_LARGEST = torch.finfo(torch.float32).max  # kernels take hyperparameters in float32


def check_switches(**switches: Any) -> None:
    """Raises TypeError for an argument that is no bool."""
    for name, value in switches.items():
        if not isinstance(value, (bool, np.bool_)):
            raise TypeError(f"Invalid {name}: {value!r}, it should be a bool")


def check_dtypes(**dtypes: Any) -> None:
    """Raises TypeError for an argument that is no dtype."""
    for name, dtype in dtypes.items():
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"Invalid {name}: {dtype!r}, it should be a torch.dtype, such as torch.bfloat16")


def check_stored_dtypes(
    optimizer: str, formats: Mapping[torch.dtype, Format], what: str | None = None, **dtypes: Any
) -> None:
    """Raises for a dtype that state cannot be stored in.

    Args:
        optimizer: name of the optimizer's class, for the error.
        formats: stored formats by dtype.
        what: name of the state in the error; that of the argument if None.
        **dtypes: dtypes by name of the argument.

    Raises:
        TypeError: for an argument that is no dtype.
        RuntimeError: for a dtype that is not supported.
    """
    check_dtypes(**dtypes)
    for name, dtype in dtypes.items():
        if dtype not in formats:
            supported = "/".join(short for stored, short in _SHORT_NAMES.items() if stored in formats)
            raise RuntimeError(f"{optimizer} only supports {supported} {what or name}, but got {dtype}.")


def rounded_format(format: Format, *, stochastic_rounding: bool) -> Format:
    """Stored format of an average, where bfloat16 may be rounded stochastically."""
    return BF16_STOCHASTIC if stochastic_rounding and format is BF16 else format


def check_rounding(stochastic_rounding: Any, rounding_seed: Any) -> None:
    """Raises for invalid arguments of stochastic rounding.

    Raises:
        TypeError: for another type.
        ValueError: for a seed out of range.
    """
    check_switches(stochastic_rounding=stochastic_rounding)
    if isinstance(rounding_seed, bool) or not isinstance(rounding_seed, int):
        raise TypeError(f"Invalid rounding_seed: {rounding_seed!r}, it should be an integer")
    if not 0 <= rounding_seed < 2**31:
        raise ValueError(f"Invalid rounding_seed: {rounding_seed}, it should be in [0, 2**31)")


def shown_rounding(stochastic_rounding: bool, rounding_seed: int) -> dict[str, str]:
    """Line on stochastic rounding for the ``repr`` of an optimizer."""
    return {"stochastic_rounding": f"seed {rounding_seed}"} if stochastic_rounding else {}


def warn_if_nothing_rounds(stochastic_rounding: bool, **dtypes: torch.dtype) -> None:
    """Warns, on behalf of the constructor's caller, where ``stochastic_rounding`` changes nothing.

    Args:
        stochastic_rounding: the constructor's argument.
        **dtypes: dtypes of the averages by name of the argument, checked already.
    """
    formats = [rounded_format(EXP_AVG_FORMATS[dtype], stochastic_rounding=True) for dtype in dtypes.values()]
    if stochastic_rounding and not any(format.stochastic for format in formats):
        warnings.warn(
            f"stochastic_rounding=True changes nothing: it is for moments in bfloat16 ({', '.join(dtypes)})",
            stacklevel=3,
        )


def standing_average(decays: Mapping[str, float], formats: Mapping[str, Format]) -> str | None:
    """Warning for an average that rounding to the nearest keeps from decaying.

    It stands still where it decays by less than half a step of its dtype.

    Args:
        decays: decay of each average by state key.
        formats: stored format of each state key.

    Returns:
        What is wrong and what to do, or None.
    """
    for key, beta in decays.items():
        format = formats[key]
        if 1 - beta >= format.half_step:
            continue
        can_round = rounded_format(format, stochastic_rounding=True).stochastic
        unbiased = "stochastic_rounding=True" if can_round else "torch.bfloat16 with stochastic_rounding=True"
        return (
            f"{key} in {format.dtype} is rounded to the nearest and stands still with a decay of {beta:.6g}: it loses "
            f"{1 - beta:.2g} of its value a step, and what is less than half the distance to the next number, up to "
            f"{format.half_step:.2g}, is rounded away. Use {unbiased}, "
            f"{key}_dtype=torch.uint8 or torch.float32, or a smaller beta."
        )
    return None


TORCH_ARGUMENTS = {
    "foreach": "there is one fused kernel for all parameters; leave the argument out",
    "fused": "the update is always one fused kernel; leave the argument out",
    "maximize": "leave the argument out; to maximize, minimize the negated loss",
    "differentiable": "the kernel has no backward; use an optimizer of torch.optim to differentiate through steps",
}
"""Arguments of torch's optimizers that no rule has, and their replacements."""


def refuse_unknown(arguments: Mapping[str, Any], optimizer: str, instead: Mapping[str, str]) -> None:
    """Raises for arguments that the constructor does not have, such as those of torch's optimizers.

    Args:
        arguments: keyword arguments beyond the constructor's own.
        optimizer: name of the optimizer's class, for the error.
        instead: advice by name, for arguments of related optimizers.

    Raises:
        TypeError: names the first one and, if it is known, says what to do.
    """
    known = {**TORCH_ARGUMENTS, **instead}
    for name in arguments:
        message = f"{optimizer} got an unexpected keyword argument {name!r}"
        raise TypeError(f"{message}: {known[name]}" if name in known else message)


def refuse_options(group: Mapping[str, Any], optimizer: str, instead: Mapping[str, str]) -> None:
    """Raises for options of other optimizers that a group turns on without effect here.

    Args:
        group: a parameter group.
        optimizer: name of the optimizer's class, for the error.
        instead: advice by name, for options of related optimizers.

    Raises:
        TypeError: names the option and says what to do.
    """
    refuse_unknown({name: group[name] for name in (*TORCH_ARGUMENTS, *instead) if group.get(name)}, optimizer, instead)


def check_learning_rate(lr: Any, *, required: bool) -> None:
    """Raises for a learning rate that no step can use, in torch's wording.

    Args:
        lr: a number or a one-element tensor.
        required: whether None is refused; schedulers may set it between construction and the first
            step.

    Raises:
        TypeError: for a value that is no number.
        ValueError: for a value out of range, and for None.
    """
    if lr is None:
        if required:
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


def check_betas(betas: Any) -> None:
    """Raises for decays other than two numbers in [0, 1) that are below 1 in float32 too.

    Raises:
        TypeError: for anything but two numbers.
        ValueError: names the decay and its value.
    """
    if isinstance(betas, (str, bytes, Mapping)) or not (hasattr(betas, "__len__") and hasattr(betas, "__getitem__")):
        raise TypeError(f"Invalid betas: {shown(betas)}, it should be two numbers")
    if len(betas) != 2:
        raise ValueError(f"Invalid betas: {shown(betas)}, it should be two numbers")
    for index, beta in enumerate(betas):
        if isinstance(beta, torch.Tensor) or not 0.0 <= _number(beta, f"beta parameter at index {index}") < 1.0:
            raise ValueError(f"Invalid beta parameter at index {index}: {beta}")
        if round_fp32(beta) == 1.0:
            raise ValueError(f"Invalid beta parameter at index {index}: {beta}, which is 1 in float32")


def check_number(value: Any, what: str, *, nonnegative: bool = False) -> None:
    """Raises for a hyperparameter that is no finite float32.

    Args:
        value: the hyperparameter; no tensor.
        what: its name in the error.
        nonnegative: whether values below 0 are refused.

    Raises:
        TypeError: for a value that is no number.
        ValueError: for a value out of range.
    """
    lowest = 0.0 if nonnegative else -_LARGEST
    if isinstance(value, torch.Tensor) or not lowest <= _number(value, what) <= _LARGEST:
        raise ValueError(f"Invalid {what}: {value}")


def checked_step(step: Any, where: str = "") -> int:
    """A step count as an int.

    Args:
        step: a number, or a tensor with one element.
        where: its place, such as " in group 1", for the error.

    Raises:
        ValueError: unless it is a whole number from 0 to 2^31.
    """
    if isinstance(step, torch.Tensor) and has_own_memory(step) and not has_data(step):
        raise ValueError(f"Invalid step{where}: a tensor without data, it should be a whole number from 0 to 2**31")
    try:
        count = int(step)
        whole = not isinstance(step, (str, bytes, bool)) and bool(count == step)
    except Exception:  # any value may stand in the place of a number
        count, whole = -1, False
    if not (whole and 0 <= count <= MAX_STEP):
        raise ValueError(f"Invalid step{where}: {shown(step)}, it should be a whole number from 0 to 2**31")
    return count


def _number(value: Any, what: str, wanted: str = "a number") -> float:
    if not isinstance(value, Real):
        raise TypeError(f"Invalid {what}: {shown(value)}, it should be {wanted}")
    try:
        return float(value)
    except OverflowError:
        return math.inf


def readable_lr(lr: float | torch.Tensor) -> float | torch.Tensor:
    """A learning rate as a kernel takes it: tensors on the CPU become numbers."""
    return lr.item() if isinstance(lr, torch.Tensor) and lr.device.type == "cpu" else lr
