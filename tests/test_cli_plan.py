"""fused-offload plan: bytes against a real optimizer, parameter counts, predictions, limits and
errors.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import only_error

from fused_offload import FusedOffloadAdam, FusedOffloadMuon, OffloadConfig
from fused_offload.cli import main
from fused_offload.profiles.machine_key import MachineKey
from fused_offload.profiles.profile import Choice, Profile, Timing
from fused_offload.profiles.profile_files import Found
from fused_offload.profiles.units import MIB
from fused_offload.tuning.budget import largest_model, memory_of
from fused_offload.tuning.prediction import step_time
from fused_offload.tuning.sizes import Decoder, count_config
from fused_offload.tuning.training import PARAM_DTYPES, STORED_DTYPES, Training

LLAMA2_7B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
}
LLAMA3_8B = {**LLAMA2_7B, "intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 128256}
MIXTRAL_8X7B = {**LLAMA3_8B, "model_type": "mixtral", "num_local_experts": 8, "vocab_size": 32000}
QWEN25_05B = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
QWEN3_06B = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
}
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
PUBLISHED = [
    ("llama-2-7b", LLAMA2_7B, 6_738_415_616),
    ("llama-3-8b", LLAMA3_8B, 8_030_261_248),
    ("mistral-7b", {**LLAMA3_8B, "model_type": "mistral", "vocab_size": 32000}, 7_241_732_096),
    ("mixtral-8x7b", MIXTRAL_8X7B, 46_702_792_704),
    ("qwen2.5-0.5b", QWEN25_05B, 494_032_768),
    ("qwen3-0.6b", QWEN3_06B, 596_049_920),
    ("qwen3-30b-a3b", QWEN3_30B_A3B, 30_532_122_624),
    ("gpt2", GPT2, 124_439_808),
]


DECODER = ["--layers", "2", "--hidden", "8", "--ffn", "16", "--vocab", "100"]


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


# -- bytes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("moments", ["fp32", "bf16", "fp16", "uint8"])
@pytest.mark.parametrize(
    ("param_dtype", "master"),
    [("bf16", "fp32"), ("bf16", "fp16"), ("bf16", "remainder"), ("fp16", "fp32"), ("fp32", "none")],
)
def test_host_bytes_are_those_of_the_optimizer(param_dtype: str, master: str, moments: str) -> None:
    dtype = PARAM_DTYPES[param_dtype]
    shapes = [(300, 257), (64, 1000), (1031,), (500, 500), (7,)]
    params = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    optimizer = FusedOffloadAdam(
        params,
        master_weights=master != "none",
        master_weight_dtype=torch.float16 if master == "fp16" else torch.float32,
        store_param_remainders=master == "remainder",
        exp_avg_dtype=STORED_DTYPES[moments],
        exp_avg_sq_dtype=STORED_DTYPES[moments],
    )
    for param in params:
        optimizer.initialize_state(param)
    actual = sum(optimizer.memory_report().host_bytes.values())
    training = Training(param_dtype=param_dtype, master=master, exp_avg=moments, exp_avg_sq=moments)
    planned = memory_of(sum(param.numel() for param in params), training)
    assert planned.host_state == pytest.approx(actual, rel=0.02)
    assert planned.resident_state == 0


@pytest.mark.parametrize(("master", "moments"), [("none", "bf16"), ("remainder", "fp32"), ("fp32", "fp32")])
def test_bytes_of_muon_are_those_of_the_optimizer(master: str, moments: str) -> None:
    """Work memory is that of the largest matrix, whatever the model, and the ring that of a phase."""
    shapes = [(300, 257), (64, 1000), (1031, 3), (500, 500)]
    params = [torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)) for shape in shapes]
    optimizer = FusedOffloadMuon(
        params,
        master_weights=master != "none",
        store_param_remainders=master == "remainder",
        momentum_dtype=STORED_DTYPES[moments],
    )
    for param in params:
        optimizer.initialize_state(param)
    training = Training(master=master, exp_avg=moments, largest_matrix=(5120, 13824))
    planned = memory_of(sum(param.numel() for param in params), training)
    assert planned.host_state == pytest.approx(sum(optimizer.memory_report().host_bytes.values()), rel=0.02)
    assert planned.work == 6 * 5120 * 13824 + 4 * 5120**2 + 512
    assert memory_of(10**9, training).ring == 150_994_944


def test_a_step_of_muon_takes_as_long_as_the_longer_of_copies_and_products(capsys: pytest.CaptureFixture[str]) -> None:
    def step_ms(*arguments: str) -> float:
        report = plan(capsys, "--params", "1e9", "--master", "remainder", "--link-gbps", "50", *arguments)
        return float(report["predicted"]["alone_ms"])

    assert step_ms("--muon", "2048x8192") == pytest.approx(6e9 / 50e6, rel=0.01)
    assert step_ms("--muon", "11008x4096") == pytest.approx(162, abs=1)  # PFLOP / 0.6
    report = plan(capsys, "--params", "1e9", "--muon", "4096x11008", "--gpu-memory", "4", "--moments", "bf16")
    assert report["gpu_bytes"]["work"] == 337_641_984
    assert "Newton-Schulz at 600 TFLOP/s, 162 ms" in report["notes"][0]
    assert not any("--step-in-backward" in note or "uint8" in note for note in report["notes"])


def test_advice_for_muon_names_only_what_muon_can_do(capsys: pytest.CaptureFixture[str]) -> None:
    limits = ("--gpu-memory", "24", "--host-memory", "1000")
    report = plan(capsys, "--params", "30e9", "--muon", "4096x11008", "--data-parallel", "4", *limits)
    assert "more GPUs (--model-parallel)" in report["notes"][-1]


def test_data_parallel_ranks_share_muons_state_only_layer_wise(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--params", "8e9", "--muon", "4096x11008", "--master", "remainder", "--link-gbps", "50")
    ranks = ("--data-parallel", "8", "--ranks-per-node", "8")
    alone, whole = plan(capsys, *arguments), plan(capsys, *arguments, *ranks)
    shared = plan(capsys, *arguments, *ranks, "--layer-wise")
    assert whole["gpu_bytes"] == alone["gpu_bytes"]
    assert whole["host_bytes"]["rank"] == alone["host_bytes"]["rank"]
    assert shared["host_bytes"]["rank"] == pytest.approx(alone["host_bytes"]["rank"] / 8)
    assert whole["host_bytes"]["node"] == alone["host_bytes"]["node"] * 8
    assert shared["gpu_bytes"]["params"] == alone["gpu_bytes"]["params"]
    assert whole["predicted"]["alone_ms"] == alone["predicted"]["alone_ms"]
    assert shared["predicted"]["alone_ms"] == pytest.approx(alone["predicted"]["alone_ms"] / 8)
    assert any("plan that with --layer-wise" in note for note in whole["notes"])
    assert not any("--layer-wise" in note for note in (*alone["notes"], *shared["notes"]))
    for report, advised in ((whole, "--model-parallel"), (shared, "--data-parallel")):
        flags = ["--layer-wise"] if report is shared else []
        limited = plan(capsys, *arguments, *ranks, *flags, "--host-memory", "1")
        assert f"more hosts ({advised})" in limited["notes"][-1]


@pytest.mark.parametrize("moments", ["fp32", "bf16"])
def test_small_matrices_fill_chunks_with_their_updates(moments: str) -> None:
    """As many as a chunk holds, in both phases of Muon."""
    training = Training(master="remainder", exp_avg=moments, largest_matrix=(512, 512))
    in_chunk = 48 * 2**20 // STORED_DTYPES[moments].itemsize
    assert memory_of(10**9, training).work == 4 * in_chunk + 2 * 512**2 + 4 * 512**2 + 512
    assert memory_of(512**2, training).work == 6 * 512**2 + 4 * 512**2 + 512


def test_8_bit_moments_take_4_bytes_a_parameter(capsys: pytest.CaptureFixture[str]) -> None:
    training = Training(master="remainder", exp_avg="uint8", exp_avg_sq="uint8")
    assert memory_of(10**9, training).host_state == pytest.approx(4.0625e9, rel=1e-4)
    assert plan(capsys, "--params", "1e9", "--master", "remainder", "--moments", "uint8")


@pytest.mark.parametrize("fraction", [0.0, 0.25, 0.75, 1.0])
def test_the_fraction_splits_as_the_optimizer_does(fraction: float) -> None:
    params = [torch.nn.Parameter(torch.zeros(128 * 50 + 1)) for _ in range(200)]
    config = OffloadConfig(fraction=fraction)
    optimizer = FusedOffloadAdam(params, offload=config)
    for param in params:
        optimizer.initialize_state(param)
    report = optimizer.memory_report()
    planned = memory_of(
        sum(param.numel() for param in params), Training(param_dtype="fp32", master="none", offload=config)
    )
    assert planned.host_state == pytest.approx(sum(report.host_bytes.values()), rel=0.02)
    assert planned.resident_state == pytest.approx(sum(report.resident_bytes.values()), rel=0.02)


def test_bytes_per_parameter_and_the_ring() -> None:
    memory = memory_of(10**9, Training())
    assert memory.params == memory.grads == 2 * 10**9
    assert memory.host_state == pytest.approx(12e9, rel=1e-6)
    assert memory.ring == 150_994_944  # as memory_report() said on a GPU with the defaults
    assert memory.node_in_save == 2 * memory.node == 2 * memory.host_state
    assert memory_of(
        10**9, Training(master="remainder", exp_avg="bf16", exp_avg_sq="bf16")
    ).host_state == pytest.approx(6e9, rel=1e-6)


def test_ranks_share() -> None:
    alone = memory_of(8 * 10**9, Training())
    shared = memory_of(8 * 10**9, Training(data_parallel=8, ranks_per_node=8))
    assert shared.params == alone.params
    assert shared.host_state == pytest.approx(alone.host_state / 8, rel=1e-6)
    assert shared.node == pytest.approx(alone.host_state, rel=1e-6)
    assert memory_of(8 * 10**9, Training(data_parallel=8, shard_params=True)).params == alone.params / 8
    assert memory_of(8 * 10**9, Training(model_parallel=4)).grads == alone.grads / 4


def test_an_asynchronous_save_also_copies_state_that_stays() -> None:
    memory = memory_of(10**9, Training(offload=OffloadConfig(fraction=0.5)))
    assert memory.host_in_save == pytest.approx(18e9, rel=1e-5)


def test_the_window_is_no_larger_than_the_state_and_hides_its_bytes() -> None:
    half = memory_of(10**9, Training(offload=OffloadConfig(window_bytes=6 * 10**9)))
    time = step_time(half, 50.0)
    assert (time.alone_ms, time.added_ms) == pytest.approx((240, 120), rel=1e-4)
    whole = memory_of(10**9, Training(offload=OffloadConfig(window_bytes=10**12)))
    assert whole.window == whole.host_state
    assert step_time(whole, 50.0).added_ms == 0


def test_the_largest_model_does_not_depend_on_the_one_that_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    reports = [plan(capsys, "--params", size, "--link-gbps", "50", "--gpu-memory", "1") for size in ("1e6", "100e6")]
    assert reports[0]["largest_param_numel"] == reports[1]["largest_param_numel"]
    assert [report["training"]["offload"]["chunk_bytes"] for report in reports] == [8 * MIB, 48 * MIB]
    given = plan(capsys, "--params", "1e6", "--link-gbps", "50", "--chunk-bytes", "4MiB", "--depth", "2")
    assert (given["training"]["offload"]["chunk_bytes"], given["training"]["offload"]["depth"]) == (4 * MIB, 2)


def test_a_window_of_auto_lies_where_activations_were(capsys: pytest.CaptureFixture[str]) -> None:
    common = ("--params", "1e9", "--link-gbps", "50", "--gpu-memory", "80")
    without = plan(capsys, *common, "--other-gpu", "4")
    auto = plan(capsys, *common, "--other-gpu", "4", "--window-bytes", "auto")
    assert auto["training"]["offload"]["window_bytes"] == "auto"
    assert auto["gpu_bytes"] == without["gpu_bytes"]
    assert auto["largest_param_numel"] == without["largest_param_numel"]
    assert auto["predicted"]["hidden_bytes"] == 4 * 10**9
    assert auto["predicted"]["exposed_ms_at_least"] == pytest.approx(160, rel=1e-4)
    assert without["predicted"]["exposed_ms_at_least"] == pytest.approx(240, rel=1e-4)
    # No more than all of the state, and nothing where nothing is said of activations.
    assert plan(capsys, *common, "--other-gpu", "40", "--window-bytes", "auto")["predicted"]["exposed_ms_at_least"] == 0
    unknown = plan(capsys, *common, "--window-bytes", "auto")["predicted"]
    assert unknown["exposed_ms_at_least"] == unknown["alone_ms"]
    assert main(["plan", *common, "--other-gpu", "4", "--window-bytes", "auto"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "window, in place of activations │ 0.000 GB" in out
    assert "up to 4.000 GB of state" in out
    assert "160 ms" in out


def test_stepping_in_backward_needs_no_memory_for_gradients_and_hides_the_step(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = plan(capsys, "--params", "1e9", "--step-in-backward")
    assert report["gpu_bytes"]["grads"] == 48 * 2**20
    assert report["predicted"]["exposed_ms_at_least"] == 0
    assert report["predicted"]["hidden_bytes"] == report["host_bytes"]["rank"]
    waiting = "Gradients wait on the GPU until there are 48 MiB of them"
    assert [note for note in report["notes"] if note.startswith(waiting)]
    assert not any(note.startswith(waiting) for note in plan(capsys, "--params", "1e9")["notes"])
    assert plan(capsys, "--params", "1e6", "--step-in-backward")["gpu_bytes"]["grads"] == 2 * 10**6
    for window in ("auto", "5GB"):
        assert main(["plan", "--params", "1e9", "--step-in-backward", "--window-bytes", window]) == 2
        assert "window_bytes=0" in capsys.readouterr().err


def test_parameters_on_the_host_take_its_memory_and_the_links_time(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--params", "1e9", "--master", "remainder", "--moments", "uint8", "--link-gbps", "50")
    without, report = plan(capsys, *arguments), plan(capsys, *arguments, "--params-on-host")
    assert report["gpu_bytes"]["params"] == report["gpu_bytes"]["grads"] == 0
    # Chunks are as large as they were: with parameters and gradients they hold fewer elements.
    assert report["gpu_bytes"]["ring"] == pytest.approx(without["gpu_bytes"]["ring"], rel=1e-3)
    assert report["host_bytes"]["rank"] == without["host_bytes"]["rank"]
    assert report["host_bytes"]["rank_params_and_grads"] == 4 * 10**9
    assert report["host_bytes"]["node"] == pytest.approx(8.0625e9, rel=1e-5)
    assert report["host_bytes"]["node_in_save"] == pytest.approx(12.125e9, rel=1e-5)
    assert report["predicted"]["alone_ms"] == pytest.approx(8.0625e9 / 50e6, rel=1e-5)
    assert any("layer by layer" in note for note in report["notes"])
    float32 = plan(capsys, *arguments, "--params-on-host", "--grad-dtype", "fp32", "--fraction", "0")
    assert float32["host_bytes"]["node"] == pytest.approx(10.0625e9, rel=1e-5)
    shared = plan(capsys, *arguments, "--params-on-host", "--data-parallel", "8", "--shard-params")
    assert shared["host_bytes"]["rank_params_and_grads"] == 4 * 10**9 // 8
    limited = plan(capsys, *arguments, "--params-on-host", "--host-memory", "129")
    assert limited["largest_param_numel"]["training"] == pytest.approx(16e9, rel=1e-3)
    assert main(["plan", *arguments, "--params-on-host"]) == 0
    assert "parameters and gradients │ 4.000 GB" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--step-in-backward", "one of the two"),
        ("--window-bytes 1GB", "window_bytes=0"),
        ("--data-parallel 2", "--shard-params"),
        ("--muon 1024x1024", "Muon"),
    ],
)
def test_what_does_not_go_with_parameters_on_the_host(
    arguments: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--params", "1e9", "--params-on-host", *arguments.split()]) == 2
    assert words in only_error(capsys)


def test_a_model_too_large_for_the_gpu_may_be_on_the_host(capsys: pytest.CaptureFixture[str]) -> None:
    limits = ("--gpu-memory", "24", "--other-gpu", "10", "--host-memory")
    report = plan(capsys, "--params", "14e9", "--master", "remainder", "--moments", "bf16", *limits, "256")
    assert "--params-on-host would fit" in report["notes"][-1]
    both = plan(capsys, "--params", "14e9", "--master", "remainder", "--moments", "bf16", *limits, "128")
    assert "--params-on-host --master remainder --moments uint8 would fit" in both["notes"][-1]
    window = plan(capsys, "--params", "1e9", "--window-bytes", "auto", "--gpu-memory", "2", "--host-memory", "32")
    assert "--window-bytes 0 --params-on-host would fit" in window["notes"][-1]


def test_advice_counts_the_ring_of_parameters_on_the_host(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Even if a profile says that zero copy, which has none, is faster."""
    choice = Choice(10**9, "zero_copy", 8 * MIB, 3, 32, 7.0, "because")
    timings = (Timing(10**7, 10**8, 0.8), Timing(10**8, 10**9, 7.0))
    narrow = (Timing(10**7, 6 * 10**7, 0.5), Timing(10**8, 6 * 10**8, 4.0))
    profile = Profile(MachineKey("GPU", "link", "host", {}), "2026-11-28", 47.0, (choice,), timings, narrow)
    monkeypatch.setattr("fused_offload.profiles.profile_files.of_device", lambda index: Found(profile, "made up"))
    given = ("--params", "1e8", "--gpu-memory", "0.1", "--host-memory", "10")
    advice = plan(capsys, *given)["notes"][-1]
    assert "--params-on-host would fit" in advice
    report = plan(capsys, *given, "--params-on-host")
    assert report["gpu_bytes"]["ring"] >= 24 * MIB
    assert f"{report['gpu_bytes']['total'] / 1e9:.3f} GB on the GPU" in advice


def test_the_largest_model_fits_and_the_next_does_not() -> None:
    training = Training(ranks_per_node=2, data_parallel=2, offload=OffloadConfig(fraction=0.5))
    for limits in ({"gpu_bytes": 80 * 10**9, "node_bytes": None}, {"gpu_bytes": None, "node_bytes": 128 * 10**9}):
        for saving in (False, True):
            numel = largest_model(lambda _: training, saving=saving, **limits)
            assert numel is not None
            fitting, larger = memory_of(numel, training), memory_of(numel + 1024, training)
            for memory, fits in ((fitting, True), (larger, False)):
                node = memory.node_in_save if saving else memory.node
                used, limit = (memory.gpu, 80e9) if limits["gpu_bytes"] else (node, 128e9)
                assert (used <= limit) == fits
    assert largest_model(lambda _: training, gpu_bytes=None, node_bytes=None, saving=False) is None
    assert largest_model(lambda _: training, gpu_bytes=1, node_bytes=None, saving=False) == 0


def test_where_nothing_limits_it_there_is_no_largest_model(capsys: pytest.CaptureFixture[str]) -> None:
    report = plan(capsys, "--params", "1e9", "--fraction", "0", "--host-memory", "128")
    assert report["largest_param_numel"]["training"] is None
    assert report["largest_param_numel"]["with_save"] == pytest.approx(128e9 / 12, rel=1e-6)
    assert main(["plan", "--params", "1e9", "--fraction", "0", "--host-memory", "128"]) == 0
    assert "no limit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "flags"),
    [
        ("--host-memory 140", "--master remainder --moments fp32"),
        ("--host-memory 128", "--master remainder --moments bf16"),
        ("--host-memory 128 --gpu-memory 100", "--fraction 0.8"),
        ("--host-memory 20", None),
        ("--host-memory 40 --param-dtype fp16", None),
        ("--host-memory 110 --param-dtype fp16", "--moments bf16"),
        ("--host-memory 100 --param-dtype fp32", "--moments bf16"),
        ("--gpu-memory 40", "--step-in-backward"),
        ("--gpu-memory 20 --data-parallel 4", "--shard-params"),
        ("--gpu-memory 60 --fraction 0.5", "--fraction 1"),
        ("--gpu-memory 40 --fraction 0.5", "--fraction 1 --step-in-backward"),
        ("--gpu-memory 60 --window-bytes 20GB", "--window-bytes 0"),
        ("--gpu-memory 40 --window-bytes 20GB", "--window-bytes 0 --step-in-backward"),
        ("--gpu-memory 20", None),
        ("--gpu-memory 80 --host-memory 64 --fraction 0.9 --master remainder --moments bf16", "--fraction 0.8"),
        # What helps one memory and hurts the other is no advice.
        ("--gpu-memory 60 --host-memory 100 --fraction 0.5", "--fraction 1 --master remainder --moments bf16"),
        ("--gpu-memory 30 --host-memory 100", "--step-in-backward --master remainder --moments bf16"),
    ],
)
@pytest.mark.parametrize("is_tuned", [False, True])
def test_what_does_not_fit_comes_with_what_would(
    is_tuned: bool,
    arguments: str,
    flags: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if is_tuned:  # a ring for large state, and none for small
        small = Choice(10**9, "zero_copy", 8 * 2**20, 3, 32, 7.0, "because")
        large = Choice(10**11, "copy", 64 * 2**20, 4, 64, 720.0, "because")
        timings = (Timing(10**8, 10**9, 7.0), Timing(10**10, 10**11, 720.0))
        narrow = (Timing(10**8, 6 * 10**8, 4.0), Timing(10**10, 6 * 10**10, 400.0))
        key = MachineKey("GPU", "link", "host", {})
        profile = Profile(key, "2026-11-28", 47.0, (small, large), timings, narrow)
        monkeypatch.setattr("fused_offload.profiles.profile_files.of_device", lambda index: Found(profile, "made up"))
    given = ["--params", "13e9", *arguments.split()]
    (note,) = (note for note in plan(capsys, *given)["notes"] if "too small" in note)
    if flags is None:
        assert "Nothing that was tried fits" in note
        return
    assert f" too small. {flags} would fit" in note
    report = plan(capsys, *given, *flags.split())
    assert False not in (report["fits"]["gpu"], report["fits"]["host"])
    assert (
        f"{report['gpu_bytes']['total'] / 1e9:.3f} GB on the GPU, {report['host_bytes']['node'] / 1e9:.3f} GB" in note
    )
    assert not any("too small" in note for note in report["notes"])


def test_the_largest_model_fits_as_it_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    formats = ["--master", "remainder", "--moments", "bf16", "--gpu-memory", "80", "--host-memory", "128"]
    assert main(["plan", "--params", "13e9", *formats]) == 0
    with_save, training = (
        re.search(rf"{label} +│ +([0-9.]+) billion", out)
        for out in [capsys.readouterr().out]
        for label in ("largest model with an asynchronous save", "largest model")
    )
    assert with_save is not None
    assert training is not None
    assert plan(capsys, "--params", f"{with_save[1]}B", *formats)["fits"]["host_in_save"]
    report = plan(capsys, "--params", f"{training[1]}B", *formats)
    assert report["fits"]["gpu"]
    assert report["fits"]["host"]


def test_gradients_are_as_wide_as_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    for dtype, nbytes in (("fp32", 4), ("bf16", 2)):
        report = plan(capsys, "--params", "1e9", "--param-dtype", dtype)
        assert report["gpu_bytes"]["grads"] == nbytes * 10**9
    assert plan(capsys, "--params", "1e9", "--grad-dtype", "fp32")["gpu_bytes"]["grads"] == 4 * 10**9


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    ("arguments", "out", "err", "code", "words"),
    [
        (["--help"], "/dev/full", None, 2, "fused-offload: error: .* No space left on device"),
        (["--version"], "/dev/full", None, 2, "fused-offload: error: .* No space left on device"),
        (["plan", "--help"], "/dev/full", None, 2, "fused-offload: error: .* No space left on device"),
        (["plan", "--help"], "a closed pipe", None, 1, ""),
        (["plan", "--help"], "/dev/full", "/dev/full", 2, ""),
        (["plan", "--no-such"], None, "/dev/full", 2, ""),
        (["plan", "--no-such"], None, "a closed pipe", 1, ""),
        (["plan", "--no-such"], "/dev/full", None, 2, "unrecognized arguments"),
    ],
)
def test_what_cannot_be_written_is_told_in_one_line(
    arguments: list[str], out: str | None, err: str | None, code: int, words: str, unbuffered: str
) -> None:
    """Python's own words, at exit, would be two lines and exit code 120."""

    def opened(name: str | None) -> Any:
        if name == "a closed pipe":
            reading, writing = os.pipe()
            os.close(reading)
            return writing
        return subprocess.PIPE if name is None else os.open(name, os.O_WRONLY)

    streams = opened(out), opened(err)
    process = subprocess.run(
        [sys.executable, "-m", "fused_offload.cli", *arguments],
        stdout=streams[0],
        stderr=streams[1],
        text=True,
        check=False,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    )
    for number in streams:
        if number != subprocess.PIPE:
            os.close(number)
    assert process.returncode == code
    if err is None:
        assert re.search(words, process.stderr)
        assert process.stderr.count("\n") == (1 if words else 0)


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_a_plan_that_cannot_be_written(
    more: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["plan", "--params", "1B", *more]) == 2
        monkeypatch.undo()
    assert "No space left on device" in only_error(capsys)


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_streams_may_be_closed(stream: str) -> None:
    """Nothing is written to the other one, and nothing fails."""
    number = {"stdout": 1, "stderr": 2}[stream]
    arguments = "plan --params 1e9" if stream == "stdout" else "plan --config /nowhere"
    command = f"exec '{sys.executable}' -m fused_offload.cli {arguments} {number}>&-"
    run = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60)
    assert run.returncode == (0 if stream == "stdout" else 2)
    assert (run.stdout, run.stderr) == ("", "")


# -- counts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("config", "numel"), [case[1:] for case in PUBLISHED], ids=[case[0] for case in PUBLISHED])
def test_counts_are_the_published_ones(tmp_path: Path, config: dict[str, Any], numel: int) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert count_config(path) == numel


def test_a_sparse_model_without_experts_is_a_dense_one(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**QWEN3_30B_A3B, "num_experts": 0}), encoding="utf-8-sig")
    sparse = count_config(path)
    path.write_text(json.dumps({**QWEN3_30B_A3B, "model_type": "qwen3"}))
    assert sparse == count_config(path)
    shared = {"model_type": "qwen2_moe", "num_experts": 0, "shared_expert_intermediate_size": 5632}
    path.write_text(json.dumps({**QWEN3_30B_A3B, **shared}))
    sparse = count_config(path)
    path.write_text(json.dumps({**QWEN3_30B_A3B, "model_type": "qwen2"}))
    assert sparse == count_config(path)


@pytest.mark.parametrize(
    ("kind", "left_out", "given"),
    [
        ("qwen3", "head_dim", 128),
        ("qwen3", "num_key_value_heads", 32),
        ("mistral", "num_key_value_heads", 8),
        ("mixtral", "num_local_experts", 8),
        ("llama", "num_key_value_heads", 64),
        ("qwen3_moe", "num_key_value_heads", 4),
    ],
)
def test_what_a_configuration_leaves_out_is_as_in_transformers(
    kind: str, left_out: str, given: int, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    config = {
        **QWEN3_30B_A3B,
        "model_type": kind,
        "num_attention_heads": 64,
        "hidden_size": 4096,
        "num_local_experts": 8,
    }
    config.pop("head_dim")
    if kind == "mixtral":
        config.pop("num_experts")
    path.write_text(json.dumps({**config, left_out: given}))
    expected = count_config(path)
    config.pop(left_out, None)
    path.write_text(json.dumps(config))
    assert count_config(path) == expected


def test_the_number_of_experts_has_two_names(tmp_path: Path) -> None:
    path, config = tmp_path / "config.json", dict(QWEN3_30B_A3B)
    path.write_text(json.dumps(config))
    expected = count_config(path)
    config["num_local_experts"] = config.pop("num_experts")
    path.write_text(json.dumps(config))
    assert count_config(path) == expected


def test_megatron_sizes_count_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = [
        "--layers",
        "32",
        "--hidden",
        "4096",
        "--ffn",
        "14336",
        "--heads",
        "32",
        "--kv-heads",
        "8",
        "--vocab",
        "128256",
    ]
    assert plan(capsys, *sizes)["param_numel"] == 8_030_261_248
    assert plan(capsys, *sizes, "--tied")["param_numel"] == 8_030_261_248 - 128256 * 4096


def test_a_decoder_has_the_parameters_of_its_modules() -> None:
    decoder = Decoder(layers=1, hidden=8, ffn=16, heads=2, kv_heads=1, head_dim=4, vocab=10, gated=False, mlp_bias=True)
    attention = 8 * 8 + 2 * 8 * 4 + 8 * 8
    mlp = 8 * 16 + 16 + 16 * 8 + 8
    assert decoder.param_numel() == 2 * 80 + attention + mlp + 3 * 8


# -- the command -----------------------------------------------------------------------------------


def test_the_table_says_what_is_predicted_from_what(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--params", "13e9", "--gpu-memory", "80", "--host-memory", "256"]) == 0
    out = capsys.readouterr().out
    for words in (
        "13.000 billion",
        "52.151 GB",
        "156.000 GB",
        "312.000 GB",
        "prediction",
        "an assumption",
        "yes",
        "no",
    ):
        assert words in out
    assert main(["plan", "--params", "13e9", "--link-gbps", "20"]) == 0
    out = capsys.readouterr().out
    assert "7800 ms" in out
    assert "an assumption" not in out


PLAN_13B = ("--params", "13B", "--master", "remainder", "--moments", "bf16", "--other-gpu", "15")


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (
            (*PLAN_13B, "--gpu-memory", "80", "--host-memory", "128GiB"),
            "Fits: 67 of 80 GB on the GPU, 78 of 137 GB on the host; a step takes about 1.7 s.",
        ),
        (
            (*PLAN_13B, "--gpu-memory", "67.1", "--host-memory", "79"),
            "Does not fit: 67.2 of 67.1 GB on the GPU, 78 of 79 GB on the host; a step takes about 1.7 s.",
        ),
        (PLAN_13B, "Takes 67 GB on the GPU, 78 GB on the host; a step takes about 1.7 s."),
        (
            (*PLAN_13B, "--window-bytes", "auto", "--host-memory", "100"),
            "Fits: 67 GB on the GPU, 78 of 100 GB on the host; a step takes about 1.7 s and adds at least 1.3 s to an "
            "iteration.",
        ),
        (
            ("--params", "1e9", "--step-in-backward"),
            "Takes 2.2 GB on the GPU, 12 GB on the host; a step takes about 255 ms, which may all run under forward "
            "and backward passes.",
        ),
        (
            ("--params", "1e6", "--fraction", "0", "--gpu-memory", "16"),
            "Fits: 0.02 of 16 GB on the GPU, 0 GB on the host; a step moves nothing.",
        ),
    ],
)
def test_the_plan_begins_with_a_sentence(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], answer: str
) -> None:
    assert plan(capsys, *arguments)["answer"] == answer
    assert main(["plan", *arguments]) == 0
    assert capsys.readouterr().out.splitlines()[0] == answer


@pytest.mark.parametrize(("columns", "width"), [(None, 100), ("120", 120), ("80", 80)])
def test_tables_are_readable_without_a_terminal(columns: str | None, width: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    environment |= {} if columns is None else {"COLUMNS": columns}
    program = "from fused_offload.tuning.output import new_console; print(new_console().width)"
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert run.stdout.strip() == str(width), run.stderr


def test_json_says_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    report = plan(capsys, "--params", "13e9", "--gpu-memory", "80", "--host-memory", "256")
    assert report["fits"] == {"gpu": True, "host": True, "host_in_save": False}
    assert report["predicted"]["link_assumed"] is True
    assert plan(capsys, "--params", "1e9")["fits"] == {"gpu": None, "host": None, "host_in_save": None}
    assert plan(capsys, "--params", "1e9", "--param-dtype", "fp32")["training"]["master"] == "none"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan"], "--params"),
        (["plan", "--params", "1e9", "--layers", "3"], "one of --params"),
        (["plan", "--layers", "3", "--hidden", "8"], "--ffn, --heads, --vocab"),
        (["plan", "--params", "many"], "'many' is not a whole number of at least 1"),
        (["plan", "--params", "nan"], "is not a whole number"),
        (["plan", "--params=-5"], "at least 1 and below 1e18, such as 13e9 or 13B"),
        (["plan", "--params", "1e9", "--gpu-memory", "many"], "'many' is not a number"),
        (["plan", "--params", "1e9", "--depth", "1.5"], "whole number"),
        (["plan", "--params", "1e9", "--fraction", "2"], "--fraction: '2' is not a share from 0 to 1"),
        (["plan", "--params", "1e9", "--fraction", "75%"], "such as 0.75"),
        (["plan", "--params", "1e9", "--fraction", "half"], "'half' is not a share"),
        (["plan", "--params", "1e9", "--link-gbps", "1e-300"], "too slow for a link"),
        (["plan", "--params", "1e9", "--window-bytes", "much"], "or 48MiB; or give auto"),
        (["plan", "--params", "1e9", "--window-bytes", "-1"], "at least 0"),
        (["plan", "--params", "13X"], "such as 13e9 or 13B"),
        (["plan", "--params", "0.5"], "whole number of at least 1"),
        (["plan", "--params", "13000000.5"], "whole number of at least 1"),
        (["plan", "--config", "missing\nfile.json"], r"missing\nfile.json"),
        (["plan", "--params=--"], "argument --params: expected one argument (see"),
        (["plan", "--params", "1", "--config=--"], "argument --config: expected one argument (see"),
        (["plan", "--config", "a\x1b[2Jb"], r"a\x1b[2Jb' cannot be read"),
        (["plan", "a\nb", "--params", "1"], r"arguments: a\nb (see"),
        (["plan", "--params", "1e9", "--gpu-memory", "80e9"], "plain numbers are GB"),
        (["plan", "--params", "1e9", "--gpu-memory", "80 cores"], "80GiB"),
        (["plan", "--params", "1e9", "--host-memory", "0GB"], "larger than 0"),
        (["plan", "--params", "1e9", "--chunk-bytes", "1.5"], "whole number of bytes"),
        (["plan", "--params", "1e9", "--gpu-mem", "80"], "unrecognized arguments: --gpu-mem"),
        (["plan", "--params", "1e9", "--tied"], "not by --params and --tied at once"),
        (["plan", "--params", "1e9", "--config", "x.json"], "not by --params and --config at once"),
        (["plan", "--params", "1e9", "--ranks-per-node", "8", "--data-parallel", "4"], "4 x 1 ranks in all"),
        (
            ["plan", "--params", "1e9", "--window-bytes", "4"],
            "'4' is 4 bytes; give at least 1024, or a unit, as in 4MiB; or give auto",
        ),
        (
            ["plan", "--params", "1e9", "--chunk-bytes", "512B"],
            "'512B' is 512 bytes; give at least 1024; or give auto (see",
        ),
        (["plan", "--params", "1e9", "--chunk-bytes", "24"], "24MiB"),
        (
            ["plan", "--gpu", "80"],
            "fused-offload plan: error: unrecognized arguments: --gpu 80 (see fused-offload plan --help)",
        ),
        (["plan", "--config", "x.json", "--kv-heads", "8"], "not by --config and --kv-heads at once"),
        (["plan", *DECODER, "--heads", "3"], "not a multiple of 3 heads"),
        (["plan", *DECODER, "--heads", "4", "--kv-heads", "3"], "evenly"),
        (["plan", *DECODER, "--heads", "4", "--layers", "1e17"], "beyond what can be planned"),
        (["plan", "--params", "1e9", "--master", "remainder", "--param-dtype", "fp16"], "remainder needs bf16"),
        (["plan", "--config", "missing.json"], "cannot be read"),
        (["plan", "--params", "1e9", "--muon", "4096"], "'4096' is not the size of a matrix, such as 4096x11008"),
        (["plan", "--params", "1e9", "--muon", "0x5"], "'0x5' is not the size of a matrix"),
        (["plan", "--params", "1e9", "--muon", "8x8", "--step-in-backward"], "Muon steps behind the backward pass"),
        (["plan", "--params", "1e9", "--muon", "8x8", "--shard-params"], "Muon steps whole matrices, not the parts"),
        (["plan", "--params", "1e9", "--layer-wise"], "only Muon is layer-wise"),
        (["plan", "--params", "1e9", "--muon", "8x8", "--window-bytes", "1GB"], "and without a window"),
        (["plan", "--params", "1e9", "--muon", "8x8", "--moments", "uint8"], "fp32 or bf16, not in uint8"),
        (["sweep"], "invalid choice"),
        ([], "required"),
    ],
)
def test_errors_are_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    try:
        code = main(arguments)
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    assert words in only_error(capsys)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"model_type": "mamba"}', "--params"),
        ('{"model_type": "llama", "hidden_size": 8}', "lacks num_hidden_layers"),
        ('{"model_type": "gpt2", "n_embd": "a", "n_layer": 1, "vocab_size": 3}', "n_embd is 'a', it should be a whole"),
        ('{"model_type": "gpt2", "n_embd": -4, "n_layer": 1, "vocab_size": 3}', "n_embd is -4"),
        ('{"model_type": "gpt2", "n_embd": 4, "n_layer": 100000000, "vocab_size": 3}', "n_layer is 100000000"),
        ("[" * 100_000, "not JSON"),
        ("[]", "JSON object"),
        ("{", "not JSON"),
        (f'{{"model_type": "{"x" * 10**6}"}}', "x is not known"),
        (f'{{"model_type": "gpt2", "n_embd": {[1] * 10**6}, "n_layer": 1, "vocab_size": 3}}', "n_embd is [1, 1"),
        (f'{{"model_type": "gpt2", "n_embd": {"1" * 5_000}, "n_layer": 1, "vocab_size": 3}}', "not JSON"),
    ],
)
def test_configurations_that_cannot_be_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: str
) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    assert main(["plan", "--config", str(path)]) == 2
    error = only_error(capsys)
    assert words in error
    assert len(error) < 500


def test_a_configuration_is_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    with (tmp_path / "huge.json").open("wb") as huge:
        huge.truncate(40 * 10**9)
    for path, words in (
        ("model", "'model' cannot be read: it is a folder; give 'model/config.json'"),
        (os.devnull, "it is a device; give a file"),
        ("meta-llama/Llama-3.1-8B", "give a config.json on this machine, not a name on the hub"),
        ("model/config.json", "'model/config.json' cannot be read: No such file"),
        ("huge.json", "'huge.json' cannot be read: it is larger than 16 MiB; give a config.json"),
    ):
        assert main(["plan", "--config", path]) == 2
        assert words in only_error(capsys)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": 8.5}, "hidden_size is 8.5"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"hidden_size": 1e400}, "hidden_size is inf"),
        ({"hidden_size": 10**23}, "hidden_size is 100000000000000000000000"),
        ({"hidden_size": None}, "hidden_size is None"),
        ({"num_hidden_layers": 10**11}, "num_hidden_layers is 100000000000"),
        ({"num_attention_heads": 33}, "4096 is not a multiple of 33 heads"),
        ({"num_key_value_heads": 5}, "32 heads cannot share 5"),
        ({"num_experts": -1}, "num_experts is -1"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ({"mlp_only_layers": 5}, "mlp_only_layers is 5"),
        ({"mlp_only_layers": ["a"]}, "mlp_only_layers is ['a']"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'"),
        ({"model_type": None}, "has no model_type"),
    ],
)
def test_sizes_that_no_model_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], words: str
) -> None:
    path = tmp_path / "config.json"
    config = {**LLAMA3_8B, "model_type": "qwen3_moe", "moe_intermediate_size": 768, "num_experts": 4}
    path.write_text(json.dumps(config))
    assert main(["plan", "--config", str(path)]) == 0
    capsys.readouterr()
    path.write_text(json.dumps({**config, **change}))
    assert main(["plan", "--config", str(path)]) == 2
    error = only_error(capsys)
    assert str(path) in error
    assert words in error


def test_units(capsys: pytest.CaptureFixture[str]) -> None:
    in_words = plan(
        *(capsys, "--params", "8.03B", "--gpu-memory", "79GiB", "--host-memory", "0.5 TB", "--other-gpu", "500MB"),
        *("--window-bytes", "2GiB", "--chunk-bytes", "24MiB"),
    )
    in_numbers = plan(
        *(capsys, "--params", "8.03e9", "--gpu-memory", str(79 * 2**30 / 1e9), "--host-memory", "500"),
        *("--other-gpu", "0.5", "--window-bytes", str(2**31), "--chunk-bytes", str(24 * 2**20)),
    )
    assert in_words == in_numbers
    assert in_words["param_numel"] == 8_030_000_000
    assert in_words["gpu_bytes"]["window"] == 2**31
    assert plan(capsys, "--params", "125m")["param_numel"] == 125_000_000
    assert plan(capsys, "--params", "14399999999983617")["param_numel"] == 14399999999983617
    assert plan(capsys, "--params", "1B", "--window-bytes", "1.1GiB")["gpu_bytes"]["window"] == round(1.1 * 2**30)
    assert plan(capsys, "--params", "1B", "--window-bytes", " Auto ")["gpu_bytes"]["window"] == 0
    assert plan(capsys, "--params", "1B", "--chunk-bytes", "AUTO") == plan(capsys, "--params", "1B")
    assert plan(capsys, "--params", "1B", "--other-gpu", "2Gi")["gpu_bytes"]["other"] == 2 * 2**30


def test_few_parameters_are_not_rounded_away(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--params", "13"]) == 0
    assert "13 parameters" in capsys.readouterr().out


def test_a_reader_that_has_enough_is_no_error() -> None:
    program = "from fused_offload.cli import main; import sys; sys.exit(main(['plan', '--params', '1e9']))"
    run = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert run.stdout is not None
    run.stdout.close()
    _, errors = run.communicate(timeout=60)
    assert run.returncode == 1
    assert errors == ""


@pytest.mark.parametrize(
    "arguments", [["--help"], ["plan", "--help"], ["tune", "--help"], ["doctor", "--help"], ["--version"]]
)
def test_help_and_version(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 0
    assert capsys.readouterr().out


def test_help_says_when_there_is_no_profile_and_what_is_timed_in_any_case(capsys: pytest.CaptureFixture[str]) -> None:
    texts = {}
    for command in ("plan", "tune"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        texts[command] = " ".join(capsys.readouterr().out.split())
    assert texts["plan"].count("what tune chose on this machine (not with --link-gbps), or") == 2
    assert "time every way once in any case" in texts["tune"]


@pytest.mark.parametrize("command", ["plan", "doctor"])
@pytest.mark.parametrize("package", ["rich", "torch"])
def test_a_damaged_package_is_named(package: str, command: str, tmp_path: Path) -> None:
    (tmp_path / f"{package}.py").write_text("raise ImportError('half of\\nit is missing')")
    run = subprocess.run(
        [sys.executable, "-m", "fused_offload.cli", command, *(["--params", "1e9"] if command == "plan" else [])],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == (
        f"fused-offload {command}: error: {package} cannot be imported (ImportError: half of it is missing): "
        f"install {package} again\n"
    )


def test_a_missing_package_is_named_and_an_error_of_our_own_is_not_hidden(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("plan_command", "plan_arguments", "plan_output", "prediction", "advice", "output"):
        monkeypatch.delitem(sys.modules, f"fused_offload.tuning.{name}", raising=False)
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "rich.console", None)
        assert main(["plan", "--params", "1e9"]) == 2
        assert "): install rich again\n" in capsys.readouterr().err
    monkeypatch.delattr("fused_offload.tuning.sizes.count_config")
    with pytest.raises(ImportError, match="count_config"):
        main(["plan", "--params", "1e9"])


def test_neither_triton_nor_cuda_is_needed() -> None:
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "from fused_offload.cli import main; import torch\n"
        "code = main(['plan', '--params', '1e9', '--json']); assert not torch.cuda.is_initialized(); sys.exit(code)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["param_numel"] == 10**9
