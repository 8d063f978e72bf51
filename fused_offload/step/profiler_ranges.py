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
        # torch asserts that a profiler which is on now was on at the beginning, but one can be
        # started from outside, or in another thread, at any time.
        with suppress(RuntimeError):
            self._mark.__exit__(*error)


def profiler_range(name: str) -> AbstractContextManager[Any]:
    """Marks what runs inside as ``FusedOffloadAdam::<name>``.

    While one of torch's profilers is on, this is `torch.profiler.record_function`, which marks
    kernels on the GPU, too. While they are off, that would still take the host 11 us, several times
    a step, and small steps take less than a millisecond. So it is then the range of torch's
    compiled code, which takes 2 us (one CPU, torch 2.13) and is still seen by profilers from
    outside.

    Args:
        name: name of the phase.
    """
    full_name = f"FusedOffloadAdam::{name}"
    if getattr(profiler, "_is_profiler_enabled", True) or torch.compiler.is_compiling():  # which knows only that one
        return profiler.record_function(full_name)
    return _Marked(full_name)
