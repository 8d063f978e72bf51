"""A checkpoint that another process writes while training goes on is the state at the save."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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


def run_job(*arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, since it puts stand-ins for CUDA into torch."""
    folder = Path(__file__).resolve().parent
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=folder, check=False)


def test_a_job_that_compares_nothing_is_refused(tmp_path: Path) -> None:
    job = run_job("async_job.py", str(tmp_path), "--cases", "no such case")
    assert job.returncode == 2
    assert "no case has such a name" in job.stderr


def test_cases_that_could_not_be_run_are_not_well() -> None:
    outcomes = {
        "ran": {"wrong": []},
        "of a missing library": {"wrong": [], "not run": True},
        "failed": {"wrong": ["another value"]},
    }
    judged = [["of a missing library"], ["ran", "of a missing library"], ["ran", "failed"]]
    program = "import async_job; print([async_job.verdict(outcomes)[0] for outcomes in {}])"
    job = run_job("-c", program.format([{name: outcomes[name] for name in names} for names in judged]))
    assert job.stdout.splitlines()[-1] == "[False, True, False]", job.stderr
