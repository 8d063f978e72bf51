"""Captured steps on a real GPU: whatever changes between replays, the bits are those of steps that are not captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_training import FORMS, Outcome, assert_same, build, outcome, set_grads

from fused_offload import FusedOffloadAdam, OffloadConfig

pytestmark = pytest.mark.gpu

MIB = 2**20
CONFIGS = [
    OffloadConfig(graph=True, chunk_bytes=5 * MIB + 77, depth=2),
    OffloadConfig(graph=True, chunk_bytes=8 * MIB, fraction=0.5),
    OffloadConfig(graph=True, transport="zero_copy"),
]


def replayed_plans(optimizer: FusedOffloadAdam) -> int:
    plans = optimizer._stepper.planner._plans.values()
    captures = [derived.capture for plan in plans for derived in plan.derived.values()]
    return sum(capture is not None and capture.graph is not None for capture in captures)


def set_lr(optimizer: FusedOffloadAdam, step: int, lr: list[torch.Tensor] | None) -> None:
    for index, group in enumerate(optimizer.param_groups):
        value = 1e-3 * (1 + step) / (1 + index)
        if lr is None:
            group["lr"] = value
        else:
            group["lr"] = lr[index].fill_(value)


def set_scale(params: list[torch.nn.Parameter], optimizer: Any, scale: float, *, overflow: bool) -> None:
    """What a GradScaler does before a step, in new tensors as it does; on a GPU it has no check for bfloat16."""
    optimizer.grad_scale = torch.full((1,), scale, device="cuda")
    optimizer.found_inf = torch.full((1,), float(overflow), device="cuda")
    for param in params:
        if param.grad is not None:
            param.grad.mul_(scale)
    if overflow:
        params[0].grad.view(-1)[7] = float("inf")


def train(forms: str, config: OffloadConfig, *, scaled: bool, lr_on_gpu: bool = False) -> tuple[Outcome, int]:
    """Learning rates that change, tensors that move, and with a scale two steps that the device skips."""
    params, optimizer = build(forms, config)
    lr = [torch.zeros((), device="cuda") for _ in optimizer.param_groups] if lr_on_gpu else None
    replayed = 0
    for step in range(14):
        set_grads(params, step)
        set_lr(optimizer, step, lr)
        if step == 7:
            for param in params:
                param.data = param.data.clone()
        if scaled:
            set_scale(params, optimizer, 2.0 ** (3 + step // 4), overflow=step in (5, 9))
        optimizer.step()
        # What is captured is thrown away whenever the host learns of a skip, maybe after the last step.
        replayed = max(replayed, replayed_plans(optimizer))
    result = outcome(params, optimizer)
    optimizer.close()
    return result, replayed


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("config", CONFIGS, ids=["copy", "half", "zero_copy"])
@pytest.mark.parametrize("forms", FORMS)
def test_replays_are_steps(forms: str, config: OffloadConfig, scaled: bool) -> None:
    expected, _ = train(forms, OffloadConfig(fraction=0.0), scaled=scaled)
    result, replayed = train(forms, config, scaled=scaled)
    assert replayed
    assert_same(result, expected)


def test_a_learning_rate_on_the_gpu() -> None:
    expected, _ = train("fp32", OffloadConfig(fraction=0.0), scaled=False, lr_on_gpu=True)
    result, replayed = train("fp32", CONFIGS[0], scaled=False, lr_on_gpu=True)
    assert replayed
    assert_same(result, expected)


def test_two_optimizers_share_a_ring() -> None:
    """One replays, the other does not, and its larger ring moves the first one's slots."""
    reference, _ = train("fp32", OffloadConfig(fraction=0.0), scaled=False)
    params, optimizer = build("fp32", CONFIGS[0])
    others, other = build("remainder", OffloadConfig(chunk_bytes=16 * MIB))
    for step in range(14):
        set_grads(params, step)
        set_lr(optimizer, step, None)
        optimizer.step()
        if step >= 5:
            set_grads(others, step)
            other.step()
    assert replayed_plans(optimizer)
    assert_same(outcome(params, optimizer), reference)
    for each in (optimizer, other):
        each.close()
