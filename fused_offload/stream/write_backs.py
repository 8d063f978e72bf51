"""The events after which state in host memory is complete."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from typing import Any


class WriteBacks:
    """Events of the write-backs of one optimizer's state on one device; later reads wait for them.

    Write-backs complete in the order in which they are enqueued.

    Attributes:
        last: event of the latest write-back, which covers all earlier ones, or None.
        before_copies: event to wait for before the step's streamed state is copied, or None.
    """

    def __init__(self) -> None:
        """Starts without write-backs."""
        self.last: Any = None
        self.before_copies: Any = None
        self._streamed: Any = None  # event of all state that has none of its own
        self._of_block: dict[Hashable, Any] = {}
        self._some_block_was_written = False

    def begin_step(self) -> None:
        """Sets the event that this step's reads wait for. Its parts share no state."""
        self.before_copies = self.last

    @property
    def before_kernels(self) -> Any:
        """Event to wait for before the step's zero-copy kernels, or None.

        An extent's transport does not change, so only window blocks are copied to the memory of
        these kernels. Without them, the kernels need not wait for write-backs of other extents.
        """
        return self.before_copies if self._some_block_was_written else None

    def before_block(self, block: Hashable) -> Any:
        """Event to wait for before a block is prefetched, or None."""
        return self._of_block.get(block, self._streamed)

    def note_streamed(self, event: Any, window: Collection[Hashable]) -> None:
        """Notes the last write-back of a step's streamed chunks.

        Args:
            event: event of that write-back.
            window: blocks of the step's window, which are written back later.
        """
        # The event is behind all write-backs of earlier steps, so it covers all other blocks.
        self._of_block = {block: event for block, event in self._of_block.items() if block in window}
        self._streamed = self.last = event

    def note_block(self, block: Hashable, event: Any) -> None:
        """Notes the write-back of a window block."""
        self._of_block[block] = self.last = event
        self._some_block_was_written = True
