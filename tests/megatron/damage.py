"""Damaged state dicts: one place of a nested structure is removed, replaced or cut."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import torch

Path = tuple[Any, ...]


def copied(value: Any) -> Any:
    """A copy of nested dictionaries, lists and tuples with copies of the tensors in it."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: copied(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(copied(inner) for inner in value)
    return value


def _paths(value: Any, path: Path = ()) -> Iterator[Path]:
    if path:
        yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _paths(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _paths(inner, (*path, index))


def _other(value: Any, draw: random.Random) -> Any:
    """Something else than a value."""
    anything = [None, "x", [], {}, (), object(), torch.zeros(3), b"", 2**70]
    if isinstance(value, torch.Tensor):
        flat = value.reshape(-1)
        changed = [
            flat[:-1],
            torch.cat([flat, flat[:1]]),
            flat[:0],
            value.unsqueeze(0) if value.dim() != 1 else flat.reshape(1, -1)[:, 1:],
            value.long(),
            value.to(torch.complex64),
            value.bool(),
            value.to(torch.int16),
            value.to("meta"),
            flat.to_sparse(),
        ]
        return draw.choice(changed + anything[:6])
    if isinstance(value, (bool, int, float)):
        return draw.choice([-1, 1.5, math.inf, -math.inf, math.nan, "5", -(2**40), *anything])
    return draw.choice(anything)


def damaged(state_dict: Any, seed: int) -> tuple[Any, str]:
    """A damaged copy, and what was done to it.

    Args:
        state_dict: nested dictionaries and lists with tensors.
        seed: which damage.
    """
    draw, result = random.Random(seed), copied(state_dict)
    # Few entries are not inside the tensors' part; they are drawn as often as those.
    paths = list(_paths(result))
    outside = [path for path in paths if "param_state" not in path]
    path = draw.choice(outside if draw.random() < 0.5 else paths)
    *way, last = path
    owner = result
    for key in way:
        owner = owner[key]
    kind = draw.choice(("removed", "replaced", "replaced"))
    if kind == "removed":
        del owner[last]
        return result, f"{path} removed"
    value = _other(owner[last], draw)
    owner[last] = value
    return result, f"{path} replaced by {type(value).__name__} {getattr(value, 'shape', value)}"
