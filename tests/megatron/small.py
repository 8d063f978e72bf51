"""A model of four parameters under every wrapping of Megatron's that its optimizers have."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from job import PLAIN_LAYERS, Job, JobSpec
from pairs import covering
from reference_optimizer import StoredFormats

WIDTH, INNER = 24, 20


class Wrapping(NamedTuple):
    """A place, the kind of Megatron's optimizer, and the parameters' dtypes.

    Attributes:
        place: as `JobSpec.optimizer`.
        kind: whether Megatron's optimizer is distributed, and who keeps the masters then.
        dtype: of the parameters; ``"mixed"`` is bf16 with some of them in fp32.
    """

    place: str
    kind: str
    dtype: str

    @property
    def name(self) -> str:
        return f"{self.place}, {self.kind}, {self.dtype}"

    @property
    def distributed(self) -> bool:
        return self.kind != "whole parameters"

    @property
    def formats(self) -> tuple[str, ...]:
        """Of checkpoints."""
        return ("dp_reshardable", "fully_reshardable", "legacy") if self.distributed else ("torch_dist", "torch")

    def spec(self, seed: int = 1) -> JobSpec:
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "mixed": torch.bfloat16}
        config = (
            ("use_distributed_optimizer", self.distributed),
            ("use_precision_aware_optimizer", self.kind == "its own masters"),
            ("initial_loss_scale", 2.0**10),
        )
        stored_formats = StoredFormats(remainders=self.kind == "its own masters")
        return JobSpec(self.place, stored_formats, dtype=dtype[self.dtype], seed=seed, config=config, fraction=0.5)


PLACES = ("ours", "ours as FusedAdam")
KINDS = ("its own masters", "Megatron's masters", "whole parameters")
DTYPES = ("bf16", "fp16", "fp32", "mixed")
WRAPPINGS = [Wrapping(*parts) for parts in itertools.product(PLACES, KINDS, DTYPES)]
COVERING = covering(WRAPPINGS)


class SmallJob(Job):
    """Trains the small model."""

    def __init__(self, wrapping: Wrapping, seed: int = 1) -> None:
        self.wrapping = wrapping
        super().__init__(wrapping.spec(seed))

    def build_model(self) -> Any:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.transformer.module import MegatronModule
        from megatron.core.transformer.transformer_config import TransformerConfig

        spec, in_fp32 = self.spec, ("gain", "last") if self.wrapping.dtype == "mixed" else ()

        class Small(MegatronModule):
            def __init__(self, config: Any) -> None:
                super().__init__(config)
                generator = torch.Generator().manual_seed(spec.seed)
                for name, shape in (
                    ("first", (INNER, WIDTH)),
                    ("gain", (INNER,)),
                    ("bias", (WIDTH,)),
                    ("last", (WIDTH, INNER)),
                ):
                    values = torch.randn(shape, generator=generator) / 4 + (len(shape) == 1)
                    values = values.float() if name in in_fp32 else values.to(spec.dtype)
                    self.register_parameter(name, torch.nn.Parameter(values))

            def forward(self, batch: torch.Tensor) -> torch.Tensor:
                hidden = torch.tanh(batch @ self.first.float().T) * self.gain.float()
                return hidden @ self.last.float().T + self.bias.float()

        config = TransformerConfig(
            num_layers=1,
            hidden_size=WIDTH,
            num_attention_heads=4,
            params_dtype=spec.dtype,
            bf16=spec.dtype == torch.bfloat16,
            fp16=spec.dtype == torch.float16,
            **PLAIN_LAYERS,
        )
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=self.wrapping.distributed, grad_reduce_in_fp32=True, bucket_size=300
        )
        return DistributedDataParallel(config, ddp, Small(config))

    def loss(self, generator: torch.Generator) -> torch.Tensor:
        batch = torch.randn((8, WIDTH), generator=generator)
        return (self.model(batch) - batch.roll(1, dims=1)).square().mean()

    def params(self) -> list[torch.Tensor]:
        """Parameters of the inner optimizers."""
        return [param for inner in self.inners for group in inner.param_groups for param in group["params"]]

    def snapshot(self) -> dict[str, Any]:
        state = [
            {"param": param, **{key: inner.get_unscaled_state(param, key) for key in inner.state[param]}}
            for inner in self.inners
            for group in inner.param_groups
            for param in group["params"]
        ]
        state = [{key: value.detach().clone() for key, value in values.items()} for values in state]
        scale = self.optimizer.get_loss_scale().item()
        return {"weights": self.weights(), "state": state, "steps": self.steps(), "scale": scale}
