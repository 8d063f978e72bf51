"""bench/megatron_lm.py: arguments, ranks, log, comparison and table, on a small script over
Megatron's training loop.

The script is `tests/megatron/pretrain_gpt.py`, under the stand-in for CUDA: what Megatron-LM's own
does beyond that (its data, TransformerEngine, GPUs) is not tested here. The variable MEGATRON_LM
names a checkout to take instead.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import os
import shutil
from pathlib import Path
from textwrap import dedent
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
MEGATRON = ROOT / "tests" / "megatron"

SITE = dedent(
    """
    import os, sys, typing
    if "LOCAL_RANK" in os.environ:
        import typing_extensions
        typing.override = typing_extensions.override  # Megatron's training loop is for Python 3.12
        sys.path.append({stand_in!r})
        import stand_in, torch
        stand_in.install()
        from fused_offload.megatron.after_import import call_after_import
        torch.cuda.is_current_stream_capturing = lambda: False
        def trains():
            from megatron.core.datasets import utils
            utils.compile_helpers = lambda: None  # the installed package has no Makefile
            stand_in.install_in_megatron()
            torch.cuda.is_available = lambda: True  # or Megatron does not begin
        call_after_import("megatron.training.training", trains)
    """
)


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "bench")
    return importlib.import_module("megatron_lm")


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SITE.format(stand_in=str(MEGATRON)))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "site"), str(ROOT)]))
    for name, value in (("CUDA_VISIBLE_DEVICES", ""), ("GLOO_SOCKET_IFNAME", "lo"), ("OMP_NUM_THREADS", "1")):
        monkeypatch.setenv(name, value)
    if "MEGATRON_LM" in os.environ:
        return Path(os.environ["MEGATRON_LM"])
    try:
        spec = importlib.util.find_spec("megatron.training")
    except ModuleNotFoundError:
        spec = None
    if spec is None or spec.origin is None or not (Path(spec.origin).parent / "argument_utils.py").exists():
        pytest.skip("needs the training loop of megatron-core 0.19")
    (tmp_path / "megatron-lm").mkdir()
    shutil.copy(MEGATRON / "pretrain_gpt.py", tmp_path / "megatron-lm")
    (tmp_path / "megatron-lm" / "megatron").symlink_to(Path(spec.origin).parents[1])
    return tmp_path / "megatron-lm"


def test_cases_run_are_compared_and_shown(program: ModuleType, checkout: Path, tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    command = ["--megatron-lm", str(checkout), "--results", str(results), "--tiny", "--device", "cpu"]
    cases = ["stock", "ours-100-12B-full", "ours-50-4.06B-none"]
    assert program.main([*command, "--cases", *cases]) == 0
    record = json.loads(results.read_text())
    assert record["failed"] == {}
    assert list(record["whole"]) == cases
    stock, ours, narrow = (record["whole"][name] for name in cases)
    assert (stock["inner"], ours["inner"]) == ("AdamW", "HybridPlaceAdam")
    assert [line["iteration"] for line in ours["log"]] == [1, 3, 6]
    assert len(stock["losses"]) == len(stock["grad_norms"]) == 6
    assert stock["losses"][0] == pytest.approx(stock["log"][0]["lm loss"], rel=1e-5)
    assert stock["losses"][0] == ours["losses"][0] == narrow["losses"][0]  # before the first step
    assert 2.0 < ours["losses_digits"]  # torch's AdamW is another order of the same arithmetic
    assert "losses_digits" not in narrow
    assert ours["over_stock"] == ours["iteration_ms"] / stock["iteration_ms"]
    assert ours["tokens_per_s"] == pytest.approx(2 * 32 / ours["iteration_ms"] * 1e3)
    # Half of the state, in whole parameters.
    assert 1.5 < ours["host_bytes"] / narrow["host_bytes"] / (12 / 4.0625) < 2
    assert ours["same_weights"] == (ours["weights"] == stock["weights"])
    assert len(stock["weights"]) == 1
    assert "same_weights" not in narrow
    assert stock["said"] == []
    assert any("FusedOffloadAdam in the place of HybridDeviceOptimizer" in line for line in ours["said"])
    assert any("master_param as fp32" in line for line in ours["said"])  # 12 bytes
    table = "\n".join(importlib.import_module("megatron_lm_table").whole_lines(record))
    assert all(f"| {name} |" in table for name in cases)


def test_words_of_another_rank_behind_a_line_of_the_log_are_left_out(program: ModuleType) -> None:
    log = (
        " [2026-11-29] iteration        2/       4 | elapsed time per iteration (ms): 500.0 | lm loss: 1.5E+00 |"
        " 7 | Theoretical memory footprints: weight and optimizer=6944.38 MB, total=8169.22 MB\n"
        " iteration        4/       4 | elapsed time per iteration (ms): 400.0 | "
        "throughput per GPU (TFLOP/s/GPU): 50.0 |\n"
    )
    record = program.what_log_says(log)
    assert record["log"] == [
        {"iteration": 2, "elapsed time per iteration (ms)": 500.0, "lm loss": 1.5},
        {"iteration": 4, "elapsed time per iteration (ms)": 400.0, "throughput per GPU (TFLOP/s/GPU)": 50.0},
    ]
    assert record["tflop_per_iteration"] == 20.0
    damaged = program.what_log_says(log.replace("iteration (ms): 400.0", "iteration (ms): 4x0.0"))
    assert "tflop_per_iteration" not in damaged


def test_a_script_that_fails_is_reported_and_the_others_run(
    program: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "megatron" / "training").mkdir(parents=True)
    (tmp_path / "megatron" / "core").mkdir()
    (tmp_path / "pretrain_gpt.py").write_text("raise ValueError('as asked')\n")
    results = tmp_path / "results.json"
    command = ["--megatron-lm", str(tmp_path), "--results", str(results), "--tiny", "--device", "cpu"]
    assert program.main([*command, "--cases", "stock", "hybrid-100"]) == 1
    assert {"stock", "hybrid-100"} == json.loads(results.read_text())["failed"].keys()
    assert "ValueError: as asked" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--tp", "2"], "--gpus 1 should be a multiple of --tp times --pp, 2"),
        (["--vpp", "2"], "--vpp needs --pp 2 or more"),
        (["--ep", "2"], "--ep 2 should divide --experts, which is 0"),
        (["--muon", "--cases", "stock-6B"], "--muon goes with --cases stock ours-100-12B-none, and not with stock-6B"),
        (["--iterations", "2"], "--iterations should be at least 4"),
        (["--place", "fused-adam", "--cases", "ours-100-6B-auto"], "ours-100-6B-auto needs TransformerEngine"),
        (["--impl", "transformer_engine"], "--impl transformer_engine needs TransformerEngine"),
        (["--device", "cuda", "--gpus", "4096"], "there are"),
    ],
)
def test_what_cannot_run_is_said_in_one_line(
    program: ModuleType,
    tmp_path: Path,
    given: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for folder in ("megatron/training", "megatron/core"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "pretrain_gpt.py").touch()
    monkeypatch.setattr(program.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(program.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(program.torch.cuda, "device_count", lambda: 1)
    command = ["--megatron-lm", str(tmp_path), "--results", str(tmp_path / "r.json"), "--tiny", "--device", "cpu"]
    with pytest.raises(SystemExit):
        program.parse([*command, "--cases", "hybrid-100", *given])
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_a_folder_that_is_no_checkout_is_refused(
    program: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        program.parse(["--megatron-lm", str(tmp_path), "--results", str(tmp_path / "r.json"), "--device", "cpu"])
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"--megatron-lm {tmp_path} is no checkout of Megatron-LM: it has no pretrain_gpt.py" in last


def test_arguments_of_parallel_experts(program: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "check", lambda *_: None)
    given = "--gpus 8 --tp 2 --pp 2 --vpp 2 --ep 2 --layers 8 --experts 128 --micro-batch 4 -- --recompute-activations"
    options = program.parse(["--megatron-lm", str(tmp_path), "--results", str(tmp_path / "r.json"), *given.split()])
    line = " ".join(program.script_arguments(options))
    for part in (
        "--global-batch-size 32",  # 4 x 4 microbatches x 2 data-parallel ranks
        "--sequence-parallel",
        "--num-virtual-stages-per-pipeline-rank 2",
        "--overlap-grad-reduce --overlap-param-gather",
        "--num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768 --expert-model-parallel-size 2",
        "--moe-grouped-gemm",
    ):
        assert part in line
    assert line.endswith("--recompute-activations")


@pytest.mark.parametrize(
    ("ours", "theirs", "digits"),
    [([1.0, 2.0], [1.0, 2.0], math.inf), ([1.0, 2.0], [1.0, 2.002], 3.0), ([None], [1.0], None)],
)
def test_digits_in_which_series_agree(
    program: ModuleType, ours: list[float], theirs: list[float], digits: float | None
) -> None:
    found = program.equal_digits(ours, theirs)
    assert found == (None if digits is None else pytest.approx(digits, abs=1e-3))
