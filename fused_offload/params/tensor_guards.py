"""Tells in bulk whether tensors are what they were, for lists too long to ask each tensor a dozen questions."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

try:  # compares type, dispatch keys, dtype, device, sizes and strides of many tensors in one call
    from torch._C._dynamo.guards import TensorGuards as _TensorGuards
except ImportError:
    _new_guards: Any = None
else:
    _new_guards = _TensorGuards


def same_objects(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether two lists hold the very same objects."""
    return len(one) == len(other) and all(map(operator.is_, one, other))


Kind = tuple[Any, ...]


class KindWatch:
    """What kinds of strided tensors a list held; holds none of them."""

    def __init__(self, kinds: Sequence[Kind]) -> None:
        """Remembers the kind of each tensor, see `kind_of`."""
        self._count = len(kinds)
        self._kinds = kinds
        self._guards: Any = None

    def same_kind(self, tensors: Sequence[torch.Tensor | None]) -> bool:
        """Whether other tensors have the types, layouts, dtypes, devices, shapes and strides of these, one by one."""
        if len(tensors) != self._count:
            return False
        if self._guards is None:
            if list(map(kind_of, tensors)) != self._kinds:
                return False
            # Guards are worth their making only where a list is seen again.
            if _new_guards is not None and tensors:
                self._guards = _new_guards(
                    *tensors,
                    dynamic_dims_sizes=[list(kind[4]) for kind in self._kinds],
                    dynamic_dims_strides=[list(kind[5]) for kind in self._kinds],
                )
                self._kinds = ()
            return True
        try:
            return bool(self._guards.check(*tensors))
        except TypeError:  # not all are tensors
            return False


def kind_of(tensor: torch.Tensor | None) -> Kind:
    """Type, layout and, of a strided tensor, all that can be asked without its elements."""
    if not isinstance(tensor, torch.Tensor):
        return (type(tensor),)
    if tensor.layout != torch.strided:
        return type(tensor), tensor.layout
    return type(tensor), tensor.layout, tensor.dtype, tensor.device, tensor.shape, tensor.stride(), tensor.is_neg()
