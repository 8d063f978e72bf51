"""The signals of a gradient scaler, from the optimizer's attributes or from the scaler itself."""

from __future__ import annotations

from typing import Any

import torch

from fused_offload.stream.step_inputs import ScalerInputs


def scaler_inputs(optimizer: Any, grad_scaler: Any) -> ScalerInputs:
    """Signals that ``GradScaler.step`` set on the optimizer, or those of a given scaler.

    Args:
        optimizer: has ``grad_scale`` and ``found_inf`` while its scaler calls ``step``.
        grad_scaler: ``torch.amp.GradScaler`` that was passed to ``step``, or None.
    """
    inputs = ScalerInputs(
        getattr(optimizer, "grad_scale", None), _flag(optimizer, getattr(optimizer, "found_inf", None))
    )
    if inputs.found_inf is not None or grad_scaler is None or not grad_scaler.is_enabled():
        return inputs
    per_optimizer = grad_scaler._per_optimizer_states[id(optimizer)]
    unscaled = bool(per_optimizer["found_inf_per_device"])  # unscale_() has divided the gradients
    found = per_optimizer["found_inf_per_device"] or grad_scaler._check_inf_per_device(optimizer)
    scale = grad_scaler._get_scale_async()
    found_inf = sum(flag.to(scale.device, non_blocking=True) for flag in found.values())
    return ScalerInputs(None if unscaled else scale, _flag(optimizer, found_inf))


def _flag(optimizer: Any, found_inf: Any) -> torch.Tensor | None:
    """The overflow flag; None in the place of torch's plain 0 if there are no gradients."""
    if found_inf is None or isinstance(found_inf, torch.Tensor):
        return found_inf
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if any(optimizer._grad_of(param) is not None for param in params):
        raise RuntimeError(
            "The gradient scaler did not check the gradients of this step: it looks at param.grad, not at "
            "param.decoupled_grad, and not at what is set after unscale_(). Unscale and check them yourself."
        )
    return None
