"""Weights that are loaded into the model after the optimizer was built survive the next step; a
resume loses no bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparison import assert_same
from registry import Phase, Results
from scenarios_reload import EARLY, RELOADED_FORMATS, RESUMED_FORMATS, early_name, late_name, main_params_name
from walkers import REFRESHES

STORED_FORMATS = pytest.mark.parametrize("stored_formats", RELOADED_FORMATS)
KEPT = pytest.mark.parametrize("stored_formats", ["fp32", "remainders"])
LATE = pytest.mark.parametrize("how", REFRESHES, ids=lambda how: how.__name__)


@STORED_FORMATS
@pytest.mark.parametrize("how", EARLY, ids=lambda how: how.__name__.strip("_"))
def test_weights_loaded_before_the_first_step_count(
    results: Results, how: Callable[..., None], stored_formats: str
) -> None:
    expected = results.ranks(early_name(None, stored_formats), Phase.TWO_RANKS)
    for rank, run in enumerate(results.ranks(early_name(how, stored_formats), Phase.TWO_RANKS)):
        assert_same(run, expected[rank], f"rank {rank}")


@KEPT
@LATE
def test_weights_loaded_later_count(results: Results, how: Callable[..., None], stored_formats: str) -> None:
    expected = results.ranks(late_name(None, stored_formats), Phase.TWO_RANKS)
    for rank, run in enumerate(results.ranks(late_name(how, stored_formats), Phase.TWO_RANKS)):
        assert_same(run["log"], expected[rank]["log"], f"rank {rank}, log")
        assert_same(run["end"], expected[rank]["end"], f"rank {rank}")


@STORED_FORMATS
@LATE
def test_moments_and_steps_stay(results: Results, how: Callable[..., None], stored_formats: str) -> None:
    for run in results.ranks(late_name(how, stored_formats), Phase.TWO_RANKS):
        before, after = run["before"], run["after"]
        assert_same(after["steps"], before["steps"], "steps")
        assert_same(after["weights"], before["weights"], "weights")
        for name, shard in before["state"].items():
            for key in ("exp_avg", "exp_avg_sq"):
                assert_same(after["state"][name].values[key], shard.values[key], f"{name} {key}")


@KEPT
@LATE
def test_masters_round_to_the_loaded_weights(results: Results, how: Callable[..., None], stored_formats: str) -> None:
    for run in results.ranks(late_name(how, stored_formats), Phase.TWO_RANKS):
        for name, shard in run["after"]["state"].items():
            weights = run["after"]["weights"][name].reshape(-1)[shard.start : shard.stop].float()
            masters = shard.values["master_param"]
            if stored_formats == "fp32":
                assert_same(masters.to(torch.bfloat16).float(), weights, name)
            else:  # within half a step of bf16, whose significand has 8 bits
                torch.testing.assert_close(masters, weights, rtol=2**-8, atol=1e-38)


@pytest.mark.parametrize("stored_formats", RESUMED_FORMATS)
def test_a_refresh_after_a_resume_loses_no_bit(results: Results, stored_formats: str) -> None:
    for rank, run in enumerate(results.ranks(f"refreshed after a resume ({stored_formats})", Phase.TWO_RANKS)):
        assert_same(run["refreshed"], run["saved"], f"rank {rank}")
        assert_same(run["resumed log"], run["log"], f"rank {rank}, log")


def _main_params(results: Results, stored_formats: str, iterations: int) -> list[dict[str, Any]]:
    return results.ranks(main_params_name(stored_formats, iterations), Phase.TWO_RANKS)


@STORED_FORMATS
@pytest.mark.parametrize("iterations", [0, 2])
def test_a_state_dict_gives_masters_their_fp32_values(results: Results, stored_formats: str, iterations: int) -> None:
    for run in _main_params(results, stored_formats, iterations):
        for name, shard in run["after"]["state"].items():
            assert_same(shard.values["master_param"], run["masters"][name], name)
            rounded = run["after"]["weights"][name].reshape(-1)[shard.start : shard.stop].float()
            if shard.stop - shard.start > 100:
                assert not torch.equal(rounded, run["masters"][name])


@STORED_FORMATS
def test_a_state_dict_changes_neither_moments_nor_steps(results: Results, stored_formats: str) -> None:
    for run in _main_params(results, stored_formats, 2):
        assert_same(run["after"]["steps"], run["before"]["steps"], "steps")
        for name, shard in run["before"]["state"].items():
            for key in ("exp_avg", "exp_avg_sq"):
                assert_same(run["after"]["state"][name].values[key], shard.values[key], f"{name} {key}")


@STORED_FORMATS
@pytest.mark.parametrize("iterations", [0, 2])
def test_training_goes_on_from_masters_of_a_state_dict(results: Results, stored_formats: str, iterations: int) -> None:
    for run in _main_params(results, stored_formats, iterations):
        moved = 0.0
        for name, shard in run["end"]["state"].items():
            step = (shard.values["master_param"] - run["masters"][name]).abs().max().item()
            assert step < 0.05, f"{name} moved by {step} in two steps"
            moved = max(moved, step)
        assert moved > 0.0


def test_both_formats_of_masters_train_alike(results: Results) -> None:
    fp32, remainders = (_main_params(results, stored_formats, 0) for stored_formats in ("fp32", "remainders"))
    for run, other in zip(fp32, remainders, strict=True):
        for step, expected in zip(run["log"], other["log"], strict=True):
            assert step.loss == pytest.approx(expected.loss, rel=1e-3)
