"""Launches of the Muon kernels."""

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

from .kernel import momentum_kernel, transpose_kernel, update_kernel
from .newton_schulz import TRANSPOSED_SIZES
from .reference import MuonScalars, MuonState

_SHARED = ("table_ptr", "rows", "blocks", "found_inf_ptr", "ALIGNED", "BLOCK", "num_warps", "enable_fp_fusion")
_TILE = 64


def _momentum_arguments(
    table: torch.Tensor,
    rows: int,
    programs: int,
    state: MuonState,
    scalars: MuonScalars,
    kind: LaunchKind,
    signals: ScalerSignals,
) -> dict[str, Any]:
    shared = shared_arguments(table, rows, programs, None, 0.0, kind, signals)
    momentum, average = state.momentum, scalars.average
    look_ahead = average if scalars.look_ahead is None else scalars.look_ahead
    assert momentum is not None
    return {
        **{name: shared[name] for name in (*_SHARED, "grad_scale_ptr", "GRAD")},
        "momentum_ptr": raw_pointer(momentum.data),
        "weight": average.weight,
        "rest": average.rest,
        "look_ahead_weight": look_ahead.weight,
        "look_ahead_rest": look_ahead.rest,
        "MOMENTUM": momentum.format.name,
        "INIT_MOMENTUM": state.init_momentum,
        "SMALL": average.is_small,
        "NESTEROV": scalars.look_ahead is not None,
        "LOOK_AHEAD_SMALL": look_ahead.is_small,
        "ARRAY": _array_format(scalars),
    }


def _update_arguments(
    table: torch.Tensor,
    rows: int,
    programs: int,
    state: MuonState,
    scalars: MuonScalars,
    kind: LaunchKind,
    signals: ScalerSignals,
) -> dict[str, Any]:
    shared = shared_arguments(table, rows, programs, state.master_param, scalars.lr, kind, signals)
    return {
        **{name: shared[name] for name in (*_SHARED, "master_ptr", "master_scale_ptr", "lr_ptr", "PARAM", "MASTER")},
        "decay": scalars.decay,
        "weight_decay": scalars.weight_decay,
        "INIT_MASTER": state.init_master,
        "ARRAY": _array_format(scalars),
        "ADDS_DECAY": scalars.numerics == "megatron",
    }


def _array_format(scalars: MuonScalars) -> str:
    """Format of the updates between the phases."""
    return "fp32" if scalars.numerics == "megatron" else "bf16"


def momentum_phase_(
    table: torch.Tensor,
    rows: int,
    programs: int,
    state: MuonState,
    scalars: MuonScalars,
    kind: LaunchKind,
    signals: ScalerSignals = ScalerSignals(),  # noqa: B008 - immutable
) -> None:
    """Launches the first phase of all pieces in the table on the current stream.

    `reference.momentum_phase_` specifies it.

    Args:
        table: ``[>= rows, 8]`` int64 on the parameters' device, see `launch.ARRAY_COLUMNS`.
            Gradients behind its addresses are only read, arrays are written.
        rows: number of pieces, at least 1.
        programs: sum of `programs_of` over the pieces.
        state: stored momentum on the parameters' device, updated in place at the rows' state
            starts.
        scalars: hyperparameters.
        kind: dtypes and most programs.
        signals: a gradient scaler's signals on the parameters' device.
    """
    momentum_kernel[kind.grid(programs)](**_momentum_arguments(table, rows, programs, state, scalars, kind, signals))


def update_phase_(
    table: torch.Tensor,
    rows: int,
    programs: int,
    state: MuonState,
    scalars: MuonScalars,
    kind: LaunchKind,
    signals: ScalerSignals = ScalerSignals(),  # noqa: B008 - immutable
) -> None:
    """Launches the second phase of all pieces in the table on the current stream.

    `reference.update_phase_` specifies it.

    Args:
        table: as for `momentum_phase_`. Parameters behind its addresses are updated in place,
            arrays are only read.
        rows: number of pieces, at least 1.
        programs: sum of `programs_of` over the pieces.
        state: stored masters on the parameters' device, updated in place at the rows' state starts.
        scalars: hyperparameters.
        kind: dtypes and most programs.
        signals: a gradient scaler's signals on the parameters' device.
    """
    update_kernel[kind.grid(programs)](**_update_arguments(table, rows, programs, state, scalars, kind, signals))


def _transpose_arguments(source: torch.Tensor, target: torch.Tensor) -> dict[str, Any]:
    rows, columns = source.shape
    return {
        "source_ptr": raw_pointer(source),
        "target_ptr": raw_pointer(target),
        "rows": rows,
        "columns": columns,
        "TILE": _TILE,
        "num_warps": 4,
        "enable_fp_fusion": False,
    }


def copy_transposed(source: torch.Tensor, target: torch.Tensor) -> None:
    """Launches the copy of a matrix into its transposed memory order on the current stream.

    Args:
        source: ``[m, n]`` bfloat16, contiguous; `newton_schulz.TRANSPOSED_SIZES` divides both sizes.
        target: ``[n, m]`` bfloat16, contiguous.
    """
    rows, columns = source.shape
    grid = (-(-columns // _TILE), -(-rows // _TILE))
    transpose_kernel[grid](**_transpose_arguments(source, target))


def compile_momentum_phase(
    table: torch.Tensor, state: MuonState, scalars: MuonScalars, kind: LaunchKind, signals: ScalerSignals
) -> None:
    """Compiles and loads the kernel that `momentum_phase_` launches with such arguments.

    Also the one of `copy_transposed`, and cuBLAS, whose first product allocates memory for the
    stream.

    Args:
        table: any int64 tensor on the device.
        state: state in the formats to compile for.
        scalars: hyperparameters; only the kinds of interpolation matter.
        kind: dtypes.
        signals: a gradient scaler's signals; only which of them are None matters.
    """
    compile_and_load(momentum_kernel, _momentum_arguments(table, 1, 1, state, scalars, kind, signals))
    if table.is_cuda:
        matrix = torch.zeros(TRANSPOSED_SIZES, TRANSPOSED_SIZES, dtype=torch.bfloat16, device=table.device)
        compile_and_load(transpose_kernel, _transpose_arguments(matrix, matrix))
        torch.mm(matrix, matrix)


def compile_update_phase(
    table: torch.Tensor, state: MuonState, scalars: MuonScalars, kind: LaunchKind, signals: ScalerSignals
) -> None:
    """Compiles and loads the kernel that `update_phase_` launches with such arguments.

    Args:
        table: any int64 tensor on the device.
        state: state in the formats to compile for.
        scalars: hyperparameters; only the type and dtype of ``lr`` matter.
        kind: dtypes.
        signals: a gradient scaler's signals; only which of them are None matters.
    """
    compile_and_load(update_kernel, _update_arguments(table, 1, 1, state, scalars, kind, signals))
