"""The plan covers every element once, within the capacity, and copies no more often than it has
to.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fused_offload.plan.chunks import Chunk, CopyRange, Piece, Segment, make_plan
from fused_offload.state.layout import ALIGNMENT, align, chunk_numel

KINDS = ("a", "b", "c")


@st.composite
def segments_of_a_step(draw: st.DrawFn) -> list[Segment]:
    """Segments in any order; those of one kind lie in one storage, with and without gaps between
    them.
    """
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


class Planned(NamedTuple):
    """A plan and what it was made from."""

    segments: list[Segment]
    capacities: dict[str, int | None]
    chunks: tuple[Chunk, ...]

    def pieces(self) -> list[tuple[Chunk, Piece]]:
        return [(chunk, piece) for chunk in self.chunks for piece in chunk.pieces]

    def chunks_of(self, kind: Hashable) -> list[Chunk]:
        return [chunk for chunk in self.chunks if chunk.kind == kind]


def check_every_element_is_covered_once(plan: Planned) -> None:
    offsets = [0] * len(plan.segments)
    for _, piece in plan.pieces():
        # In order and without gaps: the next piece of a segment starts where its last one ended.
        assert piece.offset == offsets[piece.segment]
        assert piece.numel >= 1
        offsets[piece.segment] += piece.numel
    assert offsets == [segment.numel for segment in plan.segments]


def check_chunks_stay_within_their_capacity(plan: Planned) -> None:
    for chunk in plan.chunks:
        capacity = plan.capacities[str(chunk.kind)]
        assert capacity is None or chunk.numel <= capacity
        last = chunk.pieces[-1]
        assert chunk.numel == last.slot_start + align(last.numel)


def check_pieces_are_cut_at_multiples_of_the_alignment(plan: Planned) -> None:
    for _, piece in plan.pieces():
        assert piece.offset % ALIGNMENT == 0
        assert piece.slot_start % ALIGNMENT == 0
        ends_the_segment = piece.offset + piece.numel == plan.segments[piece.segment].numel
        assert ends_the_segment or piece.numel % ALIGNMENT == 0


def check_pieces_do_not_share_a_place_in_their_slot(plan: Planned) -> None:
    for chunk in plan.chunks:
        end = 0
        for piece in chunk.pieces:
            assert piece.slot_start == end
            end += align(piece.numel)


def range_of(chunk: Chunk, piece: Piece) -> CopyRange:
    found = [r for r in chunk.ranges if r.slot_start <= piece.slot_start < r.slot_start + r.numel]
    assert len(found) == 1
    return found[0]


def check_ranges_bring_every_piece_to_its_place(plan: Planned) -> None:
    for chunk, piece in plan.pieces():
        copied = range_of(chunk, piece)
        in_storage = plan.segments[piece.segment].start + piece.offset
        assert copied.start + piece.slot_start - copied.slot_start == in_storage
        assert copied.slot_start + copied.numel >= piece.slot_start + align(piece.numel)


def check_ranges_hold_nothing_but_pieces(plan: Planned) -> None:
    for chunk in plan.chunks:
        assert sum(r.numel for r in chunk.ranges) == sum(align(piece.numel) for piece in chunk.pieces)
        assert [r.slot_start for r in chunk.ranges] == sorted({r.slot_start for r in chunk.ranges})
        assert all(r.numel % ALIGNMENT == 0 for r in chunk.ranges)


def check_consecutive_storage_is_one_range(plan: Planned) -> None:
    for chunk in plan.chunks:
        for one, following in zip(chunk.ranges, chunk.ranges[1:], strict=False):
            assert one.start + one.numel < following.start


def check_chunks_do_not_mix_kinds(plan: Planned) -> None:
    for chunk, piece in plan.pieces():
        assert plan.segments[piece.segment].kind == chunk.kind


def check_order(plan: Planned) -> None:
    first_seen = list(dict.fromkeys(segment.kind for segment in plan.segments))
    assert list(dict.fromkeys(chunk.kind for chunk in plan.chunks)) == first_seen
    for kind in first_seen:
        pieces = [piece for chunk in plan.chunks_of(kind) for piece in chunk.pieces]
        places = [plan.segments[piece.segment].start + piece.offset for piece in pieces]
        assert places == sorted(places)
        positions = [index for index, chunk in enumerate(plan.chunks) if chunk.kind == kind]
        assert positions == list(range(positions[0], positions[0] + len(positions)))


def check_no_chunk_is_started_before_the_last_is_full(plan: Planned) -> None:
    for kind in {segment.kind for segment in plan.segments}:
        needed = sum(align(segment.numel) for segment in plan.segments if segment.kind == kind)
        capacity = plan.capacities[str(kind)] or needed
        assert [chunk.numel for chunk in plan.chunks_of(kind)][:-1] == [capacity] * ((needed - 1) // capacity)


@settings(max_examples=200, deadline=None)
@given(segments_of_a_step(), CAPACITIES)
def test_any_plan(segments: list[Segment], capacities: dict[str, int | None]) -> None:
    kept = list(segments)
    plan = Planned(segments, capacities, make_plan(segments, lambda kind: capacities[str(kind)]))
    assert segments == kept
    check_every_element_is_covered_once(plan)
    check_chunks_stay_within_their_capacity(plan)
    check_pieces_are_cut_at_multiples_of_the_alignment(plan)
    check_pieces_do_not_share_a_place_in_their_slot(plan)
    check_ranges_bring_every_piece_to_its_place(plan)
    check_ranges_hold_nothing_but_pieces(plan)
    check_consecutive_storage_is_one_range(plan)
    check_chunks_do_not_mix_kinds(plan)
    check_order(plan)
    check_no_chunk_is_started_before_the_last_is_full(plan)


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


@settings(deadline=None)
@given(st.integers(1, 2**34), st.integers(1, 4096))
def test_a_chunk_is_as_large_as_its_bytes_allow(chunk_bytes: int, alignment_bytes: int) -> None:
    multiple, rest = divmod(chunk_numel(chunk_bytes, alignment_bytes), ALIGNMENT)
    assert rest == 0
    assert multiple * alignment_bytes <= chunk_bytes or multiple == 1
    assert (multiple + 1) * alignment_bytes > chunk_bytes


def test_a_chunk_is_not_smaller_than_the_alignment() -> None:
    assert chunk_numel(1, 1536) == ALIGNMENT
    assert chunk_numel(1536, 1536) == ALIGNMENT
    assert chunk_numel(2 * 1536 - 1, 1536) == ALIGNMENT
    assert chunk_numel(2 * 1536, 1536) == 2 * ALIGNMENT
