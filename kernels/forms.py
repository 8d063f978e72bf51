"""Stored forms of optimizer state: how fp32 values lie in memory, encoded and decoded in plain torch.

``formats.py`` holds the same conversions as Triton helpers; both give the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

SCALE_BLOCK = 128
"""Elements that share one scale. Segments start at multiples of it, so no chunking ever splits a scale block."""

_FP16_TOP_EXPONENT = 14  # a block's largest magnitude, rounded to fp16, lands in [2^14, 2^15): below fp16's 65504
_HALF_FP16_ULP = 0x1000  # in the bits of an fp32 number: adding it carries into the exponent where rounding would
_FP16_SMALLEST = 2.0**-24  # smallest positive fp16 number


class Form(NamedTuple):
    """How one state key is stored.

    Attributes:
        name: ``"fp32"``, ``"bf16"``, ``"fp16"`` or ``"remainder"``; also the kernel's compile-time name.
        dtype: dtype of the stored elements.
        scaled: whether each block of `SCALE_BLOCK` elements has an fp32 power-of-two scale beside it.
        keep_nonzero: whether a positive value may not become zero. Set for second moments: ``exp_avg_sq == 0`` with
            ``exp_avg != 0`` would turn the update into ``exp_avg / eps``.
    """

    name: str
    dtype: torch.dtype
    scaled: bool = False
    keep_nonzero: bool = False

    @property
    def element_bytes(self) -> int:
        """Bytes of one stored element, without its share of a scale."""
        return self.dtype.itemsize

    def stored_bytes(self, numel: int) -> int:
        """Bytes that ``numel`` elements take, scales included; ``numel`` is a multiple of `SCALE_BLOCK`."""
        return numel * self.element_bytes + (numel // SCALE_BLOCK * 4 if self.scaled else 0)


FP32 = Form("fp32", torch.float32)
BF16 = Form("bf16", torch.bfloat16)
FP16 = Form("fp16", torch.float16, scaled=True)
FP16_NONZERO = Form("fp16", torch.float16, scaled=True, keep_nonzero=True)
REMAINDER = Form("remainder", torch.int16)


class Stored(NamedTuple):
    """A run of stored elements.

    Attributes:
        form: how the elements are stored.
        data: ``[numel]`` of ``form.dtype``, contiguous.
        scale: ``[ceil(numel / SCALE_BLOCK)]`` float32 if ``form.scaled``, else None.
    """

    form: Form
    data: torch.Tensor
    scale: torch.Tensor | None = None

    def narrow(self, start: int, numel: int) -> Stored:
        """Elements ``[start, start + numel)``; ``start`` is a multiple of `SCALE_BLOCK`."""
        scale = self.scale
        if scale is not None:
            first = start // SCALE_BLOCK
            scale = scale[first : first + -(-numel // SCALE_BLOCK)]
        return Stored(self.form, self.data[start : start + numel], scale)


def _block_scales(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Power-of-two scale of each row of ``[blocks, SCALE_BLOCK]`` fp32 values, and its exact reciprocal.

    The scale is that of the largest magnitude after rounding, so that decoded values encode to the same bits again.
    """
    # Infinities and NaNs keep their own value and must not cost their neighbours theirs.
    absmax = torch.where(torch.isfinite(values), values.abs(), 0.0).amax(dim=1)
    exponent = (((absmax.view(torch.int32) + _HALF_FP16_ULP) >> 23) - _FP16_TOP_EXPONENT).clamp_(min=1)
    return (exponent << 23).view(torch.float32), ((254 - exponent) << 23).view(torch.float32)


def _encode_scaled_(stored: Stored, values: torch.Tensor) -> None:
    assert stored.scale is not None
    numel = values.numel()
    whole = numel // SCALE_BLOCK * SCALE_BLOCK
    parts = [(0, whole), (whole, numel)] if whole < numel else [(0, whole)]
    for start, stop in parts:
        if start == stop:
            continue
        rows = values[start:stop].view(-1, min(SCALE_BLOCK, stop - start))
        scale, inverse = _block_scales(rows)
        quotient = (rows * inverse[:, None]).to(torch.float16)
        if stored.form.keep_nonzero:
            quotient = torch.where((quotient == 0) & (rows > 0), _FP16_SMALLEST, quotient)
        stored.data[start:stop].copy_(quotient.view(-1))
        stored.scale[start // SCALE_BLOCK : -(-stop // SCALE_BLOCK)].copy_(scale)


def encode_(stored: Stored, values: torch.Tensor) -> None:
    """Writes fp32 values into a stored run, rounding to the nearest even where the form is narrower.

    Args:
        stored: destination, updated in place. Not a remainder: those need the parameter too (`split_remainder_`).
        values: ``[numel]`` float32 on the same device.
    """
    if stored.form.name == "remainder":
        raise TypeError("a remainder is written together with its parameter; use split_remainder_")
    if stored.form.scaled:
        _encode_scaled_(stored, values)
    else:
        stored.data.copy_(values)


def decode(stored: Stored, out: torch.Tensor | None = None) -> torch.Tensor:
    """Reads a stored run as fp32, exactly.

    Args:
        stored: source. Not a remainder: those need the parameter too (`join_remainder`).
        out: ``[numel]`` float32 to write to; a new tensor if None.

    Returns:
        ``[numel]`` float32.
    """
    if stored.form.name == "remainder":
        raise TypeError("a remainder is read together with its parameter; use join_remainder")
    out = torch.empty(stored.data.shape, dtype=torch.float32, device=stored.data.device) if out is None else out
    out.copy_(stored.data)
    if stored.scale is not None:
        whole = out.numel() // SCALE_BLOCK * SCALE_BLOCK
        blocks = whole // SCALE_BLOCK
        out[:whole].view(-1, SCALE_BLOCK).mul_(stored.scale[:blocks, None])
        out[whole:].mul_(stored.scale[blocks:])
    return out


def join_remainder(param: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The fp32 master of a bf16 parameter and its remainder.

    The remainder is the low half of the master's bits; the parameter is the high half, plus one where the low half is
    at least 0x8000 (rounding half away from zero), so that both together give back all 32 bits.

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
        master: ``[numel]`` float32. Every NaN becomes 0x7FC00000: a GPU's 0x7FFFFFFF would round up to the parameter
            -0.0, and the NaN would be seen by nobody.
    """
    bits = torch.where(master.isnan(), 0x7FC00000, master.view(torch.int32))
    remainder.copy_(bits)  # int32 -> int16 keeps the low half
    param.view(torch.int16).copy_((bits >> 16) + (remainder < 0))
