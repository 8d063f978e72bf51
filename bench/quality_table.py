"""Held-out losses of `quality.py` as tables, beside those in float32."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from table import markdown

ALLOWED = {"uint8": 0.003, "bf16": 0.001}
"""Tolerance of a format's held-out loss over float32, unless the seeds differ by more."""
_SETTINGS = ("beta2", "eps", "lr", "size")
_RUNS = ("form", "beta2", "eps", "seed", "bytes a parameter", "held-out loss", "over float32", "allowed")
_FORMATS = ("form", "beta2", "eps", "seeds", "mean held-out loss", "spread of seeds", "over float32, mean", "by seed")


def _percent(share: float) -> str:
    return f"{100 * share:+.2f} %"


def _same_settings(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(one.get(key) == other.get(key) for key in _SETTINGS)


def _in_float32(runs: Sequence[dict[str, Any]], run: dict[str, Any]) -> dict[int, float]:
    """Held-out loss by seed of runs in float32 that are otherwise as this one."""
    return {
        other["seed"]: other["held_out"] for other in runs if other["form"] == "fp32" and _same_settings(run, other)
    }


def _spread(losses: Sequence[float]) -> float:
    return max(losses) / min(losses) - 1


def quality_lines(runs: Sequence[dict[str, Any]]) -> Iterator[str]:
    """All runs beside those in float32 with the same seed, then each format over its seeds, in
    Markdown.
    """

    def run_line(run: dict[str, Any]) -> tuple[str, ...]:
        base = _in_float32(runs, run)
        gap = _spread(list(base.values())) if len(base) > 1 else 0.0
        return (
            run["form"],
            f"{run['beta2']}",
            f"{run['eps']:g}",
            f"{run['seed']}",
            f"{run['state_bytes']:.2f}",
            f"{run['held_out']:.4f}",
            _percent(run["held_out"] / base[run["seed"]] - 1) if run["seed"] in base else "",
            f"{100 * max(ALLOWED[run['form']], gap):.2f} %" if run["form"] in ALLOWED else "",
        )

    def format_line(same: Sequence[dict[str, Any]]) -> tuple[str, ...]:
        base = _in_float32(runs, same[0])
        losses = [run["held_out"] for run in same]
        over = [run["held_out"] / base[run["seed"]] - 1 for run in same if run["seed"] in base]
        return (
            same[0]["form"],
            f"{same[0]['beta2']}",
            f"{same[0]['eps']:g}",
            ", ".join(str(run["seed"]) for run in same),
            f"{sum(losses) / len(losses):.4f}",
            f"{100 * _spread(losses):.2f} %",
            _percent(sum(over) / len(over)) if over else "",
            ", ".join(map(_percent, over)),
        )

    def place(run: dict[str, Any]) -> tuple[Any, ...]:
        return run["beta2"], run["eps"], -run["state_bytes"], run["form"], run["seed"]

    ordered = sorted(runs, key=place)
    yield from markdown(_RUNS, map(run_line, ordered))
    by_format: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for run in ordered:
        by_format[run["form"], repr([run.get(key) for key in _SETTINGS])].append(run)
    if len({run["seed"] for run in runs}) > 1:
        yield ""
        yield from markdown(_FORMATS, map(format_line, by_format.values()))
