"""Megatron-FSDP on GPUs over NCCL: ``torchrun --nproc-per-node 2 fsdp_on_gpus.py EMPTY_FOLDER``.

Twenty steps of a GPT with gated MLPs, deterministic; every run starts from the same weights and
sees the same tokens.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Needed for determinism, and set before the first matrix product.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from comparison import assert_same
from fsdp_job import MOMENTS, FsdpJob, FsdpSpec, load, save
from scenarios_fsdp import fully_sharded, resume_plainly, train_plainly

from fused_offload.params.dtensors import local_of

STEPS, SAVES = 20, (10, 12)
HAS_TE = importlib.util.find_spec("transformer_engine") is not None
PLACES = ("ours", *(("ours as FusedAdam",) if HAS_TE else ()))


def _trained(spec: FsdpSpec) -> tuple[FsdpJob, dict[str, Any]]:
    job = FsdpJob(spec)
    log = job.train(STEPS)
    return job, {"log": log, **job.snapshot()}


def _check_places(job: FsdpJob, device: str) -> None:
    views = [local_of(job.inner.state[param][key]) for param in job.params().values() for key in MOMENTS]
    assert {view.device.type for view in views if view.numel()} == {device}
    assert device != "cpu" or all(view.is_pinned() for view in views if view.numel())
    keys = {key for entry in job.inner.state.values() for key in entry}
    assert keys == set(MOMENTS), keys
    report = job.inner.memory_report()
    assert set(report.host_bytes if device == "cpu" else report.resident_bytes) == set(MOMENTS)


def trains_the_bits_of_the_resident_run(folder: Path) -> None:
    for place in PLACES:
        for precision_aware in (True, False):
            spec = FsdpSpec(place, precision_aware=precision_aware)
            resident, expected = _trained(spec._replace(fraction=0.0))
            _check_places(resident, "cuda")
            if spec == FsdpSpec():
                assert_same(_trained(spec._replace(fraction=0.0))[1], expected, "the same run twice")
            for window_bytes in (0, 2**30):
                job, result = _trained(spec._replace(window_bytes=window_bytes))
                _check_places(job, "cpu")
                assert_same(result, expected, f"{place}, precision-aware={precision_aware}, window {window_bytes}")


def has_the_bits_of_transformer_engine(folder: Path) -> None:
    if not HAS_TE:
        return
    _, theirs = _trained(FsdpSpec("stock"))
    _, ours = _trained(FsdpSpec("ours as FusedAdam"))
    assert_same(ours, theirs)


def saves_twice_and_resumes(folder: Path) -> None:
    for place in PLACES:
        for moments in (torch.float32, torch.bfloat16):
            spec = FsdpSpec(place, moments=moments)
            expected = _trained(spec)[1]
            job, log = FsdpJob(spec), []
            for iteration in SAVES:
                log += job.train(iteration - job.iteration)
                save(job, folder / f"{place} {moments} {iteration}")
            log += job.train(STEPS - job.iteration)
            assert_same({"log": log, **job.snapshot()}, expected, f"{place}, {moments}, saving")
            # With half of it on the host, the same parameter's state may be on one rank's GPU and
            # another's host.
            for iteration, fraction in zip(SAVES, (1.0, 0.5), strict=True):
                other = FsdpJob(spec._replace(seed=2, fraction=fraction))
                load(other, folder / f"{place} {moments} {iteration}", iteration)
                rest = other.train(STEPS - iteration)
                result = {"log": log[:iteration] + rest, **other.snapshot()}
                assert_same(result, expected, f"{place}, {moments}, resumed at {iteration}")


def stands_alone(folder: Path) -> None:
    for decoupled in (False, True):
        runs = [
            train_plainly(*fully_sharded("ours", decoupled=decoupled, fraction=fraction), range(STEPS))
            for fraction in (0.0, 1.0)
        ]
        assert_same(*runs, f"decoupled={decoupled}")
    for saved_at, fraction in zip(SAVES, (1.0, 0.5), strict=True):
        went_on, resumed = resume_plainly(folder / f"stand-alone {saved_at}", saved_at, STEPS, fraction)
        assert_same(resumed, went_on, f"resumed at {saved_at}")


SCENARIOS: tuple[Callable[[Path], None], ...] = (
    trains_the_bits_of_the_resident_run,
    has_the_bits_of_transformer_engine,
    saves_twice_and_resumes,
    stands_alone,
)


def main() -> None:
    from megatron.core import parallel_state, tensor_parallel

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl")
    torch.use_deterministic_algorithms(True, warn_only=True)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    for scenario in SCENARIOS:
        started = time.monotonic()
        scenario(Path(sys.argv[1]))
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 0:
            print(f"passed: {scenario.__name__} ({time.monotonic() - started:.0f} s)", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
