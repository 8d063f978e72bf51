"""Quantised parameters of TransformerEngine sharded by FSDP2 over two GPUs: its FusedAdam and ours,
byte for byte; the scenarios are in quantised_fsdp_scenarios.py.
"""

from __future__ import annotations

import importlib.util

import pytest
import quantised_fsdp_scenarios
from ranks import run_ranks

pytestmark = pytest.mark.multi_gpu


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    if importlib.util.find_spec("transformer_engine") is None:
        pytest.skip("needs TransformerEngine")
    folder = tmp_path_factory.mktemp("quantised")
    return run_ranks(
        quantised_fsdp_scenarios.__file__, 2, folder, list(quantised_fsdp_scenarios.SCENARIOS), limit_s=240
    )


@pytest.mark.parametrize("name", quantised_fsdp_scenarios.SCENARIOS)
def test_scenario(failed: dict[str, str], name: str) -> None:
    assert name not in failed, failed[name]
