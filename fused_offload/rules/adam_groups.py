"""Parameter groups of Adam as checkpoints of TransformerEngine and torch hold them."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

import numpy as np

from fused_offload.kernels.adam.reference import bias_correction

SETTINGS = ("lr", "betas", "eps", "weight_decay", "bias_correction")
TORCH_SETTINGS: dict[str, Any] = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
}
"""Settings of torch's Adam and AdamW that have no meaning here, and their defaults;
``decoupled_weight_decay`` is another."""


def torch_group(group: Mapping[str, Any], *, adam_w_mode: bool) -> dict[str, Any]:
    """A group in the layout of torch's Adam and AdamW."""
    kept = {key: value for key, value in group.items() if key not in ("step", "bias_correction")}
    return {**kept, **TORCH_SETTINGS, "decoupled_weight_decay": adam_w_mode}


def check_saved_group(saved: Mapping[str, Any], index: int, adam_w_mode: bool) -> None:
    """Raises ValueError for a saved group that was trained in a mode that is refused here."""
    for key in ("amsgrad", "maximize"):
        if _is_on(saved, key, index):
            raise ValueError(f"loaded state dict was trained with {key}=True in group {index}; it is not supported")
    if saved.get("decoupled_weight_decay") is None or not isinstance(saved.get("weight_decay"), Real):
        return  # check_hyperparameters says what a weight decay should be
    decoupled = _is_on(saved, "decoupled_weight_decay", index)
    if decoupled != adam_w_mode and saved["weight_decay"]:
        raise ValueError(
            f"loaded state dict has decoupled_weight_decay={decoupled} in group {index}, but this optimizer has "
            f"adam_w_mode={adam_w_mode}; build it with adam_w_mode={decoupled}"
        )


def _is_on(saved: Mapping[str, Any], key: str, index: int) -> bool:
    value = saved.get(key)
    if value is not None and not isinstance(value, (bool, int, np.bool_)):
        raise TypeError(f"loaded state dict has {key}={value!r} in group {index}, it should be a bool")
    return bool(value)


def decay_is_unknown(saved: Mapping[str, Any]) -> bool:
    """True if a group of torch's Adam or AdamW has a weight decay of unknown kind."""
    is_torchs = "maximize" in saved and "bias_correction" not in saved
    return is_torchs and saved.get("decoupled_weight_decay") is None and bool(saved.get("weight_decay"))


def catch_up_factors(group: Mapping[str, Any], count: int | None) -> dict[str, float]:
    """Factors that keep the bias-corrected moments of a parameter that had only ``count`` steps."""
    step = group.get("step", 0)
    if not count or count >= step or not group.get("bias_correction", True):
        return {}
    return {
        key: bias_correction(beta, step) / bias_correction(beta, count)
        for key, beta in zip(("exp_avg", "exp_avg_sq"), group["betas"], strict=True)
    }
