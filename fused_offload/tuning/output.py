"""Output of the commands: its width, lines of text, numbers with units."""

from __future__ import annotations

import os
import sys

from rich.console import Console

_WIDTH = 100
"""Columns of files, pipes and logs."""


def new_console() -> Console:
    """A console as wide as the terminal or ``COLUMNS``; 100 columns wide without either."""
    has_width = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return Console(width=None if has_width else _WIDTH)


def print_line(console: Console, text: str) -> None:
    """Prints a text as it is, for the terminal to wrap."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def gb(nbytes: int) -> str:
    """Bytes in GB, to the megabyte."""
    return f"{nbytes / 1e9:.3f} GB"


def ms(value: float) -> str:
    """Milliseconds, with two digits below 10."""
    return f"{value:.0f} ms" if value >= 10 else f"{value:.2g} ms"


def duration(value_ms: float) -> str:
    """Milliseconds, or seconds from 1,000 ms on."""
    if value_ms >= 1000:
        return f"{value_ms / 1e3:,.{0 if value_ms >= 9950 else 1}f} s"
    return ms(value_ms)
