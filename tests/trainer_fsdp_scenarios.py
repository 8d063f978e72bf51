"""Scenarios of tests/test_trainer_fsdp.py, run by every rank: ``trainer_fsdp_scenarios.py FOLDER NAME...``.

Accelerate shards only on accelerators. On the CPU its state is told to shard all the same; nothing
else is replaced.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
import transformers
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor

from fused_offload import FusedOffloadAdam

FOLDER = Path()
SCENARIOS: dict[str, Callable[[], None]] = {}
ON_GPUS = torch.cuda.is_available()
STEPS, HALF, LENGTH, TOKENS = 4, 2, 32, 256
HYPER: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95)}


def scenario(function: Callable[[], None]) -> Callable[[], None]:
    SCENARIOS[function.__name__] = function
    return function


def shard_on_the_cpu() -> None:
    initialise = AcceleratorState.__init__

    def with_fsdp(self: Any, *arguments: Any, fsdp_plugin: Any = None, **settings: Any) -> None:
        initialise(self, *arguments, fsdp_plugin=fsdp_plugin, **settings)
        if fsdp_plugin is not None:
            self.distributed_type = DistributedType.FSDP
            fsdp_plugin.set_mixed_precision(self.mixed_precision)
            self.fsdp_plugin = fsdp_plugin

    AcceleratorState.__init__ = with_fsdp


def arguments_for(folder: Path) -> transformers.TrainingArguments:
    """As docs/trainers.md has them, with checkpoints halfway."""
    return transformers.TrainingArguments(
        str(folder),
        bf16=True,
        fsdp=True,
        fsdp_config={
            "fsdp_version": 2,
            "transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
            "state_dict_type": "SHARDED_STATE_DICT",
        },
        weight_decay=0.1,
        max_steps=STEPS,
        save_steps=HALF,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        use_cpu=not ON_GPUS,
        report_to=[],
        disable_tqdm=True,
    )


def decoder(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=TOKENS,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        use_cache=False,
    )
    model: torch.nn.Module = transformers.LlamaForCausalLM(config).to(dtype)
    return model


def rows() -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(TOKENS, (64, LENGTH), generator=torch.Generator().manual_seed(7))
    return [{"input_ids": row, "labels": row} for row in tokens]


def trained(
    folder: Path, cls: type = FusedOffloadAdam, *, dtype: torch.dtype = torch.float32, resume: bool = False, **more: Any
) -> tuple[torch.nn.Module, Any]:
    """A decoder after all steps, and its optimizer."""
    model = decoder(dtype)
    trainer = transformers.Trainer(
        model=model,
        args=arguments_for(folder),
        train_dataset=rows(),
        optimizer_cls_and_kwargs=(cls, {**HYPER, **more}),
    )
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{HALF}") if resume else None)
    return model, trainer.optimizer.optimizer


def shards(model: torch.nn.Module) -> list[torch.Tensor]:
    params = list(model.parameters())
    assert all(isinstance(param, DTensor) for param in params)
    assert dist.get_world_size() == 1 or sum(p.to_local().numel() for p in params) < sum(p.numel() for p in params)
    return [param.to_local().detach().clone() for param in params]


def state_of(optimizer: FusedOffloadAdam, model: torch.nn.Module) -> list[dict[str, torch.Tensor]]:
    return [{key: value.to_local().clone() for key, value in optimizer.state[p].items()} for p in model.parameters()]


def assert_resumes(name: str, keys: set[str], **more: Any) -> None:
    folder = FOLDER / name
    model, optimizer = trained(folder, **more)
    assert type(optimizer) is FusedOffloadAdam
    expected = shards(model), state_of(optimizer, model)
    assert all(set(entry) == keys for entry in expected[1])
    assert {shard.dtype for shard in expected[0]} == {torch.float32}
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder / f"checkpoint-{STEPS}")
    dist.barrier()
    again, resumed = trained(folder, resume=True, **more)
    assert all(map(torch.equal, shards(again), expected[0]))
    for one, other in zip(state_of(resumed, again), expected[1], strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)
    assert [group["step"] for group in resumed.param_groups] == [STEPS] * len(resumed.param_groups)


@scenario
def resumes_with_the_same_bits() -> None:
    assert_resumes("float32", {"exp_avg", "exp_avg_sq"})


@scenario
def bfloat16_moments_resume_with_the_same_bits() -> None:
    moments = {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}
    assert_resumes("moments", {"exp_avg", "exp_avg_sq"}, **moments)


@scenario
def a_bfloat16_model_is_trained_in_float32() -> None:
    """Accelerate makes its parameters float32, so masters are second copies."""
    assert_resumes(
        "bfloat16",
        {"exp_avg", "exp_avg_sq", "master_param"},
        dtype=torch.bfloat16,
        master_weights=True,
        store_param_remainders=True,
    )


@scenario
def trains_as_torch_adamw() -> None:
    """With an eps that keeps Adam from turning the rounding of tiny gradients into whole steps."""
    model, _ = trained(FOLDER / "ours", eps=1e-3)
    reference, _ = trained(FOLDER / "theirs", torch.optim.AdamW, eps=1e-3)
    for one, other in zip(shards(model), shards(reference), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=2e-5)
    for param, start in zip(model.parameters(), decoder().parameters(), strict=True):
        assert (param.full_tensor().cpu() - start).abs().max() > 2e-4  # type: ignore[attr-defined]


@scenario
def the_trainer_refuses_an_optimizer_that_exists() -> None:
    model = decoder()
    given = FusedOffloadAdam(model.parameters(), **HYPER), None
    with pytest.raises(RuntimeError, match="`optimizers` is not allowed if PyTorch FSDP"):
        transformers.Trainer(model=model, args=arguments_for(FOLDER / "given"), optimizers=given)


if __name__ == "__main__":
    FOLDER = Path(sys.argv[1])
    if ON_GPUS:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        shard_on_the_cpu()
    ranks.main(SCENARIOS, sys.argv[2:], backend="cpu:gloo,cuda:nccl" if ON_GPUS else "gloo", limit_s=120)
