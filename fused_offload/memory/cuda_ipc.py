"""GPU memory whose parts can be sent to other processes."""

from __future__ import annotations

import weakref
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing import reductions

_ALLOCATIONS: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
"""Allocations that have storages within them, by address."""


def make_parts_shareable(memory: torch.Tensor) -> None:
    """Lets tensors whose storage is a part of ``memory`` be sent to other processes.

    ``torch.multiprocessing`` finds the allocation of a CUDA tensor by the address of its storage,
    and fails where that lies within the allocation. Such a tensor goes as a view of all of
    ``memory`` instead, for as long as that exists.

    Args:
        memory: ``[nbytes]`` uint8 on a GPU, an allocation of torch's.
    """
    _ALLOCATIONS[memory.data_ptr()] = memory
    ForkingPickler.register(torch.Tensor, _reduce)


def _reduce(tensor: torch.Tensor) -> Any:
    return reductions.reduce_tensor(over_allocation(tensor))


def over_allocation(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements with the whole allocation as storage; the tensor itself if it is in none."""
    address = tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0
    for start, memory in list(_ALLOCATIONS.items()):
        if start < address < start + memory.nbytes:
            whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            offset = (tensor.data_ptr() - start) // tensor.itemsize
            return whole.set_(memory.untyped_storage(), offset, tensor.shape, tensor.stride())
    return tensor
