"""Damaged state dicts, and those of another training: all of a load is refused, or steps until one
succeeds.
"""

from __future__ import annotations

import os
from pathlib import Path

import launch
import pytest
from comparison import assert_same
from registry import BOTH_WORLDS, Phase, Results
from scenarios_damage import DAMAGED, DAMAGES, INTERRUPTED, damage_name, interrupted_name
from small import Wrapping

WORLDS = pytest.mark.parametrize("phase", BOTH_WORLDS, ids=lambda phase: phase.value)


@pytest.mark.parametrize(("wrapping", "kind"), DAMAGED, ids=lambda value: getattr(value, "name", value))
def test_damaged_state_dicts_change_nothing_or_train_on(results: Results, wrapping: Wrapping, kind: str) -> None:
    (run,) = results.ranks(damage_name(wrapping, kind), Phase.ONE_RANK)
    assert run["wrong"] == []
    assert run["counts"]["refused"] > 0


@pytest.mark.large
def test_many_damaged_state_dicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, DAMAGES, "200")
    launch.run(tmp_path, "^damaged, ", large=True)
    results = launch.collect(tmp_path)
    total = 0
    for wrapping, kind in DAMAGED:
        (run,) = results.ranks(damage_name(wrapping, kind), Phase.ONE_RANK)
        print(f"{wrapping.name}, {kind}: {run['counts']}")
        assert run["wrong"] == []
        total += sum(run["counts"].values())
    assert total == 200 * len(DAMAGED)


@WORLDS
@pytest.mark.parametrize("wrapping", INTERRUPTED, ids=lambda wrapping: wrapping.name)
def test_after_an_interrupted_load_only_another_load_goes_on(
    results: Results, wrapping: Wrapping, phase: Phase
) -> None:
    for rank, run in enumerate(results.ranks(interrupted_name(wrapping), phase)):
        assert set(run) == set(wrapping.formats)
        for kind, after in run.items():
            assert "the disk is gone" in after["error"]
            assert after["other error"].startswith("ValueError: ")
            for refused in (after["step"], after["saving"]):
                assert refused.startswith("RuntimeError: ")
                assert "half-way" in refused
                assert "the disk is gone" in refused
            assert_same(after["loaded"], after["saved"], f"rank {rank}, {kind}")


def test_checkpoints_of_another_training_change_nothing(results: Results) -> None:
    (run,) = results.ranks("checkpoints of another training", Phase.ONE_RANK)
    words = {"amsgrad": "amsgrad=True", "decay": "decoupled_weight_decay=False", "step": "step"}
    assert len(run) == 9
    for name, (message, same) in run.items():
        assert message.startswith("ValueError: "), name
        assert words[name.split(", ")[1]] in message
        assert same == "True", name


def test_a_load_that_fails_at_the_last_parameter_has_written_none(results: Results) -> None:
    (run,) = results.ranks("a short last moment", Phase.ONE_RANK)
    assert len(run) == 4
    for name, (message, same) in run.items():
        assert message.startswith("ValueError: "), f"{name}: {message}"
        assert same == "True", name


def test_all_ranks_refuse_a_damaged_legacy_file_that_one_has_read(results: Results) -> None:
    for run in results.ranks("damaged legacy files", Phase.TWO_RANKS):
        assert len(run) == 16
        for name, (message, same) in run.items():
            assert message.startswith("ValueError: "), f"{name}: {message}"
            assert same == "True", name
