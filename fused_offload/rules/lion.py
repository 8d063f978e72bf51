"""Lion as an update rule."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from fused_offload.kernels.formats import Format, Stored
from fused_offload.kernels.launch import imported_when_called
from fused_offload.kernels.lion.reference import LionScalars, LionState, lion_scalars, lion_step_

from .arguments import (
    EXP_AVG_FORMATS,
    TORCH_ARGUMENTS,
    check_betas,
    check_learning_rate,
    check_number,
    checked_step,
    readable_lr,
    refuse_options,
    rounded_format,
    standing_average,
)
from .base import MASTER_PARAM, Phase, UpdateRule

_OTHER_ARGUMENTS = {
    "amsgrad": "Lion has no second moment; leave the argument out",
    "bias_correction": "the sign of an average needs no bias correction; leave the argument out",
    "capturable": "lr tensors are read on the device already; leave the argument out",
    "decoupled_weight_decay": "weight decay is always decoupled; leave the argument out",
    "eps": "Lion divides by nothing; leave the argument out",
}
"""Arguments of torch's Adam and AdamW, and their replacements."""


_LAUNCHES = "fused_offload.kernels.lion.launch"
_ALL_KEYS = frozenset({"exp_avg", MASTER_PARAM})


@dataclass(frozen=True, kw_only=True)
class LionRule(UpdateRule):
    """Lion; `kernels.lion.reference.lion_step_` has the formula.

    Attributes:
        exp_avg_dtype: stored dtype of the momentum.
        stochastic_rounding: round a bfloat16 momentum stochastically.
        rounding_seed: seed of that rounding, in [0, 2^31).
    """

    exp_avg_dtype: torch.dtype = torch.float32
    stochastic_rounding: bool = False
    rounding_seed: int = 0

    keys: ClassVar[tuple[str, ...]] = ("exp_avg",)
    settings: ClassVar[tuple[str, ...]] = ("lr", "betas", "weight_decay")
    foreign_settings: ClassVar[frozenset[str]] = frozenset({*TORCH_ARGUMENTS, *_OTHER_ARGUMENTS})
    phases: ClassVar[tuple[Phase, ...]] = (
        Phase(
            _ALL_KEYS,
            _ALL_KEYS,
            lion_step_,
            imported_when_called(_LAUNCHES, "compile_step"),
            imported_when_called(_LAUNCHES, "lion_step_"),
        ),
    )

    @property
    def formats(self) -> dict[str, Format]:
        """Stored format of the momentum."""
        format = EXP_AVG_FORMATS[self.exp_avg_dtype]
        return {"exp_avg": rounded_format(format, stochastic_rounding=self.stochastic_rounding)}

    # -- groups ------------------------------------------------------------------------------------

    def check_group(self, group: Mapping[str, Any], *, lr_required: bool = False) -> None:
        """Raises for hyperparameters that no step can use."""
        check_learning_rate(group["lr"], required=lr_required)
        check_betas(group["betas"])
        check_number(group["weight_decay"], "weight_decay value")
        checked_step(group.get("step", 0))

    def check_new_group(self, group: Mapping[str, Any]) -> None:
        """`check_group`, and raises for options of other optimizers that a group turns on."""
        refuse_options(group, "FusedOffloadLion", _OTHER_ARGUMENTS)
        self.check_group(group)

    def group_warning(self, group: Mapping[str, Any]) -> str | None:
        """Warns of a momentum whose format is too coarse for its decay."""
        return standing_average({"exp_avg": group["betas"][1]}, self.formats)

    # -- arithmetic --------------------------------------------------------------------------------

    def bind(self, stored: Mapping[str, Stored], initial: Set[str]) -> LionState:
        """State under Lion's names."""
        return LionState(
            stored["exp_avg"],
            stored.get(MASTER_PARAM),
            init_exp_avg="exp_avg" in initial,
            init_master=MASTER_PARAM in initial,
        )

    def step_values(self, group: Mapping[str, Any], step: int) -> LionScalars:
        """Hyperparameters in float32."""
        return lion_scalars(
            lr=readable_lr(group["lr"]),
            betas=group["betas"],
            weight_decay=group["weight_decay"],
            step=step,
            rounding_seed=self.rounding_seed,
        )

    def compiled_values(self, values: LionScalars) -> tuple[Any, ...]:
        """Dtype of a learning rate tensor."""
        return (values.lr.dtype if isinstance(values.lr, torch.Tensor) else None,)
