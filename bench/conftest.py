"""Options of the benchmarks, what every benchmark gets, and the results file."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

# Benchmarks import their helpers by plain name. pytest puts this folder on sys.path in its default
# import mode only.
_HERE = str(Path(__file__).resolve().parent)
if _HERE not in sys.path:
    sys.path.append(_HERE)

from cases import release_memory  # noqa: E402
from machine import machine_facts  # noqa: E402
from rows import Rows  # noqa: E402
from scale import Scale, cpu_scale, full_scale, smoke_scale  # noqa: E402

from fused_offload.profiles import units  # noqa: E402

_ROWS = pytest.StashKey[Rows]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fused-offload benchmarks")
    group.addoption(
        "--bench-numel", type=units.count, help="parameters (default: 1_000_000_000 on a GPU, 1_000_000 without)"
    )
    group.addoption("--results", metavar="FILE.json", help="write machine facts and all rows to this file")
    group.addoption("--profiles", metavar="DIR", help="where fused-offload tune kept its profile (default: as it does)")
    group.addoption("--smoke", action="store_true", help="tiny sizes, once: only checks that the benchmarks work")
    group.addoption("--sweep", action="store_true", help="also sweep chunk_bytes and depth (minutes)")


def _scale(config: pytest.Config) -> Scale:
    numel = config.getoption("bench_numel")
    if config.getoption("smoke"):
        return smoke_scale(numel or 4 * 1_153)  # a whole block and a part of one each, five chunks
    if torch.cuda.is_available():
        return full_scale(numel or 1_000_000_000)
    return cpu_scale(numel or 1_000_000)


class _ResultsFile:
    """Rows, and what was skipped or failed and why.

    Written after each test, so that a run that is cut off leaves what it has measured.
    """

    def __init__(self, path: Path, config: pytest.Config) -> None:
        self._path = path
        self._config = config
        self._skipped: dict[str, list[str]] = {}  # by reason
        self._failed: list[str] = []
        self._machine: dict[str, Any] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self._skipped.setdefault(reason.removeprefix("Skipped: "), []).append(report.nodeid)
        elif report.failed:
            self._failed.append(report.nodeid)
        if report.when == "teardown":
            self._write()

    def pytest_sessionfinish(self) -> None:
        self._write()

    def _write(self) -> None:
        # Behind the first benchmark, since an idle link slows down, and before the file can change
        # the checkout.
        self._machine = self._machine or machine_facts()
        results: dict[str, Any] = {
            "command": " ".join(["pytest", *self._config.invocation_params.args]),
            "scale": asdict(_scale(self._config)),
            "machine": self._machine,
            "rows": self._config.stash[_ROWS].as_json(),
            "skipped": self._skipped,
            "failed": self._failed,
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._path.with_name(self._path.name + ".tmp")
        unfinished.write_text(json.dumps(results, indent=2) + "\n")
        unfinished.replace(self._path)


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_ROWS] = Rows()
    path = config.getoption("results")
    if path and (config.invocation_params.dir / path).is_dir():
        raise pytest.UsageError(f"--results {path} is a folder; it should be a file")
    if path and not config.option.collectonly:
        # Relative to where pytest was started, like any other file that is named on a command line.
        config.pluginmanager.register(_ResultsFile(config.invocation_params.dir / path, config))


@pytest.fixture(scope="session")
def scale(request: pytest.FixtureRequest) -> Scale:
    return _scale(request.config)


@pytest.fixture(scope="session")
def rows(request: pytest.FixtureRequest) -> Rows:
    return request.config.stash[_ROWS]


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_left_over() -> Iterator[None]:
    """Each case starts with the memory that the one before it took."""
    yield
    release_memory()
