"""Training goes on while another process writes a checkpoint, as with ``--async-save``."""

from __future__ import annotations

import contextlib
import functools
import importlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from checkpoints import load, load_state_dict, sharded_state_dict, start_saving
from job import SEVERAL_BUCKETS, Job, JobSpec, Layout, replaced
from pairs import covering
from reference_optimizer import StoredFormats
from registry import Context, NotInReleaseError, Phase, scenario
from scenarios_checkpoint import EIGHT_BITS, place
from scenarios_training import STORED_FORMATS
from torch.distributed.checkpoint.api import CheckpointException

from fused_offload.memory import cuda_driver
from fused_offload.memory.pinned import PinnedSlab
from fused_offload.state import storage

_PADDED = Layout(bucket_size=SEVERAL_BUCKETS, overlap_grad_reduce=True)
_PATIENCE_S = 60
LIBRARIES = {
    "mcore": "megatron.core.dist_checkpointing.strategies",
    "nvrx": "nvidia_resiliency_ext.checkpointing.async_ckpt",
}
"""Packages with a writer and a queue of requests, by Megatron's names for them."""


class Writing(NamedTuple):
    """A checkpoint that another process writes.

    Attributes:
        library: ``"mcore"`` or ``"nvrx"``.
        worker: ``"forked"`` for each save, or ``"persistent"``, which was started before and gets
            tensors in shared memory.
        kind: of the checkpoint.
        stored_formats: of the state, or the owner of the masters.
    """

    library: str
    worker: str
    kind: str
    stored_formats: str

    @property
    def name(self) -> str:
        return f"{self.library} writes, {self.worker}, {self.kind}, {self.stored_formats}"

    @property
    def config(self) -> tuple[tuple[str, Any], ...]:
        return (("use_precision_aware_optimizer", False),) if self.stored_formats == MEGATRONS_MASTERS else ()


MEGATRONS_MASTERS = "Megatron's masters"
FORMATS = {
    **STORED_FORMATS,
    EIGHT_BITS: StoredFormats(torch.uint8, remainders=True),
    MEGATRONS_MASTERS: StoredFormats(),
}
WRITINGS = [
    Writing(library, worker, kind, stored_formats)
    for library in LIBRARIES
    for worker in ("forked", "persistent")
    for kind in ("dp_reshardable", "fully_reshardable")
    for stored_formats in FORMATS
    # Those masters lie on the GPU, from where writers copy them. Here they are tensors on the host
    # that fill their storage, and a persistent process would get the live ones.
    if (worker, stored_formats) != ("persistent", MEGATRONS_MASTERS)
]
COVERING = [case for library in LIBRARIES for case in covering([case for case in WRITINGS if case.library == library])]


def write_when_told(told: Path, write: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Writes as soon as a file exists."""
    deadline = time.monotonic() + _PATIENCE_S
    while not told.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{told} did not appear")
        time.sleep(0.01)
    return write(*args, **kwargs)


@contextlib.contextmanager
def page_locked() -> Iterator[None]:
    """State that forked children do not inherit, as on a machine with a GPU."""
    # What Linux does stays; the driver is not there.
    cuda_driver.register_host_memory = lambda *args: None  # type: ignore[assignment]
    cuda_driver.unregister_host_memory = lambda *args: None  # type: ignore[assignment]
    with replaced(
        (storage, "PinnedSlab", lambda nbytes, **options: PinnedSlab(nbytes, **{**options, "pin": True})),
    ):
        yield


def modules(library: str) -> tuple[Any, Any]:
    """Modules with the queue of requests and with the writer."""
    package = LIBRARIES[library]
    try:
        queue = importlib.import_module(f"{package}.{'async_utils' if library == 'mcore' else 'core'}")
        writer = importlib.import_module(f"{package}.filesystem_async")
    except ModuleNotFoundError as error:
        raise NotInReleaseError(f"needs {error.name}") from error
    return queue, writer


@functools.cache
def _results(library: str) -> Any:
    """Queue in which a library's writers leave what they did; a process of its own keeps it."""
    writer = modules(library)[1]
    with replaced((writer, "_results_queue", None)):
        return writer.get_write_results_queue("fork")


@functools.cache
def _requests(library: str, worker: str) -> Any:
    """Queue of requests; a persistent process goes on until this one ends."""
    return modules(library)[0].AsyncCallsQueue(persistent=worker == "persistent")


def _schedule(request: Any, requests: Any, told: Path) -> None:
    """Starts a writer that waits for a file."""
    write = functools.partial(write_when_told, told, request.async_fn)
    requests.schedule_async_request(request._replace(async_fn=write))


@contextlib.contextmanager
def _writer_of(library: str) -> Iterator[None]:
    writer = modules(library)[1]
    with page_locked(), replaced((writer, "_results_queue", _results(library))):
        yield


def _written(context: Context, case: Writing) -> dict[str, Any]:
    spec = JobSpec("ours", FORMATS[case.stored_formats], _PADDED, fraction=0.5, config=case.config)
    directory = place(context, case.name)
    told = directory.with_name(f"{directory.name}.told")
    with _writer_of(case.library):
        requests = _requests(case.library, case.worker)
        job, other = Job(spec), Job(spec._replace(seed=2))
        job.train(2)
        _schedule(start_saving(job, directory, case.kind, case.library), requests, told)
        saved = job.snapshot()
        job.train(2)
        finished_early = requests.maybe_finalize_async_calls()
        told.touch()
        requests.maybe_finalize_async_calls(blocking=True)
        load(other, directory, case.kind)
    return {
        "finished early": finished_early,
        "saved": saved,
        "meanwhile": job.snapshot(),
        "loaded": other.snapshot(),
    }


for _case in WRITINGS:
    scenario(
        _case.name,
        lambda context, case=_case: _written(context, case),
        (Phase.TWO_RANKS,),
        large=_case not in COVERING,
    )


# -- what would be written without the spare element ------------------------------------------------

LIVE = "a forked writer of live state"


def _live(context: Context) -> dict[str, Any]:
    """Views that fill their storage, which writers do not clone."""
    view = storage.Extent.view

    def filled(extent: Any, *args: Any) -> torch.Tensor:
        return torch.from_numpy(view(extent, *args).numpy())

    directory = place(context, LIVE)
    with _writer_of("mcore"), replaced((storage.Extent, "view", filled)):
        requests = _requests("mcore", "forked")
        job = Job(JobSpec(layout=_PADDED))
        job.train(1)
        requests.schedule_async_request(start_saving(job, directory, "dp_reshardable"))
        with pytest.raises(CheckpointException) as failed:
            requests.maybe_finalize_async_calls(blocking=True)
        torch.distributed.barrier()
    return {"error": str(failed.value), "has metadata": (directory / ".metadata").exists()}


scenario(LIVE, _live, (Phase.TWO_RANKS,))


# -- checkpoints on the host's own disk -------------------------------------------------------------

LOCAL_FORMATS = ("fp32", "remainders")


def local_name(stored_formats: str) -> str:
    return f"local checkpoint, {stored_formats}"


def _local(context: Context, stored_formats: str) -> dict[str, Any]:
    """As ``--non-persistent-ckpt-type local`` does with ``--async-save``."""
    try:
        from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager
    except ModuleNotFoundError as error:
        raise NotInReleaseError(f"needs {error.name}") from error
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.tensor_aware_state_dict import MCoreTensorAwareStateDict

    spec = JobSpec("ours", FORMATS[stored_formats], _PADDED, fraction=0.5)
    directory = place(context, local_name(stored_formats))
    told = directory.with_name(f"{directory.name}.told")
    settings = {"algo": "fully_parallel", "parallelization_group": parallel_state.get_data_parallel_group()}
    with page_locked():
        requests = _requests("nvrx", "forked")
        job, other = Job(spec), Job(spec._replace(seed=2))
        job.train(2)
        given, _ = MCoreTensorAwareStateDict.from_state_dict(
            sharded_state_dict(job, "dp_reshardable", is_loading=False), **settings
        )
        _schedule(LocalCheckpointManager(directory).save(given, 2, is_async=True), requests, told)
        saved = job.snapshot()
        job.train(2)
        told.touch()
        requests.maybe_finalize_async_calls(blocking=True)
        manager = LocalCheckpointManager(directory)
        manager.find_latest()
        read, _ = manager.load()
        load_state_dict(
            other, read.to_state_dict(sharded_state_dict(other, "dp_reshardable", is_loading=True), **settings)
        )
    return {"saved": saved, "loaded": other.snapshot()}


for _formats in LOCAL_FORMATS:
    scenario(
        local_name(_formats),
        lambda context, stored_formats=_formats: _local(context, stored_formats),
        (Phase.TWO_RANKS,),
    )
