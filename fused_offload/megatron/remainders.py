"""Detects checkpoints that hold 16-bit remainders in the place of fp32 master weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from .adam import inner_of
from .quantised_shards import is_quantised_param
from .shards import Shards

_INT16 = torch.iinfo(torch.int16)
REFUSED_REMAINDERS = (
    "This checkpoint's optimizer state holds the 16-bit remainders of TransformerEngine's store_param_remainders under "
    "the name of the fp32 master weights, converted to floats. The {format} format lacks the parameters that they "
    "belong to. Save it with OptimizerConfig.store_param_remainders=False or in the dp_reshardable format, or load it "
    "with the optimizer that wrote it."
)


def are_remainders(masters: Iterable[tuple[torch.Tensor, torch.Tensor | None]]) -> bool:
    """True if the master weights of a checkpoint are 16-bit remainders, converted to floats.

    TransformerEngine's FusedAdam saves remainders under the masters' name, and readers of
    checkpoints convert dtypes silently. Remainders are whole numbers that do not round to the
    parameters. Masters of a whole model are never all whole numbers. Masters of a few parameters
    may be (a norm's weights before the first step), but these round to their parameters.

    Args:
        masters: all values that this rank sees, each with the bfloat16 parameter that was loaded
            beside it, or None if that is unknown.
    """
    some_differ = False  # from their parameters
    for values, param in masters:
        if not values.is_floating_point():
            return values.dtype == torch.int16
        flat = values.reshape(-1)
        whole = (flat == flat.round()) & (flat >= _INT16.min) & (flat <= _INT16.max)
        if not whole.all():
            return False
        if param is None:
            some_differ = some_differ or flat.numel() > 0
        elif not some_differ:
            some_differ = bool((flat.to(param.dtype) != param.detach().to(flat.device).reshape(-1)).any())
    return some_differ


def holds_remainders(distributed: Any, shards: Shards, state_dict: dict[str, Any]) -> bool:
    """True if a loaded state dict holds remainders in the place of masters.

    Args:
        distributed: a DistributedOptimizer whose inner optimizer is a `MegatronAdam`.
        shards: the shards of that optimizer.
        state_dict: argument of its ``load_state_dict``.

    Raises:
        ValueError: for remainders in a format that lacks their parameters.
    """
    if not inner_of(distributed).master_weights or "param_state" not in state_dict:
        return False
    state, kind = state_dict["param_state"], state_dict.get("param_state_sharding_type")
    if kind == "dp_reshardable":
        return are_remainders(_loaded_shards(distributed, shards, state))
    if kind == "fully_reshardable" and are_remainders(_loaded_params(distributed, state)):
        raise ValueError(REFUSED_REMAINDERS.format(format=kind))
    return False


def _loaded_shards(distributed: Any, shards: Shards, state: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Masters and parameters of this rank, from the buckets of the dp_reshardable format."""
    for index, ranges in enumerate(distributed.gbuf_ranges):
        for dtype, buckets in ranges.items():
            for bucket, loaded in zip(buckets, state[index][dtype], strict=True):
                whole = [tensors for tensors in loaded if not tensors["padding"]]
                for model_param, tensors in zip(bucket["param_map"], whole, strict=False):
                    if _may_have_remainder(model_param) and isinstance(tensors.get("param"), torch.Tensor):
                        yield tensors["param"], shards.of(model_param).param


def _loaded_params(distributed: Any, state: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Masters and parameters, both whole, from the fully_reshardable format."""
    index = 0
    for buffer in distributed.buffers:
        for model_param in buffer.param_index_map:
            values = state[index].get("param", state[index].get("fp32_param"))
            index += 1
            if _may_have_remainder(model_param) and isinstance(values, torch.Tensor):
                yield values, model_param


def _may_have_remainder(model_param: torch.Tensor) -> bool:
    """True for bfloat16 parameters; quantised ones say that they are, and have whole masters."""
    return model_param.dtype == torch.bfloat16 and not is_quantised_param(model_param)
