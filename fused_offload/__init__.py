"""FusedOffloadAdam: Adam with its state in pinned host memory, at the speed of the link."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .config import OffloadConfig

if TYPE_CHECKING:
    from .optimizer import FusedOffloadAdam

__all__ = ["FusedOffloadAdam", "OffloadConfig"]


def __getattr__(name: str) -> Any:
    """Imports the optimizer, and with it torch, when it is asked for: the command line's help needs neither."""
    if name != "FusedOffloadAdam":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .optimizer import FusedOffloadAdam

    globals()[name] = FusedOffloadAdam
    return FusedOffloadAdam
