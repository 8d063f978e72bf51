"""Which NUMA node memory is asked for on, and what is said about it, on hosts of the tests' own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fused_offload import FusedOffloadAdam
from fused_offload.memory import cuda_driver, numa, pinned
from fused_offload.memory.pinned import PinnedSlab
from fused_offload.state import memory_report, storage
from fused_offload.tuning.machine import read_numa_nodes

TWO_NODES = {0: Path("node0"), 1: Path("node1")}


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """A host of two nodes whose kernel only notes what it is asked for."""
    asked: list[tuple[int, int]] = []

    def prefer(address: int, nbytes: int, node: int) -> None:
        asked.append((nbytes, node))

    monkeypatch.setattr(numa, "node_folders", lambda: TWO_NODES)
    monkeypatch.setattr(pinned.numa, "prefer", prefer)
    return asked


def test_state_is_asked_for_on_the_node_of_its_gpu(
    two_nodes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage.numa, "preferred_node", lambda device: 1)
    monkeypatch.setattr(memory_report.numa, "nodes_of", lambda address, nbytes: {0: 0.25, 1: 0.75})
    param = torch.nn.Parameter(torch.zeros(1000))
    optimizer = FusedOffloadAdam([param])
    optimizer.initialize_state(param)
    found = optimizer.memory_report()
    [(nbytes, node)] = two_nodes
    assert (nbytes, node) == (sum(found.host_bytes.values()), 1)
    assert found.numa_nodes == (1,)
    assert found.numa_bytes == {0: nbytes // 4, 1: nbytes * 3 // 4}


def test_nothing_is_asked_for_where_it_does_not_matter(
    two_nodes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert numa.preferred_node(torch.device("cpu")) is None
    monkeypatch.setattr(numa, "node_folders", lambda: {0: Path("node0")})
    assert numa.preferred_node.__wrapped__(torch.device("cuda", 0)) is None  # without the driver
    PinnedSlab(4096, pin=False)
    assert two_nodes == []


def test_the_node_of_a_gpu(two_nodes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "pci_bus_id", lambda index: f"0000:3{index}:00.0")
    monkeypatch.setattr(numa, "device_node", lambda bus: {"0000:33:00.0": 1}.get(bus))
    assert numa.preferred_node.__wrapped__(torch.device("cuda", 3)) == 1
    assert numa.preferred_node.__wrapped__(torch.device("cuda", 4)) is None


def test_a_refusal_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned.numa, "prefer", lambda address, nbytes, node: "Operation not permitted")
    slab = PinnedSlab(4096, pin=False, numa_node=0)
    assert slab.numa_node is None
    assert not slab.bytes.any()


def test_this_host() -> None:
    if not numa.node_folders():
        pytest.skip("the kernel shows no NUMA nodes")
    free = read_numa_nodes(numa.SYSFS)
    # A full node would not fulfil the request, which is a preference only.
    node = max(free, key=lambda node: free[node])
    refused = numa.try_to_prefer(node)
    slab = PinnedSlab(10 * 4096 + 1, pin=False, numa_node=node)
    assert (slab.numa_node is None) == (refused is not None)
    slab.bytes.fill_(1)
    shares = numa.nodes_of(slab.bytes.data_ptr(), slab.bytes.numel())
    if refused is None and shares:  # the kernel does as it is told, and says so
        assert shares.get(node, 0) >= 0.99
    assert numa.try_to_prefer(1000) is not None  # no host has so many


@pytest.mark.gpu
def test_a_gpu_has_an_address() -> None:
    bus = cuda_driver.pci_bus_id(0)
    assert bus.count(":") == 2
    assert numa.pci_folder(bus).is_dir()
    assert cuda_driver.driver_version()
