"""When an attached model starts the prefetch, on a clock and an allocator of the test's own."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fused_offload import FusedOffloadAdam, OffloadConfig
from fused_offload.model_hooks import auto_prefetch
from fused_offload.model_hooks.auto_prefetch import AutoPrefetch
from fused_offload.step.devices import Devices
from fused_offload.stream.queues import CurrentStreams


class FakeOptimizer:
    def __init__(self) -> None:
        self.events: list[str] = []
        self.copy_s, self.allocated, self.retries, self.window, self.looks = 0.5, 1000, 0, 0, 0
        self.attachment: AutoPrefetch | None = None
        self.hooks: list[Any] = []
        self.devices = Devices(OffloadConfig())

    def prefetch(self) -> None:
        assert self.attachment is not None
        budget = self.attachment.budget_bytes
        self.events.append("prefetch" if budget is None else f"prefetch {budget}")
        self.window += max(0, budget or 0)

    def cancel_prefetch(self) -> None:
        self.events.append("cancel")

    def window_seconds(self, assumed: float) -> float:
        return self.copy_s

    def allocated_bytes(self) -> int:
        self.looks += 1
        return self.allocated

    def allocation_retries(self) -> int:
        return self.retries

    def window_bytes(self) -> int:
        return self.window

    def _current_streams(self) -> CurrentStreams:
        return CurrentStreams(self.devices.pipelines)

    def register_step_post_hook(self, hook: Any) -> Any:
        self.hooks.append(hook)
        return self

    def remove(self) -> None:
        self.hooks.clear()

    def step(self) -> None:
        self.events.append("step")
        self.window = 0
        for hook in self.hooks:
            hook(self, (), {})


class Loop:
    """A training loop of microbatches that take ``microbatch_s`` each, with copies that take
    ``copy_s``.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, copy_s: float = 0.5, window: int | str = 1, **attach_to: Any
    ) -> None:
        self.now = 0.0
        monkeypatch.setattr(auto_prefetch.time, "perf_counter", lambda: self.now)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        self.optimizer = FakeOptimizer()
        self.optimizer.copy_s = copy_s
        self.optimizer.attachment = AutoPrefetch(
            self.optimizer,
            [self.model],
            microbatches=attach_to.get("microbatches"),
            window_bytes=window,
        )

    def microbatch(self) -> None:
        output = self.model(torch.ones(1, 4))
        self.optimizer.events.append("forward")
        output.sum().backward()
        self.now += 1.0

    def iteration(self, microbatches: int, *, step: bool = True) -> list[str]:
        """What happened: ``F`` and ``P`` for forward and prefetch, in order."""
        self.optimizer.events.clear()
        for _ in range(microbatches):
            self.microbatch()
        if step:
            self.optimizer.step()
        return list(self.optimizer.events)


@pytest.mark.parametrize(("copy_s", "lead"), [(0.1, 1), (0.79, 1), (0.81, 2), (2.0, 3), (9.0, 4)])
@pytest.mark.parametrize("given", [4, None])
def test_the_prefetch_starts_as_late_as_the_copies_allow(
    copy_s: float, lead: int, given: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Loop(monkeypatch, copy_s=copy_s, microbatches=given)
    for _ in range(3):
        events = loop.iteration(4)
    first = events.index("prefetch")
    assert events[:first].count("forward") == 4 - lead
    assert events[-1] == "step"


def test_more_microbatches_than_before(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch)
    for count in (2, 2, 5):
        loop.iteration(count)
    events = loop.iteration(5)
    assert events[: events.index("prefetch")].count("forward") == 4


def test_a_step_that_never_comes_gives_the_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch, microbatches=2)
    loop.iteration(2)
    assert "prefetch" in loop.iteration(2, step=False)
    assert loop.iteration(2)[0] == "cancel"


def test_evaluation_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch, microbatches=1)
    loop.iteration(1)
    loop.optimizer.events.clear()
    with torch.no_grad():
        loop.model(torch.ones(1, 4))
    loop.model.eval()
    loop.model(torch.ones(1, 4))
    assert loop.optimizer.events == []


def test_a_wrong_count_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch, microbatches=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loop.iteration(2)
        loop.iteration(2)
    with pytest.warns(UserWarning, match=r"microbatches=4.* 2 times"):
        loop.iteration(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loop.iteration(2)


def test_auto_grows_into_what_activations_gave_back(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch, window="auto", microbatches=2)
    loop.iteration(2)  # there is no state yet
    # The loop learns that a backward pass begins at 1000 bytes.
    assert "prefetch" not in " ".join(loop.iteration(2))
    loop.optimizer.allocated, loop.optimizer.looks = 400, 0
    events = loop.iteration(2)
    assert loop.optimizer.looks == 8  # once for each of four parameters in two passes
    assert [event for event in events if event != "forward"] == ["prefetch 600"] * 4 + ["step"]
    assert events[:2] == ["forward", "forward"]  # in the last microbatch only
    loop.optimizer.allocated = 1200  # a longer batch than the one it learned from
    assert "prefetch 0" in loop.iteration(2)
    loop.optimizer.allocated = 700
    assert "prefetch 500" in loop.iteration(2)


def test_auto_shrinks_where_the_allocator_had_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch, window="auto", microbatches=1)
    optimizer = loop.optimizer

    def window() -> int:
        """Bytes that the window reached in one iteration."""
        reached = []
        step = optimizer.step
        monkeypatch.setattr(optimizer, "step", lambda: (reached.append(optimizer.window), step()))
        loop.iteration(1)
        monkeypatch.setattr(optimizer, "step", step)
        return reached[0]

    loop.iteration(1)
    optimizer.retries = 3  # before there is a window they have other reasons
    loop.iteration(1)
    optimizer.allocated = 400
    full = window()
    assert full == 4 * 600  # at each of four gradients, all that is free
    optimizer.retries = 4
    assert window() == full  # the window before this step did it
    assert window() == full // 2
    optimizer.retries = 6
    assert window() == full // 2
    assert window() == full // 4
    for _ in range(100):
        assert window() in (full // 4, full // 2)
    assert window() == full // 2  # after many steps without, it tries again


def test_memory_is_looked_at_a_few_times_in_a_pass_however_many_parameters() -> None:
    layers = [torch.nn.Linear(8, 8) for _ in range(200)]
    chosen = auto_prefetch._evenly_spaced([torch.nn.Sequential(*layers)])
    assert 25 <= len(chosen) <= 33
    assert chosen[0] is layers[-1].bias  # the first one whose gradient comes up
    chosen = auto_prefetch._evenly_spaced([torch.nn.Sequential(*layers[:2], torch.nn.Linear(1000, 1000))])
    assert len(chosen) <= 4


def test_detached_is_detached(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch, window="auto")
    assert loop.optimizer.attachment is not None
    loop.optimizer.attachment.detach()
    assert loop.optimizer.events == ["cancel"]
    loop.model(torch.ones(1, 4)).sum().backward()
    assert loop.optimizer.events == ["cancel"]
    assert loop.optimizer.hooks == []


def test_after_detach_a_prefetch_is_that_of_an_optimizer_without_a_model() -> None:
    model = torch.nn.Linear(4, 1)
    for window in ("auto", 0):
        optimizer = FusedOffloadAdam(model.parameters(), offload=OffloadConfig(window_bytes=window))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # without a window attach() says that it does nothing
            attachment = optimizer.attach(model)
        optimizer.prefetch()
        attachment.detach()
        if window == "auto":
            with pytest.raises(RuntimeError, match="learns from a model"):
                optimizer.prefetch()
        else:
            with pytest.warns(UserWarning, match="does nothing"):
                optimizer.prefetch()
        optimizer.close()


def test_the_model_does_not_keep_the_optimizer_alive() -> None:
    model = torch.nn.Linear(4, 1)
    optimizer = FusedOffloadAdam(model.parameters(), offload=OffloadConfig(window_bytes=1))
    optimizer.attach(model)
    alive = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert alive() is None
    model(torch.ones(1, 4)).sum().backward()  # and its hooks do nothing


def test_a_closed_optimizer_leaves_the_model_alone() -> None:
    model = torch.nn.Linear(4, 1)
    optimizer = FusedOffloadAdam(model.parameters(), offload=OffloadConfig(window_bytes="auto"))
    attachment = optimizer.attach(model)
    assert optimizer.is_attached
    optimizer.close()
    assert not attachment.is_active
    assert not optimizer.is_attached
    model(torch.ones(1, 4)).sum().backward()


@pytest.mark.parametrize("microbatches", [0, -1, True, 1.5, "2"])
def test_microbatches_are_checked(microbatches: Any) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = FusedOffloadAdam(model.parameters(), offload=OffloadConfig(window_bytes=2**20))
    attachment = optimizer.attach(model)
    with pytest.raises(ValueError, match="microbatches"):
        optimizer.attach(model, microbatches=microbatches)
    assert attachment.is_active


def test_what_is_no_model_is_refused() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = FusedOffloadAdam(model.parameters(), offload=OffloadConfig(window_bytes=2**20))
    attachment = optimizer.attach(model)
    with pytest.raises(ValueError, match="needs the model"):
        optimizer.attach()
    with pytest.raises(TypeError, match="list"):
        optimizer.attach([model])  # type: ignore[arg-type]
    assert attachment.is_active
    assert len(optimizer._optimizer_step_post_hooks) == 1


def test_auto_without_a_model_to_learn_from_says_so() -> None:
    optimizer = FusedOffloadAdam(torch.nn.Linear(2, 2).parameters(), offload=OffloadConfig(window_bytes="auto"))
    with pytest.raises(RuntimeError, match="attach"):
        optimizer.prefetch()


@pytest.mark.parametrize("copied", ["deepcopy", "saved"])
def test_a_copy_of_an_attached_model_is_attached_to_nothing(copied: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch)
    loop.iteration(1)
    if copied == "deepcopy":
        other = copy.deepcopy(loop.model)
    else:
        file = io.BytesIO()
        torch.save(loop.model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    loop.optimizer.events.clear()
    other(torch.ones(1, 4)).sum().backward()
    assert loop.optimizer.events == []
    assert "prefetch" in loop.iteration(1)


def test_a_compiled_model_does_not_look_into_the_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch)
    loop.model.compile(backend="eager")
    for _ in range(2):
        events = loop.iteration(1)
    assert events == ["prefetch", "forward", "step"]


def test_without_a_window_they_say_that_they_do_nothing() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = FusedOffloadAdam(model.parameters())
    with pytest.warns(UserWarning, match=r"^prefetch\(\) does nothing: there is no window"):
        optimizer.prefetch()
    with pytest.warns(UserWarning, match=r"^attach\(\) does nothing"):
        optimizer.attach(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.prefetch()  # its hooks do so at every step


@pytest.mark.filterwarnings("ignore:attach.. does nothing")
@pytest.mark.parametrize("window", [0, 2**20, "auto"])
def test_on_the_cpu_it_changes_nothing(window: Any) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    twin = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    twin.load_state_dict(model.state_dict())
    optimizer = FusedOffloadAdam(model.parameters(), lr=0.1, offload=OffloadConfig(window_bytes=window))
    other = FusedOffloadAdam(twin.parameters(), lr=0.1)
    first = optimizer.attach(model)
    second = optimizer.attach(model, microbatches=2)
    assert first is not second
    optimizer.prefetch()
    for _ in range(4):
        for net, opt in ((model, optimizer), (twin, other)):
            for batch in range(2):
                (net(torch.full((3, 8), 0.1 + batch)) ** 2).sum().backward()
            opt.step()
            opt.zero_grad()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)
    optimizer.cancel_prefetch()
    optimizer.close()


@pytest.mark.parametrize("window", [-1, True, 1.5, "all", None])
def test_window_bytes_are_checked(window: Any) -> None:
    with pytest.raises(ValueError, match="window_bytes"):
        OffloadConfig(window_bytes=window)


# -- streams ---------------------------------------------------------------------------------------


class Streams:
    """Names of streams instead of streams: the current one is what ``torch.cuda.stream`` made
    it.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current = "default"
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self.use)

    @contextlib.contextmanager
    def use(self, stream: str) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


@pytest.mark.parametrize("window", [1, "auto"])
@pytest.mark.parametrize("forward", ["default", "side"])
@pytest.mark.parametrize("hooks", ["default", "side", "reduce"])
def test_window_memory_comes_from_the_stream_of_the_forward_pass(
    monkeypatch: pytest.MonkeyPatch, window: int | str, forward: str, hooks: str
) -> None:
    """FSDP runs gradient hooks under its reduce stream, whose memory activations never return
    to.
    """
    streams = Streams(monkeypatch)
    loop = Loop(monkeypatch, window=window)
    optimizer = loop.optimizer
    assert optimizer.attachment is not None
    optimizer.devices.pipelines[torch.device("cuda", 0)] = None  # type: ignore[assignment]
    used: list[str] = []
    monkeypatch.setattr(optimizer, "prefetch", lambda: used.append(streams.current))
    for _ in range(4):
        with streams.use(forward):
            output = loop.model(torch.ones(1, 4))
        with streams.use(hooks):
            output.sum().backward()
            if window == 1:
                optimizer.attachment.prefetch()  # as Megatron's reduction of gradients does
            assert streams.current == hooks
        loop.now += 1.0
        optimizer.step()
    assert set(used) == {forward}
