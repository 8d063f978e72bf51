"""Tracks parameters and their gradients from step to step."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from .dense import FLOAT_DTYPES, addresses_of, dense_copy, is_dense, like_memory_of, same_order, span_bytes
from .dtensors import is_distributed, locals_of
from .quantised import is_quantised
from .tensor_guards import Metadata, TensorGuards, metadata_of, same_objects
from .validation import ParamSpans, check_grad, check_params, local_grad


class Updates(NamedTuple):
    """Parameters with gradients, in group order; parameters without elements are left out.

    Attributes:
        params: parameters; of distributed ones this rank's part, of those with gaps in their memory
            a dense copy.
        grads: their gradients, in the parameters' memory order.
        groups: index of each parameter's group.
        present_groups: the same, each group once.
        positions: place of each parameter in `ParamTracker.params`.
        grad_dtypes: dtype of each gradient.
        param_addresses: ``[len(params)]`` int64, bytes.
        grad_addresses: ``[len(params)]`` int64, bytes.
        numels: ``[len(params)]`` int64.
        version: equal for two steps with the same signature and the same addresses.
        signature: equal for two steps that update the same parameters with gradients of the same
            dtypes.
        copied: parameters with gaps, and the copies in ``params`` that are to be written back into
            them.
    """

    params: list[torch.Tensor]
    grads: list[torch.Tensor]
    groups: list[int]
    present_groups: list[int]
    positions: list[int]
    grad_dtypes: list[torch.dtype]
    param_addresses: np.ndarray
    grad_addresses: np.ndarray
    numels: np.ndarray
    version: int
    signature: Hashable
    copied: list[tuple[torch.Tensor, torch.Tensor]]

    def write_copies_back(self) -> None:
        """Enqueues the write-back of parameters that were stepped in a copy."""
        for param, copy in self.copied:
            param.copy_(copy)


class _Seen(NamedTuple):
    """Parameters and gradients of an earlier step or part, to compare a later one with.

    Attributes:
        present: place of each parameter with a gradient.
        filled: those of them that have elements, by their index in ``present``.
        guards: metadata of the present parameters, then of their gradients.
        param_addresses: address of each present parameter, as the bytes of an int64 array.
        spans: memory of the parameters that have elements.
        updates: the result, without the gradients, which the caller frees.
    """

    present: list[int]
    filled: np.ndarray
    guards: TensorGuards
    param_addresses: bytes
    spans: ParamSpans
    updates: Updates


class ParamTracker:
    """All parameters of the groups and their gradients, validated again only after a change.

    Between steps, callers replace parameters, swap their storage, edit groups and get new
    gradients. Every step compares what it updates with the last step in bulk, which is cheap, and
    every part with the last part of its number. Full validation runs only where they differ.

    Attributes:
        params: parameters in group order, as the groups hold them.
        tensors: the same, of distributed ones this rank's part.
        groups: index of each parameter's group.
        has_quantised: whether some of them are quantised.
        generation: counts changes of the parameters.
    """

    def __init__(self) -> None:
        """A tracker without parameters; the first `observe` takes them in."""
        self.generation = 0
        self.params: list[torch.Tensor] = []
        self.tensors: list[torch.Tensor] = []
        self.groups: list[int] = []
        self.has_quantised = False
        self._lengths: list[int] = []
        self._some_distributed = False
        self._with_gaps: set[int] = set()
        self._param_guards = TensorGuards(())
        self._addresses = addresses_of([])
        self._numels = self._span_bytes = np.empty(0, np.int64)
        self._metadata: list[Metadata] = []
        # Of each parameter's last gradient that was read where it was.
        self._good_metadata: list[Metadata] = []
        self._places: list[int] = []
        self._place_of: dict[int, int] = {}
        self._seen: dict[int | None, _Seen] = {}  # by part; of whole steps and last parts under None
        self._version = 0

    def observe(
        self,
        param_groups: Sequence[dict[str, Any]],
        decoupled: bool,
        given: Mapping[int, torch.Tensor] | None = None,
        part: int | None = None,
    ) -> Updates:
        """Takes in groups and gradients as they are now, and validates what changed.

        Args:
            param_groups: the optimizer's groups.
            decoupled: read ``decoupled_grad`` instead of ``grad``.
            given: gradients by the ``id`` of their parameter, to be taken instead of those on the
                parameters.
            part: number of the part that the given gradients are.

        Returns:
            Parameters with gradients.

        Raises:
            TypeError: for values that cannot be parameters or gradients.
            RuntimeError: for tensors that cannot be updated, do not fit together or overlap.
        """
        params = [param for group in param_groups for param in group["params"]]
        lengths = [len(group["params"]) for group in param_groups]
        if not (lengths == self._lengths and same_objects(params, self.params)):
            self._take_in(param_groups, params, lengths)
        places = self._places
        grads: list[Any]
        if given is not None:
            places = sorted([self._place_of[key] for key in given if key in self._place_of])
            if len(self._place_of) < len(params):  # edited groups that have a parameter twice
                places = [place for place, param in enumerate(params) if id(param) in given]
            grads = [given[id(self.params[place])] for place in places]
        elif decoupled:
            grads = [getattr(param, "decoupled_grad", None) for param in params]
        else:
            # As .grad, without its warning for views of a flat buffer.
            grads = [param._grad for param in params]
        if self._some_distributed:
            grads = [
                local_grad(self.params[place], grad, self.groups[place])
                for place, grad in zip(places, grads, strict=True)
            ]
        updates = self._as_seen(part, places, grads)
        if updates is None:
            tensors = locals_of(params) if self._some_distributed else params
            if not (self._param_guards.match(tensors) and np.array_equal(self._addresses, addresses_of(tensors))):
                self._take_in(param_groups, params, lengths)
            updates = self._checked(part, places, grads)
        return updates

    def _as_seen(self, part: int | None, places: list[int], grads: list[Any]) -> Updates | None:
        """The updates, if they differ in nothing but addresses of gradients from earlier ones."""
        seen = self._seen.get(part)
        if seen is None:
            return None
        if len(places) > len(seen.present):
            places = [place for place, grad in zip(places, grads, strict=True) if grad is not None]
            grads = [grad for grad in grads if grad is not None]
        if places != seen.present:
            return None
        params = self.params if len(places) == len(self.params) else [self.params[place] for place in places]
        tensors = [*(locals_of(params) if self._some_distributed else params), *grads]
        if not seen.guards.match(tensors):
            return None
        addresses = addresses_of(tensors)
        of_params, of_grads = addresses[: len(places)], addresses[len(places) :]
        if of_params.tobytes() != seen.param_addresses:
            return None
        if len(seen.filled) < len(places):
            of_grads, grads = of_grads[seen.filled], [grads[index] for index in seen.filled]
        updates = seen.updates
        if of_grads.tobytes() != updates.grad_addresses.tobytes():
            seen.spans.check_apart(of_grads)
            self._version += 1
            updates = updates._replace(grad_addresses=of_grads, version=self._version)
            self._seen[part] = seen._replace(updates=updates)
        return updates._replace(grads=grads)

    def _take_in(self, param_groups: Sequence[dict[str, Any]], params: list[torch.Tensor], lengths: list[int]) -> None:
        self._seen.clear()
        for index, group in enumerate(param_groups):
            check_params(group["params"], f"parameter group {index}")
        self.params, self._lengths = params, lengths
        self._some_distributed = any(map(is_distributed, params))
        self.tensors = tensors = locals_of(params) if self._some_distributed else params
        self.groups = [index for index, length in enumerate(lengths) for _ in range(length)]
        self.has_quantised = any(map(is_quantised, tensors))
        self._with_gaps = {position for position, tensor in enumerate(tensors) if not is_dense(tensor)}
        self._metadata = list(map(metadata_of, tensors))
        self._param_guards, self._addresses = TensorGuards(self._metadata), addresses_of(tensors)
        self._numels = np.fromiter(map(torch.Tensor.numel, tensors), np.int64, len(tensors))
        self._span_bytes = self._numels * _itemsizes([tensor.dtype for tensor in tensors])
        for position, param in enumerate(tensors if self.has_quantised else ()):
            if is_quantised(param):
                self._span_bytes[position] = 0
        for position in self._with_gaps:
            self._span_bytes[position] = span_bytes(tensors[position])
        self._good_metadata = [()] * len(tensors)
        self._places = list(range(len(params)))
        self._place_of = {id(param): place for place, param in enumerate(params)}
        self.generation += 1

    def _checked(self, part: int | None, places: list[int], grads: list[Any]) -> Updates:
        """Updates that were not seen before, after their validation."""
        self._seen.pop(part, None)
        found = {place: grad for place, grad in zip(places, grads, strict=True) if grad is not None}
        present = list(found)
        without_gaps = {index: dense_copy(self.tensors[index]) for index in present if index in self._with_gaps}
        copied = bool(without_gaps)
        for index in present:
            grad = found[index]
            kind = metadata_of(grad)
            if kind != self._good_metadata[index]:
                param = self.tensors[index]
                check_grad(param, grad, self.groups[index])
                found[index] = ordered = _in_memory_order(without_gaps.get(index, param), grad)
                if ordered is grad:
                    self._good_metadata[index] = kind
                else:
                    copied = True
        positions = [index for index in present if self._numels[index]] if not self._numels.all() else present
        there = np.array(positions, np.int64)
        grads = [found[index] for index in positions]
        params = [self.tensors[index] for index in positions]
        if without_gaps:
            params = [without_gaps.get(index, param) for index, param in zip(positions, params, strict=True)]
        dtypes = [grad.dtype for grad in grads]
        groups = [self.groups[index] for index in positions]
        self._version += 1
        updates = Updates(
            params=params,
            grads=grads,
            groups=groups,
            present_groups=list(dict.fromkeys(groups)),
            positions=positions,
            grad_dtypes=dtypes,
            param_addresses=addresses_of(params) if without_gaps else self._addresses[there],
            grad_addresses=addresses_of(grads),
            numels=self._numels[there],
            version=self._version,
            # Bytes know their hash, and a plan's key is looked at in every step.
            signature=(self.generation, there.tobytes(), bytes(map(FLOAT_DTYPES.index, dtypes))),
            copied=[(self.tensors[index], copy) for index, copy in without_gaps.items()],
        )
        spans = ParamSpans(self._addresses[there], self._span_bytes[there], self._numels[there] * _itemsizes(dtypes))
        spans.check_apart(updates.grad_addresses)
        if not copied:  # copies have to be made again at every step
            metadata = [table[index] for table in (self._metadata, self._good_metadata) for index in present]
            self._seen[part] = _Seen(
                present,
                np.flatnonzero(self._numels[present]),
                TensorGuards(metadata),
                self._addresses[present].tobytes(),
                spans,
                updates._replace(grads=[]),
            )
        return updates


def _in_memory_order(param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    if same_order(param.shape, param.stride(), grad.stride()) and not grad.is_neg():
        return grad
    return like_memory_of(grad.resolve_neg(), param)


def _itemsizes(dtypes: list[torch.dtype]) -> np.ndarray:
    return np.fromiter(map(_ITEMSIZE, dtypes), np.int64, len(dtypes))


_ITEMSIZE = operator.attrgetter("itemsize")
