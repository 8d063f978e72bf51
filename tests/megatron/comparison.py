"""Bitwise comparison of scenario results."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch


def assert_same(actual: Any, expected: Any, what: str = "") -> None:
    """Same structure, numbers and bits; NaNs count as equal where their bits are."""
    assert type(actual) is type(expected), f"{what}: {type(actual).__name__}, not {type(expected).__name__}"
    if isinstance(expected, torch.Tensor):
        assert actual.dtype == expected.dtype, f"{what}: {actual.dtype}, not {expected.dtype}"
        assert actual.shape == expected.shape, f"{what}: {tuple(actual.shape)}, not {tuple(expected.shape)}"
        _assert_same_bits(actual, expected, what)
    elif isinstance(expected, Mapping):
        assert list(actual) == list(expected), f"{what}: {list(actual)}, not {list(expected)}"
        for key in expected:
            assert_same(actual[key], expected[key], f"{what}[{key!r}]")
    elif isinstance(expected, Sequence) and not isinstance(expected, str):
        assert len(actual) == len(expected), f"{what}: {len(actual)} entries, not {len(expected)}"
        for index, pair in enumerate(zip(actual, expected, strict=True)):
            assert_same(*pair, f"{what}[{index}]")
    else:
        assert actual == expected, f"{what}: {actual!r}, not {expected!r}"


def _assert_same_bits(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    flat, other = (tensor.contiguous().view(torch.uint8).reshape(-1) for tensor in (actual, expected))
    if not torch.equal(flat, other):
        different = (actual != expected).reshape(-1).nonzero()
        first = int(different[0]) if len(different) else 0
        raise AssertionError(
            f"{what}: {len(different)} of {actual.numel()} elements differ, first at {first}: "
            f"{actual.reshape(-1)[first].item()!r}, not {expected.reshape(-1)[first].item()!r}"
        )


def whole_state(ranks: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, torch.Tensor]]:
    """Masters and moments of whole parameters, put together from the shards of all ranks."""
    shards: dict[str, list[Any]] = {}
    for state in ranks:
        for name, shard in state.items():
            shards.setdefault(name, []).append(shard)
    whole = {}
    for name, parts in sorted(shards.items()):
        parts.sort(key=lambda part: part.start)
        for before, after in itertools.pairwise(parts):
            assert before.stop == after.start, f"{name}: nobody has elements from {before.stop} to {after.start}"
        whole[name] = {key: torch.cat([part.values[key] for part in parts]) for key in parts[0].values}
    return whole
