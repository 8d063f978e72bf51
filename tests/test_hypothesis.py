"""Random trainings against an oracle that knows no chunks, no storage, no groups and no places:
every bit, after every event.
"""

from __future__ import annotations

import copy
import importlib.util
import io
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import helpers
import hypothesis
import pytest
import torch
from helpers import DTYPES, FormatsCase, Oracle, in_memory_order
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from fused_offload import FusedOffloadAdam, OffloadConfig

device = helpers.device
if importlib.util.find_spec("triton"):
    from cpu_pipeline import on_host  # noqa: F401

MOMENT_DTYPES = [*DTYPES, torch.uint8]
EXAMPLES = 50  # times the four kinds of masters
MANY_EXAMPLES = 250

numels = st.one_of(
    st.sampled_from([0, 1, 2, 127, 128, 129, 255, 256, 257, 1023, 1024, 1025]),
    st.sampled_from([0, 5, 383, 384, 385, 2047, 2048, 2049]),
    st.integers(0, 3000),
    st.integers(3000, 20_000),
    st.sampled_from([0, 3, 100_000]),
)


class ParamSpec(NamedTuple):
    """How one parameter looks and how often it gets a gradient."""

    shape: tuple[int, ...]
    order: tuple[int, ...]  # dimensions from the slowest to the fastest in memory
    dtype: torch.dtype
    frozen: bool
    grad_share: float


@st.composite
def param_specs(draw: st.DrawFn) -> ParamSpec:
    dims = draw(st.sampled_from([1, 1, 1, 2, 3, 4]))
    if dims == 1:
        shape = (draw(numels),)
    else:
        shape = tuple(draw(st.lists(st.integers(1, 9), min_size=dims, max_size=dims)))
    order = tuple(draw(st.permutations(range(dims))))
    share = draw(st.sampled_from([1.0, 1.0, 0.5, 0.0]))
    return ParamSpec(shape, order, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 9)) == 0, share)


hyperparameters = st.fixed_dictionaries(
    {},
    optional={
        "lr": st.one_of(st.sampled_from([0.0, 1e-3, 1.0]), st.floats(0.0, 0.1)),
        "betas": st.tuples(st.floats(0.0, 0.9999), st.floats(0.0, 0.9999)),
        "eps": st.sampled_from([1e-8, 1e-15, 1e-3]),
        "weight_decay": st.sampled_from([0.0, 0.1, -0.1, 1.0]),
        "bias_correction": st.booleans(),
    },
)
configs = st.builds(
    OffloadConfig,
    fraction=st.sampled_from([0.0, 0.3, 0.5, 1.0, 1.0]),
    chunk_bytes=st.one_of(st.sampled_from([1, 2**20, 2**30]), st.integers(1, 200_000)),
    depth=st.integers(1, 4),
)
group_specs = st.tuples(st.lists(param_specs(), max_size=3), hyperparameters)
EVENTS = (
    st.tuples(st.just("step"), st.sampled_from([1.0, 1.0, 1e-6, 1e6, 0.0, math.nan, math.inf])),
    st.tuples(st.just("step"), st.sampled_from([1.0, 1e-3])),
    st.tuples(st.just("scaled step"), st.sampled_from([2.0**16, 3.0])),
    st.tuples(st.just("skipped step"), st.none()),
    st.tuples(st.just("edit"), hyperparameters),
    st.tuples(st.just("resume"), configs),
    st.tuples(st.just("resume from a file"), configs),
    st.tuples(st.just("new group"), group_specs),
)
CLIPS = (
    st.tuples(st.just("clipped step"), st.sampled_from([1.0, 1e-3, 1e30])),
    st.tuples(st.just("step clipped twice"), st.sampled_from([1.0, 1e-3])),
)


class Training:
    """An optimizer and, beside it, one oracle per parameter."""

    def __init__(
        self,
        seed: int,
        device: str,
        formats: FormatsCase,
        adam_w_mode: bool,
        groups: list[Any],
        hosted: list[torch.Tensor] | None = None,
    ) -> None:
        """``hosted`` gets every other parameter, by chance, as one in host memory."""
        self.hosted = hosted
        self.random = torch.Generator().manual_seed(seed)
        self.device = device
        self.formats = formats
        self.options = {"use_decoupled_grad": True, "adam_w_mode": adam_w_mode, **formats.arguments()}
        self.specs: list[list[ParamSpec]] = []
        self.oracles: list[list[Oracle]] = []
        self.has_state: list[list[bool]] = []
        self.first_groups = [self.new_group(*group) for group in groups]

    def values(self, shape: tuple[int, ...], dtype: torch.dtype, order: tuple[int, ...]) -> torch.Tensor:
        """Random values on the device, laid out in memory as told."""
        laid_out = torch.randn([shape[dim] for dim in order], generator=self.random).to(self.device, dtype)
        return laid_out.permute([order.index(dim) for dim in range(len(shape))])

    def choose(self, options: int) -> int:
        return int(torch.randint(options, (), generator=self.random))

    def new_group(self, specs: list[ParamSpec], settings: dict[str, Any]) -> dict[str, Any]:
        params = [nn.Parameter(self.values(s.shape, s.dtype, s.order), requires_grad=not s.frozen) for s in specs]
        if self.hosted is not None:
            self.hosted += [param for param in params if self.choose(2)]
        self.specs.append(specs)
        first = sum(map(len, self.oracles))
        self.oracles.append([Oracle(param, self.formats, number) for number, param in enumerate(params, start=first)])
        self.has_state.append([False] * len(params))
        return {"params": params, **settings}

    def build(self, config: OffloadConfig) -> None:
        """The first optimizer."""
        self.optimizer = FusedOffloadAdam(self.first_groups, offload=config, **self.options)

    def resume(self, config: OffloadConfig, *, through_file: bool) -> None:
        """Another optimizer takes over the parameters and what the last one saved."""
        saved: Any = self.optimizer.state_dict()
        if through_file:
            buffer = io.BytesIO()
            torch.save(saved, buffer)
            buffer.seek(0)
            saved = torch.load(buffer)
        groups = [{"params": [*group["params"]]} for group in self.optimizer.param_groups]
        old, self.optimizer = self.optimizer, FusedOffloadAdam(groups, offload=config, **self.options)
        self.optimizer.load_state_dict(saved)
        old.close()
        for oracles, flags in zip(self.oracles, self.has_state, strict=True):
            for oracle, has_state in zip(oracles, flags, strict=True):
                if has_state:
                    oracle.save_and_load()

    def gradient(self, param: torch.Tensor, magnitude: float) -> torch.Tensor:
        order = tuple(range(param.dim()))
        if self.choose(2):
            order = order[::-1]
        grad = self.values(tuple(param.shape), DTYPES[self.choose(3)], order)
        if math.isfinite(magnitude):
            return grad * magnitude
        if grad.numel():
            grad[tuple(self.choose(size) for size in grad.shape)] = magnitude
        return grad

    def step(
        self,
        magnitude: float,
        *,
        grad_scale: float | None = None,
        skipped: bool = False,
        limits: tuple[float, ...] = (),
    ) -> None:
        """``limits`` are those of clips by norm."""
        groups = self.optimizer.param_groups
        if grad_scale is not None or skipped:
            self.optimizer.grad_scale = torch.tensor(grad_scale or 1.0, device=self.device)
            self.optimizer.found_inf = torch.tensor(float(skipped), device=self.device)
        expected_steps = [group.get("step", 0) + (not skipped) for group in groups]
        grads: dict[Oracle, tuple[torch.Tensor, int]] = {}
        for index, (specs, oracles, group) in enumerate(zip(self.specs, self.oracles, groups, strict=True)):
            for spec, oracle, param in zip(specs, oracles, group["params"], strict=True):
                present = not spec.frozen and self.choose(1000) < 1000 * spec.grad_share
                param.decoupled_grad = grad = self.gradient(param, magnitude) if present else None
                if grad is not None:
                    grads[oracle] = grad.clone(), index
        for limit in limits:
            self.clip([grad for grad, _ in grads.values()], limit)
        for oracle, (grad, index) in grads.items() if not skipped else ():
            oracle.step(
                in_memory_order(grad, oracle.laid_out),
                {**self.optimizer.defaults, **groups[index]},
                expected_steps[index],
                adam_w_mode=self.options["adam_w_mode"],
                grad_scale=grad_scale,
            )
        self.optimizer.step()
        self.optimizer.synchronize()
        assert [group.get("step", 0) for group in groups] == expected_steps
        if not skipped:
            self.has_state = [[not spec.frozen for spec in specs] for specs in self.specs]
        if grad_scale is not None or skipped:
            del self.optimizer.grad_scale, self.optimizer.found_inf

    def clip(self, copies: list[torch.Tensor], limit: float) -> None:
        """Clips the optimizer's gradients, and the same ones by torch's own operations."""
        expected = torch.nn.utils.get_total_norm(copies, foreach=False)
        norm = self.optimizer.clip_grad_norm_(limit, foreach=False)
        assert norm.item() == expected.item() or (norm.isnan() and expected.isnan())
        for grad in copies:
            grad.mul_(torch.clamp(limit / (expected + 1e-6), max=1.0))

    def apply(self, event: str, argument: Any) -> None:
        if event == "step":
            self.step(argument)
        elif event == "scaled step":
            self.step(argument, grad_scale=argument)
        elif event == "clipped step":
            self.step(1.0, limits=(argument,))
        elif event == "step clipped twice":
            self.step(1.0, limits=(argument, argument / 2))
        elif event == "skipped step":
            self.step(1.0, skipped=True)
        elif event == "edit":
            self.optimizer.param_groups[self.choose(len(self.specs))].update(copy.deepcopy(argument))
        elif event == "new group":
            self.optimizer.add_param_group(self.new_group(*argument))
        else:
            self.resume(argument, through_file=event == "resume from a file")

    def check(self) -> None:
        for index, (oracles, group) in enumerate(zip(self.oracles, self.optimizer.param_groups, strict=True)):
            for position, (oracle, param) in enumerate(zip(oracles, group["params"], strict=True)):
                oracle.check(self.optimizer, param, f"parameter {position} of group {index}:")


def check_trainings(number: int, master: str, examples: int, events: Any, begin: Callable[..., Training]) -> None:
    """Runs random trainings; ``begin`` makes each, without its optimizer."""
    tried = 0

    @hypothesis.seed(number)  # the same in every run, and different for each kind of master
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(
        seed=st.integers(0, 2**32),
        moments=st.tuples(st.sampled_from(MOMENT_DTYPES), st.sampled_from(MOMENT_DTYPES)),
        adam_w_mode=st.booleans(),
        groups=st.lists(group_specs, min_size=1, max_size=3),
        config=configs,
        events=st.lists(st.one_of(*events), min_size=4, max_size=8),
    )
    def run(
        seed: int,
        moments: tuple[torch.dtype, torch.dtype],
        adam_w_mode: bool,
        groups: list[Any],
        config: OffloadConfig,
        events: list[tuple[str, Any]],
    ) -> None:
        nonlocal tried
        tried += 1
        training = begin(seed, FormatsCase(*moments, master), adam_w_mode, groups)
        training.build(config)
        try:
            for event in events:
                training.apply(*event)
                training.check()
        finally:
            training.optimizer.close()

    run()
    assert tried >= examples


MASTERS = ["none", "fp32", "fp16", "remainder"]


def in_two_forms(examples: int) -> pytest.MarkDecorator:
    many = pytest.param(MANY_EXAMPLES, marks=pytest.mark.large)
    return pytest.mark.parametrize("examples", [examples, many], ids=["small", "large"])


@in_two_forms(EXAMPLES)
@pytest.mark.parametrize(("number", "master"), [*enumerate(MASTERS)])
def test_random_trainings(device: str, number: int, master: str, examples: int) -> None:
    def begin(seed: int, *arguments: Any) -> Training:
        return Training(seed, device, *arguments)

    check_trainings(number, master, examples, EVENTS, begin)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the simulated device is for machines without a GPU")
@in_two_forms(20)
@pytest.mark.parametrize(("number", "master"), [*enumerate(MASTERS)])
def test_parameters_in_host_memory(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, number: int, master: str, examples: int
) -> None:
    """Beside others on the device, through the ring of a simulated one, with clipping.

    Kernels run as their specification: interpreted ones would take minutes.
    """
    pytest.importorskip("triton")
    from simulated_device import SimulatedDevice, installed

    from fused_offload.stream.launches import Launches

    hosted: list[torch.Tensor] = request.getfixturevalue("on_host")

    def begin(seed: int, *arguments: Any) -> Training:
        hosted.clear()
        return Training(seed, "cpu", *arguments, hosted=hosted)

    sim = SimulatedDevice()
    monkeypatch.setattr(Launches, "launch", lambda self, index, slot=0: sim.launch(self, index, slot))
    with installed(sim, monkeypatch):
        check_trainings(number, master, examples, (*EVENTS, *CLIPS), begin)
