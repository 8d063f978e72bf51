"""Runs a plan on parameters that live on the CPU: the same chunks, updated in place by the reference."""

from __future__ import annotations

from collections.abc import Mapping

from .kernels.forms import rounding_counter
from .kernels.reference import AdamScalars, adam_step_
from .plan import Chunk
from .planner import ChunkKind, StepPlan
from .tensors import flat
from .updates import Updates


def run_chunk(
    chunk: Chunk, plan: StepPlan, updates: Updates, scalars: Mapping[int, AdamScalars], grad_scale: float | None
) -> None:
    """Updates the parameters and the state of one chunk.

    Args:
        chunk: chunk of the plan.
        plan: the step's plan.
        updates: the step's parameters, updated in place, and gradients.
        scalars: hyperparameters of each group.
        grad_scale: gradients are divided by it first.
    """
    kind = chunk.kind
    assert isinstance(kind, ChunkKind)
    state = kind.extent.state(init_moments=kind.init_moments, init_master=kind.init_master)
    for piece in chunk.pieces:
        part = slice(piece.offset, piece.offset + piece.numel)
        adam_step_(
            flat(updates.params[piece.segment])[part],
            flat(updates.grads[piece.segment])[part],
            state.narrow(plan.starts[piece.segment] + piece.offset, piece.numel),
            scalars[kind.group],
            grad_scale=grad_scale,
            counter=rounding_counter(updates.positions[piece.segment], piece.offset),
        )
