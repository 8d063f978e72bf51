"""What one step updates: parameters with gradients, checked before anything is changed."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from .tensors import FLOAT_DTYPES, addresses_of, is_dense, like_memory_of, same_order


class Updates(NamedTuple):
    """Parameters with gradients, in group order; parameters without elements are left out.

    Attributes:
        params: parameters.
        grads: their gradients, in the parameters' memory order.
        groups: index of each parameter's group.
        positions: place of each parameter in `ParamWatch.params`.
        grad_dtypes: dtype of each gradient.
        param_addresses: ``[len(params)]`` int64, bytes.
        grad_addresses: ``[len(params)]`` int64, bytes.
        signature: equal for two steps that update the same parameters with gradients of the same dtypes.
    """

    params: list[torch.Tensor]
    grads: list[torch.Tensor]
    groups: list[int]
    positions: list[int]
    grad_dtypes: list[torch.dtype]
    param_addresses: np.ndarray
    grad_addresses: np.ndarray
    signature: Hashable


class ParamWatch:
    """All parameters of the groups, checked again only when something about them changed.

    Callers replace parameters, swap their storage and edit groups between steps, so every step compares what it can
    afford to: identities, addresses, shapes and strides.

    Attributes:
        params: parameters in group order.
        groups: index of each parameter's group.
        addresses: ``[len(params)]`` int64, bytes.
        sizes: ``[len(params)]`` int64, bytes.
        generation: counts changes.
    """

    def __init__(self) -> None:
        """Knows no parameters yet."""
        self.generation = 0
        self.params: list[torch.Tensor] = []
        self.groups: list[int] = []
        self.addresses = np.empty(0, np.int64)
        self.sizes = np.empty(0, np.int64)
        self._lengths: list[int] = []
        self._shapes: list[torch.Size] = []
        self._strides: list[tuple[int, ...]] = []

    def refresh(self, param_groups: Sequence[dict[str, Any]]) -> bool:
        """Takes in the groups as they are now.

        Returns:
            Whether anything changed since the last call.

        Raises:
            TypeError: for what cannot be a parameter.
            RuntimeError: for parameters that cannot be updated.
        """
        params = [param for group in param_groups for param in group["params"]]
        lengths = [len(group["params"]) for group in param_groups]
        if (
            lengths == self._lengths
            and all(map(operator.is_, params, self.params))
            and np.array_equal(addresses_of(params), self.addresses)
            and [param.shape for param in params] == self._shapes
            and [param.stride() for param in params] == self._strides
        ):
            return False
        for index, group in enumerate(param_groups):
            check_params(group["params"], f"parameter group {index}")
        self.params, self._lengths = params, lengths
        self.groups = [index for index, length in enumerate(lengths) for _ in range(length)]
        self._shapes = [param.shape for param in params]
        self._strides = [param.stride() for param in params]
        self.addresses = addresses_of(params)
        self.sizes = np.array([param.nbytes for param in params], np.int64)
        self.generation += 1
        return True

    def collect(self, decoupled: bool) -> Updates:
        """Finds what has a gradient and checks it. Call `refresh` first.

        Args:
            decoupled: read ``decoupled_grad`` instead of ``grad``.

        Raises:
            TypeError: for what cannot be a gradient.
            RuntimeError: for tensors that do not fit together or overlap.
        """
        if decoupled:
            found = [getattr(param, "decoupled_grad", None) for param in self.params]
        else:
            found = [param.grad for param in self.params]
        positions = [index for index, grad in enumerate(found) if grad is not None]
        grads = [found[index] for index in positions]
        self._check_grads(positions, grads)
        if 0 in self.sizes:
            positions = [index for index in positions if self.sizes[index]]
            grads = [found[index] for index in positions]
        everything = len(positions) == len(self.params)
        params = self.params if everything else [self.params[index] for index in positions]
        strides = self._strides if everything else [self._strides[index] for index in positions]
        if [grad.stride() for grad in grads] != strides or any(map(torch.Tensor.is_neg, grads)):
            grads = _in_memory_order(params, grads)
        dtypes = [grad.dtype for grad in grads]
        updates = Updates(
            params,
            grads,
            self.groups if everything else [self.groups[index] for index in positions],
            positions,
            dtypes,
            self.addresses[positions],
            addresses_of(grads),
            (self.generation, None if everything else tuple(positions), _unless_uniform(dtypes)),
        )
        self._check_overlap(updates)
        return updates

    def _check_grads(self, positions: list[int], grads: list[Any]) -> None:
        for kind in set(map(type, grads)):
            if not issubclass(kind, torch.Tensor):
                raise TypeError(f"A gradient should be a tensor, but got {kind.__name__}")
        if {grad.layout for grad in grads} - {torch.strided}:
            raise RuntimeError(
                "FusedOffloadAdam does not support sparse gradients; use dense embeddings (sparse=False)"
            )
        bad = {grad.dtype for grad in grads} - set(FLOAT_DTYPES)
        if bad:
            index = next(i for i, grad in zip(positions, grads, strict=True) if grad.dtype in bad)
            raise TypeError(
                "FusedOffloadAdam takes float32, bfloat16 and float16 gradients, but parameter group "
                f"{self.groups[index]} has {bad.pop()}"
            )
        everything = len(positions) == len(self.params)
        shapes = self._shapes if everything else [self._shapes[index] for index in positions]
        if [grad.shape for grad in grads] != shapes:
            index, grad = next(
                (i, grad) for i, grad in zip(positions, grads, strict=True) if grad.shape != self._shapes[i]
            )
            raise RuntimeError(
                f"A gradient should have the shape of its parameter {tuple(self._shapes[index])}, but got "
                f"{tuple(grad.shape)} in parameter group {self.groups[index]}"
            )
        self._check_devices(positions, grads)

    def _check_devices(self, positions: list[int], grads: list[torch.Tensor]) -> None:
        devices = {grad.device for grad in grads}
        if len(devices) == 1 and {self.params[index].device for index in positions} == devices:
            return
        for index, grad in zip(positions, grads, strict=True):
            device = self.params[index].device
            if grad.device != device:
                raise RuntimeError(
                    f"Expected all tensors to be on the same device, but parameter group {self.groups[index]} is on "
                    f"{device} and has a gradient on {grad.device}. Move the gradient to its parameter."
                )

    def _check_overlap(self, updates: Updates) -> None:
        """Raises where a parameter shares memory with another one or with a gradient: the result would depend on order.

        Devices share one address space, so addresses of different devices cannot be confused.
        """
        if not updates.params:
            return
        sizes = self.sizes[updates.positions]
        order = np.argsort(updates.param_addresses, kind="stable")
        starts = updates.param_addresses[order]
        ends = starts + sizes[order]
        if (starts[1:] < ends[:-1]).any():
            raise RuntimeError(
                "Some parameters share memory, so one step would update it twice. Pass each parameter, and each part "
                "of a flat buffer, once."
            )
        grad_starts = updates.grad_addresses
        grad_ends = grad_starts + np.fromiter(map(_NBYTES, updates.grads), np.int64, len(updates.grads))
        before = np.searchsorted(starts, grad_ends, side="left") - 1  # last parameter to start before the gradient ends
        if ((before >= 0) & (ends[before] > grad_starts)).any():
            raise RuntimeError(
                "A gradient shares memory with a parameter; gradients are only read, so give it its own."
            )


_NBYTES = operator.attrgetter("nbytes")


def _unless_uniform(dtypes: list[torch.dtype]) -> Hashable:
    """The dtypes, or just the one that all have."""
    return dtypes[0] if dtypes and dtypes.count(dtypes[0]) == len(dtypes) else tuple(dtypes)


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


def _in_memory_order(params: list[torch.Tensor], grads: list[torch.Tensor]) -> list[torch.Tensor]:
    return [
        grad
        if same_order(param.shape, param.stride(), grad.stride()) and not grad.is_neg()
        else like_memory_of(grad.resolve_neg(), param)
        for param, grad in zip(params, grads, strict=True)
    ]
