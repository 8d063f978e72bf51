"""Layouts of state: alignment, keys with their formats, and byte offsets of the arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable, Set
from dataclasses import dataclass, replace

import torch

from fused_offload.kernels.formats import SCALE_GROUP, Format, Stored
from fused_offload.rules.base import MASTER_PARAM

PARAM, GRAD = "param", "grad"
"""Keys of parameters and gradients in a slot, where they are in host memory; no state keys."""

ALIGNMENT = 128
"""Number of elements. Segments start and are cut at multiples of it."""


def align(numel: int) -> int:
    """``numel`` rounded up to a multiple of `ALIGNMENT`."""
    return -(-numel // ALIGNMENT) * ALIGNMENT


def chunk_numel(chunk_bytes: int, alignment_bytes: int) -> int:
    """Most elements of a chunk of ``chunk_bytes``: a multiple of `ALIGNMENT`, at least one.

    Args:
        chunk_bytes: state bytes that a chunk may move in one direction.
        alignment_bytes: state bytes of `ALIGNMENT` elements.
    """
    return max(1, chunk_bytes // alignment_bytes) * ALIGNMENT


FormatsOf = Callable[[torch.Tensor], dict[str, Format]]
"""Function that returns the stored format of each state key of a parameter."""

_ARRAY_ALIGNMENT = 256  # bytes; the widest access of any copy or kernel


@dataclass(frozen=True)
class Layout:
    """Common properties of parameters whose state lies together; constant between steps.

    Attributes:
        device: device that steps the parameters.
        param_dtype: dtype of the parameters; for quantised ones the dtype that they stand for.
        keys: state keys and their stored formats, in the order of storage. `MASTER_PARAM` is one of
            them if masters are kept.
        resident: True if the state stays on ``device``, False if it is in host memory.
        params_on_host: True if parameters and gradients are in host memory, and pass through the
            ring with their state.
    """

    device: torch.device
    param_dtype: torch.dtype
    keys: tuple[tuple[str, Format], ...]
    resident: bool
    params_on_host: bool = False

    @property
    def param_device(self) -> torch.device:
        """Device that the parameters are on."""
        return torch.device("cpu") if self.params_on_host else self.device

    @property
    def formats(self) -> dict[str, Format]:
        """Stored format of each state key."""
        return dict(self.keys)

    def only(self, keys: Set[str]) -> Layout:
        """This layout with only those of its keys that are in ``keys``."""
        return replace(self, keys=tuple(pair for pair in self.keys if pair[0] in keys))

    def in_slot(self, grad_dtype: torch.dtype) -> Layout:
        """The layout of a slot: with `PARAM` and `GRAD` where they pass through it."""
        if not self.params_on_host:
            return self
        beside = ((PARAM, Format(PARAM, self.param_dtype)), (GRAD, Format(GRAD, grad_dtype)))
        return replace(self, keys=self.keys + beside)

    @property
    def alignment_bytes(self) -> int:
        """State bytes of `ALIGNMENT` elements."""
        return self.state_bytes(ALIGNMENT)

    def state_bytes(self, numel: int) -> int:
        """State bytes of ``numel`` elements, a multiple of `ALIGNMENT`."""
        return sum(format.stored_bytes(numel) for _, format in self.keys)

    @functools.cached_property
    def is_quantised(self) -> bool:
        """True for parameters that are quantised from what a step writes."""
        return any(format.of_quantised for _, format in self.keys)

    @functools.cached_property
    def written_dtype(self) -> torch.dtype:
        """dtype of the parameter values that a step writes."""
        return torch.float32 if self.is_quantised else self.param_dtype

    @property
    def reads_master(self) -> bool:
        """True if a step reads `MASTER_PARAM`. A float32 parameter is its own master."""
        return self.is_quantised or (
            self.param_dtype != torch.float32 and any(key == MASTER_PARAM for key, _ in self.keys)
        )


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ARRAY_ALIGNMENT) * _ARRAY_ALIGNMENT


class ArrayPlace:
    """Byte offsets of each key's elements and scales in a range of memory.

    Attributes:
        nbytes: bytes in total.
        data: byte offset of each key's elements.
        scale: byte offset of each key's scales, for scaled formats.
        spans: first byte and end of the arrays of each key.
    """

    def __init__(self, formats: dict[str, Format], numel: int, *, gap: int = 0) -> None:
        """Places arrays one after the other.

        Args:
            formats: stored format of each key.
            numel: number of elements of each array, a multiple of `ALIGNMENT`.
            gap: bytes left free behind each key's arrays, a multiple of `_ARRAY_ALIGNMENT`.
        """
        self.formats = formats
        self.numel = numel
        self.data: dict[str, int] = {}
        self.scale: dict[str, int] = {}
        self.spans: dict[str, tuple[int, int]] = {}
        self.nbytes = 0
        for key, format in formats.items():
            self.data[key] = self.nbytes
            self.nbytes += _aligned(numel * format.element_bytes)
            if format.scaled:
                self.scale[key] = self.nbytes
                self.nbytes += _aligned(numel // SCALE_GROUP * 4)
            self.nbytes += gap
            self.spans[key] = (self.data[key], self.nbytes)

    def carve(self, memory: torch.Tensor) -> dict[str, Stored]:
        """Typed views into ``memory``, a uint8 tensor of at least `nbytes`."""
        return {key: self.stored(key, memory[start:stop]) for key, (start, stop) in self.spans.items()}

    def stored(self, key: str, span: torch.Tensor) -> Stored:
        """Typed views of one key into the uint8 bytes of its span."""
        format = self.formats[key]
        data = span[: self.numel * format.element_bytes].view(format.dtype)
        scale = None
        if format.scaled:
            scale = span[self.scale[key] - self.data[key] :][: self.numel // SCALE_GROUP * 4].view(torch.float32)
        return Stored(format, data, scale)


@functools.lru_cache(maxsize=64)
def block_place(layout: Layout, numel: int) -> ArrayPlace:
    """Byte offsets of the keys of ``numel`` elements in GPU memory, without gaps."""
    return ArrayPlace(layout.formats, numel)


def extent_place(layout: Layout, numel: int) -> ArrayPlace:
    """Byte offsets of the keys in an extent of ``numel`` elements."""
    return ArrayPlace(layout.formats, numel, gap=_ARRAY_ALIGNMENT)


def slot_bytes(layout: Layout, extent_numel: int, chunk_bytes: int) -> int:
    """Bytes of the largest chunk that an extent can have."""
    return block_place(layout, min(extent_numel, chunk_numel(chunk_bytes, layout.alignment_bytes))).nbytes
