"""The FSDP example on one rank: a resumed run ends in the same bits."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ranks import free_port

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "train_fsdp.py"

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")


def run(folder: Path, *options: str) -> str:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "1",
        "RANK": "0",
        "LOCAL_RANK": "0",
    }
    arguments = ["--folder", str(folder), "--steps", "4", "--save-every", "2", "--report-every", "1", "--context", "32"]
    arguments += options
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), *arguments], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_resumed_run_ends_in_the_same_bits(tmp_path: Path) -> None:
    output = run(tmp_path)
    shutil.rmtree(tmp_path / "step-4")
    resumed = run(tmp_path, "--cpu-offload")
    assert re.findall(r"step +(\d+)", output) == ["1", "2", "3", "4"]
    assert re.findall(r"step +(\d+)", resumed) == ["3", "4"]
    digest = re.search(r"digest \w{64}", output)
    assert digest is not None
    assert digest[0] in resumed


def test_it_says_that_it_needs_torchrun(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "LOCAL_RANK"}
    command = [sys.executable, str(EXAMPLE), "--folder", str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "start it by torchrun: torchrun" in done.stderr
