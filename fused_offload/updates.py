"""What one step updates: parameters with gradients, checked before anything is changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from .tensors import FLOAT_DTYPES, is_dense, like_memory_of, same_order


class Updates(NamedTuple):
    """Parameters with gradients, in group order; parameters without elements are left out.

    Attributes:
        params: parameters.
        grads: their gradients, in the parameters' memory order.
        groups: index of each parameter's group.
        grad_dtypes: dtype of each gradient.
        param_addresses: ``[len(params)]`` int64, bytes.
        grad_addresses: ``[len(params)]`` int64, bytes.
    """

    params: list[torch.Tensor]
    grads: list[torch.Tensor]
    groups: list[int]
    grad_dtypes: list[torch.dtype]
    param_addresses: np.ndarray
    grad_addresses: np.ndarray


def collect_updates(
    param_groups: Sequence[dict[str, Any]], grad_of: Callable[[torch.Tensor], torch.Tensor | None]
) -> Updates:
    """Finds what has a gradient and checks it.

    Args:
        param_groups: the optimizer's groups.
        grad_of: gradient of a parameter, or None.

    Raises:
        TypeError: for what cannot be a parameter or a gradient.
        RuntimeError: for tensors that do not fit together or overlap.
    """
    all_params: list[torch.Tensor] = []
    all_grads: list[torch.Tensor] = []
    groups: list[int] = []
    for index, group in enumerate(param_groups):
        params = group["params"]
        check_params(params, f"parameter group {index}")
        grads = [grad_of(param) for param in params]
        pairs = [(p, g) for p, g in zip(params, grads, strict=True) if g is not None]
        if not pairs:
            continue
        _check_grads([p for p, _ in pairs], [g for _, g in pairs], index)
        pairs = [(p, g) for p, g in pairs if p.numel()]
        all_params.extend(p for p, _ in pairs)
        all_grads.extend(_in_memory_order(pairs))
        groups.extend([index] * len(pairs))
    updates = Updates(
        all_params,
        all_grads,
        groups,
        [grad.dtype for grad in all_grads],
        _addresses(all_params),
        _addresses(all_grads),
    )
    _check_overlap(updates)
    return updates


def check_params(params: Sequence[Any], where: str) -> None:
    """Raises unless all are real floating point tensors of one device that this optimizer can update.

    Args:
        params: parameters of one group.
        where: what to call the group in an error.
    """
    for position, param in enumerate(params):
        if not isinstance(param, torch.Tensor):
            raise TypeError(
                f"Parameter {position} of {where} should be a tensor, but got {type(param).__name__}. "
                "Leave placeholders out of the groups."
            )
    if any(type(param) not in _PLAIN_TENSORS for param in params):
        _check_subclasses(params, where)
    devices = {param.device for param in params}
    if len(devices) > 1:
        names = ", ".join(sorted(str(device) for device in devices))
        raise RuntimeError(f"All parameters of {where} should be on one device, but they are on {names}. Split it.")
    if any(device.type not in ("cpu", "cuda") for device in devices):
        raise RuntimeError(
            f"The parameters of {where} are on {devices.pop()}; FusedOffloadAdam updates parameters on CUDA devices "
            "and on the CPU. Materialise the model before building the optimizer."
        )
    bad = {param.dtype for param in params} - set(FLOAT_DTYPES)
    if bad:
        raise TypeError(
            f"FusedOffloadAdam updates float32, bfloat16 and float16 parameters, but {where} has {bad.pop()}"
        )
    for position, param in enumerate(params):
        if param.layout != torch.strided or not (param.is_contiguous() or is_dense(param)):
            raise RuntimeError(
                f"Parameter {position} of {where} (shape {tuple(param.shape)}, strides "
                f"{param.stride() if param.layout == torch.strided else 'none'}) does not fill its memory without gaps "
                "or overlaps. Make it contiguous before building the optimizer."
            )


_PLAIN_TENSORS = (torch.nn.Parameter, torch.Tensor)


def _check_subclasses(params: Sequence[torch.Tensor], where: str) -> None:
    for position, param in enumerate(params):
        if hasattr(param, "_local_tensor") or hasattr(type(param), "__tensor_flatten__"):
            raise TypeError(
                f"Parameter {position} of {where} is a {type(param).__name__}, which FusedOffloadAdam cannot update: "
                "its elements do not lie in one plain tensor"
            )


def _check_grads(params: list[torch.Tensor], grads: list[torch.Tensor], index: int) -> None:
    if any(grad.layout != torch.strided for grad in grads):
        raise RuntimeError("FusedOffloadAdam does not support sparse gradients; use dense embeddings (sparse=False)")
    bad = {grad.dtype for grad in grads} - set(FLOAT_DTYPES)
    if bad:
        raise TypeError(
            f"FusedOffloadAdam takes float32, bfloat16 and float16 gradients, but parameter group {index} "
            f"has {bad.pop()}"
        )
    if {grad.device for grad in grads} != {params[0].device}:
        device = next(grad.device for grad in grads if grad.device != params[0].device)
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but parameter group {index} is on {params[0].device} and "
            f"has a gradient on {device}. Move the gradient to its parameter."
        )
    if [grad.shape for grad in grads] != [param.shape for param in params]:
        param, grad = next((p, g) for p, g in zip(params, grads, strict=True) if p.shape != g.shape)
        raise RuntimeError(
            f"A gradient should have the shape of its parameter {tuple(param.shape)}, but got {tuple(grad.shape)} "
            f"in parameter group {index}"
        )


def _in_memory_order(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    return [
        grad if (param.stride() == grad.stride() or same_order(param.shape, param.stride(), grad.stride()))
        and not grad.is_neg()
        else like_memory_of(grad.resolve_neg(), param)
        for param, grad in pairs
    ]  # fmt: skip


def _addresses(tensors: list[torch.Tensor]) -> np.ndarray:
    return np.fromiter(map(torch.Tensor.data_ptr, tensors), np.int64, len(tensors))


def _sizes(tensors: list[torch.Tensor]) -> np.ndarray:
    return np.fromiter((tensor.nbytes for tensor in tensors), np.int64, len(tensors))


def _check_overlap(updates: Updates) -> None:
    """Raises where a parameter shares memory with another one or with a gradient: the result would depend on order.

    Devices share one address space, so addresses of different devices cannot be confused.
    """
    if not updates.params:
        return
    order = np.argsort(updates.param_addresses, kind="stable")
    starts = updates.param_addresses[order]
    ends = starts + _sizes(updates.params)[order]
    if (starts[1:] < ends[:-1]).any():
        raise RuntimeError(
            "Some parameters share memory, so one step would update it twice. Pass each parameter, and each part of a "
            "flat buffer, once."
        )
    grad_starts = updates.grad_addresses
    grad_ends = grad_starts + _sizes(updates.grads)
    before = np.searchsorted(starts, grad_ends, side="left") - 1  # last parameter that starts before the gradient ends
    if ((before >= 0) & (ends[before] > grad_starts)).any():
        raise RuntimeError("A gradient shares memory with a parameter; gradients are only read, so give it its own.")
