"""Contents of checkpoints; other optimizers read ours, and ours reads theirs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comparison import assert_same, whole_state
from pairs import in_two_forms
from registry import Phase, Results
from scenarios_checkpoint import BEFORE
from scenarios_foreign import COVERING, FROM_REMAINDERS, TRANSFERS, WRITTEN_FORMATS, Transfer, written_name

from fused_offload.megatron.remainders import are_remainders

ALL = pytest.mark.parametrize("case", in_two_forms(TRANSFERS, COVERING))
REFUSED = [case for case in FROM_REMAINDERS if case.kind != "dp_reshardable"]
TAKEN = [case for case in FROM_REMAINDERS if case.kind == "dp_reshardable"]
PLAIN = (bool, int, float, str, tuple, type(None))


def rounded_moments(state: dict[str, dict[str, torch.Tensor]]) -> dict[str, dict[str, torch.Tensor]]:
    return {
        name: {
            key: value if key == "master_param" else value.to(torch.bfloat16).float() for key, value in values.items()
        }
        for name, values in state.items()
    }


def states(runs: list[dict[str, Any]], which: str) -> dict[str, dict[str, torch.Tensor]]:
    return whole_state([run[which]["state"] for run in runs])


@ALL
def test_masters_and_moments_survive(results: Results, case: Transfer) -> None:
    runs = results.ranks(case.name, Phase.TWO_RANKS)
    assert {run["refused"] for run in runs} == {None}
    saved = states(runs, "saved")
    assert_same(states(runs, "loaded"), rounded_moments(saved) if "bf16" in case.reader_formats else saved, "state")


# HybridDeviceOptimizer takes its masters from a checkpoint into use after a fully_reshardable load
# only.
@pytest.mark.parametrize(
    "case",
    in_two_forms([case for case in TRANSFERS if case.reader != "hybrid" or case.kind == "fully_reshardable"], COVERING),
)
def test_training_goes_on_from_there(results: Results, case: Transfer) -> None:
    for run in results.ranks(case.name, Phase.TWO_RANKS):
        for step, expected in zip(run["read log"], run["log"], strict=True):
            assert step.loss == pytest.approx(expected.loss, rel=5e-4)
            assert step.grad_norm == pytest.approx(expected.grad_norm, rel=1e-2)


@pytest.mark.parametrize("case", in_two_forms([case for case in TRANSFERS if case.reader == "ours"], COVERING))
def test_groups_hold_plain_values_and_the_step(results: Results, case: Transfer) -> None:
    for run in results.ranks(case.name, Phase.TWO_RANKS):
        for group in run["groups"]:
            assert type(group["step"]) is int
            assert group["step"] == BEFORE
            assert {key: value for key, value in group.items() if not isinstance(value, PLAIN)} == {}
            assert not {"offload_fraction", "pin_cpu_grads"} & set(group)


@pytest.mark.parametrize("case", TAKEN, ids=lambda case: case.name)
def test_remainders_of_fusedadam_load_beside_their_parameters(results: Results, case: Transfer) -> None:
    runs = results.ranks(case.name, Phase.TWO_RANKS)
    assert {run["refused"] for run in runs} == {None}
    assert_same(states(runs, "loaded"), states(runs, "saved"), "state")
    for run in runs:
        assert_same(run["loaded"]["weights"], run["saved"]["weights"], "weights")


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.name)
def test_remainders_of_fusedadam_are_refused_where_they_lost_their_parameters(results: Results, case: Transfer) -> None:
    for run in results.ranks(case.name, Phase.TWO_RANKS):
        assert run["refused"] is not None
        for word in ("store_param_remainders", case.kind.removesuffix("_gather"), "dp_reshardable"):
            assert word in run["refused"]
        after = run["after"]["state"]
        for name, shard in run["before"]["state"].items():
            assert shard.values is None
            values = after[name].values
            assert values is None or not values["exp_avg"].any()


@pytest.mark.parametrize("stored_formats", WRITTEN_FORMATS)
@pytest.mark.parametrize("kind", ["fully_reshardable", "legacy"])
def test_files_hold_the_true_masters_and_unscaled_moments(results: Results, kind: str, stored_formats: str) -> None:
    runs = results.ranks(written_name(kind, stored_formats), Phase.TWO_RANKS)
    expected = whole_state([run["state"] for run in runs])
    found = runs[0]["found"]
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert_same(
            {"exp_avg": found[name]["exp_avg"], "exp_avg_sq": found[name]["exp_avg_sq"]},
            {"exp_avg": values["exp_avg"], "exp_avg_sq": values["exp_avg_sq"]},
            name,
        )
        assert_same(found[name]["param"], values["master_param"], f"{name} master")
        assert not torch.equal(values["master_param"], values["master_param"].to(torch.bfloat16).float()) or (
            values["master_param"].numel() < 64
        )


_WHOLE = torch.tensor([3.0, -200.0, 0.0])
_FITTING = _WHOLE.bfloat16()


@pytest.mark.parametrize(
    ("masters", "expected"),
    [
        ([(_WHOLE, None)], True),
        ([(_WHOLE, torch.ones(3).bfloat16())], True),
        ([(_WHOLE.short(), _FITTING)], True),
        ([(_WHOLE, _FITTING)], False),
        ([(_WHOLE + 0.5, None)], False),
        ([(_WHOLE, None), (_WHOLE + 0.5, None)], False),
        ([], False),
        ([(torch.empty(0), None)], False),
        ([(torch.empty(0), torch.empty(0).bfloat16())], False),
        ([(_WHOLE.long(), None)], False),
    ],
)
def test_what_is_taken_for_remainders(masters: list[tuple[torch.Tensor, torch.Tensor | None]], expected: bool) -> None:
    assert are_remainders(masters) is expected
