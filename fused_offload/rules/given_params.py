"""Checks of the parameters that an optimizer is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from fused_offload.kernels.formats import Format
from fused_offload.params import placement
from fused_offload.params.dense import is_frozen
from fused_offload.params.dtensors import is_offloaded_by_fsdp, local_of
from fused_offload.params.quantised import is_quantised
from fused_offload.params.validation import FROZEN, check_params

from .base import MASTER_PARAM, UpdateRule

CPU_SHARDS = (
    "FSDP keeps these parameters in host memory that is not page-locked, so the optimizer steps them on the CPU, many "
    "times slower than on the GPU. Shard with CPUOffloadPolicy(pin_memory=True); behind load_state_dict(assign=True) "
    "call model.cpu(), which makes FSDP page-lock what was assigned."
)
"""Warning for parameters of which `are_cpu_shards` is true."""


def check_given(
    params: Sequence[torch.Tensor],
    where: str,
    rule: UpdateRule,
    formats_of: Callable[[torch.Tensor], Mapping[str, Format]],
) -> None:
    """Refuses parameters of one group that a rule cannot step.

    Args:
        params: the parameters.
        where: name of the group in errors.
        rule: the rule.
        formats_of: returns the stored format of each state key of a parameter.

    Raises:
        TypeError: for anything but tensors that can be updated.
        RuntimeError: for several devices or an unsupported one.
        ValueError: for a shape or sharding that the rule does not take.
    """
    check_params(params, where)
    for position, param in enumerate(params):
        rule.check_param(param)
        reason = why_not_quantised(param, rule, formats_of)
        if reason is not None:
            raise TypeError(f"Parameter {position} of {where} {reason}{f' {FROZEN}' if is_frozen(param) else ''}")


def why_not_quantised(
    param: torch.Tensor, rule: UpdateRule, formats_of: Callable[[torch.Tensor], Mapping[str, Format]]
) -> str | None:
    """Reason why a quantised parameter cannot be stepped, to follow its name; None for plain ones.

    Args:
        param: the parameter.
        rule: the rule that would step it.
        formats_of: returns the stored format of each state key of a parameter.
    """
    if not is_quantised(param):
        return None
    kind = f"is a {type(local_of(param)).__name__}, a quantised parameter"
    if len(rule.phases) > 1:
        return (
            f"{kind}, which an update rule of two phases does not step. Build the model with plain parameters (outside "
            "of quantized_model_init)."
        )
    if MASTER_PARAM not in formats_of(param):
        return f"{kind}, which has too few bits to be updated itself. Keep float32 masters: master_weights=True."
    return None


def are_cpu_shards(params: Sequence[torch.Tensor]) -> bool:
    """True if FSDP keeps some in host memory where no GPU steps them."""
    return any(
        is_offloaded_by_fsdp(param) and local_of(param).numel() and not placement.placement_of(param).on_host
        for param in params
    )
