"""Steps that only the device knows to be skipped: counted there, learned by the host later without waiting."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from .pinned import PinnedSlab

MAX_PENDING = 64
"""Steps that the host may be ahead of the device before it waits: bounds the table of bias corrections."""


class SkipCounter:
    """Skipped steps of one optimizer on one device.

    The host counts the steps that it issued, the device those that it skipped; a step's true number is the difference.

    Attributes:
        known: skips that the host has learned of.
    """

    def __init__(self, device: torch.device) -> None:
        """Takes no memory until a scaler is used."""
        self._device = device
        self._slab: PinnedSlab | None = None
        self._pending: deque[tuple[Any, int]] = deque()
        self._turn = 0
        self.known = 0

    @property
    def pending(self) -> int:
        """Steps whose outcome the host does not know yet."""
        return len(self._pending)

    def on_device(self) -> torch.Tensor:
        """``[1]`` int64 on the device: skips so far."""
        if self._slab is None:
            slab = PinnedSlab(MAX_PENDING * 8, pin=True)
            with torch.inference_mode(False):  # steps outside that mode write them too
                skips = torch.full((1,), self.known, dtype=torch.int64, device=self._device)
                is_skip = torch.empty(1, dtype=torch.bool, device=self._device)
            # All of it or, where memory ran out, nothing.
            self._cells, self._skips, self._is_skip = slab.bytes.view(torch.int64), skips, is_skip
            self._slab = slab
        return self._skips

    def count(self, found_inf: torch.Tensor, record: Callable[[], Any]) -> None:
        """Enqueues the count of one step on the current stream, after its kernels.

        Args:
            found_inf: one-element tensor on the device, nonzero if the step was skipped.
            record: records an event on the current stream.
        """
        skips = self.on_device()
        torch.ne(found_inf.view(1), 0, out=self._is_skip)
        skips.add_(self._is_skip)
        cell = self._turn
        self._turn = (self._turn + 1) % MAX_PENDING
        self._cells[cell : cell + 1].copy_(skips, non_blocking=True)
        self._pending.append((record(), cell))

    def learn(self, *, room: bool = False) -> int:
        """Takes in outcomes that have arrived.

        Args:
            room: wait for as many outcomes as it takes to issue one more step.

        Returns:
            Skips that the host did not know of before.
        """
        before = self.known
        while self._pending:
            event, cell = self._pending[0]
            if room and len(self._pending) >= MAX_PENDING:
                event.synchronize()
            elif not event.query():
                break
            self.known = int(self._cells[cell])
            self._pending.popleft()
        return self.known - before

    def wait(self) -> None:
        """Waits until every outcome has arrived; `learn` takes them in."""
        if self._pending:
            self._pending[-1][0].synchronize()
