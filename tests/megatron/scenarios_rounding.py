"""Stochastic rounding of bfloat16 moments, switched on at the installation."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from job import Job, JobSpec, build_model, optimizer_config, te_branches
from reference_optimizer import StoredFormats
from registry import Context, Phase, scenario

import fused_offload.megatron as fom
from fused_offload.megatron.options import ROUNDING_VARIABLE

ASKED = ((None, None), (True, None), (None, "1"), (False, "1"), (None, "0"))
"""Argument of `install` and value of the variable."""
_FORMATS = StoredFormats(torch.bfloat16, remainders=True)


@contextlib.contextmanager
def _variable(value: str | None) -> Iterator[None]:
    if value is not None:
        os.environ[ROUNDING_VARIABLE] = value
    try:
        yield
    finally:
        os.environ.pop(ROUNDING_VARIABLE, None)


def _built(place: str) -> dict[str, str]:
    """Stored formats of what Megatron builds now."""
    from megatron.core.optimizer import get_megatron_optimizer

    spec = JobSpec(place, _FORMATS)
    optimizer = get_megatron_optimizer(optimizer_config(spec), [build_model(spec)])
    return optimizer.chained_optimizers[0].optimizer.planned_formats()


def _formats(context: Context) -> dict[Any, Any]:
    """Stored formats by place and by what was asked for; also after a context within has ended."""
    results: dict[Any, Any] = {}
    for place in ("ours", "ours as FusedAdam"):
        with te_branches() if place == "ours as FusedAdam" else contextlib.nullcontext():
            for argument, variable in ASKED:
                with _variable(variable), fom.installed(numerics="ieee", stochastic_rounding=argument):
                    results[place, argument, variable] = _built(place)
    with fom.installed(stochastic_rounding=True):
        with fom.installed():
            results["within"] = _built("ours")
        results["again"] = _built("ours")
    return results


def _refused(context: Context) -> list[str]:
    messages = []
    for argument, variable in ((1, None), (None, "yes")):
        try:
            with _variable(variable):
                fom.install(stochastic_rounding=argument)  # type: ignore[arg-type] - what the test is about
        except (TypeError, ValueError) as error:
            messages.append(f"{type(error).__name__}: {error}")
    return [*messages, str(fom.is_installed())]


def _train(context: Context) -> dict[str, Any]:
    results = {}
    for name, variable, fraction in (("offloaded", "1", 1.0), ("resident", "1", 0.0), ("to the nearest", "0", 1.0)):
        with _variable(variable):  # jobs install it themselves
            job = Job(JobSpec("ours", _FORMATS, fraction=fraction, chunk_bytes=8000))
        results[name] = {"log": job.train(4), **job.snapshot()}
    return results


scenario("stochastic rounding, formats", _formats, (Phase.ONE_RANK,))
scenario("stochastic rounding, refused", _refused, (Phase.ONE_RANK,))
scenario("stochastic rounding, training", _train, (Phase.TWO_RANKS,))
