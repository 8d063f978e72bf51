"""Shared parts of every rule's step in plain torch: arithmetic, scratch, parameters and masters.

Every operation is computed in float64 and rounded once to float32. For ``+ - * /`` on float32 that
is the result of torch's own float32 operations, so those are used directly. A fused multiply-add
(`fma_`) and the square root (torch's float32 square root on CPU is not correctly rounded) go
through float64 explicitly.
"""

from __future__ import annotations

import threading

import numpy as np
import torch

from .formats import Stored, decode, encode_, join_remainder, split_remainder_

BLOCK_NUMEL = 128 * 1024
"""Elements updated at a time, a multiple of `SCALE_GROUP`: small enough for the scratch to stay in
cache, large enough for torch to spread each operation over several cores (measured: 4 times fewer
elements take 1.9 times as long)."""

_BELOW_FP32 = (1 << 28) - 1
"""Bits of a float64 that are zero in every float32, and half way between two of them."""


def round_fp32(value: float) -> float:
    """The float32 nearest to ``value``, as a Python float."""
    return float(np.float32(value))


class Scratch(threading.local):
    """Buffers of one block, one set a thread: a step allocates nothing."""

    def __init__(self) -> None:
        # A caller's default device and inference mode are not those of the next caller.
        with torch.inference_mode(False):
            self.fp32 = [torch.empty(BLOCK_NUMEL, dtype=torch.float32, device="cpu") for _ in range(5)]
            self.fp64 = [torch.empty(BLOCK_NUMEL, dtype=torch.float64, device="cpu") for _ in range(2)]


scratch = Scratch()


def fma_(a: torch.Tensor, b: float, c: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """``out = fma(a, b, c)`` in float32, rounded once.

    The product of two float32 is exact in float64, but a sum need not be. A sum that float64 rounds
    to a number half way between two of float32 has lost the side that it was on, so rounding it
    again may go wrong. 8-bit moments, which have few bits, get there often. Such sums are first
    moved to their side.
    """
    total, product = (buffer[: a.numel()] for buffer in scratch.fp64)
    total.copy_(c)
    product.copy_(a)
    torch.add(total, product, alpha=b, out=total)
    low_bits = torch.bitwise_and(total.view(torch.int64), _BELOW_FP32, out=product.view(torch.int64))
    if not low_bits.min():  # faster than all()
        for index in (low_bits == 0).nonzero()[:, 0].split(BLOCK_NUMEL // 16):  # bounds a dozen temporaries
            exact, rest, near = a[index].double() * b, c[index].double(), total[index]
            error = (exact - (near - (near - exact))) + (rest - (near - exact))
            up, down = (torch.nextafter(near, torch.full_like(near, side)) for side in (torch.inf, -torch.inf))
            total[index] = torch.where(error > 0, up, torch.where(error < 0, down, near))
    return out.copy_(total)


def load_params(param: torch.Tensor, master: Stored | None, out: torch.Tensor, *, is_initial: bool) -> torch.Tensor:
    """The fp32 values that the update applies to.

    A float32 parameter is its own master even if a copy is kept.

    Args:
        param: ``[numel]`` float32, bfloat16 or float16.
        master: stored masters, their 16-bit remainders, or None.
        out: ``[numel]`` float32, written.
        is_initial: take the parameter as the master instead of reading the stored one.
    """
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
