"""Scenarios of tests/test_fsdp_gpu.py, run by every rank: ``fsdp_gpu_scenarios.py FOLDER NAME...``.

Without GPUs they run on the CPU and gloo, which is good for nothing but finding mistakes in them.
"""

from __future__ import annotations

import copy
import functools
import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp_scenarios import GPT, alone, local
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel

from fused_offload import FusedOffloadAdam, OffloadConfig
from fused_offload.model_hooks import backward_step
from fused_offload.plan import planner
from fused_offload.plan.window_blocks import blocks_of
from fused_offload.stream import prefetch

FOLDER = Path()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS = 20
SCENARIOS: dict[str, Callable[[], None]] = {}
WIDTH, TOKENS = (512, 1000) if DEVICE == "cuda" else (32, 50)

NUMERICS = "te" if DEVICE == "cuda" else "ieee"
OFFLOADED = OffloadConfig(chunk_bytes=2**20)  # tens of chunks a step
RESIDENT = OffloadConfig(fraction=0.0)
FORMATS: dict[str, dict[str, Any]] = {
    "plain": {},
    "remainders": {
        "master_weights": True,
        "store_param_remainders": True,
        "exp_avg_dtype": torch.bfloat16,
        "exp_avg_sq_dtype": torch.bfloat16,
    },
    "masters": {"master_weights": True, "exp_avg_dtype": torch.float16, "exp_avg_sq_dtype": torch.float16},
    "narrow masters": {"master_weights": True, "master_weight_dtype": torch.float16, "numerics": NUMERICS},
    "eight bits": {
        "master_weights": True,
        "store_param_remainders": True,
        "exp_avg_dtype": torch.uint8,
        "exp_avg_sq_dtype": torch.uint8,
        "numerics": NUMERICS,
    },
}


def scenario(function: Callable[[], None]) -> Callable[[], None]:
    SCENARIOS[function.__name__] = function
    return function


def build(
    offload: OffloadConfig, formats: str = "remainders", *, odd: int = 1, **options: Any
) -> tuple[Any, FusedOffloadAdam]:
    torch.manual_seed(0)
    model: Any = GPT(WIDTH, TOKENS, odd).to(DEVICE, torch.float32 if formats == "plain" else torch.bfloat16)
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model, FusedOffloadAdam(model.parameters(), lr=1e-3, weight_decay=0.1, offload=offload, **FORMATS[formats])


def loss_of(model: Any, step: int, batch: int = 4) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    tokens = torch.randint(TOKENS, (batch, 65), generator=generator).to(DEVICE)
    logits = model(tokens[:, :-1]).float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def train(
    model: Any, optimizer: FusedOffloadAdam, steps: Iterable[int], clip: float | None = 1.0, batch: int = 4
) -> list[float]:
    """Trains, clipping by torch where gradients are on the device; returns the norms."""
    norms = []
    on_host = DEVICE == "cuda" and any(local(param).device.type == "cpu" for param in model.parameters())
    for step in steps:
        loss_of(model, step, batch).backward()
        if clip is not None:
            if on_host:
                norm: Any = optimizer.clip_grad_norm_(clip)
            else:
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            norms.append(norm.full_tensor().item())
        with alone():
            optimizer.step()
        optimizer.zero_grad()
    return norms


def same_training(one: Any, a: FusedOffloadAdam, other: Any, b: FusedOffloadAdam) -> None:
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(local(p).cpu(), local(q).cpu())
        assert list(a.state[p]) == list(b.state[q])
        for key in a.state[p]:
            x, y = local(a.state[p][key]).cpu(), local(b.state[q][key]).cpu()
            assert x.dtype == y.dtype
            assert torch.equal(x, y), key
    assert [group["step"] for group in a.param_groups] == [group["step"] for group in b.param_groups]


@scenario
def streams_the_bits_of_the_resident_run() -> None:
    for formats in FORMATS:
        runs = []
        for offload in (OFFLOADED, RESIDENT):
            model, optimizer = build(offload, formats)
            train(model, optimizer, range(STEPS))
            runs += [model, optimizer]
        same_training(*runs)
        for model, optimizer, place in ((*runs[:2], "cpu"), (*runs[2:], DEVICE)):
            values = [local(optimizer.state[p]["exp_avg"]) for p in model.parameters()]
            # Where a shard has no elements, nothing is anywhere.
            assert {value.device.type for value in values if value.numel()} == {place}


def load_checkpoint(model: Any, optimizer: Any, folder: Path) -> None:
    """Loads what `torch.distributed.checkpoint` saved of both."""
    target = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(target, checkpoint_id=folder)
    set_model_state_dict(model, target["model"])
    set_optimizer_state_dict(model, optimizer, target["optimizer"])


@scenario
def saves_and_resumes() -> None:
    expected, reference = build(RESIDENT)
    train(expected, reference, range(STEPS))
    model, optimizer = build(OFFLOADED)
    train(model, optimizer, range(10))
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    writing = dcp.async_save(state, checkpoint_id=FOLDER / "async", process_group=dist.new_group(backend="gloo"))
    train(model, optimizer, range(10, STEPS))
    same_training(model, optimizer, expected, reference)
    writing.result()
    for offload in (OFFLOADED, RESIDENT):
        other, resumed = build(offload)
        train(other, resumed, range(2))
        load_checkpoint(other, resumed, FOLDER / "async")
        train(other, resumed, range(10, STEPS))
        same_training(other, resumed, expected, reference)


@scenario
def full_state_dicts_load_into_host_and_gpu_memory() -> None:
    model, optimizer = build(OFFLOADED)
    train(model, optimizer, range(3))
    for cpu_offload in (False, True):  # with it, rank 0 alone gets them
        options = StateDictOptions(full_state_dict=True, cpu_offload=cpu_offload)
        saved = get_optimizer_state_dict(model, optimizer, options=options)
        weights = get_model_state_dict(model, options=options)
        loaded = StateDictOptions(full_state_dict=True, broadcast_from_rank0=cpu_offload)
        other, resumed = build(OffloadConfig(fraction=0.5, chunk_bytes=2**20))
        set_model_state_dict(other, weights, options=loaded)
        set_optimizer_state_dict(other, resumed, saved, options=loaded)
        same_training(model, optimizer, other, resumed)


@scenario
def steps_in_backward() -> None:
    backward_step.PART_BYTES = 2**19
    runs = []
    for steps_early in (True, False):
        model, optimizer = build(OFFLOADED)
        if steps_early:
            optimizer.step_in_backward(model)
        train(model, optimizer, range(STEPS), clip=None)
        runs += [model, optimizer]
    same_training(*runs)


@scenario
def window_memory_comes_from_the_stream_of_the_forward_pass() -> None:
    allocated: list[int] = []
    window_memory = prefetch.Window._memory

    def spy(self: prefetch.Window, nbytes: int) -> torch.Tensor | None:
        allocated.append(torch.cuda.current_stream().cuda_stream)
        return window_memory(self, nbytes)

    runs = []
    hooks: set[int] = set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "blocks_of", functools.partial(blocks_of, block_bytes=2**20))
        patch.setattr(prefetch.Window, "_memory", spy)
        for offload in (OffloadConfig(chunk_bytes=2**20, window_bytes="auto"), RESIDENT):
            model, optimizer = build(offload)
            if offload.window_bytes:
                optimizer.attach(model)
            if DEVICE == "cuda":
                model.embed.weight.register_post_accumulate_grad_hook(
                    lambda _: hooks.add(torch.cuda.current_stream().cuda_stream)
                )
            train(model, optimizer, range(5), batch=64)
            runs += [model, optimizer]
    same_training(*runs)
    if DEVICE == "cuda":
        ours = torch.cuda.current_stream().cuda_stream
        assert ours not in hooks  # else this would show nothing
        assert len(allocated) > 3
        assert set(allocated) == {ours}


ON_HOST = {"offload_policy": CPUOffloadPolicy(pin_memory=DEVICE == "cuda")}


def sized_for_the_same_norms(formats: str, **options: Any) -> tuple[Any, FusedOffloadAdam]:
    """Every gradient lies at a multiple of 16 bytes, also where FSDP puts those of a block side by side on the GPU."""
    return build(OFFLOADED, formats, odd=0, **options)


@scenario
def parameters_in_host_memory() -> None:
    """Every format and both numerics, clipped: the bits of parameters on the GPU."""
    for formats in FORMATS:
        runs, norms = [], []
        for options in ({}, ON_HOST):
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message=".*CPUOffloadPolicy")
                model, optimizer = sized_for_the_same_norms(formats, **options)
            norms.append(train(model, optimizer, range(STEPS), clip=0.3))
            runs += [model, optimizer]
        assert norms[0] == norms[1], formats
        assert min(norms[0]) > 0.3  # else nothing was clipped
        same_training(*runs)
        if DEVICE == "cuda":
            assert {local(param).device.type for param in runs[2].parameters()} == {"cpu"}
            report = runs[3].last_step_report()
            assert report is not None  # of a GPU
            assert report.bytes_to_device > report.bytes_to_host > 0
            with pytest.raises(RuntimeError, match="CPUOffloadPolicy"):
                runs[3].step_in_backward(runs[2])


@scenario
def norms_of_every_order() -> None:
    largest = math.inf if dist.get_world_size() == 1 else 4.0  # torch refuses it where a rank has no elements
    for foreach, order in ((None, 1.0), (True, 2.0), (False, 3.0), (None, largest)):
        found = []
        for options in ({}, ON_HOST):
            model, optimizer = sized_for_the_same_norms("eight bits", **options)
            loss_of(model, 0).backward()
            if options:
                norm = optimizer.clip_grad_norm_(1e-3, order, foreach=foreach)
            else:
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3, order, foreach=foreach)
            with alone():
                optimizer.step()
            found.append((norm.full_tensor().cpu(), [local(param).cpu() for param in model.parameters()]))
        (norm, params), (other, others) = found
        assert norm.dtype == other.dtype
        assert norm.item() == other.item()
        assert all(map(torch.equal, params, others))


@scenario
def checkpoints_of_parameters_in_host_memory() -> None:
    """Sharded and full; from the host to the GPU, back, and from host to host."""
    expected, reference = sized_for_the_same_norms("eight bits")
    train(expected, reference, range(STEPS))
    for index, (saving, loading) in enumerate(((ON_HOST, {}), ({}, ON_HOST), (ON_HOST, ON_HOST))):
        model, optimizer = sized_for_the_same_norms("eight bits", **saving)
        train(model, optimizer, range(10))
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        whole = (
            copy.deepcopy(get_model_state_dict(model, options=options)),
            copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options)),
        )
        state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
        folder = FOLDER / f"on-host-{index}"
        writing = dcp.async_save(state, checkpoint_id=folder, process_group=dist.new_group(backend="gloo"))
        train(model, optimizer, range(10, STEPS))
        same_training(model, optimizer, expected, reference)
        writing.result()
        for is_full in (False, True):
            other, resumed = sized_for_the_same_norms("eight bits", **loading)
            train(other, resumed, range(2))
            if is_full:
                load = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
                set_model_state_dict(other, whole[0], options=load)
                set_optimizer_state_dict(other, resumed, whole[1], options=load)
            else:
                load_checkpoint(other, resumed, folder)
            train(other, resumed, range(10, STEPS))
            same_training(other, resumed, expected, reference)


@scenario
def parameters_of_some_layers_in_host_memory() -> None:
    runs = []
    for options in ({}, ON_HOST):
        torch.manual_seed(0)
        model: Any = GPT(WIDTH, TOKENS, odd=0).to(DEVICE, torch.bfloat16)
        for block in model.blocks:
            fully_shard(block, **options)
        fully_shard(model)
        hosted = list(model.blocks.parameters())
        others = [param for param in model.parameters() if all(param is not one for one in hosted)]
        groups = [{"params": hosted}, {"params": others, "lr": 2e-3}]
        optimizer = FusedOffloadAdam(groups, lr=1e-3, offload=OFFLOADED, **FORMATS["eight bits"])
        train(model, optimizer, range(5), clip=0.3)
        runs += [model, optimizer]
    same_training(*runs)


@scenario
def a_gradient_scaler_skips_steps_of_parameters_in_host_memory() -> None:
    runs = []
    for options in ({}, ON_HOST):
        model, optimizer = sized_for_the_same_norms("eight bits", **options)
        for step in range(5):
            loss_of(model, step).backward()
            optimizer.grad_scale = torch.full((), 2.0, device=DEVICE)
            optimizer.found_inf = torch.full((), float(step in (1, 3)), device=DEVICE)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        assert optimizer.param_groups[0]["step"] == 3
        runs += [model, optimizer]
    same_training(*runs)


@scenario
def the_step_takes_the_ring_and_nothing_else() -> None:
    """No growth over 50 iterations, neither of the GPU's memory nor of page-locked memory nor of the process."""
    model, optimizer = sized_for_the_same_norms("eight bits", **ON_HOST)
    train(model, optimizer, range(10))
    if DEVICE == "cpu":
        return
    seen = []
    for step in range(10, 50):
        loss_of(model, step).backward()
        optimizer.clip_grad_norm_(0.3)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()  # with the ring, which the first step took
        optimizer.step()
        assert torch.cuda.max_memory_allocated() == before
        optimizer.zero_grad()
        pinned = torch.cuda.host_memory_stats()["allocated_bytes.current"]
        seen.append((torch.cuda.memory_reserved(), pinned, rss_bytes()))
    assert seen[-1][0] == seen[10][0]
    assert seen[-1][1] == seen[10][1]
    assert seen[-1][2] < seen[10][2] + 8 * 2**20
    assert optimizer.memory_report().ring_bytes <= 3 * (OFFLOADED.chunk_bytes + 4096)  # type: ignore[operator]


def rss_bytes() -> int:
    text = Path("/proc/self/status").read_text()
    return 1024 * int(re.findall(r"VmRSS:\s+(\d+) kB", text)[0])


@scenario
def host_memory_that_is_not_page_locked() -> None:
    """Stepped on the CPU, with a warning that says what to write."""
    runs = []
    for options in ({}, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model, optimizer = build(OFFLOADED, **options)
        said = [
            str(warning.message) for warning in caught if "CPUOffloadPolicy(pin_memory=True)" in str(warning.message)
        ]
        assert len(said) == (1 if options and DEVICE == "cuda" else 0)
        train(model, optimizer, range(3), clip=None)
        runs += [model, optimizer]
    same_training(*runs)


@scenario
def replicated_and_in_mixed_precision() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh(DEVICE, (2, 1), mesh_dim_names=("replicate", "shard"))
    runs = []
    for offload, options in ((OFFLOADED, {}), (RESIDENT, {}), (OFFLOADED, ON_HOST)):
        model, optimizer = build(offload, "plain", odd=0, mesh=mesh, mp_policy=policy, **options)
        train(model, optimizer, range(5))
        runs += [model, optimizer]
    same_training(*runs[:2], *runs[4:])
    runs = runs[:4]
    same_training(*runs)
    if DEVICE == "cuda":
        with pytest.raises(RuntimeError, match="HSDP"):
            runs[1].step_in_backward(runs[0])


if __name__ == "__main__":
    FOLDER = Path(sys.argv[1])
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.use_deterministic_algorithms(True)
    with sdpa_kernel(SDPBackend.MATH):
        # State in host memory is sent over gloo where torch sends it as it is.
        backend = "cpu:gloo,cuda:nccl" if DEVICE == "cuda" else "gloo"
        ranks.main(SCENARIOS, sys.argv[2:], backend=backend, limit_s=240)
