"""Megatron-FSDP, version 1: the bits of the reference, and checkpoints that load all of the
state.
"""

from __future__ import annotations

import importlib.util
import re

import pytest
from comparison import assert_same, whole_state
from registry import BOTH_WORLDS, Phase, Results
from scenarios_fsdp import BEFORE, PLACES, RESUMES, RUNS, resume_name, training_name

pytestmark = pytest.mark.skipif(importlib.util.find_spec("einops") is None, reason="Megatron-FSDP needs einops")

TRAINED = [(name, phase) for name, run in RUNS.items() for phase in run.phases]


@pytest.mark.parametrize(("name", "phase"), TRAINED)
def test_training_has_the_bits_of_the_reference(results: Results, name: str, phase: Phase) -> None:
    for rank, run in enumerate(results.ranks(training_name(name), phase)):
        assert all(step.updated for step in run["ours"]["log"])
        assert_same(run["ours"], run["reference"], f"rank {rank}")


@pytest.mark.parametrize(("name", "phase"), TRAINED)
def test_only_moments_are_kept_since_the_masters_are_not_ours(results: Results, name: str, phase: Phase) -> None:
    for run in results.ranks(training_name(name), phase):
        assert run["flags"] == (False, RUNS[name].spec.precision_aware)
        assert run["keys"] == ["exp_avg", "exp_avg_sq"]
        assert set(run["report"].host_bytes) == {"exp_avg", "exp_avg_sq"}
        assert run["report"].resident_bytes == {}
        assert run["report"].param_numel == sum(run["shards"])
        assert "master_param" not in run["shown"]


def test_some_shards_are_empty_on_either_rank(results: Results) -> None:
    for run in results.ranks(training_name("place of HybridDeviceOptimizer"), Phase.TWO_RANKS):
        assert 0 in run["shards"]


@pytest.mark.parametrize("place", PLACES)
def test_moving_the_optimizer_away_and_back_and_refreshing_masters_changes_nothing(
    results: Results, place: str
) -> None:
    for rank, run in enumerate(results.ranks("Megatron-FSDP, moved away and back", Phase.TWO_RANKS)):
        assert_same(run[place], run["left"], f"rank {rank}")


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("name", RESUMES)
def test_a_run_that_loads_either_of_two_checkpoints_goes_on_bit_for_bit(
    results: Results, name: str, number: int
) -> None:
    for rank, run in enumerate(results.ranks(resume_name(name), Phase.TWO_RANKS)):
        assert_same(run["loaded"][number], run["saved"][number], f"rank {rank}")
        assert_same(run[f"resumed {number}"], run["went on"], f"rank {rank}")


@pytest.mark.parametrize("name", RESUMES)
def test_what_is_compared_has_moments(results: Results, name: str) -> None:
    for run in results.ranks(resume_name(name), Phase.TWO_RANKS):
        for shard in run["saved"][0]["state"].values():
            assert shard.values["exp_avg"].any()
            assert shard.values["exp_avg_sq"].any()


def test_parts_of_gated_mlps_pass_the_gpu_one_at_a_time_and_nothing_else_does(results: Results) -> None:
    for run in results.ranks(resume_name("gated MLPs"), Phase.TWO_RANKS):
        gated = sum(
            shard.values["exp_avg"].nbytes + shard.values["exp_avg_sq"].nbytes
            for name, shard in run["went on"]["state"].items()
            if "linear_fc1" in name
        )
        assert run["copied"] == gated > 0


@pytest.mark.parametrize(
    ("reader", "writer"), [(Phase.ONE_RANK, Phase.TWO_RANKS), (Phase.TWO_RANKS_AGAIN, Phase.ONE_RANK)]
)
def test_another_number_of_ranks_reads_the_same_state(results: Results, reader: Phase, writer: Phase) -> None:
    written = results.ranks("Megatron-FSDP, written", writer)
    read = results.ranks("Megatron-FSDP, written by others", reader)
    assert_same(whole_state([run["state"] for run in read]), whole_state([run["state"] for run in written]))
    assert {step for run in read for step in run["steps"]} == {BEFORE}


@pytest.mark.parametrize("way", ["stock to ours", "ours to stock"])
def test_checkpoints_of_torchs_adamw_go_both_ways(results: Results, way: str) -> None:
    run = results.ranks("Megatron-FSDP, torch's AdamW", Phase.ONE_RANK)[0][way]
    assert_same(run["loaded"], run["saved"])
    assert run["steps"] == [{BEFORE}, {float(BEFORE)}]


STRATEGIES = ("optim_grads_params", "optim_grads", "optim", "no_shard")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_rank_knows_where_its_moments_lie_without_asking(results: Results, strategy: str) -> None:
    for run in results.ranks("Megatron-FSDP, where parts lie", Phase.TWO_RANKS):
        assert run[strategy]["packing"] == []
        assert run[strategy]["telling"] == []
        sharded = {key: chunk for key, chunk in run[strategy]["told"].items() if 0 not in chunk[1]}
        assert sharded
        assert sharded == {key: run[strategy]["found"][key] for key in sharded}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_ranks_have_the_same_keys_in_the_same_order(results: Results, strategy: str) -> None:
    first, second = (run[strategy]["keys"] for run in results.ranks("Megatron-FSDP, where parts lie", Phase.TWO_RANKS))
    assert first == second
    assert {tuple(keys) for _, keys in first} == {("step", "exp_avg", "exp_avg_sq")}


def test_the_dummy_step_makes_state_and_changes_nothing(results: Results) -> None:
    for run in results.ranks("Megatron-FSDP, the dummy step", Phase.TWO_RANKS):
        assert_same(run["after"], run["before"])
        assert all(run["grads"])
        assert run["steps"] == [0]


@pytest.mark.parametrize("phase", BOTH_WORLDS)
def test_fully_shard_takes_the_optimizer_as_it_is(results: Results, phase: Phase) -> None:
    for rank, run in enumerate(results.ranks("Megatron-FSDP, stand-alone", phase)):
        for decoupled in (False, True):
            ours, reference = (run[f"{name}, decoupled={decoupled}"] for name in ("ours", "reference"))
            assert_same(ours, reference, f"rank {rank}, decoupled={decoupled}")
        assert_same(run["resumed"], run["went on"], f"rank {rank}")


def test_what_a_release_lacks_and_settings_that_disagree_are_refused(results: Results) -> None:
    (messages,) = results.ranks("Megatron-FSDP, refused", Phase.ONE_RANK)
    assert (
        "ValueError: DistributedDataParallelConfig.megatron_fsdp_use_decoupled_grad" in messages["gradients elsewhere"]
    )
    for name, missing in (
        ("another checkpoint", "DistributedOptimizer.sharded_param_state_fsdp_dtensor"),
        ("other splits", "fsdp_dtensor_checkpoint.make_fsdp_dtensor"),
    ):
        assert messages[name].startswith("RuntimeError: ")
        assert missing in messages[name]


def test_the_first_rank_says_who_owns_the_masters(results: Results) -> None:
    first, second = results.ranks("Megatron-FSDP, what is said", Phase.TWO_RANKS)
    assert first.count("FusedOffloadAdam in the place of") == 1
    assert "Megatron-FSDP owns the master weights and keeps them on the GPU" in first
    assert re.search("at step 2: .*; masters stay on the GPU with Megatron-FSDP", first)
    assert "--use-precision-aware-optimizer" not in first
    assert second == ""
