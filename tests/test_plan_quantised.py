"""`fused-offload plan` of quantised parameters: the bytes that the optimizer and the parameters take.

Parameters are stand-ins for TransformerEngine's, on a simulated device.
"""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import quantised_stand_ins as stand_ins
from quantised_stand_ins import CLASSES
from simulated_device import SimulatedDevice, installed

from fused_offload import FusedOffloadAdam, OffloadConfig
from fused_offload.cli import _build_parser, main
from fused_offload.kernels.adam import launch
from fused_offload.megatron.quantised_shards import QuantisedShard, QuantisedShards
from fused_offload.tuning.budget import Memory, memory_of
from fused_offload.tuning.plan_arguments import request_of
from fused_offload.tuning.recipes import RECIPES
from fused_offload.tuning.training import STORED_DTYPES, Training

LARGE = (1031, 260)
SHAPES = [(300, 257), LARGE, (1000,), (500, 500), (7,)]
NUMEL = sum(map(math.prod, SHAPES))
QUANTISED: dict[str, Any] = {"quantised": "blockwise", "largest_quantised": LARGE}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A simulated device whose kernels do nothing."""
    if torch.cuda.is_available():
        pytest.skip("the simulated device is for machines without a GPU")
    monkeypatch.setattr(launch, "adam_step_", lambda *arguments: None)
    with installed(SimulatedDevice(), monkeypatch):
        yield
        gc.collect()  # what is page-locked is given back the same way


def stepped(config: OffloadConfig, moments: str, master: torch.dtype = torch.float32) -> FusedOffloadAdam:
    params = [stand_ins.param_of(CLASSES["blockwise"], torch.ones(shape)) for shape in SHAPES]
    optimizer = FusedOffloadAdam(
        params,
        master_weights=True,
        master_weight_dtype=master,
        exp_avg_dtype=STORED_DTYPES[moments],
        exp_avg_sq_dtype=STORED_DTYPES[moments],
        offload=config,
    )
    for param in params:
        param.grad = torch.ones(param.shape, dtype=torch.bfloat16)
    optimizer.step()
    return optimizer


@pytest.mark.usefixtures("device")
@pytest.mark.filterwarnings("ignore:exp_avg")
@pytest.mark.parametrize("moments", ["fp32", "bf16", "fp16", "uint8"])
@pytest.mark.parametrize(("master", "dtype"), [("fp32", torch.float32), ("fp16", torch.float16)])
@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_bytes_are_those_of_the_optimizer(moments: str, master: str, dtype: torch.dtype, fraction: float) -> None:
    config = OffloadConfig(chunk_bytes=2**18, depth=2, transport="copy", fraction=fraction)
    optimizer = stepped(config, moments, dtype)
    report = optimizer.memory_report()
    training = Training(master=master, exp_avg=moments, exp_avg_sq=moments, offload=config, **QUANTISED)
    planned = memory_of(NUMEL, training)
    assert planned.host_state == pytest.approx(sum(report.host_bytes.values()), rel=0.02)
    assert planned.resident_state == pytest.approx(sum(report.resident_bytes.values()), rel=0.02)
    assert planned.work == report.step_bytes
    assert report.ring_bytes <= planned.ring <= report.ring_bytes * 1.02
    optimizer.close()


@pytest.mark.usefixtures("device")
def test_small_parameters_of_a_chunk_are_quantised_together() -> None:
    config = OffloadConfig(chunk_bytes=2**30, depth=2, transport="copy")
    optimizer = stepped(config, "fp32")
    planned = memory_of(NUMEL, Training(offload=config, **QUANTISED))
    assert planned.work == pytest.approx(optimizer.memory_report().step_bytes, rel=0.01)
    assert 4 * NUMEL <= planned.work < 4 * NUMEL + 512
    optimizer.close()


@pytest.mark.parametrize(("recipe", "kind"), [("tensorwise", "current"), ("blockwise", "blockwise")])
def test_parameters_have_two_copies_and_scales(recipe: str, kind: str) -> None:
    param = stand_ins.param_of(CLASSES[kind], torch.ones(1024, 2048))
    by_rows = sum(part.nbytes for part in param.internals())
    assert param.numel() * RECIPES[recipe].param_bytes == pytest.approx(2 * by_rows, rel=1e-5)


def test_delayed_parameters_have_two_copies() -> None:
    param = stand_ins.param_of(CLASSES["delayed"], torch.ones(1024, 2048))
    actual = sum(part.nbytes for part in param.internals())
    assert param.numel() * RECIPES["delayed"].param_bytes == pytest.approx(actual, rel=1e-5)


def planned(numel: int = 10**9, **options: Any) -> Memory:
    return memory_of(numel, Training(**{"quantised": "delayed", "largest_quantised": (28672, 4096), **options}))


@pytest.mark.parametrize(
    ("recipe", "bytes_each"),
    [("delayed", 2), ("tensorwise", 2), ("blockwise", 2 + 1 / 2048), ("mxfp8", 2.0625), ("nvfp4", 1.125)],
)
def test_bytes_of_each_recipe(recipe: str, bytes_each: float) -> None:
    """Those of the shapes of 4096 x 4096, which need no padding."""
    assert planned(4096**2, quantised=recipe).params == 4096**2 * bytes_each


def test_sharing_divides_parameters_or_state() -> None:
    alone, sharded = planned(), planned(data_parallel=8, shard_params=True)
    assert alone.work == 4 * 28672 * 4096
    assert (sharded.params, sharded.work) == (alone.params // 8, alone.work // 8)
    assert planned(data_parallel=8) == alone
    megatron = planned(data_parallel=8, fp8_param_gather=True)
    assert megatron.params == alone.params
    assert megatron.host_state == pytest.approx(alone.host_state / 8)
    assert megatron.work == alone.work + 2 * 10**9 // 8
    assert planned(8 * 10**6, data_parallel=8, fp8_param_gather=True).work == 4_000_256 + 2 * 10**6


def test_megatrons_shards_take_two_bytes_in_a_step() -> None:
    param = torch.zeros(1000, dtype=torch.bfloat16)
    shards = object.__new__(QuantisedShards)
    shards._stand_ins = [QuantisedShard(param, start, start + 250) for start in (0, 500)]
    shards.take_memory()
    taken = sum(shard.rounded.nbytes for shard in shards._stand_ins if shard.rounded is not None)
    without, training = (
        Training(quantised="delayed", largest_quantised=(1, 250), fp8_param_gather=gathers) for gathers in (False, True)
    )
    assert memory_of(500, training).work - memory_of(500, without).work == taken


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main(["plan", "--json", "--params", "8e9", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


FLAGS = ("--quantised", "mxfp8", "--largest-param", "28672x4096")


def test_the_command_counts_them(capsys: pytest.CaptureFixture[str]) -> None:
    report = plan(capsys, *FLAGS, "--moments", "uint8")
    assert report["gpu_bytes"]["params"] == 8 * 10**9 * 2.0625
    assert report["gpu_bytes"]["work"] == 4 * 28672 * 4096
    assert report["host_bytes"]["rank"] == pytest.approx(8e9 * 6.0625, rel=1e-4)
    assert any("--quantised" in note for note in report["notes"])
    assert main(["plan", "--params", "8e9", *FLAGS]) == 0
    text = capsys.readouterr().out
    assert "parameters, mxfp8" in text
    assert "exact values in a step" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (FLAGS[:2], "--largest-param"),
        (FLAGS[2:], "--quantised"),
        (("--fp8-param-gather",), "--quantised"),
        ((*FLAGS, "--muon", "8x8"), "leave the other out"),
        ((*FLAGS, "--params-on-host"), "leave the other out"),
        ((*FLAGS, "--master", "remainder"), "not remainder"),
        ((*FLAGS, "--param-dtype", "fp32"), "not none"),
        ((*FLAGS, "--fp8-param-gather", "--shard-params"), "Megatron-FSDP"),
        ((*FLAGS, "--fp8-param-gather", "--step-in-backward"), "backward"),
        (("--quantised", "nvfp4", *FLAGS[2:], "--fp8-param-gather"), "NVFP4"),
        (("--quantised", "tensorwise", *FLAGS[2:], "--shard-params", "--step-in-backward"), "agree on the scales"),
    ],
    ids=lambda value: "-".join(value[-2:]) if isinstance(value, tuple) else "",
)
def test_what_does_not_go_with_them(capsys: pytest.CaptureFixture[str], arguments: Any, words: str) -> None:
    assert main(["plan", "--params", "8e9", *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("recipe", list(RECIPES))
@pytest.mark.parametrize("sharing", [(), ("--shard-params",), ("--fp8-param-gather",)])
def test_advice_names_only_what_they_can_do(
    capsys: pytest.CaptureFixture[str], recipe: str, sharing: tuple[str, ...]
) -> None:
    if recipe == "nvfp4" and "--fp8-param-gather" in sharing:
        return
    flags = ("--quantised", recipe, *FLAGS[2:], "--data-parallel", "4", *sharing)
    for gpu, host in (("5", "1000"), ("1000", "17"), ("0.1", "0.1")):
        advice = plan(capsys, *flags, "--gpu-memory", gpu, "--host-memory", host, "--window-bytes", "1GB")["notes"][-1]
        assert "too small" in advice
        assert "remainder" not in advice
        assert "--params-on-host" not in advice
        if "--fp8-param-gather" in sharing:
            assert "--step-in-backward" not in advice
            assert "--shard-params" not in advice


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_advice_for_a_step_in_backward_shards_only_what_needs_no_agreement(
    capsys: pytest.CaptureFixture[str], recipe: str
) -> None:
    flags = ("--quantised", recipe, *FLAGS[2:], "--data-parallel", "4", "--step-in-backward")
    agrees = RECIPES[recipe].agrees
    for host, is_enough in (("30", True), ("1", False)):
        advice = plan(capsys, *flags, "--host-memory", host, "--gpu-memory", "7")["notes"][-1]
        assert "too small" in advice
        assert ("--shard-params would fit" in advice) == (is_enough and not agrees)
        assert ("--data-parallel with --shard-params" in advice) == (not is_enough and not agrees)


@pytest.mark.parametrize("flags", [FLAGS, ("--params-on-host",), ("--muon", "8x8")], ids=lambda flags: flags[0])
def test_what_streams_through_the_ring_is_planned_with_it(flags: tuple[str, ...]) -> None:
    """Even if a profile says that zero copy is faster."""
    options = _build_parser()[1]["plan"].parse_args(["--params", "8e9", *flags])
    assert request_of(options).training.offload.transport == "copy"
