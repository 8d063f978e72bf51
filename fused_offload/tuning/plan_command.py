"""`fused-offload plan`: memory and step time of a model, as a table or as JSON."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from functools import partial
from typing import Any

from fused_offload.profiles import profile_files as profiles

from .advice import advice
from .budget import Memory, fits_into, largest_model, memory_of
from .plan_arguments import Request, request_of
from .plan_output import answer, notes_on, show
from .prediction import Prediction, TransferSettings, predict, streaming_by
from .training import Training


def plan(options: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    request = request_of(options)
    found = profiles.of_device(0) if request.link_gbps is None else None
    profile = None if found is None else found.profile
    transfers = TransferSettings(profile)
    training_of = partial(transfers.settle, request.training)
    numel, training = request.param_numel, training_of(request.param_numel)
    memory = memory_of(numel, training)
    settled = streaming_by(None, training, memory.host_state)
    prediction = predict(numel, training, memory, profile, request.link_gbps)
    report = _numbers(request, settled, memory, prediction, training_of)
    report["notes"] = [
        *notes_on(request.training, memory, prediction, found),
        *advice(numel, request.training, transfers.settle, **request.limits),
    ]
    report["answer"] = answer(report)
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        show(report, settled)
    return 0


def _numbers(
    request: Request,
    training: Training,
    memory: Memory,
    prediction: Prediction,
    training_of: Callable[[int], Training],
) -> dict[str, Any]:
    """Numbers of the report, by the names that they have in the JSON.

    Args:
        request: the model and the limits.
        training: training settings with the transfer settings that are planned for.
        memory: memory of the model.
        prediction: the predicted step.
        training_of: returns the training settings for a number of parameters.
    """
    on_gpu = ("params", "grads", "resident_state", "ring", "work", "window", "other")
    return {
        "param_numel": request.param_numel,
        "limits": request.limits,
        "training": dataclasses.asdict(training),
        "gpu_bytes": {**{name: getattr(memory, name) for name in on_gpu}, "total": memory.gpu},
        "host_bytes": {
            "rank": memory.host_state,
            "rank_params_and_grads": memory.host_params,
            "rank_in_save": memory.host_in_save,
            "node": memory.node,
            "node_in_save": memory.node_in_save,
        },
        "fits": fits_into(memory, **request.limits)._asdict(),
        "largest_param_numel": {
            "training": largest_model(training_of, saving=False, **request.limits),
            "with_save": largest_model(training_of, saving=True, **request.limits),
        },
        "predicted": {
            "alone_ms": prediction.time.alone_ms,
            "exposed_ms_at_least": prediction.time.added_ms,
            "hidden_bytes": memory.hidden,
            "link_gbps": prediction.link_gbps,
            "link_assumed": prediction.source == "assumption",
            "gpus_at_once": prediction.gpus,
            "source": prediction.source,
        },
    }
