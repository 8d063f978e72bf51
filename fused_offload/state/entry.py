"""What a parameter's state looks like from outside: the entries of ``optimizer.state``, and values in and out.

The tensors in an entry are views of the canonical storage. Writing a tensor into an entry copies it there; nothing that
a caller keeps is ever adopted, so state stays where it is whatever is done to it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

import torch

from fused_offload.kernels.formats import Format, Stored, decode, encode_
from fused_offload.params.dense import (
    dense_strides,
    flat,
    has_data,
    has_own_memory,
    like_memory_of,
    overlaps,
    same_order,
)
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

from .storage import Extent

_VALUES_BLOCK = 2**20  # elements converted at a time: bounds the temporary memory of loads and saves


class StateHooks:
    """What the entries ask of the optimizer that owns them.

    Attributes:
        wait: waits until the host copy of the state is complete and nobody else writes it.
        write_step: ``(param, step)``, a caller's step count for the parameter's group.
        initialize: ``(param,)``, gives an entry its storage.
        forget: waits, then drops what would keep the storage of removed entries alive.
        nonnegative: keys of averages of squares, which no caller may set to negative values.
        version: counts changes of which storage belongs to which parameter, and values that became initial again.
        lent: whether any view was ever given out, so that someone may move it.
    """

    def __init__(
        self,
        wait: Callable[[], None],
        write_step: Callable[[torch.Tensor, int], None],
        initialize: Callable[[torch.Tensor], None],
        forget: Callable[[], None],
        nonnegative: Set[str] = frozenset(),
    ) -> None:
        """Keeps the callbacks."""
        self.wait = wait
        self.write_step = write_step
        self.initialize = initialize
        self.forget = forget
        self.nonnegative = nonnegative
        self.version = 0
        self.lent = False


class StateEntry(dict[str, torch.Tensor]):
    """State of one parameter: ``exp_avg``, ``exp_avg_sq`` and, where the optimizer keeps one, ``master_param``.

    Empty until the first step, a load or `FusedOffloadAdam.initialize_state`. Values are views of the storage, shaped
    and strided like the parameter, in their stored dtype. Handing one out waits for the last step's write-back.
    Storage knows only what this rank has; a distributed parameter's values are handed out distributed like it.

    Attributes:
        param: parameter that the entry belongs to.
        extent: storage, or None without one (also for parameters without elements).
        start: first element in the extent.
        bound: whether the entry has its storage.
        shape: the parameter's shape when it got its storage; of a distributed one that of this rank's part.
        strides: strides of the values, as the parameter's were then, but without gaps.
        initial: keys whose stored values are not authoritative yet: the next step takes zero, and for `MASTER_PARAM`
            the parameter. The rule's keys are in it together or not at all.
    """

    def __init__(self, hooks: StateHooks, param: torch.Tensor) -> None:
        """An entry without storage."""
        super().__init__()
        self._hooks = hooks
        self.param = param
        self.extent: Extent | None = None
        self.start = 0
        self.bound = False
        local = local_of(param)
        self.shape, self.strides = local.shape, dense_strides(local)
        self._distributed: dict[str, Any] = {}
        self._reshaped: dict[str, torch.Tensor] = {}
        self.initial: frozenset[str] = frozenset()

    # -- storage -----------------------------------------------------------------------------------------------

    def bind(self, extent: Extent | None, start: int, formats: dict[str, Format]) -> None:
        """Gives the entry its storage: elements of ``extent`` from ``start``; None for an empty parameter."""
        self.extent, self.start, self.bound = extent, start, True
        local = local_of(self.param)
        self.shape, self.strides = local.shape, dense_strides(local)
        self._distributed.clear()
        self._reshaped.clear()
        self._make_initial({*formats, MASTER_PARAM})
        for key, format in formats.items():
            super().__setitem__(key, self._view(key, format))

    def _view(self, key: str, format: Format) -> torch.Tensor:
        if self.extent is None:
            return torch.empty(self.shape, dtype=format.dtype, device="cpu")  # no elements, but where the others are
        return self.shaped(self.extent.view(key, self.start, self.shape.numel()))

    def shaped(self, values: torch.Tensor) -> torch.Tensor:
        """``[numel]`` values in the order of the storage, seen as the parameter's."""
        return values.as_strided(self.shape, self.strides)

    def ordered(self, values: torch.Tensor) -> torch.Tensor:
        """``[numel]`` elements of a tensor shaped like the parameter, in the order of the storage."""
        key = next(iter(self))  # all keys lie alike
        return flat(like_memory_of(values.detach(), self._view(key, self.format(key))))

    def stored(self, key: str) -> Stored:
        """One key's elements in memory order. The entry has storage and elements."""
        assert self.extent is not None
        return self.extent.narrow(key, self.start, self.shape.numel())

    def format(self, key: str) -> Format:
        """Stored format of one key."""
        assert self.extent is not None
        return self.extent.layout.formats[key]

    def peek(self, key: str) -> torch.Tensor:
        """The view of one key, without waiting and without any effect on the values."""
        self._hooks.lent = True
        return super().__getitem__(key)

    def outside(self, key: str, values: torch.Tensor) -> torch.Tensor:
        """Values of one key as callers see them.

        Args:
            key: state key.
            values: shaped like this rank's part of the parameter; for the live view the result is always one object.
        """
        if not is_distributed(self.param):
            return values
        if values is not super().__getitem__(key):
            return distributed_like(self.param, values)
        known = self._distributed.get(key)
        if known is None or known._local_tensor is not values or not same_sharding(known, self.param):
            known = self._distributed[key] = distributed_like(self.param, values)
        result: torch.Tensor = known
        return result

    def peek_all(self) -> list[torch.Tensor]:
        """All views, for looking at where they are, without waiting and without any effect."""
        return list(super().values())

    def rehome(self) -> None:
        """Takes values back into storage whose view was pointed elsewhere (``tensor.data = ...``)."""
        if self.extent is None:
            return
        for key in self:
            view = super().__getitem__(key)
            distributed = self._distributed.get(key)
            if distributed is not None and distributed._local_tensor is not view:
                self[key] = distributed._local_tensor
                distributed._local_tensor = view
            if view.data_ptr() == self.extent.address_of(key, self.start):
                continue
            check_value(self, key, view, raw=True)
            super().__setitem__(key, self._view(key, self.format(key)))
            self[key] = view
        self._follow_param()

    def _follow_param(self) -> None:
        """Reorders the values where the parameter got other strides (``model.to(memory_format=...)``)."""
        param = local_of(self.param)
        if param.shape != self.shape or overlaps(param):
            return
        strides = dense_strides(param)
        if same_order(param.shape, strides, self.strides):
            return
        self._hooks.wait()
        kept = {key: self._values(key) for key in self}
        self.strides = strides
        for key, values in kept.items():
            super().__setitem__(key, self._view(key, self.format(key)))
            stored, ordered = self.stored(key), self.ordered(values)
            if stored.format.scaled:
                encode_(stored, ordered)
            else:
                stored.data.copy_(ordered)

    def _values(self, key: str) -> torch.Tensor:
        """A copy of one key's values, in their own dtype or, where that needs scales, in float32."""
        stored = self.stored(key)
        return self.shaped(decode(stored) if stored.format.scaled else stored.data.clone())

    def fill_master(self) -> None:
        """Writes the parameter's value into a master that is not authoritative yet; it stays so."""
        if MASTER_PARAM not in self or self.is_set(MASTER_PARAM) or self.extent is None:
            return
        local = local_of(self.param)
        if local.shape != self.shape:
            raise RuntimeError(
                f"A parameter has shape {tuple(local.shape)} now, but its state was made for {tuple(self.shape)}, "
                "and its master weights are still in the parameter. Bring the parameter back first."
            )
        stored = self.stored(MASTER_PARAM)
        if stored.format.name == "remainder":
            stored.data.zero_()
        else:
            write_values(stored, self.ordered(local))

    def reset(self) -> None:
        """Takes the rule's state back to zero; the master stays."""
        self._reshaped.clear()
        keys = self._rule_keys()
        for key in keys - self.initial if self.extent is not None else ():
            self.stored(key).data.zero_()
        self._make_initial(self.initial | keys)

    def forget_initial_state(self) -> None:
        """Makes the parameter the master again, after a first step that was skipped; other state is still zero."""
        self._make_initial({*self, MASTER_PARAM})

    def unset_master(self) -> None:
        """Makes the next step start from the parameter again."""
        self._make_initial(self.initial | {MASTER_PARAM})

    def _rule_keys(self) -> frozenset[str]:
        """Keys without the master."""
        return frozenset(self) - {MASTER_PARAM}

    def _make_initial(self, keys: Set[str]) -> None:
        self.initial = frozenset(keys)
        self._hooks.version += 1

    # -- reading: whoever gets a tensor may read it at once and write into it -----------------------------------

    def _hand_out(self, *keys: str) -> None:
        if not self.bound:
            return
        self._hooks.wait()
        self._hooks.lent = True
        if MASTER_PARAM in keys:
            self.fill_master()
        for key in keys:
            self.mark_set(key)

    def note_read(self, key: str) -> None:
        """Notes that a live view left by another way than `__getitem__`: its moments may be written there.

        A master that is not authoritative stays so: checkpoint code reads it as a template, and says what it wrote.
        """
        if key != MASTER_PARAM:
            self.mark_set(key)

    def __getitem__(self, key: str) -> torch.Tensor:
        """The view of one key, complete."""
        if key in self._reshaped:
            return self._reshaped[key]
        if key in self:
            self._hand_out(key)
        return self.outside(key, super().__getitem__(key))

    def get(self, key: str, default: Any = None) -> Any:
        """The view of one key, complete, or ``default``."""
        return self[key] if key in self else default

    def items(self) -> Any:
        """Keys and complete views."""
        self._hand_out(*self)
        return self._all_outside().items() if self._reshaped or is_distributed(self.param) else super().items()

    def values(self) -> Any:
        """Complete views."""
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
        """A plain dict of the views and of what ``other`` has."""
        return {**self, **other}

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, torch.Tensor]:
        """A plain dict of copies, each with memory of its own: torch would copy all of the storage behind a view."""
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

    # -- writing: values are copied into the storage ------------------------------------------------------------

    def __setitem__(self, key: str, value: Any) -> None:
        """Copies a tensor into storage, in its stored dtype or, where that loses nothing else, from another one.

        Args:
            key: a state key, or ``"step"``, which goes to the parameter's group.
            value: a tensor shaped like the parameter, on any device; for a distributed parameter one sharded like it,
                or this rank's part; for ``"step"`` a whole number from 0 to 2^31. One of another shape waits for a
                parameter of that shape: the one that gets the entry, or this one once it has changed.

        Raises:
            KeyError: for a key that this optimizer does not keep.
            TypeError: for a value that cannot be stored.
            ValueError: for another shape, for 8-bit elements of another time, and for any other step.
        """
        if key == "step":
            step = checked_step(value)
            self._hooks.wait()  # steps that turn out skipped must not be taken off the new count
            self._hooks.write_step(self.param, step)
            return
        had_values = self.bound
        if not self.bound:
            self._hooks.initialize(self.param)
        value = local_value(self.param, key, value)
        if had_values and self._is_reshaped(key, value):
            self._reshaped[key] = value.detach().clone()
            self._hooks.version += 1  # steps look at the entry again
            return
        check_value(self, key, value, raw=True)
        self._hooks.wait()
        view = self.peek(key)
        if value is not view and not same_memory(value, view):
            self._copy_in(key, value)
        self._reshaped.pop(key, None)
        self.mark_set(key)

    # -- values of another shape: parameters that are pruned or grown together with their state -------------------

    @property
    def is_reshaped(self) -> bool:
        """Whether some value was replaced by one of another shape, which waits for its parameter."""
        return bool(self._reshaped)

    def _is_reshaped(self, key: str, value: Any) -> bool:
        """Whether a value fits the key, but is of another shape. Only the elements of unscaled formats are values."""
        if key not in self or self.extent is None or is_distributed(self.param):
            return False
        if not isinstance(value, torch.Tensor) or value.shape == self.shape:
            return False
        if self.format(key).scaled and value.dtype == self.format(key).dtype:
            raise ValueError(
                f"{key} is kept as {value.dtype} elements that mean something beside their scales only. Read and write "
                "float32 values: get_unscaled_state(param, key)."
            )
        check_storable(key, self.format(key).dtype, value, nonnegative=self.is_nonnegative(key))
        return True

    def take_reshaped(self) -> str | None:
        """Gives the parameter storage of its new shape, with the values that wait for it.

        Returns:
            Why it cannot be, or None.
        """
        if not self._reshaped:
            return None
        shape, values = local_of(self.param).shape, dict(self._reshaped)
        for key in dict.fromkeys((*self._rule_keys(), *values)):
            found = values[key].shape if key in values else self.shape
            if found != shape:
                return (
                    f"{key} of a parameter has shape {tuple(found)}, but the parameter has {tuple(shape)}. Give the "
                    "entry to the parameter that it fits (optimizer.state[new] = entry), or write values of this shape."
                )
        super().clear()
        self.bound, self.extent = False, None
        self._hooks.initialize(self.param)
        self.update(values)
        return None

    def take_values(self, other: StateEntry) -> None:
        """Copies what is set in an entry that cannot move here, for another layout or another optimizer.

        Raises:
            KeyError: for a key that this optimizer does not keep; nothing is changed.
            TypeError: for values that cannot be stored; nothing is changed.
            ValueError: for another shape; nothing is changed.
        """
        other.wait_and_rehome()
        if is_distributed(self.param) and is_distributed(other.param) and not same_sharding(self.param, other.param):
            raise ValueError(
                f"State of a parameter with {sharding_of(other.param)} does not fit one with {sharding_of(self.param)}"
            )
        keys = [key for key in other if other.is_set(key) or key in other._reshaped]
        if other._reshaped and MASTER_PARAM not in other._reshaped:
            keys = [key for key in keys if key != MASTER_PARAM]  # that of the old parameter
        if keys and not self.bound:
            self._hooks.initialize(self.param)
        for key in keys:
            check_value(self, key, other._reshaped.get(key, _unscaled_like(other.peek(key))))
        self._hooks.wait()
        self.reset()
        self.unset_master()
        for key in keys:
            set_scaled(
                self, key, other._reshaped[key] if key in other._reshaped else local_of(get_unscaled(other, key))
            )

    def wait_and_rehome(self) -> None:
        """Makes the storage hold complete values."""
        self._hooks.wait()
        self.rehome()

    def belongs_to(self, hooks: StateHooks) -> bool:
        """Whether this is an entry of the optimizer with these hooks."""
        return self._hooks is hooks

    def is_set(self, key: str) -> bool:
        """Whether one key's values are authoritative."""
        return self.bound and key not in self.initial

    def is_nonnegative(self, key: str) -> bool:
        """Whether one key's values are averages of squares."""
        return key in self._hooks.nonnegative

    def mark_set(self, key: str | None = None) -> None:
        """Makes one key's values authoritative, and with a key of the rule all of the rule's; without a key, all."""
        kept = frozenset() if key is None else {MASTER_PARAM} if key != MASTER_PARAM else self._rule_keys()
        self.initial &= kept

    def mark_loaded(self, key: str) -> None:
        """Makes values authoritative that a reader wrote in place.

        A master that is not, and still has a parameter's value in every element, is taken for one that the reader left
        alone because the checkpoint has none: the next step then starts from the parameter, which may be loaded later.
        """
        if key == MASTER_PARAM and not self.is_set(key) and self.extent is not None:
            stored = self.stored(key)
            dtype = self.extent.layout.param_dtype
            blocks = stored.data.split(_VALUES_BLOCK)
            if stored.format.name == "remainder":
                untouched = not any(block.any() for block in blocks)
            else:
                untouched = all(torch.equal(block, block.to(dtype).to(block.dtype)) for block in blocks)
            if untouched:
                return
        self.mark_set(key)

    def _copy_in(self, key: str, value: torch.Tensor) -> None:
        if self.extent is None:
            return
        format, view = self.format(key), self.peek(key)
        value = _apart_from(value, view)
        if format.scaled and value.dtype != format.dtype:
            write_values(self.stored(key), self.ordered(value))
            return
        if format.scaled:  # raw: a scaled format's own elements go with the scales it has
            scale = self.stored(key).scale
            assert scale is not None
            if not scale.any() and value.any():
                raise ValueError(
                    f"{key} has no scales yet, so raw {format.dtype} elements have no meaning here. "
                    "Write float32 values."
                )
            if value.dtype == torch.uint8 and value.any() and not torch.equal(value.to(view.device), view):
                raise ValueError(
                    f"{key} is kept as bytes that mean something beside their scales only, which steps change. Bytes "
                    "other than those that are there cannot be written back: copy and write float32 values "
                    "(get_unscaled_state, set_scaled_state, or state_dict and load_state_dict)."
                )
        view.copy_(value)

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Writes several keys."""
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def replace(self, values: Mapping[str, Any]) -> None:
        """Writes several keys; the others start over."""
        self.update(values)
        for key in self.keys() - values.keys():
            if key == MASTER_PARAM:
                self.unset_master()
            elif self.extent is not None:
                self.stored(key).data.zero_()

    def __ior__(self, other: Any) -> StateEntry:  # type: ignore[override]
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

    __delitem__ = pop = popitem = clear = _refuse_removal


def _unscaled_like(view: torch.Tensor) -> torch.Tensor:
    """What stands for the values of stored elements where only their shape and kind matter."""
    return view if view.dtype != torch.uint8 else torch.zeros((), dtype=torch.float32, device="cpu").expand(view.shape)


def same_memory(value: torch.Tensor, view: torch.Tensor) -> bool:
    """Whether ``value``, shaped like ``view``, is the same elements in the same places."""
    return (
        value.device == view.device
        and value.data_ptr() == view.data_ptr()
        and value.dtype == view.dtype
        and value.stride() == view.stride()
        and value.is_neg() == view.is_neg()
    )


def _apart_from(value: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    """``value`` without autograd; a copy if it may share memory with ``view``, which is about to be written."""
    value = value.detach()
    shared = value.device == view.device and value.untyped_storage().data_ptr() == view.untyped_storage().data_ptr()
    return value.clone() if shared else value


def check_value(entry: StateEntry, key: str, value: Any, *, raw: bool = False) -> None:
    """Raises if ``value`` cannot become ``entry[key]``; see `StateEntry.__setitem__`.

    Args:
        entry: state of a parameter.
        key: state key.
        value: a tensor of this rank's part.
        raw: whether it may be 8-bit elements for 8-bit elements, which only mean something beside their scales.
    """
    if key not in entry:
        raise KeyError(f"FusedOffloadAdam keeps {', '.join(entry)} for this parameter; it cannot take {key!r}")
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{key} should be a tensor, but got {type(value).__name__}")
    if value.shape != entry.shape:
        raise ValueError(f"{key} should have shape {tuple(entry.shape)}, but got {tuple(value.shape)}")
    kept = entry.peek(key).dtype
    if not (raw and kept == value.dtype == torch.uint8):
        check_storable(key, kept, value, nonnegative=entry.is_nonnegative(key))


def check_storable(key: str, kept: torch.dtype, value: torch.Tensor, *, nonnegative: bool = False) -> None:
    """Raises if a value cannot be stored as ``kept`` without meaning something else."""
    if value.layout != torch.strided or value.device.type == "meta":
        raise TypeError(f"{key} should be a dense tensor with data, but got {value.layout} on {value.device}")
    if not has_own_memory(value):
        raise TypeError(f"{key} should be a plain tensor, but got a {type(value).__name__}; dequantise it first")
    if not has_data(value):
        raise ValueError(f"{key} of shape {tuple(value.shape)} has lost its memory (its storage was resized or freed)")
    gathered = kept == torch.int16 and value.dtype == torch.int32  # see dcp_calls.Wanted
    if (kept == torch.int16) != (value.dtype == torch.int16 or gathered):
        raise TypeError(
            f"{key} is kept as {kept}, but got {value.dtype}: a 16-bit remainder only means something beside the "
            "parameter it was split from. Use store_param_remainders as when it was written."
        )
    if gathered and not torch.equal(value, value.to(torch.int16).to(torch.int32)):
        raise ValueError(f"{key} is kept as torch.int16, but got torch.int32 values that do not fit")
    if kept != torch.int16 and not value.dtype.is_floating_point:
        raise TypeError(f"{key} should be a floating point tensor, but got {value.dtype}")
    if nonnegative and value.numel() and value.detach().min() < 0:
        raise ValueError(f"{key} holds negative values, so it is no average of squares; was it mixed up?")


def write_values(stored: Stored, values: torch.Tensor) -> None:
    """Encodes ``[numel]`` values of any float dtype and device, a bounded block at a time."""
    device = stored.data.device
    for start in range(0, values.numel(), _VALUES_BLOCK):
        block = values[start : start + _VALUES_BLOCK].to(device, torch.float32)
        encode_(stored.narrow(start, block.numel()), block)


def get_unscaled(entry: StateEntry, key: str) -> torch.Tensor:
    """One key's values, shaped like the parameter.

    Returns:
        The live view for float32 and 16-bit remainders; for narrower formats a new float32 tensor, exact.
    """
    view = entry.peek(key)
    if view.dtype in (torch.float32, torch.int16):
        entry.note_read(key)
        return entry.outside(key, view)
    if entry.extent is None:
        return entry.outside(key, view.float())
    return entry.outside(key, entry.shaped(decode(entry.stored(key))))


def set_scaled(entry: StateEntry, key: str, value: torch.Tensor) -> None:
    """Writes float32 values (int16 for remainders) in their stored format; they become authoritative."""
    value = local_value(entry.param, key, value)
    check_value(entry, key, value)
    view = entry.peek(key)
    if not same_memory(value, view) and entry.extent is not None:
        value = _apart_from(value, view)
        if view.dtype == torch.int16:
            view.copy_(value)
        else:
            write_values(entry.stored(key), entry.ordered(value))
    entry._reshaped.pop(key, None)
    entry.mark_set(key)
