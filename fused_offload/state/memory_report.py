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
        host_bytes: offloaded state in host memory by state key, with scales and alignment.
        resident_bytes: state on the parameters' own device by state key.
        ring_bytes: staging rings on GPUs, shared by all optimizers of the process.
        work_bytes: work memory of operations on whole parameters on GPUs, shared in the same way.
        step_bytes: GPU memory that the last step took for the updated values of quantised
            parameters, and gave back.
        param_numel: number of elements that have state.
        pinned: True if all offloaded state is page-locked.
        numa_nodes: NUMA nodes that offloaded state is preferred on; empty on hosts with one node,
            or if Linux refuses.
        numa_bytes: bytes of offloaded state on each NUMA node, estimated from a sample of its
            pages; empty on hosts with one node, or if Linux does not report it.
    """

    host_bytes: dict[str, int] = field(default_factory=dict)
    resident_bytes: dict[str, int] = field(default_factory=dict)
    ring_bytes: int = 0
    work_bytes: int = 0
    step_bytes: int = 0
    param_numel: int = 0
    pinned: bool = False
    numa_nodes: tuple[int, ...] = ()
    numa_bytes: dict[int, int] = field(default_factory=dict)

    def __str__(self) -> str:
        """One line for a log. GB is 1e9 bytes."""
        host, resident = sum(self.host_bytes.values()), sum(self.resident_bytes.values())
        parts = [f"{host / 1e9:.3f} GB on the host" + (", not page-locked" if host and not self.pinned else "")]
        if resident:
            parts.append(f"{resident / 1e9:.3f} GB on the parameters' device")
        if self.ring_bytes:
            parts.append(f"{self.ring_bytes / 1e9:.3f} GB of staging on the GPU")
        if self.work_bytes:
            parts.append(f"{self.work_bytes / 1e9:.3f} GB of work memory on the GPU")
        each = f" ({(host + resident) / self.param_numel:.2f} bytes each)" if self.param_numel else ""
        return f"state of {self.param_numel:,} parameters{each}: {', '.join(parts)}"


def memory_report(
    extents: Iterable[Extent], *, ring_bytes: int, work_bytes: int, step_bytes: int, param_numel: int
) -> MemoryReport:
    """Adds up the bytes of extents by state key.

    Args:
        extents: extents in use.
        ring_bytes: GPU bytes of staging rings.
        work_bytes: GPU bytes of work memory.
        step_bytes: GPU bytes that a step takes and gives back.
        param_numel: number of elements that have state.
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
        step_bytes=step_bytes,
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
