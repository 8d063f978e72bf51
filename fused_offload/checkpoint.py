"""State dicts: TransformerEngine's layout and torch AdamW's, both ways.

Checkpoints hold unscaled values, so runs may change stored forms between save and load. Saving hands out references to
the live storage wherever its dtype says all (float32, bfloat16, 16-bit remainders): no second copy of the state. Only
block-scaled forms are expanded to float32.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from .dcp_calls import Wanted
from .dtensors import local_of, local_value
from .kernels.forms import Form, decode
from .mapping import StateMapping
from .state import StateEntry, check_storable, get_unscaled, same_memory, set_scaled
from .tensors import is_frozen

_TORCH_KEYS = ("amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay")
_SCALED_DTYPES = (torch.float16, torch.uint8)
_REQUIRED = ("lr", "betas", "eps", "weight_decay", "bias_correction")


def _exported(entry: StateEntry, key: str) -> torch.Tensor:
    view = entry.peek(key)
    if entry.extent is None and view.dtype in _SCALED_DTYPES:  # as other ranks export what they have of it
        return entry.outside(key, view.float())
    if entry.extent is None or not entry.form(key).scaled:
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
            fresh["step"] = int(fresh["step"])
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


def pack_for_torch(param_groups: Sequence[dict[str, Any]], state: StateMapping, *, adam_w_mode: bool) -> dict[str, Any]:
    """torch AdamW's layout: ``step`` beside each parameter's moments, no master weights."""
    groups = _packed_groups(param_groups)
    steps = {index: group.get("step", 0) for group in groups for index in group["params"]}
    packed = {}
    for index, entry in _bound_entries(state, _indices(param_groups)):
        moments = {key: get_unscaled(entry, key) for key in ("exp_avg", "exp_avg_sq")}
        packed[index] = {"step": _step_tensor(steps[index]), **moments}
    for group in groups:
        group.pop("step", None)
        group.pop("bias_correction", None)
        group.update(
            amsgrad=False,
            maximize=False,
            foreach=None,
            capturable=False,
            differentiable=False,
            fused=None,
            decoupled_weight_decay=adam_w_mode,
        )
    return {"state": packed, "param_groups": groups}


class LoadPlan(NamedTuple):
    """A checked state dict, ready to be applied.

    Attributes:
        groups: the new groups.
        values: parameter, state key and value, in group order.
    """

    groups: list[dict[str, Any]]
    values: list[tuple[torch.Tensor, str, torch.Tensor]]

    @property
    def params(self) -> list[torch.Tensor]:
        """Parameters that get state, each once."""
        return list({id(param): param for param, _, _ in self.values}.values())


def plan_load(
    state_dict: Mapping[str, Any],
    param_groups: Sequence[dict[str, Any]],
    forms_of: Callable[[torch.Tensor], Mapping[str, Form]],
    *,
    adam_w_mode: bool,
) -> LoadPlan:
    """Checks a state dict against the groups; changes nothing.

    Args:
        state_dict: TransformerEngine's or torch AdamW's layout.
        param_groups: the optimizer's groups.
        forms_of: stored form of each state key that the optimizer keeps for a parameter.
        adam_w_mode: the optimizer's kind of weight decay.

    Raises:
        ValueError: names what differs.
        TypeError: for values that are no tensors.
    """
    for key in ("state", "param_groups"):
        if key not in state_dict:
            raise ValueError(f"loaded state dict has no {key!r}; pass what state_dict() returned")
    saved_groups = state_dict["param_groups"]
    if len(saved_groups) != len(param_groups):
        raise ValueError(
            "loaded state dict has a different number of parameter groups "
            f"({len(saved_groups)}, here {len(param_groups)})"
        )
    unknown = set(state_dict["state"]) - {name for saved in saved_groups for name in saved["params"]}
    if unknown:
        raise ValueError(
            f"loaded state dict has state of parameters that are in none of its groups: {sorted(unknown, key=str)[:3]}"
        )
    groups, values = [], []
    for index, (saved, group) in enumerate(zip(saved_groups, param_groups, strict=True)):
        if len(saved["params"]) != len(group["params"]):
            raise ValueError(
                f"loaded state dict contains a parameter group that doesn't match the size of optimizer's group "
                f"(group {index}: {len(saved['params'])}, here {len(group['params'])})"
            )
        check_settings(saved, index, adam_w_mode)
        pairs = [(p, state_dict["state"].get(name)) for p, name in zip(group["params"], saved["params"], strict=True)]
        pairs = [(param, entry) for param, entry in pairs if entry is not None]
        step = _saved_step(saved, pairs, index, int(group.get("step", 0)))
        if step and not pairs and any(local_of(param).numel() and not is_frozen(param) for param in group["params"]):
            raise ValueError(
                f"loaded state dict has no state for any parameter of group {index} at step {step}. "
                "If they were frozen until then, load first and unfreeze them afterwards."
            )
        groups.append(merged_group(saved, group, step))
        for param, entry in pairs:
            values.extend(_checked_values(param, entry, forms_of(param), index))
    return LoadPlan(groups, values)


def check_settings(saved: Mapping[str, Any], index: int, adam_w_mode: bool) -> None:
    """Raises ValueError for a saved group that was trained in a way that this optimizer does not have."""
    for key in ("amsgrad", "maximize"):
        if saved.get(key):
            raise ValueError(f"loaded state dict was trained with {key}=True in group {index}; it is not supported")
    decoupled = saved.get("decoupled_weight_decay")
    if decoupled is not None and bool(decoupled) != adam_w_mode and saved.get("weight_decay"):
        raise ValueError(
            f"loaded state dict has decoupled_weight_decay={decoupled} in group {index}, but this optimizer has "
            f"adam_w_mode={adam_w_mode}; build it with adam_w_mode={bool(decoupled)}"
        )


def _saved_step(
    saved: Mapping[str, Any], pairs: Sequence[tuple[torch.Tensor, Mapping[str, Any]]], index: int, current: int
) -> int | None:
    """Step of a saved group; torch keeps it beside each parameter."""
    steps = {int(entry["step"]) for _, entry in pairs if entry.get("step") is not None}
    if len(steps) > 1:
        raise ValueError(
            f"loaded state dict has parameters at different steps {sorted(steps)} in group {index}; FusedOffloadAdam "
            "counts steps per group. Give them groups of their own."
        )
    beside = steps.pop() if steps else None
    if "step" not in saved:
        return beside
    step = int(saved["step"])
    if beside in (None, step):
        return step
    # A reader that fills in a state dict of ours leaves alone what the checkpoint does not have: the group's step if
    # torch AdamW wrote it.
    filled_in = {step, beside} - {current}
    if len(filled_in) > 1:
        raise ValueError(f"loaded state dict has step {step} in group {index}, but step {beside} beside its parameters")
    return filled_in.pop()


def merged_group(saved: Mapping[str, Any], group: Mapping[str, Any], step: int | None) -> dict[str, Any]:
    """A group with the settings that were saved and the parameters that are here."""
    # A tensor, such as lr, belongs to one optimizer: filling it may not reach the one that was saved.
    merged = {key: copy.deepcopy(value) for key, value in saved.items() if key not in (*_TORCH_KEYS, "params")}
    merged.update({key: group[key] for key in _REQUIRED if key not in merged and key in group})
    if "param_names" in group:
        merged["param_names"] = group["param_names"]
    if step is not None:
        merged["step"] = step
    return {**merged, "params": group["params"]}


def _checked_values(
    param: torch.Tensor, saved: Mapping[str, Any], forms: Mapping[str, Form], index: int
) -> list[tuple[torch.Tensor, str, torch.Tensor]]:
    unknown = set(saved) - {"exp_avg", "exp_avg_sq", "master_param", "step"}
    if unknown:
        raise ValueError(f"loaded state dict has unknown state {sorted(unknown)} in group {index}")
    local = local_of(param)
    values = []
    for key in ("exp_avg", "exp_avg_sq", "master_param"):
        value = saved.get(key)
        if value is None:
            if key != "master_param" and local.numel():
                raise ValueError(f"loaded state dict lacks {key} of a parameter in group {index}")
            continue
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"loaded state dict has a {type(value).__name__} as {key} in group {index}, not a tensor")
        if key not in forms:
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
        check_storable(key, forms[key].dtype, value)
        values.append((param, key, value))
    return values


def _detached_from_storage(plan: LoadPlan, state: StateMapping) -> list[tuple[torch.Tensor, str, torch.Tensor]]:
    """The values to copy.

    Those that are the live storage of their own place need no copy; those of another place are cloned before anything
    is written over them.
    """
    storages = {
        view.untyped_storage().data_ptr() for entry in state.values() for view in entry.peek_all() if view.numel()
    }
    values = []
    for param, key, value in plan.values:
        if value.numel() and value.untyped_storage().data_ptr() in storages:
            if same_memory(value, state[param].peek(key)):
                state[param].mark_loaded(key)  # checkpoint readers fill a state dict in place, then load it
                continue
            value = value.clone()
        values.append((param, key, value))
    return values


def apply_load(plan: LoadPlan, state: StateMapping) -> None:
    """Copies the values into storage and forgets state that the checkpoint does not have.

    Args:
        plan: a checked state dict; every parameter in it has its storage.
        state: the optimizer's state, updated in place.
    """
    loaded = {(id(param), key) for param, key, _ in plan.values}
    values = _detached_from_storage(plan, state)
    for entry in state.values():
        if (id(entry.param), "exp_avg") not in loaded:
            entry.reset_moments()
        if (id(entry.param), "master_param") not in loaded:
            entry.unset_master()
    narrow = set()
    for param, key, value in values:
        if value.dtype in (torch.bfloat16, torch.float16) and state[param].peek(key).dtype == torch.float32:
            narrow.add(f"{key} ({value.dtype})")
        set_scaled(state[param], key, value)
    if narrow:
        warnings.warn(
            f"{', '.join(sorted(narrow))} loaded into float32: the values are exact, but as coarse as they were saved",
            stacklevel=6,  # the caller of load_state_dict, whose decorators take three frames
        )
