"""Calls of the CUDA driver API that torch does not offer.

The driver API, unlike the runtime API, keeps no sticky error: a refused call changes nothing.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE: pinned for every context of the process
_DEVICEMAP = 2  # CU_MEMHOSTREGISTER_DEVICEMAP: kernels may read and write it
_TEXT_BYTES = 256
_DEINITIALIZED = 4  # CUDA_ERROR_DEINITIALIZED: the process is exiting


@functools.cache
def _driver() -> Any:
    library = ctypes.CDLL("libcuda.so.1")
    library.cuMemHostRegister_v2.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
    library.cuMemHostUnregister.argtypes = [ctypes.c_void_p]
    library.cuMemcpyHtoDAsync_v2.argtypes = [ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    library.cuMemcpyDtoHAsync_v2.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
    library.cuGetErrorString.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]
    library.cuInit.argtypes = [ctypes.c_uint]
    library.cuDeviceGet.argtypes = [ctypes.POINTER(ctypes.c_int), ctypes.c_int]
    library.cuDeviceGetPCIBusId.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_int]
    library.cuDeviceGetName.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_int]
    library.cuDriverGetVersion.argtypes = [ctypes.POINTER(ctypes.c_int)]
    return library


def _message(result: int) -> str:
    text = ctypes.c_char_p()
    _driver().cuGetErrorString(result, ctypes.byref(text))
    return f"{(text.value or b'unknown error').decode()} (CUDA error {result})"


def pci_bus_id(index: int) -> str:
    """PCI address of a device of this process, such as ``"0000:3B:00.0"``. Makes no context."""
    return _device_text("cuDeviceGetPCIBusId", index)


def device_name(index: int) -> str:
    """Name of a device of this process, such as ``"NVIDIA H100 80GB HBM3"``. Makes no context."""
    return _device_text("cuDeviceGetName", index)


def _device_text(function: str, index: int) -> str:
    text = ctypes.create_string_buffer(_TEXT_BYTES)
    device = ctypes.c_int()
    result = _driver().cuInit(0)
    if result == 0:
        result = _driver().cuDeviceGet(ctypes.byref(device), index)
    if result == 0:
        result = getattr(_driver(), function)(text, _TEXT_BYTES, device)
    if result != 0:
        raise RuntimeError(f"The CUDA driver does not describe device {index}: {_message(result)}")
    return text.value.decode()


def driver_version() -> str:
    """Newest CUDA version that the driver supports, such as ``"13.0"``."""
    version = ctypes.c_int()
    result = _driver().cuDriverGetVersion(ctypes.byref(version))
    if result != 0:
        raise RuntimeError(f"The CUDA driver does not say its version: {_message(result)}")
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def is_capturing() -> bool:
    """True while a CUDA graph is being captured on the current stream.

    Nothing may wait for the device during a capture.
    """
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def register_host_memory(address: int, nbytes: int, device: torch.device | None = None) -> str | None:
    """Page-locks host memory for every device of the process. The device need not be idle.

    Args:
        address: start of the memory.
        nbytes: size.
        device: device whose context makes the call; the current one if None.

    Returns:
        The driver's message if it refuses, else None.
    """
    with torch.cuda.device(device):
        torch.cuda.mem_get_info(device)  # binds the context to this thread, and waits for nothing
        result = _driver().cuMemHostRegister_v2(address, nbytes, _PORTABLE | _DEVICEMAP)
    return None if result == 0 else _message(result)


def unregister_host_memory(address: int, device: torch.device | None = None) -> None:
    """Waits for the device that uses the memory, and releases the page locks.

    Args:
        address: as given to `register_host_memory`.
        device: the device that uses the memory; the current one if None.

    Raises:
        RuntimeError: if the driver refuses.
    """
    with torch.cuda.device(device):
        try:
            torch.cuda.synchronize(device)
        except RuntimeError:  # the context is gone, and with it every copy
            return
        result = _driver().cuMemHostUnregister(address)
    if result not in (0, _DEINITIALIZED):
        raise RuntimeError(f"The CUDA driver could not give host memory back: {_message(result)}")


def copy_to_device_async(device_address: int, host_address: int, nbytes: int, stream: int) -> None:
    """Enqueues one host-to-device copy on a raw stream handle of the current device."""
    result = _driver().cuMemcpyHtoDAsync_v2(device_address, host_address, nbytes, stream)
    if result != 0:
        raise RuntimeError(f"A host-to-device copy of {nbytes} bytes failed: {_message(result)}")


def copy_to_host_async(host_address: int, device_address: int, nbytes: int, stream: int) -> None:
    """Enqueues one device-to-host copy on a raw stream handle of the current device."""
    result = _driver().cuMemcpyDtoHAsync_v2(host_address, device_address, nbytes, stream)
    if result != 0:
        raise RuntimeError(f"A device-to-host copy of {nbytes} bytes failed: {_message(result)}")
