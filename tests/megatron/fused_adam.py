"""TransformerEngine's FusedAdam as Megatron uses it, around the reference: state stays resident.

Checkpoints that it writes through Megatron have the keys, dtypes and values that FusedAdam's have.
"""

from __future__ import annotations

from typing import Any

import torch
from reference_optimizer import ReferenceAdam, StoredFormats

KEYS = ("exp_avg", "exp_avg_sq", "master_param")


class FusedAdamLike(ReferenceAdam):
    """Takes FusedAdam's place in tests."""

    def __init__(
        self, params: Any, *, exp_avg_dtype: torch.dtype, store_param_remainders: bool, **settings: Any
    ) -> None:
        super().__init__(params, **settings)
        self.stored_formats = StoredFormats(exp_avg_dtype, store_param_remainders)

    def get_unscaled_state(self, param: torch.Tensor, name: str) -> torch.Tensor:
        value = self.state[param][name]
        return value.float() if value.is_floating_point() else value

    def set_scaled_state(self, param: torch.Tensor, name: str, value: torch.Tensor) -> None:
        self._state_of(param)  # makes it where there is none
        wanted = torch.int16 if self.state[param][name].dtype == torch.int16 else torch.float32
        if value.dtype != wanted:
            raise AssertionError(f"{name} is {value.dtype}, not {wanted}")
        self.state[param][name].copy_(value)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As FusedAdam's: never through torch's, which would cast values to the parameters'
        dtype.
        """
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        for index, param in enumerate(param for group in self.param_groups for param in group["params"]):
            for key in KEYS:
                value = state_dict["state"].get(index, {}).get(key)
                if value is not None:
                    self.set_scaled_state(param, key, value if value.dtype == torch.int16 else value.float())
