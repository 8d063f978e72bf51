"""FusedOffloadAdam: Adam with its state in pinned host memory, at the speed of the link."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from .config import OffloadConfig

if TYPE_CHECKING:
    from .optimizer import FusedOffloadAdam

__all__ = ["FusedOffloadAdam", "OffloadConfig"]

_ABOVE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if os.path.isfile(os.path.join(_ABOVE, "kernels", "forms.py")):
    # A checkout, and Python was perhaps started in it: `kernels/`, which the installation puts in here, is beside.
    __path__.append(_ABOVE)


def __getattr__(name: str) -> Any:
    """Imports the optimizer, and with it torch, when it is asked for: the command line's help needs neither."""
    if name != "FusedOffloadAdam":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .optimizer import FusedOffloadAdam

    globals()[name] = FusedOffloadAdam
    return FusedOffloadAdam
