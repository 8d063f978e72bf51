"""Checkpoints of other optimizers loaded by ours, ours by them, and ours stored in other
formats.
"""

from __future__ import annotations

import contextlib
import pickle
from importlib.metadata import version
from typing import Any, NamedTuple

import torch
from checkpoints import FORMATS, load, save
from job import SEVERAL_BUCKETS, Job, JobSpec, Layout, te_branches
from pairs import covering
from registry import Context, NotInReleaseError, Phase, scenario
from scenarios_checkpoint import BEFORE, place
from scenarios_training import STORED_FORMATS

_LAYOUT = Layout(bucket_size=SEVERAL_BUCKETS, overlap_grad_reduce=True)
_TWO = (Phase.TWO_RANKS,)


class Transfer(NamedTuple):
    """One optimizer saves, another one loads; each with its formats."""

    kind: str
    writer: str
    writer_formats: str
    reader: str
    reader_formats: str

    @property
    def name(self) -> str:
        return f"{self.kind}, from {self.writer} ({self.writer_formats}) to {self.reader} ({self.reader_formats})"

    @property
    def with_te(self) -> bool:
        """True if Megatron has to take its branches for TransformerEngine.

        FusedAdam needs them, and without them Megatron cannot load HybridDeviceOptimizer's state.
        """
        return "FusedAdam" in (self.writer, self.reader) or self.reader == "hybrid"


TRANSFERS = [
    Transfer(kind, *ends)
    for kind in FORMATS
    for ends in (
        ("hybrid", "fp32", "ours", "fp32"),
        ("hybrid", "fp32", "ours", "remainders, bf16 moments"),
        ("ours", "fp32", "hybrid", "fp32"),
        ("ours", "remainders", "hybrid", "fp32"),
        ("FusedAdam", "fp32", "ours", "fp32"),
        ("ours", "remainders", "FusedAdam", "fp32"),
        ("ours", "fp32", "ours", "remainders, bf16 moments"),
        ("ours", "remainders, bf16 moments", "ours", "fp32"),
    )
]
COVERING = covering(TRANSFERS)
REMAINDER_FORMATS = ("fp32", "remainders")
FROM_REMAINDERS = [
    Transfer(kind, "FusedAdam", "remainders", "ours", stored_formats)
    for kind in FORMATS
    for stored_formats in REMAINDER_FORMATS
]


def _transfer(context: Context, case: Transfer) -> dict[str, Any]:
    with te_branches() if case.with_te else contextlib.nullcontext():
        # With several padded buckets, Megatron itself loses state of others in the
        # fully_reshardable format.
        layout = Layout() if case.kind == "fully_reshardable" and case.writer != "ours" else _LAYOUT
        writer = Job(JobSpec(case.writer, STORED_FORMATS[case.writer_formats], layout))
        writer.train(BEFORE)
        save(writer, place(context, case.name), case.kind)
        reader = Job(JobSpec(case.reader, STORED_FORMATS[case.reader_formats], layout, seed=2))
        before = reader.snapshot()
        try:
            load(reader, place(context, case.name), case.kind)
        except pickle.UnpicklingError as error:
            if case.writer != "hybrid":
                raise
            raise NotInReleaseError(
                f"megatron-core {version('megatron-core')} cannot read groups with classes, as HybridDeviceOptimizer "
                "saves them"
            ) from error
        except ValueError as error:
            return {"refused": str(error), "before": before, "after": reader.snapshot()}
        result = {"refused": None, "saved": writer.snapshot(), "loaded": reader.snapshot()}
        result["groups"] = [
            {key: value for key, value in group.items() if key != "params"}
            for inner in reader.inners
            for group in inner.param_groups
            if case.reader == "ours"
        ]
        return {**result, "log": writer.train(2), "read log": reader.train(2)}


for _case in (*TRANSFERS, *FROM_REMAINDERS):
    scenario(
        _case.name,
        lambda context, case=_case: _transfer(context, case),
        _TWO,
        large=_case in TRANSFERS and _case not in COVERING,
    )


# -- what the files hold ---------------------------------------------------------------------------

WRITTEN_FORMATS = tuple(STORED_FORMATS)


def written_name(kind: str, stored_formats: str) -> str:
    return f"contents, {kind}, {stored_formats}"


def _written(context: Context, kind: str, stored_formats: str) -> dict[str, Any]:
    """The state of whole parameters as it is, and as a file has it that nobody but torch has
    read.
    """
    job = Job(JobSpec(stored_formats=STORED_FORMATS[stored_formats], layout=_LAYOUT))
    job.train(BEFORE)
    directory = place(context, written_name(kind, stored_formats))
    save(job, directory, kind)
    if kind == "legacy":
        found = _legacy_contents(job, torch.load(directory / "distrib_optim.pt", weights_only=False))
    else:
        from megatron.core import dist_checkpointing

        found = _reshardable_contents(job, dist_checkpointing.load_plain_tensors(str(directory)))
    return {"state": job.state(), "found": found}


def _legacy_contents(job: Job, file: Any) -> dict[str, dict[str, torch.Tensor]]:
    """Parameters cut out of the buffers that were gathered without the padding at the ends of
    buckets.
    """
    names = {id(param): name for name, param in job.model.module.named_parameters()}
    (buffer,) = job.model.buffers
    (tensors,) = file[0].values()
    skipped, starts = 0, {}
    for bucket in buffer.buckets:
        starts[bucket.bucket_id] = skipped
        skipped += bucket.grad_data.numel() - bucket.numel_unpadded
    return {
        names[id(param)]: {
            key: tensors[key][start - starts[bucket] : stop - starts[bucket]]
            for key in ("exp_avg", "exp_avg_sq", "param")
        }
        for param, (start, stop, bucket) in buffer.param_index_map.items()
    }


def _reshardable_contents(job: Job, tensors: dict[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """Parameters under the names that the model gives them in checkpoints; those of all layers are
    one tensor.
    """
    from megatron.core.dist_checkpointing import ShardedTensor

    names = {id(param): name for name, param in job.model.module.named_parameters()}
    found = {}
    for sharded in job.model.module.sharded_state_dict().values():
        if isinstance(sharded, ShardedTensor) and id(sharded.data) in names:
            layer = sharded.global_offset[: sharded.prepend_axis_num]
            found[names[id(sharded.data)]] = {
                key: tensors[f"optimizer.state.{key}.{sharded.key}"][layer].reshape(-1)
                for key in ("exp_avg", "exp_avg_sq", "param")
            }
    return found


for _kind in ("fully_reshardable", "legacy"):
    for _formats in WRITTEN_FORMATS:
        scenario(
            written_name(_kind, _formats),
            lambda context, kind=_kind, stored_formats=_formats: _written(context, kind, stored_formats),
            _TWO,
        )
