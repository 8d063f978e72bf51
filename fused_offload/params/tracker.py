"""What one step updates: parameters with gradients, checked before anything is changed."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from .dense import (
    FLOAT_DTYPES,
    addresses_of,
    dense_copy,
    has_own_memory,
    is_dense,
    is_frozen,
    like_memory_of,
    overlaps,
    same_order,
    span_bytes,
)
from .dtensors import has_partial, is_distributed, like_param, local_of, locals_of, same_sharding, sharding_of
from .tensor_guards import Kind, KindWatch, kind_of, same_objects


class Updates(NamedTuple):
    """Parameters with gradients, in group order; parameters without elements are left out.

    Attributes:
        params: parameters; of distributed ones what this rank has, of those with gaps in their memory a copy without.
        grads: their gradients, in the parameters' memory order.
        groups: index of each parameter's group.
        positions: place of each parameter in `ParamWatch.params`.
        grad_dtypes: dtype of each gradient.
        param_addresses: ``[len(params)]`` int64, bytes.
        grad_addresses: ``[len(params)]`` int64, bytes.
        numels: ``[len(params)]`` int64.
        version: equal for two steps with the same signature and the same addresses.
        signature: equal for two steps that update the same parameters with gradients of the same dtypes.
        copied: parameters with gaps, and the copies in ``params`` that are to be written back into them.
    """

    params: list[torch.Tensor]
    grads: list[torch.Tensor]
    groups: list[int]
    positions: list[int]
    grad_dtypes: list[torch.dtype]
    param_addresses: np.ndarray
    grad_addresses: np.ndarray
    numels: np.ndarray
    version: int
    signature: Hashable
    copied: list[tuple[torch.Tensor, torch.Tensor]]

    def write_copies_back(self) -> None:
        """Enqueues the writes of what was updated in a copy, behind the step."""
        for param, copy in self.copied:
            param.copy_(copy)


class ParamWatch:
    """All parameters of the groups and their gradients, checked again only where something about them changed.

    Callers replace parameters, swap their storage, edit groups and get new gradients between steps, so every step asks
    whether all are what they were; the questions are cheap in bulk, the full checks are not.

    Attributes:
        params: parameters in group order, as the groups hold them.
        tensors: the same, of distributed ones what this rank has.
        groups: index of each parameter's group.
        devices: where the parameters are.
        generation: counts changes of the parameters.
    """

    def __init__(self) -> None:
        """Knows no parameters yet."""
        self.generation = 0
        self.params: list[torch.Tensor] = []
        self.tensors: list[torch.Tensor] = []
        self.groups: list[int] = []
        self.devices: set[torch.device] = set()
        self._lengths: list[int] = []
        self._some_distributed = False
        self._with_gaps: set[int] = set()
        self._kinds = KindWatch(())
        self._addresses = addresses_of([])
        self._numels = self._span_bytes = np.empty(0, np.int64)
        self._good_kinds: list[Kind] = []  # of each parameter's last gradient that could be read where it was
        self._present: list[int] = []
        self._grad_kinds = KindWatch(())
        self._spans: _ParamSpans | None = None
        self._last: Updates | None = None  # without its gradients, which the caller frees
        self._version = 0

    def observe(
        self,
        param_groups: Sequence[dict[str, Any]],
        decoupled: bool,
        given: Mapping[int, torch.Tensor] | None = None,
    ) -> Updates:
        """Takes in groups and gradients as they are now.

        Args:
            param_groups: the optimizer's groups.
            decoupled: read ``decoupled_grad`` instead of ``grad``.
            given: gradients by the ``id`` of their parameter, to be taken instead of those on the parameters.

        Returns:
            What has a gradient.

        Raises:
            TypeError: for what cannot be a parameter or a gradient.
            RuntimeError: for tensors that cannot be updated, do not fit together or overlap.
        """
        params = [param for group in param_groups for param in group["params"]]
        lengths = [len(group["params"]) for group in param_groups]
        tensors = locals_of(params) if self._some_distributed else params
        unchanged = (
            lengths == self._lengths
            and same_objects(params, self.params)
            and self._kinds.same_kind(tensors)
            and np.array_equal(self._addresses, addresses_of(tensors))
        )
        if not unchanged:
            self._take_in(param_groups, params, lengths)
        found: list[torch.Tensor | None]
        if given is not None:
            found = [given.get(id(param)) for param in params]
        elif decoupled:
            found = [getattr(param, "decoupled_grad", None) for param in params]
        else:
            found = [param._grad for param in params]  # as .grad, without its warning for views of a flat buffer
        if self._some_distributed:
            found = list(map(_local_grad, params, found, self.groups))
        return self._like_last(found) or self._checked(found)

    def _take_in(self, param_groups: Sequence[dict[str, Any]], params: list[torch.Tensor], lengths: list[int]) -> None:
        self._last = None
        for index, group in enumerate(param_groups):
            check_params(group["params"], f"parameter group {index}")
        self.params, self._lengths = params, lengths
        self._some_distributed = any(map(is_distributed, params))
        self.tensors = tensors = locals_of(params) if self._some_distributed else params
        self.groups = [index for index, length in enumerate(lengths) for _ in range(length)]
        self.devices = {tensor.device for tensor in tensors}
        self._with_gaps = {position for position, tensor in enumerate(tensors) if not is_dense(tensor)}
        self._kinds, self._addresses = KindWatch(list(map(kind_of, tensors))), addresses_of(tensors)
        self._numels = np.fromiter(map(torch.Tensor.numel, tensors), np.int64, len(tensors))
        self._span_bytes = self._numels * _itemsizes([tensor.dtype for tensor in tensors])
        for position in self._with_gaps:
            self._span_bytes[position] = span_bytes(tensors[position])
        self._good_kinds = [()] * len(tensors)
        self.generation += 1

    def _like_last(self, found: list[Any]) -> Updates | None:
        """The last updates with these gradients, if they are of the same kinds and for the same parameters."""
        last = self._last
        if last is None:
            return None
        if len(last.positions) < len(found):
            if [index for index, grad in enumerate(found) if grad is not None] != self._present:
                return None
            found = [found[position] for position in last.positions]
        if not self._grad_kinds.same_kind(found):
            return None
        addresses = addresses_of(found)
        if not np.array_equal(addresses, last.grad_addresses):
            assert self._spans is not None
            self._last = None  # unless the gradients pass
            self._spans.check_apart(addresses)
            self._version += 1
            self._last = last = last._replace(grad_addresses=addresses, version=self._version)
        return last._replace(grads=found)

    def _checked(self, found: list[Any]) -> Updates:
        """Updates of gradients that are not those of the last step, each checked unless it is of a good kind."""
        self._last = None
        present = [index for index, grad in enumerate(found) if grad is not None]
        without_gaps = {index: dense_copy(self.tensors[index]) for index in present if index in self._with_gaps}
        copied = bool(without_gaps)
        for index in present:
            grad = found[index]
            kind = kind_of(grad)
            if kind != self._good_kinds[index]:
                param = self.tensors[index]
                _check_grad(param, grad, self.groups[index])
                found[index] = ordered = _in_memory_order(without_gaps.get(index, param), grad)
                if ordered is grad:
                    self._good_kinds[index] = kind
                else:
                    copied = True
        positions = [index for index in present if self._numels[index]] if not self._numels.all() else present
        places = np.array(positions, np.int64)
        grads = [found[index] for index in positions]
        params = [self.tensors[index] for index in positions]
        if without_gaps:
            params = [without_gaps.get(index, param) for index, param in zip(positions, params, strict=True)]
        dtypes = [grad.dtype for grad in grads]
        self._version += 1
        updates = Updates(
            params=params,
            grads=grads,
            groups=[self.groups[index] for index in positions],
            positions=positions,
            grad_dtypes=dtypes,
            param_addresses=addresses_of(params) if without_gaps else self._addresses[places],
            grad_addresses=addresses_of(grads),
            numels=self._numels[places],
            version=self._version,
            # Bytes know their hash, and a plan's key is looked at in every step.
            signature=(self.generation, places.tobytes(), bytes(map(FLOAT_DTYPES.index, dtypes))),
            copied=[(self.tensors[index], copy) for index, copy in without_gaps.items()],
        )
        spans = _ParamSpans(
            self._addresses[places], self._span_bytes[places], self._numels[places] * _itemsizes(dtypes)
        )
        spans.check_apart(updates.grad_addresses)
        if not copied:  # what was copied has to be copied again at every step
            kinds = [self._good_kinds[index] for index in positions]
            self._present, self._grad_kinds, self._spans = present, KindWatch(kinds), spans
            self._last = updates._replace(grads=[])
        return updates


def _check_grad(param: torch.Tensor, grad: Any, group: int) -> None:
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
        raise RuntimeError("FusedOffloadAdam does not support sparse gradients; use dense embeddings (sparse=False)")
    if grad.dtype not in FLOAT_DTYPES:
        raise TypeError(
            f"FusedOffloadAdam takes float32, bfloat16 and float16 gradients, but parameter group {group} "
            f"has {grad.dtype}"
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


def _local_grad(param: torch.Tensor, grad: Any, group: int) -> Any:
    """This rank's part of a gradient, in the placements of its parameter.

    Whatever is no tensor is left to `_check_grad`.
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


class _ParamSpans:
    """The memory that a step's parameters take, which no two of them and no gradient may share.

    The result would depend on the order of the updates. Devices share one address space, so addresses of different
    devices cannot be confused.
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
        # last parameter to start before the gradient ends
        before = np.searchsorted(self._starts, grad_addresses + self._grad_bytes, side="left") - 1
        if ((before >= 0) & (self._ends[before] > grad_addresses)).any():
            raise RuntimeError(
                "A gradient shares memory with a parameter; gradients are only read, so give it its own."
            )


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
        params = locals_of(params)
    devices = {param.device for param in params}
    if len(devices) > 1:
        names = ", ".join(sorted(str(device) for device in devices))
        raise RuntimeError(f"All parameters of {where} should be on one device, but they are on {names}. Split it.")
    if any(device.type not in ("cpu", "cuda") for device in devices):
        raise RuntimeError(
            f"The parameters of {where} are on {devices.pop()}; FusedOffloadAdam updates parameters on CUDA devices "
            "and on the CPU. Materialise the model before building the optimizer."
        )
    for position, param in enumerate(params):
        if param.dtype not in FLOAT_DTYPES:
            advice = f". {_FROZEN}" if is_frozen(param) else ""
            raise TypeError(
                "FusedOffloadAdam updates float32, bfloat16 and float16 parameters, but parameter "
                f"{position} of {where} has {param.dtype}{_class_of(param)}{advice}"
            )
    for position, param in enumerate(params):
        if param.layout != torch.strided or not (param.is_contiguous() or not overlaps(param)):
            raise RuntimeError(
                f"Parameter {position} of {where} (shape {tuple(param.shape)}, strides "
                f"{param.stride() if param.layout == torch.strided else 'none'}) does not have a place in memory for "
                "each of its elements. Make it contiguous before building the optimizer."
            )


_PLAIN_TENSORS = (torch.nn.Parameter, torch.Tensor)
_FROZEN = "It is frozen, so leave it out: pass the parameters that require gradients."


def _class_of(param: torch.Tensor) -> str:
    return "" if type(param) in _PLAIN_TENSORS else f" ({type(param).__name__})"


def _check_subclasses(params: Sequence[torch.Tensor], where: str) -> None:
    for position, param in enumerate(params):
        if is_distributed(param) and has_partial(param):
            raise TypeError(
                f"Parameter {position} of {where} is a DTensor with partial values ({sharding_of(param)}), which no "
                "rank can update alone. Redistribute it to Shard or Replicate first."
            )
        local = local_of(param)
        if hasattr(local, "_local_tensor") or not has_own_memory(local):
            raise TypeError(
                f"Parameter {position} of {where} is a {type(local).__name__}, which FusedOffloadAdam cannot update: "
                f"its elements do not lie in one plain tensor. {_what_to_do(param, local)}"
            )


def _what_to_do(param: torch.Tensor, local: torch.Tensor) -> str:
    """Instead of handing over a parameter of a class that stands for other tensors."""
    if is_frozen(param):
        return _FROZEN
    if type(local).__module__.startswith("transformer_engine."):
        return (
            "Build the model outside of quantized_model_init (fp8_model_init): autocast computes with quantised copies "
            "of bfloat16 parameters all the same. Or pass float32 masters in its place, and quantize_ it from them "
            "after each step (docs/eight_bit.md)."
        )
    return "Pass plain tensors, and quantise what they hold after training, or from them after each step."


def _in_memory_order(param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    if same_order(param.shape, param.stride(), grad.stride()) and not grad.is_neg():
        return grad
    return like_memory_of(grad.resolve_neg(), param)


def _itemsizes(dtypes: list[torch.dtype]) -> np.ndarray:
    return np.fromiter(map(_ITEMSIZE, dtypes), np.int64, len(dtypes))


_ITEMSIZE = operator.attrgetter("itemsize")
