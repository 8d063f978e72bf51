"""Profilers see the phases of a step by name; without one, naming them costs next to nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd import profiler

from fused_offload import FusedOffloadAdam
from fused_offload.step.profiler_ranges import profiler_range


def stepped() -> FusedOffloadAdam:
    param = torch.nn.Parameter(torch.zeros(10))
    param.grad = torch.ones(10)
    optimizer = FusedOffloadAdam([param])
    optimizer.step()
    optimizer.synchronize()
    return optimizer


def test_a_profile_shows_the_phases() -> None:
    with torch.profiler.profile() as profile:
        stepped()
    names = {event.key for event in profile.key_averages()}
    assert {f"FusedOffloadAdam::{name}" for name in ("check", "cpu_chunk", "wait")} <= names


def test_profilers_from_outside_see_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.profiler.profile() as profile:
        monkeypatch.setattr(profiler, "_is_profiler_enabled", False)  # as if Python knew of none
        stepped()
        monkeypatch.undo()
    assert "FusedOffloadAdam::check" in {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("is_profiling", [False, True])
def test_record_function_is_for_profiles(is_profiling: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []
    original = profiler.record_function

    def record(name: str, *args: Any) -> Any:
        used.append(name)
        return original(name, *args)

    monkeypatch.setattr(profiler, "record_function", record)
    monkeypatch.setattr(profiler, "_is_profiler_enabled", is_profiling)
    with profiler_range("check"):
        pass
    assert used == ["FusedOffloadAdam::check"] * is_profiling


def test_a_compiled_function_takes_phases() -> None:
    def named(value: torch.Tensor) -> torch.Tensor:
        with profiler_range("check"):
            return value + 1

    assert torch.compile(named, backend="eager", fullgraph=True)(torch.ones(1)).item() == 2


def test_without_the_light_one_record_function_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fused_offload.step.profiler_ranges._light", profiler.record_function)
    stepped()


def test_a_profiler_may_start_and_stop_inside_of_a_phase() -> None:
    """One can be started from outside or in another thread; a marker that raised would fail a step
    that went well.
    """
    profile = torch.profiler.profile()
    with profiler_range("check"):
        profile.start()
    with profiler_range("stream"):
        profile.stop()
    with pytest.raises(KeyError, match="mine"), profiler_range("check"):
        raise KeyError("mine")
