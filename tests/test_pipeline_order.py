"""The order of copies and kernels, on fake streams that run their queues in any order that the
events allow.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

pytest.importorskip("triton")

from fused_offload.memory.staging_ring import Slot
from fused_offload.state.layout import ArrayPlace
from fused_offload.stream.copies import ChunkTransfer, Copy
from fused_offload.stream.schedule import (
    LoadedBlock,
    StreamedChunk,
    WindowChunk,
    launch_in_host_memory,
    launch_window,
    load_block,
    stream_chunks,
    write_back_window,
)
from fused_offload.stream.write_backs import WriteBacks

EDGES = ("previous step", "slot reuse", "compute after prefetch", "write-back after compute", "window memory")
WINDOW_EDGE = "window memory"
ZERO_COPY_EDGE = "kernel after write-back"


class FakeEvent:
    """As CUDA's: a wait is for what was recorded when it was enqueued."""

    def __init__(self) -> None:
        self.stream: Any = None
        self.recording: list[None] = []  # with an element once it is complete

    def record(self, stream: deque[Any]) -> None:
        self.stream = stream
        done = self.recording = []
        stream.append(lambda: done.append(None) or True)


class FakeOps:
    """Three queues of operations on a slab of counters; an operation runs when its queue and its
    waits allow.
    """

    def __init__(self, slab: list[int], *, dropped: str | None = None) -> None:
        self.compute, self.h2d, self.d2h = deque[Any](), deque[Any](), deque[Any]()
        self.slab, self.dropped = slab, dropped
        self.passing = FakeEvent()
        self.held: dict[int, Any] = {}  # content of slots and blocks: place and value
        self.of_state = 0  # next waits for write-backs of state, not of a slot
        self.errors = 0

    def record(self, stream: deque[Any], event: FakeEvent | None = None, *, timing: bool = False) -> FakeEvent:
        event = event or FakeEvent()
        event.record(stream)
        return event

    def wait(self, stream: deque[Any], event: FakeEvent) -> None:
        done = event.recording
        if self._edge(stream, event) != self.dropped:
            stream.append(lambda: bool(done))

    def wait_stream(self, stream: deque[Any], other: deque[Any]) -> None:
        self.passing.record(other)
        self.wait(stream, self.passing)

    def _edge(self, stream: deque[Any], event: FakeEvent) -> str:
        if stream is self.compute:
            return ZERO_COPY_EDGE if event.stream is self.d2h else "compute after prefetch"
        if stream is self.d2h:
            return "write-back after compute"
        if event.stream is self.compute:
            return "window memory"
        self.of_state -= 1
        return "previous step" if self.of_state >= 0 else "slot reuse"

    def activation(self, memory: Slot) -> None:
        """A layer's output that lives where the window is going to be, and is gone after this."""

        def run() -> bool:
            self.held[id(memory)] = None
            return True

        self.compute.append(run)

    def copy_to_device(self, slot: Slot, copies: Sequence[Copy]) -> None:
        for copy in copies:

            def run(place: int = copy.host_address) -> bool:
                self.held[id(slot)] = (place, self.slab[place])
                return True

            self.h2d.append(run)

    def copy_to_host(self, slot: Slot, copies: Sequence[Copy]) -> None:
        for copy in copies:

            def run(place: int = copy.host_address) -> bool:
                held = self.held.get(id(slot))
                if held is None or held[0] != place:
                    self.errors += 1
                else:
                    self.slab[place] = held[1]
                return True

            self.d2h.append(run)

    def kernel(self, memory: Slot, place: int) -> None:
        def run() -> bool:
            held = self.held.get(id(memory))
            if held is None or held[0] != place:
                self.errors += 1
            else:
                self.held[id(memory)] = (place, held[1] + 1)
            return True

        self.compute.append(run)

    def kernel_in_host_memory(self, place: int) -> None:
        def run() -> bool:
            self.slab[place] += 1
            return True

        self.compute.append(run)

    def run_all(self, rng: random.Random) -> None:
        """Runs everything; favours one queue at a time, so that it gets as far ahead as the events
        let it.
        """
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


def streamed(ops: FakeOps, slots: Sequence[Slot], place: int) -> StreamedChunk:
    copies = (Copy(place, 0, 1),)
    return StreamedChunk(
        ChunkTransfer(copies, copies, ArrayPlace({}, 0)), lambda index: ops.kernel(slots[index], place)
    )


class FakeWindow:
    """Blocks of one place each, in memory that is used again and again."""

    def __init__(self, ops: FakeOps, write_backs: WriteBacks, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ops, self.write_backs = ops, write_backs
        self.memory = [Slot(None) for _ in range(7)]  # type: ignore[arg-type]
        self.loaded: dict[int, LoadedBlock] = {}
        monkeypatch.setattr("fused_offload.stream.schedule.block_transfer", lambda place: (Copy(place, 0, 1),))

    def prefetch(self, places: Sequence[int]) -> None:
        for place in places:
            memory = Slot(None)  # type: ignore[arg-type]
            self.ops.activation(memory)
            written = self.write_backs.before_block(place)
            self.ops.of_state = 1
            self.loaded[place] = load_block(place, memory, self.ops, written)  # type: ignore[arg-type]

    def chunk(self, place: int) -> WindowChunk:
        loaded = self.loaded[place]
        return WindowChunk(loaded, lambda: self.ops.kernel(loaded.slot, place), (Copy(place, 0, 1),))


def train(
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
    *,
    depth: int,
    windows: bool = True,
    zero_copy: bool = False,
    dropped: str | None = None,
) -> tuple[list[int], list[int], int]:
    """Several steps over different places, streamed and in windows of different sizes, without a
    host wait.

    With ``zero_copy`` some places are updated in host memory instead, unless they are in the
    window.
    """
    rng = random.Random(seed)
    slab, expected = [0] * 7, [0] * 7
    slots = [Slot(None) for _ in range(depth)]  # type: ignore[arg-type]
    ops, write_backs = FakeOps(slab, dropped=dropped), WriteBacks()
    window = FakeWindow(ops, write_backs, monkeypatch)
    is_zero_copy = [zero_copy and rng.random() < 0.5 for _ in slab]
    for _ in range(5):
        window.prefetch(range(rng.randint(0, 7) if windows else 0))
        places = sorted(rng.sample(range(7), rng.randint(1, 7)))
        for place in places:
            expected[place] += 1
        not_loaded = [place for place in places if place not in window.loaded]
        in_host_memory = [place for place in not_loaded if is_zero_copy[place]]
        chunks = [streamed(ops, slots, place) for place in not_loaded if place not in in_host_memory]
        in_window = [window.chunk(place) for place in places if place in window.loaded]
        write_backs.begin_step()
        previous = write_backs.before_copies
        ops.of_state = int(bool(chunks) and previous is not None)
        event = stream_chunks(chunks, slots, ops, previous, in_window).written_back
        if in_host_memory:
            launches = [partial(ops.kernel_in_host_memory, place) for place in in_host_memory]
            event = launch_in_host_memory(launches, ops, write_backs.before_kernels)
        if event is not None:
            write_backs.note_streamed(event, window.loaded)
        write_back_window(in_window, ops, write_backs.note_block)
        window.loaded.clear()
    ops.run_all(rng)
    return slab, expected, ops.errors


@pytest.mark.parametrize("zero_copy", [False, True])
@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_every_legal_order_gives_the_same_state(
    depth: int, windows: bool, zero_copy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(50):
        slab, expected, errors = train(seed, monkeypatch, depth=depth, windows=windows, zero_copy=zero_copy)
        assert errors == 0
        assert slab == expected


@pytest.mark.parametrize(
    ("edge", "windows", "zero_copy"),
    [
        *((edge, False, False) for edge in EDGES if edge != WINDOW_EDGE),
        *((edge, True, False) for edge in EDGES),
        (ZERO_COPY_EDGE, True, True),
    ],
)
def test_each_edge_is_needed(edge: str, windows: bool, zero_copy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any one kind of wait, some legal order goes wrong."""
    outcomes = (
        train(seed, monkeypatch, depth=2, windows=windows, zero_copy=zero_copy, dropped=edge) for seed in range(300)
    )
    assert any(errors or slab != expected for slab, expected, errors in outcomes)


def test_write_backs_of_single_blocks_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event of the last streamed chunk does not stand for blocks that are written back behind
    it.
    """
    monkeypatch.setattr(WriteBacks, "note_block", lambda self, block, event: None)
    outcomes = (train(seed, monkeypatch, depth=2) for seed in range(300))
    assert any(errors or slab != expected for slab, expected, errors in outcomes)


def waits_of_h2d(ops: FakeOps) -> list[Any]:
    waits: list[Any] = []
    original = ops.wait

    def wait(stream: Any, event: FakeEvent) -> None:
        if stream is ops.h2d:
            waits.append(event)
        original(stream, event)

    ops.wait = wait  # type: ignore[method-assign]
    return waits


def test_no_h2d_waits_for_an_unrelated_write_back() -> None:
    """A prefetch is held back by its own slot and the previous step only, never by the chunk right
    before it.
    """
    slots = [Slot(None) for _ in range(3)]  # type: ignore[arg-type]
    ops = FakeOps([0] * 7)
    waits = waits_of_h2d(ops)
    stream_chunks([streamed(ops, slots, place) for place in range(3)], slots, ops, None)
    assert waits == []


def test_a_streamed_chunk_waits_for_no_more_than_the_blocks_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are written back last, under the next forward pass; the prefetch has waited for them
    already.
    """
    slots = [Slot(None) for _ in range(2)]  # type: ignore[arg-type]
    ops, write_backs = FakeOps([0] * 7), WriteBacks()
    window = FakeWindow(ops, write_backs, monkeypatch)
    written: list[FakeEvent] = []

    def step() -> list[FakeEvent]:
        used = [slot.written_back for slot in slots]
        window.prefetch((0, 1))
        write_backs.begin_step()
        in_window = [window.chunk(place) for place in (0, 1)]
        chunks = [streamed(ops, slots, place) for place in (2, 3)]
        event = stream_chunks(chunks, slots, ops, write_backs.before_copies, in_window).written_back
        write_backs.note_streamed(event, window.loaded)

        def note(place: Any, event: Any) -> None:
            written.append(event)
            write_backs.note_block(place, event)

        write_back_window(in_window, ops, note)
        window.loaded.clear()
        return used

    step()
    before = list(written)
    waits = waits_of_h2d(ops)
    used = step()
    write_backs_waited_for = [event for event in waits if event.stream is ops.d2h]
    assert write_backs_waited_for[:2] == before  # each block for its own
    assert set(write_backs_waited_for[2:]) <= {*before, *used}
    ops.run_all(random.Random(0))
    assert ops.slab[:4] == [2, 2, 2, 2]


def test_kernels_of_the_window_run_between_the_streamed_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = [Slot(None) for _ in range(2)]  # type: ignore[arg-type]
    ops = FakeOps([0] * 7)
    window = FakeWindow(ops, WriteBacks(), monkeypatch)
    window.prefetch((0, 1, 2))
    order: list[int] = []
    ops.kernel = lambda memory, place: order.append(place)  # type: ignore[method-assign]
    stream_chunks(
        [streamed(ops, slots, place) for place in (3, 4, 5)],
        slots,
        ops,
        None,
        [window.chunk(place) for place in range(3)],
    )
    assert order == [3, 0, 4, 1, 5, 2]
    order.clear()
    launch_window([window.chunk(1)], ops)
    assert order == [1]


def test_a_kernel_in_host_memory_waits_for_nothing_without_a_window() -> None:
    """Under a backward pass a wait for other extents' write-backs would hold up the pass."""
    slots = [Slot(None) for _ in range(2)]  # type: ignore[arg-type]
    ops, write_backs = FakeOps([0] * 7), WriteBacks()
    waits: list[Any] = []
    original = ops.wait

    def wait(stream: Any, event: FakeEvent) -> None:
        if stream is ops.compute:
            waits.append(event.stream)
        original(stream, event)

    ops.wait = wait  # type: ignore[method-assign]
    for _ in range(3):
        write_backs.begin_step()
        stream_chunks([streamed(ops, slots, 0)], slots, ops, write_backs.before_copies)
        launch = partial(ops.kernel_in_host_memory, 1)
        event = launch_in_host_memory([launch], ops, write_backs.before_kernels)
        write_backs.note_streamed(event, ())
    assert all(stream is ops.h2d for stream in waits)
    ops.run_all(random.Random(0))
    assert ops.slab[:2] == [3, 3]
