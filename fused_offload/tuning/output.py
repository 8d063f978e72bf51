"""Width of what the commands print."""

from __future__ import annotations

import os
import sys

from rich.console import Console

_WIDTH = 100
"""Columns where there is no terminal: of files, pipes and logs."""


def new_console() -> Console:
    """A console as wide as the terminal, as ``COLUMNS`` says, or 100 columns wide without either."""
    has_width = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return Console(width=None if has_width else _WIDTH)
