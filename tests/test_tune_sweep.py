"""fused-offload tune: which ways to stream state are timed, how often, and which is chosen."""

from __future__ import annotations

import contextlib
import itertools
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tune_ways import timed

from fused_offload.config import LEAST_DEFAULT_CHUNK_BYTES
from fused_offload.memory.pinned import PinnedSlab
from fused_offload.plan.transfer_settings import Streaming, default_streaming
from fused_offload.profiles import profile_files as profiles
from fused_offload.profiles.machine_key import MachineKey
from fused_offload.profiles.profile import SharedLink
from fused_offload.profiles.units import MIB
from fused_offload.tuning.candidates import Timed, candidates, choose, chosen, still_close

Swept = Any  # of `tuning.measure`, which needs Triton

KEY = MachineKey("NVIDIA H100 80GB HBM3", "32.0 GT/s PCIe x16", "Xeon, 16 CPUs, 1 NUMA nodes", {"torch": "2.11"})

DEFAULTS = default_streaming(10**9)


def test_the_fastest_wins() -> None:
    choice = choose(timed(c48x3=72.0, c16x2=80.0, c32x3=65.0, z32=90.0, z64=85.0), 10**9)
    assert (choice.transport, choice.chunk_bytes, choice.depth, choice.programs) == ("copy", 32 * MIB, 3, 64)
    assert (choice.ms, choice.state_bytes) == (65.0, 10**9)
    for words in ("32 MiB x 3 takes 65.00 ms", "the defaults (48 MiB x 3) take 1.108", "64 programs) 1.308"):
        assert words in choice.why


def test_of_equal_copies_the_smallest_ring_wins() -> None:
    choice = choose(timed(c48x3=72.0, c64x4=71.6, c24x3=72.2, c24x2=73.0, z128=84.9, z16=85.0), 10**9)
    assert (choice.chunk_bytes, choice.depth, choice.programs) == (24 * MIB, 3, 128)
    assert "64 MiB x 4 is 0.8% faster" in choice.why


@pytest.mark.parametrize(("ms", "programs"), [(66.1, 64), (66.5, 16)])
def test_other_programs_than_the_default_have_to_be_clearly_faster(ms: float, programs: int) -> None:
    assert choose(timed(c48x3=90.0, z16=64.5, z32=65.0, z64=ms, z128=67.0), 10**9).programs == programs


def test_what_is_faster_on_a_fast_host_and_on_a_slow_one_wins() -> None:
    fast, slow = [0.76, 0.75, 0.77, 0.74] * 4, [1.00, 0.98, 1.01, 1.02] * 4
    better = Timed(Streaming(8 * MIB, 2), (*slow, 1.0, *fast))
    worse = Timed(DEFAULTS, (*(ms * 1.04 for ms in slow), *(ms * 1.04 for ms in fast), 0.79))
    assert sorted(better.samples_ms)[16] > sorted(worse.samples_ms)[16]  # medians say the opposite
    zero_copy = Timed(Streaming(programs=64), (2.0,))
    assert choose([better, worse, zero_copy], 10**7).chunk_bytes == 8 * MIB


@pytest.mark.parametrize(("zero_copy_ms", "transport"), [(71.0, "copy"), (69.0, "zero_copy")])
def test_zero_copy_has_to_be_clearly_faster(zero_copy_ms: float, transport: str) -> None:
    choice = choose(timed(c48x3=72.0, z64=zero_copy_ms), 10**9)
    assert choice.transport == transport
    assert choice.ms == min(72.0, zero_copy_ms) if transport == "zero_copy" else choice.ms == 72.0


@pytest.mark.parametrize(("zero_copy_ms", "transport"), [(0.92, "copy"), (0.905, "zero_copy"), (0.85, "zero_copy")])
def test_zero_copy_only_has_to_be_as_fast_in_a_step_of_less_than_a_millisecond(
    zero_copy_ms: float, transport: str
) -> None:
    choice = choose(timed(c8x3=0.9, z64=zero_copy_ms), 15_000_000)
    assert choice.transport == transport
    assert choice.ms == pytest.approx(zero_copy_ms if transport == "zero_copy" else 0.9)


def test_the_default_number_of_programs_does_not_make_zero_copy_win() -> None:
    ways = timed(c48x3=100.0, z16=96.9, z64=99.7)
    choice = choose(ways, 10**9)
    assert (choice.transport, choice.programs) == ("zero_copy", 16)


def test_what_is_tried() -> None:
    ways = candidates(10**9)
    assert len(set(ways)) == len(ways)
    assert DEFAULTS in ways
    assert {way.depth for way in ways} >= {2, 3, 4}
    assert max(way.chunk_bytes for way in candidates(20 * MIB) if way.programs is None) <= 20 * MIB
    assert {way.chunk_bytes for way in candidates(1) if way.programs is None} == {4 * MIB, LEAST_DEFAULT_CHUNK_BYTES}


def test_what_stays() -> None:
    tried = timed(c48x3=90.0, c32x3=65.0, c16x3=69.0, c16x2=67.0, c64x3=80.0, z64=70.0, z16=100.0)
    copies = [Streaming(32 * MIB, 3), Streaming(16 * MIB, 3), Streaming(16 * MIB, 2), Streaming(64 * MIB, 3)]
    # Within 23 %.
    assert still_close(tried, 1, 10**9) == [DEFAULTS, *copies[:3], *copies[3:], Streaming(programs=64)]
    assert still_close(tried, 4, 10**9) == [DEFAULTS, *copies[:3], Streaming(programs=64)]  # 8 %
    # Within 3.8 %.
    assert still_close(tried, 24, 10**9) == [DEFAULTS, copies[0], copies[2], Streaming(programs=64)]
    # A step of 1 ms may be longer by what a host's speed makes of it.
    assert len(still_close(timed(c48x3=1.0, c8x2=1.6, z64=1.0, z32=1.6), 1, 10**9)) == 4
    assert len(still_close(timed(c48x3=1.0, c8x2=1.6, z64=1.0, z32=1.6), 8, 10**9)) == 2
    # The default number of programs stays, too: another has to be clearly faster in the end.
    assert Streaming(programs=64) in still_close(timed(c48x3=1.0, z64=2.0, z32=1.0), 24, 10**9)


def test_one_disturbed_step_does_not_end_it_for_a_way() -> None:
    best = Timed(Streaming(16 * MIB, 3), (60.0, 190.0))
    others = [Timed(DEFAULTS, (66.0, 66.0)), Timed(Streaming(programs=64), (70.0, 70.0))]
    assert best.streaming in still_close([best, *others], 1, 10**9)


class FakeSteps:
    """Steps that take what a formula says, on a link whose speed drifts, by a clock of their
    own.
    """

    param_numel = 1000

    def __init__(self, state_bytes: int = 3_000_000_000) -> None:
        self.state_bytes = state_bytes
        self.now = 0.0
        self.calls = 0
        self.asked: list[Streaming] = []

    def true_ms(self, way: Streaming) -> float:
        if way.programs is not None:
            return 90 + 100 / way.programs
        mib = way.chunk_bytes / MIB
        return 60 + 0.05 * mib + 40 / mib + (6 if way.depth == 2 else 0)

    def disturbed(self) -> float:
        """How much longer the next step takes."""
        self.calls += 1
        return 1 + 0.03 * (self.calls * 7919 % 13) / 13

    def time(self, way: Streaming, steps: int = 2) -> list[float]:
        times = [self.true_ms(way) * self.disturbed() for _ in range(1 + steps)]
        self.now += sum(times) / 1e3
        if steps:
            self.asked.append(way)
        return times[1:]

    @property
    def best_ms(self) -> float:
        return min(map(self.true_ms, candidates(self.state_bytes)))


@pytest.fixture
def sweep(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Swept]:
    """`measure.sweep` by the clock of the steps; checks what holds for every sweep."""
    measure = pytest.importorskip("fused_offload.tuning.measure")

    def run(steps: FakeSteps, seconds: float, told: Callable[..., Any] = lambda *_: None) -> Swept:
        monkeypatch.setattr(measure, "time", types.SimpleNamespace(perf_counter=lambda: steps.now))
        began: list[float] = []

        def tell(*report: Any) -> None:
            began.append(steps.now)  # the first time when all is compiled
            told(*report)

        swept = measure.sweep(steps, seconds, 1, tell)
        assert steps.now <= max(seconds, began[0] + spent_on_one_round(steps)) + 10 * steps.best_ms * 3 * 3e-3
        most = max(len(one.samples_ms) for one in swept.timed)
        [choice] = [one for one in swept.timed if one.streaming == chosen(swept.choice)]
        assert len(choice.samples_ms) == most
        return swept

    return run


def spent_on_one_round(steps: FakeSteps) -> float:
    return sum(3 * steps.true_ms(way) * 1.03 for way in candidates(steps.state_bytes)) / 1e3


def test_the_sweep_finds_what_brute_force_finds(sweep: Callable[..., Swept]) -> None:
    steps, told = FakeSteps(), []
    swept = sweep(steps, 60.0, lambda *report: told.append(report))
    assert steps.true_ms(chosen(swept.choice)) <= 1.02 * steps.best_ms
    assert told[-1][1] == told[-1][2]
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)
    # What is clearly slower is soon left alone; what may be the fastest is always timed, and so are
    # the defaults.
    rounds = {one.streaming: len(one.samples_ms) // 2 for one in swept.timed}
    assert rounds[Streaming(4 * MIB, 2)] == 1
    assert rounds[DEFAULTS] == rounds[chosen(swept.choice)] == 8


def test_without_time_everything_is_tried_once(sweep: Callable[..., Swept]) -> None:
    steps = FakeSteps()
    swept = sweep(steps, -1.0)
    assert {len(one.samples_ms) for one in swept.timed} == {2}
    assert steps.true_ms(chosen(swept.choice)) <= 1.05 * steps.best_ms


@given(st.floats(0.0, 80.0))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_round_is_left_unfinished(sweep: Callable[..., Swept], seconds: float) -> None:
    swept = sweep(FakeSteps(), seconds)
    counts = sorted({len(one.samples_ms) for one in swept.timed})
    assert all(count % 2 == 0 for count in counts)


@pytest.mark.parametrize("state_bytes", [15_000_000, 60_000_000])
def test_a_host_whose_speed_has_two_levels(sweep: Callable[..., Swept], state_bytes: int) -> None:
    """Phases of a second or so, in which all steps take 0.35 ms longer: the choice is good in
    both.
    """

    class TwoLevels(FakeSteps):
        phase = 0.0

        def true_ms(self, way: Streaming) -> float:
            if way.programs is not None:
                return 0.5 + self.state_bytes / 46e6 + 2 / way.programs
            return 0.6 + self.state_bytes / 48e6 + 0.02 * self.state_bytes / way.chunk_bytes + way.chunk_bytes / 100e6

        def time(self, way: Streaming, steps: int = 2) -> list[float]:
            slow = int(self.now * 1.7 + self.phase) % 2 * 0.35
            times = [self.true_ms(way) * self.disturbed() + slow for _ in range(7)]
            self.now += sum(times) / 1e3
            return times[:steps]

    for tenth in range(10):
        steps = TwoLevels(state_bytes)
        steps.phase = tenth / 5
        assert steps.true_ms(chosen(sweep(steps, 6.0).choice)) <= 1.04 * steps.best_ms


def test_short_steps_are_timed_more_often() -> None:
    measure = pytest.importorskip("fused_offload.tuning.measure")
    assert [measure.rounds_of(nbytes) for nbytes in (0, 60_000_000, 120_000_000, 3 * 10**9)] == [24, 24, 16, 8]


def test_sizes_fit_the_link_and_the_memory() -> None:
    measure = pytest.importorskip("fused_offload.tuning.measure")
    assert measure.sizes(50.0, 10**12, 80 * 10**9) == [312_500, 1_250_000, 5_000_000, 20_000_000, 166_666_666]
    assert measure.sizes(12.0, 10**12, 80 * 10**9) == [156_250, 625_000, 2_500_000, 10_000_000, 40_000_000]
    assert measure.sizes(0.5, 10**12, 80 * 10**9)[-1] == 8_000_000
    assert measure.sizes(50.0, 4 * 10**9, 80 * 10**9)[-1] * 12 <= 10**9
    assert measure.sizes(50.0, 10**12, 2 * 10**9)[-1] * 4 <= 0.5e9
    with pytest.raises(RuntimeError, match="Too little memory"):  # 64 MiB x 4 is tried, too
        measure.sizes(50.0, 10**12, 350 * 10**6)
    with pytest.raises(RuntimeError, match="Too little memory"):
        measure.sizes(50.0, 10**8, 80 * 10**9)
    assert measure.sizes(50.0, None, 80 * 10**9) == measure.sizes(50.0, 10**12, 80 * 10**9)
    with pytest.raises(
        RuntimeError, match=r"an unknown number of bytes may be taken on the host and 0\.1 GB on the GPU"
    ):
        measure.sizes(50.0, None, 10**8)


def test_a_choice_for_every_size_and_a_profile_that_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    measure = pytest.importorskip("fused_offload.tuning.measure")

    class Steps(FakeSteps):
        def __init__(self, numel: int, formats: dict[str, Any], *_: Any) -> None:
            super().__init__()
            self.param_numel, self.state_bytes = numel, numel * (6 if "exp_avg_dtype" in formats else 12)

        def true_ms(self, way: Streaming) -> float:
            if way.programs is not None:
                return 0.1 + self.state_bytes / 40e6
            return 1 + self.state_bytes / 50e6 + way.chunk_bytes / 50e6

    rate = measure.LinkRate(16, 54.0, 53.0, 50.0)
    monkeypatch.setattr(measure, "measure_link", lambda *_: [rate])
    monkeypatch.setattr(measure, "_free_bytes", lambda _: (10**12, 80 * 10**9))
    monkeypatch.setattr(measure, "step_harness", lambda *arguments: contextlib.nullcontext(Steps(*arguments)))
    monkeypatch.setattr(measure, "_time_resident", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)

    def shared(devices: list[torch.device], *_: Any) -> Any:
        assert [device.index for device in devices] == [1, 0, 2]  # the tuned one always
        return [SharedLink(2, 30.0)], "3 GPUs at once: lost"

    monkeypatch.setattr(measure, "measure_shared_link", shared)
    tuning = measure.tune(KEY, torch.device("cuda", 1), 40.0, lambda *_: None)
    assert (tuning.profile.shared_link, tuning.shared_link_error) == ((SharedLink(2, 30.0),), "3 GPUs at once: lost")
    sizes = [choice.state_bytes for choice in tuning.profile.choices]
    assert sizes == [3_750_000, 15_000_000, 60_000_000, 240_000_000, 1_999_999_992]
    transports = [choice.transport for choice in tuning.profile.choices]
    assert transports == ["zero_copy", "zero_copy", "zero_copy", "copy", "copy"]
    assert [timing.state_bytes for timing in tuning.profile.timings] == sizes
    assert [timing.state_bytes for timing in tuning.profile.narrow_timings] == [nbytes // 2 for nbytes in sizes]
    profile = profiles.load(profiles.save(tuning.profile, tmp_path))
    assert profile.choice_for(30_000_001).state_bytes == 60_000_000
    for timing in (*tuning.profile.timings, *tuning.profile.narrow_timings):
        assert profile.step_ms(timing.state_bytes, timing.param_numel) == pytest.approx(timing.ms)


@pytest.mark.parametrize("compile_s", [0.0, 10.0, 45.0])
def test_compiling_and_page_locking_take_of_the_time(compile_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command has to end within a minute also where nothing was compiled before."""
    measure = pytest.importorskip("fused_offload.tuning.measure")
    clock = types.SimpleNamespace(now=0.0, compiled=False)
    ends = []

    class Steps(FakeSteps):
        def __init__(self, numel: int, formats: dict[str, Any], *_: Any) -> None:
            super().__init__(numel * 12)
            self.param_numel = numel
            clock.now += 0.5 + self.state_bytes / 4e9

        def true_ms(self, way: Streaming) -> float:
            return 1 + self.state_bytes / 45e6 + (way.chunk_bytes / 50e6 if way.programs is None else 0.0)

        def time(self, way: Streaming, steps: int = 2) -> list[float]:
            if not clock.compiled:
                clock.now, clock.compiled = clock.now + compile_s, True
            clock.now += (1 + steps) * self.true_ms(way) / 1e3
            return super().time(way, steps)

    def narrow(*_: Any) -> tuple[()]:
        ends.append(clock.now)
        return ()

    monkeypatch.setattr(measure, "time", types.SimpleNamespace(perf_counter=lambda: clock.now))
    monkeypatch.setattr(measure, "measure_link", lambda *_: [measure.LinkRate(16, 54.0, 53.0, 50.0)])
    monkeypatch.setattr(measure, "_free_bytes", lambda _: (10**12, 80 * 10**9))
    monkeypatch.setattr(measure, "step_harness", lambda *arguments: contextlib.nullcontext(Steps(*arguments)))
    monkeypatch.setattr(measure, "_time_narrow", narrow)
    monkeypatch.setattr(measure, "_time_resident", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    tuning = measure.tune(KEY, torch.device("cuda", 0), 28.0, lambda *_: None)
    if compile_s < 28.0:
        one_step_by_each_way_s = 26 * 0.05
        assert 24.0 < ends[0] < 28.0 + 2 * one_step_by_each_way_s
    else:  # nothing is left: every way is timed in one round, at every size
        assert {len(one.samples_ms) for swept in tuning.swept for one in swept.timed} == {2}


@pytest.mark.parametrize("what", ["_time_narrow", "_time_resident"])
def test_what_is_timed_alone_is_a_mean_of_the_middle_half(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host may have two levels; the median of twelve steps is one of them, and which is a matter
    of luck.
    """
    samples = [0.7] * 9 + [1.05] * 7 if what == "_time_narrow" else [9.0] + [0.7] * 7 + [1.05] * 5

    class Steps:
        param_numel, state_bytes = 1000, 6000
        optimizer: Any = types.SimpleNamespace(close=lambda: None)

        def __init__(self, *_: Any) -> None:
            self.left = list(samples)

        def time(self, way: Any, steps: int) -> list[float]:
            self.left, now = self.left[steps:], self.left[:steps]
            return now

        def step_ms(self) -> float:
            return self.left.pop(0)

    measure = pytest.importorskip("fused_offload.tuning.measure")
    monkeypatch.setattr(measure, "step_harness", lambda *_: contextlib.nullcontext(Steps()))
    monkeypatch.setattr(measure, "StepHarness", Steps)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**12, 10**12))
    choice = choose(timed(c8x3=1.0, z64=2.0), 10**6)
    device = torch.device("cuda")
    report: Any = lambda *_: None  # noqa: E731
    if what == "_time_narrow":
        ((_, _, ms),) = measure._time_narrow([1000], [choice], device, report)
        assert ms == pytest.approx((5 * 0.7 + 3 * 1.05) / 8)
    else:
        ms = measure._time_resident(1000, device, report)
        assert ms == pytest.approx((4 * 0.7 + 2 * 1.05) / 6)


def test_the_link_is_measured_down_up_and_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies within one slab and within the memory on the device, both ways apart; a made-up
    clock.
    """
    link = pytest.importorskip("fused_offload.tuning.link")
    h2d, d2h = (types.SimpleNamespace(cuda_stream=number, synchronize=lambda: None) for number in (1, 2))
    queues = types.SimpleNamespace(h2d=types.SimpleNamespace(current=h2d), d2h=types.SimpleNamespace(current=d2h))
    monkeypatch.setattr(link.DeviceQueues, "of", lambda device: queues)
    monkeypatch.setattr(link.torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(link, "COPY_MIB", (1, 5))
    slabs: list[PinnedSlab] = []

    def slab(nbytes: int, **_: Any) -> PinnedSlab:
        slabs.append(PinnedSlab(nbytes, pin=False))
        return slabs[-1]

    monkeypatch.setattr(link, "PinnedSlab", slab)
    copies: dict[int, list[tuple[int, int, int]]] = {1: [], 2: []}

    def copier(stream: int) -> Callable[..., None]:
        def record(to: int, begin: int, nbytes: int, on: int) -> None:
            assert on == stream
            copies[stream].append((to, begin, nbytes))

        return record

    monkeypatch.setattr(link.cuda_driver, "copy_to_device_async", copier(1))
    monkeypatch.setattr(link.cuda_driver, "copy_to_host_async", copier(2))

    def took(run: Callable[[], None]) -> float:
        for made in copies.values():
            made.clear()
        run()
        down, up = copies[1], copies[2]
        nbytes = (down or up)[0][2]
        assert {size for *_, size in (*down, *up)} == {nbytes}
        host = {source for _, source, _ in down} | {target for target, _, _ in up}
        device = {target for target, _, _ in down} | {source for _, source, _ in up}
        begin, directions = slabs[0].bytes.data_ptr(), bool(down) + bool(up)
        for places in (sorted(host), sorted(device)):  # no place for both, none twice in a round
            assert len(places) == directions * (5 * MIB // nbytes)
            assert all(after - before >= nbytes for before, after in itertools.pairwise(places))
        assert min(host) >= begin
        assert max(host) + nbytes <= begin + slabs[0].bytes.numel()
        if down and up:
            assert len(down) == len(up)
        moved = max(sum(nbytes for *_, nbytes in made) for made in (down, up))
        gbps = 50.0 if not up else 40.0 if not down else 30.0
        return moved / gbps / 1e6

    monkeypatch.setattr(link, "_wall_ms", took)
    told: list[tuple[str, int, int]] = []
    rates = link.measure_link(torch.device("cpu"), lambda *what: told.append(what))
    assert [rate.copy_mib for rate in rates] == [1, 5]
    for rate in rates:
        assert (rate.h2d_gbps, rate.d2h_gbps, rate.duplex_gbps) == pytest.approx((50, 40, 30))
    assert told == [("link", 0, 2), ("link", 1, 2), ("link", 2, 2)]


def test_gpus_are_measured_together(monkeypatch: pytest.MonkeyPatch) -> None:
    link = pytest.importorskip("fused_offload.tuning.link")
    idle = []

    def queues(device: torch.device) -> Any:
        def stream(way: str) -> Any:
            name = f"{device}{way}"
            current = types.SimpleNamespace(cuda_stream=name, synchronize=lambda: idle.append(name))
            return types.SimpleNamespace(current=current)

        return types.SimpleNamespace(h2d=stream("down"), d2h=stream("up"))

    monkeypatch.setattr(link.DeviceQueues, "of", queues)
    monkeypatch.setattr(link, "PinnedSlab", lambda nbytes, **_: PinnedSlab(nbytes, pin=False))
    monkeypatch.setattr(link.torch.cuda, "device", lambda device: contextlib.nullcontext())
    moved: dict[str, int] = {}
    places: set[tuple[int, int]] = set()

    def copier(to: int, begin: int, nbytes: int, on: str) -> None:
        assert (to, begin) not in places  # what a host's cache holds would say nothing
        places.add((to, begin))
        moved[on] = moved.get(on, 0) + nbytes

    monkeypatch.setattr(link.cuda_driver, "copy_to_device_async", copier)
    monkeypatch.setattr(link.cuda_driver, "copy_to_host_async", copier)

    def took(run: Callable[[], None]) -> float:
        run()
        return sum(moved.values()) / 100.0 / 1e6  # 100 GB/s of host memory for all of them

    monkeypatch.setattr(link, "_wall_ms", took)
    monkeypatch.setattr(link, "_LINK_BYTES", 48 * MIB)
    devices = [torch.device("cpu"), torch.device("cpu", 0)]
    assert link.duplex_gbps(devices) == pytest.approx(25)
    assert set(idle) == {"cpudown", "cpuup", "cpu:0down", "cpu:0up"} == moved.keys()
    assert len(set(moved.values())) == 1
    moved.clear()
    places.clear()
    assert link.duplex_gbps(devices[:1]) == pytest.approx(50)


@pytest.mark.parametrize(
    ("gpus", "counts"), [(1, []), (2, [2]), (3, [2, 3]), (4, [2, 4]), (6, [2, 4, 6]), (8, [2, 4, 8])]
)
@pytest.mark.parametrize("lost", [None, 1, 3])
def test_how_many_gpus_are_measured_together(
    gpus: int, counts: list[int], lost: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is lost ends it, and keeps what was measured."""
    link = pytest.importorskip("fused_offload.tuning.link")
    devices = [torch.device("cuda", index) for index in range(gpus)]

    def speed(together: list[torch.device]) -> float:
        assert together == devices[: len(together)]
        if lost is not None and lost < len(together):
            raise RuntimeError("CUDA error: uncorrectable ECC error\nCompile with it")
        return 60.0 / len(together)

    monkeypatch.setattr(link, "duplex_gbps", speed)
    told: list[tuple[str, int, int]] = []
    measured, error = link.measure_shared_link(devices, lambda *what: told.append(what))
    fine = [count for count in counts if lost is None or lost >= count]
    assert measured == [(count, 60.0 / count) for count in fine]
    failed = [count for count in counts if count not in fine]
    assert error == (f"{failed[0]} GPUs at once: CUDA error: uncorrectable ECC error" if failed else None)
    assert told == [("GPUs at once", done, len(counts)) for done in range(len(fine) + bool(counts))]
