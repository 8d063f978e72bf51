"""The table of `megatron_lm.py` in docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Iterator

from summary import PEAK_TFLOPS
from table import Record, markdown, number


def whole_lines(record: Record) -> Iterator[str]:
    """Cases of whole Megatron-LM jobs, against stock FusedAdam."""
    peak = PEAK_TFLOPS.get((record["machine"]["gpu"] or {}).get("name"))
    header = (
        *("case", "optimizer", "iteration, ms", "/ stock", "added, ms", "exposed by the report, ms", "tokens/s"),
        *("TFLOP/s", "of peak", "peak GPU GB", "reserved GB", "host GB", "equal digits: loss", "gradient norm"),
    )

    def line(name: str, case: Record) -> tuple[str, ...]:
        tflops, said = case.get("tflops"), case.get("report", {})
        return (
            name,
            case["inner"],
            number(case["iteration_ms"], 4),
            f"{case['over_stock']:.3f}" if "over_stock" in case else "",
            number(case.get("added_ms")) if "added_ms" in case and name != "stock" else "",
            number(said.get("exposed_ms")),
            number(case["tokens_per_s"], 4),
            number(tflops),
            f"{tflops / peak:.0%}" if tflops and peak else "",
            *(number(case[key] / 1e9) if case.get(key) else "" for key in ("peak_bytes", "peak_reserved_bytes")),
            number(case["host_bytes"] / 1e9) if case.get("host_bytes") else "",
            *(_digits(case.get(f"{values}_digits")) for values in ("losses", "grad_norms")),
        )

    yield from markdown(header, (line(name, case) for name, case in record["whole"].items()))
    for name, reason in record.get("failed", {}).items():
        yield from ("", f"**Failed: {name}**: {reason.splitlines()[0]}")


def _digits(value: float | str | None) -> str:
    return "" if value is None else value if isinstance(value, str) else f"{value:.1f}"
