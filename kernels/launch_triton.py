"""Triton helpers for the kernels of all rules: the piece and the pointers of a program."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def piece_of_program(table_ptr, rows, pid, COLUMNS: tl.constexpr = 6):
    """The row of the piece of program ``pid``: the last one whose first program is not after it."""
    low = pid * 0
    high = low + rows
    while high - low > 1:
        middle = (low + high) // 2
        here = tl.load(table_ptr + middle * COLUMNS) <= pid
        low = tl.where(here, middle, low)
        high = tl.where(here, high, middle)
    return low


@triton.jit
def typed_pointer(address, FORMAT: tl.constexpr, ALIGNED: tl.constexpr):
    """An address in bytes as a pointer to elements; bfloat16 as its bits."""
    if ALIGNED:
        address = tl.multiple_of(address, 16)
    if FORMAT == "bf16":
        return address.to(tl.pointer_type(tl.int16))
    elif FORMAT == "fp16":
        return address.to(tl.pointer_type(tl.float16))
    else:
        return address.to(tl.pointer_type(tl.float32))
