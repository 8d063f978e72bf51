"""Loads and stores of each stored form as Triton helpers; ``forms.py`` says what the forms are.

bf16 is handled as int16 bits and rounded with integer arithmetic everywhere, so that the same code gives the same bits
on every GPU and in Triton's interpreter (which truncates a plain float32 -> bfloat16 conversion).
"""

import triton
import triton.language as tl


@triton.jit
def bf16_to_fp32(bits):
    """The float32 of int16 bf16 bits, exactly."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def fp32_to_bf16(values):
    """Int16 bf16 bits of float32 values, rounded to the nearest even; every NaN becomes 0x7FC0, as in torch."""
    bits = values.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(values != values, 0x7FC0, rounded).to(tl.int16)


@triton.jit
def join_remainder(param_bits, remainder):
    """Float32 master from int16 bf16 bits and its int16 remainder."""
    high = param_bits.to(tl.int32) - (remainder < 0).to(tl.int32)
    return ((high << 16) | (remainder.to(tl.int32) & 0xFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def split_remainder(master):
    """Int16 bf16 bits and int16 remainder of a float32 master; `forms.split_remainder_` is the specification."""
    bits = tl.where(master != master, 0x7FC00000, master.to(tl.int32, bitcast=True))
    remainder = bits.to(tl.int16)
    return ((bits >> 16) + (remainder < 0).to(tl.int32)).to(tl.int16), remainder


@triton.jit
def load_raw(ptr, offsets, mask, MASKED: tl.constexpr):
    """Elements at ``ptr + offsets``; masked-off elements read as zero."""
    if MASKED:
        return tl.load(ptr + offsets, mask=mask, other=0)
    else:
        return tl.load(ptr + offsets)


@triton.jit
def store_raw(ptr, offsets, values, mask, MASKED: tl.constexpr):
    """Writes elements at ``ptr + offsets``."""
    if MASKED:
        tl.store(ptr + offsets, values, mask=mask)
    else:
        tl.store(ptr + offsets, values)


@triton.jit
def load_fp32(ptr, offsets, mask, FORM: tl.constexpr, MASKED: tl.constexpr):
    """Unscaled elements of a dtype (``"fp32"``, ``"bf16"`` as int16, ``"fp16"``) as float32, exactly."""
    raw = load_raw(ptr, offsets, mask, MASKED)
    if FORM == "bf16":
        return bf16_to_fp32(raw)
    else:
        return raw.to(tl.float32)


@triton.jit
def store_fp32(ptr, offsets, values, mask, FORM: tl.constexpr, MASKED: tl.constexpr):
    """Float32 values rounded to the nearest even of a dtype."""
    if FORM == "bf16":
        store_raw(ptr, offsets, fp32_to_bf16(values), mask, MASKED)
    elif FORM == "fp16":
        store_raw(ptr, offsets, values.to(tl.float16), mask, MASKED)
    else:
        store_raw(ptr, offsets, values, mask, MASKED)


@triton.jit
def load_state(
    ptr, scale_ptr, start, numel, offsets, mask, FORM: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr
):
    """Stored state as float32, exactly.

    ``offsets`` are ``start + arange(BLOCK)``, ``start`` is a multiple of the scale block, ``mask`` is true for the
    first ``numel`` of them.
    """
    values = load_fp32(ptr, offsets, mask, FORM, MASKED)
    if FORM == "fp16":
        rows: tl.constexpr = BLOCK // 128
        row = tl.arange(0, rows)
        # Scales past the last element belong to another segment or to nobody.
        scale = tl.load(scale_ptr + start // 128 + row, mask=row * 128 < numel, other=0.0)
        values = tl.reshape(tl.reshape(values, (rows, 128)) * scale[:, None], (BLOCK,))
    return values


@triton.jit
def store_state(
    ptr,
    scale_ptr,
    start,
    numel,
    offsets,
    values,
    mask,
    FORM: tl.constexpr,
    KEEP_NONZERO: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Float32 values in their stored form; `forms.encode_` is the specification."""
    if FORM == "fp16":
        rows: tl.constexpr = BLOCK // 128
        magnitude = tl.abs(values)
        # Padding, infinities and NaNs have no say in the scale of their neighbours.
        magnitude = tl.where(mask & (magnitude < float("inf")), magnitude, 0.0)
        absmax = tl.max(tl.reshape(magnitude, (rows, 128)), axis=1)
        # Half an fp16 ulp more, so that the scale is that of the rounded maximum.
        exponent = tl.maximum(((absmax.to(tl.int32, bitcast=True) + 0x1000) >> 23) - 14, 1)
        scale = (exponent << 23).to(tl.float32, bitcast=True)
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        scaled = tl.reshape(tl.reshape(values, (rows, 128)) * inverse[:, None], (BLOCK,))
        quotient = scaled.to(tl.float16)
        if KEEP_NONZERO:
            smallest = tl.full((BLOCK,), 5.9604644775390625e-08, tl.float32).to(tl.float16)
            quotient = tl.where((quotient.to(tl.float32) == 0.0) & (values > 0.0), smallest, quotient)
        store_raw(ptr, offsets, quotient, mask, MASKED)
        row = tl.arange(0, rows)
        tl.store(scale_ptr + start // 128 + row, scale, mask=row * 128 < numel)
    else:
        store_fp32(ptr, offsets, values, mask, FORM, MASKED)
