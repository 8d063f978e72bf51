"""The address table of a step: the current addresses of each piece's parameter and gradient."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from fused_offload.kernels.formats import rounding_counter
from fused_offload.kernels.launch import ARRAY_COLUMNS, TABLE_COLUMNS, programs_of
from fused_offload.params.tracker import Updates
from fused_offload.plan.chunks import Chunk
from fused_offload.plan.operations import Operation
from fused_offload.plan.planner import StepPlan, kind_of

from .host_params import HostParams

_VECTOR_BYTES = 16  # the widest memory access of the kernels


class ChunkRows(NamedTuple):
    """Rows of the table that one chunk's launch reads.

    Attributes:
        first: first row.
        rows: number of rows.
        programs: programs of the launch.
    """

    first: int
    rows: int
    programs: int


class Arrays(NamedTuple):
    """Inputs of the two columns that rules with an operation have in the table.

    Attributes:
        address: address of the work memory, in which each parameter has an array.
        scalars: this step's scalar of each operation's parameter.
    """

    address: int
    scalars: tuple[float, ...]


class AddressTable:
    """Rows of all chunks of a plan, in order. Only addresses and scalars change between steps.

    Attributes:
        chunks: rows of each chunk.
        rows: ``[rows, 6]`` int64, or 8 columns with operations; see `kernels.launch.TABLE_COLUMNS`.
        version: version of the updates whose addresses are in the table, with all else that is.
    """

    def __init__(
        self,
        plan: StepPlan,
        chunks: Sequence[Chunk],
        updates: Updates,
        host_params: HostParams,
        operations: Sequence[Operation],
        array_itemsize: int,
        *,
        in_place_of_params: bool,
    ) -> None:
        """Fills all columns but addresses and scalars.

        Args:
            plan: the plan.
            chunks: the plan's chunks on one device.
            updates: updates that the plan was made for; no tensor of them is kept.
            host_params: parameters and gradients that kernels find in a slot.
            operations: operations between the chunks.
            array_itemsize: bytes of an element of the operations' arrays.
            in_place_of_params: True if launches find such an array in the parameter's place, False
                if beside it.
        """
        counts = [len(chunk.pieces) for chunk in chunks]
        pieces = itertools.chain.from_iterable(chunk.pieces for chunk in chunks)
        numbers = np.fromiter(itertools.chain.from_iterable(pieces), np.int64, 4 * sum(counts))
        segment, offset, numel, slot_start = numbers.reshape(-1, 4).T
        programs = programs_of(numel)
        columns = ARRAY_COLUMNS if operations and not in_place_of_params else TABLE_COLUMNS
        self.rows = np.zeros((len(numel), columns), np.int64)
        self.rows[:, 0] = np.cumsum(programs) - programs  # over all chunks; made per chunk below
        self.rows[:, 3] = np.array(plan.starts, np.int64)[segment] + offset
        self.rows[:, 4] = numel
        self.rows[:, 5] = rounding_counter(np.array(updates.positions, np.int64)[segment], offset)
        self.chunks: list[ChunkRows] = []
        first = 0
        for chunk, count in zip(chunks, counts, strict=True):
            kind = kind_of(chunk)
            rows = slice(first, first + count)
            self.rows[rows, 0] -= self.rows[first, 0]
            if kind.origin is None:
                self.rows[rows, 3] = slot_start[rows]
            else:
                self.rows[rows, 3] -= kind.origin
            self.chunks.append(ChunkRows(first, count, int(programs[rows].sum())))
            first += count
        self._address = self.rows.ctypes.data
        self._segment = segment
        param_sizes = np.fromiter((param.itemsize for param in updates.params), np.int64, len(updates.params))
        grad_sizes = np.fromiter((dtype.itemsize for dtype in updates.grad_dtypes), np.int64, len(updates.params))
        self._param_offset = offset * param_sizes[segment]
        self._grad_offset = offset * grad_sizes[segment]
        self._operations = [operation.segment for operation in operations]
        arrays = np.zeros(len(updates.params), np.int64)
        arrays[self._operations] = [operation.offset for operation in operations]
        self._array_offset = arrays[segment] + offset * array_itemsize
        self._host_params = host_params
        self._replaced = np.isin(segment, self._operations) if in_place_of_params else None
        self.version: Hashable = -1
        self._aligned: list[bool] = []
        self._starts = np.array([chunk.first for chunk in self.chunks])

    def fill(self, updates: Updates, arrays: Arrays | None, slots: tuple[int, ...]) -> list[bool]:
        """Writes this step's addresses and scalars.

        Args:
            updates: the step's parameters and gradients, in the plan's order.
            arrays: work memory and scalars if the plan has operations.
            slots: address of each slot in the order of the step, if parameters pass through them.

        Returns:
            For each chunk, True if all of its addresses are aligned for the widest access.
        """
        version = updates.version if arrays is None and not slots else (updates.version, arrays, slots)
        if version == self.version:
            return self._aligned
        self.rows[:, 1] = updates.param_addresses[self._segment] + self._param_offset
        if arrays is not None and self._replaced is not None:
            self.rows[self._replaced, 1] = arrays.address + self._array_offset[self._replaced]
        self.rows[:, 2] = updates.grad_addresses[self._segment] + self._grad_offset
        if slots:
            self._host_params.redirect(self.rows, slots)
        misaligned = (self.rows[:, 1] | self.rows[:, 2]) % _VECTOR_BYTES
        self._aligned = [not bits for bits in np.bitwise_or.reduceat(misaligned, self._starts)]
        if arrays is not None and self._replaced is None:
            scalars = np.zeros(len(updates.params), np.float32)
            scalars[self._operations] = arrays.scalars
            self.rows[:, 6] = arrays.address + self._array_offset
            self.rows[:, 7] = scalars.view(np.int32)[self._segment]
        self.version = version  # last, so that an interrupted call is repeated
        return self._aligned

    @property
    def nbytes(self) -> int:
        """Bytes of the table."""
        return self.rows.nbytes

    def write_to(self, memory: torch.Tensor) -> None:
        """Copies the rows to the start of ``memory``, uint8 on CPU."""
        ctypes.memmove(memory.data_ptr(), self._address, self.nbytes)
