"""Model hooks that refer weakly to their optimizer and do nothing in copies of the model."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch


class WeakHook:
    """Calls a method as long as its object exists. Copies of it, pickled or not, do nothing."""

    def __init__(self, method: Callable[..., None]) -> None:
        """Takes a bound method."""
        self._method = weakref.WeakMethod(method)

    @property
    def owner(self) -> Any:
        """The object of the method, or None once it is gone."""
        method: Any = self._method()
        return None if method is None else method.__self__

    @torch._disable_dynamo  # copies, events and clocks are nothing to compile
    def __call__(self, *args: Any) -> None:
        """Calls the method with torch's arguments."""
        method = self._method()
        if method is not None:
            method(*args)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[()]]:
        return _hook_of_a_copy, ()


def _hook_of_a_copy() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*_: Any) -> None:
    """The hook of a copied model."""
