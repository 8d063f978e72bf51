"""Extents: consecutive storage of many parameters, one array per state key."""

from __future__ import annotations

import torch

from fused_offload.kernels.formats import Stored, encode_
from fused_offload.memory import cuda_ipc, numa
from fused_offload.memory.pinned import PinnedSlab
from fused_offload.state.layout import Layout, extent_place

_CPU = torch.device("cpu")
_ENCODED_ELEMENTS = 2**20
"""Number of elements to encode at a time; bounds the temporary memory of loads."""


def write_values(stored: Stored, values: torch.Tensor) -> None:
    """Encodes ``[numel]`` values of any float dtype and device, in parts of bounded size."""
    device = stored.data.device
    for start in range(0, values.numel(), _ENCODED_ELEMENTS):
        part = values[start : start + _ENCODED_ELEMENTS].to(device, torch.float32)
        encode_(stored.narrow(start, part.numel()), part)


class Extent:
    """Consecutive state of parameters of one layout, zero-filled at first.

    Attributes:
        layout: common properties of the parameters.
        numel: number of elements, a multiple of `ALIGNMENT`.
        place: byte offsets of the arrays in the memory.
        nbytes: bytes of the memory.
        param_starts: first element of each of the parameters, ascending, as they were placed.
        stored: arrays of each key.
        slab: host memory of the extent, or None if it is resident on a device.
    """

    def __init__(self, layout: Layout, numel: int, *, pin: bool) -> None:
        """Allocates the memory, and waits for a GPU that has filled it.

        Whoever places parameters in it notes their starts.

        Args:
            layout: common properties of the parameters.
            numel: number of elements, a multiple of `ALIGNMENT`, at least one.
            pin: page-lock host memory.

        Raises:
            RuntimeError: if the memory cannot be allocated.
        """
        self.layout = layout
        self.numel = numel
        self.param_starts: list[int] = []
        self.place = place = extent_place(layout, numel)
        self.nbytes = place.nbytes
        self.slab = None
        if not layout.resident:
            self.slab = PinnedSlab(
                place.nbytes, pin=pin, numa_node=numa.preferred_node(layout.device), device=layout.device
            )
        with torch.inference_mode(False):  # as for the slab's memory
            self._memory = (
                torch.zeros(place.nbytes, dtype=torch.uint8, device=layout.device)
                if self.slab is None
                else self.slab.bytes
            )
            self.stored = place.carve(self._memory)
        if self.slab is None and layout.device != _CPU:
            # Readers and steps may be on other streams, and wait for what earlier steps enqueued only.
            torch.cuda.synchronize(layout.device)
        if self._memory.device.type == "cuda":
            cuda_ipc.make_parts_shareable(self._memory)

    @property
    def is_pinned(self) -> bool:
        """True if its host memory is page-locked now."""
        return self.slab is not None and self.slab.pinned

    def view(self, key: str, start: int, numel: int) -> torch.Tensor:
        """``[numel]`` stored elements of one key, as a tensor with a torch storage of its own.

        Saving, pickling or copying a tensor takes its whole storage. The storage is one element
        longer than the view, since checkpoint writers keep references to CPU tensors that fill
        their storage, and clone others.

        Args:
            key: state key.
            start: first element.
            numel: elements, at least one.
        """
        format = self.layout.formats[key]
        first = self.place.data[key] + start * format.element_bytes
        with torch.inference_mode(False):  # as for the slab's memory
            storage = self._memory.untyped_storage()[first : first + (numel + 1) * format.element_bytes]
            empty = torch.empty(0, dtype=format.dtype, device=self._memory.device)
            return empty.set_(storage, 0, (numel,), (1,))

    def address_of(self, key: str, start: int) -> int:
        """Address of one stored element of a key, in bytes."""
        data = self.stored[key].data
        return data.data_ptr() + start * data.itemsize

    def narrow(self, key: str, start: int, numel: int) -> Stored:
        """One key's elements ``[start, start + numel)``; ``start`` is a multiple of `ALIGNMENT`."""
        return self.stored[key].narrow(start, numel)

    def close(self) -> None:
        """Releases page locks; views stay readable."""
        if self.slab is not None:
            self.slab.close()
