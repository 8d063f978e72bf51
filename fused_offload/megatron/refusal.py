"""Errors of refused loads, and state dicts for the next attempt."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch

SAME_MODEL = "load one that was saved from the same model with the same groups"
"""Advice in the messages of refused loads."""

_DAMAGE = (ArithmeticError, AssertionError, AttributeError, LookupError, NotImplementedError, RecursionError)
"""Errors that Megatron raises for a state dict that is incomplete or of another kind."""


def refusal(error: Exception) -> Exception:
    """The error to raise for a failed load: a ValueError if the state dict is at fault.

    Args:
        error: the original error.
    """
    if isinstance(error, _DAMAGE) or type(error) is RuntimeError:
        return ValueError(
            f"The loaded state dict does not belong to this optimizer ({type(error).__name__}: {error}); {SAME_MODEL}."
        )
    return error


def allow_loading(optimizer: Any) -> None:
    """Allows one Megatron optimizer to make a state dict to load into, even after a failure.

    The optimizer stays marked as failed until a load succeeds.

    Args:
        optimizer: a MegatronOptimizer whose inner optimizer is a `MegatronAdam`.
    """
    make = optimizer.sharded_state_dict

    @functools.wraps(make)
    def sharded_state_dict(*args: Any, **kwargs: Any) -> Any:
        is_loading = inspect.signature(make).bind(*args, **kwargs).arguments.get("is_loading", False)
        with optimizer.optimizer.failure_set_aside() if is_loading else contextlib.nullcontext():
            return make(*args, **kwargs)

    optimizer.sharded_state_dict = sharded_state_dict


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All dense tensors with data in nested dictionaries, lists and tuples."""
    if isinstance(value, torch.Tensor):
        if value.layout == torch.strided and value.device.type != "meta":
            yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from tensors_in(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from tensors_in(inner)
