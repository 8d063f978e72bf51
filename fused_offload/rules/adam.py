"""Adam and AdamW as an update rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar

import numpy as np
import torch

from fused_offload.kernels.adam.reference import AdamScalars, AdamState, adam_scalars, adam_step_, bias_correction
from fused_offload.kernels.formats import BF16, FP16_NONZERO, FP32, LOG8, Format, Stored
from fused_offload.kernels.launch import imported_when_called
from fused_offload.params import placement

from .arguments import (
    EXP_AVG_FORMATS,
    check_betas,
    check_dtypes,
    check_learning_rate,
    check_number,
    check_stored_dtypes,
    checked_step,
    readable_lr,
    refuse_options,
    rounded_format,
    shown,
    standing_average,
)
from .base import MASTER_PARAM, NOT_SUPPORTED, Phase, UpdateRule

EXP_AVG_SQ_FORMATS = {torch.float32: FP32, torch.bfloat16: BF16, torch.float16: FP16_NONZERO, torch.uint8: LOG8}
"""Stored format of an average of squares, by its dtype."""

ADAM_ARGUMENTS = {"decoupled_weight_decay": "use adam_w_mode"}
"""Arguments that only torch's Adam and AdamW have, and their replacements."""

_TORCH_SETTINGS: dict[str, Any] = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
}
"""Settings of torch's Adam and AdamW that have no meaning here, and their defaults;
``decoupled_weight_decay`` is another."""

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
    check_stored_dtypes(optimizer, EXP_AVG_FORMATS, exp_avg_dtype=exp_avg_dtype, exp_avg_sq_dtype=exp_avg_sq_dtype)
    check_numerics(numerics, ())


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


_LAUNCHES = "fused_offload.kernels.adam.launch"
_KEYS = ("exp_avg", "exp_avg_sq")
_ALL_KEYS = frozenset((*_KEYS, MASTER_PARAM))


@dataclass(frozen=True, kw_only=True)
class AdamRule(UpdateRule):
    """Adam and AdamW; `kernels.adam.reference.adam_step_` has the formula.

    Attributes:
        adam_w_mode: decoupled weight decay (AdamW) if true, else L2 (Adam).
        bias_correction: default of groups without the key.
        numerics: ``"ieee"`` or ``"te"``.
        exp_avg_dtype: stored dtype of the first moment.
        exp_avg_sq_dtype: stored dtype of the second moment.
        stochastic_rounding: round bfloat16 moments stochastically.
        rounding_seed: seed of that rounding, in [0, 2^31).
    """

    adam_w_mode: bool = True
    bias_correction: bool = True
    numerics: str = "ieee"
    exp_avg_dtype: torch.dtype = torch.float32
    exp_avg_sq_dtype: torch.dtype = torch.float32
    stochastic_rounding: bool = False
    rounding_seed: int = 0

    keys: ClassVar[tuple[str, ...]] = _KEYS
    nonnegative: ClassVar[frozenset[str]] = frozenset({"exp_avg_sq"})
    settings: ClassVar[tuple[str, ...]] = ("lr", "betas", "eps", "weight_decay", "bias_correction")
    foreign_settings: ClassVar[frozenset[str]] = frozenset({*_TORCH_SETTINGS, "decoupled_weight_decay"})
    phases: ClassVar[tuple[Phase, ...]] = (
        Phase(
            _ALL_KEYS,
            _ALL_KEYS,
            adam_step_,
            imported_when_called(_LAUNCHES, "compile_step"),
            imported_when_called(_LAUNCHES, "adam_step_"),
        ),
    )

    @property
    def formats(self) -> dict[str, Format]:
        """Stored format of both moments."""
        return moment_formats(self.exp_avg_dtype, self.exp_avg_sq_dtype, stochastic_rounding=self.stochastic_rounding)

    # -- groups ------------------------------------------------------------------------------------

    def check_group(self, group: Mapping[str, Any], *, lr_required: bool = False) -> None:
        """Raises for hyperparameters that no step can use, in torch's wording."""
        check_learning_rate(group["lr"], required=lr_required)
        check_number(group["eps"], "epsilon value", nonnegative=True)
        check_betas(group["betas"])
        check_number(group["weight_decay"], "weight_decay value")
        corrected = group.get("bias_correction", True)
        if not isinstance(corrected, (bool, int, np.bool_)):
            raise TypeError(f"Invalid bias_correction: {shown(corrected)}, it should be a bool")
        checked_step(group.get("step", 0))

    def check_new_group(self, group: Mapping[str, Any]) -> None:
        """`check_group`, and raises for options of torch's AdamW that a group turns on."""
        refuse_options(group, "FusedOffloadAdam", ADAM_ARGUMENTS)
        if group.get("amsgrad"):
            raise RuntimeError(_NO_AMSGRAD.format("FusedOffloadAdam"))
        self.check_group(group)

    def check_param(self, param: torch.Tensor) -> None:
        """Refuses parameters on the CPU with ``numerics="te"``."""
        check_numerics(self.numerics, (param,))

    def group_warning(self, group: Mapping[str, Any]) -> str | None:
        """Warns of moments whose format is too coarse for their decay."""
        return standing_average(dict(zip(self.keys, group["betas"], strict=True)), self.formats)

    def check_saved_group(self, saved: Mapping[str, Any], index: int) -> None:
        """Refuses AMSGrad, maximisation and the other kind of weight decay."""
        for key in ("amsgrad", "maximize"):
            if _is_on(saved, key, index):
                raise ValueError(NOT_SUPPORTED.format(key, index))
        if saved.get("decoupled_weight_decay") is None or not isinstance(saved.get("weight_decay"), Real):
            return  # check_group says what a weight decay should be
        decoupled = _is_on(saved, "decoupled_weight_decay", index)
        if decoupled != self.adam_w_mode and saved["weight_decay"]:
            raise ValueError(
                f"loaded state dict has decoupled_weight_decay={decoupled} in group {index}, but this optimizer has "
                f"adam_w_mode={self.adam_w_mode}; build it with adam_w_mode={decoupled}"
            )

    def load_warnings(self, saved_groups: Sequence[Mapping[str, Any]]) -> list[str]:
        """A sentence where the kind of weight decay is not known."""
        if not any(map(_decay_is_unknown, saved_groups)):
            return []
        return [
            "loaded state dict does not say whether its weight decay is decoupled (AdamW) or L2 (Adam), as torch's "
            f"before 2.7 do not; it is taken for what this optimizer was built with, adam_w_mode={self.adam_w_mode}"
        ]

    def torch_group(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """A group of torch's AdamW, or Adam."""
        kept = {key: value for key, value in group.items() if key not in ("step", "bias_correction")}
        return {**kept, **_TORCH_SETTINGS, "decoupled_weight_decay": self.adam_w_mode}

    def catch_up_factors(self, group: Mapping[str, Any], count: int | None) -> dict[str, float]:
        """Factors that keep the bias-corrected moments."""
        step = group.get("step", 0)
        if not count or count >= step or not group.get("bias_correction", True):
            return {}
        return {
            key: bias_correction(beta, step) / bias_correction(beta, count)
            for key, beta in zip(self.keys, group["betas"], strict=True)
        }

    # -- arithmetic --------------------------------------------------------------------------------

    def bind(self, stored: Mapping[str, Stored], initial: Set[str]) -> AdamState:
        """State under Adam's names."""
        return AdamState(
            stored["exp_avg"],
            stored["exp_avg_sq"],
            stored.get(MASTER_PARAM),
            init_moments="exp_avg" in initial,
            init_master=MASTER_PARAM in initial,
        )

    def _is_corrected(self, group: Mapping[str, Any]) -> bool:
        return bool(group.get("bias_correction", self.bias_correction))

    def step_values(self, group: Mapping[str, Any], step: int) -> AdamScalars:
        """Hyperparameters in float32."""
        return adam_scalars(
            lr=readable_lr(group["lr"]),
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            step=step,
            bias_corrected=self._is_corrected(group),
            adam_w_mode=self.adam_w_mode,
            rounding_seed=self.rounding_seed,
        )

    def skip_rows(self, group: Mapping[str, Any], step: int, pending: int) -> list[tuple[float, ...]]:
        """Both bias corrections."""
        if not self._is_corrected(group):
            return [(1.0, 1.0)] * (pending + 1)
        beta1, beta2 = group["betas"]
        steps = [max(1, step - skipped) for skipped in range(pending + 1)]
        return [(bias_correction(beta1, count), bias_correction(beta2, count)) for count in steps]

    def compiled_values(self, values: AdamScalars) -> tuple[Any, ...]:
        """Kind of weight decay, and dtype of a learning rate tensor."""
        return values.adam_w_mode, values.lr.dtype if isinstance(values.lr, torch.Tensor) else None


def _is_on(saved: Mapping[str, Any], key: str, index: int) -> bool:
    value = saved.get(key)
    if value is not None and not isinstance(value, (bool, int, np.bool_)):
        raise TypeError(f"loaded state dict has {key}={value!r} in group {index}, it should be a bool")
    return bool(value)


def _decay_is_unknown(saved: Mapping[str, Any]) -> bool:
    """True if a group of torch's Adam or AdamW has a weight decay of unknown kind."""
    is_torchs = "maximize" in saved and "bias_correction" not in saved
    return is_torchs and saved.get("decoupled_weight_decay") is None and bool(saved.get("weight_decay"))
