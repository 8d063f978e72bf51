"""The order of copies and kernels, on fake streams that run their queues in any order that the events allow."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest

pytest.importorskip("triton")

from fused_offload.pipeline import StreamedChunk, stream_chunks
from fused_offload.staging import Slot
from fused_offload.storage import ArrayPlace
from fused_offload.transfers import ChunkTransfer, Copy

EDGES = ("previous step", "slot reuse", "compute after prefetch", "write-back after compute")


class FakeEvent:
    def __init__(self) -> None:
        self.done = False


class FakeOps:
    """Three queues of operations on a slab of counters; an operation runs when its queue and its waits allow."""

    def __init__(self, slab: list[int], slots: Sequence[Slot], *, dropped: str | None = None) -> None:
        self.compute, self.h2d, self.d2h = deque[Any](), deque[Any](), deque[Any]()
        self.slab, self.dropped = slab, dropped
        self.held = {id(slot): None for slot in slots}
        self.written_back: set[int] = set()  # events that free a slot
        self.errors = 0

    def record(self, stream: deque[Any]) -> FakeEvent:
        event = FakeEvent()
        stream.append(lambda: setattr(event, "done", True) or True)
        if stream is self.d2h:
            self.written_back.add(id(event))
        return event

    def wait(self, stream: deque[Any], event: FakeEvent) -> None:
        if self._edge(stream, event) != self.dropped:
            stream.append(lambda: event.done)

    def _edge(self, stream: deque[Any], event: FakeEvent) -> str:
        if stream is self.compute:
            return EDGES[2]
        if stream is self.d2h:
            return EDGES[3]
        return EDGES[0] if event is self.previous else EDGES[1]

    previous: FakeEvent | None = None

    def copy_to_device(self, slot: Slot, copies: Sequence[Copy]) -> None:
        for copy in copies:

            def run(place: int = copy.host_address) -> bool:
                self.held[id(slot)] = (place, self.slab[place])
                return True

            self.h2d.append(run)

    def copy_to_host(self, slot: Slot, copies: Sequence[Copy]) -> None:
        for copy in copies:

            def run(place: int = copy.host_address) -> bool:
                held = self.held[id(slot)]
                if held is None or held[0] != place:
                    self.errors += 1
                else:
                    self.slab[place] = held[1]
                return True

            self.d2h.append(run)

    def kernel(self, slots: Sequence[Slot], place: int) -> Callable[[int], None]:
        def launch(slot_index: int) -> None:
            def run() -> bool:
                held = self.held[id(slots[slot_index])]
                if held is None or held[0] != place:
                    self.errors += 1
                else:
                    self.held[id(slots[slot_index])] = (place, held[1] + 1)
                return True

            self.compute.append(run)

        return launch

    def run_all(self, rng: random.Random) -> None:
        """Runs everything; favours one queue at a time, so that it gets as far ahead as the events let it."""
        queues = [self.compute, self.h2d, self.d2h]
        while any(queues):
            rng.shuffle(queues)
            progress = False
            for queue in queues:
                steps = rng.choice((1, 3, 1000))
                while queue and steps and queue[0]():
                    queue.popleft()
                    progress, steps = True, steps - 1
            assert progress, "deadlock: every queue waits"


def train(seed: int, *, depth: int, dropped: str | None = None, steps: int = 4) -> tuple[list[int], list[int], int]:
    """Several steps over different sets of chunks without a host wait between them."""
    rng = random.Random(seed)
    slab, expected = [0] * 7, [0] * 7
    slots = [Slot(None) for _ in range(depth)]  # type: ignore[arg-type]
    ops = FakeOps(slab, slots, dropped=dropped)
    previous = None
    for _ in range(steps):
        places = sorted(rng.sample(range(7), rng.randint(1, 7)))
        for place in places:
            expected[place] += 1
        ops.previous = previous
        chunks = [
            StreamedChunk(
                ChunkTransfer((Copy(place, 0, 1),), (Copy(place, 0, 1),), ArrayPlace({}, 0)), ops.kernel(slots, place)
            )
            for place in places
        ]
        previous = stream_chunks(chunks, slots, ops, previous)
    ops.run_all(rng)
    return slab, expected, ops.errors


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_every_legal_order_gives_the_same_state(depth: int) -> None:
    for seed in range(200):
        slab, expected, errors = train(seed, depth=depth)
        assert errors == 0
        assert slab == expected


@pytest.mark.parametrize("edge", EDGES)
def test_every_wait_is_needed(edge: str) -> None:
    """Without any one kind of wait, some legal order goes wrong."""
    outcomes = [train(seed, depth=2, dropped=edge) for seed in range(300)]
    assert any(errors or slab != expected for slab, expected, errors in outcomes)


def test_no_h2d_waits_for_an_unrelated_write_back() -> None:
    """A prefetch is held back by its own slot and the previous step only, never by the chunk right before it."""
    slots = [Slot(None) for _ in range(3)]  # type: ignore[arg-type]
    ops = FakeOps([0] * 7, slots)
    waits: list[Any] = []
    chunks = [
        StreamedChunk(ChunkTransfer((Copy(i, 0, 1),), (Copy(i, 0, 1),), ArrayPlace({}, 0)), ops.kernel(slots, i))
        for i in range(3)
    ]
    original = ops.wait
    ops.wait = lambda stream, event: (waits.append(stream is ops.h2d), original(stream, event))[1]  # type: ignore
    stream_chunks(chunks, slots, ops, None)
    assert not any(waits)
