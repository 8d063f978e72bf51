"""Trains a byte-level GPT with FusedOffloadAdam, and checks that resuming keeps all bits.

The text is the Python standard library's own source code, which every machine has. Three runs are
compared:

1. one from start to end;
2. the same again, saving a checkpoint halfway: two runs must agree bit for bit;
3. a fresh process that resumes from that checkpoint: it must end in the same bits as well.

Parameters are bfloat16; float32 master weights and both moments live in CPU memory. Needs nothing
but this project, and no GPU: without one the model is small and the demo takes a few minutes; on a
GPU it has 354 million parameters. On a CPU it computes with as many threads as cores are idle.

    python examples/train_gpt.py
    python examples/train_gpt.py --size tiny --steps 4 --device cpu
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from link import link_table
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fused_offload import FusedOffloadAdam

VOCABULARY = 256
MAX_TEXT_BYTES = 16 * 2**20
HELD_OUT_FRACTION = 0.05
HELD_OUT_BATCHES = 16
MAX_GRAD_NORM = 1.0
SECONDS_BETWEEN_LINES = 8.0

console = Console()


@dataclass(frozen=True, kw_only=True)
class Size:
    """Shape of the model and of its training.

    Attributes:
        layers: transformer blocks.
        width: features of the residual stream.
        heads: attention heads.
        context: bytes in a training sequence.
        batch: sequences in a step.
        steps: default length of the run.
        lr: highest learning rate.
    """

    layers: int
    width: int
    heads: int
    context: int
    batch: int
    steps: int
    lr: float


SIZES = {
    "tiny": Size(layers=2, width=64, heads=2, context=32, batch=4, steps=20, lr=3e-3),
    "small": Size(layers=4, width=160, heads=5, context=64, batch=8, steps=120, lr=3e-3),
    "gpu": Size(layers=28, width=1024, heads=16, context=1024, batch=8, steps=100, lr=3e-4),
}


class Linear(nn.Linear):
    """A linear layer without bias that computes in the dtype of its input."""

    def __init__(self, in_features: int, out_features: int, *, init_std: float = 0.02) -> None:
        super().__init__(in_features, out_features, bias=False)
        nn.init.normal_(self.weight, std=init_std)

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``[..., in_features]`` to ``[..., out_features]``."""
        return F.linear(x, self.weight.to(x.dtype))


class Norm(nn.Module):
    """Layer normalisation with a gain and no bias, computed in the dtype of its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalises the last dimension."""
        return F.layer_norm(x, self.gain.shape, self.gain.to(x.dtype))


class Block(nn.Module):
    """Pre-norm transformer block: causal self-attention, then a two-layer perceptron."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        # GPT-2's rule: the residual stream keeps its variance however many branches add to it.
        branch_std = 0.02 / math.sqrt(2 * size.layers)
        self.attention_norm = Norm(size.width)
        self.qkv = Linear(size.width, 3 * size.width)
        self.attention_out = Linear(size.width, size.width, init_std=branch_std)
        self.mlp_norm = Norm(size.width)
        self.mlp_in = Linear(size.width, 4 * size.width)
        self.mlp_out = Linear(4 * size.width, size.width, init_std=branch_std)

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``[batch, context, width]`` to the same shape."""
        batch, context, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, context, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).reshape(x.shape))
        x = x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x)), approximate="tanh"))
        return x


class GPT(nn.Module):
    """Byte-level GPT with bfloat16 parameters.

    On a GPU it computes in bfloat16 too. On a CPU it computes in float32, since most CPUs have no
    bfloat16 arithmetic and emulate it several times slower; parameters and gradients are bfloat16
    all the same.
    """

    def __init__(self, size: Size, device: torch.device) -> None:
        super().__init__()
        with device:
            self.token_embedding = nn.Embedding(VOCABULARY, size.width)
            self.position_embedding = nn.Embedding(size.context, size.width)
            self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
            self.norm = Norm(size.width)
            self.head = Linear(size.width, VOCABULARY)
        for embedding in (self.token_embedding, self.position_embedding):
            # Much smaller embeddings, divided by their size in the first normalisation, get huge
            # gradients.
            nn.init.normal_(embedding.weight, std=0.5)
        self.compute_dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.to(torch.bfloat16)

    def loss(self, tokens: Tensor) -> Tensor:
        """Mean negative log likelihood in nats of ``[batch, context + 1]`` bytes but the first."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        positions = torch.arange(inputs.shape[1], device=tokens.device)
        x = (self.token_embedding(inputs) + self.position_embedding(positions)).to(self.compute_dtype)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.reshape(-1, VOCABULARY), targets.reshape(-1))


class Corpus(NamedTuple):
    """Text as bytes, ``[numel]`` uint8 on CPU each."""

    train: Tensor
    held_out: Tensor


def load_corpus() -> Corpus:
    """Reads the standard library's sources in sorted order; the last part is held out."""
    text = bytearray()
    for folder, subfolders, files in os.walk(sysconfig.get_path("stdlib")):
        # os.walk descends into what is left here, in this order; site-packages may hold gigabytes.
        subfolders[:] = sorted(set(subfolders) - {"site-packages", "dist-packages", "test", "tests"})
        for name in sorted(files):
            if name.endswith(".py"):
                text += Path(folder, name).read_bytes()
    tokens = torch.frombuffer(text[:MAX_TEXT_BYTES], dtype=torch.uint8)
    train_numel = int(len(tokens) * (1 - HELD_OUT_FRACTION))
    return Corpus(tokens[:train_numel], tokens[train_numel:])


def windows(text: Tensor, starts: Tensor, size: Size, device: torch.device) -> Tensor:
    """Bytes from each start, as ``[len(starts), context + 1]`` int64 on ``device``."""
    offsets = torch.arange(size.context + 1)
    return text[starts[:, None] + offsets].long().to(device)


def learning_rate_factor(step: int, steps: int) -> float:
    """Linear warm-up over the first tenth, then a cosine down to a tenth."""
    warm_up = max(1, steps // 10)
    if step < warm_up:
        return (step + 1) / warm_up
    progress = (step - warm_up) / max(1, steps - warm_up)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, progress)))


class Digests(NamedTuple):
    """SHA-256 over all bytes of a run's final parameters and optimizer state."""

    parameters: str
    optimizer: str


def update_digest(digest: Any, tensor: Tensor) -> None:
    """Adds a tensor's dtype, shape and bytes to a hashlib object."""
    digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy())


class Training:
    """One training run: everything that a checkpoint has to hold.

    Args:
        size: shape of the model and its training.
        steps: length of the whole run; the learning rate schedule depends on it.
        seed: seed of the initial parameters and of the order of the data.
        device: where the model lives.
        corpus: the text.
    """

    def __init__(self, size: Size, *, steps: int, seed: int, device: torch.device, corpus: Corpus) -> None:
        self.size, self.steps, self.device, self.corpus = size, steps, device, corpus
        torch.manual_seed(seed)
        self.model = GPT(size, device)
        self.data_order = torch.Generator().manual_seed(seed)
        parameters = list(self.model.parameters())
        groups = [
            {"params": [param for param in parameters if param.ndim >= 2], "weight_decay": 0.1},
            {"params": [param for param in parameters if param.ndim < 2], "weight_decay": 0.0},
        ]
        self.optimizer = FusedOffloadAdam(groups, lr=size.lr, betas=(0.9, 0.95), master_weights=True)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: learning_rate_factor(step, steps)
        )
        self.step = 0

    def train_step(self) -> tuple[Tensor, Tensor]:
        """One step; returns the loss and the gradient norm before clipping."""
        starts = torch.randint(
            len(self.corpus.train) - self.size.context, (self.size.batch,), generator=self.data_order
        )
        loss = self.model.loss(windows(self.corpus.train, starts, self.size, self.device))
        loss.backward()
        grad_norm = nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.step += 1
        return loss.detach(), grad_norm

    def train(self, until: int, label: str) -> None:
        """Trains up to step ``until`` and reports the loss on the way."""
        report_every = max(1, self.steps // 8)
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[status]}"))
        first, began = self.step, time.perf_counter()
        printed_step, printed = first, began
        with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
            task = progress.add_task(label, total=self.steps, completed=self.step, status="")
            while self.step < until:
                loss, grad_norm = self.train_step()
                progress.advance(task)
                now = time.perf_counter()
                is_due = self.step - printed_step >= report_every or now - printed > SECONDS_BETWEEN_LINES
                if is_due or self.step in (1, until):
                    printed_step, printed = self.step, now
                    left_s = (now - began) / (self.step - first) * (self.steps - self.step)
                    status = f"step {self.step:4d}  loss {loss:.3f}  grad norm {grad_norm:.2f}"
                    progress.update(task, status=status)
                    lr = self.scheduler.get_last_lr()[0]
                    line = f"  {status}  lr {lr:.2e}  {left_s:3.0f} s left of {label}"
                    progress.console.print(line, soft_wrap=True)

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Mean loss, in nats a byte, over evenly spaced sequences of the held-out text."""
        text = self.corpus.held_out
        starts = torch.linspace(0, len(text) - self.size.context - 1, HELD_OUT_BATCHES * self.size.batch).long()
        batches = starts.split(self.size.batch)
        losses = [self.model.loss(windows(text, batch, self.size, self.device)) for batch in batches]
        return torch.stack(losses).mean().item()

    def save(self, path: Path) -> None:
        """Writes a checkpoint."""
        checkpoint = {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "data_order": self.data_order.get_state(),
        }
        torch.save(checkpoint, path)

    def load(self, path: Path) -> None:
        """Continues from a checkpoint."""
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        self.step = checkpoint["step"]
        self.model.load_state_dict(checkpoint["model"])
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        self.scheduler.load_state_dict(checkpoint["scheduler"])
        self.data_order.set_state(checkpoint["data_order"])

    def digests(self) -> Digests:
        """Digests of the parameters and of the optimizer's state, step counts included."""
        parameters, optimizer = hashlib.sha256(), hashlib.sha256()
        for param in self.model.parameters():
            update_digest(parameters, param)
        state_dict = self.optimizer.state_dict()
        for index, state in sorted(state_dict["state"].items()):
            for key, tensor in sorted(state.items()):
                optimizer.update(f"{index}{key}".encode())
                update_digest(optimizer, tensor)
        optimizer.update(str([group["step"] for group in state_dict["param_groups"]]).encode())
        return Digests(parameters.hexdigest(), optimizer.hexdigest())


def memory_table(optimizer: FusedOffloadAdam) -> Table:
    """Where the optimizer's state lives, in bytes."""
    report = optimizer.memory_report()
    table = Table(title=f"Optimizer state of {report.param_numel:,} parameters, in bytes")
    table.add_column("")
    host_title = "host, page-locked" if report.pinned else "host"
    for title in (host_title, "parameters' device", "GPU, staging"):
        table.add_column(title, justify="right")
    for key in dict.fromkeys([*report.host_bytes, *report.resident_bytes]):
        table.add_row(key, f"{report.host_bytes.get(key, 0):,}", f"{report.resident_bytes.get(key, 0):,}", "")
    table.add_row("chunks in flight", "", "", f"{report.ring_bytes:,}", end_section=True)
    host, resident = sum(report.host_bytes.values()), sum(report.resident_bytes.values())
    table.add_row("total", f"{host:,}", f"{resident:,}", f"{report.ring_bytes:,}")
    per_param = [f"{count / report.param_numel:.2f}" for count in (host, resident, report.ring_bytes)]
    table.add_row("per parameter", *per_param)
    return table


def make_deterministic(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Restricts torch to operations with reproducible bits; attention only within the context."""
    torch.use_deterministic_algorithms(True)
    if device.type == "cuda":
        # cuBLAS reads it when it is initialised; without it matrix products may differ from run to
        # run.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # Its backward pass is deterministic when asked for as above; cuDNN's, which torch may
        # prefer, is not.
        backend = SDPBackend.FLASH_ATTENTION
    else:
        backend = SDPBackend.MATH
    return sdpa_kernel(backend)


def idle_cores() -> int:
    """Cores that no other program uses now, at least one."""
    allowed = len(os.sched_getaffinity(0))

    def ticks() -> tuple[int, int]:
        values = [int(value) for value in Path("/proc/stat").read_text().partition("\n")[0].split()[1:]]
        return values[3] + values[4], sum(values[:8])  # idle and waiting for a disk; all

    try:
        idle, total = ticks()
        time.sleep(0.5)
        idle_now, total_now = ticks()
    except (OSError, ValueError, IndexError):  # no Linux
        return allowed
    share = (idle_now - idle) / max(1, total_now - total)
    return max(1, min(allowed, round(share * (os.cpu_count() or allowed))))


def describe_machine(device: torch.device) -> str:
    """One line about what the run computes on."""
    if device.type != "cuda":
        return f"CPU, {torch.get_num_threads()} thread(s), torch {torch.__version__}"
    facts = torch.cuda.get_device_properties(device)
    return (
        f"{facts.name}, compute capability {facts.major}.{facts.minor}, {facts.total_memory / 1e9:.1f} GB, "
        f"{facts.multi_processor_count} multiprocessors, torch {torch.__version__}, CUDA {torch.version.cuda}"
    )


def train_timed(training: Training, until: int, label: str) -> None:
    """Trains up to step ``until``; reports the time of a step and the peak of GPU memory."""
    on_gpu = training.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(training.device)
    first_step, start = training.step, time.perf_counter()
    training.train(until, label)
    training.optimizer.synchronize()
    peak = ""
    if on_gpu:
        torch.cuda.synchronize(training.device)
        peak = f", peak {torch.cuda.max_memory_allocated(training.device) / 1e9:.2f} GB of GPU memory"
    step_count = training.step - first_step
    step_ms = (time.perf_counter() - start) * 1e3 / step_count
    bytes_per_s = training.size.batch * training.size.context * 1e3 / step_ms
    console.print(f"  {step_count} steps, {step_ms:.0f} ms a step, {bytes_per_s:,.0f} bytes of text a second{peak}")


def new_training(options: argparse.Namespace) -> Training:
    """A run at step 0, as the command line describes it."""
    return Training(
        SIZES[options.size],
        steps=options.steps,
        seed=options.seed,
        device=torch.device(options.device),
        corpus=load_corpus(),
    )


def run_uninterrupted(options: argparse.Namespace, label: str, checkpoint: Path | None = None) -> Digests:
    """Trains from start to end, writing a checkpoint halfway if a path is given for it."""
    training = new_training(options)
    if checkpoint is not None:
        train_timed(training, options.steps // 2, label)
        training.save(checkpoint)
        console.print(f"  saved {checkpoint.stat().st_size / 1e6:.1f} MB at step {training.step}")
    train_timed(training, options.steps, label)
    digests = training.digests()
    if checkpoint is None:
        console.print(f"  held-out loss {training.held_out_loss():.3f} nats a byte")
        console.print(memory_table(training.optimizer))
        if training.device.type == "cuda":
            console.print(link_table(training.optimizer, training.device))
    training.optimizer.close()
    return digests


def resume(options: argparse.Namespace) -> None:
    """Continues from a checkpoint to the end and writes the digests beside it."""
    training = new_training(options)
    training.load(options.resume)
    started_path(options.resume).touch()
    train_timed(training, options.steps, f"resumed at {training.step}")
    console.print(f"  held-out loss {training.held_out_loss():.3f} nats a byte")
    result_path(options.resume).write_text(json.dumps(training.digests()._asdict()))
    training.optimizer.close()


def result_path(checkpoint: Path) -> Path:
    """Where a process that resumes from ``checkpoint`` leaves its digests."""
    return checkpoint.with_suffix(".digests.json")


def started_path(checkpoint: Path) -> Path:
    """File that a process resuming from ``checkpoint`` makes when it begins to train."""
    return checkpoint.with_suffix(".started")


def run_resumed_process(options: argparse.Namespace, checkpoint: Path) -> Digests:
    """Resumes in a fresh process, which shares only the checkpoint with this one."""
    command = [sys.executable, __file__, "--resume", str(checkpoint)]
    for name in ("size", "steps", "device", "seed", "threads"):  # threads set the order of sums
        command += [f"--{name}", str(getattr(options, name))]
    started_path(checkpoint).unlink(missing_ok=True)
    began = time.perf_counter()
    with subprocess.Popen(command) as process:
        while process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(SECONDS_BETWEEN_LINES)
            if process.poll() is None and not started_path(checkpoint).exists():
                console.print(f"  the process starts, {time.perf_counter() - began:.0f} s so far")
    if process.returncode != 0:
        raise SystemExit(f"The resumed process ended with exit code {process.returncode}")
    return Digests(**json.loads(result_path(checkpoint).read_text()))


def report_agreement(runs: dict[str, Digests]) -> bool:
    """Prints the digests of all runs; returns whether they are the same."""
    expected = next(iter(runs.values()))
    table = Table(title="SHA-256 of what each run ended in")
    for title in ("run", "parameters", "optimizer state", ""):
        table.add_column(title)
    for name, digests in runs.items():
        verdict = "[green]same bits" if digests == expected else "[bold red]DIFFERENT"
        table.add_row(name, digests.parameters[:16], digests.optimizer[:16], verdict)
    console.print(table)
    agree = all(digests == expected for digests in runs.values())
    if agree:
        console.print(
            "Shown: with its optimizer state in host memory, a run that stops and resumes in a fresh process ends in "
            "exactly the parameters and the state of one that never stopped.",
            soft_wrap=True,
        )
    else:
        console.print("[bold red]Runs that should agree ended in different bits: please report it.", soft_wrap=True)
    return agree


def run_demo(options: argparse.Namespace, directory: Path) -> bool:
    """Runs the three trainings; returns whether they ended in the same bits."""
    checkpoint = directory / "halfway.pt"
    titles = ("uninterrupted", "again, saving halfway", "resumed, fresh process")
    runs = {}
    console.print(f"[bold]1. {titles[0]}")
    runs[titles[0]] = run_uninterrupted(options, "run 1")
    console.print(f"[bold]2. {titles[1]}")
    runs[titles[1]] = run_uninterrupted(options, "run 2", checkpoint)
    console.print(f"[bold]3. {titles[2]}")
    runs[titles[2]] = run_resumed_process(options, checkpoint)
    return report_agreement(runs)


def parse_arguments() -> argparse.Namespace:
    """Reads the command line and fills in what depends on the machine."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--size", choices=SIZES, help="model size (default: gpu on a GPU, else small)")
    parser.add_argument("--steps", type=int, help="length of the run (default: depends on the size)")
    parser.add_argument("--device", help="torch device (default: cuda if there is one, else cpu)")
    parser.add_argument("--seed", type=int, default=0, help="seed of parameters and data order (default: 0)")
    parser.add_argument("--threads", type=int, help="of the CPU (default: OMP_NUM_THREADS, or as many as are idle)")
    parser.add_argument("--checkpoint-dir", type=Path, help="keep the checkpoint here (default: a temporary folder)")
    parser.add_argument("--resume", type=Path, metavar="CHECKPOINT", help="only continue from this checkpoint")
    options = parser.parse_args()
    if options.device is None:
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.size is None:
        options.size = "gpu" if torch.device(options.device).type == "cuda" else "small"
    if options.steps is None:
        options.steps = SIZES[options.size].steps
    if torch.device(options.device).type == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: there is no CUDA GPU; leave --device out to train on the CPU")
    if options.threads is None:
        options.threads = torch.get_num_threads() if "OMP_NUM_THREADS" in os.environ else idle_cores()
    if options.steps < 2:
        parser.error("--steps must be at least 2: the checkpoint is saved halfway")
    return options


def main() -> int:
    """Runs the demo; the exit code is 1 if any two runs ended in different bits."""
    options = parse_arguments()
    device = torch.device(options.device)
    torch.set_num_threads(options.threads)
    with make_deterministic(device):
        if options.resume is not None:
            resume(options)
            return 0
        console.print(f"{describe_machine(device)}; size {options.size}")
        console.print(
            f"Three trainings: {options.steps} steps, the same again with a checkpoint halfway, and the second half "
            "once more from the checkpoint.",
            soft_wrap=True,
        )
        if options.checkpoint_dir is not None:
            options.checkpoint_dir.mkdir(parents=True, exist_ok=True)
            return 0 if run_demo(options, options.checkpoint_dir) else 1
        with tempfile.TemporaryDirectory() as directory:
            return 0 if run_demo(options, Path(directory)) else 1


if __name__ == "__main__":
    sys.exit(main())
