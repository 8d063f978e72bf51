"""`clip_grad_norm_` of gradients in host memory, whatever happens between it and the step.

Its factor is applied by the step, so each training is compared with one whose gradients are on the
device, where torch multiplies them at once: the same bits, or an error before anything changes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_same_snapshot, param_of, randn, snapshot

pytest.importorskip("triton")

import cpu_pipeline

from fused_offload import FusedOffloadAdam, OffloadConfig

pipeline_on_the_cpu, on_host = cpu_pipeline.pipeline_on_the_cpu, cpu_pipeline.on_host

specified_kernels = cpu_pipeline.specified_kernels

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the simulated device is for machines without a GPU"),
    pytest.mark.usefixtures("specified_kernels"),
]

SIZES = (130, 3)
LIMIT = 0.5


class Run:
    """An optimizer and its parameters.

    Attributes:
        expected: of every gradient ``"clipped"``, ``"changed"`` since in place, ``"derived"`` from
            one that was clipped, ``"new"``, or ``"none"``.
        awaited: True if no step has followed a clip.
    """

    def __init__(self, *, decoupled: bool) -> None:
        self.params = [param_of(randn(numel, numel)) for numel in SIZES]
        self.name = "decoupled_grad" if decoupled else "grad"
        config = OffloadConfig(chunk_bytes=700)
        self.optimizer = FusedOffloadAdam(self.params, lr=0.1, use_decoupled_grad=decoupled, offload=config)
        self.made = 0
        self.expected = dict.fromkeys(range(len(SIZES)), "none")
        self.awaited = False
        self.new()

    def grad(self, index: int) -> Any:
        return getattr(self.params[index], self.name, None)

    def put(self, index: int, grad: torch.Tensor | None) -> None:
        setattr(self.params[index], self.name, grad)
        self.expected[index] = "none" if grad is None else "new"

    def present(self) -> list[int]:
        return [index for index in self.expected if self.grad(index) is not None]

    def kinds(self) -> set[str]:
        return {self.expected[index] for index in self.present()}

    def is_refused(self, *, by_step: bool) -> bool:
        """True if the factor belongs to other gradients than those that are there."""
        kinds = self.kinds()
        if kinds <= {"new", "derived"}:
            return bool(kinds) and by_step and self.awaited
        return kinds != {"clipped"}

    def new(self) -> None:
        for index, numel in enumerate(SIZES):
            self.made += 1
            self.put(index, randn(numel, 100 + self.made))

    def new_first(self) -> None:
        self.made += 1
        self.put(0, randn(SIZES[0], 100 + self.made))

    def replace(self) -> None:
        for index in self.present():
            was = self.expected[index]
            self.put(index, self.grad(index) * 2)
            self.expected[index] = "derived" if was in ("clipped", "changed", "derived") else "new"

    def replace_data(self) -> None:
        for index in self.present():
            self.grad(index).data = self.grad(index) * 2
            self.note_change(index)

    def scale(self) -> None:
        for index in self.present():
            self.grad(index).mul_(2)
            self.note_change(index)

    def scale_last(self) -> None:
        if self.grad(1) is not None:
            self.grad(1).mul_(2)
            self.note_change(1)

    def note_change(self, index: int) -> None:
        if self.expected[index] == "clipped":
            self.expected[index] = "changed"

    def drop_first(self) -> None:
        self.put(0, None)

    def clip(self) -> float:
        norm = self.optimizer.clip_grad_norm_(LIMIT, foreach=False).item()
        if self.present():
            self.expected |= dict.fromkeys(self.present(), "clipped")
            self.awaited = True
        return norm

    def step(self) -> None:
        self.optimizer.step()
        self.awaited = False

    def skipped_step(self) -> None:
        self.optimizer.found_inf = torch.ones(())
        self.optimizer.step()
        del self.optimizer.found_inf
        self.awaited = False

    def step_with_closure(self) -> None:
        self.optimizer.step(lambda: None)
        self.awaited = False

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()
        self.expected |= dict.fromkeys(self.expected, "none")
        self.awaited = False

    def zero_grad_in_place(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        self.expected |= dict.fromkeys(self.present(), "new")
        self.awaited = False

    def models_zero_grad(self) -> None:
        for index in self.present():
            self.put(index, None)

    def models_zero_grad_in_place(self) -> None:
        for index in self.present():
            self.grad(index).zero_()
            self.note_change(index)

    def save_and_load(self) -> None:
        self.optimizer.load_state_dict(self.optimizer.state_dict())


CLIPS, STEPS = ("clip",), ("step", "skipped_step", "step_with_closure")
CHANGES = (
    *("new", "new_first", "replace", "replace_data", "scale", "scale_last", "drop_first", "zero_grad"),
    *("zero_grad_in_place", "models_zero_grad", "models_zero_grad_in_place", "save_and_load"),
)
EVENTS = (*CLIPS, *STEPS[:2], *CHANGES)


def follow(on_host: list[torch.Tensor], events: tuple[str, ...], *, decoupled: bool) -> bool:
    """Runs events with gradients on the host and on the device; True if one of them was refused."""
    hosted, resident = Run(decoupled=decoupled), Run(decoupled=decoupled)
    on_host[:] = hosted.params
    try:
        return follow_both(hosted, resident, events)
    finally:
        hosted.optimizer.close()
        resident.optimizer.close()


def follow_both(hosted: Run, resident: Run, events: tuple[str, ...]) -> bool:
    for event in events:
        is_refused = event in (*CLIPS, *STEPS) and hosted.is_refused(by_step=event in STEPS)
        if event in (*CLIPS, *STEPS) and not is_refused and "derived" in hosted.kinds():
            return False  # `.grad` is not clipped, and nobody can tell its double from a new gradient
        if is_refused:
            before = snapshot(hosted.optimizer)
            with pytest.raises(RuntimeError, match=r"clip_grad_norm_\(\), whose factor"):
                getattr(hosted, event)()
            assert_same_snapshot(snapshot(hosted.optimizer), before)
            assert hosted.optimizer._stepper.failure is None
            return True
        result = getattr(hosted, event)()
        assert result == getattr(resident, event)(), events
    assert_same_snapshot(snapshot(hosted.optimizer), snapshot(resident.optimizer))
    return False


@pytest.mark.parametrize(
    ("length", "decoupled"),
    [(1, False), (1, True), *[pytest.param(*case, marks=pytest.mark.large) for case in ((2, True), (3, False))]],
)
def test_whatever_happens_before_the_step(on_host: list[torch.Tensor], length: int, decoupled: bool) -> None:
    """All sequences of events between a clip and a step."""
    refused = 0
    for events in itertools.product(EVENTS, repeat=length):
        for last in STEPS[::2] if length == 1 else STEPS[:1]:
            refused += follow(on_host, ("clip", *events, last), decoupled=decoupled)
    assert 0 < refused < len(EVENTS) ** length * 2


@pytest.mark.parametrize("change", CHANGES)
def test_a_step_ends_the_wait_for_the_factor(on_host: list[torch.Tensor], change: str) -> None:
    """Behind a step, gradients that are new in all places need no clip."""
    assert not follow(on_host, ("clip", "step", change, "new", "step"), decoupled=False)


def test_a_closure_may_clip(on_host: list[torch.Tensor]) -> None:
    outcomes = []
    for is_hosted in (True, False):
        run = Run(decoupled=False)
        on_host += run.params if is_hosted else []

        def closure(run: Run = run) -> float:
            run.zero_grad()
            run.new()
            return run.clip()

        norms = [run.optimizer.step(closure) for _ in range(3)]
        outcomes.append((snapshot(run.optimizer), norms))
    assert_same_snapshot(outcomes[0][0], outcomes[1][0])
    assert outcomes[0][1] == outcomes[1][1]


@pytest.mark.parametrize("overflows", [False, True])
@pytest.mark.parametrize(
    "order", [("unscale", "clip"), ("clip", "unscale"), ("clip",), ("clip", "unscale", "clip")], ids="-".join
)
def test_a_gradient_scaler(on_host: list[torch.Tensor], order: tuple[str, ...], overflows: bool) -> None:
    """torch's scaler divides gradients without counting it as a change; it commutes with the factor."""
    outcomes = []
    for is_hosted in (True, False):
        run = Run(decoupled=False)
        on_host += run.params if is_hosted else []
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        norms = []
        calls: dict[str, Callable[[], Any]] = {
            "unscale": lambda scaler=scaler, run=run: scaler.unscale_(run.optimizer),
            "clip": lambda norms=norms, run=run: norms.append(run.clip()),
        }
        for step in range(4):
            run.zero_grad()
            run.new()
            for param in run.params:
                param.grad = scaler.scale(param.grad)
            if overflows and step in (0, 2):
                run.grad(0)[5] = torch.inf
            for name in order:
                calls[name]()
            scaler.step(run.optimizer)
            scaler.update()
        outcomes.append((snapshot(run.optimizer), norms, scaler.get_scale()))
    assert_same_snapshot(outcomes[0][0], outcomes[1][0])
    assert str(outcomes[0][1:]) == str(outcomes[1][1:])  # some norms are NaN
