"""Events after which state in host memory is complete."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from typing import Any


class WriteBacks:
    """Write-backs of one optimizer's state on one device, as the events that later reads wait for.

    Relies on write-backs completing in the order they are enqueued.

    Attributes:
        last: event of the latest write-back, or None. It stands for all earlier ones.
        before_copies: event to wait for before the step's streamed state is copied, or None.
    """

    def __init__(self) -> None:
        """Nothing was written yet."""
        self.last: Any = None
        self.before_copies: Any = None
        self._streamed: Any = None  # of everything that has no event of its own
        self._of_block: dict[Hashable, Any] = {}
        self._some_block_was_written = False

    def begin_step(self) -> None:
        """Fixes the write-backs that reads of this step wait for: its parts share no state."""
        self.before_copies = self.last

    @property
    def before_kernels(self) -> Any:
        """Event to wait for before kernels of the step work on host memory, or None.

        Only the window writes there by copies: an extent's transport does not change from step to step. Without a
        window kernels are not held up by write-backs of other extents.
        """
        return self.before_copies if self._some_block_was_written else None

    def before_block(self, block: Hashable) -> Any:
        """Event to wait for before a block is prefetched, or None."""
        return self._of_block.get(block, self._streamed)

    def note_streamed(self, event: Any, window: Collection[Hashable]) -> None:
        """Takes down the last write-back of a step's streamed chunks.

        Args:
            event: the event.
            window: blocks of the step's window, which are written back behind it.
        """
        # Behind all write-backs of earlier steps, so it stands for those of blocks that are not in the window.
        self._of_block = {block: event for block, event in self._of_block.items() if block in window}
        self._streamed = self.last = event

    def note_block(self, block: Hashable, event: Any) -> None:
        """Takes down the write-back of a block."""
        self._of_block[block] = self.last = event
        self._some_block_was_written = True
