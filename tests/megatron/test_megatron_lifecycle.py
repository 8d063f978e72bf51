"""Moves, replacements, resets and calls between iterations change no bit of the training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from comparison import assert_same
from registry import Phase, Results
from scenarios_lifecycle import LIFECYCLES, WALKED_FORMATS, walk_name
from walkers import HARMLESS

STORED_FORMATS = pytest.mark.parametrize("stored_formats", WALKED_FORMATS)


@STORED_FORMATS
@pytest.mark.parametrize("walk", HARMLESS, ids=lambda walk: walk.__name__)
def test_training_does_not_notice(results: Results, walk: Callable[..., None], stored_formats: str) -> None:
    undisturbed = results.ranks(walk_name(None, stored_formats), Phase.TWO_RANKS)
    for rank, run in enumerate(results.ranks(walk_name(walk, stored_formats), Phase.TWO_RANKS)):
        assert_same(run, undisturbed[rank], f"rank {rank}")


@STORED_FORMATS
def test_the_undisturbed_run_trains(results: Results, stored_formats: str) -> None:
    first, second = results.ranks(walk_name(None, stored_formats), Phase.TWO_RANKS)
    assert_same(first["weights"], second["weights"], "weights")
    assert len({step.loss for step in first["log"]}) == 5


@STORED_FORMATS
def test_a_reset_in_place_is_that_of_a_plain_optimizer(results: Results, stored_formats: str) -> None:
    ours, reference = (
        results.ranks(f"{optimizer}, slime resets state ({stored_formats})", Phase.TWO_RANKS)
        for optimizer in ("ours", "reference")
    )
    for rank, run in enumerate(ours):
        assert_same(run, reference[rank], f"rank {rank}")
        assert set(run["steps"]) == {2}


@STORED_FORMATS
def test_state_that_is_copied_back_in_place_counts(results: Results, stored_formats: str) -> None:
    undisturbed = results.ranks(walk_name(None, stored_formats), Phase.TWO_RANKS)
    for rank, run in enumerate(results.ranks(f"state is put back ({stored_formats})", Phase.TWO_RANKS)):
        expected = {**undisturbed[rank], "log": undisturbed[rank]["log"][2:]}
        assert_same(run, expected, f"rank {rank}")


@pytest.mark.parametrize("layout", LIFECYCLES)
def test_lifecycle_calls_in_any_order_and_repeated_change_nothing(results: Results, layout: str) -> None:
    undisturbed = results.ranks(f"lifecycle left alone, {layout}", Phase.TWO_RANKS)
    for rank, run in enumerate(results.ranks(f"lifecycle called, {layout}", Phase.TWO_RANKS)):
        assert_same(run, undisturbed[rank], f"rank {rank}")


def _runs(results: Results) -> list[dict[str, Any]]:
    return results.ranks("names of HybridDeviceOptimizer", Phase.TWO_RANKS)


def test_dummy_step_allocates_and_changes_nothing(results: Results) -> None:
    for run in _runs(results):
        assert_same(run["untouched"]["weights"], run["weights"], "weights")
        assert {step or 0 for step in run["untouched"]["steps"]} == {0}
        for states in run["allocated"]:
            assert states
            assert {tuple(keys) for keys in states} == {("exp_avg", "exp_avg_sq", "master_param")}


def test_training_after_a_dummy_step_is_as_without(results: Results) -> None:
    undisturbed = results.ranks(walk_name(None, "fp32"), Phase.TWO_RANKS)
    for rank, run in enumerate(_runs(results)):
        assert_same(run["after"], run["before"], f"rank {rank}, after the calls")
        assert_same({"log": run["log"], **run["end"]}, undisturbed[rank], f"rank {rank}")


def test_there_are_no_sub_optimizers_and_no_copies_to_walk(results: Results) -> None:
    for run in _runs(results):
        assert run["lists"] == [([], {}, {})] * 2


def test_defaults_hold_only_what_a_group_may_hold_and_the_options(results: Results) -> None:
    for run in _runs(results):
        for defaults in run["defaults"]:
            assert set(defaults) - {"options"} == {"lr", "bias_correction", "betas", "eps", "weight_decay"}


def test_an_optimizer_that_is_built_anew_wraps_no_wrappers(results: Results) -> None:
    for first, *others in results.ranks("optimizers take turns", Phase.TWO_RANKS):
        assert set(first) == {1}
        assert others == [first, first]


def test_offloading_gives_freed_memory_to_other_processes(results: Results) -> None:
    for run in _runs(results):
        assert run["caches emptied"] == len(run["lists"])
