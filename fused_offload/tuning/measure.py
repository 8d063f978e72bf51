"""Measures a GPU: its link, and optimizer steps over the ways to stream their state."""

from __future__ import annotations

import datetime
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import torch

from fused_offload import OffloadConfig
from fused_offload.hostmem import available_host_bytes
from fused_offload.machine_key import MachineKey
from fused_offload.profiles import Choice, Profile, Timing
from fused_offload.streaming import Streaming

from .choose import Timed, candidates, choose, chosen, gigabytes, graph_candidates, worth_another_look
from .link import LinkRate, Report, measure_link
from .rig import NARROW, WIDE, Rig, rig

ROUNDS = 3
MORE_ROUNDS = 5
_MOST_ROUNDS = 16
_SMALL_NUMEL = 20_000_000
_SMALLER = (64, 16, 4)  # so many times: what the host's time and zero-copy decide differs from size to size
_FEW_BYTES = 2 * 12 * _SMALL_NUMEL
_STEP_SECONDS = 0.06  # of the large state, roughly: long enough to be measured, short enough to try everything
_MOST_BYTES = 3_000_000_000
_SHARE_OF_MEMORY = 0.25  # that tuning takes of what is free, on host and GPU

_WIDE_BYTES = 12


class Swept(NamedTuple):
    """Steps of one size.

    Attributes:
        param_numel: elements that are stepped.
        state_bytes: of their state.
        timed: every way that was tried.
        choice: the one that is chosen.
        graphs: captured steps, which have to be asked for (``OffloadConfig.graph``).
    """

    param_numel: int
    state_bytes: int
    timed: tuple[Timed, ...]
    choice: Choice
    graphs: tuple[Timed, ...] = ()


@dataclass(frozen=True)
class Tuning:
    """All that was measured.

    Attributes:
        profile: what is kept.
        link: rates by size of a copy.
        kernel_ms: a step of the largest state with all of it on the GPU, or None where it did not fit.
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
        seconds: after about so long nothing is measured again.
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
            # The rest of the time is shared by the sizes that are left; a small state takes less than its share.
            left = seconds - (time.perf_counter() - start)
            deadline = time.perf_counter() + left / (len(numels) - len(swept))
            with rig(numel, WIDE, device) as steps:
                swept.append(sweep(steps, deadline, report))
        narrow = _time_narrow(numels[-1], swept[-1].choice, device, report)
        kernel_ms = _time_resident(numels[-1], device, report)
    profile = Profile(
        key,
        datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="minutes"),
        duplex_gbps,
        tuple(one.choice for one in swept),
        (*(Timing(one.param_numel, one.state_bytes, one.choice.ms) for one in swept), narrow),
    )
    return Tuning(profile, tuple(link), kernel_ms, tuple(swept), time.perf_counter() - start)


def sizes(duplex_gbps: float, host_bytes: int, gpu_bytes: int) -> list[int]:
    """Elements of the states that are stepped, ascending; the last but one is small and the last large.

    Args:
        duplex_gbps: of the link, each way.
        host_bytes: that may be taken.
        gpu_bytes: that may be taken; parameters and gradients take 4 bytes an element.

    Raises:
        RuntimeError: if that is too little.
    """
    wanted = min(_MOST_BYTES, int(duplex_gbps * 1e9 * _STEP_SECONDS)) // _WIDE_BYTES
    possible = int(min(host_bytes / _WIDE_BYTES, gpu_bytes / 4) * _SHARE_OF_MEMORY)
    large = min(max(wanted, 4 * _SMALL_NUMEL), possible)
    small = min(_SMALL_NUMEL, large // 4)
    if small < _SMALL_NUMEL // 10:
        raise RuntimeError(
            f"Too little memory to measure: {host_bytes / 1e9:.1f} GB may be taken on the host and "
            f"{gpu_bytes / 1e9:.1f} GB on the GPU. Stop what else uses them."
        )
    return [*(small // times for times in _SMALLER), small, large]


def rounds_of(state_bytes: int) -> int:
    """How often each way is timed: short steps more often, since what disturbs one does not grow with it."""
    return min(_MOST_ROUNDS, max(ROUNDS, ROUNDS * _FEW_BYTES // max(1, state_bytes)))


def _free_bytes(device: torch.device) -> tuple[int, int]:
    return available_host_bytes()[0], torch.cuda.mem_get_info(device)[0]


def sweep(steps: Any, deadline: float, report: Report) -> Swept:
    """Times every way in turn, several times over, then again what may be the fastest.

    One way after the other in each round: a link's speed drifts, and then it drifts for all of them.

    Args:
        steps: a `Rig`.
        deadline: when to stop, as `time.perf_counter` counts; every way is timed at least once.
        report: told about the progress.
    """
    state_bytes = steps.state_bytes
    phase = f"steps of {gigabytes(state_bytes)}"
    ways = candidates(state_bytes)
    samples: dict[Streaming, list[float]] = {way: [] for way in ways}
    order = random.Random(0)
    rounds = rounds_of(state_bytes)
    more_rounds = max(MORE_ROUNDS, rounds)
    total = rounds * len(ways) + more_rounds * len(ways) // 2
    done = 0

    def go_round(some: Sequence[Streaming], *, must: bool) -> None:
        nonlocal done
        for way in order.sample(list(some), len(some)):
            if must or time.perf_counter() < deadline:
                samples[way] += steps.time(way)
                done = min(done + 1, total)
                report(phase, done, total)

    for index in range(rounds):
        go_round(ways, must=index == 0)
    again = worth_another_look(_timed(samples))
    for _ in range(more_rounds):
        go_round(again, must=False)
    report(phase, total, total)
    timed = _timed(samples)
    # Only what was timed in all rounds is comparable: the host or the link may be slower in the later ones.
    choice = choose([one for one in timed if one.streaming in again], state_bytes)
    graphs: dict[Streaming, list[float]] = {way: [] for way in graph_candidates(choice)}
    for _ in range(2):
        for way, times in graphs.items():
            if not times or time.perf_counter() < deadline:
                times += steps.time(way, graph=True)
    return Swept(steps.param_numel, state_bytes, timed, choice, _timed(graphs))


def _timed(samples: dict[Streaming, list[float]]) -> tuple[Timed, ...]:
    return tuple(Timed(way, tuple(times)) for way, times in samples.items())


def _time_narrow(numel: int, choice: Choice, device: torch.device, report: Report) -> Timing:
    report("steps of 6 bytes a parameter", 0, 1)
    with rig(numel, NARROW, device) as steps:
        ms = median(steps.time(chosen(choice), steps=4 * ROUNDS))
        timing = Timing(steps.param_numel, steps.state_bytes, ms)
    report("steps of 6 bytes a parameter", 1, 1)
    return timing


def _time_resident(numel: int, device: torch.device, report: Report) -> float | None:
    report("kernel", 0, 1)
    ms = None
    if numel * (_WIDE_BYTES + 4) < _SHARE_OF_MEMORY * torch.cuda.mem_get_info(device)[0]:
        steps = Rig(numel, WIDE, OffloadConfig(fraction=0.0), device)
        steps.step_ms()
        ms = median(steps.step_ms() for _ in range(2 * ROUNDS))
        steps.optimizer.close()
    report("kernel", 1, 1)
    return ms
