"""Recognises what torch's checkpoint functions want when they call an optimizer's ordinary methods.

``get_optimizer_state_dict`` and ``set_optimizer_state_dict`` know nothing of an optimizer but ``step``, ``state_dict``
and ``load_state_dict``, and use them for purposes that the calls themselves do not tell.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import NamedTuple

_STATE_DICT_MODULE = "torch.distributed.checkpoint.state_dict"
_GETS = "_get_optim_state_dict"  # the function behind get_optimizer_state_dict, also called by the next one
_LOADS = "_load_optim_state_dict"  # the function behind set_optimizer_state_dict


class Wanted(NamedTuple):
    """What a state dict is for.

    Attributes:
        with_steps: put ``step`` beside each parameter's state as well, where torch's optimizers have it. Readers that
            fill the state dict in then find the count of either, which is all that a group of torch AdamW's lacks.
        on_host: hand out copies of what is not in host memory: a full state dict is copied to all of it at once, for
            which torch wants one device.
        gathered: hand out remainders as int32, since collectives take no 16-bit integers.
    """

    with_steps: bool = False
    on_host: bool = False
    gathered: bool = False


def is_dummy_step() -> bool:
    """Whether a running ``step`` is the one by which those functions make an optimizer create its state.

    They call it with zero gradients and a learning rate of zero. That has to make state, but must not count. Nothing
    but the caller tells it from the first step of a warm-up: gradients may be zero on one rank only, and ranks have to
    agree on the count without talking.
    """
    return any(True for _ in _callers())


def wanted_state_dict() -> Wanted:
    """What a running ``state_dict`` is for."""
    callers = {frame.f_code.co_name: frame for frame in _callers()}
    info = callers[_GETS].f_locals.get("info") if _GETS in callers else None
    return Wanted(
        with_steps=bool(callers), on_host=_LOADS in callers, gathered=bool(getattr(info, "full_state_dict", False))
    )


def _callers() -> Iterator[FrameType]:
    """Those functions that wait for the running call."""
    if _STATE_DICT_MODULE not in sys.modules:
        return
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == _STATE_DICT_MODULE:
            yield frame
        frame = frame.f_back
