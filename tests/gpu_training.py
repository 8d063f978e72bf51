"""Training runs that the GPU tests compare bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fused_offload import FusedOffloadAdam, OffloadConfig

FORMATS: dict[str, dict[str, Any]] = {
    "fp32": {"master_weights": True},
    "remainder": {"master_weights": True, "store_param_remainders": True},
    "remainder_bf16": {
        "master_weights": True,
        "store_param_remainders": True,
        "exp_avg_dtype": torch.bfloat16,
        "exp_avg_sq_dtype": torch.bfloat16,
    },
    "fp16": {
        "master_weights": True,
        "master_weight_dtype": torch.float16,
        "exp_avg_dtype": torch.float16,
        "exp_avg_sq_dtype": torch.float16,
    },
    "uint8": {
        "master_weights": True,
        "store_param_remainders": True,
        "exp_avg_dtype": torch.uint8,
        "exp_avg_sq_dtype": torch.uint8,
    },
    "no_master": {"exp_avg_dtype": torch.bfloat16, "stochastic_rounding": True},
}

SIZES = ((4096, 1500), (3000, 1111), (127,), (1,), (0,), (2_000_003,), (1024,), (700, 901))


class Outcome(NamedTuple):
    """Everything that training decides, on the CPU."""

    params: list[torch.Tensor]
    state: list[dict[str, torch.Tensor]]
    steps: list[int]


def make_params(sizes: Any = SIZES, dtype: torch.dtype = torch.bfloat16) -> list[torch.nn.Parameter]:
    generator = torch.Generator("cuda").manual_seed(1)
    return [torch.nn.Parameter(torch.randn(size, generator=generator, device="cuda").to(dtype)) for size in sizes]


def set_grads(params: list[torch.nn.Parameter], step: int) -> None:
    """Gradients of one step; one parameter has none at every third step."""
    generator = torch.Generator("cuda").manual_seed(100 + step)
    for index, param in enumerate(params):
        grad = torch.randn(param.shape, generator=generator, device="cuda").mul_(0.1).to(param.dtype)
        param.grad = None if index == 1 and step % 3 == 2 else grad


def outcome(params: list[torch.nn.Parameter], optimizer: FusedOffloadAdam) -> Outcome:
    saved = optimizer.state_dict()
    state = [{key: value.cpu().clone() for key, value in entry.items()} for entry in saved["state"].values()]
    return Outcome([p.detach().cpu().clone() for p in params], state, [g["step"] for g in saved["param_groups"]])


def build(formats: str, config: OffloadConfig, sizes: Any = SIZES) -> tuple[list[torch.nn.Parameter], FusedOffloadAdam]:
    """Parameters in two groups, and their optimizer."""
    params = make_params(sizes)
    groups: list[dict[str, Any]] = [{"params": params[:3]}, {"params": params[3:], "lr": 3e-3, "weight_decay": 0.0}]
    return params, FusedOffloadAdam(groups, lr=1e-3, weight_decay=0.1, offload=config, **FORMATS[formats])


def train(formats: str, config: OffloadConfig, *, steps: int = 20, sizes: Any = SIZES) -> Outcome:
    """Trains; slots are filled with NaN before every fourth step."""
    params, optimizer = build(formats, config, sizes)
    for step in range(steps):
        set_grads(params, step)
        if step % 4 == 1:
            poison(optimizer)
        optimizer.step()
    result = outcome(params, optimizer)
    optimizer.close()
    return result


def poison(optimizer: FusedOffloadAdam) -> None:
    """Makes every byte of the ring a NaN, or for remainders nonsense."""
    optimizer.synchronize()
    for pipeline in optimizer._stepper.devices.pipelines.values():
        for slot in pipeline.queues.ring.slots:
            slot.memory.fill_(255)
    torch.cuda.synchronize()


def gpu_rise(action: Callable[[], Any]) -> int:
    """Bytes of GPU memory that an action takes at its peak."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    action()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def assert_same(one: Outcome, other: Outcome) -> None:
    assert one.steps == other.steps
    for a, b in zip(one.params, other.params, strict=True):
        assert torch.equal(a, b)
    for a_state, b_state in zip(one.state, other.state, strict=True):
        assert a_state.keys() == b_state.keys()
        for key in a_state:
            assert torch.equal(a_state[key], b_state[key]), key


def differs(one: Outcome, other: Outcome) -> bool:
    try:
        assert_same(one, other)
    except AssertionError:
        return True
    return False
