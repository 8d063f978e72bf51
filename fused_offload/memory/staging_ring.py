"""GPU staging: one ring of slots per device, shared by all optimizers of the process."""

from __future__ import annotations

import threading
import weakref
from typing import Any, NamedTuple

import torch

_SLOT_ALIGNMENT = 512  # bytes

ENQUEUE_LOCK = threading.RLock()
"""Held from a step's first enqueued operation to its last, and so by whoever uses a ring, on any device.

Taken by ``with ENQUEUE_LOCK``, never inside a context manager written in Python: an interrupt between two of its
bytecodes would leave the lock held.
"""


class RingNeed(NamedTuple):
    """What one optimizer needs of its device's ring.

    Attributes:
        depth: slots.
        slot_bytes: bytes of a slot.
    """

    depth: int
    slot_bytes: int

    @property
    def aligned_slot_bytes(self) -> int:
        """Bytes that a slot of the ring takes."""
        return -(-self.slot_bytes // _SLOT_ALIGNMENT) * _SLOT_ALIGNMENT


class Slot:
    """GPU staging of one chunk in flight.

    Attributes:
        memory: ``[slot_bytes]`` uint8 on the device.
        written_back: event after which the slot may be overwritten, or None if it was never used.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        """A slot that nobody used yet."""
        self.memory = memory
        self.written_back: Any = None


class StagingRing:
    """``depth`` slots of raw GPU memory, sized to the largest need of any living user.

    Grown only when a user brings a larger need, which is before its first launch; never in a steady step.

    Attributes:
        device: where the slots are.
        slots: the slots, empty while nobody needs them.
    """

    def __init__(self, device: torch.device) -> None:
        """A ring without memory."""
        self.device = device
        self.slots: list[Slot] = []
        self._needs: weakref.WeakKeyDictionary[Any, RingNeed] = weakref.WeakKeyDictionary()

    @property
    def nbytes(self) -> int:
        """GPU bytes that the ring holds now."""
        return sum(slot.memory.numel() for slot in self.slots)

    def note_need(self, user: Any, need: RingNeed) -> bool:
        """Notes what a user needs.

        Args:
            user: whose need it is; forgotten when it dies.
            need: slots and bytes.

        Returns:
            Whether the ring has to `grow` before the user can go on.
        """
        need = RingNeed(need.depth, need.aligned_slot_bytes)
        if self._needs.get(user) != need:
            self._needs[user] = need
        # Other users ask for themselves before they step.
        return len(self.slots) < need.depth or self.slots[0].memory.numel() < need.slot_bytes

    def grow(self, user: Any) -> None:
        """Allocates what is needed on the current stream, for which the copy streams then have to wait.

        The caller holds `ENQUEUE_LOCK` and has waited for all copies.

        Args:
            user: whose need it is for; the need is forgotten if it cannot be met.

        Raises:
            RuntimeError: if the GPU has too little memory; names the need and the smallest ring that fits.
        """
        depth, slot_bytes = self._wanted()
        self.slots = []
        try:
            memory = torch.empty(depth * slot_bytes, dtype=torch.uint8, device=self.device)
        except torch.OutOfMemoryError as error:
            self._needs.pop(user, None)
            raise RuntimeError(self._too_large(depth, slot_bytes)) from error
        self.slots = [Slot(memory[i * slot_bytes : (i + 1) * slot_bytes]) for i in range(depth)]

    def _wanted(self) -> RingNeed:
        needs = list(self._needs.values())
        return RingNeed(max(need.depth for need in needs), max(need.slot_bytes for need in needs))

    def _too_large(self, depth: int, slot_bytes: int) -> str:
        free, _ = torch.cuda.mem_get_info(self.device)
        free += torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        smaller = free // 2 // 2**20 * 2**20
        advice = (
            f"OffloadConfig(depth=2, chunk_bytes={smaller}) is the largest ring of two slots that fits"
            if smaller >= 2**20
            else "Free GPU memory first"
        )
        return (
            f"The staging ring on {self.device} needs {depth} slots of {slot_bytes} bytes "
            f"({depth * slot_bytes} bytes), but about {free} bytes are free. "
            f"{advice}; one slot of one block of 128 elements always works, slowly."
        )

    def rotate(self, used: int) -> None:
        """Puts the slots that a step used last behind the others; the caller holds `ENQUEUE_LOCK`.

        Args:
            used: chunks of the step.
        """
        if self.slots:
            first = used % len(self.slots)
            self.slots = self.slots[first:] + self.slots[:first]

    def release(self) -> None:
        """Drops the memory; the caller holds `ENQUEUE_LOCK` and has waited for all copies."""
        self.slots = []
