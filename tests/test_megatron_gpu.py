"""State that stays on the GPU in a Megatron checkpoint."""

from __future__ import annotations

import pytest
import torch

from fused_offload import OffloadConfig
from fused_offload.kernels.formats import join_remainder
from fused_offload.megatron.adam import MegatronAdam
from fused_offload.megatron.param_checkpoint import read_values


@pytest.mark.gpu
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_expanded_state_is_in_host_memory_and_live_state_stays(fraction: float, moments: torch.dtype) -> None:
    param = torch.nn.Parameter(torch.randn(3000, device="cuda").bfloat16())
    param.grad = torch.randn_like(param)
    optimizer = MegatronAdam(
        [param],
        master_weights=True,
        store_param_remainders=True,
        exp_avg_dtype=moments,
        exp_avg_sq_dtype=moments,
        offload=OffloadConfig(fraction=fraction),
    )
    optimizer.step()
    values = read_values(optimizer, param)
    live = "cuda" if fraction == 0 and moments == torch.float32 else "cpu"
    assert {key: value.device.type for key, value in values.items()} == {
        "exp_avg": live,
        "exp_avg_sq": live,
        "param": "cpu",
    }
    remainder = optimizer.get_unscaled_state(param, "master_param").cpu()
    assert torch.equal(values["param"], join_remainder(param.detach().cpu(), remainder))
    for key in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(values[key].cpu(), optimizer.get_unscaled_state(param, key).cpu())
