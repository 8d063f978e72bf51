"""Measures a GPU: the link, and optimizer steps with candidates of transfer settings."""

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
from .link import LinkRate, Report, measure_link, measure_shared_link
from .step_harness import NARROW, WIDE, StepHarness, step_harness

_STEPS = 2
"""Timed steps of a candidate in a round."""
_TIMED_ALONE = 12
"""Timed steps with all state on the GPU."""
_FEWEST_ROUNDS, _MOST_ROUNDS = 8, 24
_SMALL_NUMEL = 20_000_000
_SMALLER = (64, 16, 4)  # divisors of `_SMALL_NUMEL`: best settings differ from size to size there
_STEP_SECONDS = 0.04  # rough time of a step with the largest state, so that all can be tried
_MOST_BYTES = 2_000_000_000
_SHARE_OF_MEMORY = 0.25  # of the free memory on host and GPU that is used

_WIDE_BYTES = 12
_LARGEST_RING = max(CHUNK_MIB) * MIB * max(DEPTHS)


class Swept(NamedTuple):
    """Measured steps of one size of state.

    Attributes:
        param_numel: number of parameter elements.
        state_bytes: bytes of their state.
        timed: all candidates with their times.
        choice: the chosen settings.
    """

    param_numel: int
    state_bytes: int
    timed: tuple[Timed, ...]
    choice: Choice


@dataclass(frozen=True)
class Tuning:
    """All measurements.

    Attributes:
        profile: the profile to keep.
        link: speeds of the link, by size of a copy.
        shared_link_error: error that ended the measurement of several GPUs at once, or None.
        kernel_ms: time of a step with all of the largest state on the GPU; None if it did not fit.
        swept: measured steps, by ascending size of the state.
        seconds: duration of the measurements.
    """

    profile: Profile
    link: tuple[LinkRate, ...]
    kernel_ms: float | None
    swept: tuple[Swept, ...]
    seconds: float
    shared_link_error: str | None = None


def tune(key: MachineKey, device: torch.device, seconds: float, report: Report) -> Tuning:
    """Measures the link and steps, and chooses transfer settings; last, copies of several GPUs.

    Args:
        key: key of the machine.
        device: the GPU. With the other visible ones only copies at once are measured.
        seconds: time for the link and the comparison of candidates, with page-locking and
            compiling. It is exceeded if needed, since every candidate is timed at least once. Steps
            that are not compared and copies of several GPUs come on top.
        report: progress callback.

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
            with step_harness(numel, WIDE, device) as steps:
                swept.append(sweep(steps, start + seconds, len(numels) - len(swept), report))
        narrow = _time_narrow(numels, [one.choice for one in swept], device, report)
        kernel_ms = _time_resident(numels[-1], device, report)
    others = [torch.device("cuda", index) for index in range(torch.cuda.device_count()) if index != device.index]
    shared_link, error = measure_shared_link([device, *others], report)
    profile = Profile(
        key,
        datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="minutes"),
        duplex_gbps,
        tuple(one.choice for one in swept),
        tuple(Timing(one.param_numel, one.state_bytes, one.choice.ms) for one in swept),
        narrow,
        tuple(shared_link),
    )
    return Tuning(profile, tuple(link), kernel_ms, tuple(swept), time.perf_counter() - start, error)


def sizes(duplex_gbps: float, host_bytes: int | None, gpu_bytes: int) -> list[int]:
    """Numbers of parameter elements to measure, ascending: four small sizes and a large one.

    Args:
        duplex_gbps: speed of the link, each way.
        host_bytes: free host memory, or None if unknown.
        gpu_bytes: free GPU memory; parameters and gradients take 4 bytes an element.

    Raises:
        RuntimeError: if there is too little memory.
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
            "Stop other programs that use it."
        )
    return [*(small // times for times in _SMALLER), small, large]


def rounds_of(state_bytes: int) -> int:
    """Number of rounds: more for short steps, which disturbances affect most."""
    few_bytes = _WIDE_BYTES * _SMALL_NUMEL
    return min(_MOST_ROUNDS, max(_FEWEST_ROUNDS, _FEWEST_ROUNDS * few_bytes // max(1, state_bytes)))


def _free_bytes(device: torch.device) -> tuple[int | None, int]:
    return available_host_bytes()[0], torch.cuda.mem_get_info(device)[0]


def sweep(steps: Any, end: float, shared_by: int, report: Report) -> Swept:
    """Times all candidates in turn, round by round, and drops clearly slower ones.

    Candidates take turns within a round, so that a drift of the link's speed affects all of them.
    The choice is one of those that were timed in all rounds.

    Args:
        steps: a `StepHarness`.
        end: end of the comparison of all sizes, by `time.perf_counter`.
        shared_by: number of sizes that are left, with this one. Each may use an equal part of the
            time. After the first, no round begins that would not end within it.
        report: progress callback.
    """
    state_bytes = steps.state_bytes
    phase = f"steps of {gigabytes(state_bytes)}"
    close = tried = candidates(state_bytes)
    for streaming in tried:  # compiles the kernels before the time is shared: all sizes use them
        steps.time(streaming, 0)
    samples: dict[Streaming, list[float]] = {streaming: [] for streaming in tried}
    order = random.Random(0)
    round_start = time.perf_counter()
    end = round_start + (end - round_start) / shared_by
    rounds = rounds_of(state_bytes)
    for index in range(rounds):
        for place, streaming in enumerate(order.sample(close, len(close))):
            report(phase, index * len(tried) + place * len(tried) // len(close), rounds * len(tried))
            samples[streaming] += steps.time(streaming, _STEPS)
        now = time.perf_counter()
        seconds_each = (now - round_start) / len(close)
        close = still_close(_timed(samples, close), index + 1, state_bytes)
        if now + seconds_each * len(close) > end:
            break
        round_start = now
    report(phase, rounds * len(tried), rounds * len(tried))
    choice = choose(_timed(samples, close), state_bytes)
    return Swept(steps.param_numel, state_bytes, _timed(samples, tried), choice)


def _timed(samples: Mapping[Streaming, list[float]], tried: Iterable[Streaming]) -> tuple[Timed, ...]:
    return tuple(Timed(streaming, tuple(samples[streaming])) for streaming in tried)


def _time_narrow(
    numels: Sequence[int], choices: Sequence[Choice], device: torch.device, report: Report
) -> tuple[Timing, ...]:
    """Times steps of the narrowest state with the choices for its size; the sizes take turns."""
    phase = "steps of 6 bytes a parameter"
    report(phase, 0, _FEWEST_ROUNDS)
    with contextlib.ExitStack() as stack:
        harnesses = [stack.enter_context(step_harness(numel, NARROW, device)) for numel in numels]
        settings = [chosen(nearest(choices, steps.state_bytes)) for steps in harnesses]
        samples: list[list[float]] = [[] for _ in harnesses]
        for index in range(_FEWEST_ROUNDS):
            for steps, streaming, times in zip(harnesses, settings, samples, strict=True):
                times += steps.time(streaming, _STEPS)
            report(phase, index + 1, _FEWEST_ROUNDS)
        return tuple(
            Timing(steps.param_numel, steps.state_bytes, middle_ms(times))
            for steps, times in zip(harnesses, samples, strict=True)
        )


def _time_resident(numel: int, device: torch.device, report: Report) -> float | None:
    report("kernel", 0, 1)
    ms = None
    if numel * (_WIDE_BYTES + 4) < _SHARE_OF_MEMORY * torch.cuda.mem_get_info(device)[0]:
        steps = StepHarness(numel, WIDE, OffloadConfig(fraction=0.0), device)
        steps.step_ms()
        ms = middle_ms([steps.step_ms() for _ in range(_TIMED_ALONE)])
        steps.optimizer.close()
    report("kernel", 1, 1)
    return ms
