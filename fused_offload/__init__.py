"""Adam, Lion and Muon with their state in pinned host memory, at the speed of the link."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from typing import TYPE_CHECKING, Any

from .config import OffloadConfig

if TYPE_CHECKING:
    from .adam import FusedOffloadAdam
    from .lion import FusedOffloadLion
    from .muon import FusedOffloadMuon

__version__ = "0.1.0"

__all__ = ["FusedOffloadAdam", "FusedOffloadLion", "FusedOffloadMuon", "OffloadConfig"]

_MODULES = {"FusedOffloadAdam": "adam", "FusedOffloadLion": "lion", "FusedOffloadMuon": "muon"}


def _find_kernels() -> None:
    """Makes ``fused_offload.kernels`` of the folder ``kernels/`` beside this one in a checkout.

    An installation has it inside of this folder. A checkout does not, also if another copy is
    installed and Python was started in the checkout.
    """
    here = os.path.dirname(os.path.abspath(__file__))
    beside = os.path.join(os.path.dirname(here), "kernels")
    if os.path.isdir(os.path.join(here, "kernels")) or not os.path.isfile(os.path.join(beside, "formats.py")):
        return
    name = f"{__name__}.kernels"
    spec = importlib.util.spec_from_file_location(
        name, os.path.join(beside, "__init__.py"), submodule_search_locations=[beside]
    )
    if spec is not None and spec.loader is not None:
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        globals()["kernels"] = module


_find_kernels()


def __getattr__(name: str) -> Any:
    """Imports an optimizer and torch at first use, since the command's help needs neither."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
    return globals()[name]
