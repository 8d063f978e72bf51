"""Megatron-FSDP, version 1: training, checkpoints in parts, other numbers of ranks, and its
stand-alone form.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import os
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from fsdp_job import DEVICE, FsdpJob, FsdpSpec, ShardReference, fake_gpu, load, optimizer_config, save, state_dict
from job import replaced
from registry import BOTH_WORLDS, Context, NotInReleaseError, Phase, scenario
from walkers import REFRESHES

import fused_offload.megatron as fom
from fused_offload import FusedOffloadAdam, OffloadConfig
from fused_offload.megatron.step_log import VARIABLE

_TWO = (Phase.TWO_RANKS,)
BEFORE, BETWEEN, AFTER = 2, 1, 1
"""Iterations before the first save, between it and the second, and after that."""

# -- training --------------------------------------------------------------------------------------


class Run(NamedTuple):
    """A run that has to be the reference's, bit for bit."""

    spec: FsdpSpec
    iterations: int
    phases: tuple[Phase, ...] = _TWO


RUNS = {
    "place of HybridDeviceOptimizer": Run(FsdpSpec(), 10, BOTH_WORLDS),
    "place of FusedAdam": Run(FsdpSpec("ours as FusedAdam"), 5),
    "default mode": Run(FsdpSpec(precision_aware=False), 5),
    "window": Run(FsdpSpec(window_bytes=2**30), 3),
    **{strategy: Run(FsdpSpec(strategy=strategy), 3) for strategy in ("no_shard", "optim", "optim_grads")},
}


def training_name(name: str) -> str:
    return f"Megatron-FSDP, {name}"


def _training(context: Context, run: Run) -> dict[str, Any]:
    results = {}
    with fake_gpu():
        for spec in (run.spec, run.spec._replace(optimizer="reference", window_bytes=0)):
            job = FsdpJob(spec)
            results[spec.optimizer] = {"log": job.train(run.iterations), **job.snapshot()}
            if job.is_ours:
                results["flags"] = (job.inner.master_weights, job.inner.use_decoupled_grad)
                results["keys"] = sorted({key for entry in job.inner.state.values() for key in entry})
                results["report"] = job.inner.memory_report()
                results["shards"] = [param._local_tensor.numel() for param in job.params().values()]
                results["shown"] = repr(job.inner)
    return {"ours": results.pop(run.spec.optimizer), **results}


for _name, _run in RUNS.items():
    scenario(training_name(_name), lambda context, run=_run: _training(context, run), _run.phases)


PLACES = ("ours", "ours as FusedAdam")


def _moved_away(context: Context) -> dict[str, Any]:
    """Training with the calls that RL frameworks make after each step, refreshes of masters
    included.
    """
    results = {}
    with fake_gpu():
        for name in (*PLACES, "left"):
            job = FsdpJob(FsdpSpec("ours" if name == "left" else name))
            for _ in range(3):
                job.step()
                if name != "left":
                    job.optimizer.offload_to_cpu()
                    job.optimizer.restore_from_cpu()
                    for refresh in REFRESHES:
                        refresh(job)
            results[name] = job.snapshot()
    return results


scenario("Megatron-FSDP, moved away and back", _moved_away, _TWO)


# -- checkpoints -----------------------------------------------------------------------------------

RESUMES = {
    "gated MLPs": FsdpSpec(),
    "gated MLPs, default mode, place of FusedAdam": FsdpSpec("ours as FusedAdam", precision_aware=False),
    "gated MLPs, bf16 moments, optim": FsdpSpec(moments=torch.bfloat16, strategy="optim"),
    "gated MLPs, 8-bit moments": FsdpSpec(moments=torch.uint8),
    "gated experts": FsdpSpec(model="experts"),
    "fused projections": FsdpSpec(model="fused projections"),
}


def resume_name(name: str) -> str:
    return f"Megatron-FSDP, resume, {name}"


def folder(context: Context, name: str) -> Path:
    return context.directory / "fsdp" / f"{name}, {context.phase.value}".replace(" ", "_")


def _resume(context: Context, name: str, spec: FsdpSpec) -> dict[str, Any]:
    """Saves twice, and goes on; others start elsewhere, load one of the two, and catch up."""
    with fake_gpu() as copied:
        job = FsdpJob(spec)
        log = job.train(BEFORE)
        states = []
        for number, iterations in enumerate((BETWEEN, AFTER)):
            save(job, folder(context, f"{name} {number}"))
            states.append(job.snapshot())
            log += job.train(iterations)
        results: dict[str, Any] = {"saved": states, "loaded": [], "went on": {"log": log, **job.snapshot()}}
        for number, iteration in enumerate((BEFORE, BEFORE + BETWEEN)):
            other = FsdpJob(spec._replace(seed=2, fraction=0.3))
            del copied[:]
            load(other, folder(context, f"{name} {number}"), iteration)
            results["copied"] = sum(copied)
            results["loaded"].append(other.snapshot())
            rest = other.train(BEFORE + BETWEEN + AFTER - iteration)
            results[f"resumed {number}"] = {"log": log[:iteration] + rest, **other.snapshot()}
        return results


for _name, _spec in RESUMES.items():
    scenario(resume_name(_name), lambda context, name=_name, spec=_spec: _resume(context, name, spec), _TWO)


def _written(context: Context) -> dict[str, Any]:
    with fake_gpu():
        job = FsdpJob(FsdpSpec())
        job.train(BEFORE)
        save(job, folder(context, "other ranks"))
        return job.snapshot()


def _read(context: Context) -> dict[str, Any]:
    """By one process alone, and by both, what the other number of ranks wrote."""
    writer = Phase.TWO_RANKS if context.phase.alone else Phase.ONE_RANK
    directory = folder(context._replace(phase=writer), "other ranks")
    if not directory.exists():
        raise NotInReleaseError(f"nothing was written by {writer.value}")
    with fake_gpu():
        job = FsdpJob(FsdpSpec(seed=2))
        load(job, directory, BEFORE)
        return job.snapshot()


scenario("Megatron-FSDP, written", _written, BOTH_WORLDS)
scenario("Megatron-FSDP, written by others", _read, (Phase.ONE_RANK, Phase.TWO_RANKS_AGAIN))


def _other_adam(context: Context) -> dict[str, Any]:
    """Torch's AdamW, which Megatron takes without TransformerEngine, writes for ours, and the other
    way round.

    On one rank: with an empty shard anywhere, Megatron waits for ever for ranks whose AdamW has no
    state of it.
    """
    results = {}
    default = FsdpSpec(precision_aware=False)
    with fake_gpu():
        for writer, reader in (("stock", "ours"), ("ours", "stock")):
            job = FsdpJob(default._replace(optimizer=writer))
            job.train(BEFORE)
            place = folder(context, f"written by {writer}")
            save(job, place)
            other = FsdpJob(default._replace(optimizer=reader, seed=2))
            load(other, place, BEFORE)
            ours = job if writer == "ours" else other
            stock = other if writer == "ours" else job
            results[f"{writer} to {reader}"] = {
                "saved": job.snapshot()["state"],
                "loaded": other.snapshot()["state"],
                "steps": [
                    {group["step"] for group in ours.inner.param_groups},
                    {float(entry["step"]) for entry in stock.inner.state.values()},
                ],
            }
    return results


scenario("Megatron-FSDP, torch's AdamW", _other_adam, (Phase.ONE_RANK,))


@contextlib.contextmanager
def _counted_collectives() -> Iterator[list[str]]:
    calls: list[str] = []

    def counting(name: str) -> Any:
        function = getattr(torch.distributed, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return function(*args, **kwargs)

        return counted

    names = ("all_gather_object", "all_gather", "all_reduce", "broadcast")
    with replaced(*((torch.distributed, name, counting(name)) for name in names)):
        yield calls


def _chunks(context: Context) -> dict[str, Any]:
    """Chunks of all ranks, as Megatron gathers them and as the hook knows them, with the requests
    made.
    """
    from megatron.core.distributed.fsdp.src.megatron_fsdp import uneven_dtensor

    results: dict[str, Any] = {}
    with fake_gpu():
        for strategy in ("optim_grads_params", "optim_grads", "optim", "no_shard"):
            job = FsdpJob(FsdpSpec(strategy=strategy))
            job.train(1)
            # Must come first, since it gives the parameters their names.
            job.model.state_dict_for_save_checkpoint()
            with _counted_collectives() as packing:
                packed = job.optimizer.sharded_param_state_fsdp_dtensor()
            with _counted_collectives() as telling:
                uneven_dtensor.preprocess_state_dict_for_uneven_dtensor(packed)
            told, found = {}, {}
            for name, values in packed["state"].items():
                for key in ("exp_avg", "exp_avg_sq"):
                    (told[name, key],) = values[key]._local_tensor.__create_chunk_list__()
                    found[name, key] = uneven_dtensor.gather_and_compute_chunk_metadata.__wrapped__(values[key])
            results[strategy] = {
                "keys": [(name, list(values)) for name, values in packed["state"].items()],
                "packing": packing,
                "telling": telling,
                "told": {key: (tuple(chunk.offsets), tuple(chunk.sizes)) for key, chunk in told.items()},
                "found": {key: (tuple(chunk.offsets), tuple(chunk.sizes)) for key, chunk in found.items()},
            }
    return results


scenario("Megatron-FSDP, where parts lie", _chunks, _TWO)


def _empty_checkpoint(context: Context) -> dict[str, Any]:
    """Loading into an optimizer that never stepped, and packing one, change no parameter and no
    count.
    """
    with fake_gpu():
        job = FsdpJob(FsdpSpec())
        before = {name: param._local_tensor.clone() for name, param in job.params().items()}
        for param in job.params().values():
            param.decoupled_grad = torch.ones_like(param)
        packed = state_dict(job, is_loading=True)["optimizer"]
        after = {name: param._local_tensor.clone() for name, param in job.params().items()}
        return {
            "before": before,
            "after": after,
            "grads": [param.grad is None for param in job.params().values()],
            "steps": sorted({meta["step"] for meta in packed["param_to_group_meta"].values()}),
        }


scenario("Megatron-FSDP, the dummy step", _empty_checkpoint, _TWO)


# -- the stand-alone form --------------------------------------------------------------------------


def fully_sharded(optimizer: str, *, decoupled: bool, fraction: float = 1.0, seed: int = 0) -> tuple[Any, Any]:
    from megatron.core.distributed.fsdp.src.megatron_fsdp import fully_shard
    from torch.distributed.device_mesh import DeviceMesh

    if "use_decoupled_grad" not in inspect.signature(fully_shard).parameters:
        raise NotInReleaseError(f"fully_shard of megatron-core {version('megatron-core')} has no use_decoupled_grad")
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(30, 50), torch.nn.ReLU(), torch.nn.Linear(50, 50), torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(50, 7)).to(DEVICE)
    settings: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
    if optimizer == "ours":
        offload = OffloadConfig(fraction=fraction, chunk_bytes=16000)
        inner: Any = FusedOffloadAdam(model.parameters(), **settings, use_decoupled_grad=decoupled, offload=offload)
    else:
        inner = ShardReference(model.parameters(), **settings, betas=(0.9, 0.999), eps=1e-8)
        inner.decoupled = decoupled
    world_size = torch.distributed.get_world_size()
    return fully_shard(
        model,
        inner,
        device_mesh=DeviceMesh("cuda", torch.arange(world_size).view(-1, 1), mesh_dim_names=("dp", "tp")),
        dp_shard_dim="dp",
        tp_dim="tp",
        fsdp_unit_modules=[torch.nn.Linear],
        use_decoupled_grad=decoupled,
        calculate_per_token_loss=True,  # gloo cannot scale while it sums
    )


def train_plainly(model: Any, optimizer: Any, steps: range) -> dict[str, Any]:
    """Losses, and this rank's shards of the weights at the end."""
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(10 * step + torch.distributed.get_rank())
        loss = model(torch.randn(4, 30, generator=generator).to(DEVICE)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    named = model.param_and_grad_buffer.optimizer_named_parameters
    shards = {name: param._local_tensor.detach().clone() for name, param in named}
    return {"losses": losses, "shards": shards}


def resume_plainly(place: Path, saved_at: int, steps: int, fraction: float = 1.0) -> tuple[dict[str, Any], ...]:
    """A run that saves and goes on, and another that starts elsewhere, loads and does the same."""
    model, optimizer = fully_sharded("ours", decoupled=False)
    train_plainly(model, optimizer, range(saved_at))
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=place)
    went_on = train_plainly(model, optimizer, range(saved_at, steps))
    model, optimizer = fully_sharded("ours", decoupled=False, fraction=fraction, seed=1)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.load(state, checkpoint_id=place)
    model.load_state_dict(state["model"], strict=False)
    optimizer.load_state_dict(state["optimizer"])
    return went_on, train_plainly(model, optimizer, range(saved_at, steps))


def _standalone(context: Context) -> dict[str, Any]:
    results: dict[str, Any] = {}
    with fake_gpu():
        for decoupled in (False, True):
            for name in ("ours", "reference"):
                run = train_plainly(*fully_sharded(name, decoupled=decoupled), range(5))
                results[f"{name}, decoupled={decoupled}"] = run
        results["went on"], results["resumed"] = resume_plainly(folder(context, "standalone"), 3, 6)
    return results


scenario("Megatron-FSDP, stand-alone", _standalone)


# -- what is refused, and what is said -------------------------------------------------------------


def _refused(context: Context) -> dict[str, str]:
    from megatron.core.optimizer import distrib_optimizer, get_megatron_optimizer
    from megatron.core.transformer import fsdp_dtensor_checkpoint

    results = {}
    with fake_gpu():
        job = FsdpJob(FsdpSpec())
        distributed = distrib_optimizer.DistributedOptimizer
        for name, change in {
            "gradients elsewhere": (job.model.ddp_config, "megatron_fsdp_use_decoupled_grad", False),
            "another checkpoint": (distributed, "sharded_param_state_fsdp_dtensor", None),
            "other splits": (fsdp_dtensor_checkpoint, "make_fsdp_dtensor", None),
        }.items():
            owner, attribute, value = change
            with contextlib.ExitStack() as stack:
                stack.enter_context(fom.installed())
                stack.callback(setattr, owner, attribute, getattr(owner, attribute))
                if value is None:
                    delattr(owner, attribute)
                else:
                    setattr(owner, attribute, value)
                try:
                    get_megatron_optimizer(optimizer_config(FsdpSpec()), [job.model])
                    results[name] = "nothing was refused"
                except (ValueError, RuntimeError) as error:
                    results[name] = f"{type(error).__name__}: {error}"
    return results


def _said(context: Context) -> str:
    output = io.StringIO()
    os.environ[VARIABLE] = "2"
    try:
        with fake_gpu(), contextlib.redirect_stdout(output):
            FsdpJob(FsdpSpec()).train(2)
    finally:
        del os.environ[VARIABLE]
    return output.getvalue()


scenario("Megatron-FSDP, refused", _refused, (Phase.ONE_RANK,))
scenario("Megatron-FSDP, what is said", _said, _TWO)
