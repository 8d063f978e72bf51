"""Masters after the parameters were changed behind the optimizer's back."""

from __future__ import annotations

import torch

from fused_offload.kernels.formats import SCALE_BLOCK, Stored, decode, encode_
from fused_offload.params.dtensors import local_of

from .entry import StateEntry

_BLOCK = 4 * 2**20  # elements compared at a time; a multiple of the scale block


def refresh_master(entry: StateEntry) -> None:
    """Replaces the master by the parameter wherever the parameter is not the master's rounding.

    Args:
        entry: state with an authoritative ``master_param``, updated in place. Remainders are kept, but negative ones
            of parameters that are zero become zero: no master has such a pair, and joined they would be NaN.
    """
    stored = entry.stored("master_param")
    param = entry.ordered(local_of(entry.param))
    for start in range(0, param.numel(), _BLOCK):
        block = param[start : start + _BLOCK].to(stored.data.device)
        refresh = _refresh_remainders if stored.format.name == "remainder" else _refresh_block
        refresh(stored.narrow(start, block.numel()), block)


def _refresh_remainders(stored: Stored, param: torch.Tensor) -> None:
    impossible = (param == 0) & (stored.data < 0)
    if impossible.any():
        stored.data.masked_fill_(impossible, 0)


def _refresh_block(stored: Stored, param: torch.Tensor) -> None:
    master = decode(stored)
    slack = _quantum(stored) / 2
    low, high = (master - slack).to(param.dtype), (master + slack).to(param.dtype)
    is_rounding = ((low <= param) & (param <= high)) | (param == _half_away(master, param.dtype))
    is_rounding |= param.isnan() & master.isnan()
    if not is_rounding.all():
        encode_(stored, torch.where(is_rounding, master, param.float()))


def _quantum(stored: Stored) -> torch.Tensor | float:
    """How far apart neighbouring stored values are: what storing may have moved a master by, twice over."""
    if stored.scale is None:
        return 0.0
    values = stored.data.float()
    _, exponent = torch.frexp(values)
    exponent = exponent.masked_fill(values == 0, -13)  # frexp gives 0 for zero
    spacing = torch.exp2((exponent.clamp(min=-13) - 11).float())  # fp16: 11 bits, subnormal below 2^-14
    return spacing * stored.scale.repeat_interleave(SCALE_BLOCK)[: stored.data.numel()]


def _half_away(master: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The master rounded half away from zero, as parameters with remainders are; only bfloat16 ones are."""
    if dtype != torch.bfloat16:
        return master.to(dtype)
    bits = master.contiguous().view(torch.int32)
    return ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
