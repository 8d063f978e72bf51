"""Choices of ``fused-offload tune`` against the defaults and the link, on other sizes."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Collection
from functools import partial
from statistics import median

import pytest
import torch
from clock import measure, wall_ms
from duplex import PlainDuplex, host_slabs
from pytest_benchmark.fixture import BenchmarkFixture
from rows import Rows, make_row
from scale import DUPLEX_MIB, Scale

from fused_offload import OffloadConfig
from fused_offload.config import DEFAULT_CHUNK_BYTES, DEFAULT_DEPTH
from fused_offload.plan.transfer_settings import Streaming, default_streaming, streaming_of
from fused_offload.profiles import profile_files as profiles
from fused_offload.tuning.candidates import candidates, label
from fused_offload.tuning.step_harness import NARROW, WIDE, StepHarness, step_harness

pytestmark = pytest.mark.gpu

SIZES = (1_000_000, 5_000_000, 20_000_000, 100_000_000, 1_000_000_000)


@pytest.fixture(autouse=True)
def profile_of_this_machine(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """The user's own profile, which tests do not see otherwise."""
    monkeypatch.setenv(profiles.FOLDER_VARIABLE, request.config.getoption("profiles") or "")
    # Reads the profile now, instead of what was read before.
    monkeypatch.setattr(profiles, "of_device", profiles.of_device.__wrapped__)
    found = profiles.of_device(device.index)
    if found.profile is None:
        pytest.skip(f"no profile to compare with the defaults: {found.reason}")


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("format", ["12B", "6B"])
def test_tuned(
    format: str,
    numel: int,
    request: pytest.FixtureRequest,
    benchmark: BenchmarkFixture,
    scale: Scale,
    rows: Rows,
    device: torch.device,
) -> None:
    if numel > scale.numel:
        pytest.skip("larger than --bench-numel")
    formats = {"12B": WIDE, "6B": NARROW}[format]
    resident = StepHarness(numel, formats, OffloadConfig(fraction=0.0), device)
    with step_harness(numel, formats, device) as steps:
        state_bytes = steps.state_bytes
        auto = streaming_of(OffloadConfig(), device, state_bytes)
        fixed = Streaming(DEFAULT_CHUNK_BYTES, DEFAULT_DEPTH)
        compared = {"defaults": default_streaming(state_bytes), "fixed": fixed, "auto": auto}
        profile = profiles.of(device)
        assert profile is not None  # else the fixture has skipped
        predicted_ms = profile.step_ms(state_bytes, steps.param_numel)
        swept: dict[Streaming, float] = {}
        if request.config.getoption("sweep"):
            swept = sweep(steps, {*candidates(state_bytes), auto}, more_often(scale.rounds, state_bytes))
            # The least of many medians is less than that way takes: it is timed anew beside what it
            # is compared with.
            compared["fastest"] = min(swept, key=lambda way: swept[way])
        copy_sizes = [scale.bytes_of(mib) for mib in DUPLEX_MIB]
        plain = PlainDuplex(host_slabs(steps.optimizer), device, copy_sizes)
        order = random.Random(0)
        resident_ms: list[float] = []
        plain_ms: defaultdict[int, list[float]] = defaultdict(list)

        def one_round() -> dict[str, float]:
            """One step of each way, in turns, so that all of them see the link as it is now."""
            resident_ms.append(resident.step_ms())
            plain.refresh()
            for size in copy_sizes:
                plain_ms[size].append(wall_ms(partial(plain.run, size), device))
            shuffled = order.sample(sorted(compared), len(compared))
            return {case: steps.time(compared[case], steps=1)[0] for case in shuffled}

        often = more_often(scale.compared_rounds, state_bytes)
        rounds = measure(benchmark, one_round, rounds=often, warmup_rounds=min(1, scale.warmup_rounds))
    resident.optimizer.close()

    cases = {case: (label(way), [one[case] for one in rounds]) for case, way in compared.items()}
    defaults_ms = median(cases["defaults"][1])
    link_ms = min(median(times[-len(rounds) :]) for times in plain_ms.values())
    bound_ms = median(resident_ms[-len(rounds) :]) + link_ms
    for case, (name, samples_ms) in cases.items():
        note = f"{name}; {median(samples_ms) / bound_ms:.2f} x the resident step plus the link"
        if case == "auto":
            note += f"; {predicted_ms:.3g} ms predicted"
        if case == "auto" and swept:
            note += f"; {median(samples_ms) / median(cases['fastest'][1]):.3f} x the fastest of {len(swept)} ways"
        row = make_row(
            f"tuned/{format}-{numel}/{case}",
            samples_ms,
            params={
                "form": format,
                "way": name,
                "peer": f"tuned/{format}-{numel}/defaults",
                "resident_plus_link_ms": bound_ms,
                **({"predicted_ms": predicted_ms} if case == "auto" else {}),
                **({"sweep_ms": {label(way): ms for way, ms in swept.items()}} if case == "fastest" else {}),
            },
            numel=numel,
            bytes_to_device=state_bytes,
            bytes_to_host=state_bytes,
            ratio_to_peer=median(samples_ms) / defaults_ms,
            ratio_to_link=median(samples_ms) / link_ms,
            note=note,
        )
        rows.add(benchmark, row)


def more_often(rounds: int, state_bytes: int) -> int:
    """More rounds for short steps.

    What disturbs them is large beside them, and they cost little.
    """
    return rounds * (4 if state_bytes < 100_000_000 else 2 if state_bytes < 1_000_000_000 else 1)


def sweep(steps: StepHarness, ways: Collection[Streaming], rounds: int) -> dict[Streaming, float]:
    """Median time of a step by each way, in ms; all of them take turns.

    Args:
        steps: the optimizer.
        ways: what is tried.
        rounds: how often each.
    """
    order = random.Random(0)
    samples: dict[Streaming, list[float]] = {way: [] for way in sorted(ways, key=str)}
    for _ in range(rounds):
        for way in order.sample(list(samples), len(samples)):
            samples[way] += steps.time(way, steps=1)
    return {way: median(times) for way, times in samples.items()}
