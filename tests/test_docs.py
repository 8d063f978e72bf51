"""Files and headings that the pages name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_rooms import ROOMS

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "bench/README.md",
    *(f"docs/{p.name}" for p in ROOT.glob("docs/*.md")),
)
FOLDERS = ("", "fused_offload", "fused_offload/megatron", "tests", "docs", "tests/megatron", "bench", "tools")
"""Folders that names of files are relative to."""

OF_OTHERS = {"test_optimizer_cpu_offloading.py", "pretrain_gpt.py"}
"""Files of other projects."""


def slug(heading: str) -> str:
    """Anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def files_named(text: str) -> set[str]:
    """Names of files in backticks, without arguments."""
    words = (word for quoted in re.findall(r"`([^`\n]+)`", text) for word in quoted.split())
    return {word for word in words if re.fullmatch(r"[\w./*-]+\.(py|sh)", word)}


def exists(name: str) -> bool:
    return any(next((ROOT / folder).glob(name), None) for folder in FOLDERS)


@pytest.mark.parametrize("page", PAGES)
def test_files_exist(page: str) -> None:
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
    assert {name for name in files_named(text) - OF_OTHERS if not exists(name)} == set()


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", (ROOT / page).read_text()):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        linked = (ROOT / page).parent / name if name else ROOT / page
        assert linked.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", linked.read_text(), flags=re.MULTILINE)
            assert anchor in map(slug, headings), target


def test_rooms_stand_in_the_design_in_their_order() -> None:
    [block] = re.findall(
        r"^## 4\. Rooms\n+```\n(.*?)```", (ROOT / "docs/design.md").read_text(), re.DOTALL | re.MULTILINE
    )
    shown = re.findall(r"(?:^|(?<=\s))(\w+)(?:/|\.py)(?=\s)", block)
    assert shown == [*ROOMS[:1], "fused_offload", *(room for room in ROOMS[1:] if room not in ("__init__", "__main__"))]


def test_the_readme_fits_on_a_few_screens() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_numbers_of_the_readme_are_those_of_the_results() -> None:
    """Each number of its first table stands in the summary of the results, which bench/page.py
    writes.
    """
    summary = (ROOT / "docs/benchmarks.md").read_text().partition("## Contents")[0]
    (table,) = re.findall(r"^\| measured on .*?\n\n", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    numbers = re.findall(
        r"[\d,.]*\d(?= (?:tokens/s|TFLOP/s|with recomputation|GB|ms|billion))", table.partition("\n")[2]
    )
    assert len(numbers) >= 12
    assert [
        number for number in numbers if not re.search(rf"(?<![\d,.]){re.escape(number)}(?![\d]|[,.]\d)", summary)
    ] == []


@pytest.mark.parametrize("page", [page for page in PAGES if page not in ("docs/benchmarks.md", "bench/README.md")])
def test_prose_is_wrapped(page: str) -> None:
    """At 100 columns; tables, pictures, addresses and code are as long as they are."""
    text = re.sub(r"^( *)```.*?^ *```$", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    long = [
        line for line in text.splitlines() if len(line) > 100 and not re.match(r" *(\||!\[|#|\S+$)|.*\(https:", line)
    ]
    assert long == []


def test_the_checks_find_names() -> None:
    assert files_named("`a/b.py`, `python c.py --x`, `d*.py`, e.py, `f.g`") == {"a/b.py", "c.py", "d*.py"}
    assert slug("8-bit moments and `stochastic` rounding") == "8-bit-moments-and-stochastic-rounding"
    assert exists("state/layout.py")
    assert not exists("state/no_such.py")
