"""Import hook: calls a function right after a module has been executed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def call_after_import(name: str, function: Callable[[], None]) -> None:
    """Calls a function right after a module that is not imported yet has been executed.

    Args:
        name: dotted name of the module.
        function: called once. If it raises, the import fails, and the next import calls it again.
    """
    sys.meta_path.insert(0, _AfterImport(name, function))


class _AfterImport:
    """Finder that wraps the loader of one module; later finders in ``sys.meta_path`` find it.

    The finder stays there until the module has been executed: the module may be looked up without
    an import (``importlib.util.find_spec``), and an import may fail.
    """

    def __init__(self, name: str, function: Callable[[], None]) -> None:
        self._name = name
        self._function = function

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self._name or self not in sys.meta_path:
            return None
        behind = sys.meta_path[sys.meta_path.index(self) + 1 :]
        found = (finder.find_spec(name, path, target) for finder in behind if hasattr(finder, "find_spec"))
        spec = next((spec for spec in found if spec is not None), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            if self in sys.meta_path:
                self._function()
                sys.meta_path.remove(self)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
