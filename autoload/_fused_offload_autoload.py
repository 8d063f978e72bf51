"""Installs FusedOffloadAdam when Megatron is imported, if ``FUSED_OFFLOAD_ADAM`` is 1.

For frameworks that start their own workers, where no line of code can be put in front.
`fused_offload_autoload.pth`, which Python reads at every start, imports this module if the variable
is set at all. It stands beside the package because importing `fused_offload.megatron` imports
torch, which must not happen in every Python process of a machine.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

_VARIABLE = "FUSED_OFFLOAD_ADAM"
_MEGATRON = "megatron.core.optimizer"


def arm() -> None:
    """Waits for Megatron's optimizers to be imported, unless the variable says no."""
    value = os.environ.get(_VARIABLE, "")
    if value not in ("", "0"):
        sys.meta_path.insert(0, _WaitForMegatron(value))


class _WaitForMegatron:
    """A finder that finds nothing, but sees the import that it waits for.

    It stays until the optimizer is installed, so that a wrong variable fails every import.
    """

    def __init__(self, value: str) -> None:
        self._value = value

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _MEGATRON or self not in sys.meta_path:
            return None
        if self._value != "1":
            # Here and not when Python starts: only who runs Megatron needs to know, and there it
            # cannot be overlooked.
            raise ValueError(
                f"Invalid {_VARIABLE}: {self._value!r}, it should be '1' to train with FusedOffloadAdam, or '0'"
            )
        from importlib.util import find_spec

        from fused_offload.megatron import install

        # `install` waits for the end of this import with its own finder, which the search now
        # passes.
        install()
        sys.meta_path.remove(self)
        return find_spec(name)
