"""The benchmarks still run, each once and tiny, and their results file has what the tables are made
from.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from test_tune import PROFILE

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
    "tensors/150",
    "resident/torch-fused",
    "resident/fraction-0",
    "drift/early",
    "drift/late",
    "peers/torch-fused-resident",
    "peers/torch-fused-cpu",
}
HAS_MUON = hasattr(torch.optim, "Muon")  # from torch 2.9 on
if HAS_MUON:
    EXPECTED_ROWS |= {
        f"muon-{width}/{name}"
        for width in (4096, 2048)
        for name in ("torch-resident", "fraction-0-2B", "fraction-0-6B", "whole-step-2B", "whole-step-6B")
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
    "muon-4096/plain-duplex-6B",
    "muon-2048/plain-duplex-6B",
    "step/6B/plain-duplex",
}


def run_benchmarks(path: Path) -> None:
    # A worker of pytest-xdist that runs this test would make pytest-benchmark turn itself off.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "bench", "--smoke", f"--results={path}", "-p", "no:cacheprovider"]
    command += ["--bench-numel", "4_612"]  # as the README writes numbers
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr


def test_the_large_model_trains_tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "bench")
    program = importlib.import_module("large_model")
    options = program.parse(["--tiny", "--device", "cpu", "--window-bytes", "auto", "--text-bytes", "500000"])
    program.run_case(options, tmp_path / "case.json")
    record = json.loads((tmp_path / "case.json").read_text())
    assert program.has_trained(record)
    assert "failed" not in record
    assert record["tokens"] == 2 * 2 * 32
    assert record["tokens_per_s"] == pytest.approx(record["tokens"] / record["iteration_ms"] * 1e3)
    planned = record["predicted"]["host_bytes"]["rank"]
    assert record["host_bytes"] == pytest.approx(planned, rel=0.02) == pytest.approx(6 * record["param_numel"], 0.02)


@pytest.mark.parametrize("optimizer", ["ours", "torch"])
def test_the_large_model_trains_tiny_with_parameters_on_the_host(
    optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "bench")
    program = importlib.import_module("large_model")
    arguments = ["--tiny", "--device", "cpu", "--text-bytes", "500000", "--microbatches", "1", "--params-on-host"]
    options = program.parse([*arguments, "--optimizer", optimizer, "--moments", "uint8"])
    program.run_case(options, tmp_path / "case.json")
    record = json.loads((tmp_path / "case.json").read_text())
    assert program.has_trained(record), record.get("failed")
    assert "failed" not in record
    assert record["predicted"]["host_bytes"]["rank_params_and_grads"] == 4 * record["param_numel"]
    bytes_of_state = 4 if optimizer == "torch" else 4.0625
    assert record["host_bytes"] == pytest.approx(bytes_of_state * record["param_numel"], 0.03)


def test_a_model_whose_sequences_go_one_by_one_is_the_same_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "bench")
    program = importlib.import_module("large_model")
    options = program.parse(["--tiny", "--device", "cpu"])
    model = program.build_model(options, torch.device("cpu"))
    tokens = torch.randint(0, options.vocab, (3, options.length + 1))
    whole = model(tokens)
    model.blocks = torch.nn.ModuleList(map(program.OneByOne, model.blocks))
    assert model(tokens).item() == pytest.approx(whole.item(), rel=1e-2)


def test_a_step_of_parameters_on_the_host_is_measured_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "host.json"
    command = [sys.executable, "bench/params_on_host.py", "--tiny", "--device", "cpu", "--results", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    written = json.loads(path.read_text())
    record = written["params_on_host"]
    assert set(record) == {"remainder and 8 bits", "12 bytes", "cpu"}
    assert len(record["cpu"]) == 4
    monkeypatch.syspath_prepend(ROOT / "bench")
    page = importlib.import_module("page")
    for name, plain_ms in (("remainder and 8 bits", 150.0), ("12 bytes", 320.0)):
        record[name] |= {
            "numel": 10**9,
            "step_ms": [160.0, 155.0, 170.0],
            "plain_ms": {"16": [plain_ms], "48": [400.0]},
        }
    path.write_text(json.dumps(written))
    text = "\n".join(page.Results(path).lines())
    assert "| remainder and 8 bits | 1,000,000,000 | 160.0 | 150.0 | 1.067 |" in text
    assert "| 12 bytes | 1,000,000,000 | 160.0 | 320.0 | 0.500 |" in text
    assert "| torch fused, bfloat16 everything |" in text


def test_the_step_of_a_large_model_is_timed_alone_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "bench")
    program, page = importlib.import_module("large_model"), importlib.import_module("page")
    options = program.parse(["--tiny", "--device", "cpu"])
    model = program.build_model(options, torch.device("cpu"))
    params = list(model.parameters())
    assert sum(param.numel() for param in params) == program.param_numel(options.layers, options)
    optimizer = program.build_optimizer(params, options)
    model(torch.randint(0, options.vocab, (2, options.length + 1))).backward()
    optimizer.step()
    alone = program.step_alone(optimizer, params)
    assert 0 < alone["alone_ms"] <= max(alone["alone_samples_ms"][0])
    record = {
        "param_numel": 13 * 10**9,
        "tokens": 32_768,
        "tokens_per_s": 4000.0,
        "iteration_ms": 8192.0,
        "passes_ms": 6400.0,
        "exposed_step_ms": 1700.0,
        "host_bytes": 78 * 10**9,
        "peak_bytes": 66 * 10**9,
        "gpu_used_bytes": 70 * 10**9,
        "alone_ms": 1700.0,
        "copies_only_ms": 1690.0,
        "iterations": [{"loss": 10.8}, {"loss": 9.3}],
        "predicted": program.predict(options, 80 * 10**9, 128 * 10**9),
    }
    assert "GPU peak 66.00 GB" in program.in_words(record)
    path = tmp_path / "large.json"
    machine = importlib.import_module("machine").machine_facts()
    path.write_text(json.dumps({"machine": machine, "large": {"13B": record, "20B": {"failed": "out of memory"}}}))
    text = "\n".join(page.Results(path).lines())
    assert "| 13B | 13,000,000,000 | 32,768 | 4,000 | 312 | 416 |" in text
    assert " | 6,400 | 1,700 |" in text
    assert "| 1.006 | 78.0 |" in text
    assert "**Failed: 20B**: out of memory" in text


def test_a_model_trains_within_given_gpu_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "bench")
    program = importlib.import_module("large_model")
    fractions: list[float] = []
    # The CUDA context takes 1 GB.
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (139 * 10**9, 140 * 10**9))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", fractions.append)
    program.limit_allocator(24 * 10**9)
    (fraction,) = fractions
    assert fraction * 140e9 == pytest.approx(24e9 - 1e9 - program.LIBRARY_BYTES)
    with pytest.raises(RuntimeError, match=r"1\.0 GB are in use already"):  # as what does not fit
        program.limit_allocator(10**9)


@pytest.mark.gpu
def test_a_model_that_does_not_fit_says_so(tmp_path: Path) -> None:
    path = tmp_path / "large.json"
    limits = ["--gpu-memory", "2", "--params", "2e9", "--iterations", "3"]
    command = [sys.executable, "bench/large_model.py", *limits, "--results", str(path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 1, run.stdout + run.stderr
    (case,) = json.loads(path.read_text())["large"].values()
    # Tests in other processes may take more of the GPU than the limit.
    assert re.search("OutOfMemoryError|GB are in use already", case["failed"])


def test_the_largest_model_is_what_the_plan_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "large.json"
    limits = ["--gpu-memory", "0.02", "--host-memory", "0.005"]
    command = [sys.executable, "bench/large_model.py", "--tiny", "--device", "cpu", "--find-largest", "--in-backward"]
    command += [*limits, "--results", str(path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stdout + run.stderr
    results = json.loads(path.read_text())
    (search,) = results["largest"].values()
    (case,) = results["large"].values()
    assert search["param_numel"] == search["predicted_numel"] == case["param_numel"]
    assert 6 * search["param_numel"] <= 5e6 < 6 * search["param_numel"] * 4 / 3
    assert case["layers"] == 3
    monkeypatch.syspath_prepend(ROOT / "bench")
    text = "\n".join(importlib.import_module("page").Results(path).lines())
    assert f"| {search['param_numel']:,} |" in text
    assert "Largest model, bf16-in-backward" in text
    assert results["machine"]["versions"]["torch"] == importlib.metadata.version("torch")


def test_training_with_each_optimizer_runs_tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "bench")
    program = importlib.import_module("train_loop")
    names = ["none-4", "resident-6B-4", "window-6B-4", "auto-6B-4-full-gpu", "resident-12B-4"]
    names += ["torch-fused-resident-4", "torch-fused-cpu-4", "bitsandbytes-paged-8bit-4", "te-fused-adam-6B-4"]
    path = tmp_path / "loop.json"
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    monkeypatch.setattr(program, "NEEDS_NO_GPU", program.NEEDS_NO_GPU | {"bitsandbytes-paged-8bit"})
    program.main(["--tiny", "--device", "cpu", "--results", str(path), "--cases", *names])
    record = json.loads(path.read_text())
    assert record["failed"] == {}
    assert list(record["skipped"]) == ["bitsandbytes-paged-8bit-4", "te-fused-adam-6B-4"]
    assert record["skipped"]["te-fused-adam-6B-4"] == "needs a CUDA GPU"
    assert list(record["cases"]) == [name for name in names if name not in (*record["skipped"], "auto-6B-4-full-gpu")]
    none = record["cases"]["none-4"]["iteration_ms"]
    for name, case in record["cases"].items():
        assert len(case["iterations_ms"]) == 2
        assert sum(case["iterations_ms"]) == pytest.approx(2 * case["iteration_ms"])
        assert case["over_none_ms"] == pytest.approx(case["iteration_ms"] - none)
        assert ("step_alone_ms" in case) == (name != "none-4")
    assert record["cases"]["window-6B-4"]["host_bytes"] == pytest.approx(
        6 * record["cases"]["none-4"]["param_numel"], rel=0.02
    )
    text = "\n".join(importlib.import_module("page").Results(path).lines())
    assert "| over no optimizer, ms |" in text
    assert "A smoke test" in text
    assert "| torch-fused-cpu-4 | 4 | " in text
    assert "gradients and parameters are copied |" in text
    assert "Not measured: bitsandbytes-paged-8bit-4 (bitsandbytes.optim.PagedAdamW8bit cannot be imported" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "cuda:1", "--cases", "auto-6B-4-full-gpu", "none-4"], "run that first"),
        (["--device", "cuda:2"], "there are 2 GPUs"),
        (["--device", "cuda:x"], "should be cpu, cuda or cuda:N"),
        (["--device", "cpu:x"], "should be cpu, cuda or cuda:N"),
        (["--device", "cpu", "--cases", "auto-6B-4-full-gpu"], "there is no full GPU on a CPU"),
        (["--device", "cpu", "--results", "FOLDER"], "cannot be written"),
        (["--device", "cpu", "--results", "FOLDER/a-file/loop.json"], "cannot be written"),
    ],
)
def test_a_training_loop_that_cannot_run_as_asked_ends_with_words_before_it_starts(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(ROOT / "bench")
    program = importlib.import_module("train_loop")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    (tmp_path / "a-file").touch()
    arguments = [argument.replace("FOLDER", str(tmp_path)) for argument in arguments]
    with pytest.raises(SystemExit) as ended:
        program.parse(["--results", str(tmp_path / "loop.json"), *arguments])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a-file"]


def test_sizes_that_are_given_count_more_than_tiny_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "bench")
    program, path = importlib.import_module("train_loop"), tmp_path / "new" / "loop.json"
    options = program.parse(["--layers", "3", "--results", str(path), "--tiny", "--device", "cpu"])
    assert (options.layers, options.width) == (3, 128)
    assert path.parent.is_dir()  # that it can be written was tried
    assert not path.exists()


def test_a_full_gpu_has_no_more_memory_than_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "bench")
    program = importlib.import_module("train_loop")
    fraction, full = program.memory_fraction, program.all_cases()["auto-6B-4-full-gpu"]
    assert fraction(full, 80 * 10**9, {"peak_reserved_bytes": 79 * 10**9}) == 1.0
    assert fraction(full, 80 * 10**9, {"peak_reserved_bytes": 40 * 10**9}) == pytest.approx(0.51, abs=0.01)
    assert fraction(program.all_cases()["none-4"], 80 * 10**9, {}) == 1.0


def test_the_gpu_that_is_asked_for_is_the_current_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "bench")
    program, clock = importlib.import_module("train_loop"), importlib.import_module("clock")
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(program, "machine_facts", lambda: calls.append("facts") or {})
    row = {"microbatches": 4, "iteration_ms": 1.0, "form": None, "window_bytes": []}
    monkeypatch.setattr(program, "train", lambda *_: calls.append("train") or row)
    command = ["--cases", "none-4", "--results", str(tmp_path / "loop.json"), "--device"]
    assert program.main([*command, "cuda:1"]) == program.main([*command, "cuda"]) == 0
    assert calls == [torch.device("cuda:1"), "train", "facts", "train", "facts"]
    event = MagicMock()
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    assert clock.mark(torch.device("cuda:1")) is event
    event.record.assert_called_once_with("stream of cuda:1")


def test_what_a_peer_keeps_is_no_memory_of_the_next_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "bench")
    program = importlib.import_module("train_loop")
    kept: list[torch.nn.Parameter] = []

    def build(params: list[torch.nn.Parameter]) -> Any:
        kept.extend(params)
        return program.PEERS[0].build(params)

    keeper = program.PEERS[0]._replace(name="keeper", build=build)
    monkeypatch.setattr(program, "PEERS", (*program.PEERS, keeper))
    monkeypatch.setattr(program, "NEEDS_NO_GPU", {"keeper"})
    path = tmp_path / "loop.json"
    assert program.main(["--tiny", "--device", "cpu", "--results", str(path), "--cases", "keeper-4"]) == 0
    assert kept
    assert sum(param.untyped_storage().nbytes() for param in kept) == 0
    assert all(param.grad is None for param in kept)


def test_losses_by_format_run_tiny_and_go_on_where_they_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(ROOT / "bench")
    program, path = importlib.import_module("quality"), tmp_path / "quality.json"
    command = ["quality.py", "--tiny", "--device", "cpu", "--steps", "2", "--seeds", "0", "--forms", "fp32", "uint8"]
    for decays, found in ((["0.95"], 2), (["0.95", "0.999"], 4)):
        monkeypatch.setattr(sys, "argv", [*command, "--results", str(path), "--beta2", *decays])
        program.main()
        runs = json.loads(path.read_text())["runs"]
        assert len(runs) == found
    assert [(run["form"], run["beta2"]) for run in runs] == [
        ("fp32", 0.95),
        ("uint8", 0.95),
        ("fp32", 0.999),
        ("uint8", 0.999),
    ]
    assert capsys.readouterr().out.count("Case(form='uint8', seed=0, beta2=0.95)") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "there is no CUDA GPU"),
        (["--device", "cuda:x"], "should be cpu, cuda or cuda:N"),
        (["--tiny", "--device", "cpu", "--results", "FOLDER"], "cannot be written"),
    ],
)
def test_losses_that_cannot_be_measured_end_with_a_line_at_once(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(ROOT / "bench")
    program = importlib.import_module("quality")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(program, "read_text", None)
    monkeypatch.setattr(sys, "argv", ["quality.py", *(word.replace("FOLDER", str(tmp_path)) for word in arguments)])
    with pytest.raises(SystemExit) as ended:
        program.main()
    assert ended.value.code == 2
    assert words in capsys.readouterr().err.splitlines()[-1]


def test_losses_over_seeds_are_shown_with_their_signs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "bench")
    table = importlib.import_module("quality_table")
    losses = {("fp32", 0): 2.0, ("fp32", 1): 2.02, ("uint8", 0): 2.01, ("uint8", 1): 2.0098}
    runs = [
        {"form": format, "seed": seed, "beta2": 0.95, "eps": 1e-8, "size": {}, "state_bytes": 4.0, "held_out": loss}
        for (format, seed), loss in losses.items()
    ]
    # A run that differs in anything else is compared with no other.
    runs.append({**runs[0], "form": "bf16", "size": {"steps": 1}})
    lines = list(table.quality_lines(runs))
    assert "| uint8 | 0.95 | 1e-08 | 0, 1 | 2.0099 | 0.01 % | -0.00 % | +0.50 %, -0.50 % |" in lines
    assert "| fp32 | 0.95 | 1e-08 | 0, 1 | 2.0100 | 1.00 % | +0.00 % | +0.00 %, +0.00 % |" in lines
    assert "| bf16 | 0.95 | 1e-08 | 0 | 2.0000 | 0.00 % |  |  |" in lines


def test_the_step_on_several_gpus_at_once_runs_tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "together.json"
    device = "cuda" if torch.cuda.device_count() >= 2 else "cpu"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["bench/two_gpus.py", "--tiny", "--device", device, "--forms", "6B", "--results", str(path)]
    run = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=180
    )
    assert run.returncode == 0, run.stdout + run.stderr
    record = json.loads(path.read_text())["together"]["forms"]["6B"]
    # Four tensors of 10,000 elements are padded to 10,112 each.
    assert record["bytes_each_way"] == 40_448 * 6
    assert len(record["ranks"]) == 2
    last_ms = [max(times) for times in zip(*(one["samples_ms"]["whole-step"] for one in record["ranks"]), strict=True)]
    assert record["all_ranks_ms"]["whole-step"] == pytest.approx(sum(last_ms) / 2)
    assert (record["turns_win"] is None) == (device == "cpu")
    monkeypatch.syspath_prepend(ROOT / "bench")
    page = importlib.import_module("page")
    assert "| whole-step | " in "\n".join(page.Results(path).lines())
    results = json.loads(path.read_text())
    results["together"]["forms"]["6B"]["planned_ms"] = 174.0
    path.write_text(json.dumps(results))
    assert "Planned: 174.0 ms until all are done." in "\n".join(page.Results(path).lines())


def test_the_step_on_several_gpus_is_planned_if_so_many_were_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "bench")
    program = importlib.import_module("two_gpus")
    device = torch.device("cuda", 0)
    for found, ranks, ms in ((None, 2, None), (PROFILE, 2, 72 + 3000 / 36 - 3000 / 47), (PROFILE, 8, None)):
        monkeypatch.setattr(program.profiles, "of", lambda device, found=found: found)
        monkeypatch.setattr(program.dist, "get_world_size", lambda ranks=ranks: ranks)
        assert program.planned_ms(3 * 10**9, 250_000_000, device) == (ms if ms is None else pytest.approx(ms))


@pytest.mark.parametrize(("turns_ms", "win"), [(90.0, True), (110.0, False)])
@pytest.mark.parametrize(("step_ms", "reaches"), [(104.0, True), (106.0, False)])
def test_turns_and_steps_are_judged(
    turns_ms: float, win: bool, step_ms: float, reaches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "bench")
    program = importlib.import_module("two_gpus")
    first = {"plain-duplex": [99.0, 100.0, 101.0], "whole-step": [100.0] * 3}
    first |= {name: [120.0] * 3 for name in program.TURNS} | {"turns-opposite": [turns_ms] * 3}
    second = {**first, "turns-opposite": [turns_ms - 30] * 3, "whole-step": [step_ms] * 3}
    assert program.verdicts([first, second]) == {"step_reaches_share": reaches, "turns_win": win}


# One test, since each worker of pytest-xdist would run the benchmarks again for its share of
# several.
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
    of_muon = {"bench/test_muon.py::test_emerging_optimizers"} | (
        set() if HAS_MUON else {"bench/test_muon.py::test_muon"}
    )
    assert skipped - of_muon == {
        "bench/test_kernel_speed.py::test_fused_kernel",
        "bench/test_kernel_speed.py::test_te_fused_adam",
        "bench/test_link.py::test_link",
        "bench/test_peers.py::test_peer",
        "bench/test_step.py::test_quantised_parameters",
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
    assert machine["versions"]["torch"] == importlib.metadata.version("torch")
    assert machine["cores"] >= 1
    assert machine["date"]
    assert (machine["gpu"] is not None) == torch.cuda.is_available()


def check_table(path: Path, results: dict[str, Any]) -> None:
    for command in (["bench/table.py"], ["-m", "bench.table"]):
        run = subprocess.run(
            [sys.executable, *command, str(path)], cwd=ROOT, capture_output=True, text=True, timeout=60
        )
        assert run.returncode == 0, run.stderr
        assert f"torch {importlib.metadata.version('torch')}" in run.stdout
        assert "smoke test" in run.stdout
        for row in results["rows"]:
            suite, _, case = row["name"].partition("/")
            assert suite == "link" or f"| {case} |" in run.stdout
