"""The line that a memory report prints as."""

from __future__ import annotations

import pytest
import torch

from fused_offload import FusedOffloadAdam, OffloadConfig
from fused_offload.state.memory_report import MemoryReport

HOST = {"exp_avg": 4_000_000_000, "exp_avg_sq": 4_000_000_000}


@pytest.mark.parametrize(
    ("report", "line"),
    [
        (MemoryReport(), "state of 0 parameters: 0.000 GB on the host"),
        (
            MemoryReport(host_bytes=HOST, param_numel=10**9, pinned=True, ring_bytes=150_994_944),
            "state of 1,000,000,000 parameters (8.00 bytes each): 8.000 GB on the host, 0.151 GB of staging on the GPU",
        ),
        (
            MemoryReport(host_bytes=HOST, resident_bytes=HOST, param_numel=2 * 10**9, work_bytes=10**9),
            "state of 2,000,000,000 parameters (8.00 bytes each): 8.000 GB on the host, not page-locked, "
            "8.000 GB on the parameters' device, 1.000 GB of work memory on the GPU",
        ),
    ],
)
def test_a_report_is_a_line(report: MemoryReport, line: str) -> None:
    assert str(report) == line


def test_the_line_of_an_optimizer_has_its_bytes() -> None:
    param = torch.nn.Parameter(torch.zeros(1 << 20))
    param.grad = torch.zeros_like(param)
    optimizer = FusedOffloadAdam([param], offload=OffloadConfig(pin=False))
    assert str(optimizer.memory_report()).startswith("state of 0 parameters")
    optimizer.step()
    assert str(optimizer.memory_report()) == (
        "state of 1,048,576 parameters (8.00 bytes each): 0.008 GB on the host, not page-locked"
    )
