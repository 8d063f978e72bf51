"""The mapping behind ``optimizer.state``."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch

from fused_offload.params.dtensors import is_distributed, local_of, same_sharding
from fused_offload.params.quantised import is_quantised

from .entry import StateEntry
from .param_state import StateHooks


class StateMapping(defaultdict[torch.Tensor, StateEntry]):
    """``optimizer.state``: a `StateEntry` for each parameter.

    Reading a missing parameter adds an empty entry, as in torch. Moving an entry to another key
    (``state[new] = state.pop(old)``) moves its storage with it.
    """

    def __init__(self, hooks: StateHooks) -> None:
        """An empty mapping."""
        super().__init__()
        self._hooks = hooks

    def __missing__(self, param: torch.Tensor) -> StateEntry:
        """Adds an empty entry."""
        if not isinstance(param, torch.Tensor):
            raise TypeError(f"optimizer.state is kept by parameter, but got {param!r} as a key; pass the tensor itself")
        entry = StateEntry(self._hooks, param)
        super().__setitem__(param, entry)
        self._hooks.version += 1
        return entry

    def __setitem__(self, param: torch.Tensor, value: Any) -> None:
        """Moves an entry to this key, or copies the tensors of a plain dict into its storage.

        As in torch, the value replaces the present one: keys that a dict lacks are reset.
        """
        if isinstance(value, StateEntry) and value is super().get(param):
            return
        if isinstance(value, StateEntry) and self._fits(value, param):
            value.storage.param = param
            super().__setitem__(param, value)
            self._hooks.version += 1
            return
        if isinstance(value, StateEntry):
            self[param].take_values(value)
        elif not isinstance(value, Mapping):
            raise TypeError(f"State of a parameter should be a dict of tensors, but got {type(value).__name__}")
        elif value:
            self[param].replace(value)
        elif param in self:
            del self[param]

    def _fits(self, entry: StateEntry, param: torch.Tensor) -> bool:
        if not entry.belongs_to(self._hooks) or entry.is_reshaped:
            return False
        if entry.param is param:
            return True
        old = entry.param
        if super().get(old) is entry:  # two parameters cannot share an entry
            return False
        if not entry.storage.bound:
            return True
        if is_distributed(old) != is_distributed(param) or (is_distributed(old) and not same_sharding(old, param)):
            return False
        old, param = local_of(old), local_of(param)
        return (
            old.shape == param.shape
            and old.stride() == param.stride()
            and old.dtype == param.dtype
            and old.device == param.device
            and is_quantised(old) == is_quantised(param)
        )

    def __delitem__(self, param: torch.Tensor) -> None:
        """Drops an entry."""
        self._about_to_remove()
        super().__delitem__(param)

    def pop(self, param: torch.Tensor, *default: Any) -> Any:
        """Takes an entry out."""
        self._about_to_remove()
        return super().pop(param, *default)

    def popitem(self) -> tuple[torch.Tensor, StateEntry]:
        """Takes the last entry out."""
        self._about_to_remove()
        return super().popitem()

    def clear(self) -> None:
        """Drops all entries and their storage."""
        self._about_to_remove()
        super().clear()

    def _about_to_remove(self) -> None:
        self._hooks.version += 1
        self._hooks.forget()

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Sets several entries."""
        for param, value in dict(*args, **kwargs).items():
            self[param] = value

    def __ior__(self, other: Any) -> StateMapping:  # type: ignore[override]
        """Sets several entries."""
        self.update(other)
        return self

    def setdefault(self, param: torch.Tensor, default: Any = None) -> StateEntry:
        """The entry of a parameter; sets ``default`` first if there is none."""
        if param not in self and default is not None:
            self[param] = default
        return self[param]

    def copy(self) -> dict[torch.Tensor, StateEntry]:  # type: ignore[override]
        """A plain dict of the entries."""
        return dict(self)

    def __copy__(self) -> dict[torch.Tensor, StateEntry]:  # type: ignore[override]
        """A plain dict of the entries."""
        return dict(self)

    def __or__(self, other: Any) -> dict[torch.Tensor, Any]:  # type: ignore[override]
        """A plain dict of the entries and of the items of ``other``."""
        return {**self, **other}

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
        """A plain dict of copies."""
        return {copy.deepcopy(param, memo): copy.deepcopy(entry, memo) for param, entry in self.items()}

    def __reduce__(self) -> Any:
        """Pickles as a plain dict."""
        return dict, (list(self.items()),)
