"""Iterations without a step, and steps whose gradients were prepared twice."""

from __future__ import annotations

import pytest
from comparison import assert_same
from registry import BOTH_WORLDS, Phase, Results
from scenarios_skips import ITERATIONS, SKIPS, skip_name

WORLDS = pytest.mark.parametrize("phase", BOTH_WORLDS, ids=lambda phase: phase.value)


@WORLDS
@pytest.mark.parametrize("name", SKIPS)
def test_skipped_iterations_leave_state_alone(results: Results, name: str, phase: Phase) -> None:
    ours, reference = (results.ranks(skip_name(name, optimizer), phase) for optimizer in ("ours", "reference"))
    for rank, run in enumerate(ours):
        steps = sum(step.updated for step in run["log"])
        assert 0 < steps < ITERATIONS
        assert set(run["steps"]) == {steps}
        assert_same(run, reference[rank], f"rank {rank}")


@WORLDS
def test_the_reduced_loss_scale_stays(results: Results, phase: Phase) -> None:
    for run in results.ranks(skip_name("overflow in fp16", "ours"), phase):
        assert not run["log"][0].updated
        assert run["scale"] < 2.0**24


@WORLDS
def test_gradients_may_be_prepared_before_the_step(results: Results, phase: Phase) -> None:
    once, twice = (results.ranks(f"gradients prepared {count}", phase) for count in ("once", "twice"))
    for rank, run in enumerate(twice):
        assert_same(run, once[rank], f"rank {rank}")
