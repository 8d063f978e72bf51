"""Thousands of small adapters beside a frozen model, as LoRA makes them."""

from __future__ import annotations

import helpers
import torch
from helpers import randn

from fused_offload import FusedOffloadAdam, OffloadConfig

device = helpers.device

RANK, WIDTH = 8, 40


def test_thousands_of_adapters_beside_a_frozen_model(device: str) -> None:
    pairs = 2000 if device == "cuda" else 200
    base = torch.nn.Linear(WIDTH, WIDTH, device=device).requires_grad_(False)
    frozen = base.weight.detach().clone()
    shapes = [(RANK, WIDTH), (WIDTH, RANK)] * pairs
    params = [torch.nn.Parameter(randn(shape, index, device)) for index, shape in enumerate(shapes)]
    copies = [torch.nn.Parameter(param.detach().clone()) for param in params]
    optimizer = FusedOffloadAdam([*base.parameters(), *params], lr=1e-2, offload=OffloadConfig(chunk_bytes=2**18))
    reference = torch.optim.AdamW(copies, lr=1e-2, weight_decay=0.0)
    for step in range(3):
        for index, (param, copy) in enumerate(zip(params, copies, strict=True)):
            param.grad = randn(param.shape, 10_000 * step + index, device)
            copy.grad = param.grad.clone()
        optimizer.step()
        optimizer.zero_grad()
        reference.step()
    # Memory that the step has written where it should not shows in what is built next.
    other = torch.nn.Linear(1000, 1000, device=device)
    assert other(torch.ones(2, 1000, device=device)).isfinite().all()
    for param, copy in zip(params, copies, strict=True):
        torch.testing.assert_close(param, copy)
    assert torch.equal(base.weight, frozen)
    assert base.weight not in optimizer.state
    assert len(optimizer.state) == 2 * pairs
    optimizer.close()
