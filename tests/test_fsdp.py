"""Parameters sharded by FSDP2, and torch's distributed checkpoints of them, on one and on two ranks.

The scenarios are in fsdp_scenarios.py; one process per rank runs all of them.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import fsdp_scenarios
import pytest
import torch

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


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def run(ranks: int, folder: Path, names: list[str]) -> tuple[set[str], str]:
    """Names that passed on every rank, and what all ranks said."""
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(ranks),
    }
    logs = [folder / f"{names[0]}-{ranks}-{rank}.log" for rank in range(ranks)]
    processes = []
    for rank, log in enumerate(logs):
        with log.open("w") as output:
            processes.append(
                subprocess.Popen(
                    [sys.executable, fsdp_scenarios.__file__, str(folder), *names],
                    env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        for process in processes:
            process.wait(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        pass  # what did not finish did not pass
    finally:
        for process in processes:
            process.kill()
            process.wait()
    texts = [log.read_text() for log in logs]
    passed = set.intersection(*(set(text.splitlines()) for text in texts)) & set(names)
    return passed, "\n".join(f"rank {rank}:\n{text}" for rank, text in enumerate(texts))


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
