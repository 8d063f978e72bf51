"""Weights that are loaded into a model whose optimizer exists already."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
from checkpoints import load, save
from job import Job, JobSpec
from reference_optimizer import ReferenceAdam
from registry import Context, NotInReleaseError, Phase, scenario
from scenarios_checkpoint import place
from scenarios_training import LAYOUTS, STORED_FORMATS
from walkers import REFRESHES, bridge_syncs_masters, masters_are_refreshed_twice, megatron_reloads_masters

from fused_offload.kernels.formats import join_remainder

RELOADED_FORMATS = ("fp32", "remainders")
_TWO = (Phase.TWO_RANKS,)


def _job(optimizer: str, stored_formats: str, seed: int) -> Job:
    return Job(
        JobSpec(optimizer, STORED_FORMATS[stored_formats], LAYOUTS["dense and experts"], fraction=0.5, seed=seed)
    )


def _take_weights(job: Job, weights: dict[str, torch.Tensor]) -> None:
    job.weights()  # no gather may be in flight that would bring the old ones back
    with torch.no_grad():
        for name, param in job.model.module.named_parameters():
            param.copy_(weights[name])


def _nothing(job: Job) -> None: ...


# -- before the first step -------------------------------------------------------------------------

EARLY: tuple[Callable[[Job], None], ...] = (_nothing, *REFRESHES)


def early_name(how: Callable[[Job], None] | None, stored_formats: str) -> str:
    moment = how.__name__.strip("_") if how else "there from the start"
    return f"weights before the first step, {moment} ({stored_formats})"


def _loaded_early(how: Callable[[Job], None], stored_formats: str) -> dict[str, Any]:
    job, donor = _job("ours", stored_formats, 1), _job("stock", stored_formats, 2)
    for inner in job.inners:
        # Memory for state exists, as after a load of a checkpoint without optimizer.
        inner.dummy_step()
    _take_weights(job, donor.weights())
    how(job)
    return {"log": job.train(3), **job.snapshot()}


def _there_from_the_start(stored_formats: str) -> dict[str, Any]:
    job = _job("reference", stored_formats, 2)
    return {"log": job.train(3), **job.snapshot()}


for _formats in RELOADED_FORMATS:
    scenario(
        early_name(None, _formats), lambda context, stored_formats=_formats: _there_from_the_start(stored_formats), _TWO
    )
    for _how in EARLY:
        scenario(
            early_name(_how, _formats),
            lambda context, how=_how, stored_formats=_formats: _loaded_early(how, stored_formats),
            _TWO,
        )


# -- later -----------------------------------------------------------------------------------------


def late_name(how: Callable[[Job], None] | None, stored_formats: str) -> str:
    return f"weights after three steps, {how.__name__ if how else 'reference'} ({stored_formats})"


def _loaded_late(how: Callable[[Job], None] | None, stored_formats: str) -> dict[str, Any]:
    """The reference's masters are made to fit the weights by hand."""
    job, donor = _job("ours" if how else "reference", stored_formats, 1), _job("stock", stored_formats, 2)
    job.train(3)
    _take_weights(job, donor.weights())
    before = job.snapshot()
    if how is not None:
        how(job)
    else:
        _fit_masters(job)
    return {"before": before, "after": job.snapshot(), "log": job.train(3), "end": job.snapshot()}


def _fit_masters(job: Job) -> None:
    """A master becomes the parameter where that is not its rounding. A remainder stays unless it
    turns the parameter into NaN, as a negative one does to zero.
    """
    for shard in job.shards():
        assert isinstance(shard.inner, ReferenceAdam)
        master = shard.inner.state[shard.param]["master_param"]
        if master.dtype == torch.int16:
            master[join_remainder(shard.param, master).isnan()] = 0
        else:
            master.copy_(torch.where(master.to(shard.param.dtype) == shard.param, master, shard.param.float()))


for _formats in RELOADED_FORMATS:
    for _late in (None, *REFRESHES):
        scenario(
            late_name(_late, _formats),
            lambda context, how=_late, stored_formats=_formats: _loaded_late(how, stored_formats),
            _TWO,
        )


# -- after a real resume ---------------------------------------------------------------------------


def _resumed(context: Context, stored_formats: str) -> dict[str, Any]:
    """Megatron-Bridge refreshes masters after every load."""
    job, other = _job("ours", stored_formats, 1), _job("ours", stored_formats, 2)
    job.train(3)
    directory = place(context, f"refreshed ({stored_formats})")
    save(job, directory, "dp_reshardable")
    load(other, directory, "dp_reshardable")
    for refresh in (megatron_reloads_masters, masters_are_refreshed_twice, bridge_syncs_masters):
        refresh(other)
    return {"saved": job.snapshot(), "refreshed": other.snapshot(), "log": job.train(2), "resumed log": other.train(2)}


RESUMED_FORMATS = tuple(STORED_FORMATS)
for _formats in RESUMED_FORMATS:
    scenario(
        f"refreshed after a resume ({_formats})",
        lambda context, stored_formats=_formats: _resumed(context, stored_formats),
        _TWO,
    )


# -- fp32 values for the masters -------------------------------------------------------------------


def main_params_name(stored_formats: str, iterations: int) -> str:
    return f"masters out of a state dict after {iterations} iterations ({stored_formats})"


def _main_params(stored_formats: str, iterations: int) -> dict[str, Any]:
    """As with Megatron's --load-main-params-from-ckpt: bf16 weights in the model, fp32 ones in the
    state dict.
    """
    job = _job("ours", stored_formats, 1)
    job.train(iterations)
    generator = torch.Generator().manual_seed(7)
    values = {
        name: value.float() * (1 + 2**-10 * torch.rand(value.shape, generator=generator))
        for name, value in _job("stock", stored_formats, 2).weights().items()
    }
    _take_weights(job, {name: value.to(torch.bfloat16) for name, value in values.items()})
    before = job.snapshot()
    if None in job.optimizer._split_state_dict(dict(values)):
        raise NotInReleaseError(
            f"megatron-core {version('megatron-core')} gives a state dict to the first optimizer of a chain alone"
        )
    job.optimizer.reload_model_params(state_dict=dict(values))
    masters = {shard.name: values[shard.name].reshape(-1)[shard.start : shard.stop].clone() for shard in job.shards()}
    after = job.snapshot()
    return {"before": before, "after": after, "masters": masters, "log": job.train(2), "end": job.snapshot()}


for _formats in RELOADED_FORMATS:
    for _iterations in (0, 2):
        scenario(
            main_params_name(_formats, _iterations),
            lambda context, stored_formats=_formats, iterations=_iterations: _main_params(stored_formats, iterations),
            _TWO,
        )
