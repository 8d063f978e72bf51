"""State dicts: a run can go on from what it saved, bit for bit, in another format, layout and
process.
"""

from __future__ import annotations

import copy
import functools
import io
import itertools
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fused_offload import FusedOffloadAdam, OffloadConfig
from fused_offload.kernels.adam.reference import AdamState, adam_scalars, adam_step_
from fused_offload.kernels.formats import FP16, SCALE_GROUP, Format, Stored, decode, encode_
from fused_offload.rules.adam import EXP_AVG_SQ_FORMATS
from fused_offload.rules.arguments import EXP_AVG_FORMATS
from fused_offload.state.entry import StateEntry

Bits = dict[str, torch.Tensor]

SHAPES = [(1,), (127,), (128,), (3, 43), (0,), (700,)]
HYPERPARAMETERS = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.03}
SMALL_CHUNKS = OffloadConfig(chunk_bytes=1)  # one block of 128 elements a chunk


class Stores(NamedTuple):
    """How an optimizer keeps the state of bfloat16 parameters."""

    master: str
    exp_avg: torch.dtype
    exp_avg_sq: torch.dtype

    def arguments(self) -> dict[str, Any]:
        return {
            "master_weights": self.master != "none",
            "master_weight_dtype": torch.float16 if self.master == "fp16" else torch.float32,
            "store_param_remainders": self.master == "remainder",
            "exp_avg_dtype": self.exp_avg,
            "exp_avg_sq_dtype": self.exp_avg_sq,
        }


MASTERS = ("none", "fp32", "fp16", "remainder")
MOMENTS = (torch.float32, torch.bfloat16, torch.float16)
ALL_STORES = [Stores(*combination) for combination in itertools.product(MASTERS, MOMENTS, MOMENTS)]
ALL_STORES += [
    Stores("remainder", *moments)
    for moments in itertools.product((*MOMENTS, torch.uint8), repeat=2)
    if torch.uint8 in moments
]
FEW_STORES = [
    Stores("fp32", torch.float32, torch.float32),
    Stores("remainder", torch.float32, torch.bfloat16),
    Stores("fp16", torch.float16, torch.float16),
    Stores("remainder", torch.uint8, torch.uint8),
]


def store_id(stores: Stores) -> str:
    return "-".join([stores.master, *(str(dtype).removeprefix("torch.") for dtype in stores[1:])])


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def make_params(device: torch.device, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(shape, generator=generator).to(device, dtype) for shape in SHAPES]
    values.append(torch.randn(20, 30, generator=generator).to(device, dtype).t())
    return [torch.nn.Parameter(value) for value in values]


def clone_params(params: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(param.detach().clone()) for param in params]


def train(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter], steps: range) -> None:
    """Steps with gradients that depend on the number of the step only."""
    for step in steps:
        generator = torch.Generator().manual_seed(1000 + step)
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(param.device, param.dtype)
        optimizer.step()


def train_some(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter], step: int) -> None:
    """One step in which only some parameters have gradients."""
    optimizer.zero_grad()
    for index, param in enumerate(params):
        generator = torch.Generator().manual_seed(1000 * index + step)
        param.grad = torch.randn(param.shape, generator=generator).to(param)
    optimizer.step()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).clone()


def snapshot(optimizer: FusedOffloadAdam, params: list[torch.nn.Parameter]) -> list[Bits]:
    found = []
    for param in params:
        keys = list(optimizer.state[param]) if param in optimizer.state else []
        state = {key: bits(optimizer.get_unscaled_state(param, key)) for key in keys}
        found.append({"param": bits(param), **state})
    return found


def assert_same(left: list[Bits], right: list[Bits]) -> None:
    assert len(left) == len(right)
    for index, (one, other) in enumerate(zip(left, right, strict=True)):
        assert one.keys() == other.keys()
        for key in one:
            assert torch.equal(one[key], other[key]), f"parameter {index} differs in {key}"


def groups_without_params(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def through_file(state_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    buffer.seek(0)
    loaded: dict[str, Any] = torch.load(buffer, weights_only=True, **kwargs)
    return loaded


def rounded(values: torch.Tensor, format: Format) -> torch.Tensor:
    """Values as a block-scaled format keeps them."""
    values = values.detach().cpu().flatten()
    scale = torch.empty(-(-values.numel() // SCALE_GROUP))
    stored = Stored(format, torch.empty(values.shape, dtype=format.dtype), scale)
    encode_(stored, values)
    return decode(stored)


# -- saving ----------------------------------------------------------------------------------------


def test_before_training_there_is_no_state(device: torch.device) -> None:
    params = make_params(device)
    optimizer = FusedOffloadAdam(params, **HYPERPARAMETERS)
    saved = optimizer.state_dict()
    assert saved["state"] == {}
    assert saved["param_groups"] == [{**HYPERPARAMETERS, "bias_correction": True, "params": list(range(len(params)))}]

    twins = clone_params(params)
    loaded = FusedOffloadAdam(twins)
    loaded.load_state_dict(saved)
    assert loaded.state_dict()["state"] == {}
    train(optimizer, params, range(2))
    train(loaded, twins, range(2))
    assert_same(snapshot(optimizer, params), snapshot(loaded, twins))


def test_state_dict_between_steps_changes_nothing(device: torch.device) -> None:
    params, twins = make_params(device, torch.bfloat16), make_params(device, torch.bfloat16)
    watched = FusedOffloadAdam(params, master_weights=True, exp_avg_dtype=torch.float16, **HYPERPARAMETERS)
    alone = FusedOffloadAdam(twins, master_weights=True, exp_avg_dtype=torch.float16, **HYPERPARAMETERS)
    for step in range(4):
        watched.state_dict()
        watched.torch_state_dict()
        train(watched, params, range(step, step + 1))
        train(alone, twins, range(step, step + 1))
    assert_same(snapshot(watched, params), snapshot(alone, twins))


def test_saved_groups_are_copies(device: torch.device) -> None:
    params = make_params(device)
    optimizer = FusedOffloadAdam(params)
    train(optimizer, params, range(3))
    for group in optimizer.state_dict()["param_groups"]:
        del group["params"]
        group["step"] = 77
        group["lr"] = 5.0
    assert optimizer.param_groups[0]["step"] == 3
    assert optimizer.param_groups[0]["lr"] == 1e-3
    assert len(optimizer.param_groups[0]["params"]) == len(params)


def test_tensors_of_wide_formats_are_the_live_ones(device: torch.device) -> None:
    params = make_params(device, torch.bfloat16)
    optimizer = FusedOffloadAdam(
        params, master_weights=True, store_param_remainders=True, exp_avg_sq_dtype=torch.bfloat16
    )
    train(optimizer, params, range(1))
    saved = optimizer.state_dict()["state"]
    for index, param in enumerate(params):
        for key, dtype in [("exp_avg", torch.float32), ("exp_avg_sq", torch.bfloat16), ("master_param", torch.int16)]:
            assert saved[index][key].dtype == dtype
            assert saved[index][key].data_ptr() == optimizer.state[param][key].data_ptr()
            assert saved[index][key].stride() == param.stride()


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(key)
            yield from leaves(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves(item)
    else:
        yield value


def test_state_dict_holds_plain_data_only(device: torch.device) -> None:
    params = make_params(device, torch.bfloat16)
    optimizer = FusedOffloadAdam(params, master_weights=True, exp_avg_sq_dtype=torch.float16, **HYPERPARAMETERS)
    train(optimizer, params, range(2))
    for saved in (optimizer.state_dict(), optimizer.torch_state_dict()):
        assert {type(leaf) for leaf in leaves(saved)} <= {torch.Tensor, int, float, bool, str, type(None)}
        for copied in (copy.deepcopy(saved), pickle.loads(pickle.dumps(saved)), through_file(saved)):
            assert copied["param_groups"] == saved["param_groups"]
            for index in saved["state"]:
                for key, value in saved["state"][index].items():
                    assert torch.equal(bits(copied["state"][index][key]), bits(value))


def test_a_saved_file_has_the_size_of_the_state(device: torch.device, tmp_path: Path) -> None:
    params = [torch.nn.Parameter(torch.randn(4096, device=device)) for _ in range(40)]
    optimizer = FusedOffloadAdam(params)
    train(optimizer, params, range(1))
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    state_bytes = 40 * 4096 * 8
    assert state_bytes <= (tmp_path / "state.pt").stat().st_size <= state_bytes * 1.05


def test_state_is_complete_right_after_a_step(device: torch.device) -> None:
    numel = 2_000_000 if device.type == "cuda" else 20_000
    params = [torch.nn.Parameter(torch.randn(numel, device=device)) for _ in range(4)]
    optimizer = FusedOffloadAdam(params, offload=OffloadConfig(chunk_bytes=numel))
    for step in range(5):
        train(optimizer, params, range(step, step + 1))
        at_once = [bits(value) for entry in optimizer.state_dict()["state"].values() for value in entry.values()]
        optimizer.synchronize()
        if device.type == "cuda":
            torch.cuda.synchronize()
        later = [bits(value) for entry in optimizer.state_dict()["state"].values() for value in entry.values()]
        assert all(itertools.starmap(torch.equal, zip(at_once, later, strict=True)))


def test_loading_right_after_a_step_waits_for_it(device: torch.device) -> None:
    numel = 2_000_000 if device.type == "cuda" else 20_000
    params = [torch.nn.Parameter(torch.randn(numel, device=device)) for _ in range(4)]
    optimizer = FusedOffloadAdam(params, offload=OffloadConfig(chunk_bytes=numel))
    train(optimizer, params, range(1))
    saved = copy.deepcopy(optimizer.state_dict())
    train(optimizer, params, range(1, 3))
    optimizer.load_state_dict(saved)
    if device.type == "cuda":
        torch.cuda.synchronize()
    for index, param in enumerate(params):
        assert torch.equal(optimizer.state[param]["exp_avg"], saved["state"][index]["exp_avg"])


def test_state_of_a_parameter_outside_the_groups_is_not_dropped(device: torch.device) -> None:
    params = make_params(device)
    optimizer = FusedOffloadAdam(params)
    train(optimizer, params, range(1))
    removed = optimizer.param_groups[0]["params"].pop()
    with pytest.raises(RuntimeError, match="in no parameter group"):
        optimizer.state_dict()
    del optimizer.state[removed]
    assert len(optimizer.state_dict()["state"]) == len(params) - 1


# -- resuming --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stores", ALL_STORES, ids=store_id)
def test_resume_is_bit_identical(device: torch.device, stores: Stores) -> None:
    params = make_params(device, torch.bfloat16)
    optimizer = FusedOffloadAdam(params, **HYPERPARAMETERS, **stores.arguments())
    train(optimizer, params, range(3))
    saved, twins = through_file(optimizer.state_dict()), clone_params(params)
    train(optimizer, params, range(3, 5))

    resumed = FusedOffloadAdam(twins, **stores.arguments())
    resumed.load_state_dict(saved)
    train(resumed, twins, range(3, 5))
    assert_same(snapshot(optimizer, params), snapshot(resumed, twins))
    assert groups_without_params(resumed) == groups_without_params(optimizer)


def test_resume_goes_on_with_the_same_random_numbers(device: torch.device) -> None:
    arguments = {
        "exp_avg_dtype": torch.bfloat16,
        "exp_avg_sq_dtype": torch.bfloat16,
        "stochastic_rounding": True,
        "rounding_seed": 11,
    }
    params = make_params(device, torch.bfloat16)
    optimizer = FusedOffloadAdam(params, **HYPERPARAMETERS, **arguments)
    train(optimizer, params, range(3))
    saved, twins, others = through_file(optimizer.state_dict()), clone_params(params), clone_params(params)
    train(optimizer, params, range(3, 5))

    resumed = FusedOffloadAdam(twins, offload=SMALL_CHUNKS, **arguments)
    resumed.load_state_dict(saved)
    train(resumed, twins, range(3, 5))
    assert_same(snapshot(optimizer, params), snapshot(resumed, twins))

    reseeded = FusedOffloadAdam(others, **{**arguments, "rounding_seed": 12})
    reseeded.load_state_dict(saved)
    train(reseeded, others, range(3, 5))
    assert not torch.equal(optimizer.state[params[2]]["exp_avg_sq"], reseeded.state[others[2]]["exp_avg_sq"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("master_weights", [False, True])
def test_resume_of_other_parameters_is_bit_identical(
    device: torch.device, dtype: torch.dtype, master_weights: bool
) -> None:
    params = make_params(device, dtype)
    optimizer = FusedOffloadAdam(params, master_weights=master_weights, **HYPERPARAMETERS)
    train(optimizer, params, range(3))
    saved, twins = through_file(optimizer.state_dict()), clone_params(params)
    train(optimizer, params, range(3, 5))
    resumed = FusedOffloadAdam(twins, master_weights=master_weights)
    resumed.load_state_dict(saved)
    train(resumed, twins, range(3, 5))
    assert_same(snapshot(optimizer, params), snapshot(resumed, twins))


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("stores", FEW_STORES, ids=store_id)
def test_chunks_and_residency_may_change(device: torch.device, stores: Stores, fraction: float) -> None:
    params = make_params(device, torch.bfloat16)
    optimizer = FusedOffloadAdam(params, **HYPERPARAMETERS, **stores.arguments())
    train(optimizer, params, range(2))
    twins = clone_params(params)
    offload = OffloadConfig(fraction=fraction, chunk_bytes=1, depth=2)
    resumed = FusedOffloadAdam(twins, offload=offload, **stores.arguments())
    resumed.load_state_dict(optimizer.state_dict())
    train(optimizer, params, range(2, 4))
    train(resumed, twins, range(2, 4))
    assert_same(snapshot(optimizer, params), snapshot(resumed, twins))


_FRESH_PROCESS = """
import sys
import torch
sys.path.insert(0, {folder!r})
import test_checkpoint as shared
device = torch.device({device!r})
saved = torch.load({path!r}, weights_only=True)
params = [torch.nn.Parameter(value.to(device)) for value in saved["params"]]
optimizer = shared.FusedOffloadAdam(params, **shared.FEW_STORES[1].arguments())
optimizer.load_state_dict(saved["optimizer"])
shared.train(optimizer, params, range(3, 6))
torch.save(shared.snapshot(optimizer, params), {path!r})
"""


def test_resume_in_a_fresh_process(device: torch.device, tmp_path: Path) -> None:
    params = make_params(device, torch.bfloat16)
    optimizer = FusedOffloadAdam(params, **HYPERPARAMETERS, **FEW_STORES[1].arguments())
    train(optimizer, params, range(3))
    path = str(tmp_path / "checkpoint.pt")
    torch.save({"params": [param.detach() for param in params], "optimizer": optimizer.state_dict()}, path)
    script = _FRESH_PROCESS.format(folder=str(Path(__file__).parent), path=path, device=str(device))
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    train(optimizer, params, range(3, 6))
    assert_same(snapshot(optimizer, params), torch.load(path, weights_only=True))


@pytest.mark.parametrize("target", ["cpu", "device"])
def test_state_lives_where_it_did(device: torch.device, target: str) -> None:
    params = make_params(device, torch.bfloat16)
    optimizer = FusedOffloadAdam(params, master_weights=True)
    train(optimizer, params, range(1))
    saved = through_file(optimizer.state_dict(), map_location=device if target == "device" else "cpu")
    twins = clone_params(params)
    resumed = FusedOffloadAdam(twins, master_weights=True)
    resumed.load_state_dict(saved)
    for twin in twins:
        for value in resumed.state[twin].values():
            assert value.device.type == "cpu"
            assert value.numel() == 0 or value.is_pinned() == (device.type == "cuda")
    assert type(resumed.param_groups[0]["step"]) is int
    assert_same(snapshot(optimizer, params), snapshot(resumed, twins))


@pytest.mark.gpu
def test_loading_takes_no_gpu_memory() -> None:
    device = torch.device("cuda")
    params = [torch.nn.Parameter(torch.zeros(4 * 2**20, device=device)) for _ in range(4)]
    optimizer = FusedOffloadAdam(params)
    moments = torch.ones(4 * 2**20)
    group = {**optimizer.state_dict()["param_groups"][0], "step": 3}
    saved = {
        "state": {index: {"exp_avg": moments, "exp_avg_sq": moments} for index in range(4)},
        "param_groups": [group],
    }
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer.load_state_dict(saved)
    assert torch.cuda.max_memory_allocated() == before


# -- other layouts and formats ---------------------------------------------------------------------


@pytest.mark.parametrize("adam_w_mode", [True, False], ids=["adamw", "adam"])
def test_to_torch_and_back(device: torch.device, adam_w_mode: bool) -> None:
    params = make_params(device)
    optimizer = FusedOffloadAdam(params, adam_w_mode=adam_w_mode, **HYPERPARAMETERS)
    train(optimizer, params, range(3))

    theirs = clone_params(params)
    torch_class = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    torch_optimizer = torch_class(theirs)
    defaults = torch_optimizer.state_dict()["param_groups"][0]
    (saved_group,) = optimizer.torch_state_dict()["param_groups"]
    for key in defaults.keys() - HYPERPARAMETERS.keys():
        assert saved_group[key] == defaults[key], key
    torch_optimizer.load_state_dict(through_file(optimizer.torch_state_dict()))
    for key, value in HYPERPARAMETERS.items():
        assert torch_optimizer.param_groups[0][key] == value
    for param, twin in zip(params, theirs, strict=True):
        state = torch_optimizer.state[twin]
        assert state["step"].shape == ()
        assert state["step"] == 3
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(bits(state[key]), bits(optimizer.state[param][key]))

    train(optimizer, params, range(3, 5))
    train(torch_optimizer, theirs, range(3, 5))
    for param, twin in zip(params, theirs, strict=True):
        torch.testing.assert_close(param, twin, rtol=1e-5, atol=1e-6)  # another rounding

    ours = clone_params(theirs)
    back = FusedOffloadAdam(ours, adam_w_mode=adam_w_mode)
    back.load_state_dict(through_file(torch_optimizer.state_dict()))
    group = back.param_groups[0]
    assert group["step"] == 5
    assert type(group["step"]) is int
    assert group["bias_correction"] is True
    assert {key: group[key] for key in HYPERPARAMETERS} == HYPERPARAMETERS
    assert not {"foreach", "fused", "amsgrad", "capturable"} & group.keys()
    for mine, twin in zip(ours, theirs, strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(bits(back.state[mine][key]), bits(torch_optimizer.state[twin][key]))
    train(back, ours, range(5, 6))
    train(torch_optimizer, theirs, range(5, 6))
    for mine, twin in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, twin, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stores", FEW_STORES, ids=store_id)
def test_torch_layout_holds_exact_float32_moments(device: torch.device, stores: Stores) -> None:
    params = make_params(device, torch.bfloat16)
    optimizer = FusedOffloadAdam(params, **stores.arguments())
    train(optimizer, params, range(2))
    saved = optimizer.torch_state_dict()["state"]
    for index, param in enumerate(params):
        assert saved[index].keys() == {"step", "exp_avg", "exp_avg_sq"}
        for key in ("exp_avg", "exp_avg_sq"):
            assert saved[index][key].dtype == torch.float32
            assert torch.equal(bits(saved[index][key]), bits(optimizer.get_unscaled_state(param, key)))


def test_torch_checkpoint_of_the_other_kind_of_decay_is_refused(device: torch.device) -> None:
    params = make_params(device)
    adam = torch.optim.Adam(params, weight_decay=0.1)
    train(adam, params, range(1))
    saved = adam.state_dict()
    saved["param_groups"][0]["decoupled_weight_decay"] = False  # torch before 2.7 does not say so
    with pytest.raises(ValueError, match="build it with adam_w_mode=False"):
        FusedOffloadAdam(params).load_state_dict(saved)
    FusedOffloadAdam(params, adam_w_mode=False).load_state_dict(saved)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_torch_checkpoint_of_an_unknown_kind_of_decay(device: torch.device, weight_decay: float) -> None:
    """As torch before 2.7 writes them; our own say nothing either, and belong to how the optimizer
    was built.
    """
    params = make_params(device)
    theirs = torch.optim.AdamW(params, weight_decay=weight_decay)
    train(theirs, params, range(1))
    saved = theirs.state_dict()
    saved["param_groups"][0].pop("decoupled_weight_decay", None)
    ours = FusedOffloadAdam(params, weight_decay=0.5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours.load_state_dict(saved)
        ours.load_state_dict(ours.state_dict())
    assert len(caught) == bool(weight_decay)
    for warning in caught:
        assert warning.filename == __file__
        assert "does not say whether its weight decay is decoupled" in str(warning.message)


@pytest.mark.parametrize("filled_in", [False, True], ids=["given", "filled into our state dict"])
@pytest.mark.parametrize("stores", FEW_STORES[:2], ids=store_id)
def test_steps_that_differ_within_a_group(device: torch.device, stores: Stores, filled_in: bool) -> None:
    """As experts without tokens leave them. The bias-corrected moments stay what they were, so the
    next update is.
    """
    betas = (0.8, 0.95)
    params = make_params(device)
    theirs = torch.optim.AdamW(params, lr=0.01, betas=betas)
    for step in range(6):
        train_some(theirs, [param for index, param in enumerate(params) if step % (index + 1) == 0], step)
    saved = theirs.state_dict()
    steps = {index: int(entry["step"]) for index, entry in saved["state"].items()}
    assert len(set(steps.values())) > 2
    twins = clone_params(params)
    ours = FusedOffloadAdam(twins, lr=0.01, betas=betas, **stores.arguments())
    if filled_in:
        train(ours, twins, range(1))
        for twin, param in zip(twins, params, strict=True):
            twin.data.copy_(param)
        template = ours.state_dict()
        for index, entry in saved["state"].items():
            for key in ("exp_avg", "exp_avg_sq"):
                template["state"][index][key].copy_(entry[key])
            template["state"][index]["step"] = entry["step"]
            template["state"][index].pop("master_param", None)
        saved = template
    with pytest.warns(UserWarning, match=r"at different steps in groups \[0\]") as caught:
        ours.load_state_dict(saved)
    assert caught[0].filename == __file__
    assert ours.param_groups[0]["step"] == max(steps.values())
    for index, twin in enumerate(twins):
        for key, beta, dtype in zip(("exp_avg", "exp_avg_sq"), betas, stores[1:], strict=True):
            corrected = ours.get_unscaled_state(twin, key) / (1 - beta ** max(steps.values()))
            expected = theirs.state[params[index]][key].cpu() / (1 - beta ** steps[index])
            rtol = 1e-5 if dtype == torch.float32 else 2.0**-7
            torch.testing.assert_close(corrected, expected, rtol=rtol, atol=0)


@pytest.mark.parametrize("target", ALL_STORES[::2], ids=store_id)
def test_formats_may_change_between_save_and_load(device: torch.device, target: Stores) -> None:
    """Values arrive unchanged in wide formats and rounded to the nearest in narrow ones."""
    source = Stores("remainder" if target.master == "remainder" else "fp32", torch.float32, torch.float32)
    params = make_params(device, torch.bfloat16)
    optimizer = FusedOffloadAdam(params, **HYPERPARAMETERS, **source.arguments())
    train(optimizer, params, range(3))
    saved = through_file(optimizer.state_dict())
    if target.master == "none":
        for entry in saved["state"].values():
            del entry["master_param"]
    twins = clone_params(params)
    loaded = FusedOffloadAdam(twins, **target.arguments())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded.load_state_dict(saved)
    kept = {
        "exp_avg": (target.exp_avg, EXP_AVG_FORMATS[target.exp_avg]),
        "exp_avg_sq": (target.exp_avg_sq, EXP_AVG_SQ_FORMATS[target.exp_avg_sq]),
        "master_param": (torch.float16 if target.master == "fp16" else torch.float32, FP16),
    }
    for index, twin in enumerate(twins):
        assert set(loaded.state[twin]) == set(saved["state"][index])
        for key, value in saved["state"][index].items():
            dtype, scaled_format = kept[key]
            found = loaded.get_unscaled_state(twin, key)
            if value.dtype == torch.int16 or dtype == torch.float32:
                expected = value
            elif dtype == torch.bfloat16:
                expected = value.to(torch.bfloat16).float()
            else:  # the format works on memory order, and so does the parameter
                ordered = value.t() if twin.dim() == 2 and not twin.is_contiguous() else value
                expected = rounded(ordered, scaled_format).view(ordered.shape)
                expected = expected.t() if ordered is not value else expected
            assert torch.equal(bits(found), bits(expected)), key


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_state_of_any_float_dtype_is_taken(device: torch.device, dtype: torch.dtype) -> None:
    params = make_params(device)
    optimizer = FusedOffloadAdam(params)
    train(optimizer, params, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    for entry in saved["state"].values():
        for key in ("exp_avg", "exp_avg_sq"):
            entry[key] = entry[key].to(dtype)
    twins = clone_params(params)
    loaded = FusedOffloadAdam(twins)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loaded.load_state_dict(saved)
    narrow = dtype in (torch.bfloat16, torch.float16)
    assert len(caught) == int(narrow)  # once, however many tensors
    if narrow:
        assert "exp_avg" in str(caught[0].message)
        assert str(dtype) in str(caught[0].message)
    for index, twin in enumerate(twins):
        for key in ("exp_avg", "exp_avg_sq"):
            assert loaded.state[twin][key].dtype == torch.float32
            assert torch.equal(bits(loaded.state[twin][key]), bits(saved["state"][index][key].float()))


def test_no_value_passes_through_a_narrower_dtype(device: torch.device) -> None:
    """torch's own loader casts state to the parameter's dtype."""
    param = torch.nn.Parameter(torch.ones(300, device=device, dtype=torch.bfloat16))
    optimizer = FusedOffloadAdam([param], master_weights=True)
    value = torch.full((300,), 1 + 2.0**-20)
    state = {"exp_avg": value, "exp_avg_sq": value, "master_param": value}
    optimizer.load_state_dict({"state": {0: state}, "param_groups": [{**optimizer.state_dict()["param_groups"][0]}]})
    for key in state:
        assert optimizer.state[param][key].dtype == torch.float32
        assert torch.equal(optimizer.state[param][key], value)
    assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], value)


@pytest.mark.parametrize("stores", FEW_STORES, ids=store_id)
def test_without_saved_masters_training_starts_from_the_parameters(device: torch.device, stores: Stores) -> None:
    params = make_params(device, torch.bfloat16)
    optimizer = FusedOffloadAdam(params, **stores.arguments())
    train(optimizer, params, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    for entry in saved["state"].values():
        del entry["master_param"]
    weights = make_params(device, torch.bfloat16, seed=5)
    with torch.no_grad():
        for param, weight in zip(params, weights, strict=True):
            param.copy_(weight)
    optimizer.load_state_dict(saved)
    optimizer.param_groups[0]["lr"] = 0.0
    train(optimizer, params, range(3, 4))
    for param, weight in zip(params, weights, strict=True):
        assert torch.equal(bits(param), bits(weight))
    fresh = FusedOffloadAdam(weights, **stores.arguments())
    fresh.load_state_dict(saved)
    fresh.param_groups[0]["lr"] = 0.0
    train(fresh, weights, range(3, 4))
    assert_same(snapshot(optimizer, params), snapshot(fresh, weights))


def test_a_float32_parameter_is_its_own_master(device: torch.device) -> None:
    params = make_params(device)
    optimizer = FusedOffloadAdam(params, master_weights=True, **HYPERPARAMETERS)
    train(optimizer, params, range(2))
    twins = clone_params(params)
    loaded = FusedOffloadAdam(twins)  # nothing is lost without the copies
    loaded.load_state_dict(optimizer.state_dict())
    train(optimizer, params, range(2, 4))
    train(loaded, twins, range(2, 4))
    for param, twin in zip(params, twins, strict=True):
        assert torch.equal(bits(param), bits(twin))


# -- groups ----------------------------------------------------------------------------------------


def test_settings_and_counters_are_taken_over(device: torch.device) -> None:
    params = make_params(device)
    optimizer = FusedOffloadAdam(params, lr=0.125, betas=(0.8, 0.95), weight_decay=0.03)
    train(optimizer, params, range(1))
    optimizer.param_groups[0]["step"] = 58
    optimizer.param_groups[0]["wd_mult"] = 0.5
    optimizer.param_groups[0]["is_expert_parallel"] = False
    twins = clone_params(params)
    loaded = FusedOffloadAdam(twins, lr=9.0, betas=(0.5, 0.5), eps=1.0, weight_decay=7.0, bias_correction=False)
    loaded.load_state_dict(through_file(optimizer.state_dict()))
    assert groups_without_params(loaded) == groups_without_params(optimizer)
    assert loaded.param_groups[0]["wd_mult"] == 0.5
    train(optimizer, params, range(1, 2))
    train(loaded, twins, range(1, 2))
    assert loaded.param_groups[0]["step"] == 59
    assert_same(snapshot(optimizer, params), snapshot(loaded, twins))


def test_settings_changed_after_a_load_are_used(device: torch.device) -> None:
    params = make_params(device)
    optimizer = FusedOffloadAdam(params, **HYPERPARAMETERS)
    train(optimizer, params, range(2))
    loaded = FusedOffloadAdam(params)
    loaded.load_state_dict(optimizer.state_dict())
    loaded.param_groups[0]["weight_decay"] = 0.5
    loaded.param_groups[0]["lr"] = 0.25
    scalars = adam_scalars(
        lr=0.25, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.5, step=3, bias_corrected=True, adam_w_mode=True
    )
    expected = params[-2].detach().cpu().clone()
    state = {key: loaded.get_unscaled_state(params[-2], key).clone() for key in ("exp_avg", "exp_avg_sq")}
    format = Format("fp32", torch.float32)
    stored = AdamState(Stored(format, state["exp_avg"]), Stored(format, state["exp_avg_sq"]), None)
    train(loaded, params, range(2, 3))
    assert params[-2].grad is not None
    adam_step_(expected, params[-2].grad.cpu(), stored, scalars)
    assert torch.equal(bits(params[-2]), bits(expected))


def test_a_scheduler_can_be_rebuilt(device: torch.device) -> None:
    params = make_params(device)
    optimizer = FusedOffloadAdam(params, lr=0.5)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    for step in range(9):
        train(optimizer, params, range(step, step + 1))
        scheduler.step()
    loaded = FusedOffloadAdam(clone_params(params), lr=3.0)
    loaded.load_state_dict(through_file(optimizer.state_dict()))
    assert loaded.param_groups[0]["initial_lr"] == 0.5
    assert loaded.param_groups[0]["lr"] == 0.5 * 0.5**9
    rebuilt = torch.optim.lr_scheduler.LambdaLR(loaded, lambda epoch: 0.5**epoch, last_epoch=9)
    assert rebuilt.get_last_lr() == [0.5 * 0.5**10]


def test_a_tensor_lr_is_not_shared_between_optimizers(device: torch.device) -> None:
    optimizer = FusedOffloadAdam(make_params(device), lr=torch.tensor(0.5))
    loaded = FusedOffloadAdam(make_params(device))
    loaded.load_state_dict(optimizer.state_dict())
    optimizer.param_groups[0]["lr"].fill_(9.0)
    assert loaded.param_groups[0]["lr"] == 0.5


def test_empty_groups_keep_step(device: torch.device) -> None:
    def build() -> tuple[list[torch.nn.Parameter], FusedOffloadAdam]:
        params = make_params(device)
        return params, FusedOffloadAdam([{"params": params}, {"params": [], "lr": 0.5}])

    params, optimizer = build()
    train(optimizer, params, range(5))
    saved = optimizer.state_dict()
    assert [group["step"] for group in saved["param_groups"]] == [5, 5]
    assert saved["param_groups"][1]["params"] == []
    twins, loaded = build()
    loaded.load_state_dict(through_file(saved))
    assert [group["step"] for group in loaded.param_groups] == [5, 5]
    assert loaded.param_groups[1]["lr"] == 0.5
    train(loaded, twins, range(1))
    assert [group["step"] for group in loaded.state_dict()["param_groups"]] == [6, 6]


def test_an_optimizer_without_elements(device: torch.device) -> None:
    params = [torch.nn.Parameter(torch.empty(0, 4, device=device))]
    optimizer = FusedOffloadAdam(params, master_weights=True)
    train(optimizer, params, range(3))
    loaded = FusedOffloadAdam([torch.nn.Parameter(torch.empty(0, 4, device=device))], master_weights=True)
    loaded.load_state_dict(through_file(optimizer.state_dict()))
    assert loaded.param_groups[0]["step"] == 3
    assert loaded.state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()


def test_groups_without_state_resume(device: torch.device) -> None:
    """A frozen group counts steps but has no state."""

    def build() -> tuple[list[torch.nn.Parameter], FusedOffloadAdam]:
        params, frozen = make_params(device), make_params(device, seed=3)
        for param in frozen:
            param.requires_grad_(False)
        return params, FusedOffloadAdam([{"params": params}, {"params": frozen}])

    params, optimizer = build()
    train(optimizer, params, range(3))
    saved = through_file(optimizer.state_dict())
    assert len(saved["state"]) == len(params)
    twins, loaded = build()
    with torch.no_grad():
        for twin, param in zip(twins, params, strict=True):
            twin.copy_(param)
    loaded.load_state_dict(saved)
    train(optimizer, params, range(3, 5))
    train(loaded, twins, range(3, 5))
    assert_same(snapshot(optimizer, params), snapshot(loaded, twins))


@pytest.mark.parametrize("step", [3, 3.0, torch.tensor(3.0), torch.tensor([3]), torch.tensor([3.0])], ids=repr)
def test_step_becomes_an_int(device: torch.device, step: Any) -> None:
    params = make_params(device)
    optimizer = FusedOffloadAdam(params)
    train(optimizer, params, range(1))
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["step"] = step.to(device) if isinstance(step, torch.Tensor) else step
    optimizer.load_state_dict(saved)
    assert type(optimizer.param_groups[0]["step"]) is int
    assert optimizer.param_groups[0]["step"] == 3
    assert type(optimizer.state_dict()["param_groups"][0]["step"]) is int
    assert optimizer.torch_state_dict()["state"][0]["step"].shape == ()


def test_parameters_may_be_saved_by_name(device: torch.device) -> None:
    params = make_params(device)
    optimizer = FusedOffloadAdam(params, **HYPERPARAMETERS)
    train(optimizer, params, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    names = [f"layers.{index}.weight" for index in range(len(params))]
    saved["param_groups"][0]["params"] = names
    saved["state"] = {names[index]: entry for index, entry in reversed(saved["state"].items())}
    twins = clone_params(params)
    loaded = FusedOffloadAdam(twins)
    loaded.load_state_dict(saved)
    assert_same(snapshot(optimizer, params), snapshot(loaded, twins))
    assert loaded.state_dict()["param_groups"][0]["params"] == list(range(len(params)))


def test_named_parameters_keep_their_names(device: torch.device) -> None:
    model = torch.nn.Linear(3, 4).to(device)
    optimizer = FusedOffloadAdam(model.named_parameters())
    saved = through_file(optimizer.state_dict())
    assert saved["param_groups"][0]["param_names"] == ["weight", "bias"]
    other = [(name, torch.nn.Parameter(torch.zeros(shape, device=device))) for name, shape in (("w", (4, 3)), ("b", 4))]
    loaded = FusedOffloadAdam(other)
    loaded.load_state_dict(saved)
    assert loaded.param_groups[0]["param_names"] == ["w", "b"]


# -- live tensors ----------------------------------------------------------------------------------


@pytest.mark.parametrize("stores", FEW_STORES, ids=store_id)
def test_loading_its_own_live_state_is_no_change(device: torch.device, stores: Stores) -> None:
    params = make_params(device, torch.bfloat16)
    optimizer = FusedOffloadAdam(params, offload=SMALL_CHUNKS, **HYPERPARAMETERS, **stores.arguments())
    train(optimizer, params, range(2))
    before = snapshot(optimizer, params)
    addresses = [value.data_ptr() for param in params for value in optimizer.state[param].values()]
    report = optimizer.memory_report()
    optimizer.load_state_dict(optimizer.state_dict())
    assert_same(snapshot(optimizer, params), before)
    assert [value.data_ptr() for param in params for value in optimizer.state[param].values()] == addresses
    assert optimizer.memory_report() == report


def test_live_tensors_may_change_places(device: torch.device) -> None:
    params = [torch.nn.Parameter(torch.randn(400, device=device)) for _ in range(3)]
    optimizer = FusedOffloadAdam(params)
    train(optimizer, params, range(2))
    saved = optimizer.state_dict()
    expected = [{key: value.clone() for key, value in saved["state"][index].items()} for index in (1, 2, 0)]
    saved["state"] = {index: saved["state"][source] for index, source in enumerate((1, 2, 0))}
    optimizer.load_state_dict(saved)
    for param, values in zip(params, expected, strict=True):
        for key, value in values.items():
            assert torch.equal(optimizer.state[param][key], value)


def test_a_state_dict_filled_in_place_is_loaded(device: torch.device) -> None:
    """Distributed checkpoint readers write into the tensors of a state dict, then load it."""
    params = make_params(device, torch.bfloat16)
    optimizer = FusedOffloadAdam(params, master_weights=True, **HYPERPARAMETERS)
    train(optimizer, params, range(2))
    twins = clone_params(params)
    loaded = FusedOffloadAdam(twins, master_weights=True)
    for twin in twins:
        loaded.initialize_state(twin)
    template = loaded.state_dict()
    saved = optimizer.state_dict()
    for index, entry in template["state"].items():
        for key, value in entry.items():
            value.copy_(saved["state"][index][key])
    template["param_groups"] = saved["param_groups"]
    loaded.load_state_dict(template)
    train(optimizer, params, range(2, 4))
    train(loaded, twins, range(2, 4))
    assert_same(snapshot(optimizer, params), snapshot(loaded, twins))


def test_the_state_dict_that_was_loaded_stays_as_it_is(device: torch.device) -> None:
    params = make_params(device)
    optimizer = FusedOffloadAdam(params)
    train(optimizer, params, range(1))
    saved = copy.deepcopy(optimizer.state_dict())
    again = copy.deepcopy(saved)
    loaded = FusedOffloadAdam(clone_params(params))
    loaded.load_state_dict(saved)
    train(loaded, loaded.param_groups[0]["params"], range(1, 3))
    assert saved["param_groups"] == again["param_groups"]
    for index, entry in saved["state"].items():
        for key, value in entry.items():
            assert torch.equal(value, again["state"][index][key])


def test_state_missing_from_the_checkpoint_is_forgotten(device: torch.device) -> None:
    params = make_params(device, torch.bfloat16)
    optimizer = FusedOffloadAdam(params, master_weights=True)
    train(optimizer, params, range(3))
    optimizer.load_state_dict({"state": {}, "param_groups": [{"params": list(range(len(params)))}]})
    assert "step" not in optimizer.param_groups[0]
    twins = clone_params(params)
    fresh = FusedOffloadAdam(twins, master_weights=True)
    train(optimizer, params, range(2))
    train(fresh, twins, range(2))
    assert_same(snapshot(optimizer, params), snapshot(fresh, twins))


# -- hooks -----------------------------------------------------------------------------------------


def test_state_dict_hooks(device: torch.device) -> None:
    params = make_params(device)
    optimizer = FusedOffloadAdam(params)
    train(optimizer, params, range(1))
    called: list[str] = []

    def pre(hooked: torch.optim.Optimizer) -> None:
        assert hooked is optimizer
        called.append("pre")
        hooked.param_groups[0]["lr"] = 0.75

    def post_in_place(hooked: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        called.append("post in place")
        state_dict["first"] = 1

    def post_replacing(hooked: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        called.append("post replacing")
        return {**state_dict, "second": state_dict["first"] + 1}

    optimizer.register_state_dict_pre_hook(pre)
    optimizer.register_state_dict_post_hook(post_in_place)
    optimizer.register_state_dict_post_hook(post_replacing)
    saved = optimizer.state_dict()
    assert called == ["pre", "post in place", "post replacing"]
    assert (saved["first"], saved["second"]) == (1, 2)
    assert saved["param_groups"][0]["lr"] == 0.75


def test_load_state_dict_hooks(device: torch.device) -> None:
    params = make_params(device)
    optimizer = FusedOffloadAdam(params)
    train(optimizer, params, range(2))
    loaded = FusedOffloadAdam(clone_params(params))
    seen: list[int] = []

    def pre(hooked: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        assert "step" not in hooked.param_groups[0]
        groups = [{**group, "lr": 0.75} for group in state_dict["param_groups"]]
        return {**state_dict, "param_groups": groups}

    def post(hooked: torch.optim.Optimizer) -> None:
        seen.append(hooked.param_groups[0]["step"])
        hooked.param_groups[0]["weight_decay"] = 0.5

    loaded.register_load_state_dict_pre_hook(pre)
    loaded.register_load_state_dict_post_hook(post)
    loaded.load_state_dict(optimizer.state_dict())
    assert seen == [2]
    assert (loaded.param_groups[0]["lr"], loaded.param_groups[0]["weight_decay"]) == (0.75, 0.5)


# -- what cannot be loaded -------------------------------------------------------------------------


def group_of(saved: dict[str, Any]) -> dict[str, Any]:
    group: dict[str, Any] = saved["param_groups"][1]
    return group


def last_entry(saved: dict[str, Any]) -> dict[str, Any]:
    entry: dict[str, Any] = saved["state"][max(saved["state"])]
    return entry


def drop_state(saved: dict[str, Any]) -> None:
    saved["state"] = {}


def drop_parameter(saved: dict[str, Any]) -> None:
    del saved["state"][group_of(saved)["params"].pop()]


BROKEN: dict[str, tuple[Callable[[dict[str, Any]], Any], type[Exception], str]] = {
    "no state": (lambda s: s.pop("state"), ValueError, "no 'state'"),
    "no groups": (lambda s: s.pop("param_groups"), ValueError, "no 'param_groups'"),
    "fewer groups": (lambda s: s["param_groups"].pop(), ValueError, r"number of parameter groups \(1, here 2\)"),
    "smaller group": (drop_parameter, ValueError, r"group 1: 1, here 2"),
    "larger group": (lambda s: group_of(s)["params"].append(9), ValueError, r"group 1: 3, here 2"),
    "other shape": (
        lambda s: last_entry(s).update(exp_avg=torch.zeros(5)),
        ValueError,
        r"exp_avg of shape \(5,\) in group 1.*\(30, 20\)",
    ),
    "transposed": (
        lambda s: last_entry(s).update(exp_avg_sq=last_entry(s)["exp_avg_sq"].t()),
        ValueError,
        r"exp_avg_sq of shape \(20, 30\)",
    ),
    "lacks exp_avg": (lambda s: last_entry(s).pop("exp_avg"), ValueError, "lacks exp_avg of a parameter in group 1"),
    "exp_avg_sq is None": (lambda s: last_entry(s).update(exp_avg_sq=None), ValueError, "lacks exp_avg_sq"),
    "all state lost": (drop_state, ValueError, "no state for any parameter of group 0 at step 2"),
    "unknown key": (
        lambda s: last_entry(s).update(max_exp_avg_sq=torch.zeros(30, 20)),
        ValueError,
        r"unknown state \['max_exp_avg_sq'\] in group 1",
    ),
    "state of unknown parameters": (
        lambda s: s["state"].update({77: last_entry(s)}),
        ValueError,
        r"in none of its groups: \[77\]",
    ),
    "amsgrad": (lambda s: group_of(s).update(amsgrad=True), ValueError, "amsgrad=True in group 1"),
    "maximize": (lambda s: group_of(s).update(maximize=True), ValueError, "maximize=True in group 1"),
    "other decay": (
        lambda s: group_of(s).update(decoupled_weight_decay=False, weight_decay=0.1),
        ValueError,
        "adam_w_mode=False",
    ),
    "a group's step differs from its parameters'": (
        lambda s: last_entry(s).update(step=torch.tensor(7.0)) or group_of(s).update(step=5),
        ValueError,
        "has step 5 in group 1, but step 7 beside its parameters",
    ),
    "a parameter twice": (
        lambda s: group_of(s).update(params=[group_of(s)["params"][0]] * 2),
        ValueError,
        "has parameter 5 twice",
    ),
    "groups of another type": (lambda s: s.update(param_groups={}), TypeError, "has a dict as 'param_groups'"),
    "state of another type": (lambda s: s.update(state=[1]), TypeError, "has a list as 'state'"),
    "a group of another type": (lambda s: s["param_groups"].__setitem__(1, 3), TypeError, "has a int as group 1"),
    "no params": (lambda s: group_of(s).pop("params"), ValueError, "no 'params' in group 1"),
    "params of another type": (
        lambda s: group_of(s).update(params="ab"),
        TypeError,
        "has a str as 'params' of group 1",
    ),
    "names that cannot be looked up": (lambda s: group_of(s).update(params=[[5], 6]), TypeError, "has a list as name"),
    "an entry of another type": (lambda s: s["state"].update({5: torch.zeros(3)}), TypeError, "has a Tensor as state"),
    "keys that cannot be sorted": (lambda s: last_entry(s).update({3: 1, "x": 2}), ValueError, "unknown state"),
    "a setting that cannot be copied": (
        lambda s: group_of(s).update(tag=functools.reduce(lambda nested, _: [nested], range(10_000), [])),
        ValueError,
        "has a 'tag' in its groups that cannot be copied",
    ),
    "amsgrad of several elements": (
        lambda s: group_of(s).update(amsgrad=torch.ones(2)),
        TypeError,
        "amsgrad=.* in group 1, it should be a bool",
    ),
    "moments that were mixed up": (
        lambda s: last_entry(s).update(exp_avg_sq=-torch.ones(30, 20)),
        ValueError,
        "exp_avg_sq has negative values",
    ),
    "freed memory": (
        lambda s: last_entry(s)["exp_avg"].untyped_storage().resize_(8),
        ValueError,
        r"exp_avg of shape .* has lost its memory",
    ),
    "a class that stands for other tensors": (
        lambda s: last_entry(s).update(exp_avg=FakeTensorMode().from_tensor(torch.zeros(30, 20))),
        TypeError,
        "should be a plain tensor, but got a FakeTensor",
    ),
    "not a tensor": (lambda s: last_entry(s).update(exp_avg=0.5), TypeError, "float as exp_avg in group 1"),
    "integers": (
        lambda s: last_entry(s).update(exp_avg=torch.zeros(30, 20, dtype=torch.int32)),
        TypeError,
        "exp_avg should be a floating point tensor, but got torch.int32",
    ),
    "no data": (
        lambda s: last_entry(s).update(exp_avg=torch.zeros(30, 20, device="meta")),
        TypeError,
        "exp_avg should be a dense tensor with data",
    ),
    "sparse": (
        lambda s: last_entry(s).update(exp_avg=torch.zeros(30, 20).to_sparse()),
        TypeError,
        "exp_avg should be a dense tensor with data, but got torch.sparse_coo",
    ),
    "remainder instead of a master": (
        lambda s: last_entry(s).update(master_param=torch.zeros(30, 20, dtype=torch.int16)),
        TypeError,
        "master_param is kept as torch.float32, but got torch.int16.*store_param_remainders",
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_state_dict_that_does_not_belong_changes_nothing(device: torch.device, fault: str) -> None:
    def build() -> tuple[list[torch.nn.Parameter], FusedOffloadAdam]:
        params = make_params(device, torch.bfloat16)
        groups = [{"params": params[:5]}, {"params": params[5:], "lr": 0.3, "tag": "second"}]
        return params, FusedOffloadAdam(groups, master_weights=True, **HYPERPARAMETERS)

    breaks, error, message = BROKEN[fault]
    params, optimizer = build()
    twins, undisturbed = build()
    train(optimizer, params, range(2))
    train(undisturbed, twins, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    for entry in saved["state"].values():
        for value in entry.values():
            value.zero_()
    for group in saved["param_groups"]:
        group["lr"] = 100.0
    breaks(saved)
    groups = optimizer.param_groups
    with pytest.raises(error, match=message):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups is groups
    assert groups_without_params(optimizer) == groups_without_params(undisturbed)
    assert_same(snapshot(optimizer, params), snapshot(undisturbed, twins))
    train(optimizer, params, range(2, 4))
    train(undisturbed, twins, range(2, 4))
    assert_same(snapshot(optimizer, params), snapshot(undisturbed, twins))


def test_masters_are_not_dropped_silently(device: torch.device) -> None:
    params = make_params(device, torch.bfloat16)
    with_masters = FusedOffloadAdam(params, master_weights=True)
    train(with_masters, params, range(1))
    with pytest.raises(ValueError, match=r"master weights in group 0.*master_weights=True"):
        FusedOffloadAdam(params).load_state_dict(with_masters.state_dict())


def test_masters_and_remainders_are_not_taken_for_each_other(device: torch.device) -> None:
    params = make_params(device, torch.bfloat16)
    masters = FusedOffloadAdam(params, master_weights=True)
    remainders = FusedOffloadAdam(params, master_weights=True, store_param_remainders=True)
    train(masters, params, range(1))
    train(remainders, params, range(1))
    with pytest.raises(TypeError, match=r"torch\.int16, but got torch\.float32.*store_param_remainders"):
        remainders.load_state_dict(masters.state_dict())
    with pytest.raises(TypeError, match=r"torch\.float32, but got torch\.int16.*store_param_remainders"):
        masters.load_state_dict(remainders.state_dict())


def test_a_failed_load_gives_no_storage(device: torch.device) -> None:
    params = make_params(device)
    optimizer = FusedOffloadAdam(params)
    train(optimizer, params, range(1))
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["state"][5]["exp_avg_sq"]
    fresh = FusedOffloadAdam(clone_params(params))
    with pytest.raises(ValueError, match="lacks exp_avg_sq"):
        fresh.load_state_dict(saved)
    assert len(fresh.state) == 0
    assert fresh.memory_report().host_bytes == {}


def test_a_load_that_is_interrupted_refuses_steps(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some values are written by then, and some are not; the next load makes them one checkpoint
    again.
    """
    params = make_params(device)
    optimizer = FusedOffloadAdam(params, **HYPERPARAMETERS)
    train(optimizer, params, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    written = []
    set_unscaled = StateEntry.set_unscaled

    def interrupted(entry: StateEntry, key: str, value: torch.Tensor) -> None:
        written.append(key)
        if len(written) == 3:
            raise KeyboardInterrupt
        set_unscaled(entry, key, value)

    with monkeypatch.context() as patch:
        patch.setattr(StateEntry, "set_unscaled", interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimizer.load_state_dict(saved)
    for use in (optimizer.step, optimizer.state_dict):
        with pytest.raises(RuntimeError, match=r"load failed half-way .* Load a checkpoint"):
            use()
    optimizer.load_state_dict(saved)
    train(optimizer, params, range(2, 3))
