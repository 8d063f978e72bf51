"""Where optimizer state lives and how it is moved: the one place for knobs and their defaults."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral, Real
from typing import Literal

MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """Knobs of the offload. Every combination gives bitwise the same training.

    Attributes:
        fraction: share of the state bytes that lives in host memory, in [0, 1]. In group order, whole parameters are
            offloaded until their state reaches this share; the rest stays on the parameters' device.
        chunk_bytes: state bytes that are moved and updated at a time, in one direction. The GPU holds up to ``depth``
            chunks. Too small costs launches, too large delays the first kernel and the last write-back. A chunk has
            at least 128 elements.
        depth: chunks in flight. 3 keeps both directions of the link and the kernel busy; 2 saves a chunk of GPU
            memory and loses 5-7 % (measured on an H100 over PCIe 5).
        window_bytes: GPU bytes of state that may be prefetched under backward and written back under the next forward
            pass, by `FusedOffloadAdam.prefetch` or `FusedOffloadAdam.attach`. 0 streams everything within the step.
            ``"auto"``: what activations have given back, as `FusedOffloadAdam.attach` learns.
        pin: page-lock the host memory. Without it copies go through the driver's bounce buffers and nothing overlaps.
    """

    fraction: float = 1.0
    chunk_bytes: int = 48 * MIB
    depth: int = 3
    window_bytes: int | Literal["auto"] = 0
    pin: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.fraction, bool) or not isinstance(self.fraction, Real) or not 0.0 <= self.fraction <= 1.0:
            raise ValueError(f"Invalid fraction: {self.fraction!r}, it should be a number in [0, 1]")
        for name in ("chunk_bytes", "depth"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
                raise ValueError(f"Invalid {name}: {value!r}, it should be an integer of at least 1")
        window = self.window_bytes
        if window != "auto" and (isinstance(window, bool) or not isinstance(window, Integral) or window < 0):
            raise ValueError(f"Invalid window_bytes: {window!r}, it should be an integer of at least 0, or 'auto'")
        if not isinstance(self.pin, bool):
            raise TypeError(f"Invalid pin: {self.pin!r}, it should be a bool")
