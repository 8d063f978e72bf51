"""`fused-offload doctor`: examines this machine, and prints a table or JSON."""

from __future__ import annotations

import argparse
import json

from rich.markup import escape
from rich.table import Table

from .doctor import examine, exit_code
from .machine import read_machine
from .output import new_console


def doctor(options: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    findings = examine(read_machine())
    if options.json:
        print(json.dumps([finding._asdict() for finding in findings], indent=2))
        return exit_code(findings)
    table = Table()
    for column in ("", "what", "found", "what to do"):
        table.add_column(column, overflow="fold")  # wraps paths and names instead of cutting them
    colours = {"ok": "green", "warning": "yellow", "problem": "red"}
    for finding in findings:
        level = f"[{colours[finding.level]}]{finding.level}[/]"
        table.add_row(level, *(escape(text) for text in (finding.what, finding.found, finding.advice)))
    new_console().print(table)
    return exit_code(findings)
