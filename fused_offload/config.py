"""Configuration of the offload, with all its defaults."""

from __future__ import annotations

import argparse
import warnings
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal

from fused_offload.profiles.units import MIB

from .profiles import units

DEFAULT_CHUNK_BYTES = 48 * MIB
"""Largest chunk size without a profile of the machine."""

LEAST_DEFAULT_CHUNK_BYTES = 8 * MIB
"""Smallest chunk size without a profile of the machine."""

DEFAULT_DEPTH = 3
"""Depth without a profile of the machine."""

DEFAULT_PROGRAMS = 64
"""Programs of a zero-copy kernel without a profile of the machine.

64 and 128 are within 3 % of each other; 16 is up to 61 % slower (H100, PCIe 5 x16, two sweeps).
"""


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """Settings of the offload. All combinations give bitwise the same training.

    ``"auto"`` takes the choice of ``fused-offload tune`` on this machine, or a default without one.
    Sizes are numbers of bytes, or texts such as ``"48MiB"`` and ``"8GiB"``, which become numbers.

    Attributes:
        fraction: share of the state bytes in host memory, from 0 to 1. Whole parameters are
            offloaded in group order until their state reaches this share. The state of the others
            stays on the parameters' device. State of parameters in host memory is always offloaded.
        chunk_bytes: state bytes of a chunk in one direction. The GPU holds up to ``depth`` chunks
            of at least 128 elements. Small chunks cost launches; large ones delay the first kernel
            and the last write-back. The default is a sixteenth of the state, from 8 to 48 MiB.
        depth: chunks in flight. The default, 3, keeps both directions of the link and the kernel
            busy; 2 saves a chunk of GPU memory. With 1 to 100 million parameters, 2 took 7 % less
            to 14 % more time (H100 over PCIe 5, two sweeps).
        transport: ``"copy"`` moves chunks with the copy engines, through staging memory on the GPU.
            With ``"zero_copy"`` the kernel accesses host memory directly. That suits small state
            and links that a kernel uses as fast as a copy does. It was slower for large state over
            PCIe 5, and it takes multiprocessors from concurrent kernels. ``"auto"`` is ``"copy"``
            without a profile, without ``pin``, or if ``chunk_bytes`` or ``depth`` is given.
        zero_copy_programs: maximum number of programs of the zero-copy kernel. Programs beyond
            those that saturate the link only take multiprocessors. The default is 64.
        window_bytes: GPU bytes for state that is prefetched under the backward pass and written
            back under the next forward pass, by `OffloadOptimizer.prefetch` or
            `OffloadOptimizer.attach`. With 0 all state streams within the step. ``"auto"`` uses the
            memory that activations have freed, as `OffloadOptimizer.attach` measures it.
        graph: has no effect, and True gives a ``DeprecationWarning``. It replayed the step as a
            CUDA graph, which was at most 2 % faster and up to 31 % slower.
        pin: page-lock the host memory. Without it copies go through the driver's bounce buffers and
            nothing overlaps.
    """

    fraction: float = 1.0
    chunk_bytes: int | str = "auto"
    depth: int | Literal["auto"] = "auto"
    transport: Literal["auto", "copy", "zero_copy"] = "auto"
    zero_copy_programs: int | Literal["auto"] = "auto"
    window_bytes: int | str = 0
    graph: bool = False
    pin: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.fraction, bool) or not isinstance(self.fraction, Real) or not 0.0 <= self.fraction <= 1.0:
            raise ValueError(f"Invalid fraction: {self.fraction!r}, it should be a number from 0 to 1, such as 0.5")
        plain: dict[str, Any] = {
            "fraction": float(self.fraction),
            "chunk_bytes": _size("chunk_bytes", self.chunk_bytes, 1),
            "depth": _count("depth", self.depth),
            "zero_copy_programs": _count("zero_copy_programs", self.zero_copy_programs),
            "window_bytes": _size("window_bytes", self.window_bytes, 0),
        }
        for name, value in plain.items():
            object.__setattr__(self, name, value)  # Python numbers: NumPy's overflow
        for name in ("graph", "pin"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"Invalid {name}: {getattr(self, name)!r}, it should be True or False")
        if self.graph:
            object.__setattr__(self, "graph", False)  # so that copies do not warn again
            warnings.warn(
                "OffloadConfig(graph=True) has no effect any more: replaying the step as a CUDA graph was at most 2 % "
                "faster and up to 31 % slower. Leave graph out; the next release will not accept it.",
                DeprecationWarning,
                stacklevel=3,
            )
        if not isinstance(self.transport, str) or self.transport not in ("auto", "copy", "zero_copy"):
            raise ValueError(f"Invalid transport: {self.transport!r}, it should be 'auto', 'copy' or 'zero_copy'")
        if self.transport == "zero_copy":
            if not self.pin:
                raise ValueError("transport='zero_copy' needs pin=True: a kernel reads page-locked memory only")
            if (self.chunk_bytes, self.depth) != ("auto", "auto"):
                raise ValueError("transport='zero_copy' has no chunks in flight: leave chunk_bytes and depth out")
        elif self.zero_copy_programs != "auto":
            raise ValueError("zero_copy_programs belongs to transport='zero_copy': set both, or neither")


def _size(name: str, value: Any, least: int) -> int | str:
    """Converts a size to a number of bytes, or to ``"auto"``.

    Args:
        name: name of the field.
        value: a whole number, or text.
        least: smallest accepted number.

    Raises:
        ValueError: if the size is not accepted.
    """
    if isinstance(value, str):
        try:
            return (units.chunk_bytes if least else units.window_bytes)(value)
        except argparse.ArgumentTypeError as error:
            raise ValueError(f"Invalid {name}: {error}") from None
    if not _is_whole(value, least):
        raise ValueError(
            f"Invalid {name}: {value!r}, it should be a whole number of bytes of at least {least}, or text such as "
            "'48MiB', '8GiB' or 'auto'"
        )
    return int(value)


def _count(name: str, value: Any) -> int | Literal["auto"]:
    if isinstance(value, str) and value == "auto":
        return "auto"
    if not _is_whole(value, 1):
        raise ValueError(f"Invalid {name}: {value!r}, it should be a whole number of at least 1, such as 3, or 'auto'")
    return int(value)


def _is_whole(value: Any, least: int) -> bool:
    is_number = isinstance(value, Integral) and not isinstance(value, bool)
    return is_number and least <= value < units.MOST_PARAMS
