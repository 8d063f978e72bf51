"""Modules that are not installed, made up when they are imported.

Only for processes that run nothing else. Any name in such a module is an empty class, which takes
any arguments and, called with a function alone, gives it back: so it may stand for types, base
classes and decorators.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, ClassVar


class _Kind(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(cls, name, _kind(name, cls.__module__))
        return getattr(cls, name)

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__


def _kind(name: str, module: str) -> Any:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args and callable(args[0]) else self

    def accept(self: Any, *args: Any, **kwargs: Any) -> None: ...

    same = classmethod(lambda cls, item: cls)
    return _Kind(name, (), {"__module__": module, "__init__": accept, "__call__": call, "__class_getitem__": same})


class _Module(ModuleType):
    __path__: ClassVar[list[str]] = []
    __version__ = "99.0.0"  # new enough

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, _kind(name, self.__name__))
        return getattr(self, name)


class _Finder(MetaPathFinder, Loader):
    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.partition(".")[0] == self._package else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


def make_up(package: str) -> None:
    """Makes up a package and everything in it."""
    _forget(package)
    sys.meta_path.insert(0, _Finder(package))


def _forget(package: str) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        del sys.modules[name]


def import_making_up(module: str, own: Sequence[str]) -> list[str]:
    """Imports a module, and makes up the packages that it needs and that are not installed.

    Args:
        own: packages that must be there.

    Returns:
        those that were made up.
    """
    made: list[str] = []
    while True:
        try:
            importlib.import_module(module)
            return made
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            if package in (*made, *own, ""):
                raise
        made.append(package)
        make_up(package)
        _forget(module.partition(".")[0])  # halfway imported
