"""Measures a GPU: its link, and optimizer steps over the ways to stream their state."""

from __future__ import annotations

import contextlib
import datetime
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fused_offload import OffloadConfig
from fused_offload.memory.host_limits import available_host_bytes
from fused_offload.plan.transfer_settings import Streaming
from fused_offload.profiles.machine_key import MachineKey
from fused_offload.profiles.profile import Choice, Profile, Timing, nearest
from fused_offload.profiles.units import MIB

from .candidates import CHUNK_MIB, DEPTHS, Timed, candidates, choose, chosen, gigabytes, middle_ms, still_close
from .link import LinkRate, Report, measure_link
from .step_harness import NARROW, WIDE, Rig, rig

_STEPS = 2
"""That one way is timed for in a round."""
_TIMED_ALONE = 12
"""Steps of what is not compared."""
_FEWEST_ROUNDS, _MOST_ROUNDS = 8, 24
_SMALL_NUMEL = 20_000_000
_SMALLER = (64, 16, 4)  # so many times: what the host's time and zero-copy decide differs from size to size
_STEP_SECONDS = 0.04  # of the large state, roughly: long enough to be measured, short enough to try everything
_MOST_BYTES = 2_000_000_000
_SHARE_OF_MEMORY = 0.25  # that tuning takes of what is free, on host and GPU

_WIDE_BYTES = 12
_LARGEST_RING = max(CHUNK_MIB) * MIB * max(DEPTHS)


class Swept(NamedTuple):
    """Steps of one size.

    Attributes:
        param_numel: elements that are stepped.
        state_bytes: of their state.
        timed: every way that was tried.
        choice: the one that is chosen.
    """

    param_numel: int
    state_bytes: int
    timed: tuple[Timed, ...]
    choice: Choice


@dataclass(frozen=True)
class Tuning:
    """All that was measured.

    Attributes:
        profile: what is kept.
        link: rates by size of a copy.
        kernel_ms: a step of the largest state with all of it on the GPU, or None where it did not
            fit.
        swept: steps, by ascending size.
        seconds: how long it took.
    """

    profile: Profile
    link: tuple[LinkRate, ...]
    kernel_ms: float | None
    swept: tuple[Swept, ...]
    seconds: float


def tune(key: MachineKey, device: torch.device, seconds: float, report: Report) -> Tuning:
    """Measures everything and chooses.

    Args:
        key: of the machine.
        device: the GPU.
        seconds: for the link and the sweeps, with the page-locking and compiling that they need.
            Every way is timed once in any case, and the steps that are not compared come on top.
        report: told about the progress.

    Raises:
        RuntimeError: if there is too little memory on the GPU or the host.
    """
    start = time.perf_counter()
    with torch.cuda.device(device):
        link = measure_link(device, report)
        duplex_gbps = max(rate.duplex_gbps for rate in link)
        numels = sizes(duplex_gbps, *_free_bytes(device))
        swept: list[Swept] = []
        for numel in numels:
            with rig(numel, WIDE, device) as steps:
                swept.append(sweep(steps, start + seconds, len(numels) - len(swept), report))
        narrow = _time_narrow(numels, [one.choice for one in swept], device, report)
        kernel_ms = _time_resident(numels[-1], device, report)
    profile = Profile(
        key,
        datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="minutes"),
        duplex_gbps,
        tuple(one.choice for one in swept),
        tuple(Timing(one.param_numel, one.state_bytes, one.choice.ms) for one in swept),
        narrow,
    )
    return Tuning(profile, tuple(link), kernel_ms, tuple(swept), time.perf_counter() - start)


def sizes(duplex_gbps: float, host_bytes: int | None, gpu_bytes: int) -> list[int]:
    """Elements of the states that are stepped, ascending; the last but one is small and the last large.

    Args:
        duplex_gbps: of the link, each way.
        host_bytes: that may be taken, or None where the kernel does not say.
        gpu_bytes: that may be taken; parameters and gradients take 4 bytes an element.

    Raises:
        RuntimeError: if that is too little.
    """
    wanted = min(_MOST_BYTES, int(duplex_gbps * 1e9 * _STEP_SECONDS)) // _WIDE_BYTES
    room = max(0, gpu_bytes - _LARGEST_RING) / 4
    if host_bytes is not None:
        room = min(room, host_bytes / _WIDE_BYTES)
    possible = int(room * _SHARE_OF_MEMORY)
    least = 4 * _SMALL_NUMEL // 10
    large = min(max(wanted, least), possible)
    small = min(_SMALL_NUMEL, large // 4)
    if large < least:
        host = "an unknown number of bytes" if host_bytes is None else f"{host_bytes / 1e9:.1f} GB"
        raise RuntimeError(
            f"Too little memory to measure: {host} may be taken on the host and {gpu_bytes / 1e9:.1f} GB on the GPU. "
            "Stop what else uses them."
        )
    return [*(small // times for times in _SMALLER), small, large]


def rounds_of(state_bytes: int) -> int:
    """How often a way is timed: short steps more often, since what disturbs one does not grow with it."""
    few_bytes = 12 * _SMALL_NUMEL
    return min(_MOST_ROUNDS, max(_FEWEST_ROUNDS, _FEWEST_ROUNDS * few_bytes // max(1, state_bytes)))


def _free_bytes(device: torch.device) -> tuple[int | None, int]:
    return available_host_bytes()[0], torch.cuda.mem_get_info(device)[0]


def sweep(steps: Any, end: float, shared_by: int, report: Report) -> Swept:
    """Times every way in turn, round by round, and drops those that are clearly slower than another.

    One way after the other in each round: a link's speed drifts, and then it drifts for all of
    them. What is chosen is one of those that were timed in all rounds.

    Args:
        steps: a `Rig`.
        end: when the comparison of all sizes should be over, by `time.perf_counter`.
        shared_by: sizes that are left, this one included. When its part of the time is over no
            round begins but the first, nor does one that would not end by then. A small state takes
            less than its part.
        report: told about the progress.
    """
    state_bytes = steps.state_bytes
    phase = f"steps of {gigabytes(state_bytes)}"
    close = ways = candidates(state_bytes)
    for way in ways:  # kernels are compiled, which all sizes pay for: the first would have no time for anything else
        steps.time(way, 0)
    samples: dict[Streaming, list[float]] = {way: [] for way in ways}
    order = random.Random(0)
    round_start = time.perf_counter()
    end = round_start + (end - round_start) / shared_by
    rounds = rounds_of(state_bytes)
    for index in range(rounds):
        for place, way in enumerate(order.sample(close, len(close))):
            report(phase, index * len(ways) + place * len(ways) // len(close), rounds * len(ways))
            samples[way] += steps.time(way, _STEPS)
        now = time.perf_counter()
        a_way = (now - round_start) / len(close)
        close = still_close(_timed(samples, close), index + 1, state_bytes)
        if now + a_way * len(close) > end:
            break
        round_start = now
    report(phase, rounds * len(ways), rounds * len(ways))
    choice = choose(_timed(samples, close), state_bytes)
    return Swept(steps.param_numel, state_bytes, _timed(samples, ways), choice)


def _timed(samples: Mapping[Streaming, list[float]], ways: Iterable[Streaming]) -> tuple[Timed, ...]:
    return tuple(Timed(way, tuple(samples[way])) for way in ways)


def _time_narrow(
    numels: Sequence[int], choices: Sequence[Choice], device: torch.device, report: Report
) -> tuple[Timing, ...]:
    """Steps of the narrowest state, by what was chosen for so much of it; the sizes take turns."""
    phase = "steps of 6 bytes a parameter"
    report(phase, 0, _FEWEST_ROUNDS)
    with contextlib.ExitStack() as stack:
        rigs = [stack.enter_context(rig(numel, NARROW, device)) for numel in numels]
        ways = [chosen(nearest(choices, steps.state_bytes)) for steps in rigs]
        samples: list[list[float]] = [[] for _ in rigs]
        for index in range(_FEWEST_ROUNDS):
            for steps, way, times in zip(rigs, ways, samples, strict=True):
                times += steps.time(way, _STEPS)
            report(phase, index + 1, _FEWEST_ROUNDS)
        return tuple(
            Timing(steps.param_numel, steps.state_bytes, middle_ms(times))
            for steps, times in zip(rigs, samples, strict=True)
        )


def _time_resident(numel: int, device: torch.device, report: Report) -> float | None:
    report("kernel", 0, 1)
    ms = None
    if numel * (_WIDE_BYTES + 4) < _SHARE_OF_MEMORY * torch.cuda.mem_get_info(device)[0]:
        steps = Rig(numel, WIDE, OffloadConfig(fraction=0.0), device)
        steps.step_ms()
        ms = middle_ms([steps.step_ms() for _ in range(_TIMED_ALONE)])
        steps.optimizer.close()
    report("kernel", 1, 1)
    return ms
