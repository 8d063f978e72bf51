"""Iterations that Megatron skips or prepares twice."""

from __future__ import annotations

from typing import Any

import torch
from job import Job, JobSpec
from reference_optimizer import Forms
from registry import scenario
from scenarios_training import LAYOUTS

ITERATIONS = 8
SKIPS = {
    # Norms are between 1.5 and 3.5 here, so that some iterations are above it and some below.
    "gradient norm above the threshold": JobSpec(
        layout=LAYOUTS["all overlapped"], config=(("grad_norm_skip_threshold", 2.3),)
    ),
    "overflow in fp16": JobSpec(
        forms=Forms(),
        layout=LAYOUTS["several buckets"],
        dtype=torch.float16,
        config=(("initial_loss_scale", 2.0**24), ("hysteresis", 1), ("loss_scale_window", 3.0)),
    ),
    "overflow in fp16, experts": JobSpec(
        layout=LAYOUTS["dense and experts"],
        dtype=torch.float16,
        config=(("initial_loss_scale", 2.0**24), ("hysteresis", 1), ("loss_scale_window", 3.0)),
    ),
}


def skip_name(name: str, optimizer: str) -> str:
    return f"{name}, {optimizer}"


def _skips(spec: JobSpec) -> dict[str, Any]:
    job = Job(spec)
    log = []
    for _ in range(ITERATIONS):
        for child in job.children:
            prefetch = getattr(child, "reload_offloaded_states", None)
            if prefetch is not None:
                prefetch()
        log.append(job.step())
    return {"log": log, "scale": job.optimizer.get_loss_scale().item(), **job.snapshot()}


for _name, _spec in SKIPS.items():
    for _optimizer in ("ours", "reference"):
        scenario(
            skip_name(_name, _optimizer),
            lambda context, spec=_spec, optimizer=_optimizer: _skips(spec._replace(optimizer=optimizer)),
        )


def _prepared_twice(optimizer: str, *, twice: bool) -> dict[str, Any]:
    """slime looks at the gradients' norm before it decides to step."""
    job = Job(JobSpec(optimizer, layout=LAYOUTS["all overlapped"]))
    log = []
    for _ in range(3):
        if twice:
            job.forward_backward()
            assert not job.optimizer.prepare_grads()
            job.optimizer.get_grad_norm()
        log.append(job.step())
    return {"log": log, **job.snapshot()}


for _twice in (True, False):
    scenario(
        f"gradients prepared {'twice' if _twice else 'once'}",
        lambda context, twice=_twice: _prepared_twice("ours", twice=twice),
    )
