"""Stored state of one parameter: place in an extent, views, initial keys."""

from __future__ import annotations

from collections.abc import Callable, Set

import torch

from fused_offload.kernels.formats import Format, Stored, decode, encode_
from fused_offload.params.dense import dense_strides, flat, like_memory_of, overlaps, same_order
from fused_offload.params.dtensors import local_of
from fused_offload.params.quantised import plain_values
from fused_offload.rules.base import MASTER_PARAM

from .storage import Extent, write_values


class StateHooks:
    """Callbacks into the optimizer that owns the entries, and notes of the entries for it.

    Attributes:
        wait: waits until the host copy of the state is complete, and no work in flight writes it.
        write_step: ``(param, step)``, writes a caller's step count to the parameter's group.
        initialize: ``(param,)``, gives an entry its storage.
        forget: waits, then drops references to the storage of entries that are about to be removed.
        nonnegative: keys of averages of squares, which callers must not set to negative values.
        version: number that grows when a parameter gets other storage, or when values become
            initial again.
        lent: True once a view was handed out, so that callers may move views.
    """

    def __init__(
        self,
        wait: Callable[[], None],
        write_step: Callable[[torch.Tensor, int], None],
        initialize: Callable[[torch.Tensor], None],
        forget: Callable[[], None],
        nonnegative: Set[str] = frozenset(),
    ) -> None:
        """Stores the callbacks."""
        self.wait = wait
        self.write_step = write_step
        self.initialize = initialize
        self.forget = forget
        self.nonnegative = nonnegative
        self.version = 0
        self.lent = False


class ParamState:
    """Stored state of one parameter, or of this rank's part of a distributed parameter.

    Attributes:
        hooks: callbacks into the optimizer.
        param: parameter that the state belongs to.
        extent: storage, or None before there is any, and for parameters without elements.
        start: first element in the extent.
        bound: True once the parameter has its storage.
        shape: the parameter's shape when it got its storage.
        strides: strides of the values: the parameter's at that time, but without gaps.
        formats: stored format of each key, once there is storage.
        views: stored elements of each key, shaped like the parameter, in their stored dtype.
        initial: keys whose stored values are not authoritative: the next step takes zero instead,
            and for `MASTER_PARAM` the parameter. Contains all of the rule's keys or none.
    """

    def __init__(self, hooks: StateHooks, param: torch.Tensor) -> None:
        """A parameter without storage."""
        self.hooks = hooks
        self.param = param
        self.extent: Extent | None = None
        self.start = 0
        self.bound = False
        local = local_of(param)
        self.shape, self.strides = local.shape, dense_strides(local)
        self.formats: dict[str, Format] = {}
        self.views: dict[str, torch.Tensor] = {}
        self.initial: frozenset[str] = frozenset()

    # -- place -------------------------------------------------------------------------------------

    def bind(self, extent: Extent | None, start: int, formats: dict[str, Format]) -> None:
        """Takes elements of ``extent`` from ``start``; None for a parameter without elements."""
        self.extent, self.start, self.bound, self.formats = extent, start, True, formats
        local = local_of(self.param)
        self.shape, self.strides = local.shape, dense_strides(local)
        self._make_initial({*formats, MASTER_PARAM})
        self.views = {}
        for key, format in formats.items():
            # Without elements the view is on the CPU, too, like all others.
            empty = torch.empty(self.shape, dtype=format.dtype, device="cpu") if extent is None else None
            self.views[key] = self._view(key) if empty is None else empty

    def unbind(self) -> None:
        """Drops the storage."""
        self.extent, self.bound, self.views = None, False, {}

    def _view(self, key: str) -> torch.Tensor:
        assert self.extent is not None
        return self.shaped(self.extent.view(key, self.start, self.shape.numel()))

    def renew_view(self, key: str) -> torch.Tensor:
        """Replaces a view that no longer points into the storage; returns the old one."""
        old, self.views[key] = self.views[key], self._view(key)
        return old

    def is_home(self, key: str) -> bool:
        """True if a view still points into the storage; ``tensor.data = ...`` changes that."""
        return self.extent is None or self.views[key].data_ptr() == self.extent.address_of(key, self.start)

    def follow_param(self) -> None:
        """Reorders the values where ``model.to(memory_format=...)`` changed strides."""
        param = local_of(self.param)
        if param.shape != self.shape or overlaps(param):
            return
        strides = dense_strides(param)
        if same_order(param.shape, strides, self.strides):
            return
        self.hooks.wait()
        kept = {}
        for key in self.views:  # copies, in the stored dtype or, with scales, in float32
            stored = self.stored(key)
            kept[key] = self.shaped(decode(stored) if stored.format.scaled else stored.data.clone())
        self.strides = strides
        for key, values in kept.items():
            self.renew_view(key)
            stored, ordered = self.stored(key), self.ordered(values)
            if stored.format.scaled:
                encode_(stored, ordered)
            else:
                stored.data.copy_(ordered)

    # -- elements ----------------------------------------------------------------------------------

    def stored(self, key: str) -> Stored:
        """One key's elements in memory order. There is storage."""
        assert self.extent is not None
        return self.extent.narrow(key, self.start, self.shape.numel())

    def shaped(self, values: torch.Tensor) -> torch.Tensor:
        """View of ``[numel]`` values in storage order, shaped like the parameter."""
        return values.as_strided(self.shape, self.strides)

    def ordered(self, values: torch.Tensor) -> torch.Tensor:
        """``[numel]`` elements of a tensor shaped like the parameter, in storage order."""
        view = self._view(next(iter(self.views)))  # all keys have the same order
        return flat(like_memory_of(values.detach(), view))

    # -- authority ---------------------------------------------------------------------------------

    def is_set(self, key: str) -> bool:
        """True if one key's values are authoritative."""
        return self.bound and key not in self.initial

    def mark_set(self, key: str | None = None) -> None:
        """Makes values authoritative.

        Args:
            key: `MASTER_PARAM` for the master alone, one of the rule's keys for all of these, or
                None for all keys.
        """
        kept = frozenset() if key is None else {MASTER_PARAM} if key != MASTER_PARAM else self.rule_keys()
        self.initial &= kept

    def fill_master(self) -> None:
        """Writes the parameter into a master that is not authoritative, which it stays."""
        if MASTER_PARAM not in self.views or self.is_set(MASTER_PARAM) or self.extent is None:
            return
        local = local_of(self.param)
        if local.shape != self.shape:
            raise RuntimeError(
                f"A parameter has shape {tuple(local.shape)} now, but its state was made for {tuple(self.shape)}, "
                "and its master weights are still in the parameter. Bring the parameter back first."
            )
        stored = self.stored(MASTER_PARAM)
        if stored.format.needs_param:
            stored.data.zero_()
        else:
            write_values(stored, self.ordered(plain_values(local)))

    def reset(self) -> None:
        """Resets the rule's state to zero; the master stays."""
        keys = self.rule_keys()
        for key in keys - self.initial if self.extent is not None else ():
            self.stored(key).data.zero_()
        self._make_initial(self.initial | keys)

    def forget_initial_state(self) -> None:
        """Makes all keys initial again, after a first step that was skipped."""
        self._make_initial({*self.views, MASTER_PARAM})

    def unset_master(self) -> None:
        """Makes the next step start from the parameter again."""
        self._make_initial(self.initial | {MASTER_PARAM})

    def rule_keys(self) -> frozenset[str]:
        """Keys without the master."""
        return frozenset(self.views) - {MASTER_PARAM}

    def _make_initial(self, keys: Set[str]) -> None:
        self.initial = frozenset(keys)
        self.hooks.version += 1
