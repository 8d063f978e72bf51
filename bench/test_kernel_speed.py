"""The update by itself, on state that is in GPU memory already: is it as fast as that memory?"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import KERNEL_FORMATS, LR, TE_FORMATS, WEIGHT_DECAY, StoredFormat, Watch, make_params
from clock import measure, synchronize
from peers import te_fused_adam
from pytest_benchmark.fixture import BenchmarkFixture
from rows import Rows, make_row
from scale import Scale

from fused_offload.kernels.adam import launch as adam
from fused_offload.kernels.adam.reference import AdamState, adam_scalars
from fused_offload.kernels.formats import SCALE_GROUP, Format, Stored, rounding_counter
from fused_offload.kernels.launch import programs_of
from fused_offload.state.layout import align


def launches_ms(launch: Callable[[], Any], count: int, device: torch.device) -> float:
    """Mean time of one of several launches in a row."""
    if device.type == "cpu":
        start = time.perf_counter()
        for _ in range(count):
            launch()
        return (time.perf_counter() - start) * 1e3 / count
    # One more launch first keeps the GPU busy until the host is ahead of it: what it takes to
    # prepare a launch is not the kernel's time.
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    launch()
    start.record()
    for _ in range(count):
        launch()
    end.record()
    synchronize(device)
    return start.elapsed_time(end) / count


def measure_launches(
    benchmark: BenchmarkFixture, launch: Callable[[], Any], scale: Scale, device: torch.device
) -> list[float]:
    """Samples of `launches_ms`, as many as the scale says."""
    return measure(
        benchmark,
        lambda: launches_ms(launch, scale.launches, device),
        rounds=scale.rounds,
        warmup_rounds=scale.warmup_rounds,
    )


def resident_state(format: StoredFormat, numel: int, device: torch.device) -> AdamState:
    """State of ``numel`` elements, not yet set."""

    def stored(key_format: Format) -> Stored:
        scale = torch.ones(numel // SCALE_GROUP, device=device) if key_format.scaled else None
        return Stored(key_format, torch.zeros(numel, dtype=key_format.dtype, device=device), scale)

    return AdamState(stored(format.exp_avg), stored(format.exp_avg_sq), stored(format.master_param))


def address_table(params: list[torch.nn.Parameter], device: torch.device) -> tuple[torch.Tensor, int]:
    """One row for each parameter, and the programs of a launch over all."""
    table, program = [], 0
    for index, param in enumerate(params):
        start = index * align(param.numel())
        assert param.grad is not None
        counter = rounding_counter(index, 0)
        table.append((program, param.data_ptr(), param.grad.data_ptr(), start, param.numel(), counter))
        program += programs_of(param.numel())
    return torch.tensor(table, dtype=torch.int64, device=device), program


@pytest.mark.parametrize("numerics", ["ieee", pytest.param("te", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("format", KERNEL_FORMATS, ids=str)
def test_fused_kernel(
    format: StoredFormat, numerics: str, benchmark: BenchmarkFixture, scale: Scale, rows: Rows, device: torch.device
) -> None:
    if device.type == "cpu" and not scale.smoke:
        pytest.skip("without a GPU the kernel runs in Triton's interpreter, whose speed says nothing; --smoke runs it")
    numel, tensors = scale.tensor_numel, scale.tensors
    params = make_params(numel, tensors, device)
    table, programs = address_table(params, device)
    state = resident_state(format, tensors * align(numel), device)
    aligned = all(address % 16 == 0 for row in table.tolist() for address in row[1:3])
    kind = adam.LaunchKind(torch.bfloat16, torch.bfloat16, numerics, aligned)
    scalars = adam_scalars(
        lr=LR, betas=(0.9, 0.999), eps=1e-8, weight_decay=WEIGHT_DECAY, step=1, bias_corrected=True, adam_w_mode=True
    )
    watch = Watch(params)
    adam.adam_step_(table, tensors, programs, state._replace(init_moments=True, init_master=True), scalars, kind)
    watch.assert_trained()

    def launch() -> None:
        adam.adam_step_(table, tensors, programs, state, scalars, kind)

    watch = Watch(params)
    samples = measure_launches(benchmark, launch, scale, device)

    watch.assert_trained()
    row = make_row(
        f"kernel/{format}/{numerics}",
        samples,
        params={"form": format.name, "numerics": numerics, "launches": scale.launches},
        numel=numel * tensors,
        memory_bytes=format.kernel_bytes(numel, tensors),
    )
    rows.add(benchmark, row)


def test_torch_fused_adamw(benchmark: BenchmarkFixture, scale: Scale, rows: Rows, device: torch.device) -> None:
    numel, tensors = scale.tensor_numel, scale.tensors
    params = make_params(numel, tensors, device, torch.float32)
    optimizer = torch.optim.AdamW(params, lr=LR, weight_decay=WEIGHT_DECAY, foreach=False, fused=True)
    watch = Watch(params)

    samples = measure_launches(benchmark, optimizer.step, scale, device)

    watch.assert_trained()
    row = make_row(
        "kernel/torch-fused-fp32",
        samples,
        params={"form": "fp32 parameters, no master", "launches": scale.launches},
        numel=numel * tensors,
        memory_bytes=7 * 4 * numel * tensors,  # read p, g and 2 moments, write p and 2 moments
        note="float32 parameters and gradients",
    )
    rows.add(benchmark, row)


@pytest.mark.gpu
@pytest.mark.parametrize("format", TE_FORMATS, ids=str)
def test_te_fused_adam(
    format: StoredFormat, benchmark: BenchmarkFixture, scale: Scale, rows: Rows, device: torch.device
) -> None:
    fused_adam = te_fused_adam()
    numel, tensors = scale.tensor_numel, scale.tensors
    params = make_params(numel, tensors, device)
    optimizer = fused_adam(params, **format.arguments)
    watch = Watch(params)

    samples = measure_launches(benchmark, optimizer.step, scale, device)

    watch.assert_trained()
    row = make_row(
        f"kernel/te-fused-adam/{format}",
        samples,
        params={"form": format.name, "launches": scale.launches},
        numel=numel * tensors,
        # What an update has to move. Where TE converts moments to float32 first, it moves more.
        memory_bytes=format.kernel_bytes(numel, tensors),
        note="TransformerEngine's FusedAdam",
    )
    rows.add(benchmark, row)
