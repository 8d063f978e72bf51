"""Runs the job of the Megatron tests once, also under several pytest workers."""

from __future__ import annotations

import fcntl
import importlib.util
import os
from pathlib import Path

import launch
import pytest
from registry import Results

_HERE = Path(__file__).resolve().parent


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if _is_installed("megatron.core"):
        return
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs megatron-core"))


@pytest.fixture(scope="session")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Outcomes of all scenarios, of large ones only for tests marked so. The first worker to ask runs
    them, the others wait for it.
    """
    if launch.OUTCOMES in os.environ:
        return launch.collect(Path(os.environ[launch.OUTCOMES]))
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    directory = shared / "megatron"
    with (shared / "megatron.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not directory.exists():
            directory.mkdir()
            large = any(
                item.get_closest_marker("large") and _HERE in item.path.parents for item in request.session.items
            )
            launch.run(directory, large=large)
    return launch.collect(directory)
