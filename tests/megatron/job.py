"""A tiny GPT under Megatron's DistributedDataParallel and distributed optimizer, for the scenarios.

Importing this module imports neither Megatron nor the stand-in for CUDA, so that tests can share
its records.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any, Literal, NamedTuple

import torch
from reference_optimizer import ReferenceAdam, StoredFormats
from registry import NotInReleaseError

from fused_offload import OffloadConfig
from fused_offload.kernels.formats import join_remainder
from fused_offload.megatron.adam import MegatronAdam

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Few sizes are multiples of the 128 elements of padding.
VOCABULARY, SEQUENCE, HIDDEN, LAYERS = 96, 16, 36, 2
SEVERAL_BUCKETS = 7000
"""Bucket size that cuts the model into several buckets with padding at their ends."""


class Layout(NamedTuple):
    """Buffers of parameters and gradients, and their reduction between ranks."""

    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    bucket_size: int | None = None
    experts: int = 0
    trainable: tuple[str, ...] = ()
    """Parts of the names of parameters that are trained; all are where it is empty."""
    grads_in_bf16: bool = False
    adapter_rank: int = 0
    """Of low-rank adapters, which alone are trained then; 0 for a model without."""


class JobSpec(NamedTuple):
    """Model, training settings and inner optimizer of a job.

    ``"ours"``, ``"reference"`` and ``"hybrid"``, Megatron's own, are in the place of its
    HybridDeviceOptimizer, ``"ours as FusedAdam"`` and ``"FusedAdam"`` in that of
    TransformerEngine's optimizer, which is there only within `te_branches`. ``"stock"`` is AdamW
    with masters of Megatron's.
    """

    optimizer: str = "ours"
    stored_formats: StoredFormats = StoredFormats()
    layout: Layout = Layout()
    fraction: float = 1.0
    chunk_bytes: int = 48 * 2**20
    depth: int = 3
    window_bytes: int | Literal["auto"] = 0
    dtype: torch.dtype = torch.bfloat16
    lr: float = 1e-2
    seed: int = 1
    config: tuple[tuple[str, Any], ...] = ()
    """Further fields of Megatron's OptimizerConfig."""


class Step(NamedTuple):
    """Values that Megatron's training loop logs for one iteration."""

    loss: float
    grad_norm: float | None
    updated: bool


class ShardState(NamedTuple):
    """One parameter's state on one rank, as the true fp32 values; moments and master are None
    before they exist.
    """

    start: int
    stop: int
    values: dict[str, torch.Tensor] | None


class Shard(NamedTuple):
    """One parameter's part on this rank, found without the help of the package under test."""

    name: str
    model_param: torch.Tensor
    param: torch.Tensor
    start: int
    stop: int
    inner: Any


@contextlib.contextmanager
def replaced(*replacements: tuple[Any, str, Any]) -> Iterator[None]:
    """Sets attributes, given as owner, name and value, for a while."""
    with contextlib.ExitStack() as stack:
        for owner, name, value in replacements:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield


def te_branches() -> contextlib.AbstractContextManager[None]:
    """Megatron's branches for machines with TransformerEngine. Nothing calls into it: its FusedAdam
    is not its own.
    """
    from fused_adam import FusedAdamLike
    from megatron.core import optimizer as package
    from megatron.core.optimizer import distrib_optimizer

    return replaced(
        (package, "Adam", FusedAdamLike),
        (package, "USING_PYTORCH_OPTIMIZER", False),
        (package, "is_te_min_version", lambda *args, **kwargs: True),
        (distrib_optimizer, "Adam", FusedAdamLike),
        (distrib_optimizer, "HAVE_APEX_OR_TE", True),
        (distrib_optimizer, "USING_TE_OPTIMIZER", True),
    )


def _hybrid_place(inner: type) -> contextlib.AbstractContextManager[None]:
    from megatron.core import optimizer as package
    from megatron.core.optimizer import distrib_optimizer

    return replaced(*((module, "HybridDeviceOptimizer", inner) for module in (package, distrib_optimizer)))


def offload_flags(fraction: float, stored_formats: StoredFormats) -> dict[str, Any]:
    """Fields of Megatron's OptimizerConfig that ask for an offloaded optimizer."""
    return {
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": fraction,
        "use_precision_aware_optimizer": True,
        "exp_avg_dtype": stored_formats.moments,
        "exp_avg_sq_dtype": stored_formats.moments,
        "store_param_remainders": stored_formats.remainders,
    }


def need_field(config: type, name: str) -> None:
    """Leaves a scenario whose configuration class of Megatron has no such field in this release."""
    if name not in {field.name for field in dataclasses.fields(config)}:
        raise NotInReleaseError(f"megatron-core {version('megatron-core')} has no {config.__name__}.{name}")


def optimizer_config(spec: JobSpec) -> Any:
    from megatron.core.optimizer import OptimizerConfig

    fields: dict[str, Any] = {
        "optimizer": "adam",
        "lr": spec.lr,
        "min_lr": 0.0,
        "weight_decay": 0.1,
        "bf16": spec.dtype == torch.bfloat16,
        "fp16": spec.dtype == torch.float16,
        "params_dtype": spec.dtype,
        "use_distributed_optimizer": True,
    }
    if spec.optimizer != "stock":
        fields |= offload_flags(spec.fraction, spec.stored_formats)
    if spec.optimizer == "hybrid":
        fields["pin_cpu_grads"] = False  # there is nothing to pin memory for
    if spec.layout.grads_in_bf16:
        fields["main_grads_dtype"] = torch.bfloat16
    for name, _ in spec.config:
        need_field(OptimizerConfig, name)
    config = OptimizerConfig(**{**fields, **dict(spec.config)})
    if spec.optimizer in ("ours as FusedAdam", "FusedAdam"):
        # Asked for without offload from the start, Megatron would look for TransformerEngine
        # itself.
        config.optimizer_cpu_offload = False
        config.store_param_remainders = spec.stored_formats.remainders
    return config


PLAIN_LAYERS: dict[str, Any] = {
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "gradient_accumulation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "apply_rope_fusion": False,
    "add_bias_linear": False,
}
"""Of a TransformerConfig: the same in every run, and nothing that needs a GPU."""


def build_model(spec: JobSpec) -> Any:
    from adapters import add_adapters
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    layout = spec.layout
    torch.manual_seed(spec.seed)
    config = TransformerConfig(
        num_layers=1 if layout.experts else LAYERS,  # experts make many parameters, and take long
        hidden_size=HIDDEN,
        num_attention_heads=4,
        num_moe_experts=layout.experts or None,
        moe_router_topk=2,
        use_cpu_initialization=True,
        params_dtype=spec.dtype,
        bf16=spec.dtype == torch.bfloat16,
        fp16=spec.dtype == torch.float16,
        **PLAIN_LAYERS,
    )
    layers = get_gpt_layer_local_spec(num_experts=layout.experts or None, moe_grouped_gemm=False)
    model = GPTModel(config, layers, vocab_size=VOCABULARY, max_sequence_length=SEQUENCE).to(DEVICE, spec.dtype)
    if layout.adapter_rank:
        add_adapters(model, layout.adapter_rank)
    for name, param in model.named_parameters():
        trainable = (".adapter.",) if layout.adapter_rank else layout.trainable
        param.requires_grad_(not trainable or any(part in name for part in trainable))
        if ".experts." in name:
            # As with expert parallelism, it gets buffers and an optimizer of its own.
            param.allreduce = False
    return DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            overlap_grad_reduce=layout.overlap_grad_reduce,
            overlap_param_gather=layout.overlap_param_gather,
            bucket_size=layout.bucket_size,
            grad_reduce_in_fp32=not layout.grads_in_bf16,
        ),
        model,
    )


def build_optimizer(spec: JobSpec, model: Any) -> Any:
    from megatron.core.optimizer import get_megatron_optimizer

    import fused_offload.megatron as fom

    offload = OffloadConfig(chunk_bytes=spec.chunk_bytes, depth=spec.depth, window_bytes=spec.window_bytes)
    if spec.optimizer == "ours":
        place: Any = fom.installed(offload=offload)
    elif spec.optimizer == "ours as FusedAdam":
        place = fom.installed(offload=dataclasses.replace(offload, fraction=spec.fraction), numerics="ieee")
    elif spec.optimizer == "reference":
        place = _hybrid_place(ReferenceAdam.with_stored_formats(spec.stored_formats))
    elif spec.optimizer == "hybrid":
        from hybrid import HybridOnCpu

        place = _hybrid_place(HybridOnCpu)
    else:
        place = contextlib.nullcontext()
    with place:
        return get_megatron_optimizer(optimizer_config(spec), [model])


class Job:
    """A model, its optimizer and its schedule, and the training loop's order of calls."""

    def __init__(self, spec: JobSpec) -> None:
        self.spec = spec
        self.rank, self.world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self.model = self.build_model()
        self.optimizer = build_optimizer(spec, self.model)
        is_ours = spec.optimizer.startswith("ours")
        assert all(isinstance(inner, MegatronAdam) == is_ours for inner in self.inners), "another optimizer was built"
        self.iteration = 0
        self.scheduler = self._build_scheduler()

    def build_model(self) -> Any:
        return build_model(self.spec)

    def _build_scheduler(self) -> Any:
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

        return OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=self.spec.lr,
            min_lr=0.0,
            lr_warmup_steps=2,
            lr_decay_steps=100,
            lr_decay_style="linear",
            start_wd=0.1,
            end_wd=0.1,
            wd_incr_steps=0,
            wd_incr_style="constant",
        )

    # -- training ----------------------------------------------------------------------------------

    def forward_backward(self) -> float:
        """Gradients of the next iteration's batch, reduced over ranks."""
        generator = torch.Generator().manual_seed(1000 + self.iteration * 8 + self.rank)
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = self.loss(generator)
        scale = self.optimizer.get_loss_scale().item() if self.spec.dtype == torch.float16 else 1.0
        (loss * scale).backward()
        self.model.finish_grad_sync()
        return loss.item()

    def loss(self, generator: torch.Generator) -> torch.Tensor:
        """Loss of a batch that the generator draws."""
        tokens = torch.randint(0, VOCABULARY, (2, SEQUENCE), generator=generator).to(DEVICE)
        positions = torch.arange(SEQUENCE, device=DEVICE).expand(2, SEQUENCE).contiguous()
        mask = torch.tril(torch.ones(1, 1, SEQUENCE, SEQUENCE, device=DEVICE)) < 0.5
        loss: torch.Tensor = self.model(tokens, positions, mask, labels=tokens)
        return loss.float().mean()

    def step(self) -> Step:
        loss = self.forward_backward()
        updated, grad_norm, _ = self.optimizer.step()
        if updated:
            self.scheduler.step(1)
        self.iteration += 1
        return Step(loss, None if grad_norm is None else float(grad_norm), bool(updated))

    def train(self, iterations: int) -> list[Step]:
        return [self.step() for _ in range(iterations)]

    # -- reading -----------------------------------------------------------------------------------

    @property
    def children(self) -> list[Any]:
        """The chain's DistributedOptimizers."""
        return self.optimizer.chained_optimizers

    @property
    def inners(self) -> list[Any]:
        return [child.optimizer for child in self.children if child.optimizer is not None]

    def weights(self) -> dict[str, torch.Tensor]:
        """The model's parameters, gathered where that overlaps with the next forward pass."""
        if self.spec.layout.overlap_param_gather:
            self.model.start_param_sync(force_sync=True)
        return {name: param.detach().clone() for name, param in self.model.module.named_parameters()}

    def shards(self) -> Iterator[Shard]:
        """This rank's part of every parameter, as the inner optimizers' groups have it."""
        names = {id(param): name for name, param in self.model.module.named_parameters()}
        for child in self.children:
            if child.is_stub_optimizer:  # all its parameters are frozen
                continue
            for model_group, group in zip(child.model_float16_groups, child.optimizer.param_groups, strict=True):
                for model_param, param in zip(model_group, group["params"], strict=True):
                    place = child._get_model_param_range_map(model_param)["param"]
                    yield Shard(names[id(model_param)], model_param, param, place.start, place.end, child.optimizer)

    def state(self) -> dict[str, ShardState]:
        """Masters and moments of this rank's shards, copied, as fp32 values."""
        return {
            shard.name: ShardState(shard.start, shard.stop, _values_of(shard.inner, shard.param))
            for shard in self.shards()
        }

    def buckets(self) -> list[tuple[int, int]]:
        """Elements of each bucket of the dense parameters, with and without the padding at its
        end.
        """
        return [(bucket.grad_data.numel(), bucket.numel_unpadded) for b in self.model.buffers for bucket in b.buckets]

    def steps(self) -> list[Any]:
        """The step counts of all groups, those without parameters too."""
        return [group.get("step") for inner in self.inners for group in inner.param_groups]

    def snapshot(self) -> dict[str, Any]:
        """All that must be equal where two runs are called equal."""
        return {"weights": self.weights(), "state": self.state(), "steps": self.steps()}


def _values_of(inner: Any, param: torch.Tensor) -> dict[str, torch.Tensor] | None:
    state = inner.state.get(param)
    if not state:
        return None
    keys = ("exp_avg", "exp_avg_sq", "master_param")
    if isinstance(inner, MegatronAdam):
        values = {key: inner.get_unscaled_state(param, key) if key in state else param for key in keys}
    else:
        values = {key: state.get(key, param) for key in keys}  # else a master of Megatron's
    if values["master_param"].dtype == torch.int16:
        values["master_param"] = join_remainder(param.detach(), values["master_param"])
    return {key: value.detach().float().clone() for key, value in values.items()}
