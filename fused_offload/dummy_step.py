"""Recognises the step by which torch's checkpoint functions make an optimizer create its state."""

from __future__ import annotations

import sys

_STATE_DICT_MODULE = "torch.distributed.checkpoint.state_dict"


def is_dummy_step() -> bool:
    """Whether ``get_optimizer_state_dict`` or ``set_optimizer_state_dict`` asks for the step that is running.

    They call ``step()`` with zero gradients and a learning rate of zero. That has to make state, but must not count.
    Nothing but the caller tells it from the first step of a warm-up: gradients may be zero on one rank only, and ranks
    have to agree on the count without talking.
    """
    if _STATE_DICT_MODULE not in sys.modules:
        return False
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == _STATE_DICT_MODULE:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
