"""Fine-tunes a Hugging Face decoder or LoRA adapters with optimizer state in host memory.

The model is a Llama made from a configuration, with random weights; nothing comes from a hub. The
text is the Python standard library's own source code, byte by byte. Put `from_pretrained` and your
data in their places.

    python examples/finetune_hf.py
    python examples/finetune_hf.py --lora
    python examples/finetune_hf.py --size 1b --steps 50

Needs transformers and accelerate, and peft for --lora. A GPU for --size 1b; tiny trains on a CPU in
seconds.
"""

from __future__ import annotations

import argparse
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import torch

from fused_offload import FusedOffloadAdam

VOCABULARY = 256
MAX_TEXT_BYTES = 4 * 2**20
SIZES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32},
}
"""Shapes; 1b is that of Llama 3.2 1B with a vocabulary of bytes."""


def import_or_say(name: str) -> Any:
    """Imports a package, or ends the program with what to install."""
    try:
        return __import__(name)
    except ImportError as error:
        raise SystemExit(f"This example needs {name} ({error}): pip install transformers accelerate peft") from error


def build_model(options: argparse.Namespace, device: str) -> torch.nn.Module:
    """The decoder in bfloat16, with adapters if asked for."""
    transformers = import_or_say("transformers")
    import_or_say("accelerate")
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, max_position_embeddings=options.length, use_cache=False, **SIZES[options.size]
    )
    torch.manual_seed(0)
    model: torch.nn.Module = transformers.LlamaForCausalLM(config).to(device, torch.bfloat16)
    if options.lora:
        peft = import_or_say("peft")
        adapters = peft.LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
        model = peft.get_peft_model(model, adapters)
    return model


def build_optimizer(model: torch.nn.Module, options: argparse.Namespace) -> FusedOffloadAdam:
    """AdamW with 6 bytes of state for each bfloat16 parameter, and 4 for each float32 parameter."""
    return FusedOffloadAdam(
        [param for param in model.parameters() if param.requires_grad],
        lr=options.lr,
        betas=(0.9, 0.95),
        weight_decay=0.1,
        master_weights=any(param.dtype == torch.bfloat16 for param in model.parameters() if param.requires_grad),
        store_param_remainders=True,
        exp_avg_dtype=torch.bfloat16,
        exp_avg_sq_dtype=torch.bfloat16,
    )


def read_rows(options: argparse.Namespace) -> list[dict[str, torch.Tensor]]:
    """Sequences of bytes, as a dataset of the Trainer."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
    count = min(len(text), MAX_TEXT_BYTES) // options.length
    tokens = torch.frombuffer(text[: count * options.length], dtype=torch.uint8).long().view(count, options.length)
    return [{"input_ids": row, "labels": row} for row in tokens]


def parse_arguments() -> argparse.Namespace:
    """Reads the command line and fills in what depends on the machine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lora", action="store_true", help="train adapters, not the model")
    parser.add_argument("--size", choices=SIZES, help="default: 1b on a GPU, else tiny")
    parser.add_argument("--steps", type=int, default=20, help="default: %(default)s")
    parser.add_argument("--length", type=int, default=128, help="bytes of a sequence; default: %(default)s")
    parser.add_argument("--batch", type=int, default=8, help="sequences of a microbatch; default: %(default)s")
    parser.add_argument("--lr", type=float, help="default: 3e-4, with --lora 2e-3")
    options = parser.parse_args()
    options.size = options.size or ("1b" if torch.cuda.is_available() else "tiny")
    options.lr = options.lr or (2e-3 if options.lora else 3e-4)
    return options


def main() -> None:
    """Fine-tunes, and says what the optimizer took."""
    options = parse_arguments()
    transformers = import_or_say("transformers")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build_model(options, device)
    trained = sum(param.numel() for param in model.parameters() if param.requires_grad)
    held = sum(param.numel() for param in model.parameters())
    print(f"{trained:,} of {held:,} parameters are trained, on {device}, {options.steps} steps", flush=True)
    optimizer = build_optimizer(model, options)
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            max_steps=options.steps,
            per_device_train_batch_size=options.batch,
            gradient_accumulation_steps=2,
            max_grad_norm=1.0,
            warmup_steps=max(1, options.steps // 10),
            logging_steps=max(1, options.steps // 10),
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=device == "cpu",
        )
        trainer = transformers.Trainer(
            model=model, args=arguments, train_dataset=read_rows(options), optimizers=(optimizer, None)
        )
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    report = optimizer.memory_report()
    host = sum(report.host_bytes.values())
    print(
        f"The loss went from {float(losses[0]):.2f} to {float(losses[-1]):.2f} nats a byte; the optimizer's state took "
        f"{host / 1e6:,.1f} MB of host memory and {report.ring_bytes / 1e6:,.1f} MB of staging on the GPU."
    )
    optimizer.close()


if __name__ == "__main__":
    main()
