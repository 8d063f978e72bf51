"""Operations on whole parameters, between the chunks of two phases or behind those of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from fused_offload.plan.operations import Operation, WorkMemory
from fused_offload.rules.base import UpdateRule, WholeOperation

from .step_inputs import StepInputs

Parts = Sequence[Callable[[], Any]]
"""Calls that enqueue an operation."""


def _quantise(param: Any, array: torch.Tensor, scratch: torch.Tensor, values: Any) -> Parts:
    return [partial(param.quantize_, array)]


QUANTISE = WholeOperation(torch.float32, lambda param: 0, _quantise, lambda shape, values: 0.0)
"""Makes a quantised parameter from its updated values, behind the only phase of a rule. The kernels
write those into an array in the parameter's place."""


def operation_of(rule: UpdateRule) -> WholeOperation:
    """The operation on whole parameters in the steps of a rule, if they have one."""
    return rule.phases[0].then or QUANTISE


def stand_in_for_params(rule: UpdateRule) -> bool:
    """True if the arrays of operations take the place of parameters in the launches."""
    return operation_of(rule) is QUANTISE


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
    dtype = operation_of(inputs.rule).dtype
    nbytes = inputs.updates.params[operation.segment].numel() * dtype.itemsize
    return memory[operation.offset : operation.offset + nbytes].view(dtype)


def parts_of(operation: Operation, work: WorkMemory, memory: torch.Tensor, inputs: StepInputs) -> Parts:
    """The calls that enqueue one operation on the current stream.

    Args:
        operation: the operation.
        work: size and scratch of the work memory.
        memory: the work memory, uint8.
        inputs: the step's inputs.
    """
    param = inputs.updates.params[operation.segment]
    array = array_of(operation, memory, inputs).as_strided(param.shape, param.stride())
    values = inputs.values[inputs.updates.groups[operation.segment]]
    return operation_of(inputs.rule).parts(param, array, memory[work.scratch : work.nbytes], values)


def scalars_of(operations: Sequence[Operation], inputs: StepInputs) -> tuple[float, ...]:
    """This step's scalar of each operation's parameter."""
    updates, scalar = inputs.updates, operation_of(inputs.rule).scalar
    keys = [(updates.groups[one.segment], updates.params[one.segment].shape) for one in operations]
    found = {(group, shape): scalar(shape, inputs.values[group]) for group, shape in dict.fromkeys(keys)}
    return tuple([found[key] for key in keys])


def step_memory(nbytes: int, device: torch.device) -> torch.Tensor:
    """Memory for the operations of one step, uint8 on the current stream.

    Raises:
        RuntimeError: if the GPU has too little memory.
    """
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as error:
        raise RuntimeError(
            f"A step needs {nbytes} bytes on {device} for the updated values of its largest quantised parameter, which "
            "are not free. Free GPU memory first."
        ) from error
