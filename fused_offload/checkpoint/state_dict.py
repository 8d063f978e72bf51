"""State dicts: TransformerEngine's layout and torch AdamW's, both ways.

Checkpoints hold unscaled values, so runs may change stored formats between save and load. Saving hands out references
to the live storage wherever its dtype says all (float32, bfloat16, 16-bit remainders): no second copy of the state.
Only block-scaled formats are expanded to float32.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fused_offload.kernels.adam.reference import round_fp32
from fused_offload.kernels.formats import Format, decode
from fused_offload.params.dense import is_frozen
from fused_offload.params.dtensors import local_of, local_value
from fused_offload.rules.arguments import checked_step, shown
from fused_offload.rules.base import MASTER_PARAM, UpdateRule
from fused_offload.state.entry import StateEntry, check_storable, get_unscaled, same_memory, set_scaled
from fused_offload.state.mapping import StateMapping

from .torch_dcp import Wanted

_SCALED_DTYPES = (torch.float16, torch.uint8)


def _exported(entry: StateEntry, key: str) -> torch.Tensor:
    view = entry.peek(key)
    if entry.extent is None and view.dtype in _SCALED_DTYPES:  # as other ranks export what they have of it
        return entry.outside(key, view.float())
    if entry.extent is None or not entry.format(key).scaled:
        entry.note_read(key)
        return entry.outside(key, view)
    return entry.outside(key, entry.shaped(decode(entry.stored(key))))


def _indices(param_groups: Sequence[dict[str, Any]]) -> dict[int, int]:
    """Position of each parameter over all groups, by identity."""
    params = [param for group in param_groups for param in group["params"]]
    return {id(param): index for index, param in enumerate(params)}


def _packed_groups(param_groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    packed, position = [], 0
    for group in param_groups:
        fresh = {key: value for key, value in group.items() if key != "params"}
        if "step" in fresh:
            fresh["step"] = checked_step(fresh["step"])
        fresh["params"] = list(range(position, position + len(group["params"])))
        position += len(group["params"])
        packed.append(fresh)
    return packed


def _bound_entries(state: StateMapping, indices: Mapping[int, int]) -> list[tuple[int, StateEntry]]:
    entries = []
    for param, entry in state.items():
        if not entry.bound:
            continue
        if id(param) not in indices:
            raise RuntimeError(
                f"A parameter of shape {tuple(param.shape)} has state but is in no parameter group, so its state could "
                "not be found again after a load. Put it back into param_groups, or drop optimizer.state[param]."
            )
        entries.append((indices[id(param)], entry))
    return sorted(entries, key=lambda item: item[0])


def pack(param_groups: Sequence[dict[str, Any]], state: StateMapping, wanted: Wanted = Wanted()) -> dict[str, Any]:  # noqa: B008 - immutable
    """TransformerEngine's layout: per parameter its state, per group its settings and ``step``.

    Args:
        param_groups: the optimizer's groups.
        state: its state.
        wanted: what torch's checkpoint functions want otherwise.
    """
    groups = _packed_groups(param_groups)
    steps = {index: group.get("step", 0) for group in groups for index in group["params"]}
    packed = {}
    for index, entry in _bound_entries(state, _indices(param_groups)):
        entry.fill_master()
        values = {key: _as_wanted(entry, key, wanted) for key in entry}
        packed[index] = {"step": _step_tensor(steps[index]), **values} if wanted.with_steps else values
    return {"state": packed, "param_groups": groups}


def _as_wanted(entry: StateEntry, key: str, wanted: Wanted) -> torch.Tensor:
    value = _exported(entry, key)
    local = local_of(value)
    if wanted.gathered and local.dtype == torch.int16:
        return entry.outside(key, local.int())
    if wanted.on_host and local.device.type != "cpu":
        return entry.outside(key, local.cpu())
    return value


def _step_tensor(step: int) -> torch.Tensor:
    return torch.tensor(float(step), dtype=torch.float32, device="cpu")


def pack_for_torch(param_groups: Sequence[dict[str, Any]], state: StateMapping, rule: UpdateRule) -> dict[str, Any]:
    """The layout of torch's optimizer: ``step`` beside each parameter's state, no master weights."""
    groups = _packed_groups(param_groups)
    steps = {index: group.get("step", 0) for group in groups for index in group["params"]}
    packed = {}
    for index, entry in _bound_entries(state, _indices(param_groups)):
        values = {key: get_unscaled(entry, key) for key in rule.keys}
        packed[index] = {"step": _step_tensor(steps[index]), **values}
    return {"state": packed, "param_groups": [rule.torch_group(group) for group in groups]}


class LoadedValue(NamedTuple):
    """One state value of a checked state dict.

    Attributes:
        param: parameter that it belongs to.
        key: state key.
        value: the values, of a distributed parameter those of this rank.
        factor: what the values are multiplied by; not 1 where a parameter had fewer steps than its group.
    """

    param: torch.Tensor
    key: str
    value: torch.Tensor
    factor: float


class LoadPlan(NamedTuple):
    """A checked state dict, ready to be applied.

    Attributes:
        groups: the new groups.
        values: state values, in group order.
        warnings: what the caller should know about how it is taken.
    """

    groups: list[dict[str, Any]]
    values: list[LoadedValue]
    warnings: list[str]

    @property
    def params(self) -> list[torch.Tensor]:
        """Parameters that get state, each once."""
        return list({id(value.param): value.param for value in self.values}.values())


def plan_load(
    state_dict: Mapping[str, Any],
    param_groups: Sequence[dict[str, Any]],
    state: StateMapping,
    rule: UpdateRule,
    formats_of: Callable[[torch.Tensor], Mapping[str, Format]],
) -> LoadPlan:
    """Checks a state dict against the groups and their state; changes nothing.

    Args:
        state_dict: TransformerEngine's or torch AdamW's layout.
        param_groups: the optimizer's groups.
        state: the optimizer's state.
        rule: the optimizer's arithmetic.
        formats_of: stored format of each state key that the optimizer keeps for a parameter.

    Raises:
        ValueError: names what differs.
        TypeError: for values that are no tensors, and for what has another type than it should.
    """
    saved_groups, saved_state = _checked_structure(state_dict, param_groups)
    groups: list[dict[str, Any]] = []
    values: list[LoadedValue] = []
    unequal: list[int] = []
    for index, (saved, group) in enumerate(zip(saved_groups, param_groups, strict=True)):
        rule.check_saved_group(saved, index)
        pairs = [
            (param, saved_state[name])
            for param, name in zip(group["params"], saved["params"], strict=True)
            if saved_state.get(name)
        ]
        beside = [None if entry.get("step") is None else checked_step(entry["step"]) for _, entry in pairs]
        step = _saved_step(saved, beside, index, int(group.get("step", 0)))
        if step and not pairs and any(local_of(param).numel() and not is_frozen(param) for param in group["params"]):
            raise ValueError(
                f"loaded state dict has no state for any parameter of group {index} at step {step}. "
                "If they were frozen until then, load first and unfreeze them afterwards."
            )
        groups.append(merged_group(saved, group, step, rule))
        rule.check_group(groups[-1])
        if len({count for count in beside if count is not None}) > 1:
            unequal.append(index)
        for (param, entry), count in zip(pairs, beside, strict=True):
            factors = rule.catch_up_factors(groups[-1], count)
            kept = state[param] if param in state else None
            for key, value in _checked_values(param, entry, kept, rule, formats_of(param), index):
                values.append(LoadedValue(param, key, value, factors.get(key, 1.0)))
    narrow = {
        f"{key} ({value.dtype})"
        for param, key, value, _ in values
        if value.dtype in (torch.bfloat16, torch.float16) and formats_of(param)[key].dtype == torch.float32
    }
    messages = []
    if narrow:
        messages.append(
            f"{', '.join(sorted(narrow))} loaded into float32: the values are exact, but as coarse as they were saved"
        )
    if unequal:
        messages.append(
            f"loaded state dict has parameters at different steps in groups {unequal}; steps are counted by "
            "group. Parameters with fewer steps take their group's count, and their moments are scaled so that "
            "the bias-corrected ones stay what they were."
        )
    messages += rule.load_warnings(saved_groups)
    return LoadPlan(groups, values, messages)


def _checked_structure(
    state_dict: Mapping[str, Any], param_groups: Sequence[Mapping[str, Any]]
) -> tuple[Sequence[Mapping[str, Any]], Mapping[Any, Any]]:
    """Groups and state of a state dict whose containers are what they should be, and fit the optimizer's groups."""
    _check_type(state_dict, Mapping, "state dict")
    for key in ("state", "param_groups"):
        if key not in state_dict:
            raise ValueError(f"loaded state dict has no {key!r}; pass what state_dict() returned")
    groups, state = state_dict["param_groups"], state_dict["state"]
    _check_type(groups, (list, tuple), "'param_groups'")
    _check_type(state, Mapping, "'state'")
    if len(groups) != len(param_groups):
        raise ValueError(
            f"loaded state dict has a different number of parameter groups ({len(groups)}, here {len(param_groups)})"
        )
    names: set[Any] = set()
    for index, (saved, group) in enumerate(zip(groups, param_groups, strict=True)):
        _check_type(saved, Mapping, f"group {index}")
        if "params" not in saved:
            raise ValueError(f"loaded state dict has no 'params' in group {index}; pass what state_dict() returned")
        _check_type(saved["params"], (list, tuple), f"'params' of group {index}")
        if len(saved["params"]) != len(group["params"]):
            raise ValueError(
                f"loaded state dict contains a parameter group that doesn't match the size of optimizer's group "
                f"(group {index}: {len(saved['params'])}, here {len(group['params'])})"
            )
        for name in saved["params"]:
            _check_type(name, Hashable, f"name of a parameter in group {index}")
            if name in names:
                raise ValueError(
                    f"loaded state dict has parameter {shown(name)} twice, the second time in group {index}"
                )
            names.add(name)
    unknown = set(state) - names
    if unknown:
        raise ValueError(
            "loaded state dict has state of parameters that are in none of its groups: "
            f"{shown(sorted(unknown, key=str))}"
        )
    for name, entry in state.items():
        if entry is not None:
            _check_type(entry, Mapping, f"state of parameter {shown(name)}")
    return groups, state


def _check_type(value: Any, kind: Any, what: str) -> None:
    if not isinstance(value, kind):
        raise TypeError(
            f"loaded state dict has a {type(value).__name__} as {what}; pass what state_dict() returned, unchanged"
        )


def _saved_step(saved: Mapping[str, Any], beside: Sequence[int | None], index: int, current: int) -> int | None:
    """Step of a saved group; torch keeps it beside each parameter, where the largest is the group's."""
    largest = max((count for count in beside if count is not None), default=None)
    if saved.get("step") is None:
        return largest
    step = checked_step(saved["step"])
    if largest is None or largest in (step, round_fp32(step)):  # torch keeps it in float32
        return step
    # A reader that fills in a state dict of ours leaves alone what the checkpoint does not have: the group's step if
    # torch AdamW wrote it.
    filled_in = {step, largest} - {current}
    if len(filled_in) > 1:
        raise ValueError(
            f"loaded state dict has step {step} in group {index}, but step {largest} beside its parameters"
        )
    return filled_in.pop()


def merged_group(
    saved: Mapping[str, Any], group: Mapping[str, Any], step: int | None, rule: UpdateRule
) -> dict[str, Any]:
    """A group with the settings that were saved and the parameters that are here.

    Raises:
        ValueError: for a setting that cannot be copied.
    """
    # A tensor, such as lr, belongs to one optimizer: filling it may not reach the one that was saved.
    dropped = {*rule.foreign_settings, "params", "step"}
    merged = {key: _copied(value, key) for key, value in saved.items() if key not in dropped}
    merged.update({key: group[key] for key in rule.settings if key not in merged and key in group})
    if "param_names" in group:
        merged["param_names"] = group["param_names"]
    if step is not None:
        merged["step"] = step
    return {**merged, "params": group["params"]}


def _copied(value: Any, key: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception as error:  # of whatever a group may hold
        raise ValueError(
            f"loaded state dict has a {shown(key)} in its groups that cannot be copied: {shown(error)}"
        ) from error


def _checked_values(
    param: torch.Tensor,
    saved: Mapping[str, Any],
    kept: StateEntry | None,
    rule: UpdateRule,
    formats: Mapping[str, Format],
    index: int,
) -> list[tuple[str, torch.Tensor]]:
    unknown = set(saved) - {*rule.keys, MASTER_PARAM, "step"}
    if unknown:
        raise ValueError(f"loaded state dict has unknown state {shown(sorted(unknown, key=str))} in group {index}")
    local = local_of(param)
    if kept is not None and kept.extent is not None and local.numel() and kept.shape != local.shape:
        raise ValueError(
            f"A parameter of group {index} has shape {tuple(local.shape)} now, but its state was made for "
            f"{tuple(kept.shape)}. Drop optimizer.state[param] before loading."
        )
    values = []
    for key in (*rule.keys, MASTER_PARAM):
        value = saved.get(key)
        if value is None:
            if key != MASTER_PARAM and local.numel():
                raise ValueError(f"loaded state dict lacks {key} of a parameter in group {index}")
            continue
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"loaded state dict has a {type(value).__name__} as {key} in group {index}, not a tensor")
        if key not in formats:
            if param.dtype != torch.float32:  # a float32 parameter is its own master: nothing is lost
                raise ValueError(
                    f"loaded state dict has master weights in group {index}, but this optimizer keeps none; build it "
                    "with master_weights=True"
                )
            continue
        value = local_value(param, key, value)
        if value.shape != local.shape:
            raise ValueError(
                f"loaded state dict has {key} of shape {tuple(value.shape)} in group {index}, but the parameter has "
                f"{tuple(local.shape)}"
            )
        check_storable(key, formats[key].dtype, value, nonnegative=key in rule.nonnegative)
        values.append((key, value))
    return values


def _detached_from_storage(plan: LoadPlan, state: StateMapping) -> list[LoadedValue]:
    """The values to copy.

    Those that are the live storage of their own place need no copy; those of another place are cloned before anything
    is written over them.
    """
    storages = {
        view.untyped_storage().data_ptr() for entry in state.values() for view in entry.peek_all() if view.numel()
    }
    values = []
    for loaded in plan.values:
        value = loaded.value
        if value.numel() and value.untyped_storage().data_ptr() in storages:
            if same_memory(value, state[loaded.param].peek(loaded.key)):
                state[loaded.param].mark_loaded(loaded.key)  # readers fill a state dict in place, then load it
                if loaded.factor == 1.0:
                    continue
            else:
                loaded = loaded._replace(value=value.clone())
        values.append(loaded)
    return values


def apply_load(plan: LoadPlan, state: StateMapping) -> None:
    """Copies the values into storage and forgets state that the checkpoint does not have.

    Args:
        plan: a checked state dict; every parameter in it has its storage.
        state: the optimizer's state, updated in place.
    """
    loaded = {(id(value.param), value.key) for value in plan.values}
    values = _detached_from_storage(plan, state)
    for entry in state.values():
        if not any((id(entry.param), key) in loaded for key in entry if key != MASTER_PARAM):
            entry.reset()
        if (id(entry.param), MASTER_PARAM) not in loaded:
            entry.unset_master()
    for param, key, value, factor in values:
        set_scaled(state[param], key, value if factor == 1.0 else value.float() * factor)
