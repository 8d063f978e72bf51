"""The same step by other optimizers: from gradients on the GPU until everything is final again."""

from __future__ import annotations

from statistics import median

import pytest
import torch
from cases import PeakMemory, Watch, make_params
from clock import measure, time_step
from peers import NEEDS_NO_GPU, PEERS, Peer
from pytest_benchmark.fixture import BenchmarkFixture
from rows import Rows, make_row
from scale import Scale

CASES = [pytest.param(peer, marks=() if peer.name in NEEDS_NO_GPU else pytest.mark.gpu, id=peer.name) for peer in PEERS]


@pytest.mark.parametrize("peer", CASES)
def test_peer(peer: Peer, benchmark: BenchmarkFixture, scale: Scale, rows: Rows, device: torch.device) -> None:
    numel, tensors = scale.tensor_numel, scale.tensors
    params = make_params(numel, tensors, device)
    memory = PeakMemory(device)
    ready = peer.build(params)
    watch = Watch(ready.params)

    times = measure(
        benchmark,
        lambda: time_step(ready.step, device),
        rounds=scale.rounds,
        warmup_rounds=scale.warmup_rounds,
    )

    watch.assert_trained()
    row = make_row(
        f"peers/{peer.name}",
        [time.total_ms for time in times],
        params={"tensors": tensors},
        numel=numel * tensors,
        extra_gpu_bytes=memory.extra_bytes() if ready.extra_is_gpu_state else None,
        host_ms=median(time.host_ms for time in times),
        note=peer.note,
    )
    rows.add(benchmark, row)
