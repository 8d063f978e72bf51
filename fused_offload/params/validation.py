"""Validation of parameters and gradients, before anything is changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from .dense import FLOAT_DTYPES, has_own_memory, is_frozen, overlaps
from .dtensors import (
    PLAIN_TENSORS,
    has_partial,
    is_distributed,
    like_param,
    local_of,
    locals_of,
    same_sharding,
    sharding_of,
)
from .quantised import is_quantised, why_unusable


def check_params(params: Sequence[Any], where: str) -> None:
    """Refuses parameters that this optimizer cannot update.

    Args:
        params: parameters of one group: real floating point tensors on one device.
        where: name of the group in errors.

    Raises:
        TypeError: for anything but such tensors.
        RuntimeError: for several devices or an unsupported one, and for elements that share a place
            in memory.
    """
    for position, param in enumerate(params):
        if not isinstance(param, torch.Tensor):
            raise TypeError(
                f"Parameter {position} of {where} should be a tensor, but got {type(param).__name__}. "
                "Leave placeholders out of the groups."
            )
    if any(type(param) not in PLAIN_TENSORS for param in params):
        _check_subclasses(params, where)
        params = locals_of(params)
    devices = {param.device for param in params}
    if len(devices) > 1:
        names = ", ".join(sorted(str(device) for device in devices))
        raise RuntimeError(f"All parameters of {where} should be on one device, but they are on {names}. Split it.")
    if any(device.type not in ("cpu", "cuda") for device in devices):
        raise RuntimeError(
            f"The parameters of {where} are on {devices.pop()}; parameters should be on a CUDA device "
            "or on the CPU. Materialise the model before building the optimizer."
        )
    for position, param in enumerate(params):
        if param.dtype not in FLOAT_DTYPES:
            advice = f". {FROZEN}" if is_frozen(param) else ""
            raise TypeError(
                "Parameters should be float32, bfloat16 or float16, but parameter "
                f"{position} of {where} has {param.dtype}{_class_of(param)}{advice}"
            )
    for position, param in enumerate(params):
        if param.layout != torch.strided or not (param.is_contiguous() or not overlaps(param)):
            raise RuntimeError(
                f"Parameter {position} of {where} (shape {tuple(param.shape)}, strides "
                f"{param.stride() if param.layout == torch.strided else 'none'}) does not have a place in memory for "
                "each of its elements. Make it contiguous before building the optimizer."
            )


FROZEN = "It is frozen, so leave it out: pass the parameters that require gradients."
"""Advice for a parameter that cannot be stepped and waits for no gradient."""


def _class_of(param: torch.Tensor) -> str:
    return "" if type(param) in PLAIN_TENSORS else f" ({type(param).__name__})"


def _check_subclasses(params: Sequence[torch.Tensor], where: str) -> None:
    for position, param in enumerate(params):
        if is_distributed(param) and has_partial(param):
            raise TypeError(
                f"Parameter {position} of {where} is a DTensor with partial values ({sharding_of(param)}), which no "
                "rank can update alone. Redistribute it to Shard or Replicate first."
            )
        local = local_of(param)
        if is_quantised(param):
            reason = why_unusable(param)
            if reason is not None and not is_frozen(param):
                raise TypeError(f"Parameter {position} of {where} is a {type(local).__name__} {reason}")
            continue
        if hasattr(local, "_local_tensor") or not has_own_memory(local):
            raise TypeError(
                f"Parameter {position} of {where} is a {type(local).__name__}, which cannot be updated: "
                f"its elements do not lie in one plain tensor. {_what_to_do(param, local)}"
            )


def _what_to_do(param: torch.Tensor, local: torch.Tensor) -> str:
    """Advice for a parameter whose class stands for other tensors."""
    if is_frozen(param):
        return FROZEN
    if type(local).__module__.startswith("transformer_engine."):
        return (
            "Build the model outside of quantized_model_init (fp8_model_init): autocast computes with quantised copies "
            "of bfloat16 parameters all the same."
        )
    return (
        "Pass plain tensors, and quantise what they hold after training; or parameters of a class with the methods "
        "quantize_(values) and dequantize(dtype=...), as TransformerEngine's."
    )


def check_grad(param: torch.Tensor, grad: Any, group: int) -> None:
    """Refuses a gradient that cannot update its parameter.

    Args:
        param: this rank's part of the parameter.
        grad: the gradient, or whatever stands in its place.
        group: index of the parameter group.

    Raises:
        TypeError: for another type, dtype or layout.
        RuntimeError: for another device, shape or sharding, and for a sparse gradient.
    """
    if not isinstance(grad, torch.Tensor):
        raise TypeError(f"A gradient should be a tensor, but got {type(grad).__name__} in parameter group {group}")
    if is_distributed(grad):  # that of a distributed parameter was taken apart before
        raise RuntimeError(_other_sharding(param, grad, group))
    if not has_own_memory(grad):
        raise TypeError(
            f"A gradient in parameter group {group} is a {type(grad).__name__}, whose elements do not lie in one plain "
            "tensor. Give its parameter a plain one."
        )
    if grad.layout != torch.strided:
        raise RuntimeError("Sparse gradients are not supported; use dense embeddings (sparse=False)")
    if grad.dtype not in FLOAT_DTYPES:
        raise TypeError(
            f"Gradients should be float32, bfloat16 or float16, but parameter group {group} has {grad.dtype}"
        )
    if grad.device != param.device:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but parameter group {group} is on {param.device} and has "
            f"a gradient on {grad.device}. Move the gradient to its parameter."
        )
    if grad.shape != param.shape:
        raise RuntimeError(
            f"A gradient should have the shape of its parameter {tuple(param.shape)}, but got {tuple(grad.shape)} "
            f"in parameter group {group}"
        )


def local_grad(param: torch.Tensor, grad: Any, group: int) -> Any:
    """This rank's part of a gradient, in the placements of its parameter.

    Whatever is no tensor is left to `check_grad`.
    """
    grad = like_param(param, grad)
    if is_distributed(param) and is_distributed(grad) and same_sharding(param, grad):
        return local_of(grad)
    if not isinstance(grad, torch.Tensor) or not (is_distributed(param) or is_distributed(grad)):
        return grad
    raise RuntimeError(_other_sharding(param, grad, group))


def _other_sharding(param: torch.Tensor, grad: torch.Tensor, group: int) -> str:
    if not is_distributed(param):
        return (
            f"A gradient in parameter group {group} is distributed ({sharding_of(grad)}), but its parameter is a plain "
            "tensor. Give it a plain one: grad.full_tensor() or grad.to_local()."
        )
    expected, got = sharding_of(param), sharding_of(grad) if is_distributed(grad) else "a plain tensor"
    return (
        f"A gradient should be distributed over the mesh of its parameter ({expected}), but got {got} in parameter "
        f"group {group}. Distribute it first: distribute_tensor(grad, param.device_mesh, param.placements)."
    )


class ParamSpans:
    """Memory of a step's parameters, which no other parameter or gradient may share.

    Otherwise the result would depend on the order of updates. Devices share one address space, so
    addresses on different devices differ.
    """

    def __init__(self, starts: np.ndarray, param_bytes: np.ndarray, grad_bytes: np.ndarray) -> None:
        """Sorts the spans; raises where two parameters share memory.

        Args:
            starts: ``[n]`` int64, address of each parameter.
            param_bytes: ``[n]`` int64, bytes from its first element to the end of its last.
            grad_bytes: ``[n]`` int64, bytes of its gradient.
        """
        order = np.argsort(starts, kind="stable")
        self._starts = starts[order]
        self._ends = self._starts + param_bytes[order]
        self._grad_bytes = grad_bytes
        if (self._starts[1:] < self._ends[:-1]).any():
            raise RuntimeError(
                "Some parameters share memory, so one step would update it twice. Pass each parameter, and each part "
                "of a flat buffer, once."
            )

    def check_apart(self, grad_addresses: np.ndarray) -> None:
        """Raises where a gradient of the same updates shares memory with a parameter."""
        if not len(self._starts):
            return
        # The last parameter that starts before the gradient ends.
        before = np.searchsorted(self._starts, grad_addresses + self._grad_bytes, side="left") - 1
        if ((before >= 0) & (self._ends[before] > grad_addresses)).any():
            raise RuntimeError(
                "A gradient shares memory with a parameter; gradients are only read, so give it its own."
            )
