"""Files of profiles, one for each kind of machine, in this user's folder."""

from __future__ import annotations

import functools
import json
import logging
import os
import secrets
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch

from .machine_key import MachineKey, read_key
from .profile import Profile, as_json, from_json
from .units import MIB, printable

FOLDER_VARIABLE = "FUSED_OFFLOAD_PROFILES"
"""Environment variable that names the folder of profiles; an empty folder means none."""

_FORMAT = 2
"""Version of the file format and of the method by which `fused-offload tune` measures."""
_MOST_FILE_BYTES = MIB

_logger = logging.getLogger("fused_offload")


class Found(NamedTuple):
    """Result of the search for a machine's profile.

    Attributes:
        profile: the profile, or None.
        reason: date and file of the profile, or the reason why there is none.
        is_outdated: True if there is a profile that must not be used any more.
    """

    profile: Profile | None
    reason: str
    is_outdated: bool = False


def folder() -> Path:
    """Folder of this user's profiles.

    Raises:
        ImportError: if platformdirs is missing and `FOLDER_VARIABLE` is not set.
        OSError: if the user has no home folder and `FOLDER_VARIABLE` is not set, or if the variable
            names a home folder that does not exist.
    """
    chosen = os.environ.get(FOLDER_VARIABLE)
    if chosen:
        try:
            return Path(chosen).expanduser()
        except RuntimeError as error:
            raise OSError(
                f"{FOLDER_VARIABLE} is {chosen!r}, but there is no such home folder: give the whole path, without ~"
            ) from error
    import platformdirs  # not above, so that training works without this dependency

    try:
        path = platformdirs.user_data_path("fused-offload") / "profiles"
    except RuntimeError:  # as if there were no home folder; older releases give a relative path
        path = Path()
    if not path.is_absolute():
        raise OSError(f"this user has no home folder (HOME is not set): set {FOLDER_VARIABLE} to a folder")
    return path


def save(profile: Profile, where: Path | None = None) -> Path:
    """Writes a profile. Replaces an older one of the same kind of machine.

    Everybody may read the file in a folder that was named, since other users may train with that
    folder. In this user's own data folder the umask decides.

    Args:
        profile: the profile.
        where: folder; None for this user's.

    Returns:
        Path of the file.
    """
    is_named = where is not None or bool(os.environ.get(FOLDER_VARIABLE))
    path = (where or folder()) / profile.key.file_name
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"format": _FORMAT, **as_json(profile)}
    # Processes of a job may read while this one writes.
    temporary = path.with_name(f"{secrets.token_hex(8)}.tmp")
    with open(temporary, "x", encoding="utf-8", opener=_open_new) as file:
        try:
            if is_named:
                os.fchmod(file.fileno(), 0o644)  # not by name, which others may change there
            file.write(json.dumps(record, indent=2) + "\n")
            file.flush()
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    return path


def _open_new(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o644)


def load(path: Path) -> Profile:
    """Reads a profile.

    Raises:
        ValueError: if the file is not a profile of this release, or is damaged.
    """
    try:
        record = json.loads(_read(path))
        if record["format"] != _FORMAT:
            raise ValueError(f"its format is {record['format']!r}, not {_FORMAT}")
        return from_json(record)
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{shown(path)} is no profile of this release: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """Message of an error, without the path that an OSError may name."""
    return printable((isinstance(error, OSError) and error.strerror) or str(error))


def _read(path: Path) -> str:
    """Reads a file in a folder that other users may write to.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it is not a regular file, is too large, or belongs to an untrusted user.
    """
    with open(path, "rb", opener=_open_without_waiting) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is no regular file")
        if status.st_uid not in (0, os.geteuid(), path.parent.stat().st_uid):
            raise ValueError("it belongs to another user, who owns neither this folder nor the machine")
        content = file.read(_MOST_FILE_BYTES + 1)
    if len(content) > _MOST_FILE_BYTES:
        raise ValueError("it is larger than 1 MiB")
    return content.decode()


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)


def shown(path: Path) -> str:
    """A path for messages, logs and results, with ``~`` for the home folder."""
    home = os.path.expanduser("~")
    if os.path.isabs(home) and home != "/" and path.is_relative_to(home):
        path = Path("~") / path.relative_to(home)
    return printable(str(path))


def find(key: MachineKey, where: Path | None = None) -> Found:
    """Finds the profile of a machine.

    Args:
        key: the machine.
        where: folder; None for this user's.
    """
    where = where or folder()
    path = where / key.file_name
    if not path.exists():
        others = sorted(where.glob("*.json")) if where.is_dir() else []
        if not others:
            return Found(None, "none yet: fused-offload tune makes one")
        return Found(None, f"none of this machine; {_differences(key, others)}")
    try:
        profile = load(path)
    except ValueError as error:
        return Found(None, f"ignored: {error}", is_outdated=True)
    if profile.key.file_name != key.file_name:
        return Found(None, f"ignored: {shown(path)} is of {'; '.join(_different(profile.key, key))}", is_outdated=True)
    if profile.key != key:
        made_with, now = profile.key.versions, key.versions
        changed = [
            f"{name} {made_with.get(name, 'none')}, now {now.get(name, 'none')}"
            for name in sorted({*made_with, *now})
            if made_with.get(name) != now.get(name)
        ]
        return Found(None, f"ignored: made with {'; '.join(changed)}", is_outdated=True)
    return Found(profile, f"of {profile.measured}, {shown(path)}")


def _differences(key: MachineKey, others: Iterable[Path]) -> str:
    """Differences between this machine and that of the most similar profile, in words."""
    best: list[str] | None = None
    for path in others:
        try:
            other = load(path).key
        except ValueError:
            continue
        different = _different(other, key)
        if not different:
            return f"there is one, but it is called {printable(path.name)}, not {key.file_name}"
        if best is None or len(different) < len(best):
            best = different
    return "the others cannot be read" if best is None else f"there is one of {'; '.join(best)}"


def _different(other: MachineKey, key: MachineKey) -> list[str]:
    return [
        f"{name} {getattr(other, name)}, here {getattr(key, name)}"
        for name in ("gpu", "link", "host")
        if getattr(other, name) != getattr(key, name)
    ]


@functools.cache
def of_device(index: int) -> Found:
    """Finds the profile of a device and logs the result, once a process."""
    try:
        found = find(read_key(index))
    except (OSError, RuntimeError, ImportError, ValueError) as error:  # a bad bus id: ValueError
        found = Found(None, f"none: {_reason(error)}")
    level = logging.WARNING if found.is_outdated else logging.INFO
    advice = " (fused-offload tune makes a new one)" if found.is_outdated else ""
    _logger.log(level, "Profile for cuda:%d: %s%s", index, found.reason, advice)
    return found


def of(device: torch.device) -> Profile | None:
    """The profile of a device, or None if it has none."""
    if device.type != "cuda":
        return None
    return of_device(torch.cuda.current_device() if device.index is None else device.index).profile
