"""Distributed tensors. The optimizer uses this rank's part; only `like_param` communicates.

A ``DTensor`` is recognised by its attributes, so that other programs do not import
``torch.distributed.tensor``.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch

PLAIN_TENSORS = (torch.nn.Parameter, torch.Tensor)
"""Classes whose tensors are certainly not distributed and have memory of their own."""


def is_distributed(tensor: Any) -> bool:
    """True if a tensor is a ``DTensor``."""
    return type(tensor) not in PLAIN_TENSORS and hasattr(tensor, "_local_tensor") and hasattr(tensor, "_spec")


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor behind a ``DTensor``, not a view of it; any other tensor itself."""
    if not is_distributed(tensor):
        return tensor
    local: torch.Tensor = tensor._local_tensor  # type: ignore[attr-defined]
    # The result of a collective that is still running, as tensor parallelism makes them, has no
    # meaningful data_ptr().
    return local.wait() if type(local).__name__ == "AsyncCollectiveTensor" else local  # type: ignore[attr-defined]


def locals_of(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """`local_of` of each."""
    return [local_of(tensor) for tensor in tensors]


def same_sharding(one: Any, other: Any) -> bool:
    """True if two ``DTensor`` of one global shape have the same elements on every rank."""
    return bool(one._spec.placements == other._spec.placements) and _same_mesh_and_shape(one, other)


def _same_mesh_and_shape(one: Any, other: Any) -> bool:
    a, b = one._spec.mesh, other._spec.mesh
    return (a is b or bool(a == b)) and one.shape == other.shape


def like_param(param: Any, grad: Any) -> Any:
    """A gradient in the placements of its parameter.

    Tensor parallelism leaves gradients of sharded parameters replicated, and those of replicated
    ones as partial sums. As in the ``DTensor`` operations of torch's optimizers, such a gradient is
    redistributed; all ranks of the mesh have to take part. Anything that is not a ``DTensor`` over
    the mesh of a ``DTensor`` parameter is returned as it is.
    """
    if not (is_distributed(param) and is_distributed(grad)):
        return grad
    placements = param._spec.placements
    if grad._spec.placements == placements or not _same_mesh_and_shape(param, grad):
        return grad
    return grad.redistribute(placements=placements)


def sharding_of(tensor: Any) -> str:
    """Global shape, placements and mesh in words."""
    return f"shape {tuple(tensor.shape)}, placements {tuple(tensor._spec.placements)} on {tensor._spec.mesh}"


def has_partial(tensor: Any) -> bool:
    """True if a ``DTensor``'s elements are still to be reduced over ranks."""
    return any(placement.is_partial() for placement in tensor._spec.placements)


def is_replicated(tensor: Any) -> bool:
    """True if several ranks of a ``DTensor``'s mesh hold the same elements."""
    if not is_distributed(tensor):
        return False
    spec = tensor._spec
    return any(placement.is_replicate() and spec.mesh.size(dim) > 1 for dim, placement in enumerate(spec.placements))


def is_offloaded_by_fsdp(param: Any) -> bool:
    """True if a parameter sharded over GPUs is in host memory (FSDP's ``CPUOffloadPolicy``)."""
    return is_distributed(param) and param._spec.mesh.device_type != "cpu" and local_of(param).device.type == "cpu"


def local_value(param: torch.Tensor, key: str, value: Any) -> Any:
    """This rank's part of a state value.

    Args:
        param: parameter that the value belongs to.
        key: state key.
        value: a ``DTensor`` sharded like the parameter; anything else is returned as it is.

    Raises:
        TypeError: for a distributed value of a parameter that is not distributed.
        ValueError: for another sharding.
    """
    if not is_distributed(value):
        return value
    if not is_distributed(param):
        raise TypeError(f"{key} is a DTensor, but its parameter is not; pass the plain tensor (DTensor.full_tensor())")
    if not same_sharding(value, param):
        raise ValueError(
            f"{key} should be sharded like its parameter ({sharding_of(param)}), but got {sharding_of(value)}. Load "
            "through torch.distributed.checkpoint, which reshards."
        )
    return local_of(value)


def distributed_like(param: Any, local: torch.Tensor) -> torch.Tensor:
    """``local`` itself as this rank's part of a tensor sharded like ``param``.

    ``DTensor.from_local`` would move a tensor in host memory to the device of the mesh, hence the
    plain constructor.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import TensorMeta

    spec = copy.copy(param._spec)
    spec.tensor_meta = TensorMeta(param.shape, param.stride(), local.dtype)
    with torch.inference_mode(False):
        # Given a view, the constructor notes its storage offset, which makes data_ptr() of the
        # whole something else than 0. Writers that copy state before they save it in the background
        # then look for memory there.
        whole: Any = DTensor(local.new_empty(0), spec, requires_grad=False)
    whole._local_tensor = local
    result: torch.Tensor = whole
    return result
