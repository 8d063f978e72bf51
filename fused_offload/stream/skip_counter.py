"""The skip counter: the device counts the steps that it skips, and the host reads them later."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fused_offload.memory.pinned import PinnedSlab

MAX_PENDING = 64
"""Most steps whose outcome is pending before the host waits; bounds the number of skip rows."""


class _Learned(NamedTuple):
    """Outcomes that the host knows. One record, so that an interrupt cannot leave half of it set.

    Attributes:
        steps: number of steps whose outcome is known.
        skips: number of skipped steps among them.
        last_was_skipped: outcome of the latest of them.
    """

    steps: int
    skips: int
    last_was_skipped: bool


class SkipCounter:
    """Skipped steps of one optimizer on one device.

    The host counts the steps that it issued, the device counts those that it skipped. A step's true
    number is the difference.
    """

    def __init__(self, device: torch.device) -> None:
        """Takes no memory until a scaler is used."""
        self._device = device
        self._slab: PinnedSlab | None = None
        self._pending: deque[tuple[int, Any]] = deque()  # step, and the event behind its count
        self._steps = 0
        self._learned = _Learned(0, 0, False)

    @property
    def known(self) -> int:
        """Skips that the host has learned of."""
        return self._learned.skips

    @property
    def last_was_skipped(self) -> bool:
        """Outcome of the latest step that the host has learned of."""
        return self._learned.last_was_skipped

    @property
    def pending(self) -> int:
        """Number of pending steps."""
        return len(self._pending)

    def on_device(self) -> torch.Tensor:
        """``[1]`` int64 on the device: skips so far."""
        if self._slab is None:
            slab = PinnedSlab(MAX_PENDING * 8, pin=True, device=self._device)
            with torch.inference_mode(False):  # steps outside of inference mode write them too
                skips = torch.full((1,), self.known, dtype=torch.int64, device=self._device)
                is_skip = torch.empty(1, dtype=torch.bool, device=self._device)
            # Set together, so that nothing is set if memory runs out above.
            self._cells, self._skips, self._is_skip = slab.bytes.view(torch.int64), skips, is_skip
            self._slab = slab
        return self._skips

    def count(self, found_inf: torch.Tensor, record: Callable[[], Any]) -> None:
        """Enqueues the count of one step on the current stream, after the step's kernels.

        Args:
            found_inf: one-element tensor on the device, nonzero if the step is skipped.
            record: records an event on the current stream.
        """
        skips = self.on_device()
        torch.ne(found_inf.view(1), 0, out=self._is_skip)
        skips.add_(self._is_skip)
        cell = self._steps % MAX_PENDING
        self._cells[cell : cell + 1].copy_(skips, non_blocking=True)
        self._pending.append((self._steps, record()))
        self._steps += 1

    def learn(self, *, wait: bool) -> int:
        """Reads the outcomes that have arrived; waits for the oldest if `MAX_PENDING` are pending.

        Args:
            wait: wait for all outcomes.

        Returns:
            Number of skips that the host knows of now.
        """
        while self._pending:
            step, event = self._pending[0]
            if wait or len(self._pending) >= MAX_PENDING:
                event.synchronize()
            elif not event.query():
                break
            if step == self._learned.steps:  # False if an interrupt came just before `popleft`
                skips = int(self._cells[step % MAX_PENDING])
                self._learned = _Learned(step + 1, skips, skips > self.known)
            self._pending.popleft()
        return self._learned.skips

    def recount(self) -> None:
        """Reads the count on the device, after a step that failed while it was counted."""
        if self._slab is not None:
            self._learned = _Learned(self._steps, int(self._skips), False)
        self._pending.clear()
