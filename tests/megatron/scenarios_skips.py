"""Iterations that Megatron skips or prepares twice."""

from __future__ import annotations

from typing import Any

import torch
from job import Job, JobSpec
from reference_optimizer import StoredFormats
from registry import Context, Phase, scenario
from scenarios_training import LAYOUTS

ITERATIONS = 8
_ABOVE = "gradient norm above the threshold"
# Norms are between 1.3 and 2.1, with twice the tokens below 1.8: some iterations are above it and
# some below.
_THRESHOLDS = {Phase.TWO_RANKS: 1.54, Phase.ONE_RANK: 1.86}
SKIPS = {
    _ABOVE: JobSpec(layout=LAYOUTS["all overlapped"]),
    "overflow in fp16": JobSpec(
        stored_formats=StoredFormats(),
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


def _skips(context: Context, name: str, optimizer: str) -> dict[str, Any]:
    spec = SKIPS[name]._replace(optimizer=optimizer)
    if name == _ABOVE:
        spec = spec._replace(config=(("grad_norm_skip_threshold", _THRESHOLDS[context.phase]),))
    job = Job(spec)
    log = []
    for _ in range(ITERATIONS):
        for child in job.children:
            prefetch = getattr(child, "reload_offloaded_states", None)
            if prefetch is not None:
                prefetch()
        log.append(job.step())
    return {"log": log, "scale": job.optimizer.get_loss_scale().item(), **job.snapshot()}


for _name in SKIPS:
    for _optimizer in ("ours", "reference"):
        scenario(
            skip_name(_name, _optimizer),
            lambda context, name=_name, optimizer=_optimizer: _skips(context, name, optimizer),
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
