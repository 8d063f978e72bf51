"""Trains a byte-level GPT sharded by FSDP2, with optimizer state in host memory.

The loop is like torchtitan's: float32 parameters, bfloat16 compute, float32 reduction, activation
checkpointing, gradient accumulation, clipping, warm-up, and asynchronous distributed checkpoints
that resume on any number of processes.

    torchrun --nproc-per-node 8 examples/train_fsdp.py --folder run --steps 200
    torchrun --nproc-per-node 4 examples/train_fsdp.py --folder run --steps 400

The second command goes on from the last checkpoint of the first. With ``--cpu-offload`` parameters
and gradients are in host memory, too, and FSDP brings each layer to the GPU; either kind of run
goes on from checkpoints of the other. Needs torchrun, and a GPU for each process; without GPUs it
trains a tiny model over gloo.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from fused_offload import FusedOffloadAdam

VOCABULARY = 256
MAX_TEXT_BYTES = 16 * 2**20
MAX_GRAD_NORM = 1.0
WARM_UP_STEPS = 10


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``[batch, length, width]`` to the same shape."""
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        result: Tensor = x + self.mlp(self.mlp_norm(x))
        return result


class GPT(nn.Module):
    """A decoder over bytes with tied embeddings, whose blocks are recomputed in backward."""

    def __init__(self, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, text: Tensor) -> Tensor:
        """Mean loss in nats a byte of ``[batch, length + 1]`` bytes."""
        x = self.tokens(text[:, :-1]) + self.positions.weight[: text.shape[1] - 1]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


class TrainState(Stateful):
    """What a checkpoint holds, read and written by ``torch.distributed.checkpoint``.

    Attributes:
        step: steps done.
    """

    def __init__(self, model: nn.Module, optimizer: FusedOffloadAdam, scheduler: Any) -> None:
        """Keeps what is saved."""
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        """This rank's shards; the optimizer's are views of its host memory."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "scheduler": self.scheduler.state_dict(), "step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over what was read into `state_dict`."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )
        self.scheduler.load_state_dict(state_dict["scheduler"])
        self.step = state_dict["step"]

    def digest(self) -> str:
        """SHA-256 of this rank's parameters and state."""
        digest = hashlib.sha256()
        for param in self.model.parameters():
            for value in (param, *self.optimizer.state[param].values()):
                local = value.detach()._local_tensor if hasattr(value, "_local_tensor") else value.detach()
                digest.update(local.contiguous().cpu().view(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


def read_text() -> Tensor:
    """The standard library's source code, ``[bytes]`` uint8."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(map(Path.read_bytes, paths))[:MAX_TEXT_BYTES]), dtype=torch.uint8)


def build(device: torch.device, context: int, total_steps: int, *, cpu_offload: bool) -> TrainState:
    """Model, optimizer and schedule at step 0."""
    torch.manual_seed(0)
    width, layers, heads = (1024, 12, 16) if device.type == "cuda" else (32, 2, 2)
    model = GPT(width, layers, heads, context).to(device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if cpu_offload else OffloadPolicy()
    for block in model.blocks:
        fully_shard(block, mp_policy=policy, offload_policy=offload)
    fully_shard(model, mp_policy=policy, offload_policy=offload)
    optimizer = FusedOffloadAdam(model.parameters(), lr=1e-3, weight_decay=0.1)
    optimizer.reserve_gpu_memory()
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARM_UP_STEPS, 1 - step / (total_steps + 1))
    )
    return TrainState(model, optimizer, scheduler)


def train_step(
    state: TrainState, text: Tensor, device: torch.device, context: int, microbatches: int
) -> tuple[Any, Any]:
    """One step on this rank's share of the data; returns loss and gradient norm on the device."""
    generator = torch.Generator().manual_seed(state.step * dist.get_world_size() + dist.get_rank())
    assert isinstance(state.model, FSDPModule)
    total = torch.zeros((), device=device)
    for index in range(microbatches):
        starts = torch.randint(len(text) - context - 1, (4,), generator=generator)
        batch = torch.stack([text[start : start + context + 1] for start in starts.tolist()]).to(device, torch.long)
        state.model.set_requires_gradient_sync(index == microbatches - 1)
        loss = state.model(batch) / microbatches
        loss.backward()
        total += loss.detach()
    norm: Any = state.optimizer.clip_grad_norm_(MAX_GRAD_NORM)
    state.optimizer.step()
    state.scheduler.step()
    state.optimizer.zero_grad()
    state.step += 1
    return total, norm.full_tensor()


def train(state: TrainState, args: argparse.Namespace, device: torch.device) -> None:
    """Trains to the end, saving while it goes on."""
    text, saving = read_text(), dist.new_group(backend="gloo")
    writing: Any = None
    while state.step < args.steps:
        loss, norm = train_step(state, text, device, args.context, args.microbatches)
        if state.step % args.report_every == 0:
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
            if dist.get_rank() == 0:
                print(f"step {state.step:5d}  loss {loss.item():.3f}  gradient norm {norm.item():.3f}", flush=True)
        if state.step % args.save_every == 0 or state.step == args.steps:
            if writing is not None:
                writing.result()
            # Copies the state before it returns, so that the steps to come do not tear what is
            # written.
            writing = dcp.async_save({"train": state}, checkpoint_id=folder_of(args, state.step), process_group=saving)
    if writing is not None:
        writing.result()


def folder_of(args: argparse.Namespace, step: int) -> Path:
    """Where the checkpoint of a step is."""
    folder: Path = args.folder / f"step-{step}"
    return folder


def last_checkpoint(args: argparse.Namespace) -> int | None:
    """Step of the last complete checkpoint; dcp writes ``.metadata`` last."""
    steps = [int(path.parent.name.removeprefix("step-")) for path in args.folder.glob("step-*/.metadata")]
    return max(steps, default=None)


def main() -> None:
    """Trains, from the last checkpoint if there is one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="checkpoints")
    parser.add_argument("--steps", type=int, default=200, help="last step")
    parser.add_argument("--save-every", type=int, default=50, help="steps between checkpoints; the end has one")
    parser.add_argument("--report-every", type=int, default=10, help="steps between lines of output")
    parser.add_argument("--microbatches", type=int, default=2, help="passes for each step")
    parser.add_argument("--context", type=int, default=128, help="bytes that a sequence has")
    parser.add_argument("--total-steps", type=int, default=1000, help="steps of the learning rate schedule")
    parser.add_argument("--cpu-offload", action="store_true", help="parameters and gradients in host memory, too")
    args = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        parser.error("start it by torchrun: torchrun --nproc-per-node 2 examples/train_fsdp.py --folder run")
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    state = build(device, args.context, args.total_steps, cpu_offload=args.cpu_offload)
    resumed = last_checkpoint(args)
    if resumed is not None:
        dcp.load({"train": state}, checkpoint_id=folder_of(args, resumed))
        if dist.get_rank() == 0:
            print(f"resumed after {resumed} steps from {folder_of(args, resumed)}", flush=True)
    train(state, args, device)
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, state.digest())
    if dist.get_rank() == 0:
        report = state.optimizer.memory_report()
        print(f"this rank's state: {sum(report.host_bytes.values()):,} bytes on the host, {report.ring_bytes:,} staged")
        print("digest", hashlib.sha256("".join(digests).encode()).hexdigest())
    state.optimizer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
