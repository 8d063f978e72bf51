"""Prints a results file as Markdown tables.

``python bench/table.py results.json`` or ``python -m bench.table ...``.

Reads JSON and nothing else, so it also works where the package is not installed.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

_HERE = Path(__file__).resolve().parent
if str(_HERE) not in sys.path:
    sys.path.append(str(_HERE))

from plots import people_name  # noqa: E402

Record = dict[str, Any]  # a row of the file; rows.py says what is in it


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        header: its title.
        text: what it shows of a row; "" where that says nothing.
    """

    header: str
    text: Callable[[Record], str]


def number(value: float | None, digits: int = 3) -> str:
    """A value with a fixed number of significant digits; "inf" and "nan" are themselves."""
    if value is None:
        return ""
    whole = len(str(int(abs(value)))) if 1 <= abs(value) < math.inf else 0
    return f"{value:,.{max(0, digits - whole)}f}"


def _case(row: Record) -> str:
    return str(row["name"]).partition("/")[2]


def _milliseconds(row: Record) -> str:
    return number(row["median_ms"])


def _spread(row: Record) -> str:
    return f"{number(row['min_ms'])} to {number(row['max_ms'])}"


def _link_rate(row: Record) -> str:
    return number(row["gbps_to_device"] if row["gbps_to_device"] is not None else row["gbps_to_host"])


def _extra_memory(row: Record) -> str:
    return "" if row["extra_gpu_bytes"] is None else number(row["extra_gpu_bytes"] / 1e9)


def _host(row: Record) -> str:
    if row["host_ms"] is None:
        return ""
    return f"{number(row['host_ms'])} ({row['host_ms'] / row['median_ms']:.0%})"


def _ratio(key: str) -> Callable[[Record], str]:
    return lambda row: "" if row[key] is None else f"{row[key]:.3f}"


def _optimizer(row: Record) -> str:
    return people_name(row["name"]) if row["name"].startswith("peers/") else ""


COLUMNS = (
    Column("optimizer", _optimizer),
    Column("case", _case),
    Column("parameters", lambda row: "" if row["numel"] is None else f"{row['numel']:,}"),
    Column("ms", _milliseconds),
    Column("from, to", _spread),
    Column("GB/s each way", _link_rate),
    Column("TB/s of GPU memory", lambda row: number(row["memory_tbps"])),
    Column("/ copies alone", _ratio("ratio_to_copies")),
    Column("/ plain duplex", _ratio("ratio_to_link")),
    Column("/ first row", _ratio("ratio_to_peer")),
    Column("extra GPU GB", _extra_memory),
    Column("host ms in step()", _host),
    Column("note", lambda row: str(row["note"])),
)

SUITES = {
    "link": "The link alone, GB/s each way",
    "kernel": "The update alone, in GPU memory",
    "step": "Whole step, state in host memory",
    "quantised": "FP8 parameters against bfloat16 ones",
    "tensors": "Many small tensors",
    "resident": "Nothing offloaded",
    "muon-4096": "Muon, matrices of 4,096 and 11,008",
    "muon-2048": "Muon, matrices of 2,048 and 8,192",
    "drift": "Two hundred steps in a row",
    "peers": "The same step by others",
    "sweep": "Chunk size and depth, ms",
    "tuned": "What fused-offload tune chose, against the defaults",
}


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> Iterator[str]:
    """A Markdown table."""
    yield "| " + " | ".join(header) + " |"
    yield "|" + "---|" * len(header)
    for line in lines:
        yield "| " + " | ".join(line) + " |"


def plain_table(rows: list[Record], columns: Iterable[Column] = COLUMNS) -> Iterator[str]:
    """One line for each row, with the columns that say something about any of them."""
    columns = [column for column in columns if any(column.text(row) for row in rows)]
    yield from markdown(
        [column.header for column in columns], ([column.text(row) for column in columns] for row in rows)
    )


def pivot_table(
    rows: list[Record], line_key: str, column_key: str, corner: str, text: Callable[[Record], str]
) -> Iterator[str]:
    """One cell for each row, placed by two of its parameters."""
    cells = {(row["params"][line_key], row["params"][column_key]): text(row) for row in rows}
    lines = list(dict.fromkeys(line for line, _ in cells))
    columns = list(dict.fromkeys(column for _, column in cells))
    yield from markdown(
        [corner, *map(str, columns)],
        ([str(line), *(cells.get((line, column), "") for column in columns)] for line in lines),
    )


def suite_tables(suite: str, rows: list[Record]) -> Iterator[str]:
    """The tables of one suite."""
    if suite == "link":
        yield from pivot_table(rows, "copy_mib", "direction", "MiB a copy", _link_rate)
    elif suite == "sweep":
        for format in dict.fromkeys(row["params"]["form"] for row in rows):
            chosen = [row for row in rows if row["params"]["form"] == format]
            yield from pivot_table(chosen, "chunk_mib", "depth", f"{format}: MiB a chunk, by depth", _milliseconds)
            yield ""
    else:
        yield from plain_table(rows)


def machine_lines(results: Record) -> Iterator[str]:
    """Origin of the numbers."""
    machine = results["machine"]
    gpu = machine["gpu"] or {}
    width = gpu.get("pcie_width") or gpu.get("pcie_width_max")
    generation = gpu.get("pcie_generation_max")
    link = f", PCIe {generation} x{width}" if generation and width else ""
    yield f"{gpu.get('name', 'no GPU')}{link}, driver {gpu.get('driver', 'unknown')}, CUDA {machine['cuda']}; "
    yield (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['numa_nodes']} NUMA node(s), "
        f"{machine['host_memory_bytes'] / 2**30:.0f} GiB; "
    )
    versions = [f"{name} {version}" for name, version in machine["versions"].items() if version]
    yield f"Python {machine['python']}, {', '.join(versions)}; "
    how = f"; medians of {_rounds(results['scale'])}; `{results['command']}`" if "command" in results else ""
    yield f"commit {machine['commit']}, {machine['date']}{how}"
    if results.get("scale", {}).get("smoke"):
        yield "**A smoke test: these numbers say nothing about speed.**"


def _rounds(scale: Record) -> str:
    compared = scale.get("compared_rounds", scale["rounds"])
    return f"{scale['rounds']}" + (f", of steps {compared}" if compared != scale["rounds"] else "")


def report(results: Record) -> Iterator[str]:
    """The whole file as Markdown."""
    yield from machine_lines(results)
    for suite, title in SUITES.items():
        rows = [row for row in results["rows"] if row["name"].partition("/")[0] == suite]
        if rows:
            yield from ("", f"### {title}", "", *suite_tables(suite, rows))
    for reason, names in results["skipped"].items():
        yield from ("", f"Not measured ({reason}): {', '.join(names)}")
    if results["failed"]:
        yield from ("", f"**Failed: {', '.join(results['failed'])}**")


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("results", type=Path, help="what pytest wrote to --results")
    path = parser.parse_args(arguments).results
    try:
        results = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        parser.error(f"{path} cannot be read: {error}")
    if not isinstance(results, dict) or "rows" not in results:
        parser.error(f"{path} was not written by pytest --results; bench/page.py shows the other files")
    print("\n".join(report(results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
