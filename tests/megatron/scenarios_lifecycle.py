"""Training while frameworks move, replace or reset the optimizer's tensors."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any

import torch
from job import SEVERAL_BUCKETS, Job, JobSpec, Layout, build_model, build_optimizer, replaced
from registry import Context, Phase, scenario
from scenarios_training import LAYOUTS, SMALL_CHUNK, STORED_FORMATS
from walkers import BEFORE_STATE, HARMLESS, slime_resets_state

WALKED_FORMATS = ("fp32", "remainders, bf16 moments")
_LAYOUTS = {
    "fp32": Layout(overlap_grad_reduce=True, bucket_size=SEVERAL_BUCKETS, experts=4),
    "remainders, bf16 moments": Layout(overlap_grad_reduce=True, bucket_size=SEVERAL_BUCKETS),
}
_TWO = (Phase.TWO_RANKS,)


def _spec(stored_formats: str, optimizer: str = "ours") -> JobSpec:
    return JobSpec(
        optimizer, STORED_FORMATS[stored_formats], _LAYOUTS[stored_formats], fraction=0.5, chunk_bytes=SMALL_CHUNK
    )


def _walk(spec: JobSpec, walk: Callable[[Job], None]) -> dict[str, Any]:
    """Two visits when state exists, and one before where the walker does not look at state."""
    job = Job(spec)
    if walk in BEFORE_STATE:
        walk(job)
    log = job.train(2)
    for iterations in (1, 2):
        walk(job)
        log += job.train(iterations)
    return {"log": log, **job.snapshot()}


def walk_name(walk: Callable[[Job], None] | None, stored_formats: str) -> str:
    return f"between iterations, {walk.__name__ if walk else 'nothing happens'} ({stored_formats})"


for _formats in WALKED_FORMATS:
    scenario(
        walk_name(None, _formats),
        lambda context, stored_formats=_formats: _walk(_spec(stored_formats), lambda job: None),
        _TWO,
    )
    for _walker in HARMLESS:
        scenario(
            walk_name(_walker, _formats),
            lambda context, stored_formats=_formats, walker=_walker: _walk(_spec(stored_formats), walker),
            _TWO,
        )
    for _optimizer in ("ours", "reference"):
        scenario(
            f"{_optimizer}, slime resets state ({_formats})",
            lambda context, stored_formats=_formats, optimizer=_optimizer: _walk(
                _spec(stored_formats, optimizer), slime_resets_state
            ),
            _TWO,
        )


# -- a copy of all state, put back in place --------------------------------------------------------


def _put_back(context: Context, stored_formats: str) -> dict[str, Any]:
    """As SkyRL's store of adapters does: copies now, ``copy_`` into the live tensors later."""
    job = Job(_spec(stored_formats))
    job.train(2)
    weights = job.weights()
    states = [
        {key: value.clone() for key, value in state.items()} for inner in job.inners for state in inner.state.values()
    ]
    steps, schedule, iteration = job.steps(), job.scheduler.state_dict(), job.iteration
    job.train(3)
    with torch.no_grad():
        for name, param in job.model.module.named_parameters():
            param.copy_(weights[name])
        live = [state for inner in job.inners for state in inner.state.values()]
        for state, copies in zip(live, states, strict=True):
            for key, value in copies.items():
                state[key].copy_(value)
    for group, step in zip((g for inner in job.inners for g in inner.param_groups), steps, strict=True):
        group["step"] = step
    job.scheduler.num_steps = 0  # loading adds to it
    job.scheduler.load_state_dict(schedule)
    job.iteration = iteration
    return {"log": job.train(3), **job.snapshot()}


for _formats in WALKED_FORMATS:
    scenario(
        f"state is put back ({_formats})",
        lambda context, stored_formats=_formats: _put_back(context, stored_formats),
        _TWO,
    )


# -- lifecycle calls -------------------------------------------------------------------------------

NAMES = ("offload_states", "release_offloaded_gpu_states", "reload_offloaded_states")
DEVELOPMENT_NAMES = (
    "offload_optimizer_state_for_forward",
    "prefetch_optimizer_state_for_gradient_finalization",
    "prefetch_optimizer_state_for_step",
    "synchronize_optimizer_state_for_checkpoint",
)
LIFECYCLES = {
    "dense and experts": LAYOUTS["dense and experts"],
    "experts alone": LAYOUTS["experts alone"],
    "empty rank": LAYOUTS["empty rank"],
}


def _call(job: Job, name: str) -> None:
    for child in job.children:
        assert getattr(child, name)() is None
        assert child.optimizer_state_offload_requires_pre_forward_param_sync() is False


def _lifecycle(layout: Layout, *, called: bool) -> dict[str, Any]:
    """Every iteration another order, each call twice; Megatron's rerun machine may repeat forward
    and backward.
    """
    job = Job(JobSpec(layout=layout, fraction=0.5))
    log = []
    for order in itertools.permutations(NAMES):
        if called:
            for name in order:
                _call(job, name)
                _call(job, name)
            for name in DEVELOPMENT_NAMES:
                _call(job, name)
            job.forward_backward()
            for name in reversed(order):
                _call(job, name)
        log.append(job.step())
    return {"log": log, **job.snapshot()}


for _name, _layout in LIFECYCLES.items():
    for _called in (True, False):
        scenario(
            f"lifecycle {'called' if _called else 'left alone'}, {_name}",
            lambda context, layout=_layout, called=_called: _lifecycle(layout, called=called),
            _TWO,
        )


def _names_of_hybrid(context: Context) -> dict[str, Any]:
    """Attributes that frameworks know from HybridDeviceOptimizer, before and after state exists."""
    job = Job(_spec("fp32"))
    weights = job.weights()
    for inner in job.inners:
        inner.dummy_step()
    allocated = [[sorted(state) for state in inner.state.values()] for inner in job.inners]
    untouched = {"weights": job.weights(), "steps": job.steps()}
    log = job.train(2)
    before = job.snapshot()
    for inner in job.inners:
        inner.dummy_step()
        inner.move_new_state_to_right_device()
        inner._sync_hdo_state_to_sub_optimizers()
    emptied: list[int] = []
    with replaced((torch.cuda, "empty_cache", lambda: emptied.append(1))):
        job.optimizer.offload_to_cpu()
    return {
        "caches emptied": len(emptied),
        "lists": [(i.sub_optimizers, i.inner_param_to_orig_param, i.gpu_params_map_cpu_copy) for i in job.inners],
        "defaults": [dict(inner.defaults) for inner in job.inners],
        "allocated": allocated,
        "weights": weights,
        "untouched": untouched,
        "before": before,
        "after": job.snapshot(),
        "log": log + job.train(3),
        "end": job.snapshot(),
    }


scenario("names of HybridDeviceOptimizer", _names_of_hybrid, _TWO)


def _built_anew(context: Context) -> list[list[int]]:
    """Number of wrappers around the model's methods, after each of three optimizers in turn."""
    spec = JobSpec(layout=LAYOUTS["all overlapped"], window_bytes=60000)
    model = build_model(spec)
    depths = []
    for _ in range(3):
        optimizer = build_optimizer(spec, model)
        methods = [model.finish_grad_sync, *(group.start_grad_sync for group in model.bucket_groups)]
        depths.append([_depth(method) for method in methods])
        del optimizer
        gc.collect()
    return depths


def _depth(method: Any) -> int:
    return 1 + _depth(method.__wrapped__) if hasattr(method, "__wrapped__") else 0


scenario("optimizers take turns", _built_anew, _TWO)
