"""Key of a profile: a GPU, its link, its host, and the versions in use."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fused_offload.memory import cuda_driver, numa
from fused_offload.memory.host_limits import read_text

from .units import printable

_PACKAGES = ("fused-offload", "torch", "triton")
_CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class MachineKey:
    """Kind of machine that a profile is valid for.

    Machines of one kind share a profile, for instance in a home folder on a network.

    Attributes:
        gpu: the driver's name of the GPU.
        link: speed and width of its PCIe link, or ``"unknown"`` if Linux does not report it.
        host: CPU model, number of CPUs and NUMA nodes.
        versions: version of each package that the speed of a step depends on.
    """

    gpu: str
    link: str
    host: str
    versions: Mapping[str, str]

    @property
    def file_name(self) -> str:
        """Name of the profile's file, without versions: an outdated file is replaced."""
        digest = hashlib.sha256("\n".join((self.gpu, self.link, self.host)).encode()).hexdigest()
        return f"{re.sub('[^A-Za-z0-9]+', '-', self.gpu).strip('-')}-{digest[:12]}.json"


def read_key(index: int, sysfs: Path = numa.SYSFS) -> MachineKey:
    """Reads the key of a GPU of this process, without creating a CUDA context.

    Args:
        index: index of the device.
        sysfs: mount point of sysfs.

    Raises:
        RuntimeError: if there is no such device, or no driver.
    """
    return MachineKey(
        gpu=printable(cuda_driver.device_name(index)),
        link=printable(_read_link(cuda_driver.pci_bus_id(index), sysfs)),
        host=f"{printable(_cpu_name())}, {os.cpu_count()} CPUs, {max(1, len(numa.node_folders(sysfs)))} NUMA nodes",
        versions={
            **{name: version_of(name) or "none" for name in _PACKAGES},
            "CUDA driver": cuda_driver.driver_version(),
        },
    )


def _read_link(bus: str, sysfs: Path) -> str:
    pci = numa.pci_folder(bus, sysfs)
    speed, width = (read_text(pci / name).strip() for name in ("max_link_speed", "current_link_width"))
    return f"{speed} x{width}" if speed and width else "unknown"


def _cpu_name() -> str:
    lines = read_text(_CPUINFO, "utf-8", "replace").splitlines()  # firmware may give any bytes
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def version_of(package: str) -> str | None:
    """Version of an installed package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
