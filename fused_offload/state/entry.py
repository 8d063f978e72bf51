"""Entries of ``optimizer.state``: a parameter's state as callers read and write it.

The tensors in an entry are views of the storage. Writing a tensor into an entry copies it there.
Tensors of callers are never kept, so state stays in its place.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from fused_offload.kernels.formats import Format
from fused_offload.params.dtensors import (
    distributed_like,
    is_distributed,
    local_of,
    local_value,
    same_sharding,
    sharding_of,
)
from fused_offload.rules.arguments import checked_step
from fused_offload.rules.base import MASTER_PARAM

from .convert import check_storable, check_value, stand_in, unscaled, write_elements, write_unscaled
from .param_state import ParamState, StateHooks
from .storage import Extent


class StateEntry(dict[str, torch.Tensor]):
    """State of one parameter: the rule's keys and, where the optimizer keeps one, ``master_param``.

    Empty until the first step, a load or `OffloadOptimizer.initialize_state`. Values are views of
    the storage, shaped and strided like the parameter, in their stored dtype. Reading one waits for
    the last step's write-back. For a distributed parameter, values are tensors distributed like it.

    Attributes:
        storage: stored state. The entry itself, as a dict, contains the views in ``storage.views``.
    """

    def __init__(self, hooks: StateHooks, param: torch.Tensor) -> None:
        """An entry without storage."""
        super().__init__()
        self._hooks = hooks
        self.storage = ParamState(hooks, param)
        self._distributed: dict[str, Any] = {}
        self._reshaped: dict[str, torch.Tensor] = {}

    # -- storage -----------------------------------------------------------------------------------

    @property
    def param(self) -> torch.Tensor:
        """Parameter that the entry belongs to."""
        return self.storage.param

    def bind(self, extent: Extent | None, start: int, formats: dict[str, Format]) -> None:
        """Gives the entry its storage; see `ParamState.bind`."""
        self._distributed.clear()
        self._reshaped.clear()
        self.storage.bind(extent, start, formats)
        self._hold_views()

    def _hold_views(self) -> None:
        super().update(self.storage.views)

    def peek(self, key: str) -> torch.Tensor:
        """The view of one key, without waiting; changes no value."""
        self._hooks.lent = True
        return self.storage.views[key]

    def outside(self, key: str, values: torch.Tensor) -> torch.Tensor:
        """Values of one key as callers see them.

        Args:
            key: state key.
            values: shaped like this rank's part of the parameter. The live view always gives the
                same object.
        """
        param = self.param
        if not is_distributed(param):
            return values
        if values is not self.storage.views[key]:
            return distributed_like(param, values)
        known = self._distributed.get(key)
        if known is None or known._local_tensor is not values or not same_sharding(known, param):
            known = self._distributed[key] = distributed_like(param, values)
        result: torch.Tensor = known
        return result

    def rehome(self) -> None:
        """Copies values back into the storage if their view was moved (``tensor.data = ...``)."""
        if self.storage.extent is None:
            return
        for key, view in list(self.storage.views.items()):
            distributed = self._distributed.get(key)
            if distributed is not None and distributed._local_tensor is not view:
                self[key] = distributed._local_tensor
                distributed._local_tensor = view
            if self.storage.is_home(key):
                continue
            check_value(self.storage, key, view, raw=True)
            self.storage.renew_view(key)
            self._hold_views()
            self[key] = view
        self.storage.follow_param()
        self._hold_views()

    def wait_and_rehome(self) -> None:
        """Waits until the storage is complete, and copies moved values back into it."""
        self._hooks.wait()
        self.rehome()

    def belongs_to(self, hooks: StateHooks) -> bool:
        """True if this is an entry of the optimizer with these hooks."""
        return self._hooks is hooks

    def reset(self) -> None:
        """Takes the rule's state back to zero; the master stays."""
        self._reshaped.clear()
        self.storage.reset()

    def get_unscaled(self, key: str) -> torch.Tensor:
        """Values of one key, shaped like the parameter.

        Returns:
            The live view for float32 and 16-bit remainders; a new, exact float32 tensor for
            narrower formats.
        """
        values = unscaled(self.storage, key)
        if values is self.peek(key):
            self.note_read(key)
        return self.outside(key, values)

    def set_unscaled(self, key: str, value: torch.Tensor) -> None:
        """Writes float values (int16 for remainders) in their format, and makes them authoritative.

        Raises:
            KeyError: for a key that this optimizer does not keep.
            TypeError: for a value that cannot be stored.
            ValueError: for a wrong shape or sharding.
        """
        value = local_value(self.param, key, value)
        check_value(self.storage, key, value)
        write_unscaled(self.storage, key, value)
        self._reshaped.pop(key, None)
        self.storage.mark_set(key)

    # -- reading: the caller may read a tensor at once, and write into it --------------------------

    def _hand_out(self, *keys: str) -> None:
        if not self.storage.bound:
            return
        self._hooks.wait()
        self._hooks.lent = True
        if MASTER_PARAM in keys:
            self.storage.fill_master()
        for key in keys:
            self.storage.mark_set(key)

    def note_read(self, key: str) -> None:
        """Makes the values of a live view authoritative when it is handed out, except a master's.

        Callers may write to the view. Checkpoint code reads a master as a template, and then writes
        it through `set_unscaled`.
        """
        if key != MASTER_PARAM:
            self.storage.mark_set(key)

    def __getitem__(self, key: str) -> torch.Tensor:
        """The view of one key, with complete values."""
        if key in self._reshaped:
            return self._reshaped[key]
        if key in self:
            self._hand_out(key)
        return self.outside(key, super().__getitem__(key))

    def get(self, key: str, default: Any = None) -> Any:
        """The view of one key, with complete values, or ``default``."""
        return self[key] if key in self else default

    def items(self) -> Any:
        """Keys and views, with complete values."""
        self._hand_out(*self)
        return self._all_outside().items() if self._reshaped or is_distributed(self.param) else super().items()

    def values(self) -> Any:
        """Views with complete values."""
        self._hand_out(*self)
        return self._all_outside().values() if self._reshaped or is_distributed(self.param) else super().values()

    def _all_outside(self) -> dict[str, torch.Tensor]:
        return {key: self.outside(key, self.peek(key)) for key in self} | self._reshaped

    def __iter__(self) -> Iterator[str]:
        """Keys. Defined so that ``dict(entry)`` and ``{**entry}`` read through `__getitem__`."""
        return super().__iter__()

    def copy(self) -> dict[str, torch.Tensor]:
        """A plain dict of the views."""
        return dict(self.items())

    def __copy__(self) -> dict[str, torch.Tensor]:
        """A plain dict of the views."""
        return self.copy()

    def __or__(self, other: Any) -> dict[str, Any]:  # type: ignore[override]
        """A plain dict of the views and of the items of ``other``."""
        return {**self, **other}

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, torch.Tensor]:
        """A plain dict of copies; torch would copy the whole storage of each view."""
        self._hand_out(*self)
        copies = {}
        for key in self:
            view = self.peek(key)
            if id(view) not in memo:
                memo[id(view)] = self.outside(key, view.detach().clone())
            copies[key] = memo[id(view)]
        return copies | copy.deepcopy(self._reshaped, memo)

    def __reduce__(self) -> Any:
        """Pickles as a plain dict of copies, as `__deepcopy__` does."""
        return dict, (list(copy.deepcopy(self).items()),)

    # -- writing: values are copied into the storage -----------------------------------------------

    def __setitem__(self, key: str, value: Any) -> None:
        """Copies a tensor into the storage.

        Args:
            key: a state key, or ``"step"``, which is written to the parameter's group.
            value: a tensor shaped like the parameter, of any dtype that the format can take, on any
                device; for a distributed parameter a tensor sharded like it, or this rank's part;
                for ``"step"`` a whole number from 0 to 2^31. A tensor of another shape waits for a
                parameter of that shape: one that gets the entry, or this one after a change.

        Raises:
            KeyError: for a key that this optimizer does not keep.
            TypeError: for a value that cannot be stored.
            ValueError: for a wrong shape, for 8-bit elements that were read earlier, or for a wrong
                step.
        """
        if key == "step":
            step = checked_step(value)
            self._hooks.wait()  # so that later news of skips does not lower the new count
            self._hooks.write_step(self.param, step)
            return
        had_values = self.storage.bound
        if not had_values:
            self._hooks.initialize(self.param)
        value = local_value(self.param, key, value)
        if had_values and self._has_other_shape(key, value):
            self._reshaped[key] = value.detach().clone()
            self._hooks.version += 1  # makes the next step check the entry
            return
        check_value(self.storage, key, value, raw=True)
        self._hooks.wait()
        write_elements(self.storage, key, value)
        self._reshaped.pop(key, None)
        self.storage.mark_set(key)

    # -- values of another shape: parameters that are pruned or grown together with their state ----

    @property
    def is_reshaped(self) -> bool:
        """True if a value of another shape waits for its parameter."""
        return bool(self._reshaped)

    def _has_other_shape(self, key: str, value: Any) -> bool:
        """True if a value fits the key except for its shape."""
        if key not in self or self.storage.extent is None or is_distributed(self.param):
            return False
        if not isinstance(value, torch.Tensor) or value.shape == self.storage.shape:
            return False
        format = self.storage.formats[key]
        if format.scaled and value.dtype == format.dtype:
            raise ValueError(
                f"{key} is kept as {value.dtype} elements, which have a meaning only with their scales. Read and write "
                "float32 values: get_unscaled_state(param, key)."
            )
        check_storable(key, format, value, nonnegative=key in self._hooks.nonnegative)
        return True

    def take_reshaped(self) -> str | None:
        """Gives the parameter storage of its new shape, with the values that wait for it.

        Returns:
            None, or the reason why the values do not fit the parameter.
        """
        if not self._reshaped:
            return None
        shape, values = local_of(self.param).shape, dict(self._reshaped)
        for key in dict.fromkeys((*self.storage.rule_keys(), *values)):
            found = values[key].shape if key in values else self.storage.shape
            if found != shape:
                return (
                    f"{key} of a parameter has shape {tuple(found)}, but the parameter has {tuple(shape)}. Give the "
                    "entry to the parameter that it fits (optimizer.state[new] = entry), or write values of this shape."
                )
        super().clear()
        self.storage.unbind()
        self._hooks.initialize(self.param)
        self.update(values)
        return None

    def take_values(self, other: StateEntry) -> None:
        """Copies the authoritative values of an entry of another layout or another optimizer.

        Nothing is changed if it raises.

        Raises:
            KeyError: for a key that this optimizer does not keep.
            TypeError: for values that cannot be stored.
            ValueError: for a wrong shape or sharding.
        """
        other.wait_and_rehome()
        if is_distributed(self.param) and is_distributed(other.param) and not same_sharding(self.param, other.param):
            raise ValueError(
                f"State of a parameter with {sharding_of(other.param)} does not fit one with "
                f"{sharding_of(self.param)}. Shard both alike, or save a state dict and load it."
            )
        keys = [key for key in other if other.storage.is_set(key) or key in other._reshaped]
        if other._reshaped and MASTER_PARAM not in other._reshaped:
            keys = [key for key in keys if key != MASTER_PARAM]  # it has the old parameter's shape
        if keys and not self.storage.bound:
            self._hooks.initialize(self.param)
        for key in keys:
            value = other._reshaped[key] if key in other._reshaped else stand_in(other.storage, key)
            check_value(self.storage, key, value)
        self._hooks.wait()
        self.reset()
        self.storage.unset_master()
        for key in keys:
            self.set_unscaled(
                key, other._reshaped[key] if key in other._reshaped else local_of(other.get_unscaled(key))
            )

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Writes several keys."""
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def replace(self, values: Mapping[str, Any]) -> None:
        """Writes several keys, and resets the others."""
        self.update(values)
        for key in self.keys() - values.keys():
            if key == MASTER_PARAM:
                self.storage.unset_master()
            elif self.storage.extent is not None:
                self.storage.stored(key).data.zero_()

    def __ior__(self, other: Any) -> StateEntry:  # type: ignore[override]
        """Writes several keys."""
        self.update(other)
        return self

    def setdefault(self, key: str, default: Any = None) -> Any:
        """The view of one key; writes ``default`` first if there is none."""
        if key not in self:
            self[key] = default
        return self[key]

    def _refuse_removal(self, *_: Any) -> Any:
        raise TypeError(
            "State keys cannot be removed one by one: storage and values belong together. "
            "Remove the parameter's entry (optimizer.state.pop(param)) to start over."
        )

    __delitem__ = pop = popitem = clear = _refuse_removal
