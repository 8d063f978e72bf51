"""Numbers and sizes with units, in command lines and environment variables.

All functions but `printable` parse a text and can be the ``type`` of an argparse argument.

Raises:
    argparse.ArgumentTypeError: for any other text; the message says what is accepted.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from decimal import Decimal

MOST_PARAMS = 10**18
"""Exclusive upper bound of counts and numbers."""

_LEAST_LINK_GBPS = 1e-3
_LEAST_BYTES = 1024  # smaller numbers were probably meant in another unit
_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_BYTES = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_BYTES |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_BYTES |= {unit.removesuffix("b"): factor for unit, factor in _BYTES.items() if len(unit) > 1}
_GB = _BYTES | {"": 10**9}
_MOST_GB = 1e6
"""More than any machine has; larger numbers were probably meant in bytes."""


def printable(text: str) -> str:
    """Escapes control characters, so that the text stays on one line of a terminal or a log."""
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


def index(text: str) -> int:
    """Parses a whole number of at least 0."""
    return _whole(number(text), text)


def number(text: str) -> float:
    """Parses a number from 0 to below 1e18."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 <= value < MOST_PARAMS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0 and below 1e18")
    return value


def _with_unit(text: str, units: Mapping[str, int], example: str, most: int = MOST_PARAMS) -> tuple[Decimal, str]:
    """Parses a number with a unit. Returns the exact product and the unit.

    Args:
        text: digits and an optional unit, in any case.
        units: factor of each unit in lower case; ``""`` stands for numbers without one.
        example: accepted text, for the error.
        most: exclusive upper bound.
    """
    match = re.fullmatch(r"(.*?)\s*([A-Za-z]*)", text.strip(), re.DOTALL)
    digits, unit = match.groups() if match else ("", "")
    try:
        value = Decimal(digits) * units[unit.lower()]
        if 0 <= value < most:
            return value, unit
    except (ArithmeticError, KeyError):
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0 and below 1e18, such as {example}")


def count(text: str) -> int:
    """Parses a whole number of at least 1; it may end in K, M, B or T."""
    error = argparse.ArgumentTypeError(
        f"{text!r} is not a whole number of at least 1 and below 1e18, such as 13e9 or 13B"
    )
    try:
        value, _ = _with_unit(text, _COUNTS, "13B")
    except argparse.ArgumentTypeError:
        raise error from None
    if value < 1 or value != value.to_integral_value():
        raise error
    return int(value)


def matrix(text: str) -> tuple[int, int]:
    """Parses the size of a matrix, such as ``4096x11008``."""
    sizes = text.lower().split("x")
    if len(sizes) == 2 and all(size.isascii() and size.isdigit() and 0 < len(size) < 8 for size in sizes):
        rows, columns = map(int, sizes)
        if rows and columns:
            return rows, columns
    raise argparse.ArgumentTypeError(f"{text!r} is not the size of a matrix, such as 4096x11008")


def share(text: str) -> float:
    """Parses a number from 0 to 1."""
    error = argparse.ArgumentTypeError(f"{text!r} is not a share from 0 to 1, such as 0.75")
    try:
        value = number(text)
    except argparse.ArgumentTypeError:
        raise error from None
    if value > 1:
        raise error
    return value


def gb(text: str) -> float:
    """Parses a size in GB; plain numbers are GB, too."""
    nbytes, _ = _with_unit(text, _GB, "80, 80GB or 80GiB", MOST_PARAMS * 10**9)
    value = float(nbytes) / 1e9
    if value > _MOST_GB:
        raise argparse.ArgumentTypeError(f"{text!r} is {value:g} GB; plain numbers are GB: 80, 80GB, 80GiB")
    return value


def positive_gb(text: str) -> float:
    """Parses a size in GB that is larger than 0."""
    return _larger_than_0(gb(text))


def chunk_bytes(text: str) -> int | str:
    """Parses ``OffloadConfig.chunk_bytes``: a whole number of bytes larger than 0, or auto."""
    value = window_bytes(text)
    return value if isinstance(value, str) else int(_larger_than_0(value))


def whole_bytes(text: str) -> int:
    """Parses a size in bytes; with a unit it is rounded to whole bytes."""
    exact, unit = _with_unit(text, _BYTES, "50331648 or 48MiB")
    value = round(exact)
    if not unit and value != exact:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of bytes")
    if 0 < value < _LEAST_BYTES:
        hint = "" if unit else f", or a unit, as in {value}MiB"
        raise argparse.ArgumentTypeError(f"{text!r} is {value} bytes; give at least {_LEAST_BYTES}{hint}")
    return value


def positive(text: str) -> float:
    """Parses a number larger than 0."""
    return _larger_than_0(number(text))


def link_gbps(text: str) -> float:
    """Parses the speed of a link in GB/s."""
    value = positive(text)
    if value < _LEAST_LINK_GBPS:
        raise argparse.ArgumentTypeError(f"{text!r} is too slow for a link; give GB/s, such as 47")
    return value


def _larger_than_0(value: float) -> float:
    if not value:
        raise argparse.ArgumentTypeError("it should be larger than 0")
    return value


def window_bytes(text: str) -> int | str:
    """Parses ``OffloadConfig.window_bytes``: a whole number of bytes, or auto."""
    if text.strip().lower() == "auto":
        return "auto"
    try:
        return whole_bytes(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}; or give auto") from None


def positive_int(text: str) -> int:
    """Parses a whole number of at least 1."""
    return _whole(positive(text), text)


def _whole(value: float, text: str) -> int:
    if not value.is_integer():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(value)


MIB = 2**20
