"""Parameters in FP8 under Megatron, with its own masters and with the optimizer's.

With TransformerEngine on a GPU, what is stepped has the bits of its FusedAdam.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import fp8_job
import pytest
import torch
from checkpoints import FORMATS
from comparison import assert_same, whole_state
from registry import Phase, Results
from scenarios_fp8 import RECIPES, quantised


@pytest.mark.parametrize("place", ["ours", "ours as FusedAdam"])
def test_loaded_weights_go_into_masters_of_megatron(results: Results, place: str) -> None:
    for run in results.ranks("quantised parameters reloaded", Phase.TWO_RANKS):
        shards = run[place]
        assert any(is_quantised for is_quantised, _, _ in shards)
        for is_quantised, master, weights in shards:
            assert_same(master if is_quantised else master.bfloat16().float(), weights, place)


def test_masters_of_megatron_are_stepped_and_parameters_quantised_from_them(results: Results) -> None:
    runs = results.ranks("quantised parameters train", Phase.TWO_RANKS)
    for rank, run in enumerate(runs):
        for name in ("resident", "as FusedAdam"):
            assert_same(run[name], run["offloaded"], f"rank {rank}, {name}")
        assert run["offloaded"]["losses"] == pytest.approx(run["AdamW"]["losses"], rel=1e-3)
    state, by_adamw = (whole_state([run[name]["state"] for run in runs]) for name in ("offloaded", "AdamW"))
    assert len(runs[0]["offloaded"]["bytes"]) == 8
    for name, stored in runs[0]["offloaded"]["bytes"].items():
        master = state[name]["master_param"]
        assert_same(stored.view(-1), quantised(master), name)
        torch.testing.assert_close(
            master, by_adamw[name]["master_param"], rtol=0, atol=3e-4
        )  # of 2e-3 that the steps moved it
        assert not torch.equal(quantised(master).view(torch.float8_e4m3fn).float(), master)


OWNED = [f"{recipe}, {place}" for recipe in RECIPES for place in ("hybrid place", "FusedAdam's place")]


@pytest.mark.parametrize("phase", [Phase.ONE_RANK, Phase.TWO_RANKS])
@pytest.mark.parametrize("name", [*OWNED, "resident", "half"])
def test_masters_of_the_optimizer_give_the_bits_of_megatrons(results: Results, phase: Phase, name: str) -> None:
    for rank, run in enumerate(results.ranks("quantised parameters owned", phase)):
        wanted, ours = run["Megatron's"], run[name]
        assert not wanted["owns"]
        assert ours["owns"]
        assert ours["held"]
        assert all(ours["held"])
        for part in ("losses", "bytes", "amaxes", "state"):
            assert_same(ours[part], wanted[part], f"rank {rank}, {part}")


@pytest.mark.parametrize("recipe", RECIPES)
def test_masters_of_16_bit_parameters_are_the_optimizers_with_every_recipe(results: Results, recipe: str) -> None:
    [owners] = results.ranks("masters beside FP8 recipes", Phase.ONE_RANK)
    assert owners[recipe] == (True, False)


OWNERS = ["Megatron's to Megatron's", "ours to ours", "Megatron's to ours", "ours to Megatron's"]


@pytest.mark.parametrize("owners", OWNERS)
@pytest.mark.parametrize("kind", FORMATS[:2])
def test_a_resumed_run_goes_on_as_the_one_that_saved_whoever_owns_the_masters(
    results: Results, kind: str, owners: str
) -> None:
    for rank, run in enumerate(results.ranks("quantised parameters resumed", Phase.TWO_RANKS)):
        saved, resumed = run[f"{kind}, {owners}"]
        assert_same(resumed, saved, f"rank {rank}")


def test_parameters_are_written_from_the_masters_outside_of_a_step(results: Results) -> None:
    for rank, (before, after) in enumerate(results.ranks("quantised parameters written anew", Phase.TWO_RANKS)):
        assert before
        assert_same(after, before, f"rank {rank}")


@pytest.mark.parametrize("place", ["hybrid place", "FusedAdam's place"])
def test_masters_of_the_optimizer_are_refused(results: Results, place: str) -> None:
    message = results.ranks("quantised parameters refused", Phase.ONE_RANK)[0][place]
    assert "decoder.layers.0" in message
    assert "is a QuantisedLike" in message
    for flag in ("--fp8-param-gather", "--reuse-grad-buf-for-mxfp8-param-ag", "--use-precision-aware-optimizer"):
        assert flag in message


def test_frozen_quantised_parameters_need_no_masters(results: Results) -> None:
    (owners,) = results.ranks("quantised parameters frozen", Phase.ONE_RANK)
    assert owners == {"ours": True, "ours as FusedAdam": True}


def test_what_megatron_leaves_in_the_groups_is_refused(results: Results) -> None:
    ((quantised_one, placeholder),) = results.ranks("quantised parameters left", Phase.ONE_RANK)
    assert "Parameter 0 of parameter group 0 is a QuantisedLike" in quantised_one
    assert "Parameter 0 of parameter group 0 should be a tensor, but got NoneType" in placeholder


# -- TransformerEngine's on a GPU ------------------------------------------------------------------


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of all cases, in a process of their own: Megatron's groups stay for the life of a process."""
    path = tmp_path_factory.mktemp("fp8") / "outcomes.json"
    done = subprocess.run(
        [sys.executable, str(Path(fp8_job.__file__)), "--json", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert path.exists(), done.stdout[-6000:]
    return json.loads(path.read_text())


@pytest.mark.gpu
@pytest.mark.xdist_group("fp8_job")
@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is None, reason="needs TransformerEngine")
@pytest.mark.parametrize("name", list(fp8_job.CASES))
def test_bits_of_fused_adam(outcomes: dict[str, Any], name: str) -> None:
    assert outcomes[name]["wrong"] == [], outcomes[name]["said"]
