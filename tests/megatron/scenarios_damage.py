"""Damaged state dicts in Megatron's formats, and failures in the middle of loads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
from checkpoints import load, save
from damage import copied, damaged
from job import replaced
from registry import BOTH_WORLDS, Context, Phase, scenario
from scenarios_checkpoint import place
from scenarios_wrappings import branches
from small import WRAPPINGS, SmallJob, Wrapping

from fused_offload.megatron import param_checkpoint as megatron_values

DAMAGES = "MEGATRON_DAMAGES"
"""Environment variable: how many state dicts of each kind are damaged."""
DAMAGED = [
    (wrapping, kind)
    for wrapping in WRAPPINGS
    for kind in wrapping.formats
    if wrapping.dtype == "bf16" or (wrapping.dtype == "mixed" and wrapping.distributed)
    if kind in ("dp_reshardable", "fully_reshardable", "torch_dist")
]


def damage_name(wrapping: Wrapping, kind: str) -> str:
    return f"damaged, {wrapping.name}, {kind}"


def _read(job: SmallJob, context: Context, wrapping: Wrapping, kind: str) -> Any:
    """The optimizer's part of a checkpoint, as it is read."""
    directory = place(context, damage_name(wrapping, kind))
    save(job, directory, kind)
    read = []
    with replaced((job.optimizer, "load_state_dict", lambda state_dict: read.append(copied(state_dict)))):
        load(job, directory, kind)
    return read[0]


def _refused_steps(job: SmallJob) -> bool:
    try:
        for inner in job.inners:
            inner.step()
    except RuntimeError as error:
        return "half-way" in str(error)
    return False


def _same(state: Any, other: Any) -> bool:
    if isinstance(state, torch.Tensor):
        return torch.equal(state.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
    if isinstance(state, dict):
        return state.keys() == other.keys() and all(_same(state[key], other[key]) for key in state)
    if isinstance(state, list):
        return len(state) == len(other) and all(map(_same, state, other))
    return bool(state == other)


def _settings(job: SmallJob) -> list[dict[str, Any]]:
    return [{key: v for key, v in group.items() if key != "params"} for i in job.inners for group in i.param_groups]


def _damage(context: Context, wrapping: Wrapping, kind: str) -> dict[str, Any]:
    """Damages with their outcomes, for the damaged state dicts that were handled wrongly."""
    counts, wrong = {"refused": 0, "steps refused": 0, "loaded": 0}, []
    with branches(wrapping):
        job = SmallJob(wrapping)
        job.train(2)
        good = _read(job, context, wrapping, kind)
        job.optimizer.load_state_dict(copied(good))
        before, settings = job.snapshot(), _settings(job)
        for seed in range(int(os.environ.get(DAMAGES, "12"))):
            bad, what = damaged(good, seed)
            try:
                job.optimizer.load_state_dict(bad)
            except (ValueError, TypeError):
                if any(inner.failure for inner in job.inners):
                    counts["steps refused"] += 1
                    if not _refused_steps(job):
                        wrong.append(f"{what}: steps go on")
                elif _same(job.snapshot(), before) and _settings(job) == settings:
                    counts["refused"] += 1
                    continue
                else:
                    wrong.append(f"{what}: refused, but something changed")
            except Exception as error:
                wrong.append(f"{what}: {error!r}")
            else:
                counts["loaded"] += 1
                try:
                    job.step()
                    if not all(weights.isfinite().all() for weights in job.weights().values()):
                        wrong.append(f"{what}: not finite")
                except Exception as error:
                    # None is the value of a group without a schedule yet.
                    if "set group['lr'] before" not in str(error):
                        wrong.append(f"{what}: loaded, then {error!r}")
            _take(job, before["weights"])
            job.optimizer.load_state_dict(copied(good))
            if not _same(job.snapshot(), before):
                wrong.append(f"{what}: a good state dict does not bring everything back")
    return {"counts": counts, "wrong": wrong}


def _take(job: SmallJob, weights: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, param in job.model.module.named_parameters():
            param.copy_(weights[name])


for _wrapping, _kind in DAMAGED:
    scenario(
        damage_name(_wrapping, _kind),
        lambda context, wrapping=_wrapping, kind=_kind: _damage(context, wrapping, kind),
        (Phase.ONE_RANK,),
    )


# -- an exception between two parameters -----------------------------------------------------------

INTERRUPTED = [wrapping for wrapping in WRAPPINGS if wrapping.dtype == "bf16"]


def interrupted_name(wrapping: Wrapping) -> str:
    return f"interrupted, {wrapping.name}"


def _message(function: Any, *args: Any) -> str:
    try:
        function(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _changed(job: SmallJob, change: dict[str, Any]) -> Any:
    """A copy of the job's state dict with values in all groups replaced."""
    state_dict = copied(job.optimizer.state_dict())
    groups = state_dict["optimizer"]["param_groups"] if "optimizer" in state_dict else state_dict["param_groups"]
    for group in groups:
        group.update(change)
    return state_dict


def _interrupted(context: Context, wrapping: Wrapping) -> dict[str, Any]:
    """A load that dies after some writes, then one that changes nothing, what is refused then, and a
    load of the same checkpoint.
    """
    results = {}
    with branches(wrapping):
        for kind in wrapping.formats:
            job = SmallJob(wrapping)
            job.train(2)
            directory = place(context, f"{interrupted_name(wrapping)} {kind}")
            save(job, directory, kind)
            saved = job.snapshot()
            job.train(1)
            bad = _changed(job, {"step": -1})
            if wrapping.distributed:
                from fused_offload.megatron import distributed

                owner, name, module = distributed, "write_values", megatron_values
                calls: list[int] = []

                def fail(*args: Any, calls: list[int] = calls, module: Any = module) -> None:
                    calls.append(1)
                    if len(calls) > 1:
                        raise OSError("the disk is gone")
                    module.write_values(*args)

            else:
                owner, name = job.inners[0], "load_state_dict"
                stock = job.inners[0].load_state_dict

                def fail(state_dict: Any, stock: Any = stock) -> None:  # type: ignore[misc]
                    stock(state_dict)
                    raise OSError("the disk is gone")

            with replaced((owner, name, fail)):
                error = _message(load, job, directory, kind)
            if not wrapping.distributed:
                del job.inners[0].load_state_dict
            other_error = _message(job.optimizer.load_state_dict, bad)
            step, saving = _message(job.inners[0].step), _message(job.inners[0].state_dict)
            load(job, directory, kind)
            errors = {"error": error, "other error": other_error, "step": step, "saving": saving}
            results[kind] = {**errors, "saved": saved, "loaded": job.snapshot()}
            job.train(1)
    return results


for _wrapping in INTERRUPTED:
    scenario(
        interrupted_name(_wrapping), lambda context, wrapping=_wrapping: _interrupted(context, wrapping), BOTH_WORLDS
    )


# -- settings and files of another training --------------------------------------------------------


def _refusals(context: Context) -> dict[str, list[str]]:
    """Messages for checkpoints of another training, and that nothing changed."""
    results = {}
    for wrapping in WRAPPINGS:
        if wrapping.dtype != "bf16" or wrapping.place != "ours":
            continue
        job = SmallJob(wrapping)
        job.train(2)
        before = job.snapshot()
        for name, change in (
            ("amsgrad", {"amsgrad": True}),
            ("decay", {"decoupled_weight_decay": False}),
            ("step", {"step": -1}),
        ):
            message = _message(job.optimizer.load_state_dict, _changed(job, change))
            results[f"{wrapping.kind}, {name}"] = [message, str(_same(job.snapshot(), before))]
    return results


def _short(context: Context) -> dict[str, list[str]]:
    """Messages where the last parameter's second moment lacks an element, and that nothing before
    it was written.
    """
    results = {}
    for wrapping, kind in DAMAGED:
        if wrapping.dtype != "bf16" or wrapping.place != "ours" or not wrapping.distributed:
            continue
        job = SmallJob(wrapping)
        job.train(2)
        bad = _read(job, context._replace(directory=context.directory / "short"), wrapping, kind)
        job.train(1)
        before = job.snapshot()
        *_, last = (values for values in _dictionaries(bad["param_state"]) if "exp_avg_sq" in values)
        last["exp_avg_sq"] = last["exp_avg_sq"].reshape(-1)[:-1]
        message = _message(job.optimizer.load_state_dict, bad)
        results[f"{wrapping.kind}, {kind}"] = [message, str(_same(job.snapshot(), before))]
    return results


def _dictionaries(value: Any) -> Iterator[dict[Any, Any]]:
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _dictionaries(inner)


def _damaged_legacy(context: Context) -> dict[str, list[str]]:
    """Files in the legacy format, which only the first rank reads."""
    results = {}
    for wrapping in WRAPPINGS:
        if wrapping.dtype != "bf16" or wrapping.place != "ours" or not wrapping.distributed:
            continue
        job = SmallJob(wrapping)
        job.train(2)
        before = job.snapshot()
        state = job.children[0].get_parameter_state_dp_zero()
        for key in ("param", "exp_avg", "exp_avg_sq", "numel_unpadded"):
            for how in ("lacks", "cut"):
                bad = copied(state)
                if bad is not None:
                    ((_, tensors),) = bad[0].items()
                    if how == "lacks":
                        del tensors[key]
                    else:
                        tensors[key] = tensors[key][:-1] if key != "numel_unpadded" else 3
                message = _message(job.children[0].load_parameter_state_from_dp_zero, bad)
                results[f"{wrapping.kind}, {key}, {how}"] = [message, str(_same(job.snapshot(), before))]
    return results


scenario("checkpoints of another training", _refusals, (Phase.ONE_RANK,))
scenario("a short last moment", _short, (Phase.ONE_RANK,))
scenario("damaged legacy files", _damaged_legacy, (Phase.TWO_RANKS,))
