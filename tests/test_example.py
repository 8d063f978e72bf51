"""The demo: three trainings that must end in the same bits, and an exit code that says whether they
did.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "train_gpt.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    sys.path.append(str(EXAMPLE.parent))  # as for a script's siblings
    spec = importlib.util.spec_from_file_location("train_gpt", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # dataclasses look their module up by name.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def run_demo(*arguments: str) -> str:
    # A table cut to a narrow terminal would lose its last column.
    environment = {**os.environ, "COLUMNS": "120"}
    run = subprocess.run(
        [sys.executable, str(EXAMPLE), *arguments], env=environment, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_tiny_demo_end_to_end(tmp_path: Path) -> None:
    output = run_demo("--size", "tiny", "--steps", "4", "--device", "cpu", "--checkpoint-dir", str(tmp_path))
    assert output.count("same bits") == 3
    losses = [float(loss) for loss in re.findall(r"step +\d+ +loss ([0-9.]+) +grad norm [0-9.]+ +lr", output)]
    first_run, second_run, resumed = losses[:4], losses[4:8], losses[8:]
    assert first_run == second_run
    assert resumed == first_run[2:]
    # By 0.27 to 0.51 with Python 3.10 to 3.13: the text is the standard library's own source.
    assert first_run[-1] < first_run[0] - 0.1
    # 4 bytes each of exp_avg, exp_avg_sq and master_param, plus the padding of small tensors.
    host_bytes = float(re.findall(r"per parameter +│ +([0-9.]+)", output)[0])
    assert 12 <= host_bytes < 12.5
    assert (tmp_path / "halfway.pt").exists()
    assert len(re.findall(r"s left of run 1$", output, re.MULTILINE)) == 4
    assert output.rstrip().splitlines()[-1].startswith("Shown: with its optimizer state in host memory")


def test_it_takes_the_threads_that_are_idle(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = len(os.sched_getaffinity(0))
    assert 1 <= example.idle_cores() <= allowed
    for idle, cores in ((0, 1), (500, 2), (1000, 4)):  # of 1,000 ticks of four cores
        stats = iter(["cpu 0 0 0 0 0 0 0 0 0 0\n", f"cpu {1000 - idle} 0 0 {idle} 0 0 0 0 0 0\n"])
        monkeypatch.setattr(example.Path, "read_text", lambda path, stats=stats: next(stats))
        monkeypatch.setattr(example.os, "sched_getaffinity", lambda pid: range(4))
        monkeypatch.setattr(example.os, "cpu_count", lambda: 4)
        assert example.idle_cores() == cores


def test_it_says_that_there_is_no_gpu() -> None:
    command = [sys.executable, str(EXAMPLE), "--device", "cuda"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert run.returncode == 2
    assert "there is no CUDA GPU; leave --device out" in run.stderr


@pytest.mark.gpu
def test_tiny_demo_on_a_gpu() -> None:
    output = run_demo("--size", "tiny", "--steps", "4", "--device", "cuda")
    assert output.count("same bits") == 3


def test_a_different_bit_is_reported(example: ModuleType) -> None:
    digests = example.Digests(parameters="a" * 64, optimizer="b" * 64)
    other = digests._replace(optimizer="b" * 63 + "c")
    assert example.report_agreement({"one": digests, "two": digests})
    assert not example.report_agreement({"one": digests, "two": other})


def test_exit_code_tells_of_different_bits(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example, "run_demo", lambda options, directory: False)
    monkeypatch.setattr(example, "make_deterministic", lambda device: example.contextlib.nullcontext())
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", "--size", "tiny", "--device", "cpu"])
    assert example.main() == 1
