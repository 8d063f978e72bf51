"""NUMA nodes of GPUs and of host memory."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import platform
import re
from pathlib import Path

import torch

from . import cuda_driver
from .host_limits import read_int

SYSFS = Path("/sys")
_MPOL_PREFERRED = 1
_SYSTEM_CALLS = {"x86_64": (237, 279), "aarch64": (235, 239)}
"""Numbers of mbind and move_pages, for which libc has no functions."""

_BITS = 64
_SAMPLES = 64  # pages sampled of a slab


def node_folders(sysfs: Path = SYSFS) -> dict[int, Path]:
    """sysfs folder of each node by its number; empty if Linux shows none.

    Args:
        sysfs: mount point of sysfs.
    """
    found = {}
    for folder in (sysfs / "devices" / "system" / "node").glob("node[0-9]*"):
        number = re.fullmatch(r"node(\d+)", folder.name)
        if number:
            found[int(number[1])] = folder
    return dict(sorted(found.items()))


def device_node(bus: str, sysfs: Path = SYSFS) -> int | None:
    """NUMA node of a PCI device, or None if Linux does not know it.

    Args:
        bus: PCI address, such as ``"0000:3B:00.0"``; NVML writes the domain with eight digits.
        sysfs: mount point of sysfs.
    """
    return read_int(pci_folder(bus, sysfs) / "numa_node")  # -1 where it belongs to none


def pci_folder(bus: str, sysfs: Path = SYSFS) -> Path:
    """sysfs folder of a PCI device."""
    domain, _, rest = bus.lower().partition(":")
    return sysfs / "bus" / "pci" / "devices" / f"{int(domain, 16):04x}:{rest}"


@functools.cache
def preferred_node(device: torch.device) -> int | None:
    """Best node for the state of a device's parameters; None if unknown or irrelevant.

    Args:
        device: device of the parameters.
    """
    if device.type != "cuda" or len(node_folders()) < 2:
        return None
    return device_node(cuda_driver.pci_bus_id(torch.cuda.current_device() if device.index is None else device.index))


def prefer(address: int, nbytes: int, node: int) -> str | None:
    """Asks Linux to place untouched memory on a node. If the node is full, others are used.

    Args:
        address: start of a page.
        nbytes: size.
        node: the node.

    Returns:
        None, or the reason of a refusal.
    """
    numbers = _SYSTEM_CALLS.get(platform.machine())
    if numbers is None:
        return f"unknown on {platform.machine()}"
    words = node // _BITS + 1
    mask = (ctypes.c_ulong * words)()
    mask[node // _BITS] = 1 << (node % _BITS)
    # Linux reads one bit less than the given number.
    return _call(
        numbers[0],
        ctypes.c_void_p(address),
        ctypes.c_ulong(nbytes),
        ctypes.c_int(_MPOL_PREFERRED),
        mask,
        ctypes.c_ulong(words * _BITS + 1),
        ctypes.c_uint(0),
    )


def try_to_prefer(node: int) -> str | None:
    """Result of `prefer` for a temporary page."""
    page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return prefer(ctypes.addressof(ctypes.c_char.from_buffer(page)), mmap.PAGESIZE, node)


def nodes_of(address: int, nbytes: int) -> dict[int, float]:
    """Share of some memory on each node, from a sample of its pages; empty if unknown.

    Args:
        address: start of a page.
        nbytes: size, at least 1.
    """
    numbers = _SYSTEM_CALLS.get(platform.machine())
    if numbers is None:
        return {}
    pages = -(-nbytes // mmap.PAGESIZE)
    count = min(pages, _SAMPLES)
    addresses = (ctypes.c_void_p * count)(*(address + i * pages // count * mmap.PAGESIZE for i in range(count)))
    status = (ctypes.c_int * count)()
    refused = _call(
        numbers[1], ctypes.c_int(0), ctypes.c_ulong(count), addresses, ctypes.c_void_p(), status, ctypes.c_int(0)
    )
    nodes = [] if refused else [node for node in status if node >= 0]  # < 0: an absent page
    return {node: nodes.count(node) / len(nodes) for node in sorted(set(nodes))}


def _call(number: int, *arguments: object) -> str | None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    return None if libc.syscall(ctypes.c_long(number), *arguments) == 0 else os.strerror(ctypes.get_errno())
