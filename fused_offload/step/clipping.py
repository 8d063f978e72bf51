"""Clipping by the global norm of gradients that may be in host memory, computed on the GPU."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._foreach_utils import (
    _device_has_foreach_support,
    _group_tensors_by_device_and_dtype,
    _has_foreach_support,
)

from fused_offload.params.dense import dense_strides
from fused_offload.params.dtensors import distributed_like, is_distributed, local_of


class HostGrad:
    """A gradient in host memory, and the device that steps its parameter.

    Attributes:
        grad: the gradient.
        device: the device.
    """

    def __init__(self, grad: torch.Tensor, device: torch.device) -> None:
        """Copies nothing yet."""
        self.grad = grad
        self.device = device

    @property
    def local(self) -> torch.Tensor:
        """This rank's part."""
        return local_of(self.grad)

    def on_device(self, memory: torch.Tensor, factors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Enqueues a copy to the device, multiplied by factors, distributed as the gradient.

        Args:
            memory: uint8 on the device, at least as many bytes as the local part.
            factors: one-element tensors on the device.
        """
        local = self.local
        flat = memory[: local.nbytes].view(local.dtype)
        copied = flat.as_strided(local.shape, dense_strides(local)).copy_(local, non_blocking=True)
        for factor in factors:
            copied.mul_(factor)
        return distributed_like(self.grad, copied) if is_distributed(self.grad) else copied


def _hosted(grads: Sequence[torch.Tensor | HostGrad]) -> list[torch.Tensor]:
    return [one.grad for one in grads if isinstance(one, HostGrad)]


def total_norm(
    grads: Sequence[torch.Tensor | HostGrad],
    factors: Sequence[torch.Tensor],
    norm_type: float,
    *,
    error_if_nonfinite: bool,
    foreach: bool | None,
) -> torch.Tensor:
    """The result of ``torch.nn.utils.get_total_norm`` for the same gradients on their devices.

    Gradients in host memory are copied to the device one after the other, into memory for the
    largest of them. So every norm is that of a whole tensor, by torch's own operation.

    Args:
        grads: at least one gradient.
        factors: one-element tensors that those in host memory are multiplied by first.
        norm_type: order of the norm.
        error_if_nonfinite: whether to read the norm and refuse NaN and infinities.
        foreach: as in torch.

    Raises:
        RuntimeError: for a norm that is not finite, if asked to.
    """
    hosted = [grad for grad in grads if isinstance(grad, HostGrad)]
    memory: dict[torch.device, torch.Tensor] = {}
    for device in dict.fromkeys(one.device for one in hosted):
        torch.cuda.synchronize(device)  # the gradients may still be under way to the host
        nbytes = max(one.local.nbytes for one in hosted if one.device == device)
        memory[device] = torch.empty(nbytes, dtype=torch.uint8, device=device)
    norms: list[torch.Tensor] = []
    for device, group in _as_torch_groups(grads):
        given = [one.grad if isinstance(one, HostGrad) else one for one in group]
        in_bulk = _has_foreach_support(given, device) if foreach is None else foreach
        if foreach and not _device_has_foreach_support(device):
            raise RuntimeError(f"foreach=True was passed, but {device.type} tensors have no such functions")
        for one in group:
            value = one.on_device(memory[device], factors) if isinstance(one, HostGrad) else one
            if in_bulk:
                norms += torch._foreach_norm([value], norm_type)
            else:
                norms.append(torch.linalg.vector_norm(value, norm_type))
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack([norm.to(grads[0].device) for norm in norms]), norm_type)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(
            f"The total norm of order {norm_type} of the gradients is {total.item()}, so they cannot be clipped. Leave "
            "error_if_nonfinite out to multiply them all the same."
        )
    return total


def _as_torch_groups(
    grads: Sequence[torch.Tensor | HostGrad],
) -> Iterator[tuple[torch.device, list[torch.Tensor | HostGrad]]]:
    """Gradients by device and dtype, in the order in which torch takes them where all are on their devices."""
    dtypes = [one.local.dtype if isinstance(one, HostGrad) else one.dtype for one in grads]
    stand_ins = [torch.empty(0, dtype=dtype, device=one.device) for one, dtype in zip(grads, dtypes, strict=True)]
    groups: Any = _group_tensors_by_device_and_dtype([stand_ins], with_indices=True)  # type: ignore[list-item]
    for (device, _), (_, indices) in groups.items():
        yield device, [grads[index] for index in indices]


def _nothing() -> None:
    """A reference to nothing."""


class _Known(NamedTuple):
    """A gradient as it was noted.

    Attributes:
        grad: returns the gradient, or None if it is gone.
        marks: its `_marks`.
    """

    grad: Callable[[], torch.Tensor | None] = _nothing
    marks: tuple[int, ...] = ()


def _marks(grad: torch.Tensor) -> tuple[int, ...]:
    """Numbers that change with a gradient: address, and version counters, of which a ``DTensor`` has its own."""
    local = local_of(grad)
    return grad._version, local._version, local.data_ptr()


class Clipping:
    """Clipping by norm of gradients that may be in host memory.

    Those on a device are multiplied at once. Those in host memory are multiplied when a step reads
    them, by the factors that are noted here together with the gradients that they are for.
    """

    def __init__(self) -> None:
        """Notes no factor yet."""
        self._factors: tuple[torch.Tensor, ...] = ()
        self._grads: dict[int, _Known] = {}
        self._awaited = False

    def clip(
        self,
        grads: Sequence[torch.Tensor | HostGrad],
        max_norm: float,
        norm_type: float,
        *,
        error_if_nonfinite: bool,
        foreach: bool | None,
    ) -> torch.Tensor:
        """Clips gradients as ``torch.nn.utils.clip_grad_norm_`` does; returns their norm.

        Args:
            grads: the gradients, as the parameters have them.
            max_norm: norm above which gradients are scaled down.
            norm_type: order of the norm.
            error_if_nonfinite: whether to read the norm and refuse NaN and infinities.
            foreach: as in torch.
        """
        if not grads:
            return torch.tensor(0.0, device="cpu")
        hosted = _hosted(grads)
        known = self._of(hosted)
        norm = total_norm(grads, known, norm_type, error_if_nonfinite=error_if_nonfinite, foreach=foreach)
        factor: Any = torch.clamp(float(max_norm) / (norm + 1e-6), max=1.0)
        for grad in grads:
            if isinstance(grad, torch.Tensor):
                grad.mul_(factor.to(grad.device))
        if hosted:
            self._factors = (*known, factor.full_tensor() if is_distributed(factor) else factor)
            self._grads = {id(grad): _Known(weakref.ref(grad), _marks(grad)) for grad in hosted}
            self._awaited = True
        return norm

    def of_step(self, grads: Callable[[], Sequence[torch.Tensor | HostGrad]]) -> tuple[torch.Tensor, ...]:
        """Factors that a step multiplies gradients in host memory by.

        Args:
            grads: returns all gradients; called only if factors are noted.

        Raises:
            RuntimeError: if some gradients in host memory are others than those that were noted, or
                were changed since; also if all are others, and no step has applied the factors.
        """
        if not self._factors:
            return ()
        given = _hosted(grads())
        factors = self._of(given)
        if self._awaited and given and not factors:
            raise RuntimeError(f"All gradients in host memory were replaced after clip_grad_norm_(), {_ADVICE}")
        return factors

    def note_step(self) -> None:
        """Notes that a step has applied or skipped the factors: gradients may be replaced from now on."""
        self._awaited = False

    def forget(self) -> None:
        """Drops all factors."""
        self._factors, self._grads, self._awaited = (), {}, False

    def _of(self, grads: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Factors of these gradients; none if all are others than those that were noted.

        Raises:
            RuntimeError: if some are others, or were changed since.
        """
        noted = [self._grads.get(id(grad), _Known()) for grad in grads]
        same = [known.grad() is grad for known, grad in zip(noted, grads, strict=True)]
        if not any(same):
            return ()
        if not all(same) or list(map(_marks, grads)) != [known.marks for known in noted]:
            raise RuntimeError(
                f"Some gradients in host memory were changed or replaced after clip_grad_norm_(), {_ADVICE}"
            )
        return self._factors


_ADVICE = (
    "whose factor step() multiplies them by. Call clip_grad_norm_() last, right before step(), and with a gradient "
    "scaler after scaler.unscale_(optimizer). Zero gradients with optimizer.zero_grad(), which forgets the factor; "
    "model.zero_grad() does not."
)
