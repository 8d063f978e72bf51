"""Sends parameters on the CPU through the GPU's pipeline, for tests on machines without a GPU."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from simulated_device import SimulatedDevice, installed

from fused_offload.params import placement
from fused_offload.params.placement import Placement

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def pipeline_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """On a device that runs everything at once, in order. Modules take it over by its name."""
    with installed(SimulatedDevice(), monkeypatch):
        yield
        gc.collect()  # what is page-locked so far is given back the same way


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.Tensor]]:
    """Parameters that the test puts into this list count as parameters in host memory."""
    hosted: list[torch.Tensor] = []
    monkeypatch.setattr(
        placement, "placement_of", lambda param: Placement(CPU, on_host=any(param is one for one in hosted))
    )
    yield hosted
    gc.collect()
