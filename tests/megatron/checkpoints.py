"""Saves and loads as Megatron's training loop does."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint
from job import Job, replaced
from registry import NotInReleaseError

FORMATS = ("dp_reshardable", "fully_reshardable", "legacy")
GATHERED = "fully_reshardable, gathered on one rank"
"""The second of these, saved in the way that takes less memory."""


def save(job: Job, directory: Path, kind: str) -> None:
    if job.rank == 0:
        directory.mkdir(parents=True)
    torch.distributed.barrier()
    if kind in ("legacy", "torch"):
        _save_legacy(job, directory)
    else:
        from megatron.core import dist_checkpointing

        job.weights()  # waits for parameters that are still being gathered
        dist_checkpointing.save(sharded_state_dict(job, kind, is_loading=False), str(directory))
    torch.distributed.barrier()


def start_saving(job: Job, directory: Path, kind: str, library: str = "mcore", strategy: Any = None) -> Any:
    """As ``--async-save`` does, with Megatron's default strategy or a given one.

    Returns:
        the request to write the checkpoint, of the library of this name (``--async-strategy``).
    """
    from megatron.core import dist_checkpointing

    if job.rank == 0:
        directory.mkdir(parents=True)
    torch.distributed.barrier()
    job.weights()
    state = sharded_state_dict(job, kind, is_loading=False)
    # As random states do in Megatron's own checkpoints, it leaves no rank without anything to
    # write: persistent processes of 0.19 wait for such ranks forever.
    ranks, rank = (job.world_size,), (job.rank,)
    state["of each rank"] = dist_checkpointing.ShardedObject("of each rank", job.rank, ranks, rank)
    return dist_checkpointing.save(state, str(directory), strategy, async_sharded_save=True, async_strategy=library)


@contextlib.contextmanager
def handed_to_writer() -> Iterator[list[torch.Tensor]]:
    """Collects the tensors that Megatron's writer is going to write."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    tensors: list[torch.Tensor] = []
    prepare = FileSystemWriterAsync.prepare_write_data

    def prepare_and_look(writer: Any, *args: Any) -> None:
        prepare(writer, *args)
        tensors.extend(tensor for _, _, (_, items) in writer.write_buckets for _, tensor in items)

    with replaced((FileSystemWriterAsync, "prepare_write_data", prepare_and_look)):
        yield tensors


def need_reading() -> None:
    """Leaves a scenario that reads distributed checkpoints where this torch lacks what Megatron
    calls.
    """
    megatron = importlib.import_module("megatron.core.dist_checkpointing.strategies.torch")
    calls_with_no_dist = "no_dist" in inspect.getsource(megatron)
    if calls_with_no_dist and "no_dist" not in inspect.signature(torch.distributed.checkpoint.load).parameters:
        raise NotInReleaseError(
            f"megatron-core {version('megatron-core')} reads checkpoints with no_dist=True, which torch "
            f"{torch.__version__} does not take"
        )


def load(job: Job, directory: Path, kind: str) -> None:
    """Takes over model, optimizer and schedule."""
    if kind in ("legacy", "torch"):
        load_state_dict(job, torch.load(directory / "common.pt", weights_only=False))
        if kind == "legacy":
            job.optimizer.load_parameter_state(str(directory / "distrib_optim.pt"))
    else:
        from megatron.core import dist_checkpointing

        need_reading()
        load_state_dict(job, dist_checkpointing.load(sharded_state_dict(job, kind, is_loading=True), str(directory)))


def load_state_dict(job: Job, state_dict: dict[str, Any]) -> None:
    """Takes over what was read of a checkpoint."""
    job.model.module.load_state_dict(state_dict["model"])
    job.optimizer.load_state_dict(state_dict["optimizer"])
    job.scheduler.load_state_dict(state_dict["scheduler"])
    job.iteration = state_dict["iteration"]


def sharded_state_dict(job: Job, kind: str, *, is_loading: bool) -> dict[str, Any]:
    """All that a distributed checkpoint of this format has."""
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable" if kind == GATHERED else kind,
        "chained_optim_avoid_prefix": True,
        "distrib_optim_fully_reshardable_mem_efficient": kind == GATHERED,
    }
    model = job.model.module.sharded_state_dict()
    optimizer = job.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
    return {"model": model, "optimizer": optimizer, **_common(job)}


def _common(job: Job) -> dict[str, Any]:
    return {"scheduler": job.scheduler.state_dict(), "iteration": job.iteration}


def _save_legacy(job: Job, directory: Path) -> None:
    job.weights()
    common = {"model": job.model.module.state_dict(), "optimizer": job.optimizer.state_dict(), **_common(job)}
    if job.rank == 0:
        torch.save(common, directory / "common.pt")
    if hasattr(job.children[0], "save_parameter_state"):
        job.optimizer.save_parameter_state(str(directory / "distrib_optim.pt"))
