"""What to change where a model does not fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from .budget import Training, memory_of

_NARROWER = (("remainder", "fp32"), ("remainder", "bf16"), ("remainder", "uint8"))
"""Masters and moments, by descending bytes."""


def advice(numel: int, training: Training, *, gpu_bytes: int | None, node_bytes: int | None) -> list[str]:
    """One sentence for each memory that is too small.

    Args:
        numel: parameters of the whole model.
        training: how it would be trained.
        gpu_bytes: memory of a GPU, or None for no limit.
        node_bytes: memory of a host, or None for no limit.
    """
    memory = memory_of(numel, training)
    words = []
    if node_bytes is not None and memory.node > node_bytes:
        words.append(f"The host is too small. {_for_the_host(numel, training, node_bytes)}")
    if gpu_bytes is not None and memory.gpu > gpu_bytes:
        words.append(f"The GPU is too small. {_for_the_gpu(numel, training, gpu_bytes)}")
    return words


def _for_the_host(numel: int, training: Training, node_bytes: int) -> str:
    for flags, narrower in _narrower(training):
        node = memory_of(numel, narrower).node
        if node <= node_bytes:
            return f"It would hold {flags}: {node / 1e9:.3f} GB."
    return "Spread the state over more hosts (--data-parallel), or leave a part of it on the GPU (--fraction)."


def _narrower(training: Training) -> Iterator[tuple[str, Training]]:
    """Stored forms that take fewer bytes, and the flags for them."""
    if training.param_dtype != "bf16" or training.master == "none":
        return
    now = training.layout().block_bytes
    for master, moments in _NARROWER:
        narrower = dataclasses.replace(training, master=master, exp_avg=moments, exp_avg_sq=moments)
        if narrower.layout().block_bytes < now:
            yield f"--master {master} --moments {moments}", narrower


def _for_the_gpu(numel: int, training: Training, gpu_bytes: int) -> str:
    ways = []
    if training.offload.window_bytes == 0:
        ways.append(("--step-in-backward", {"in_backward": True}))
    if training.data_parallel > 1:
        ways.append(("--shard-params", {"shard_params": True}))
    if training.offload.fraction < 1:
        offload = dataclasses.replace(training.offload, fraction=1.0)
        ways.insert(0, ("--fraction 1", {"offload": offload}))
    for flags, changes in ways:
        gpu = memory_of(numel, dataclasses.replace(training, **changes)).gpu
        if gpu <= gpu_bytes:
            return f"It would hold {flags}: {gpu / 1e9:.3f} GB."
    return "Share the model between more GPUs (--model-parallel, or --data-parallel with --shard-params)."
