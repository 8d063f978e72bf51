"""Sends parameters on the CPU through the GPU's pipeline, for tests on machines without a GPU."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from simulated_device import SimulatedDevice, installed


@pytest.fixture(autouse=True)
def pipeline_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """On a device that runs everything at once, in order. Modules take it over by its name."""
    with installed(SimulatedDevice(), monkeypatch):
        yield
        gc.collect()  # what is page-locked so far is given back the same way
