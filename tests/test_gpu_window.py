"""State in the window on a real GPU: any window gives the bits of the resident run, and races would
show.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from gpu_training import FORMATS, Outcome, assert_same, build, differs, outcome, poison, set_grads
from test_gpu_streaming import MIB, RESIDENT, STREAMS, delay

from fused_offload import FusedOffloadAdam, OffloadConfig
from fused_offload.plan import planner
from fused_offload.plan.window_blocks import blocks_of

pytestmark = pytest.mark.gpu

ALL = 2**40


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the few parameters here fill many blocks, and a block holds several of them."""
    monkeypatch.setattr(planner, "blocks_of", functools.partial(blocks_of, block_bytes=3 * MIB))


def window(nbytes: int, **fields: Any) -> OffloadConfig:
    return OffloadConfig(window_bytes=nbytes, chunk_bytes=fields.pop("chunk_bytes", MIB), **fields)


def poison_free_memory() -> None:
    """Fills what the allocator is about to hand out with NaN."""
    blocks = [torch.full((3 * MIB // 4 + 512,), float("nan"), device="cuda") for _ in range(40)]
    del blocks


def train(
    formats: str, config: OffloadConfig, *, steps: int = 20, before: Callable[[int, Any], None] | None = None
) -> Outcome:
    params, optimizer = build(formats, config)
    for step in range(steps):
        if step % 5 == 3:
            poison_free_memory()
        optimizer.prefetch()
        if before is not None:
            before(step, optimizer)
        set_grads(params, step)
        if step % 4 == 1:
            poison_ring(optimizer)
        optimizer.step()
    result = outcome(params, optimizer)
    optimizer.close()
    return result


def poison_ring(optimizer: FusedOffloadAdam) -> None:
    """`poison` without its wait for the state, which would cancel the prefetch."""
    pipelines = optimizer._stepper.devices.pipelines
    windows = {device: dict(pipeline.window.blocks) for device, pipeline in pipelines.items()}
    torch.cuda.synchronize()
    poison(optimizer)
    for device, loaded in windows.items():
        pipelines[device].window.blocks.update(loaded)


@functools.cache
def resident(formats: str, steps: int = 20) -> Outcome:
    return train(formats, RESIDENT, steps=steps)


@pytest.mark.parametrize("nbytes", [0, 4 * MIB, 20 * MIB, ALL], ids=lambda n: f"{min(n // MIB, 999)}MiB")
@pytest.mark.parametrize("formats", FORMATS)
def test_any_window_equals_resident(formats: str, nbytes: int) -> None:
    used: list[int] = []
    config = window(nbytes)
    assert_same(
        train(formats, config, before=lambda _, optimizer: used.append(len(optimizer._stepper.devices.window()))),
        resident(formats),
    )
    assert used[0] == 0  # no state yet
    assert (used[-1] > 0) == (nbytes > 0)


@pytest.mark.parametrize("formats", ["fp32", "remainder_bf16"])
@pytest.mark.parametrize("fraction", [0.3, 1.0])
def test_a_window_that_changes_from_step_to_step(formats: str, fraction: float) -> None:
    rng = random.Random(3)

    def change(step: int, optimizer: Any) -> None:
        optimizer.cancel_prefetch()
        object.__setattr__(optimizer.offload, "window_bytes", rng.choice((0, 3 * MIB, 10 * MIB, ALL)))
        optimizer.prefetch()
        if step % 3 == 0:
            optimizer.prefetch()  # a second time changes nothing

    assert_same(train(formats, window(0, fraction=fraction), before=change), resident(formats))


@pytest.mark.parametrize("slow", STREAMS)
@pytest.mark.parametrize("nbytes", [10 * MIB, ALL])
def test_a_slow_stream_changes_no_bit(slow: str, nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = resident("fp32", 6)
    delay(monkeypatch, slow)
    assert_same(train("fp32", window(nbytes, chunk_bytes=4 * MIB), steps=6), expected)


@pytest.mark.parametrize(("dropped", "slow"), [("h2d", "d2h"), ("compute", "h2d"), ("d2h", "compute")])
def test_without_its_waits_a_slow_stream_changes_bits(dropped: str, slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = resident("fp32", 6)
    delay(monkeypatch, slow, dropped)
    assert differs(train("fp32", window(ALL, chunk_bytes=4 * MIB), steps=6), expected)


@pytest.mark.parametrize("how", ["read", "write", "held view", "moved view", "state dict", "cancel"])
def test_whoever_touches_state_drops_the_prefetch(how: str) -> None:
    def run(config: OffloadConfig) -> Outcome:
        params, optimizer = build("fp32", config)
        held: list[torch.Tensor] = []
        for step in range(6):
            optimizer.prefetch()
            if step == 3:
                touch(how, optimizer, params[0], held)
            set_grads(params, step)
            optimizer.step()
            held = [optimizer.state[params[0]]["exp_avg"]]
        return outcome(params, optimizer)

    assert_same(run(window(ALL)), run(RESIDENT if how != "held view" else window(0)))


def touch(how: str, optimizer: FusedOffloadAdam, param: torch.Tensor, held: list[torch.Tensor]) -> None:
    if how == "read":
        optimizer.state[param]["exp_avg"].mul_(2)
    elif how == "write":
        optimizer.state[param]["exp_avg"] = torch.ones_like(param, dtype=torch.float32)
    elif how == "held view":
        held[0].zero_()
    elif how == "moved view":
        held[0].data = torch.full_like(held[0], 0.5)
    elif how == "state dict":
        optimizer.load_state_dict(optimizer.state_dict())
    else:
        optimizer.cancel_prefetch()


def test_skipped_and_refused_steps_leave_no_trace() -> None:
    def run(config: OffloadConfig) -> Outcome:
        params, optimizer = build("remainder", config)
        for step in range(8):
            optimizer.prefetch()
            set_grads(params, step)
            if step == 2:  # a scaler that found an overflow, known on the host
                optimizer.found_inf = torch.ones(1)  # type: ignore[attr-defined]
                optimizer.step()
                del optimizer.found_inf  # type: ignore[attr-defined]
                assert optimizer._stepper.devices.window() == ()
            elif step == 4:  # known on the device only
                optimizer.found_inf = torch.ones(1, device="cuda")  # type: ignore[attr-defined]
                optimizer.step()
                del optimizer.found_inf  # type: ignore[attr-defined]
            elif step == 5:  # refused
                params[0].grad = params[0].grad.to_sparse()  # type: ignore[union-attr]
                with pytest.raises(RuntimeError):
                    optimizer.step()
                assert optimizer._stepper.devices.window() == ()
            elif step == 6:  # the caller never steps, and goes on
                continue
            else:
                optimizer.step()
        return outcome(params, optimizer)

    assert_same(run(window(ALL)), run(RESIDENT))


def hundred_steps(formats: str, config: OffloadConfig) -> Outcome:
    """Windows and skipped steps at random, the same ones for every configuration."""
    rng = random.Random(5)
    params, optimizer = build(formats, config)
    has_window = bool(config.window_bytes)
    for step in range(100):
        nbytes = rng.choice((0, 3 * MIB, 10 * MIB, ALL))
        if has_window:
            object.__setattr__(optimizer.offload, "window_bytes", nbytes)
        optimizer.prefetch()
        set_grads(params, step)
        if step % 10 == 3:
            poison_free_memory()
        skipped = rng.choice((None, None, None, "host", "device"))
        if skipped is not None:
            optimizer.found_inf = torch.ones(1, device="cuda" if skipped == "device" else "cpu")  # type: ignore[attr-defined]
        optimizer.step()
        if skipped is not None:
            del optimizer.found_inf  # type: ignore[attr-defined]
    result = outcome(params, optimizer)
    optimizer.close()
    assert 0 < result.steps[0] < 100
    return result


@functools.cache
def resident_hundred_steps(formats: str) -> Outcome:
    return hundred_steps(formats, RESIDENT)


@pytest.mark.parametrize("slow", [None, *STREAMS])
@pytest.mark.parametrize("formats", ["fp32", "remainder_bf16"])
def test_a_hundred_steps_with_skips_and_changing_windows(
    formats: str, slow: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = resident_hundred_steps(formats)
    if slow is not None:
        delay(monkeypatch, slow)
    assert_same(hundred_steps(formats, window(ALL, chunk_bytes=4 * MIB)), expected)


def test_the_last_step_is_reported_without_waiting_for_it() -> None:
    params, optimizer = build("remainder_bf16", window(10 * MIB))
    for step in range(3):
        optimizer.prefetch()
        set_grads(params, step)
        if step == 2:
            torch.cuda.synchronize()
            torch.cuda._sleep(1_000_000_000)
        optimizer.step()
        if step == 2:
            first = optimizer.last_step_report()  # an earlier step: the device sleeps
    torch.cuda.synchronize()
    report = optimizer.last_step_report()
    assert report is not None
    assert first is not None
    assert first != report
    moved = sum(optimizer.memory_report().host_bytes.values())
    numel = sum(param.numel() for param in params)
    assert 6 * numel * 0.5 < report.bytes_to_device <= moved
    assert 6 * numel * 0.5 < report.bytes_to_host <= moved
    assert 0.1 < report.prefetched_share < 0.9
    assert 3 * MIB <= report.window_bytes <= 10 * MIB
    assert 0 < report.exposed_ms < 10_000
    for speed in (report.to_device_gbps, report.to_host_gbps):
        assert speed is not None
        assert 0.05 < speed < 1000  # megabytes beside other tests: it is the unit that is checked


def test_too_little_memory_makes_the_window_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    from fused_offload.stream import prefetch

    taken = []
    allocate = torch.empty

    class Torch:
        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        def empty(self, *arguments: Any, **fields: Any) -> torch.Tensor:
            if len(taken) % 3 == 2:
                taken.append(0)
                raise torch.OutOfMemoryError("CUDA out of memory.")
            taken.append(1)
            return allocate(*arguments, **fields)

    expected = resident("fp32", 6)
    monkeypatch.setattr(prefetch, "torch", Torch())
    with pytest.warns(UserWarning, match="window") as caught:
        assert_same(train("fp32", window(ALL), steps=6), expected)
    assert len([warning for warning in caught if "window" in str(warning.message)]) == 1


def test_memory_of_the_window_is_given_back() -> None:
    params, optimizer = build("fp32", window(12 * MIB))
    set_grads(params, 0)
    optimizer.step()
    optimizer.synchronize()
    before = torch.cuda.memory_allocated()
    optimizer.prefetch()
    # Where what would be left of a cached block is below 1 MiB, torch's allocator hands that out
    # with it.
    assert 3 * MIB <= torch.cuda.memory_allocated() - before <= 12 * MIB + 4 * MIB
    optimizer.step()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    optimizer.prefetch()
    optimizer.release_gpu_memory()
    assert torch.cuda.memory_allocated() < before  # the ring went, too


@pytest.fixture(autouse=True)
def nothing_left_over() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()
