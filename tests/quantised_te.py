"""Quantised parameters of TransformerEngine: recipes, what parameters are made of, comparison by
bytes.
"""

from __future__ import annotations

from typing import Any

import torch

RECIPES = {"delayed": "DelayedScaling", "current": "Float8CurrentScaling", "blockwise": "Float8BlockScaling"}
TENSORS = (
    "_data",
    "_scale_inv",
    "_transpose",
    "_rowwise_data",
    "_rowwise_scale_inv",
    "_columnwise_data",
    "_columnwise_scale_inv",
)


def recipe_of(name: str) -> Any:
    """TransformerEngine's recipe for a key of `RECIPES`."""
    from transformer_engine.common import recipe

    return getattr(recipe, RECIPES[name])()


def parts_of(params: list[Any]) -> dict[str, torch.Tensor]:
    """Every tensor that the parameters are made of, and what their quantizers note."""
    found = {}
    for index, param in enumerate(params):
        if not hasattr(param, "_quantizer"):
            found[f"parameter {index}"] = param.detach().clone()
            continue
        for name in TENSORS:
            if isinstance(getattr(param, name, None), torch.Tensor):
                found[f"{name} of {index}"] = _without_padding(name, param).detach().clone()
        for name in ("scale", "amax"):
            if isinstance(getattr(param._quantizer, name, None), torch.Tensor):
                found[f"{name} of {index}"] = getattr(param._quantizer, name).detach().clone()
    return found


def _without_padding(name: str, param: Any) -> torch.Tensor:
    """A tensor of a parameter; of a tile's scales those of tiles, as nobody writes what pads them."""
    tensor: torch.Tensor = getattr(param, name)
    if not name.endswith("wise_scale_inv"):
        return tensor
    rows, columns = (-(-size // 128) for size in param.shape)
    return tensor[:rows, :columns] if name.startswith("_row") else tensor[:columns, :rows]


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """``uint8[bytes]`` on the CPU."""
    return tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Number of differing bytes of each tensor that differs."""
    assert one.keys() == other.keys(), one.keys() ^ other.keys()
    counts = {key: int((bytes_of(one[key]) != bytes_of(other[key])).sum()) for key in one}
    return {key: count for key, count in counts.items() if count}


def transposes_are_right(params: list[Any]) -> bool:
    """Whether each copy in the other order that is marked valid belongs to the rowwise one."""
    return all(
        torch.equal(param._transpose, param._data.reshape(-1, param._data.shape[-1]).t().contiguous())
        for param in params
        if getattr(param, "_transpose", None) is not None and not param._transpose_invalid
    )


def is_stale(recipe: str, name: str) -> bool:
    """Whether TransformerEngine leaves a tensor of a parameter behind: the fused kernel of delayed
    scaling leaves the other order as it was, marked valid.
    """
    return recipe == "delayed" and name.startswith("_transpose")
