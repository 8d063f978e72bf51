"""What a step tells the device besides the state: addresses and bias corrections, in one small copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from . import cuda_driver
from .pinned import PinnedSlab
from .table import AddressTable

_HALVES = 2  # the host writes one while the device may still read the other


class UploadBuffer:
    """Ring-buffered pinned memory and its copy on the device, grown as plans grow."""

    def __init__(self, device: torch.device) -> None:
        """Takes no memory yet."""
        self._device = device
        self._capacity = 0
        self._slab: PinnedSlab | None = None
        self._sent: list[Any] = [None] * _HALVES
        self._turn = 0
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._table: AddressTable | None = None  # keeps the id below from being reused
        self._holds = (0, -1)
        self._rows = torch.empty(0, dtype=torch.int64, device="cpu")

    def send(
        self,
        table: AddressTable,
        corrections: Mapping[int, list[tuple[float, float]]],
        stream: int,
        record: Callable[[], Any],
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Enqueues the copy on the current stream, behind everything that reads the previous one.

        Args:
            table: this step's addresses.
            corrections: per group both bias corrections by the number of skips.
            stream: raw handle of the current stream.
            record: records an event on it.

        Returns:
            The rows on the device, ``[rows, 6]`` int64, and each group's corrections, ``[., 2]`` float32.
        """
        if not corrections and self._holds == (id(table), table.version):
            return self._rows, {}
        pairs = [pair for rows in corrections.values() for pair in rows]
        values = torch.tensor(pairs, dtype=torch.float32, device="cpu")  # whatever torch's default device is
        nbytes = table.nbytes + values.nbytes
        self._reserve(nbytes)
        assert self._slab is not None
        self._turn = (self._turn + 1) % _HALVES
        if self._sent[self._turn] is not None:
            self._sent[self._turn].synchronize()
        self._holds = (0, -1)  # until all of it is enqueued
        host = self._slab.bytes[self._turn * self._capacity :][:nbytes]
        table.write_to(host)
        host[table.nbytes :].copy_(values.view(-1).view(torch.uint8))
        cuda_driver.copy_to_device_async(self._memory.data_ptr(), host.data_ptr(), nbytes, stream)
        self._sent[self._turn] = record()
        self._table, self._holds = table, (id(table), table.version)
        self._rows = self._memory[: table.nbytes].view(torch.int64).view(table.rows.shape)
        return self._rows, self._split(corrections, self._memory[table.nbytes : nbytes].view(torch.float32).view(-1, 2))

    @staticmethod
    def _split(corrections: Mapping[int, list[Any]], values: torch.Tensor) -> dict[int, torch.Tensor]:
        rows, first = {}, 0
        for group, pairs in corrections.items():
            rows[group] = values[first : first + len(pairs)]
            first += len(pairs)
        return rows

    def _reserve(self, nbytes: int) -> None:
        if nbytes <= self._capacity:
            return
        torch.cuda.synchronize(self._device)
        capacity = -(-nbytes * 5 // 4 // 4096) * 4096  # room for corrections to come and go
        memory = torch.empty(capacity, dtype=torch.uint8, device=self._device)
        slab = PinnedSlab(capacity * _HALVES, pin=True)
        # Nothing fails from here on: after running out of memory, what there is still fits together.
        if self._slab is not None:
            self._slab.close()
        self._capacity, self._memory, self._slab = capacity, memory, slab
        self._sent = [None] * _HALVES
