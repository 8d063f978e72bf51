"""Whole trainings with FSDP2 under Hugging Face's Trainer, on two CPU ranks and on GPUs; the
scenarios are in trainer_fsdp_scenarios.py.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from ranks import run_ranks

LIMIT_S = 240
SCRIPT = Path(__file__).with_name("trainer_fsdp_scenarios.py")
NAMES = [
    "resumes_with_the_same_bits",
    "bfloat16_moments_resume_with_the_same_bits",
    "a_bfloat16_model_is_trained_in_float32",
    "trains_as_torch_adamw",
    "the_trainer_refuses_an_optimizer_that_exists",
]
"""Functions of the script, which needs packages that may be missing."""

missing = [name for name in ("transformers", "accelerate") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.skipif(bool(missing), reason=f"needs {' and '.join(missing)}"),
    pytest.mark.xdist_group("trainer_fsdp"),
]


def run(ranks: int, folder: Path, environment: dict[str, str]) -> dict[str, str]:
    return run_ranks(str(SCRIPT), ranks, folder, NAMES, limit_s=LIMIT_S, environment=environment)


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run(2, tmp_path_factory.mktemp("trainer"), {"CUDA_VISIBLE_DEVICES": ""})


@pytest.mark.parametrize("name", NAMES)
def test_scenario(failed: dict[str, str], name: str) -> None:
    assert name not in failed, failed[name]


@pytest.fixture(scope="module")
def failed_on_gpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run(2, tmp_path_factory.mktemp("trainer"), {})


@pytest.mark.multi_gpu
@pytest.mark.parametrize("name", NAMES)
def test_scenario_on_two_gpus(failed_on_gpus: dict[str, str], name: str) -> None:
    assert name not in failed_on_gpus, failed_on_gpus[name]


@pytest.fixture(scope="module")
def failed_on_one_gpu(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run(1, tmp_path_factory.mktemp("trainer"), {"CUDA_VISIBLE_DEVICES": "0"})


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_scenario_on_one_gpu(failed_on_one_gpu: dict[str, str], name: str) -> None:
    assert name not in failed_on_one_gpu, failed_on_one_gpu[name]


def test_every_scenario_runs() -> None:
    text = SCRIPT.read_text()
    assert text.count("\n@scenario\n") == len(NAMES)
    assert all(f"\ndef {name}()" in text for name in NAMES)
