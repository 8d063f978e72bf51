"""Checkpoints through Megatron: exact resume in every format, on as many ranks and on others."""

from __future__ import annotations

import pytest
from comparison import assert_same, whole_state
from registry import BOTH_WORLDS, Phase, Results
from scenarios_checkpoint import (
    ADAPTERS_ALONE,
    AFTER,
    COVERING,
    RESHARDED,
    RESUMES,
    Resume,
    copies_name,
    resharded_name,
)
from scenarios_training import STORED_FORMATS

WORLDS = pytest.mark.parametrize("phase", BOTH_WORLDS, ids=lambda phase: phase.value)
RUNS = [
    pytest.param(case, phase, id=f"{case.name}-{phase.value}", marks=() if case in COVERING else pytest.mark.large)
    for case in RESUMES
    for phase in case.phases
]
CASES = pytest.mark.parametrize(("case", "phase"), RUNS)


@CASES
def test_loading_gives_what_was_saved(results: Results, case: Resume, phase: Phase) -> None:
    for rank, run in enumerate(results.ranks(case.name, phase)):
        assert_same(run["loaded"]["weights"], run["saved"]["weights"], f"rank {rank}, weights")
        if case.iterations_before:
            assert_same(run["loaded"]["state"], run["saved"]["state"], f"rank {rank}, state")


@CASES
def test_resumed_training_has_the_bits_of_the_uninterrupted_one(results: Results, case: Resume, phase: Phase) -> None:
    for rank, run in enumerate(results.ranks(case.name, phase)):
        assert_same(run["resumed"], run["went on"], f"rank {rank}")


@CASES
def test_loading_puts_less_than_the_state_of_one_parameter_on_the_gpu(
    results: Results, case: Resume, phase: Phase
) -> None:
    for run in results.ranks(case.name, phase):
        assert run["placed on the GPU"] < 1000


@CASES
def test_step_counts_survive_in_all_groups(results: Results, case: Resume, phase: Phase) -> None:
    for run in results.ranks(case.name, phase):
        steps = run["loaded"]["steps"]
        assert [step or 0 for step in steps] == [case.iterations_before] * len(steps)
        assert run["resumed"]["steps"] == [case.iterations_before + AFTER] * len(steps)


@pytest.mark.parametrize(("case", "phase"), [run for run in RUNS if run.values[0].layout == "all overlapped"])
def test_saving_changes_nothing(results: Results, case: Resume, phase: Phase) -> None:
    references = results.ranks(f"{case.layout}, {case.stored_formats}, reference", phase)
    for run, reference in zip(results.ranks(case.name, phase), references, strict=True):
        start = case.iterations_before
        assert_same(run["went on"]["log"], reference["log"][start : start + AFTER], "log")


@WORLDS
def test_buckets_before_the_last_one_have_padding(results: Results, phase: Phase) -> None:
    case = next(case for case in COVERING if (case.kind, case.layout) == ("fully_reshardable", "all overlapped"))
    for run in results.ranks(case.name, phase):
        assert sum(padded > unpadded for padded, unpadded in run["buckets"][:-1]) > 1


@WORLDS
def test_only_adapters_have_state_and_change(results: Results, phase: Phase) -> None:
    for run in results.ranks(ADAPTERS_ALONE, phase):
        assert all(".adapter." in name for name in run["names"])
        assert run["state numel"] == run["numel"] > 0
        padding = 128 * len(run["names"])  # at most
        assert 12 * run["numel"] <= run["host bytes"] <= 12 * (run["numel"] + padding)
        assert_same(run["frozen after"], run["frozen"])


@pytest.mark.parametrize("stored_formats", STORED_FORMATS)
def test_only_an_asynchronous_save_copies_state(results: Results, stored_formats: str) -> None:
    for run in results.ranks(copies_name(stored_formats), Phase.TWO_RANKS):
        assert (run["live"] > 0) == (stored_formats != "remainders, bf16 moments")
        assert run["sync"] == run["live"]
        assert run["async"] == 0


@pytest.mark.parametrize(("kind", "stored_formats"), RESHARDED)
@pytest.mark.parametrize(
    ("saving", "loading"),
    [(Phase.TWO_RANKS, Phase.ONE_RANK), (Phase.ONE_RANK, Phase.TWO_RANKS_AGAIN)],
    ids=["two to one", "one to two"],
)
def test_another_number_of_ranks_loads_the_same_state(
    results: Results, kind: str, stored_formats: str, saving: Phase, loading: Phase
) -> None:
    saved, loaded = (results.ranks(resharded_name(kind, stored_formats), phase) for phase in (saving, loading))
    assert_same(
        whole_state([run["loaded"]["state"] for run in loaded]),
        whole_state([run["saved"]["state"] for run in saved]),
        "state",
    )
    for run in loaded:
        assert_same(run["loaded"]["weights"], saved[0]["saved"]["weights"], "weights")
        assert set(run["loaded"]["steps"]) == set(saved[0]["saved"]["steps"])
