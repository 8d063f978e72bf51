"""Parameters sharded by FSDP2, and torch's distributed checkpoints of them, on one and on two ranks.

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
EVERYWHERE = [name for name in fsdp_scenarios.SCENARIOS if name not in RESHARDING]

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed"),
    pytest.mark.xdist_group("fsdp"),
]


def run(ranks: int, folder: Path, names: list[str]) -> tuple[set[str], str]:
    return run_ranks(
        fsdp_scenarios.__file__, ranks, folder, names, limit_s=LIMIT_S, environment={"CUDA_VISIBLE_DEVICES": ""}
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fsdp")


@pytest.fixture(scope="module", params=[1, 2], ids=["1 rank", "2 ranks"])
def finished(request: pytest.FixtureRequest, folder: Path) -> tuple[set[str], str]:
    return run(request.param, folder, EVERYWHERE)


@pytest.mark.parametrize("name", EVERYWHERE)
def test_scenario(finished: tuple[set[str], str], name: str) -> None:
    passed, output = finished
    assert name in passed, output


def test_resharding_from_two_ranks_to_one_and_back(folder: Path) -> None:
    for name, ranks in RESHARDING.items():
        passed, output = run(ranks, folder, [name])
        assert name in passed, output
