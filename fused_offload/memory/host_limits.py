"""How much host memory this process may still take, by the machine and by its cgroup."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

RANKS_VARIABLE = "LOCAL_WORLD_SIZE"
"""Environment variable in which launchers say how many ranks share this host."""

_MEMINFO = Path("/proc/meminfo")
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


class _Limit(NamedTuple):
    """One limit of the memory that this process may take.

    Attributes:
        left: bytes until it is reached.
        name: ``"machine"`` or ``"cgroup"``.
        used: bytes that count towards it now.
    """

    left: int
    name: str
    used: int


def host_bytes() -> int | None:
    """Memory of the machine; None where the kernel does not say."""
    return _meminfo("MemTotal")


def _meminfo(key: str) -> int | None:
    found = re.search(rf"^{key}:\s*(\d+) kB$", kernel_text(_MEMINFO), re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def _limits() -> Iterator[_Limit]:
    available = _meminfo("MemAvailable")
    if available is not None:
        yield _Limit(available, "machine", max(0, (host_bytes() or 0) - available))
    for folder in _cgroup_folders():
        for limit_name, usage_name, cache_key in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.high", "memory.current", "inactive_file"),  # beyond it allocations are slowed down to a halt
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, usage = kernel_int(folder / limit_name), kernel_int(folder / usage_name)
            if limit is not None and usage is not None and limit < _UNLIMITED:
                used = usage - _reclaimable(folder, cache_key)
                yield _Limit(max(0, limit - used), "cgroup", max(0, used))


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


def available_host_bytes() -> tuple[int | None, str]:
    """Bytes that this process may still allocate, and what limits them.

    Returns:
        The smaller of the machine's available memory and the room in every cgroup above this process, and
        ``"machine"`` or ``"cgroup"``; None and ``"unknown"`` where the kernel says neither.
    """
    tightest = min(_limits(), default=None)
    return (None, "unknown") if tightest is None else (tightest.left, tightest.name)


def check_host_bytes(needed: int) -> None:
    """Raises before an allocation that the machine or its cgroup could only answer by killing the process.

    Ranks of a host allocate at the same time, so each may only take what leaves as much for those that still have to
    allocate. Their number follows from the memory in use. Where the kernel tells no limit, nothing is checked.

    Args:
        needed: bytes about to be allocated.

    Raises:
        RuntimeError: if fewer bytes are left; names both numbers.
    """
    left, limit = available_host_bytes()
    if left is not None and needed > left:
        gc.collect()  # an optimizer that was replaced is a reference cycle; jobs that switch collection off keep it
        left, limit = available_host_bytes()
    if left is None:
        return
    waiting = _waiting_ranks(needed)
    if needed * waiting <= left:
        return
    others = ""
    if needed <= left:
        others = (
            f" for {waiting} ranks that allocate at the same time ({RANKS_VARIABLE} is {os.environ[RANKS_VARIABLE]}; "
            "set it lower where other ranks need less)"
        )
    raise RuntimeError(
        f"Optimizer state needs {needed / 1e9:.3f} GB of host memory, but only {left / 1e9:.3f} GB are left{others} "
        f"(limited by the {limit}). Offload less (OffloadConfig.fraction), use smaller stored formats "
        "(store_param_remainders, 16-bit moments), shard over more ranks, or give the job more memory."
    )


def _waiting_ranks(needed: int) -> int:
    """Ranks of this host that still have to allocate as much as this one, itself included."""
    text = os.environ.get(RANKS_VARIABLE, "")
    ranks = int(text) if text.isdecimal() else 1
    if ranks < 2 or not needed:
        return 1
    tightest = min(_limits(), default=None)
    has_theirs = 0 if tightest is None else tightest.used // needed  # at most: what others use may be anything
    return max(1, ranks - has_theirs)
