"""What training a model takes in memory and time: bytes by the optimizer's own layouts, time by a link's speed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch

from fused_offload.config import OffloadConfig
from fused_offload.kernels.formats import REMAINDER, Format
from fused_offload.memory.staging_ring import RingNeed
from fused_offload.model_hooks.backward_step import PART_BYTES
from fused_offload.plan.transfer_settings import streaming_of
from fused_offload.profiles.profile import Profile
from fused_offload.profiles.units import MOST_PARAMS
from fused_offload.rules.arguments import EXP_AVG_FORMATS, EXP_AVG_SQ_FORMATS, MASTER_FORMATS
from fused_offload.rules.base import MASTER_PARAM
from fused_offload.state.layout import ALIGNMENT, Layout, align, extent_place, slot_bytes

from .cli_choices import DTYPES, MOMENT_DTYPES

PARAM_DTYPES = dict(zip(DTYPES, (torch.float32, torch.bfloat16, torch.float16), strict=True))
STORED_DTYPES = dict(zip(MOMENT_DTYPES, (*PARAM_DTYPES.values(), torch.uint8), strict=True))


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a model is trained.

    Dtypes are names of `PARAM_DTYPES`, those of moments of `STORED_DTYPES`.

    Attributes:
        param_dtype: dtype of the parameters.
        grad_dtype: dtype of the gradients.
        master: one of `MASTERS`.
        exp_avg: stored dtype of the first moment.
        exp_avg_sq: stored dtype of the second moment.
        data_parallel: ranks that share the optimizer's state.
        model_parallel: ranks that share the parameters (tensor times pipeline parallel size).
        shard_params: whether parameters and gradients are shared by the data-parallel ranks too
            (FSDP).
        offload: fraction, chunks and window; ``"auto"`` is what it is on a machine without a
            profile.
        ranks_per_node: ranks whose state lies in one host's memory.
        other_gpu_bytes: what else the GPU has to hold: activations, CUDA context. A window of
            ``"auto"`` lies within.
        in_backward: whether gradients are applied during the backward pass and freed
            (`step_in_backward`).
    """

    param_dtype: str = "bf16"
    grad_dtype: str = "bf16"
    master: str = "fp32"
    exp_avg: str = "fp32"
    exp_avg_sq: str = "fp32"
    data_parallel: int = 1
    model_parallel: int = 1
    shard_params: bool = False
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    ranks_per_node: int = 1
    other_gpu_bytes: int = 0
    in_backward: bool = False

    def __post_init__(self) -> None:
        if self.in_backward and self.offload.window_bytes != 0:
            raise ValueError("stepping in backward needs window_bytes=0: its copies run under the backward pass anyway")

    def layout(self) -> Layout:
        """The optimizer's layout of offloaded state.

        Raises:
            ValueError: for remainders of parameters that have none.
        """
        if self.master == "remainder" and self.param_dtype != "bf16":
            raise ValueError("a remainder needs bf16 parameters: it is the half of the master that they do not hold")
        formats: dict[str, Format] = {
            "exp_avg": EXP_AVG_FORMATS[STORED_DTYPES[self.exp_avg]],
            "exp_avg_sq": EXP_AVG_SQ_FORMATS[STORED_DTYPES[self.exp_avg_sq]],
        }
        if self.master == "remainder":
            formats[MASTER_PARAM] = REMAINDER
        elif self.master != "none":
            formats[MASTER_PARAM] = MASTER_FORMATS[PARAM_DTYPES[self.master]]
        return Layout(torch.device("cuda"), PARAM_DTYPES[self.param_dtype], tuple(formats.items()), resident=False)


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank, and of one node.

    Attributes:
        params: on the GPU.
        grads: on the GPU.
        resident_state: state that is not offloaded, on the GPU.
        ring: staging of the optimizer, on the GPU.
        window: what the window takes on the GPU beside everything else; one of ``"auto"`` takes
            nothing.
        other: what the caller reserved on the GPU.
        host_state: offloaded state of a rank, in host memory.
        hidden: of that, what may move under forward and backward passes, at most.
        ranks_per_node: ranks of a node.
    """

    params: int
    grads: int
    resident_state: int
    ring: int
    window: int
    other: int
    host_state: int
    hidden: int
    ranks_per_node: int

    @property
    def gpu(self) -> int:
        """All on the GPU."""
        return self.params + self.grads + self.resident_state + self.ring + self.window + self.other

    @property
    def state_in_save(self) -> int:
        """What an asynchronous save copies: all state, wherever it is."""
        return self.host_state + self.resident_state

    @property
    def host_in_save(self) -> int:
        """Host bytes of a rank while a checkpoint is written in the background from a copy of the state."""
        return self.host_state + self.state_in_save

    @property
    def node(self) -> int:
        """Host bytes of a node."""
        return self.host_state * self.ranks_per_node

    @property
    def node_in_save(self) -> int:
        """Host bytes of a node during an asynchronous save."""
        return self.host_in_save * self.ranks_per_node


class Fits(NamedTuple):
    """Whether a model fits; None where no limit is given.

    Attributes:
        gpu: into the memory of a GPU.
        host: into that of a host.
        host_in_save: into that of a host during an asynchronous save.
    """

    gpu: bool | None
    host: bool | None
    host_in_save: bool | None


def fits_into(memory: Memory, *, gpu_bytes: int | None, node_bytes: int | None) -> Fits:
    """Whether a model fits.

    Args:
        memory: what it takes.
        gpu_bytes: memory of a GPU, or None for no limit.
        node_bytes: memory of a host, or None for no limit.
    """
    return Fits(
        None if gpu_bytes is None else memory.gpu <= gpu_bytes,
        None if node_bytes is None else memory.node <= node_bytes,
        None if node_bytes is None else memory.node_in_save <= node_bytes,
    )


def memory_of(param_numel: int, training: Training) -> Memory:
    """Bytes that a model takes.

    State is counted as one extent, and the offloaded share to the element. The optimizer pads each
    parameter to 128 elements and offloads whole parameters, so a real one differs by about one
    parameter.

    Args:
        param_numel: parameters of the whole model.
        training: how it is trained.

    Raises:
        ValueError: for remainders of parameters that have none.
    """
    layout, offload = training.layout(), training.offload
    rank_numel = -(-param_numel // training.model_parallel)
    shard_numel = -(-rank_numel // training.data_parallel)
    held_numel = shard_numel if training.shard_params else rank_numel
    offloaded = align(min(shard_numel, round(shard_numel * offload.fraction)))
    host = _extent_bytes(layout, offloaded)
    grads = held_numel * PARAM_DTYPES[training.grad_dtype].itemsize
    # "auto" takes memory that activations gave back, and those are no more than what else is on the
    # GPU.
    if isinstance(offload.window_bytes, str):
        window, hidden = 0, min(training.other_gpu_bytes, host)
    else:
        window = hidden = min(offload.window_bytes, host)
    return Memory(
        params=held_numel * PARAM_DTYPES[training.param_dtype].itemsize,
        grads=min(PART_BYTES, grads) if training.in_backward else grads,
        resident_state=_extent_bytes(layout, align(max(0, shard_numel - offloaded))),
        ring=_ring_bytes(layout, offloaded, offload),
        window=window,
        other=training.other_gpu_bytes,
        host_state=host,
        hidden=host if training.in_backward else hidden,
        ranks_per_node=training.ranks_per_node,
    )


def _extent_bytes(layout: Layout, numel: int) -> int:
    """Bytes of an extent, which leaves a gap behind each array."""
    return extent_place(layout, numel).nbytes if numel else 0


def _ring_bytes(layout: Layout, numel: int, offload: OffloadConfig) -> int:
    if not numel:
        return 0
    # As on a machine without a profile: what "auto" means on this one is for the caller to say.
    chunk_bytes, depth, programs = streaming_of(offload, torch.device("cpu"), layout.state_bytes(numel))
    if programs is not None:
        return 0
    return depth * RingNeed(depth, slot_bytes(layout, numel, chunk_bytes)).aligned_slot_bytes


@dataclass(frozen=True)
class StepTime:
    """Predicted times of one optimizer step, in ms.

    Attributes:
        alone_ms: a step with nothing beside it: bytes each way over the link's speed.
        exposed_ms: what it adds to an iteration at least, if what may be hidden moves under
            backward and forward.
    """

    alone_ms: float
    exposed_ms: float


def step_time(memory: Memory, link_gbps: float) -> StepTime:
    """Predicts, from bytes and the link alone: kernels, launches and the slowdown of what runs beside are not counted.

    Args:
        memory: what is moved.
        link_gbps: GB/s each way with both directions busy.
    """
    exposed = memory.host_state - memory.hidden
    return StepTime(memory.host_state / link_gbps / 1e6, exposed / link_gbps / 1e6)


def profile_step_time(memory: Memory, training: Training, profile: Profile) -> StepTime:
    """Predicts from steps that were measured on this machine, alone.

    Args:
        memory: what is moved.
        training: how it is stored.
        profile: of the machine.
    """
    bytes_per_param = training.layout().block_bytes / ALIGNMENT

    def step_ms(nbytes: int) -> float:
        return profile.step_ms(nbytes, round(nbytes / bytes_per_param))

    return StepTime(step_ms(memory.host_state), step_ms(memory.host_state - memory.hidden))


def largest_model(
    training_of: Callable[[int], Training], *, gpu_bytes: int | None, node_bytes: int | None, saving: bool
) -> int | None:
    """Parameters of the largest model that fits, or None where nothing limits it.

    Args:
        training_of: how a model of so many parameters is trained. The same object within a range of
            numbers; what is chosen for a larger model may take less of the GPU.
        gpu_bytes: memory of a GPU, or None for no limit.
        node_bytes: memory of a host, or None for no limit.
        saving: whether an asynchronous save has to fit too.
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
    """The largest number up to `MOST_PARAMS` for which something holds that holds for all from ``low`` to it."""
    high = MOST_PARAMS + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
