"""Scenarios of tests/test_verl.py, run by every rank, on GPUs where it sees any:
``verl_scenarios.py FOLDER NAME...``.

verl's own FSDP engine builds the model, the optimizer and the schedule, runs forward and backward
passes of micro-batches, clips, steps, moves the optimizer between its phases, saves and loads.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ranks
import torch
import torch.distributed as dist

os.environ["VERL_PLATFORM"] = "nvidia" if torch.cuda.is_available() else "cpu"

from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import PlatformRegistry

from fused_offload import FusedOffloadAdam, OffloadConfig

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    torch.cpu.set_rng_state = torch.set_rng_state  # type: ignore[attr-defined] - verl asks the device for it

FOLDER = Path()
SCENARIOS: dict[str, Callable[[], None]] = {}
LENGTH, TOKENS, ROWS = 10, 37, 4


@PlatformRegistry.register(platform="cpu")
class PlatformCpu(PlatformCUDA):
    """As far as training needs it."""

    device_name = "cpu"
    device_module = torch.cpu

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def empty_cache(self) -> None: ...

    def communication_backend_name(self) -> str:
        return "gloo"


def scenario(function: Callable[[], None]) -> Callable[[], None]:
    SCENARIOS[function.__name__] = function
    return function


@functools.cache
def model_folder() -> Path:
    """A tiny model, as pretrained weights are found."""
    import transformers

    folder = FOLDER / "model"
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        config = transformers.Qwen2Config(
            vocab_size=TOKENS,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=LENGTH,
            tie_word_embeddings=False,
        )
        transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
    dist.barrier()
    return folder


SCHEDULE = {
    "lr": 1e-3,
    "betas": [0.9, 0.999],
    "weight_decay": 0.1,
    "total_training_steps": 20,
    "lr_warmup_steps": 3,
    "lr_scheduler_type": "cosine",
}
OURS = {"optimizer": "FusedOffloadAdam", "optimizer_impl": "fused_offload"}


def build_engine(*, lora_rank: int = 0, model_dtype: str = "fp32", engine: Any = None, **optimizer: Any) -> Any:
    """The engine of verl's actor, with its optimizer and schedule."""
    from omegaconf import OmegaConf
    from verl.trainer.config import CheckpointConfig
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    path = str(model_folder())
    torch.manual_seed(1)  # of adapters
    built = FSDPEngineWithLMHead(
        HFModelConfig(
            path=path,
            load_tokenizer=False,
            use_remove_padding=False,
            enable_gradient_checkpointing=False,
            override_config={"attn_implementation": "eager"},
            lora_rank=lora_rank,
        ),
        FSDPEngineConfig(
            strategy="fsdp2",
            use_torch_compile=False,
            model_dtype=model_dtype,
            full_determinism=ON_GPU,
            **(engine or {}),
        ),
        omega_conf_to_dataclass(
            OmegaConf.create({**SCHEDULE, **optimizer}), FSDPOptimizerConfig
        ),  # as from the command line
        CheckpointConfig(),
    )
    built.initialize()
    return built


def batch(step: int) -> Any:
    from verl.utils import tensordict_utils as tu

    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    lengths = torch.randint(3, LENGTH + 1, (ROWS,), generator=generator).tolist()

    def nested(rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    return tu.get_tensordict(
        {
            "input_ids": nested([torch.randint(TOKENS, (length,), generator=generator) for length in lengths]),
            "position_ids": nested([torch.arange(length) for length in lengths]),
            "loss_mask": nested([torch.arange(length) >= 2 for length in lengths]),
        },
        {
            "use_remove_padding": False,
            "use_dynamic_bsz": False,
            "micro_batch_size_per_gpu": ROWS // 2,
            "temperature": 1.0,
        },
    )


def update(engine: Any, steps: range) -> list[tuple[float, float]]:
    """Updates of the actor; their losses and gradient norms."""
    from verl.workers.utils.losses import sft_loss

    log = []
    for step in steps:
        with engine.train_mode():
            output = engine.train_batch(batch(step), functools.partial(sft_loss, config=None))
            engine.lr_scheduler_step()
        log.append((sum(output["loss"]), output["metrics"]["grad_norm"]))
    return log


def local(value: torch.Tensor) -> torch.Tensor:
    return getattr(value, "_local_tensor", value).detach().cpu().clone()


def snapshot(engine: Any) -> dict[str, Any]:
    """Parameters and state of this rank."""
    params = {name: local(param) for name, param in engine.module.named_parameters()}
    state = {
        f"{name}, {key}": local(value)
        for name, param in engine.module.named_parameters()
        if param in engine.optimizer.state
        for key, value in engine.optimizer.state[param].items()
    }
    return {**params, **state}


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert not different, different


def assert_near_adamw(**options: Any) -> None:
    ours, adamw = build_engine(**OURS, **options), build_engine(optimizer="AdamW", **options)
    assert isinstance(ours.optimizer, FusedOffloadAdam)
    before = snapshot(ours)
    logs = [update(engine, range(5)) for engine in (ours, adamw)]
    torch.testing.assert_close(*logs, rtol=1e-3, atol=1e-3)
    assert len(set(logs[0])) == 5
    changed = 0
    for (name, param), other in zip(ours.module.named_parameters(), adamw.module.parameters(), strict=True):
        changed += not torch.equal(before[name], local(param))
        if param.dim() > 1:  # gradients of biases of keys are nothing but rounding
            torch.testing.assert_close(local(param).float(), local(other).float(), rtol=2e-2, atol=2e-4)
    assert changed == sum(param.requires_grad for param in ours.module.parameters())


@scenario
def an_update_is_that_of_adamw() -> None:
    assert_near_adamw()


@scenario
def an_update_of_adapters_is_that_of_adamw() -> None:
    assert_near_adamw(lora_rank=4)


@scenario
def only_adapters_have_state() -> None:
    engine = build_engine(**OURS, lora_rank=4)
    update(engine, range(1))
    numels = {name: local(param).numel() for name, param in engine.module.named_parameters()}
    trained = {name for name, param in engine.module.named_parameters() if param.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)
    state = engine.optimizer.state
    assert {name for name, param in engine.module.named_parameters() if param in state} == trained
    host_bytes = sum(engine.optimizer.memory_report().host_bytes.values())
    padding = 128 * len(trained)  # at most
    trained_numel = sum(numels[name] for name in trained)
    assert 8 * trained_numel <= host_bytes <= 8 * (trained_numel + padding)


def adam_of_4_bytes(params: Any, **settings: Any) -> FusedOffloadAdam:
    """What a configuration cannot say, in a module of the user's."""
    return FusedOffloadAdam(
        params, exp_avg_dtype=torch.uint8, exp_avg_sq_dtype=torch.uint8, offload=OffloadConfig(fraction=0.9), **settings
    )


REMAINDERS = {"override_optimizer_config": {"master_weights": True, "store_param_remainders": True}}
PHASES = {
    "fp32": OURS,
    "bf16 with remainders": {**OURS, **REMAINDERS, "model_dtype": "bf16"},
    "4 bytes": {
        **REMAINDERS,
        "model_dtype": "bf16",
        "optimizer": "adam_of_4_bytes",
        "optimizer_impl": "verl_scenarios",
    },
}


@scenario
def moving_the_optimizer_between_phases_changes_nothing() -> None:
    """verl's own functions write every tensor of the state back on the other device."""
    for settings in PHASES.values():
        still = build_engine(**settings)
        moved = build_engine(**settings, engine={"optimizer_offload": True, "param_offload": True})
        logs = [update(engine, range(3)) for engine in (still, moved)]
        assert logs[0] == logs[1]
        assert_same(snapshot(moved), snapshot(still))


@scenario
def a_resumed_run_has_the_bits_of_the_uninterrupted_one() -> None:
    for name, settings in PHASES.items():
        engine = build_engine(**settings)
        update(engine, range(2))
        folder = FOLDER / name
        engine.save_checkpoint(str(folder), global_step=2)
        saved = snapshot(engine)
        log = update(engine, range(2, 4))
        other = build_engine(**settings)
        other.load_checkpoint(str(folder), del_local_after_load=False)
        assert_same(snapshot(other), saved)
        assert update(other, range(2, 4)) == log
        assert_same(snapshot(other), snapshot(engine))


@scenario
def a_gradient_that_is_not_finite_skips_the_update() -> None:
    engine = build_engine(**OURS)
    update(engine, range(1))
    before = snapshot(engine)
    engine.optimizer_zero_grad()
    for param in engine.module.parameters():
        param.grad = torch.full_like(param, torch.inf)
    engine.optimizer_step()
    assert_same(snapshot(engine), before)
    assert [group["step"] for group in engine.optimizer.param_groups] == [1]
    update(engine, range(1, 2))


def main() -> None:
    global FOLDER
    FOLDER = Path(sys.argv[1])
    if ON_GPU:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    ranks.main(SCENARIOS, sys.argv[2:], backend="cpu:gloo,cuda:nccl" if ON_GPU else "gloo", limit_s=120)


if __name__ == "__main__":
    main()
