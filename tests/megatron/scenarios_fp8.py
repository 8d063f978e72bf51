"""Parameters of a class that stands for other tensors, as TransformerEngine's in FP8, with
Megatron's own masters and with the optimizer's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from checkpoints import FORMATS, need_reading
from job import SEVERAL_BUCKETS, Job, JobSpec, Layout, build_model, build_optimizer, replaced, te_branches
from registry import Context, Phase, scenario

ITERATIONS = 4
_MEGATRONS_MASTERS = (("use_precision_aware_optimizer", False), ("fp8_recipe", "blockwise"))
_OUR_MASTERS = (("store_param_remainders", False),)
RECIPES = ("delayed", "tensorwise", "blockwise")


def quantised(values: torch.Tensor) -> torch.Tensor:
    """Bytes of float8_e4m3fn."""
    return values.bfloat16().to(torch.float8_e4m3fn).view(torch.uint8)


class QuantisedLike(torch.Tensor):
    """TransformerEngine's quantised parameters as Megatron uses them, without a scale."""

    _data: torch.Tensor

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.bfloat16, device=data.device)
        made._data = data
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0]._data)
        args, kwargs = torch.utils._pytree.tree_map_only(
            QuantisedLike, lambda tensor: tensor._data.view(torch.float8_e4m3fn).bfloat16(), (args, kwargs or {})
        )
        return func(*args, **kwargs)


def _write_shards(
    params: Sequence[Any], masters: Sequence[Any], starts: Sequence[Any], group: Any, *others: Any
) -> None:
    """Ranks agree on the largest magnitude of every parameter, also on those without a part of it."""
    amaxes = torch.zeros(len(params))
    for index, master in enumerate(masters):
        if master is not None:  # something of it belongs to this rank
            amaxes[index] = master.bfloat16().float().abs().max()
    torch.distributed.all_reduce(amaxes, torch.distributed.ReduceOp.MAX, group=group)
    for param, master, start, amax in zip(params, masters, starts, amaxes, strict=True):
        param._amax = amax.reshape(1).clone()
        if master is not None:
            param._data.view(-1)[start : start + master.numel()] = quantised(master)


def _move(param: Any, memory: torch.Tensor) -> None:
    memory.copy_(param._data)
    param._data = memory


@contextlib.contextmanager
def quantised_models() -> Iterator[None]:
    """Within the context, models are built with quantised matrices, which Megatron treats as
    TransformerEngine's.
    """
    from megatron.core import distributed, fp8_utils
    from megatron.core.distributed import param_and_grad_buffer

    wrap = distributed.DistributedDataParallel

    def quantise_and_wrap(config: Any, ddp_config: Any, model: Any) -> Any:
        for module in model.decoder.modules():
            weight = module._parameters.get("weight")
            if weight is not None and weight.dim() == 2:
                data = QuantisedLike(quantised(weight.detach()))
                module.weight = param = torch.nn.Parameter(data, weight.requires_grad)
                vars(param).update(vars(weight))
                param.get_high_precision_init_val = weight.detach
                param.clear_high_precision_init_val = lambda: None
        ddp_config.fp8_param_gather = True
        return wrap(config, ddp_config, model)

    with replaced(
        (fp8_utils, "HAVE_TE_FP8_TENSOR_CLASS", True),
        (fp8_utils, "FP8_TENSOR_CLASS", QuantisedLike),
        (fp8_utils, "_modify_underlying_storage_impl", _move),
        (fp8_utils, "_quantize_param_shard_impl", _write_shards),
        (distributed, "DistributedDataParallel", quantise_and_wrap),
        # gloo gathers buffers of several dtypes in one go as if all were of the first one's
        (param_and_grad_buffer, "_coalescing_manager", lambda *args, **kwargs: contextlib.nullcontext()),
    ):
        yield


def _place(optimizer: str) -> contextlib.AbstractContextManager[None]:
    return te_branches() if optimizer == "ours as FusedAdam" else contextlib.nullcontext()


def _trained(optimizer: str, fraction: float, config: Any) -> tuple[Job, dict[str, Any]]:
    """A job behind some steps, offloaded in small chunks, and what came of them."""
    with quantised_models(), _place(optimizer):
        job = Job(JobSpec(optimizer, fraction=fraction, chunk_bytes=8000, lr=1e-3, config=config))
        losses = [step.loss for step in job.train(ITERATIONS)]
        return job, {"losses": losses, **job.snapshot(), **_written(job)}


def _written(job: Job) -> dict[str, dict[str, torch.Tensor]]:
    """Bytes and amaxes of the quantised parameters."""
    matrices = {name: p for name, p in job.model.module.named_parameters() if isinstance(p, QuantisedLike)}
    return {
        "bytes": {name: param._data.clone() for name, param in matrices.items()},
        "amaxes": {name: param._amax.clone() for name, param in matrices.items()},
    }


def _train(context: Context) -> dict[str, Any]:
    """In both places, offloaded in small chunks and resident, and with torch's AdamW."""
    cases = {
        "offloaded": ("ours", 1.0, _MEGATRONS_MASTERS),
        "resident": ("ours", 0.0, _MEGATRONS_MASTERS),
        "as FusedAdam": ("ours as FusedAdam", 1.0, _MEGATRONS_MASTERS),
        "AdamW": ("stock", 1.0, _MEGATRONS_MASTERS[1:]),
    }
    return {name: _trained(*case)[1] for name, case in cases.items()}


def _optimizer_state(job: Job, kind: str, *, is_loading: bool) -> dict[str, Any]:
    metadata = {"distrib_optim_sharding_type": kind, "chained_optim_avoid_prefix": True}
    weights = job.model.module.sharded_state_dict()
    return {"optimizer": job.optimizer.sharded_state_dict(weights, is_loading=is_loading, metadata=metadata)}


def _take_weights(job: Job, donor: Job) -> None:
    for param, source in zip(job.model.parameters(), donor.model.parameters(), strict=True):
        memory, values = (p._data if isinstance(p, QuantisedLike) else p.data for p in (param, source))
        memory.copy_(values)


def _reloaded(context: Context) -> dict[str, list[tuple[bool, torch.Tensor, torch.Tensor]]]:
    """Parameters in both places: quantised or not, master after a reload, loaded weights."""
    results = {}
    for optimizer in ("ours", "ours as FusedAdam"):
        with quantised_models(), _place(optimizer):
            spec = JobSpec(optimizer, lr=1e-3, config=_MEGATRONS_MASTERS)
            job, donor = Job(spec), Job(spec._replace(seed=2))
            job.train(1)
            _take_weights(job, donor)
            job.optimizer.reload_model_params()
            results[optimizer] = [
                (
                    isinstance(shard.model_param, QuantisedLike),
                    shard.param.clone(),
                    shard.model_param.float().reshape(-1)[shard.start : shard.stop].detach().clone(),
                )
                for shard in job.shards()
            ]
    return results


def _refused(context: Context) -> dict[str, str]:
    """Error messages where the optimizer owns the masters and nobody writes the parameters."""
    messages = {}
    for name, optimizer, config in (
        ("hybrid place", "ours", (("fp8_recipe", "blockwise"),)),
        ("FusedAdam's place", "ours as FusedAdam", (("fp8_recipe", "delayed"),)),
    ):
        with quantised_models(), _place(optimizer):
            spec = JobSpec(optimizer, config=(*config, ("reuse_grad_buf_for_mxfp8_param_ag", True)))
            try:
                build_optimizer(spec, build_model(spec))
            except ValueError as error:
                messages[name] = str(error)
    return messages


def _frozen(context: Context) -> dict[str, bool]:
    """True for each place where 16-bit parameters beside frozen quantised ones have masters in the
    optimizer.
    """
    results = {}
    for optimizer in ("ours", "ours as FusedAdam"):
        with quantised_models(), _place(optimizer):
            job = Job(JobSpec(optimizer, layout=Layout(trainable=("layernorm",))))
            job.train(1)
            [inner] = job.inners
            results[optimizer] = inner.master_weights
    return results


def _owned(context: Context) -> dict[str, Any]:
    """Masters in host memory beside quantised parameters: each recipe and place, and Megatron's own
    masters.
    """
    results = {}
    cases: list[tuple[str, str, float, Any]] = [("Megatron's", "ours", 1.0, _MEGATRONS_MASTERS)]
    for recipe in RECIPES:
        config = (*_OUR_MASTERS, ("fp8_recipe", recipe))
        cases.append((f"{recipe}, hybrid place", "ours", 1.0, config))
        cases.append((f"{recipe}, FusedAdam's place", "ours as FusedAdam", 1.0, config))
    cases.append(("resident", "ours", 0.0, cases[1][3]))
    cases.append(("half", "ours", 0.5, cases[1][3]))
    for name, *case in cases:
        job, result = _trained(*case)
        inner = job.optimizer.chained_optimizers[0].optimizer
        results[name] = {
            **result,
            "owns": inner.master_weights,
            "held": [shard.param.rounded is None for shard in job.shards() if hasattr(shard.param, "rounded")],
        }
    return results


def _owned_beside_recipes(context: Context) -> dict[str, tuple[bool, bool]]:
    """16-bit parameters and a recipe: whether the optimizer has masters, and whether Megatron has
    any.
    """
    results = {}
    for recipe in RECIPES:
        with te_branches():
            job = Job(JobSpec("ours as FusedAdam", config=(("fp8_recipe", recipe),)))
            job.train(1)
            [optimizer] = job.optimizer.chained_optimizers
            groups = optimizer.shard_fp32_from_float16_groups
            results[recipe] = (
                optimizer.optimizer.master_weights,
                any(master is not None for group in groups for master in group),
            )
    return results


def _resumed(context: Context) -> dict[str, Any]:
    """Two runs that go on alike, one that saved and one that loaded, from and into masters of either
    owner. Weights travel from model to model.
    """
    from megatron.core import dist_checkpointing

    results = {}
    ours = (*_OUR_MASTERS, ("fp8_recipe", "blockwise"))
    for kind in FORMATS[:2]:
        for name, saving, loading in (
            ("Megatron's to Megatron's", _MEGATRONS_MASTERS, _MEGATRONS_MASTERS),
            ("ours to ours", ours, ours),
            ("Megatron's to ours", _MEGATRONS_MASTERS, ours),
            ("ours to Megatron's", ours, _MEGATRONS_MASTERS),
        ):
            directory = context.directory / f"quantised, {kind}, {name}"
            with quantised_models():
                layout = Layout(bucket_size=SEVERAL_BUCKETS)
                job = Job(JobSpec(layout=layout, lr=1e-3, config=saving))
                other = Job(JobSpec(layout=layout, lr=1e-3, config=loading, seed=2))
                job.train(2)
                if job.rank == 0:
                    directory.mkdir()
                torch.distributed.barrier()
                dist_checkpointing.save(_optimizer_state(job, kind, is_loading=False), str(directory))
                torch.distributed.barrier()
                need_reading()
                loaded = dist_checkpointing.load(_optimizer_state(other, kind, is_loading=True), str(directory))
                other.optimizer.load_state_dict(loaded["optimizer"])
                _take_weights(other, job)
                other.scheduler.load_state_dict(job.scheduler.state_dict())
                other.iteration = job.iteration
                results[f"{kind}, {name}"] = [
                    {"log": run.train(2), **run.snapshot(), **_written(run)} for run in (job, other)
                ]
    return results


def _written_anew(context: Context) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parameters after a step, and cast again from the masters once they were overwritten."""
    with quantised_models():
        job = Job(JobSpec(lr=1e-3, config=(*_OUR_MASTERS, ("fp8_recipe", "blockwise"))))
        job.train(2)
        before = _written(job)
        for param in job.model.parameters():
            if isinstance(param, QuantisedLike):
                param._data.zero_()
        for optimizer in job.optimizer.chained_optimizers:
            optimizer._copy_main_params_to_model_params()
        job.model.start_param_sync(force_sync=True)
        return before, _written(job)


def _left_in_groups(context: Context) -> list[str]:
    """A Megatron that puts no masters in their place; one that builds with placeholders."""
    from fused_offload.megatron.adam import MegatronAdam

    messages = []
    for param in (torch.nn.Parameter(QuantisedLike(torch.zeros(4, 8, dtype=torch.uint8))), None):
        try:
            MegatronAdam([param]).check_groups()
        except TypeError as error:
            messages.append(str(error))
    return messages


scenario("quantised parameters train", _train, (Phase.TWO_RANKS,))
scenario("quantised parameters reloaded", _reloaded, (Phase.TWO_RANKS,))
scenario("quantised parameters owned", _owned)
scenario("masters beside FP8 recipes", _owned_beside_recipes, (Phase.ONE_RANK,))
scenario("quantised parameters resumed", _resumed, (Phase.TWO_RANKS,))
scenario("quantised parameters written anew", _written_anew, (Phase.TWO_RANKS,))
scenario("quantised parameters refused", _refused, (Phase.ONE_RANK,))
scenario("quantised parameters frozen", _frozen, (Phase.ONE_RANK,))
scenario("quantised parameters left", _left_in_groups, (Phase.ONE_RANK,))
