"""Parameters sharded by FSDP2, and torch's distributed checkpoints of them, on one and on two
ranks.

The scenarios are in fsdp_scenarios.py; one process per rank runs all of them.
"""

from __future__ import annotations

from pathlib import Path

import fsdp_scenarios
import pytest
import torch
from ranks import run_ranks

LIMIT_S = 240
RESHARDING = {
    "saves_for_another_number_of_ranks": 2,
    "loads_and_saves_on_another_number_of_ranks": 1,
    "is_the_same_after_resharding": 2,
}
ON_FOUR_RANKS = ["gradients_in_other_placements_are_redistributed"]  # a mesh of two by two
EVERYWHERE = [name for name in fsdp_scenarios.SCENARIOS if name not in {*RESHARDING, *ON_FOUR_RANKS}]

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed"),
    pytest.mark.xdist_group("fsdp"),
]


def run(ranks: int, folder: Path, names: list[str]) -> dict[str, str]:
    return run_ranks(
        fsdp_scenarios.__file__, ranks, folder, names, limit_s=LIMIT_S, environment={"CUDA_VISIBLE_DEVICES": ""}
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fsdp")


@pytest.fixture(scope="module", params=[1, 2], ids=["1 rank", "2 ranks"])
def failed(request: pytest.FixtureRequest, folder: Path) -> dict[str, str]:
    return run(request.param, folder, EVERYWHERE)


@pytest.mark.parametrize("name", EVERYWHERE)
def test_scenario(failed: dict[str, str], name: str) -> None:
    assert name not in failed, failed[name]


@pytest.mark.parametrize("name", ON_FOUR_RANKS)
def test_scenario_on_four_ranks(folder: Path, name: str) -> None:
    assert not run(4, folder, [name])


def test_resharding_from_two_ranks_to_one_and_back(folder: Path) -> None:
    for name, ranks in RESHARDING.items():
        assert not run(ranks, folder, [name])


_SCENARIOS = """
import sys, ranks, torch.distributed as dist

def passes(): dist.barrier()
def fails_on_the_last_rank():
    assert dist.get_rank() < dist.get_world_size() - 1, "the reason"
    dist.barrier()
def passes_too(): dist.barrier()

names = ("passes", "fails_on_the_last_rank", "passes_too")
ranks.main({name: globals()[name] for name in names}, sys.argv[2:], backend="gloo", limit_s=60)
"""


def test_scenarios_that_fail_are_reported_one_by_one(tmp_path: Path) -> None:
    script = tmp_path / "scenarios.py"
    script.write_text(_SCENARIOS)
    names = ["passes", "fails_on_the_last_rank", "passes_too"]
    environment = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(Path(__file__).parent)}
    failed = run_ranks(str(script), 2, tmp_path, names, limit_s=LIMIT_S, environment=environment)
    assert list(failed) == names[1:2]
    assert "the reason" in failed[names[1]]
    late = run_ranks(str(script), 2, tmp_path, names, limit_s=0, environment=environment)
    assert list(late) == names
    assert "not run" in late["passes"]
