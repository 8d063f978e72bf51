"""Width of the commands' output."""

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
