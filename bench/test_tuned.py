"""What ``fused-offload tune`` chose against the defaults and the link, on other sizes than it measured."""

from __future__ import annotations

import random
from collections import defaultdict
from functools import partial
from statistics import median

import pytest
import torch
from clock import measure, wall_ms
from duplex import PlainDuplex, host_slabs
from pytest_benchmark.fixture import BenchmarkFixture
from rows import Rows, make_row
from scale import DUPLEX_MIB, Scale

from fused_offload import OffloadConfig, profiles
from fused_offload.streaming import Streaming, streaming_of

pytestmark = pytest.mark.gpu

SIZES = (1_000_000, 5_000_000, 20_000_000, 100_000_000, 1_000_000_000)


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
    from fused_offload.tuning.rig import NARROW, WIDE, Rig, rig

    if numel > scale.numel:
        pytest.skip("larger than --bench-numel")
    forms = {"12B": WIDE, "6B": NARROW}[form]
    resident = Rig(numel, forms, OffloadConfig(fraction=0.0), device)
    with rig(numel, forms, device) as steps:
        auto = streaming_of(OffloadConfig(), device, steps.state_bytes)
        ways = {DEFAULTS, auto, *(candidates(steps.state_bytes) if request.config.getoption("sweep") else ())}
        copy_sizes = [scale.bytes_of(mib) for mib in DUPLEX_MIB]
        plain = PlainDuplex(host_slabs(steps.optimizer), device, copy_sizes)
        order = random.Random(0)
        graph_ms: list[float] = []
        resident_ms: list[float] = []
        plain_ms: defaultdict[int, list[float]] = defaultdict(list)

        def one_round() -> dict[Streaming, float]:
            """One step of each way, in turns, so that all of them see the link as it is now."""
            resident_ms.append(resident.step_ms())
            plain.refresh()
            for size in copy_sizes:
                plain_ms[size].append(wall_ms(partial(plain.run, size), device))
            graph_ms.extend(steps.time(auto, steps=1, graph=True))
            shuffled = order.sample(sorted(ways, key=str), len(ways))
            return {way: steps.time(way, steps=1)[0] for way in shuffled}

        rounds = measure(benchmark, one_round, rounds=scale.rounds, warmup_rounds=min(1, scale.warmup_rounds))
        state_bytes = steps.state_bytes
    resident.optimizer.close()

    samples = {way: [one[way] for one in rounds] for way in ways}
    cases = {"defaults": (label(DEFAULTS), samples[DEFAULTS]), "auto": (label(auto), samples[auto])}
    cases["auto-graph"] = (f"{label(auto)}, graph=True", graph_ms[-len(rounds) :])
    if request.config.getoption("sweep"):
        fastest = min(ways, key=lambda way: median(samples[way]))
        cases["fastest"] = (label(fastest), samples[fastest])
    defaults_ms = median(samples[DEFAULTS])
    link_ms = min(median(times[-len(rounds) :]) for times in plain_ms.values())
    bound_ms = median(resident_ms[-len(rounds) :]) + link_ms
    for case, (name, samples_ms) in cases.items():
        row = make_row(
            f"tuned/{form}-{numel}/{case}",
            samples_ms,
            params={
                "form": form,
                "way": name,
                "peer": f"tuned/{form}-{numel}/defaults",
                "resident_plus_link_ms": bound_ms,
            },
            numel=numel,
            bytes_to_device=state_bytes,
            bytes_to_host=state_bytes,
            ratio_to_peer=median(samples_ms) / defaults_ms,
            ratio_to_link=median(samples_ms) / link_ms,
            note=f"{name}; {median(samples_ms) / bound_ms:.2f} x the resident step plus the link",
        )
        rows.add(benchmark, row)
