"""GPU staging ring of a device, shared by all optimizers of the process."""

from __future__ import annotations

import threading
import weakref
from typing import Any, NamedTuple

import torch

_SLOT_ALIGNMENT = 512  # bytes

ENQUEUE_LOCK = threading.RLock()
"""Lock of all rings. A step holds it from its first enqueued operation to its last.

Take it with a plain ``with ENQUEUE_LOCK``. A context manager written in Python that takes it could
be interrupted between two bytecodes and leave it locked.
"""


class RingNeed(NamedTuple):
    """Size of the ring that one optimizer needs.

    Attributes:
        depth: number of slots.
        slot_bytes: bytes of a slot.
        work_bytes: bytes of the work memory.
    """

    depth: int
    slot_bytes: int
    work_bytes: int = 0

    @property
    def aligned_slot_bytes(self) -> int:
        """Bytes of a slot, rounded up to the alignment."""
        return -(-self.slot_bytes // _SLOT_ALIGNMENT) * _SLOT_ALIGNMENT


class Slot:
    """GPU staging memory of one chunk in flight.

    Attributes:
        memory: ``[slot_bytes]`` uint8 on the device.
        written_back: event after which the slot may be overwritten; None before its first use.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        """Makes an unused slot."""
        self.memory = memory
        self.written_back: Any = None


class StagingRing:
    """Slots of raw GPU memory, and work memory of operations.

    The ring has the size of the largest need of any living user. It grows before the first launch
    of a user with a larger need, never in a steady step.

    Attributes:
        device: device of the slots.
        slots: the slots, empty while nobody needs them.
        work: work memory, or None while nobody needs it; free behind the last step that used it.
    """

    def __init__(self, device: torch.device) -> None:
        """Makes a ring without slots."""
        self.device = device
        self.slots: list[Slot] = []
        self.work: Slot | None = None
        self._needs: weakref.WeakKeyDictionary[Any, RingNeed] = weakref.WeakKeyDictionary()

    @property
    def nbytes(self) -> int:
        """GPU bytes of the slots."""
        return sum(slot.memory.numel() for slot in self.slots)

    @property
    def work_bytes(self) -> int:
        """GPU bytes of the work memory."""
        return 0 if self.work is None else self.work.memory.numel()

    def note_need(self, user: Any, need: RingNeed) -> bool:
        """Records a user's need.

        Args:
            user: the optimizer's pipeline; its need is forgotten when it dies.
            need: slots and bytes.

        Returns:
            True if the ring has to `grow` before the user can go on.
        """
        need = self._needs[user] = need._replace(slot_bytes=need.aligned_slot_bytes)
        # Other users ask for themselves before they step.
        slot_bytes = self.slots[0].memory.numel() if self.slots else 0
        return len(self.slots) < need.depth or slot_bytes < need.slot_bytes or self.work_bytes < need.work_bytes

    def grow(self, user: Any) -> None:
        """Allocates the slots on the current stream; the copy streams have to wait for it then.

        The caller holds `ENQUEUE_LOCK` and has waited for all copies.

        Args:
            user: user whose need is met. A need that cannot be met is forgotten.

        Raises:
            RuntimeError: if the GPU has too little memory; names the need and a ring that fits.
        """
        depth, slot_bytes, work_bytes = wanted = self._wanted()
        self.release()
        try:
            memory = torch.empty(depth * slot_bytes, dtype=torch.uint8, device=self.device)
            work = torch.empty(work_bytes, dtype=torch.uint8, device=self.device) if work_bytes else None
        except torch.OutOfMemoryError as error:
            self._needs.pop(user, None)
            raise RuntimeError(self._too_large(wanted)) from error
        self.work = None if work is None else Slot(work)
        self.slots = [Slot(memory[i * slot_bytes : (i + 1) * slot_bytes]) for i in range(depth)]

    def _wanted(self) -> RingNeed:
        needs = list(self._needs.values())
        return RingNeed(*map(max, zip(*needs, strict=True)))

    def _too_large(self, wanted: RingNeed) -> str:
        depth, slot_bytes, work_bytes = wanted
        free, _ = torch.cuda.mem_get_info(self.device)
        free += torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        smaller = (free - work_bytes) // 2 // 2**20 * 2**20
        advice = "Free GPU memory first"
        if smaller >= 2**20:
            advice = f"OffloadConfig(depth=2, chunk_bytes={smaller}) is the largest ring of two slots that fits"
        if work_bytes < free:
            advice += "; one slot of 128 elements always works, slowly"
        else:
            advice += ": a smaller ring does not help"
        work = f" and {work_bytes} bytes of work memory for its largest parameters" if work_bytes else ""
        return (
            f"The staging ring on {self.device} needs {depth} slots of {slot_bytes} bytes "
            f"({depth * slot_bytes} bytes){work}, but about {free} bytes are free. "
            f"{advice}."
        )

    def rotate(self, used: int) -> None:
        """Moves the slots that a step used last to the end; the caller holds `ENQUEUE_LOCK`.

        Args:
            used: number of chunks of the step.
        """
        if self.slots:
            first = used % len(self.slots)
            self.slots = self.slots[first:] + self.slots[:first]

    def release(self) -> None:
        """Frees the memory; the caller holds `ENQUEUE_LOCK` and has waited for all work."""
        self.slots = []
        self.work = None
