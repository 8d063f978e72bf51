"""Imports of kernels at their first call: they need Triton, which steps on the CPU do without."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

_module = functools.cache(importlib.import_module)


def imported_when_called(module: str, name: str) -> Callable[..., None]:
    """A function of a module that is imported at the first call.

    Args:
        module: dotted name.
        name: name of the function in the module.
    """

    def call(*arguments: Any) -> None:
        getattr(_module(module), name)(*arguments)

    return call
