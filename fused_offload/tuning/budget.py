"""Memory of training a model, by the optimizer's own layouts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from fused_offload.kernels.muon import newton_schulz
from fused_offload.memory.staging_ring import RingNeed
from fused_offload.model_hooks.backward_step import PART_BYTES
from fused_offload.plan.transfer_settings import streaming_of
from fused_offload.profiles.units import MOST_PARAMS
from fused_offload.rules.adam import AdamRule
from fused_offload.rules.muon import MuonRule
from fused_offload.state.layout import GRAD, PARAM, Layout, align, chunk_numel, extent_place, slot_bytes

from .recipes import RECIPES
from .training import PARAM_DTYPES, Training

_WORK_ALIGNMENT = 512  # bytes, as in torch's allocator


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank, and of one node.

    Attributes:
        params: parameters, on the GPU.
        grads: gradients, on the GPU.
        resident_state: state that is not offloaded, on the GPU.
        ring: staging ring, on the GPU.
        work: memory of operations on whole parameters, on the GPU: Muon's, or of a step for exact
            values of quantised ones.
        window: additional GPU memory of the window; 0 for ``"auto"``.
        other: GPU memory that the caller counts for other purposes.
        host_state: offloaded state of a rank, in host memory.
        hidden: largest part of ``host_state`` that may move under forward and backward passes.
        ranks_per_node: number of ranks of a node.
        host_params: parameters and gradients of a rank that are in host memory.
    """

    params: int
    grads: int
    resident_state: int
    ring: int
    work: int
    window: int
    other: int
    host_state: int
    hidden: int
    ranks_per_node: int
    host_params: int = 0

    @property
    def gpu(self) -> int:
        """Sum of all GPU memory."""
        return self.params + self.grads + self.resident_state + self.ring + self.work + self.window + self.other

    @property
    def host_in_save(self) -> int:
        """Host bytes of a rank during an asynchronous save, which copies all state, on host and GPU."""
        return 2 * self.host_state + self.resident_state + self.host_params

    @property
    def node(self) -> int:
        """Host bytes of a node."""
        return (self.host_state + self.host_params) * self.ranks_per_node

    @property
    def node_in_save(self) -> int:
        """Host bytes of a node during an asynchronous save."""
        return self.host_in_save * self.ranks_per_node


class Fits(NamedTuple):
    """Result of a comparison with the given limits; None for a limit that is not given.

    Attributes:
        gpu: True if a GPU's memory suffices.
        host: True if a host's memory suffices.
        host_in_save: True if a host's memory suffices during an asynchronous save, too.
    """

    gpu: bool | None
    host: bool | None
    host_in_save: bool | None


def fits_into(memory: Memory, *, gpu_bytes: int | None, node_bytes: int | None) -> Fits:
    """Compares the memory of a model with the limits.

    Args:
        memory: memory that the model takes.
        gpu_bytes: memory of a GPU, or None for no limit.
        node_bytes: memory of a host, or None for no limit.
    """
    return Fits(
        None if gpu_bytes is None else memory.gpu <= gpu_bytes,
        None if node_bytes is None else memory.node <= node_bytes,
        None if node_bytes is None else memory.node_in_save <= node_bytes,
    )


def memory_of(param_numel: int, training: Training) -> Memory:
    """Computes the memory of a model.

    State is counted as one extent, of which exactly the offloaded share is on the host. The
    optimizer pads each parameter to 128 elements and offloads whole parameters, so the real numbers
    differ by about one parameter.

    Args:
        param_numel: parameters of the whole model.
        training: settings of the training run.

    Raises:
        ValueError: for remainders of parameters that have none.
    """
    layout, offload = training.layout(), training.offload
    rank_numel = -(-param_numel // training.model_parallel)
    shard_numel = -(-rank_numel // training.state_parallel)
    held_numel = shard_numel if training.shard_params else rank_numel
    fraction = 1.0 if training.params_on_host else offload.fraction
    offloaded = align(min(shard_numel, round(shard_numel * fraction)))
    host = _extent_bytes(layout, offloaded)
    grad_dtype = PARAM_DTYPES[training.grad_dtype]
    param_bytes = layout.param_dtype.itemsize if training.quantised is None else RECIPES[training.quantised].param_bytes
    params, grads = math.ceil(held_numel * param_bytes), held_numel * grad_dtype.itemsize
    host_params = params + grads if training.params_on_host else 0
    if training.params_on_host:
        params = grads = 0
    # "auto" uses the memory of freed activations, which are part of `other_gpu_bytes`.
    if isinstance(offload.window_bytes, str):
        window, hidden = 0, min(training.other_gpu_bytes, host)
    else:
        window = hidden = min(offload.window_bytes, host)
    return Memory(
        params=params,
        grads=min(PART_BYTES, grads) if training.in_backward else grads,
        resident_state=_extent_bytes(layout, align(max(0, shard_numel - offloaded))),
        ring=_ring_bytes(layout, offloaded, training),
        work=_work_bytes(layout, shard_numel, training),
        window=window,
        other=training.other_gpu_bytes,
        host_state=host,
        hidden=host if training.in_backward else hidden,
        ranks_per_node=training.ranks_per_node,
        host_params=host_params,
    )


def _extent_bytes(layout: Layout, numel: int) -> int:
    """Bytes of an extent, with the gaps behind its arrays."""
    return extent_place(layout, numel).nbytes if numel else 0


def _ring_bytes(layout: Layout, numel: int, training: Training) -> int:
    if not numel:
        return 0
    # No profile is read for the CPU: callers have replaced "auto" by this machine's profile.
    chunk_bytes, depth, programs = streaming_of(training.offload, torch.device("cpu"), layout.state_bytes(numel))
    if programs is not None and training.largest_matrix is None:
        return 0
    phases = (AdamRule if training.largest_matrix is None else MuonRule).phases
    in_slot = layout.in_slot(PARAM_DTYPES[training.grad_dtype])
    moved = [in_slot.only(phase.keys | {PARAM, GRAD}) for phase in phases]
    largest = max(slot_bytes(part, numel, chunk_bytes) for part in moved if part.keys)
    return depth * RingNeed(depth, largest).aligned_slot_bytes


def _work_bytes(layout: Layout, numel: int, training: Training) -> int:
    """Bytes of operations on whole parameters.

    Under Muon those of the arrays of two matrices, or of small ones that fill two chunks, and of
    one operation's scratch. Of quantised parameters those of their exact values.
    """
    if training.largest_quantised is not None:
        return _exact_bytes(layout, numel, training)
    if training.largest_matrix is None:
        return 0
    matrix = torch.empty(training.largest_matrix, device="meta")
    chunk_bytes = streaming_of(training.offload, torch.device("cpu"), layout.state_bytes(numel)).chunk_bytes
    most = chunk_numel(chunk_bytes, max(layout.only(phase.keys).alignment_bytes for phase in MuonRule.phases))
    together = max(1, min(most, numel) // matrix.numel()) * matrix.numel()
    return 4 * together + newton_schulz.scratch_bytes(matrix)


def _exact_bytes(layout: Layout, numel: int, training: Training) -> int:
    """Bytes of the exact values that a step quantises: of the largest parameter, or of a chunk of small ones.

    In Megatron also those of all values of the rank, rounded to the dtype they stand for.
    """
    assert training.largest_quantised is not None
    largest = math.prod(training.largest_quantised)
    if training.shard_params:
        largest = -(-largest // training.data_parallel)
    chunk_bytes = streaming_of(training.offload, torch.device("cpu"), layout.state_bytes(numel)).chunk_bytes
    exact = 4 * min(numel, max(largest, chunk_numel(chunk_bytes, layout.alignment_bytes)))
    exact = -(-exact // _WORK_ALIGNMENT) * _WORK_ALIGNMENT
    return exact + (numel * layout.param_dtype.itemsize if training.fp8_param_gather else 0)


def largest_model(
    training_of: Callable[[int], Training], *, gpu_bytes: int | None, node_bytes: int | None, saving: bool
) -> int | None:
    """Number of parameters of the largest model that fits, or None without a limit.

    Args:
        training_of: returns the training settings for a number of parameters: one object for each
            range of numbers. The settings of a larger model may take less GPU memory.
        gpu_bytes: memory of a GPU, or None for no limit.
        node_bytes: memory of a host, or None for no limit.
        saving: True if an asynchronous save has to fit, too.
    """

    def fits(numel: int, training: Training) -> bool:
        found = fits_into(memory_of(numel, training), gpu_bytes=gpu_bytes, node_bytes=node_bytes)
        return False not in (found.gpu, found.host_in_save if saving else found.host)

    found, first = 0, 1
    while first <= MOST_PARAMS:
        training = training_of(first)
        end = _last(partial(_is_same, training_of, training), first)
        if fits(first, training):
            found = min(end, _last(partial(fits, training=training), first))
        first = end + 1
    return None if found == MOST_PARAMS else found


def _is_same(training_of: Callable[[int], Training], training: Training, numel: int) -> bool:
    return training_of(numel) is training


def _last(holds: Callable[[int], bool], low: int) -> int:
    """Largest number up to `MOST_PARAMS` that meets a condition, by bisection from ``low``."""
    high = MOST_PARAMS + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
