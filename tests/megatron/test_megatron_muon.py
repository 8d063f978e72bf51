"""Megatron's Muon with its momentum in host memory has the bits of stock Megatron, and its checkpoints."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from fused_offload import OffloadConfig
from fused_offload.megatron import install
from fused_offload.megatron.api_probe import MegatronApi
from fused_offload.megatron.patches import Installation
from fused_offload.megatron.replacements import Settings

_HERE = Path(__file__).resolve().parent

pytest.importorskip("megatron.core")


def run(directory: Path, ranks: int) -> list[dict[str, Any]]:
    """What each rank found."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [sys.executable, str(_HERE / "muon_job.py"), str(directory)]
    logs = [directory / f"{rank}.{ranks}.log" for rank in range(ranks)]
    processes = []
    for rank, log in enumerate(logs):
        with log.open("wb") as output:
            arguments = [*command, str(rank), str(ranks)]
            processes.append(subprocess.Popen(arguments, env=environment, stdout=output, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0] * ranks, "\n".join(log.read_text()[-3000:] for log in logs)
    return [torch.load(directory / f"{rank}.{ranks}.pt", weights_only=False) for rank in range(ranks)]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shared = tmp_path_factory.getbasetemp()
    return shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared


def once(folder: Path, ranks: int) -> list[dict[str, Any]]:
    """The job's findings; the first of pytest's workers to ask runs it."""
    if importlib.util.find_spec("megatron.core.optimizer.emerging_optimizers") is None:
        pytest.skip("needs Muon as Megatron-Core has it from 0.18 on")
    directory = folder / f"megatron-muon-{ranks}"
    with (folder / f"megatron-muon-{ranks}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not directory.exists():
            directory.mkdir()
            return run(directory, ranks)
    return [torch.load(directory / f"{rank}.{ranks}.pt", weights_only=False) for rank in range(ranks)]


@pytest.fixture(scope="session")
def alone(folder: Path) -> dict[str, Any]:
    [found] = once(folder, 1)
    return found


@pytest.fixture(scope="session")
def both(folder: Path) -> list[dict[str, Any]]:
    return once(folder, 2)


def assert_same(found: dict[str, Any]) -> None:
    """Losses, weights and momenta of both are equal to the bit, and were trained."""
    stock, ours = found["stock"], found["ours"]
    assert ours["losses"] == stock["losses"]
    assert len(set(ours["losses"])) == len(ours["losses"])
    assert ours["weights"].keys() == stock["weights"].keys()
    for name, weight in ours["weights"].items():
        assert torch.equal(weight, stock["weights"][name]), name
    assert len(ours["momenta"]) == len(stock["momenta"]) > 0
    for index, (one, other) in enumerate(zip(ours["momenta"], stock["momenta"], strict=True)):
        assert torch.equal(one, other), index
        assert one.any()


ALONE = (
    "bf16",
    "fp32",
    "nesterov, small momentum",
    "no split of queries, keys and values",
    "resident, with a window for Adam",
)
OF_TWO = (
    "data parallel",
    "layer-wise",
    *(f"tensor parallel, {mode}" for mode in ("blockwise", "duplicated", "distributed")),
)


@pytest.mark.parametrize("name", ALONE)
def test_bits_are_those_of_stock(name: str, alone: dict[str, Any]) -> None:
    assert_same(alone[name])
    assert (alone[name]["stock"]["classes"], alone[name]["ours"]["classes"]) == (
        ["TensorParallelMuon"],
        ["MegatronMuon"],
    )


@pytest.mark.parametrize("name", OF_TWO)
def test_bits_of_two_ranks_are_those_of_stock(name: str, both: list[dict[str, Any]]) -> None:
    for found in both:
        assert_same(found[name])


def test_the_layer_wise_optimizer_gives_each_rank_matrices_of_its_own(both: list[dict[str, Any]]) -> None:
    counts = [len(found["layer-wise"]["ours"]["momenta"]) for found in both]
    whole = len(both[0]["data parallel"]["ours"]["momenta"])
    assert sum(counts) == whole
    assert 0 < min(counts)


def test_one_line_counts_what_is_on_muon(alone: dict[str, Any], both: list[dict[str, Any]]) -> None:
    assert alone["bf16"]["ours"]["said"] == (
        "fused-offload: 9 matrices (31,680 elements) on Muon, their float32 momentum in host memory, masters on the "
        "GPU; 12 other parameters on adam.\n"
    )
    assert alone["bf16"]["stock"]["said"] == ""
    assert "9 matrices" in both[0]["layer-wise"]["ours"]["said"]  # of the model, before ranks share them
    assert both[1]["layer-wise"]["ours"]["said"] == ""


@pytest.mark.parametrize("format", ["torch checkpoints", "torch_dist checkpoints"])
@pytest.mark.parametrize("ways", ["False False", "False True", "True False", "True True"])
def test_checkpoints_are_exchanged_with_stock(format: str, ways: str, alone: dict[str, Any]) -> None:
    assert_same(alone[format][ways])


def test_a_model_without_matrices_is_an_error(alone: dict[str, Any]) -> None:
    assert alone["no matrices"].startswith("--optimizer muon, but none of the 10 trainable parameters of this model")


def test_what_is_not_asked_for_stays_stock(alone: dict[str, Any]) -> None:
    assert alone["stays stock"] == {
        "registry": "TensorParallelMuon",
        "without the switch": "TensorParallelMuon",
        "built": "soap",
        "said": "fused-offload: --optimizer soap keeps Megatron's own optimizer; only muon moves.\n",
    }


def test_bad_input_is_refused(alone: dict[str, Any]) -> None:
    l2, vector, closure = alone["refusals"]
    assert "decays weights decoupled, but got weight_decay_method='l2'" in l2
    assert "Muon only supports 2D parameters whereas we found a parameter with size: (3,)" in vector
    assert closure == "closure is not supported"


@pytest.fixture
def nothing_installed() -> Iterator[None]:
    yield
    from fused_offload.megatron import uninstall

    uninstall()


def test_the_switch_is_checked(monkeypatch: pytest.MonkeyPatch, nothing_installed: None) -> None:
    with pytest.raises(TypeError, match="Invalid muon: 1, it should be a bool"):
        install(muon=1)  # type: ignore[arg-type]
    monkeypatch.setenv("FUSED_OFFLOAD_MUON", "yes")
    with pytest.raises(ValueError, match="Invalid FUSED_OFFLOAD_MUON: 'yes', it should be '1' to keep Muon's momentum"):
        install()
    monkeypatch.setenv("FUSED_OFFLOAD_MUON", "1")
    monkeypatch.setitem(sys.modules, "emerging_optimizers", None)
    monkeypatch.setattr("importlib.util.find_spec", _without_emerging_optimizers)
    with pytest.raises(ModuleNotFoundError, match="needs emerging-optimizers: pip install"):
        install()


def test_a_release_without_muon_is_refused() -> None:
    installation = Installation(Settings(OffloadConfig(), None, muon=True))
    api = MegatronApi(ModuleType("package"), ModuleType("distrib"), None, "0.17.1")
    with pytest.raises(RuntimeError, match=r"muon=True needs the Muon of Megatron-Core 0\.19\.2, which 0\.17\.1"):
        installation.check_muon(api)
    installation.settings = installation.settings._replace(muon=False)
    installation.check_muon(api)


def _without_emerging_optimizers(name: str) -> object:
    return None if name == "emerging_optimizers" else object()
