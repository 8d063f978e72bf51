"""The Triton kernel against the reference: interpreted on CPU, compiled where there is a GPU; bit
for bit in both.

Every comparison is of whole buffers, guard zones and padding included, so a write outside a piece
fails the test too.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from interpreted_fma import fma_that_rounds_once
from pairs import covering

from fused_offload.kernels.adam import launch as adam
from fused_offload.kernels.adam.reference import AdamScalars, AdamState, adam_scalars, adam_step_
from fused_offload.kernels.formats import (
    BF16,
    BF16_STOCHASTIC,
    FP16,
    FP16_NONZERO,
    FP32,
    LOG8,
    REMAINDER,
    ROOT8,
    SCALE_GROUP,
    Format,
    Stored,
    decode,
    encode_,
    rounding_counter,
    split_remainder_,
)
from fused_offload.kernels.launch import TABLE_COLUMNS, LaunchKind, ScalerSignals, programs_of

GUARD = 64  # elements of random bits on both sides of every parameter and gradient
SIZES = (1, 3, 127, 128, 129, 1023, 1024, 1025, 3 * 1024 + 17)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EXP_AVG_FORMATS = (FP32, BF16, BF16_STOCHASTIC, FP16, ROOT8)
EXP_AVG_SQ_FORMATS = (FP32, BF16, BF16_STOCHASTIC, FP16_NONZERO, LOG8)


class Setup(NamedTuple):
    """What the kernel is compiled for."""

    param_dtype: torch.dtype = torch.float32
    grad_dtype: torch.dtype = torch.float32
    exp_avg: Format = FP32
    exp_avg_sq: Format = FP32
    master: Format | None = None
    adam_w_mode: bool = True

    def __str__(self) -> str:
        names = [str(self.param_dtype)[6:], str(self.grad_dtype)[6:], self.exp_avg.name, self.exp_avg_sq.name]
        return "-".join([*names, self.master.name if self.master else "none", "adamw" if self.adam_w_mode else "l2"])


def covering_setups() -> list[Setup]:
    """Setups in which every pair of two choices occurs."""
    choices = (DTYPES, DTYPES, EXP_AVG_FORMATS, EXP_AVG_SQ_FORMATS, (None, FP32, FP16, REMAINDER))
    return covering(
        [
            Setup(*choice)
            for choice in itertools.product(*choices, (True, False))
            if choice[4] is not REMAINDER or choice[0] == torch.bfloat16
        ]
    )


COVERING = covering_setups()
SCALED = Setup(torch.bfloat16, torch.float32, FP16, FP16_NONZERO, FP16)
SMALLEST = Setup(torch.bfloat16, torch.bfloat16, BF16, BF16, REMAINDER, adam_w_mode=False)
# A float32 parameter's master is written and never read.
FP32_WITH_MASTER = Setup(torch.float32, torch.bfloat16, FP16, FP16_NONZERO, FP16)
EIGHT_BIT = Setup(torch.bfloat16, torch.bfloat16, ROOT8, LOG8, REMAINDER)
STOCHASTIC = Setup(torch.bfloat16, torch.float32, BF16_STOCHASTIC, BF16_STOCHASTIC, REMAINDER)
EIGHT_BIT_WITH_MASTER = Setup(torch.float32, torch.float32, ROOT8, LOG8, FP32)
TYPICAL = [Setup(), SCALED, SMALLEST, FP32_WITH_MASTER, EIGHT_BIT, STOCHASTIC, EIGHT_BIT_WITH_MASTER]

# The interpreter computes with numpy, which remarks on inf / inf.
IGNORE_INVALID = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")


@pytest.fixture(scope="module")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="module", autouse=True)
def correctly_rounded_fma() -> Iterator[None]:
    with fma_that_rounds_once():
        yield


def scalars_of(setup: Setup, step: int, lr: float | torch.Tensor = 0.01) -> AdamScalars:
    return adam_scalars(
        lr=lr,
        betas=(0.9, 0.99),
        eps=1e-8,
        weight_decay=0.1,
        step=step,
        bias_corrected=True,
        adam_w_mode=setup.adam_w_mode,
        rounding_seed=1234,
    )


def align(numel: int) -> int:
    return -(-numel // SCALE_GROUP) * SCALE_GROUP


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


class Piece(NamedTuple):
    """Part of one segment; ``offset`` is a multiple of 128."""

    segment: int
    offset: int
    numel: int


class World:
    """Parameters, gradients and state of some segments, in memory that is full of random bits
    everywhere else.
    """

    def __init__(self, setup: Setup, numels: Sequence[int], *, shift: int = 0) -> None:
        """``shift`` moves parameters and gradients by elements, away from aligned addresses."""
        self.setup = setup
        self.numels = list(numels)
        self.shift = GUARD + shift
        self.skipped = 0  # elements of each parameter before its piece here
        self.random = torch.Generator().manual_seed(sum(numels))
        self.params = [self._random_bits(self.shift + numel + GUARD, setup.param_dtype) for numel in numels]
        self.grads = [self._random_bits(self.shift + numel + GUARD, setup.grad_dtype) for numel in numels]
        for index, numel in enumerate(numels):
            self.param(index).copy_(torch.randn(numel, generator=self.random))
        # A block of nobody before and after.
        self.starts = [SCALE_GROUP + start for start in itertools.accumulate(map(align, numels), initial=0)]
        total = self.starts.pop() + SCALE_GROUP
        self.state = AdamState(
            self._stored(setup.exp_avg, total),
            self._stored(setup.exp_avg_sq, total),
            None if setup.master is None else self._stored(setup.master, total),
            init_moments=True,
            init_master=True,
        )

    def _random_bits(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        nbytes = numel * dtype.itemsize
        return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=self.random).view(dtype)

    def _stored(self, format: Format, numel: int) -> Stored:
        scale = self._random_bits(numel // SCALE_GROUP, torch.float32) if format.scaled else None
        return Stored(format, self._random_bits(numel, format.dtype), scale)

    def clone(self, device: torch.device) -> World:
        def moved(stored: Stored | None) -> Any:
            if stored is None:
                return None
            scale = None if stored.scale is None else stored.scale.to(device, copy=True)
            return Stored(stored.format, stored.data.to(device, copy=True), scale)

        other = object.__new__(World)
        other.__dict__ |= self.__dict__
        other.params = [param.to(device, copy=True) for param in self.params]
        other.grads = [grad.to(device, copy=True) for grad in self.grads]
        other.state = self.state._replace(
            exp_avg=moved(self.state.exp_avg),
            exp_avg_sq=moved(self.state.exp_avg_sq),
            master_param=moved(self.state.master_param),
        )
        return other

    def param(self, index: int) -> torch.Tensor:
        return self.params[index][self.shift : self.shift + self.numels[index]]

    def grad(self, index: int) -> torch.Tensor:
        return self.grads[index][self.shift : self.shift + self.numels[index]]

    def new_grads(self, seed: int) -> None:
        """Gradients over nine decades, with exact zeros and one whose square is subnormal."""
        random = torch.Generator().manual_seed(seed)
        for index, numel in enumerate(self.numels):
            values = torch.randn(numel, generator=random) * 10 ** torch.empty(numel).uniform_(-7, 2, generator=random)
            values[5::13] = 0
            values[7::17] = 1e-20
            self.grad(index).copy_(values)

    def started(self) -> None:
        self.state = self.state._replace(init_moments=False, init_master=False)

    def pieces(self) -> list[Piece]:
        return [Piece(index, 0, numel) for index, numel in enumerate(self.numels)]

    def buffers(self) -> dict[str, torch.Tensor]:
        """Bits of all memory, on CPU."""
        found = {f"param {index}": param for index, param in enumerate(self.params)}
        found |= {f"grad {index}": grad for index, grad in enumerate(self.grads)}
        for key, stored in zip(AdamState._fields, self.state[:3], strict=False):
            if isinstance(stored, Stored):
                found[key] = stored.data
                if stored.scale is not None:
                    found[f"{key} scale"] = stored.scale
        return {name: bits(tensor).cpu().clone() for name, tensor in found.items()}

    def reference_step(self, scalars: AdamScalars, pieces: Iterable[Piece], grad_scale: float | None = None) -> None:
        for segment, offset, numel in pieces:
            adam_step_(
                self.param(segment)[offset : offset + numel],
                self.grad(segment)[offset : offset + numel],
                self.state.narrow(self.starts[segment] + offset, numel),
                scalars,
                grad_scale=grad_scale,
                counter=rounding_counter(segment, self.skipped + offset),
            )

    def kernel_step(
        self,
        scalars: AdamScalars,
        pieces: Sequence[Piece],
        amp: ScalerSignals | None = None,
        *,
        aligned: bool = False,
        numerics: str = "ieee",
    ) -> None:
        rows, programs = [], 0
        for segment, offset, numel in pieces:
            param, grad = self.param(segment)[offset:], self.grad(segment)[offset:]
            counter = rounding_counter(segment, self.skipped + offset)
            rows.append([programs, param.data_ptr(), grad.data_ptr(), self.starts[segment] + offset, numel, counter])
            programs += programs_of(numel)
        # Rows beyond the launch's own are another chunk's; this one must not be found.
        table = torch.tensor([*rows, [0, 0, 0, 0, 2**40, 0]], device=self.params[0].device)
        assert table.shape[1] == TABLE_COLUMNS
        kind = LaunchKind(self.setup.param_dtype, self.setup.grad_dtype, numerics=numerics, aligned=aligned)
        adam.adam_step_(table, len(rows), programs, self.state, scalars, kind, amp or ScalerSignals())


def assert_same_memory(actual: World, expected: World) -> None:
    theirs = expected.buffers()
    for name, ours in actual.buffers().items():
        differing = int((ours != theirs[name]).sum())
        assert differing == 0, f"{differing} of {ours.numel()} elements of {name} differ"


def same_but_for_nans(actual: torch.Tensor, expected: torch.Tensor | None) -> bool:
    assert expected is not None
    actual, nans = actual.cpu(), expected.isnan()
    return torch.equal(actual.isnan(), nans) and torch.equal(bits(actual)[~nans], bits(expected)[~nans])


def both(setup: Setup, numels: Sequence[int], device: torch.device, *, steps: int = 0, shift: int = 0) -> list[World]:
    """The same memory twice, for the kernel and for the reference, after some steps of the
    reference.
    """
    expected = World(setup, numels, shift=shift)
    for step in range(1, steps + 1):
        expected.new_grads(step)
        expected.reference_step(scalars_of(setup, step), expected.pieces())
        expected.started()
    expected.new_grads(steps + 1)
    return [expected.clone(device), expected]


# -- the same bits ---------------------------------------------------------------------------------


@pytest.mark.parametrize("setup", COVERING, ids=str)
def test_every_combination_of_formats(setup: Setup, device: torch.device) -> None:
    actual, expected = both(setup, (1, 129, 1025), device)
    for step in (1, 2):
        for world in (actual, expected):
            world.new_grads(step)
        actual.kernel_step(scalars_of(setup, step), actual.pieces())
        expected.reference_step(scalars_of(setup, step), expected.pieces())
        assert_same_memory(actual, expected)
        for world in (actual, expected):
            world.started()


def test_covering_setups_cover_every_choice() -> None:
    chosen = [set(choices) for choices in zip(*COVERING, strict=True)]
    assert [len(choices) for choices in chosen] == [3, 3, 5, 5, 4, 2]
    assert {setup.param_dtype for setup in COVERING if setup.master is REMAINDER} == {torch.bfloat16}


@pytest.mark.parametrize("setup", TYPICAL, ids=str)
def test_awkward_sizes_in_one_launch(setup: Setup, device: torch.device) -> None:
    actual, expected = both(setup, SIZES, device, steps=2)
    before = actual.buffers()
    actual.kernel_step(scalars_of(setup, 3), actual.pieces(), aligned=True)
    expected.reference_step(scalars_of(setup, 3), expected.pieces())
    assert_same_memory(actual, expected)
    for index in range(len(SIZES)):
        assert not torch.equal(actual.buffers()[f"param {index}"], before[f"param {index}"])


@pytest.mark.parametrize("numerics", ["ieee", pytest.param("te", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("lr", [0.01, 0.0])
@pytest.mark.parametrize("adam_w_mode", [True, False])
@pytest.mark.parametrize(
    ("param_dtype", "master"),
    [
        (dtype, master)
        for dtype, master in itertools.product(DTYPES, (None, FP32, FP16, REMAINDER))
        if master is not REMAINDER or dtype == torch.bfloat16
    ],
    ids=lambda value: str(value.name if isinstance(value, Format) else value),
)
def test_zeros_without_a_gradient_keep_their_sign(
    param_dtype: torch.dtype, master: Format | None, adam_w_mode: bool, lr: float, numerics: str, device: torch.device
) -> None:
    setup = Setup(param_dtype, master=master, adam_w_mode=adam_w_mode)
    actual, expected = both(setup, (8,), device)
    values = torch.tensor([-0.0, 0.0] * 4, dtype=param_dtype)
    grads = torch.tensor([0.0, 0.0, -0.0, -0.0] * 2)
    for world in (actual, expected):
        world.param(0).copy_(values)
        world.grad(0).copy_(grads)
    for step in (1, 2):
        actual.kernel_step(scalars_of(setup, step, lr=lr), actual.pieces(), numerics=numerics)
        expected.reference_step(scalars_of(setup, step, lr=lr), expected.pieces())
        assert_same_memory(actual, expected)
        assert torch.equal(bits(actual.param(0).cpu()), bits(values))
        for world in (actual, expected):
            world.started()


@pytest.mark.parametrize("numel", SIZES)
def test_each_size_alone(numel: int, device: torch.device) -> None:
    actual, expected = both(SCALED, (numel,), device, steps=1)
    actual.kernel_step(scalars_of(SCALED, 2), actual.pieces())
    expected.reference_step(scalars_of(SCALED, 2), expected.pieces())
    assert_same_memory(actual, expected)


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 100])
def test_programs_find_their_row(rows: int, device: torch.device) -> None:
    # One to three programs a row, so that no arithmetic on the program number finds the row.
    numels = [1 + (37 * row) % 50 + 1024 * (row % 20 == 1) + 2048 * (row % 50 == 2) for row in range(rows)]
    actual, expected = both(Setup(), numels, device, steps=1)
    actual.kernel_step(scalars_of(Setup(), 2), actual.pieces())
    expected.reference_step(scalars_of(Setup(), 2), expected.pieces())
    assert_same_memory(actual, expected)


@pytest.mark.parametrize("setup", TYPICAL, ids=str)
def test_pieces_inside_a_segment(setup: Setup, device: torch.device) -> None:
    actual, expected = both(setup, (200, 3089), device, steps=1)
    first_launch = [Piece(1, 128, 1152), Piece(0, 128, 72)]
    second_launch = [Piece(1, 1280, 1809), Piece(1, 0, 128), Piece(0, 0, 128)]
    for pieces in (first_launch, second_launch):
        # After the first launch everything outside its pieces still has to be as it was.
        actual.kernel_step(scalars_of(setup, 2), pieces)
        expected.reference_step(scalars_of(setup, 2), pieces)
        assert_same_memory(actual, expected)
    whole = both(setup, (200, 3089), device, steps=1)[1]
    whole.reference_step(scalars_of(setup, 2), whole.pieces())
    assert_same_memory(actual, whole)


@pytest.mark.parametrize("shift", [0, 1, 3])
@pytest.mark.parametrize("setup", [Setup(), SMALLEST], ids=str)
def test_addresses_need_not_be_aligned(setup: Setup, shift: int, device: torch.device) -> None:
    actual, expected = both(setup, (129, 2048), device, steps=1, shift=shift)
    assert bool(actual.param(0).data_ptr() % 16) == bool(shift)
    actual.kernel_step(scalars_of(setup, 2), actual.pieces(), aligned=False)
    expected.reference_step(scalars_of(setup, 2), expected.pieces())
    assert_same_memory(actual, expected)


@pytest.mark.parametrize(("init_moments", "init_master"), [(True, False), (False, True)])
@pytest.mark.parametrize("setup", [SCALED, SMALLEST, FP32_WITH_MASTER, EIGHT_BIT], ids=str)
def test_moments_and_master_are_initialised_apart(
    setup: Setup, init_moments: bool, init_master: bool, device: torch.device
) -> None:
    actual, expected = both(setup, (129, 1024), device, steps=1)
    for world in (actual, expected):
        world.state = world.state._replace(init_moments=init_moments, init_master=init_master)
    actual.kernel_step(scalars_of(setup, 2), actual.pieces())
    expected.reference_step(scalars_of(setup, 2), expected.pieces())
    assert_same_memory(actual, expected)


@IGNORE_INVALID
@pytest.mark.parametrize("setup", [Setup(), SCALED, SMALLEST], ids=str)
def test_infinite_and_nan_gradients(setup: Setup, device: torch.device) -> None:
    # NaNs carry other payloads on other processors, so of them only the places are compared.
    hit = [3, 4, 100, 200]
    actual, expected = both(setup, (300,), device, steps=1)
    for world in (actual, expected):
        world.grad(0)[hit] = torch.tensor([float("nan"), float("inf"), float("nan"), float("-inf")]).to(world.grad(0))
    actual.kernel_step(scalars_of(setup, 2), actual.pieces())
    expected.reference_step(scalars_of(setup, 2), expected.pieces())
    assert actual.param(0).cpu().isnan().nonzero().flatten().tolist() == hit
    assert same_but_for_nans(actual.param(0), expected.param(0))
    for ours, theirs in zip(actual.state[:2], expected.state[:2], strict=True):
        assert isinstance(ours, Stored)
        assert isinstance(theirs, Stored)
        assert not ours.data[[SCALE_GROUP + index for index in hit]].isfinite().any()
        assert same_but_for_nans(ours.data, theirs.data)
        assert ours.scale is None or same_but_for_nans(ours.scale, theirs.scale)


@IGNORE_INVALID
@pytest.mark.parametrize("setup", TYPICAL, ids=str)
def test_the_largest_nan_stays_nan(setup: Setup, device: torch.device) -> None:
    # It is what a GPU makes; rounded like a number it would be -0.0.
    actual, expected = both(setup, (SCALE_GROUP,), device, steps=1)
    for world in (actual, expected):
        bits(world.grad(0)).fill_(-1 if world.setup.grad_dtype != torch.float32 else 0x7FFFFFFF)
    actual.kernel_step(scalars_of(setup, 2), actual.pieces())
    expected.reference_step(scalars_of(setup, 2), expected.pieces())
    on_cpu = actual.clone(torch.device("cpu"))
    for world in (on_cpu, expected):
        assert world.param(0).isnan().all()
        for stored in world.state.narrow(world.starts[0], SCALE_GROUP)[:2]:
            assert isinstance(stored, Stored)
            assert decode(stored).isnan().all()


@IGNORE_INVALID
@pytest.mark.parametrize("magnitude", [1.0, 1e-15, 1e-17])
def test_infinite_moments_have_no_say_in_their_neighbours_scales(magnitude: float, device: torch.device) -> None:
    actual, expected = both(SCALED, (2 * SCALE_GROUP,), device)
    values = (torch.rand(2 * SCALE_GROUP, generator=torch.Generator().manual_seed(0)) + 1e-3) * magnitude
    clean = expected.clone(torch.device("cpu"))
    clean.grad(0).copy_(values)
    values[[5, SCALE_GROUP + 127]] = float("inf")
    for world in (actual, expected):
        world.grad(0).copy_(values)
    actual.kernel_step(scalars_of(SCALED, 1), actual.pieces())
    for world in (expected, clean):
        world.reference_step(scalars_of(SCALED, 1), world.pieces())
    for key in ("exp_avg scale", "exp_avg_sq scale"):
        assert torch.equal(actual.buffers()[key], expected.buffers()[key])
        assert torch.equal(actual.buffers()[key], clean.buffers()[key])


@pytest.mark.parametrize("shift", [16, 17, 18, 19])
def test_log8_takes_a_coarser_grid_at_the_same_spread(shift: int, device: torch.device) -> None:
    # Blocks whose largest and smallest value are as far apart as a grid just holds, a step less and
    # a step more.
    blocks = 24
    actual, expected = both(EIGHT_BIT_WITH_MASTER, (blocks * SCALE_GROUP,), device)
    wanted = torch.full((blocks, SCALE_GROUP), ((0x3F800000 >> shift) << shift) + (101 << shift))
    places = torch.arange(blocks)
    wanted[:, 0] = (((0x3F800000 >> shift) + places % 4) << shift) + (places % 5 + 1) * (1 << shift) // 6
    wanted[:, 1] = wanted[:, 0] + ((251 + places % 3) << shift) + (1 << shift) // 3
    scalars = scalars_of(EIGHT_BIT_WITH_MASTER, 1)
    second = wanted.to(torch.int32).view(torch.float32).double()
    for world in (actual, expected):
        world.grad(0).copy_((second / scalars.one_minus_beta2).sqrt().flatten())
    actual.kernel_step(scalars, actual.pieces())
    expected.reference_step(scalars, expected.pieces())
    assert_same_memory(actual, expected)
    scale = expected.state.exp_avg_sq.narrow(expected.starts[0], blocks * SCALE_GROUP).scale
    assert scale is not None
    assert set((bits(scale) & 31).tolist()) == {shift, shift + 1}


def compiled(tmp_path: Path, formats: tuple[str, ...], *targets: str) -> list[str]:
    """Targets of the compiled kernels."""
    pytest.importorskip("triton.backends.nvidia")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    script = str(Path(__file__).parent / "compile_kernel.py")
    command = [sys.executable, script, "adam", *formats, "--target", *targets]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    return re.findall(r"(\w+): \d+ lines of PTX", run.stdout)


def test_the_compiler_takes_what_the_interpreter_takes(tmp_path: Path) -> None:
    assert compiled(tmp_path, ("root8", "log8", "remainder"), "120") == ["sm_120", "sm_120"]


@pytest.mark.large
@pytest.mark.parametrize(
    "formats",
    [("fp32", "fp32", "fp32"), ("root8", "log8", "remainder"), ("bf16", "bf16", "remainder"), ("fp16", "fp16", "fp16")],
    ids="-".join,
)
def test_every_generation_of_gpus_is_compiled_for(formats: tuple[str, ...], tmp_path: Path) -> None:
    """Ampere, Hopper, and both kinds of Blackwell."""
    targets = ("80", "90", "100", "120")
    assert compiled(tmp_path, formats, *targets) == [f"sm_{target}" for target in targets for _ in range(2)]


@pytest.mark.parametrize("magnitude", [2.0**-149, 2.0**-130, 2.0**-61, 2.0**100])
def test_8_bit_moments_of_any_magnitude(magnitude: float, device: torch.device) -> None:
    actual, expected = both(EIGHT_BIT, (300,), device, steps=1)
    for world in (actual, expected):
        values = torch.randn(300, generator=torch.Generator().manual_seed(0)) * magnitude
        world.grad(0).copy_(values.clamp(-1e15, 1e15))
        for stored, moment in zip(world.state[:2], (values, values.abs()), strict=True):
            encode_(stored.narrow(world.starts[0], 300), moment.to(stored.data.device))
    actual.kernel_step(scalars_of(EIGHT_BIT, 2), actual.pieces())
    expected.reference_step(scalars_of(EIGHT_BIT, 2), expected.pieces())
    assert_same_memory(actual, expected)


# -- what the kernel reads on the device -----------------------------------------------------------


@pytest.mark.parametrize("lr_dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_lr_is_read_from_the_device(lr_dtype: torch.dtype, device: torch.device) -> None:
    actual, expected = both(Setup(), (129,), device, steps=1)
    lr = torch.tensor(0.3, dtype=lr_dtype)
    actual.kernel_step(scalars_of(Setup(), 2, lr=lr.to(device)), actual.pieces())
    expected.reference_step(scalars_of(Setup(), 2, lr=lr), expected.pieces())
    assert_same_memory(actual, expected)


@pytest.mark.parametrize("grad_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [3.0, 65536.0])
def test_gradients_are_divided_by_the_scale_on_the_device(
    grad_dtype: torch.dtype, scale: float, device: torch.device
) -> None:
    setup = Setup(grad_dtype=grad_dtype)
    actual, expected = both(setup, (129,), device, steps=1)
    amp = ScalerSignals(grad_scale=torch.tensor([scale], device=device))
    actual.kernel_step(scalars_of(setup, 2), actual.pieces(), amp)
    expected.reference_step(scalars_of(setup, 2), expected.pieces(), grad_scale=scale)
    assert_same_memory(actual, expected)


def signals(
    device: torch.device, *, found_inf: float, skips: int = 0, skips_before: int = 0, step: int = 2
) -> ScalerSignals:
    """Bias corrections for every number of skips that would still leave a step."""
    corrections = [
        [scalars.bias_correction1, scalars.bias_correction2]
        for scalars in (scalars_of(Setup(), step - skips_before - row) for row in range(step - skips_before))
    ]
    return ScalerSignals(
        found_inf=torch.tensor([found_inf], device=device),
        skips=torch.tensor([skips], device=device),
        skip_rows=torch.tensor(corrections, dtype=torch.float32, device=device),
        skips_before=skips_before,
    )


@pytest.mark.parametrize(("skips", "skips_before"), [(0, 0), (5, 0), (2, 2), (5, 2), (9, 8)])
def test_bias_corrections_follow_the_skips(skips: int, skips_before: int, device: torch.device) -> None:
    actual, expected = both(Setup(), (129, 1024), device, steps=1)
    stale = scalars_of(Setup(), 10)._replace(bias_correction1=float("nan"), bias_correction2=float("nan"))
    amp = signals(device, found_inf=0.0, skips=skips, skips_before=skips_before, step=10)
    actual.kernel_step(stale, actual.pieces(), amp)
    expected.reference_step(scalars_of(Setup(), 10 - skips), expected.pieces())
    assert_same_memory(actual, expected)


@IGNORE_INVALID
@pytest.mark.parametrize("setup", [*TYPICAL, Setup(torch.float16, torch.float16, BF16, FP32, FP32)], ids=str)
def test_a_skipped_step_changes_no_bit(setup: Setup, device: torch.device) -> None:
    actual, expected = both(setup, (129, 1025), device, steps=2)
    for world in (actual, expected):
        world.grad(0).fill_(float("inf"))
        world.grad(1).fill_(float("nan"))
    actual.kernel_step(scalars_of(setup, 3), actual.pieces(), signals(device, found_inf=1.0, step=3))
    assert_same_memory(actual, expected)


@pytest.mark.parametrize("found_inf", [1.0, 2.0, -1.0, float("inf"), float("nan")])
def test_any_sign_of_infinities_skips(found_inf: float, device: torch.device) -> None:
    # A scaler adds up what several devices found.
    actual, expected = both(Setup(), (129,), device, steps=1)
    actual.kernel_step(scalars_of(Setup(), 2), actual.pieces(), signals(device, found_inf=found_inf))
    assert_same_memory(actual, expected)


def test_a_skipped_step_keeps_scales_of_maxima_that_rounded_up(device: torch.device) -> None:
    # Here skipping rewrites what was read (the master has no other way to its slot), so encoding
    # has to be idempotent even where the largest value of a block was rounded up to the next power
    # of two.
    actual, expected = both(FP32_WITH_MASTER, (SCALE_GROUP,), device, steps=2)
    for world in (actual, expected):
        values = torch.arange(SCALE_GROUP, dtype=torch.float32) * 2.0**-38
        values[0] = 2.0 - 2.0**-20
        for stored in (world.state.exp_avg, world.state.exp_avg_sq):
            encoded = Stored(stored.format, torch.empty(SCALE_GROUP, dtype=stored.format.dtype), torch.empty(1))
            encode_(encoded, values)
            run = stored.narrow(world.starts[0], SCALE_GROUP)
            run.data.copy_(encoded.data)
            assert run.scale is not None
            run.scale.copy_(encoded.scale)
    actual.kernel_step(scalars_of(FP32_WITH_MASTER, 3), actual.pieces(), signals(device, found_inf=1.0, step=3))
    assert_same_memory(actual, expected)


def initialise_moments(world: World) -> None:
    for index, numel in enumerate(world.numels):
        state = world.state.narrow(world.starts[index], numel)
        encode_(state.exp_avg, torch.zeros(numel))
        encode_(state.exp_avg_sq, torch.zeros(numel))


def initialise_masters(world: World) -> None:
    for index, numel in enumerate(world.numels):
        master, param = world.state.narrow(world.starts[index], numel).master_param, world.param(index)
        if master is not None and master.format is REMAINDER:
            split_remainder_(param, master.data, param.float())
        elif master is not None:
            encode_(master, param.float())


def spoil_masters(world: World) -> None:
    for start, numel in zip(world.starts, world.numels, strict=True):
        master = world.state.narrow(start, numel).master_param
        assert master is not None
        master.data.fill_(77)
        if master.scale is not None:
            master.scale.fill_(77)


@IGNORE_INVALID
@pytest.mark.parametrize("setup", TYPICAL, ids=str)
def test_a_skipped_first_step_leaves_initial_state(setup: Setup, device: torch.device) -> None:
    # The memory held random bits; what is copied back after a skipped first step must be a state to
    # go on from.
    actual, expected = both(setup, (129, 1025), device)
    initialise_moments(expected)
    initialise_masters(expected)
    for world in (actual, expected):
        world.grad(0).fill_(float("inf"))
    params = {name: memory for name, memory in actual.buffers().items() if name.startswith("param")}
    actual.kernel_step(scalars_of(setup, 1), actual.pieces(), signals(device, found_inf=1.0, step=1))
    assert_same_memory(actual, expected)
    after = actual.buffers()
    assert all(torch.equal(after[name], memory) for name, memory in params.items())


@IGNORE_INVALID
@pytest.mark.parametrize("setup", [SCALED, SMALLEST], ids=str)
def test_a_skipped_step_initialises_a_master_beside_existing_moments(setup: Setup, device: torch.device) -> None:
    actual, expected = both(setup, (129, 1025), device, steps=1)
    initialise_masters(expected)
    spoil_masters(actual)
    actual.state = actual.state._replace(init_master=True)
    actual.grad(0).fill_(float("inf"))
    expected.grad(0).fill_(float("inf"))
    actual.kernel_step(scalars_of(setup, 2), actual.pieces(), signals(device, found_inf=1.0))
    assert_same_memory(actual, expected)


@IGNORE_INVALID
@pytest.mark.parametrize("setup", [SCALED, SMALLEST, EIGHT_BIT], ids=str)
def test_a_skipped_step_initialises_moments_beside_an_existing_master(setup: Setup, device: torch.device) -> None:
    actual, expected = both(setup, (129, 1025), device, steps=1)
    initialise_moments(expected)
    actual.state = actual.state._replace(init_moments=True)
    actual.kernel_step(scalars_of(setup, 2), actual.pieces(), signals(device, found_inf=1.0))
    assert_same_memory(actual, expected)


@pytest.mark.parametrize("master", [FP32, FP16], ids=lambda format: format.name)
def test_a_skipped_step_writes_the_master_of_a_float32_parameter(master: Format, device: torch.device) -> None:
    # This master is never read, so it is not copied to the slot, and what the slot holds must not
    # be copied back.
    setup = Setup(master=master)
    actual, expected = both(setup, (129, 1025), device, steps=1)
    spoil_masters(actual)
    actual.kernel_step(scalars_of(setup, 2), actual.pieces(), signals(device, found_inf=1.0))
    assert_same_memory(actual, expected)


# -- masters of quantised parameters ---------------------------------------------------------------

QUANTISED = [
    Setup(torch.float32, torch.bfloat16, FP32, FP32, FP32._replace(of_quantised=True)),
    Setup(torch.float32, torch.float32, FP16, FP16_NONZERO, FP16._replace(of_quantised=True)),
    Setup(torch.float32, torch.bfloat16, ROOT8, LOG8, FP32._replace(of_quantised=True), adam_w_mode=False),
]


@pytest.mark.parametrize("setup", QUANTISED, ids=str)
@pytest.mark.parametrize("init_moments", [False, True])
@pytest.mark.parametrize("shift", [0, 1])
def test_values_of_quantised_parameters_are_written_and_not_read(
    setup: Setup, init_moments: bool, shift: int, device: torch.device
) -> None:
    expected = World(setup, (1, 129, 1025, 3000), shift=shift)
    for index, numel in enumerate(expected.numels):
        for stored in expected.state[:3]:
            assert isinstance(stored, Stored)
            encode_(stored.narrow(expected.starts[index], numel), torch.rand(numel, generator=expected.random))
        expected.param(index).fill_(torch.nan)
    expected.new_grads(1)
    expected.state = expected.state._replace(init_moments=init_moments, init_master=False)
    actual = expected.clone(device)
    actual.kernel_step(scalars_of(setup, 2), actual.pieces(), aligned=not shift)
    expected.reference_step(scalars_of(setup, 2), expected.pieces())
    assert_same_memory(actual, expected)
    assert setup.master is not None
    for index, numel in enumerate(expected.numels):
        assert expected.state.master_param is not None
        master = decode(expected.state.master_param.narrow(expected.starts[index], numel))
        error = (expected.param(index) - master).abs()
        assert (error <= (0.0 if setup.master.name == "fp32" else 2**-11) * master.abs().max()).all()


# -- stochastic rounding ---------------------------------------------------------------------------


def test_random_numbers_of_parameters_beyond_2_to_the_32_elements(device: torch.device) -> None:
    worlds = both(STOCHASTIC, (3 * 1024 + 1,), device, steps=1)
    outcomes = []
    # The lower half of the counter overflows within a block.
    for skipped in (0, 2**32 - 1024 - 128, 2**32):
        actual, expected = (world.clone(torch.device(world.params[0].device)) for world in worlds)
        actual.skipped = expected.skipped = skipped
        actual.kernel_step(scalars_of(STOCHASTIC, 2), actual.pieces())
        expected.reference_step(scalars_of(STOCHASTIC, 2), expected.pieces())
        assert_same_memory(actual, expected)
        outcomes.append(actual.buffers()["exp_avg"])
    assert not torch.equal(outcomes[0], outcomes[2])


# -- fast math -------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("setup", COVERING, ids=str)
def test_te_numerics_stay_within_fast_math_of_ieee(setup: Setup, device: torch.device) -> None:
    # Moments know no division; they only lose subnormals. A division is within 2 ulp, a square root
    # within 1, so an update, at most 1 plus the decay in a first step, is within 2^-20. Then its
    # parameter may round to a neighbour.
    actual, expected = both(setup, (1, 129, 1025), device)
    scalars = scalars_of(setup, 1)
    actual.kernel_step(scalars, actual.pieces(), numerics="te")
    expected.reference_step(scalars, expected.pieces())
    ours, theirs = actual.buffers(), expected.buffers()
    dtype = torch.finfo(setup.param_dtype)
    for index in range(3):
        assert torch.equal(ours[f"grad {index}"], theirs[f"grad {index}"])
        param, reference = actual.param(index).cpu().double(), expected.param(index).double()
        ulp = dtype.eps * reference.abs().clamp(min=dtype.smallest_normal)
        assert ((param - reference).abs() <= 0.01 * 1.5 * 2.0**-20 + ulp).all()
    assert torch.equal(ours["exp_avg"], theirs["exp_avg"])
    on_cpu = actual.clone(torch.device("cpu"))
    for start, numel in zip(expected.starts, expected.numels, strict=True):
        # The smallest value of a scaled format is what a lost subnormal may take from one that has
        # to stay positive.
        values, wanted = (decode(world.state.exp_avg_sq.narrow(start, numel)) for world in (on_cpu, expected))
        smallest = {"log8": 2.0**-31}.get(setup.exp_avg_sq.name, 2.0**-38)
        assert ((values - wanted).abs() <= 2.0**-126 + smallest * wanted.max()).all()


# -- size ------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_state_beyond_2_to_the_31_elements(device: torch.device) -> None:
    # Where offsets were 32-bit, this would write 4 GiB before the state, or fault.
    setup = Setup(exp_avg=BF16, exp_avg_sq=BF16)
    start, numel = 2**31 + SCALE_GROUP, 1025
    moments = [torch.zeros(start + 1152, dtype=torch.bfloat16, device=device) for _ in range(2)]
    state = AdamState(Stored(BF16, moments[0]), Stored(BF16, moments[1]), None)
    small = World(setup, (numel,))
    small.new_grads(1)
    far = small.clone(device)
    far.state, far.starts = state, [start]
    small.reference_step(scalars_of(setup, 1), small.pieces())
    far.kernel_step(scalars_of(setup, 1), far.pieces())
    assert torch.equal(far.param(0).cpu(), small.param(0))
    for moment, stored in zip(moments, small.state[:2], strict=True):
        assert isinstance(stored, Stored)
        assert torch.equal(moment[start : start + numel].cpu(), stored.narrow(SCALE_GROUP, numel).data)
        assert not moment[:start].any()
