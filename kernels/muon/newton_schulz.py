"""Newton-Schulz iteration as in torch.optim.Muon, but in given memory: it allocates nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from fused_offload.kernels.launch import imported_when_called

from .reference import NewtonSchulz

TRANSPOSED_SIZES = 16
"""Divisor of the sizes of matrices that a kernel of our own transposes; torch copies others."""

_copy_transposed = imported_when_called("fused_offload.kernels.muon.launch", "copy_transposed")

_ALIGNMENT = 512  # bytes, as in torch's allocator, since cuBLAS chooses kernels by alignment


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def scratch_bytes(param: torch.Tensor) -> int:
    """Bytes of scratch memory: ``2mn + 4m^2`` for a matrix with ``m <= n``, and a norm.

    Args:
        param: parameter with two dimensions.
    """
    rows = min(param.shape)
    return _aligned(2 * param.numel()) + 2 * _aligned(2 * rows * rows) + _ALIGNMENT


class _Scratch:
    """Arrays of the iteration in given memory."""

    def __init__(self, memory: torch.Tensor, shape: torch.Size) -> None:
        numel, rows = shape.numel(), min(shape)
        square = _aligned(2 * rows * rows)
        self.matrix, memory = self._taken(memory, numel, _aligned(2 * numel))
        gram, memory = self._taken(memory, rows * rows, square)
        update, memory = self._taken(memory, rows * rows, square)
        self.gram, self.update = gram.view(rows, rows), update.view(rows, rows)
        self.norm = memory[:2].view(torch.bfloat16)[0]

    @staticmethod
    def _taken(memory: torch.Tensor, numel: int, nbytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        return memory[: 2 * numel].view(torch.bfloat16), memory[nbytes:]


def newton_schulz_parts(matrix: torch.Tensor, memory: torch.Tensor, settings: NewtonSchulz) -> list[Callable[[], Any]]:
    """Calls that orthogonalise a matrix in place, three for each iteration and a few around them.

    They are those of ``torch.optim._muon._zeropower_via_newtonschulz``: same operations, shapes,
    strides and order, so the same bits. Results alternate between the matrix and the scratch, so
    that the last one is the matrix. Where the matrix has another memory order than its result (it
    is tall, or its columns are contiguous), the last result is copied.

    Args:
        matrix: ``[m, n]`` bfloat16 without gaps, updated in place.
        memory: uint8, `scratch_bytes` of it.
        settings: settings of the iteration.
    """
    a, b, c = settings.coefficients
    scratch = _Scratch(memory, matrix.shape)
    other = scratch.matrix.as_strided(matrix.shape, matrix.stride())
    if matrix.shape[0] > matrix.shape[1]:
        matrix, other = matrix.T, other.T
    wide = [buffer.as_strided(matrix.shape, (matrix.shape[1], 1)) for buffer in (matrix, other)]
    is_in_order = matrix.is_contiguous()
    place = int((settings.steps % 2 == 1) == is_in_order) if settings.steps else 0
    x = (matrix, other)[place]
    norm, gram, update = scratch.norm, scratch.gram, scratch.update
    parts: list[Callable[[], Any]] = [
        partial(torch.linalg.vector_norm, matrix, 2, out=norm),
        partial(torch.clamp, norm, min=settings.eps, out=norm),
        partial(torch.div, matrix, norm, out=x),
    ]
    for _ in range(settings.steps):
        place = 1 - place
        parts += [
            partial(torch.mm, x, x.T, out=gram),
            partial(torch.addmm, gram, gram, gram, beta=b, alpha=c, out=update),
            partial(torch.addmm, x, update, x, beta=a, out=wide[place]),
        ]
        x = wide[place]
    if settings.steps and not is_in_order:
        parts.append(_copy_to(matrix, x))
    return parts


def _copy_to(matrix: torch.Tensor, x: torch.Tensor) -> Callable[[], Any]:
    """The copy of a contiguous matrix into one of transposed memory order.

    torch's kernel reads one element of each row at a time.
    """
    if matrix.is_cuda and all(size % TRANSPOSED_SIZES == 0 for size in matrix.shape):
        return partial(_copy_transposed, x, matrix.T)
    return partial(matrix.copy_, x)
