"""The whole step, from gradients to state back in host memory, against what the link allows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import pytest
import torch
from cases import FORMAT_6B, FORMAT_12B, LR, STEP_FORMATS, WEIGHT_DECAY, PeakMemory, StoredFormat, Watch, make_params
from clock import StepTime, measure, time_step, wall_ms
from copies_only import run_copies_only
from duplex import PlainDuplex, host_slabs
from pytest_benchmark.fixture import BenchmarkFixture
from rows import Row, Rows, make_row
from scale import DUPLEX_MIB, Scale

from fused_offload import FusedOffloadAdam, OffloadConfig

_MODEL_TENSORS = 150
_MOST_HOST_SHARE = 0.25
_LEAST_BYTES = 10**9  # smaller steps are over before the host is


@contextmanager
def offloaded(params: list[Any], offload: OffloadConfig, **arguments: Any) -> Iterator[FusedOffloadAdam]:
    """An optimizer that gives its memory back."""
    optimizer = FusedOffloadAdam(params, offload=offload, **arguments)
    try:
        yield optimizer
    finally:
        optimizer.close()


def timed_step(optimizer: FusedOffloadAdam, device: torch.device) -> StepTime:
    """One step and its write-back."""
    return time_step(optimizer.step, device, finish=optimizer.synchronize)


class LinkTimes(NamedTuple):
    """Time of the link for the bytes of a step.

    Attributes:
        copies_ms: the step's own chunks without kernels.
        plain_ms: plain duplex copies of the best size.
        best_mib: that size.
        by_copy_mib: medians from which it was chosen.
    """

    copies_ms: list[float]
    plain_ms: list[float]
    best_mib: int
    by_copy_mib: dict[int, float]


class LinkRounds:
    """Baselines of a step, measured right before it: its copies alone, and plain duplex copies.

    The best size of the plain copies is chosen first and then measured anew. The best of several
    medians is better than what it was drawn from.
    """

    def __init__(self, optimizer: FusedOffloadAdam, device: torch.device, scale: Scale) -> None:
        self._optimizer = optimizer
        self._device = device
        self._sizes = {mib: scale.bytes_of(mib) for mib in DUPLEX_MIB}
        self._plain = PlainDuplex(host_slabs(optimizer), device, list(self._sizes.values()))
        self._copies_ms: list[float] = []
        self._plain_ms: list[float] = []
        self._by_copy_mib = self._medians(scale.rounds)
        self._best_mib = min(self._by_copy_mib, key=lambda mib: self._by_copy_mib[mib])

    def _medians(self, rounds: int) -> dict[int, float]:
        """Time of plain copies by their size, the sizes taking turns."""
        samples: defaultdict[int, list[float]] = defaultdict(list)
        self._plain.refresh()
        for _ in range(rounds):
            for mib in self._sizes:
                samples[mib].append(self._plain_once(mib))
        return {mib: median(times) for mib, times in samples.items()}

    def _plain_once(self, mib: int) -> float:
        return wall_ms(partial(self._plain.run, self._sizes[mib]), self._device)

    def measure(self) -> None:
        """One round of both."""
        self._plain.refresh()
        self._plain_ms.append(self._plain_once(self._best_mib))
        # Last, right before the step: a link that slows down between the two would pass for the
        # price of computing.
        self._copies_ms.append(wall_ms(partial(run_copies_only, self._optimizer), self._device))

    def times(self, rounds: int) -> LinkTimes:
        """The last rounds, those before them were warm-up."""
        return LinkTimes(self._copies_ms[-rounds:], self._plain_ms[-rounds:], self._best_mib, self._by_copy_mib)


@pytest.mark.parametrize("format", STEP_FORMATS, ids=str)
def test_whole_step(
    format: StoredFormat, benchmark: BenchmarkFixture, scale: Scale, rows: Rows, device: torch.device
) -> None:
    params = make_params(scale.tensor_numel, scale.tensors, device)
    memory = PeakMemory(device)
    with offloaded(params, scale.offload, **format.arguments) as optimizer:
        for _ in range(max(1, scale.warmup_rounds)):
            timed_step(optimizer, device)
        extra_gpu_bytes = memory.extra_bytes()  # before the mirror of the plain copies is there
        link = None
        if device.type == "cuda":
            link = LinkRounds(optimizer, device, scale)
            check_that_copies_change_nothing(optimizer, link, params)
        watch = Watch(params)

        times = measure(
            benchmark,
            lambda: timed_step(optimizer, device),
            rounds=scale.compared_rounds,
            warmup_rounds=min(1, scale.warmup_rounds),  # all of it is warm by now
            setup=link.measure if link is not None else None,
        )

        watch.assert_trained()
        assert all(value.isfinite().all() for value in optimizer.state[params[-1]].values())

    link_times = None if link is None else link.times(len(times))
    for row in step_rows(format, scale, times, link_times, extra_gpu_bytes):
        rows.add(benchmark, row)


def step_rows(
    format: StoredFormat, scale: Scale, times: list[StepTime], link: LinkTimes | None, extra_gpu_bytes: int | None
) -> Iterator[Row]:
    """The step and, where there is a link, what it is compared with."""
    numel = scale.tensor_numel * scale.tensors
    state_bytes = format.state_bytes(scale.tensor_numel, scale.tensors)
    moved: dict[str, Any] = {"numel": numel, "bytes_to_device": state_bytes, "bytes_to_host": state_bytes}
    chunks = {"form": format.name, "chunk_bytes": scale.offload.chunk_bytes, "depth": scale.offload.depth}
    step_ms = [time.total_ms for time in times]
    ratios: dict[str, float] = {}
    if link is not None:
        plain_ms, copies_ms = median(link.plain_ms), median(link.copies_ms)
        plain = {"form": format.name, "copy_mib": link.best_mib, "ms_by_copy_mib": link.by_copy_mib}
        yield make_row(f"step/{format}/plain-duplex", link.plain_ms, params=plain, **moved)
        yield make_row(
            f"step/{format}/copies-only", link.copies_ms, params=chunks, ratio_to_link=copies_ms / plain_ms, **moved
        )
        ratios = {"ratio_to_copies": median(step_ms) / copies_ms, "ratio_to_link": median(step_ms) / plain_ms}
    yield make_row(
        f"step/{format}/whole-step",
        step_ms,
        params=chunks,
        extra_gpu_bytes=extra_gpu_bytes,
        host_ms=median(time.host_ms for time in times),
        note="" if link is not None else "CPU: plain torch, nothing crosses a link",
        **ratios,
        **moved,
    )


def check_that_copies_change_nothing(optimizer: FusedOffloadAdam, link: LinkRounds, params: list[Any]) -> None:
    """The baseline moves the same bytes to the same places as the step."""
    views = [view for param in (params[0], params[-1]) for view in optimizer.state[param].values()]
    # A NaN equals nothing, so none may be left.
    assert not any(view.isnan().any() for view in views if view.is_floating_point())
    before = [view.clone() for view in views]
    watch = Watch(params)
    link.measure()
    watch.assert_unchanged()
    for value, view in zip(before, views, strict=True):
        assert torch.equal(value, view), "copies without kernels changed the state"


def test_many_small_tensors(benchmark: BenchmarkFixture, scale: Scale, rows: Rows, device: torch.device) -> None:
    """Thousands of tiny parameters against the same bytes in a few.

    The price of a tensor is the host's.
    """
    format = FORMAT_12B
    few_numel = scale.small_tensors * scale.small_numel // scale.few_tensors
    many = make_params(scale.small_numel, scale.small_tensors, device)
    few = make_params(few_numel, scale.few_tensors, device)
    few_times: list[StepTime] = []
    with (
        offloaded(many, scale.offload, **format.arguments) as many_optimizer,
        offloaded(few, scale.offload, **format.arguments) as few_optimizer,
    ):
        watches = [Watch(many), Watch(few)]
        times = measure(
            benchmark,
            lambda: timed_step(many_optimizer, device),
            rounds=scale.rounds,
            warmup_rounds=scale.warmup_rounds,
            setup=lambda: few_times.append(timed_step(few_optimizer, device)),
        )
        for watch in watches:
            watch.assert_trained()

    few_times = few_times[-len(times) :]
    few_ms = median(time.total_ms for time in few_times)
    for label, tensors, numel, samples in (
        ("few", scale.few_tensors, few_numel, few_times),
        ("many", scale.small_tensors, scale.small_numel, times),
    ):
        state_bytes = format.state_bytes(numel, tensors) if device.type == "cuda" else None
        total_ms = [time.total_ms for time in samples]
        row = make_row(
            f"tensors/{label}",
            total_ms,
            params={"form": format.name, "tensors": tensors, "tensor_numel": numel, "peer": "tensors/few"},
            numel=tensors * numel,
            bytes_to_device=state_bytes,
            bytes_to_host=state_bytes,
            host_ms=median(time.host_ms for time in samples),
            ratio_to_peer=median(total_ms) / few_ms,
        )
        rows.add(benchmark, row)


def test_the_share_of_the_host(benchmark: BenchmarkFixture, scale: Scale, rows: Rows, device: torch.device) -> None:
    """As many parameters as a model of some ten layers has.

    What the host does for them is little beside the copies.
    """
    format, tensors = FORMAT_12B, min(_MODEL_TENSORS, scale.tensor_numel * scale.tensors)
    numel = scale.tensor_numel * scale.tensors // tensors
    params = make_params(numel, tensors, device)
    with offloaded(params, OffloadConfig(), **format.arguments) as optimizer:
        watch = Watch(params)
        times = measure(
            benchmark,
            lambda: timed_step(optimizer, device),
            rounds=scale.rounds,
            warmup_rounds=scale.warmup_rounds,
        )
        watch.assert_trained()
    state_bytes = format.state_bytes(numel, tensors) if device.type == "cuda" else None
    total_ms, host_ms = [time.total_ms for time in times], median(time.host_ms for time in times)
    row = make_row(
        f"tensors/{_MODEL_TENSORS}",
        total_ms,
        params={"form": format.name, "tensors": tensors, "tensor_numel": numel},
        numel=tensors * numel,
        bytes_to_device=state_bytes,
        bytes_to_host=state_bytes,
        host_ms=host_ms,
    )
    rows.add(benchmark, row)
    if state_bytes is not None and state_bytes >= _LEAST_BYTES:
        assert host_ms < _MOST_HOST_SHARE * median(total_ms)


def test_resident_against_torch(benchmark: BenchmarkFixture, scale: Scale, rows: Rows, device: torch.device) -> None:
    """With fraction=0 nothing is offloaded.

    Torch's fused AdamW then does the same work on the same bytes.
    """
    numel, tensors = scale.tensor_numel, scale.tensors
    ours, theirs = (make_params(numel, tensors, device, torch.float32) for _ in range(2))
    memory = PeakMemory(device)
    torch_optimizer = torch.optim.AdamW(theirs, lr=LR, weight_decay=WEIGHT_DECAY, foreach=False, fused=True)
    torch_optimizer.step()
    torch_bytes = memory.extra_bytes()
    torch_times: list[StepTime] = []
    memory = PeakMemory(device)
    with offloaded(ours, OffloadConfig(fraction=0.0), lr=LR, weight_decay=WEIGHT_DECAY) as optimizer:
        timed_step(optimizer, device)
        our_bytes = memory.extra_bytes()
        watches = [Watch(ours), Watch(theirs)]
        times = measure(
            benchmark,
            lambda: timed_step(optimizer, device),
            rounds=scale.rounds,
            warmup_rounds=scale.warmup_rounds,
            setup=lambda: torch_times.append(time_step(torch_optimizer.step, device)),
        )
        for watch in watches:
            watch.assert_trained()

    torch_times = torch_times[-len(times) :]
    torch_ms = median(time.total_ms for time in torch_times)
    for label, samples, extra_gpu_bytes in (
        ("torch-fused", torch_times, torch_bytes),
        ("fraction-0", times, our_bytes),
    ):
        total_ms = [time.total_ms for time in samples]
        row = make_row(
            f"resident/{label}",
            total_ms,
            params={"form": "fp32 parameters, no master", "peer": "resident/torch-fused"},
            numel=numel * tensors,
            memory_bytes=7 * 4 * numel * tensors,  # read p, g and 2 moments, write p and 2 moments
            extra_gpu_bytes=extra_gpu_bytes,
            host_ms=median(time.host_ms for time in samples),
            ratio_to_peer=median(total_ms) / torch_ms,
        )
        rows.add(benchmark, row)


def test_drift(benchmark: BenchmarkFixture, scale: Scale, rows: Rows, device: torch.device) -> None:
    """Many steps in a row: memory that grows or a queue that fills would show as steps that take
    longer and longer.
    """
    format = FORMAT_6B
    numel, tensors = scale.tensor_numel, scale.tensors
    params = make_params(numel, tensors, device)
    with offloaded(params, scale.offload, **format.arguments) as optimizer:
        watch = Watch(params)
        times = measure(benchmark, lambda: timed_step(optimizer, device), rounds=scale.drift_steps)
        watch.assert_trained()

    total_ms = [time.total_ms for time in times]
    count = len(total_ms)
    # Of 200 steps these are 10 to 60, when everything is warm, and the last 50.
    early, late = total_ms[count // 20 : max(1, count * 3 // 10)], total_ms[-(-count * 3 // 4) :] or total_ms
    state_bytes = format.state_bytes(numel, tensors) if device.type == "cuda" else None
    for label, samples in (("early", early), ("late", late)):
        row = make_row(
            f"drift/{label}",
            samples,
            params={"form": format.name, "steps": count, "peer": "drift/early"},
            numel=numel * tensors,
            bytes_to_device=state_bytes,
            bytes_to_host=state_bytes,
            ratio_to_peer=median(samples) / median(early),
        )
        rows.add(benchmark, row)


_RECIPES = {"delayed": "DelayedScaling", "current": "Float8CurrentScaling", "blockwise": "Float8BlockScaling"}
_MATRIX_ROWS = 4096


def quantised_params(recipe: str, numel: int, tensors: int, device: torch.device) -> list[Any]:
    """TransformerEngine's quantised weights of about ``numel`` elements each, with gradients."""
    te = pytest.importorskip("transformer_engine.pytorch", reason="needs TransformerEngine")
    from transformer_engine.common import recipe as recipes

    columns = max(1, numel // _MATRIX_ROWS // 128) * 128
    params = []
    with te.quantized_model_init(enabled=True, recipe=getattr(recipes, _RECIPES[recipe])()):
        for _ in range(tensors):
            linear = te.Linear(columns, _MATRIX_ROWS, bias=False, params_dtype=torch.bfloat16, device=device)
            linear.weight.grad = torch.randn(_MATRIX_ROWS, columns, dtype=torch.bfloat16, device=device)
            params.append(linear.weight)
    return params


@pytest.mark.parametrize("recipe", _RECIPES)
def test_quantised_parameters(
    recipe: str, benchmark: BenchmarkFixture, scale: Scale, rows: Rows, device: torch.device
) -> None:
    """The same bytes of state beside FP8 and beside bfloat16 parameters, taking turns."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        pytest.skip("needs a Hopper GPU, whose FP8 recipes these are")
    quantised = quantised_params(recipe, scale.tensor_numel, scale.tensors, device)
    numel = quantised[0].numel()
    plain = make_params(numel, scale.tensors, device)
    plain_times: list[StepTime] = []
    before = [param.dequantize().clone() for param in (quantised[0], quantised[-1])]
    memory = PeakMemory(device)
    with offloaded(quantised, scale.offload, **FORMAT_12B.arguments) as optimizer:
        timed_step(optimizer, device)
        extra_gpu_bytes = memory.extra_bytes()
        with offloaded(plain, scale.offload, **FORMAT_12B.arguments) as other:
            watch = Watch(plain)
            times = measure(
                benchmark,
                lambda: timed_step(optimizer, device),
                rounds=scale.compared_rounds,
                warmup_rounds=scale.warmup_rounds,
                setup=lambda: plain_times.append(timed_step(other, device)),
            )
            watch.assert_trained()
        for old, param in zip(before, (quantised[0], quantised[-1]), strict=True):
            assert param.dequantize().isfinite().all()
            assert not torch.equal(old, param.dequantize()), "the steps changed no parameter"
    plain_times = plain_times[-len(times) :]
    plain_ms = median(time.total_ms for time in plain_times)
    state_bytes = FORMAT_12B.state_bytes(numel, scale.tensors)
    for label, samples, extra in ((f"bf16 beside {recipe}", plain_times, None), (recipe, times, extra_gpu_bytes)):
        total_ms = [time.total_ms for time in samples]
        row = make_row(
            f"quantised/{label}",
            total_ms,
            params={"form": FORMAT_12B.name, "peer": f"quantised/bf16 beside {recipe}"},
            numel=numel * scale.tensors,
            bytes_to_device=state_bytes,
            bytes_to_host=state_bytes,
            extra_gpu_bytes=extra,
            host_ms=median(time.host_ms for time in samples),
            ratio_to_peer=median(total_ms) / plain_ms,
        )
        rows.add(benchmark, row)
