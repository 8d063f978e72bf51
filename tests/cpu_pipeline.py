"""Sends parameters on the CPU through the GPU's pipeline, for tests on machines without a GPU."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from simulated_device import SimulatedDevice, installed

from fused_offload.params import placement
from fused_offload.params.placement import Placement
from fused_offload.stream.launches import Launches

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def pipeline_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedDevice]:
    """On a device that runs everything at once, in order. Modules take it over by its name."""
    sim = SimulatedDevice()
    with installed(sim, monkeypatch):
        yield sim
        gc.collect()  # what is page-locked so far is given back the same way


@pytest.fixture
def specified_kernels(pipeline_on_the_cpu: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run as their specification; in Triton's interpreter they take many times longer."""
    monkeypatch.setattr(Launches, "launch", lambda self, index, slot=0: pipeline_on_the_cpu.launch(self, index, slot))


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.Tensor]]:
    """Parameters that the test puts into this list count as parameters in host memory."""
    hosted: list[torch.Tensor] = []
    monkeypatch.setattr(
        placement, "placement_of", lambda param: Placement(CPU, on_host=any(param is one for one in hosted))
    )
    yield hosted
    gc.collect()
