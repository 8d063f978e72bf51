"""Checkpoints written while training goes on, compared bit for bit with synchronous ones.

    python tests/megatron/async_job.py EMPTY_FOLDER [--cases REGULAR_EXPRESSION] [--json FILE]

One rank; on a GPU where there is one, else with the stand-in for CUDA. In each case a run starts to
save, as ``--async-save`` does, and goes on. Another run of the same seed saves at the same
iteration and waits. What both checkpoints hold has to be the same. A checkpoint of the later state
has to be another one, or the comparison would see nothing. A third run resumes from the first
checkpoint and has to go on like the second. Exit status 1 if anything is otherwise, or if no case
could be run.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import functools
import gc
import io
import json
import multiprocessing
import os
import re
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

# Needed for determinism, and set before the first matrix product.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import job
import stand_in
import torch

if not torch.cuda.is_available():
    stand_in.install()  # in writing processes, too
BEFORE, AFTER = 3, 3
"""Iterations before the save, and behind it."""
BUCKET_SIZE = 2**20 if job.DEVICE == "cuda" else job.SEVERAL_BUCKETS
ALL = 2**30
"""Bytes of a window for all of the state."""
LIMIT_S = 120
"""Seconds for a case. A writer that could not be sent what to write waits without end."""


class Case(NamedTuple):
    """One way to write a checkpoint.

    Attributes:
        library: ``"mcore"`` or ``"nvrx"``, as in `scenarios_async`.
        worker: ``"forked"`` for each save; ``"persistent"``; ``"shared memory"`` for a persistent
            one that gets copies there; ``"same structure"`` for one that keeps what it got at the
            first of two saves.
        stored_formats: name in `scenarios_async.FORMATS`.
        kind: of the checkpoint.
        late: whether nothing is written before training has gone on; else at once.
    """

    library: str
    worker: str
    stored_formats: str
    kind: str = "dp_reshardable"
    late: bool = True

    @property
    def name(self) -> str:
        when = "late" if self.late else "at once"
        return f"{self.library}, {self.worker}, {self.stored_formats}, {self.kind}, {when}"


def all_cases() -> list[Case]:
    from scenarios_async import FORMATS, LIBRARIES, MEGATRONS_MASTERS

    cases = []
    for library in LIBRARIES:
        for worker in ("forked", "persistent"):
            cases += [Case(library, worker, "fp32", late=False), Case(library, worker, "fp32", "fully_reshardable")]
            cases += [Case(library, worker, stored_formats) for stored_formats in FORMATS]
    cases += [Case("nvrx", worker, "fp32", late=False) for worker in ("shared memory", "same structure")]
    if job.DEVICE == "cpu":  # as in `scenarios_async.WRITINGS`
        cases = [case for case in cases if (case.worker, case.stored_formats) != ("persistent", MEGATRONS_MASTERS)]
    return cases


def set_up() -> None:
    """Process groups of one rank, and the processes through which writers return results."""
    from megatron.core import parallel_state, tensor_parallel
    from registry import NotInReleaseError
    from scenarios_async import LIBRARIES, modules

    if job.DEVICE == "cpu":
        stand_in.install_in_megatron()
    for library in LIBRARIES:
        with contextlib.suppress(NotInReleaseError):
            writer = modules(library)[1]
            writer._results_queue = None
            writer.get_write_results_queue("fork")  # before there is a CUDA context
    backend = "nccl" if job.DEVICE == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(create_gloo_process_groups=True)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    if job.DEVICE == "cuda":
        job.HIDDEN, job.LAYERS = 512, 4


@functools.cache
def queue_of(library: str, worker: str) -> Any:
    from scenarios_async import modules

    settings = {"cpu_shm_mode": True} if worker == "shared memory" else {}
    return modules(library)[0].AsyncCallsQueue(persistent=worker != "forked", **settings)


def strategy_of(worker: str) -> Any:
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    if worker not in ("shared memory", "same structure"):
        return None
    return TorchDistSaveShardedStrategy(
        cached_metadata=worker == "same structure", cpu_shm_mode=worker != "same structure"
    )


def new_job(stored_formats: str, *, seed: int = 1, window_bytes: int = 0) -> job.Job:
    from scenarios_async import FORMATS, MEGATRONS_MASTERS

    config = (("use_precision_aware_optimizer", False),) if stored_formats == MEGATRONS_MASTERS else ()
    layout = job.Layout(bucket_size=BUCKET_SIZE, overlap_grad_reduce=True)
    return job.Job(
        job.JobSpec(
            "ours", FORMATS[stored_formats], layout, fraction=0.5, config=config, seed=seed, window_bytes=window_bytes
        )
    )


class Expected(NamedTuple):
    """A run with synchronous checkpoints."""

    saved: dict[str, Any]
    later: dict[str, Any]
    log: list[job.Step]


@functools.cache
def expected(folder: Path, stored_formats: str, kind: str) -> Expected:
    from checkpoints import save

    run = new_job(stored_formats)
    log = run.train(BEFORE)
    save(run, folder / f"{stored_formats}, {kind}, saved", kind)
    log += run.train(AFTER)
    save(run, folder / f"{stored_formats}, {kind}, later", kind)
    return Expected(*(read(folder / f"{stored_formats}, {kind}, {when}") for when in ("saved", "later")), log)


def write(case: Case, folder: Path) -> list[job.Step]:
    """Trains, and leaves a checkpoint that was written meanwhile."""
    from checkpoints import start_saving
    from scenarios_async import write_when_told

    queue, strategy, told = queue_of(case.library, case.worker), strategy_of(case.worker), folder.with_suffix(".told")
    run = new_job(case.stored_formats, window_bytes=ALL)
    log = []
    if case.worker == "same structure":
        log += run.train(BEFORE - 1)
        queue.schedule_async_request(start_saving(run, folder.with_suffix(".first"), case.kind, case.library, strategy))
    log += run.train(BEFORE - len(log))
    queue.maybe_finalize_async_calls(blocking=True)
    request = start_saving(run, folder, case.kind, case.library, strategy)
    if case.late:
        request = request._replace(async_fn=functools.partial(write_when_told, told, request.async_fn))
    queue.schedule_async_request(request)
    log += run.train(AFTER)
    if case.late and queue.maybe_finalize_async_calls():
        raise AssertionError("it was written before training had gone on")
    told.touch()
    queue.maybe_finalize_async_calls(blocking=True)
    return log


def read(folder: Path) -> dict[str, Any]:
    """Tensors and bytes of other objects in a checkpoint, by key."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    found: dict[str, Any] = {}
    _load_state_dict(found, FileSystemReader(folder), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return {key: value for key, value in _flat(found) if "of each rank" not in key}  # see `start_saving`


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, (dict, list)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, part in items:
            yield from _flat(part, f"{prefix}/{key}")
    else:
        yield prefix, value.getvalue() if isinstance(value, io.BytesIO) else value


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Keys of what differs in any bit."""
    return [key for key in {**one, **other} if not (key in one and key in other and _same(one[key], other[key]))]


def _same(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return bool(type(one) is type(other) and one == other)
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    flat, other_flat = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(flat, other_flat)


def compare(case: Case, folder: Path) -> dict[str, Any]:
    from checkpoints import load
    from scenarios_async import page_locked

    with contextlib.nullcontext() if job.DEVICE == "cuda" else page_locked():
        wanted = expected(folder, case.stored_formats, case.kind)
        log = write(case, folder / case.name)
        saved = read(folder / case.name)
        resumed = new_job(case.stored_formats, seed=2)
        load(resumed, folder / case.name, case.kind)
        resumed_log = resumed.train(AFTER)
    wrong = [f"another value of {key}" for key in differing(saved, wanted.saved)]
    if log != wanted.log:
        wrong.append(f"the runs differ, so nothing can be compared: {log}, {wanted.log}")
    if resumed_log != wanted.log[BEFORE:]:
        wrong.append(f"resumed: {resumed_log}, not {wanted.log[BEFORE:]}")
    moments = [key for key in saved if "exp_avg" in key]
    changed = set(differing(saved, wanted.later))
    if not moments or not changed.issuperset(moments):
        wrong.append(f"{len(moments)} tensors of moments, of which {len(changed & {*moments})} differ later")
    nbytes = sum(value.nbytes for value in saved.values() if isinstance(value, torch.Tensor))
    return {"wrong": wrong, "said": f"{len(saved)} values, {nbytes / 1e6:.1f} MB, {len(moments)} tensors of moments"}


def run_case(case: Case, folder: Path) -> dict[str, Any]:
    """The outcome of a case, also where it raises."""
    from registry import NotInReleaseError
    from torch.distributed.checkpoint.api import CheckpointException

    started = time.monotonic()
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    try:
        outcome = compare(case, folder)
    except NotInReleaseError as reason:
        outcome = {"wrong": [], "said": f"not run: {reason}", "not run": True}
    except (Exception, CheckpointException):  # which is none
        outcome = {"wrong": [traceback.format_exc()], "said": ""}
    faulthandler.cancel_dump_traceback_later()
    gc.collect()
    return {**outcome, "seconds": time.monotonic() - started}


def verdict(outcomes: dict[str, dict[str, Any]]) -> tuple[bool, str]:
    """True if all is well, and words for it. Cases of a library that is not there are not counted."""
    failed = [name for name, outcome in outcomes.items() if outcome["wrong"]]
    not_run = sum(outcome.get("not run", False) for outcome in outcomes.values())
    if failed or not_run == len(outcomes):
        return False, "FAIL: " + ("; ".join(failed) or "no case could be run")
    beside = f", {not_run} could not be run" if not_run else ""
    return True, f"all {len(outcomes) - not_run} cases are well{beside}"


def main() -> None:
    """Runs the cases, says what came out, and ends with status 1 unless all is well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cases", default="", help="regular expression for their names")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes here")
    args = parser.parse_args()
    cases = [case for case in all_cases() if re.search(args.cases, case.name)]
    if not cases:
        parser.error(f"--cases {args.cases!r}: no case has such a name")
    warnings.simplefilter("ignore")
    args.folder.mkdir(parents=True, exist_ok=True)
    if any(args.folder.iterdir()):
        parser.error(f"{args.folder} is not empty")
    set_up()
    outcomes = {}
    for case in cases:
        outcomes[case.name] = outcome = run_case(case, args.folder)
        print(f"{'FAIL' if outcome['wrong'] else 'ok'}  {case.name} ({outcome['seconds']:.1f} s): {outcome['said']}")
        for line in outcome["wrong"]:
            print(f"      {line}")
        sys.stdout.flush()
        if args.json:
            args.json.write_text(json.dumps(outcomes, indent=1))
    is_well, words = verdict(outcomes)
    print(f"VERDICT: {words}")
    sys.stdout.flush()
    for child in multiprocessing.active_children():  # of writers; they would keep the output open
        child.kill()
    os._exit(not is_well)


if __name__ == "__main__":
    main()
