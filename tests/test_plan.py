"""The plan covers every element once, within the capacity, and copies no more often than it has to."""

from __future__ import annotations

from collections.abc import Hashable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fused_offload.plan import ALIGNMENT, Chunk, CopyRange, Piece, Segment, align, chunk_numel, make_plan

KINDS = ("a", "b", "c")


@st.composite
def segments_of_a_step(draw: st.DrawFn) -> list[Segment]:
    """Segments in any order; those of one kind lie in one storage, with and without gaps between them."""
    segments = []
    place = dict.fromkeys(KINDS, 0)
    for kind in draw(st.lists(st.sampled_from(KINDS), max_size=12)):
        numel = draw(st.one_of(st.integers(1, 300), st.sampled_from([127, 128, 129, 1024, 5000])))
        start = place[kind] + ALIGNMENT * draw(st.sampled_from([0, 0, 0, 1, 7]))
        segments.append(Segment(kind, start, numel))
        place[kind] = start + align(numel)
    return draw(st.permutations(segments))


CAPACITIES = st.fixed_dictionaries(
    {kind: st.one_of(st.none(), st.integers(1, 20).map(lambda blocks: blocks * ALIGNMENT)) for kind in KINDS}
)
Capacities = dict[str, int | None]


def plan_of(segments: list[Segment], capacities: Capacities) -> tuple[Chunk, ...]:
    def capacity(kind: Hashable) -> int | None:
        assert isinstance(kind, str)
        return capacities[kind]

    return make_plan(segments, capacity)


def pieces_with_chunks(chunks: tuple[Chunk, ...]) -> list[tuple[Chunk, Piece]]:
    return [(chunk, piece) for chunk in chunks for piece in chunk.pieces]


plans = given(segments_of_a_step(), CAPACITIES)
thorough = settings(max_examples=200, deadline=None)


@thorough
@plans
def test_every_element_is_covered_once(segments: list[Segment], capacities: Capacities) -> None:
    offsets = [0] * len(segments)
    for _, piece in pieces_with_chunks(plan_of(segments, capacities)):
        # In order and without gaps: the next piece of a segment starts where its last one ended.
        assert piece.offset == offsets[piece.segment]
        assert piece.numel >= 1
        offsets[piece.segment] += piece.numel
    assert offsets == [segment.numel for segment in segments]


@thorough
@plans
def test_chunks_stay_within_their_capacity(segments: list[Segment], capacities: Capacities) -> None:
    for chunk in plan_of(segments, capacities):
        capacity = capacities[str(chunk.kind)]
        assert capacity is None or chunk.numel <= capacity
        last = chunk.pieces[-1]
        assert chunk.numel == last.slot_start + align(last.numel)


@thorough
@plans
def test_pieces_are_cut_at_multiples_of_the_alignment(segments: list[Segment], capacities: Capacities) -> None:
    for _, piece in pieces_with_chunks(plan_of(segments, capacities)):
        assert piece.offset % ALIGNMENT == 0
        assert piece.slot_start % ALIGNMENT == 0
        ends_the_segment = piece.offset + piece.numel == segments[piece.segment].numel
        assert ends_the_segment or piece.numel % ALIGNMENT == 0


@thorough
@plans
def test_pieces_do_not_share_a_place_in_their_slot(segments: list[Segment], capacities: Capacities) -> None:
    for chunk in plan_of(segments, capacities):
        end = 0
        for piece in chunk.pieces:
            assert piece.slot_start == end
            end += align(piece.numel)


def range_of(chunk: Chunk, piece: Piece) -> CopyRange:
    found = [r for r in chunk.ranges if r.slot_start <= piece.slot_start < r.slot_start + r.numel]
    assert len(found) == 1
    return found[0]


@thorough
@plans
def test_ranges_bring_every_piece_to_its_place(segments: list[Segment], capacities: Capacities) -> None:
    for chunk, piece in pieces_with_chunks(plan_of(segments, capacities)):
        copied = range_of(chunk, piece)
        in_storage = segments[piece.segment].start + piece.offset
        assert copied.start + piece.slot_start - copied.slot_start == in_storage
        assert copied.slot_start + copied.numel >= piece.slot_start + align(piece.numel)


@thorough
@plans
def test_ranges_hold_nothing_but_pieces(segments: list[Segment], capacities: Capacities) -> None:
    for chunk in plan_of(segments, capacities):
        assert sum(r.numel for r in chunk.ranges) == sum(align(piece.numel) for piece in chunk.pieces)
        assert [r.slot_start for r in chunk.ranges] == sorted({r.slot_start for r in chunk.ranges})
        assert all(r.numel % ALIGNMENT == 0 for r in chunk.ranges)


@thorough
@plans
def test_consecutive_storage_is_one_range(segments: list[Segment], capacities: Capacities) -> None:
    for chunk in plan_of(segments, capacities):
        for one, following in zip(chunk.ranges, chunk.ranges[1:], strict=False):
            assert one.start + one.numel < following.start


@thorough
@plans
def test_chunks_do_not_mix_kinds(segments: list[Segment], capacities: Capacities) -> None:
    for chunk, piece in pieces_with_chunks(plan_of(segments, capacities)):
        assert segments[piece.segment].kind == chunk.kind


@thorough
@plans
def test_order(segments: list[Segment], capacities: Capacities) -> None:
    chunks = plan_of(segments, capacities)
    first_seen = list(dict.fromkeys(segment.kind for segment in segments))
    assert list(dict.fromkeys(chunk.kind for chunk in chunks)) == first_seen
    for kind in first_seen:
        places = [
            segments[piece.segment].start + piece.offset
            for chunk, piece in pieces_with_chunks(chunks)
            if chunk.kind == kind
        ]
        assert places == sorted(places)
        positions = [index for index, chunk in enumerate(chunks) if chunk.kind == kind]
        assert positions == list(range(positions[0], positions[0] + len(positions)))


@thorough
@plans
def test_no_chunk_is_started_before_the_last_is_full(segments: list[Segment], capacities: Capacities) -> None:
    chunks = plan_of(segments, capacities)
    for kind in {segment.kind for segment in segments}:
        needed = sum(align(segment.numel) for segment in segments if segment.kind == kind)
        capacity = capacities[str(kind)] or needed
        assert [chunk.numel for chunk in chunks if chunk.kind == kind][:-1] == [capacity] * ((needed - 1) // capacity)


@thorough
@plans
def test_same_input_same_plan(segments: list[Segment], capacities: Capacities) -> None:
    kept = list(segments)
    assert plan_of(segments, capacities) == plan_of(segments, capacities)
    assert segments == kept


def test_nothing_to_do() -> None:
    assert make_plan([], lambda kind: None) == ()


def test_a_parameter_larger_than_a_chunk_is_cut() -> None:
    chunks = make_plan([Segment("a", 128, 3 * 256 + 17)], lambda kind: 256)
    assert [chunk.pieces for chunk in chunks] == [
        (Piece(0, 0, 256, 0),),
        (Piece(0, 256, 256, 0),),
        (Piece(0, 512, 256, 0),),
        (Piece(0, 768, 17, 0),),
    ]
    assert [chunk.ranges for chunk in chunks] == [
        (CopyRange(128, 256, 0),),
        (CopyRange(384, 256, 0),),
        (CopyRange(640, 256, 0),),
        (CopyRange(896, 128, 0),),
    ]


def test_small_parameters_share_a_chunk_and_a_copy() -> None:
    # Segments without gradient leave gaps; their state is not copied.
    segments = [Segment("a", 0, 1), Segment("a", 128, 127), Segment("a", 512, 128)]
    [chunk] = make_plan(segments, lambda kind: 512)
    assert chunk == Chunk(
        "a",
        (Piece(0, 0, 1, 0), Piece(1, 0, 127, 128), Piece(2, 0, 128, 256)),
        (CopyRange(0, 256, 0), CopyRange(512, 128, 256)),
        384,
    )


@pytest.mark.parametrize(("numel", "aligned"), [(0, 0), (1, 128), (127, 128), (128, 128), (129, 256)])
def test_align(numel: int, aligned: int) -> None:
    assert align(numel) == aligned


@given(st.integers(1, 2**34), st.integers(1, 4096))
def test_a_chunk_is_as_large_as_its_bytes_allow(chunk_bytes: int, block_bytes: int) -> None:
    blocks, rest = divmod(chunk_numel(chunk_bytes, block_bytes), ALIGNMENT)
    assert rest == 0
    assert blocks * block_bytes <= chunk_bytes or blocks == 1
    assert (blocks + 1) * block_bytes > chunk_bytes


def test_a_chunk_has_at_least_one_block() -> None:
    assert chunk_numel(1, 1536) == ALIGNMENT
    assert chunk_numel(1536, 1536) == ALIGNMENT
    assert chunk_numel(2 * 1536 - 1, 1536) == ALIGNMENT
    assert chunk_numel(2 * 1536, 1536) == 2 * ALIGNMENT
