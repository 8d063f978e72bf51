"""Runs a plan on parameters that live on the CPU: the same chunks, updated in place by the reference."""

from __future__ import annotations

from fused_offload.kernels.formats import rounding_counter
from fused_offload.params.dense import flat
from fused_offload.plan.chunks import Chunk
from fused_offload.plan.planner import ChunkKind, StepPlan

from .step_inputs import StepInputs


def run_chunk(chunk: Chunk, plan: StepPlan, inputs: StepInputs) -> None:
    """Updates the parameters and the state of one chunk.

    Args:
        chunk: chunk of the plan.
        plan: the step's plan.
        inputs: the step's inputs; its parameters are updated in place.
    """
    kind = chunk.kind
    assert isinstance(kind, ChunkKind)
    rule, updates = inputs.rule, inputs.updates
    state = rule.bind(kind.extent.stored, kind.initial)
    for piece in chunk.pieces:
        part = slice(piece.offset, piece.offset + piece.numel)
        rule.phases[kind.phase].reference(
            flat(updates.params[piece.segment])[part],
            flat(updates.grads[piece.segment])[part],
            state.narrow(plan.starts[piece.segment] + piece.offset, piece.numel),
            inputs.values[kind.group],
            grad_scale=inputs.scaler.grad_scale_on_host(),
            counter=rounding_counter(updates.positions[piece.segment], piece.offset),
        )
