"""Operations on whole parameters between the chunks of two phases."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from fused_offload.plan.operations import Operation, WorkMemory

from .step_inputs import StepInputs

Parts = Sequence[Callable[[], Any]]
"""Calls that enqueue an operation."""

PartsOf = Callable[[Operation], Parts]


def order_of_work(chunks: int, operations: Sequence[Operation], parts_of: PartsOf) -> Iterator[int | Callable[[], Any]]:
    """Indices of all chunks in order, and between them calls that run the operations.

    Chunks that go beside an operation are spread evenly over its parts. Without operations the
    result is the indices alone.

    Args:
        chunks: number of chunks.
        operations: operations between the chunks.
        parts_of: returns the parts of an operation; called when the first of them is due.
    """
    done = 0
    for operation in operations:
        yield from range(done, operation.position)
        run_next = partial(next, _slices(operation, parts_of))
        done = operation.position + operation.beside
        for index in range(operation.position, done):
            yield run_next
            yield index
        yield run_next
    yield from range(done, chunks)


def _slices(operation: Operation, parts_of: PartsOf) -> Iterator[None]:
    """Runs a slice of an operation's parts at each `next`; one more than chunks go beside it."""
    parts, slices = parts_of(operation), operation.beside + 1
    for number in range(slices):
        for part in parts[number * len(parts) // slices : (number + 1) * len(parts) // slices]:
            part()
        yield


def array_of(operation: Operation, memory: torch.Tensor, inputs: StepInputs) -> torch.Tensor:
    """A parameter's array in the work memory, ``[numel]``."""
    whole, param = inputs.rule.phases[0].then, inputs.updates.params[operation.segment]
    assert whole is not None
    nbytes = param.numel() * whole.dtype.itemsize
    return memory[operation.offset : operation.offset + nbytes].view(whole.dtype)


def parts_of(operation: Operation, work: WorkMemory, memory: torch.Tensor, inputs: StepInputs) -> Parts:
    """The calls that enqueue one operation on the current stream.

    Args:
        operation: the operation.
        work: size and scratch of the work memory.
        memory: the work memory, uint8.
        inputs: the step's inputs.
    """
    whole, param = inputs.rule.phases[0].then, inputs.updates.params[operation.segment]
    assert whole is not None
    array = array_of(operation, memory, inputs).as_strided(param.shape, param.stride())
    values = inputs.values[inputs.updates.groups[operation.segment]]
    return whole.parts(param, array, memory[work.scratch : work.nbytes], values)


def scalars_of(operations: Sequence[Operation], inputs: StepInputs) -> tuple[float, ...]:
    """This step's scalar of each operation's parameter."""
    updates, whole = inputs.updates, inputs.rule.phases[0].then
    assert whole is not None
    return tuple(
        whole.scalar(updates.params[one.segment], inputs.values[updates.groups[one.segment]]) for one in operations
    )
