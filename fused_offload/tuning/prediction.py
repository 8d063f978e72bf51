"""Transfer settings and time of a planned step, by this machine's profile or without one."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

from fused_offload.plan.transfer_settings import settle
from fused_offload.profiles.profile import Choice, Profile
from fused_offload.state.layout import ALIGNMENT

from .budget import Memory, memory_of
from .cli_choices import DEFAULT_LINK_GBPS
from .output import duration
from .training import Training


class TransferSettings:
    """Transfer settings by a profile's choice for the size of the state.

    Without a profile they stay as they are.
    """

    def __init__(self, profile: Profile | None) -> None:
        self._profile = profile
        self._known: dict[tuple[Training, Choice], Training] = {}

    def settle(self, training: Training, numel: int) -> Training:
        """Sets transport, chunks and depth. Returns the same object for the same choice.

        Args:
            training: training settings; transfer settings may be ``"auto"``.
            numel: parameters of the whole model.
        """
        if self._profile is None:
            return training
        state_bytes = memory_of(numel, training).host_state
        key = training, self._profile.choice_for(state_bytes)
        if key not in self._known:
            self._known[key] = streaming_by(key[1], training, state_bytes)
        return self._known[key]


def streaming_by(choice: Choice | None, training: Training, state_bytes: int) -> Training:
    """Replaces ``"auto"`` by transport, chunks and depth for a size of state.

    Args:
        choice: choice of a profile, or None without one.
        training: training settings.
        state_bytes: bytes of a rank's state.
    """
    streaming = settle(training.offload, choice, state_bytes)
    if streaming.programs is not None:
        how: dict[str, Any] = {"transport": "zero_copy", "zero_copy_programs": streaming.programs}
    else:
        how = {"transport": "copy", "chunk_bytes": streaming.chunk_bytes, "depth": streaming.depth}
    return dataclasses.replace(training, offload=dataclasses.replace(training.offload, **how))


@dataclass(frozen=True)
class StepTime:
    """Predicted times of one optimizer step, in ms.

    Attributes:
        alone_ms: time of a step without concurrent work.
        added_ms: lower bound of the time that a step adds to an iteration, reached if all hidden
            bytes move under the backward and forward passes.
    """

    alone_ms: float
    added_ms: float


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


class Prediction(NamedTuple):
    """A predicted step.

    Attributes:
        time: the time of the step.
        link_gbps: bytes over time, each way.
        source: ``"profile"``, ``"link_gbps"`` for the option, or ``"assumption"``.
        how: derivation in words.
        gpus: number of GPUs of a host that copy at once at this speed; None if the option says it.
    """

    time: StepTime
    link_gbps: float
    source: str
    how: str
    gpus: int | None


def predict(
    numel: int, training: Training, memory: Memory, profile: Profile | None, given_gbps: float | None
) -> Prediction:
    """Predicts a step.

    Args:
        numel: parameters of the whole model.
        training: settings of the training run.
        memory: memory of the model.
        profile: profile of this machine, or None.
        given_gbps: GB/s each way that the user gave, or None.
    """
    gpus: int | None = 1
    link_gbps = DEFAULT_LINK_GBPS
    source, where = "assumption", "an assumption: what an H100 over PCIe 5 x16 reaches; give your own with --link-gbps"
    if given_gbps is not None:
        gpus, link_gbps = None, given_gbps
        source, where = "link_gbps", "given by --link-gbps"
    elif profile is not None:
        gpus, link_gbps = profile.link_of(training.ranks_per_node)
        source, where = "profile", "of this machine's profile" + (f", {gpus} GPUs at once" if gpus > 1 else "")
        if training.largest_matrix is None:
            time = profile_step_time(memory, training, profile)
            moved = memory.host_state + memory.host_params
            rate = moved / time.alone_ms / 1e6 if moved else link_gbps
            how = f"from steps that fused-offload tune measured on this machine, {profile.measured}"
            if gpus > 1:
                how += f", and copies of {gpus} GPUs at once, {link_gbps:.1f} GB/s each way and GPU"
            return Prediction(time, rate, source, how, gpus)
    compute_ms = newton_schulz_ms(numel, training)
    bounds = f"bytes / {link_gbps:g} GB/s each way ({where})"
    if compute_ms:
        bounds = (
            f"the longer of {bounds} and Newton-Schulz at {NEWTON_SCHULZ_TFLOPS:g} TFLOP/s, {duration(compute_ms)} "
            "(an assumption for large matrices on an H100)"
        )
    how = f"from {bounds}. Kernels, launches and the slowdown of what runs beside the copies are not counted"
    return Prediction(step_time(memory, link_gbps, compute_ms), link_gbps, source, how, gpus)
