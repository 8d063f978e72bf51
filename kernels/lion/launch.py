"""Launches of the fused Lion kernel."""

from __future__ import annotations

from typing import Any

import torch

from fused_offload.kernels.launch import (
    LaunchKind,
    ScalerSignals,
    compile_and_load,
    raw_pointer,
    shared_arguments,
)

from .kernel import lion_kernel
from .reference import LionScalars, LionState


def _arguments(
    table: torch.Tensor,
    rows: int,
    programs: int,
    state: LionState,
    scalars: LionScalars,
    kind: LaunchKind,
    signals: ScalerSignals,
) -> dict[str, Any]:
    return {
        **shared_arguments(table, rows, programs, state.master_param, scalars.lr, kind, signals),
        "exp_avg_ptr": raw_pointer(state.exp_avg.data),
        "exp_avg_scale_ptr": state.exp_avg.scale,
        "rounding_seed": scalars.rounding_seed,
        "rounding_step": scalars.step,
        "beta1": scalars.beta1,
        "one_minus_beta1": scalars.one_minus_beta1,
        "beta2": scalars.beta2,
        "one_minus_beta2": scalars.one_minus_beta2,
        "weight_decay": scalars.weight_decay,
        "EXP_AVG": state.exp_avg.format.name,
        "INIT_EXP_AVG": state.init_exp_avg,
        "INIT_MASTER": state.init_master,
    }


def lion_step_(
    table: torch.Tensor,
    rows: int,
    programs: int,
    state: LionState,
    scalars: LionScalars,
    kind: LaunchKind,
    signals: ScalerSignals = ScalerSignals(),  # noqa: B008 - immutable
) -> None:
    """Launches one Lion step of all pieces in the table on the current stream.

    `reference.lion_step_` specifies it.

    Args:
        table: ``[>= rows, 6]`` int64 on the parameters' device, see `launch.TABLE_COLUMNS`.
            Parameters behind its addresses are updated in place, gradients are only read.
        rows: number of pieces, at least 1.
        programs: sum of `programs_of` over the pieces.
        state: stored state on the parameters' device or in page-locked host memory, updated in
            place at the rows' state starts.
        scalars: hyperparameters.
        kind: dtypes and most programs.
        signals: a gradient scaler's signals on the parameters' device.
    """
    lion_kernel[kind.grid(programs)](**_arguments(table, rows, programs, state, scalars, kind, signals))


def compile_step(
    table: torch.Tensor, state: LionState, scalars: LionScalars, kind: LaunchKind, signals: ScalerSignals
) -> None:
    """Compiles and loads the kernel that `lion_step_` launches with such arguments.

    Args:
        table: any int64 tensor on the device.
        state: state in the formats to compile for.
        scalars: hyperparameters; only the type and dtype of ``lr`` matter.
        kind: dtypes.
        signals: a gradient scaler's signals; only which of them are None matters.
    """
    compile_and_load(lion_kernel, _arguments(table, 1, 1, state, scalars, kind, signals))
