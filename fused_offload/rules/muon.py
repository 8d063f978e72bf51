"""Muon as an update rule of two phases, with Newton-Schulz between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from numbers import Integral
from typing import Any, ClassVar

import torch

from fused_offload.kernels.formats import BF16, FP32, Format, Stored
from fused_offload.kernels.launch import imported_when_called
from fused_offload.kernels.muon.newton_schulz import newton_schulz_parts, scratch_bytes
from fused_offload.kernels.muon.reference import (
    ADJUSTMENTS,
    MuonScalars,
    MuonState,
    NewtonSchulz,
    momentum_phase_,
    muon_scalars,
    update_phase_,
    update_scale,
)
from fused_offload.params.dtensors import is_distributed, sharding_of

from .arguments import (
    TORCH_ARGUMENTS,
    check_learning_rate,
    check_number,
    check_switches,
    checked_step,
    readable_lr,
    refuse_options,
    shown,
)
from .base import MASTER_PARAM, Phase, UpdateRule, WholeOperation

MUON_ARGUMENTS = {
    "amsgrad": "Muon has no second moment; leave the argument out",
    "betas": "Muon has one momentum; give momentum=...",
    "bias_correction": "the update is orthogonalised, so its scale does not matter; leave the argument out",
    "capturable": "lr tensors are read on the device already; leave the argument out",
    "decoupled_weight_decay": "weight decay is always decoupled; leave the argument out",
    "exp_avg_dtype": "the average of gradients is called momentum here; give momentum_dtype=...",
    "rounding_seed": "nothing is rounded stochastically; leave the argument out",
    "stochastic_rounding": (
        "a momentum of 0.95 moves by a twentieth in every step and does not stand still when it is rounded to the "
        "nearest; leave the argument out"
    ),
}
"""Arguments of other optimizers, and their replacements."""

MOMENTUM_FORMATS = {torch.float32: FP32, torch.bfloat16: BF16}
"""Stored format of the momentum, by its dtype."""

_MOMENTUM = "momentum_buffer"
_MOST_STEPS = 100  # exclusive, as in torch


def _parts(
    param: torch.Tensor, array: torch.Tensor, scratch: torch.Tensor, values: MuonScalars
) -> Sequence[Callable[[], Any]]:
    assert values.newton_schulz is not None
    return newton_schulz_parts(array, scratch, values.newton_schulz)


_LAUNCHES = "fused_offload.kernels.muon.launch"
_FIRST, _SECOND = frozenset({_MOMENTUM}), frozenset({MASTER_PARAM})


@dataclass(frozen=True, kw_only=True)
class MuonRule(UpdateRule):
    """Muon; `kernels.muon.reference` has the formulas of both phases.

    Attributes:
        momentum_dtype: stored dtype of the momentum.
    """

    momentum_dtype: torch.dtype = torch.float32

    keys: ClassVar[tuple[str, ...]] = (_MOMENTUM,)
    settings: ClassVar[tuple[str, ...]] = (
        "lr",
        "weight_decay",
        "momentum",
        "nesterov",
        "ns_coefficients",
        "eps",
        "ns_steps",
        "adjust_lr_fn",
    )
    foreign_settings: ClassVar[frozenset[str]] = frozenset({*TORCH_ARGUMENTS, *MUON_ARGUMENTS})
    counts_steps: ClassVar[bool] = False
    phases: ClassVar[tuple[Phase, ...]] = (
        Phase(
            _FIRST,
            _FIRST,
            momentum_phase_,
            imported_when_called(_LAUNCHES, "compile_momentum_phase"),
            imported_when_called(_LAUNCHES, "momentum_phase_"),
            WholeOperation(torch.bfloat16, scratch_bytes, _parts, update_scale),
        ),
        Phase(
            _SECOND,
            _SECOND,
            update_phase_,
            imported_when_called(_LAUNCHES, "compile_update_phase"),
            imported_when_called(_LAUNCHES, "update_phase_"),
        ),
    )

    @property
    def formats(self) -> dict[str, Format]:
        """Stored format of the momentum."""
        return {_MOMENTUM: MOMENTUM_FORMATS[self.momentum_dtype]}

    # -- groups ------------------------------------------------------------------------------------

    def check_group(self, group: Mapping[str, Any], *, lr_required: bool = False) -> None:
        """Raises for hyperparameters that no step can use."""
        check_learning_rate(group["lr"], required=lr_required)
        check_number(group["weight_decay"], "weight_decay value", nonnegative=True)
        check_number(group["momentum"], "momentum value", nonnegative=True)
        check_switches(nesterov=group["nesterov"])
        _check_newton_schulz(group)
        if group["adjust_lr_fn"] not in ADJUSTMENTS:
            raise ValueError(
                f"Invalid adjust_lr_fn: {shown(group['adjust_lr_fn'])}, it should be one of "
                f"{', '.join(map(repr, ADJUSTMENTS))}"
            )
        checked_step(group.get("step", 0))

    def check_new_group(self, group: Mapping[str, Any]) -> None:
        """`check_group`, and raises for options of other optimizers that a group turns on."""
        refuse_options(group, "FusedOffloadMuon", MUON_ARGUMENTS)
        if not group.get("use_muon", True):
            raise ValueError(
                "got a group with use_muon=False, but FusedOffloadMuon orthogonalises all of its groups. Give this one "
                "to a FusedOffloadAdam, which shares the staging memory."
            )
        self.check_group(group)

    def check_param(self, param: torch.Tensor) -> None:
        """Refuses all but whole matrices.

        Raises:
            ValueError: for another parameter; the message says which optimizer to use.
        """
        if param.ndim != 2:
            raise ValueError(
                f"Muon only supports 2D parameters whereas we found a parameter with size: {tuple(param.shape)}. Give "
                "it to a FusedOffloadAdam, which shares the staging memory. Do the same with embeddings and the output "
                "layer, which are 2D, but not matrices of a hidden layer."
            )
        if is_distributed(param) and not all(placement.is_replicate() for placement in param._spec.placements):  # type: ignore[attr-defined]
            raise ValueError(
                f"Muon orthogonalises whole matrices, but got a DTensor of which each rank has a part "
                f"({sharding_of(param)}). Use FusedOffloadAdam for sharded parameters, or keep these replicated."
            )

    def group_warning(self, group: Mapping[str, Any]) -> str | None:
        """Warns of a momentum whose format is too coarse for its decay."""
        [format] = self.formats.values()
        if 1 - group["momentum"] >= format.half_step:
            return None
        return (
            f"{_MOMENTUM} in {format.dtype} is rounded to the nearest and stands still with a momentum of "
            f"{group['momentum']:.6g}. Use momentum_dtype=torch.float32, or a smaller momentum."
        )

    def check_saved_group(self, saved: Mapping[str, Any], index: int) -> None:
        """Refuses maximisation, groups without Muon, and SGD, whose momentum is a sum of gradients."""
        if "dampening" in saved:
            raise ValueError(
                f"loaded state dict is of torch.optim.SGD (it has dampening in group {index}): its momentum_buffer is "
                "a sum of gradients, not their average. Load the parameters alone, and start with an empty momentum."
            )
        if not saved.get("use_muon", True):
            raise ValueError(
                f"loaded state dict has use_muon=False in group {index}; load that group into a FusedOffloadAdam"
            )
        super().check_saved_group(saved, index)

    # -- arithmetic --------------------------------------------------------------------------------

    def bind(self, stored: Mapping[str, Stored], initial: Set[str]) -> MuonState:
        """State of either phase under Muon's names."""
        return MuonState(
            stored.get(_MOMENTUM),
            stored.get(MASTER_PARAM),
            init_momentum=_MOMENTUM in initial,
            init_master=MASTER_PARAM in initial,
        )

    def step_values(self, group: Mapping[str, Any], step: int) -> MuonScalars:
        """Hyperparameters, rounded as torch does."""
        a, b, c = (float(value) for value in group["ns_coefficients"])
        return muon_scalars(
            lr=readable_lr(group["lr"]),
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            nesterov=bool(group["nesterov"]),
            newton_schulz=NewtonSchulz((a, b, c), float(group["eps"]), int(group["ns_steps"])),
            adjust_lr_fn=group["adjust_lr_fn"],
            step=step,
        )

    def compiled_values(self, values: MuonScalars) -> tuple[Any, ...]:
        """Dtype of a learning rate tensor, kinds of interpolation, settings of Newton-Schulz."""
        look_ahead = values.look_ahead
        return (
            values.lr.dtype if isinstance(values.lr, torch.Tensor) else None,
            values.average.is_small,
            None if look_ahead is None else look_ahead.is_small,
            values.newton_schulz,
        )


def _check_newton_schulz(group: Mapping[str, Any]) -> None:
    coefficients, steps = group["ns_coefficients"], group["ns_steps"]
    if not isinstance(coefficients, (tuple, list)) or len(coefficients) != 3:
        raise ValueError(f"Invalid ns_coefficients: {shown(coefficients)}, it should be three numbers")
    for index, value in enumerate(coefficients):
        check_number(value, f"ns_coefficients value at index {index}")
    check_number(group["eps"], "eps value", nonnegative=True)
    if isinstance(steps, bool) or not isinstance(steps, Integral) or not 0 <= int(steps) < _MOST_STEPS:
        raise ValueError(f"Invalid ns_steps: {shown(steps)}, it should be a whole number from 0 to {_MOST_STEPS - 1}")
