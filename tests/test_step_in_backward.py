"""Stepping during backward passes: the bits of the ordinary step, gradients freed, and what is
refused.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import helpers
import pytest
import torch
from helpers import assert_same_snapshot, snapshot, unchanged
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from fused_offload import FusedOffloadAdam, OffloadConfig
from fused_offload.memory.staging_ring import Slot, StagingRing
from fused_offload.model_hooks import backward_step
from fused_offload.model_hooks.stepped_grad import SteppedGrad
from fused_offload.step import stepper
from fused_offload.step.devices import Devices
from fused_offload.stream.write_backs import WriteBacks

device = helpers.device

WIDTH = 40
FORMATS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "plain": (torch.float32, {}),
    "remainders": (torch.bfloat16, {"master_weights": True, "store_param_remainders": True}),
    "narrow": (
        torch.bfloat16,
        {"master_weights": True, "exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.float16},
    ),
}


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of a weight or two of the small models here."""
    monkeypatch.setattr(backward_step, "PART_BYTES", 7000)


class Net(torch.nn.Module):
    """With a frozen layer, one that gets no gradient, and many small parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(WIDTH) for _ in range(5))
        self.unused = torch.nn.Linear(3, 3)
        self.layers[2].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + torch.tanh(norm(layer(x)))
        return x


def net(device: str, dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(0)
    return Net().to(device, dtype)


def adam(model: torch.nn.Module, **settings: Any) -> FusedOffloadAdam:
    params = list(model.parameters())
    groups = [{"params": params[:4]}, {"params": params[4:], "lr": 3e-3, "weight_decay": 0.0}]
    return FusedOffloadAdam(groups, **{"lr": 1e-2, "weight_decay": 0.1, **settings})


def loss_of(model: torch.nn.Module, step: int) -> torch.Tensor:
    param = next(model.parameters())
    x = helpers.randn((6, WIDTH), 100 + step, str(param.device), param.dtype)
    return model(x).float().square().sum()


def train(model: torch.nn.Module, optimizer: FusedOffloadAdam, steps: range = range(5)) -> None:
    for step in steps:
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def pair(device: str, **settings: Any) -> tuple[Net, FusedOffloadAdam, Net, FusedOffloadAdam]:
    """A model that is stepped in its backward passes, and the same one that is not."""
    model, reference = net(device), net(device)
    optimizer, expected = adam(model), adam(reference)
    optimizer.step_in_backward(model, **settings)
    return model, optimizer, reference, expected


def refused(words: str, function: Callable[..., Any], *arguments: Any) -> None:
    with pytest.raises(RuntimeError, match=words):
        function(*arguments)


# -- the same bits ---------------------------------------------------------------------------------


@pytest.mark.parametrize("part_bytes", [1, 7000, 10**9])
@pytest.mark.parametrize("formats", FORMATS)
def test_same_bits(device: str, formats: str, part_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backward_step, "PART_BYTES", part_bytes)
    dtype, arguments = FORMATS[formats]
    results = []
    for steps_in_backward in (False, True):
        model = net(device, dtype)
        optimizer = adam(model, offload=OffloadConfig(chunk_bytes=20_000), **arguments)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        if steps_in_backward:
            optimizer.step_in_backward(model)
        for step in range(5):
            loss_of(model, step).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        results.append(snapshot(optimizer))
    assert results[0].steps == [5, 5]
    assert_same_snapshot(results[1], results[0])


@pytest.mark.parametrize("in_parts", [False, True])
def test_storage_of_removed_state_is_freed(device: str, in_parts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that steps remember keeps it, though parts of a step have plans of their own."""
    monkeypatch.setattr(backward_step, "PART_BYTES", 1)
    model = net(device)
    optimizer = adam(model)
    if in_parts:
        optimizer.step_in_backward(model)
    train(model, optimizer, range(2))
    extents = [weakref.ref(extent) for extent in {entry.storage.extent for entry in optimizer.state.values()}]
    assert extents
    optimizer.state.clear()
    gc.collect()
    assert all(extent() is None for extent in extents)
    train(model, optimizer, range(1))


def test_parameters_change_during_the_pass(device: str) -> None:
    model, optimizer, *_ = pair(device)
    train(model, optimizer, range(1))
    last, first = model.layers[4].weight, model.layers[0].weight
    before = [last.detach().clone(), first.detach().clone()]
    loss_of(model, 1).backward()
    assert not torch.equal(last, before[0])
    assert optimizer.param_groups[0]["step"] == 1
    optimizer.step()
    assert not torch.equal(first, before[1])
    assert optimizer.param_groups[0]["step"] == 2
    assert all(param.grad is None for param in model.parameters())


def test_gradients_are_freed_during_the_pass(device: str) -> None:
    most = {}
    for steps_in_backward in (False, True):
        model = net(device)
        optimizer = adam(model)
        grads: list[tuple[StorageWeakRef, int]] = []
        alive: list[int] = []

        def look(param: torch.Tensor, grads: list = grads, alive: list = alive) -> None:
            grads.append((StorageWeakRef(param.grad.untyped_storage()), param.grad.nbytes))
            alive.append(sum(nbytes for storage, nbytes in grads if not storage.expired()))

        for param in model.parameters():
            if param.requires_grad:
                # Runs before our hook, which takes the gradient away.
                param.register_post_accumulate_grad_hook(look)
        if steps_in_backward:
            optimizer.step_in_backward(model)
        train(model, optimizer, range(1))
        most[steps_in_backward] = max(alive)
    weight_bytes = WIDTH * WIDTH * 4
    assert most[False] > 4 * weight_bytes
    assert most[True] < 7000 + weight_bytes


def test_small_parameters_are_stepped_together(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backward_step, "PART_BYTES", 100 * 512 * 4)
    model = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(512, device=device)) for _ in range(550))
    optimizer = FusedOffloadAdam(model.parameters())
    optimizer.step_in_backward(model)
    parts = []

    def step_part(rule: Any, grads: dict[int, torch.Tensor], part: int, done: Callable[[], None]) -> None:
        parts.append(len(grads))
        done()

    monkeypatch.setattr(optimizer, "_step_part", step_part)
    sum(param.sum() for param in model).backward()
    assert parts == [100] * 5


def test_the_first_step_looks_at_all_parameters_once(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once for each part, whose state becomes authoritative one after another."""
    monkeypatch.setattr(backward_step, "PART_BYTES", 1)
    model = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(16, device=device)) for _ in range(20))
    optimizer = FusedOffloadAdam(model.parameters())
    optimizer.step_in_backward(model)
    looks = []
    misfit = stepper.misfit
    monkeypatch.setattr(stepper, "misfit", lambda *arguments: looks.append(1) or misfit(*arguments))
    for _ in range(2):
        sum(param.sum() for param in model).backward()
        optimizer.step()
    assert len(looks) <= 2 * len(model)


@pytest.mark.parametrize("part_bytes", [1, 7000])
def test_clipping_by_value(device: str, part_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backward_step, "PART_BYTES", part_bytes)
    model, optimizer, reference, expected = pair(device, clip_value=0.01)
    train(model, optimizer)
    for step in range(5):
        loss_of(reference, step).backward()
        assert max(float(p.grad.abs().max()) for p in reference.parameters() if p.grad is not None) > 0.01
        torch.nn.utils.clip_grad_value_(reference.parameters(), 0.01)
        expected.step()
        expected.zero_grad()
    assert_same_snapshot(snapshot(optimizer), snapshot(expected))


class Tied(torch.nn.Module):
    """An embedding and a head of one weight, each with activations recomputed in backward."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(30, WIDTH)
        self.middle = torch.nn.Linear(WIDTH, WIDTH)
        self.head = torch.nn.Linear(WIDTH, 30, bias=False)
        self.head.weight = self.embed.weight
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.middle(x + self.embed(torch.arange(6, device=x.device)))
        x = checkpoint(self.head, x, use_reentrant=self.reentrant)
        return checkpoint(torch.nn.functional.linear, x, self.embed.weight.t(), use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_tied_weights(device: str, reentrant: bool) -> None:
    results = []
    for steps_in_backward in (False, True):
        torch.manual_seed(0)
        model = Tied(reentrant=reentrant).to(device)
        optimizer = FusedOffloadAdam(model.parameters(), lr=1e-2)
        if steps_in_backward:
            optimizer.step_in_backward(model)
        train(model, optimizer)
        results.append(snapshot(optimizer))
    assert_same_snapshot(*results)


class Repeated(torch.nn.Module):
    """One layer, called twice, recomputed in backward."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.layer = torch.nn.Linear(WIDTH, WIDTH)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=self.reentrant)
        return x


def repeated(device: str, *, reentrant: bool) -> tuple[Repeated, FusedOffloadAdam]:
    torch.manual_seed(0)
    model = Repeated(reentrant=reentrant).to(device)
    return model, FusedOffloadAdam(model.parameters(), lr=1e-2)


def test_a_weight_that_is_checkpointed_twice_is_stepped_once(device: str) -> None:
    results = []
    for steps_in_backward in (False, True):
        model, optimizer = repeated(device, reentrant=False)
        if steps_in_backward:
            optimizer.step_in_backward(model)
        train(model, optimizer)
        results.append(snapshot(optimizer))
    assert_same_snapshot(*results)


def test_several_gradients_of_a_weight_in_one_pass_are_refused(device: str) -> None:
    model, optimizer = repeated(device, reentrant=True)
    optimizer.step_in_backward(model)
    refused("use_reentrant=False", loss_of(model, 0).backward)


def test_a_weight_that_the_pass_still_needs_is_noticed(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backward_step, "PART_BYTES", 1)
    model, _optimizer, *_ = pair(device)
    x = torch.ones(2, WIDTH, device=device, requires_grad=True)
    weight = model.layers[4].weight
    # No gradient of the weight waits for this.
    early = torch.nn.functional.linear(x, weight.detach())
    refused("modified by an inplace operation", model.layers[4](early).sum().backward)


def test_closures(device: str) -> None:
    model, optimizer, reference, expected = pair(device)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        return loss

    returned = [optimizer.step(closure) for _ in range(3)]
    for loss in returned:
        current = loss_of(reference, 0)
        current.backward()
        expected.step()
        expected.zero_grad()
        assert torch.equal(loss, current)
    assert_same_snapshot(snapshot(optimizer), snapshot(expected))


def test_parameters_that_come_later(device: str) -> None:
    model, optimizer, reference, expected = pair(device)
    for one, other in ((model, optimizer), (reference, expected)):
        train(one, other, range(2))
        one.layers[2].requires_grad_(True)
        train(one, other, range(2, 4))
        one.extra = torch.nn.Linear(WIDTH, WIDTH, device=device)
        with torch.no_grad():
            one.extra.weight.fill_(0.1)
            one.extra.bias.fill_(0.1)
        one.layers.append(one.extra)
        one.norms.append(one.norms[0])
        other.add_param_group({"params": one.extra.parameters(), "lr": 1e-4})
        train(one, other, range(4, 6))
    assert [group["step"] for group in optimizer.param_groups] == [6, 6, 2]
    assert_same_snapshot(snapshot(optimizer), snapshot(expected))


# -- what needs all gradients is refused -----------------------------------------------------------


@pytest.mark.parametrize("part_bytes", [1, 10**9])
def test_everything_that_looks_at_all_gradients(device: str, part_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backward_step, "PART_BYTES", part_bytes)
    model, optimizer, *_ = pair(device)
    train(model, optimizer, range(1))
    loss_of(model, 1).backward()
    params = list(model.parameters())
    grad = params[0].grad
    with unchanged(optimizer):
        for foreach in (True, False):
            refused("global norm", lambda foreach=foreach: torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=foreach))
        refused("clip_value", torch.nn.utils.clip_grad_value_, params, 1.0)
        refused("accumulation", loss_of(model, 2).backward)
        refused("global norm", lambda: grad.norm())
        refused("global norm", lambda: grad.mul_(0.5))
        refused("global norm", lambda: model.zero_grad(set_to_none=False))
    assert "SteppedGrad" in repr(grad)
    optimizer.step()
    assert optimizer.param_groups[0]["step"] == 2


def test_a_second_pass_is_refused_also_after_zero_grad(device: str) -> None:
    model, optimizer, *_ = pair(device)
    loss_of(model, 0).backward()
    model.zero_grad()
    with unchanged(optimizer):
        refused("accumulation", loss_of(model, 1).backward)
    optimizer.zero_grad()
    optimizer.step()
    train(model, optimizer, range(2))
    assert optimizer.param_groups[0]["step"] == 3


def test_gradient_scalers(device: str) -> None:
    for call in ("step", "unscale_"):
        model, optimizer, *_ = pair(device)
        scaler = torch.amp.GradScaler(device)
        scaler.scale(loss_of(model, 0)).backward()
        refused("gradient scaler", getattr(scaler, call), optimizer)
    refused("gradient scaler", lambda: optimizer.step(grad_scaler=torch.amp.GradScaler(device)))
    model, optimizer, reference, expected = pair(device)
    scaler = torch.amp.GradScaler(device, enabled=False)
    scaler.scale(loss_of(model, 0)).backward()
    scaler.step(optimizer)
    train(reference, expected, range(1))
    assert_same_snapshot(snapshot(optimizer), snapshot(expected))


def test_hyperparameters_that_change_within_an_iteration(device: str) -> None:
    model, optimizer, reference, expected = pair(device)
    for lr in (1e-2, torch.tensor(1e-2)):
        for group in (*optimizer.param_groups, *expected.param_groups):
            group["lr"] = lr
        train(reference, expected, range(1))
        loss_of(model, 0).backward()
        with unchanged(optimizer):
            for change in ({"lr": 1e-3}, {"betas": (0.8, 0.9)}, {"weight_decay": 0.3}):
                group = optimizer.param_groups[1]
                kept = {key: group[key] for key in change}
                group.update(change)
                refused(f"{next(iter(change))} of parameter group 1", optimizer.step)
                group.update(kept)
        optimizer.step()
    assert_same_snapshot(snapshot(optimizer), snapshot(expected))


def test_gradients_that_callers_set_in_between(device: str) -> None:
    model, optimizer, *_ = pair(device)
    train(model, optimizer, range(1))
    loss_of(model, 1).backward()
    weight = model.layers[4].weight
    weight.grad = torch.ones_like(weight)
    with unchanged(optimizer):
        refused("got another gradient", optimizer.step)
    weight.grad = None
    optimizer.step()


def test_arguments(device: str) -> None:
    model = net(device)
    optimizer = adam(model)
    for value in (0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="clip_value"):
            optimizer.step_in_backward(model, clip_value=value)
    with pytest.raises(ValueError, match="No parameter of this optimizer"):
        optimizer.step_in_backward(torch.nn.Linear(3, 3))
    with pytest.raises(ValueError, match="No parameter of this optimizer"):
        optimizer.step_in_backward()
    refused("window_bytes", adam(model, offload=OffloadConfig(window_bytes=10**6)).step_in_backward, model)
    refused("use_decoupled_grad", adam(model, use_decoupled_grad=True).step_in_backward, model)
    assert not any(param._post_accumulate_grad_hooks for param in model.parameters())


def test_without_memory_for_the_staging_nothing_is_hooked(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = net(device)
    optimizer = adam(model)

    def refuse() -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(optimizer, "reserve_gpu_memory", refuse)
    refused("no memory", optimizer.step_in_backward, model)
    assert not any(param._post_accumulate_grad_hooks for param in model.parameters())
    train(model, optimizer, range(1))


def test_modules_of_a_model_may_be_passed_beside_it(device: str) -> None:
    model = net(device)
    optimizer = adam(model)
    optimizer.step_in_backward(model.layers[0], model, model)
    assert len([param for param in model.parameters() if param._post_accumulate_grad_hooks]) == 20


# -- lifecycles ------------------------------------------------------------------------------------


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("on purpose")


def failing_pass(model: Net) -> None:
    """Steps the upper layers, not the lowest."""
    lowest = model.layers[0].register_forward_hook(lambda module, args, output: FailsInBackward.apply(output))
    with pytest.raises(ArithmeticError):
        loss_of(model, 7).backward()
    lowest.remove()


def test_a_pass_that_fails_can_be_finished_or_loaded_over(device: str) -> None:
    model, optimizer, reference, expected = pair(device)
    train(model, optimizer, range(2))
    saved = ({k: v.clone() for k, v in model.state_dict().items()}, optimizer.state_dict())
    saved[1]["state"] = {k: {n: t.clone() for n, t in v.items()} for k, v in saved[1]["state"].items()}
    lowest = model.layers[0].weight.detach().clone()
    failing_pass(model)
    refused("two steps", optimizer.state_dict)
    refused("two steps", optimizer.torch_state_dict)
    refused("accumulation", loss_of(model, 2).backward)
    optimizer.zero_grad()
    optimizer.step()
    assert torch.equal(model.layers[0].weight, lowest)
    assert optimizer.param_groups[0]["step"] == 3
    train(model, optimizer, range(3, 4))

    failing_pass(model)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    train(model, optimizer, range(2, 4))
    train(reference, expected, range(4))
    assert_same_snapshot(snapshot(optimizer), snapshot(expected))


def test_resume(device: str) -> None:
    model, optimizer, reference, expected = pair(device)
    train(reference, expected, range(6))
    train(model, optimizer, range(3))
    other = net(device)
    other.load_state_dict(model.state_dict())
    resumed = adam(other)
    resumed.step_in_backward(other)
    resumed.load_state_dict(optimizer.state_dict())
    train(other, resumed, range(3, 6))
    assert_same_snapshot(snapshot(resumed), snapshot(expected))


@pytest.mark.parametrize("between", [True, False])
def test_detach(device: str, between: bool) -> None:
    model, optimizer, reference, expected = pair(device)
    handle = optimizer.step_in_backward(model)  # again: the hooks of before are gone
    train(model, optimizer, range(2))
    loss_of(model, 2).backward()
    if not between:
        optimizer.step()
    handle.detach()
    assert not handle.is_active
    assert not any(param._post_accumulate_grad_hooks for param in model.parameters())
    assert not any(isinstance(param.grad, SteppedGrad) for param in model.parameters())
    if between:
        optimizer.step()
        optimizer.zero_grad()
    train(model, optimizer, range(3, 4))
    loss_of(model, 4).backward()
    loss_of(model, 5).backward()
    optimizer.step()
    train(reference, expected, range(4))
    loss_of(reference, 4).backward()
    loss_of(reference, 5).backward()
    expected.step()
    assert_same_snapshot(snapshot(optimizer), snapshot(expected))


def test_detaching_twice_leaves_what_came_after_alone(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, *_ = pair(device)
    first = optimizer.step_in_backward(model)
    optimizer.step_in_backward(model)
    loss_of(model, 0).backward()
    ended: list[None] = []
    monkeypatch.setattr(optimizer, "_end_parts", lambda: ended.append(None))
    first.detach()
    assert not ended
    optimizer.step()
    assert ended


@pytest.mark.parametrize("old", ["kept", "garbage", "closed", "detached", "the same"])
def test_a_notebook_cell_that_runs_twice(device: str, old: str) -> None:
    model, optimizer, reference, expected = pair(device)
    kept = [optimizer]
    if old == "closed":
        optimizer.close()
    if old == "detached":
        optimizer.step_in_backward(model).detach()
    if old == "garbage":
        kept.clear()
    gc.disable()
    try:
        if old != "the same":
            optimizer = adam(model)
        if old == "kept":
            before = dict(model.layers[0].weight._post_accumulate_grad_hooks or {})
            with pytest.raises(RuntimeError, match=r"Another optimizer.*close\(\).*scheduler"):
                optimizer.step_in_backward(model)
            assert dict(model.layers[0].weight._post_accumulate_grad_hooks or {}) == before
            kept.pop().close()
        optimizer.step_in_backward(model)
        train(model, optimizer, range(2))
    finally:
        gc.enable()
    train(reference, expected, range(2))
    assert_same_snapshot(snapshot(optimizer), snapshot(expected))


class Refused(RuntimeError): ...


BAD_CALLS: dict[str, tuple[type[Exception], Callable[[FusedOffloadAdam, Any], Any]]] = {
    "clip_value": (ValueError, lambda optimizer, model: optimizer.step_in_backward(model, clip_value=-1.0)),
    "models": (ValueError, lambda optimizer, model: optimizer.step_in_backward(torch.nn.Linear(2, 2))),
    "memory": (Refused, lambda optimizer, model: optimizer.step_in_backward(model)),
}


@pytest.mark.parametrize("bad", BAD_CALLS)
@pytest.mark.parametrize("between", [True, False])
def test_a_call_that_is_refused_leaves_the_one_before(
    device: str, monkeypatch: pytest.MonkeyPatch, bad: str, between: bool
) -> None:
    model, optimizer, reference, expected = pair(device)
    train(model, optimizer, range(2))
    if between:
        loss_of(model, 2).backward()
    kind, call = BAD_CALLS[bad]
    with monkeypatch.context() as patch:
        if bad == "memory":

            def refuse() -> None:
                raise Refused

            patch.setattr(optimizer, "reserve_gpu_memory", refuse)
        with pytest.raises(kind):
            call(optimizer, model)
    if between:
        optimizer.step()
    else:
        train(model, optimizer, range(2, 3))
    train(reference, expected, range(3))
    assert_same_snapshot(snapshot(optimizer), snapshot(expected))
    loss_of(model, 3).backward()
    assert isinstance(model.layers[4].weight.grad, SteppedGrad)


def test_nothing_is_kept_alive(device: str) -> None:
    model, optimizer, *_ = pair(device)
    train(model, optimizer, range(1))
    alive = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert alive() is None
    loss_of(model, 1).backward()
    assert type(model.layers[4].weight.grad) is torch.Tensor
    optimizer = adam(model)
    handle = optimizer.step_in_backward(model)
    optimizer.close()
    assert not handle.is_active


def test_parameters_left_without_gradient_by_model_zero_grad(device: str) -> None:
    model, optimizer, *_ = pair(device)
    lowest = model.layers[0].weight
    loss_of(model, 0).backward()
    before = lowest.detach().clone()
    model.zero_grad()
    optimizer.step()
    assert torch.equal(lowest, before)


# -- parts on a device -----------------------------------------------------------------------------


def test_parts_wait_for_what_was_written_before_the_first() -> None:
    devices, backs = Devices(OffloadConfig()), WriteBacks()
    devices.pipelines = {torch.device("cuda", 0): SimpleNamespace(write_backs=backs)}  # type: ignore[dict-item]
    backs.note_streamed("before", ())
    for part in ("first part", "second part"):
        devices.begin_step(has_more_parts=True)
        assert backs.before_copies == "before"
        backs.note_streamed(part, ())
    devices.begin_step(has_more_parts=False)
    assert backs.before_copies == "before"
    backs.note_streamed("last part", ())
    assert backs.last == "last part"
    devices.begin_step(has_more_parts=True)
    assert backs.before_copies == "last part"
    backs.note_streamed("only part", ())
    devices.end_step()  # state was loaded
    devices.begin_step(has_more_parts=False)
    assert backs.before_copies == "only part"


def test_a_step_begins_with_the_slot_that_was_free_first() -> None:
    ring = StagingRing(torch.device("cpu"))
    ring.rotate(2)
    ring.slots = [Slot(torch.empty(1)) for _ in range(3)]
    first, second, third = ring.slots
    ring.rotate(1)
    assert ring.slots == [second, third, first]
    ring.rotate(5)
    assert ring.slots == [first, second, third]


MIB = 2**20


@pytest.fixture
def large_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(backward_step, "PART_BYTES", 24 * MIB)
    gc.collect()
    torch.cuda.empty_cache()
    yield
    gc.collect()


@pytest.mark.gpu
@pytest.mark.usefixtures("large_parts")
@pytest.mark.parametrize("width", [2048, 4096])
def test_peak_of_gpu_memory(width: int) -> None:
    """Parameters + activations + largest gradient + ring + 2 %."""
    rises, total_bytes = {}, 0
    for steps_in_backward in (False, True):
        torch.manual_seed(0)
        count = 48 * (2048 // 256) ** 2 // (width // 256) ** 2
        model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(count))).cuda()
        optimizer = FusedOffloadAdam(model.parameters(), lr=1e-5)
        if steps_in_backward:
            optimizer.step_in_backward(model)
        x = torch.randn(16, width, device="cuda")
        for step in range(3):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            base = torch.cuda.memory_allocated()  # parameters, ring, workspaces of matrix products
            loss = model(x).square().mean()
            activations = torch.cuda.memory_allocated() - base
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del loss
            torch.cuda.synchronize()
            rise = torch.cuda.max_memory_allocated() - base
            assert step == 0 or rise > 0
        rises[steps_in_backward] = rise - activations
        param_bytes = sum(param.nbytes for param in model.parameters())
        total_bytes = param_bytes + activations + optimizer.memory_report().ring_bytes
        optimizer.close()
        del model, optimizer, x
        gc.collect()
    largest = width * width * 4
    assert rises[False] >= 0.9 * param_bytes
    assert rises[True] <= largest + 0.02 * (total_bytes + largest), rises


@pytest.mark.gpu
@pytest.mark.usefixtures("large_parts")
@pytest.mark.parametrize("side_stream", [False, True])
def test_streams_the_bits_of_the_ordinary_step(side_stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With parts of one chunk, whose copies overlap, and gradients that other kernels overwrite
    once they are freed.
    """
    monkeypatch.setattr(backward_step, "PART_BYTES", 4 * MIB)
    results = []
    for steps_in_backward in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(24))).cuda()
        optimizer = FusedOffloadAdam(model.parameters(), lr=1e-3, offload=OffloadConfig(chunk_bytes=4 * MIB))
        if steps_in_backward:
            optimizer.step_in_backward(model)
        stream = torch.cuda.Stream() if side_stream else torch.cuda.current_stream()
        x = torch.randn(512, 1024, device="cuda")
        stream.wait_stream(torch.cuda.current_stream())
        for _ in range(10):
            with torch.cuda.stream(stream):
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        torch.cuda.current_stream().wait_stream(stream)
        results.append(snapshot(optimizer))
        optimizer.close()
    assert_same_snapshot(*results)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_gradients_that_wait_keep_no_graph() -> None:
    model = torch.nn.Linear(3, 3)
    optimizer = FusedOffloadAdam(model.parameters())
    steps = optimizer.step_in_backward(model)
    model(torch.ones(2, 3)).square().sum().backward(create_graph=True)
    waiting = [grad for one in steps._waiting.values() for grad in one.grads.values()]
    assert len(waiting) == 2
    assert not any(grad.requires_grad for grad in waiting)
    optimizer.step()
