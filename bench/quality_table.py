"""Held-out losses of `quality.py` as a table, beside those in float32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from table import markdown

ALLOWED = {"uint8": 0.003, "bf16": 0.001}
"""How much worse than float32 a form's held-out loss may be, unless the seeds differ by more."""
_SETTINGS = ("beta2", "eps", "size")
_HEADER = ("form", "beta2", "eps", "seed", "bytes a parameter", "held-out loss", "over float32", "allowed")


def quality_lines(runs: Sequence[dict[str, Any]]) -> Iterator[str]:
    """All runs beside those in float32 with the same seed, in Markdown."""

    def line(run: dict[str, Any]) -> tuple[str, ...]:
        base = {
            other["seed"]: other["held_out"]
            for other in runs
            if other["form"] == "fp32" and all(other[key] == run[key] for key in _SETTINGS)
        }
        gap = max(base.values()) / min(base.values()) - 1 if len(base) > 1 else 0.0
        return (
            run["form"],
            f"{run['beta2']}",
            f"{run['eps']:g}",
            f"{run['seed']}",
            f"{run['state_bytes']:.2f}",
            f"{run['held_out']:.4f}",
            f"{100 * (run['held_out'] / base[run['seed']] - 1):+.2f} %" if run["seed"] in base else "",
            f"{100 * max(ALLOWED[run['form']], gap):.2f} %" if run["form"] in ALLOWED else "",
        )

    def place(run: dict[str, Any]) -> tuple[Any, ...]:
        return run["beta2"], run["eps"], -run["state_bytes"], run["form"], run["seed"]

    yield from markdown(_HEADER, (line(run) for run in sorted(runs, key=place)))
