"""Facts of this machine that `fused-offload doctor` examines, as plain values."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import re
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fused_offload.memory import cuda_driver, numa
from fused_offload.memory.host_limits import available_host_bytes, host_bytes, read_text
from fused_offload.memory.pinned import PinnedSlab
from fused_offload.profiles import profile_files as profiles
from fused_offload.profiles.machine_key import version_of

from .candidates import chosen, gigabytes, label
from .link import duplex_gbps

_COPY_BYTES = 64 * 2**20
_COPY_SECONDS = 0.3  # each way
PACKAGES = ("fused-offload", "torch", "triton", "transformer-engine", "megatron-core")
_ENVIRONMENT_VARIABLE = "FUSED_OFFLOAD_ADAM"


@dataclass(frozen=True, kw_only=True)
class Link:
    """A GPU's PCIe link; None for unknown values.

    Attributes:
        generation: current generation.
        generation_max: highest generation that GPU and board allow.
        width: current number of lanes.
        width_max: highest number of lanes that GPU and board allow.
    """

    generation: int | None = None
    generation_max: int | None = None
    width: int | None = None
    width_max: int | None = None


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU.

    Attributes:
        name: CUDA's name of the GPU.
        memory_bytes: total memory.
        capability: compute capability, major and minor, or None.
        driver: driver version, or None.
        nvml_error: error of NVML, or None.
        link: PCIe link, read right after the copies.
        numa_node: NUMA node of the GPU, or None if unknown.
        numa_error: error of a request for memory on that node, or None.
        gbps_by_node: speed of copies from each NUMA node, if there are several.
        error: error that prevented the examination of this GPU, or None.
        pin_error: error of page-locking a small piece of host memory, or None.
        h2d_gbps: speed of copies from page-locked memory alone, or None.
        d2h_gbps: speed of copies to page-locked memory alone, or None.
        profile: profile of `fused-offload tune`, in words.
        profile_is_outdated: True if there is a profile that must not be used any more.
    """

    name: str
    memory_bytes: int
    capability: tuple[int, int] | None = None
    driver: str | None = None
    nvml_error: str | None = None
    link: Link = Link()
    numa_node: int | None = None
    numa_error: str | None = None
    gbps_by_node: Mapping[int, float] = field(default_factory=dict)
    error: str | None = None
    pin_error: str | None = None
    h2d_gbps: float | None = None
    d2h_gbps: float | None = None
    profile: str = ""
    profile_is_outdated: bool = False


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Facts for `doctor.examine`.

    Attributes:
        cuda: CUDA version that torch was built for, or None.
        gpus: GPUs that this process sees.
        memlock_bytes: soft limit of locked memory, or None for no limit.
        host_bytes: memory of the machine, or None if Linux does not report it.
        free_host_bytes: bytes that this process may still allocate, or None if unknown.
        host_limit: name of the tightest limit: ``"machine"``, ``"cgroup"`` or ``"unknown"``.
        numa_nodes: free bytes of each node.
        cpu_nodes: nodes of the CPUs that this process may run on.
        versions: version of each package, or None if it is not installed.
        missing: for each module the error of its import, or None.
        autoload: value of the environment variable that installs into Megatron.
        autoload_present: True if the module that reads this variable is installed.
        duplex_gbps: speed of copies both ways at once, each way and GPU: of the slowest GPU alone,
            and with all GPUs at once; None with fewer than two GPUs.
    """

    cuda: str | None
    gpus: tuple[Gpu, ...]
    memlock_bytes: int | None
    host_bytes: int | None
    free_host_bytes: int | None
    host_limit: str
    numa_nodes: dict[int, int]
    cpu_nodes: frozenset[int]
    versions: dict[str, str | None]
    missing: dict[str, str | None]
    autoload: str
    autoload_present: bool
    duplex_gbps: tuple[float, float] | None = None


def read_machine(sysfs: Path = Path("/sys"), nvml: Callable[[], Any] | None = None) -> Machine:
    """Reads this machine. Measures copies for at most a second if there are GPUs.

    Args:
        sysfs: mount point of sysfs.
        nvml: imports the ``pynvml`` module.
    """
    free, limit = available_host_bytes()
    gpus = _read_gpus(sysfs, nvml or _import_nvml)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Machine(
        cuda=torch.version.cuda,
        gpus=gpus,
        duplex_gbps=_alone_and_together(gpus),
        memlock_bytes=None if soft == resource.RLIM_INFINITY else soft,
        host_bytes=host_bytes(),
        free_host_bytes=free,
        host_limit=limit,
        numa_nodes=read_numa_nodes(sysfs),
        cpu_nodes=read_cpu_nodes(sysfs, os.sched_getaffinity(0)),
        versions={name: version_of(name) for name in PACKAGES},
        missing={name: _why_missing(name) for name in ("transformer_engine", "megatron.core")},
        autoload=os.environ.get(_ENVIRONMENT_VARIABLE, ""),
        autoload_present=_why_missing("_fused_offload_autoload") is None,
    )


NOT_FOUND = "not found"


def _why_missing(module: str) -> str | None:
    package = module.partition(".")[0]
    try:
        if importlib.util.find_spec(package) is None:
            return NOT_FOUND
        with contextlib.redirect_stdout(sys.stderr):  # what it prints must not mix with the JSON
            importlib.import_module(package)
        return NOT_FOUND if importlib.util.find_spec(module) is None else None
    except (Exception, SystemExit) as error:  # a damaged package may raise anything
        return f"{type(error).__name__}: {error}"


def read_numa_nodes(sysfs: Path) -> dict[int, int]:
    """Free bytes of each NUMA node; empty if Linux shows none.

    Args:
        sysfs: mount point of sysfs.
    """
    nodes = {}
    for node, folder in numa.node_folders(sysfs).items():
        free = re.search(r"MemFree:\s+(\d+) kB", read_text(folder / "meminfo"))
        nodes[node] = int(free[1]) * 1024 if free else 0
    return nodes


def read_cpu_nodes(sysfs: Path, cpus: set[int]) -> frozenset[int]:
    """NUMA nodes of some CPUs.

    Args:
        sysfs: mount point of sysfs.
        cpus: numbers of the CPUs.
    """
    folders = numa.node_folders(sysfs)
    return frozenset(node for node, folder in folders.items() if any((folder / f"cpu{cpu}").exists() for cpu in cpus))


def _import_nvml() -> Any:
    import pynvml

    return pynvml


def _read_gpus(sysfs: Path, nvml: Callable[[], Any]) -> tuple[Gpu, ...]:
    if not torch.cuda.is_available():
        return ()
    # One after another, and the copies before NVML is asked: an idle link lowers its generation.
    count = torch.cuda.device_count()
    gpus = []
    for index in range(count):
        try:
            gpus.append(_read_gpu(index, _COPY_SECONDS / count, sysfs, nvml))
        except Exception as error:  # a lost or damaged GPU; torch raises many kinds
            gpus.append(Gpu(name=f"cuda:{index}", memory_bytes=0, error=f"{type(error).__name__}: {error}"))
    return tuple(gpus)


def _alone_and_together(gpus: Sequence[Gpu]) -> tuple[float, float] | None:
    """See `Machine.duplex_gbps`; GPUs that fail are left out."""
    devices = [torch.device("cuda", index) for index, gpu in enumerate(gpus) if not (gpu.error or gpu.pin_error)]
    if len(devices) < 2:
        return None
    try:
        return min(duplex_gbps([device]) for device in devices), duplex_gbps(devices)
    except (RuntimeError, OSError):  # too little memory for all GPUs at once
        return None


def _read_gpu(index: int, seconds: float, sysfs: Path, nvml: Callable[[], Any]) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    device = torch.device("cuda", index)
    pin_error, h2d, d2h = _measure(device, seconds, numa.preferred_node(device))
    found = profiles.of_device(index)
    facts = read_nvml(nvml, str(getattr(properties, "uuid", "")))
    facts |= _read_numa(cuda_driver.pci_bus_id(index), sysfs)
    if pin_error is None and facts["numa_error"] is None:
        facts["gbps_by_node"] = _gbps_by_node(device, seconds, _nodes_with_cpus(sysfs))
    return Gpu(
        name=properties.name,
        memory_bytes=properties.total_memory,
        capability=(properties.major, properties.minor),
        pin_error=pin_error,
        h2d_gbps=h2d,
        d2h_gbps=d2h,
        profile=_in_words(found),
        profile_is_outdated=found.is_outdated,
        **facts,
    )


def _in_words(found: profiles.Found) -> str:
    if found.profile is None:
        return found.reason
    choices = [f"{gigabytes(choice.state_bytes)} of state {label(chosen(choice))}" for choice in found.profile.choices]
    return f"{', '.join(choices)}; {found.reason}"


def _nodes_with_cpus(sysfs: Path) -> list[int]:
    """Nodes of host memory; those without CPUs may be GPU memory."""
    return [node for node, folder in numa.node_folders(sysfs).items() if any(folder.glob("cpu[0-9]*"))]


def _gbps_by_node(device: torch.device, seconds: float, nodes: Sequence[int]) -> dict[int, float]:
    """Speed of copies to the device from each node with memory, if there are several nodes."""
    if len(nodes) < 2:
        return {}
    measured = {node: _measure(device, seconds / len(nodes), node)[1] for node in nodes}
    return {node: gbps for node, gbps in measured.items() if gbps is not None}


def _measure(device: torch.device, seconds: float, node: int | None) -> tuple[str | None, float | None, float | None]:
    """Measures copies of a little page-locked memory, each way alone.

    Args:
        device: the GPU.
        seconds: time for each direction.
        node: NUMA node of the memory, or None for any.

    Returns:
        An error or None, and GB/s to the device and from it.
    """
    try:
        with torch.cuda.device(device):
            slab = PinnedSlab(_COPY_BYTES, pin=True, numa_node=node, device=device)
            try:
                mirror = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)
                return None, _gbps(mirror, slab.bytes, seconds), _gbps(slab.bytes, mirror, seconds)
            finally:
                slab.close()
    except (RuntimeError, OSError) as error:
        return str(error), None, None


def _gbps(target: torch.Tensor, source: torch.Tensor, seconds: float) -> float:
    target.copy_(source)
    torch.cuda.synchronize()
    copies, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds or not copies:
        target.copy_(source)
        copies += 1
        torch.cuda.synchronize()
    return copies * source.numel() / elapsed / 1e9 if elapsed > 0 else 0.0


def read_nvml(nvml: Callable[[], Any], uuid: str) -> dict[str, Any]:
    """Facts of a GPU from NVML, as keyword arguments of `Gpu`.

    Args:
        nvml: imports the ``pynvml`` module.
        uuid: torch's UUID of the GPU.
    """
    try:
        library = nvml()
        library.nvmlInit()
        try:
            # By UUID: NVML counts devices that CUDA_VISIBLE_DEVICES hides.
            handle = library.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())
            return {
                "driver": _decoded(library.nvmlSystemGetDriverVersion()),
                "link": Link(
                    generation=_ask(library, library.nvmlDeviceGetCurrPcieLinkGeneration, handle),
                    generation_max=_ask(library, library.nvmlDeviceGetMaxPcieLinkGeneration, handle),
                    width=_ask(library, library.nvmlDeviceGetCurrPcieLinkWidth, handle),
                    width_max=_ask(library, library.nvmlDeviceGetMaxPcieLinkWidth, handle),
                ),
            }
        finally:
            library.nvmlShutdown()
    except Exception as error:  # the package is missing or too old, or its library is unusable
        return {"nvml_error": str(error) or type(error).__name__}


def _read_numa(bus: str, sysfs: Path) -> dict[str, Any]:
    node = numa.device_node(bus, sysfs)
    several = node is not None and len(numa.node_folders(sysfs)) > 1
    return {"numa_node": node, "numa_error": numa.try_to_prefer(node) if node is not None and several else None}


def _ask(library: Any, question: Callable[[Any], int], handle: Any) -> int | None:
    try:
        return question(handle)
    except library.NVMLError:  # virtual machines hide some values
        return None


def _decoded(value: str | bytes) -> str:
    """Text of nvidia-ml-py, whose older releases return bytes."""
    return value.decode() if isinstance(value, bytes) else value
