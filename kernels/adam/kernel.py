"""The fused Adam kernel: one launch updates any number of parameters of one chunk."""

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
def _fma(a, b, c, NUMERICS: tl.constexpr):
    if NUMERICS == "te":
        return tl.inline_asm_elementwise(
            "fma.rn.ftz.f32 $0, $1, $2, $3;", "=f,f,f,f", [a, b, c], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.fma(a, b, c)


@triton.jit
def _mul(a, b, NUMERICS: tl.constexpr):
    if NUMERICS == "te":
        return tl.inline_asm_elementwise(
            "mul.rn.ftz.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return a * b


@triton.jit
def _add(a, b, NUMERICS: tl.constexpr):
    if NUMERICS == "te":
        return tl.inline_asm_elementwise(
            "add.rn.ftz.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return a + b


@triton.jit
def _div(a, b, NUMERICS: tl.constexpr):
    if NUMERICS == "te":
        return tl.inline_asm_elementwise(
            "div.approx.ftz.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.div_rn(a, b)


@triton.jit
def _sqrt(a, NUMERICS: tl.constexpr):
    if NUMERICS == "te":
        return tl.inline_asm_elementwise(
            "sqrt.approx.ftz.f32 $0, $1;", "=f,f", [a], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.sqrt_rn(a)


@triton.jit
def _update_block(
    param_ptr,  # [BLOCK] dtype PARAM (bf16 as int16), updated in place
    grad_ptr,  # [BLOCK] dtype GRAD (bf16 as int16), only read
    exp_avg_ptr,  # [.] stored format, updated in place
    exp_avg_scale_ptr,  # [.] float32 per 128 elements, or None
    exp_avg_sq_ptr,  # [.] stored format, updated in place
    exp_avg_sq_scale_ptr,  # [.] float32 per 128 elements, or None
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
    eps,
    weight_decay,
    bias_correction1,
    bias_correction2,
    grad_scale,
    skip,  # bool, keep all values
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    EXP_AVG: tl.constexpr,
    EXP_AVG_SQ: tl.constexpr,
    MASTER: tl.constexpr,
    INIT_MOMENTS: tl.constexpr,
    INIT_MASTER: tl.constexpr,
    ADAM_W: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    SCALED_GRAD: tl.constexpr,
    CAN_SKIP: tl.constexpr,
    NUMERICS: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    lane = tl.arange(0, BLOCK)
    mask = lane < numel
    offsets = start + lane
    zero = tl.zeros((BLOCK,), tl.float32)

    p_model, p = load_params(
        param_ptr, master_ptr, master_scale_ptr, start, numel, lane, mask, PARAM, MASTER, INIT_MASTER, MASKED, BLOCK
    )
    p_before = p

    g = load_fp32(grad_ptr, lane, mask, GRAD, MASKED)
    if SCALED_GRAD:
        g = tl.div_rn(g, zero + grad_scale)
    if INIT_MOMENTS:
        m = zero
        v = zero
    else:
        m = load_state(exp_avg_ptr, exp_avg_scale_ptr, start, numel, offsets, mask, EXP_AVG, MASKED, BLOCK)
        v = load_state(exp_avg_sq_ptr, exp_avg_sq_scale_ptr, start, numel, offsets, mask, EXP_AVG_SQ, MASKED, BLOCK)

    if not ADAM_W:
        g = _fma(p, zero + weight_decay, g, NUMERICS)
    m_new = _fma(m, zero + beta1, _mul(g, zero + one_minus_beta1, NUMERICS), NUMERICS)
    v_new = _fma(v, zero + beta2, _mul(_mul(g, zero + one_minus_beta2, NUMERICS), g, NUMERICS), NUMERICS)
    root = _sqrt(_div(v_new, zero + bias_correction2, NUMERICS), NUMERICS)
    update = _div(_div(m_new, zero + bias_correction1, NUMERICS), _add(root, zero + eps, NUMERICS), NUMERICS)
    if ADAM_W:
        update = _fma(p, zero + weight_decay, update, NUMERICS)
    # Not -update: Triton 3.6 computes 0 - update, which gives +0 for an update of +0, and would
    # then change a parameter of -0 to +0.
    p = _fma(update * -1.0, zero + lr, p, NUMERICS)

    p_model_new = p
    if CAN_SKIP:
        # Reached with skip only under WRITE_ON_SKIP: it writes the present or initial values.
        m_new = tl.where(skip, m, m_new)
        v_new = tl.where(skip, v, v_new)
        p = tl.where(skip, p_before, p)
        # Not p: a rounded master may not round to the present parameter, which was rounded from the
        # exact value.
        p_model_new = tl.where(skip, p_model, p)
    threshold = lane  # only used with STOCHASTIC, but Triton requires a value
    threshold_sq = lane
    if STOCHASTIC:
        threshold, threshold_sq = rounding_thresholds(counter, lane, rounding_seed, rounding_step)
    store_state(
        exp_avg_ptr, exp_avg_scale_ptr, start, numel, offsets, m_new, threshold, mask, EXP_AVG, False, MASKED, BLOCK
    )
    store_state(
        exp_avg_sq_ptr, exp_avg_sq_scale_ptr, start, numel, offsets, v_new, threshold_sq, mask,
        EXP_AVG_SQ, True, MASKED, BLOCK,
    )  # fmt: skip
    store_params(
        param_ptr, master_ptr, master_scale_ptr, start, numel, lane, mask, p_model_new, p, PARAM, MASTER, MASKED, BLOCK
    )


@triton.jit
def _update_program(
    pid,
    table_ptr,
    rows,
    exp_avg_ptr,
    exp_avg_scale_ptr,
    exp_avg_sq_ptr,
    exp_avg_sq_scale_ptr,
    master_ptr,
    master_scale_ptr,
    rounding_seed,
    rounding_step,
    lr,
    beta1,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    eps,
    weight_decay,
    bias_correction1,
    bias_correction2,
    grad_scale,
    skip,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    EXP_AVG: tl.constexpr,
    EXP_AVG_SQ: tl.constexpr,
    MASTER: tl.constexpr,
    INIT_MOMENTS: tl.constexpr,
    INIT_MASTER: tl.constexpr,
    ADAM_W: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    SCALED_GRAD: tl.constexpr,
    CAN_SKIP: tl.constexpr,
    NUMERICS: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Updates kernel block ``pid`` of the launch, counted over all pieces."""
    row = piece_of_program(table_ptr, rows, pid)
    base = table_ptr + row * 6
    inside = (pid - tl.load(base)).to(tl.int64) * BLOCK
    param_bytes: tl.constexpr = 4 if PARAM == "fp32" or PARAM == "fp32_out" else 2
    grad_bytes: tl.constexpr = 4 if GRAD == "fp32" else 2
    param_ptr = typed_pointer(tl.load(base + 1) + inside * param_bytes, PARAM, ALIGNED)
    grad_ptr = typed_pointer(tl.load(base + 2) + inside * grad_bytes, GRAD, ALIGNED)
    start = tl.multiple_of(tl.load(base + 3) + inside, 128)
    numel = tl.load(base + 4) - inside
    counter = tl.load(base + 5) + inside
    if numel >= BLOCK:
        _update_block(
            param_ptr, grad_ptr, exp_avg_ptr, exp_avg_scale_ptr, exp_avg_sq_ptr, exp_avg_sq_scale_ptr,
            master_ptr, master_scale_ptr, start, numel, counter, rounding_seed, rounding_step,
            lr, beta1, one_minus_beta1, beta2, one_minus_beta2, eps, weight_decay,
            bias_correction1, bias_correction2, grad_scale, skip,
            PARAM, GRAD, EXP_AVG, EXP_AVG_SQ, MASTER, INIT_MOMENTS, INIT_MASTER, ADAM_W, STOCHASTIC,
            SCALED_GRAD, CAN_SKIP, NUMERICS, False, BLOCK,
        )  # fmt: skip
    else:
        _update_block(
            param_ptr, grad_ptr, exp_avg_ptr, exp_avg_scale_ptr, exp_avg_sq_ptr, exp_avg_sq_scale_ptr,
            master_ptr, master_scale_ptr, start, numel, counter, rounding_seed, rounding_step,
            lr, beta1, one_minus_beta1, beta2, one_minus_beta2, eps, weight_decay,
            bias_correction1, bias_correction2, grad_scale, skip,
            PARAM, GRAD, EXP_AVG, EXP_AVG_SQ, MASTER, INIT_MOMENTS, INIT_MASTER, ADAM_W, STOCHASTIC,
            SCALED_GRAD, CAN_SKIP, NUMERICS, True, BLOCK,
        )  # fmt: skip


_OF_ANY_VALUE = ("rows", "blocks", "skips_before", "rounding_seed", "rounding_step")
_OF_ANY_ALIGNMENT = ("lr_ptr", "corrections_ptr", "skips_ptr", "grad_scale_ptr", "found_inf_ptr")
"""Arguments that differ between launches or belong to the caller. They are not specialized, so that
the kernel that is compiled before the first launch serves all launches."""


@triton.jit(do_not_specialize=_OF_ANY_VALUE, do_not_specialize_on_alignment=_OF_ANY_ALIGNMENT)
def adam_kernel(
    table_ptr,  # [rows, 6] int64, see launch.TABLE_COLUMNS
    rows,
    blocks,  # blocks of all pieces; only read with LOOP
    exp_avg_ptr,  # [numel] stored format, updated in place
    exp_avg_scale_ptr,  # [numel / 128] float32 or None, updated in place
    exp_avg_sq_ptr,  # [numel] stored format, updated in place
    exp_avg_sq_scale_ptr,  # [numel / 128] float32 or None, updated in place
    master_ptr,  # [numel] stored format or None, updated in place
    master_scale_ptr,  # [numel / 128] float32 or None, updated in place
    rounding_seed,  # [0, 2^31)
    rounding_step,  # step number if none was skipped since skips_before; only with STOCHASTIC
    lr,
    lr_ptr,  # [1] any float dtype or None; replaces lr
    beta1,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    eps,
    weight_decay,
    bias_correction1,
    bias_correction2,
    corrections_ptr,  # [., 2] float32 or None; row i replaces both bias corrections after i skips
    skips_ptr,  # [1] int64 or None, steps skipped so far
    skips_before,  # skips that row 0 of the corrections takes into account
    grad_scale_ptr,  # [1] float32 or None, divides the gradients
    found_inf_ptr,  # [1] float32 or None; nonzero skips the step
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    EXP_AVG: tl.constexpr,
    EXP_AVG_SQ: tl.constexpr,
    MASTER: tl.constexpr,
    INIT_MOMENTS: tl.constexpr,
    INIT_MASTER: tl.constexpr,
    ADAM_W: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    NUMERICS: tl.constexpr,
    ALIGNED: tl.constexpr,
    LOOP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One launch: a program per kernel block, or with LOOP fewer programs that take turns."""
    SCALED_GRAD: tl.constexpr = grad_scale_ptr is not None
    CAN_SKIP: tl.constexpr = found_inf_ptr is not None
    # State that no earlier step wrote, or that is written without being read, is written by a
    # skipped step, too: otherwise leftovers in the slot would be copied back.
    WRITE_ON_SKIP: tl.constexpr = (INIT_MOMENTS or INIT_MASTER) or (PARAM == "fp32" and MASTER != "none")

    pid = tl.program_id(0)
    if lr_ptr is not None:
        lr = tl.load(lr_ptr).to(tl.float32)
    grad_scale = 1.0
    if SCALED_GRAD:
        grad_scale = tl.load(grad_scale_ptr).to(tl.float32)
    skip = False
    if CAN_SKIP:
        skip = tl.load(found_inf_ptr) != 0.0
        row_of_step = tl.load(skips_ptr) - skips_before
        bias_correction1 = tl.load(corrections_ptr + row_of_step * 2)
        bias_correction2 = tl.load(corrections_ptr + row_of_step * 2 + 1)
        rounding_step = tl.maximum(rounding_step - row_of_step, 1).to(tl.int32)

    write = True
    if CAN_SKIP and not WRITE_ON_SKIP:
        write = not skip
    if write:
        if LOOP:
            for block in range(pid, blocks, tl.num_programs(0)):
                _update_program(
                    block, table_ptr, rows, exp_avg_ptr, exp_avg_scale_ptr, exp_avg_sq_ptr, exp_avg_sq_scale_ptr,
                    master_ptr, master_scale_ptr, rounding_seed, rounding_step, lr, beta1, one_minus_beta1, beta2,
                    one_minus_beta2, eps, weight_decay, bias_correction1, bias_correction2, grad_scale, skip,
                    PARAM, GRAD, EXP_AVG, EXP_AVG_SQ, MASTER, INIT_MOMENTS, INIT_MASTER, ADAM_W, STOCHASTIC,
                    SCALED_GRAD, CAN_SKIP, NUMERICS, ALIGNED, BLOCK,
                )  # fmt: skip
        else:
            _update_program(
                pid, table_ptr, rows, exp_avg_ptr, exp_avg_scale_ptr, exp_avg_sq_ptr, exp_avg_sq_scale_ptr,
                master_ptr, master_scale_ptr, rounding_seed, rounding_step, lr, beta1, one_minus_beta1, beta2,
                one_minus_beta2, eps, weight_decay, bias_correction1, bias_correction2, grad_scale, skip,
                PARAM, GRAD, EXP_AVG, EXP_AVG_SQ, MASTER, INIT_MOMENTS, INIT_MASTER, ADAM_W, STOCHASTIC,
                SCALED_GRAD, CAN_SKIP, NUMERICS, ALIGNED, BLOCK,
            )  # fmt: skip
