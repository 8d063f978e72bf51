"""Advice of `fused-offload plan` for models that do not fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .budget import Memory, fits_into, memory_of
from .output import gb
from .training import Training

_FRACTIONS = tuple(percent / 100 for percent in range(95, -1, -5))


def advice(
    numel: int,
    training: Training,
    settle: Callable[[Training, int], Training],
    *,
    gpu_bytes: int | None,
    node_bytes: int | None,
) -> list[str]:
    """Advice in one sentence; empty if the model fits.

    Args:
        numel: parameters of the whole model.
        training: the planned training; its transfer settings may be ``"auto"``.
        settle: sets the transfer settings for a number of parameters.
        gpu_bytes: memory of a GPU, or None for no limit.
        node_bytes: memory of a host, or None for no limit.
    """

    def needed(changed: Training) -> Memory:
        return memory_of(numel, settle(changed, numel))

    def small(memory: Memory) -> list[str]:
        fits = fits_into(memory, gpu_bytes=gpu_bytes, node_bytes=node_bytes)
        return [what for what, is_enough in (("GPU", fits.gpu), ("host", fits.host)) if is_enough is False]

    too_small = small(needed(training))
    if not too_small:
        return []
    begin = f"The {' and the '.join(too_small)} {'is' if len(too_small) == 1 else 'are'} too small."
    for flags, changed in _changes(training, knows_gpu=gpu_bytes is not None, knows_host=node_bytes is not None):
        memory = needed(changed)
        if not small(memory):
            return [f"{begin} {flags} would fit: {gb(memory.gpu)} on the GPU, {gb(memory.node)} on the host."]
    sharded = ", or --data-parallel with --shard-params" if training.may_be_sharded else ""
    by_state = "--data-parallel" if training.shares_state else "--model-parallel"
    more = {
        "GPU": f"share the model between more GPUs (--model-parallel{sharded})",
        "host": f"spread the state over more hosts ({by_state})",
    }
    return [f"{begin} Nothing that was tried fits: {', and '.join(more[what] for what in too_small)}."]


def _changes(training: Training, *, knows_gpu: bool, knows_host: bool) -> Iterator[tuple[str, Training]]:
    """Possible changes with their flags, ordered by what they cost.

    The order is: nothing, GPU memory, stepping in backward, precision, then pairs of changes.

    Args:
        training: the training to change.
        knows_gpu: True if the GPU's memory is given.
        knows_host: True if the host's memory is given.
    """
    singles = list(_of_placement(training))
    yield from singles
    yield from _formats(training, "fp32")
    if knows_gpu:
        for fraction in _FRACTIONS:
            if fraction < training.offload.fraction and not training.params_on_host:
                yield f"--fraction {fraction:g}", _offloaded(training, fraction=fraction)
    in_backward = list(_in_backward(training, singles))
    yield from in_backward
    yield from _formats(training, "bf16", "uint8")
    for flags, changed in (*singles, *in_backward):
        for more, narrower in _formats(changed, "fp32", "bf16", "uint8"):
            yield f"{flags} {more}", narrower
    for flags, changed in _on_host(training) if knows_host else ():
        yield flags, changed
        for more, narrower in _formats(changed, "fp32", "bf16", "uint8"):
            yield f"{flags} {more}", narrower


def _on_host(training: Training) -> Iterator[tuple[str, Training]]:
    """Parameters and gradients on the host, if the passes leave them there."""
    is_plain = training.largest_matrix is None and training.quantised is None
    if is_plain and not (training.params_on_host or training.in_backward):
        flags = "--shard-params " if training.data_parallel > 1 and not training.shard_params else ""
        flags += "--window-bytes 0 " if training.offload.window_bytes != 0 else ""
        without = _offloaded(training, window_bytes=0, fraction=1.0, transport="copy")
        yield f"{flags}--params-on-host", dataclasses.replace(without, params_on_host=True, shard_params=True)


def _of_placement(training: Training) -> Iterator[tuple[str, Training]]:
    if training.offload.window_bytes != 0:
        yield "--window-bytes 0", _offloaded(training, window_bytes=0)
    if training.offload.fraction < 1:
        yield "--fraction 1", _offloaded(training, fraction=1.0)
    if training.data_parallel > 1 and not training.shard_params and training.may_be_sharded:
        yield "--shard-params", dataclasses.replace(training, shard_params=True)


def _in_backward(training: Training, singles: Sequence[tuple[str, Training]]) -> Iterator[tuple[str, Training]]:
    """Stepping in backward, alone and with each other change."""
    for flags, changed in (("", training), *singles):
        without = _offloaded(changed, window_bytes=0)
        if changed.offload.window_bytes != 0:
            flags += " --window-bytes 0"
        if not training.in_backward and changed.may_step_in_backward:
            yield f"{flags} --step-in-backward".strip(), dataclasses.replace(without, in_backward=True)


def _offloaded(training: Training, **changes: Any) -> Training:
    return dataclasses.replace(training, offload=dataclasses.replace(training.offload, **changes))


def _formats(training: Training, *moments: str) -> Iterator[tuple[str, Training]]:
    """Changes to stored formats that take fewer bytes. A remainder loses no precision."""
    has_remainder = training.param_dtype == "bf16" and training.master != "none" and training.quantised is None
    flag, master = ("--master remainder ", "remainder") if has_remainder else ("", training.master)
    now = training.layout().alignment_bytes
    for moment in moments:
        if training.largest_matrix is not None and moment == "uint8":
            continue
        narrower = dataclasses.replace(training, master=master, exp_avg=moment, exp_avg_sq=moment)
        if narrower.layout().alignment_bytes < now:
            yield f"{flag}--moments {moment}", narrower
