"""Loading: a state dict is checked as a whole, then applied."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch

from fused_offload.kernels.formats import Format
from fused_offload.kernels.reference import round_fp32
from fused_offload.params.dense import is_frozen
from fused_offload.params.dtensors import local_of, local_value
from fused_offload.rules.arguments import checked_step, shown
from fused_offload.rules.base import MASTER_PARAM, UpdateRule
from fused_offload.state.convert import check_storable, same_memory
from fused_offload.state.mapping import StateMapping
from fused_offload.state.master_weights import is_param_value
from fused_offload.state.param_state import ParamState

_COMPARED_ELEMENTS = 2**20
"""Elements of a master compared at a time; bounds the temporary memory of a load."""


class LoadedValue(NamedTuple):
    """One state value of a checked state dict.

    Attributes:
        param: parameter that it belongs to.
        key: state key.
        value: the values, of a distributed parameter those of this rank.
        factor: multiplies the values; not 1 where a parameter had fewer steps than its group.
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
        warnings: messages for the caller.
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
    """Checks a state dict against the groups and their state. Changes nothing.

    Args:
        state_dict: TransformerEngine's or torch AdamW's layout.
        param_groups: the optimizer's groups.
        state: the optimizer's state.
        rule: the optimizer's arithmetic.
        formats_of: stored format of each state key that the optimizer keeps for a parameter.

    Raises:
        ValueError: for a state dict that does not fit; names the difference.
        TypeError: for values that are no tensors, and for other unexpected types.
    """
    saved_groups, saved_state = _checked_structure(state_dict, param_groups)
    groups: list[dict[str, Any]] = []
    values: list[LoadedValue] = []
    unequal: list[int] = []
    for index, (saved, group) in enumerate(zip(saved_groups, param_groups, strict=True)):
        rule.check_saved_group(saved, index)
        params = _saved_params(saved, saved_state, group, index)
        counts = {steps for _, _, steps in params if steps is not None}
        step = _saved_step(saved, counts, index, int(group.get("step", 0)))
        if step and not params and any(local_of(param).numel() and not is_frozen(param) for param in group["params"]):
            raise ValueError(
                f"loaded state dict has no state for any parameter of group {index} at step {step}. "
                "If they were frozen until then, load first and unfreeze them afterwards."
            )
        groups.append(merged_group(saved, group, step, rule))
        rule.check_group(groups[-1])
        if len(counts) > 1:
            unequal.append(index)
        for param, entry, steps in params:
            factors = rule.catch_up_factors(groups[-1], steps)
            kept = state[param].storage if param in state else None
            for key, value in _checked_values(param, entry, kept, rule, formats_of(param), index):
                values.append(LoadedValue(param, key, value, factors.get(key, 1.0)))
    messages = _precision_warnings(values, formats_of) + _step_warnings(unequal) + rule.load_warnings(saved_groups)
    return LoadPlan(groups, values, messages)


class _SavedParam(NamedTuple):
    param: torch.Tensor
    entry: Mapping[str, Any]
    steps: int | None  # of this parameter, if the checkpoint counts them


def _saved_params(
    saved: Mapping[str, Any], saved_state: Mapping[Any, Any], group: Mapping[str, Any], index: int
) -> list[_SavedParam]:
    """Parameters of a group that have saved state."""
    found = []
    for param, name in zip(group["params"], saved["params"], strict=True):
        entry = saved_state.get(name)
        if entry:
            step = entry.get("step")
            where = f" beside a parameter of group {index}"
            found.append(_SavedParam(param, entry, None if step is None else checked_step(step, where)))
    return found


def _precision_warnings(
    values: Sequence[LoadedValue], formats_of: Callable[[torch.Tensor], Mapping[str, Format]]
) -> list[str]:
    narrow = {
        f"{key} ({value.dtype})"
        for param, key, value, _ in values
        if value.itemsize < 4 and formats_of(param)[key].dtype == torch.float32
    }
    if not narrow:
        return []
    return [f"{', '.join(sorted(narrow))} loaded into float32: the values are exact, but as coarse as they were saved"]


def _step_warnings(unequal: Sequence[int]) -> list[str]:
    """Message on groups whose parameters had different numbers of steps."""
    if not unequal:
        return []
    return [
        f"loaded state dict has parameters at different steps in groups {unequal}; steps are counted by "
        "group. Parameters with fewer steps take their group's count, and their moments are scaled so that "
        "the bias-corrected ones stay what they were."
    ]


def _checked_structure(
    state_dict: Mapping[str, Any], param_groups: Sequence[Mapping[str, Any]]
) -> tuple[Sequence[Mapping[str, Any]], Mapping[Any, Any]]:
    """Groups and state of a state dict, checked to fit the optimizer's groups."""
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


def _saved_step(saved: Mapping[str, Any], counts: Set[int], index: int, current: int) -> int | None:
    """Step of a saved group. torch keeps it beside each parameter; the largest is the group's."""
    largest = max(counts, default=None)
    if saved.get("step") is None:
        return largest
    step = checked_step(saved["step"], f" in group {index}")
    if largest is None or largest in (step, round_fp32(step)):  # torch keeps it in float32
        return step
    # A reader that fills in our state dict leaves values alone that the checkpoint lacks: the
    # group's step, if torch AdamW wrote the checkpoint.
    filled_in = {step, largest} - {current}
    if len(filled_in) > 1:
        raise ValueError(
            f"loaded state dict has step {step} in group {index}, but step {largest} beside its parameters"
        )
    return filled_in.pop()


def merged_group(
    saved: Mapping[str, Any], group: Mapping[str, Any], step: int | None, rule: UpdateRule
) -> dict[str, Any]:
    """A group with the saved settings and the present parameters.

    Raises:
        ValueError: for a setting that cannot be copied.
    """
    # A tensor, such as lr, belongs to one optimizer: filling it may not reach the one that was
    # saved.
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
    kept: ParamState | None,
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
            if param.dtype != torch.float32:  # a float32 parameter is its own master
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
        check_storable(key, formats[key], value, nonnegative=key in rule.nonnegative)
        values.append((key, value))
    return values


def _detached_from_storage(plan: LoadPlan, state: StateMapping) -> list[LoadedValue]:
    """Values of a plan that have to be copied.

    Values that are the live storage of their own place need no copy. Values of another place are
    cloned before anything is written over them.
    """
    views = (view for entry in state.values() for view in entry.storage.views.values())
    storages = {view.untyped_storage().data_ptr() for view in views if view.numel()}
    values = []
    for loaded in plan.values:
        value = loaded.value
        if value.numel() and value.untyped_storage().data_ptr() in storages:
            own = state[loaded.param].storage
            if same_memory(value, own.views[loaded.key]):
                _mark_loaded(own, loaded.key)  # readers fill a state dict in place, then load it
                if loaded.factor == 1.0:
                    continue
            else:
                loaded = loaded._replace(value=value.clone())
        values.append(loaded)
    return values


def _mark_loaded(state: ParamState, key: str) -> None:
    """Makes values authoritative that a reader wrote in place.

    A master that is not, and still has a parameter's value in every element, was left alone by the
    reader because the checkpoint has none. The next step then starts from the parameter, which may
    be loaded later.
    """
    if key == MASTER_PARAM and not state.is_set(key) and state.extent is not None:
        stored = state.stored(key)
        dtype = state.extent.layout.param_dtype
        parts = stored.data.split(_COMPARED_ELEMENTS)
        if stored.format.of_quantised:
            untouched = is_param_value(state)
        elif stored.format.needs_param:
            untouched = not any(part.any() for part in parts)
        else:
            untouched = all(torch.equal(part, part.to(dtype).to(part.dtype)) for part in parts)
        if untouched:
            return
    state.mark_set(key)


def apply_load(plan: LoadPlan, state: StateMapping) -> None:
    """Copies the values into storage, and resets state that the checkpoint lacks.

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
            entry.storage.unset_master()
    for param, key, value, factor in values:
        state[param].set_unscaled(key, value if factor == 1.0 else value.float() * factor)
