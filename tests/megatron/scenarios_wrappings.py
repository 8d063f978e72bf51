"""Resumes, and weights that are loaded, under every wrapping of Megatron's optimizers and in every
format.
"""

from __future__ import annotations

import contextlib
import traceback
from typing import Any

import torch
from checkpoints import load, save
from job import te_branches
from registry import BOTH_WORLDS, Context, Phase, scenario
from scenarios_checkpoint import place
from small import COVERING, WRAPPINGS, SmallJob, Wrapping

BEFORE, AFTER = 2, 2


def is_large(wrapping: Wrapping, phase: Phase) -> bool:
    """The small form is those that cover all pairs on two ranks, and the others on one."""
    return (wrapping in COVERING) != (phase is Phase.TWO_RANKS)


def wrapping_name(wrapping: Wrapping) -> str:
    return f"wrapping {wrapping.name}"


def branches(wrapping: Wrapping) -> contextlib.AbstractContextManager[None]:
    return te_branches() if wrapping.place == "ours as FusedAdam" else contextlib.nullcontext()


def _resumed(context: Context, wrapping: Wrapping, kind: str) -> dict[str, Any]:
    """A run that saves and goes on, and another that starts elsewhere, loads, refreshes masters and
    does the same.
    """
    job, other = SmallJob(wrapping), SmallJob(wrapping, seed=2)
    job.train(BEFORE)
    directory = place(context, f"{wrapping_name(wrapping)} {kind}")
    save(job, directory, kind)
    saved = job.snapshot()
    load(other, directory, kind)
    loaded = other.snapshot()
    other.optimizer.reload_model_params()
    refreshed = other.snapshot()
    runs = [{"log": run.train(AFTER), **run.snapshot()} for run in (job, other)]
    return {"saved": saved, "loaded": loaded, "refreshed": refreshed, "went on": runs[0], "resumed": runs[1]}


def _take_weights(job: SmallJob, weights: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, param in job.model.module.named_parameters():
            param.copy_(weights[name])


def _reloaded(wrapping: Wrapping) -> dict[str, Any]:
    """Weights of another model, alone and with values for the masters, and a step that moves
    nothing.
    """
    results = {}
    for how in ("parameters", "state dict"):
        job, donor = SmallJob(wrapping), SmallJob(wrapping, seed=2)
        job.train(BEFORE)
        moments = [[inner.get_unscaled_state(p, "exp_avg").clone() for p in inner.state] for inner in job.inners]
        weights = donor.weights()
        values = {name: value.float() * (1 + 2**-12) for name, value in weights.items()}
        _take_weights(job, weights)
        if how == "parameters":
            job.optimizer.reload_model_params()
        elif wrapping.distributed:
            job.optimizer.reload_model_params(state_dict=dict(values))
        else:
            continue
        after = [[inner.get_unscaled_state(p, "exp_avg").clone() for p in inner.state] for inner in job.inners]
        for group in job.optimizer.param_groups:
            group.update(lr=0.0, weight_decay=0.0, max_lr=0.0, min_lr=0.0)
        job.forward_backward()
        job.optimizer.step()
        wanted = values if how == "state dict" else weights
        results[how] = {
            "weights": job.weights(),
            "wanted": {name: value.to(weights[name].dtype) for name, value in wanted.items()},
            "masters": [values["master"] for values in _masters(job)],
            "wanted masters": [wanted[values["name"]].reshape(-1)[values["slice"]] for values in _masters(job)],
            "moments": moments,
            "moments after": after,
        }
    return results


def _masters(job: SmallJob) -> list[dict[str, Any]]:
    """Masters of 16-bit parameters that Megatron keeps, with the places in the model that they
    stand for.
    """
    names = {id(param): name for name, param in job.model.module.named_parameters()}
    found = []
    for child in job.children:
        whole = not hasattr(child, "model_float16_groups")
        if whole and not hasattr(child, "float16_groups"):
            continue
        models = child.float16_groups if whole else child.model_float16_groups
        masters = child.fp32_from_float16_groups if whole else child.shard_fp32_from_float16_groups
        for model_group, group in zip(models, masters, strict=True):
            for param, master in zip(model_group, group, strict=True):
                if master is not None:
                    part = slice(None)
                    if not whole:
                        there = child._get_model_param_range_map(param)["param"]
                        part = slice(there.start, there.end)
                    found.append({"name": names[id(param)], "slice": part, "master": master.reshape(-1).clone()})
    return found


def _wrapping(context: Context, wrapping: Wrapping) -> dict[str, Any]:
    with branches(wrapping):
        resumes = {}
        for kind in wrapping.formats:
            try:
                resumes[kind] = _resumed(context, wrapping, kind)
            except KeyError as error:
                raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
                if (wrapping.dtype, kind) != ("mixed", "torch_dist") or "/megatron/core/" not in raised_in:
                    raise
                resumes[kind] = repr(error)
        return {"resumes": resumes, "reloaded": _reloaded(wrapping)}


for _case in WRAPPINGS:
    for _phase in BOTH_WORLDS:
        scenario(
            wrapping_name(_case),
            lambda context, case=_case: _wrapping(context, case),
            (_phase,),
            large=is_large(_case, _phase),
        )
