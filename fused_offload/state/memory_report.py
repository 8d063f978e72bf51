"""Report of the bytes that an optimizer holds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from fused_offload.memory import numa
from fused_offload.memory.pinned import PinnedSlab

from .storage import Extent


@dataclass(frozen=True)
class MemoryReport:
    """Bytes that an optimizer holds, exactly as allocated.

    Attributes:
        host_bytes: offloaded state in host memory, per state key, scales and alignment included.
        resident_bytes: state on the parameters' own device, per state key.
        ring_bytes: GPU staging of the device's ring, shared by all optimizers of the process.
        work_bytes: GPU work memory of operations on whole parameters, shared likewise.
        param_numel: elements that have state.
        pinned: whether all offloaded state is page-locked.
        numa_nodes: NUMA nodes that offloaded state was requested on, as long as they have room;
            empty on hosts of one node and where Linux refuses.
        numa_bytes: bytes of offloaded state on each NUMA node, estimated from a sample of its
            pages; empty on hosts of one node and where Linux does not tell.
    """

    host_bytes: dict[str, int] = field(default_factory=dict)
    resident_bytes: dict[str, int] = field(default_factory=dict)
    ring_bytes: int = 0
    work_bytes: int = 0
    param_numel: int = 0
    pinned: bool = False
    numa_nodes: tuple[int, ...] = ()
    numa_bytes: dict[int, int] = field(default_factory=dict)


def memory_report(extents: Iterable[Extent], *, ring_bytes: int, work_bytes: int, param_numel: int) -> MemoryReport:
    """Adds up the bytes of extents by state key.

    Args:
        extents: storage in use.
        ring_bytes: GPU staging bytes.
        work_bytes: GPU bytes of work memory.
        param_numel: elements that have state.
    """
    host: dict[str, int] = {}
    resident: dict[str, int] = {}
    slabs: list[PinnedSlab] = []
    for extent in extents:
        bytes_of = host if extent.slab is not None else resident
        if extent.slab is not None:
            slabs.append(extent.slab)
        for key, (start, stop) in extent.place.spans.items():
            bytes_of[key] = bytes_of.get(key, 0) + stop - start
    return MemoryReport(
        host_bytes=host,
        resident_bytes=resident,
        ring_bytes=ring_bytes,
        work_bytes=work_bytes,
        param_numel=param_numel,
        pinned=bool(slabs) and all(slab.pinned for slab in slabs),
        numa_nodes=tuple(sorted({slab.numa_node for slab in slabs if slab.numa_node is not None})),
        numa_bytes=_numa_bytes(slabs),
    )


def _numa_bytes(slabs: Iterable[PinnedSlab]) -> dict[int, int]:
    found: dict[int, int] = {}
    if len(numa.node_folders()) > 1:
        for slab in slabs:
            nbytes = slab.bytes.numel()
            for node, share in numa.nodes_of(slab.bytes.data_ptr(), nbytes).items():
                found[node] = found.get(node, 0) + round(share * nbytes)
    return found
