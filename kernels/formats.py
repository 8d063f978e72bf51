"""Stored formats of optimizer state: encoding and decoding of fp32 values in plain torch.

``formats_triton.py`` has the same conversions as Triton helpers, which give the same bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

Whole = TypeVar("Whole", int, np.ndarray)
"""A whole number, or an int64 array of them."""

SCALE_GROUP = 128
"""Number of elements that share one scale. Segments start and are cut at multiples of it, so no
chunk splits a scale group."""

_FP16_TOP_EXPONENT = 14  # a group's largest rounded magnitude is in [2^14, 2^15), below 65504
_HALF_FP16_ULP = 0x1000  # in bits of fp32; carries into the exponent if rounding to fp16 does
_FP16_SMALLEST = 2.0**-24  # smallest positive fp16 number

_INFINITY = 0x7F800000  # bits of fp32
_ROOT8_TOP = 127  # largest code; its value is the scale
_ROOT8_INVERSE = 6.200012e-05  # float32 inverse of the top code's square; their product is 1
_ROOT8_NAN = 128
_LOG8_TOP = 253  # largest code of a finite value
_LOG8_INFINITY = 254
_LOG8_NAN = 255
_LOG8_SHIFTS = (20, 19, 18, 17, 16)  # bits of fp32 between neighbouring codes, the coarsest first

_MASK32 = 0xFFFFFFFF
_NEAREST = 0x80000000  # a threshold in the middle: rounds to the nearest


class Format(NamedTuple):
    """Stored format of one state key.

    Attributes:
        name: name of the format in kernels, a compile-time constant there.
        dtype: dtype of the stored elements.
        scaled: each group of `SCALE_GROUP` elements has a scale, 32 bits that are stored apart.
        keep_nonzero: a positive value never becomes zero. Set for second moments: ``exp_avg_sq ==
            0`` with ``exp_avg != 0`` would make the update ``exp_avg / eps``.
        stochastic: a step rounds to either neighbour, to the nearer one more often, so that nothing
            is lost on average; see `rounding_thresholds`. Values from outside of a step are rounded
            to the nearest.
        needs_param: elements have values only together with the bfloat16 parameter.
        of_quantised: masters of a quantised parameter. A step does not read the parameter's own
            values, and writes the exact updated ones in float32 for its class to quantise.
        half_step: largest share of a value that rounding to the nearest takes away: half the
            distance between 1 and the next number. 0 if steps lose nothing.
    """

    name: str
    dtype: torch.dtype
    scaled: bool = False
    keep_nonzero: bool = False
    stochastic: bool = False
    needs_param: bool = False
    of_quantised: bool = False
    half_step: float = 0.0

    @property
    def value_dtype(self) -> torch.dtype:
        """The dtype of values that are read and written: float32, or int16 for remainders."""
        return self.dtype if self.needs_param else torch.float32

    @property
    def is_coded(self) -> bool:
        """True if elements are codes, which no arithmetic applies to."""
        return self.scaled and not self.dtype.is_floating_point

    @property
    def element_bytes(self) -> int:
        """Bytes of one stored element, without its share of a scale."""
        return self.dtype.itemsize

    def stored_bytes(self, numel: int) -> int:
        """Bytes of ``numel`` elements, a multiple of `SCALE_GROUP`, with their scales."""
        return numel * self.element_bytes + (numel // SCALE_GROUP * 4 if self.scaled else 0)


FP32 = Format("fp32", torch.float32)
BF16 = Format("bf16", torch.bfloat16, half_step=2.0**-8)
BF16_STOCHASTIC = Format("bf16_stochastic", torch.bfloat16, stochastic=True)
FP16 = Format("fp16", torch.float16, scaled=True, half_step=2.0**-11)
FP16_NONZERO = Format("fp16", torch.float16, scaled=True, keep_nonzero=True, half_step=2.0**-11)
REMAINDER = Format("remainder", torch.int16, needs_param=True)
ROOT8 = Format("root8", torch.uint8, scaled=True, stochastic=True)
"""8 bits for first moments: sign and fourth root, in 127 steps.

The byte is a two's complement number ``c``, and its value is ``sign(c) * (c / 127)**4 * scale``.
The scale is the group's largest magnitude. -128 is NaN; infinities are stored as NaN, too.
Neighbours are 3 % apart at the largest magnitude, 10 % at a hundredth and 30 % at a ten-thousandth
of it."""
LOG8 = Format("log8", torch.uint8, scaled=True, keep_nonzero=True, stochastic=True)
"""8 bits for second moments: 253 successive numbers of a floating point grid.

The grid consists of the float32 numbers whose lowest ``shift`` bits are zero, which have 3 to 7
bits of mantissa. Each group uses the finest shift from 20 to 16 whose range contains all of its
positive values. With a shift of 20 the range spans 32 binary orders, and smaller values are raised
to its lower end. The scale's bits contain ``shift`` and, above it, the number below the range. The
grid does not depend on the largest value, so a change of it does not round the others again. Code 0
is zero, 254 is infinity, and 255 is NaN; negative values are stored as NaN, too."""


class Stored(NamedTuple):
    """Consecutive stored elements.

    Attributes:
        format: format of the elements.
        data: ``[numel]`` of ``format.dtype``, contiguous.
        scale: ``[ceil(numel / SCALE_GROUP)]`` float32 if ``format.scaled``, else None.
    """

    format: Format
    data: torch.Tensor
    scale: torch.Tensor | None = None

    def narrow(self, start: int, numel: int) -> Stored:
        """Elements ``[start, start + numel)``; ``start`` is a multiple of `SCALE_GROUP`."""
        scale = self.scale
        if scale is not None:
            first = start // SCALE_GROUP
            scale = scale[first : first + -(-numel // SCALE_GROUP)]
        return Stored(self.format, self.data[start : start + numel], scale)


class Rounding(NamedTuple):
    """Position in the random numbers of stochastic rounding.

    Attributes:
        seed: seed of the training run, in [0, 2^31).
        step: number of the step, counted from 1.
        counter: `rounding_counter` of the first element; counters of the next elements follow.
    """

    seed: int
    step: int
    counter: int


def rounding_counter(parameter: Whole, offset: Whole) -> Whole:
    """Number of an element within its optimizer, of which its random numbers are a hash.

    Args:
        parameter: number of the parameter within the optimizer, below 2^23.
        offset: number of the element within this rank's part of the parameter, below 2^40.
    """
    counter: Whole = (parameter << 40) + offset
    return counter


def _mix(bits: Any) -> Any:
    """Hash of 32 bits in a Python int or an int64 tensor (Wellons' lowbias32)."""
    bits = bits ^ (bits >> 16)
    bits = (bits * 0x7FEB352D) & _MASK32
    bits = bits ^ (bits >> 15)
    bits = (bits * 0x846CA68B) & _MASK32
    return bits ^ (bits >> 16)


def rounding_thresholds(rounding: Rounding, numel: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Random thresholds for rounding the first and the second moment.

    In units of the last place, a value is rounded up if the part to be rounded off and
    ``threshold / 2^32`` add up to at least 1.

    The generator is counter-based. Seed, parameter and step are hashed to a key of 64 bits, and
    each element hashes the sum of that key and its offset. So thresholds of successive steps are
    independent, and rounding is right on average for any sequence of gradients. A threshold that
    depended on earlier ones would be correlated with the moment that these have rounded.

    Both moments share one hash: the first uses its upper 16 bits, the second its lower 20. Four
    bits are in both; they are the least significant ones of the first moment's threshold.

    Args:
        rounding: position in the random numbers.
        numel: number of elements.
        device: device of the results.

    Returns:
        Two ``[numel]`` int64 tensors of 32 bits. The second's lowest 12 bits are zero.
    """
    parameter, offset = rounding.counter >> 40, rounding.counter & ((1 << 40) - 1)
    own = _mix((parameter * 0x9E3779B1 + rounding.seed) & _MASK32)
    low = _mix(own ^ rounding.step)
    high = _mix((own + rounding.step * 0x85EBCA6B) & _MASK32)
    start = offset + low
    index = torch.arange(start, start + numel, dtype=torch.int64, device=device)
    bits = _mix((index & _MASK32) ^ (((index >> 32) + high) & _MASK32))
    return bits, (bits << 12) & _MASK32


def _encode_fp16(rows: torch.Tensor, keep_nonzero: bool) -> tuple[torch.Tensor, torch.Tensor]:
    # Infinities and NaNs keep their value, and do not affect the scale. The scale follows the
    # largest magnitude after rounding, so that decoded values encode to the same bits again.
    absmax = torch.where(torch.isfinite(rows), rows.abs(), 0.0).amax(dim=1)
    exponent = (((absmax.view(torch.int32) + _HALF_FP16_ULP) >> 23) - _FP16_TOP_EXPONENT).clamp_(min=1)
    scale, inverse = (exponent << 23).view(torch.float32), ((254 - exponent) << 23).view(torch.float32)
    quotient = (rows * inverse[:, None]).to(torch.float16)
    if keep_nonzero:
        quotient = torch.where((quotient == 0) & (rows > 0), _FP16_SMALLEST, quotient)
    return quotient, scale


def _root8_units(code: torch.Tensor) -> torch.Tensor:
    """Magnitudes of non-negative codes, in units of the scale."""
    square = (code * code).to(torch.float32) * _ROOT8_INVERSE
    return square * square


def _encode_root8(rows: torch.Tensor, thresholds: torch.Tensor | int) -> tuple[torch.Tensor, torch.Tensor]:
    finite = torch.isfinite(rows)
    magnitude = torch.where(finite, rows.abs(), 0.0)
    scale = magnitude.amax(dim=1)
    lift = torch.where(scale < 2.0**-60, 2.0**64, torch.where(scale > 2.0**60, 2.0**-64, 1.0))
    divisor = torch.where(scale > 0, scale * lift, 1.0)
    quotient = magnitude * lift[:, None] * (torch.ones_like(divisor) / divisor)[:, None]
    root = quotient.to(torch.float64).sqrt().to(torch.float32).to(torch.float64).sqrt().to(torch.float32)
    below = (root * float(_ROOT8_TOP)).to(torch.int32).clamp_(max=_ROOT8_TOP - 1)
    low = _root8_units(below)
    step = _root8_units(below + 1) - low
    # In 2^16 parts, so that a decoded value gives exactly its own code for any threshold.
    parts = torch.as_tensor((_MASK32 - thresholds) >> 16, device=rows.device).to(torch.float32) + 0.5
    code = below + ((quotient - low) * 65536.0 >= parts * step)
    code = torch.where(rows < 0, -code, code)
    return torch.where(finite, code & 0xFF, _ROOT8_NAN).to(torch.uint8), scale


def _log8_shift(highest: torch.Tensor, lowest: torch.Tensor) -> torch.Tensor:
    """Finest shift whose range contains both values, as int32 bits, rounded up or down."""
    shift = torch.full_like(highest, _LOG8_SHIFTS[0])
    for finer in _LOG8_SHIFTS[1:]:
        steps = ((highest + (1 << finer) - 1) >> finer) - (lowest >> finer)
        shift = torch.where(steps < _LOG8_TOP, finer, shift)
    return shift


def _encode_log8(rows: torch.Tensor, thresholds: torch.Tensor | int) -> tuple[torch.Tensor, torch.Tensor]:
    bits = rows.contiguous().view(torch.int32)
    positive = (bits > 0) & (bits < _INFINITY)

    def bounds(bits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        highest = torch.where(positive, bits, 0).amax(dim=1, keepdim=True)
        return highest, torch.where(positive, bits, _INFINITY - 1).amin(dim=1, keepdim=True)

    highest, lowest = bounds(bits)
    shift = _log8_shift(highest, lowest)
    largest = (_INFINITY >> shift) - 1
    ceiling = torch.minimum((highest + (1 << shift) - 1) >> shift, largest)
    below = (ceiling - _LOG8_TOP).clamp_(min=0)
    index = (bits + (thresholds >> (32 - shift.to(torch.int64))).to(torch.int32)) >> shift
    rounded = torch.minimum(torch.maximum(index, below + 1), largest) << shift
    # Again: rounded values may fit a finer range, and must encode to the same bits.
    highest, lowest = bounds(rounded)
    shift = _log8_shift(highest, lowest)
    below = ((highest >> shift) - _LOG8_TOP).clamp_(min=0)
    code = torch.where(positive, (rounded >> shift) - below, 0)
    code = torch.where(bits == _INFINITY, _LOG8_INFINITY, code)
    code = torch.where(rows.isnan() | (rows < 0), _LOG8_NAN, code)
    return code.to(torch.uint8), ((below << shift) | shift).view(torch.float32).flatten()


def _encode_rows(
    format: Format, rows: torch.Tensor, thresholds: torch.Tensor | int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Elements and scales of ``[groups, elements]`` values."""
    if format.name == "root8":
        return _encode_root8(rows, thresholds)
    if format.name == "log8":
        return _encode_log8(rows, thresholds)
    return _encode_fp16(rows, format.keep_nonzero)


def _encode_scaled_(stored: Stored, values: torch.Tensor, thresholds: torch.Tensor | None) -> None:
    assert stored.scale is not None
    numel = values.numel()
    whole = numel // SCALE_GROUP * SCALE_GROUP
    parts = [(0, whole), (whole, numel)] if whole < numel else [(0, whole)]
    for start, stop in parts:
        if start == stop:
            continue
        shape = (-1, min(SCALE_GROUP, stop - start))
        taken: torch.Tensor | int = _NEAREST if thresholds is None else thresholds[start:stop].view(shape)
        elements, scale = _encode_rows(stored.format, values[start:stop].view(shape), taken)
        stored.data[start:stop].copy_(elements.view(-1))
        stored.scale[start // SCALE_GROUP : -(-stop // SCALE_GROUP)].copy_(scale)


def _round_to_bf16(values: torch.Tensor, thresholds: torch.Tensor) -> torch.Tensor:
    bits = values.view(torch.int32) + (thresholds >> 16).to(torch.int32) >> 16
    return torch.where(values.isnan(), 0x7FC0, bits).to(torch.int16).view(torch.bfloat16)


def encode_(stored: Stored, values: torch.Tensor, thresholds: torch.Tensor | None = None) -> None:
    """Writes fp32 values to stored elements.

    Values that the format can represent are never changed.

    Args:
        stored: destination, updated in place. Not a remainder, for which the parameter is needed
            (`split_remainder_`).
        values: ``[numel]`` float32 on the same device.
        thresholds: ``[numel]`` int64 for stochastic formats; see `rounding_thresholds`. Without
            thresholds, and in other formats, values are rounded to the nearest.

    Raises:
        TypeError: for remainders.
    """
    if stored.format.needs_param:
        raise TypeError("a remainder is written together with its parameter; use split_remainder_")
    if stored.format.scaled:
        _encode_scaled_(stored, values, thresholds)
    elif thresholds is not None and stored.format.stochastic:
        stored.data.copy_(_round_to_bf16(values, thresholds))
    else:
        stored.data.copy_(values)


def _decode_root8(elements: torch.Tensor) -> torch.Tensor:
    """Values of codes, in units of the scale."""
    code = elements.view(torch.int8).to(torch.int32)
    unit = _root8_units(code)
    return torch.where(elements == _ROOT8_NAN, torch.nan, torch.where(code < 0, -unit, unit))


def _decode_log8(elements: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    code, bits = elements.to(torch.int32), scale.view(torch.int32)
    shift = bits & 31
    values = torch.where(code == 0, 0, bits - shift + (code << shift))
    values = torch.where(code == _LOG8_INFINITY, _INFINITY, values).view(torch.float32)
    return torch.where(code == _LOG8_NAN, torch.nan, values)


def decode(stored: Stored, out: torch.Tensor | None = None) -> torch.Tensor:
    """Reads stored elements as fp32, exactly.

    Args:
        stored: source. Not a remainder, for which the parameter is needed (`join_remainder`).
        out: ``[numel]`` float32 to write to; None for a new tensor.

    Returns:
        ``[numel]`` float32.

    Raises:
        TypeError: for remainders.
    """
    if stored.format.needs_param:
        raise TypeError("a remainder is read together with its parameter; use join_remainder")
    out = torch.empty(stored.data.shape, dtype=torch.float32, device=stored.data.device) if out is None else out
    if stored.format.name == "log8":
        assert stored.scale is not None
        scale = stored.scale.repeat_interleave(SCALE_GROUP)[: out.numel()]
        return out.copy_(_decode_log8(stored.data, scale))
    out.copy_(_decode_root8(stored.data) if stored.format.name == "root8" else stored.data)
    if stored.scale is not None:
        whole = out.numel() // SCALE_GROUP * SCALE_GROUP
        blocks = whole // SCALE_GROUP
        out[:whole].view(-1, SCALE_GROUP).mul_(stored.scale[:blocks, None])
        out[whole:].mul_(stored.scale[blocks:])
    return out


def join_remainder(param: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The fp32 master of a bf16 parameter and its remainder.

    The remainder is the low half of the master's bits. The parameter is the high half, plus one if
    the low half is at least 0x8000 (rounding half away from zero). Together they have all 32 bits.

    Args:
        param: ``[numel]`` bfloat16.
        remainder: ``[numel]`` int16.

    Returns:
        ``[numel]`` float32.
    """
    high = param.view(torch.int16).to(torch.int32) - (remainder < 0).to(torch.int32)
    return ((high << 16) | (remainder.to(torch.int32) & 0xFFFF)).view(torch.float32)


def split_remainder_(param: torch.Tensor, remainder: torch.Tensor, master: torch.Tensor) -> None:
    """Writes an fp32 master as a bf16 parameter and its remainder; the inverse of `join_remainder`.

    Args:
        param: ``[numel]`` bfloat16, updated in place.
        remainder: ``[numel]`` int16, updated in place.
        master: ``[numel]`` float32. Every NaN becomes 0x7FC00000, since the NaN of GPUs,
            0x7FFFFFFF, would round up to the parameter -0.0.
    """
    bits = torch.where(master.isnan(), 0x7FC00000, master.view(torch.int32))
    remainder.copy_(bits)  # int32 -> int16 keeps the low half
    param.view(torch.int16).copy_((bits >> 16) + (remainder < 0))
