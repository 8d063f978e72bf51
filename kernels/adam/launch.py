"""Launches of the fused Adam kernel."""

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

from .kernel import adam_kernel
from .reference import AdamScalars, AdamState


def _arguments(
    table: torch.Tensor,
    rows: int,
    programs: int,
    state: AdamState,
    scalars: AdamScalars,
    kind: LaunchKind,
    signals: ScalerSignals,
) -> dict[str, Any]:
    return {
        **shared_arguments(table, rows, programs, state.master_param, scalars.lr, kind, signals),
        "exp_avg_ptr": raw_pointer(state.exp_avg.data),
        "exp_avg_scale_ptr": state.exp_avg.scale,
        "exp_avg_sq_ptr": raw_pointer(state.exp_avg_sq.data),
        "exp_avg_sq_scale_ptr": state.exp_avg_sq.scale,
        "rounding_seed": scalars.rounding_seed,
        "rounding_step": scalars.step,
        "beta1": scalars.beta1,
        "one_minus_beta1": scalars.one_minus_beta1,
        "beta2": scalars.beta2,
        "one_minus_beta2": scalars.one_minus_beta2,
        "eps": scalars.eps,
        "weight_decay": scalars.weight_decay,
        "bias_correction1": scalars.bias_correction1,
        "bias_correction2": scalars.bias_correction2,
        "corrections_ptr": signals.skip_rows,
        "EXP_AVG": state.exp_avg.format.name,
        "EXP_AVG_SQ": state.exp_avg_sq.format.name,
        "INIT_MOMENTS": state.init_moments,
        "INIT_MASTER": state.init_master,
        "ADAM_W": scalars.adam_w_mode,
        "STOCHASTIC": state.exp_avg.format.stochastic or state.exp_avg_sq.format.stochastic,
        "NUMERICS": kind.numerics,
        "LOOP": kind.max_programs is not None,
    }


def adam_step_(
    table: torch.Tensor,
    rows: int,
    programs: int,
    state: AdamState,
    scalars: AdamScalars,
    kind: LaunchKind,
    signals: ScalerSignals = ScalerSignals(),  # noqa: B008 - immutable
) -> None:
    """Launches one Adam step of all pieces in the table on the current stream.

    `reference.adam_step_` specifies it.

    Args:
        table: ``[>= rows, 6]`` int64 on the parameters' device, see `launch.TABLE_COLUMNS`.
            Parameters behind its addresses are updated in place, gradients are only read.
        rows: number of pieces, at least 1.
        programs: sum of `programs_of` over the pieces.
        state: stored state on the parameters' device or in page-locked host memory, updated in
            place at the rows' state starts.
        scalars: hyperparameters.
        kind: dtypes, numerics, and most programs.
        signals: a gradient scaler's signals on the parameters' device.
    """
    adam_kernel[kind.grid(programs)](**_arguments(table, rows, programs, state, scalars, kind, signals))


def compile_step(
    table: torch.Tensor, state: AdamState, scalars: AdamScalars, kind: LaunchKind, signals: ScalerSignals
) -> None:
    """Compiles and loads the kernel that `adam_step_` launches with such arguments.

    Args:
        table: any int64 tensor on the device.
        state: state in the formats to compile for.
        scalars: hyperparameters; only ``adam_w_mode`` and the type and dtype of ``lr`` matter.
        kind: dtypes and numerics.
        signals: a gradient scaler's signals; only which of them are None matters.
    """
    compile_and_load(adam_kernel, _arguments(table, 1, 1, state, scalars, kind, signals))
