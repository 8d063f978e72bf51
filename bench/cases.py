"""Benchmark cases: stored formats, parameters with gradients, and the check that a step was one."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fused_offload.kernels.formats import (
    BF16,
    BF16_STOCHASTIC,
    FP16,
    FP16_NONZERO,
    FP32,
    LOG8,
    REMAINDER,
    ROOT8,
    Format,
)
from fused_offload.state.layout import align

LR = 1e-3
WEIGHT_DECAY = 0.1
_SAMPLE_NUMEL = 4096


@dataclass(frozen=True)
class StoredFormat:
    """Stored format of the state of bfloat16 parameters.

    Attributes:
        name: bytes per parameter each way, as in the README.
        exp_avg: first moment.
        exp_avg_sq: second moment.
        master_param: master weights.
    """

    name: str
    exp_avg: Format
    exp_avg_sq: Format
    master_param: Format

    def __str__(self) -> str:
        return self.name

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of FusedOffloadAdam, and of TransformerEngine's FusedAdam where it has the
        format.
        """
        return {
            "lr": LR,
            "weight_decay": WEIGHT_DECAY,
            "master_weights": True,
            "store_param_remainders": self.master_param is REMAINDER,
            "exp_avg_dtype": self.exp_avg.dtype,
            "exp_avg_sq_dtype": self.exp_avg_sq.dtype,
            **({"stochastic_rounding": True} if self.exp_avg is BF16_STOCHASTIC else {}),
        }

    def state_bytes(self, numel: int, tensors: int = 1) -> int:
        """Bytes of state, scales and alignment included: what crosses the link each way."""
        formats = (self.exp_avg, self.exp_avg_sq, self.master_param)
        return tensors * sum(format.stored_bytes(align(numel)) for format in formats)

    def kernel_bytes(self, numel: int, tensors: int = 1) -> int:
        """GPU memory that one update reads and writes."""
        # I/O: read grad + state (+ param, of which a remainder is the other half), write param +
        # state
        param_bytes = 2 + (2 if self.master_param is REMAINDER else 0)
        return tensors * numel * (2 + param_bytes) + 2 * self.state_bytes(numel, tensors)


FORMAT_12B = StoredFormat("12B", FP32, FP32, FP32)
FORMAT_10B = StoredFormat("10B", FP32, FP32, REMAINDER)
FORMAT_6B = StoredFormat("6B", BF16, BF16, REMAINDER)
FORMAT_6B_FP16 = StoredFormat("6B-fp16", FP16, FP16_NONZERO, REMAINDER)

FORMAT_6B_STOCHASTIC = StoredFormat("6B-stochastic", BF16_STOCHASTIC, BF16_STOCHASTIC, REMAINDER)
FORMAT_4B = StoredFormat("4B", ROOT8, LOG8, REMAINDER)

STEP_FORMATS = (FORMAT_12B, FORMAT_10B, FORMAT_6B, FORMAT_4B)
KERNEL_FORMATS = (*STEP_FORMATS, FORMAT_6B_FP16, FORMAT_6B_STOCHASTIC)
TE_FORMATS = (FORMAT_12B, FORMAT_10B, FORMAT_6B)


def make_params(
    numel: int, tensors: int, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> list[torch.nn.Parameter]:
    """Parameters of ``numel`` random elements each, with random gradients of the same dtype."""
    # Random within a tensor, equal between tensors: a GPU's clocks notice zeros, and a CPU takes
    # half a minute to draw two billion numbers.
    generator = torch.Generator(device).manual_seed(0)
    values = torch.randn(numel, generator=generator, device=device) * 0.02
    grads = torch.randn(numel, generator=generator, device=device)
    params = []
    for _ in range(tensors):
        param = torch.nn.Parameter(values.to(dtype, copy=True))
        param.grad = grads.to(dtype, copy=True)
        params.append(param)
    return params


class Watch:
    """Remembers some of the parameters, to tell afterwards that they were trained."""

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        self._params = [params[0], params[-1]]
        self._all = list(params)
        self._before = self._samples()

    def _samples(self) -> list[torch.Tensor]:
        # The end of a parameter as well: the last chunk is the one that goes missing.
        ends = [end for param in self._params for end in (param[:_SAMPLE_NUMEL], param[-_SAMPLE_NUMEL:])]
        return [end.detach().clone() for end in ends]

    def assert_trained(self) -> None:
        """Every parameter is finite and the watched ones changed."""
        assert torch.stack([param.isfinite().all() for param in self._all]).all(), "a parameter is not finite"
        for before, after in zip(self._before, self._samples(), strict=True):
            assert not torch.equal(before, after), "the steps changed no parameter"

    def assert_unchanged(self) -> None:
        """The watched parameters are what they were, bit for bit."""
        for before, after in zip(self._before, self._samples(), strict=True):
            assert torch.equal(before, after), "parameters changed although no kernel should have run"


class PeakMemory:
    """GPU memory that is taken from now on, beyond what is allocated now."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._before = torch.cuda.memory_allocated(device)

    def extra_bytes(self) -> int | None:
        """The most that was allocated at once since then; None on a CPU."""
        if self._device.type != "cuda":
            return None
        return torch.cuda.max_memory_allocated(self._device) - self._before


def release_memory() -> None:
    """Gives everything back that nobody refers to any more, pinned host memory of torch
    included.
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()
