"""Candidates of transfer settings: the initial set, its reduction, and the choice. Pure Python."""

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
"""Slowdown below which copies count as equal; of equal ones the smallest ring is chosen."""

_ZERO_COPY_GAIN = 0.03
"""Share of the time that zero-copy must save, since it takes multiprocessors from other work."""

_SHORT_MS = 1.0
"""Step time below which zero-copy only has to be as fast as copies.

A step this short hardly takes multiprocessors from other work. Zero-copy is a single launch, while
copies cost the host several calls a chunk, so a busy host disturbs it least.
"""

_PROGRAMS_GAIN = 0.03
"""Share of the time that another number of programs than the default must save.

The best number depends on the stored formats, of which only one is measured. Too few programs cost
more than too many.
"""

_STILL_CLOSE = 0.03
_CLOSE_AFTER_ONE = 0.2
_LEVELS_MS = 0.4
"""Slowdown at which a candidate is dropped, relative to the fastest of its transport.

The sum of a share of the step, of a share that shrinks with the number of rounds, and of a time
that shrinks, too: the difference between the two levels of a host's speed.
"""


def middle_ms(samples_ms: Sequence[float]) -> float:
    """Mean of the middle half; of fewer than four samples the shortest.

    Like a median it resists outliers. But a host's speed may alternate between two levels every few
    seconds. Medians of two candidates may then be at different levels, although both candidates
    were timed at each level equally often.

    Args:
        samples_ms: times of the same work.
    """
    ordered = sorted(samples_ms)
    if len(ordered) < 4:
        return ordered[0]
    outside = len(ordered) // 4
    return fmean(ordered[outside : len(ordered) - outside])


class Timed(NamedTuple):
    """A candidate and its measured steps.

    Attributes:
        streaming: its transfer settings.
        samples_ms: times of steps, from an idle GPU until the state is back in host memory.
    """

    streaming: Streaming
    samples_ms: tuple[float, ...]

    @property
    def ms(self) -> float:
        """`middle_ms` of the samples."""
        return middle_ms(self.samples_ms)

    @property
    def label(self) -> str:
        """The transfer settings in words."""
        return label(self.streaming)


def label(streaming: Streaming) -> str:
    """Transfer settings in words."""
    if streaming.programs is not None:
        return f"zero-copy, {streaming.programs} programs"
    return f"{streaming.chunk_bytes / MIB:g} MiB x {streaming.depth}"


def gigabytes(nbytes: int) -> str:
    """Size of state in words, with three digits."""
    return f"{nbytes / 1e9:.3g} GB"


def chosen(choice: Choice) -> Streaming:
    """Transfer settings of a choice."""
    if choice.transport == "zero_copy":
        return Streaming(programs=choice.programs)
    return Streaming(choice.chunk_bytes, choice.depth)


def candidates(state_bytes: int) -> list[Streaming]:
    """Initial candidates: copies in chunks up to the state's size, the default, zero-copy kernels.

    Args:
        state_bytes: size of the state.
    """
    sizes = [mib * MIB for mib in CHUNK_MIB if mib * MIB <= state_bytes] or [CHUNK_MIB[0] * MIB]
    copies = [Streaming(chunk_bytes, depth) for chunk_bytes, depth in product(sizes, DEPTHS)]
    if default_streaming(state_bytes) not in copies:
        copies.append(default_streaming(state_bytes))
    return copies + [Streaming(programs=programs) for programs in PROGRAMS]


def still_close(timed: Sequence[Timed], rounds: int, state_bytes: int) -> list[Streaming]:
    """The candidates that may still be the fastest of their transport, and the defaults.

    Args:
        timed: candidates that are still timed.
        rounds: rounds in which all of them were timed.
        state_bytes: size of the state.
    """
    defaults = default_streaming(state_bytes), Streaming(programs=DEFAULT_PROGRAMS)
    close = []
    for group in (_copies(timed), _zero_copies(timed)):
        best = min(one.ms for one in group)
        most = best * (1 + _STILL_CLOSE + _CLOSE_AFTER_ONE / rounds) + _LEVELS_MS / rounds
        close += [one.streaming for one in group if one.ms <= most or one.streaming in defaults]
    return close


def choose(timed: Sequence[Timed], state_bytes: int) -> Choice:
    """Chooses the fastest candidate, or an equally good one that takes less of the GPU.

    Args:
        timed: at least one copy and one zero-copy kernel, all timed in the same rounds.
        state_bytes: size of the state.
    """
    copy = _least(_copies(timed), _AS_GOOD, lambda streaming: streaming.depth * streaming.chunk_bytes)
    zero_copy = _least(_zero_copies(timed), _PROGRAMS_GAIN, lambda streaming: streaming.programs != DEFAULT_PROGRAMS)
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
    """The cheapest candidate within a tolerance of the fastest, and of these the fastest."""
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
