"""GPU memory whose parts can be sent to other processes."""

from __future__ import annotations

import io
import weakref
from collections.abc import Callable
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

_ALLOCATIONS: dict[int, StorageWeakRef] = {}
"""Allocations that have storages within them, by address. Those storages keep them alive."""


def make_parts_shareable(memory: torch.Tensor) -> None:
    """Lets tensors whose storage is a part of ``memory`` be sent to other processes.

    ``torch.multiprocessing`` finds the allocation of a CUDA tensor by the address of its storage,
    and fails where that lies within the allocation. Such a tensor goes as a view of all of
    ``memory`` instead. A receiver copies it before it saves it, or it saves all of that memory.
    Other tensors go as before. When ``memory`` is dropped, so are torch's records of what receivers
    have dropped, which would keep it allocated.

    Args:
        memory: ``[nbytes]`` uint8 on a GPU, an allocation of torch's.
    """
    for address, reference in list(_ALLOCATIONS.items()):
        if reference.expired():
            _ALLOCATIONS.pop(address, None)
    _ALLOCATIONS[memory.data_ptr()] = StorageWeakRef(memory.untyped_storage())
    weakref.finalize(memory, _forget_received).atexit = False
    reduce = ForkingPickler(io.BytesIO()).dispatch_table[torch.Tensor]
    if not (isinstance(reduce, partial) and reduce.func is _reduce):
        ForkingPickler.register(torch.Tensor, partial(_reduce, reduce))


def _forget_received() -> None:
    """Drops torch's records of sends that receivers are done with.

    They keep the memory. torch looks through them when something else is sent or its cache has no
    memory left, and not when the sender frees its own.
    """
    if torch.cuda.is_initialized():  # not so in a forked process
        torch.cuda.ipc_collect()


def _reduce(reduce: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> Any:
    return reduce(over_allocation(tensor))


def over_allocation(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements with the whole allocation as storage; the tensor itself if it is in none.

    Also where the tensor's storage begins with the allocation: receivers know storages by their
    address, and would take that short one for the whole. The result has a storage object of its
    own, since torch keeps a record of each send with the storage for as long as that lives.
    """
    if tensor.layout != torch.strided:
        return tensor
    part = tensor.untyped_storage()
    for reference in list(_ALLOCATIONS.values()):  # to which other threads add
        memory = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
        # A forked process may have other memory at an address of the GPU's.
        if memory is None or memory.device != part.device:
            continue
        first = part.data_ptr() - memory.data_ptr()
        if 0 <= first < memory.nbytes():
            whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            offset = first // tensor.itemsize + tensor.storage_offset()
            return whole.set_(memory[:], offset, tensor.shape, tensor.stride())
    return tensor
