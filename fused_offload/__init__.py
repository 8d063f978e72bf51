"""FusedOffloadAdam: Adam with its state in pinned host memory, at the speed of the link."""

from .config import OffloadConfig
from .optimizer import FusedOffloadAdam

__all__ = ["FusedOffloadAdam", "OffloadConfig"]
