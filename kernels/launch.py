"""Launches of kernels: the address table, dtypes, a gradient scaler's signals, the compile cache.

Parameters and gradients stay where they are. The address table has one row per piece (the part of
one parameter that lies in the chunk). Each program finds the row of its piece by bisection.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from .formats import Stored, Whole

BLOCK_NUMEL = 1024
"""Number of elements of a kernel block, a multiple of `formats.SCALE_GROUP`."""

TABLE_COLUMNS = 6
"""int64 columns of a row: first program, parameter address, gradient address, state start, numel,
counter.

The first program is counted from the launch's program 0. The addresses are in bytes and point to
the piece's first element. The state start is in elements from the state pointers, and a multiple of
128. The counter is `formats.rounding_counter` of the piece's first element.
"""

ARRAY_COLUMNS = TABLE_COLUMNS + 2
"""Columns for rules with an operation between two phases.

The first of two further columns is the address in bytes of the piece in the operation's array. The
lower half of the second has the bits of the parameter's float32 scalar.
"""

NAME_OF_DTYPE = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
"""Compile-time names of parameter and gradient dtypes."""


class ScalerSignals(NamedTuple):
    """Signals of a gradient scaler, which kernels read on the device, so that no host waits.

    Attributes:
        grad_scale: ``[1]`` float32 that divides the gradients, or None.
        found_inf: ``[1]`` float32, nonzero to skip the step, or None. ``skips`` and ``skip_rows``
            are None if and only if this is.
        skips: ``[1]`` int64, number of steps skipped so far.
        skip_rows: ``[., width]`` float32; row ``skips - skips_before`` has the values of this step
            that depend on its number, see the rule's ``skip_rows``.
        skips_before: number of skips that row 0 takes into account.
    """

    grad_scale: torch.Tensor | None = None
    found_inf: torch.Tensor | None = None
    skips: torch.Tensor | None = None
    skip_rows: torch.Tensor | None = None
    skips_before: int = 0


class LaunchKind(NamedTuple):
    """Compile-time properties of a launch, next to the stored formats.

    Attributes:
        param_dtype: dtype of the values that are written to the parameters' addresses.
        grad_dtype: dtype of the gradients.
        numerics: name of the numerics.
        aligned: every address of a parameter or gradient is a multiple of 16 bytes.
        max_programs: most programs of the launch, each of which updates several kernel blocks in
            turn; None for a program per block. Used for zero copy, where more programs than keep
            the link busy only take multiprocessors from other work.
    """

    param_dtype: torch.dtype
    grad_dtype: torch.dtype
    numerics: str = "ieee"
    aligned: bool = False
    max_programs: int | None = None

    def grid(self, programs: int) -> tuple[int]:
        """Launch grid for ``programs`` kernel blocks."""
        return (programs if self.max_programs is None else min(programs, self.max_programs),)


def programs_of(numel: Whole) -> Whole:
    """Number of programs, one per kernel block, for a piece of ``numel`` elements."""
    return -(-numel // BLOCK_NUMEL)


def raw_pointer(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The tensor that a kernel gets for this one: bfloat16 as int16 bits."""
    return tensor.view(torch.int16) if tensor is not None and tensor.dtype == torch.bfloat16 else tensor


def shared_arguments(
    table: torch.Tensor,
    rows: int,
    programs: int,
    master: Stored | None,
    lr: float | torch.Tensor,
    kind: LaunchKind,
    signals: ScalerSignals,
) -> dict[str, Any]:
    """Arguments that the kernels of all rules take, by name.

    Args:
        table: address table, see `TABLE_COLUMNS`.
        rows: number of pieces.
        programs: sum of `programs_of` over the pieces.
        master: stored master weights or None.
        lr: learning rate, or a one-element tensor that the kernel reads.
        kind: properties of the launch.
        signals: a gradient scaler's signals.
    """
    lr_on_device = isinstance(lr, torch.Tensor)
    return {
        "table_ptr": table,
        "rows": rows,
        "blocks": programs,
        "master_ptr": None if master is None else master.data,
        "master_scale_ptr": None if master is None else master.scale,
        "lr": 0.0 if lr_on_device else lr,
        "lr_ptr": lr if lr_on_device else None,
        "skips_ptr": signals.skips,
        "skips_before": signals.skips_before,
        "grad_scale_ptr": signals.grad_scale,
        "found_inf_ptr": signals.found_inf,
        "PARAM": "fp32_out" if master is not None and master.format.of_quantised else NAME_OF_DTYPE[kind.param_dtype],
        "GRAD": NAME_OF_DTYPE[kind.grad_dtype],
        "MASTER": "none" if master is None else master.format.name,
        "ALIGNED": kind.aligned,
        "BLOCK": BLOCK_NUMEL,
        "num_warps": 4,
        "enable_fp_fusion": False,
    }


@functools.cache
def _ensure_writable_cache() -> None:
    """Gives Triton a private cache folder until this process exits, if its own cannot be used.

    For a user without HOME and without an entry in the users' database, Triton's own would be a
    folder called ``~`` below the current one. Another user may have put compiled code there.
    """
    folder = os.environ.get("TRITON_CACHE_DIR")
    if not folder:
        folder = os.path.join(os.environ.get("TRITON_HOME") or os.path.expanduser("~"), ".triton", "cache")
    try:
        if folder.startswith("~"):
            raise OSError("no home folder")
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError:
        folder = tempfile.mkdtemp(prefix="triton-cache-")  # for this user alone
        os.environ["TRITON_CACHE_DIR"] = folder
        atexit.register(_remove, folder, os.getpid())


def _remove(folder: str, pid: int) -> None:
    """Removes the folder when the process exits that made it, but not when a forked child does."""
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)


def compile_and_load(kernel: Any, arguments: Mapping[str, Any]) -> None:
    """Compiles the kernel for such arguments and loads it on the device, without launching it.

    A kernel that is loaded by its first launch could run out of memory in the middle of a step. If
    Triton's cache folder cannot be written (a read-only home), a private one is used.

    Args:
        kernel: a `triton.jit` function.
        arguments: arguments of the launch.
    """
    if not hasattr(kernel, "warmup"):  # Triton 3.4's interpreter compiles nothing
        return
    _ensure_writable_cache()
    compiled = kernel.warmup(**arguments, grid=(1,))
    load = getattr(compiled, "_init_handles", None)  # no public name; missing if interpreted
    if load is not None:
        load()


_module = functools.cache(importlib.import_module)


def imported_when_called(module: str, name: str) -> Callable[..., None]:
    """A function of a module that is imported at the first call, so that CPU steps need no Triton.

    Args:
        module: dotted name.
        name: name of the function in the module.
    """

    def call(*arguments: Any) -> None:
        getattr(_module(module), name)(*arguments)

    return call
