"""Quantised parameters: any chunks, places and order give the bits of whole ones, one by one."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from helpers import EXP_AVG_FORMATS, EXP_AVG_SQ_FORMATS, Snapshot, assert_same_bits, bits
from torch import nn

pytest.importorskip("triton")

from pairs import combinations
from quantised_stand_ins import CLASSES, Quantised, Whole, config, param_of
from simulated_device import SCHEDULES
from test_simulated_device import Device, run

from fused_offload import FusedOffloadAdam
from fused_offload.model_hooks import backward_step
from fused_offload.optimizer import OffloadOptimizer
from fused_offload.plan import planner
from fused_offload.plan.window_blocks import blocks_of
from fused_offload.rules.arguments import MASTER_FORMATS

SHAPES = ((256,), (2, 257), (30, 4), (1,), (7, 17), (130, 140), (256, 2), (3, 3), (128,))
"""One chunk, more than two, three in one, one element, tiles that end early, two chunks."""

FORMATS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16},
    "fp16": {
        "exp_avg_dtype": torch.float16,
        "exp_avg_sq_dtype": torch.float16,
        "master_weight_dtype": torch.float16,
    },
    "uint8": {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8, "store_param_remainders": True},
}
GROUPS = ({"lr": 1e-2, "weight_decay": 0.1}, {"lr": 3e-3, "weight_decay": 0.0})
SPLIT = 5
"""Parameters of the first group."""
SETTINGS = [{**GROUPS[index >= SPLIT], "position": index + 1} for index in range(len(SHAPES))]
"""Of each parameter; a plain one comes first."""


pytestmark = pytest.mark.filterwarnings("ignore:exp_avg_sq in torch.bfloat16 is rounded")


@pytest.fixture(autouse=True)
def fresh_notes() -> None:
    Quantised.calls.clear()
    Quantised.fails = None


@pytest.fixture(scope="module", autouse=True)
def small_pieces() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "blocks_of", lambda extents: blocks_of(extents, 8192))
        patch.setattr(backward_step, "PART_BYTES", 1000)
        yield


def values_of(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def grads_of(number: int) -> list[torch.Tensor | None]:
    """Gradients of one step; one parameter has none in the second and third."""
    grads: list[torch.Tensor | None] = [grad.bfloat16() for grad in values_of(100 + number)]
    if number in (1, 2):
        grads[number + 3] = None
    return grads


def make(device: Device, kind: str, formats: str, **options: Any) -> tuple[list[Any], FusedOffloadAdam]:
    """Quantised parameters between plain ones, in two groups."""
    params = [
        param_of(CLASSES[kind], device.tensor(values), index, dtype=torch.float32 if index == 6 else torch.bfloat16)
        for index, values in enumerate(values_of(0))
    ]
    plain = [nn.Parameter(device.tensor(torch.arange(numel).bfloat16())) for numel in (77, 300)]
    groups = [
        {"params": [plain[0], *params[:SPLIT]], **GROUPS[0]},
        {"params": [*params[SPLIT:], plain[1]], **GROUPS[1]},
    ]
    optimizer = FusedOffloadAdam(groups, master_weights=True, offload=config(**options), **FORMATS[formats])
    return params, optimizer


def set_grads(device: Device, params: list[Any], optimizer: OffloadOptimizer, number: int) -> None:
    by_id = {id(param): grad for param, grad in zip(params, grads_of(number), strict=True)}
    for group in optimizer.param_groups:
        for param in group["params"]:
            grad = by_id.get(id(param), torch.ones(param.shape, dtype=torch.bfloat16))
            param.grad = None if grad is None else device.tensor(grad.to(param.dtype))


def seen(device: Device, params: list[Any], optimizer: OffloadOptimizer) -> Snapshot:
    optimizer.synchronize()
    if device.sim is not None:
        device.sim.run_all()
    taken = device.snapshot(optimizer)
    return taken._replace(params=[*taken.params, *[bits(part) for param in params for part in param.internals()]])


def order() -> list[Any]:
    return [call.label for call in Quantised.calls]


# -- against whole parameters ----------------------------------------------------------------------

PLACEMENTS: dict[str, dict[str, Any]] = {
    "streamed": {},
    "half": {"fraction": 0.5},
    "resident": {"fraction": 0.0},
    "one chunk": {"chunk_bytes": 2**30},
    "tiny": {"chunk_bytes": 1},
    "zero copy": {"transport": "zero_copy", "chunk_bytes": "auto", "depth": "auto"},
}


@combinations(("kind", "formats", "placement"), itertools.product(CLASSES, FORMATS, PLACEMENTS))
def test_any_chunks_give_the_bits_of_whole_parameters(kind: str, formats: str, placement: str) -> None:
    params, optimizer = make(Device(None), kind, formats, **PLACEMENTS[placement])
    arguments = FORMATS[formats]
    stored = {
        "exp_avg": EXP_AVG_FORMATS[arguments.get("exp_avg_dtype", torch.float32)],
        "exp_avg_sq": EXP_AVG_SQ_FORMATS[arguments.get("exp_avg_sq_dtype", torch.float32)],
    }
    master = MASTER_FORMATS[arguments.get("master_weight_dtype", torch.float32)]
    others, _ = make(Device(None), kind, formats)
    plain = Whole(others, formats=stored, master=master)
    Quantised.calls.clear()
    for number in range(4):
        set_grads(Device(None), params, optimizer, number)
        optimizer.grad_scale, optimizer.found_inf = torch.full((1,), 4.0), torch.full((1,), float(number == 1))  # type: ignore[attr-defined]
        optimizer.step()
    assert order() == [index for number in (0, 2, 3) for index, grad in enumerate(grads_of(number)) if grad is not None]
    for call in Quantised.calls:
        assert (call.dtype, call.shape) == (torch.float32, SHAPES[call.label])
        assert call.is_contiguous
        assert call.is_plain
    for step, number in enumerate((0, 2, 3), 1):
        plain.step(grads_of(number), SETTINGS, step, 4.0)
    for index, (param, wanted) in enumerate(zip(params, others, strict=True)):
        for part, (a, b) in enumerate(zip(param.internals(), wanted.internals(), strict=True)):
            assert_same_bits(a, b, f"part {part} of parameter {index}")
        for key, value in plain.state[index]._asdict().items():
            if hasattr(value, "data"):
                stored_value = optimizer.state[param].storage.stored(key)
                assert_same_bits(stored_value.data, value.data, f"{key} of {index}")
                if value.scale is not None:
                    assert_same_bits(stored_value.scale, value.scale, f"scales of {key} of {index}")


# -- on the simulated device -----------------------------------------------------------------------


def steps(device: Device, kind: str, formats: str, way: str, **options: Any) -> list[Snapshot]:
    """Steps with gradients missing; with a window, in the backward pass, or with a skipped one."""
    params, optimizer = make(device, kind, formats, **options)
    model = nn.ParameterList(params)
    if way == "parts":
        optimizer.step_in_backward(model)
    Quantised.calls.clear()
    for number in range(4):
        if way == "parts":
            grads = [grad for grad in grads_of(number) if grad is not None]
            wanted = [param for param, grad in zip(params, grads_of(number), strict=True) if grad is not None]
            losses = [Product.apply(param, device.tensor(grad)) for param, grad in zip(wanted, grads, strict=True)]
            torch.stack(losses).sum().backward()
            device.random(300).mul_(2)
        else:
            set_grads(device, params, optimizer, number)
        if way == "window":
            optimizer.prefetch()
            device.random(300).mul_(2)
        if way == "scaler":
            optimizer.grad_scale = device.signal(4.0)  # type: ignore[attr-defined]
            optimizer.found_inf = device.signal(float(number == 1))  # type: ignore[attr-defined]
        optimizer.step()
        device.random(5000)  # in the place of what the step has dropped
    if way != "parts":
        made = [number for number in range(4) if way != "scaler" or number != 1]
        assert order() == [index for number in made for index, grad in enumerate(grads_of(number)) if grad is not None]
    return [seen(device, params, optimizer)]


class Product(torch.autograd.Function):
    """A loss whose gradient of the parameter is given."""

    @staticmethod
    def forward(ctx: Any, param: Any, grad: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(grad.to(param.dtype))
        return grad.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return ctx.saved_tensors[0].clone(), None


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaler": {},
    "window": {"window_bytes": 60_000},
    "small window": {"window_bytes": 12_000},
    "parts": {},
}
CASES = list(itertools.product(CLASSES, FORMATS, WAYS, (0.0, 0.5, 1.0)))


@pytest.mark.parametrize(
    ("number", "case"),
    [(n, case) if n % 5 == 0 else pytest.param(n, case, marks=pytest.mark.large) for n, case in enumerate(CASES)],
    ids=str,
)
def test_any_legal_order_gives_the_same_bits(number: int, case: tuple[str, str, str, float]) -> None:
    kind, formats, way, fraction = case
    scenario = partial(
        steps, kind=kind, formats=formats, way=way.removeprefix("small "), fraction=fraction, **WAYS[way]
    )
    run(scenario, SCHEDULES[number % len(SCHEDULES)])
