"""Scenarios of tests/test_fsdp_gpu.py, run by every rank: ``fsdp_gpu_scenarios.py FOLDER NAME...``.

Without GPUs they run on the CPU and gloo, which is good for nothing but finding mistakes in them.
"""

from __future__ import annotations

import functools
import os
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
from fused_offload.plan.window_blocks import blocks_of
from fused_offload.step import stepper
from fused_offload.stream import prefetch

FOLDER = Path()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS = 20
SCENARIOS: dict[str, Callable[[], None]] = {}
WIDTH, TOKENS = (512, 1000) if DEVICE == "cuda" else (32, 50)

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
}


def scenario(function: Callable[[], None]) -> Callable[[], None]:
    SCENARIOS[function.__name__] = function
    return function


def build(offload: OffloadConfig, formats: str = "remainders", **options: Any) -> tuple[Any, FusedOffloadAdam]:
    torch.manual_seed(0)
    model: Any = GPT(WIDTH, TOKENS).to(DEVICE, torch.float32 if formats == "plain" else torch.bfloat16)
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model, FusedOffloadAdam(model.parameters(), lr=1e-3, weight_decay=0.1, offload=offload, **FORMATS[formats])


def train(
    model: Any, optimizer: FusedOffloadAdam, steps: Iterable[int], clip: float | None = 1.0, batch: int = 4
) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        tokens = torch.randint(TOKENS, (batch, 65), generator=generator).to(DEVICE)
        logits = model(tokens[:, :-1]).float()
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        with alone():
            optimizer.step()
        optimizer.zero_grad()


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
        target = {"model": get_model_state_dict(other), "optimizer": get_optimizer_state_dict(other, resumed)}
        dcp.load(target, checkpoint_id=FOLDER / "async")
        set_model_state_dict(other, target["model"])
        set_optimizer_state_dict(other, resumed, target["optimizer"])
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
        patch.setattr(stepper, "blocks_of", functools.partial(blocks_of, block_bytes=2**20))
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


@scenario
def parameters_in_host_memory() -> None:
    runs = []
    for options in ({}, {"offload_policy": CPUOffloadPolicy(pin_memory=DEVICE == "cuda")}):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model, optimizer = build(OFFLOADED, **options)
        said = [str(warning.message) for warning in caught if "CPUOffloadPolicy" in str(warning.message)]
        assert len(said) == (1 if options and DEVICE == "cuda" else 0)
        if DEVICE == "cuda" and options:
            with pytest.raises(RuntimeError, match="CPUOffloadPolicy"):
                optimizer.step_in_backward(model)
        train(model, optimizer, range(3), clip=None)
        runs += [model, optimizer]
    same_training(*runs)


@scenario
def replicated_and_in_mixed_precision() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh(DEVICE, (2, 1), mesh_dim_names=("replicate", "shard"))
    runs = []
    for offload in (OFFLOADED, RESIDENT):
        model, optimizer = build(offload, "plain", mesh=mesh, mp_policy=policy)
        train(model, optimizer, range(5))
        runs += [model, optimizer]
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
        ranks.main(SCENARIOS, sys.argv[2:], backend=backend, limit_s=60)
