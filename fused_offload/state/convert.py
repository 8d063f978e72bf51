"""Conversion between values and stored formats, and validation of values."""

from __future__ import annotations

from typing import Any

import torch

from fused_offload.kernels.formats import REMAINDER, Format, decode
from fused_offload.params.dense import has_data, has_own_memory

from .param_state import ParamState
from .storage import write_values


def check_value(state: ParamState, key: str, value: Any, *, raw: bool = False) -> None:
    """Refuses a value that cannot be written to one key.

    Args:
        state: stored state of a parameter.
        key: state key.
        value: a tensor of this rank's part.
        raw: allow codes of a coded format, which have a meaning only with their scales.

    Raises:
        KeyError: for a key that the optimizer does not keep.
        TypeError: for a value that cannot be stored.
        ValueError: for a wrong shape, or values out of range.
    """
    if key not in state.views:
        raise KeyError(f"The optimizer keeps {', '.join(state.views)} for this parameter; it cannot take {key!r}")
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{key} should be a tensor, but got {type(value).__name__}")
    if value.shape != state.shape:
        raise ValueError(f"{key} should have shape {tuple(state.shape)}, but got {tuple(value.shape)}")
    format = state.formats[key]
    if not (raw and format.is_coded and value.dtype == format.dtype):
        check_storable(key, format, value, nonnegative=key in state.hooks.nonnegative)


def check_storable(key: str, format: Format, value: torch.Tensor, *, nonnegative: bool = False) -> None:
    """Refuses a tensor whose values would change their meaning when they are stored.

    Args:
        key: state key.
        format: stored format of the key.
        value: tensor of any shape.
        nonnegative: refuse negative values: the key's values are averages of squares.

    Raises:
        TypeError: for a tensor without plain dense memory, or a dtype that does not fit.
        ValueError: for a tensor whose memory was freed, or values out of range.
    """
    if value.layout != torch.strided or value.device.type == "meta":
        raise TypeError(f"{key} should be a dense tensor with data, but got {value.layout} on {value.device}")
    if not has_own_memory(value):
        raise TypeError(f"{key} should be a plain tensor, but got a {type(value).__name__}; dequantise it first")
    if not has_data(value):
        raise ValueError(
            f"{key} of shape {tuple(value.shape)} has lost its memory (its storage was resized or freed); pass a "
            "tensor with data"
        )
    gathered = format.needs_param and value.dtype == torch.int32  # see torch_dcp.Wanted
    if format.needs_param != (value.dtype == REMAINDER.dtype or gathered):
        raise TypeError(
            f"{key} is kept as {format.dtype}, but got {value.dtype}: a 16-bit remainder has a meaning only with the "
            "parameter that it was split from. Use store_param_remainders as when it was written."
        )
    if gathered and not torch.equal(value, value.to(format.dtype).to(value.dtype)):
        raise ValueError(
            f"{key} is kept as {format.dtype}, but got {value.dtype} values that do not fit; they should be remainders "
            "from -32768 to 32767"
        )
    if not format.needs_param and not value.dtype.is_floating_point:
        raise TypeError(f"{key} should be a floating point tensor, but got {value.dtype}")
    if nonnegative and value.numel() and value.detach().min() < 0:
        raise ValueError(f"{key} has negative values, but should be an average of squares; was it mixed up?")


def same_memory(value: torch.Tensor, view: torch.Tensor) -> bool:
    """True if ``value``, shaped like ``view``, has the same elements in the same memory."""
    return (
        value.device == view.device
        and value.data_ptr() == view.data_ptr()
        and value.dtype == view.dtype
        and value.stride() == view.stride()
        and value.is_neg() == view.is_neg()
    )


def unscaled(state: ParamState, key: str) -> torch.Tensor:
    """Values of one key, shaped like this rank's part of the parameter.

    Returns:
        The live view for float32 and 16-bit remainders; a new, exact float32 tensor for narrower
        formats.
    """
    view = state.views[key]
    if view.dtype == state.formats[key].value_dtype:
        return view
    return view.float() if state.extent is None else state.shaped(decode(state.stored(key)))


def stand_in(state: ParamState, key: str) -> torch.Tensor:
    """A tensor with the shape, dtype and signs of one key's values, without decoding them."""
    view, format = state.views[key], state.formats[key]
    return torch.zeros((), dtype=format.value_dtype, device="cpu").expand(view.shape) if format.is_coded else view


def write_unscaled(state: ParamState, key: str, value: torch.Tensor) -> None:
    """Writes checked float values (int16 for remainders) in their stored format."""
    view = state.views[key]
    if state.extent is None or same_memory(value, view):
        return
    value = _apart_from(value, view)
    if state.formats[key].needs_param:
        view.copy_(value)
    else:
        write_values(state.stored(key), state.ordered(value))


def write_elements(state: ParamState, key: str, value: torch.Tensor) -> None:
    """Writes a tensor, checked with ``raw``, as an assignment to an entry does.

    Elements of a scaled format, in its dtype, are taken with the present scales. Tensors of other
    dtypes are values.

    Raises:
        ValueError: for elements of a scaled format that do not belong to the present scales.
    """
    view = state.views[key]
    if state.extent is None or value is view or same_memory(value, view):
        return
    format, value = state.formats[key], _apart_from(value, view)
    if format.scaled and value.dtype != format.dtype:
        write_values(state.stored(key), state.ordered(value))
        return
    if format.scaled:
        scale = state.stored(key).scale
        assert scale is not None
        if not scale.any() and value.any():
            raise ValueError(
                f"{key} has no scales yet, so raw {format.dtype} elements have no meaning here. Write float32 values."
            )
        if format.is_coded and value.any() and not torch.equal(value.to(view.device), view):
            raise ValueError(
                f"{key} is kept as bytes that have a meaning only with their scales, which steps change. Only the "
                "present bytes can be written back: copy and write float32 values (get_unscaled_state, "
                "set_scaled_state, or state_dict and load_state_dict)."
            )
    view.copy_(value)


def _apart_from(value: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    """``value`` without autograd; a copy if it may share memory with ``view``."""
    value = value.detach()
    shared = value.device == view.device and value.untyped_storage().data_ptr() == view.untyped_storage().data_ptr()
    return value.clone() if shared else value
