"""Megatron-FSDP on two GPUs; runs fsdp_on_gpus.py."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("fsdp_on_gpus.py")
LIMIT_S = 300


@pytest.mark.multi_gpu
@pytest.mark.skipif(importlib.util.find_spec("einops") is None, reason="Megatron-FSDP needs einops")
def test_two_gpus_train_save_and_resume_bit_for_bit(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    done = subprocess.run(
        [*command, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert done.stdout.count("passed: ") == 4, done.stdout[-6000:]
