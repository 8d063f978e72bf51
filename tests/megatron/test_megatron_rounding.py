"""Stochastic rounding reaches the optimizer in both places, and changes only stored moments."""

from __future__ import annotations

import pytest
import torch
from comparison import assert_same
from registry import Phase, Results
from scenarios_rounding import ASKED


@pytest.mark.parametrize("place", ["ours", "ours as FusedAdam"])
def test_the_argument_counts_before_the_variable(results: Results, place: str) -> None:
    (run,) = results.ranks("stochastic rounding, formats", Phase.ONE_RANK)
    for argument, variable in ASKED:
        format = "bf16_stochastic" if argument or (argument is None and variable == "1") else "bf16"
        expected = {"exp_avg": format, "exp_avg_sq": format, "master_param": "remainder"}
        assert run[place, argument, variable] == expected, (argument, variable)


def test_a_context_ends_with_what_was_there_before(results: Results) -> None:
    (run,) = results.ranks("stochastic rounding, formats", Phase.ONE_RANK)
    assert run["within"]["exp_avg"] == "bf16"
    assert run["again"]["exp_avg"] == "bf16_stochastic"


def test_what_is_no_switch_installs_nothing(results: Results) -> None:
    ((argument, variable, is_installed),) = results.ranks("stochastic rounding, refused", Phase.ONE_RANK)
    assert argument == "TypeError: Invalid stochastic_rounding: 1, it should be a bool"
    assert variable.startswith("ValueError: Invalid FUSED_OFFLOAD_STOCHASTIC_ROUNDING: 'yes'")
    assert is_installed == "False"


def test_offloaded_state_is_rounded_as_resident_state(results: Results) -> None:
    for rank, run in enumerate(results.ranks("stochastic rounding, training", Phase.TWO_RANKS)):
        assert_same(run["offloaded"], run["resident"], f"rank {rank}")
        moved = [
            not torch.equal(shard.values["exp_avg_sq"], run["to the nearest"]["state"][name].values["exp_avg_sq"])
            for name, shard in run["offloaded"]["state"].items()
        ]
        assert all(moved)
