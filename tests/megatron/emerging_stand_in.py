"""Stands in for emerging-optimizers, which needs Python 3.12: the names that Megatron-Core imports, on plain torch.

Its arithmetic is an orthogonalisation of its own, in float32: tests compare Megatron's Muon with itself, with its
momentum in one place or another.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import sys
import types
from collections.abc import Iterator
from typing import Any, Literal

import torch

Coefficients = Literal["simple", "quintic"]


class OrthogonalizedOptimizer(torch.optim.Optimizer):
    """The step of the class of this name."""

    def __init__(
        self,
        params: Any,
        lr: float,
        momentum: float,
        weight_decay: float,
        *,
        nesterov: bool,
        weight_decay_method: str,
        fp32_matmul_prec: str,
        scaled_orthogonalize_fn: Any,
    ) -> None:
        self.nesterov = nesterov
        self.weight_decay_method = weight_decay_method
        self.fp32_matmul_prec = fp32_matmul_prec
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.scaled_orthogonalize_fn = scaled_orthogonalize_fn

    def _init_group(self, group: dict[str, Any], skip_non_grad_params: bool = True) -> None:
        for param in group["params"]:
            if (param.grad is not None or not skip_non_grad_params) and not self.state[param]:
                self.state[param]["momentum_buffer"] = torch.zeros_like(param)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            self._init_group(group)
            for param in group["params"]:
                if param.grad is None:
                    continue
                param.add_(param, alpha=-group["weight_decay"] * group["lr"])
                momentum = self.state[param]["momentum_buffer"].lerp_(param.grad, 1 - group["momentum"])
                update = param.grad.lerp(momentum, group["momentum"]) if self.nesterov else momentum
                with fp32_matmul_precision(self.fp32_matmul_prec):
                    settings = {key: value for key, value in group.items() if key != "params"}
                    orthogonal = self.orthogonalize(param, update, **settings)
                param.add_(orthogonal, alpha=-group["lr"])


@contextlib.contextmanager
def fp32_matmul_precision(precision: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def newton_schulz_tp(
    x: torch.Tensor, steps: int, coefficient_type: str, tp_group: Any, partition_dim: int | None, tp_mode: str
) -> torch.Tensor:
    if partition_dim is None:
        return _orthogonalised(x, steps)
    shards = [torch.empty_like(x) for _ in range(tp_group.size())]
    torch.distributed.all_gather(shards, x.contiguous(), tp_group)
    whole = _orthogonalised(torch.cat(shards, dim=partition_dim), steps)
    return whole.chunk(len(shards), dim=partition_dim)[tp_group.rank()].contiguous()


def _orthogonalised(x: torch.Tensor, steps: int) -> torch.Tensor:
    """Newton's iteration for the polar factor."""
    assert x.dtype == torch.float32
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(steps):
        x = 1.5 * x - 0.5 * (x @ x.T) @ x
    return x


def install() -> None:
    """Registers the modules; call it before Megatron is imported."""
    nothing = type("Nothing", (), {})
    members = {
        "emerging_optimizers": {},
        "emerging_optimizers.registry": {"get_optimizer_name_list": list},
        "emerging_optimizers.utils": {"fp32_matmul_precision": fp32_matmul_precision},
        "emerging_optimizers.orthogonalized_optimizers": {
            "AdaptiveMuon": nothing,
            "OrthogonalizedOptimizer": OrthogonalizedOptimizer,
            "get_muon_scale_factor": lambda rows, columns, mode: max(rows, columns) ** 0.5,
        },
        "emerging_optimizers.orthogonalized_optimizers.muon_utils": {
            "NSCoeffT": Coefficients,
            "newton_schulz_tp": newton_schulz_tp,
        },
        "emerging_optimizers.scalar_optimizers": {"Lion": nothing},
        "emerging_optimizers.soap": {"SOAP": nothing},
    }
    for name, values in members.items():
        module = types.ModuleType(name)
        module.__dict__.update(values)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: "0.3.0" if name == "emerging-optimizers" else version(name)
