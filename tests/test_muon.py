"""Muon: torch.optim.Muon <- the plain torch phases <- the kernels; any chunks on any device;
checkpoints.
"""

from __future__ import annotations

import copy
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import helpers
import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import DTYPES, Snapshot, assert_same_bits, assert_same_snapshot, param_of, randn, snapshot

pytest.importorskip("triton")

from interpreted_fma import fma_that_rounds_once
from pairs import combinations
from simulated_device import SCHEDULES, Interrupt
from test_simulated_device import Device
from test_simulated_device import run as run_on_simulated_device
from torch.utils._python_dispatch import TorchDispatchMode

from fused_offload import FusedOffloadAdam, FusedOffloadMuon, OffloadConfig
from fused_offload.kernels.formats import BF16, FP16, FP32, REMAINDER, Format, Stored, decode, rounding_counter
from fused_offload.kernels.launch import LaunchKind, ScalerSignals, programs_of
from fused_offload.kernels.muon import launch
from fused_offload.kernels.muon.newton_schulz import newton_schulz_parts, scratch_bytes
from fused_offload.kernels.muon.reference import (
    MuonState,
    NewtonSchulz,
    lr_ratio,
    momentum_phase_,
    muon_scalars,
    update_phase_,
)
from fused_offload.megatron.muon import MegatronMuonRule
from fused_offload.optimizer import OffloadOptimizer

device = helpers.device
torchs = pytest.importorskip("torch.optim._muon")  # from torch 2.9 on

SHAPES = ((300, 70), (70, 300), (128, 128), (1, 500), (500, 1), (129, 257), (64, 300), (1, 1))
"""Tall, wide, square, of one row or column, odd."""

CHUNKS = {"small": 512, "odd": 128 * 4 * 5 + 3, "whole": 2**40}
FRACTIONS = (0.0, 0.5, 1.0)
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
DEFAULT = NewtonSchulz(COEFFICIENTS, 1e-7, 5)


class Kept(NamedTuple):
    """State that is kept for parameters of one dtype."""

    dtype: torch.dtype
    momentum: Format
    master: Format | None
    options: dict[str, Any]


KEPT = {
    "fp32": Kept(torch.float32, FP32, None, {}),
    "fp32 bf16": Kept(torch.float32, BF16, None, {"momentum_dtype": torch.bfloat16}),
    "fp32 master": Kept(torch.float32, FP32, FP32, {"master_weights": True}),
    "bf16 2": Kept(torch.bfloat16, BF16, None, {"momentum_dtype": torch.bfloat16}),
    "bf16 4": Kept(
        torch.bfloat16,
        BF16,
        REMAINDER,
        {"momentum_dtype": torch.bfloat16, "master_weights": True, "store_param_remainders": True},
    ),
    "bf16 6": Kept(torch.bfloat16, FP32, REMAINDER, {"master_weights": True, "store_param_remainders": True}),
    "bf16 8": Kept(torch.bfloat16, FP32, FP32, {"master_weights": True}),
    "fp16 master": Kept(torch.float16, FP32, FP16, {"master_weights": True, "master_weight_dtype": torch.float16}),
}
"""By dtype of the parameters and bytes of state for each element."""

kinds_of_state = pytest.mark.parametrize("kept", KEPT.values(), ids=KEPT)


def tensors(seed: int, dtype: torch.dtype, shapes: Sequence[tuple[int, int]] = SHAPES) -> list[torch.Tensor]:
    """One of each shape; the second and the third in another memory order."""
    made = [randn(shape, 100 * seed + index, dtype=dtype) for index, shape in enumerate(shapes)]
    for index in (1, 2):
        if index < len(made):
            made[index] = made[index].t().contiguous().t()
    return made


def make(params: Sequence[torch.Tensor], kept: Kept, *, lr: Any = 0.02, offload: Any = None, **settings: Any) -> Any:
    config = OffloadConfig(**{"chunk_bytes": 1000, "depth": 2, **(offload or {})})
    return FusedOffloadMuon(
        [torch.nn.Parameter(param) for param in params], lr=lr, offload=config, **kept.options, **settings
    )


def params_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def set_grads(optimizer: torch.optim.Optimizer, grads: Sequence[torch.Tensor | None]) -> None:
    for param, grad in zip(params_of(optimizer), grads, strict=True):
        helpers.set_grad(param, grad)


def in_order(tensor: torch.Tensor) -> torch.Tensor:
    """Elements in the order in which they lie in memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


# -- torch.optim.Muon ------------------------------------------------------------------------------

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "no nesterov": {"nesterov": False, "adjust_lr_fn": "match_rms_adamw", "ns_steps": 4, "weight_decay": 0.0},
    "small momentum": {"momentum": 0.3, "adjust_lr_fn": "original", "weight_decay": 0.01},
    "half": {"momentum": 0.5, "ns_steps": 1, "eps": 0.5},
    "no steps": {"ns_steps": 0, "ns_coefficients": (2.0, -1.5, 0.5)},
    "no momentum": {"momentum": 0.0, "ns_steps": 3, "ns_coefficients": (2.0, -1.5, 0.5)},
}


@combinations(("name", "chunks", "fraction"), itertools.product(SETTINGS, CHUNKS, FRACTIONS))
def test_float32_parameters_get_the_bits_of_torch(name: str, chunks: str, fraction: float) -> None:
    settings, offload = SETTINGS[name], {"chunk_bytes": CHUNKS[chunks], "fraction": fraction}
    ours = make(tensors(0, torch.float32), KEPT["fp32"], offload=offload, **settings)
    theirs = torch.optim.Muon(map(torch.nn.Parameter, tensors(0, torch.float32)), lr=0.02, **settings)
    for step in range(10):
        for optimizer in (ours, theirs):
            grads: list[torch.Tensor | None] = [*tensors(1 + step, torch.float32)]
            if step in (3, 5):
                grads[step] = None
            set_grads(optimizer, grads)
            optimizer.param_groups[0]["lr"] = 0.02 / (1 + step)
            optimizer.step()
    for index, (param, wanted) in enumerate(zip(params_of(ours), params_of(theirs), strict=True)):
        assert_same_bits(param, wanted, f"parameter {index}")
        assert_same_bits(ours.state[param]["momentum_buffer"], theirs.state[wanted]["momentum_buffer"], f"{index}")


@pytest.mark.parametrize("name", ["bf16 6", "bf16 8"])
def test_masters_get_the_bits_of_float32_parameters_in_torch(name: str) -> None:
    ours = make(tensors(0, torch.bfloat16), KEPT[name])
    theirs = torch.optim.Muon([torch.nn.Parameter(p.float()) for p in tensors(0, torch.bfloat16)], lr=0.02)
    for step in range(10):
        set_grads(ours, tensors(1 + step, torch.bfloat16))
        set_grads(theirs, [grad.float() for grad in tensors(1 + step, torch.bfloat16)])
        ours.step()
        theirs.step()
    for index, (param, wanted) in enumerate(zip(params_of(ours), params_of(theirs), strict=True)):
        master = ours.state[param]["master_param"]
        if name == "bf16 6":
            low = master.int() & 0xFFFF
            high = param.detach().view(torch.int16).int() - (master < 0).int()
            master = (high << 16 | low).view(torch.float32)
        else:
            assert_same_bits(param, wanted.detach().bfloat16(), f"parameter {index}")
        assert_same_bits(master, wanted, f"master {index}")


def oracle_step(param: torch.Tensor, grad: torch.Tensor, momentum: torch.Tensor) -> torch.Tensor:
    """A default step of a 16-bit parameter without a master in float64, rounded where torch rounds
    on a GPU.

    Returns:
        The momentum. torch on a CPU rounds the learning rate of such parameters to 16 bits.
    """

    def lerp(start: torch.Tensor, end: torch.Tensor, weight: float) -> torch.Tensor:
        weight = float(torch.tensor(weight))
        gap = (end.double() - start.double()).float().double()
        near, share = (start, weight) if weight < 0.5 else (end, -float(torch.tensor(1.0) - weight))
        return (near.double() + share * gap).float()

    lr, decay = 0.02, 0.1  # as in `make`, and the default
    momentum = lerp(momentum.float(), grad.float(), 1 - 0.95).to(momentum.dtype)
    update = lerp(grad.float(), momentum.float(), 0.95).bfloat16()
    update = torchs._zeropower_via_newtonschulz(update, COEFFICIENTS, 5, 1e-7)
    param.copy_((param.double() * float(torch.tensor(1 - lr * decay))).float())
    scale = float(torch.tensor(-lr * max(1, param.shape[0] / param.shape[1]) ** 0.5))
    param.copy_((param.double() + scale * update.double()).float())
    return momentum


def test_parameters_of_16_bits_are_rounded_twice() -> None:
    ours = make(tensors(0, torch.bfloat16), KEPT["bf16 2"])
    params, momenta = tensors(0, torch.bfloat16), [torch.zeros_like(p) for p in tensors(0, torch.bfloat16)]
    for step in range(5):
        set_grads(ours, tensors(1 + step, torch.bfloat16))
        ours.step()
        momenta = [oracle_step(*of) for of in zip(params, tensors(1 + step, torch.bfloat16), momenta, strict=True)]
    for index, param in enumerate(params_of(ours)):
        assert_same_bits(ours.state[param]["momentum_buffer"], momenta[index], f"momentum {index}")
        assert_same_bits(param, params[index], f"parameter {index}")


@pytest.mark.parametrize("adjust_lr_fn", [None, "original", "match_rms_adamw"])
def test_ratios_are_those_of_torch(adjust_lr_fn: str | None) -> None:
    for shape in SHAPES:
        ours, theirs = lr_ratio(shape, adjust_lr_fn), torchs._adjust_lr(1.0, adjust_lr_fn, torch.Size(shape))
        assert ours == theirs
    assert lr_ratio((2, 8), "spectral_unclamped") == 0.5


def test_a_stored_momentum_is_not_normalised() -> None:
    """As torch does by mistake with a bfloat16 momentum and without Nesterov's."""
    grad = 3 * randn((40, 30), 1, dtype=torch.bfloat16)
    ours = make([randn((40, 30), 0, dtype=torch.bfloat16)], KEPT["bf16 2"], nesterov=False)
    set_grads(ours, [grad])
    ours.step()
    [param] = params_of(ours)
    assert_same_bits(
        ours.state[param]["momentum_buffer"], (grad.float() * float(torch.tensor(1 - 0.95))).bfloat16(), ""
    )


# -- Newton-Schulz ---------------------------------------------------------------------------------


def orthogonalised(matrix: torch.Tensor, settings: NewtonSchulz = DEFAULT) -> torch.Tensor:
    """In memory full of NaN, with a border that must stay."""
    border = 512
    memory = torch.full((scratch_bytes(matrix) + 2 * border,), 0xFF, dtype=torch.uint8, device=matrix.device)
    matrix = torch.empty_strided(matrix.shape, matrix.stride(), dtype=matrix.dtype, device=matrix.device).copy_(matrix)
    for part in newton_schulz_parts(matrix, memory[border:-border], settings):
        part()
    assert (memory[:border] == 0xFF).all()
    assert (memory[-border:] == 0xFF).all()
    return matrix


@pytest.mark.parametrize("steps", range(7))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_newton_schulz_gives_the_bits_of_torch(shape: tuple[int, int], steps: int, device: str) -> None:
    matrix = randn(shape, 1, device, torch.bfloat16)
    for order in (matrix, matrix.t().contiguous().t()):
        wanted = torchs._zeropower_via_newtonschulz(order.clone(), COEFFICIENTS, steps, 1e-7)
        found = orthogonalised(order, NewtonSchulz(COEFFICIENTS, 1e-7, steps))
        assert_same_bits(found, wanted, f"{steps} steps")
        assert found.stride() == order.stride()


class _OnlyGivenMemory(TorchDispatchMode):
    """Fails at an operation that returns memory of its own."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = [value.alias_info for value in func._schema.returns]
        assert all(alias is not None for alias in returned), f"{func} allocates its result"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_newton_schulz_allocates_no_results(shape: tuple[int, int]) -> None:
    matrix = randn(shape, 1, dtype=torch.bfloat16)
    parts = newton_schulz_parts(matrix, torch.empty(scratch_bytes(matrix), dtype=torch.uint8), DEFAULT)
    with _OnlyGivenMemory():
        for part in parts:
            part()
    with pytest.raises(AssertionError, match=r"mm\.default allocates"), _OnlyGivenMemory():
        torch.mm(matrix, matrix.T)


@pytest.mark.parametrize("shape", [(16, 16), (64, 128), (80, 208), (336, 48)], ids=str)
def test_a_transposing_copy_keeps_the_bits(shape: tuple[int, int], kernel_device: torch.device) -> None:
    """Of any value, in whole tiles and in parts of them, within a border."""
    rows, columns = shape
    bits = torch.arange(rows * columns, dtype=torch.int32).to(torch.int16).view(shape).to(kernel_device)
    memory = torch.full((rows * columns + 32,), -1, dtype=torch.int16, device=kernel_device)
    target = memory[16:-16].view(columns, rows)
    launch.copy_transposed(bits.view(torch.bfloat16), target.view(torch.bfloat16))
    assert torch.equal(target, bits.T)
    assert (memory[:16] == -1).all()
    assert (memory[-16:] == -1).all()


def newton_schulz64(matrix: torch.Tensor) -> torch.Tensor:
    """The iteration in float64, from the definition."""
    a, b, c = COEFFICIENTS
    x = matrix.double() / matrix.double().norm()
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


@pytest.mark.parametrize("shape", [(64, 64), (96, 256), (256, 96), (33, 500)], ids=str)
def test_newton_schulz_flattens_the_spectrum(shape: tuple[int, int], device: str) -> None:
    """Singular values of well-conditioned matrices end near 1, and not far from those of the same
    steps in float64.

    Elements may be far off: rounding moves singular vectors of close singular values. So this
    bounds norms.
    """
    left, _, right = torch.linalg.svd(randn(shape, 3), full_matrices=False)
    matrix = left @ torch.diag(torch.linspace(0.2, 1.0, min(shape))) @ right
    found = orthogonalised(matrix.bfloat16().to(device)).cpu()
    values = torch.linalg.svdvals(found.double())
    assert 0.5 < values.min()
    assert values.max() < 1.5
    exact = newton_schulz64(matrix.bfloat16())
    rows = min(shape)
    # The Frobenius norm; that of `exact` is about its root.
    assert torch.linalg.norm(found.double() - exact) < 0.05 * rows**0.5
    assert (values - torch.linalg.svdvals(exact)).abs().max() < 0.1


# -- the kernels -----------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def correctly_rounded_fma() -> Iterator[None]:
    with fma_that_rounds_once():
        yield


@pytest.fixture(scope="module")
def kernel_device() -> torch.device:
    return torch.device(helpers.DEVICES[0])


class Setup(NamedTuple):
    """Formats, dtypes and settings that the kernels are compiled for."""

    param: torch.dtype
    grad: torch.dtype
    momentum: str
    master: str
    decay: float
    nesterov: bool
    numerics: str = "torch"


MASTERS: dict[str, Format | None] = {"none": None, "fp32": FP32, "fp16": FP16, "remainder": REMAINDER}
MOMENTA = {"fp32": FP32, "bf16": BF16}


def covering_setups() -> list[Setup]:
    """Setups in which every pair of two choices occurs, greedily few."""
    setups = [
        Setup(*choice)
        for choice in itertools.product(
            DTYPES, DTYPES, MOMENTA, MASTERS, (0.95, 0.3), (True, False), ("torch", "megatron")
        )
        if choice[3] != "remainder" or choice[0] == torch.bfloat16
    ]

    def pairs(setup: Setup) -> set[Any]:
        return set(itertools.combinations(enumerate(setup), 2))

    missing, chosen = set().union(*map(pairs, setups)), []
    while missing:
        best = max(setups, key=lambda setup: len(pairs(setup) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


NUMELS = (1, 129, 1025)
SCALES = (-0.02, -0.5, -3e-4)
START = 128  # elements of nobody before the state


def scalars_of(setup: Setup, lr: Any = 0.02) -> Any:
    return muon_scalars(
        lr=lr,
        weight_decay=0.1,
        momentum=setup.decay,
        nesterov=setup.nesterov,
        newton_schulz=DEFAULT,
        adjust_lr_fn=None,
        step=1,
        numerics=setup.numerics,
    )


class Memory:
    """Everything that both phases read and write for a few pieces, in memory that is full of random
    bits elsewhere.
    """

    def __init__(self, setup: Setup, *, shift: int = 0) -> None:
        self.setup, self.shift = setup, shift
        random = torch.Generator().manual_seed(7)

        def bits(numel: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=random).view(dtype)

        def stored(format: Format | None) -> Stored | None:
            if format is None:
                return None
            scale = bits(total // 128, torch.float32) if format.scaled else None
            return Stored(format, bits(total, format.dtype), scale)

        self.starts = [START + start for start in itertools.accumulate((128, 256, 1152), initial=0)]
        total = self.starts.pop() + 128
        self.params = [bits(numel + 64, setup.param) for numel in NUMELS]
        self.grads = [bits(numel + 64, setup.grad) for numel in NUMELS]
        array_dtype = torch.float32 if setup.numerics == "megatron" else torch.bfloat16
        self.arrays = [bits(-(-numel // 128) * 128, array_dtype) for numel in NUMELS]
        for index, numel in enumerate(NUMELS):
            self.part(self.params, index).copy_(torch.randn(numel, generator=random))
        self.first = MuonState(stored(MOMENTA[setup.momentum]), None, True, True)
        self.second = MuonState(None, stored(MASTERS[setup.master]), True, True)
        self.new_grads(1)

    def part(self, tensors: list[torch.Tensor], index: int) -> torch.Tensor:
        first = 16 + self.shift
        return tensors[index][first : first + NUMELS[index]]

    def on(self, device: torch.device) -> Memory:
        other = copy.copy(self)
        names = ("params", "grads", "arrays", "first", "second")
        moved = torch.utils._pytree.tree_map_only(
            torch.Tensor, lambda tensor: tensor.to(device, copy=True), [getattr(self, name) for name in names]
        )
        for name, value in zip(names, moved, strict=True):
            setattr(other, name, value)
        return other

    def new_grads(self, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        for index, numel in enumerate(NUMELS):
            values = torch.randn(numel, generator=random) * 10 ** torch.empty(numel).uniform_(-5, 2, generator=random)
            values[5::13] = 0
            self.part(self.grads, index).copy_(values)

    def started(self) -> None:
        """Ends the first step."""
        self.first = self.first._replace(init_momentum=False, init_master=False)
        self.second = self.second._replace(init_momentum=False, init_master=False)

    def bytes(self) -> list[torch.Tensor]:
        leaves = torch.utils._pytree.tree_leaves(
            (self.params, self.grads, self.arrays, tuple(self.first[:2]), tuple(self.second[:2]))
        )
        return [tensor.view(torch.uint8).cpu() for tensor in leaves if isinstance(tensor, torch.Tensor)]

    def reference_phases(self, grad_scale: float | None = None, lr: Any = 0.02) -> None:
        for phase, state in ((momentum_phase_, self.first), (update_phase_, self.second)):
            for index, (start, numel) in enumerate(zip(self.starts, NUMELS, strict=True)):
                phase(
                    self.part(self.params, index),
                    self.part(self.grads, index),
                    state.narrow(start, numel),
                    scalars_of(self.setup, lr),
                    array=self.arrays[index][:numel],
                    scalar=float(torch.tensor(SCALES[index])),
                    grad_scale=grad_scale,
                )

    def kernel_phases(self, signals: Any = ScalerSignals(), lr: Any = 0.02, **kind: Any) -> None:  # noqa: B008
        rows, programs = [], 0
        for index, (start, numel) in enumerate(zip(self.starts, NUMELS, strict=True)):
            addresses = self.part(self.params, index).data_ptr(), self.part(self.grads, index).data_ptr()
            scale = int(torch.tensor(SCALES[index]).view(torch.int32))
            counter, array = rounding_counter(index, 0), self.arrays[index].data_ptr()
            rows.append([programs, *addresses, start, numel, counter, array, scale])
            programs += programs_of(numel)
        # The row behind the launch's own is another chunk's; this one must not be found.
        table = torch.tensor([*rows, [0, 0, 0, 0, 2**40, 0, 0, 0]], device=self.params[0].device)
        launch_kind = LaunchKind(self.setup.param, self.setup.grad, **kind)
        for phase, state in ((launch.momentum_phase_, self.first), (launch.update_phase_, self.second)):
            phase(table, len(rows), programs, state, scalars_of(self.setup, lr), launch_kind, signals)


def both(setup: Setup, device: torch.device, *, started: bool, shift: int = 0) -> tuple[Memory, Memory]:
    """The same memory twice, for the kernels and for the reference, before or after a first
    step.
    """
    expected = Memory(setup, shift=shift)
    if started:
        expected.reference_phases()
        expected.started()
        expected.new_grads(2)
    return expected.on(device), expected


def assert_same_memory(actual: Memory, expected: Memory) -> None:
    for ours, theirs in zip(actual.bytes(), expected.bytes(), strict=True):
        assert torch.equal(ours, theirs)


def name(value: object) -> str:
    return str(value).removeprefix("torch.")


first_or_later = pytest.mark.parametrize("started", [False, True], ids=["first", "later"])


@pytest.mark.parametrize("setup", covering_setups(), ids=lambda setup: "-".join(map(name, setup)))
@first_or_later
def test_kernels_give_the_bits_of_the_reference(setup: Setup, started: bool, kernel_device: torch.device) -> None:
    actual, expected = both(setup, kernel_device, started=started)
    actual.kernel_phases()
    expected.reference_phases()
    assert_same_memory(actual, expected)


TYPICAL = [
    Setup(torch.float32, torch.bfloat16, "fp32", "fp16", 0.95, True),
    Setup(torch.bfloat16, torch.float32, "bf16", "remainder", 0.3, False),
    Setup(torch.float16, torch.float16, "bf16", "none", 0.95, True),
    Setup(torch.bfloat16, torch.bfloat16, "fp32", "fp32", 0.95, True),
    Setup(torch.float32, torch.float32, "fp32", "none", 0.95, False, "megatron"),
]
typical = pytest.mark.parametrize("setup", TYPICAL, ids=lambda setup: "-".join(map(name, setup)))


def signals_of(device: torch.device, *, skip: bool) -> ScalerSignals:
    one = torch.ones(1, device=device)
    return ScalerSignals(one * 8, one * skip, torch.zeros(1, dtype=torch.int64, device=device), one.view(1, 1))


@typical
def test_signals_and_a_bounded_launch(setup: Setup, kernel_device: torch.device) -> None:
    """A gradient scale, a learning rate on the device, two programs, odd addresses."""
    actual, expected = both(setup, kernel_device, started=True, shift=1)
    signals = signals_of(kernel_device, skip=False)
    actual.kernel_phases(signals, lr=torch.tensor([0.02], device=kernel_device), max_programs=2)
    expected.reference_phases(grad_scale=8.0, lr=torch.tensor([0.02]))
    assert_same_memory(actual, expected)


@typical
@first_or_later
# NumPy warns of inf * 0.
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_a_skipped_step_changes_no_value(setup: Setup, started: bool, kernel_device: torch.device) -> None:
    """State that no step wrote before gets its initial value, which later steps read."""
    actual, expected = both(setup, kernel_device, started=started)
    params = [actual.part(actual.params, index).clone() for index in range(len(NUMELS))]
    actual.part(actual.grads, 2)[3] = torch.inf
    actual.kernel_phases(signals_of(kernel_device, skip=True))
    for index, param in enumerate(params):
        assert torch.equal(actual.part(actual.params, index), param)
    for memory in (actual, expected):
        memory.new_grads(3)
    actual.started()
    actual.kernel_phases()
    expected.reference_phases()
    assert_same_memory(actual, expected)


@pytest.mark.parametrize(("kernel", "format"), [("muon_momentum", "bf16"), ("muon_update", "remainder")])
def test_the_compiler_takes_what_the_interpreter_takes(kernel: str, format: str, tmp_path: Path) -> None:
    pytest.importorskip("triton.backends.nvidia")
    script = str(Path(__file__).parent / "compile_kernel.py")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, script, kernel, format]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("lines of PTX") == 2


# -- any chunks, on any device ---------------------------------------------------------------------


def whole_step(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor | None],
    states: list[tuple[MuonState, MuonState]],
    grad_scale: float | None,
) -> None:
    """A step of whole parameters, one after the other."""
    for index, (param, grad) in enumerate(zip(params, grads, strict=True)):
        if grad is None:
            continue
        scalars = scalars_of(Setup(param.dtype, grad.dtype, "", "", 0.95, True))
        array = torch.empty(param.numel(), dtype=torch.bfloat16)
        scale = float(torch.tensor(-0.02 * lr_ratio(param.shape, None)))
        beside: dict[str, Any] = {"array": array, "scalar": scale, "grad_scale": grad_scale}
        first, second = states[index]
        momentum_phase_(in_order(param), in_order(grad), first, scalars, **beside)
        array.copy_(in_order(orthogonalised(array.as_strided(param.shape, param.stride()))))
        update_phase_(in_order(param), in_order(grad), second, scalars, **beside)
        states[index] = first._replace(init_momentum=False), second._replace(init_master=False)


def empty_states(params: Sequence[torch.Tensor], kept: Kept) -> list[tuple[MuonState, MuonState]]:
    def stored(format: Format | None, numel: int) -> Stored | None:
        if format is None:
            return None
        scale = torch.empty(-(-numel // 128)) if format.scaled else None
        return Stored(format, torch.empty(numel, dtype=format.dtype), scale)

    return [
        (
            MuonState(stored(kept.momentum, param.numel()), None, init_momentum=True),
            MuonState(None, stored(kept.master, param.numel()), init_master=True),
        )
        for param in params
    ]


@combinations(("name", "chunks", "fraction"), itertools.product(KEPT, CHUNKS, FRACTIONS))
def test_any_chunks_give_the_bits_of_whole_parameters(name: str, chunks: str, fraction: float) -> None:
    kept, offload = KEPT[name], {"chunk_bytes": CHUNKS[chunks], "fraction": fraction}
    optimizer = make(tensors(0, kept.dtype), kept, offload=offload)
    params = tensors(0, kept.dtype)
    states = empty_states(params, kept)
    optimizer.grad_scale = torch.full((1,), 4.0)
    for step in range(4):
        grads: list[torch.Tensor | None] = [*tensors(1 + step, kept.dtype)]
        if step in (1, 2):
            grads[step] = None
        optimizer.found_inf = torch.full((1,), float(step == 2))
        set_grads(optimizer, grads)
        optimizer.step()
        if step != 2:
            whole_step(params, grads, states, grad_scale=4.0)
    for index, param in enumerate(params_of(optimizer)):
        assert_same_bits(param, params[index], f"parameter {index}")
        first, second = states[index]
        for key, stored in (("momentum_buffer", first.momentum), ("master_param", second.master_param)):
            if stored is not None:
                assert_same_bits(in_order(optimizer.state[param].peek(key)), stored.data, f"{key} of {index}")


def steps(device: Device, kept: Kept, **offload: Any) -> list[Snapshot]:
    """Steps with gradients missing and a learning rate that changes, then some of which the device
    skips one.
    """
    optimizer = make([device.copied(param) for param in tensors(0, kept.dtype)], kept, offload=offload)
    for number in range(6):
        grads = tensors(1 + number, kept.dtype)
        set_grads(optimizer, [None if index == number else device.copied(grad) for index, grad in enumerate(grads)])
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + number)
        optimizer.param_groups[0]["ns_steps"] = 5 - number % 2
        if number > 2:
            optimizer.grad_scale = device.signal(2.0)
            optimizer.found_inf = device.signal(float(number == 4))
        optimizer.step()
    return [device.snapshot(optimizer)]


CASES = list(itertools.product(KEPT.values(), list(CHUNKS.values())[:2], FRACTIONS))


@pytest.mark.parametrize(
    "number", [n if n % 5 == 0 else pytest.param(n, marks=pytest.mark.large) for n in range(len(CASES))]
)
def test_any_legal_order_gives_the_same_bits(number: int) -> None:
    kept, chunk_bytes, fraction = CASES[number]
    schedule = SCHEDULES[number % len(SCHEDULES)]
    run_on_simulated_device(partial(steps, kept=kept, chunk_bytes=chunk_bytes, fraction=fraction), schedule)


def skipped_first(device: Device) -> list[Snapshot]:
    """Steps of which the device alone knows that they are skipped, the first among them."""
    kept = KEPT["bf16 6"]
    optimizer = make([device.copied(param) for param in tensors(0, kept.dtype)], kept)
    for number in range(5):
        optimizer.grad_scale = device.signal(2.0**number)
        optimizer.found_inf = device.signal(float(number in (0, 3)))
        set_grads(optimizer, [device.copied(grad) for grad in tensors(1 + number, kept.dtype)])
        optimizer.step()
    return [device.snapshot(optimizer)]


def beside_adam(device: Device) -> list[Snapshot]:
    """Matrices and other parameters in two optimizers on one ring, which each of them makes
    grow.
    """
    matrices = make([device.copied(param) for param in tensors(0, torch.float32)], KEPT["fp32"])
    others = FusedOffloadAdam(device.params(), offload=OffloadConfig(chunk_bytes=3000, depth=3))
    for number in range(4):
        set_grads(matrices, [device.copied(grad) for grad in tensors(1 + number, torch.float32)])
        device.set_grads(others)
        for optimizer in (others, matrices)[:: (-1) ** number]:
            optimizer.step()
        if number == 1:
            matrices.release_gpu_memory()
    return [device.snapshot(matrices), device.snapshot(others)]


@pytest.mark.parametrize("scenario", [skipped_first, beside_adam])
def test_skips_and_a_shared_ring(scenario: Any) -> None:
    for schedule in SCHEDULES[:2]:
        run_on_simulated_device(scenario, schedule)


def interrupted(device: Device, calls: int) -> list[Snapshot]:
    """A step that ends after so many copies and kernels, and a load."""
    kept = KEPT["bf16 8"]
    optimizer = make([device.copied(param) for param in tensors(0, kept.dtype)], kept, offload={"chunk_bytes": 20_000})
    set_grads(optimizer, [device.copied(grad) for grad in tensors(1, kept.dtype)])
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    weights = [param.detach().clone(memory_format=torch.preserve_format) for param in params_of(optimizer)]
    if device.sim is not None:
        device.sim.calls_left = calls
        with pytest.raises(Interrupt):
            optimizer.step()
        with pytest.raises(RuntimeError, match="failed half-way"):
            optimizer.step()
    optimizer.load_state_dict(saved)
    with torch.no_grad():
        for param, weight in zip(params_of(optimizer), weights, strict=True):
            param.copy_(weight)
    optimizer.step()
    return [device.snapshot(optimizer)]


@pytest.mark.parametrize("calls", [1, 4, 9, 15, 22])
def test_an_interrupt_at_any_call_fails_the_step_until_a_load(calls: int) -> None:
    run_on_simulated_device(partial(interrupted, calls=calls), SCHEDULES[calls % len(SCHEDULES)])


class _OfAnotherPackage(OffloadOptimizer):
    """Muon around an orthogonalisation that ranks may share, as in Megatron."""

    def __init__(self, params: Sequence[torch.Tensor], **offload: Any) -> None:
        self.order: list[int] = []
        config = OffloadConfig(depth=2, **offload)
        super().__init__(params, {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.95}, offload=config)

    def _rule(self) -> MegatronMuonRule:
        return MegatronMuonRule(nesterov=True, orthogonalize=self._orthogonal)

    def _orthogonal(self, param: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        self.order.append([param is other for other in self._all_params()].index(True))
        return update / update.norm()


def shared_orthogonalisation(device: Device, **offload: Any) -> list[Snapshot]:
    params = [torch.nn.Parameter(device.copied(param)) for param in tensors(0, torch.float32)]
    optimizer = _OfAnotherPackage(params, **offload)
    for step in range(3):
        set_grads(optimizer, [device.copied(grad) for grad in tensors(1 + step, torch.float32)])
        optimizer.order.clear()
        optimizer.step()
        assert optimizer.order == list(range(len(params)))
    return [device.snapshot(optimizer)]


def test_ranks_that_share_an_operation_take_parameters_in_their_order() -> None:
    """Whatever the chunks, which may differ between machines; and the bits are the same."""
    found = [shared_orthogonalisation(Device(None), chunk_bytes=chunk_bytes)[0] for chunk_bytes in CHUNKS.values()]
    for other in found[1:]:
        assert_same_snapshot(other, found[0])
    for number, chunk_bytes in enumerate(CHUNKS.values()):
        run_on_simulated_device(partial(shared_orthogonalisation, chunk_bytes=chunk_bytes), SCHEDULES[number])


# -- memory ----------------------------------------------------------------------------------------


def work_bytes(shape: tuple[int, int], arrays: int) -> int:
    """Arrays of so many matrices, the scratch of one, and the alignment."""
    rows, numel = min(shape), shape[0] * shape[1]

    def aligned(nbytes: int) -> int:
        return -(-nbytes // 512) * 512

    return (arrays + 1) * aligned(2 * numel) + 2 * aligned(2 * rows * rows) + 512


@pytest.mark.parametrize(("name", "to_device", "to_host"), [("fp32", 4, 4), ("bf16 2", 2, 2), ("bf16 6", 6, 6)])
@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_memory_is_that_of_two_matrices(name: str, to_device: int, to_host: int, fraction: float) -> None:
    """Reserved as a whole, and reported; chunks move the state once each way."""
    shape, kept = (70, 300), KEPT[name]
    numel = -(-70 * 300 // 128) * 128

    def scenario(device: Device) -> list[Snapshot]:
        made = [device.copied(param) for param in tensors(0, kept.dtype, [shape] * 5)]
        optimizer = make(made, kept, offload={"chunk_bytes": 4096, "fraction": fraction})
        optimizer.reserve_gpu_memory()
        reserved = optimizer.memory_report()
        for step in range(2):
            set_grads(optimizer, [device.copied(grad) for grad in tensors(1 + step, kept.dtype, [shape] * 5)])
            optimizer.step()
        seen = device.snapshot(optimizer)
        if device.sim is not None:
            torch.cuda.synchronize()
            report, moved = optimizer.memory_report(), optimizer.last_step_report()
            assert report.work_bytes == reserved.work_bytes == work_bytes(shape, arrays=2)
            assert report.ring_bytes == reserved.ring_bytes == (2 * 4096 if fraction else 0)
            assert (moved.bytes_to_device, moved.bytes_to_host) == (
                fraction * 5 * numel * to_device,
                fraction * 5 * numel * to_host,
            )
            optimizer.release_gpu_memory()
            assert optimizer.memory_report().work_bytes == 0
        return [seen]

    run_on_simulated_device(scenario, SCHEDULES[0])


def test_reserved_memory_is_that_of_a_step() -> None:
    """Several groups, dtypes and shapes, some with state already; small matrices share chunks."""

    def scenario(device: Device) -> list[Snapshot]:
        first = [torch.nn.Parameter(device.copied(param)) for param in tensors(0, torch.float32)]
        second = [torch.nn.Parameter(device.copied(param)) for param in tensors(3, torch.bfloat16, SHAPES[::-1])]
        config = OffloadConfig(chunk_bytes=30_000, depth=2, fraction=0.7)
        optimizer = FusedOffloadMuon([{"params": first}, {"params": second, "lr": 0.1}], offload=config)
        optimizer.initialize_state(second[3])
        optimizer.reserve_gpu_memory()
        reserved = optimizer.memory_report()
        for index, param in enumerate(params_of(optimizer)):
            grad = torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device="cpu")
            param.grad = device.copied(grad.fill_(0.1 * index))
        optimizer.step()
        assert optimizer.memory_report().work_bytes == reserved.work_bytes
        assert optimizer.memory_report().ring_bytes == reserved.ring_bytes
        assert device.sim is None or reserved.work_bytes > work_bytes((300, 70), arrays=1)
        return [device.snapshot(optimizer)]

    run_on_simulated_device(scenario, SCHEDULES[2])


@pytest.mark.parametrize("name", ["bf16 4", "bf16 6", "bf16 8"])
def test_work_memory_does_not_grow_with_the_number_of_layers(name: str) -> None:
    """Grouped-query attention, whose small matrices share chunks that its large ones fill in part."""
    width, layers, kept = 64, 8, KEPT[name]
    layer = [(width, width), (16, width), (16, width), (width, width), (224, width), (224, width), (width, 224)]

    def scenario(device: Device) -> list[Snapshot]:
        made = [device.copied(param) for param in tensors(0, kept.dtype, layer * layers)]
        optimizer = make(made, kept, offload={"chunk_bytes": 3 * width * width})
        optimizer.reserve_gpu_memory()
        assert device.sim is None or optimizer.memory_report().work_bytes == work_bytes((width, 224), arrays=2)
        return [device.snapshot(optimizer)]

    run_on_simulated_device(scenario, SCHEDULES[0])


@pytest.mark.parametrize("number", range(len(SCHEDULES)))
def test_memory_that_one_stream_took_is_used_by_another(number: int) -> None:
    """Without offload no copy stands between the stream that took the work memory and the step's."""

    def scenario(device: Device) -> list[Snapshot]:
        optimizer = make([device.copied(p) for p in tensors(0, torch.float32)], KEPT["fp32"], offload={"fraction": 0.0})
        set_grads(optimizer, [device.copied(grad) for grad in tensors(1, torch.float32)])
        for _ in range(2):  # later steps take no memory for addresses, which would wait for the device
            optimizer.step()
        if device.sim is None:
            optimizer.step()
            return [device.snapshot(optimizer)]
        first, second = torch.cuda.current_stream(), torch.cuda.Stream()
        second.wait_stream(first)
        optimizer.release_gpu_memory()
        optimizer.reserve_gpu_memory()
        with torch.cuda.stream(second):
            optimizer.step()
        first.wait_stream(second)
        return [device.snapshot(optimizer)]

    run_on_simulated_device(scenario, SCHEDULES[number])


class _TakesNoBytes(TorchDispatchMode):
    """Fails at an allocation of untyped memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten.empty.memory_format or (kwargs or {}).get("dtype") is not torch.uint8
        return func(*args, **(kwargs or {}))


def test_sets_of_gradients_share_work_memory_on_the_cpu() -> None:
    optimizer = make(tensors(0, torch.float32), KEPT["fp32"])
    grads = tensors(1, torch.float32)
    set_grads(optimizer, grads)
    for _ in range(2):  # state, then the plan that is kept
        optimizer.step()
    for missing in range(len(grads)):
        set_grads(optimizer, [None if index == missing else grad for index, grad in enumerate(grads)])
        with _TakesNoBytes():
            optimizer.step()
    optimizer.release_gpu_memory()
    with pytest.raises(AssertionError), _TakesNoBytes():
        optimizer.step()


def test_parts_of_an_operation_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until its settings or its memory change."""
    from fused_offload.rules import muon

    made = []
    original = newton_schulz_parts
    monkeypatch.setattr(muon, "newton_schulz_parts", lambda *args: made.append(args[0]) or original(*args))

    def scenario(device: Device) -> list[Snapshot]:
        optimizer = make([device.copied(param) for param in tensors(0, torch.float32)], KEPT["fp32"])
        counts = []
        for step, change in enumerate((None, None, "lr", "ns_steps", "release", None)):
            if change == "release":
                optimizer.release_gpu_memory()
            elif change is not None:
                optimizer.param_groups[0][change] = {"lr": 0.5, "ns_steps": 3}[change]
            set_grads(optimizer, [device.copied(grad) for grad in tensors(1 + step, torch.float32)])
            made.clear()
            optimizer.step()
            counts.append(len(made))
        if device.sim is not None:
            assert counts == [8, 8, 0, 8, 8, 0]  # a first step's plan is not kept
        return [device.snapshot(optimizer)]

    run_on_simulated_device(scenario, SCHEDULES[0])


# -- edges -----------------------------------------------------------------------------------------


def test_a_zero_gradient_decays_only(device: str) -> None:
    [param] = params_of(make([randn((30, 20), 0, device)], KEPT["fp32"]))
    optimizer = FusedOffloadMuon([param], lr=0.5, weight_decay=0.1)
    before = param.detach().clone()
    param.grad = torch.zeros_like(param)
    optimizer.step()
    assert_same_bits(param, before * float(torch.tensor(1 - 0.05)), "parameter")
    assert not optimizer.state[param]["momentum_buffer"].any()


def test_a_gradient_below_eps_is_not_blown_up(device: str) -> None:
    param = param_of(torch.zeros((30, 20), device=device))
    param.grad = torch.full_like(param, 1e-12)
    FusedOffloadMuon([param], lr=1.0).step()
    assert 0 < param.detach().abs().max() < 0.1


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_one_nan_is_seen_in_the_whole_matrix_and_in_one_momentum(bad: float, device: str) -> None:
    params = [param_of(randn((30, 20), seed, device)) for seed in range(2)]
    for param in params:
        param.grad = torch.ones_like(param)
    params[0].grad[3, 4] = bad
    optimizer = FusedOffloadMuon(params)
    optimizer.step()
    assert params[0].isnan().all()
    assert params[1].isfinite().all()
    momentum = optimizer.state[params[0]]["momentum_buffer"]
    assert (~momentum.isfinite()).nonzero().tolist() == [[3, 4]]


def test_matrices_without_gradients_stay(device: str) -> None:
    params = [param_of(randn((30, 20), seed, device)) for seed in range(3)]
    frozen = param_of(randn((5, 5), 9, device)).requires_grad_(False)
    optimizer = FusedOffloadMuon([{"params": params}, {"params": []}, {"params": [frozen]}])
    optimizer.step()
    assert optimizer.param_groups[0]["step"] == 1
    params[1].grad = torch.ones_like(params[1])
    optimizer.step()
    assert torch.equal(params[0].cpu(), randn((30, 20), 0))
    assert not torch.equal(params[1].cpu(), randn((30, 20), 1))
    assert optimizer.memory_report().param_numel == 3 * 600


def test_matrices_without_elements_and_with_gaps(device: str) -> None:
    wide = randn((30, 40), 0, device)
    whole, gaps = param_of(wide[:, ::2].contiguous()), torch.nn.Parameter(wide[:, ::2])
    grad = randn((30, 20), 1, device)
    for param in (whole, gaps):
        empty = torch.nn.Parameter(torch.empty((0, 5), device=device))
        param.grad, empty.grad = grad.clone(), torch.empty_like(empty)
        FusedOffloadMuon([empty, param], offload=OffloadConfig(chunk_bytes=600)).step()
    assert_same_bits(gaps, whole, "parameter")


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_a_gradient_scaler_skips_and_unscales(device: str, bad: float) -> None:
    def run(scale: float, bad_step: int | None) -> Snapshot:
        param = param_of(randn((30, 20), 1, device))
        optimizer = FusedOffloadMuon([param])
        scaler = torch.amp.GradScaler(device, init_scale=scale)
        for step in range(4):
            if step == 1 and bad_step is None:
                continue  # instead of the skipped step there is none
            param.grad = scaler.scale(randn((30, 20), 10 + step, device))
            if step == bad_step:
                param.grad[7, 7] = bad
            scaler.step(optimizer)
            scaler.update()
        return snapshot(optimizer)

    assert_same_snapshot(run(1024.0, 1), run(1.0, None))


def test_settings_of_groups_change_between_steps(device: str) -> None:
    """A tensor as learning rate, closures, a group that joins late with settings of its own."""
    ours, theirs = ([param_of(randn((30, 20), seed, device)) for seed in range(2)] for _ in range(2))
    built = []
    for params, cls in ((ours, FusedOffloadMuon), (theirs, torch.optim.Muon)):
        optimizer = cls(params[:1], lr=torch.tensor(0.25))
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for step in range(3):
            for index, param in enumerate(params):
                param.grad = randn((30, 20), 10 * step + index, device)
            assert optimizer.step(lambda: 7) == 7
            scheduler.step()
            if step == 1:
                optimizer.add_param_group({"params": params[1:], "lr": 0.3, "momentum": 0.2, "nesterov": False})
        built.append(optimizer)
    for index in range(2):
        assert_same_bits(ours[index], theirs[index], f"parameter {index}")
    assert "momentum_buffer: torch.float32" in repr(built[0])


@pytest.mark.gpu
def test_a_learning_rate_on_the_device() -> None:
    """Nothing waits for it; it is multiplied in float32."""
    params = [param_of(randn((30, 20), 0, "cuda")) for _ in range(2)]
    optimizers = [FusedOffloadMuon([params[0]], lr=torch.tensor(0.02, device="cuda")), FusedOffloadMuon([params[1]])]
    optimizers[1].param_groups[0]["lr"] = 0.02
    for step in range(3):
        for param, optimizer in zip(params, optimizers, strict=True):
            param.grad = randn((30, 20), 1 + step, "cuda")
            with helpers.no_host_sync("cuda") if step else torch.no_grad():
                optimizer.step()
    torch.testing.assert_close(params[0], params[1], rtol=1e-5, atol=1e-6)


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"lr": -1.0}, ValueError, "Invalid learning rate: -1.0"),
        ({"weight_decay": -0.1}, ValueError, "Invalid weight_decay value: -0.1"),
        ({"momentum": -0.1}, ValueError, "Invalid momentum value: -0.1"),
        ({"momentum": "much"}, TypeError, "Invalid momentum value"),
        ({"nesterov": 1}, TypeError, "Invalid nesterov"),
        ({"ns_coefficients": (1.0, 2.0)}, ValueError, "Invalid ns_coefficients: .* three numbers"),
        ({"ns_coefficients": (1.0, 2.0, None)}, TypeError, "Invalid ns_coefficients value at index 2"),
        ({"eps": -1.0}, ValueError, "Invalid eps value"),
        ({"ns_steps": 100}, ValueError, "Invalid ns_steps: 100, it should be a whole number from 0 to 99"),
        ({"ns_steps": 1.5}, ValueError, "Invalid ns_steps"),
        ({"adjust_lr_fn": "rms"}, ValueError, "Invalid adjust_lr_fn: 'rms', .*'match_rms_adamw'"),
        ({"momentum_dtype": torch.float16}, RuntimeError, "FusedOffloadMuon only supports fp32/bf16 momentum_dtype"),
        ({"momentum_dtype": "bf16"}, TypeError, "Invalid momentum_dtype"),
        ({"stochastic_rounding": True}, TypeError, "unexpected keyword argument 'stochastic_rounding': .*leave"),
        ({"betas": (0.9, 0.95)}, TypeError, "unexpected keyword argument 'betas': .*momentum="),
        ({"foreach": True}, TypeError, "unexpected keyword argument 'foreach': .*leave"),
        ({"nonsense": True}, TypeError, "unexpected keyword argument 'nonsense'"),
        ({"offload": OffloadConfig(window_bytes=1000)}, ValueError, "FusedOffloadMuon .* leave OffloadConfig"),
        ({"offload": OffloadConfig(transport="zero_copy")}, ValueError, 'FusedOffloadMuon .*transport="copy"'),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        FusedOffloadMuon([torch.nn.Parameter(torch.ones(3, 3))], **options)


@pytest.mark.parametrize("shape", [(), (3,), (3, 3, 3)], ids=str)
def test_only_matrices_are_taken(shape: tuple[int, ...]) -> None:
    other, matrix = torch.nn.Parameter(torch.ones(shape)), torch.nn.Parameter(torch.ones(3, 3))
    message = r"Muon only supports 2D parameters whereas we found a parameter with size: .* FusedOffloadAdam"
    with pytest.raises(ValueError, match=message):
        FusedOffloadMuon([matrix, other])
    optimizer = FusedOffloadMuon([matrix])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [other]})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("option", ["maximize", "foreach", "betas", "stochastic_rounding"])
def test_options_of_other_optimizers_in_a_group_are_refused(option: str) -> None:
    with pytest.raises(TypeError, match=f"FusedOffloadMuon got an unexpected keyword argument '{option}': "):
        FusedOffloadMuon([{"params": [torch.nn.Parameter(torch.ones(3, 3))], option: True}])


@pytest.fixture
def mesh() -> Iterator[Any]:
    """A mesh of this process alone."""
    from torch.distributed.device_mesh import init_device_mesh

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_shards_are_refused_and_replicas_are_matrices(mesh: Any) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    values, grad = randn((30, 20), 0), randn((30, 20), 1)
    shard = torch.nn.Parameter(distribute_tensor(values, mesh, [Shard(0)]))
    with pytest.raises(ValueError, match=r"whole matrices, but .*DTensor.*Shard\(dim=0\).*FusedOffloadAdam"):
        FusedOffloadMuon([shard])
    replica, plain = torch.nn.Parameter(distribute_tensor(values, mesh, [Replicate()])), param_of(values)
    replica.grad, plain.grad = distribute_tensor(grad, mesh, [Replicate()]), grad.clone()
    optimizers = [FusedOffloadMuon([param], offload=OffloadConfig(chunk_bytes=600)) for param in (replica, plain)]
    with pytest.raises(ValueError, match="whole matrices"):
        optimizers[0].add_param_group({"params": [shard]})
    for optimizer in optimizers:
        optimizer.step()
    assert_same_bits(replica.to_local(), plain, "parameter")  # type: ignore[attr-defined]
    momentum = optimizers[0].state[replica]["momentum_buffer"]
    assert_same_bits(momentum.to_local(), optimizers[1].state[plain]["momentum_buffer"], "momentum")  # type: ignore[attr-defined]


def test_stepping_in_backward_is_refused() -> None:
    model = torch.nn.Linear(3, 3, bias=False)
    with pytest.raises(RuntimeError, match="FusedOffloadMuon works on whole parameters"):
        FusedOffloadMuon(model.parameters()).step_in_backward(model)


def test_a_momentum_that_stands_still_is_warned_of() -> None:
    param = torch.nn.Parameter(torch.ones(3, 3))
    with pytest.warns(UserWarning, match=r"momentum_buffer in torch.bfloat16 .*momentum_dtype=torch.float32"):
        FusedOffloadMuon([param], momentum=0.999, momentum_dtype=torch.bfloat16)


def test_parameters_that_stop_being_matrices_are_refused() -> None:
    param = torch.nn.Parameter(torch.ones(3, 4))
    optimizer = FusedOffloadMuon([param])
    param.data = torch.ones(12)
    param.grad = torch.ones(12)
    with pytest.raises(RuntimeError, match="Muon only supports 2D parameters"):
        optimizer.step()


# -- checkpoints -----------------------------------------------------------------------------------


@kinds_of_state
def test_a_loaded_run_goes_on_with_the_same_bits(device: str, kept: Kept) -> None:
    one = make([p.to(device) for p in tensors(0, kept.dtype)], kept)
    for step in range(2):
        set_grads(one, [grad.to(device) for grad in tensors(1 + step, kept.dtype)])
        one.step()
    saved = copy.deepcopy(one.state_dict())
    assert saved["state"][0].keys() == {"momentum_buffer"} | ({"master_param"} if kept.master else set())
    other = make([p.detach().clone(memory_format=torch.preserve_format) for p in params_of(one)], kept)
    other.load_state_dict(saved)
    for optimizer in (one, other):
        set_grads(optimizer, [grad.to(device) for grad in tensors(9, kept.dtype)])
        optimizer.step()
    assert_same_snapshot(snapshot(other), snapshot(one))


@pytest.mark.parametrize("ours_first", [True, False], ids=["from ours", "from torch"])
def test_state_dicts_are_exchanged_with_torch(device: str, ours_first: bool) -> None:
    """Both ways, and the next step is the same."""
    settings: dict[str, Any] = {"lr": 0.03, "momentum": 0.9, "nesterov": False, "adjust_lr_fn": "match_rms_adamw"}

    def optimizer_of(params: list[torch.Tensor], *, ours: bool, settings: dict[str, Any]) -> Any:
        parameters = [torch.nn.Parameter(param) for param in params]
        groups = [{"params": parameters[:3]}, {"params": parameters[3:], "weight_decay": 0.3}]
        return FusedOffloadMuon(groups, **settings) if ours else torch.optim.Muon(groups, **settings)

    one = optimizer_of([p.to(device) for p in tensors(0, torch.float32)], ours=ours_first, settings=settings)
    for step in range(3):
        set_grads(one, [grad.to(device) for grad in tensors(1 + step, torch.float32)])
        one.step()
    saved = copy.deepcopy(one.torch_state_dict() if ours_first else one.state_dict())
    reference = optimizer_of([p.to(device) for p in tensors(0, torch.float32)], ours=False, settings=settings)
    assert saved["state"][0].keys() == {"momentum_buffer"}
    assert [group.keys() for group in saved["param_groups"]] == [
        group.keys() for group in reference.state_dict()["param_groups"]
    ]
    clones = [p.detach().clone(memory_format=torch.preserve_format) for p in params_of(one)]
    other = optimizer_of(clones, ours=not ours_first, settings={})
    other.load_state_dict(saved)
    for optimizer in (one, other):
        for step in range(2):
            set_grads(optimizer, [grad.to(device) for grad in tensors(20 + step, torch.float32)])
            optimizer.step()
    for index, (param, wanted) in enumerate(zip(params_of(other), params_of(one), strict=True)):
        assert_same_bits(param, wanted, f"parameter {index}")


def test_a_checkpoint_of_torch_seeds_the_masters() -> None:
    theirs = torch.optim.Muon(map(torch.nn.Parameter, tensors(0, torch.bfloat16)))
    set_grads(theirs, tensors(1, torch.bfloat16))
    theirs.step()
    ours = make([p.detach().clone() for p in params_of(theirs)], KEPT["bf16 8"])
    with pytest.warns(UserWarning, match=r"momentum_buffer \(torch.bfloat16\) loaded into float32"):
        ours.load_state_dict(theirs.state_dict())
    for param, wanted in zip(params_of(ours), params_of(theirs), strict=True):
        assert torch.equal(ours.state[param]["momentum_buffer"], theirs.state[wanted]["momentum_buffer"].float())
        assert torch.equal(ours.get_unscaled_state(param, "master_param"), wanted.detach().float())


@kinds_of_state
def test_distributed_checkpoints(device: str, kept: Kept, tmp_path: Path) -> None:
    def stepped(steps: int) -> Any:
        optimizer = make([p.to(device) for p in tensors(0, kept.dtype)], kept)
        for step in range(steps):
            set_grads(optimizer, [grad.to(device) for grad in tensors(1 + step, kept.dtype)])
            optimizer.step()
        return optimizer

    one, other = stepped(2), stepped(1)
    dcp.save({"optimizer": one.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    target = {"optimizer": other.state_dict()}
    dcp.load(target, checkpoint_id=tmp_path, no_dist=True)
    other.load_state_dict(target["optimizer"])
    expected = snapshot(one)
    assert_same_snapshot(snapshot(other)._replace(params=expected.params), expected)


def test_stored_formats_change_between_save_and_load() -> None:
    one = make(tensors(0, torch.bfloat16), KEPT["bf16 8"])
    set_grads(one, tensors(1, torch.bfloat16))
    one.step()
    other = make([p.detach().clone() for p in params_of(one)], KEPT["bf16 2"])
    saved = copy.deepcopy(one.state_dict())
    with pytest.raises(ValueError, match="has master weights in group 0"):
        other.load_state_dict(saved)
    for entry in saved["state"].values():
        del entry["master_param"]
    other.load_state_dict(saved)
    for mine, its in zip(params_of(other), params_of(one), strict=True):
        wanted = one.state[its]["momentum_buffer"].bfloat16()
        assert_same_bits(other.state[mine]["momentum_buffer"], wanted, "momentum")


def test_checkpoints_of_other_optimizers_are_refused() -> None:
    param = param_of(torch.ones(3, 3))
    param.grad = torch.ones(3, 3)
    adam = FusedOffloadAdam([param])
    adam.step()
    with pytest.raises(ValueError, match=r"unknown state \['exp_avg', 'exp_avg_sq'\]"):
        FusedOffloadMuon([param]).load_state_dict(adam.state_dict())
    sgd = torch.optim.SGD([param], lr=0.1, momentum=0.9)
    sgd.step()
    with pytest.raises(ValueError, match=r"of torch.optim.SGD \(it has dampening in group 0\): .*sum of gradients"):
        FusedOffloadMuon([param]).load_state_dict(sgd.state_dict())


def test_groups_without_muon_are_refused() -> None:
    """The convention of optimizers that combine Muon with Adam."""
    matrix, embedding = (torch.nn.Parameter(torch.ones(3, 3)) for _ in range(2))
    optimizer = FusedOffloadMuon([{"params": [matrix], "use_muon": True}])
    with pytest.raises(ValueError, match=r"use_muon=False, .* FusedOffloadAdam"):
        optimizer.add_param_group({"params": [embedding], "use_muon": False})
    saved = optimizer.state_dict()
    saved["param_groups"][0]["use_muon"] = False
    with pytest.raises(ValueError, match=r"use_muon=False in group 0.* FusedOffloadAdam"):
        optimizer.load_state_dict(saved)
    assert [group["use_muon"] for group in optimizer.param_groups] == [True]


def test_advice_on_prefetching_is_not_refused_later() -> None:
    optimizer = FusedOffloadMuon([torch.nn.Parameter(torch.ones(3, 3))])
    for call in (optimizer.prefetch, lambda: optimizer.attach(torch.nn.Linear(3, 3))):
        with pytest.warns(UserWarning, match=r"moves its state within the step only\. Leave the call out"):
            call()


def test_state_decodes() -> None:
    """What callers read and write by name."""
    optimizer = make([randn((10, 10), 0)], KEPT["bf16 2"]._replace(dtype=torch.float32))
    [param] = params_of(optimizer)
    optimizer.set_scaled_state(param, "momentum_buffer", torch.full((10, 10), 0.1))
    stored = optimizer.state[param].storage.stored("momentum_buffer")
    assert torch.equal(decode(stored), torch.full((100,), 0.1).bfloat16().float())
    assert torch.equal(optimizer.get_unscaled_state(param, "momentum_buffer").flatten(), decode(stored))
