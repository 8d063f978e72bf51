"""Trains a byte-level GPT with FusedOffloadMuon for its matrices and FusedOffloadAdam for the rest.

Two runs are compared: one with the optimizers' state in host memory, one with all of it on the
device. They must end in the same bits. On a GPU the table shows what the first one saves.

    python examples/train_muon.py
    python examples/train_muon.py --size tiny --steps 4 --device cpu
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from train_gpt import GPT, SIZES, load_corpus, make_deterministic, windows

from fused_offload import FusedOffloadAdam, FusedOffloadMuon, OffloadConfig
from fused_offload.optimizer import OffloadOptimizer

console = Console()

STATE: dict[str, Any] = {"master_weights": True, "store_param_remainders": True}
"""Float32 masters as 16 bits beside each bfloat16 parameter; momentum and moments are float32."""


def split(model: nn.Module, output: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Matrices of hidden layers, for Muon, and all other parameters, for Adam.

    Args:
        model: the whole model.
        output: its output layer.
    """
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    apart = {id(param) for module in (*embeddings, output) for param in module.parameters()}
    params = [param for param in model.parameters() if param.requires_grad]
    matrices = [param for param in params if param.ndim == 2 and id(param) not in apart]
    hidden = set(map(id, matrices))
    return matrices, [param for param in params if id(param) not in hidden]


def build(model: GPT, lr: float, offload: OffloadConfig) -> list[OffloadOptimizer]:
    """Both optimizers. With this scale of the updates, Muon takes AdamW's learning rate."""
    matrices, others = split(model, model.head)
    return [
        FusedOffloadMuon(matrices, lr=lr, adjust_lr_fn="match_rms_adamw", offload=offload, **STATE),
        FusedOffloadAdam(others, lr=lr, betas=(0.9, 0.95), offload=offload, **STATE),
    ]


def train(options: argparse.Namespace, offload: OffloadConfig, text: Tensor) -> tuple[list[Tensor], dict[str, int]]:
    """Trains from the same start with the same data.

    Returns:
        Final parameters on the CPU, and bytes by what they are for.
    """
    size, device = SIZES[options.size], torch.device(options.device)
    torch.manual_seed(0)
    model, order = GPT(size, device), torch.Generator().manual_seed(0)
    optimizers = build(model, size.lr, offload)
    for step in range(options.steps):
        starts = torch.randint(len(text) - size.context, (size.batch,), generator=order)
        loss = model.loss(windows(text, starts, size, device))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step % max(1, options.steps // 10) == 0 or step == options.steps - 1:
            console.print(f"step {step + 1:4d}   loss {loss.item():.4f}")
    reports = [optimizer.memory_report() for optimizer in optimizers]
    held = {
        "host memory": sum(sum(report.host_bytes.values()) for report in reports),
        "state on the device": sum(sum(report.resident_bytes.values()) for report in reports),
        "staging ring, shared": reports[0].ring_bytes,
        "work memory of Muon": reports[0].work_bytes,
    }
    params = [param.detach().cpu() for param in model.parameters()]
    for optimizer in optimizers:
        optimizer.close()
    return params, held


def main() -> int:
    """Runs both trainings; the exit code is 1 if they ended in different bits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, help="model size (default: gpu on a GPU, else small)")
    parser.add_argument("--steps", type=int, default=20, help="length of the run (default: 20)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="torch device")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error("--steps must be at least 1")
    options.size = options.size or ("gpu" if options.device.startswith("cuda") else "small")
    text = load_corpus().train
    runs = {}
    with make_deterministic(torch.device(options.device)):
        for name, fraction in (("state in host memory", 1.0), ("all state on the device", 0.0)):
            console.print(f"[bold]{name}")
            runs[name] = train(options, OffloadConfig(fraction=fraction), text)
    table = Table("", *runs)
    for key in next(iter(runs.values()))[1]:
        table.add_row(key, *(f"{held[key] / 1e6:,.1f} MB" for _, held in runs.values()))
    console.print(table)
    one, other = (params for params, _ in runs.values())
    agree = all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    console.print("Both runs ended in the same bits." if agree else "[bold red]The runs ended in different bits.")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
