"""A checkpoint that another process writes while training goes on is the state at the save."""

from __future__ import annotations

import pytest
import torch
from comparison import assert_same
from pairs import in_two_forms
from registry import Phase, Results
from scenarios_async import COVERING, LIVE, LOCAL_FORMATS, WRITINGS, Writing, local_name

CASES = pytest.mark.parametrize("case", in_two_forms(WRITINGS, COVERING))


@CASES
def test_what_is_written_is_the_state_at_the_save(results: Results, case: Writing) -> None:
    for rank, run in enumerate(results.ranks(case.name, Phase.TWO_RANKS)):
        assert_same(run["loaded"], run["saved"], f"rank {rank}")


@CASES
def test_training_went_on_before_anything_was_written(results: Results, case: Writing) -> None:
    for run in results.ranks(case.name, Phase.TWO_RANKS):
        assert run["finished early"] == []
        for name, shard in run["meanwhile"]["state"].items():
            assert not torch.equal(shard.values["exp_avg"], run["saved"]["state"][name].values["exp_avg"])


def test_a_writer_of_live_state_is_found_out(results: Results) -> None:
    first, second = results.ranks(LIVE, Phase.TWO_RANKS)
    assert "results_queue should not be empty" in first["error"]
    assert not first["has metadata"]
    assert not second["has metadata"]


@pytest.mark.parametrize("stored_formats", LOCAL_FORMATS)
def test_a_local_checkpoint_is_the_state_at_the_save(results: Results, stored_formats: str) -> None:
    for rank, run in enumerate(results.ranks(local_name(stored_formats), Phase.TWO_RANKS)):
        assert_same(run["loaded"], run["saved"], f"rank {rank}")
