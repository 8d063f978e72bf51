"""Detects metadata changes of many tensors in one call."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

try:  # compares type, dispatch keys, dtype, device, sizes and strides of many tensors in one call
    from torch._C._dynamo.guards import TensorGuards as _TensorGuards
except ImportError:
    _torch_guards: Any = None
else:
    _torch_guards = _TensorGuards


def same_objects(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """True if two lists hold the very same objects."""
    return len(one) == len(other) and all(map(operator.is_, one, other))


Metadata = tuple[Any, ...]


class TensorGuards:
    """Metadata of a list of tensors, to compare later lists with. Holds no tensor."""

    def __init__(self, metadata: Sequence[Metadata]) -> None:
        """Remembers the metadata of each tensor, see `metadata_of`."""
        self._count = len(metadata)
        self._metadata = metadata
        self._guards: Any = None

    def match(self, tensors: Sequence[torch.Tensor | None]) -> bool:
        """True if the tensors have the remembered metadata, one by one."""
        if len(tensors) != self._count:
            return False
        if self._guards is None:
            if list(map(metadata_of, tensors)) != self._metadata:
                return False
            # Guards are worth their making only where a list is seen again.
            if _torch_guards is not None and tensors:
                self._guards = _torch_guards(
                    *tensors,
                    dynamic_dims_sizes=[list(metadata[4]) for metadata in self._metadata],
                    dynamic_dims_strides=[list(metadata[5]) for metadata in self._metadata],
                )
                self._metadata = ()
            return True
        try:
            return bool(self._guards.check(*tensors))
        except TypeError:  # not all are tensors
            return False


def metadata_of(tensor: torch.Tensor | None) -> Metadata:
    """Type, layout and, of a strided tensor, everything but its elements and address."""
    if not isinstance(tensor, torch.Tensor):
        return (type(tensor),)
    if tensor.layout != torch.strided:
        return type(tensor), tensor.layout
    return type(tensor), tensor.layout, tensor.dtype, tensor.device, tensor.shape, tensor.stride(), tensor.is_neg()
