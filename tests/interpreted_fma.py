"""A fused multiply-add of Triton's interpreter that rounds once, as on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
import triton.runtime.interpreter as interpreter


@triton.jit
def _fma_kernel(a_ptr, b_ptr, c_ptr, out_ptr, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    tl.store(out_ptr + lane, tl.fma(tl.load(a_ptr + lane), tl.load(b_ptr + lane), tl.load(c_ptr + lane)))


def fma_rounds_once() -> bool:
    a, b, c, out = torch.randn(4, 1024, generator=torch.Generator().manual_seed(0))
    # 5 * 0.99 is half way between two numbers of float32; what is added is too small for float64.
    a[:2], b[:2], c[:2] = 5.0, 0.99, torch.tensor([1e-17, -1e-17])
    _fma_kernel[(1,)](a, b, c, out, BLOCK=1024)
    expected = (a.double() * b.double() + c.double()).float()
    expected[0] = torch.nextafter(expected[1], torch.tensor(torch.inf))
    return torch.equal(out, expected)


@contextmanager
def fma_that_rounds_once() -> Iterator[None]:
    """Interpreters of Triton 3.6 and older round an fma twice. The kernel cannot help that, so it
    is mended here.
    """
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available() and not fma_rounds_once():

            def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
                exact = x.data.astype(np.float64) * y.data
                total = exact + z.data
                error = (exact - (total - (total - exact))) + (z.data - (total - exact))
                # Rounded to odd, so that rounding to float32 is as if it were of the exact sum.
                side = np.where(error > 0, np.inf, np.where(error < 0, -np.inf, total))
                total = np.where(total.view(np.int64) & 1, total, np.nextafter(total, side))
                return interpreter.TensorHandle(total.astype(z.data.dtype), z.dtype.scalar)

            patch.setattr(interpreter.InterpreterBuilder, "create_fma", create_fma)
            assert fma_rounds_once()
        yield
