"""The Muon kernels: a transposing copy, and one for each phase.

A launch of the latter serves any number of parameters of one chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fused_offload.kernels.formats_triton import (
    bf16_to_fp32,
    fp32_to_bf16,
    load_fp32,
    load_params,
    load_state,
    store_fp32,
    store_params,
    store_state,
)
from fused_offload.kernels.launch_triton import piece_of_program, typed_pointer

COLUMNS = tl.constexpr(8)
"""Columns of the address table, `launch.ARRAY_COLUMNS`."""


@triton.jit
def _lerp(start, end, weight, rest, SMALL: tl.constexpr):
    """Torch's ``lerp``: computed from the start for a small weight, else from the end."""
    if SMALL:
        return tl.fma(end - start, weight, start)
    else:
        # Not the negated difference: Triton 3.6 computes 0 - x, which gives +0 for +0.
        return tl.fma((end - start) * -1.0, rest, end)


@triton.jit
def _momentum_block(
    grad_ptr,
    momentum_ptr,
    array_ptr,
    start,  # int64, first element of this block in the state
    numel,  # elements of this block that exist
    weight,
    rest,
    look_ahead_weight,
    look_ahead_rest,
    grad_scale,
    skip,  # bool, keep the momentum
    GRAD: tl.constexpr,
    MOMENTUM: tl.constexpr,
    INIT_MOMENTUM: tl.constexpr,
    SMALL: tl.constexpr,
    NESTEROV: tl.constexpr,
    LOOK_AHEAD_SMALL: tl.constexpr,
    SCALED_GRAD: tl.constexpr,
    CAN_SKIP: tl.constexpr,
    ARRAY: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    lane = tl.arange(0, BLOCK)
    mask = lane < numel
    offsets = start + lane
    zero = tl.zeros((BLOCK,), tl.float32)

    g = load_fp32(grad_ptr, lane, mask, GRAD, MASKED)
    if SCALED_GRAD:
        g = tl.div_rn(g, zero + grad_scale)
    if INIT_MOMENTUM:
        m = zero
    else:
        m = load_state(momentum_ptr, None, start, numel, offsets, mask, MOMENTUM, MASKED, BLOCK)
    m_new = _lerp(m, g, zero + weight, zero + rest, SMALL)
    if CAN_SKIP:
        # Reached with skip set only where the momentum was never written: it gets its initial
        # value.
        m_new = tl.where(skip, m, m_new)
    if MOMENTUM == "bf16":  # the update is computed from the stored value
        m_new = bf16_to_fp32(fp32_to_bf16(m_new))
    store_state(momentum_ptr, None, start, numel, offsets, m_new, lane, mask, MOMENTUM, False, MASKED, BLOCK)
    u = m_new
    if NESTEROV:
        u = _lerp(g, m_new, zero + look_ahead_weight, zero + look_ahead_rest, LOOK_AHEAD_SMALL)
    store_fp32(array_ptr, lane, u, mask, ARRAY, MASKED)


@triton.jit
def _update_block(
    param_ptr,
    array_ptr,
    master_ptr,
    master_scale_ptr,
    start,  # int64, first element of this block in the state
    numel,  # elements of this block that exist
    decay,
    scale,
    skip,  # bool, keep all values
    PARAM: tl.constexpr,
    MASTER: tl.constexpr,
    INIT_MASTER: tl.constexpr,
    CAN_SKIP: tl.constexpr,
    ARRAY: tl.constexpr,
    ADDS_DECAY: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    lane = tl.arange(0, BLOCK)
    mask = lane < numel
    zero = tl.zeros((BLOCK,), tl.float32)

    p_model, p_before = load_params(
        param_ptr, master_ptr, master_scale_ptr, start, numel, lane, mask, PARAM, MASTER, INIT_MASTER, MASKED, BLOCK
    )
    o = load_fp32(array_ptr, lane, mask, ARRAY, MASKED)
    if ADDS_DECAY:
        p = tl.fma(p_before, zero + decay, p_before)
    else:
        p = p_before * (zero + decay)
    if MASTER == "none":
        if PARAM == "bf16":
            p = bf16_to_fp32(fp32_to_bf16(p))
        elif PARAM == "fp16":
            p = p.to(tl.float16).to(tl.float32)
    p = tl.fma(o, zero + scale, p)
    p_model_new = p
    if CAN_SKIP:
        # Reached with skip only under WRITE_ON_SKIP: it writes the present or initial values.
        p = tl.where(skip, p_before, p)
        # Not p: a rounded master may not round to the present parameter, which was rounded from the
        # exact value.
        p_model_new = tl.where(skip, p_model, p_model_new)
    store_params(
        param_ptr, master_ptr, master_scale_ptr, start, numel, lane, mask, p_model_new, p, PARAM, MASTER, MASKED, BLOCK
    )


_OF_ANY_VALUE = ("rows", "blocks")
_OF_ANY_ALIGNMENT = ("lr_ptr", "grad_scale_ptr", "found_inf_ptr")
"""Arguments that differ between launches or belong to the caller. They are not specialized, so that
the kernel that is compiled before the first launch serves all launches."""


@triton.jit(do_not_specialize=_OF_ANY_VALUE, do_not_specialize_on_alignment=_OF_ANY_ALIGNMENT)
def momentum_kernel(
    table_ptr,  # [rows, 8] int64, see launch.ARRAY_COLUMNS
    rows,
    blocks,  # blocks of all pieces; programs take them in turn
    momentum_ptr,  # [numel] stored format, updated in place
    weight,
    rest,
    look_ahead_weight,
    look_ahead_rest,
    grad_scale_ptr,  # [1] float32 or None, divides the gradients
    found_inf_ptr,  # [1] float32 or None; nonzero skips the step
    GRAD: tl.constexpr,
    MOMENTUM: tl.constexpr,
    INIT_MOMENTUM: tl.constexpr,
    SMALL: tl.constexpr,
    NESTEROV: tl.constexpr,
    LOOK_AHEAD_SMALL: tl.constexpr,
    ARRAY: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """First phase: gradients and momentum in, momentum and updates out."""
    SCALED_GRAD: tl.constexpr = grad_scale_ptr is not None
    CAN_SKIP: tl.constexpr = found_inf_ptr is not None
    GRAD_BYTES: tl.constexpr = 4 if GRAD == "fp32" else 2
    ARRAY_BYTES: tl.constexpr = 4 if ARRAY == "fp32" else 2

    grad_scale = 1.0
    if SCALED_GRAD:
        grad_scale = tl.load(grad_scale_ptr).to(tl.float32)
    skip = False
    write = True
    if CAN_SKIP:
        skip = tl.load(found_inf_ptr) != 0.0
        # A momentum that no earlier step wrote is written by a skipped step, too: otherwise
        # leftovers in the slot would be copied back.
        if not INIT_MOMENTUM:
            write = not skip
    if write:
        for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
            base = table_ptr + piece_of_program(table_ptr, rows, block, COLUMNS) * COLUMNS
            inside = (block - tl.load(base)).to(tl.int64) * BLOCK
            grad_ptr = typed_pointer(tl.load(base + 2) + inside * GRAD_BYTES, GRAD, ALIGNED)
            array_ptr = typed_pointer(tl.load(base + 6) + inside * ARRAY_BYTES, ARRAY, True)
            start = tl.multiple_of(tl.load(base + 3) + inside, 128)
            numel = tl.load(base + 4) - inside
            if numel >= BLOCK:
                _momentum_block(
                    grad_ptr, momentum_ptr, array_ptr, start, numel,
                    weight, rest, look_ahead_weight, look_ahead_rest, grad_scale, skip,
                    GRAD, MOMENTUM, INIT_MOMENTUM, SMALL, NESTEROV, LOOK_AHEAD_SMALL, SCALED_GRAD, CAN_SKIP, ARRAY,
                    False, BLOCK,
                )  # fmt: skip
            else:
                _momentum_block(
                    grad_ptr, momentum_ptr, array_ptr, start, numel,
                    weight, rest, look_ahead_weight, look_ahead_rest, grad_scale, skip,
                    GRAD, MOMENTUM, INIT_MOMENTUM, SMALL, NESTEROV, LOOK_AHEAD_SMALL, SCALED_GRAD, CAN_SKIP, ARRAY,
                    True, BLOCK,
                )  # fmt: skip


@triton.jit(do_not_specialize=_OF_ANY_VALUE, do_not_specialize_on_alignment=_OF_ANY_ALIGNMENT)
def update_kernel(
    table_ptr,  # [rows, 8] int64, see launch.ARRAY_COLUMNS
    rows,
    blocks,  # blocks of all pieces; programs take them in turn
    master_ptr,  # [numel] stored format or None, updated in place
    master_scale_ptr,  # [numel / 128] float32 or None, updated in place
    decay,
    weight_decay,
    lr_ptr,  # [1] any float dtype or None; replaces decay, multiplies scales
    found_inf_ptr,  # [1] float32 or None; nonzero skips the step
    PARAM: tl.constexpr,
    MASTER: tl.constexpr,
    INIT_MASTER: tl.constexpr,
    ARRAY: tl.constexpr,
    ADDS_DECAY: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Second phase: orthogonal updates and masters in, parameters and masters out."""
    CAN_SKIP: tl.constexpr = found_inf_ptr is not None
    # State that no earlier step wrote, or that is written without being read, is written by a
    # skipped step, too: otherwise leftovers in the slot would be copied back.
    WRITE_ON_SKIP: tl.constexpr = INIT_MASTER or (PARAM == "fp32" and MASTER != "none")
    PARAM_BYTES: tl.constexpr = 4 if PARAM == "fp32" else 2
    ARRAY_BYTES: tl.constexpr = 4 if ARRAY == "fp32" else 2

    lr = 1.0
    if lr_ptr is not None:
        lr = tl.load(lr_ptr).to(tl.float32)
        if ADDS_DECAY:
            decay = lr * weight_decay * -1.0
        else:
            decay = 1.0 - lr * weight_decay
    skip = False
    write = True
    if CAN_SKIP:
        skip = tl.load(found_inf_ptr) != 0.0
        if not WRITE_ON_SKIP:
            write = not skip
    if write:
        for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
            base = table_ptr + piece_of_program(table_ptr, rows, block, COLUMNS) * COLUMNS
            inside = (block - tl.load(base)).to(tl.int64) * BLOCK
            param_ptr = typed_pointer(tl.load(base + 1) + inside * PARAM_BYTES, PARAM, ALIGNED)
            array_ptr = typed_pointer(tl.load(base + 6) + inside * ARRAY_BYTES, ARRAY, True)
            scale = tl.load(base + 7).to(tl.int32).to(tl.float32, bitcast=True)
            if lr_ptr is not None:
                scale = scale * lr
            start = tl.multiple_of(tl.load(base + 3) + inside, 128)
            numel = tl.load(base + 4) - inside
            if numel >= BLOCK:
                _update_block(
                    param_ptr, array_ptr, master_ptr, master_scale_ptr, start, numel, decay, scale, skip,
                    PARAM, MASTER, INIT_MASTER, CAN_SKIP, ARRAY, ADDS_DECAY, False, BLOCK,
                )  # fmt: skip
            else:
                _update_block(
                    param_ptr, array_ptr, master_ptr, master_scale_ptr, start, numel, decay, scale, skip,
                    PARAM, MASTER, INIT_MASTER, CAN_SKIP, ARRAY, ADDS_DECAY, True, BLOCK,
                )  # fmt: skip


@triton.jit
def transpose_kernel(
    source_ptr,  # [rows, columns] int16
    target_ptr,  # [columns, rows] int16
    rows,
    columns,
    TILE: tl.constexpr,
):
    """Copies a matrix into its transposed memory order, tile by tile, so that both sides are contiguous."""
    row = tl.program_id(1) * TILE + tl.arange(0, TILE)
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tile = tl.load(source_ptr + row.to(tl.int64)[:, None] * columns + column[None, :], inside)
    inside = (column < columns)[:, None] & (row < rows)[None, :]
    tl.store(target_ptr + column.to(tl.int64)[:, None] * rows + row[None, :], tl.trans(tile), inside)
