"""Master weights: their formats, and those of parameters that were changed outside the optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from fused_offload.kernels.formats import REMAINDER, SCALE_GROUP, Format, Stored, decode, encode_
from fused_offload.params.dtensors import local_of
from fused_offload.params.quantised import half_step_of, is_quantised, plain_values
from fused_offload.rules.base import MASTER_PARAM

from .layout import FormatsOf
from .param_state import ParamState

_SMALLEST_SHARE = 2.0**-14
"""Share of the largest of 128 neighbours. Half of the smallest number of E4M3 is 2^-19 of the
largest number of its tile."""
_COMPARED_ELEMENTS = 4 * 2**20  # at a time; a multiple of the scale group


def formats_with_master(formats: Mapping[str, Format], master: Format, *, remainders: bool) -> FormatsOf:
    """Function that returns the stored format of each state key of a new parameter.

    Args:
        formats: stored format of each of the rule's keys.
        master: stored format of masters.
        remainders: keep those of plain bfloat16 parameters as 16 bits beside the parameter.
    """
    plain = {**formats, MASTER_PARAM: master}
    beside_bfloat16 = {**formats, MASTER_PARAM: REMAINDER} if remainders else plain
    of_quantised = {**formats, MASTER_PARAM: master._replace(of_quantised=True)}

    def of(param: torch.Tensor) -> dict[str, Format]:
        if is_quantised(param):
            return of_quantised
        return beside_bfloat16 if param.dtype == torch.bfloat16 else plain

    return of


def refresh_master(state: ParamState) -> None:
    """Replaces the master by the parameter wherever the parameter is not the master's rounding.

    Remainders are kept. Only negative remainders of zero parameters become zero: no master has such
    a pair, and it would join to a NaN. Masters of quantised parameters are kept within a step of
    the parameter's format.

    Args:
        state: state with an authoritative ``master_param``, updated in place.
    """
    stored = state.stored(MASTER_PARAM)
    local = local_of(state.param)
    param = state.ordered(plain_values(local))
    refresh = _refresh_remainders if stored.format.needs_param else _refresh_values
    if stored.format.of_quantised:
        refresh = partial(_refresh_quantised, half_step=half_step_of(local))
    for start in range(0, param.numel(), _COMPARED_ELEMENTS):
        part = param[start : start + _COMPARED_ELEMENTS].to(stored.data.device)
        refresh(stored.narrow(start, part.numel()), part)


def is_param_value(state: ParamState) -> bool:
    """True if the stored masters of a quantised parameter are its own values, bit for bit."""
    stored = state.stored(MASTER_PARAM)
    scale = None if stored.scale is None else torch.empty_like(stored.scale)
    again = Stored(stored.format, torch.empty_like(stored.data), scale)
    encode_(again, state.ordered(plain_values(local_of(state.param))).to(stored.data.device))
    return torch.equal(again.data, stored.data)


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


def _refresh_quantised(stored: Stored, values: torch.Tensor, half_step: float) -> None:
    """Replaces masters that are no roundings of the values.

    Scales belong to the parameter's class. Near zero, where steps no longer shrink with the value,
    the largest of 128 neighbours stands for them.
    """
    magnitude = values.abs()
    groups = torch.nn.functional.pad(magnitude, (0, -len(magnitude) % SCALE_GROUP)).view(-1, SCALE_GROUP)
    near_zero = (groups.amax(dim=1) * _SMALLEST_SHARE).repeat_interleave(SCALE_GROUP)[: len(magnitude)]
    master = decode(stored)
    slack = _quantum(stored) / 2 + magnitude * half_step + near_zero
    is_rounding = ((master - values).abs() <= slack) | (master.isnan() & values.isnan())
    if not is_rounding.all():
        encode_(stored, torch.where(is_rounding, master, values))


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
