"""Padding at the ends of buckets, in buffers that a DistributedOptimizer has gathered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def slices_unpadded_buffers(sharded_param_state: Callable[..., Any]) -> bool:
    """True if this release slices gathered buffers at the offsets of padded buffers.

    Gathered buffers have no padding at the ends of their buckets. Releases up to 0.19 take their
    slices as if they had, and so save the wrong elements after the first padded bucket. Later
    releases take the size of every bucket into account.

    Args:
        sharded_param_state: ``DistributedOptimizer.sharded_param_state_fully_reshardable``.
    """
    function = getattr(sharded_param_state, "__func__", sharded_param_state)
    return "grad_data" not in function.__code__.co_names


def insert_bucket_padding(state: dict[Any, Any], buffers: Sequence[Any]) -> None:
    """Moves every bucket of gathered buffers to its offset in the padded buffer; padding is zero.

    Args:
        state: returned by ``get_parameter_state_dp_zero``. Updated in place, one tensor at a time.
        buffers: the param-and-grad buffers, in the order of ``state``.
    """
    for index, buffer in enumerate(buffers):
        sizes = [(bucket.grad_data.numel(), bucket.numel_unpadded) for bucket in buffer.buckets]
        if all(padded == unpadded for padded, unpadded in sizes):
            continue
        for tensors in state[index].values():
            for key, values in tensors.items():
                if isinstance(values, torch.Tensor):
                    tensors[key] = _padded(values, sizes)


def _padded(values: torch.Tensor, sizes: Sequence[tuple[int, int]]) -> torch.Tensor:
    result = values.new_zeros(sum(padded for padded, _ in sizes))
    source = target = 0
    for padded, unpadded in sizes:
        result[target : target + unpadded] = values[source : source + unpadded]
        source, target = source + unpadded, target + padded
    return result
