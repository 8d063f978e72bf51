"""Host memory that this process may still allocate, by the machine and by its cgroups."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

RANKS_VARIABLE = "LOCAL_WORLD_SIZE"
"""Environment variable with the number of ranks on this host, set by launchers."""

_MEMINFO = Path("/proc/meminfo")
_CGROUP_ROOT = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_UNLIMITED = 1 << 60  # cgroup v1 writes a huge number where there is no limit


def read_int(path: Path) -> int | None:
    """Number in a /proc, /sys or cgroup file; None if it cannot be read or is no count.

    Args:
        path: the file.
    """
    text = read_text(path).strip()
    return int(text) if text.isdecimal() else None


def read_text(path: Path, encoding: str | None = None, errors: str = "surrogateescape") -> str:
    """Contents of a /proc, /sys or cgroup file; empty if it cannot be read.

    Args:
        path: the file.
        encoding: as in `open`.
        errors: as in `open`. Names of cgroups are arbitrary bytes, which the default preserves.
    """
    try:
        return path.read_text(encoding=encoding, errors=errors)
    except OSError:
        return ""


def _reclaimable(folder: Path, key: str) -> int:
    """Bytes of page cache that Linux reclaims before it enforces the limit."""
    found = re.search(rf"^{key} (\d+)$", read_text(folder / "memory.stat"), re.MULTILINE)
    return int(found[1]) if found else 0


class _Limit(NamedTuple):
    """One limit on this process's memory.

    Attributes:
        left: bytes until the limit.
        name: ``"machine"`` or ``"cgroup"``.
        used: bytes that count towards the limit now.
    """

    left: int
    name: str
    used: int


def host_bytes() -> int | None:
    """Memory of the machine in bytes; None if Linux does not report it."""
    return _meminfo("MemTotal")


def _meminfo(key: str) -> int | None:
    found = re.search(rf"^{key}:\s*(\d+) kB$", read_text(_MEMINFO), re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def _limits() -> Iterator[_Limit]:
    available = _meminfo("MemAvailable")
    if available is not None:
        yield _Limit(available, "machine", max(0, (host_bytes() or 0) - available))
    for folder in _cgroup_folders():
        for limit_name, usage_name, cache_key in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.high", "memory.current", "inactive_file"),  # allocations beyond it nearly stop
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, usage = read_int(folder / limit_name), read_int(folder / usage_name)
            if limit is not None and usage is not None and limit < _UNLIMITED:
                used = usage - _reclaimable(folder, cache_key)
                yield _Limit(max(0, limit - used), "cgroup", max(0, used))


def _cgroup_folders() -> list[Path]:
    """Folders of this process's cgroup and its parents; a container's own cgroup is its root."""
    folders = [_CGROUP_ROOT, _CGROUP_ROOT / "memory"]
    for line in read_text(_OWN_CGROUPS).splitlines():
        if line.count(":") < 2:
            continue
        _, controllers, name = line.split(":", 2)
        base = _CGROUP_ROOT if controllers == "" else _CGROUP_ROOT / "memory"
        if controllers == "" or "memory" in controllers.split(","):
            own = base / name.lstrip("/")
            folders += [own, *(parent for parent in own.parents if parent.is_relative_to(base))]
    return folders


def available_host_bytes() -> tuple[int | None, str]:
    """Bytes that this process may still allocate, and the name of the tightest limit.

    Returns:
        The minimum of the machine's available memory and the room in each cgroup of this process,
        and ``"machine"`` or ``"cgroup"``. None and ``"unknown"`` if Linux reports neither.
    """
    tightest = min(_limits(), default=None)
    return (None, "unknown") if tightest is None else (tightest.left, tightest.name)


def _offload_less(left: int) -> str:
    """Advice where optimizer state alone is too large."""
    return (
        "Offload less (OffloadConfig.fraction), use smaller stored formats (store_param_remainders, 16-bit moments), "
        "shard over more ranks, or give the job more memory."
    )


def check_host_bytes(
    needed: int, what: str = "Optimizer state needs", advice: Callable[[int], str] = _offload_less
) -> None:
    """Refuses an allocation that would make Linux kill the process.

    Ranks of a host allocate at the same time. So each rank must leave as much memory as it takes
    for every rank that still has to allocate. The number of those follows from the memory in use.
    Ranks that need less are counted as equals, so unequal ranks may be refused although their sum
    fits. Nothing is checked if Linux reports no limit.

    Args:
        needed: bytes about to be allocated.
        what: beginning of the error, up to the number of bytes.
        advice: end of the error, given the bytes that are left for this rank.

    Raises:
        RuntimeError: if fewer bytes are left; names both numbers.
    """
    left, limit = available_host_bytes()
    if left is not None and needed > left:
        gc.collect()  # a replaced optimizer is a reference cycle, which jobs may not collect
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
        f"{what} {needed / 1e9:.3f} GB of host memory, but only {left / 1e9:.3f} GB are left{others} "
        f"(limited by the {limit}). {advice(left // waiting)}"
    )


def ranks_of_host() -> int | None:
    """Number of ranks on this host by the launcher's variable, or None if it does not say."""
    text = os.environ.get(RANKS_VARIABLE, "")
    return int(text) or None if text.isdecimal() else None


def _waiting_ranks(needed: int) -> int:
    """Number of ranks on this host that still have to allocate, this one included."""
    ranks = ranks_of_host() or 1
    if ranks < 2 or not needed:
        return 1
    tightest = min(_limits(), default=None)
    # An upper bound, since other programs use memory, too.
    has_theirs = 0 if tightest is None else tightest.used // needed
    return max(1, ranks - has_theirs)
