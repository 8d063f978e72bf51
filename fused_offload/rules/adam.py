"""Adam and AdamW as an update rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from fused_offload.kernels.adam.reference import AdamScalars, AdamState, adam_scalars, adam_step_, bias_correction
from fused_offload.kernels.formats import Format, Stored
from fused_offload.kernels.launch import imported_when_called

from .adam_arguments import check_group_options, check_hyperparameters, check_numerics, moment_formats
from .adam_groups import SETTINGS, TORCH_SETTINGS, catch_up_factors, check_saved_group, decay_is_unknown, torch_group
from .arguments import lr_on, readable_lr, standing_average
from .base import MASTER_PARAM, Phase

_LAUNCHES = "fused_offload.kernels.adam.launch"
_KEYS = ("exp_avg", "exp_avg_sq")
_ALL_KEYS = frozenset((*_KEYS, MASTER_PARAM))


@dataclass(frozen=True, kw_only=True)
class AdamRule:
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
    settings: ClassVar[tuple[str, ...]] = SETTINGS
    foreign_settings: ClassVar[frozenset[str]] = frozenset({*TORCH_SETTINGS, "decoupled_weight_decay"})
    counts_steps: ClassVar[bool] = True
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
        """Raises for hyperparameters that no step can use."""
        check_hyperparameters(group, lr_required=lr_required)

    def check_new_group(self, group: Mapping[str, Any]) -> None:
        """`check_group`, and raises for options of torch's AdamW that a group turns on."""
        check_group_options(group, "FusedOffloadAdam")
        check_hyperparameters(group)

    def check_param(self, param: torch.Tensor) -> None:
        """Refuses parameters on the CPU with ``numerics="te"``."""
        check_numerics(self.numerics, (param,))

    def group_warning(self, group: Mapping[str, Any]) -> str | None:
        """Warns of moments whose format is too coarse for their decay."""
        return standing_average(dict(zip(self.keys, group["betas"], strict=True)), self.formats)

    def check_saved_group(self, saved: Mapping[str, Any], index: int) -> None:
        """Refuses AMSGrad, maximisation and the other kind of weight decay."""
        check_saved_group(saved, index, self.adam_w_mode)

    def load_warnings(self, saved_groups: Sequence[Mapping[str, Any]]) -> list[str]:
        """A sentence where the kind of weight decay is not known."""
        if not any(map(decay_is_unknown, saved_groups)):
            return []
        return [
            "loaded state dict does not say whether its weight decay is decoupled (AdamW) or L2 (Adam), as torch's "
            f"before 2.7 do not; it is taken for what this optimizer was built with, adam_w_mode={self.adam_w_mode}"
        ]

    def torch_group(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """A group of torch's AdamW, or Adam."""
        return torch_group(group, adam_w_mode=self.adam_w_mode)

    def catch_up_factors(self, group: Mapping[str, Any], count: int | None) -> dict[str, float]:
        """Factors that keep the bias-corrected moments."""
        return catch_up_factors(group, count)

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

    def values_on(self, values: AdamScalars, device: torch.device) -> AdamScalars:
        """A learning rate tensor of another device is copied."""
        return values._replace(lr=lr_on(values.lr, device))

    def compiled_values(self, values: AdamScalars) -> tuple[Any, ...]:
        """Kind of weight decay, and dtype of a learning rate tensor."""
        return values.adam_w_mode, values.lr.dtype if isinstance(values.lr, torch.Tensor) else None
