"""Megatron's own HybridDeviceOptimizer, all of it offloaded, where no parameter says that it is on
a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer import HybridDeviceOptimizer


class HybridOnCpu(HybridDeviceOptimizer):
    """Its choice of what to offload looks at ``is_cuda``, and only that is replaced."""

    def _get_sub_optimizer_param_groups(self, offload_fraction: float) -> Any:
        copies: dict[torch.Tensor, torch.Tensor] = {}
        for group in self.param_groups:
            for param in group["params"]:
                copies[param] = param.detach().clone().float()
        groups = [
            {**group, "params": [copies[param] for param in group["params"]]}
            for group in self.param_groups
            if group["params"]
        ]
        return groups, [], copies, {copy: param for param, copy in copies.items()}, dict(copies)
