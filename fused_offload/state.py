"""What a parameter's state looks like from outside: the mapping behind ``optimizer.state``, and values in and out.

The tensors in an entry are views of the canonical storage. Writing a tensor into an entry copies it there; nothing that
a caller keeps is ever adopted, so state stays where it is whatever is done to it.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .kernels.forms import Form, Stored, decode, encode_
from .storage import Extent
from .tensors import flat, like_memory_of, shaped

_VALUES_BLOCK = 4 * 2**20  # elements converted at a time: bounds the temporary memory of loads and saves


class StateHooks:
    """What the entries ask of the optimizer that owns them.

    Attributes:
        wait: waits until the host copy of the state is complete and nobody else writes it.
        write_step: ``(param, step)``, a caller's step count for the parameter's group.
        initialize: ``(param,)``, gives an entry its storage.
        version: counts changes of which storage and which initial values belong to which parameter.
    """

    def __init__(
        self,
        wait: Callable[[], None],
        write_step: Callable[[torch.Tensor, int], None],
        initialize: Callable[[torch.Tensor], None],
    ) -> None:
        """Keeps the callbacks."""
        self.wait = wait
        self.write_step = write_step
        self.initialize = initialize
        self.version = 0


class StateEntry(dict[str, torch.Tensor]):
    """State of one parameter: ``exp_avg``, ``exp_avg_sq`` and, where the optimizer keeps one, ``master_param``.

    Empty until the first step, a load or `FusedOffloadAdam.initialize_state`. Values are views of the storage, shaped
    and strided like the parameter, in their stored dtype. Handing one out waits for the last step's write-back.

    Attributes:
        param: parameter that the entry belongs to.
        extent: storage, or None without one (also for parameters without elements).
        start: first element in the extent.
        bound: whether the entry has its storage.
        moments_set: whether the moments may differ from zero.
        master_set: whether ``master_param`` is authoritative; if not, the next step takes the parameter instead.
    """

    def __init__(self, hooks: StateHooks, param: torch.Tensor) -> None:
        """An entry without storage."""
        super().__init__()
        self._hooks = hooks
        self.param = param
        self.extent: Extent | None = None
        self.start = 0
        self.bound = False
        self.moments_set = False
        self.master_set = False

    # -- storage -----------------------------------------------------------------------------------------------

    def bind(self, extent: Extent | None, start: int, forms: dict[str, Form]) -> None:
        """Gives the entry its storage: elements of ``extent`` from ``start``; None for an empty parameter."""
        self.extent, self.start, self.bound = extent, start, True
        self._hooks.version += 1
        for key, form in forms.items():
            super().__setitem__(key, self._view(key, form))

    def _view(self, key: str, form: Form) -> torch.Tensor:
        if self.extent is None:
            return torch.empty(self.param.shape, dtype=form.dtype, device=self.param.device)
        return shaped(self.stored(key).data, self.param)

    def stored(self, key: str) -> Stored:
        """One key's elements in memory order. The entry has storage and elements."""
        assert self.extent is not None
        return self.extent.narrow(key, self.start, self.param.numel())

    def form(self, key: str) -> Form:
        """Stored form of one key."""
        assert self.extent is not None
        return self.extent.layout.forms[key]

    def peek(self, key: str) -> torch.Tensor:
        """The view of one key, without waiting and without any effect."""
        return super().__getitem__(key)

    def peek_all(self) -> list[torch.Tensor]:
        """All views, without waiting and without any effect."""
        return [super(StateEntry, self).__getitem__(key) for key in self]

    def rehome(self) -> None:
        """Takes values back into storage whose view was pointed elsewhere (``tensor.data = ...``)."""
        if self.extent is None:
            return
        for key in self:
            view, home = self.peek(key), self._view(key, self.form(key))
            if view.device == home.device and view.data_ptr() == home.data_ptr():
                continue
            super().__setitem__(key, home)
            self[key] = view

    def fill_master(self) -> None:
        """Writes the parameter's value into a master that is not authoritative yet; it stays so."""
        if "master_param" not in self or self.master_set or self.extent is None:
            return
        stored = self.stored("master_param")
        if stored.form.name == "remainder":
            stored.data.zero_()
        else:
            write_values(stored, flat(self.param))

    def reset_moments(self) -> None:
        """Takes the moments back to zero."""
        if self.extent is not None and self.moments_set:
            self.stored("exp_avg").data.zero_()
            self.stored("exp_avg_sq").data.zero_()
        self.moments_set = False
        self._hooks.version += 1

    def forget_initial_state(self) -> None:
        """Makes the parameter the master again, after a first step that turned out skipped: moments are still zero."""
        self.moments_set = self.master_set = False
        self._hooks.version += 1

    # -- reading: whoever gets a tensor may read it at once and write into it -----------------------------------

    def _hand_out(self) -> None:
        if self.bound:
            self._hooks.wait()
            self.fill_master()
            self.mark_set()

    def __getitem__(self, key: str) -> torch.Tensor:
        """The view of one key, complete."""
        self._hand_out()
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """The view of one key, complete, or ``default``."""
        return self[key] if key in self else default

    def items(self) -> Any:
        """Keys and complete views."""
        self._hand_out()
        return super().items()

    def values(self) -> Any:
        """Complete views."""
        self._hand_out()
        return super().values()

    def __iter__(self) -> Iterator[str]:
        """Keys. Defined so that ``dict(entry)`` and ``{**entry}`` read through `__getitem__`."""
        return super().__iter__()

    def copy(self) -> dict[str, torch.Tensor]:
        """A plain dict of the views."""
        return dict(self.items())

    def __copy__(self) -> dict[str, torch.Tensor]:
        """A plain dict of the views."""
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, torch.Tensor]:
        """A plain dict of copies."""
        return {key: copy.deepcopy(view, memo) for key, view in self.items()}

    def __reduce__(self) -> Any:
        """Pickles as a plain dict."""
        return dict, (list(self.items()),)

    # -- writing: values are copied into the storage ------------------------------------------------------------

    def __setitem__(self, key: str, value: Any) -> None:
        """Copies a tensor into storage, in its stored dtype or, where that loses nothing else, from another one.

        Args:
            key: a state key, or ``"step"``, which goes to the parameter's group.
            value: a tensor shaped like the parameter, on any device; for ``"step"`` a number.

        Raises:
            KeyError: for a key that this optimizer does not keep.
            TypeError: for a value that cannot be stored.
            ValueError: for another shape.
        """
        if key == "step":
            self._hooks.write_step(self.param, int(value))
            return
        if not self.bound:
            self._hooks.initialize(self.param)
        if key not in self:
            raise KeyError(f"FusedOffloadAdam keeps {', '.join(self)} for this parameter; it cannot take {key!r}")
        check_value(self, key, value)
        self._hooks.wait()
        view = self.peek(key)
        if value is not view and not _same_memory(value, view):
            self._copy_in(key, value)
        self.mark_set(key)

    def mark_set(self, key: str | None = None) -> None:
        """Makes one key's values authoritative, or all."""
        moments_set = self.moments_set or key != "master_param"
        master_set = self.master_set or key in (None, "master_param")
        if (moments_set, master_set) != (self.moments_set, self.master_set):
            self.moments_set, self.master_set = moments_set, master_set
            self._hooks.version += 1

    def _copy_in(self, key: str, value: torch.Tensor) -> None:
        if self.extent is None:
            return
        form = self.form(key)
        if not form.scaled or value.dtype == form.dtype:
            self.peek(key).copy_(value.detach())  # raw: a scaled form's own elements go with the scales it has
        else:
            write_values(self.stored(key), flat(like_memory_of(value.detach(), self.param)))

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Writes several keys."""
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def __ior__(self, other: Any) -> StateEntry:  # type: ignore[override,misc]
        """Writes several keys."""
        self.update(other)
        return self

    def setdefault(self, key: str, default: Any = None) -> Any:
        """The view of one key; writes ``default`` first where there is none."""
        if key not in self:
            self[key] = default
        return self[key]

    def _refuse_removal(self, *_: Any) -> Any:
        raise TypeError(
            "State keys cannot be removed one by one: storage and values belong together. "
            "Remove the parameter's entry (optimizer.state.pop(param)) to start over."
        )

    __delitem__ = pop = popitem = clear = _refuse_removal  # type: ignore[assignment]


class StateMapping(defaultdict[torch.Tensor, StateEntry]):
    """``optimizer.state``: parameter -> `StateEntry`. A missing parameter gets an empty entry, as in torch.

    Moving an entry to another key (``state[new] = state.pop(old)``) moves everything that belongs to it.
    """

    def __init__(self, hooks: StateHooks) -> None:
        """An empty mapping."""
        super().__init__()
        self._hooks = hooks

    def __missing__(self, param: torch.Tensor) -> StateEntry:
        """An empty entry, kept."""
        entry = StateEntry(self._hooks, param)
        super().__setitem__(param, entry)
        self._hooks.version += 1
        return entry

    def __setitem__(self, param: torch.Tensor, value: Any) -> None:
        """Moves an entry here, or copies the tensors of a plain dict into this parameter's storage."""
        if isinstance(value, StateEntry) and self._fits(value, param):
            value.param = param
            super().__setitem__(param, value)
            self._hooks.version += 1
            return
        entry = self[param]
        if value is entry:
            return
        if isinstance(value, StateEntry):  # another shape or other forms: move the values
            for key in value:
                entry[key] = get_unscaled(value, key)
        else:
            entry.update(value)

    def _fits(self, entry: StateEntry, param: torch.Tensor) -> bool:
        if not entry.bound or entry.param is param:
            return True
        old = entry.param
        return (
            old.shape == param.shape
            and old.stride() == param.stride()
            and old.dtype == param.dtype
            and old.device == param.device
        )

    def __delitem__(self, param: torch.Tensor) -> None:
        """Drops an entry."""
        super().__delitem__(param)
        self._hooks.version += 1

    def pop(self, param: torch.Tensor, *default: Any) -> Any:
        """Takes an entry out."""
        self._hooks.version += 1
        return super().pop(param, *default)

    def popitem(self) -> tuple[torch.Tensor, StateEntry]:
        """Takes the last entry out."""
        self._hooks.version += 1
        return super().popitem()

    def clear(self) -> None:
        """Drops all entries."""
        self._hooks.version += 1
        super().clear()

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Sets several entries."""
        for param, value in dict(*args, **kwargs).items():
            self[param] = value

    def setdefault(self, param: torch.Tensor, default: Any = None) -> StateEntry:
        """The entry of a parameter; sets ``default`` first where there is none."""
        if param not in self and default is not None:
            self[param] = default
        return self[param]

    def __copy__(self) -> dict[torch.Tensor, StateEntry]:
        """A plain dict of the entries."""
        return dict(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
        """A plain dict of copies."""
        return {copy.deepcopy(param, memo): copy.deepcopy(entry, memo) for param, entry in self.items()}

    def __reduce__(self) -> Any:
        """Pickles as a plain dict."""
        return dict, (list(self.items()),)


def _same_memory(value: torch.Tensor, view: torch.Tensor) -> bool:
    return value.device == view.device and value.data_ptr() == view.data_ptr() and value.dtype == view.dtype


def check_value(entry: StateEntry, key: str, value: Any) -> None:
    """Raises if ``value`` cannot become ``entry[key]``; see `StateEntry.__setitem__`."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{key} should be a tensor, but got {type(value).__name__}")
    if value.shape != entry.param.shape:
        raise ValueError(f"{key} should have shape {tuple(entry.param.shape)}, but got {tuple(value.shape)}")
    check_stored_dtype(key, entry.peek(key).dtype, value)


def check_stored_dtype(key: str, kept: torch.dtype, value: torch.Tensor) -> None:
    """Raises if a value cannot be stored as ``kept`` without meaning something else."""
    if (kept == torch.int16) != (value.dtype == torch.int16):
        raise TypeError(
            f"{key} is kept as {kept}, but got {value.dtype}: a 16-bit remainder only means something beside the "
            "parameter it was split from. Use store_param_remainders as when it was written."
        )
    if kept != torch.int16 and not value.dtype.is_floating_point:
        raise TypeError(f"{key} should be a floating point tensor, but got {value.dtype}")


def write_values(stored: Stored, values: torch.Tensor) -> None:
    """Encodes ``[numel]`` values of any float dtype and device, a bounded block at a time."""
    device = stored.data.device
    for start in range(0, values.numel(), _VALUES_BLOCK):
        block = values[start : start + _VALUES_BLOCK].to(device, torch.float32)
        encode_(stored.narrow(start, block.numel()), block)


def get_unscaled(entry: StateEntry, key: str) -> torch.Tensor:
    """One key's values, shaped like the parameter.

    Returns:
        The live view for float32 and 16-bit remainders; for narrower forms a new float32 tensor, exact.
    """
    view = entry.peek(key)
    if view.dtype in (torch.float32, torch.int16):
        return view
    if entry.extent is None:
        return view.float()
    return shaped(decode(entry.stored(key)), entry.param)


def set_scaled(entry: StateEntry, key: str, value: torch.Tensor) -> None:
    """Writes float32 values (int16 for remainders) in their stored form; they become authoritative."""
    check_value(entry, key, value)
    view = entry.peek(key)
    if not _same_memory(value, view) and entry.extent is not None:
        if view.dtype == torch.int16:
            view.copy_(value)
        else:
            write_values(entry.stored(key), flat(like_memory_of(value.detach(), entry.param)))
    entry.mark_set(key)
