"""The Hugging Face example fine-tunes, says what it needs, and gives only what is trained state."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_trainers import needs

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "finetune_hf.py"


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment}
    command = [sys.executable, str(EXAMPLE), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@needs("transformers", "accelerate", "peft")
@pytest.mark.parametrize("lora", [False, True])
def test_it_fine_tunes(lora: bool) -> None:
    done = run("--steps", "40", "--length", "64", *(["--lora"] if lora else []))
    assert done.returncode == 0, done.stdout + done.stderr
    first, last = map(float, re.findall(r"from ([\d.]+) to ([\d.]+) nats", done.stdout)[0])
    assert last < first - 0.1
    trained, held = (int(count.replace(",", "")) for count in re.findall(r"([\d,]+) of ([\d,]+) para", done.stdout)[0])
    assert (trained < held / 4) == lora
    megabytes = float(re.findall(r"state took ([\d.,]+) MB", done.stdout)[0])
    assert megabytes * 1e6 == pytest.approx((4 if lora else 6) * trained, rel=0.05, abs=1e5)


def test_it_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "transformers.py").write_text("raise ImportError('no such package here')")
    done = run(PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert "This example needs transformers (no such package here): pip install transformers" in done.stderr
