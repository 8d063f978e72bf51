"""Memory and step time of training a model.

Bytes follow from the optimizer's own layouts, times from the speed of the link.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch

from fused_offload.config import OffloadConfig
from fused_offload.kernels.formats import REMAINDER, Format
from fused_offload.kernels.muon import newton_schulz
from fused_offload.memory.staging_ring import RingNeed
from fused_offload.model_hooks.backward_step import PART_BYTES
from fused_offload.plan.transfer_settings import streaming_of
from fused_offload.profiles.profile import Profile
from fused_offload.profiles.units import MOST_PARAMS
from fused_offload.rules.adam import EXP_AVG_SQ_FORMATS, AdamRule
from fused_offload.rules.arguments import EXP_AVG_FORMATS, MASTER_FORMATS
from fused_offload.rules.base import MASTER_PARAM
from fused_offload.rules.muon import MOMENTUM_FORMATS, MuonRule
from fused_offload.state.layout import ALIGNMENT, GRAD, PARAM, Layout, align, chunk_numel, extent_place, slot_bytes

from .cli_choices import DTYPES, MOMENT_DTYPES

PARAM_DTYPES = dict(zip(DTYPES, (torch.float32, torch.bfloat16, torch.float16), strict=True))
STORED_DTYPES = dict(zip(MOMENT_DTYPES, (*PARAM_DTYPES.values(), torch.uint8), strict=True))


@dataclass(frozen=True, kw_only=True)
class Training:
    """Settings of a training run.

    Dtypes are keys of `PARAM_DTYPES`, those of moments are keys of `STORED_DTYPES`.

    Attributes:
        param_dtype: dtype of the parameters.
        grad_dtype: dtype of the gradients.
        master: one of `MASTERS`.
        exp_avg: stored dtype of the first moment.
        exp_avg_sq: stored dtype of the second moment.
        data_parallel: data-parallel ranks; they share the optimizer's state, but for Muon's.
        model_parallel: ranks that share the parameters (tensor times pipeline parallel size).
        shard_params: True if data-parallel ranks share parameters and gradients, too (FSDP).
        offload: fraction, chunks and window; ``"auto"`` means the defaults without a profile.
        ranks_per_node: ranks whose state is in one host's memory.
        other_gpu_bytes: GPU memory for activations, CUDA context and others. A window of
            ``"auto"`` is part of it.
        in_backward: True if gradients are applied and freed during the backward pass
            (`step_in_backward`).
        largest_matrix: rows and columns of the largest matrix on a rank, if all parameters are
            matrices under Muon, whose momentum has the dtype ``exp_avg``. None for Adam.
        layer_wise: True if each data-parallel rank has Muon's state of some matrices only, as in
            Megatron's layer-wise optimizer.
        params_on_host: True if parameters and gradients are in host memory (FSDP2's
            ``CPUOffloadPolicy``), and their state with them.
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
    largest_matrix: tuple[int, int] | None = None
    layer_wise: bool = False
    params_on_host: bool = False

    def __post_init__(self) -> None:
        if self.params_on_host:
            self._check_params_on_host()
        if self.layer_wise and self.largest_matrix is None:
            raise ValueError("only Muon is layer-wise; give --muon, too, or leave --layer-wise out")
        if self.largest_matrix is not None and (self.in_backward or self.offload.window_bytes != 0):
            raise ValueError("Muon steps behind the backward pass and without a window: leave both out")
        if self.largest_matrix is not None and self.shard_params:
            raise ValueError("Muon steps whole matrices, not the parts that FSDP leaves on a rank; leave sharding out")
        if self.largest_matrix is not None and STORED_DTYPES[self.exp_avg] not in MOMENTUM_FORMATS:
            raise ValueError(f"Muon keeps its momentum in fp32 or bf16, not in {self.exp_avg}")
        if self.in_backward and self.offload.window_bytes != 0:
            raise ValueError("stepping in backward needs window_bytes=0: its copies run under the backward pass anyway")

    def _check_params_on_host(self) -> None:
        if self.largest_matrix is not None:
            raise ValueError("Muon cannot step parameters on the host; choose one of the two")
        if self.in_backward:
            raise ValueError("parameters on the host cannot be stepped in backward; choose one of the two")
        if self.offload.window_bytes != 0:
            raise ValueError("parameters on the host need window_bytes=0: their state moves beside them in the step")
        if self.data_parallel > 1 and not self.shard_params:
            raise ValueError("parameters on the host are sharded by FSDP2: plan them with --shard-params")

    @property
    def state_parallel(self) -> int:
        """Number of data-parallel ranks that the state is divided among."""
        return self.data_parallel if self.largest_matrix is None or self.layer_wise else 1

    def layout(self) -> Layout:
        """The optimizer's layout of offloaded state.

        Raises:
            ValueError: for remainders of parameters that have none.
        """
        if self.master == "remainder" and self.param_dtype != "bf16":
            raise ValueError(
                f"a remainder needs bf16 parameters, whose master it completes, but they are {self.param_dtype}: use "
                "another master"
            )
        formats: dict[str, Format] = {
            "exp_avg": EXP_AVG_FORMATS[STORED_DTYPES[self.exp_avg]],
            "exp_avg_sq": EXP_AVG_SQ_FORMATS[STORED_DTYPES[self.exp_avg_sq]],
        }
        if self.largest_matrix is not None:
            formats = dict(MuonRule(momentum_dtype=STORED_DTYPES[self.exp_avg]).formats)
        if self.master == "remainder":
            formats[MASTER_PARAM] = REMAINDER
        elif self.master != "none":
            formats[MASTER_PARAM] = MASTER_FORMATS[PARAM_DTYPES[self.master]]
        return Layout(
            torch.device("cuda"),
            PARAM_DTYPES[self.param_dtype],
            tuple(formats.items()),
            resident=False,
            params_on_host=self.params_on_host,
        )


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank, and of one node.

    Attributes:
        params: parameters, on the GPU.
        grads: gradients, on the GPU.
        resident_state: state that is not offloaded, on the GPU.
        ring: staging ring, on the GPU.
        work: work memory of operations on whole matrices, on the GPU.
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
    def state_in_save(self) -> int:
        """Bytes that an asynchronous save copies: all state, on the host and on the GPU."""
        return self.host_state + self.resident_state

    @property
    def host_in_save(self) -> int:
        """Host bytes of a rank during an asynchronous save."""
        return self.host_state + self.host_params + self.state_in_save

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
    params, grads = held_numel * layout.param_dtype.itemsize, held_numel * grad_dtype.itemsize
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
    """Bytes of the arrays of two matrices, or of small ones that fill two chunks, and of one operation's scratch."""
    if training.largest_matrix is None:
        return 0
    matrix = torch.empty(training.largest_matrix, device="meta")
    chunk_bytes = streaming_of(training.offload, torch.device("cpu"), layout.state_bytes(numel)).chunk_bytes
    most = chunk_numel(chunk_bytes, max(layout.only(phase.keys).alignment_bytes for phase in MuonRule.phases))
    together = max(1, min(most, numel) // matrix.numel()) * matrix.numel()
    return 4 * together + newton_schulz.scratch_bytes(matrix)


@dataclass(frozen=True)
class StepTime:
    """Predicted times of one optimizer step, in ms.

    Attributes:
        alone_ms: time of a step without concurrent work.
        exposed_ms: lower bound of the time that a step adds to an iteration, reached if all hidden
            bytes move under the backward and forward passes.
    """

    alone_ms: float
    exposed_ms: float


def step_time(memory: Memory, link_gbps: float, compute_ms: float = 0.0) -> StepTime:
    """Predicts the step from bytes and the speed of the link.

    Kernels, launches and the slowdown of concurrent work are not counted.

    Args:
        memory: memory of the model.
        link_gbps: GB/s each way with both directions busy.
        compute_ms: time of operations on whole matrices, which the copies run beside.
    """
    moved = memory.host_state + memory.host_params  # to the GPU; fewer bytes come back
    return StepTime(*(max(compute_ms, nbytes / link_gbps / 1e6) for nbytes in (moved, moved - memory.hidden)))


NEWTON_SCHULZ_TFLOPS = 600.0
"""Assumed speed of large bfloat16 products on an H100 or H200."""


def newton_schulz_ms(param_numel: int, training: Training) -> float:
    """Time of a rank's Newton-Schulz iterations, 5 steps each, if all its matrices are of the largest size.

    Args:
        param_numel: parameters of the whole model.
        training: settings of the training run.
    """
    if training.largest_matrix is None:
        return 0.0
    rows, columns = sorted(training.largest_matrix)
    flop = 5 * (4 * rows + 2 * rows * rows / columns)  # for each element
    return param_numel / training.model_parallel / training.state_parallel * flop / NEWTON_SCHULZ_TFLOPS / 1e9


def profile_step_time(memory: Memory, training: Training, profile: Profile) -> StepTime:
    """Predicts the step from measured steps of this machine, with all ranks of a node at once.

    Args:
        memory: memory of the model.
        training: settings of the training run; every rank of a node has a GPU of its own.
        profile: profile of the machine.
    """
    if training.params_on_host:
        return step_time(memory, profile.link_of(training.ranks_per_node).gbps)
    bytes_per_param = training.layout().alignment_bytes / ALIGNMENT

    def step_ms(nbytes: int) -> float:
        return profile.step_ms(nbytes, round(nbytes / bytes_per_param), training.ranks_per_node)

    return StepTime(step_ms(memory.host_state), step_ms(memory.host_state - memory.hidden))


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
