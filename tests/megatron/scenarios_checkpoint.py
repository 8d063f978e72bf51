"""Save and resume in every format, with as many ranks and with others."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, NamedTuple

from checkpoints import FORMATS, load, save, start_saving
from job import SEVERAL_BUCKETS, Job, JobSpec, Layout, te_branches
from registry import BOTH_WORLDS, Context, Phase, scenario
from scenarios_training import FORMS, LAYOUTS, SMALL_CHUNK

_PADDED = Layout(bucket_size=SEVERAL_BUCKETS, overlap_grad_reduce=True)
BEFORE, AFTER = 3, 3
"""Iterations before the save and after it."""


class Resume(NamedTuple):
    """A run that saves and goes on, and another that starts elsewhere, loads and does the same."""

    kind: str
    layout: str
    forms: str
    iterations_before: int = BEFORE
    optimizer: str = "ours"
    with_te: bool = False

    @property
    def name(self) -> str:
        when = f"after {self.iterations_before} iterations{', TE' if self.with_te else ''}"
        return f"resume {self.optimizer}, {self.kind}, {self.layout}, {self.forms}, {when}"

    @property
    def phases(self) -> tuple[Phase, ...]:
        """One rank for the plainest, which stand for the others there."""
        plain = self.layout == "all overlapped" and self.iterations_before and not self.with_te
        return BOTH_WORLDS if plain else (Phase.TWO_RANKS,)

    def spec(self) -> JobSpec:
        return JobSpec(self.optimizer, FORMS[self.forms], LAYOUTS[self.layout], fraction=0.3)


RESUMES = [
    *(Resume(kind, "all overlapped", forms) for kind in FORMATS for forms in FORMS),
    *(Resume(kind, "dense and experts", "remainders") for kind in FORMATS),
    *(Resume(kind, "empty group", "fp32") for kind in FORMATS),
    *(Resume(kind, "empty rank", "remainders") for kind in ("fully_reshardable", "legacy")),
    *(Resume(kind, "several buckets", forms, 0) for kind in FORMATS for forms in ("fp32", "remainders")),
    *(Resume(kind, "dense and experts", "fp32", 0) for kind in ("dp_reshardable", "fully_reshardable")),
    # Where TransformerEngine is installed, Megatron looks for step counts elsewhere; and there are two places to be in.
    *(Resume(kind, "dense and experts", "fp32", with_te=True) for kind in FORMATS),
    *(Resume(kind, "all overlapped", "remainders", BEFORE, "ours as FusedAdam", True) for kind in FORMATS),
    Resume("dp_reshardable", "all overlapped", "remainders", 0, "ours", True),
    Resume("dp_reshardable", "all overlapped", "fp32", 0, "ours as FusedAdam", True),
]


def resume(job: Job, other: Job, directory: Path, case: Resume) -> dict[str, Any]:
    job.train(case.iterations_before)
    save(job, directory, case.kind)
    saved = job.snapshot()
    log = job.train(AFTER)
    load(other, directory, case.kind)
    loaded = other.snapshot()
    resumed_log = other.train(AFTER)
    return {
        "buckets": job.buckets(),
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
    scenario(_case.name, lambda context, case=_case: _resume(context, case), _case.phases)


# -- training while a checkpoint is written ----------------------------------------------------------------------

WRITTEN_LATER = [(kind, forms) for kind in ("dp_reshardable", "fully_reshardable") for forms in FORMS]


def written_later_name(kind: str, forms: str) -> str:
    return f"written later, {kind}, {forms}"


def _written_later(context: Context, kind: str, forms: str) -> dict[str, Any]:
    spec = JobSpec(forms=FORMS[forms], layout=_PADDED, fraction=0.5)
    job, other = Job(spec), Job(spec._replace(seed=2))
    job.train(2)
    directory = place(context, written_later_name(kind, forms))
    request = start_saving(job, directory, kind)
    saved = job.snapshot()
    job.train(2)
    request.execute_sync()
    load(other, directory, kind)
    return {"saved": saved, "meanwhile": job.snapshot(), "loaded": other.snapshot()}


for _kind, _forms in WRITTEN_LATER:
    scenario(
        written_later_name(_kind, _forms),
        lambda context, kind=_kind, forms=_forms: _written_later(context, kind, forms),
        phases=(Phase.TWO_RANKS,),
    )


# -- other numbers of ranks --------------------------------------------------------------------------------------

RESHARDED_FORMS = ("fp32", "remainders")
RESHARDED = [(kind, forms) for kind in FORMATS for forms in RESHARDED_FORMS]


def resharded_name(kind: str, forms: str) -> str:
    return f"other ranks, {kind}, {forms}"


def _between_worlds(context: Context, kind: str, forms: str) -> dict[str, Any]:
    """Two ranks train and save, one loads, trains and saves, two load."""
    name = resharded_name(kind, forms)
    job = Job(JobSpec(forms=FORMS[forms], layout=_PADDED, seed=1 + list(Phase).index(context.phase)))
    loaded = None
    if context.phase is not Phase.TWO_RANKS:
        before = Phase.TWO_RANKS if context.phase is Phase.ONE_RANK else Phase.ONE_RANK
        load(job, place(context._replace(phase=before), name), kind)
        loaded = job.snapshot()
    job.train(2)
    save(job, place(context, name), kind)
    return {"loaded": loaded, "saved": job.snapshot()}


for _kind, _forms in RESHARDED:
    scenario(
        resharded_name(_kind, _forms),
        lambda context, kind=_kind, forms=_forms: _between_worlds(context, kind, forms),
        phases=(*BOTH_WORLDS, Phase.TWO_RANKS_AGAIN),
    )
