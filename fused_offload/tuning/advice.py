"""What to change where a model does not fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from .budget import Training, memory_of

_NARROWER = (("remainder", "fp32"), ("remainder", "bf16"), ("remainder", "uint8"))
"""Masters and moments, by descending bytes."""


def advice(numel: int, training: Training, *, gpu_bytes: int | None, node_bytes: int | None) -> list[str]:
    """A sentence, or nothing where the model fits.

    Args:
        numel: parameters of the whole model.
        training: how it would be trained.
        gpu_bytes: memory of a GPU, or None for no limit.
        node_bytes: memory of a host, or None for no limit.
    """

    def fits(changed: Training) -> tuple[bool, bool]:
        memory = memory_of(numel, changed)
        return gpu_bytes is None or memory.gpu <= gpu_bytes, node_bytes is None or memory.node <= node_bytes

    gpu_is_enough, host_is_enough = fits(training)
    if gpu_is_enough and host_is_enough:
        return []
    small = " and ".join(
        what for what, is_enough in (("GPU", gpu_is_enough), ("host", host_is_enough)) if not is_enough
    )
    begin = f"The {small} {'is' if gpu_is_enough or host_is_enough else 'are'} too small."
    for flags, changed in _changes(training):
        if fits(changed) == (True, True):
            memory = memory_of(numel, changed)
            gpu, host = f"{memory.gpu / 1e9:.3f} GB on the GPU", f"{memory.node / 1e9:.3f} GB on the host"
            return [f"{begin} {flags} would fit: {gpu}, {host}."]
    ways = []
    if not gpu_is_enough:
        ways.append("share the model between more GPUs (--model-parallel, or --data-parallel with --shard-params)")
    if not host_is_enough:
        ways.append("spread the state over more hosts (--data-parallel)")
    return [f"{begin} One change alone does not do: {', and '.join(ways)}."]


def _changes(training: Training) -> Iterator[tuple[str, Training]]:
    """What may be changed, with the flags for it; what costs least first."""
    offload = training.offload
    if offload.window_bytes != 0:
        yield "--window-bytes 0", dataclasses.replace(training, offload=dataclasses.replace(offload, window_bytes=0))
    if offload.fraction < 1:
        yield "--fraction 1", dataclasses.replace(training, offload=dataclasses.replace(offload, fraction=1.0))
    if training.data_parallel > 1 and not training.shard_params:
        yield "--shard-params", dataclasses.replace(training, shard_params=True)
    yield from _narrower(training)
    if not training.in_backward and offload.window_bytes == 0:
        in_backward = dataclasses.replace(training, in_backward=True)
        yield "--step-in-backward", in_backward
        for flags, narrower in _narrower(in_backward):
            yield f"{flags} --step-in-backward", narrower


def _narrower(training: Training) -> Iterator[tuple[str, Training]]:
    """Stored forms that take fewer bytes, and the flags for them."""
    if training.param_dtype != "bf16" or training.master == "none":
        return
    now = training.layout().block_bytes
    for master, moments in _NARROWER:
        narrower = dataclasses.replace(training, master=master, exp_avg=moments, exp_avg_sq=moments)
        if narrower.layout().block_bytes < now:
            yield f"--master {master} --moments {moments}", narrower
