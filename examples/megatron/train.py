"""Trains a Megatron-Core GPT in bfloat16 whose optimizer state lives in host memory.

The text is the Python standard library's own source code, which every machine has, byte by byte.
Megatron's distributed optimizer shards the state over the processes; each keeps its shard in host
memory and streams it through its GPU in every step. All that a Megatron program needs for it is
`install`, and the flags in `optimizer_config`.

    torchrun --nproc-per-node 1 examples/megatron/train.py --save checkpoint
    torchrun --nproc-per-node 2 examples/megatron/train.py --load checkpoint --iterations 200
    torchrun --nproc-per-node 1 examples/megatron/train.py --te

Needs megatron-core, a GPU for each process, and TransformerEngine for `--te`.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fused_offload.megatron
from fused_offload import OffloadConfig

try:
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig
except ImportError as error:
    raise SystemExit(f"This example needs Megatron-Core ({error}): pip install megatron-core") from error

VOCABULARY = 256
MAX_TEXT_BYTES = 16 * 2**20


def build_model(args: argparse.Namespace) -> DistributedDataParallel:
    """A GPT, the same on every rank, whose gradients are reduced while backward still runs."""
    config = TransformerConfig(
        num_layers=args.layers,
        hidden_size=args.hidden,
        num_attention_heads=args.heads,
        bf16=True,
        params_dtype=torch.bfloat16,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        # Megatron's own layers have these only with Apex or TransformerEngine:
        persist_layer_norm=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )
    if args.te:
        layers = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec()
    else:
        layers = gpt_layer_specs.get_gpt_layer_local_spec()
    gpt = GPTModel(config, layers, vocab_size=VOCABULARY, max_sequence_length=args.context)
    sharding = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=True, grad_reduce_in_fp32=True
    )
    return DistributedDataParallel(config, sharding, gpt.cuda().bfloat16())


def optimizer_config(args: argparse.Namespace) -> OptimizerConfig:
    """AdamW with clipping and masters that belong to the optimizer."""
    # Without the two flags more, the optimizer is in the place of TransformerEngine's FusedAdam,
    # with the same bits.
    hybrid = {} if args.te else {"optimizer_cpu_offload": True, "optimizer_offload_fraction": args.fraction}
    return OptimizerConfig(
        optimizer="adam",
        lr=args.lr,
        weight_decay=0.1,
        adam_beta2=0.95,
        clip_grad=1.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=True,
        use_precision_aware_optimizer=True,
        **hybrid,
    )


def read_text() -> Tensor:
    """The standard library's source code as uint8."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    text = bytearray()
    for path in paths:
        if len(text) < MAX_TEXT_BYTES and "site-packages" not in path.parts:
            text += path.read_bytes()
    return torch.frombuffer(text[:MAX_TEXT_BYTES], dtype=torch.uint8)


def batch_of(text: Tensor, iteration: int, args: argparse.Namespace) -> Tensor:
    """This rank's sequences, ``[batch, context + 1]``, by iteration, so that runs can resume."""
    seed = iteration * torch.distributed.get_world_size() + torch.distributed.get_rank()
    starts = torch.randint(len(text) - args.context, (args.batch, 1), generator=torch.Generator().manual_seed(seed))
    return text[starts + torch.arange(args.context + 1)].long().cuda()


def train_step(model: DistributedDataParallel, optimizer: Any, sequences: Tensor) -> tuple[float, float]:
    """One iteration; the mean loss over ranks, in nats a byte, and the norm of the gradient."""
    context = sequences.shape[1] - 1
    positions = torch.arange(context, device=sequences.device).expand(len(sequences), -1).contiguous()
    future = torch.ones(1, 1, context, context, dtype=torch.bool, device=sequences.device).triu(1)
    model.zero_grad_buffer()
    optimizer.zero_grad()
    losses = model(sequences[:, :-1].contiguous(), positions, future, labels=sequences[:, 1:].contiguous())
    loss = losses.float().mean()
    loss.backward()
    finalize_model_grads([model])
    _, grad_norm, _ = optimizer.step()
    mean_loss = loss.detach()
    torch.distributed.all_reduce(mean_loss)
    return mean_loss.item() / torch.distributed.get_world_size(), float(grad_norm)


def checkpoint_of(model: DistributedDataParallel, optimizer: Any, *, loading: bool) -> dict[str, Any]:
    """What a checkpoint holds, in the format that any number of GPUs can load."""
    weights = model.module.sharded_state_dict()
    metadata = {"distrib_optim_sharding_type": "fully_reshardable"}
    state = optimizer.sharded_state_dict(weights, is_loading=loading, metadata=metadata)
    return {"model": weights, "optimizer": state}


def save(model: DistributedDataParallel, optimizer: Any, iteration: int, directory: Path) -> None:
    """Writes a distributed checkpoint."""
    directory.mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    content = {"iteration": iteration, **checkpoint_of(model, optimizer, loading=False)}
    dist_checkpointing.save(content, str(directory))


def load(model: DistributedDataParallel, optimizer: Any, directory: Path) -> int:
    """Reads a distributed checkpoint; the iteration to go on with."""
    content = dist_checkpointing.load(checkpoint_of(model, optimizer, loading=True), str(directory))
    model.module.load_state_dict(content["model"])
    optimizer.load_state_dict(content["optimizer"])
    return int(content["iteration"])


def say(message: str) -> None:
    """Prints on the first rank."""
    if torch.distributed.get_rank() == 0:
        print(message, flush=True)


def report_memory(optimizer: Any) -> None:
    """Where the first rank's share of the optimizer's state is."""
    for child in optimizer.chained_optimizers:
        inner = child.optimizer
        report = inner.memory_report()
        host, resident = sum(report.host_bytes.values()), sum(report.resident_bytes.values())
        say(f"{type(inner).__name__} of {report.param_numel:,} parameters on this rank:")
        say(f"  {host:,} bytes on the host, {resident:,} on the GPU, {report.ring_bytes:,} for chunks in flight")
    say(f"  peak of all GPU memory: {torch.cuda.max_memory_allocated():,} bytes")


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=100, help="where training ends (default: 100)")
    parser.add_argument("--save", type=Path, metavar="DIR", help="write a checkpoint here at the end")
    parser.add_argument("--load", type=Path, metavar="DIR", help="go on from this checkpoint")
    parser.add_argument("--te", action="store_true", help="layers of TransformerEngine, and its FusedAdam's place")
    parser.add_argument("--fraction", type=float, default=1.0, help="share of the state on the host (default: 1)")
    for name, default in (("layers", 12), ("hidden", 1024), ("heads", 16), ("context", 512), ("batch", 8)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"(default: {default})")
    parser.add_argument("--lr", type=float, default=3e-4, help="learning rate (default: 3e-4)")
    return parser.parse_args()


def main() -> None:
    """Trains, and saves and resumes where asked to."""
    args = parse_arguments()
    if torch.cuda.device_count() == 0:
        raise SystemExit("This example needs a GPU: Megatron-Core puts models nowhere else.")
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit("Start this example by torchrun: torchrun --nproc-per-node 1 examples/megatron/train.py")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group()
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)

    fused_offload.megatron.install(OffloadConfig(fraction=args.fraction))
    model = build_model(args)
    optimizer = get_megatron_optimizer(optimizer_config(args), [model])
    start = load(model, optimizer, args.load) if args.load else 0

    text = read_text()
    for iteration in range(start, args.iterations):
        loss, grad_norm = train_step(model, optimizer, batch_of(text, iteration, args))
        say(f"iteration {iteration:4d}  loss {loss:.4f}  grad norm {grad_norm:.3f}")
    report_memory(optimizer)
    if args.save:
        save(model, optimizer, args.iterations, args.save)
        say(f"saved at iteration {args.iterations}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
