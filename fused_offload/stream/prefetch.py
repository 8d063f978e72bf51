"""The window of one device: blocks of state between prefetch and write-back."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch

from fused_offload.memory.staging_ring import ENQUEUE_LOCK, Slot
from fused_offload.plan.window_blocks import WindowBlock

from .copies import Copy, bytes_of
from .queues import CudaOps, DeviceQueues
from .schedule import Event, LoadedBlock, WindowChunk, load_block, write_back_window
from .timing import Call, Prefetch, Span
from .write_backs import WriteBacks


class Window:
    """Blocks of one optimizer's state that are on one device or on their way there.

    The titled notes are in `pipeline.py`.

    Attributes:
        blocks: loaded blocks, in the order of their prefetch.
    """

    def __init__(self, queues: DeviceQueues, write_backs: WriteBacks) -> None:
        """Takes no GPU memory yet.

        Args:
            queues: queues of the device.
            write_backs: write-backs of the optimizer's state on the device.
        """
        self.blocks: dict[WindowBlock, LoadedBlock] = {}
        self._queues = queues
        self._write_backs = write_backs
        self._warned_small = False
        self._prefetches: list[Prefetch] = []  # since the last step
        self._began: torch.cuda.Event | None = None
        self._ended: torch.cuda.Event | None = None
        self._seconds: float | None = None

    @property
    def nbytes(self) -> int:
        """GPU bytes of the blocks."""
        return sum([block.nbytes for block in self.blocks])

    def prefetch(self, blocks: Sequence[WindowBlock]) -> None:
        """Enqueues the copies of blocks that are not loaded yet. Stops when GPU memory runs out.

        Args:
            blocks: blocks to load, in order.
        """
        missing = [block for block in blocks if block not in self.blocks]
        if not missing:
            return
        with ENQUEUE_LOCK, torch.cuda.device(self._queues.device):
            self._queues.begin()
            ops = CudaOps(self._queues)
            call = Call.begin(ops)
            # The measured time begins when the device reaches this point.
            ops.wait_stream(ops.h2d, ops.compute)
            began = ops.record(ops.h2d, timing=True)
            if not self.blocks:
                self._began, self._ended = began, None
            try:
                nbytes = self._load(missing, ops)
                ended = ops.record(ops.h2d, timing=True)
                hold = call.end(ops)
                if nbytes:
                    self._ended = ended
                    self._prefetches.append(Prefetch(Span((began,), ended, nbytes), hold))
            except BaseException:
                for block in missing:
                    self.blocks.pop(block, None)  # else a step would use what no report counts
                raise
            self._queues.end()

    def _load(self, blocks: Iterable[WindowBlock], ops: CudaOps) -> int:
        """Enqueues the copies of blocks while there is memory; returns their bytes."""
        nbytes = 0
        for block in blocks:
            memory = self._memory(block.nbytes)
            if memory is None:
                break
            for stream in self._queues.h2d.both:
                memory.record_stream(stream)
            loaded = load_block(block, Slot(memory), ops, self._write_backs.before_block(block))
            self.blocks[block] = loaded
            nbytes += loaded.nbytes
        return nbytes

    def _memory(self, nbytes: int) -> torch.Tensor | None:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=self._queues.device)
        except torch.OutOfMemoryError:
            if not self._warned_small:
                self._warned_small = True
                warnings.warn(
                    "Out of GPU memory while growing the window of optimizer state: the rest is streamed in the "
                    "step, which takes longer. Set a smaller OffloadConfig(window_bytes=...).",
                    stacklevel=2,
                )
            return None

    def seconds(self) -> float | None:
        """Time from the first to the last copy of the last prefetch that has completed, or None."""
        began, ended = self._began, self._ended
        if began is not None and ended is not None and ended.query():
            self._seconds = began.elapsed_time(ended) / 1e3
        return self._seconds

    def take_prefetches(self) -> tuple[Prefetch, ...]:
        """Removes and returns the prefetches since the last step, for the report of a step."""
        prefetches = tuple(self._prefetches)
        self._prefetches.clear()
        return prefetches

    def cancel(self) -> None:
        """Discards prefetched blocks; the host copy stays authoritative."""
        self.blocks.clear()
        self._prefetches.clear()

    def chunks(
        self,
        parts: Iterable[tuple[int, WindowBlock, tuple[Copy, ...]]],
        launch: Callable[[int], None],
        ops: CudaOps,
    ) -> list[WindowChunk]:
        """Chunks of a step whose state is in the window.

        Args:
            parts: index of each chunk, its block, and the copies of its write-back.
            launch: enqueues the kernel of a chunk, given its index.
            ops: queues of the device.
        """
        chunks = []
        for index, block, to_host in parts:
            loaded = self.blocks[block]
            for stream in (ops.compute, *self._queues.d2h.both):
                loaded.slot.memory.record_stream(stream)  # [Note: window memory]
            chunks.append(WindowChunk(loaded, partial(launch, index), to_host))
        return chunks

    def write_back(self, chunks: list[WindowChunk], ops: CudaOps, computed: Event) -> tuple[Span, ...]:
        """Enqueues the write-back of a step's chunks, and drops each block's memory behind it.

        Args:
            chunks: chunks whose kernels are enqueued; the list is emptied.
            ops: queues of the device.
            computed: timing event behind all kernels.

        Returns:
            The span of the copies; empty if there are none.
        """
        if not chunks:
            self.blocks.clear()  # none of their parameters had a gradient
            return ()
        pending = Counter([chunk.loaded.block for chunk in chunks])
        for block in self.blocks.keys() - pending.keys():
            del self.blocks[block]  # none of its parameters had a gradient

        def written(block: WindowBlock, event: Event) -> None:
            self._write_backs.note_block(block, event)
            pending[block] -= 1
            if not pending[block]:
                del self.blocks[block]

        nbytes = sum(bytes_of(chunk.to_host) for chunk in chunks)
        began = computed, ops.record(ops.d2h, timing=True)
        chunks.reverse()
        write_back_window((chunks.pop() for _ in range(len(chunks))), ops, written)
        return (Span(began, ops.record(ops.d2h, timing=True), nbytes),)
