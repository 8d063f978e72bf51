"""The address table of a step: where each piece's parameter and gradient are now."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from .kernels.forms import rounding_counter
from .plan import Chunk
from .planner import ChunkKind, StepPlan
from .updates import Updates

_VECTOR_BYTES = 16  # the widest access of the kernel


class ChunkRows(NamedTuple):
    """Part of the table that one chunk's launch reads.

    Attributes:
        first: first row.
        rows: number of rows.
        programs: programs of the launch.
    """

    first: int
    rows: int
    programs: int


class AddressTable:
    """Rows of all chunks of a plan, in their order; only the addresses change from step to step.

    Attributes:
        chunks: rows of each chunk.
        rows: ``[rows, 6]`` int64, see `kernels.adam.TABLE_COLUMNS`.
        version: version of the updates whose addresses it holds.
    """

    def __init__(
        self, plan: StepPlan, chunks: Sequence[Chunk], updates: Updates, programs_of: Callable[[int], int]
    ) -> None:
        """Fills everything but the addresses.

        Args:
            plan: plan that the chunks are from.
            chunks: chunks of one device.
            updates: what the plan was made for; only dtypes and positions are kept.
            programs_of: programs that a piece of so many elements takes.
        """
        count = sum(len(chunk.pieces) for chunk in chunks)
        self.rows = np.zeros((count, 6), np.int64)
        self._segment = np.empty(count, np.int64)
        self._offset = np.empty(count, np.int64)
        self.chunks: list[ChunkRows] = []
        row = 0
        for chunk in chunks:
            first, program = row, 0
            kind = chunk.kind
            assert isinstance(kind, ChunkKind)
            origin = kind.origin
            for segment, offset, numel, slot_start in chunk.pieces:
                start = slot_start if origin is None else plan.starts[segment] + offset - origin
                counter = rounding_counter(updates.positions[segment], offset)
                self.rows[row] = program, 0, 0, start, numel, counter
                self._segment[row], self._offset[row] = segment, offset
                program += programs_of(numel)
                row += 1
            self.chunks.append(ChunkRows(first, row - first, program))
        sizes = np.array(
            [[p.dtype.itemsize, d.itemsize] for p, d in zip(updates.params, updates.grad_dtypes, strict=True)]
        )
        self._param_offset = self._offset * sizes[self._segment, 0]
        self._grad_offset = self._offset * sizes[self._segment, 1]
        self.version = -1
        self._aligned: list[bool] = []
        self._starts = np.array([chunk.first for chunk in self.chunks])

    def fill(self, updates: Updates) -> list[bool]:
        """Writes this step's addresses.

        Args:
            updates: the step's parameters and gradients, in the plan's order.

        Returns:
            For each chunk, whether all its addresses allow the widest accesses.
        """
        if updates.version == self.version:
            return self._aligned
        self.rows[:, 1] = updates.param_addresses[self._segment] + self._param_offset
        self.rows[:, 2] = updates.grad_addresses[self._segment] + self._grad_offset
        misaligned = (self.rows[:, 1] | self.rows[:, 2]) % _VECTOR_BYTES
        self._aligned = [not bits for bits in np.bitwise_or.reduceat(misaligned, self._starts)]
        self.version = updates.version  # last: an interrupted call has filled in nothing
        return self._aligned

    @property
    def nbytes(self) -> int:
        """Bytes of the table."""
        return self.rows.nbytes

    def write_to(self, memory: torch.Tensor) -> None:
        """Copies the rows to the start of ``memory``, uint8 on CPU."""
        memory[: self.nbytes].numpy()[:] = self.rows.reshape(-1).view(np.uint8)
