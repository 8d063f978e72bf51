"""Parameters as flat memory: dense strides, flat views, addresses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_NOT_INTERCEPTED = torch.Tensor.__torch_dispatch__


def _order(shape: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """Stride and size of every dimension that matters, by ascending stride."""
    return sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size != 1)


def is_frozen(param: torch.Tensor) -> bool:
    """True if a parameter waits for no gradient.

    Only a model's own parameters can be frozen. Shards that a wrapper passes instead never require
    a gradient, and still get one.
    """
    return isinstance(param, torch.nn.Parameter) and not param.requires_grad


def has_own_memory(tensor: torch.Tensor) -> bool:
    """True if a tensor's elements are at its address.

    Classes that stand for other tensors, as quantised ones do, intercept operations below autograd,
    and their address is meaningless. Plain subclasses do not.
    """
    return type(tensor).__torch_dispatch__ is _NOT_INTERCEPTED


def has_data(tensor: torch.Tensor) -> bool:
    """True if the memory of a tensor holds all of its elements; a freed storage does not."""
    if tensor.device.type == "meta" or tensor.layout != torch.strided or not has_own_memory(tensor):
        return False
    if tensor.numel() == 0:
        return True
    end = int(tensor.storage_offset()) * tensor.itemsize + span_bytes(tensor)
    return end <= tensor.untyped_storage().nbytes()


def is_dense(tensor: torch.Tensor) -> bool:
    """True if the elements fill ``numel`` consecutive places in memory, each once, in any order."""
    if tensor.is_contiguous() or tensor.numel() == 0:
        return True
    expected = 1
    for stride, size in _order(tensor.shape, tensor.stride()):
        if stride != expected:
            return False
        expected *= size
    return True


def overlaps(tensor: torch.Tensor) -> bool:
    """True if several elements may share a place in memory, as those of expanded tensors do."""
    span = 1  # places from the first element to the last, of the dimensions so far
    for stride, size in _order(tensor.shape, tensor.stride()):
        if stride < span:
            return tensor.numel() > 0
        span += (size - 1) * stride
    return False


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides of a gapless tensor with the same memory order; its own if it has no gaps."""
    return tensor.stride() if is_dense(tensor) else torch.empty_like(tensor, device="meta").stride()


def span_bytes(tensor: torch.Tensor) -> int:
    """Bytes from the first element to the end of the last, of a tensor with elements."""
    places = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return places * tensor.itemsize


def dense_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy without gaps, in the same memory order."""
    strides = dense_strides(tensor)
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor.detach())


def same_order(shape: Sequence[int], strides: Sequence[int], other: Sequence[int]) -> bool:
    """True if two sets of strides give the same memory order; dimensions of size 1 do not count."""
    return all(a == b or size == 1 for size, a, b in zip(shape, strides, other, strict=True))


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """``[numel]`` view of a dense tensor, in memory order, without autograd."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def like_memory_of(tensor: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """``tensor``, copied into the memory order of ``param`` if its own differs."""
    if tensor.is_contiguous() and param.is_contiguous():
        return tensor
    if same_order(param.shape, param.stride(), tensor.stride()):
        return tensor
    return torch.empty_strided(param.shape, param.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def addresses_of(tensors: Sequence[torch.Tensor]) -> np.ndarray:
    """``[len(tensors)]`` int64, address of each tensor's first element in bytes."""
    return np.fromiter(map(torch.Tensor.data_ptr, tensors), np.int64, len(tensors))
