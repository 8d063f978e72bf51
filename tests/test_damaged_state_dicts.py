"""Damaged state dicts: refused with ValueError or TypeError and without any effect, or training on
stays finite.
"""

from __future__ import annotations

import copy
import functools
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import helpers
import pytest
import torch
from helpers import FormatsCase, assert_same_snapshot, param_of, randn, snapshot
from hypothesis import HealthCheck, Phase, given, note, seed, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import fused_offload
from fused_offload import FusedOffloadAdam
from fused_offload.params.dense import has_data

device = helpers.device

FORMATS = {
    "fp32": FormatsCase(master="fp32"),
    "fp16": FormatsCase(torch.float16, torch.float16, "fp16"),
    "uint8": FormatsCase(torch.uint8, torch.uint8, "remainder"),
}
each_format = pytest.mark.parametrize("format", FORMATS)


class Model(nn.Module):
    """Parameters of two dtypes, of which two have state of one shape."""

    def __init__(self, device: str) -> None:
        super().__init__()
        # No scalar of `JUNK` has the shape of a state.
        shapes: list[tuple[int, ...]] = [(5,), (12, 13), (12, 13), (1,)]
        dtypes = [torch.bfloat16, torch.bfloat16, torch.float32, torch.float32]
        for index, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True)):
            self.register_parameter(f"p{index}", param_of(randn(shape, index, device, dtype)))


def make(device: str, format: str) -> tuple[Model, FusedOffloadAdam]:
    model = Model(device)
    params = list(model.parameters())
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.25, "tag": "second"}]
    optimizer = FusedOffloadAdam(groups, weight_decay=0.1, **FORMATS[format].arguments())
    train(model, optimizer)
    return model, optimizer


def train(model: Model, optimizer: FusedOffloadAdam) -> None:
    for group in optimizer.param_groups:
        if group["lr"] is None:  # may be set after a load
            group["lr"] = 0.1
    for step in range(2):
        for index, param in enumerate(model.parameters()):
            param.grad = randn(param.shape, 10 * step + index, param.device.type, param.dtype)
        optimizer.step()


def deeply_nested() -> Any:
    return functools.reduce(lambda nested, _: [nested], range(5000), [])


def recursive() -> Any:
    found: list[Any] = []
    found.append(found)
    return found


JUNK: list[Callable[[], Any]] = [
    *[
        functools.partial(lambda value: value, value)
        for value in (None, True, -1, 0, 3, 1.5, 2**20, 2**33, 10**400, 1j, float("nan"), float("inf"), "x", b"5")
    ],
    list,
    dict,
    object,
    lambda: (0.9,),
    lambda: (0.5, 2.0),
    lambda: [0, 0],
    lambda: {"exp_avg": 1},
    deeply_nested,
    recursive,
    lambda: torch.tensor(-1.0),
    lambda: torch.tensor(float("nan")),
    lambda: torch.ones(2),
    lambda: torch.ones((), device="meta"),
]


def freed(value: torch.Tensor) -> torch.Tensor:
    value = value.clone()
    value.untyped_storage().resize_(0)
    return value


TENSOR_DAMAGE: list[Callable[[torch.Tensor], Any]] = [
    lambda value: value.flatten(),
    lambda value: value[None],
    lambda value: value[:-1] if value.dim() else value[None, None],
    lambda value: value.t().contiguous() if value.dim() == 2 else value,
    lambda value: value.to(torch.int16),
    lambda value: value.to(torch.int32),
    lambda value: value.to(torch.uint8),
    lambda value: value.to(torch.float64),
    lambda value: value.to(torch.complex64),
    lambda value: value.bool(),
    lambda value: value.to_sparse(),
    lambda value: value.to("meta"),
    lambda value: value.abs().float().requires_grad_(),
    lambda value: torch.zeros((), device=value.device).expand(value.shape),
    lambda value: value.tolist(),
    lambda value: value.cpu().float().numpy(),
    freed,
]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of everything in a state dict, but not of what lies deeper in a value."""
    found = [path] if path else []
    if len(path) == 4:
        return found
    if isinstance(value, dict):
        found += [place for key, inner in value.items() for place in places(inner, (*path, key))]
    elif isinstance(value, list):
        found += [place for index, inner in enumerate(value) for place in places(inner, (*path, index))]
    return found


def is_sound(value: Any) -> bool:
    """Whether a value can be damaged in all the ways of `TENSOR_DAMAGE`."""
    return isinstance(value, torch.Tensor) and has_data(value) and not (value.is_complex() or value.requires_grad)


def damage(draw: Callable[[Any], Any], state_dict: dict[str, Any]) -> str:
    """Damages one place and says how."""
    path = draw(st.sampled_from(places(state_dict)))
    parent = functools.reduce(lambda inner, key: inner[key], path[:-1], state_dict)
    value = parent[path[-1]]
    how = draw(st.sampled_from(["delete", "junk", "key", "rename", "swap", "tensor", "tensor"]))
    if how == "tensor" and is_sound(value):
        number = draw(st.integers(0, len(TENSOR_DAMAGE) - 1))
        parent[path[-1]] = TENSOR_DAMAGE[number](value)
        return f"tensor damage {number} at {path}"
    number = draw(st.integers(0, len(JUNK) - 1))
    if how == "delete":
        del parent[path[-1]]
    elif how == "key" and isinstance(parent, dict):
        parent[draw(st.sampled_from(["step", "unknown", 7, (1, 2)]))] = JUNK[number]()
    elif how == "rename" and isinstance(parent, dict):
        parent[draw(st.sampled_from(["exp_avg", "lr", 1, None]))] = parent.pop(path[-1])
    elif how == "swap":
        other = draw(st.sampled_from(list(parent) if isinstance(parent, dict) else range(len(parent))))
        parent[path[-1]], parent[other] = parent[other], value
    else:
        parent[path[-1]] = JUNK[number]()
    return f"{how} {number} at {path}"


def assert_refused(error: Exception, *, foreign: bool) -> None:
    frames = traceback.extract_tb(error.__traceback__)
    ours = any(Path(frame.filename).parent == Path(fused_offload.__file__).parent for frame in frames)
    assert isinstance(error, (ValueError, TypeError)) or (foreign and not ours), "".join(
        traceback.format_exception(error)
    )


def check(model: Model, optimizer: FusedOffloadAdam, load: Callable[[], Any], *, foreign: bool = False) -> bool:
    """Whether the load succeeded.

    Args:
        foreign: errors of torch's own functions, before they call the optimizer, may be of any
            kind.
    """
    before, groups = snapshot(optimizer), optimizer.param_groups
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            load()
    except Exception as error:
        assert_refused(error, foreign=foreign)
        assert optimizer.param_groups is groups
        assert_same_snapshot(snapshot(optimizer), before)
        train(model, optimizer)
        loaded = False
    else:
        train(model, optimizer)
        loaded = True
    for param in model.parameters():
        assert param.isfinite().all()
        assert all(optimizer.get_unscaled_state(param, key).isfinite().all() for key in ("exp_avg", "exp_avg_sq"))
    optimizer.state_dict()
    return loaded


def damaged_core(model: Model, optimizer: FusedOffloadAdam, data: st.DataObject) -> bool:
    """Whether a damaged state dict in either layout was loaded."""
    layout = data.draw(st.sampled_from(["state_dict", "torch_state_dict"]))
    state_dict = copy.deepcopy(getattr(optimizer, layout)())
    damage_some(data, state_dict)
    return check(model, optimizer, lambda: optimizer.load_state_dict(state_dict))


def damaged_dcp(model: Model, optimizer: FusedOffloadAdam, data: st.DataObject) -> bool:
    """Whether a damaged state dict of torch.distributed.checkpoint was loaded."""
    state_dict = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    damage_some(data, state_dict)
    return check(model, optimizer, lambda: set_optimizer_state_dict(model, optimizer, state_dict), foreign=True)


def damage_some(data: st.DataObject, state_dict: dict[str, Any]) -> None:
    for _ in range(data.draw(st.integers(1, 2))):
        if places(state_dict):
            note(damage(data.draw, state_dict))


KINDS = {"core": damaged_core, "torch.distributed.checkpoint": damaged_dcp}


def fuzz(device: str, format: str, kind: str, examples: int) -> None:
    """Loads that many damaged state dicts, each into an optimizer of its own."""
    loaded = []

    @seed(list(FORMATS).index(format))
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def load(data: st.DataObject) -> None:
        loaded.append(KINDS[kind](*make(device, format), data))

    load()
    print(f"{format}, {kind}: {len(loaded)} damaged, {sum(loaded)} loaded")
    assert 0 < sum(loaded) < len(loaded)


@pytest.mark.parametrize("kind", KINDS)
@each_format
def test_damaged_state_dicts(device: str, format: str, kind: str) -> None:
    fuzz(device, format, kind, 15)


@pytest.mark.large
@pytest.mark.parametrize("kind", KINDS)
@each_format
def test_many_damaged_state_dicts(device: str, format: str, kind: str) -> None:
    fuzz(device, format, kind, 250)
