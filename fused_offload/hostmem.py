"""How much host memory this process may still take, by the machine and by its cgroup."""

from __future__ import annotations

import gc
import re
from pathlib import Path

import psutil

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_UNLIMITED = 1 << 60  # cgroup v1 writes a huge number where there is no limit


def kernel_int(path: Path) -> int | None:
    """The number that a file of the kernel holds; None where it cannot be read, and for what is no count.

    Args:
        path: the file.
    """
    text = kernel_text(path).strip()
    return int(text) if text.isdecimal() else None


def kernel_text(path: Path, encoding: str | None = None, errors: str = "surrogateescape") -> str:
    """What a file of the kernel says; nothing where it cannot be read.

    Args:
        path: the file.
        encoding: as `open` takes it.
        errors: likewise. Names of cgroups are bytes, and are to come back as such.
    """
    try:
        return path.read_text(encoding=encoding, errors=errors)
    except OSError:
        return ""


def _reclaimable(folder: Path, key: str) -> int:
    """Page cache that the kernel gives back before it enforces the limit."""
    found = re.search(rf"^{key} (\d+)$", kernel_text(folder / "memory.stat"), re.MULTILINE)
    return int(found[1]) if found else 0


def _room(folder: Path, limit_name: str, usage_name: str, cache_key: str) -> int | None:
    limit, usage = kernel_int(folder / limit_name), kernel_int(folder / usage_name)
    if limit is None or usage is None or limit >= _UNLIMITED:
        return None
    return max(0, limit - usage + _reclaimable(folder, cache_key))


def _cgroup_folders() -> list[Path]:
    """Folders of this process's cgroup and its parents; a container sees its own as the root."""
    folders = [_CGROUP_ROOT, _CGROUP_ROOT / "memory"]
    for line in kernel_text(_OWN_CGROUPS).splitlines():
        if line.count(":") < 2:
            continue
        _, controllers, name = line.split(":", 2)
        base = _CGROUP_ROOT if controllers == "" else _CGROUP_ROOT / "memory"
        if controllers == "" or "memory" in controllers.split(","):
            own = base / name.lstrip("/")
            folders += [own, *(parent for parent in own.parents if parent.is_relative_to(base))]
    return folders


def available_host_bytes() -> tuple[int, str]:
    """Bytes that this process may still allocate, and what limits them.

    Returns:
        The smaller of the machine's available memory and the room in every cgroup above this process, and
        ``"machine"`` or ``"cgroup"``.
    """
    best = (int(psutil.virtual_memory().available), "machine")
    for folder in _cgroup_folders():
        for names in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.high", "memory.current", "inactive_file"),  # beyond it allocations are slowed down to a halt
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            room = _room(folder, *names)
            if room is not None:
                best = min(best, (room, "cgroup"))
    return best


def check_host_bytes(needed: int) -> None:
    """Raises before an allocation that the machine or its cgroup could only answer by killing the process.

    Args:
        needed: bytes about to be allocated.

    Raises:
        RuntimeError: if fewer bytes are left; names both numbers.
    """
    left, limit = available_host_bytes()
    if needed > left:
        gc.collect()  # an optimizer that was replaced is a reference cycle; jobs that switch collection off keep it
        left, limit = available_host_bytes()
    if needed > left:
        raise RuntimeError(
            f"Optimizer state needs {needed / 1e9:.3f} GB of host memory, but only {left / 1e9:.3f} GB are left "
            f"(limited by the {limit}). Offload less (OffloadConfig.fraction), use smaller stored forms "
            "(store_param_remainders, 16-bit moments), shard over more ranks, or give the job more memory."
        )
