"""Timed steps of an optimizer whose transfer settings change."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fused_offload import FusedOffloadAdam, OffloadConfig
from fused_offload.plan.transfer_settings import Streaming

_TENSORS = 16
_WARM_MS = 20.0

WIDE: dict[str, Any] = {"master_weights": True}
"""float32 master and moments, 12 bytes a parameter: the most."""

NARROW: dict[str, Any] = {
    "master_weights": True,
    "store_param_remainders": True,
    "exp_avg_dtype": torch.bfloat16,
    "exp_avg_sq_dtype": torch.bfloat16,
}
"""Remainder and bfloat16 moments, 6 bytes a parameter."""


class StepHarness:
    """An optimizer whose steps are timed with several transfer settings, in the same host memory.

    Attributes:
        param_numel: number of parameter elements.
    """

    def __init__(self, numel: int, formats: dict[str, Any], offload: OffloadConfig, device: torch.device) -> None:
        """Allocates parameters, gradients and state.

        Args:
            numel: number of bfloat16 parameter elements.
            formats: keyword arguments of the optimizer that set the stored formats.
            offload: configuration of the optimizer.
            device: the GPU.
        """
        self.param_numel = numel // _TENSORS * _TENSORS
        params = [
            torch.nn.Parameter(torch.full((numel // _TENSORS,), 0.02, dtype=torch.bfloat16, device=device))
            for _ in range(_TENSORS)
        ]
        # Random, since a GPU that computes with zeros draws less power and may clock higher.
        values = torch.randn(numel // _TENSORS, device=device).bfloat16()
        for param in params:
            param.grad = values.clone()
        self.optimizer = FusedOffloadAdam(params, lr=1e-4, weight_decay=0.1, offload=offload, **formats)
        self.step_ms()

    @property
    def state_bytes(self) -> int:
        """Bytes of the state in host memory."""
        return sum(self.optimizer.memory_report().host_bytes.values())

    def step_ms(self) -> float:
        """Time of one step, from an idle GPU until the state is back in host memory."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        self.optimizer.step()
        self.optimizer.synchronize()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e3

    def time(self, streaming: Streaming, steps: int) -> list[float]:
        """Times steps with given transfer settings.

        A first step allocates the ring and compiles the kernels. If steps are short, further ones
        use each slot of the ring once, since a first use costs host time.

        Args:
            streaming: the transfer settings.
            steps: number of timed steps.
        """
        self.optimizer._stepper.reconfigure(config_of(streaming))
        first_ms = self.step_ms()
        start = time.perf_counter()
        for _ in range(streaming.depth):
            if (time.perf_counter() - start) * 1e3 + first_ms < _WARM_MS:
                self.step_ms()
        return [self.step_ms() for _ in range(steps)]


def config_of(streaming: Streaming) -> OffloadConfig:
    """Configuration with fixed transfer settings."""
    if streaming.programs is not None:
        return OffloadConfig(transport="zero_copy", zero_copy_programs=streaming.programs)
    return OffloadConfig(transport="copy", chunk_bytes=streaming.chunk_bytes, depth=streaming.depth)


@contextmanager
def step_harness(numel: int, formats: dict[str, Any], device: torch.device) -> Iterator[StepHarness]:
    """Context with a `StepHarness` whose state is all offloaded; frees the memory at the end."""
    made = StepHarness(numel, formats, config_of(Streaming()), device)
    try:
        yield made
    finally:
        made.optimizer.close()
