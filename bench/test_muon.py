"""Muon's step with its state in host memory, against the same step without offload, plain copies,
and others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import pytest
import torch
from cases import LR, WEIGHT_DECAY, PeakMemory, make_params
from clock import StepTime, measure, time_step, wall_ms
from duplex import PlainDuplex, host_slabs
from peers import import_peer
from pytest_benchmark.fixture import BenchmarkFixture
from rows import Rows, make_row
from scale import Scale

from fused_offload import FusedOffloadMuon, OffloadConfig

WIDTHS = {4096: 11008, 2048: 8192}
"""Width of a decoder and of its MLP."""

_BYTES: dict[str, dict[str, Any]] = {
    "2B": {"momentum_dtype": torch.bfloat16},
    "6B": {"master_weights": True, "store_param_remainders": True},
}
"""Momentum alone, as torch keeps it; remainder and float32 momentum."""

_PLAIN_MIB = 48


def matrices(width: int, ffn: int, scale: Scale, device: torch.device) -> list[torch.nn.Parameter]:
    """Four matrices of attention and three of a gated MLP for each layer, as many layers as fit."""
    if scale.smoke or device.type != "cuda":
        width, ffn = width // 64, ffn // 64
    layer = [(width, width)] * 4 + [(ffn, width)] * 2 + [(width, ffn)]
    layers = max(1, scale.numel // sum(rows * columns for rows, columns in layer))
    made = []
    for shape in layer * layers:
        [param] = make_params(shape[0] * shape[1], 1, device)
        matrix = torch.nn.Parameter(param.detach().view(shape))
        assert param.grad is not None
        matrix.grad = param.grad.view(shape)
        made.append(matrix)
    return made


def emerging_optimizers(params: list[torch.nn.Parameter]) -> Any:
    """The Muon that Megatron-Core uses. It takes matrices in float32 only, so it has copies of
    them.
    """
    optimizer_class = import_peer("emerging_optimizers.orthogonalized_optimizers", "Muon")
    masters = []
    for param in params:
        master = torch.nn.Parameter(param.detach().float())
        assert param.grad is not None
        master.grad = param.grad.float()
        masters.append(master)
    return optimizer_class(masters, lr=LR, weight_decay=WEIGHT_DECAY, nesterov=True)


@pytest.mark.parametrize("width", WIDTHS)
def test_muon(width: int, benchmark: BenchmarkFixture, scale: Scale, rows: Rows, device: torch.device) -> None:
    """Each round takes all steps in turn.

    The first row is torch's optimizer, with all state on the GPU.
    """
    params = matrices(width, WIDTHS[width], scale, device)
    numel = sum(param.numel() for param in params)

    def ours(kept: str, fraction: float) -> FusedOffloadMuon:
        config = OffloadConfig(fraction=fraction)
        return FusedOffloadMuon(params, lr=LR, weight_decay=WEIGHT_DECAY, offload=config, **_BYTES[kept])

    torchs = import_peer("torch.optim", "Muon")  # from torch 2.9 on
    built: dict[str, Callable[[], Any]] = {
        "torch-resident": lambda: torchs(params, lr=LR, weight_decay=WEIGHT_DECAY),
        "fraction-0-2B": lambda: ours("2B", 0.0),
        "fraction-0-6B": lambda: ours("6B", 0.0),
        "whole-step-2B": lambda: ours("2B", 1.0),
        "whole-step-6B": lambda: ours("6B", 1.0),
    }
    optimizers: dict[str, Any] = {}
    extra: dict[str, int | None] = {}
    for name, build in built.items():
        memory = PeakMemory(device)
        optimizers[name] = build()
        for _ in range(max(1, scale.warmup_rounds)):
            time_step(optimizers[name].step, device)
        extra[name] = memory.extra_bytes()
        if isinstance(optimizers[name], FusedOffloadMuon):
            optimizers[name].release_gpu_memory()  # or the next one would find it there
    largest = optimizers["whole-step-6B"]
    plain = None
    if device.type == "cuda":
        copy_bytes = scale.bytes_of(_PLAIN_MIB)
        plain = PlainDuplex(host_slabs(largest), device, [copy_bytes])
    samples: defaultdict[str, list[StepTime]] = defaultdict(list)
    plain_ms: list[float] = []

    def others() -> None:
        for name, optimizer in optimizers.items():
            if optimizer is not largest:
                finish = getattr(optimizer, "synchronize", None)
                samples[name].append(time_step(optimizer.step, device, finish=finish))
        if plain is not None:
            plain.refresh()
            plain_ms.append(wall_ms(partial(plain.run, copy_bytes), device))

    before = [param.detach()[:2].clone() for param in params]
    samples["whole-step-6B"] = measure(
        benchmark,
        lambda: time_step(largest.step, device, finish=largest.synchronize),
        rounds=scale.rounds,
        warmup_rounds=min(1, scale.warmup_rounds),
        setup=others,
    )
    assert all(param.isfinite().all() for param in params)
    assert not any(torch.equal(param[:2], old) for param, old in zip(params, before, strict=True))

    def add(name: str, total_ms: list[float], **fields: Any) -> None:
        first = median([time.total_ms for time in samples["torch-resident"][-scale.rounds :]])
        row_params = {"form": name.rpartition("-")[2], "peer": f"muon-{width}/torch-resident"}
        ratio = median(total_ms) / first
        rows.add(
            benchmark, make_row(f"muon-{width}/{name}", total_ms, params=row_params, ratio_to_peer=ratio, **fields)
        )

    for name, optimizer in optimizers.items():
        times = samples[name][-scale.rounds :]
        report = optimizer.memory_report() if isinstance(optimizer, FusedOffloadMuon) else None
        moved = sum(report.host_bytes.values()) if report is not None and device.type == "cuda" else 0
        compared = {}
        if name == "whole-step-6B" and plain_ms:
            compared = {"ratio_to_link": median([time.total_ms for time in times]) / median(plain_ms[-scale.rounds :])}
        add(
            name,
            [time.total_ms for time in times],
            numel=numel,
            host_ms=median(time.host_ms for time in times),
            extra_gpu_bytes=extra[name],
            bytes_to_device=moved or None,
            bytes_to_host=moved or None,
            note="" if report is None else f"work memory {report.work_bytes / 1e9:.2f} GB",
            **compared,
        )
    if plain_ms:
        moved = sum(slab.numel() for slab in host_slabs(largest))
        add("plain-duplex-6B", plain_ms[-scale.rounds :], numel=numel, bytes_to_device=moved, bytes_to_host=moved)
    for optimizer in optimizers.values():
        if isinstance(optimizer, FusedOffloadMuon):
            optimizer.close()


@pytest.mark.parametrize("width", WIDTHS)
def test_emerging_optimizers(
    width: int, benchmark: BenchmarkFixture, scale: Scale, rows: Rows, device: torch.device
) -> None:
    """Resident, with float32 parameters: its formulas are not those of torch."""
    params = matrices(width, WIDTHS[width], scale, device)
    memory = PeakMemory(device)
    optimizer = emerging_optimizers(params)
    times = measure(
        benchmark,
        lambda: time_step(optimizer.step, device),
        rounds=scale.rounds,
        warmup_rounds=max(1, scale.warmup_rounds),
    )
    row = make_row(
        f"muon-{width}/emerging-optimizers",
        [time.total_ms for time in times],
        params={"form": "4B"},
        numel=sum(param.numel() for param in params),
        extra_gpu_bytes=memory.extra_bytes(),
        host_ms=median(time.host_ms for time in times),
        note="float32 parameters, gradients and momentum on the GPU",
    )
    rows.add(benchmark, row)
