"""Save and resume in every format, with as many ranks and with others."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, NamedTuple

import torch
from checkpoints import FORMATS, GATHERED, handed_to_writer, load, save, start_saving
from job import SEVERAL_BUCKETS, Job, JobSpec, Layout, te_branches
from pairs import covering
from reference_optimizer import StoredFormats
from registry import BOTH_WORLDS, Context, Phase, scenario
from scenarios_training import LAYOUTS, SMALL_CHUNK, STORED_FORMATS
from stand_in import placed_on_gpu

_PADDED = Layout(bucket_size=SEVERAL_BUCKETS, overlap_grad_reduce=True)
BEFORE, AFTER = 2, 2
"""Iterations before the save and after it."""
EIGHT_BITS = "remainders, 8-bit moments"


class Resume(NamedTuple):
    """A run that saves and goes on, and another that starts elsewhere, loads and does the same."""

    kind: str
    layout: str
    stored_formats: str
    iterations_before: int = BEFORE
    optimizer: str = "ours"
    with_te: bool = False
    megatrons_masters: bool = False
    """Whether Megatron keeps the masters, as it does by default."""

    @property
    def name(self) -> str:
        when = f"after {self.iterations_before} iterations{', TE' if self.with_te else ''}"
        when += ", Megatron's masters" if self.megatrons_masters else ""
        return f"resume {self.optimizer}, {self.kind}, {self.layout}, {self.stored_formats}, {when}"

    @property
    def phases(self) -> tuple[Phase, ...]:
        """One rank for the plainest, which stand for the others there."""
        plain = self.layout == "all overlapped" and self.iterations_before and not self.with_te
        return BOTH_WORLDS if plain else (Phase.TWO_RANKS,)

    def spec(self) -> JobSpec:
        config = (("use_precision_aware_optimizer", False),) if self.megatrons_masters else ()
        stored_formats = {**STORED_FORMATS, EIGHT_BITS: StoredFormats(torch.uint8, remainders=True)}[
            self.stored_formats
        ]
        return JobSpec(self.optimizer, stored_formats, LAYOUTS[self.layout], fraction=0.3, config=config)


RESUMES = [
    *(Resume(kind, "all overlapped", stored_formats) for kind in FORMATS for stored_formats in STORED_FORMATS),
    *(Resume(kind, "dense and experts", "remainders") for kind in FORMATS),
    *(Resume(kind, "empty group", "fp32") for kind in FORMATS),
    *(Resume(kind, "empty rank", "remainders") for kind in ("fully_reshardable", "legacy")),
    *(Resume(kind, "adapters", stored_formats) for kind in FORMATS for stored_formats in ("fp32", "remainders")),
    *(Resume(kind, "adapters", "fp32", megatrons_masters=True) for kind in FORMATS),
    *(Resume(kind, "adapters beside experts", "remainders") for kind in ("dp_reshardable", "fully_reshardable")),
    *(
        Resume(kind, "several buckets", stored_formats, 0)
        for kind in FORMATS
        for stored_formats in ("fp32", "remainders")
    ),
    *(Resume(kind, "dense and experts", "fp32", 0) for kind in ("dp_reshardable", "fully_reshardable")),
    Resume(GATHERED, "several buckets", "remainders"),
    *(Resume(kind, "several buckets", "fp32", megatrons_masters=True) for kind in FORMATS),
    *(Resume(kind, "several buckets", EIGHT_BITS) for kind in FORMATS),
    # Where TransformerEngine is installed, Megatron looks for step counts elsewhere; and there are
    # two places to be in.
    *(Resume(kind, "dense and experts", "fp32", with_te=True) for kind in FORMATS),
    *(Resume(kind, "all overlapped", "remainders", BEFORE, "ours as FusedAdam", True) for kind in FORMATS),
    Resume("dp_reshardable", "all overlapped", "remainders", 0, "ours", True),
    Resume("dp_reshardable", "all overlapped", "fp32", 0, "ours as FusedAdam", True),
]
COVERING = covering(RESUMES)


def resume(job: Job, other: Job, directory: Path, case: Resume) -> dict[str, Any]:
    job.train(case.iterations_before)
    save(job, directory, case.kind)
    saved = job.snapshot()
    log = job.train(AFTER)
    with placed_on_gpu() as placed:
        load(other, directory, case.kind)
    loaded = other.snapshot()
    resumed_log = other.train(AFTER)
    return {
        "buckets": job.buckets(),
        "placed on the GPU": sum(placed),
        "saved": saved,
        "loaded": loaded,
        "went on": {"log": log, **job.snapshot()},
        "resumed": {"log": resumed_log, **other.snapshot()},
    }


def place(context: Context, name: str) -> Path:
    return context.directory / "checkpoints" / f"{name}, {context.phase.value}".replace(" ", "_")


def _resume(context: Context, case: Resume) -> dict[str, Any]:
    spec = case.spec()
    other = spec._replace(seed=2, fraction=1.0, chunk_bytes=SMALL_CHUNK)
    with te_branches() if case.with_te else contextlib.nullcontext():
        return resume(Job(spec), Job(other), place(context, case.name), case)


for _case in RESUMES:
    scenario(_case.name, lambda context, case=_case: _resume(context, case), _case.phases, large=_case not in COVERING)


# -- what is frozen -------------------------------------------------------------------------------


def _adapters_alone(context: Context) -> dict[str, Any]:
    """Bytes and numbers of elements of the state, and of what is trained on all ranks."""
    job = Job(JobSpec(layout=LAYOUTS["adapters"]))
    frozen = {name: weight for name, weight in job.weights().items() if ".adapter." not in name}
    job.train(2)
    after = job.weights()
    reports = [inner.memory_report() for inner in job.inners]
    return {
        "numel": sum(shard.stop - shard.start for shard in job.shards()),
        "names": {shard.name for shard in job.shards()},
        "state numel": sum(report.param_numel for report in reports),
        "host bytes": sum(sum(report.host_bytes.values()) for report in reports),
        "frozen": frozen,
        "frozen after": {name: after[name] for name in frozen},
    }


ADAPTERS_ALONE = "memory of adapters"
scenario(ADAPTERS_ALONE, _adapters_alone)


# -- what a writer copies --------------------------------------------------------------------------


def copies_name(stored_formats: str) -> str:
    return f"copies of state, {stored_formats}"


def _copies(context: Context, stored_formats: str) -> dict[str, int]:
    """Bytes of state that lie in host memory as the checkpoint has them, and how many are written
    from there.
    """
    job = Job(JobSpec(stored_formats=STORED_FORMATS[stored_formats], layout=_PADDED))
    job.train(1)
    directory = place(context, copies_name(stored_formats))
    live = {
        value.data_ptr(): value.nbytes
        for shard in job.shards()
        for key, value in shard.inner.state[shard.param].items()
        if value.dtype == torch.float32
    }
    counts = {"live": sum(live.values())}
    for when, start in (("sync", save), ("async", start_saving)):
        with handed_to_writer() as tensors:
            start(job, directory / when, "dp_reshardable")
        counts[when] = sum(live.get(tensor.data_ptr(), 0) for tensor in tensors)
    return counts


for _formats in STORED_FORMATS:
    scenario(
        copies_name(_formats),
        lambda context, stored_formats=_formats: _copies(context, stored_formats),
        (Phase.TWO_RANKS,),
    )


# -- other numbers of ranks ------------------------------------------------------------------------

RESHARDED_FORMATS = ("fp32", "remainders")
RESHARDED = [(kind, stored_formats) for kind in FORMATS for stored_formats in RESHARDED_FORMATS]


def resharded_name(kind: str, stored_formats: str) -> str:
    return f"other ranks, {kind}, {stored_formats}"


def _between_worlds(context: Context, kind: str, stored_formats: str) -> dict[str, Any]:
    """Two ranks train and save, one loads, trains and saves, two load."""
    name = resharded_name(kind, stored_formats)
    job = Job(
        JobSpec(
            stored_formats=STORED_FORMATS[stored_formats], layout=_PADDED, seed=1 + list(Phase).index(context.phase)
        )
    )
    loaded = None
    if context.phase is not Phase.TWO_RANKS:
        before = Phase.TWO_RANKS if context.phase is Phase.ONE_RANK else Phase.ONE_RANK
        load(job, place(context._replace(phase=before), name), kind)
        loaded = job.snapshot()
    job.train(2)
    save(job, place(context, name), kind)
    return {"loaded": loaded, "saved": job.snapshot()}


for _kind, _formats in RESHARDED:
    scenario(
        resharded_name(_kind, _formats),
        lambda context, kind=_kind, stored_formats=_formats: _between_worlds(context, kind, stored_formats),
        phases=(*BOTH_WORLDS, Phase.TWO_RANKS_AGAIN),
    )
