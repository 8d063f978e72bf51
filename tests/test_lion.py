"""Lion: the paper <- the plain torch step <- the kernel <- the resident run <- every way to stream;
checkpoints.
"""

from __future__ import annotations

import copy
import gc
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import helpers
import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import DTYPES, MASTER_FORMATS, Snapshot, assert_same_bits, assert_same_snapshot, param_of, randn, snapshot

pytest.importorskip("triton")

from interpreted_fma import fma_that_rounds_once
from pairs import combinations
from simulated_device import SCHEDULES, SimulatedDevice, installed
from test_simulated_device import Device
from test_simulated_device import run as run_on_simulated_device

from fused_offload import FusedOffloadAdam, FusedOffloadLion, OffloadConfig
from fused_offload.kernels.formats import BF16, BF16_STOCHASTIC, FP16, FP32, ROOT8, Format, Stored, rounding_counter
from fused_offload.kernels.launch import LaunchKind, ScalerSignals, programs_of
from fused_offload.kernels.lion import launch
from fused_offload.kernels.lion.reference import LionState, lion_scalars, lion_step_
from fused_offload.rules.lion import LionRule
from fused_offload.stream.launches import Launches

device = helpers.device

LR, BETAS, DECAY = 1e-2, (0.9, 0.99), 0.1
EXP_AVG: dict[str, tuple[Format, dict[str, Any]]] = {
    "fp32": (FP32, {}),
    "bf16": (BF16, {"exp_avg_dtype": torch.bfloat16}),
    "bf16_stochastic": (BF16_STOCHASTIC, {"exp_avg_dtype": torch.bfloat16, "stochastic_rounding": True}),
    "fp16": (FP16, {"exp_avg_dtype": torch.float16}),
    "uint8": (ROOT8, {"exp_avg_dtype": torch.uint8}),
}
MASTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "fp32": {"master_weights": True},
    "fp16": {"master_weights": True, "master_weight_dtype": torch.float16},
    "remainder": {"master_weights": True, "store_param_remainders": True},
}
STORED = [
    (dtype, master)
    for dtype, master in itertools.product(DTYPES, MASTERS)
    if master != "remainder" or dtype == torch.bfloat16
]
"""Dtypes of parameters, and stored formats of their masters."""

# NumPy warns of inf * 0.
IGNORE_INVALID = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")


def options_of(exp_avg: str, master: str) -> dict[str, Any]:
    return {**EXP_AVG[exp_avg][1], **MASTERS[master]}


def name(value: object) -> str:
    return str(value).removeprefix("torch.")


# -- the paper -------------------------------------------------------------------------------------


def step64(
    param: torch.Tensor, grad: torch.Tensor, momentum: torch.Tensor, weight_decay: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Algorithm 2 in float64.

    Returns:
        Parameter; momentum; how far a float32 momentum may be from it; where float32 is sure to get
        the sign. In float32 ``1 - beta`` is off by up to 6e-6 relative.
    """
    beta1, beta2 = BETAS
    theta, g, m = param.double(), grad.double(), momentum.double()
    interpolated = beta1 * m + (1 - beta1) * g
    sure = interpolated.abs() > 1e-5 * ((beta1 * m).abs() + ((1 - beta1) * g).abs())
    theta = theta - LR * (torch.sign(interpolated) + weight_decay * theta)
    tolerance = 1e-5 * ((beta2 * m).abs() + ((1 - beta2) * g).abs())
    return theta, beta2 * m + (1 - beta2) * g, tolerance, sure | (interpolated == 0)


@pytest.mark.parametrize("weight_decay", [0.0, DECAY])
def test_steps_are_those_of_the_paper(device: str, weight_decay: float) -> None:
    param = param_of(randn(5000, 1, device))
    optimizer = FusedOffloadLion([param], lr=LR, betas=BETAS, weight_decay=weight_decay)
    momentum = torch.zeros(5000)
    for step in range(6):
        grad = randn(5000, 10 + step) * 10.0 ** (step % 4 - 2)
        grad[::7] = 0.0
        theta, average, tolerance, sure = step64(param.detach().cpu(), grad, momentum, weight_decay)
        param.grad = grad.to(device)
        optimizer.step()
        momentum = optimizer.state[param]["exp_avg"].clone()
        assert sure.float().mean() > 0.999
        torch.testing.assert_close(param.detach().cpu()[sure], theta.float()[sure], rtol=3e-7, atol=1e-8)
        assert ((momentum - average).abs() <= tolerance).all()


def test_signs_of_zero_infinity_and_nan(device: str) -> None:
    inf, nan = torch.inf, torch.nan
    param = param_of(torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, -0.0], device=device))
    param.grad = torch.tensor([0.0, -0.0, 1e-45, inf, -inf, nan, 0.0], device=device)
    FusedOffloadLion([param], lr=0.5).step()
    expected = torch.tensor([1.0, 1.0, 1.0, 0.5, 1.5, nan, -0.0])
    assert_same_bits(param.detach().cpu(), expected, "parameter")  # 1e-45 * 0.1 is zero in float32


# -- the kernel ------------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def correctly_rounded_fma() -> Iterator[None]:
    with fma_that_rounds_once():
        yield


@pytest.fixture(scope="module")
def kernel_device() -> torch.device:
    return torch.device(helpers.DEVICES[0])


class Setup(NamedTuple):
    """Formats and dtypes that the kernel is compiled for."""

    param: torch.dtype
    grad: torch.dtype
    exp_avg: str
    master: str


def covering_setups() -> list[Setup]:
    """Setups in which every pair of two choices occurs, greedily few."""
    setups = [
        Setup(param, grad, exp_avg, master)
        for (param, master), grad, exp_avg in itertools.product(STORED, DTYPES, EXP_AVG)
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
START = 128  # a scale group of nobody before the state


class Memory:
    """Parameters, gradients and state of a few pieces, in memory that is full of random bits
    everywhere else.
    """

    def __init__(self, setup: Setup, *, shift: int = 0) -> None:
        self.setup = setup
        self.shift = shift
        random = torch.Generator().manual_seed(7)

        def bits(numel: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=random).view(dtype)

        def stored(format: Format | None) -> Any:
            if format is None:
                return None
            return Stored(
                format, bits(total, format.dtype), bits(total // 128, torch.float32) if format.scaled else None
            )

        self.starts = [START + start for start in itertools.accumulate((128, 256, 1152), initial=0)]
        total = self.starts.pop() + 128
        self.params = [bits(numel + 64, setup.param) for numel in NUMELS]
        self.grads = [bits(numel + 64, setup.grad) for numel in NUMELS]
        for index, numel in enumerate(NUMELS):
            self.part(self.params, index).copy_(torch.randn(numel, generator=random))
        self.state = LionState(stored(EXP_AVG[setup.exp_avg][0]), stored(MASTER_FORMATS[setup.master]), True, True)

    def part(self, tensors: list[torch.Tensor], index: int) -> torch.Tensor:
        first = 16 + self.shift
        return tensors[index][first : first + NUMELS[index]]

    def on(self, device: torch.device) -> Memory:
        other = copy.copy(self)
        other.params, other.grads, other.state = torch.utils._pytree.tree_map_only(
            torch.Tensor, lambda tensor: tensor.to(device, copy=True), (self.params, self.grads, self.state)
        )
        return other

    def new_grads(self, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        for index, numel in enumerate(NUMELS):
            values = torch.randn(numel, generator=random) * 10 ** torch.empty(numel).uniform_(-7, 2, generator=random)
            values[5::13] = 0
            self.part(self.grads, index).copy_(values)

    def bytes(self) -> list[torch.Tensor]:
        tensors = torch.utils._pytree.tree_leaves((self.params, self.grads, tuple(self.state[:2])))
        return [tensor.view(torch.uint8).cpu() for tensor in tensors if isinstance(tensor, torch.Tensor)]

    def reference_step(self, step: int, grad_scale: float | None = None) -> None:
        for index, (start, numel) in enumerate(zip(self.starts, NUMELS, strict=True)):
            part = self.part(self.params, index), self.part(self.grads, index), self.state.narrow(start, numel)
            lion_step_(*part, scalars_of(step), grad_scale=grad_scale, counter=rounding_counter(index, 0))

    def kernel_step(self, step: int, signals: Any = ScalerSignals(), *, lr: Any = LR, **kind: Any) -> None:  # noqa: B008
        rows, programs = [], 0
        for index, (start, numel) in enumerate(zip(self.starts, NUMELS, strict=True)):
            addresses = self.part(self.params, index).data_ptr(), self.part(self.grads, index).data_ptr()
            rows.append([programs, *addresses, start, numel, rounding_counter(index, 0)])
            programs += programs_of(numel)
        # The row behind the launch's own is another chunk's; this one must not be found.
        table = torch.tensor([*rows, [0, 0, 0, 0, 2**40, 0]], device=self.params[0].device)
        launch_kind = LaunchKind(self.setup.param, self.setup.grad, **kind)
        launch.lion_step_(table, len(rows), programs, self.state, scalars_of(step, lr), launch_kind, signals)


def scalars_of(step: int, lr: Any = LR) -> Any:
    return lion_scalars(lr=lr, betas=BETAS, weight_decay=DECAY, step=step, rounding_seed=1234)


def both(setup: Setup, device: torch.device, *, started: bool, shift: int = 0) -> tuple[Memory, Memory]:
    """The same memory twice, for the kernel and for the reference, before or after a first step."""
    expected = Memory(setup, shift=shift)
    expected.new_grads(1)
    if started:
        expected.reference_step(1)
        expected.state = expected.state._replace(init_exp_avg=False, init_master=False)
        expected.new_grads(2)
    return expected.on(device), expected


def assert_same_memory(actual: Memory, expected: Memory) -> None:
    for ours, theirs in zip(actual.bytes(), expected.bytes(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("setup", covering_setups(), ids=lambda setup: "-".join(map(name, setup)))
@pytest.mark.parametrize("started", [False, True], ids=["first", "later"])
def test_kernel_gives_the_bits_of_the_reference(setup: Setup, started: bool, kernel_device: torch.device) -> None:
    actual, expected = both(setup, kernel_device, started=started)
    actual.kernel_step(2)
    expected.reference_step(2)
    assert_same_memory(actual, expected)


@pytest.mark.parametrize("format", [FP32, FP16], ids=lambda format: format.name)
def test_values_of_quantised_parameters_are_written_and_not_read(format: Format, kernel_device: torch.device) -> None:
    _, expected = both(Setup(torch.float32, torch.bfloat16, "fp32", format.name), kernel_device, started=True)
    master = expected.state.master_param
    assert master is not None
    expected.state = expected.state._replace(master_param=master._replace(format=format._replace(of_quantised=True)))
    for index in range(len(NUMELS)):
        expected.part(expected.params, index).fill_(torch.nan)
    actual = expected.on(kernel_device)
    actual.kernel_step(2)
    expected.reference_step(2)
    assert_same_memory(actual, expected)
    assert not any(expected.part(expected.params, index).isnan().any() for index in range(len(NUMELS)))


TYPICAL = [
    Setup(torch.float32, torch.bfloat16, "fp32", "fp16"),
    Setup(torch.bfloat16, torch.float32, "bf16_stochastic", "remainder"),
    Setup(torch.float16, torch.float16, "uint8", "none"),
]
typical = pytest.mark.parametrize("setup", TYPICAL, ids=lambda setup: "-".join(map(name, setup)))


def signals_of(device: torch.device, *, skip: bool, skips: int = 0) -> ScalerSignals:
    one = torch.ones(1, device=device)
    counted = torch.full((1,), skips, dtype=torch.int64, device=device)
    return ScalerSignals(one * 8, one * skip, counted, torch.zeros(skips + 1, 1, device=device))


@typical
def test_signals_and_a_bounded_launch(setup: Setup, kernel_device: torch.device) -> None:
    """A gradient scale, skips before this step, a learning rate on the device, two programs, odd
    addresses.
    """
    actual, expected = both(setup, kernel_device, started=True, shift=1)
    signals = signals_of(kernel_device, skip=False, skips=3)
    actual.kernel_step(5, signals, lr=torch.tensor([LR], device=kernel_device), max_programs=2)
    expected.reference_step(2, grad_scale=8.0)
    assert_same_memory(actual, expected)


@typical
@pytest.mark.parametrize("started", [False, True], ids=["first", "later"])
@IGNORE_INVALID
def test_a_skipped_step_changes_no_value(setup: Setup, started: bool, kernel_device: torch.device) -> None:
    """State that no step wrote before gets its initial value, which later steps read."""
    actual, expected = both(setup, kernel_device, started=started)
    params = [actual.part(actual.params, index).clone() for index in range(len(NUMELS))]
    for memory in (actual, expected):
        memory.part(memory.grads, 2)[3] = torch.inf
    actual.kernel_step(2, signals_of(kernel_device, skip=True))
    for index, param in enumerate(params):
        assert torch.equal(actual.part(actual.params, index), param)
    for memory in (actual, expected):
        memory.new_grads(3)
    actual.state = actual.state._replace(init_exp_avg=False, init_master=False)
    actual.kernel_step(2)
    expected.reference_step(2)
    assert_same_memory(actual, expected)


def test_the_compiler_takes_what_the_interpreter_takes(tmp_path: Path) -> None:
    pytest.importorskip("triton.backends.nvidia")
    script = str(Path(__file__).parent / "compile_kernel.py")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, script, "lion", "root8", "remainder"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("lines of PTX") == 2


# -- every way to stream ---------------------------------------------------------------------------

SIZES = ((300,), (1,), (25, 11), (200,))
WAYS: dict[str, OffloadConfig] = {
    "resident": OffloadConfig(fraction=0.0),
    "copies": OffloadConfig(chunk_bytes=1000, depth=2),
    "some resident": OffloadConfig(chunk_bytes=1000, fraction=0.4),
    "zero_copy": OffloadConfig(transport="zero_copy"),
    "window": OffloadConfig(chunk_bytes=1000, window_bytes=2**40),
    "step_in_backward": OffloadConfig(chunk_bytes=1000),
}


def train(
    way: str, device: str, dtype: torch.dtype, *, sizes: Any = SIZES, steps: int = 4, **options: Any
) -> tuple[FusedOffloadLion, Snapshot]:
    """Trains by gradients of random weights; the last parameter has none in one step."""
    params = [param_of(randn(size, index, device, dtype)) for index, size in enumerate(sizes)]
    groups: list[dict[str, Any]] = [{"params": params[:2]}, {"params": params[2:], "lr": 3e-3, "weight_decay": 0.0}]
    optimizer = FusedOffloadLion(groups, lr=LR, weight_decay=DECAY, offload=WAYS[way], **options)
    if way == "step_in_backward":
        optimizer.step_in_backward(torch.nn.ParameterList(params))
    for step in range(steps):
        used = params[:-1] if step == 2 else params
        weights = [randn(p.shape, 100 * step + i, device, dtype) * 10.0 ** (step - 2) for i, p in enumerate(used)]
        torch.stack([(p * w).sum().float() for p, w in zip(used, weights, strict=True)]).sum().backward()
        if way == "window":
            optimizer.prefetch()
            assert step == 0 or optimizer.window_bytes()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer, snapshot(optimizer)


@pytest.fixture
def kernel_is_its_reference(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The GPU's pipeline on the CPU; kernels run as plain torch, which takes a fraction of the
    interpreter's time.
    """
    sim = SimulatedDevice()
    with installed(sim, monkeypatch):
        monkeypatch.setattr(Launches, "launch", lambda self, index, slot=0: sim.launch(self, index, slot))
        yield
        gc.collect()  # page-locked memory is given back the same way


@combinations(
    ("exp_avg", "dtype", "master"), [(exp_avg, *stored) for exp_avg in EXP_AVG for stored in STORED], ids=name
)
def test_every_way_gives_the_bits_of_the_cpu(
    exp_avg: str, dtype: torch.dtype, master: str, request: pytest.FixtureRequest
) -> None:
    options = options_of(exp_avg, master)
    expected = train("copies", "cpu", dtype, **options)[1]
    request.getfixturevalue("kernel_is_its_reference")
    for way in WAYS:
        assert_same_snapshot(train(way, "cpu", dtype, **options)[1], expected)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "master"), STORED, ids=name)
@pytest.mark.parametrize("exp_avg", EXP_AVG)
def test_every_way_gives_the_bits_of_the_cpu_on_a_gpu(exp_avg: str, dtype: torch.dtype, master: str) -> None:
    options: dict[str, Any] = {**options_of(exp_avg, master), "sizes": ((70_001,), (1,), (250, 111), (129,))}
    expected = train("copies", "cpu", dtype, **options)[1]
    for way in WAYS:
        optimizer, actual = train(way, "cuda", dtype, **options)
        assert_same_snapshot(actual, expected)
        optimizer.close()


def skipped(device: Device) -> list[Snapshot]:
    """Steps of which the device alone knows that they are skipped, the first among them."""
    options = {**options_of("uint8", "fp32"), "offload": OffloadConfig(chunk_bytes=2048, depth=2)}
    optimizer = FusedOffloadLion(device.params(), lr=LR, weight_decay=DECAY, **options)
    for number in range(6):
        optimizer.grad_scale = device.signal(2.0**number)  # type: ignore[attr-defined]
        optimizer.found_inf = device.signal(float(number in (0, 2, 3)))  # type: ignore[attr-defined]
        device.set_grads(optimizer)  # type: ignore[arg-type]
        optimizer.step()
    return [device.snapshot(optimizer)]  # type: ignore[arg-type]


def test_skips_that_only_the_device_knows() -> None:
    for schedule in SCHEDULES[:4]:
        run_on_simulated_device(skipped, schedule)  # type: ignore[arg-type]


# -- gradient scalers, groups, bad input -----------------------------------------------------------


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@pytest.mark.parametrize("exp_avg", ["fp32", "bf16_stochastic"])
def test_a_gradient_scaler_skips_and_unscales(device: str, exp_avg: str, bad: float) -> None:
    def run(scale: float, bad_step: int | None) -> Snapshot:
        param = param_of(randn(300, 1, device))
        optimizer = FusedOffloadLion([param], lr=LR, weight_decay=DECAY, **options_of(exp_avg, "none"))
        scaler = torch.amp.GradScaler(device, init_scale=scale)
        for step in range(4):
            if step == 1 and bad_step is None:
                continue  # instead of the skipped step there is none
            param.grad = scaler.scale(randn(300, 10 + step, device))
            if step == bad_step:
                param.grad[7] = bad
            scaler.step(optimizer)
            scaler.update()
        return snapshot(optimizer)  # type: ignore[arg-type]

    assert_same_snapshot(run(1024.0, 1), run(1.0, None))


def test_settings_of_groups_change_between_steps(device: str) -> None:
    """A tensor as learning rate, momentum weights of a group's own, a parameter that joins late."""
    first, late = param_of(randn(10, 1, device)), param_of(randn(3, 2, device))
    optimizer = FusedOffloadLion([first], lr=torch.tensor(LR))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for _ in range(2):
        first.grad = torch.ones_like(first)
        optimizer.step()
        scheduler.step()
    optimizer.add_param_group({"params": [late], "lr": 1.0, "betas": (0.0, 0.5)})
    late.grad = torch.full_like(late, -2.0)
    optimizer.step()
    torch.testing.assert_close(first.detach().cpu(), randn(10, 1) - LR * 1.5 - LR * 0.25)
    torch.testing.assert_close(late.detach().cpu(), randn(3, 2) + 1.0)
    assert torch.equal(optimizer.state[late]["exp_avg"], torch.full((3,), -1.0))
    assert optimizer.memory_report().host_bytes.keys() == {"exp_avg"}
    assert "exp_avg: torch.float32" in repr(optimizer)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"lr": -1.0}, ValueError, "Invalid learning rate: -1.0"),
        ({"betas": (0.9, 1.0)}, ValueError, "Invalid beta parameter at index 1"),
        ({"betas": 0.9}, TypeError, "Invalid betas: 0.9"),
        ({"weight_decay": "much"}, TypeError, "Invalid weight_decay value"),
        ({"exp_avg_dtype": torch.float64}, RuntimeError, "FusedOffloadLion only supports fp32/fp16/bf16/uint8"),
        ({"exp_avg_dtype": "bf16"}, TypeError, "Invalid exp_avg_dtype"),
        ({"rounding_seed": -1}, ValueError, "Invalid rounding_seed"),
        ({"stochastic_rounding": 1}, TypeError, "Invalid stochastic_rounding"),
        ({"master_weights": True, "master_weight_dtype": torch.bfloat16}, RuntimeError, "FusedOffloadLion only supp"),
        ({"eps": 1e-8}, TypeError, "unexpected keyword argument 'eps'"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        FusedOffloadLion([torch.nn.Parameter(torch.ones(3))], **options)


@pytest.mark.parametrize("option", ["maximize", "foreach", "eps", "amsgrad", "bias_correction"])
def test_options_of_other_optimizers_in_a_group_are_refused(option: str) -> None:
    with pytest.raises(TypeError, match=f"FusedOffloadLion got an unexpected keyword argument '{option}': .*leave"):
        FusedOffloadLion([{"params": [torch.nn.Parameter(torch.ones(3))], option: True}])


def test_a_momentum_that_stands_still_is_warned_of() -> None:
    param = torch.nn.Parameter(torch.ones(3))
    with pytest.warns(UserWarning, match="exp_avg in torch.bfloat16 is rounded to the nearest and stands still"):
        FusedOffloadLion([param], betas=(0.9, 0.999), exp_avg_dtype=torch.bfloat16)
    with pytest.warns(UserWarning, match=r"stochastic_rounding=True changes nothing.*\(exp_avg_dtype\)"):
        FusedOffloadLion([param], stochastic_rounding=True)


# -- checkpoints -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "master"), STORED, ids=name)
@pytest.mark.parametrize("exp_avg", EXP_AVG)
def test_a_loaded_run_goes_on_with_the_same_bits(device: str, exp_avg: str, dtype: torch.dtype, master: str) -> None:
    options = options_of(exp_avg, master)
    one, _ = train("copies", device, dtype, steps=2, **options)
    params = [param for group in one.param_groups for param in group["params"]]
    saved = copy.deepcopy(one.state_dict())
    twins = [param_of(param.detach()) for param in params]
    other = FusedOffloadLion([{"params": twins[:2]}, {"params": twins[2:]}], **options)
    other.load_state_dict(saved)
    for optimizer, its in ((one, params), (other, twins)):
        for index, param in enumerate(its):
            param.grad = randn(param.shape, 900 + index, device, dtype)
        optimizer.step()
    assert_same_snapshot(snapshot(other), snapshot(one))  # type: ignore[arg-type]


@pytest.mark.parametrize("exp_avg", EXP_AVG)
def test_stored_formats_change_between_save_and_load(device: str, exp_avg: str) -> None:
    one, _ = train("copies", device, torch.bfloat16, steps=2, **options_of("fp32", "remainder"))
    params = [param for group in one.param_groups for param in group["params"]]
    other = FusedOffloadLion(
        [{"params": params[:2]}, {"params": params[2:]}], master_weights=True, **EXP_AVG[exp_avg][1]
    )
    saved = copy.deepcopy(one.state_dict())
    # Remainders need the parameter beside them; masters of float32 parameters do not.
    for index, param in enumerate(params):
        saved["state"][index]["master_param"] = param.detach().float().cpu()
    other.load_state_dict(saved)
    tolerance = {"fp32": 0.0, "fp16": 2.0**-11, "uint8": 0.2}.get(exp_avg, 2.0**-8)
    for param in params:
        value, exact = other.get_unscaled_state(param, "exp_avg"), one.state[param]["exp_avg"]
        assert ((value - exact).abs() <= tolerance * exact.abs() + 1e-3 * exact.abs().max() * bool(tolerance)).all()
    assert [group["step"] for group in other.param_groups] == [2, 2]


@pytest.mark.parametrize("exp_avg", EXP_AVG)
def test_distributed_checkpoints(device: str, exp_avg: str, tmp_path: Path) -> None:
    options = options_of(exp_avg, "fp32")
    one, expected = train("copies", device, torch.bfloat16, steps=2, **options)
    dcp.save({"optimizer": one.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    other, _ = train("copies", device, torch.bfloat16, steps=1, **options)
    target = {"optimizer": other.state_dict()}
    dcp.load(target, checkpoint_id=tmp_path, no_dist=True)
    other.load_state_dict(target["optimizer"])
    actual = snapshot(other)  # type: ignore[arg-type]
    assert_same_snapshot(actual._replace(params=expected.params), expected)


def test_the_layout_of_public_implementations() -> None:
    optimizer, _ = train("copies", "cpu", torch.float32, steps=2)
    saved = optimizer.torch_state_dict()
    assert saved["state"][0].keys() == {"step", "exp_avg"}
    assert saved["param_groups"][0].keys() == {"lr", "betas", "weight_decay", "params"}
    del saved["state"][0]["step"]  # public implementations keep none
    other, _ = train("copies", "cpu", torch.float32, steps=1)
    other.load_state_dict(saved)
    assert torch.equal(other.state_dict()["state"][0]["exp_avg"], saved["state"][0]["exp_avg"])


def test_checkpoints_of_adam_are_refused() -> None:
    param = param_of(torch.ones(3))
    param.grad = torch.ones(3)
    adam = FusedOffloadAdam([param])
    adam.step()
    lion = FusedOffloadLion([param])
    with pytest.raises(ValueError, match=r"unknown state \['exp_avg_sq'\]"):
        lion.load_state_dict(adam.state_dict())
    with pytest.raises(ValueError, match="maximize=True"):
        LionRule().check_saved_group({"maximize": True}, 0)
