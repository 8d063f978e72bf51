"""Stochastic rounding is right on average for any sequence of gradients, in the reference and in
the kernel.

Every element of one run sees the same sequence, times an amplitude of its own. Divided by that
amplitude all moments have the same exact average, from which their mean may be a few standard
errors away.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import pytest
import torch

from fused_offload.kernels.adam import launch as adam
from fused_offload.kernels.adam import reference
from fused_offload.kernels.adam.reference import AdamScalars, AdamState, adam_scalars
from fused_offload.kernels.formats import (
    BF16_STOCHASTIC,
    LOG8,
    ROOT8,
    SCALE_GROUP,
    Format,
    Rounding,
    Stored,
    decode,
    rounding_counter,
    rounding_thresholds,
)
from fused_offload.kernels.launch import LaunchKind, programs_of

STANDARD_ERRORS = 5.0
SNAPSHOTS = (60, 400)
BETAS = (0.9, 0.95, 0.99, 0.999)


def random_walk(steps: int) -> list[float]:
    moves = np.random.default_rng(0).normal(size=steps) * 0.01
    return (0.3 + np.cumsum(moves)).tolist()


SEQUENCES: dict[str, Callable[[int], list[float]]] = {
    "constant": lambda steps: [0.3] * steps,
    "cycle of 7": lambda steps: [0.3 + 0.01 * (step % 7) for step in range(steps)],
    "sine": lambda steps: [0.3 + 0.2 * math.sin(step) for step in range(1, steps + 1)],
    "random walk": random_walk,
}
FORMATS = {"bf16": (BF16_STOCHASTIC, BF16_STOCHASTIC), "8-bit": (ROOT8, LOG8)}
# The lower half of the offset overflows among the elements.
COUNTER = rounding_counter(3, 2**32 - 1536)


class Step(NamedTuple):
    """Everything that one step of a run takes; tensors are on the run's device."""

    param: torch.Tensor
    grad: torch.Tensor
    state: AdamState
    scalars: AdamScalars


def by_reference(step: Step) -> None:
    reference.adam_step_(*step, counter=COUNTER)


def by_kernel(numerics: str) -> Callable[[Step], None]:
    def launch(step: Step) -> None:
        param, grad, state, scalars = step
        numel = param.numel()
        row = [0, param.data_ptr(), grad.data_ptr(), 0, numel, COUNTER]
        table = torch.tensor([row], device=param.device)
        kind = LaunchKind(param.dtype, grad.dtype, numerics=numerics)
        adam.adam_step_(table, 1, programs_of(numel), state, scalars, kind)

    return launch


def stored_empty(format: Format, numel: int, device: str) -> Stored:
    scale = torch.empty(-(-numel // SCALE_GROUP), device=device) if format.scaled else None
    return Stored(format, torch.empty(numel, dtype=format.dtype, device=device), scale)


def amplitudes(numel: int) -> torch.Tensor:
    """Over three decades and of both signs, so that no block holds one value and few hold its own
    largest.
    """
    random = np.random.default_rng(1)
    return torch.from_numpy(10 ** random.uniform(-3, 0, numel) * random.choice([-1.0, 1.0], numel)).float()


class Bias(NamedTuple):
    """Distance of a mean from the exact average.

    Attributes:
        what: moment and number of steps.
        relative: distance, in units of the exact average.
        standard_error: of the mean, in the same units.
    """

    what: str
    relative: float
    standard_error: float

    def check(self, limit: float = math.inf) -> None:
        # Float32 itself rounds at every step, too.
        assert abs(self.relative) <= STANDARD_ERRORS * self.standard_error + 1e-6, self
        assert abs(self.relative) <= limit, self


def biases(
    take_step: Callable[[Step], None],
    formats: tuple[Format, Format],
    sequence: str,
    beta: float,
    *,
    numel: int,
    snapshots: tuple[int, ...] = SNAPSHOTS,
    device: str = "cpu",
) -> Iterator[Bias]:
    """Both moments of a run at some steps; both decay by ``beta``."""
    amplitude = amplitudes(numel)
    param = torch.zeros(numel, device=device)
    state = AdamState(*(stored_empty(format, numel, device) for format in formats), None, init_moments=True)
    exact = [0.0, 0.0]
    for number, value in enumerate(SEQUENCES[sequence](max(snapshots)), start=1):
        scalars = adam_scalars(
            lr=0.0, betas=(beta, beta), eps=1e-8, weight_decay=0.0, step=number, bias_corrected=True, adam_w_mode=True
        )
        grad = (amplitude * value).to(device)
        take_step(Step(param, grad, state, scalars))
        state = state._replace(init_moments=False)
        for moment, term in enumerate((value, value * value)):
            exact[moment] = scalars.beta1 * exact[moment] + scalars.one_minus_beta1 * term
        if number not in snapshots:
            continue
        for moment, (stored, unit) in enumerate(zip(state[:2], (amplitude, amplitude.square()), strict=True)):
            assert isinstance(stored, Stored)
            values = decode(stored).cpu().double() / unit.double() / exact[moment] - 1
            error = float(values.std()) / math.sqrt(numel)
            yield Bias(f"{('exp_avg', 'exp_avg_sq')[moment]} after {number} steps", float(values.mean()), error)


def relative_limit(formats: str) -> float:
    return 2e-4 if formats == "bf16" else math.inf


PRODUCT = list(itertools.product(FORMATS, SEQUENCES, BETAS))


@pytest.mark.parametrize("beta", [0.9, 0.999])
@pytest.mark.parametrize("sequence", ["cycle of 7", "sine"])
@pytest.mark.parametrize("formats", FORMATS)
def test_moments_are_right_on_average(formats: str, sequence: str, beta: float) -> None:
    for bias in biases(by_reference, FORMATS[formats], sequence, beta, numel=6 * 1024, snapshots=(60, 150)):
        bias.check()


@pytest.mark.large
@pytest.mark.parametrize(("formats", "sequence", "beta"), PRODUCT)
def test_moments_are_right_on_average_whatever_the_sequence(formats: str, sequence: str, beta: float) -> None:
    for bias in biases(by_reference, FORMATS[formats], sequence, beta, numel=100_000):
        bias.check(relative_limit(formats))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernel runs on the GPU")
@pytest.mark.parametrize(("formats", "steps"), [("bf16", 60), ("8-bit", 30)])
def test_interpreted_moments_are_right_on_average(formats: str, steps: int) -> None:
    for bias in biases(by_kernel("ieee"), FORMATS[formats], "cycle of 7", 0.9, numel=1024, snapshots=(steps,)):
        bias.check()


@pytest.mark.gpu
@pytest.mark.parametrize("numerics", ["ieee", "te"])
@pytest.mark.parametrize(("formats", "sequence", "beta"), PRODUCT)
def test_moments_on_a_gpu_are_right_on_average(formats: str, sequence: str, beta: float, numerics: str) -> None:
    launch = by_kernel(numerics)
    for bias in biases(launch, FORMATS[formats], sequence, beta, numel=100_000, device="cuda"):
        bias.check(relative_limit(formats))


# -- thresholds ------------------------------------------------------------------------------------

ELEMENTS, STEPS = 512, 512


def threshold_tables(seed: int = 0, parameter: int = 0, first_step: int = 1) -> list[np.ndarray]:
    """``[STEPS, ELEMENTS]`` numbers in [0, 1) of each moment."""
    rows = [
        rounding_thresholds(
            Rounding(seed, first_step + step, rounding_counter(parameter, 0)), ELEMENTS, torch.device("cpu")
        )
        for step in range(STEPS)
    ]
    return [torch.stack(part).numpy() / 2**32 for part in zip(*rows, strict=True)]


def excess(one: np.ndarray, other: np.ndarray) -> float:
    """How much less even than chance pairs fill 16 x 16 boxes, in standard deviations of
    chi-square.
    """
    boxes = (one.ravel() * 16).astype(int) * 16 + (other.ravel() * 16).astype(int)
    expected = boxes.size / 256
    chi_square = float(((np.bincount(boxes, minlength=256) - expected) ** 2 / expected).sum())
    return (chi_square - 255) / math.sqrt(2 * 255)


def test_thresholds_are_independent() -> None:
    first, second = threshold_tables()
    pairs = {"moments": (first, second)}
    for name, moment in (("first", first), ("second", second)):
        pairs |= {f"{name}, {lag} steps": (moment[:-lag], moment[lag:]) for lag in (1, 2, 3, 5, 7, 64, 100)}
        pairs |= {f"{name}, {lag} elements": (moment[:, :-lag], moment[:, lag:]) for lag in (1, 2, 3, 8, 128)}
    for seed, parameter in ((1, 0), (2, 0), (2**31 - 1, 0), (0, 1), (0, 2), (0, 2**22), (1, 1)):
        for moment, other in zip((first, second), threshold_tables(seed, parameter), strict=True):
            pairs[f"seed {seed}, parameter {parameter}"] = moment, other
    pairs["the other moment a step later"] = first[:-1], second[1:]
    found = {name: excess(*pair) for name, pair in pairs.items()}
    assert max(found.values()) < 5, found
    assert min(found.values()) > -5, found  # nor more even than chance


def test_thresholds_that_are_shifted_or_repeated_would_be_noticed() -> None:
    first, _ = threshold_tables()
    assert excess(first, first) > 1000
    assert excess(first, (first + 0.618034) % 1) > 1000


@pytest.mark.parametrize("first_step", [1, 10_000_000, 2**31 - STEPS])
def test_thresholds_cover_their_range_evenly(first_step: int) -> None:
    for moment in threshold_tables(first_step=first_step):
        for axis in (0, 1):  # steps of an element, elements of a step
            counts = np.stack([((moment >= low / 8) & (moment < (low + 1) / 8)).sum(axis) for low in range(8)])
            chi_square = ((counts - STEPS / 8) ** 2 / (STEPS / 8)).sum(0)
            # 7 degrees of freedom, 512 samples: by chance the largest is about 24.
            assert chi_square.max() < 45
            assert abs(chi_square.mean() - 7) < 5 * math.sqrt(14 / chi_square.size)
