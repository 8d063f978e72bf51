"""Installing: places taken and given back, refused settings, messages."""

from __future__ import annotations

import re
from importlib.metadata import version

import pytest
from comparison import assert_same
from registry import Phase, Results
from scenarios_install import MISSING, OTHER_OFFLOADERS, REFUSED_BUILDS, REFUSED_CONFIGS

PACKAGE = "megatron.core.optimizer"
HYBRID = f"{PACKAGE}.cpu_offloading.hybrid_optimizer"
TAKEN = {
    f"{module}.HybridDeviceOptimizer"
    for module in (PACKAGE, f"{PACKAGE}.distrib_optimizer", f"{PACKAGE}.cpu_offloading", HYBRID)
} | {
    f"{PACKAGE}._get_megatron_optimizer_based_on_param_groups",
    f"{PACKAGE}.optimizer_config.OptimizerConfig.__post_init__",
}


def test_an_installation_before_the_import_takes_effect_with_it(results: Results) -> None:
    (run,) = results.ranks("installed before the import", Phase.BEFORE_IMPORT)
    assert run["imported"] == (False, False)
    assert TAKEN <= set(run["changed"])
    assert run["finders"] == []
    assert run["restored"] == HYBRID


def test_one_that_is_taken_back_before_the_import_has_no_effect(results: Results) -> None:
    (run,) = results.ranks("uninstalled before the import", Phase.BEFORE_IMPORT)
    assert run == {"class": HYBRID, "installed": False}


def test_installing_takes_the_places_and_uninstalling_gives_everything_back(results: Results) -> None:
    (run,) = results.ranks("installed after the import", Phase.ONE_RANK)
    assert TAKEN <= set(run["changed by the first"])
    assert {name for name in run["changed by the first"] if name.endswith(".Adam")} == set()
    assert run["left behind"] == []
    assert run["installed"] is False


def test_installing_again_changes_the_settings_alone(results: Results) -> None:
    (run,) = results.ranks("installed after the import", Phase.ONE_RANK)
    assert run["changed by the second"] == []
    assert run["chunk bytes"] == (54321, 12345)


def test_training_while_installed_is_as_after_uninstalling(results: Results) -> None:
    for rank, run in enumerate(results.ranks("installed for good", Phase.TWO_RANKS)):
        assert_same(run["for good"], run["within"], f"rank {rank}")


def test_without_the_flags_nothing_changes(results: Results) -> None:
    for rank, run in enumerate(results.ranks("flags are off", Phase.TWO_RANKS)):
        assert run["stock"]["classes"] == ["AdamW", "AdamW"]
        assert_same(run["installed"], run["stock"], f"rank {rank}")


def test_other_optimizers_in_the_same_place_stay(results: Results) -> None:
    (run,) = results.ranks("HybridDeviceOptimizer with SGD", Phase.ONE_RANK)
    assert run == {"stock": True, "is an instance": True}


@pytest.mark.parametrize("path", [path for _, path in MISSING])
def test_an_unknown_layout_gets_one_message_and_keeps_its_optimizer(results: Results, path: str) -> None:
    run = results.ranks("unknown layout", Phase.ONE_RANK)[0][path]
    (message,) = run["warnings"]
    assert path in message
    assert version("megatron-core") in message
    assert run["changed"] == []
    assert run["classes"] == ["AdamW"]


@pytest.mark.parametrize("name", REFUSED_CONFIGS)
def test_a_configuration_that_cannot_be_served_is_refused(results: Results, name: str) -> None:
    messages = results.ranks("refused configurations", Phase.ONE_RANK)[0][name]
    (field,) = REFUSED_CONFIGS[name]
    word = {"main_params_dtype": "master weights"}.get(field, field)
    for when in ("made", "built"):
        assert word in messages[when], when
        assert re.match(r"(ValueError|RuntimeError): ", messages[when]), when


@pytest.mark.parametrize("name", OTHER_OFFLOADERS)
def test_another_offloader_beside_this_one_is_refused(results: Results, name: str) -> None:
    messages = results.ranks("refused offloaders", Phase.ONE_RANK)[0][name]
    for when in ("made", "built"):
        assert re.match(rf"ValueError: {name} .* Leave {name} out", messages[when]), when


@pytest.mark.parametrize("name", REFUSED_BUILDS)
def test_what_cannot_go_together_is_refused_when_the_optimizer_is_built(results: Results, name: str) -> None:
    message = results.ranks("refused builds", Phase.ONE_RANK)[0][name]
    assert message.startswith("ValueError: ")
    assert {"qk_clip": "qk_clip"}.get(name, "version 1 of Megatron-FSDP, but not version 2") in message
    assert re.search("Leave|Use", message)


def test_unknown_numerics_install_nothing(results: Results) -> None:
    ((message, is_installed),) = results.ranks("refused arguments", Phase.ONE_RANK)
    assert "numerics" in message
    assert is_installed is False


@pytest.mark.parametrize("what", ["all", "nothing", "experts"])
def test_the_first_rank_says_once_which_class_is_active(results: Results, what: str) -> None:
    first, second = results.ranks("what is said", Phase.TWO_RANKS)
    for name in ("FusedOffloadAdam", "HybridDeviceOptimizer", version("megatron-core"), "remainder"):
        assert name in first[what]["printed"]
    assert first[what]["printed"].count("FusedOffloadAdam") == 1
    assert second[what]["printed"] == ""


def test_the_message_says_which_flag_moves_masters_that_megatron_keeps(results: Results) -> None:
    first, second = results.ranks("what is said", Phase.TWO_RANKS)
    (line,) = re.findall(".*master weights on the GPU.*", first["default mode"]["printed"])
    assert "--use-precision-aware-optimizer" in line
    assert "--use-precision-aware-optimizer" not in first["all"]["printed"]
    assert second["default mode"]["printed"] == ""


def test_the_message_names_the_bytes_of_dense_and_expert_parameters(results: Results) -> None:
    run = results.ranks("what is said", Phase.TWO_RANKS)[0]["experts"]
    (gigabytes,) = re.findall(r"of ([0-9.e-]+) GB", run["printed"])
    assert float(gigabytes) == pytest.approx(run["bytes"] / 1e9, rel=1e-2)


def test_steps_are_logged_on_the_first_rank_where_asked_for(results: Results) -> None:
    first, second = results.ranks("steps are logged", Phase.TWO_RANKS)
    for name, steps in (("argument", [2, 4]), ("variable", [3]), ("neither", [])):
        lines = re.findall(r"optimizer (\d) of 2, at step (\d): .*CPU", first[name])
        assert lines == [(number, str(step)) for step in steps for number in "12"]
        assert "at step" not in second[name]


def test_the_variable_stands_in_for_the_window_where_no_offload_is_given(results: Results) -> None:
    first, second = results.ranks("windows", Phase.TWO_RANKS)
    for run in (first, second):
        assert [window for window, _, _ in run] == [0, "auto", 60000, 0, 60000, "auto"]
        assert [attached for _, attached, _ in run] == [False, True, True, False, True, False]
    lines = [re.findall("fused-offload: .*(?:moves under|no state moves).*", said) for _, _, said in first]
    assert [len(found) for found in lines] == [0, 1, 1, 0, 1, 1]
    assert "up to what activations gave back" in lines[1][0]
    assert (
        lines[2]
        == lines[4]
        == ["fused-offload: up to 6e-05 GB of it moves under the backward and the next forward pass."]
    )
    assert "--use-distributed-optimizer" in lines[5][0]
    about_queues = ["CUDA_DEVICE_MAX_CONNECTIONS" in said for _, _, said in first]
    assert about_queues == [False, True, True, False, False, False]


def test_megatrons_share_counts_in_both_places_unless_it_is_the_default(results: Results) -> None:
    (shares,) = results.ranks("shares", Phase.ONE_RANK)
    assert shares == {
        (place, field, argument): argument if place == "ours as FusedAdam" and field != 0.5 else field
        for place in ("ours", "ours as FusedAdam")
        for field in (0.0, 0.5, 1.0)
        for argument in (1.0, 0.25)
    }


def test_a_new_iteration_gives_back_what_was_prefetched_for_one_without_a_step(results: Results) -> None:
    (run,) = results.ranks("an iteration begins", Phase.ONE_RANK)
    assert run == {"window": [1], "none": []}


def test_a_variable_that_is_no_window_installs_nothing(results: Results) -> None:
    (run,) = results.ranks("refused windows", Phase.ONE_RANK)
    for value, message in run["messages"].items():
        assert "FUSED_OFFLOAD_WINDOW_BYTES" in message
        assert repr(value) in message
        assert "auto" in message
    assert run["installed"] is False


def test_a_fraction_of_zero_is_warned_about_once(results: Results) -> None:
    for run in results.ranks("what is said", Phase.TWO_RANKS):
        assert [len(run[what]["warnings"]) for what in ("all", "nothing", "experts")] == [0, 1, 0]
        assert "optimizer_offload_fraction" in run["nothing"]["warnings"][0]
