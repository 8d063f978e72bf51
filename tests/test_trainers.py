"""In other people's training loops, each with what docs/trainers.md says: resume, accumulation,
clipping, bfloat16.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import helpers
import pytest
import torch

from fused_offload import FusedOffloadAdam

device = helpers.device

TOKENS, LENGTH, STEPS, HALF = 40, 12, 6, 3
HYPER: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1}


def needs(*packages: str) -> pytest.MarkDecorator:
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {' and '.join(missing)}")


def rows(count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(TOKENS, (count, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row} for row in tokens]


def gpt2(dtype: torch.dtype = torch.float32, dropout: float = 0.1) -> Any:
    """With tied embeddings, and frozen positions."""
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=TOKENS,
        n_positions=LENGTH,
        n_embd=32,
        n_layer=2,
        n_head=2,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        resid_pdrop=dropout,
        use_cache=False,
    )
    model = transformers.GPT2LMHeadModel(config).to(dtype)
    model.transformer.wpe.requires_grad_(False)
    return model


def state_of(optimizer: Any, model: torch.nn.Module) -> list[dict[str, torch.Tensor]]:
    return [{k: v.clone() for k, v in optimizer.state[p].items()} for p in model.parameters() if p in optimizer.state]


def assert_same_training(one: Any, a: FusedOffloadAdam, other: Any, b: FusedOffloadAdam) -> None:
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
    states = state_of(a, one), state_of(b, other)
    assert states[0]
    for x, y in zip(*states, strict=True):
        assert x.keys() == y.keys()
        assert all(torch.equal(x[key], y[key]) for key in x)
    assert [group["step"] for group in a.param_groups] == [group["step"] for group in b.param_groups]


def assert_near(one: torch.nn.Module, other: torch.nn.Module) -> None:
    """Of torch's AdamW, with the same gradients at first and nearly the same later.

    Biases are left out: gradients of key biases are nothing but rounding, which Adam makes as large
    as any.
    """
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        if p.dim() > 1:
            torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)


# -- Hugging Face Trainer --------------------------------------------------------------------------


def hugging_face(model: Any, optimizer: Any, folder: Path, device: str, **settings: Any) -> Any:
    import transformers

    arguments = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.5,
        "bf16": True,
        "use_cpu": device == "cpu",
        "save_steps": HALF,
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        **settings,
    }
    return transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(str(folder), **arguments),
        train_dataset=rows(2 * 4 * STEPS),
        optimizers=(optimizer, None),
    )


@needs("transformers", "accelerate")
def test_hugging_face_trainer(device: str, tmp_path: Path) -> None:
    model = gpt2().to(device)
    optimizer = FusedOffloadAdam(model.parameters(), **HYPER)
    hugging_face(model, optimizer, tmp_path, device).train()
    assert optimizer.param_groups[0]["step"] == STEPS
    assert model.transformer.wpe.weight not in optimizer.state

    other = gpt2().to(device)
    resumed = FusedOffloadAdam(other.parameters(), **HYPER)
    hugging_face(other, resumed, tmp_path, device).train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{HALF}"))
    assert_same_training(model, optimizer, other, resumed)
    assert other.lm_head.weight is other.transformer.wte.weight

    reference = gpt2().to(device)
    theirs = torch.optim.AdamW(reference.parameters(), **HYPER)
    hugging_face(reference, theirs, tmp_path / "reference", device).train()
    assert_near(model, reference)


@needs("transformers", "accelerate")
def test_hugging_face_trainer_by_class(device: str, tmp_path: Path) -> None:
    """The Trainer builds the optimizer, with its own groups: no decay for biases and norms."""
    import transformers

    settings = {
        "max_steps": 2,
        "use_cpu": device == "cpu",
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "weight_decay": 0.1,
    }
    model = gpt2(torch.bfloat16).to(device)
    keeps = {"master_weights": True, "store_param_remainders": True}
    trainer = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(str(tmp_path), **settings),
        train_dataset=rows(16),
        optimizer_cls_and_kwargs=(FusedOffloadAdam, {"lr": 1e-3, **keeps}),
    )
    trainer.train()
    optimizer = trainer.optimizer.optimizer if hasattr(trainer.optimizer, "optimizer") else trainer.optimizer
    assert isinstance(optimizer, FusedOffloadAdam)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert optimizer.state[model.lm_head.weight]["master_param"].dtype == torch.int16


@needs("transformers", "accelerate")
def test_the_hugging_face_trainer_wants_all_gradients(device: str, tmp_path: Path) -> None:
    """It logs their norm, also without clipping."""
    for settings in ({"gradient_accumulation_steps": 1}, {"gradient_accumulation_steps": 1, "max_grad_norm": 0}, {}):
        model = gpt2().to(device)
        optimizer = FusedOffloadAdam(model.parameters(), **HYPER)
        optimizer.step_in_backward(model)
        with pytest.raises(RuntimeError, match="no clipping by global norm"):
            hugging_face(model, optimizer, tmp_path, device, **settings).train()


@needs("transformers", "accelerate", "peft")
def test_lora(device: str, tmp_path: Path) -> None:
    import peft

    results = []
    for resume in (False, True):
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
        model = peft.get_peft_model(gpt2(), config).to(device)
        base = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
        optimizer = FusedOffloadAdam(model.parameters(), **HYPER)  # frozen ones take none
        trainer = hugging_face(model, optimizer, tmp_path, device)
        trainer.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{HALF}") if resume else None)
        assert {name for name, p in model.named_parameters() if p in optimizer.state} == {
            name for name, p in model.named_parameters() if "lora_" in name
        }
        assert all(torch.equal(p, base[name]) for name, p in model.named_parameters() if name in base)
        results += [model, optimizer]
    assert_same_training(*results)


# -- Accelerate ------------------------------------------------------------------------------------


def accelerated(device: str, optimizer_class: type, folder: Path, *, resume: bool = False) -> tuple[Any, Any]:
    import accelerate

    accelerator = accelerate.Accelerator(
        gradient_accumulation_steps=2, mixed_precision="bf16", cpu=device == "cpu", step_scheduler_with_optimizer=False
    )
    model = gpt2(dropout=0.0)  # the loader that starts again draws a number of its own
    optimizer = optimizer_class(model.parameters(), **HYPER)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loader = torch.utils.data.DataLoader(rows(2 * 4 * STEPS), batch_size=4)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    first = 0
    if resume:
        accelerator.load_state(str(folder))
        first = 2 * HALF
    for index, batch in enumerate(accelerator.skip_first_batches(loader, first), start=first):
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            if accelerator.sync_gradients:
                scheduler.step()
            optimizer.zero_grad()
        if index + 1 == 2 * HALF and not resume:
            accelerator.save_state(str(folder))
    accelerator.free_memory()
    return accelerator.unwrap_model(model), optimizer.optimizer


@pytest.fixture
def fresh_accelerator() -> Iterator[None]:
    yield
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)


@needs("transformers", "accelerate")
@pytest.mark.usefixtures("fresh_accelerator")
def test_accelerate(device: str, tmp_path: Path) -> None:
    model, optimizer = accelerated(device, FusedOffloadAdam, tmp_path / "state")
    assert optimizer.param_groups[0]["step"] == STEPS
    other, resumed = accelerated(device, FusedOffloadAdam, tmp_path / "state", resume=True)
    assert_same_training(model, optimizer, other, resumed)
    reference, _ = accelerated(device, torch.optim.AdamW, tmp_path / "reference")
    assert_near(model, reference)


# -- Lightning -------------------------------------------------------------------------------------


def lightning_run(
    device: str,
    optimizer_class: type,
    folder: Path,
    checkpoint: Path | None = None,
    *,
    precision: str,
    in_backward: bool = False,
    **settings: Any,
) -> Any:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed = torch.nn.Embedding(TOKENS, 32)
            self.middle = torch.nn.Linear(32, 32)
            self.frozen = torch.nn.Linear(32, 32).requires_grad_(False)
            self.head = torch.nn.Linear(32, TOKENS, bias=False)
            self.head.weight = self.embed.weight

        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
            x = self.frozen(torch.relu(self.middle(self.embed(batch["input_ids"][:, :-1]))))
            logits = self.head(x).float()
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())

        def configure_optimizers(self) -> Any:
            optimizer = optimizer_class(self.parameters(), **HYPER)
            if in_backward:
                optimizer.step_in_backward(self)
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

        def configure_gradient_clipping(
            self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
        ) -> None:
            if gradient_clip_val is not None:
                torch.nn.utils.clip_grad_norm_(self.parameters(), gradient_clip_val)

    module = Module()
    saves = lightning.pytorch.callbacks.ModelCheckpoint(
        folder, filename="{step}", every_n_train_steps=HALF, save_top_k=-1
    )
    trainer = lightning.Trainer(
        accelerator="cpu" if device == "cpu" else "gpu",
        devices=1,
        max_steps=STEPS,
        precision=precision,
        callbacks=[saves],
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )
    # Two epochs: within one, Lightning does not skip the batches that a checkpoint has seen.
    batches = HALF * settings.get("accumulate_grad_batches", 1)
    loader = torch.utils.data.DataLoader(rows(4 * batches), batch_size=4)
    trainer.fit(module, loader, ckpt_path=checkpoint)
    return module, trainer.optimizers[0]


@needs("lightning")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_lightning(device: str, precision: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"precision": precision, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    optimizer_class: Any = FusedOffloadAdam
    if precision == "bf16-true":
        optimizer_class = partial(FusedOffloadAdam, master_weights=True, store_param_remainders=True)
    model, optimizer = lightning_run(device, optimizer_class, tmp_path, **settings)
    assert optimizer.param_groups[0]["step"] == STEPS
    assert model.frozen.weight not in optimizer.state
    path = tmp_path / f"step={HALF}.ckpt"
    other, resumed = lightning_run(device, optimizer_class, tmp_path / "again", path, **settings)
    assert_same_training(model, optimizer, other, resumed)
    if precision != "bf16-true":
        reference, _ = lightning_run(device, torch.optim.AdamW, tmp_path / "reference", **settings)
        assert_near(model, reference)


@needs("lightning")
@pytest.mark.filterwarnings("ignore")
def test_lightning_that_steps_in_backward(device: str, tmp_path: Path) -> None:
    settings = {"precision": "bf16-mixed"}
    model, optimizer = lightning_run(device, FusedOffloadAdam, tmp_path / "one", in_backward=True, **settings)
    path = tmp_path / "one" / f"step={HALF}.ckpt"
    other, resumed = lightning_run(device, FusedOffloadAdam, tmp_path, path, in_backward=True, **settings)
    assert_same_training(model, optimizer, other, resumed)
    reference, expected = lightning_run(device, FusedOffloadAdam, tmp_path / "two", **settings)
    assert_same_training(model, optimizer, reference, expected)
