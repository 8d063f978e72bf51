r"""Trains all parameters of a decoder of 13 billion on one GPU.

Tokens a second, memory, and what the step adds.

    python bench/large_model.py --results FILE.json                  # gradients held, clipping on
    python bench/large_model.py --results FILE.json --window-bytes auto
    python bench/large_model.py --results FILE.json --in-backward    # gradients applied at once
    python bench/large_model.py --results FILE.json --find-largest --in-backward --moments uint8
    python bench/large_model.py --results FILE.json --params 8.1e9 --width 4096 --vocab 128256 \
        --batch 1 --in-backward --gpu-memory 24                      # a card of 24 GB
    python bench/large_model.py --results FILE.json --params 13.4e9 --width 8192 --vocab 32768 \
        --batch 8 --microbatches 1 --moments uint8 --params-on-host --gpu-memory 24
    python bench/large_model.py --tiny --device cpu                  # seconds, says nothing

Random weights in bfloat16, made on the GPU; real text (sources of the machine's Python packages, as
`quality.py` reads them); a checkpoint around every block; the loss in float32, a few tokens at a
time. The state is a 16-bit remainder and two moments in page-locked host memory. Each case is a
process of its own, and what `fused-offload plan` predicts is recorded beside what was measured.
Results are added to those that the file has already.

With ``--params-on-host`` FSDP2 shards the model over the one GPU with ``CPUOffloadPolicy``. Each
block then takes the sequences of a batch one after the other, so that one visit of its parameters
serves all of them. ``--optimizer torch`` steps them by torch's fused AdamW on the CPU instead, with
everything in bfloat16.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from clock import mark, ms_between, wall_ms
from copies_only import run_copies_only
from gpt import Gpt
from machine import check_device, machine_facts, make_current
from quality import Size, Text, read_text, windows
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from fused_offload import FusedOffloadAdam, OffloadConfig, cli
from fused_offload.memory.host_limits import available_host_bytes
from fused_offload.state.memory_report import MemoryReport
from fused_offload.tuning.budget import memory_of
from fused_offload.tuning.training import Training

MOMENTS = {"fp32": torch.float32, "bf16": torch.bfloat16, "uint8": torch.uint8}
LOSS_TOKENS = 1024
"""Tokens whose logits exist at a time."""
TEXT_BYTES = 16 * 2**20
HOST_RESERVE_BYTES = 6 * 10**9
"""Host memory that the search for the largest model leaves to Python, CUDA and the system."""
GPU_RESERVE_BYTES = 10**9
"""GPU memory that it leaves to the allocator's rounding."""
LIBRARY_BYTES = 3 * 10**8
"""GPU memory that kernels of libraries take when they are loaded, beside what torch allocates."""
PEAK_LR = 1e-4
WARM_UP = 2000
"""Iterations of linear warm-up, unless the command line says so.

A model of this width that starts at the full rate predicts the same for all tokens. The more layers
and the wider they are, the longer the warm-up has to be.
"""

TINY = {"layers": 2, "width": 128, "vocab": 512, "length": 32, "batch": 2, "iterations": 3, "text_bytes": 2**20}

Record = dict[str, Any]


class Decoder(Gpt):
    """The GPT of `gpt.py`, which keeps one tensor of each block, and few logits."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """``[batch, length + 1]`` tokens to the mean loss, in float32."""
        x = self.tokens(tokens[:, :-1]) + self.places.weight
        for block in self.blocks:
            x = block(x) if isinstance(block, OneByOne) else recomputed(block, x)
        hidden, targets = self.norm(x).flatten(0, 1), tokens[:, 1:].flatten()
        parts = [
            recomputed(self._loss_sum, *part)
            for part in zip(hidden.split(LOSS_TOKENS), targets.split(LOSS_TOKENS), strict=True)
        ]
        return torch.stack(parts).sum() / targets.numel()

    def _loss_sum(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.head(hidden).float(), targets, reduction="sum")


def recomputed(function: Any, *inputs: torch.Tensor) -> torch.Tensor:
    """The result of a function of which the backward pass computes everything again."""
    result: torch.Tensor = checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
    return result


class OneByOne(nn.Module):
    """A block that takes one sequence after the other, and is one visit of its parameters to the GPU."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[batch, length, width]`` to the same."""
        return torch.cat([recomputed(self.block, sequence) for sequence in x.split(1)])


def layer_numel(width: int) -> int:
    """Parameters of a block."""
    return 12 * width * width + 4 * width


def param_numel(layers: int, options: argparse.Namespace) -> int:
    """Parameters of the model."""
    outside = (2 * options.vocab + options.length + 2) * options.width
    return outside + layers * layer_numel(options.width)


def other_bytes(layers: int, options: argparse.Namespace) -> int:
    """Estimates what a pass needs on the GPU beside parameters and gradients, an upper bound.

    Kept are the input of every block, the activations and gradients of the block that is computed
    again (22 times its width), the logits of one part of the loss in bfloat16 and float32 with
    gradients, and gradients of embedding and output layer before they are added up.
    """
    tokens = options.batch * options.length
    logits = 16 * min(LOSS_TOKENS, tokens) * options.vocab
    if not options.params_on_host:
        activations = 2 * tokens * options.width * (layers + 22)
        return activations + logits + 3 * 2 * options.vocab * options.width
    # Beside the inputs of every block: gradients of an output and an input; what one sequence takes
    # in a block; a block, its gradients, and the block that FSDP fetches meanwhile; embedding,
    # output layer and the gradients of the latter.
    activations = 2 * tokens * options.width * (layers + 2) + 2 * options.length * options.width * 22
    return activations + 3 * 2 * layer_numel(options.width) + 3 * 2 * options.vocab * options.width


@torch.no_grad()
def build_model(options: argparse.Namespace, device: torch.device) -> Decoder:
    """The model in bfloat16, initialised on the device as GPT-2 is; sharded block by block if asked to."""
    with torch.device("meta"):
        model = Decoder(options).bfloat16()
    torch.manual_seed(0)
    sharding: Record = {}
    if options.params_on_host:
        policy = CPUOffloadPolicy(pin_memory=device.type == "cuda")
        sharding = {"mesh": init_device_mesh(device.type, (1,)), "offload_policy": policy}
    for index, block in enumerate(model.blocks):
        initialise(block.to_empty(device=device), options)
        if sharding:
            model.blocks[index] = fully_shard(OneByOne(block), **sharding)
    for outside in (model.tokens, model.places, model.norm, model.head):
        initialise(outside.to_empty(device=device), options)
    return fully_shard(model, **sharding) if sharding else model


def initialise(module: nn.Module, options: argparse.Namespace) -> None:
    """Values of GPT-2."""
    for name, part in module.named_modules():
        if isinstance(part, (nn.Linear, nn.Embedding)):
            nn.init.normal_(part.weight, std=0.02 / math.sqrt(2 * options.layers) if name in ("out", "down") else 0.02)
        elif isinstance(part, nn.LayerNorm):
            part.reset_parameters()


def build_optimizer(params: list[nn.Parameter], options: argparse.Namespace) -> Any:
    """The optimizer, its state page-locked but not written yet; or torch's."""
    if options.optimizer == "torch":
        return torch.optim.AdamW(params, lr=PEAK_LR, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    optimizer = FusedOffloadAdam(
        params,
        lr=PEAK_LR,
        betas=(0.9, 0.95),
        weight_decay=0.1,
        master_weights=True,
        store_param_remainders=True,
        exp_avg_dtype=MOMENTS[options.moments],
        exp_avg_sq_dtype=MOMENTS[options.moments],
        offload=OffloadConfig(window_bytes=options.window_bytes),
    )
    optimizer._make_state()  # as the first step would: to time it
    return optimizer


def predict(options: argparse.Namespace, gpu_bytes: int, host_bytes: int) -> Record:
    """Output of ``fused-offload plan --json`` for the run."""
    arguments = [
        *("plan", "--json", "--params", str(param_numel(options.layers, options))),
        *("--master", "remainder", "--moments", options.moments, "--window-bytes", str(options.window_bytes)),
        *("--other-gpu", str(other_bytes(options.layers, options) / 1e9)),
        *("--host-memory", str(host_bytes / 1e9)),
        *(["--gpu-memory", str(gpu_bytes / 1e9)] if gpu_bytes else []),
        *(["--step-in-backward"] if options.in_backward else []),
        *(["--params-on-host"] if options.params_on_host else []),
    ]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = cli.main(arguments)
    assert code == 0, out.getvalue()
    report: Record = json.loads(out.getvalue())
    return {"command": " ".join(["fused-offload", *arguments]), **report}


# -- one case, in a process of its own -------------------------------------------------------------


def limits(options: argparse.Namespace) -> tuple[int, int]:
    """Bytes that the GPU and the host have for a case, unless the command line says so."""
    gpu_bytes, host_bytes = 0, available_host_bytes()[0]  # a CPU has no GPU's limit
    if torch.device(options.device).type == "cuda":
        gpu_bytes = torch.cuda.mem_get_info(options.device)[0]
    if options.gpu_memory is not None:
        gpu_bytes = int(options.gpu_memory * 1e9)
    if options.host_memory is not None:
        host_bytes = int(options.host_memory * 1e9)
    if host_bytes is None:
        raise SystemExit("how much host memory is left is unknown (/proc/meminfo): give --host-memory")
    return gpu_bytes, host_bytes


def limit_allocator(gpu_bytes: int) -> None:
    """Keeps torch, the CUDA context and loaded kernels together below a number of bytes of the
    current GPU.
    """
    free, total = torch.cuda.mem_get_info()
    allowed = gpu_bytes - (total - free) - LIBRARY_BYTES
    if allowed <= 0:
        raise RuntimeError(f"--gpu-memory {gpu_bytes / 1e9:g}: {(total - free) / 1e9:.1f} GB are in use already")
    torch.cuda.set_per_process_memory_fraction(allowed / total)


class Iteration(NamedTuple):
    """One iteration.

    Attributes:
        wall_ms: from the end of the one before, by the host's clock.
        passes_ms: forward and backward passes of all microbatches.
        clip_ms: gradient norm and clipping; 0 where gradients are applied as they come.
        step_ms: what ``step`` holds the GPU's stream up for.
        loss: mean of its microbatches.
        window_bytes: state that was prefetched before the step.
    """

    wall_ms: float
    passes_ms: float
    clip_ms: float
    step_ms: float
    loss: float
    window_bytes: int


def train(
    model: Decoder, optimizer: Any, text: Text, options: argparse.Namespace, deadline: float
) -> Iterator[Iteration]:
    """Trains; ends early where another iteration would end after the deadline."""
    device = torch.device(options.device)
    size = size_of(options)
    order = torch.Generator().manual_seed(0)
    params = list(model.parameters())
    # All of them are on the device before anything is timed, since copies from pageable memory
    # wait.
    batches = []
    for _ in range(options.iterations * options.microbatches):
        starts = torch.randint(len(text.train) - options.length, (options.batch,), generator=order)
        batches.append(windows(text.train, starts, size, device))
    ended = time.perf_counter()
    longest = 0.0
    for index in range(options.iterations):
        if index > 2 and ended + longest > deadline:
            return
        for group in optimizer.param_groups:
            group["lr"] = PEAK_LR * min(1.0, (index + 1) / options.warm_up)
        began = mark(device)
        loss = torch.zeros((), device=device)
        for _ in range(options.microbatches):
            part = model(batches.pop()) / options.microbatches
            part.backward()
            loss += part.detach()
        passed = mark(device)
        if options.params_on_host and options.optimizer == "ours":
            optimizer.clip_grad_norm_(1.0)
        elif not options.in_backward:
            nn.utils.clip_grad_norm_(params, 1.0)
        clipped, window_bytes = mark(device), optimizer.window_bytes() if options.optimizer == "ours" else 0
        optimizer.step()
        stepped = mark(device)
        model.zero_grad(set_to_none=True)
        final_loss = float(loss)
        if device.type == "cuda":
            stepped.synchronize()  # parameters are final, the write-back is not
        now = time.perf_counter()
        yield Iteration(
            wall_ms=(now - ended) * 1e3,
            passes_ms=ms_between(began, passed),
            clip_ms=ms_between(passed, clipped),
            step_ms=ms_between(clipped, stepped),
            loss=final_loss,
            window_bytes=window_bytes,
        )
        longest, ended = max(longest, now - ended) if index else 0.0, now


def step_alone(optimizer: FusedOffloadAdam, params: list[nn.Parameter]) -> Record:
    """Steps with nothing beside them, and the same chunks without kernels, taking turns."""
    device = params[0].device
    for param in params:
        param.grad = torch.zeros_like(param)
    copies, steps = [], []

    def step() -> None:
        optimizer.step()
        optimizer.synchronize()

    for _ in range(2):
        copies.append(wall_ms(lambda: run_copies_only(optimizer), device))
        steps.append(wall_ms(step, device))
    return {"alone_ms": min(steps), "copies_only_ms": min(copies), "alone_samples_ms": [steps, copies]}


def size_of(options: argparse.Namespace) -> Size:
    """Sizes as `quality.py` has them."""
    return Size(
        layers=options.layers,
        width=options.width,
        vocab=options.vocab,
        length=options.length,
        batch=options.batch,
        steps=options.iterations,
        text_bytes=options.text_bytes,
    )


def say(text: str) -> None:
    """Prints at once: whoever waits, or ends this at a limit, should see how far it came."""
    print(text, flush=True)


def run_case(options: argparse.Namespace, path: Path) -> None:
    """Trains one model and keeps the file up to date.

    What it lacks in memory is written there, too.
    """
    record: Record = {}
    try:
        for record in case_records(options):
            path.write_text(json.dumps(record))
    except (torch.OutOfMemoryError, RuntimeError) as error:
        path.write_text(json.dumps({**record, "failed": f"{type(error).__name__}: {error}"}))
        say(f"failed: {error}")


def case_records(options: argparse.Namespace) -> Iterator[Record]:
    """The record of a case, whenever something was added."""
    began = time.perf_counter()
    device = torch.device(options.device)
    make_current(device)
    gpu_bytes, host_bytes = limits(options)
    if options.gpu_memory is not None and device.type == "cuda":
        limit_allocator(gpu_bytes)
    if options.params_on_host:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    predicted = predict(options, gpu_bytes, host_bytes)
    names = ("layers", "width", "vocab", "length", "batch", "microbatches", "window_bytes", "in_backward", "moments")
    names = (*names, "params_on_host", "optimizer", "warm_up")
    record: Record = {
        "param_numel": param_numel(options.layers, options),
        **{name: getattr(options, name) for name in names},
        "tokens": options.batch * options.length * options.microbatches,
        "gpu_limit_bytes": None if options.gpu_memory is None else gpu_bytes,
        "machine": machine_facts(),
        "predicted": predicted,
    }
    yield record
    text = read_text(size_of(options))
    record["text_tokens"] = len(text.train)
    began_building = time.perf_counter()
    model = build_model(options, device)
    params = list(model.parameters())
    assert sum(param.numel() for param in params) == record["param_numel"]
    say(
        f"{record['param_numel']:,} parameters; planned: {predicted['host_bytes']['rank'] / 1e9:.2f} GB on the host, "
        f"{predicted['gpu_bytes']['total'] / 1e9:.1f} of {gpu_bytes / 1e9:.1f} GB on the GPU"
    )
    built = time.perf_counter()
    optimizer = build_optimizer(params, options)
    record |= {
        "start_seconds": began_building - began,
        "build_seconds": built - began_building,
        "page_lock_seconds": time.perf_counter() - built,
    }
    say(f"built in {record['build_seconds']:.1f} s, host memory page-locked in {record['page_lock_seconds']:.1f} s")
    attachment = None
    if options.in_backward:
        optimizer.step_in_backward(model)
    elif options.window_bytes != 0:
        attachment = optimizer.attach(model, microbatches=options.microbatches)
    iterations: list[Iteration] = []
    for one in train(model, optimizer, text, options, began + options.seconds):
        iterations.append(one)
        record |= summary(iterations, optimizer, record, device)
        say(
            f"iteration {len(iterations)}: {one.wall_ms:.0f} ms, passes {one.passes_ms:.0f}, step {one.step_ms:.0f}, "
            f"loss {one.loss:.3f}, window {one.window_bytes / 1e9:.2f} GB"
        )
        yield record
    if attachment is not None:
        attachment.detach()
    if not (options.in_backward or options.params_on_host) and device.type == "cuda" and not options.find_largest:
        yield record | step_alone(optimizer, params)
    if options.optimizer == "ours":
        optimizer.close()
    if options.params_on_host:
        dist.destroy_process_group()


def summary(iterations: list[Iteration], optimizer: Any, record: Record, device: torch.device) -> Record:
    """Results of the iterations so far, without the warm-up as soon as there are others."""
    timed = iterations[min(2, len(iterations) - 1) :]
    is_ours = isinstance(optimizer, FusedOffloadAdam)
    report = optimizer.memory_report() if is_ours else MemoryReport(host_bytes=bytes_of_state(optimizer))
    middle_ms = median(one.wall_ms for one in timed)
    result: Record = {
        "timed_iterations": len(timed),
        "iteration_ms": middle_ms,
        "tokens_per_s": record["tokens"] / middle_ms * 1e3,
        "model_tflops": 6 * record["param_numel"] * record["tokens"] / middle_ms / 1e9,
        "passes_ms": median(one.passes_ms for one in timed),
        "clip_ms": median(one.clip_ms for one in timed),
        "exposed_step_ms": median(one.step_ms for one in timed),
        "host_bytes": sum(report.host_bytes.values()),
        "pinned": report.pinned,
        "ring_bytes": report.ring_bytes,
        "process_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "iterations": [one._asdict() for one in iterations],
    }
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        result |= {
            "peak_bytes": torch.cuda.max_memory_allocated(device),
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(device),
            "gpu_used_bytes": total - free,
            "gpu_total_bytes": total,
            "allocation_retries": torch.cuda.memory_stats(device)["num_alloc_retries"],
        }
        step = optimizer.last_step_report() if is_ours else None
        result["step_report"] = None if step is None else str(step)
    return result


def bytes_of_state(optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes of the state of an optimizer of torch's by key."""
    found: dict[str, int] = {}
    for state in optimizer.state.values():
        for key, value in state.items():
            found[key] = found.get(key, 0) + value.numel() * value.element_size()
    return found


# -- cases, and the search for the largest model ---------------------------------------------------


def in_child(options: argparse.Namespace, limit_s: float) -> Record:
    """Runs a case in a process of its own, which takes all its memory along when it ends.

    Args:
        options: of the case.
        limit_s: seconds after which it is killed; what it had recorded by then counts.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "case.json"
        process = multiprocessing.get_context("spawn").Process(target=run_case, args=(options, path))
        process.start()
        process.join(limit_s)
        ended = "" if process.exitcode is not None else f"killed after {limit_s:.0f} s"
        if ended:
            process.kill()
            process.join()
        record: Record = json.loads(path.read_text()) if path.exists() else {}
    if process.exitcode and "failed" not in record:
        record["failed"] = ended or f"ended with exit code {process.exitcode}"
    return record


def name_of(options: argparse.Namespace) -> str:
    """Name of a case."""
    way = "in-backward" if options.in_backward else f"window-{options.window_bytes}"
    if options.params_on_host:
        way = "on-host" if options.optimizer == "ours" else "on-host-torch"
    numel = param_numel(options.layers, options)
    limit = "" if options.gpu_memory is None else f"-in-{options.gpu_memory:g}GB"
    length = f"-{options.batch * options.length * options.microbatches}-tokens"
    return f"{numel / 1e9:.3g}B-{options.moments}-{way}{limit}{length}"


def in_words(record: Record) -> str:
    """A case in one line."""
    if not has_trained(record):
        return "not trained"
    planned = record["predicted"]
    parts = [
        f"{record['tokens_per_s']:.0f} tokens/s",
        f"iteration {record['iteration_ms']:.0f} ms, of which the step {record['exposed_step_ms']:.0f}",
        f"host {record['host_bytes'] / 1e9:.2f} GB (planned {planned['host_bytes']['rank'] / 1e9:.2f})",
    ]
    if "peak_bytes" in record:
        parts.append(
            f"GPU peak {record['peak_bytes'] / 1e9:.2f} GB (planned {planned['gpu_bytes']['total'] / 1e9:.2f}), "
            f"in use {record['gpu_used_bytes'] / 1e9:.2f}"
        )
    if "alone_ms" in record:
        parts.append(
            f"step alone {record['alone_ms']:.0f} ms (planned {planned['predicted']['alone_ms']:.0f}), its copies "
            f"{record['copies_only_ms']:.0f}"
        )
    return "; ".join(parts)


def has_trained(record: Record) -> bool:
    """True if a case stepped at least twice, with all memory taken, in numbers."""
    losses = [one["loss"] for one in record.get("iterations", [])]
    return len(losses) >= 2 and all(map(math.isfinite, losses))


def largest_layers(options: argparse.Namespace, gpu_bytes: int, host_bytes: int) -> int:
    """Layers of the largest model that fits, by the bytes that ``fused-offload plan`` counts."""

    def fits(layers: int) -> bool:
        training = Training(
            master="remainder",
            exp_avg=options.moments,
            exp_avg_sq=options.moments,
            offload=OffloadConfig(window_bytes=options.window_bytes),
            other_gpu_bytes=other_bytes(layers, options),
            in_backward=options.in_backward,
            params_on_host=options.params_on_host,
        )
        memory = memory_of(param_numel(layers, options), training)
        return memory.gpu <= gpu_bytes and memory.node <= host_bytes

    layers = 0
    while fits(layers + 1):
        layers += 1
    return layers


def find_largest(options: argparse.Namespace, results: Record) -> Iterator[tuple[str, Record]]:
    """Tries the largest model that should fit, then smaller ones until one trains.

    Yields every case.
    """
    began = time.perf_counter()
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:  # takes GPU memory
        gpu_bytes, host_bytes = pool.submit(limits, options).result()
    if options.gpu_memory is None:
        gpu_bytes -= GPU_RESERVE_BYTES
    if options.host_memory is None:
        host_bytes -= HOST_RESERVE_BYTES
    layers = largest_layers(options, gpu_bytes, host_bytes)
    search: Record = {
        "gpu_bytes": gpu_bytes,
        "host_bytes": host_bytes,
        "predicted_numel": param_numel(layers, options),
        "tried": [],
    }
    results.setdefault("largest", {})[f"{options.moments}-{'in-backward' if options.in_backward else 'step'}"] = search
    for _ in range(options.attempts):
        left_s = options.search_seconds - (time.perf_counter() - began)
        if layers < 1 or left_s < options.seconds / 2:
            say("no attempt left: nothing fits, or no time is left")
            return
        case = argparse.Namespace(**{**vars(options), "layers": layers, "iterations": min(3, options.iterations)})
        say(f"trying {layers} layers, {param_numel(layers, options):,} parameters")
        record = in_child(case, min(left_s, 1.5 * options.seconds))
        trained = has_trained(record)
        search["tried"].append(
            {"param_numel": param_numel(layers, options), "trained": trained, "failed": record.get("failed")}
        )
        yield name_of(case), record
        if trained:
            search["param_numel"] = param_numel(layers, options)
            return
        layers -= max(1, layers // 25)


def cases(options: argparse.Namespace, results: Record) -> Iterator[tuple[str, Record]]:
    """Everything that the command line asks for."""
    if options.find_largest:
        yield from find_largest(options, results)
    else:
        yield name_of(options), in_child(options, 1.5 * options.seconds)


def save(path: Path | None, results: Record) -> None:
    """Adds to what the file has, whoever wrote it in between."""
    if path is None:
        return
    known: Record = json.loads(path.read_text()) if path.exists() else {}
    for part in ("large", "largest"):
        known[part] = {**known.get(part, {}), **results.get(part, {})}
    for record in results["large"].values():
        known["machine"] = record.get("machine", known.get("machine"))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(known, indent=1) + "\n")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, metavar="FILE.json")
    parser.add_argument("--params", type=float, default=13e9, help="parameters, rounded to layers; default: 13e9")
    parser.add_argument("--layers", type=int, help="instead of --params")
    parser.add_argument("--width", type=int, default=5120)
    parser.add_argument("--vocab", type=int, default=50304)
    parser.add_argument("--length", type=int, default=4096, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=4, help="sequences of a microbatch")
    parser.add_argument("--microbatches", type=int, help="of an iteration; default: 2, and 1 with --in-backward")
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument(
        "--warm-up", type=int, default=WARM_UP, help="iterations until the full learning rate; default: %(default)s"
    )
    parser.add_argument("--window-bytes", type=lambda text: text if text == "auto" else int(float(text)), default=0)
    parser.add_argument("--moments", choices=MOMENTS, default="bf16")
    parser.add_argument("--in-backward", action="store_true", help="step_in_backward: no clipping, one microbatch")
    parser.add_argument("--params-on-host", action="store_true", help="FSDP2's CPUOffloadPolicy, on one GPU")
    parser.add_argument("--optimizer", choices=("ours", "torch"), default="ours", help="with --params-on-host")
    parser.add_argument("--find-largest", action="store_true", help="from the largest model that should fit downwards")
    parser.add_argument("--attempts", type=int, default=4, help="of --find-largest")
    parser.add_argument("--search-seconds", type=float, default=540, help="for all attempts; default: %(default)g")
    parser.add_argument("--seconds", type=float, default=130, help="for a case, about; default: %(default)g")
    parser.add_argument("--gpu-memory", type=float, metavar="GB", help="limit, all included; default: none")
    parser.add_argument("--host-memory", type=float, metavar="GB", help="default: what is free")
    parser.add_argument("--text-bytes", type=int, default=TEXT_BYTES, help="text that is read")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model that trains in seconds")
    options = parser.parse_args(arguments)
    check_device(parser, options.device)
    if options.tiny:
        vars(options).update(TINY)
    if options.microbatches is None:
        options.microbatches = 1 if options.in_backward else 2
    if options.in_backward and (options.microbatches != 1 or options.window_bytes != 0):
        parser.error("--in-backward steps in every backward pass: one microbatch, no window")
    if options.params_on_host and (options.microbatches != 1 or options.window_bytes != 0 or options.in_backward):
        parser.error(
            "--params-on-host takes a batch at once, one sequence after the other in each block: set --batch "
            "and --microbatches 1, without a window and --in-backward"
        )
    if options.optimizer == "torch" and not options.params_on_host:
        parser.error("--optimizer torch goes with --params-on-host")
    if options.width % 128:
        parser.error("--width should be a multiple of 128, the width of a head")
    if options.layers is None:
        options.layers = max(1, round((options.params - param_numel(0, options)) / layer_numel(options.width)))
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the cases and writes the results. Exit codes: 0 it trained, 1 it did not."""
    options = parse(arguments)
    # Read when CUDA starts, which it only does in the children.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    results: Record = {"large": {}}
    trained = False
    for name, record in cases(options, results):
        trained = has_trained(record) and "failed" not in record
        results["large"][name] = record
        save(options.results, results)
        say(f"{name}: {in_words(record)}" + (f", {record['failed']}" if "failed" in record else ""))
    save(options.results, results)
    return 0 if trained else 1


if __name__ == "__main__":
    sys.exit(main())
