"""State of one parameter in a Megatron checkpoint: true fp32 master, unscaled fp32 moments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fused_offload.kernels.formats import FP32, REMAINDER, join_remainder, split_remainder_
from fused_offload.state.convert import check_storable

from .adam import MegatronAdam
from .refusal import SAME_MODEL

_MOMENTS = ("exp_avg", "exp_avg_sq")


def read_values(inner: MegatronAdam, param: torch.Tensor) -> dict[str, torch.Tensor]:
    """A parameter's state under Megatron's keys.

    Args:
        inner: the optimizer.
        param: ``[numel]``, one of its parameters. Missing state is created.

    Returns:
        ``"param"``, ``"exp_avg"`` and ``"exp_avg_sq"``, each ``[numel]`` float32. If the stored
        format is float32 they are live tensors where the state is: saving makes no copy of them in
        host memory, and loading may write to them. Other formats give new tensors in host memory.
        ``"param"`` is the parameter itself if Megatron owns the masters.
    """
    inner.initialize_state(param)
    values = {key: inner.get_unscaled_state(param, key) for key in _MOMENTS}
    if inner.master_weights:
        values["master_param"] = _read_master(inner, param)
    formats = inner.formats_of(param)
    # Some writers keep tensors on the GPU from one save to the next, by their names, and would
    # write those of the first save again. They take tensors in host memory anew.
    values = {
        key: value if formats.get(key, FP32).dtype == torch.float32 else value.cpu() for key, value in values.items()
    }
    values["param"] = values.pop("master_param", param)
    return values


def _read_master(inner: MegatronAdam, param: torch.Tensor) -> torch.Tensor:
    master = inner.get_unscaled_state(param, "master_param")
    if master.dtype != REMAINDER.dtype:
        return master
    return join_remainder(param.detach().to(master.device), master)


def check_values(inner: MegatronAdam, param: torch.Tensor, values: Mapping[str, Any]) -> None:
    """Checks the state of one parameter from a checkpoint; changes nothing.

    Args:
        inner: the optimizer.
        param: ``[numel]``, one of its parameters.
        values: argument of `write_values`.

    Raises:
        ValueError: for a missing value or a wrong shape.
        TypeError: for a value that is not a tensor, or has a dtype that cannot be stored.
    """
    for key in (*_MOMENTS, "param"):
        if key not in values:
            raise ValueError(
                f"loaded state dict lacks {key} of a parameter; it has {', '.join(sorted(map(str, values)))}. "
                "It may be incomplete, or of another optimizer."
            )
        value = values[key]
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"loaded state dict has a {type(value).__name__} as {key}, not a tensor")
        if value.shape != param.shape:
            raise ValueError(
                f"loaded state dict has {key} of shape {tuple(value.shape)}, but this rank's part of the parameter has "
                f"{tuple(param.shape)}; {SAME_MODEL}"
            )
        is_remainder = key == "param" and value.dtype == REMAINDER.dtype
        if is_remainder and not (inner.master_weights and param.dtype == torch.bfloat16):
            raise TypeError(
                f"loaded state dict has 16-bit remainders for a {param.dtype} parameter, but this optimizer needs fp32 "
                "master weights: save it with OptimizerConfig.store_param_remainders=False"
            )
        check_storable(key, REMAINDER if is_remainder else FP32, value, nonnegative=key == "exp_avg_sq")


def write_values(inner: MegatronAdam, param: torch.Tensor, values: Mapping[str, Any]) -> None:
    """Stores the state of one parameter from a checkpoint.

    Args:
        inner: the optimizer.
        param: ``[numel]``, one of its parameters. Updated in place if it is its own master, or the
            upper half of a master that is stored as a remainder.
        values: as returned by `read_values`, on any device, checked by `check_values`.
    """
    for key in _MOMENTS:
        inner.set_scaled_state(param, key, values[key])
    if inner.master_weights and param.dtype == torch.float32:
        # The parameter is its own master, and was loaded with the model. TransformerEngine's
        # FusedAdam saves a second master, which it never updates.
        inner.state[param].storage.unset_master()
    elif values["param"] is not param:
        write_master(inner, param, values["param"])


def write_master(inner: MegatronAdam, param: torch.Tensor, master: torch.Tensor) -> None:
    """Stores the master of a parameter.

    Args:
        inner: the optimizer.
        param: ``[numel]``. Updated in place if it is its own master, or the upper half of a master
            that is stored as a remainder.
        master: ``[numel]`` float32 values, or int16 remainders that belong to ``param``; on any
            device.
    """
    if not inner.master_weights or param.dtype == torch.float32:
        with torch.no_grad():
            param.copy_(master)
        return
    inner.initialize_state(param)
    # The planned format, not the state's values: the reader of a checkpoint may have filled these.
    kept_as_remainder = inner.keeps_remainder(param)
    if master.dtype == REMAINDER.dtype:
        if not kept_as_remainder:
            master = join_remainder(param.detach().cpu(), master.cpu())
    elif kept_as_remainder:
        upper, remainder = torch.empty_like(master, dtype=param.dtype), torch.empty_like(master, dtype=torch.int16)
        split_remainder_(upper, remainder, master.float())
        with torch.no_grad():
            param.copy_(upper)
        master = remainder
    inner.set_scaled_state(param, "master_param", master)


def refresh_megatrons_master(master: torch.Tensor, weights: torch.Tensor) -> None:
    """Replaces values of Megatron's master that do not round to the loaded weights.

    Args:
        master: float32, updated in place.
        weights: the model's parameter or this rank's part of it, shaped like ``master``.
    """
    is_rounding = (master.to(weights.dtype) == weights) | (master.isnan() & weights.isnan())
    with torch.no_grad():
        master.copy_(torch.where(is_rounding, master, weights.float()))
