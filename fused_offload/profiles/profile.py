"""Profiles: what ``fused-offload tune`` found on this user's machines, one file for each kind of machine."""

from __future__ import annotations

import bisect
import functools
import itertools
import json
import logging
import math
import os
import secrets
import stat
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .machine_key import MachineKey, read_key
from .units import MIB, printable

FOLDER_VARIABLE = "FUSED_OFFLOAD_PROFILES"
"""Environment variable that names the folder of profiles; an empty folder means none."""

_FORMAT = 2
"""Counts up with what is in a profile, and with how `fused-offload tune` finds it."""
_MOST_BYTES, _LEAST_MS, _LEAST_GBPS = 2**50, 1e-6, 1e-3  # beyond is no measurement
_MOST_FILE_BYTES = MIB

CHOICES = {"chunk_bytes": (4 * MIB, 64 * MIB), "depth": (2, 4), "programs": (16, 128)}
"""Least and most of what `fused-offload tune` chooses from; a profile with other values is refused."""

_logger = logging.getLogger("fused_offload")


class Choice(NamedTuple):
    """What was fastest for state of one size.

    Attributes:
        state_bytes: of the extent that was stepped.
        transport: ``"copy"`` or ``"zero_copy"``.
        chunk_bytes: best chunk size of copies.
        depth: best depth of copies.
        programs: best number of zero-copy programs.
        ms: a step of the chosen transport.
        why: in words.
    """

    state_bytes: int
    transport: str
    chunk_bytes: int
    depth: int
    programs: int
    ms: float
    why: str


class Timing(NamedTuple):
    """A step by the choice.

    Attributes:
        param_numel: elements that were stepped.
        state_bytes: of their state, each way.
        ms: from an idle GPU until the state is back in host memory.
    """

    param_numel: int
    state_bytes: int
    ms: float


@dataclass(frozen=True)
class Profile:
    """What was found on one kind of machine.

    Attributes:
        key: the machine.
        measured: when, ISO 8601.
        duplex_gbps: what plain copies reach each way, both directions at once.
        choices: by ascending size of the state.
        timings: steps with the most bytes for each parameter, by ascending size of the state, of two sizes at least.
        narrow_timings: the same with the fewest bytes for each parameter.
    """

    key: MachineKey
    measured: str
    duplex_gbps: float
    choices: tuple[Choice, ...]
    timings: tuple[Timing, ...]
    narrow_timings: tuple[Timing, ...]

    def choice_for(self, state_bytes: int) -> Choice:
        """The choice of the measured size that is nearest, by ratio."""
        return nearest(self.choices, state_bytes)

    def step_ms(self, state_bytes: int, param_numel: int) -> float:
        """Predicts a step: by its bytes, and by how many of them a parameter has. More parameters never take less time.

        Args:
            state_bytes: that move, each way.
            param_numel: elements that they are of.
        """
        if not state_bytes or not param_numel:
            return 0.0
        measured = self.timings, self.narrow_timings
        most, least = (timings[-1].state_bytes / timings[-1].param_numel for timings in measured)
        share = min(1.0, max(0.0, (state_bytes / param_numel - least) / (most - least)))
        wide_ms, narrow_ms = (self._by_size(timings, state_bytes) for timings in measured)
        return narrow_ms + share * (wide_ms - narrow_ms)

    def _by_size(self, measured: Sequence[Timing], state_bytes: int) -> float:
        """A step by the size of its state alone, by straight lines through what was measured."""
        # What disturbed a small state is no reason to predict less for a larger one.
        timings: list[Timing] = list(itertools.accumulate(measured, lambda a, b: b._replace(ms=max(a.ms, b.ms))))
        index = bisect.bisect_left([timing.state_bytes for timing in timings], state_bytes)
        upper = min(max(index, 1), len(timings) - 1)
        begin, end = timings[upper - 1 : upper + 1]
        per_byte = (end.ms - begin.ms) / (end.state_bytes - begin.state_bytes)
        if index == 0:
            at_none = max(0.0, begin.ms - per_byte * begin.state_bytes)
            return at_none + (begin.ms - at_none) * state_bytes / begin.state_bytes
        if index == len(timings):
            return end.ms + max(per_byte, 1e-6 / self.duplex_gbps) * (state_bytes - end.state_bytes)
        return begin.ms + per_byte * (state_bytes - begin.state_bytes)


def nearest(choices: Sequence[Choice], state_bytes: int) -> Choice:
    """The choice of the measured size that is nearest, by ratio."""
    return min(choices, key=lambda choice: abs(math.log(max(1, state_bytes) / choice.state_bytes)))


class Found(NamedTuple):
    """What there is for a machine.

    Attributes:
        profile: its profile, or None.
        reason: why there is none, or what it is.
        is_outdated: whether there was one that is not used any more.
    """

    profile: Profile | None
    reason: str
    is_outdated: bool = False


def folder() -> Path:
    """Where this user's profiles are.

    Raises:
        ImportError: if platformdirs is missing and no folder is named.
        OSError: if the user has no home folder, as in containers that run as any number, and no folder is named, or
            one in a home folder that there is not.
    """
    chosen = os.environ.get(FOLDER_VARIABLE)
    if chosen:
        try:
            return Path(chosen).expanduser()
        except RuntimeError as error:
            raise OSError(
                f"{FOLDER_VARIABLE} is {chosen!r}, but there is no such home folder: give the whole path, without ~"
            ) from error
    import platformdirs  # only here, so that an installation without dependencies can train

    try:
        path = platformdirs.user_data_path("fused-offload") / "profiles"
    except RuntimeError:  # older releases give a folder below the current one
        path = Path()
    if not path.is_absolute():
        raise OSError(f"this user has no home folder (HOME is not set): set {FOLDER_VARIABLE} to a folder")
    return path


def save(profile: Profile, where: Path | None = None) -> Path:
    """Writes a profile over the one of the same kind of machine.

    In a folder that was named everybody may read it: other users may train with the same folder. In this user's own
    data folder the umask decides.

    Args:
        profile: the profile.
        where: folder; this user's if None.

    Returns:
        The file.
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
                os.fchmod(file.fileno(), 0o644)  # by the open file: in a shared folder names may change their meaning
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
        ValueError: if it is none, or damaged.
    """
    try:
        record = json.loads(_read(path))
        if record["format"] != _FORMAT:
            raise ValueError(f"its format is {record['format']!r}, not {_FORMAT}")
        profile = Profile(
            MachineKey(**record["key"]),
            str(record["measured"]),
            record["duplex_gbps"],
            tuple(Choice(**choice) for choice in record["choices"]),
            tuple(Timing(**timing) for timing in record["timings"]),
            tuple(Timing(**timing) for timing in record["narrow_timings"]),
        )
        _check(profile)
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{shown(path)} is no profile of this release: {_reason(error)}") from error
    return profile


def _reason(error: Exception) -> str:
    """What an error says, without the path that it may name."""
    return printable((isinstance(error, OSError) and error.strerror) or str(error))


def _read(path: Path) -> str:
    """Text of a file in a folder that others may write to.

    Raises:
        OSError: if it cannot be read.
        ValueError: for a pipe or device, too large a file, and one of a user who is trusted with nothing.
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
    """A path for messages, logs and results: the home folder, which has the user's name in it, as ``~``."""
    home = os.path.expanduser("~")
    if os.path.isabs(home) and home != "/" and path.is_relative_to(home):
        path = Path("~") / path.relative_to(home)
    return printable(str(path))


def _check(profile: Profile) -> None:
    key = profile.key
    if not isinstance(key.versions, dict):
        raise ValueError("its versions are not given by name")
    if not all(isinstance(text, str) for text in (key.gpu, key.link, key.host, *key.versions.values())):
        raise ValueError("its key is not made of texts")
    texts = (key.gpu, key.link, key.host, *key.versions, *key.versions.values(), profile.measured)
    if not all(text.isprintable() for text in (*texts, *(str(choice.why) for choice in profile.choices))):
        raise ValueError("its texts are not printable")
    if not _is_above_0(profile.duplex_gbps) or profile.duplex_gbps < _LEAST_GBPS:
        raise ValueError(f"duplex_gbps is not a number of at least {_LEAST_GBPS:g}")
    if not profile.choices or min(len(profile.timings), len(profile.narrow_timings)) < 2:
        raise ValueError("it lacks choices or timings")
    for choice in profile.choices:
        counts = (choice.state_bytes, choice.chunk_bytes, choice.depth, choice.programs)
        if any(type(count) is not int or not 1 <= count < 2**63 for count in counts):
            raise ValueError("a choice is not made of whole numbers of at least 1 and below 2^63")
        for name, (least, most) in CHOICES.items():
            value = getattr(choice, name)
            if not least <= value <= most:
                raise ValueError(f"a choice has {name} {value}, fused-offload tune takes {least} to {most}")
        if choice.transport not in ("copy", "zero_copy"):
            raise ValueError(f"transport {choice.transport!r} is unknown")
        if not _is_above_0(choice.ms) or not isinstance(choice.why, str):
            raise ValueError("a choice lacks its time or its reason")
    for timing in (*profile.timings, *profile.narrow_timings):
        if not all(map(_is_above_0, timing)) or type(timing.state_bytes) is not int:
            raise ValueError("a timing is not made of numbers above 0 and below 2^63")
        if max(timing.param_numel, timing.state_bytes) >= _MOST_BYTES or timing.ms < _LEAST_MS:
            raise ValueError("a timing is of more than there is, or of no time")
    for timings in (profile.timings, profile.narrow_timings):
        if any(begin.state_bytes >= end.state_bytes for begin, end in itertools.pairwise(timings)):
            raise ValueError("its timings are not by ascending size of the state")
    wide, narrow = profile.timings[-1], profile.narrow_timings[-1]
    if wide.state_bytes * narrow.param_numel <= narrow.state_bytes * wide.param_numel:
        raise ValueError("narrow_timings are not of fewer bytes a parameter than the others")


def _is_above_0(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < 2**63


def find(key: MachineKey, where: Path | None = None) -> Found:
    """The profile of a machine, or why there is none.

    Args:
        key: the machine.
        where: folder; this user's if None.
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
    """What keeps the most similar profile from being this machine's."""
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
    return "what there is cannot be read" if best is None else f"there is one of {'; '.join(best)}"


def _different(other: MachineKey, key: MachineKey) -> list[str]:
    return [
        f"{name} {getattr(other, name)}, here {getattr(key, name)}"
        for name in ("gpu", "link", "host")
        if getattr(other, name) != getattr(key, name)
    ]


@functools.cache
def of_device(index: int) -> Found:
    """The profile that steps on a device go by; read once a process, and told to the log."""
    try:
        found = find(read_key(index))
    except (OSError, RuntimeError, ImportError, ValueError) as error:  # the last for a bus id that is no number
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


def as_json(profile: Profile) -> dict[str, Any]:
    """A profile as `json.dumps` takes it."""
    return {
        "key": asdict(profile.key),
        "measured": profile.measured,
        "duplex_gbps": profile.duplex_gbps,
        "choices": [choice._asdict() for choice in profile.choices],
        "timings": [timing._asdict() for timing in profile.timings],
        "narrow_timings": [timing._asdict() for timing in profile.narrow_timings],
    }
