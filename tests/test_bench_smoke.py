"""The benchmarks still run, each once and tiny, and their results file has what the tables are made from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]

EXPECTED_ROWS = {
    "kernel/12B/ieee",
    "kernel/10B/ieee",
    "kernel/6B/ieee",
    "kernel/6B-fp16/ieee",
    "kernel/6B-stochastic/ieee",
    "kernel/4B/ieee",
    "kernel/torch-fused-fp32",
    "step/12B/whole-step",
    "step/10B/whole-step",
    "step/6B/whole-step",
    "step/4B/whole-step",
    "tensors/few",
    "tensors/many",
    "resident/torch-fused",
    "resident/fraction-0",
    "drift/early",
    "drift/late",
    "peers/torch-fused-resident",
    "peers/torch-fused-cpu",
}
EXPECTED_ROWS_ON_A_GPU = {
    "link/h2d/1MiB",
    "link/d2h/64MiB",
    "link/duplex/16MiB",
    "kernel/6B/te",
    "step/12B/copies-only",
    "step/12B/plain-duplex",
    "step/6B/copies-only",
    "step/4B/copies-only",
    "step/6B/plain-duplex",
}


def run_benchmarks(path: Path) -> None:
    # A worker of pytest-xdist that runs this test would make pytest-benchmark turn itself off.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "bench", "--smoke", f"--results={path}", "-p", "no:cacheprovider"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr


# One test, since each worker of pytest-xdist would run the benchmarks again for its share of several.
def test_benchmarks_run_and_are_reported(tmp_path: Path) -> None:
    pytest.importorskip("pytest_benchmark")
    pytest.importorskip("triton")
    path = tmp_path / "results.json"
    run_benchmarks(path)
    results = json.loads(path.read_text())
    check_that_nothing_is_missing(results)
    check_rows(results)
    check_machine(results["machine"])
    check_table(path, results)


def check_that_nothing_is_missing(results: dict[str, Any]) -> None:
    names = {row["name"] for row in results["rows"]}
    assert names >= EXPECTED_ROWS
    assert results["failed"] == []
    assert "--smoke" in results["command"]
    if torch.cuda.is_available():
        assert names >= EXPECTED_ROWS_ON_A_GPU
        return
    # What needs a link is skipped and says so; nothing else may go missing.
    assert any("test_link" in name for name in results["skipped"]["needs a CUDA GPU"])
    skipped = {name.partition("[")[0] for names in results["skipped"].values() for name in names}
    assert skipped == {
        "bench/test_kernel_speed.py::test_fused_kernel",
        "bench/test_kernel_speed.py::test_te_fused_adam",
        "bench/test_link.py::test_link",
        "bench/test_peers.py::test_peer",
        "bench/test_sweep.py::test_sweep",
        "bench/test_tuned.py::test_tuned",
    }


def check_rows(results: dict[str, Any]) -> None:
    for row in results["rows"]:
        assert 0 < row["min_ms"] <= row["median_ms"] <= row["max_ms"], row
    step = next(row for row in results["rows"] if row["name"] == "step/12B/whole-step")
    assert step["params"]["form"] == "12B"
    # Four tensors of 1,153 elements, each padded to 1,280.
    assert step["numel"] == 4 * 1_153
    assert step["bytes_to_device"] == step["bytes_to_host"] == 4 * 1_280 * 12
    assert step["gbps_to_host"] == pytest.approx(step["bytes_to_host"] / step["median_ms"] / 1e6)
    assert step["host_ms"] <= step["median_ms"]


def check_machine(machine: dict[str, Any]) -> None:
    assert machine["versions"]["torch"] == torch.__version__
    assert machine["cores"] >= 1
    assert machine["date"]
    assert (machine["gpu"] is not None) == torch.cuda.is_available()


def check_table(path: Path, results: dict[str, Any]) -> None:
    for command in (["bench/table.py"], ["-m", "bench.table"]):
        run = subprocess.run(
            [sys.executable, *command, str(path)], cwd=ROOT, capture_output=True, text=True, timeout=60
        )
        assert run.returncode == 0, run.stderr
        assert f"torch {torch.__version__}" in run.stdout
        assert "smoke test" in run.stdout
        for row in results["rows"]:
            suite, _, case = row["name"].partition("/")
            assert suite == "link" or f"| {case} |" in run.stdout
