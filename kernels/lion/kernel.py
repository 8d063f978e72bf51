"""The fused Lion kernel: one launch updates any number of parameters of one chunk."""

from __future__ import annotations

import triton
import triton.language as tl

from fused_offload.kernels.formats_triton import (
    load_fp32,
    load_params,
    load_state,
    rounding_thresholds,
    store_params,
    store_state,
)
from fused_offload.kernels.launch_triton import piece_of_program, typed_pointer


@triton.jit
def _sign(values):
    """-1, 0 or 1; NaN stays NaN."""
    return tl.where(values > 0.0, 1.0, tl.where(values < 0.0, -1.0, tl.where(values == 0.0, 0.0, values)))


@triton.jit
def _update_block(
    param_ptr,  # [BLOCK] dtype PARAM (bf16 as int16), updated in place
    grad_ptr,  # [BLOCK] dtype GRAD (bf16 as int16), only read
    exp_avg_ptr,  # [.] stored format, updated in place
    exp_avg_scale_ptr,  # [.] float32 per 128 elements, or None
    master_ptr,  # [.] stored format, updated in place, or None
    master_scale_ptr,  # [.] float32 per 128 elements, or None
    start,  # int64, first element of this block in the state
    numel,  # elements of this block that exist
    counter,  # int64, random numbers of this block's first element
    rounding_seed,
    rounding_step,
    lr,
    beta1,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    weight_decay,
    grad_scale,
    skip,  # bool, keep all values
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    EXP_AVG: tl.constexpr,
    MASTER: tl.constexpr,
    INIT_EXP_AVG: tl.constexpr,
    INIT_MASTER: tl.constexpr,
    SCALED_GRAD: tl.constexpr,
    CAN_SKIP: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    lane = tl.arange(0, BLOCK)
    mask = lane < numel
    offsets = start + lane
    zero = tl.zeros((BLOCK,), tl.float32)

    p_model, p_before = load_params(
        param_ptr, master_ptr, master_scale_ptr, start, numel, lane, mask, PARAM, MASTER, INIT_MASTER, MASKED, BLOCK
    )
    g = load_fp32(grad_ptr, lane, mask, GRAD, MASKED)
    if SCALED_GRAD:
        g = tl.div_rn(g, zero + grad_scale)
    if INIT_EXP_AVG:
        m = zero
    else:
        m = load_state(exp_avg_ptr, exp_avg_scale_ptr, start, numel, offsets, mask, EXP_AVG, MASKED, BLOCK)

    direction = _sign(tl.fma(m, zero + beta1, g * (zero + one_minus_beta1)))
    update = tl.fma(p_before, zero + weight_decay, direction)
    # Not -update: Triton 3.6 computes 0 - update, which gives +0 for an update of +0, and would
    # then change a parameter of -0 to +0.
    p = tl.fma(update * -1.0, zero + lr, p_before)
    m_new = tl.fma(m, zero + beta2, g * (zero + one_minus_beta2))

    p_model_new = p
    if CAN_SKIP:
        # Reached with skip only under WRITE_ON_SKIP: it writes the present or initial values.
        m_new = tl.where(skip, m, m_new)
        p = tl.where(skip, p_before, p)
        # Not p: a rounded master may not round to the present parameter, which was rounded from the
        # exact value.
        p_model_new = tl.where(skip, p_model, p)
    threshold, _ = rounding_thresholds(counter, lane, rounding_seed, rounding_step)
    store_state(
        exp_avg_ptr, exp_avg_scale_ptr, start, numel, offsets, m_new, threshold, mask, EXP_AVG, False, MASKED, BLOCK
    )
    store_params(
        param_ptr, master_ptr, master_scale_ptr, start, numel, lane, mask, p_model_new, p, PARAM, MASTER, MASKED, BLOCK
    )


_OF_ANY_VALUE = ("rows", "blocks", "skips_before", "rounding_seed", "rounding_step")
_OF_ANY_ALIGNMENT = ("lr_ptr", "skips_ptr", "grad_scale_ptr", "found_inf_ptr")
"""Arguments that differ between launches or belong to the caller. They are not specialized, so that
the kernel that is compiled before the first launch serves all launches."""


@triton.jit(do_not_specialize=_OF_ANY_VALUE, do_not_specialize_on_alignment=_OF_ANY_ALIGNMENT)
def lion_kernel(
    table_ptr,  # [rows, 6] int64, see launch.TABLE_COLUMNS
    rows,
    blocks,  # blocks of all pieces; programs take them in turn
    exp_avg_ptr,  # [numel] stored format, updated in place
    exp_avg_scale_ptr,  # [numel / 128] float32 or None, updated in place
    master_ptr,  # [numel] stored format or None, updated in place
    master_scale_ptr,  # [numel / 128] float32 or None, updated in place
    rounding_seed,  # [0, 2^31)
    rounding_step,  # step number if none was skipped since skips_before
    lr,
    lr_ptr,  # [1] any float dtype or None; replaces lr
    beta1,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    weight_decay,
    skips_ptr,  # [1] int64 or None, steps skipped so far
    skips_before,  # skips that rounding_step takes into account
    grad_scale_ptr,  # [1] float32 or None, divides the gradients
    found_inf_ptr,  # [1] float32 or None; nonzero skips the step
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    EXP_AVG: tl.constexpr,
    MASTER: tl.constexpr,
    INIT_EXP_AVG: tl.constexpr,
    INIT_MASTER: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One launch: a program per kernel block, or fewer programs that take them in turn."""
    SCALED_GRAD: tl.constexpr = grad_scale_ptr is not None
    CAN_SKIP: tl.constexpr = found_inf_ptr is not None
    # State that no earlier step wrote, or that is written without being read, is written by a
    # skipped step, too: otherwise leftovers in the slot would be copied back.
    WRITE_ON_SKIP: tl.constexpr = (INIT_EXP_AVG or INIT_MASTER) or (PARAM == "fp32" and MASTER != "none")
    PARAM_BYTES: tl.constexpr = 4 if PARAM == "fp32" or PARAM == "fp32_out" else 2
    GRAD_BYTES: tl.constexpr = 4 if GRAD == "fp32" else 2

    if lr_ptr is not None:
        lr = tl.load(lr_ptr).to(tl.float32)
    grad_scale = 1.0
    if SCALED_GRAD:
        grad_scale = tl.load(grad_scale_ptr).to(tl.float32)
    skip = False
    write = True
    if CAN_SKIP:
        skip = tl.load(found_inf_ptr) != 0.0
        rounding_step = tl.maximum(rounding_step - (tl.load(skips_ptr) - skips_before), 1).to(tl.int32)
        if not WRITE_ON_SKIP:
            write = not skip
    if write:
        for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
            base = table_ptr + piece_of_program(table_ptr, rows, block) * 6
            inside = (block - tl.load(base)).to(tl.int64) * BLOCK
            param_ptr = typed_pointer(tl.load(base + 1) + inside * PARAM_BYTES, PARAM, ALIGNED)
            grad_ptr = typed_pointer(tl.load(base + 2) + inside * GRAD_BYTES, GRAD, ALIGNED)
            start = tl.multiple_of(tl.load(base + 3) + inside, 128)
            numel = tl.load(base + 4) - inside
            counter = tl.load(base + 5) + inside
            if numel >= BLOCK:
                _update_block(
                    param_ptr, grad_ptr, exp_avg_ptr, exp_avg_scale_ptr, master_ptr, master_scale_ptr,
                    start, numel, counter, rounding_seed, rounding_step,
                    lr, beta1, one_minus_beta1, beta2, one_minus_beta2, weight_decay, grad_scale, skip,
                    PARAM, GRAD, EXP_AVG, MASTER, INIT_EXP_AVG, INIT_MASTER, SCALED_GRAD, CAN_SKIP, False, BLOCK,
                )  # fmt: skip
            else:
                _update_block(
                    param_ptr, grad_ptr, exp_avg_ptr, exp_avg_scale_ptr, master_ptr, master_scale_ptr,
                    start, numel, counter, rounding_seed, rounding_step,
                    lr, beta1, one_minus_beta1, beta2, one_minus_beta2, weight_decay, grad_scale, skip,
                    PARAM, GRAD, EXP_AVG, MASTER, INIT_EXP_AVG, INIT_MASTER, SCALED_GRAD, CAN_SKIP, True, BLOCK,
                )  # fmt: skip
