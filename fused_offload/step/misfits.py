"""Parameters that a step refuses, in words."""

from __future__ import annotations

import torch

from fused_offload.config import OffloadConfig
from fused_offload.params import placement
from fused_offload.params.dtensors import local_of
from fused_offload.params.quantised import is_quantised
from fused_offload.plan.transfer_settings import check_params_on_host
from fused_offload.rules.base import UpdateRule
from fused_offload.rules.given_params import why_not_quantised
from fused_offload.state.store import StateStore


def misfit(param: torch.Tensor, group: int, rule: UpdateRule, store: StateStore, config: OffloadConfig) -> str | None:
    """Reason why a parameter cannot be stepped, or does not fit its state, or None.

    Args:
        param: the parameter.
        group: index of its group.
        rule: the update rule.
        store: the optimizer's state.
        config: the configuration.
    """
    on_host = placement.placement_of(param).on_host
    try:
        rule.check_param(param)
        if on_host:  # may have become so after construction
            check_params_on_host(config, rule.phases, "This optimizer")
    except (RuntimeError, ValueError) as error:
        return str(error)
    reason = why_not_quantised(param, rule, store.formats_of)
    if reason is not None:
        return f"A parameter of group {group} {reason}"
    entry = store.state[param] if param in store.state else None
    if entry is None or entry.storage.extent is None:
        return None
    reason = entry.take_reshaped()
    if reason is not None:
        return f"{reason} It is in group {group}."
    layout, param = entry.storage.extent.layout, local_of(param)
    if is_quantised(param) != layout.is_quantised:
        kinds = ["quantised" if quantised else "plain" for quantised in (is_quantised(param), layout.is_quantised)]
        return (
            f"A parameter of group {group} is {kinds[0]} now ({type(param).__name__}), but its state was made for "
            f"a {kinds[1]} one. Drop optimizer.state[param] to start over."
        )
    if param.device != layout.param_device:
        return (
            f"A parameter of group {group} moved from {layout.param_device} to {param.device} after it got its "
            "state. Move it back, or save a state dict, build a new optimizer and load it."
        )
    if on_host != layout.params_on_host:
        now, then = ("page-locked now", "not") if on_host else ("not page-locked any more", "page-locked")
        return (
            f"A parameter of group {group} is {now}, but was {then} when its state was made, so it would be "
            "stepped on another device or many times slower. FSDP page-locks what load_state_dict(assign=True) "
            "assigned in the first forward pass: call model.cpu() before, to have it done at once. Then build a "
            "new optimizer and load its state."
        )
    if param.dtype != layout.param_dtype or param.shape != entry.storage.shape:
        return (
            f"A parameter of group {group} is {param.dtype} of shape {tuple(param.shape)} now, but its state "
            f"was made for {layout.param_dtype} of shape {tuple(entry.storage.shape)}. "
            "Drop optimizer.state[param] to start over."
        )
    return None
