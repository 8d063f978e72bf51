"""Saving: state dicts in TransformerEngine's layout and torch AdamW's.

Checkpoints hold unscaled values, so runs may change stored formats between save and load. Saving
hands out references to the live storage wherever its dtype says all (float32, bfloat16, 16-bit
remainders), which takes no second copy of the state. Only block-scaled formats are expanded to
float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fused_offload.params.dtensors import local_of
from fused_offload.rules.arguments import checked_step
from fused_offload.rules.base import UpdateRule
from fused_offload.state.entry import StateEntry
from fused_offload.state.mapping import StateMapping

from .torch_dcp import Wanted


def _exported(entry: StateEntry, key: str) -> torch.Tensor:
    """The live view where its dtype says all, else a new float32 tensor."""
    if entry.storage.formats[key].scaled:
        return entry.get_unscaled(key)
    entry.note_read(key)
    return entry.outside(key, entry.peek(key))


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


class _Packed(NamedTuple):
    position: int  # of the parameter, over all groups
    entry: StateEntry
    step: int  # that of the group


def _bound_entries(
    param_groups: Sequence[dict[str, Any]], groups: Sequence[dict[str, Any]], state: StateMapping
) -> list[_Packed]:
    """Entries with storage, in group order."""
    params = [param for group in param_groups for param in group["params"]]
    indices = {id(param): index for index, param in enumerate(params)}
    steps = [group.get("step", 0) for group in groups for _ in group["params"]]
    entries = []
    for param, entry in state.items():
        if not entry.storage.bound:
            continue
        if id(param) not in indices:
            raise RuntimeError(
                f"A parameter of shape {tuple(param.shape)} has state but is in no parameter group, so its state could "
                "not be found again after a load. Put it back into param_groups, or drop optimizer.state[param]."
            )
        index = indices[id(param)]
        entries.append(_Packed(index, entry, steps[index]))
    return sorted(entries, key=lambda packed: packed.position)


def pack(param_groups: Sequence[dict[str, Any]], state: StateMapping, wanted: Wanted) -> dict[str, Any]:
    """Packs state in TransformerEngine's layout, with ``step`` in each group.

    Args:
        param_groups: the optimizer's groups.
        state: its state.
        wanted: requests of torch's checkpoint functions.

    Raises:
        RuntimeError: for a parameter with state that is in no group.
    """
    groups = _packed_groups(param_groups)
    packed = {}
    for index, entry, step in _bound_entries(param_groups, groups, state):
        entry.storage.fill_master()
        values = {key: _as_wanted(entry, key, wanted) for key in entry}
        packed[index] = {"step": _step_tensor(step), **values} if wanted.with_steps else values
    return {"state": packed, "param_groups": groups}


def _as_wanted(entry: StateEntry, key: str, wanted: Wanted) -> torch.Tensor:
    value = _exported(entry, key)
    local = local_of(value)
    if wanted.gathered and entry.storage.formats[key].needs_param:
        return entry.outside(key, local.int())
    if wanted.on_host and local.device.type != "cpu":
        return entry.outside(key, local.cpu())
    return value


def _step_tensor(step: int) -> torch.Tensor:
    return torch.tensor(float(step), dtype=torch.float32, device="cpu")


def pack_for_torch(param_groups: Sequence[dict[str, Any]], state: StateMapping, rule: UpdateRule) -> dict[str, Any]:
    """Packs state in torch's layout, without masters; with ``step`` if torch's optimizer counts.

    Args:
        param_groups: the optimizer's groups.
        state: its state.
        rule: the optimizer's arithmetic.

    Raises:
        RuntimeError: for a parameter with state that is in no group.
    """
    groups = _packed_groups(param_groups)
    packed = {}
    for index, entry, step in _bound_entries(param_groups, groups, state):
        counted = {"step": _step_tensor(step)} if rule.counts_steps else {}
        packed[index] = {**counted, **{key: entry.get_unscaled(key) for key in rule.keys}}
    return {"state": packed, "param_groups": [rule.torch_group(group) for group in groups]}
