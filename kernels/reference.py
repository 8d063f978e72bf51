"""Shared parts of every rule's step in plain torch: arithmetic, scratch, parameters and masters.

Every operation gives its exact result, rounded once to float32. torch's own float32 operations do
that for ``+ - * /``. A fused multiply-add (`fma_`) and the square root, which torch does not round
correctly on the CPU, are computed in float64.
"""

from __future__ import annotations

import threading

import numpy as np
import torch

from .formats import Stored, decode, encode_, join_remainder, split_remainder_

BLOCK_NUMEL = 128 * 1024
"""Number of elements updated at a time, a multiple of `SCALE_GROUP`: few enough for the scratch to
stay in cache, many enough for torch to use several cores (measured: with a quarter of the elements
a step takes 1.9 times as long)."""

_BELOW_FP32 = (1 << 28) - 1
"""Bits of a float64 that are zero in every float32, and in numbers half way between two."""


def round_fp32(value: float) -> float:
    """The float32 nearest to ``value``, as a Python float."""
    return float(np.float32(value))


class Scratch(threading.local):
    """Buffers for the elements updated at a time, one set a thread, so that steps allocate none."""

    def __init__(self) -> None:
        # Made for all callers, with any default device and inference mode.
        with torch.inference_mode(False):
            self.fp32 = [torch.empty(BLOCK_NUMEL, dtype=torch.float32, device="cpu") for _ in range(5)]
            self.fp64 = [torch.empty(BLOCK_NUMEL, dtype=torch.float64, device="cpu") for _ in range(2)]


scratch = Scratch()


def fma_(a: torch.Tensor, b: float, c: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """``out = fma(a, b, c)`` in float32, rounded once.

    The product of two float32 numbers is exact in float64, but the sum may not be. If float64
    rounds a sum to a number half way between two float32 numbers, it has lost the side of the exact
    sum, and a second rounding may go the wrong way. This is frequent with 8-bit moments, which have
    few bits. Such sums are first moved to the exact side.
    """
    total, product = (buffer[: a.numel()] for buffer in scratch.fp64)
    total.copy_(c)
    product.copy_(a)
    torch.add(total, product, alpha=b, out=total)
    low_bits = torch.bitwise_and(total.view(torch.int64), _BELOW_FP32, out=product.view(torch.int64))
    if not low_bits.min():  # faster than all()
        # In parts, which bounds the size of a dozen temporaries.
        for index in (low_bits == 0).nonzero()[:, 0].split(BLOCK_NUMEL // 16):
            exact, rest, near = a[index].double() * b, c[index].double(), total[index]
            error = (exact - (near - (near - exact))) + (rest - (near - exact))
            up, down = (torch.nextafter(near, torch.full_like(near, side)) for side in (torch.inf, -torch.inf))
            total[index] = torch.where(error > 0, up, torch.where(error < 0, down, near))
    return out.copy_(total)


def load_params(param: torch.Tensor, master: Stored | None, out: torch.Tensor, *, is_initial: bool) -> torch.Tensor:
    """The fp32 values that the update applies to.

    A float32 parameter is its own master, even if a copy is kept. A quantised one never is:
    ``param`` is memory that is only written.

    Args:
        param: ``[numel]`` float32, bfloat16 or float16.
        master: stored masters, their 16-bit remainders, or None.
        out: ``[numel]`` float32, written.
        is_initial: take the parameter as the master instead of reading the stored one.
    """
    if master is not None and master.format.of_quantised:
        return decode(master, out)
    if master is None or is_initial or param.dtype == torch.float32:
        return out.copy_(param)
    if master.format.needs_param:
        return out.copy_(join_remainder(param, master.data))
    return decode(master, out)


def store_params_(param: torch.Tensor, master: Stored | None, values: torch.Tensor) -> None:
    """Rounds updated fp32 values to the parameter and its master.

    Args:
        param: ``[numel]`` float32, bfloat16 or float16, updated in place.
        master: stored masters, their 16-bit remainders, or None; updated in place.
        values: ``[numel]`` float32.
    """
    if master is not None and master.format.needs_param:
        split_remainder_(param, master.data, values)
        return
    param.copy_(values)
    if master is not None:
        encode_(master, values)
