r"""Trains a Megatron-Core GPT with one optimizer after another.

Bits, GPU memory of each iteration, time of the step.

    python bench/megatron_train.py --results FILE.json [--cases NAME ...] \
        [--layers 24] [--hidden 2048]
    torchrun --nproc-per-node 2 bench/megatron_train.py ...

The model is Megatron's local GPT in bfloat16 under DistributedDataParallel with the distributed
optimizer and gradient clipping, deterministic; every case starts from the same weights and sees the
same tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

# Needed for determinism, and set before the first matrix product.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch

# Comes before Megatron, whose import takes seconds and warns.
if __name__ == "__main__" and not torch.cuda.is_available():
    raise SystemExit("bench/megatron_train.py trains on a CUDA GPU, and torch sees none here.")

from copies_only import run_copies_only
from machine import machine_facts
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.transformer_config import TransformerConfig

import fused_offload.megatron
from fused_offload import FusedOffloadAdam, OffloadConfig

FORMATS: dict[str, dict[str, Any]] = {
    "12B": {"store_param_remainders": False},
    "10B": {"store_param_remainders": True},
    "6B": {
        "store_param_remainders": True,
        "exp_avg_dtype": torch.bfloat16,
        "exp_avg_sq_dtype": torch.bfloat16,
    },
}
HYBRID = {"use_precision_aware_optimizer": True, "optimizer_cpu_offload": True}
ALL = 2**50
ADAM = {"use_precision_aware_optimizer": True}


class Case(NamedTuple):
    """One optimizer.

    Attributes:
        config: fields of OptimizerConfig.
        ours: whether FusedOffloadAdam is installed.
        offload: how its state moves, in the place of FusedAdam.
        iterations: fewer than asked for, for optimizers of which only the time is wanted.
    """

    config: dict[str, Any]
    ours: bool = True
    offload: OffloadConfig | None = None
    iterations: int | None = None


def all_cases() -> dict[str, Case]:
    """Every case by name."""
    cases = {}
    for name, format in FORMATS.items():
        cases[f"resident-{name}"] = Case({**HYBRID, **format, "optimizer_offload_fraction": 0.0})
        cases[f"offload-{name}"] = Case({**HYBRID, **format, "optimizer_offload_fraction": 1.0})
        cases[f"te-{name}"] = Case({**ADAM, **format}, ours=False)
        cases[f"te-place-{name}"] = Case({**ADAM, **format})
        for share, window in (("window", ALL), ("auto", "auto")):
            config = {**HYBRID, **format, "optimizer_offload_fraction": 1.0}
            cases[f"offload-{name}-{share}"] = Case(config, offload=OffloadConfig(window_bytes=window))  # type: ignore[arg-type]
    for name, overlap in (("hybrid", False), ("hybrid-overlap", True)):
        config = {**HYBRID, "optimizer_offload_fraction": 1.0, "overlap_cpu_optimizer_d2h_h2d": overlap}
        cases[name] = Case(config, ours=False, iterations=5)
    return cases


def build(case: Case, args: argparse.Namespace) -> tuple[Any, Any]:
    """Model and Megatron optimizer."""
    torch.manual_seed(1)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=args.layers,
        hidden_size=args.hidden,
        num_attention_heads=args.hidden // 128,
        params_dtype=torch.bfloat16,
        bf16=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )
    spec = get_gpt_layer_local_spec(normalization="LayerNorm")
    gpt = GPTModel(config, spec, vocab_size=args.vocab, max_sequence_length=args.sequence).cuda().bfloat16()
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=True, grad_reduce_in_fp32=False, bucket_size=40_000_000
    )
    model = DistributedDataParallel(config, ddp_config, gpt)
    adam = OptimizerConfig(
        optimizer="adam",
        lr=3e-4,
        weight_decay=0.1,
        bf16=True,
        clip_grad=1.0,
        use_distributed_optimizer=True,
        **({"main_grads_dtype": torch.bfloat16} if case.config.get("use_precision_aware_optimizer") else {}),
        **case.config,
    )
    return model, get_megatron_optimizer(adam, [model])


def inners(optimizer: Any) -> list[Any]:
    """The inner optimizers of a chain that have parameters."""
    return [child.optimizer for child in optimizer.chained_optimizers if child.optimizer is not None]


def tokens_of(iteration: int, args: argparse.Namespace) -> torch.Tensor:
    """Tokens of one iteration on this rank, ``[batch, sequence + 1]``."""
    generator = torch.Generator().manual_seed(1000 * iteration + torch.distributed.get_rank())
    return torch.randint(0, args.vocab, (args.batch, args.sequence + 1), generator=generator).cuda()


@contextlib.contextmanager
def timed_steps(optimizer: Any, samples_ms: list[float]) -> Iterator[None]:
    """Notes how long the inner optimizers take from an idle GPU to an idle GPU, write-back
    included.
    """

    def timed(inner: Any) -> Any:
        step = inner.step

        def step_on_the_clock(*arguments: Any, **keywords: Any) -> Any:
            torch.cuda.synchronize()
            start = time.perf_counter()
            result = step(*arguments, **keywords)
            if isinstance(inner, FusedOffloadAdam):
                inner.synchronize()
            torch.cuda.synchronize()
            samples_ms.append((time.perf_counter() - start) * 1e3)
            return result

        return step_on_the_clock

    found = inners(optimizer)
    for inner in found:
        inner.step = timed(inner)
    try:
        yield
    finally:
        for inner in found:
            del inner.step


def checksum(tensors: list[torch.Tensor]) -> int:
    """A number that depends on every bit and its place, the same for equal tensors on any
    device.
    """
    total = 0
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        for start in range(0, flat.numel(), 2**26):
            block = flat[start : start + 2**26].cuda().contiguous()
            bits = block.view(torch.int16 if block.element_size() == 2 else torch.int32).long()
            places = torch.arange(bits.numel(), device="cuda").mul_(2).add_(1 + 2 * start)
            total = (total * 31 + int((bits * places).sum())) % 2**61
    return total


def state_checksum(optimizer: Any) -> int:
    """`checksum` of moments and true masters, parameter by parameter, in the order of the
    buffers.
    """
    total = 0
    for child in optimizer.chained_optimizers:
        for model_param in child.model_param_gbuf_map:
            values = child._get_main_param_and_optimizer_states(model_param)
            # A remainder of TransformerEngine's, to be joined with its parameter.
            if values["param"].dtype == torch.int16:
                values["param"] = _joined(child, model_param, values["param"])
            total = (total * 31 + checksum([values[key] for key in sorted(values)])) % 2**61
    return total


def _joined(child: Any, model_param: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    from fused_offload.kernels.formats import join_remainder

    place = child._get_model_param_range_map(model_param)["param"]
    return join_remainder(model_param.detach().view(-1)[place.start : place.end], remainder.to(model_param.device))


def train(name: str, case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """Runs one case."""
    release_memory()
    before = torch.cuda.memory_allocated()
    with contextlib.ExitStack() as stack:
        if case.ours:
            stack.enter_context(fused_offload.megatron.installed(case.offload, args.numerics))
        model, optimizer = build(case, args)
    positions = torch.arange(args.sequence, device="cuda").expand(args.batch, args.sequence).contiguous()
    mask = torch.triu(torch.ones(1, 1, args.sequence, args.sequence, device="cuda", dtype=torch.bool), diagonal=1)
    losses, norms, peaks, iteration_ms = [], [], [], []
    step_ms: list[float] = []
    iterations = min(case.iterations or args.iterations, args.iterations)
    with timed_steps(optimizer, step_ms) if args.sync_iterations else contextlib.nullcontext():
        torch.cuda.synchronize()
        for iteration in range(iterations):
            torch.cuda.reset_peak_memory_stats()
            if args.sync_iterations:
                torch.cuda.synchronize()
            start = time.perf_counter()
            model.zero_grad_buffer()
            optimizer.zero_grad()
            for microbatch in range(args.microbatches):
                last = microbatch == args.microbatches - 1
                tokens = tokens_of(iteration * args.microbatches + microbatch, args)
                with contextlib.nullcontext() if last else model.no_sync():
                    loss = model(tokens[:, :-1].contiguous(), positions, mask, labels=tokens[:, 1:].contiguous()).mean()
                    loss.backward()
            model.finish_grad_sync()
            _, norm, _ = optimizer.step()
            if args.sync_iterations:
                torch.cuda.synchronize()
            iteration_ms.append((time.perf_counter() - start) * 1e3)
            losses.append(loss.detach())
            norms.append(norm)
            peaks.append(torch.cuda.max_memory_allocated())
            del loss
        torch.cuda.synchronize()
    result: dict[str, Any] = {
        "case": name,
        "inner": type(inners(optimizer)[0]).__name__,
        "param_numel": sum(param.numel() for param in model.parameters()),
        "losses": [float(loss) for loss in losses],
        "grad_norms": [float(norm) for norm in norms],
        "peak_bytes": peaks,
        "iteration_ms": iteration_ms,
        "step_ms": step_ms,
        "median_step_ms": statistics.median(step_ms[2:] or step_ms or [0.0]),
        "median_iteration_ms": statistics.median(iteration_ms[4:] or iteration_ms),
        "params_checksum": checksum(list(model.parameters())),
    }
    if not name.startswith("hybrid"):
        result["state_checksum"] = state_checksum(optimizer)
    if case.ours:
        reports = [inner.memory_report() for inner in inners(optimizer)]
        result["host_bytes"] = sum(sum(report.host_bytes.values()) for report in reports)
        result["resident_bytes"] = sum(sum(report.resident_bytes.values()) for report in reports)
        result["ring_bytes"] = max(report.ring_bytes for report in reports)
        if name.startswith("offload") and args.sync_iterations:
            result |= against_copies(optimizer)
        close(optimizer)
    del model, optimizer
    release_memory()
    result["left_over_bytes"] = torch.cuda.memory_allocated() - before
    return result


def close(optimizer: Any) -> None:
    """Gives the host memory of all inner optimizers back."""
    for inner in inners(optimizer):
        inner.close()


def against_copies(optimizer: Any) -> dict[str, Any]:
    """Five times the step and the same plan without kernels, interleaved, all ranks at once."""
    step_ms: list[float] = []
    copies_ms: list[float] = []
    for _ in range(5):
        for samples, run in ((copies_ms, run_copies_only), (step_ms, _step_and_wait)):
            torch.cuda.synchronize()
            torch.distributed.barrier()
            start = time.perf_counter()
            for inner in inners(optimizer):
                run(inner)
            torch.cuda.synchronize()
            samples.append((time.perf_counter() - start) * 1e3)
    slowest = torch.tensor([statistics.median(step_ms), statistics.median(copies_ms)], device="cuda")
    torch.distributed.all_reduce(slowest, op=torch.distributed.ReduceOp.MAX)
    step, copies = slowest.tolist()
    return {"whole_step_ms": step, "copies_only_ms": copies, "ratio_to_copies": step / copies}


def _step_and_wait(inner: Any) -> None:
    inner.step()
    inner.synchronize()


def release_memory() -> None:
    """Gives back what the case before left."""
    gc.collect()
    torch.cuda.empty_cache()


def set_up() -> None:
    """Process groups, and everything deterministic."""
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("MASTER_ADDR", "127.0.0.1")):
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", "29511")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl")
    parallel_state.initialize_model_parallel()
    torch.use_deterministic_algorithms(True, warn_only=True)


def main() -> None:
    """Runs the cases and writes the results on the first rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True, metavar="FILE.json")
    parser.add_argument("--cases", nargs="+", choices=list(all_cases()), default=list(all_cases()))
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument(
        "--no-sync-iterations",
        dest="sync_iterations",
        action="store_false",
        help="let iterations overlap as in training: times whole iterations, not the step",
    )
    parser.add_argument("--numerics", choices=("ieee", "te"), default=None)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    set_up()
    results: dict[str, Any] = {"arguments": {k: str(v) for k, v in vars(args).items()}, "cases": {}, "failed": {}}
    for name in args.cases:
        try:
            result = train(name, all_cases()[name], args)
        except Exception as error:  # the other cases are worth running
            results["failed"][name] = f"{type(error).__name__}: {error}"
            result = None
        everyone: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(everyone, result)
        if torch.distributed.get_rank() == 0:
            results["cases"][name] = everyone
            results["machine"] = machine_facts()
            args.results.parent.mkdir(parents=True, exist_ok=True)
            args.results.write_text(json.dumps(results, indent=1) + "\n")
            summary = results["failed"].get(name) or (
                f"{result['median_step_ms']:.1f} ms a step, {result['median_iteration_ms']:.1f} an iteration"
            )
            print(f"{name}: {summary}", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
