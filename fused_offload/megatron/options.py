"""Arguments of FusedOffloadAdam from Megatron's OptimizerConfig and the environment."""

from __future__ import annotations

import argparse
import dataclasses
import os
from typing import Any

import torch

from fused_offload.config import OffloadConfig
from fused_offload.profiles import units
from fused_offload.rules.arguments import check_switches

_REQUESTED = "_fused_offload_store_param_remainders"
ROUNDING_VARIABLE = "FUSED_OFFLOAD_STOCHASTIC_ROUNDING"
WINDOW_VARIABLE = "FUSED_OFFLOAD_WINDOW_BYTES"
MUON_VARIABLE = "FUSED_OFFLOAD_MUON"
"""Environment variables in the place of arguments of `install`, where no call can be changed."""
_SWITCHES = {
    "stochastic_rounding": (ROUNDING_VARIABLE, "to round stochastically"),
    "muon": (MUON_VARIABLE, "to keep Muon's momentum in host memory"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamOptions:
    """Arguments of `FusedOffloadAdam` that follow from Megatron's configuration.

    Attributes:
        adam_w_mode: decoupled weight decay.
        master_weights: the optimizer owns the master weights; if False, Megatron keeps them on the
            GPU.
        master_weight_dtype: dtype of the masters.
        exp_avg_dtype: stored dtype of the first moment.
        exp_avg_sq_dtype: stored dtype of the second moment.
        use_decoupled_grad: gradients are in ``decoupled_grad``.
        store_param_remainders: masters of bfloat16 parameters are kept as 16-bit remainders.
        numerics: ``"ieee"`` or ``"te"``.
        stochastic_rounding: bfloat16 moments are rounded stochastically.
        offload: share of the state in host memory, and how it moves.
    """

    adam_w_mode: bool = True
    master_weights: bool = False
    master_weight_dtype: torch.dtype = torch.float32
    exp_avg_dtype: torch.dtype = torch.float32
    exp_avg_sq_dtype: torch.dtype = torch.float32
    use_decoupled_grad: bool = False
    store_param_remainders: bool = False
    numerics: str = "ieee"
    stochastic_rounding: bool = False
    offload: OffloadConfig = OffloadConfig()  # noqa: RUF009 - immutable


def remember_remainders(config: Any) -> None:
    """Notes the requested ``store_param_remainders``; Megatron disables it without TE."""
    setattr(config, _REQUESTED, bool(getattr(config, "store_param_remainders", False)))


def restore_remainders(config: Any) -> None:
    """Restores the requested ``store_param_remainders``."""
    config.store_param_remainders = getattr(config, _REQUESTED, config.store_param_remainders)


def takes_hybrid_place(config: Any) -> bool:
    """True if Megatron would build a HybridDeviceOptimizer with Adam in it."""
    return bool(config.optimizer_cpu_offload) and config.optimizer == "adam"


def switch(name: str, given: bool | None) -> bool:
    """A switch of `install`: the argument, or its environment variable where that is None.

    Args:
        name: ``"stochastic_rounding"`` or ``"muon"``.
        given: the argument.

    Raises:
        TypeError: if the argument is not a bool.
        ValueError: if the variable is neither 0 nor 1.
    """
    if given is not None:
        check_switches(**{name: given})
        return given
    variable, what_for = _SWITCHES[name]
    value = os.environ.get(variable, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"Invalid {variable}: {value!r}, it should be '1' {what_for}, or '0'")
    return value == "1"


def window_bytes() -> Any:
    """Default of ``OffloadConfig.window_bytes``: the environment variable, or 0 without it.

    Raises:
        ValueError: for a bad value of the variable.
    """
    try:
        return units.window_bytes(os.environ.get(WINDOW_VARIABLE) or "0")
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"Invalid {WINDOW_VARIABLE}: {error}") from None


def options_of(config: Any, offload: OffloadConfig, numerics: str, *, stochastic_rounding: bool = False) -> AdamOptions:
    """Options for the place of HybridDeviceOptimizer.

    Args:
        config: Megatron's OptimizerConfig.
        offload: chunks, depth and pinning. The fraction is Megatron's
            ``optimizer_offload_fraction``, and its ``pin_cpu_params`` can switch pinning off.
        numerics: ``"ieee"`` or ``"te"``.
        stochastic_rounding: round bfloat16 moments stochastically.
    """
    owns_masters = bool(config.use_precision_aware_optimizer_no_fp8_or_ds_fp8)
    return AdamOptions(
        adam_w_mode=bool(config.decoupled_weight_decay),
        master_weights=owns_masters,
        master_weight_dtype=config.main_params_dtype,
        exp_avg_dtype=config.exp_avg_dtype,
        exp_avg_sq_dtype=config.exp_avg_sq_dtype,
        use_decoupled_grad=owns_masters,
        store_param_remainders=owns_masters and bool(config.store_param_remainders),
        numerics=numerics,
        stochastic_rounding=stochastic_rounding,
        offload=dataclasses.replace(
            offload,
            fraction=float(config.optimizer_offload_fraction),
            pin=offload.pin and bool(getattr(config, "pin_cpu_params", True)),
        ),
    )
