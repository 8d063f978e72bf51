"""In verl's actor with FSDP2 workers, as docs/rl.md sets it up, on two ranks.

The scenarios are in verl_scenarios.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import run_ranks
from test_trainers import needs

LIMIT_S = 240
SCENARIOS = (
    "an_update_is_that_of_adamw",
    "an_update_of_adapters_is_that_of_adamw",
    "only_adapters_have_state",
    "moving_the_optimizer_between_phases_changes_nothing",
    "a_resumed_run_has_the_bits_of_the_uninterrupted_one",
    "a_gradient_that_is_not_finite_skips_the_update",
)

pytestmark = [needs("verl", "transformers", "peft", "ray"), pytest.mark.xdist_group("verl")]


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    script = str(Path(__file__).with_name("verl_scenarios.py"))
    folder = tmp_path_factory.mktemp("verl")
    return run_ranks(script, 2, folder, SCENARIOS, limit_s=LIMIT_S, environment={"CUDA_VISIBLE_DEVICES": ""})


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(failed: dict[str, str], name: str) -> None:
    assert name not in failed, failed[name]
