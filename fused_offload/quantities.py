"""Numbers and sizes as people write them on command lines and in environment variables.

Every function takes what was written and returns its value; all of them are fit for ``type`` of argparse's arguments.

Raises:
    argparse.ArgumentTypeError: says what would be right.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping

MOST_PARAMS = 10**18
"""Counts and numbers are below."""

_LEAST_LINK_GBPS = 1e-3
_LEAST_BYTES = 1024  # who asks for fewer meant another unit
_COUNTS = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
_BYTES = {"": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12}
_BYTES |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_BYTES |= {unit.removesuffix("b"): factor for unit, factor in _BYTES.items() if len(unit) > 1}
_GB = {unit: factor / 1e9 for unit, factor in _BYTES.items()} | {"": 1}
_MOST_GB = 1e6
"""No machine has more; who asks for it gave bytes."""


def index(text: str) -> int:
    """A whole number from 0."""
    value = number(text)
    if not value.is_integer():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(value)


def number(text: str) -> float:
    """From 0 to below 1e18."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 <= value < MOST_PARAMS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0 and below 1e18")
    return value


def _with_unit(text: str, units: Mapping[str, float], example: str) -> float:
    """A number times its unit.

    Args:
        text: digits, and perhaps a unit, in any case.
        units: factors by unit in lower case; that of "" is of plain numbers.
        example: what would be right.
    """
    match = re.fullmatch(r"(.*?)\s*([A-Za-z]*)", text.strip(), re.DOTALL)
    digits, unit = match.groups() if match else ("", "")
    try:
        value = float(digits) * units[unit.lower()]
        return number(repr(float(round(value)) if abs(value - round(value)) < 1e-6 * value else value))
    except (ValueError, KeyError, OverflowError, argparse.ArgumentTypeError):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of at least 0 and below 1e18, such as {example}"
        ) from None


def count(text: str) -> float:
    """A whole number of at least 1, perhaps with K, M, B or T."""
    error = argparse.ArgumentTypeError(
        f"{text!r} is not a whole number of at least 1 and below 1e18, such as 13e9 or 13B"
    )
    try:
        value = _with_unit(text, _COUNTS, "13B")
    except argparse.ArgumentTypeError:
        raise error from None
    if value < 1 or not value.is_integer():
        raise error
    return value


def share(text: str) -> float:
    """From 0 to 1."""
    error = argparse.ArgumentTypeError(f"{text!r} is not a share from 0 to 1, such as 0.75")
    try:
        value = number(text)
    except argparse.ArgumentTypeError:
        raise error from None
    if value > 1:
        raise error
    return value


def gb(text: str) -> float:
    """GB; plain numbers, too."""
    value = _with_unit(text, _GB, "80, 80GB or 80GiB")
    if value > _MOST_GB:
        raise argparse.ArgumentTypeError(f"{text!r} is {value:g} GB; plain numbers are GB: 80, 80GB, 80GiB")
    return value


def positive_gb(text: str) -> float:
    """GB, more than 0."""
    return _larger_than_0(gb(text))


def chunk_bytes(text: str) -> int:
    """A whole number of bytes, more than 0."""
    return int(_larger_than_0(whole_bytes(text)))


def whole_bytes(text: str) -> float:
    """A whole number of bytes, with or without unit."""
    value = _with_unit(text, _BYTES, "50331648 or 48MiB")
    if not value.is_integer():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of bytes")
    if 0 < value < _LEAST_BYTES:
        unit = f", or a unit, as in {text}MiB" if text.strip().isdecimal() else ""
        raise argparse.ArgumentTypeError(f"{text!r} is {value:g} bytes; give at least {_LEAST_BYTES}{unit}")
    return value


def positive(text: str) -> float:
    """More than 0."""
    return _larger_than_0(number(text))


def link_gbps(text: str) -> float:
    """GB/s that a link may have."""
    value = positive(text)
    if value < _LEAST_LINK_GBPS:
        raise argparse.ArgumentTypeError(f"{text!r} is no speed of a link in GB/s")
    return value


def _larger_than_0(value: float) -> float:
    if not value:
        raise argparse.ArgumentTypeError("it should be larger than 0")
    return value


def window_bytes(text: str) -> int | str:
    """``OffloadConfig.window_bytes``: a whole number of bytes, or auto."""
    if text == "auto":
        return "auto"
    try:
        return int(whole_bytes(text))
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}; or give auto") from None


def positive_int(text: str) -> int:
    """A whole number of at least 1."""
    value = positive(text)
    if not value.is_integer():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(value)
