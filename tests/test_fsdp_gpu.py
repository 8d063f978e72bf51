"""Parameters sharded by FSDP2 over two GPUs (NCCL); the scenarios are in fsdp_gpu_scenarios.py."""

from __future__ import annotations

from pathlib import Path

import fsdp_gpu_scenarios
import pytest
import torch
from ranks import run_ranks
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from fused_offload import FusedOffloadAdam, OffloadConfig

LIMIT_S = 240
ON_ONE_GPU = [
    "window_memory_comes_from_the_stream_of_the_forward_pass",
    "parameters_in_host_memory",
    "norms_of_every_order",
    "checkpoints_of_parameters_in_host_memory",
    "parameters_of_some_layers_in_host_memory",
    "a_gradient_scaler_skips_steps_of_parameters_in_host_memory",
    "the_step_takes_the_ring_and_nothing_else",
    "host_memory_that_is_not_page_locked",
]


def run(ranks: int, folder: Path, names: list[str]) -> dict[str, str]:
    # Matrix products of the same bits each time need a workspace of fixed size.
    environment = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    return run_ranks(fsdp_gpu_scenarios.__file__, ranks, folder, names, limit_s=LIMIT_S, environment=environment)


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run(2, tmp_path_factory.mktemp("fsdp"), list(fsdp_gpu_scenarios.SCENARIOS))


@pytest.mark.multi_gpu
@pytest.mark.parametrize("name", fsdp_gpu_scenarios.SCENARIOS)
def test_scenario(failed: dict[str, str], name: str) -> None:
    assert name not in failed, failed[name]


@pytest.fixture(scope="module")
def failed_on_one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run(1, tmp_path_factory.mktemp("fsdp"), ON_ONE_GPU)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_ONE_GPU)
def test_scenario_on_one_gpu(failed_on_one: dict[str, str], name: str) -> None:
    assert name not in failed_on_one, failed_on_one[name]


@pytest.mark.gpu
def test_a_full_state_dict_loads_into_state_on_host_and_gpu() -> None:
    def build() -> tuple[torch.nn.Module, FusedOffloadAdam]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(60, 60) for _ in range(4))).cuda()
        return model, FusedOffloadAdam(model.parameters(), lr=1e-2, offload=OffloadConfig(fraction=0.5))

    model, optimizer = build()
    for step in range(3):
        model(torch.full((2, 60), 0.1 * step, device="cuda")).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    saved = get_optimizer_state_dict(model, optimizer, options=options)
    other, resumed = build()
    set_optimizer_state_dict(other, resumed, saved, options=StateDictOptions(full_state_dict=True))
    assert resumed.param_groups[0]["step"] == 3
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        for key in optimizer.state[p]:
            value, loaded = optimizer.state[p][key], resumed.state[q][key]
            assert value.any()
            assert loaded.device == value.device
            assert torch.equal(loaded, value)
    assert {optimizer.state[p]["exp_avg"].device.type for p in model.parameters()} == {"cpu", "cuda"}
