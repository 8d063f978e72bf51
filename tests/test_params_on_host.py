"""Parameters and gradients in host memory pass through the ring: the bits of parameters on the device.

The simulated device takes tensors of the host for those of FSDP's ``CPUOffloadPolicy``; tests/test_fsdp_gpu.py has the
real ones.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from helpers import DTYPES, FormatsCase, Snapshot, assert_same_snapshot, param_of, randn, snapshot

pytest.importorskip("triton")

import cpu_pipeline

from fused_offload import FusedOffloadAdam, FusedOffloadLion, FusedOffloadMuon, OffloadConfig
from fused_offload.memory import host_limits
from fused_offload.memory.staging_ring import StagingRing

pipeline_on_the_cpu, on_host = cpu_pipeline.pipeline_on_the_cpu, cpu_pipeline.on_host
specified_kernels = cpu_pipeline.specified_kernels

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the simulated device is for machines without a GPU")

CPU = torch.device("cpu")
SIZES = [1300, 1, 129, 128, 127]
STEPS = 3
FORMATS = [
    FormatsCase(),
    FormatsCase(torch.bfloat16, torch.float16, "fp32"),
    FormatsCase(torch.float16, torch.bfloat16, "fp16"),
    FormatsCase(torch.uint8, torch.uint8, "remainder"),
    FormatsCase(torch.float32, torch.uint8, "none"),
]
CASES = [
    (dtype, formats)
    for dtype, formats in itertools.product(DTYPES, FORMATS)
    if formats.master != "remainder" or dtype == torch.bfloat16
]


def train(
    hosted: list[torch.Tensor],
    *,
    on_host: bool,
    kind: Any = FusedOffloadAdam,
    dtype: torch.dtype = torch.bfloat16,
    grad_dtype: torch.dtype | None = None,
    formats: FormatsCase | None = None,
    clip: tuple[float, float] | None = None,
    chunk_bytes: int = 700,
    steps: int = STEPS,
    **options: Any,
) -> tuple[Any, list[torch.nn.Parameter], list[torch.Tensor]]:
    """Trains two groups, the first of which may be in host memory; returns also the norms."""
    params = [param_of(randn(numel, numel, dtype=dtype)) for numel in SIZES]
    if on_host:
        hosted += params[:3]
    options |= {} if formats is None else formats.arguments()
    optimizer = kind(
        [{"params": params[:3]}, {"params": params[3:], "lr": 3e-3}],
        lr=1e-2,
        weight_decay=0.1,
        use_decoupled_grad=True,
        offload=OffloadConfig(chunk_bytes=chunk_bytes, depth=2),
        **options,
    )
    norms = []
    for step in range(steps):
        for param in params:
            grad = randn(param.numel(), 7 * step + param.numel()) * 10.0 ** (step % 4 - 2)
            param.decoupled_grad = grad.to(grad_dtype or dtype)
            if step == 1 and param is params[1]:
                param.decoupled_grad = None
        if clip is not None:
            norms.append(optimizer.clip_grad_norm_(clip[0], clip[1], foreach=False).clone())
        optimizer.step()
        optimizer.zero_grad()
    return optimizer, params, norms


def outcome(*args: Any, **options: Any) -> tuple[Snapshot, list[torch.Tensor]]:
    optimizer, _, norms = train(*args, **options)
    return snapshot(optimizer), norms


def assert_same(one: tuple[Snapshot, list[torch.Tensor]], other: tuple[Snapshot, list[torch.Tensor]]) -> None:
    assert_same_snapshot(one[0], other[0])
    assert [norm.item() for norm in one[1]] == [norm.item() for norm in other[1]]


@pytest.mark.parametrize("clip", [None, (0.05, 2.0)], ids=["unclipped", "clipped"])
@pytest.mark.parametrize(
    ("dtype", "formats"),
    [case if n % 3 == 0 else pytest.param(*case, marks=pytest.mark.large) for n, case in enumerate(CASES)],
    ids=str,
)
def test_every_format(
    on_host: list[torch.Tensor], dtype: torch.dtype, formats: FormatsCase, clip: tuple[float, float] | None
) -> None:
    expected = outcome(on_host, on_host=False, dtype=dtype, formats=formats, clip=clip)
    for chunk_bytes in (700, 2**20):
        options = {"dtype": dtype, "formats": formats, "clip": clip, "chunk_bytes": chunk_bytes}
        assert_same(outcome(on_host, on_host=True, **options), expected)


@pytest.mark.usefixtures("specified_kernels")
@pytest.mark.parametrize("grad_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_gradients_of_every_dtype(on_host: list[torch.Tensor], grad_dtype: torch.dtype, norm_type: float) -> None:
    options: dict[str, Any] = {"formats": FORMATS[3], "clip": (0.05, norm_type), "grad_dtype": grad_dtype}
    assert_same(outcome(on_host, on_host=True, **options), outcome(on_host, on_host=False, **options))


def test_another_rule(on_host: list[torch.Tensor]) -> None:
    options: dict[str, Any] = {"kind": FusedOffloadLion, "exp_avg_dtype": torch.uint8, "clip": (0.05, 2.0)}
    assert_same(outcome(on_host, on_host=True, **options), outcome(on_host, on_host=False, **options))


def test_a_ring_of_any_size(on_host: list[torch.Tensor]) -> None:
    """The parameters' share of a slot counts: a chunk takes no more bytes than were allowed, and slots hold it."""
    optimizer, params, _ = train(on_host, on_host=True, formats=FORMATS[3], chunk_bytes=128 * 12)
    ring: StagingRing = optimizer._stepper.devices.pipelines[CPU].queues.ring
    # 128 elements take 520 bytes of state and 512 of a parameter and its gradient, each array a multiple of 256.
    assert len(ring.slots) == 2
    assert ring.slots[0].memory.numel() == 2048
    optimizer.release_gpu_memory()
    optimizer.reserve_gpu_memory()
    assert ring.slots[0].memory.numel() == 2048
    params[0].decoupled_grad = torch.ones(SIZES[0])  # float32: the chunks are smaller, their slots are not
    optimizer.step()
    assert ring.slots[0].memory.numel() <= 2560


def test_the_factor_belongs_to_the_gradients(on_host: list[torch.Tensor]) -> None:
    def prepared(clips: int) -> tuple[FusedOffloadAdam, torch.nn.Parameter]:
        param = param_of(torch.ones(300))
        on_host.append(param)
        optimizer = FusedOffloadAdam([param], betas=(0.0, 0.0), eps=1.0, offload=OffloadConfig(chunk_bytes=700))
        param.grad = torch.full((300,), 2.0)
        for _ in range(clips):
            optimizer.clip_grad_norm_(1.0)
        return optimizer, param

    def first_moment(optimizer: FusedOffloadAdam, param: torch.nn.Parameter) -> float:
        optimizer.step()
        return float(optimizer.state[param]["exp_avg"][0])

    optimizer, param = prepared(1)
    clipped = 2.0 / (math.sqrt(1200) + 1e-6)
    assert param.grad is not None
    assert torch.equal(param.grad, torch.full((300,), 2.0))
    assert first_moment(optimizer, param) == pytest.approx(clipped)
    assert first_moment(optimizer, param) == pytest.approx(clipped)  # the same gradients once more
    param.grad = torch.full((300,), 2.0)
    assert first_moment(optimizer, param) == 2.0

    optimizer, param = prepared(2)
    expected = torch.nn.Parameter(torch.ones(300))
    expected.grad = torch.full((300,), 2.0)
    for _ in range(2):
        torch.nn.utils.clip_grad_norm_([expected], 1.0)
    assert first_moment(optimizer, param) == expected.grad[0].item()

    optimizer, param = prepared(1)
    assert param.grad is not None
    optimizer.zero_grad(set_to_none=False)
    param.grad += 2.0
    assert first_moment(optimizer, param) == 2.0

    optimizer, param = prepared(1)
    assert param.grad is not None
    param.grad += 1.0
    before = snapshot(optimizer)
    for refused in (optimizer.step, lambda: optimizer.clip_grad_norm_(1.0)):
        with pytest.raises(RuntimeError, match="clip_grad_norm_"):
            refused()
    assert_same_snapshot(snapshot(optimizer), before)
    optimizer.zero_grad(set_to_none=False)
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()


@pytest.mark.parametrize("norm_type", [2.0, 3.0, math.inf])
@pytest.mark.parametrize("hosted", [(0, 1, 2, 3), (1, 2)], ids=["all", "some"])
@pytest.mark.parametrize("decoupled", [False, True])
def test_norm_and_factor_are_those_of_torch(
    on_host: list[torch.Tensor], norm_type: float, hosted: tuple[int, ...], decoupled: bool
) -> None:
    """Of gradients of several dtypes, on the host and on the device, twice in a row."""
    dtypes = (torch.bfloat16, torch.float32, torch.bfloat16, torch.float32)
    values = [randn((50, 3), index, dtype=dtype) for index, dtype in enumerate(dtypes)]
    theirs = [param_of(value) for value in values]
    params = [param_of(value) for value in values]
    on_host += [params[index] for index in hosted]
    optimizer = FusedOffloadAdam([{"params": [param]} for param in params], use_decoupled_grad=decoupled)
    for index, (param, other) in enumerate(zip(params, theirs, strict=True)):
        other.grad = randn((50, 3), 10 + index, dtype=other.dtype)
        setattr(param, "decoupled_grad" if decoupled else "grad", other.grad.clone())
    reference = FusedOffloadAdam([{"params": [param]} for param in theirs])
    for limit in (5.0, 3.0):
        expected = torch.nn.utils.clip_grad_norm_(theirs, limit, norm_type, foreach=False)
        norm = optimizer.clip_grad_norm_(limit, norm_type, foreach=False)
        assert norm.dtype == expected.dtype
        assert norm.item() == expected.item()
    for one in (optimizer, reference):
        one.step()
    for param, other in zip(params, theirs, strict=True):
        assert torch.equal(param, other)
        assert torch.equal(optimizer.state[param]["exp_avg"], reference.state[other]["exp_avg"])


def test_norms_that_are_not_finite(on_host: list[torch.Tensor]) -> None:
    param = param_of(torch.ones(300))
    on_host.append(param)
    optimizer = FusedOffloadAdam([param])
    assert optimizer.clip_grad_norm_(1.0).item() == 0.0  # no gradients
    param.grad = torch.full((300,), math.inf)
    with pytest.raises(RuntimeError, match=r"total norm of order 2\.0 .* is inf"):
        optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)
    assert optimizer.clip_grad_norm_(1.0).isinf()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (OffloadConfig(window_bytes=100), "leave OffloadConfig\\(window_bytes"),
        (OffloadConfig(transport="zero_copy"), 'transport="copy"'),
    ],
    ids=["window", "zero copy"],
)
def test_settings_that_do_not_go_with_them(on_host: list[torch.Tensor], config: OffloadConfig, words: str) -> None:
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    on_host.append(params[0])
    optimizer = FusedOffloadAdam(params[1:], offload=config)
    with pytest.raises(ValueError, match=words):
        optimizer.add_param_group({"params": params[:1]})
    assert len(optimizer.param_groups) == 1


def test_too_little_host_memory_is_refused_before_training(
    on_host: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    params = [torch.nn.Parameter(torch.ones(numel, dtype=torch.bfloat16)) for numel in (2048, 3000)]
    on_host += params
    # Two moments of 4 bytes, a remainder, gradients of 4 KiB and 8 KiB.
    state, grads = 10 * (2048 + 3072), 4096 + 8192
    options: dict[str, Any] = {"master_weights": True, "store_param_remainders": True}

    def left(nbytes: int) -> None:
        monkeypatch.setattr(host_limits, "available_host_bytes", lambda: (nbytes, "cgroup"))

    left(state + grads)
    optimizer = FusedOffloadAdam(params[:1], **options)
    optimizer.add_param_group({"params": params[1:]})
    left(state + grads - 1)
    message = (
        r"State \(0\.000 GB\) and gradients .* need 0\.000 GB .* only 0\.000 GB .*cgroup.* largest model that fits"
    )
    with pytest.raises(RuntimeError, match=message) as refused:
        FusedOffloadAdam(params, **options)
    assert "about 5.05e-06 billion parameters on a rank, this one has 5.05e-06" in str(refused.value)
    left((state + grads) // 2)
    with pytest.raises(RuntimeError, match=r"about 2\.87e-06 billion"):
        FusedOffloadAdam(params, **options)
    optimizer = FusedOffloadAdam(params[:1], **options)
    with pytest.raises(RuntimeError, match="largest model"):
        optimizer.add_param_group({"params": params[1:]})
    assert len(optimizer.param_groups) == 1
    params[1].requires_grad_(False)
    optimizer.add_param_group({"params": params[1:]})


def test_a_rule_of_two_phases_is_refused(on_host: list[torch.Tensor]) -> None:
    param = torch.nn.Parameter(torch.ones(4, 4))
    on_host.append(param)
    with pytest.raises(RuntimeError, match=r"FusedOffloadMuon works on whole parameters .* leave CPUOffloadPolicy out"):
        FusedOffloadMuon([param])


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (OffloadConfig(window_bytes=2**20), "leave OffloadConfig\\(window_bytes"),
        (OffloadConfig(transport="zero_copy"), 'transport="copy"'),
        (OffloadConfig(), "is page-locked now.*call model\\.cpu\\(\\)"),
    ],
    ids=["window", "zero copy", "with state"],
)
def test_parameters_that_are_page_locked_after_construction(
    on_host: list[torch.Tensor], config: OffloadConfig, words: str
) -> None:
    """FSDP page-locks in the first forward pass what load_state_dict(assign=True) has assigned."""
    param = torch.nn.Parameter(torch.ones(300))
    optimizer = FusedOffloadAdam([param], offload=config)
    if config == OffloadConfig():
        optimizer.initialize_state(param)
    on_host.append(param)
    param.data = param.data.clone()
    param.grad = torch.ones(300)
    if config.window_bytes:
        optimizer.prefetch()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=words):
            optimizer.step()
    assert torch.equal(param, torch.ones(300))
    assert "step" not in optimizer.param_groups[0]

    optimizer = FusedOffloadAdam([param])
    optimizer.step()
    on_host.clear()
    param.data = param.data.clone()
    with pytest.raises(RuntimeError, match="is not page-locked any more"):
        optimizer.step()


def test_parameters_that_are_page_locked_before_the_first_step(on_host: list[torch.Tensor]) -> None:
    param = torch.nn.Parameter(torch.ones(300))
    optimizer = FusedOffloadAdam([param])
    on_host.append(param)
    param.grad = torch.ones(300)
    optimizer.step()
    assert optimizer.state[param].storage.extent.layout.params_on_host


def test_their_state_is_offloaded_whatever_the_fraction(on_host: list[torch.Tensor]) -> None:
    params = [torch.nn.Parameter(torch.ones(300)) for _ in range(2)]
    on_host.append(params[1])
    optimizer = FusedOffloadAdam([{"params": [param]} for param in params], offload=OffloadConfig(fraction=0.0))
    for param in params:
        param.grad = torch.ones(300)
    optimizer.step()
    assert [optimizer.state[param].storage.extent.layout.resident for param in params] == [True, False]
