"""Small models under Megatron-FSDP, version 1, for its scenarios.

On the CPU over gloo the device mesh says "cuda" as well. All that Megatron-FSDP owns counts as
being there, and what is asked to go there from the optimizer's storage is copied, as it would be:
what a checkpoint loads into a copy is lost.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from job import DEVICE, PLAIN_LAYERS, SEQUENCE, VOCABULARY, ShardState, Step, need_field, replaced, te_branches
from reference_optimizer import ReferenceAdam
from registry import NotInReleaseError

import fused_offload.megatron as fom
from fused_offload import OffloadConfig
from fused_offload.kernels.adam.reference import adam_step_
from fused_offload.megatron.adam import MegatronAdam
from fused_offload.params.dtensors import is_distributed, local_of

HIDDEN, LAYERS, CHUNK_BYTES = (512, 4, 2**20) if DEVICE == "cuda" else (36, 1, 16000)
MOMENTS = ("exp_avg", "exp_avg_sq")


class FsdpSpec(NamedTuple):
    """Model, training settings and inner optimizer of a job.

    ``"ours"`` and ``"reference"`` are in the place of Megatron's HybridDeviceOptimizer,
    ``"ours as FusedAdam"`` in that of TransformerEngine's optimizer. ``"stock"`` is that one itself
    where it is installed, else torch's AdamW.
    """

    optimizer: str = "ours"
    model: str = "gpt"
    precision_aware: bool = True
    strategy: str = "optim_grads_params"
    moments: torch.dtype = torch.float32
    fraction: float = 1.0
    window_bytes: int = 0
    seed: int = 1

    @property
    def is_gpt(self) -> bool:
        """A GPT with gated MLPs, one each or several experts; else only parameters that checkpoints
        split.
        """
        return self.model in ("gpt", "experts")


class ShardReference(ReferenceAdam):
    """The specification of a step on this rank's shards, which are their own masters."""

    decoupled = True

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            scalars = self._next_scalars(group)
            for param in group["params"]:
                grad = getattr(param, "decoupled_grad", None) if self.decoupled else param.grad
                if grad is not None:
                    local = param._local_tensor
                    adam_step_(local.view(-1), grad._local_tensor.reshape(-1), self._state_of(local), scalars)


# -- a GPU that is not there -----------------------------------------------------------------------

_inners: weakref.WeakSet[Any] = weakref.WeakSet()


@contextlib.contextmanager
def fake_gpu() -> Iterator[list[int]]:
    """Completes the stand-in for Megatron-FSDP and records bytes of state copied to the GPU."""
    copied: list[int] = []
    to = torch.Tensor.to

    def to_device(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        device = args[0] if args else kwargs.get("device")
        if not isinstance(device, (str, torch.device)) or torch.device(device).type != "cuda":
            return to(self, *args, **kwargs)
        if not _is_state(self):
            return self
        copied.append(self.nbytes)
        return self.clone()

    from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer

    with replaced(
        (torch.Tensor, "to", to_device),
        (torch.cuda, "current_device", lambda: 0),
        (param_and_grad_buffer, "_coalescing_manager", _one_by_one),
        (torch.distributed, "all_gather_into_tensor", _at_once(torch.distributed.all_gather_into_tensor)),
    ):
        yield copied


class _Done:
    """Handle of a completed collective. Streams would keep its buffers; here they may be freed."""

    def wait(self) -> None: ...


@contextlib.contextmanager
def _one_by_one(*args: Any, **kwargs: Any) -> Iterator[_Done]:
    yield _Done()


def _at_once(collective: Any) -> Any:
    def wait_for_it(*args: Any, async_op: bool = False, **kwargs: Any) -> _Done:
        collective(*args, **kwargs)
        return _Done()

    return wait_for_it


def _is_state(tensor: torch.Tensor) -> bool:
    if is_distributed(tensor):
        return False
    views = (
        view
        for inner in _inners
        for entry in inner.state.values()
        for view in entry.storage.views.values()
        if view.numel()
    )
    return tensor.untyped_storage().data_ptr() in {view.untyped_storage().data_ptr() for view in views}


# -- models ----------------------------------------------------------------------------------------


class _FusedConfig(NamedTuple):
    q_lora_rank: int = 10
    kv_lora_rank: int = 12
    qk_pos_emb_head_dim: int = 6


class _DeltaNet(torch.nn.Module):
    """Parameters of a gated delta net, with the attributes that Megatron tells it by."""

    qk_dim, v_dim, num_value_heads = 8, 16, 4
    in_proj_dim = 2 * qk_dim + 2 * v_dim + 2 * num_value_heads

    def __init__(self) -> None:
        super().__init__()
        self.in_proj = torch.nn.Linear(HIDDEN, self.in_proj_dim, bias=False)
        self.conv1d = torch.nn.Conv1d(32, 32, 3, padding=1, groups=32)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.conv1d(self.in_proj(values)[..., :32].transpose(1, 2)).mean(1, keepdim=True)


class _LatentAttention(torch.nn.Module):
    """The fused projection of multi-latent attention, which Megatron tells by its name."""

    config = _FusedConfig()

    def __init__(self) -> None:
        super().__init__()
        self.linear_qkv_down_proj = torch.nn.Linear(HIDDEN, 28, bias=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.linear_qkv_down_proj(values)


class _FusedProjections(torch.nn.Module):
    """Fused projections, which Megatron splits in checkpoints as it splits gated MLPs."""

    def __init__(self) -> None:
        super().__init__()
        self.delta_net = _DeltaNet()
        self.latent = _LatentAttention()

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.delta_net(values).mean() + self.latent(values).square().mean()


def _build_model(spec: FsdpSpec) -> Any:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig

    need_field(DistributedDataParallelConfig, "megatron_fsdp_use_decoupled_grad")
    torch.manual_seed(spec.seed)
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        use_cpu_initialization=True,
        params_dtype=torch.bfloat16,
        bf16=True,
        **PLAIN_LAYERS,
        num_moe_experts=4 if spec.model == "experts" else None,
        gated_linear_unit=spec.is_gpt,
        activation_func=torch.nn.functional.silu,
    )
    if spec.is_gpt:
        layers, units = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, moe_grouped_gemm=False), None
        model: Any = GPTModel(config, layers, vocab_size=VOCABULARY, max_sequence_length=SEQUENCE)
    else:
        model, units = _FusedProjections(), [_DeltaNet, _LatentAttention]
    ddp_config = DistributedDataParallelConfig(
        use_megatron_fsdp=True,
        use_distributed_optimizer=True,
        data_parallel_sharding_strategy=spec.strategy,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        grad_reduce_in_fp32=True,
        megatron_fsdp_use_decoupled_grad=spec.precision_aware,
    )
    return FullyShardedDataParallel(
        config, ddp_config, Float16Module(config, model.to(DEVICE)), fsdp_unit_modules=units
    )


def optimizer_config(spec: FsdpSpec) -> Any:
    from megatron.core.optimizer import OptimizerConfig

    dtypes = {"exp_avg_dtype": spec.moments, "exp_avg_sq_dtype": spec.moments}
    config = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        min_lr=0.0,
        weight_decay=0.1,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=True,
        optimizer_cpu_offload=spec.optimizer != "stock",
        optimizer_offload_fraction=spec.fraction,
        use_precision_aware_optimizer=spec.precision_aware,
        **(dtypes if spec.precision_aware else {}),
    )
    # If it were asked for from the start, Megatron would look for TransformerEngine itself.
    if spec.optimizer == "ours as FusedAdam":
        config.optimizer_cpu_offload = False
    return config


class FsdpJob:
    """A model, its optimizer, and the training loop's order of calls. To be used within
    `fake_gpu`.
    """

    def __init__(self, spec: FsdpSpec) -> None:
        self.spec = spec
        self.rank = torch.distributed.get_rank()
        self.model = _build_model(spec)
        self.optimizer = self._build_optimizer()
        self.inner = self.optimizer.optimizer
        self.is_ours = isinstance(self.inner, MegatronAdam)
        assert self.is_ours == spec.optimizer.startswith("ours"), "another optimizer was built"
        if self.is_ours:
            _inners.add(self.inner)
        elif spec.optimizer == "reference":
            self.inner.decoupled = spec.precision_aware
        self.iteration = 0

    @property
    def children(self) -> list[Any]:
        """As those of a chain, which Megatron does not make here."""
        return [self.optimizer]

    @property
    def inners(self) -> list[Any]:
        return [self.inner]

    def _build_optimizer(self) -> Any:
        from megatron.core import optimizer as package
        from megatron.core.optimizer import distrib_optimizer, get_megatron_optimizer

        spec = self.spec
        offload = OffloadConfig(fraction=spec.fraction, chunk_bytes=CHUNK_BYTES, window_bytes=spec.window_bytes)
        with contextlib.ExitStack() as places:
            if spec.optimizer == "ours":
                places.enter_context(fom.installed(offload=offload))
            elif spec.optimizer == "ours as FusedAdam":
                if DEVICE == "cpu":
                    places.enter_context(te_branches())
                places.enter_context(fom.installed(offload=offload, numerics="ieee" if DEVICE == "cpu" else "te"))
            elif spec.optimizer == "reference":
                modules = (package, distrib_optimizer)
                places.enter_context(replaced(*((m, "HybridDeviceOptimizer", ShardReference) for m in modules)))
            return get_megatron_optimizer(optimizer_config(spec), [self.model])

    # -- training ----------------------------------------------------------------------------------

    def step(self) -> Step:
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = self._loss(torch.Generator().manual_seed(1000 + self.iteration * 8 + self.rank))
        try:
            loss.backward()
            self.model.finish_grad_sync()
        except RuntimeError as error:
            if "PREMUL_SUM with Gloo" not in str(error):
                raise
            raise NotInReleaseError(
                f"Megatron-FSDP of megatron-core {version('megatron-core')} scales gradients as only NCCL can"
            ) from error
        updated, grad_norm, _ = self.optimizer.step()
        self.iteration += 1
        return Step(loss.item(), float(grad_norm), bool(updated))

    def _loss(self, generator: torch.Generator) -> torch.Tensor:
        if not self.spec.is_gpt:
            return self.model(torch.randn(2, 5, HIDDEN, generator=generator).to(DEVICE)).float()
        tokens = torch.randint(0, VOCABULARY, (2, SEQUENCE), generator=generator).to(DEVICE)
        positions = torch.arange(SEQUENCE, device=DEVICE).expand(2, SEQUENCE).contiguous()
        mask = torch.tril(torch.ones(1, 1, SEQUENCE, SEQUENCE, device=DEVICE)) < 0.5
        return self.model(tokens, positions, mask, labels=tokens).float().mean()

    def train(self, iterations: int) -> list[Step]:
        return [self.step() for _ in range(iterations)]

    # -- reading -----------------------------------------------------------------------------------

    def params(self) -> dict[str, Any]:
        """Parameters of the optimizer by name: DTensors over this rank's shards."""
        return dict(self.model.param_and_grad_buffer.optimizer_named_parameters)

    def snapshot(self) -> dict[str, Any]:
        """All that must be equal where two runs are called equal: shards of masters and moments
        that have elements.
        """
        shards = {}
        for name, param in self.params().items():
            # The attribute is missing where each rank has the whole parameter.
            part = getattr(param, "megatron_fsdp_slice", slice(0, param.numel()))
            if param._local_tensor.numel():
                shards[name] = ShardState(part.start, part.stop, self._values(param))
        return {"state": shards, "steps": [group.get("step") for group in self.inner.param_groups]}

    def _values(self, param: Any) -> dict[str, torch.Tensor]:
        local = param._local_tensor
        if self.is_ours:
            moments = {key: self.inner.get_unscaled_state(param, key)._local_tensor for key in MOMENTS}
        elif self.spec.optimizer == "stock":
            moments = {key: local_of(self.inner.state[param][key]) for key in MOMENTS}
        else:
            moments = {key: self.inner.state[local][key] for key in MOMENTS}
        return {key: value.float().cpu().flatten().clone() for key, value in {"master": local, **moments}.items()}


# -- checkpoints, in the way of Megatron's training loop -------------------------------------------


def state_dict(job: FsdpJob, *, is_loading: bool = False) -> dict[str, Any]:
    model = job.model.state_dict_for_save_checkpoint()
    metadata = {"distrib_optim_sharding_type": "fsdp_dtensor"}
    optimizer = job.optimizer.sharded_state_dict({"model": model}, is_loading=is_loading, metadata=metadata)
    return {"model": model, "optimizer": optimizer}


def preprocessed(job: FsdpJob, state: dict[str, Any]) -> dict[str, Any]:
    from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import preprocess_state_dict_for_uneven_dtensor
    from megatron.core.transformer import fsdp_dtensor_checkpoint as splits

    handlers = [splits.handle_swiglu_in_state_dict] if job.spec.is_gpt else [splits.handle_gdn_in_state_dict]
    if hasattr(splits, "handle_mla_down_proj_in_state_dict"):  # not in releases up to 0.19
        handlers.append(splits.handle_mla_down_proj_in_state_dict)
    state = dict(state)
    for handle in handlers:
        state["model"], state["optimizer"] = handle(job.model.module, state["model"], state["optimizer"])
    if job.spec.model == "experts":
        state["model"] = splits.handle_experts_in_state_dict(state["model"], 4)
    return preprocess_state_dict_for_uneven_dtensor(state)


def save(job: FsdpJob, directory: Path) -> None:
    if job.rank == 0:
        directory.mkdir(parents=True)
    torch.distributed.barrier()
    dcp.save(preprocessed(job, state_dict(job)), storage_writer=dcp.FileSystemWriter(directory))


def load(job: FsdpJob, directory: Path, iteration: int) -> None:
    state = state_dict(job, is_loading=True)
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(preprocessed(job, state), storage_reader=dcp.FileSystemReader(directory), planner=planner)
    job.model.load_state_dict(state["model"])
    job.optimizer.load_state_dict(state["optimizer"])
    job.iteration = iteration
