"""Parameters and gradients in host memory, on their way through the ring with the state of their chunk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fused_offload.plan.chunks import Chunk
from fused_offload.state.layout import GRAD, PARAM

from .copies import ChunkTransfer, Copy


class ParamCopies(NamedTuple):
    """Copies of one chunk's parameters and gradients.

    Attributes:
        to_device: parameters and gradients.
        to_host: parameters.
    """

    to_device: tuple[Copy, ...]
    to_host: tuple[Copy, ...]


class HostParams:
    """Places of a plan's parameters and gradients in the slots, and their copies in one step.

    Attributes:
        to_device: bytes of parameters and gradients.
        to_host: bytes of parameters.
    """

    def __init__(self, chunks: Sequence[Chunk], transfers: Mapping[int, ChunkTransfer]) -> None:
        """Finds the pieces that pass through slots.

        Args:
            chunks: chunks of one device.
            transfers: copies of each chunk that streams, by its index.
        """
        found: list[tuple[int, int, int, int, int, int]] = []
        self._pieces: dict[int, slice] = {}
        row = turn = 0
        for index, chunk in enumerate(chunks):
            transfer = transfers.get(index)
            if transfer is not None and PARAM in transfer.place.data:
                at, formats = transfer.place.data, transfer.place.formats
                param_size, grad_size = (formats[key].element_bytes for key in (PARAM, GRAD))
                first = len(found)
                for number, (_, _, numel, start) in enumerate(chunk.pieces, row):
                    param, grad = at[PARAM] + start * param_size, at[GRAD] + start * grad_size
                    found.append((number, turn, param, grad, numel * param_size, numel * grad_size))
                self._pieces[index] = slice(first, len(found))
            row += len(chunk.pieces)
            turn += transfer is not None
        columns = np.array(found, np.int64).reshape(-1, 6).T
        self._rows, self._turns = columns[:2]
        self._offsets, self._nbytes = columns[2:4], columns[4:]
        self._host = self._offsets
        self.to_device, self.to_host = int(self._nbytes.sum()), int(self._nbytes[0].sum())

    def __bool__(self) -> bool:
        """True if any chunk has its parameters in host memory."""
        return bool(self._pieces)

    def redirect(self, rows: np.ndarray, slots: Sequence[int]) -> None:
        """Replaces addresses in host memory by the places that the copies bring them to.

        Args:
            rows: the address table with the addresses of parameters and gradients, changed.
            slots: address of each slot, in the order of the step.
        """
        self._host = rows[self._rows, 1:3].T
        slot = np.array(slots, np.int64)[self._turns % len(slots)]
        rows[self._rows, 1:3] = (slot + self._offsets).T

    def copies(self, index: int) -> ParamCopies | None:
        """Copies of a chunk in this step, or None where its parameters are on the device."""
        pieces = self._pieces.get(index)
        if pieces is None:
            return None
        params, grads = (
            tuple(map(Copy, self._host[one, pieces].tolist(), offsets, self._nbytes[one, pieces].tolist()))
            for one, offsets in enumerate(self._offsets[:, pieces].tolist())
        )
        return ParamCopies((*params, *grads), params)
