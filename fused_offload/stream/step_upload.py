"""The step upload: one small copy of address table and skip rows to the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fused_offload.memory import cuda_driver
from fused_offload.memory.pinned import PinnedSlab

from .address_table import AddressTable

_LEAST_BYTES = 2**18  # of memory on the device, which waits for the device whenever it has to grow
_SLAB_BYTES = 2**20  # page-locking costs the same for all smaller sizes
_MOST_BYTES = 2**26  # of copies on their way; a step in parts has hundreds of small tables


class UploadBuffer:
    """Memory on the device for one table, and page-locked pieces for tables on their way there.

    A piece is reused once its copy is complete. The host does not wait for that: it takes another
    piece, up to a limit. A step in parts sends many tables while the device is still busy with the
    backward pass.
    """

    def __init__(self, device: torch.device) -> None:
        """Takes no memory yet."""
        self._device = device
        self._slabs: list[PinnedSlab] = []
        # Pieces, each with the event behind its copy; the oldest first.
        self._pieces: deque[tuple[torch.Tensor, Any]] = deque()
        self._memory = torch.empty(0, dtype=torch.int64, device="cpu")
        # The latest table, and its rows on the device from each chunk's first on.
        self._rows: tuple[AddressTable | None, list[torch.Tensor]] = (None, [])
        self._holds: Hashable = None  # version of that table, if the device has it

    def send(
        self,
        table: AddressTable,
        skip_rows: Mapping[int, Sequence[tuple[float, ...]]],
        stream: int,
        record: Callable[[], Any],
    ) -> tuple[list[torch.Tensor], dict[int, torch.Tensor]]:
        """Enqueues the copy on the current stream, behind everything that reads the previous one.

        Args:
            table: this step's addresses.
            skip_rows: `UpdateRule.skip_rows` by group, of one width.
            stream: raw handle of the current stream.
            record: records an event on it.

        Returns:
            The rows on the device from each chunk's first on, ``[., 6]`` int64, or 8 columns with
            operations, and each group's skip rows, ``[., width]`` float32.
        """
        made_for, rows = self._rows
        if not skip_rows and made_for is table and self._holds == table.version:
            return rows, {}
        values = [row for taken in skip_rows.values() for row in taken]
        values_bytes = len(values) * len(values[0]) * 4 if values else 0
        nbytes = table.nbytes + values_bytes
        self._holds = None  # until the copy is enqueued
        if nbytes > self._memory.nbytes:
            torch.cuda.synchronize(self._device)  # kernels of any stream may still read the table
            size = max(_with_room(nbytes), _LEAST_BYTES)
            self._rows = made_for, rows = None, []
            self._memory = torch.empty(size // 8, dtype=torch.int64, device=self._device)
        if made_for is not table:
            whole = self._memory[: table.rows.size].view(table.rows.shape)
            rows = [whole[chunk.first :] for chunk in table.chunks]
            self._rows = table, rows
        host = self._piece(nbytes)
        table.write_to(host)
        if values:
            host[table.nbytes : nbytes].numpy().view(np.float32)[:] = np.ravel(values)
        cuda_driver.copy_to_device_async(self._memory.data_ptr(), host.data_ptr(), nbytes, stream)
        self._pieces.append((host, record()))
        self._holds = table.version
        return rows, self._split(skip_rows, table.nbytes) if values else {}

    def _split(self, skip_rows: Mapping[int, Sequence[Any]], offset: int) -> dict[int, torch.Tensor]:
        rows, first = {}, offset // 4
        values = self._memory.view(torch.float32)
        for group, taken in skip_rows.items():
            numel = len(taken) * len(taken[0])
            rows[group] = values[first : first + numel].view(len(taken), -1)
            first += numel
        return rows

    def _piece(self, nbytes: int) -> torch.Tensor:
        """Page-locked memory that no copy is reading."""
        while self._pieces and (self._pieces[0][1] is None or self._pieces[0][1].query() or self._is_far_ahead()):
            piece, copied = self._pieces.popleft()
            if copied is not None:
                copied.synchronize()
            if piece.numel() >= nbytes:
                return piece
            # A piece that is too small is dropped. Its slab stays page-locked: unregistering it
            # would wait for the device.
        size = _with_room(nbytes)
        slab = PinnedSlab(max(size, _SLAB_BYTES // size * size), pin=True, device=self._device)
        self._slabs.append(slab)
        self._pieces.extendleft((piece, None) for piece in slab.bytes.split(size))
        return self._pieces.popleft()[0]

    def _is_far_ahead(self) -> bool:
        return sum(piece.numel() for piece, _ in self._pieces) >= _MOST_BYTES


def _with_room(nbytes: int) -> int:
    """Bytes with room for a few more skip rows, rounded up to whole pages."""
    return -(-nbytes * 5 // 4 // 4096) * 4096
