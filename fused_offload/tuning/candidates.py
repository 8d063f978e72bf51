"""Which ways to stream are tried, which of them again and again, and which is chosen.

Pure Python.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from statistics import fmean
from typing import NamedTuple

from fused_offload.config import DEFAULT_PROGRAMS
from fused_offload.plan.transfer_settings import Streaming, default_streaming
from fused_offload.profiles.profile import Choice
from fused_offload.profiles.units import MIB

CHUNK_MIB = (4, 8, 16, 24, 32, 48, 64)
DEPTHS = (2, 3, 4)
PROGRAMS = (16, 32, 64, 128)

_AS_GOOD = 0.01
"""Copies that are so little slower than the fastest count as equal; then the smallest ring wins."""

_ZERO_COPY_GAIN = 0.03
"""Zero-copy has to save so much of the time: its kernel takes multiprocessors from whatever runs beside."""

_SHORT_MS = 1.0
"""In a step this short zero-copy only has to be as fast: it takes multiprocessors for less than
that, and is a single launch, where copies cost the host several calls a chunk. So a host that turns
slow lengthens it least."""

_PROGRAMS_GAIN = 0.03
"""Another number of programs than the default has to save so much: how many a kernel needs depends
on the stored formats, of which one is measured, and too few cost more than too many."""

_STILL_CLOSE = 0.03
_CLOSE_AFTER_ONE = 0.2
_LEVELS_MS = 0.4
"""What a way may be slower than the fastest of its transport and stay: a share of the step, and
less the more rounds it was timed in; and while there were few, as much as steps differ between the
two levels of a host's speed."""


def middle_ms(samples_ms: Sequence[float]) -> float:
    """Mean of the middle half; of fewer than four the shortest.

    As steady as a median where there are outliers. But a host's speed may change between two levels
    every few seconds; then the medians of two ways may lie at different levels, though both ways
    saw as much of each.

    Args:
        samples_ms: times of the same work.
    """
    ordered = sorted(samples_ms)
    if len(ordered) < 4:
        return ordered[0]
    outside = len(ordered) // 4
    return fmean(ordered[outside : len(ordered) - outside])


class Timed(NamedTuple):
    """A way to stream, and what steps by it took.

    Attributes:
        streaming: the way.
        samples_ms: each step, from an idle GPU until the state is back in host memory.
    """

    streaming: Streaming
    samples_ms: tuple[float, ...]

    @property
    def ms(self) -> float:
        """Their `middle_ms`."""
        return middle_ms(self.samples_ms)

    @property
    def label(self) -> str:
        """In words."""
        return label(self.streaming)


def label(streaming: Streaming) -> str:
    """A way to stream in words."""
    if streaming.programs is not None:
        return f"zero-copy, {streaming.programs} programs"
    return f"{streaming.chunk_bytes / MIB:g} MiB x {streaming.depth}"


def gigabytes(nbytes: int) -> str:
    """Size of a state in words; the smallest are megabytes."""
    return f"{nbytes / 1e9:.3g} GB"


def chosen(choice: Choice) -> Streaming:
    """The way to stream that a choice is."""
    if choice.transport == "zero_copy":
        return Streaming(programs=choice.programs)
    return Streaming(choice.chunk_bytes, choice.depth)


def candidates(state_bytes: int) -> list[Streaming]:
    """What is tried: copies whose chunks are no larger than the state, the default, and zero-copy kernels.

    Args:
        state_bytes: of the extent.
    """
    sizes = [mib * MIB for mib in CHUNK_MIB if mib * MIB <= state_bytes] or [CHUNK_MIB[0] * MIB]
    ways = [Streaming(chunk_bytes, depth) for chunk_bytes, depth in product(sizes, DEPTHS)]
    if default_streaming(state_bytes) not in ways:
        ways.append(default_streaming(state_bytes))
    return ways + [Streaming(programs=programs) for programs in PROGRAMS]


def still_close(timed: Sequence[Timed], rounds: int, state_bytes: int) -> list[Streaming]:
    """What may be the fastest of its transport after all, and the defaults, which it has to beat.

    Args:
        timed: what is still timed.
        rounds: that all of it was timed in.
        state_bytes: of the extent that is stepped.
    """
    defaults = default_streaming(state_bytes), Streaming(programs=DEFAULT_PROGRAMS)
    close = []
    for group in (_copies(timed), _zero_copies(timed)):
        best = min(one.ms for one in group)
        most = best * (1 + _STILL_CLOSE + _CLOSE_AFTER_ONE / rounds) + _LEVELS_MS / rounds
        close += [one.streaming for one in group if one.ms <= most or one.streaming in defaults]
    return close


def choose(timed: Sequence[Timed], state_bytes: int) -> Choice:
    """The fastest, or what is as good and takes less of the GPU.

    Args:
        timed: copies and zero-copy kernels, of both at least one, all of them in the same rounds.
        state_bytes: of the extent that was stepped.
    """
    copy = _least(_copies(timed), _AS_GOOD, lambda way: way.depth * way.chunk_bytes)
    zero_copy = _least(_zero_copies(timed), _PROGRAMS_GAIN, lambda way: way.programs != DEFAULT_PROGRAMS)
    fastest = {True: _fastest(_zero_copies(timed)), False: _fastest(_copies(timed))}
    wanted = -_AS_GOOD if fastest[False].ms < _SHORT_MS else _ZERO_COPY_GAIN
    enough = fastest[False].ms * (1 - wanted)
    is_zero_copy = fastest[True].ms < enough
    if is_zero_copy and zero_copy.ms >= enough:
        zero_copy = fastest[True]  # the default number of programs would not win
    winner = zero_copy if is_zero_copy else copy
    return Choice(
        state_bytes=state_bytes,
        transport="zero_copy" if is_zero_copy else "copy",
        chunk_bytes=copy.streaming.chunk_bytes,
        depth=copy.streaming.depth,
        programs=zero_copy.streaming.programs or 1,
        ms=winner.ms,
        why=_why(timed, winner, fastest[not is_zero_copy], default_streaming(state_bytes)),
    )


def _copies(timed: Sequence[Timed]) -> list[Timed]:
    return [one for one in timed if one.streaming.programs is None]


def _zero_copies(timed: Sequence[Timed]) -> list[Timed]:
    return [one for one in timed if one.streaming.programs is not None]


def _fastest(timed: Sequence[Timed]) -> Timed:
    return min(timed, key=lambda one: one.ms)


def _least(timed: Sequence[Timed], tolerance: float, cost: Callable[[Streaming], int]) -> Timed:
    """What costs least of all that is as good as the fastest; of equals the fastest."""
    best_ms = _fastest(timed).ms
    as_good = [one for one in timed if one.ms <= best_ms * (1 + tolerance)]
    return min(as_good, key=lambda one: (cost(one.streaming), one.ms))


def _why(timed: Sequence[Timed], winner: Timed, other: Timed, default: Streaming) -> str:
    fastest = _fastest(timed)
    words = [f"{winner.label} takes {winner.ms:.2f} ms"]
    if fastest is not winner:
        words.append(f"{fastest.label} is {1 - fastest.ms / winner.ms:.1%} faster, which is too little")
    defaults = next((one for one in timed if one.streaming == default), None)
    if defaults is not None and defaults is not winner:
        words.append(f"the defaults ({defaults.label}) take {defaults.ms / winner.ms:.3f} times as long")
    words.append(f"the best of the other transport ({other.label}) {other.ms / winner.ms:.3f} times")
    return "; ".join(words)
