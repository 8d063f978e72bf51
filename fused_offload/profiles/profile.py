"""Profile of one kind of machine: the choices and timings of ``fused-offload tune``."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from .machine_key import MachineKey
from .units import MIB

_MOST_BYTES, _LEAST_MS, _LEAST_GBPS = 2**50, 1e-6, 1e-3  # bounds of plausible measurements

CHOICES = {"chunk_bytes": (4 * MIB, 64 * MIB), "depth": (2, 4), "programs": (16, 128)}
"""Ranges that ``fused-offload tune`` chooses from; a profile with other values is refused."""


class Choice(NamedTuple):
    """Fastest settings for state of one size.

    Attributes:
        state_bytes: size of the measured state.
        transport: ``"copy"`` or ``"zero_copy"``.
        chunk_bytes: best chunk size of copies.
        depth: best depth of copies.
        programs: best number of zero-copy programs.
        ms: time of a step with the chosen transport.
        why: reason for the choice, in words.
    """

    state_bytes: int
    transport: str
    chunk_bytes: int
    depth: int
    programs: int
    ms: float
    why: str


class Timing(NamedTuple):
    """Measured step with the chosen settings.

    Attributes:
        param_numel: number of parameter elements.
        state_bytes: bytes of their state, each way.
        ms: time from an idle GPU until the state is back in host memory.
    """

    param_numel: int
    state_bytes: int
    ms: float


class SharedLink(NamedTuple):
    """Speed of plain copies while several GPUs of a host copy at once.

    Attributes:
        gpus: number of GPUs.
        gbps: GB/s each way and GPU, both directions at once.
    """

    gpus: int
    gbps: float


@dataclass(frozen=True)
class Profile:
    """Choices and timings of one kind of machine.

    Attributes:
        key: the machine.
        measured: date of the measurement, ISO 8601.
        duplex_gbps: GB/s of plain copies each way, both directions at once, on one GPU alone.
        choices: choices by ascending size of the state.
        timings: steps with the most bytes a parameter, by ascending size of the state; at least
            two.
        narrow_timings: steps with the fewest bytes a parameter, in the same order.
        shared_link: speeds with two and more GPUs of the host at once, by ascending number of GPUs;
            empty if that was not measured.
    """

    key: MachineKey
    measured: str
    duplex_gbps: float
    choices: tuple[Choice, ...]
    timings: tuple[Timing, ...]
    narrow_timings: tuple[Timing, ...]
    shared_link: tuple[SharedLink, ...] = ()

    def choice_for(self, state_bytes: int) -> Choice:
        """The choice for the nearest measured size of state."""
        return nearest(self.choices, state_bytes)

    def link_of(self, gpus: int) -> SharedLink:
        """Speed of plain copies on each of several GPUs of a host while all of them copy.

        It is that of the smallest measured number of GPUs that is not below the given one, or else
        of the largest, and at most that of one GPU alone.

        Args:
            gpus: number of GPUs that copy at once.

        Returns:
            The speed, with the number of GPUs of its measurement: 1 if there is no other.
        """
        measured = SharedLink(1, self.duplex_gbps), *self.shared_link
        link = next((link for link in measured if link.gpus >= gpus), measured[-1])
        return link._replace(gbps=min(link.gbps, self.duplex_gbps))

    def step_ms(self, state_bytes: int, param_numel: int, gpus: int = 1) -> float:
        """Predicts the time of a step in ms, which never falls with the number of parameters.

        Steps were measured on one GPU alone. With several at once, a byte takes as much longer as it
        does in plain copies. Beyond the measured sizes it takes the longer of both: what a byte of
        a step takes alone, and what a byte of such copies takes.

        Args:
            state_bytes: bytes that move, each way.
            param_numel: number of parameter elements that these bytes belong to.
            gpus: number of GPUs of the host that step at once; see `link_of`.
        """
        if not state_bytes or not param_numel:
            return 0.0
        measured = self.timings, self.narrow_timings
        most, least = (timings[-1].state_bytes / timings[-1].param_numel for timings in measured)
        share = min(1.0, max(0.0, (state_bytes / param_numel - least) / (most - least)))
        link_gbps = self.link_of(gpus).gbps
        wide_ms, narrow_ms = (self._by_size(timings, state_bytes, link_gbps) for timings in measured)
        return narrow_ms + share * (wide_ms - narrow_ms)

    def _by_size(self, measured: Sequence[Timing], state_bytes: int, link_gbps: float) -> float:
        """Interpolates the time of a step in ms from its state's size, piecewise linearly."""
        # A disturbed measurement of a small state must not lower the prediction for a larger one.
        timings: list[Timing] = list(itertools.accumulate(measured, lambda a, b: b._replace(ms=max(a.ms, b.ms))))
        index = bisect.bisect_left([timing.state_bytes for timing in timings], state_bytes)
        upper = min(max(index, 1), len(timings) - 1)
        begin, end = timings[upper - 1 : upper + 1]
        per_byte = (end.ms - begin.ms) / (end.state_bytes - begin.state_bytes)
        slower = 1e-6 / link_gbps - 1e-6 / self.duplex_gbps
        if index == 0:
            at_none = max(0.0, begin.ms - per_byte * begin.state_bytes)
            return at_none + (begin.ms - at_none) * state_bytes / begin.state_bytes + slower * state_bytes
        if index == len(timings):
            more = max(per_byte, 1e-6 / link_gbps) * (state_bytes - end.state_bytes)
            return end.ms + slower * end.state_bytes + more
        return begin.ms + per_byte * (state_bytes - begin.state_bytes) + slower * state_bytes


def nearest(choices: Sequence[Choice], state_bytes: int) -> Choice:
    """The choice for the measured size of state that has the ratio nearest to 1."""
    return min(choices, key=lambda choice: abs(math.log(max(1, state_bytes) / choice.state_bytes)))


def check(profile: Profile) -> None:
    """Refuses contents that ``fused-offload tune`` cannot have written.

    Raises:
        ValueError: for such contents; the message says what is wrong.
    """
    key = profile.key
    if not isinstance(key.versions, dict):
        raise ValueError("its versions are not given by name")
    if not all(isinstance(text, str) for text in (key.gpu, key.link, key.host, *key.versions.values())):
        raise ValueError("its key is not made of texts")
    texts = (key.gpu, key.link, key.host, *key.versions, *key.versions.values(), profile.measured)
    if not all(text.isprintable() for text in (*texts, *(str(choice.why) for choice in profile.choices))):
        raise ValueError("its texts are not printable")
    if not _is_speed(profile.duplex_gbps):
        raise ValueError(f"duplex_gbps is not a number of at least {_LEAST_GBPS:g}")
    if not all(type(link.gpus) is int and 1 < link.gpus < 2**63 for link in profile.shared_link):
        raise ValueError("shared_link is not of whole numbers of GPUs, at least 2")
    if not all(_is_speed(link.gbps) for link in profile.shared_link):
        raise ValueError(f"a speed of shared_link is not a number of at least {_LEAST_GBPS:g}")
    if any(fewer.gpus >= more.gpus for fewer, more in itertools.pairwise(profile.shared_link)):
        raise ValueError("shared_link is not by ascending number of GPUs")
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
            raise ValueError("a timing has more bytes than any machine, or takes no time")
    for timings in (profile.timings, profile.narrow_timings):
        if any(begin.state_bytes >= end.state_bytes for begin, end in itertools.pairwise(timings)):
            raise ValueError("its timings are not by ascending size of the state")
    wide, narrow = profile.timings[-1], profile.narrow_timings[-1]
    if wide.state_bytes * narrow.param_numel <= narrow.state_bytes * wide.param_numel:
        raise ValueError("narrow_timings are not of fewer bytes a parameter than the others")


def _is_above_0(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < 2**63


def _is_speed(value: Any) -> bool:
    return _is_above_0(value) and value >= _LEAST_GBPS


def as_json(profile: Profile) -> dict[str, Any]:
    """A profile as a dictionary for `json.dumps`."""
    return {
        "key": asdict(profile.key),
        "measured": profile.measured,
        "duplex_gbps": profile.duplex_gbps,
        "choices": [choice._asdict() for choice in profile.choices],
        "timings": [timing._asdict() for timing in profile.timings],
        "narrow_timings": [timing._asdict() for timing in profile.narrow_timings],
        "shared_link": [link._asdict() for link in profile.shared_link],
    }


def from_json(record: Any) -> Profile:
    """The profile that `as_json` wrote, checked.

    Args:
        record: result of `json.loads`.

    Raises:
        ValueError: if `check` refuses the profile, or a field cannot be converted.
        KeyError: if a field is missing.
        TypeError: if a field is unknown or has a wrong type.
    """
    profile = Profile(
        MachineKey(**record["key"]),
        str(record["measured"]),
        record["duplex_gbps"],
        tuple(Choice(**choice) for choice in record["choices"]),
        tuple(Timing(**timing) for timing in record["timings"]),
        tuple(Timing(**timing) for timing in record["narrow_timings"]),
        tuple(SharedLink(**link) for link in record.get("shared_link", ())),  # older files lack it
    )
    check(profile)
    return profile
