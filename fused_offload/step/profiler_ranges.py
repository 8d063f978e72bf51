"""Profiler ranges of a step."""

from __future__ import annotations

from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
from torch.autograd import profiler

_light: Any = getattr(torch._C._profiler, "_RecordFunctionFast", profiler.record_function)


class _Marked:
    """A profiler range from enter to exit; it raises nothing."""

    __slots__ = ("_mark",)

    def __init__(self, name: str) -> None:
        self._mark = _light(name)

    def __enter__(self) -> None:
        self._mark.__enter__()

    def __exit__(self, *error: object) -> None:
        # torch asserts that a profiler that is on now was on at the beginning. But one can be
        # started from outside or in another thread at any time.
        with suppress(RuntimeError):
            self._mark.__exit__(*error)


def profiler_range(name: str) -> AbstractContextManager[Any]:
    """Context that marks its operations as ``FusedOffloadAdam::<name>`` for profilers.

    While one of torch's profilers is on, this is `torch.profiler.record_function`, which marks
    kernels on the GPU, too. While they are off, that would still take 11 us of host time, several
    times a step, although small steps take less than a millisecond. So it is then the range that
    torch's compiled code uses, which takes 2 us (one CPU, torch 2.13). Profilers from outside see
    that as well.

    Args:
        name: name of the phase.
    """
    full_name = f"FusedOffloadAdam::{name}"
    # The compiler knows only record_function.
    if getattr(profiler, "_is_profiler_enabled", True) or torch.compiler.is_compiling():
        return profiler.record_function(full_name)
    return _Marked(full_name)
