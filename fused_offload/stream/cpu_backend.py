"""The CPU backend: runs the chunks of a plan on CPU parameters, with the rule's reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from fused_offload.kernels.formats import rounding_counter
from fused_offload.params.dense import flat
from fused_offload.plan.chunks import Chunk
from fused_offload.plan.planner import StepPlan, kind_of

from .operations import array_of, order_of_work, parts_of, scalars_of, stand_in_for_params
from .step_inputs import StepInputs

_CPU = torch.device("cpu")


def work_on_cpu(plan: StepPlan, inputs: StepInputs, memory: torch.Tensor) -> Iterator[Callable[[], Any]]:
    """The calls that make up a step on the CPU, in order.

    Args:
        plan: the step's plan.
        inputs: the step's inputs on the CPU; its parameters are updated in place.
        memory: work memory of the operations, uint8.
    """
    chunks, operations = plan.chunks_on[_CPU], plan.operations.get(_CPU, [])
    params: dict[int, torch.Tensor] = {}
    beside: dict[int, dict[str, Any]] = {}
    if operations:
        work = plan.work[_CPU]
        for operation, scalar in zip(operations, scalars_of(operations, inputs), strict=True):
            array = array_of(operation, memory, inputs)
            if stand_in_for_params(inputs.rule):
                params[operation.segment] = array
            else:
                beside[operation.segment] = {"array": array, "scalar": float(np.float32(scalar))}
    for item in order_of_work(len(chunks), operations, lambda one: parts_of(one, work, memory, inputs)):
        yield partial(run_chunk, chunks[item], plan, inputs, params, beside) if isinstance(item, int) else item


def run_chunk(
    chunk: Chunk,
    plan: StepPlan,
    inputs: StepInputs,
    params: dict[int, torch.Tensor],
    beside: dict[int, dict[str, Any]],
) -> None:
    """Updates the parameters and the state of one chunk.

    Args:
        chunk: chunk of the plan.
        plan: the step's plan.
        inputs: the step's inputs.
        params: ``[numel]`` arrays in the place of quantised parameters, by segment.
        beside: array and scalar of each segment that has an operation between two phases.
    """
    kind = kind_of(chunk)
    rule, updates = inputs.rule, inputs.updates
    phase = rule.phases[kind.phase]
    state = rule.bind(phase.of(kind.extent.stored), kind.initial)
    for piece in chunk.pieces:
        part = slice(piece.offset, piece.offset + piece.numel)
        more = beside.get(piece.segment, {})
        if more:
            more = {**more, "array": more["array"][part]}
        phase.reference(
            flat(params.get(piece.segment, updates.params[piece.segment]))[part],
            flat(updates.grads[piece.segment])[part],
            state.narrow(plan.starts[piece.segment] + piece.offset, piece.numel),
            inputs.values[kind.group],
            grad_scale=inputs.scaler.grad_scale_on_host(),
            counter=rounding_counter(updates.positions[piece.segment], piece.offset),
            **more,
        )
