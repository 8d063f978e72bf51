"""Low-rank adapters beside Megatron's linear layers, as Megatron-Bridge adds them: the base is
frozen, and the adapters are layers of Megatron's own.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import MegatronModule

ADAPTED = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


class Adapter(MegatronModule):
    """The product of two small matrices; the second one is zero at first in Bridge, and small here,
    so that both have gradients from the first step on.
    """

    def __init__(self, base: Any, rank: int) -> None:
        super().__init__(base.config)
        outputs, inputs = base.weight.shape
        settings = {
            "config": base.config,
            "bias": False,
            "skip_bias_add": True,
            "init_method": lambda weight: torch.nn.init.normal_(weight, std=0.1),
        }
        self.linear_in = ColumnParallelLinear(inputs, rank, gather_output=False, **settings)
        self.linear_out = RowParallelLinear(rank, outputs, input_is_parallel=True, **settings)
        self.to(base.weight.dtype)

    def forward(self, x: torch.Tensor) -> Any:
        return self.linear_out(self.linear_in(x)[0])[0]


class Adapted(MegatronModule):
    def __init__(self, base: Any, rank: int) -> None:
        super().__init__(base.config)
        self.to_wrap = base
        self.adapter = Adapter(base, rank)

    def forward(self, x: torch.Tensor) -> Any:
        output, bias = self.to_wrap(x)
        return output + self.adapter(x), bias


def add_adapters(model: torch.nn.Module, rank: int) -> None:
    """Puts adapters beside all linear layers but those of experts."""
    for name, module in list(model.named_modules()):
        parent, _, attribute = name.rpartition(".")
        if attribute in ADAPTED and ".experts." not in name:
            setattr(model.get_submodule(parent), attribute, Adapted(module, rank))
