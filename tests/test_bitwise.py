"""Whatever the chunks, the share of offloaded state and the split into parameters: the same bits in
everything.
"""

from __future__ import annotations

import itertools
from typing import Any

import helpers
import pytest
import torch
from helpers import DTYPES, FormatsCase, Oracle, Snapshot, assert_same_snapshot, param_of, randn, snapshot
from pairs import combinations

from fused_offload import FusedOffloadAdam, OffloadConfig

device = helpers.device

STEPS = 10
SIZES = [1, 127, 128, 129, 300]
CASES = [
    (param_dtype, FormatsCase(exp_avg, exp_avg_sq, master))
    for param_dtype, exp_avg, exp_avg_sq in itertools.product(DTYPES, repeat=3)
    for master in ("none", "fp32", "fp16", "remainder")
    if master != "remainder" or param_dtype == torch.bfloat16
]
STOCHASTIC_CASES = [
    (torch.bfloat16, FormatsCase(torch.uint8, torch.uint8, "remainder")),
    (torch.bfloat16, FormatsCase(torch.uint8, torch.bfloat16, "fp32")),
    (torch.float16, FormatsCase(torch.bfloat16, torch.uint8, "fp16")),
    (torch.float32, FormatsCase(torch.bfloat16, torch.bfloat16)),
]
ONE_BLOCK, ODD, ONE_MIB, EVERYTHING = 1, 3_333, 2**20, 2**40
LARGE_CONFIGS = [
    OffloadConfig(chunk_bytes=chunk_bytes, fraction=fraction)
    for chunk_bytes, fraction in itertools.product((ODD, ONE_MIB, EVERYTHING), (0.0, 0.3, 1.0))
]


def case_id(value: object) -> str:
    if isinstance(value, FormatsCase):
        return "-".join([*(str(dtype).removeprefix("torch.") for dtype in value[:2]), value.master])
    if isinstance(value, OffloadConfig):
        return f"{value.chunk_bytes}B-{value.fraction}"
    return str(value).removeprefix("torch.")


every_case = combinations(("param_dtype", "formats"), CASES, lambda case: (case[0], *case[1]), ids=case_id)


def run(
    device: str,
    sizes: list[int],
    formats: FormatsCase,
    config: OffloadConfig,
    *,
    param_dtype: torch.dtype = torch.bfloat16,
    grad_dtype: torch.dtype | None = None,
    steps: int = STEPS,
    scale: float = 1.0,
    **options: Any,
) -> tuple[FusedOffloadAdam, list[torch.nn.Parameter], Snapshot]:
    """Trains parameters of these sizes, cut from one run of numbers, and looks at every bit."""
    total = sum(sizes)
    params = [param_of(part) for part in randn(total, 1, device, param_dtype).split(sizes)]
    options = {"lr": 1e-2, "weight_decay": 0.1, "use_decoupled_grad": True, **formats.arguments(), **options}
    optimizer = FusedOffloadAdam(params, offload=config, **options)
    for step in range(steps):
        grad = (randn(total, 100 + step) * scale * 10.0 ** (step % 4 - 2)).to(device, grad_dtype or param_dtype)
        for param, part in zip(params, grad.split(sizes), strict=True):
            param.decoupled_grad = part
        if step == 5:
            optimizer.param_groups[0]["lr"] = 3e-3
        optimizer.step()
    return optimizer, params, snapshot(optimizer)


@every_case
def test_chunks_and_fractions(device: str, param_dtype: torch.dtype, formats: FormatsCase) -> None:
    _, _, expected = run(
        device, SIZES, formats, OffloadConfig(chunk_bytes=EVERYTHING, fraction=0.0), param_dtype=param_dtype
    )
    assert expected.steps == [STEPS]
    for config in (
        OffloadConfig(chunk_bytes=ONE_BLOCK, fraction=0.3),
        OffloadConfig(chunk_bytes=ODD, fraction=1.0),
    ):
        _, _, actual = run(device, SIZES, formats, config, param_dtype=param_dtype)
        assert_same_snapshot(actual, expected)


@pytest.mark.parametrize(("param_dtype", "formats"), STOCHASTIC_CASES, ids=case_id)
def test_stochastic_rounding_knows_no_chunks(device: str, param_dtype: torch.dtype, formats: FormatsCase) -> None:
    def outcome(config: OffloadConfig, seed: int = 5) -> Snapshot:
        options = {"stochastic_rounding": True, "rounding_seed": seed}
        return run(device, [*SIZES, 700], formats, config, param_dtype=param_dtype, **options)[2]

    expected = outcome(OffloadConfig(chunk_bytes=EVERYTHING, fraction=0.0))
    assert_same_snapshot(outcome(OffloadConfig(chunk_bytes=ONE_BLOCK, fraction=0.3)), expected)
    assert_same_snapshot(outcome(OffloadConfig(chunk_bytes=ODD)), expected)
    with pytest.raises(AssertionError):
        assert_same_snapshot(outcome(OffloadConfig(chunk_bytes=ODD), seed=6), expected)


@pytest.mark.parametrize("config", LARGE_CONFIGS, ids=case_id)
@pytest.mark.parametrize(
    ("param_dtype", "formats"),
    [
        (torch.float32, FormatsCase()),
        (torch.bfloat16, FormatsCase(torch.bfloat16, torch.bfloat16, "remainder")),
        (torch.float16, FormatsCase(torch.float16, torch.float16, "fp16")),
        (torch.bfloat16, FormatsCase(torch.uint8, torch.uint8, "remainder")),
    ],
    ids=case_id,
)
def test_state_larger_than_every_chunk(
    device: str, param_dtype: torch.dtype, formats: FormatsCase, config: OffloadConfig
) -> None:
    """Against the oracle, so that all configurations cannot be wrong alike; 1 MiB is less than the
    state here.
    """
    sizes = [200_003, 5, 70_001]
    optimizer, params, _ = run(device, sizes, formats, config, param_dtype=param_dtype, steps=2)
    for index, (param, part) in enumerate(zip(params, randn(sum(sizes), 1).to(param_dtype).split(sizes), strict=True)):
        oracle = Oracle(part, formats, index)
        for step in range(2):
            grad = (randn(sum(sizes), 100 + step) * 10.0 ** (step % 4 - 2)).to(param_dtype).split(sizes)[index]
            oracle.step(grad, optimizer.param_groups[0], step + 1)
        oracle.check(optimizer, param, f"parameter {index}:")
    report = optimizer.memory_report()
    host, resident = sum(report.host_bytes.values()), sum(report.resident_bytes.values())
    assert host + resident > 2**20
    assert (host == 0) == (config.fraction == 0.0)
    assert (resident == 0) == (config.fraction == 1.0)


@every_case
def test_one_param_and_the_same_data_in_many(device: str, param_dtype: torch.dtype, formats: FormatsCase) -> None:
    whole, (param,), _ = run(device, [1200], formats, OffloadConfig(chunk_bytes=ODD), param_dtype=param_dtype)
    parts = [128, 256, 640, 176]
    split, params, _ = run(
        device, parts, formats, OffloadConfig(chunk_bytes=3000, fraction=0.3), param_dtype=param_dtype
    )
    helpers.assert_same_bits(torch.cat([p.detach() for p in params]), param.detach(), "parameter")
    for key in whole.state[param]:
        together = torch.cat([split.state[p][key].cpu() for p in params])
        helpers.assert_same_bits(together, whole.state[param][key], key)
        scales = [split.state[p].storage.stored(key).scale for p in params]
        if scales[0] is not None:
            helpers.assert_same_bits(
                torch.cat([scale.cpu() for scale in scales]),
                whole.state[param].storage.stored(key).scale,
                f"{key} scale",
            )


@pytest.mark.parametrize("grad_dtype", DTYPES, ids=case_id)
@pytest.mark.parametrize("param_dtype", DTYPES, ids=case_id)
def test_chunks_with_gradients_of_any_dtype(device: str, param_dtype: torch.dtype, grad_dtype: torch.dtype) -> None:
    runs = [
        run(device, SIZES, FormatsCase(), config, param_dtype=param_dtype, grad_dtype=grad_dtype)[2]
        for config in (OffloadConfig(chunk_bytes=EVERYTHING), OffloadConfig(chunk_bytes=ONE_BLOCK, fraction=0.3))
    ]
    assert_same_snapshot(*runs)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
@pytest.mark.parametrize("dtype", DTYPES, ids=case_id)
def test_chunks_at_the_ends_of_the_range(device: str, dtype: torch.dtype, scale: float) -> None:
    """Moments that underflow or become infinite do so in every chunking alike."""
    formats = FormatsCase(dtype, dtype)
    runs = [
        run(device, SIZES, formats, config, param_dtype=torch.float32, scale=scale)[2]
        for config in (OffloadConfig(chunk_bytes=EVERYTHING, fraction=0.0), OffloadConfig(chunk_bytes=ONE_BLOCK))
    ]
    assert_same_snapshot(*runs)


def test_a_different_bit_is_noticed(device: str) -> None:
    formats = FormatsCase(torch.float16, torch.float16, "fp32")
    (optimizer, params, expected) = run(device, SIZES, formats, OffloadConfig(), steps=2)
    optimizer.state[params[-1]].storage.stored("exp_avg_sq").scale[-1] *= 2
    with pytest.raises(AssertionError, match="exp_avg_sq scale of parameter 4"):
        assert_same_snapshot(snapshot(optimizer), expected)
