"""Page-locked host memory of exact size. The only module that registers memory with the driver.

torch's pinned allocator rounds sizes up to a power of two and caches freed memory. Optimizer state
is the largest allocation in host memory, so it gets private mappings instead.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from . import cuda_driver, numa
from .forks import keep_in_children
from .host_limits import check_host_bytes

_MADV_POPULATE_WRITE = 23  # Linux 5.14; absent from Python's mmap module
_TOUCH_BYTES = 64 * 2**20


class PinnedSlab:
    """Zero-filled host memory of exactly ``nbytes``, page-locked if asked.

    The memory is a private anonymous mapping. All cores touch it in parallel, and it is registered
    once, for every device of the process. Forked children do not inherit registered memory, since
    Linux would copy all of it during the fork. A child that reads it ends with SIGSEGV.

    Attributes:
        bytes: ``[nbytes]`` uint8 on CPU. The memory lives until its last view dies, also after
            `close`.
        pinned: True while the memory is registered.
        numa_node: node that was requested for the pages, or None.
    """

    def __init__(
        self, nbytes: int, *, pin: bool, numa_node: int | None = None, device: torch.device | None = None
    ) -> None:
        """Allocates and registers.

        Args:
            nbytes: size, at least 1.
            pin: register with the CUDA driver.
            numa_node: requested node, or None for the default of Linux. Other nodes are used if it
                is full or the process may not choose.
            device: the only device that uses the page-locked memory; `close` waits for it. By
                default the device that is current at each call.

        Raises:
            RuntimeError: if the host has less memory left, Linux refuses to map it, or the driver
                refuses to register it.
        """
        check_host_bytes(nbytes)
        mapping = _map(nbytes)
        with torch.inference_mode(False):  # inference tensors cannot be written outside that mode
            self.bytes = torch.frombuffer(mapping, dtype=torch.uint8)
        self.numa_node = None
        if numa_node is not None and numa.prefer(self.bytes.data_ptr(), nbytes, numa_node) is None:
            self.numa_node = numa_node
        self.pinned = False
        if pin:
            self._register(mapping, device)

    def _register(self, mapping: mmap.mmap, device: torch.device | None) -> None:
        address, nbytes = self.bytes.data_ptr(), self.bytes.numel()
        keep_in_children(mapping)
        mapping.madvise(mmap.MADV_DONTFORK)
        _touch(address, nbytes)
        error = cuda_driver.register_host_memory(address, nbytes, device)
        if error is not None:
            mapping.madvise(mmap.MADV_DOFORK)
            raise RuntimeError(
                f"The CUDA driver refused to page-lock {nbytes / 1e9:.3f} GB of host memory: {error}. The "
                f"locked-memory limit (RLIMIT_MEMLOCK) is {_limit(resource.RLIMIT_MEMLOCK)}. "
                "Raise it (ulimit -l unlimited; in containers --ulimit "
                "memlock=-1), offload less (OffloadConfig.fraction), or set OffloadConfig(pin=False), which is slower."
            )
        self.pinned = True
        self._unregister = weakref.finalize(self, _unregister, address, os.getpid(), mapping, device)

    def close(self) -> None:
        """Waits for copies in flight and releases the page locks. Safe to call twice."""
        if self.pinned:
            self.pinned = False
            self._unregister()


def _map(nbytes: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise RuntimeError(
            f"Linux refused to map {nbytes / 1e9:.3f} GB of host memory: {error.strerror}. The limit of the "
            f"address space (RLIMIT_AS) is {_limit(resource.RLIMIT_AS)}. Raise it (ulimit -v unlimited), let "
            "Linux commit more (vm.overcommit_memory), or offload less (OffloadConfig.fraction)."
        ) from error


def _limit(kind: int) -> str:
    soft, _ = resource.getrlimit(kind)
    return "unlimited" if soft == resource.RLIM_INFINITY else f"{soft / 1e9:.3f} GB"


_registered: list[tuple[int, Any, torch.device | None]] = []
"""Address, mapping and device of memory to unregister; during a graph capture entries wait here."""


def _unregister(address: int, pid: int, mapping: Any, device: torch.device | None) -> None:
    """Finalizer. Holds the mapping, so that the memory outlives its registration."""
    if os.getpid() != pid:  # a forked child has neither the memory nor a CUDA context
        return
    _registered.append((address, mapping, device))
    if _is_capturing():  # waiting for the device would end the capture
        return
    while _registered:
        address, mapping, device = _registered.pop()
        cuda_driver.unregister_host_memory(address, device)
        mapping.madvise(mmap.MADV_DOFORK)


def _is_capturing() -> bool:
    try:
        return cuda_driver.is_capturing()
    except RuntimeError:  # the context is gone
        return False


def _touch(address: int, nbytes: int) -> None:
    """Makes every page resident, by all cores at once.

    Registration would touch the pages on one core, at 2-3 GB/s.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def touch_part(offset: int) -> None:
        size = min(_TOUCH_BYTES, nbytes - offset)
        if libc.madvise(address + offset, size, _MADV_POPULATE_WRITE) != 0:
            ctypes.memset(address + offset, 0, size)  # before Linux 5.14

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(touch_part, range(0, nbytes, _TOUCH_BYTES)))
