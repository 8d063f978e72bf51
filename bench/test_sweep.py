"""Chunk size and depth of the ring, for whoever has another machine than the defaults were measured
on (--sweep).
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import NamedTuple

import pytest
import torch
from cases import FORMAT_6B, FORMAT_12B, StoredFormat, Watch, make_params
from clock import measure, time_step
from pytest_benchmark.fixture import BenchmarkFixture
from rows import Rows, make_row
from scale import MIB, SWEEP_CHUNK_MIB, SWEEP_DEPTHS, Scale

from fused_offload import FusedOffloadAdam, OffloadConfig
from fused_offload.plan.planner import Planner
from fused_offload.step.devices import Devices


class Swept(NamedTuple):
    """One optimizer for all points of a format.

    Its memory is page-locked once, and every point uses the same pages.
    """

    format: StoredFormat
    params: list[torch.nn.Parameter]
    optimizer: FusedOffloadAdam


@pytest.fixture(scope="module", params=[FORMAT_12B, FORMAT_6B], ids=str)
def swept(request: pytest.FixtureRequest, scale: Scale, device: torch.device) -> Iterator[Swept]:
    if not request.config.getoption("sweep"):
        pytest.skip("the sweep takes minutes; ask for it with --sweep")
    params = make_params(scale.tensor_numel, scale.tensors, device)
    optimizer = FusedOffloadAdam(params, offload=scale.offload, **request.param.arguments)
    yield Swept(request.param, params, optimizer)
    optimizer.close()


def reconfigure(optimizer: FusedOffloadAdam, config: OffloadConfig) -> None:
    """Lets the next step stream by another configuration.

    A ring is never made smaller otherwise.
    """
    optimizer.synchronize()
    optimizer.release_gpu_memory()
    optimizer.offload = config
    optimizer._stepper.planner = Planner(config)
    optimizer._stepper.devices = Devices(config)


@pytest.mark.parametrize("depth", SWEEP_DEPTHS)
@pytest.mark.parametrize("chunk_mib", SWEEP_CHUNK_MIB)
def test_sweep(
    swept: Swept,
    chunk_mib: int,
    depth: int,
    benchmark: BenchmarkFixture,
    scale: Scale,
    rows: Rows,
    device: torch.device,
) -> None:
    config = OffloadConfig(chunk_bytes=scale.bytes_of(chunk_mib), depth=depth)
    reconfigure(swept.optimizer, config)
    watch = Watch(swept.params)

    times = measure(
        benchmark,
        lambda: time_step(swept.optimizer.step, device, finish=swept.optimizer.synchronize),
        rounds=scale.sweep_rounds,
        warmup_rounds=scale.warmup_rounds,
    )

    watch.assert_trained()
    state_bytes = swept.format.state_bytes(scale.tensor_numel, scale.tensors)
    row = make_row(
        f"sweep/{swept.format}/{chunk_mib}MiB-x{depth}",
        [time.total_ms for time in times],
        params={"form": swept.format.name, "chunk_mib": config.chunk_bytes / MIB, "depth": depth},
        numel=scale.tensor_numel * scale.tensors,
        bytes_to_device=state_bytes,
        bytes_to_host=state_bytes,
        extra_gpu_bytes=swept.optimizer.memory_report().ring_bytes,
        host_ms=median(time.host_ms for time in times),
    )
    rows.add(benchmark, row)
