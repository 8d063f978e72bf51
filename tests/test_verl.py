"""In verl's actor with FSDP2 workers, as docs/rl.md sets it up: on two CPU ranks, one and two GPUs.

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


ON_CPU = {"CUDA_VISIBLE_DEVICES": ""}
ON_GPU = {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}  # the same bits each time


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((2, ON_CPU), id="2 CPU ranks"),
        pytest.param((1, ON_GPU), id="1 GPU", marks=pytest.mark.gpu),
        pytest.param((2, ON_GPU), id="2 GPUs", marks=pytest.mark.multi_gpu),
    ],
)
def failed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    script = str(Path(__file__).with_name("verl_scenarios.py"))
    ranks, environment = request.param
    return run_ranks(
        script, ranks, tmp_path_factory.mktemp("verl"), SCENARIOS, limit_s=LIMIT_S, environment=environment
    )


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(failed: dict[str, str], name: str) -> None:
    assert name not in failed, failed[name]
