"""Master weights of parameters that were changed outside the optimizer."""

from __future__ import annotations

import torch

from fused_offload.kernels.formats import SCALE_GROUP, Stored, decode, encode_
from fused_offload.params.dtensors import local_of
from fused_offload.rules.base import MASTER_PARAM

from .param_state import ParamState

_COMPARED_ELEMENTS = 4 * 2**20  # at a time; a multiple of the scale group


def refresh_master(state: ParamState) -> None:
    """Replaces the master by the parameter wherever the parameter is not the master's rounding.

    Remainders are kept. Only negative remainders of zero parameters become zero: no master has such
    a pair, and it would join to a NaN.

    Args:
        state: state with an authoritative ``master_param``, updated in place.
    """
    stored = state.stored(MASTER_PARAM)
    param = state.ordered(local_of(state.param))
    for start in range(0, param.numel(), _COMPARED_ELEMENTS):
        part = param[start : start + _COMPARED_ELEMENTS].to(stored.data.device)
        refresh = _refresh_remainders if stored.format.needs_param else _refresh_values
        refresh(stored.narrow(start, part.numel()), part)


def _refresh_remainders(stored: Stored, param: torch.Tensor) -> None:
    impossible = (param == 0) & (stored.data < 0)
    if impossible.any():
        stored.data.masked_fill_(impossible, 0)


def _refresh_values(stored: Stored, param: torch.Tensor) -> None:
    master = decode(stored)
    slack = _quantum(stored) / 2
    low, high = (master - slack).to(param.dtype), (master + slack).to(param.dtype)
    is_rounding = ((low <= param) & (param <= high)) | (param == _half_away(master, param.dtype))
    is_rounding |= param.isnan() & master.isnan()
    if not is_rounding.all():
        encode_(stored, torch.where(is_rounding, master, param.float()))


def _quantum(stored: Stored) -> torch.Tensor | float:
    """Distance of neighbouring stored values; storing changes a master by at most half of it."""
    if stored.scale is None:
        return 0.0
    values = stored.data.float()
    _, exponent = torch.frexp(values)
    exponent = exponent.masked_fill(values == 0, -13)  # frexp gives 0 for zero
    # fp16 has 11 bits, and is subnormal below 2^-14.
    spacing = torch.exp2((exponent.clamp(min=-13) - 11).float())
    return spacing * stored.scale.repeat_interleave(SCALE_GROUP)[: stored.data.numel()]


def _half_away(master: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The master rounded to a parameter: to bfloat16 half away from zero, as with remainders."""
    if dtype != torch.bfloat16:
        return master.to(dtype)
    bits = master.contiguous().view(torch.int32)
    return ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
