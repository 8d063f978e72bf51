"""What ``fused-offload tune`` chose against the defaults, on other sizes than it measured."""

from __future__ import annotations

import random

import pytest
import torch
from clock import measure
from pytest_benchmark.fixture import BenchmarkFixture
from rows import Rows, make_row
from scale import Scale

from fused_offload import OffloadConfig, profiles
from fused_offload.streaming import Streaming, streaming_of

pytestmark = pytest.mark.gpu

SIZES = (5_000_000, 20_000_000, 100_000_000, 1_000_000_000)


@pytest.fixture(autouse=True)
def profile_of_this_machine(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """The user's own profile, which tests do not see otherwise."""
    monkeypatch.setenv(profiles.FOLDER_VARIABLE, request.config.getoption("profiles") or "")
    monkeypatch.setattr(profiles, "of_device", profiles.of_device.__wrapped__)  # read it now, not what was read before
    found = profiles.of_device(device.index)
    if found.profile is None:
        pytest.skip(f"no profile to compare with the defaults: {found.reason}")


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("form", ["12B", "6B"])
def test_tuned(
    form: str,
    numel: int,
    request: pytest.FixtureRequest,
    benchmark: BenchmarkFixture,
    scale: Scale,
    rows: Rows,
    device: torch.device,
) -> None:
    from fused_offload.tuning.choose import DEFAULTS, candidates, label
    from fused_offload.tuning.rig import NARROW, WIDE, rig

    if numel > scale.numel:
        pytest.skip("larger than --bench-numel")
    with rig(numel, {"12B": WIDE, "6B": NARROW}[form], device) as steps:
        auto = streaming_of(OffloadConfig(), device, steps.state_bytes)
        ways = {DEFAULTS, auto, *(candidates(steps.state_bytes) if request.config.getoption("sweep") else ())}
        order = random.Random(0)

        def one_round() -> dict[Streaming, float]:
            """One step of each way, in turns, so that all of them see the link as it is now."""
            shuffled = order.sample(sorted(ways, key=str), len(ways))
            return {way: steps.time(way, steps=1)[0] for way in shuffled}

        rounds = measure(benchmark, one_round, rounds=scale.rounds, warmup_rounds=min(1, scale.warmup_rounds))
        state_bytes = steps.state_bytes

    samples = {way: [one[way] for one in rounds] for way in ways}
    cases = {"defaults": DEFAULTS, "auto": auto}
    if len(ways) > len(cases):
        cases["fastest"] = min(ways, key=lambda way: sorted(samples[way])[len(rounds) // 2])
    defaults_ms = sorted(samples[DEFAULTS])[len(rounds) // 2]
    for case, way in cases.items():
        row = make_row(
            f"tuned/{form}-{numel}/{case}",
            samples[way],
            params={"form": form, "way": label(way), "peer": f"tuned/{form}-{numel}/defaults"},
            numel=numel,
            bytes_to_device=state_bytes,
            bytes_to_host=state_bytes,
            ratio_to_peer=sorted(samples[way])[len(rounds) // 2] / defaults_ms,
            note=label(way),
        )
        rows.add(benchmark, row)
