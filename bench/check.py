"""Compares a results file with stored ones: ``python bench/check.py results.json``. Fails where a step got slower.

What is compared is the time of a whole step over that of plain copies of the same bytes, which were measured beside it:
links differ from machine to machine and from hour to hour, so times say less.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

STORED = Path(__file__).resolve().parent / "results"
TOLERANCE = 0.15

Record = dict[str, Any]


class Comparison(NamedTuple):
    """One row and what it is held against.

    Attributes:
        name: of the row.
        ratio: to plain copies, now.
        stored: the same, of the stored file.
        source: name of that file.
    """

    name: str
    ratio: float
    stored: float
    source: str

    @property
    def is_slower(self) -> bool:
        """Whether it is worse than the tolerance allows.

        A step that was faster than plain copies says that these were disturbed; it is not what later ones are held to.
        """
        return not 0 < self.ratio <= max(1.0, self.stored) * (1 + TOLERANCE)  # NaN, too


Step = tuple[str, int]
"""Name of a row, and how many parameters are stepped: links and hosts treat small steps differently."""


def ratios(results: Record) -> dict[Step, float]:
    """Ratio to the link of each row that has one and is a step, not a comparison."""
    return {
        (row["name"], row["numel"]): row["ratio_to_link"]
        for row in results.get("rows", [])
        if row["ratio_to_link"] is not None and row["name"].endswith("whole-step")
    }


def _gpu(results: Record) -> str | None:
    return (results.get("machine", {}).get("gpu") or {}).get("name")


def compare(results: Record, stored: Iterable[tuple[str, Record]]) -> list[Comparison]:
    """Holds each step against the newest stored one of the same name, size and card.

    Args:
        results: new results.
        stored: names and contents of stored files.
    """
    same_card = [(name, other) for name, other in stored if ratios(other) and _gpu(other) == _gpu(results)]
    same_card.sort(key=lambda item: item[1]["machine"]["date"])
    best = {row: (ratio, name) for name, other in same_card for row, ratio in ratios(other).items()}
    return [Comparison(row[0], ratio, *best[row]) for row, ratio in ratios(results).items() if row in best]


def missing(found: set[Step], stored: Iterable[tuple[str, Record]], sources: set[str]) -> set[tuple[str, str]]:
    """Steps of the files that were compared with which are not among those that were found, and the file's name."""
    return {(step[0], name) for name, other in stored if name in sources for step in set(ratios(other)) - found}


def unfit(results: Record) -> str | None:
    """Why a file cannot be compared, or None."""
    if results.get("failed"):
        return f"benchmarks failed, so it is not whole: {', '.join(results['failed'])}"
    if results.get("scale", {}).get("smoke"):
        return "it is of a smoke test, which says nothing about speed"
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line. Exit codes: 0 fine, 1 slower, 2 nothing to compare, 3 no results that can be compared."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("results", type=Path, help="what pytest wrote to --results")
    path = parser.parse_args(arguments).results
    try:
        results = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        print(f"{path} cannot be read: {error}")
        return 3
    try:
        reason = unfit(results)
        found = set(ratios(results))
        _gpu(results)
    except (AttributeError, KeyError, TypeError):
        reason = "it was not written by pytest --results"
    if reason is not None:
        print(f"{path}: {reason}")
        return 3
    stored = [
        (file.name, json.loads(file.read_text()))
        for file in sorted(STORED.glob("*.json"))
        if file.resolve() != path.resolve()
    ]
    comparisons = compare(results, stored)
    for name, source in sorted(missing(found, stored, {one.source for one in comparisons})):
        print(f"{name}: not measured now, it is in {source}")
    if not comparisons:
        print(
            f"nothing to compare: no stored results of {_gpu(results) or 'a machine without a GPU'} have the same rows"
        )
        return 2
    for one in comparisons:
        bar = "that" if one.stored > 1 else "plain copies"
        verdict = f"SLOWER than {1 + TOLERANCE:.2f} times {bar}" if one.is_slower else "fine"
        print(f"{one.name}: {one.ratio:.3f} of plain copies, {one.stored:.3f} in {one.source}: {verdict}")
    return int(any(one.is_slower for one in comparisons))


if __name__ == "__main__":
    sys.exit(main())
