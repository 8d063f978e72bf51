"""What the optimizer adds to a training iteration: a GPT of 1.4 billion parameters, gradient clipping on.

    python bench/train_loop.py --results FILE.json [--cases NAME ...]

Every case trains the same model for a few iterations, without a synchronisation between them. The time is that of
whole iterations as a training loop runs them: from the beginning of one forward pass on the GPU to that of a later one.
So every timed iteration pays for the write-back of the one before, and none for that of the last, which ends under an
iteration that is not timed. The baseline keeps all state on the GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from machine import machine_facts
from torch import nn
from torch.nn import functional

from fused_offload import FusedOffloadAdam, OffloadConfig

ALL = 2**50
RING_BYTES = 160 * 2**20
FORMS: dict[str, dict[str, Any]] = {
    "6B": {
        "master_weights": True,
        "store_param_remainders": True,
        "exp_avg_dtype": torch.bfloat16,
        "exp_avg_sq_dtype": torch.bfloat16,
    },
    "10B": {"master_weights": True, "store_param_remainders": True},
}


class Block(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[batch, length, width]`` to the same."""
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Gpt(nn.Module):
    """A decoder that returns its loss."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.tokens = nn.Embedding(args.vocab, args.width)
        self.places = nn.Embedding(args.length, args.width)
        self.blocks = nn.ModuleList(Block(args.width, args.width // 128) for _ in range(args.layers))
        self.norm = nn.LayerNorm(args.width)
        self.head = nn.Linear(args.width, args.vocab, bias=False)

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """``[batch, length]`` tokens to ``[batch, length, vocab]``."""
        x = self.tokens(tokens) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """``[batch, length + 1]`` tokens to the mean loss."""
        return functional.cross_entropy(self.logits(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class Case(NamedTuple):
    """One way to keep the state.

    Attributes:
        microbatches: of an iteration.
        form: key of `FORMS`, or None for a loop without optimizer.
        config: how the state moves.
        half: whether the window is half of the state.
        full_gpu: whether the GPU has no more memory than the loop without an optimizer took, and the ring.
    """

    microbatches: int
    form: str | None
    config: OffloadConfig | None = None
    half: bool = False
    full_gpu: bool = False


def all_cases() -> dict[str, Case]:
    """Every case by name; each row is compared with the resident one of its form and microbatches."""
    resident = OffloadConfig(fraction=0.0)
    everything, auto = OffloadConfig(window_bytes=ALL), OffloadConfig(window_bytes="auto")
    return {
        "none-4": Case(4, None),
        "resident-6B-4": Case(4, "6B", resident),
        "stream-6B-4": Case(4, "6B", OffloadConfig()),
        **{f"fraction-{f}-6B-4": Case(4, "6B", OffloadConfig(fraction=f / 100)) for f in (25, 50, 75)},
        "half-6B-4": Case(4, "6B", everything, half=True),
        "window-6B-4": Case(4, "6B", everything),
        "auto-6B-4": Case(4, "6B", auto),
        "auto-6B-4-full-gpu": Case(4, "6B", auto, full_gpu=True),
        "resident-6B-8": Case(8, "6B", resident),
        "window-6B-8": Case(8, "6B", everything),
        "auto-6B-8": Case(8, "6B", auto),
        "stream-6B-8": Case(8, "6B", OffloadConfig()),
        "resident-10B-8": Case(8, "10B", resident),
        "window-10B-8": Case(8, "10B", everything),
        "resident-6B-4-again": Case(4, "6B", resident),
    }


def train(case: Case, args: argparse.Namespace, baseline: dict[str, Any]) -> dict[str, Any]:
    """Runs one case.

    Args:
        case: which.
        args: the command line.
        baseline: result of the loop without an optimizer, if it has run.
    """
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    allowed_bytes, warmup = total_bytes, args.warmup
    if case.full_gpu:
        # A little more for the allocator's rounding, and iterations in which the window finds its size.
        allowed_bytes = int(1.02 * baseline["peak_reserved_bytes"]) + RING_BYTES
        warmup += 6
    torch.cuda.set_per_process_memory_fraction(allowed_bytes / total_bytes)
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Gpt(args).bfloat16()
    params = list(model.parameters())
    numel = sum(param.numel() for param in params)
    optimizer = attachment = None
    if case.form is not None:
        config = case.config or OffloadConfig()
        if case.half:
            config = OffloadConfig(window_bytes=numel * int(case.form[:-1]) // 2)
        optimizer = FusedOffloadAdam(params, lr=1e-4, weight_decay=0.1, offload=config, **FORMS[case.form])
        if config.window_bytes:
            attachment = optimizer.attach(model, microbatches=case.microbatches)
    tokens = torch.randint(0, args.vocab, (args.batch, args.length + 1), device="cuda")
    window = []
    begins = [torch.cuda.Event(enable_timing=True) for _ in range(warmup + args.iterations + 1)]
    for iteration, begin in enumerate(begins):
        if iteration == warmup:
            torch.cuda.reset_peak_memory_stats()
        begin.record()
        for _ in range(case.microbatches):
            (model(tokens) / case.microbatches).backward()
        nn.utils.clip_grad_norm_(params, 1.0)
        if optimizer is not None:
            window.append(sum(block.nbytes for block in optimizer._stepper.engine.window()))
            optimizer.step()
        model.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    timed = begins[warmup:]
    result = {
        "microbatches": case.microbatches,
        "form": case.form,
        "param_numel": numel,
        "iteration_ms": timed[0].elapsed_time(timed[-1]) / args.iterations,
        "iterations_ms": [begin.elapsed_time(end) for begin, end in pairwise(timed)],
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        "allocation_retries": torch.cuda.memory_stats()["num_alloc_retries"],
        "window_bytes": window,
    }
    if optimizer is not None:
        if attachment is not None:
            attachment.detach()
        report = optimizer.memory_report()
        result |= {"host_bytes": sum(report.host_bytes.values()), "ring_bytes": report.ring_bytes}
        result["prefetch_seconds"] = optimizer._stepper.engine.prefetch_seconds()
        if result["host_bytes"]:
            result["step_report"] = optimizer.last_step_report()
            result["step_alone_ms"] = step_alone_ms(optimizer, params)
        optimizer.close()
    return result


def step_alone_ms(optimizer: FusedOffloadAdam, params: list[nn.Parameter]) -> float:
    """Time of a step with nothing beside it, write-back included."""
    for param in params:
        param.grad = torch.zeros_like(param)
    samples = []
    for _ in range(4):
        torch.cuda.synchronize()
        start = time.perf_counter()
        optimizer.step()
        optimizer.synchronize()
        samples.append((time.perf_counter() - start) * 1e3)
    return sorted(samples[1:])[1]


def add_ratios(results: dict[str, Any]) -> None:
    """What each case adds to the resident one of the same form and microbatches."""
    for row in results.values():
        same = [
            other["iteration_ms"]
            for name, other in results.items()
            if name.startswith("resident")
            and (other["form"], other["microbatches"]) == (row["form"], row["microbatches"])
        ]
        if same:
            baseline = sum(same) / len(same)
            row["added_ms"] = row["iteration_ms"] - baseline
            row["added_share"] = row["iteration_ms"] / baseline - 1


def main() -> None:
    """Runs the cases and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True, metavar="FILE.json")
    parser.add_argument("--cases", nargs="+", choices=list(all_cases()), default=list(all_cases()))
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=50304)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=4)
    args = parser.parse_args()
    if any(all_cases()[name].full_gpu for name in args.cases) and "none-4" not in args.cases:
        parser.error("a full GPU is one that has what the case none-4 took: run that first")
    results: dict[str, Any] = {}
    for name in args.cases:
        try:
            results[name] = train(all_cases()[name], args, results.get("none-4", {}))
        except torch.OutOfMemoryError as error:  # the other cases are worth running
            print(f"{name}: {error!r}", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
        add_ratios(results)
        if name in results:
            row = results[name]
            print(
                f"{name}: {row['iteration_ms']:.1f} ms, added {row.get('added_ms', 0):.1f}, "
                f"peak {row['peak_bytes'] / 1e9:.2f} GB, window {row['window_bytes'][-1:]}, "
                f"prefetch {row.get('prefetch_seconds')}, alone {row.get('step_alone_ms')}",
                flush=True,
            )
        args.results.parent.mkdir(parents=True, exist_ok=True)
        args.results.write_text(
            json.dumps({"machine": machine_facts(), "cases": results}, indent=1, default=asdict) + "\n"
        )


if __name__ == "__main__":
    main()
