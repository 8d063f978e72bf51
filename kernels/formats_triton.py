"""Loads and stores of each stored format as Triton helpers; ``formats.py`` specifies them.

bf16 is handled as int16 bits and rounded with integer arithmetic. So the bits are the same on every
GPU and in Triton's interpreter, whose own conversion from float32 truncates.
"""

import triton
import triton.language as tl


@triton.jit
def bf16_to_fp32(bits):
    """The float32 of int16 bf16 bits, exactly."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def fp32_to_bf16(values):
    """Int16 bf16 bits of float32 values, rounded to the nearest even; NaN is 0x7FC0 as in torch."""
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
    """Int16 bf16 bits and int16 remainder of a float32 master; see `formats.split_remainder_`."""
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
def load_fp32(ptr, offsets, mask, FORMAT: tl.constexpr, MASKED: tl.constexpr):
    """Elements of ``"fp32"``, ``"bf16"`` (as int16) or ``"fp16"`` as float32, exactly."""
    raw = load_raw(ptr, offsets, mask, MASKED)
    if FORMAT == "bf16":
        return bf16_to_fp32(raw)
    else:
        return raw.to(tl.float32)


@triton.jit
def store_fp32(ptr, offsets, values, mask, FORMAT: tl.constexpr, MASKED: tl.constexpr):
    """Writes float32 values rounded to the nearest even of ``"fp32"``, ``"bf16"`` or ``"fp16"``."""
    if FORMAT == "bf16":
        store_raw(ptr, offsets, fp32_to_bf16(values), mask, MASKED)
    elif FORMAT == "fp16":
        store_raw(ptr, offsets, values.to(tl.float16), mask, MASKED)
    else:
        store_raw(ptr, offsets, values, mask, MASKED)


@triton.jit
def _mix(bits):
    bits = bits ^ (bits >> 16)
    bits = bits * 0x7FEB352D
    bits = bits ^ (bits >> 15)
    bits = bits * 0x846CA68B
    return bits ^ (bits >> 16)


@triton.jit
def rounding_thresholds(counter, lane, seed, step):
    """Thresholds of the first and the second moment, uint32; see `formats.rounding_thresholds`.

    ``counter`` is the int64 counter of lane 0. ``seed`` and ``step`` are in [0, 2^31).
    """
    step = step.to(tl.uint32)
    own = _mix((counter >> 40).to(tl.uint32) * 0x9E3779B1 + seed.to(tl.uint32))
    low = _mix(own ^ step)
    high = _mix(own + step * 0x85EBCA6B)
    key = (high.to(tl.int64) << 32) + low.to(tl.int64)
    index = key + (counter & 0xFFFFFFFFFF) + lane
    bits = _mix(index.to(tl.uint32) ^ (index >> 32).to(tl.uint32))
    return bits, bits << 12


@triton.jit
def _fp32_to_bf16_stochastic(values, threshold):
    bits = values.to(tl.int32, bitcast=True) + (threshold >> 16).to(tl.int32)
    return tl.where(values != values, 0x7FC0, bits >> 16).to(tl.int16)


@triton.jit
def _root8_units(code):
    """Magnitudes of codes, in units of the scale."""
    square = (code * code).to(tl.float32) * 6.200012e-05  # 127^-2; code 127 gives exactly 1
    return square * square


@triton.jit
def _load_root8(raw):
    """Values of codes, in units of the scale."""
    byte = raw.to(tl.int32)
    code = tl.where(byte < 128, byte, byte - 256)
    unit = _root8_units(code)
    return tl.where(code == -128, float("nan"), tl.where(code < 0, -unit, unit))


@triton.jit
def _store_root8(rows, exists, threshold):
    """Elements and scales of ``[., 128]`` values."""
    magnitude = tl.abs(rows)
    finite = magnitude < float("inf")
    magnitude = tl.where(finite & exists, magnitude, 0.0)
    # As integers, since the hardware computes their maximum over a warp.
    scale = tl.max(magnitude.to(tl.int32, bitcast=True), axis=1).to(tl.float32, bitcast=True)
    # One division per scale group, since one per element would take most of the kernel's time.
    # Operands and result are kept away from subnormal numbers, which old releases of Triton flush
    # to zero.
    lift = tl.where(scale < 8.673617379884035e-19, 18446744073709551616.0, 1.0)  # 2^-60 and 2^64
    lift = tl.where(scale > 1152921504606846976.0, 5.421010862427522e-20, lift)  # 2^60 and 2^-64
    divisor = tl.where(scale > 0.0, scale * lift, 1.0)
    inverse = tl.div_rn(tl.full(divisor.shape, 1.0, tl.float32), divisor)
    quotient = magnitude * lift[:, None] * inverse[:, None]
    below = tl.minimum((tl.sqrt_rn(tl.sqrt_rn(quotient)) * 127.0).to(tl.int32), 126)
    low = _root8_units(below)
    step = _root8_units(below + 1) - low
    parts = (0xFFFF - (threshold >> 16).to(tl.int32)).to(tl.float32) + 0.5
    above = (quotient - low) * 65536.0 >= parts * step
    code = tl.where(above, below + 1, below)
    code = tl.where(rows < 0.0, -code, code)
    return tl.where(finite, code & 0xFF, 128).to(tl.uint8), scale


@triton.jit
def _load_log8(raw, scale_bits):
    code = raw.to(tl.int32)
    shift = scale_bits & 31
    bits = tl.where(code == 0, 0, scale_bits - shift + (code << shift))
    bits = tl.where(code == 254, 0x7F800000, bits)
    return tl.where(code == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def _log8_shift(highest, lowest):
    shift = tl.full(highest.shape, 20, tl.int32)
    for finer in tl.static_range(19, 15, -1):
        steps = ((highest + ((1 << finer) - 1)) >> finer) - (lowest >> finer)
        shift = tl.where(steps < 253, finer, shift)
    return shift


@triton.jit
def _store_log8(rows, exists, threshold):
    """Elements and bits of the scales of ``[., 128]`` values."""
    bits = rows.to(tl.int32, bitcast=True)
    positive = (bits > 0) & (bits < 0x7F800000) & exists
    highest = tl.max(tl.where(positive, bits, 0), axis=1)
    shift = _log8_shift(highest, tl.min(tl.where(positive, bits, 0x7F7FFFFF), axis=1))
    largest = (0x7F800000 >> shift) - 1
    ceiling = tl.minimum((highest + ((1 << shift) - 1)) >> shift, largest)
    below = tl.maximum(ceiling - 253, 0)
    first_shift = tl.broadcast_to(shift[:, None], bits.shape)
    index = (bits + (threshold >> (32 - first_shift).to(tl.uint32)).to(tl.int32)) >> first_shift
    rounded = tl.minimum(tl.maximum(index, below[:, None] + 1), largest[:, None]) << first_shift
    # Again: rounded values may fit a finer range, and must encode to the same bits.
    highest = tl.max(tl.where(positive, rounded, 0), axis=1)
    shift = _log8_shift(highest, tl.min(tl.where(positive, rounded, 0x7F7FFFFF), axis=1))
    below = tl.maximum((highest >> shift) - 253, 0)
    code = tl.where(positive, (rounded >> shift[:, None]) - below[:, None], 0)
    code = tl.where(bits == 0x7F800000, 254, code)
    code = tl.where((rows != rows) | (rows < 0.0), 255, code)
    return code.to(tl.uint8), (below << shift) | shift


@triton.jit
def load_state(
    ptr, scale_ptr, start, numel, offsets, mask, FORMAT: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr
):
    """Stored state as float32, exactly.

    ``offsets`` are ``start + arange(BLOCK)``. ``start`` is a multiple of the scale group, and
    ``mask`` is true for the first ``numel`` offsets.
    """
    if (FORMAT == "fp16" or FORMAT == "root8") or FORMAT == "log8":
        rows: tl.constexpr = BLOCK // 128
        row = tl.arange(0, rows)
        # Scales beyond the last element belong to another segment or to none.
        scale = tl.load(scale_ptr + start // 128 + row, mask=row * 128 < numel, other=0.0)
        raw = tl.reshape(load_raw(ptr, offsets, mask, MASKED), (rows, 128))
        if FORMAT == "log8":
            values = _load_log8(raw, tl.broadcast_to(scale.to(tl.int32, bitcast=True)[:, None], (rows, 128)))
        elif FORMAT == "root8":
            values = _load_root8(raw) * scale[:, None]
        else:
            values = raw.to(tl.float32) * scale[:, None]
        return tl.reshape(values, (BLOCK,))
    elif FORMAT == "bf16_stochastic":
        return load_fp32(ptr, offsets, mask, "bf16", MASKED)
    else:
        return load_fp32(ptr, offsets, mask, FORMAT, MASKED)


@triton.jit
def store_state(
    ptr,
    scale_ptr,
    start,
    numel,
    offsets,
    values,
    threshold,
    mask,
    FORMAT: tl.constexpr,
    KEEP_NONZERO: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes float32 values in their stored format; see `formats.encode_`.

    ``threshold`` is uint32 for stochastic formats, and unused for others.
    """
    if FORMAT == "fp16":
        rows: tl.constexpr = BLOCK // 128
        magnitude = tl.abs(values)
        # Padding, infinities and NaNs do not affect the scale.
        magnitude = tl.where(mask & (magnitude < float("inf")), magnitude, 0.0)
        absmax = tl.max(tl.reshape(magnitude, (rows, 128)), axis=1)
        # Half a unit in the last place of fp16 is added: the scale follows the rounded maximum.
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
    elif FORMAT == "root8" or FORMAT == "log8":
        groups: tl.constexpr = BLOCK // 128
        shaped = tl.reshape(values, (groups, 128))
        exists = tl.reshape(mask, (groups, 128))
        thresholds = tl.reshape(threshold, (groups, 128))
        if FORMAT == "root8":
            elements, scale = _store_root8(shaped, exists, thresholds)
        else:
            elements, scale_bits = _store_log8(shaped, exists, thresholds)
            scale = scale_bits.to(tl.float32, bitcast=True)
        store_raw(ptr, offsets, tl.reshape(elements, (BLOCK,)), mask, MASKED)
        group = tl.arange(0, groups)
        tl.store(scale_ptr + start // 128 + group, scale, mask=group * 128 < numel)
    elif FORMAT == "bf16_stochastic":
        store_raw(ptr, offsets, _fp32_to_bf16_stochastic(values, threshold), mask, MASKED)
    else:
        store_fp32(ptr, offsets, values, mask, FORMAT, MASKED)


@triton.jit
def load_params(
    param_ptr,
    master_ptr,
    master_scale_ptr,
    start,
    numel,
    lane,
    mask,
    PARAM: tl.constexpr,
    MASTER: tl.constexpr,
    INIT_MASTER: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Parameters and master weights of a kernel block, float32.

    ``lane`` is ``arange(BLOCK)``; the state of lane 0 is at ``start``. A float32 parameter is its
    own master, and so is every parameter with ``MASTER == "none"`` or ``INIT_MASTER``. What is at
    the address of ``PARAM == "fp32_out"`` is written and not read.
    """
    if PARAM == "fp32_out":
        p = load_state(master_ptr, master_scale_ptr, start, numel, start + lane, mask, MASTER, MASKED, BLOCK)
        p_model = p
    else:
        raw = load_raw(param_ptr, lane, mask, MASKED)
        if PARAM == "bf16":
            p_model = bf16_to_fp32(raw)
        else:
            p_model = raw.to(tl.float32)
        if (INIT_MASTER or PARAM == "fp32") or MASTER == "none":
            p = p_model
        elif MASTER == "remainder":
            p = join_remainder(raw, load_raw(master_ptr, start + lane, mask, MASKED))
        else:
            p = load_state(master_ptr, master_scale_ptr, start, numel, start + lane, mask, MASTER, MASKED, BLOCK)
    return p_model, p


@triton.jit
def store_params(
    param_ptr,
    master_ptr,
    master_scale_ptr,
    start,
    numel,
    lane,
    mask,
    p_model,
    p,
    PARAM: tl.constexpr,
    MASTER: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes master weights ``p`` of a kernel block, and parameters rounded from ``p_model``.

    Both are float32. They differ only in a skipped step, in which a rounded master may not round to
    the present parameter. With remainders, ``p`` gives both.
    """
    if MASTER == "remainder":
        bits, remainder = split_remainder(p)
        store_raw(param_ptr, lane, bits, mask, MASKED)
        store_raw(master_ptr, start + lane, remainder, mask, MASKED)
    else:
        store_fp32(param_ptr, lane, p_model, mask, PARAM, MASKED)
        if MASTER != "none":
            store_state(
                master_ptr, master_scale_ptr, start, numel, start + lane, p, lane, mask, MASTER, False, MASKED, BLOCK
            )
