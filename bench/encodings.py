"""Errors of updates with 8-bit encodings of Adam's moments: the measurement of docs/eight_bit.md.

The gradients of a small GPT in training on real text are recorded once. For each encoding AdamW
then goes through the same gradients again, with moments that are encoded after every step, and each
update is compared with float64's.

    python bench/encodings.py                       # some minutes on two cores
    python bench/encodings.py --steps 6 --every 64  # seconds, says nothing
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from fused_offload.kernels.formats import (
    BF16,
    BF16_STOCHASTIC,
    FP16,
    FP16_NONZERO,
    LOG8,
    ROOT8,
    SCALE_GROUP,
    Format,
    Rounding,
    Stored,
    decode,
    encode_,
    rounding_thresholds,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import train_gpt

BETA1 = 0.9
_CPU = torch.device("cpu")
_PIECE = 1024  # elements; a multiple of every block size

Codec = Callable[[Tensor, int], Tensor]
"""float32 ``[numel]`` values after an encoding in the step of this number."""


def record_gradients(steps: int) -> Tensor:
    """Clipped gradients of a GPT of 1.3 million parameters, ``[steps, numel]`` float32.

    Parameters padded to 1,024.
    """
    size = train_gpt.SIZES["small"]
    torch.manual_seed(0)
    model = train_gpt.GPT(size, _CPU).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=size.lr, betas=(BETA1, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: train_gpt.learning_rate_factor(step, steps))
    corpus, order, recorded = train_gpt.load_corpus(), torch.Generator().manual_seed(0), []
    for _ in range(steps):
        starts = torch.randint(len(corpus.train) - size.context, (2 * size.batch,), generator=order)
        model.loss(train_gpt.windows(corpus.train, starts, size, _CPU)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), train_gpt.MAX_GRAD_NORM)
        flat = [param.grad.flatten() for param in model.parameters() if param.grad is not None]
        recorded.append(torch.cat([torch.nn.functional.pad(grad, (0, -grad.numel() % _PIECE)) for grad in flat]))
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return torch.stack(recorded)


def gradient_sets(recorded: Tensor) -> dict[str, Tensor]:
    """The recorded gradients, and what is hard about others."""
    steps, numel = recorded.shape
    random = torch.Generator().manual_seed(0)
    dead, rare, outliers = recorded.clone(), recorded.clone(), recorded.clone()
    dead[steps // 6 :, ::3] = 0
    rows = torch.rand(steps, numel // SCALE_GROUP, generator=random) < 0.01
    rare.view(steps, -1, SCALE_GROUP).mul_(rows[..., None])
    outliers[:, SCALE_GROUP // 2 :: SCALE_GROUP] *= 1e4
    return {"recorded": recorded, "every third dies": dead, "rows rarely seen": rare, "outliers": outliers}


class Error(NamedTuple):
    """Errors of updates against those of float64.

    Attributes:
        relative: root mean square over elements and steps, in units of that of the updates.
        drift: the same of the sum over all steps: errors that do not cancel.
        worst: largest error of one element in one step; an update is rarely larger than 1.
    """

    relative: float
    drift: float
    worst: float


class ExactUpdates:
    """Updates by float64, before learning rate and decay."""

    def __init__(self, grads: Tensor, beta2: float, eps: float) -> None:
        self.grads, self.beta2, self.eps = grads, beta2, eps
        exp_avg, exp_avg_sq = torch.zeros(2, grads.shape[1], dtype=torch.float64)
        self.updates = []
        for step, grad in enumerate(grads.double(), start=1):
            exp_avg = BETA1 * exp_avg + (1 - BETA1) * grad
            exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * grad**2
            self.updates.append(self.update(exp_avg, exp_avg_sq, step).float())

    def update(self, exp_avg: Tensor, exp_avg_sq: Tensor, step: int) -> Tensor:
        """Adam's update from unrounded moments."""
        corrected = (exp_avg_sq.double() / (1 - self.beta2**step)).sqrt()
        return exp_avg.double() / (1 - BETA1**step) / (corrected + self.eps)

    def error_of(self, updates: Callable[[Tensor, int], Tensor]) -> Error:
        """Error of an optimizer that gives its update for each step's gradient."""
        squared = total = worst = 0.0
        drift, length = torch.zeros(2, self.grads.shape[1], dtype=torch.float64)
        for step, (grad, exact) in enumerate(zip(self.grads, self.updates, strict=True), start=1):
            error = updates(grad, step) - exact.double()
            squared += float(error.square().sum())
            total += float(exact.double().square().sum())
            worst = max(worst, float(error.abs().max()))
            drift += error
            length += exact
        return Error((squared / total) ** 0.5, float(drift.norm() / length.norm()), worst)


class EncodedAdam:
    """Adam whose moments are encoded after each step, and used before."""

    def __init__(self, exact: ExactUpdates, exp_avg: Codec, exp_avg_sq: Codec) -> None:
        self._exact, self._codecs = exact, (exp_avg, exp_avg_sq)
        self._moments = torch.zeros(2, exact.grads.shape[1])

    def __call__(self, grad: Tensor, step: int) -> Tensor:
        """The update."""
        beta2 = self._exact.beta2
        exp_avg = self._moments[0] * BETA1 + grad * (1 - BETA1)
        exp_avg_sq = self._moments[1] * beta2 + grad * grad * (1 - beta2)
        for kept, codec, values in zip(self._moments, self._codecs, (exp_avg, exp_avg_sq), strict=True):
            kept.copy_(codec(values, step))
        return self._exact.update(exp_avg, exp_avg_sq, step)


def unchanged(values: Tensor, step: int) -> Tensor:
    """float32 itself."""
    return values


class StoredFormat:
    """A format of this package."""

    def __init__(self, format: Format, moment: int) -> None:
        self._format, self._moment = format, moment

    def __call__(self, values: Tensor, step: int) -> Tensor:
        """Values after encoding and decoding."""
        numel = values.numel()
        scale = torch.empty(numel // SCALE_GROUP) if self._format.scaled else None
        stored = Stored(self._format, torch.empty(numel, dtype=self._format.dtype), scale)
        random = rounding_thresholds(Rounding(0, step, 0), numel, _CPU) if self._format.stochastic else None
        encode_(stored, values, None if random is None else random[self._moment])
        return decode(stored)


class Table:
    """Block-scaled lookup: the nearest of given numbers in [-1, 1], times the block's largest
    magnitude.

    Args:
        grid: the numbers, ascending.
        block: elements that share a scale.
        rounding: ``"nearest"``, ``"up"`` (away from zero) or ``"stochastic"`` with numbers of its
            own at every step.
        keep_nonzero: whether positive values are kept at the smallest positive number.
    """

    def __init__(
        self, grid: Tensor, *, block: int = SCALE_GROUP, rounding: str = "nearest", keep_nonzero: bool = False
    ) -> None:
        self._grid = grid.double()
        self._block, self._rounding, self._keep_nonzero = block, rounding, keep_nonzero

    def __call__(self, values: Tensor, step: int) -> Tensor:
        """Values after encoding and decoding."""
        rows = values.view(-1, self._block).double()
        scale = rows.abs().amax(dim=1, keepdim=True).clamp(min=2.0**-149)
        quotient = (rows / scale).flatten()
        below = (torch.searchsorted(self._grid, quotient, right=True) - 1).clamp(0, len(self._grid) - 2)
        low, high = self._grid[below], self._grid[below + 1]
        fraction = (quotient - low) / (high - low)
        if self._rounding == "stochastic":
            up = fraction > torch.rand(
                len(quotient), generator=torch.Generator().manual_seed(step), dtype=torch.float64
            )
        elif self._rounding == "up":
            up = torch.where(quotient > 0, fraction > 0, fraction >= 1)
        else:
            up = fraction > 0.5
        kept = torch.where(up, high, low)
        if self._keep_nonzero:
            kept = torch.where((kept == 0) & (quotient > 0), self._grid[self._grid > 0][0], kept)
        return (kept.view(rows.shape) * scale).flatten().float()


def power_grid(power: float, *, signed: bool) -> Tensor:
    """``(code / largest code) ** power``; 1 is linear, 2 stores square roots."""
    grid = torch.linspace(0, 1, 128 if signed else 256, dtype=torch.float64) ** power
    return torch.cat([-grid[1:].flip(0), grid]) if signed else grid


def e4m3_grid(*, signed: bool) -> Tensor:
    """Numbers of the 8-bit float with 4 bits of exponent and 3 of mantissa, up to its largest,
    448.
    """
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double() / 448
    return torch.cat([-codes[1:].flip(0), codes]) if signed else codes


def dynamic_grid(*, signed: bool) -> Tensor:
    """The dynamic map of Dettmers et al. (arXiv:2110.02861).

    Each decade has twice the numbers of the one below.
    """
    positive = []
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (decade + (0 if signed else 1)) + 1, dtype=torch.float64)
        positive.append(10.0 ** (decade - 6) * (edges[:-1] + edges[1:]) / 2)
    numbers = torch.cat(positive)
    parts = [numbers, torch.tensor([0.0, 1.0], dtype=torch.float64)]
    return torch.cat([*parts, -numbers] if signed else parts).sort().values


def first_moment_codecs() -> dict[str, Codec]:
    """Encodings compared for ``exp_avg``."""
    return {
        "e4m3": Table(e4m3_grid(signed=True)),
        "dynamic map, block 256": Table(dynamic_grid(signed=True), block=256),
        "dynamic map": Table(dynamic_grid(signed=True)),
        "linear": Table(power_grid(1, signed=True)),
        "square root": Table(power_grid(2, signed=True)),
        "square root, stochastic": Table(power_grid(2, signed=True), rounding="stochastic"),
        "cube root": Table(power_grid(3, signed=True)),
        "cube root, stochastic": Table(power_grid(3, signed=True), rounding="stochastic"),
        "fourth root": Table(power_grid(4, signed=True)),
        "fourth root, stochastic": Table(power_grid(4, signed=True), rounding="stochastic"),
        "fourth root, stochastic, block 64": Table(power_grid(4, signed=True), block=64, rounding="stochastic"),
        "fourth root, stochastic, block 32": Table(power_grid(4, signed=True), block=32, rounding="stochastic"),
        "sixth root, stochastic": Table(power_grid(6, signed=True), rounding="stochastic"),
        "e4m3, stochastic": Table(e4m3_grid(signed=True), rounding="stochastic"),
        "**root8**": StoredFormat(ROOT8, 0),
        "(16 bits) bf16": StoredFormat(BF16, 0),
        "(16 bits) bf16, stochastic": StoredFormat(BF16_STOCHASTIC, 0),
        "(16 bits) fp16": StoredFormat(FP16, 0),
    }


def second_moment_codecs() -> dict[str, Codec]:
    """Encodings compared for ``exp_avg_sq``."""

    def table(grid: Tensor, **arguments: Any) -> Table:
        return Table(grid, keep_nonzero=True, **arguments)

    return {
        "e4m3": Table(e4m3_grid(signed=False)),
        "e4m3, never zero": table(e4m3_grid(signed=False)),
        "dynamic map, block 256": Table(dynamic_grid(signed=False), block=256),
        "dynamic map": Table(dynamic_grid(signed=False)),
        "dynamic map, never zero": table(dynamic_grid(signed=False)),
        "dynamic map, up": Table(dynamic_grid(signed=False), rounding="up"),
        "square root, linear": table(power_grid(2, signed=False)),
        "square root, linear, stochastic": table(power_grid(2, signed=False), rounding="stochastic"),
        "square root, e4m3": table(e4m3_grid(signed=False) ** 2),
        "fourth root": table(power_grid(4, signed=False)),
        "fourth root, up": Table(power_grid(4, signed=False), rounding="up"),
        "fourth root, stochastic": table(power_grid(4, signed=False), rounding="stochastic"),
        "eighth root, stochastic": table(power_grid(8, signed=False), rounding="stochastic"),
        "log8 to the nearest": StoredFormat(LOG8._replace(stochastic=False), 1),
        "**log8**": StoredFormat(LOG8, 1),
        "(16 bits) bf16": StoredFormat(BF16, 1),
        "(16 bits) bf16, stochastic": StoredFormat(BF16_STOCHASTIC, 1),
        "(16 bits) fp16": StoredFormat(FP16_NONZERO, 1),
    }


def peer_updates(name: str, exact: ExactUpdates) -> Callable[[Tensor, int], Tensor]:
    """Updates of another package's own 8-bit AdamW.

    What it subtracts from zero with a learning rate of 1.

    Raises:
        ImportError: where it is not installed.
    """
    param = torch.nn.Parameter(torch.zeros(exact.grads.shape[1]))
    settings: dict[str, Any] = {"lr": 1.0, "betas": (BETA1, exact.beta2), "eps": exact.eps, "weight_decay": 0.0}
    if name == "torchao":
        from torchao.optim import AdamW8bit
    else:
        from bitsandbytes.optim import AdamW8bit
    optimizer = AdamW8bit([param], **settings)

    def update(grad: Tensor, step: int) -> Tensor:
        with torch.no_grad():
            param.zero_()
        param.grad = grad
        with mock.patch("torch.compile", lambda function, **_: function):  # torchao's step
            optimizer.step()
        return -param.detach().double()

    return update


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share < 10 else "> 1000 %"


def show(title: str, rows: dict[str, list[Error]], sets: list[str]) -> None:
    """Prints one table in Markdown."""
    print(f"\n{title}\n\n| | {' | '.join(sets)} |\n|---|{'---|' * len(sets)}")
    for name, errors in rows.items():
        cells = [f"{_percent(error.relative)}, {_percent(error.drift)}, {error.worst:.2g}" for error in errors]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def compare(sets: dict[str, Tensor], beta2: float, eps: float) -> None:
    """Prints the tables of one choice of hyperparameters."""
    exact = {name: ExactUpdates(grads, beta2, eps) for name, grads in sets.items()}
    setting = f"beta2 = {beta2}, eps = {eps:g}: error, drift, worst"

    def errors(exp_avg: Codec, exp_avg_sq: Codec) -> list[Error]:
        return [updates.error_of(EncodedAdam(updates, exp_avg, exp_avg_sq)) for updates in exact.values()]

    if eps == 1e-8:
        first = {name: errors(codec, unchanged) for name, codec in first_moment_codecs().items()}
        show(f"exp_avg, exp_avg_sq in float32, {setting}", first, list(sets))
        second = {name: errors(unchanged, codec) for name, codec in second_moment_codecs().items()}
        show(f"exp_avg_sq, exp_avg in float32, {setting}", second, list(sets))
    ours = {
        "root8 and log8": errors(StoredFormat(ROOT8, 0), StoredFormat(LOG8, 1)),
        "root8 and stochastic bf16": errors(StoredFormat(ROOT8, 0), StoredFormat(BF16_STOCHASTIC, 1)),
        "stochastic bf16": errors(StoredFormat(BF16_STOCHASTIC, 0), StoredFormat(BF16_STOCHASTIC, 1)),
        "bf16": errors(StoredFormat(BF16, 0), StoredFormat(BF16, 1)),
    }
    for peer in ("torchao", "bitsandbytes"):
        try:
            ours[f"{peer} AdamW8bit"] = [updates.error_of(peer_updates(peer, updates)) for updates in exact.values()]
        except ImportError as error:
            print(f"{peer} was left out: {error}", file=sys.stderr)
    show(f"both moments, {setting}", ours, list(sets))


def main() -> None:
    """Records, compares, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="recorded steps")
    parser.add_argument("--every", type=int, default=16, help="keep one in so many runs of 1,024 elements")
    parser.add_argument("--grads", type=Path, help="keep the recorded gradients in this file, or take them from there")
    options = parser.parse_args()
    began = time.perf_counter()
    if options.grads is not None and options.grads.exists():
        recorded = torch.load(options.grads, weights_only=True)
    else:
        recorded = record_gradients(options.steps)
        recorded = recorded.view(options.steps, -1, _PIECE)[:, :: options.every].flatten(1).contiguous()
        if options.grads is not None:
            torch.save(recorded, options.grads)
    print(f"{recorded.shape[0]} steps of {recorded.shape[1]} elements, torch {torch.__version__}")
    sets = gradient_sets(recorded)
    for beta2, eps in ((0.95, 1e-8), (0.999, 1e-8), (0.95, 1e-15), (0.999, 1e-15)):
        compare(sets, beta2, eps)
    print(f"\n{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
