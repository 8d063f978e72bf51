"""Cost of narrow moments in held-out loss: one GPT, one text, one stored format after another.

    python bench/quality.py --results FILE.json           # 24 runs: formats, seeds, beta2
    python bench/quality.py --results FILE.json --forms bf16-stochastic --seeds 0 --beta2 0.999
    python bench/quality.py --tiny --device cpu           # seconds, says nothing

The text is the source code of whatever Python packages the machine has, split into words; a word
that is not among the most frequent ones is its bytes. Rare words make embedding rows that most
steps give no gradient. State stays on the GPU (`fraction=0`), which gives the bits of any other
place. Each run is added to the file when it ends; a run that the file has already is not repeated,
so a call that was cut short goes on where it ended.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
import sysconfig
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpt import Gpt
from machine import check_device, check_writable, machine_facts, make_current
from quality_table import quality_lines
from torch import nn

from fused_offload import FusedOffloadAdam, OffloadConfig

NARROW = {"fp32": torch.float32, "bf16": torch.bfloat16, "uint8": torch.uint8}
FORMATS: dict[str, dict[str, Any]] = {
    **{name: {"exp_avg_dtype": dtype, "exp_avg_sq_dtype": dtype} for name, dtype in NARROW.items()},
    "bf16-stochastic": {
        "exp_avg_dtype": torch.bfloat16,
        "exp_avg_sq_dtype": torch.bfloat16,
        "stochastic_rounding": True,
    },
    "uint8-fp32": {"exp_avg_dtype": torch.uint8},
    "fp32-uint8": {"exp_avg_sq_dtype": torch.uint8},
}
_BYTES = 256  # tokens of single bytes
_WORD = re.compile(rb"\w+|[^\w\s]+|\s+")


@dataclass(frozen=True, kw_only=True)
class Size:
    """Model, text and length of a run.

    Attributes:
        layers: transformer blocks.
        width: features of the residual stream.
        vocab: tokens, those of bytes among them.
        length: tokens of a sequence.
        batch: sequences of a step.
        steps: steps of a run.
        held_out_tokens: tokens of the measurement.
        text_bytes: text that is read, at most; the default is about what 800 steps see once.
    """

    layers: int = 12
    width: int = 768
    vocab: int = 16_384
    length: int = 1024
    batch: int = 16
    steps: int = 800
    held_out_tokens: int = 2**20
    text_bytes: int = 64 * 2**20


TINY = Size(layers=2, width=128, vocab=512, length=32, batch=4, steps=8, held_out_tokens=1024, text_bytes=2**20)


class Text(NamedTuple):
    """Tokens, ``[numel]`` int32 on CPU each."""

    train: torch.Tensor
    held_out: torch.Tensor

    @property
    def digest(self) -> str:
        """Hash of the held-out tokens; runs on different texts do not compare."""
        return hashlib.sha256(self.held_out.cpu().numpy().tobytes()).hexdigest()[:16]


def read_text(size: Size) -> Text:
    """Tokens of all packages' sources; one file in 16, by a hash of its content, is held out."""
    folders = [sysconfig.get_path("stdlib"), Path(torch.__file__).parents[1]]
    files: dict[bytes, bytes] = {}  # by hash: packages carry copies of each other
    total = 0
    for path in sorted({path for folder in folders for path in Path(folder).rglob("*.py") if path.is_file()}):
        content = path.read_bytes()
        if total + len(content) > size.text_bytes:
            break
        total += len(content)
        files.setdefault(hashlib.sha256(content).digest(), content)
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    for digest in sorted(files):
        parts[digest[0] < 16].append(files[digest])
    counts: Counter[bytes] = Counter()
    for content in parts[False]:
        counts.update(_WORD.findall(content))
    frequent = [word for word, _ in counts.most_common() if len(word) > 1][: size.vocab - _BYTES]
    tokens = {word: [_BYTES + index] for index, word in enumerate(frequent)}

    def encode(contents: list[bytes]) -> torch.Tensor:
        found: list[int] = []
        for content in contents:
            for word in _WORD.findall(content):
                found += tokens.get(word) or word
        return torch.tensor(found, dtype=torch.int32)

    return Text(encode(parts[False]), encode(parts[True]))


class Model(Gpt):
    """The GPT, with its loss in float32: bfloat16 does not resolve what is looked for."""

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """As of `Gpt`, in float32."""
        return super().logits(tokens).float()


def windows(tokens: torch.Tensor, starts: torch.Tensor, size: Size, device: torch.device) -> torch.Tensor:
    """``[len(starts), length + 1]`` int64 tokens from each start."""
    return tokens[starts[:, None] + torch.arange(size.length + 1, device=starts.device)].to(device, torch.int64)


def build_model(size: Size, seed: int, device: torch.device) -> Model:
    """A GPT in bfloat16, initialised as GPT-2."""
    torch.manual_seed(seed)
    shape = argparse.Namespace(vocab=size.vocab, width=size.width, length=size.length, layers=size.layers)
    model = Model(shape)
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
    for block in model.blocks:
        for branch in (block.out, block.down):
            nn.init.normal_(branch.weight, std=0.02 / math.sqrt(2 * size.layers))
    return model.to(device, torch.bfloat16)


@torch.no_grad()
def held_out_loss(model: Model, text: Text, size: Size) -> float:
    """Mean loss over the first tokens of the text that was held out, in nats a token."""
    device = text.held_out.device
    count = min(size.held_out_tokens, len(text.held_out) - 1) // size.length
    batches = (torch.arange(count, device=device) * size.length).split(2 * size.batch)
    losses = [model(windows(text.held_out, part, size, device)) * len(part) for part in batches]
    return float(torch.stack(losses).double().sum()) / count


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run.

    Attributes:
        format: key of `FORMATS`.
        seed: seed of weights and of the order of the data.
        beta2: decay of the second moment.
        eps: added to the denominator.
        lr: largest learning rate.
        size: model, text and length.
        text: `Text.digest`.
        held_out: loss, in nats a token.
        losses: mean training loss of each tenth of the run.
        state_bytes: of a parameter.
        step_ms: a whole step, training included; in the first run compiling, too.
    """

    form: str
    seed: int
    beta2: float
    eps: float
    lr: float
    size: dict[str, int]
    text: str
    held_out: float
    losses: list[float]
    state_bytes: float
    step_ms: float


class Case(NamedTuple):
    """Everything in which runs differ, with the attributes of `Run`."""

    form: str
    seed: int
    beta2: float

    def is_that_of(self, run: dict[str, Any], size: Size, options: argparse.Namespace) -> bool:
        """True if a run of the results file is this one."""
        same = all(run[key] == value for key, value in self._asdict().items())
        return same and run["size"] == asdict(size) and run["eps"] == options.eps and run.get("lr") == options.lr


class Training:
    """The model and the text on their device; one run after another.

    The model is compiled once. Every run writes initial weights into the same parameters.
    """

    def __init__(self, text: Text, size: Size, options: argparse.Namespace) -> None:
        self.device = torch.device(options.device)
        self.size, self.options = size, options
        self.text = Text(*(tokens.to(self.device) for tokens in text))
        self.model = build_model(size, 0, self.device)
        # Initial parameters by seed, which take seconds to make.
        self._initial: dict[int, dict[str, torch.Tensor]] = {}
        self._loss: Callable[[torch.Tensor], torch.Tensor] = self.model
        if options.compile:
            self._loss = torch.compile(self.model)

    def _reset(self, seed: int) -> None:
        if seed not in self._initial:
            self._initial = {seed: build_model(self.size, seed, self.device).state_dict()}
        self.model.load_state_dict(self._initial[seed])

    def run(self, case: Case) -> Run:
        """Trains with one stored format and measures the model."""
        size, options = self.size, self.options
        self._reset(case.seed)
        params = list(self.model.parameters())
        groups: list[dict[str, Any]] = [
            {"params": [param for param in params if param.ndim >= 2], "weight_decay": 0.1},
            {"params": [param for param in params if param.ndim < 2], "weight_decay": 0.0},
        ]
        optimizer = FusedOffloadAdam(
            groups,
            lr=options.lr,
            betas=(0.9, case.beta2),
            eps=options.eps,
            master_weights=True,
            store_param_remainders=True,
            offload=OffloadConfig(fraction=0.0),
            **FORMATS[case.form],
        )
        order = torch.Generator().manual_seed(case.seed)
        last_start = len(self.text.train) - size.length
        starts = torch.randint(last_start, (size.steps, size.batch), generator=order).to(self.device)
        losses = torch.zeros(size.steps, device=self.device)
        began = time.perf_counter()
        for step in range(size.steps):
            warm = min(1.0, (step + 1) / max(1, size.steps // 10))
            for group in optimizer.param_groups:
                group["lr"] = options.lr * warm * (0.1 + 0.45 * (1 + math.cos(math.pi * step / size.steps)))
            loss = self._loss(windows(self.text.train, starts[step], size, self.device))
            loss.backward()
            nn.utils.clip_grad_norm_(params, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses[step] = loss.detach()
        tenths = [float(part.mean()) for part in losses.tensor_split(min(10, size.steps))]
        step_ms = (time.perf_counter() - began) * 1e3 / size.steps
        report = optimizer.memory_report()
        optimizer.close()
        run = Run(
            **case._asdict(),
            eps=options.eps,
            lr=options.lr,
            size=asdict(size),
            text=self.text.digest,
            held_out=held_out_loss(self.model, self.text, size),
            losses=tenths,
            state_bytes=sum(report.resident_bytes.values()) / report.param_numel,
            step_ms=step_ms,
        )
        assert math.isfinite(run.held_out), f"{case} ended in {run.held_out}"
        return run


def main() -> None:
    """Trains what was asked for, writes and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, metavar="FILE.json")
    parser.add_argument("--forms", nargs="+", choices=FORMATS, default=["fp32", "bf16", "bf16-stochastic", "uint8"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--beta2", nargs="+", type=float, default=[0.95, 0.999])
    parser.add_argument("--eps", type=float, default=1e-8)
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--steps", type=int, help=f"default {Size.steps}")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model that trains in seconds")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="without torch.compile")
    options = parser.parse_args()
    check_device(parser, options.device)
    if options.results is not None:
        check_writable(parser, options.results)
    make_current(torch.device(options.device))
    options.compile = options.compile and torch.device(options.device).type == "cuda"
    size = TINY if options.tiny else Size()
    if options.steps is not None:
        size = Size(**{**asdict(size), "steps": options.steps})
    record: dict[str, Any] = {"runs": []}
    if options.results is not None and options.results.exists():
        record = json.loads(options.results.read_text())
    asked = [Case(form, seed, beta2) for seed in options.seeds for beta2 in options.beta2 for form in options.forms]
    cases = [case for case in asked if not any(case.is_that_of(run, size, options) for run in record["runs"])]
    if cases:
        began = time.perf_counter()
        text = read_text(size)
        took = time.perf_counter() - began
        print(f"{len(text.train):,} tokens to train on, {len(text.held_out):,} held out, {took:.0f} s", flush=True)
        if any(run["text"] != text.digest for run in record["runs"]):
            parser.error(f"{options.results} has runs on another text; write to another file")
        training = Training(text, size, options)
    for case in cases:
        run = training.run(case)
        print(f"{case}: {run.held_out:.4f}, {run.step_ms:.1f} ms a step", flush=True)
        record["runs"].append(asdict(run))
        if options.results is not None:
            record["machine"] = machine_facts()
            options.results.write_text(json.dumps(record, indent=1) + "\n")
    print("", *quality_lines(record["runs"]), sep="\n")


if __name__ == "__main__":
    main()
