"""Compares a results file with stored ones: ``python bench/check.py results.json``.

Fails where a step got slower.

What is compared is the time of a whole step over that of plain copies of the same bytes, which were
measured beside it: links differ from machine to machine and from hour to hour, so times say less.
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
        """True if it is worse than the tolerance allows.

        A step that was faster than plain copies says that these were disturbed; it is not what
        later ones are held to.
        """
        return not 0 < self.ratio <= max(1.0, self.stored) * (1 + TOLERANCE)  # NaN, too


Step = tuple[str, int]
"""Name of a row, and how many parameters are stepped.

Links and hosts treat small steps differently.
"""


def ratios(results: Record) -> dict[Step, float]:
    """Ratio to the link of each row that has one and is a step, not a comparison."""
    return {
        (row["name"], row["numel"]): row["ratio_to_link"]
        for row in results["rows"]
        if row["ratio_to_link"] is not None and row["name"].endswith("whole-step")
    }


def _gpu(results: Record) -> str | None:
    return (results["machine"]["gpu"] or {}).get("name")


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
    """Steps of the files that were compared with which are not among those that were found, and the
    file's name.
    """
    return {(step[0], name) for name, other in stored if name in sources for step in set(ratios(other)) - found}


def unfit(results: Any) -> str | None:
    """Why a file cannot be compared, or None."""
    try:
        if results.get("failed"):
            return f"benchmarks failed, so it is not whole: {', '.join(results['failed'])}"
        if results.get("scale", {}).get("smoke"):
            return "it is of a smoke test, which says nothing about speed"
        _gpu(results)
        are_numbers = all(isinstance(ratio, float | int) for ratio in ratios(results).values())
        if are_numbers and isinstance(results["machine"]["date"], str):
            return None
    except (AttributeError, KeyError, TypeError):
        pass
    return "it was not written by pytest --results"


def read(path: Path) -> tuple[Any, str | None]:
    """Contents of a file, and the reason why it cannot be compared, or None."""
    try:
        results = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        return None, f"it cannot be read: {error}"
    return results, unfit(results)


def stored_beside(path: Path) -> list[tuple[str, Record]]:
    """Names and contents of the stored files that another can be compared with.

    Says which of the suite cannot be.
    """
    stored = []
    for file in sorted(STORED.glob("*.json")):
        results, reason = read(file)
        if file.resolve() == path.resolve() or (isinstance(results, dict) and "rows" not in results):
            continue  # itself, or of another program
        if reason is None:
            stored.append((file.name, results))
        else:
            print(f"{file.name} is left out: {reason}")
    return stored


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line.

    Exit codes: 0 fine, 1 slower, or steps of the stored files were not measured (unless
    ``--partial``), 2 nothing to compare, 3 no results that can be compared.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("results", type=Path, help="what pytest wrote to --results")
    parser.add_argument("--partial", action="store_true", help="only some of the steps were to be measured")
    options = parser.parse_args(arguments)
    path: Path = options.results
    results, reason = read(path)
    if reason is not None:
        print(f"{path}: {reason}")
        return 3
    stored = stored_beside(path)
    comparisons = compare(results, stored)
    lacking = sorted(missing(set(ratios(results)), stored, {one.source for one in comparisons}))
    for name, source in lacking:
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
    if lacking and not options.partial:
        print("not all was compared, since steps were not measured; --partial says that they were not to be")
        return 1
    return int(any(one.is_slower for one in comparisons))


if __name__ == "__main__":
    sys.exit(main())
