"""Recognises calls of torch's checkpoint functions to an optimizer's ordinary methods.

``get_optimizer_state_dict`` and ``set_optimizer_state_dict`` use only ``step``, ``state_dict`` and
``load_state_dict`` of an optimizer, for purposes that the arguments do not show.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import NamedTuple

_STATE_DICT_MODULE = "torch.distributed.checkpoint.state_dict"
_GETS = "_get_optim_state_dict"  # behind get_optimizer_state_dict, and called by _LOADS, too
_LOADS = "_load_optim_state_dict"  # behind set_optimizer_state_dict


class Wanted(NamedTuple):
    """Purpose of a state dict.

    Attributes:
        with_steps: put ``step`` beside each parameter's state as well, where torch's optimizers
            have it. Readers that fill in the state dict then find the step count in either layout.
        on_host: hand out copies of tensors that are not in host memory. torch copies a full state
            dict to all of its tensors at once, and wants them on one device.
        gathered: hand out remainders as int32, since collectives take no 16-bit integers.
    """

    with_steps: bool = False
    on_host: bool = False
    gathered: bool = False


def is_dummy_step() -> bool:
    """True if those functions called the running ``step`` to make an optimizer create its state.

    They call it with zero gradients and a learning rate of zero. The call has to make state, but
    must not count. Only its caller distinguishes it from the first step of a warm-up: gradients may
    be zero on one rank only, and ranks have to agree on the count without communication.
    """
    return any(True for _ in _callers())


def wanted_state_dict() -> Wanted:
    """Purpose of a running ``state_dict``."""
    callers = {frame.f_code.co_name: frame for frame in _callers()}
    info = callers[_GETS].f_locals.get("info") if _GETS in callers else None
    return Wanted(
        with_steps=bool(callers), on_host=_LOADS in callers, gathered=bool(getattr(info, "full_state_dict", False))
    )


def _callers() -> Iterator[FrameType]:
    """Frames of those functions that wait for the running call."""
    if _STATE_DICT_MODULE not in sys.modules:
        return
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == _STATE_DICT_MODULE:
            yield frame
        frame = frame.f_back
