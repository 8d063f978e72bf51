"""Time that an optimizer adds to a training iteration of a GPT of 1.4 billion parameters.

    python bench/train_loop.py --results FILE.json [--cases NAME ...]
    python bench/train_loop.py --results FILE.json --tiny --device cpu    # seconds, says nothing

Every case trains the same model for a few iterations, without a synchronisation between them: ours
with its state on the GPU, streamed, and with a window; and the other optimizers of `peers.py` that
are installed. The time is that of whole iterations as a training loop runs them: from the beginning
of one forward pass on the GPU to that of a later one. So every timed iteration pays for the
write-back of the one before, and none for that of the last, which ends under an iteration that is
not timed.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import traceback
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import pytest
import torch
from clock import mark, ms_between, synchronize, time_step
from gpt import Gpt
from machine import check_device, check_writable, machine_facts, make_current
from peers import NEEDS_NO_GPU, PEERS, Peer
from torch import nn

from fused_offload import FusedOffloadAdam, OffloadConfig

ALL = 2**50
RING_BYTES = 160 * 2**20
FORMATS: dict[str, dict[str, Any]] = {
    "6B": {
        "master_weights": True,
        "store_param_remainders": True,
        "exp_avg_dtype": torch.bfloat16,
        "exp_avg_sq_dtype": torch.bfloat16,
    },
    "10B": {"master_weights": True, "store_param_remainders": True},
    "12B": {"master_weights": True},
}
TINY = {"layers": 2, "width": 128, "vocab": 512, "length": 32, "batch": 2, "iterations": 2, "warmup": 1}


class Case(NamedTuple):
    """One way to keep the state.

    Attributes:
        microbatches: of an iteration.
        format: key of `FORMATS`, or None for a loop without our optimizer.
        config: how the state moves.
        half: whether the window is half of the state.
        full_gpu: whether the GPU has no more memory than the loop without an optimizer took, and
            the ring.
        peer: another optimizer.
    """

    microbatches: int
    format: str | None
    config: OffloadConfig | None = None
    half: bool = False
    full_gpu: bool = False
    peer: Peer | None = None


def all_cases() -> dict[str, Case]:
    """Every case by name; each row is compared with the resident one of its format and
    microbatches.
    """
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
        "resident-12B-4": Case(4, "12B", resident),
        "stream-12B-4": Case(4, "12B", OffloadConfig()),
        "window-12B-4": Case(4, "12B", everything),
        **{f"{peer.name}-4": Case(4, None, peer=peer) for peer in PEERS},
        "resident-6B-4-again": Case(4, "6B", resident),
    }


class Trained(NamedTuple):
    """An optimizer in a training loop.

    Attributes:
        ours: it, if it is ours.
        attachment: of ours to the model, if it has a window.
        step: takes the gradients of an iteration.
        finish: waits for what a step left under way.
    """

    ours: FusedOffloadAdam | None
    attachment: Any
    step: Any
    finish: Any = None


def optimizer_of(case: Case, model: nn.Module) -> Trained | None:
    """The optimizer of a case, if it has one."""
    params = list(model.parameters())
    if case.peer is not None:
        if params[0].device.type == "cpu" and case.peer.name not in NEEDS_NO_GPU:
            pytest.skip("needs a CUDA GPU")
        build = case.peer.build_to_train or case.peer.build
        return Trained(None, None, build(params).step)
    if case.format is None:
        return None
    config = case.config or OffloadConfig()
    if case.half:
        numel = sum(param.numel() for param in params)
        config = OffloadConfig(window_bytes=numel * int(case.format[:-1]) // 2)
    ours = FusedOffloadAdam(params, lr=1e-4, weight_decay=0.1, offload=config, **FORMATS[case.format])
    attachment = ours.attach(model, microbatches=case.microbatches) if config.window_bytes else None
    return Trained(ours, attachment, ours.step, ours.synchronize)


def memory_fraction(case: Case, total_bytes: int, baseline: dict[str, Any]) -> float:
    """Share of the GPU's memory that a case may take.

    Args:
        case: which.
        total_bytes: what the GPU has.
        baseline: result of the loop without an optimizer.
    """
    if not case.full_gpu:
        return 1.0
    # A little more, for the allocator's rounding.
    return min(1.0, (1.02 * baseline["peak_reserved_bytes"] + RING_BYTES) / total_bytes)


def train(case: Case, args: argparse.Namespace, baseline: dict[str, Any]) -> dict[str, Any]:
    """Runs one case.

    Args:
        case: which.
        args: the command line.
        baseline: result of the loop without an optimizer, if it has run.
    """
    device, warmup = torch.device(args.device), args.warmup
    if device.type == "cuda":
        total_bytes = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(memory_fraction(case, total_bytes, baseline))
        if case.full_gpu:
            warmup += 6  # iterations in which the window finds its size
    torch.manual_seed(0)
    with device:
        model = Gpt(args).bfloat16()
    try:
        return train_model(case, args, model, warmup)
    finally:
        for param in model.parameters():
            # Some peers' hooks keep the model alive, which is not to count as memory of the cases
            # that follow.
            param.grad, param.data = None, torch.empty(0, dtype=param.dtype, device=device)


def train_model(case: Case, args: argparse.Namespace, model: nn.Module, warmup: int) -> dict[str, Any]:
    """Times of a case's iterations, and its memory.

    Args:
        case: which.
        args: the command line.
        model: trained by it.
        warmup: iterations that are not timed.
    """
    device = torch.device(args.device)
    params = list(model.parameters())
    trained = optimizer_of(case, model)
    tokens = torch.randint(0, args.vocab, (args.batch, args.length + 1), device=device)
    window, begins = [], []
    for iteration in range(warmup + args.iterations + 1):
        if iteration == warmup and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        begins.append(mark(device))
        for _ in range(case.microbatches):
            (model(tokens) / case.microbatches).backward()
        nn.utils.clip_grad_norm_(params, 1.0)
        if trained is not None:
            if trained.ours is not None:
                window.append(trained.ours.window_bytes())
            trained.step()
        model.zero_grad(set_to_none=True)
    synchronize(device)
    timed = begins[warmup:]
    result = {
        "microbatches": case.microbatches,
        "form": case.format,
        "param_numel": sum(param.numel() for param in params),
        "iteration_ms": ms_between(timed[0], timed[-1]) / args.iterations,
        "iterations_ms": [ms_between(begin, end) for begin, end in pairwise(timed)],
        "window_bytes": window,
    }
    if case.peer is not None:
        result["note"] = case.peer.note_to_train or case.peer.note
    if device.type == "cuda":
        result |= {
            "peak_bytes": torch.cuda.max_memory_allocated(device),
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(device),
            "allocation_retries": torch.cuda.memory_stats(device)["num_alloc_retries"],
        }
    if trained is not None:
        result |= afterwards(trained, params, device)
    assert all(param.isfinite().all() for param in params), "a parameter is not finite"
    return result


def afterwards(trained: Trained, params: list[nn.Parameter], device: torch.device) -> dict[str, Any]:
    """Place of the state, and the time of a step without concurrent work."""
    result: dict[str, Any] = {}
    if trained.attachment is not None:
        trained.attachment.detach()
    if trained.ours is not None:
        report = trained.ours.memory_report()
        result |= {"host_bytes": sum(report.host_bytes.values()), "ring_bytes": report.ring_bytes}
        result["prefetch_seconds"] = trained.ours._stepper.devices.prefetch_seconds()
        if device.type == "cuda" and result["host_bytes"]:
            result["step_report"] = trained.ours.last_step_report()
    for param in params:
        param.grad = torch.zeros_like(param)
    samples = [time_step(trained.step, device, trained.finish).total_ms for _ in range(4)]
    result["step_alone_ms"] = median(samples[1:])
    if trained.ours is not None:
        trained.ours.close()
    return result


def add_ratios(results: dict[str, Any]) -> None:
    """Time of each case beyond the resident one of its format and microbatches, and the bare
    loop.
    """
    without = {row["microbatches"]: row["iteration_ms"] for name, row in results.items() if name.startswith("none")}
    for row in results.values():
        if row["microbatches"] in without:
            row["over_none_ms"] = row["iteration_ms"] - without[row["microbatches"]]
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


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True, metavar="FILE.json")
    parser.add_argument("--cases", nargs="+", choices=list(all_cases()), default=list(all_cases()))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model that trains in seconds")
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=50304)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=4)
    if parser.parse_args(arguments).tiny:
        parser.set_defaults(**TINY)  # what the command line says counts more
    options = parser.parse_args(arguments)
    if min(options.iterations, options.warmup) < 1:
        parser.error("--iterations and --warmup should be at least 1")
    check_device(parser, options.device)
    check_cases(parser, options)
    check_writable(parser, options.results)
    return options


def check_cases(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Leaves out what needs a GPU where there is none, and ends the program if what is left cannot
    run.
    """
    full_gpu = [name for name in options.cases if all_cases()[name].full_gpu]
    if torch.device(options.device).type != "cuda":
        options.cases = [name for name in options.cases if name not in full_gpu]
        if not options.cases:
            parser.error(f"--cases {' '.join(full_gpu)}: there is no full GPU on a CPU")
    elif full_gpu and "none-4" not in options.cases[: options.cases.index(full_gpu[0])]:
        parser.error("a full GPU is one that has what the case none-4 took: run that first")


def main(arguments: list[str] | None = None) -> int:
    """Runs the cases and writes the results.

    Exit codes: 0 all that is installed ran, 1 some failed.
    """
    args = parse(arguments)
    device = torch.device(args.device)
    make_current(device)
    results: dict[str, Any] = {}
    skipped: dict[str, str] = {}
    failed: dict[str, str] = {}
    machine: dict[str, Any] = {}
    for name in args.cases:
        try:
            results[name] = train(all_cases()[name], args, results.get("none-4", {}))
        except pytest.skip.Exception as reason:  # a peer that is not installed
            skipped[name] = str(reason)
        except Exception as error:  # the other cases are worth running
            traceback.print_exc()
            failed[name] = f"{type(error).__name__}: {error}"
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        add_ratios(results)
        print(in_words(name, results.get(name), skipped.get(name) or failed.get(name)), flush=True)
        machine = machine or machine_facts()  # behind the first case, since an idle link slows down
        record = {
            "machine": machine,
            "arguments": {key: value for key, value in vars(args).items() if key not in ("results", "cases")},
            "scale": {"smoke": args.tiny or device.type != "cuda"},
            "cases": results,
            "skipped": skipped,
            "failed": failed,
        }
        args.results.write_text(json.dumps(record, indent=1, default=asdict) + "\n")
    return int(bool(failed))


def in_words(name: str, row: dict[str, Any] | None, otherwise: str | None) -> str:
    """One line for a case."""
    if row is None:
        return f"{name}: {otherwise}"
    parts = [f"{row['iteration_ms']:.1f} ms"]
    for key, words in (("added_ms", "added"), ("over_none_ms", "over no optimizer"), ("step_alone_ms", "step alone")):
        if key in row:
            parts.append(f"{words} {row[key]:.1f} ms")
    if "peak_bytes" in row:
        parts.append(f"peak {row['peak_bytes'] / 1e9:.2f} GB")
    if any(row["window_bytes"]):
        parts.append(f"window {row['window_bytes'][-1] / 1e9:.2f} GB")
    return f"{name}: {', '.join(parts)}"


if __name__ == "__main__":
    sys.exit(main())
