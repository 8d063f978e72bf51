"""Adapts one Megatron optimizer to the FusedOffloadAdam inside: checkpoints and lifecycle."""

from __future__ import annotations

from typing import Any

from .adam import MegatronAdam
from .api_probe import MegatronApi
from .distributed import DistributedHooks
from .fsdp import FsdpHooks, uses_fsdp
from .lifecycle import Lifecycle
from .overlap import Overlap
from .refusal import allow_loading
from .saving import write_in_place
from .undistributed import UndistributedHooks

_ADAPTED = "_fused_offload_hooks"


def adapt(optimizer: Any, api: MegatronApi) -> None:
    """Gives one Megatron optimizer the checkpoints and the lifecycle of its FusedOffloadAdam, once.

    Args:
        optimizer: result of Megatron's factory. It is left alone unless it is a MegatronOptimizer
            with a `MegatronAdam` inside, or one without parameters.
        api: the Megatron-Core that built the optimizer.
    """
    inner = getattr(optimizer, "optimizer", None)
    without_params = inner is None and getattr(optimizer, "is_stub_optimizer", False)
    if not isinstance(inner, MegatronAdam) and not without_params:
        return
    if getattr(optimizer, _ADAPTED, None) is not None:
        return
    hooks: list[Any] = [Lifecycle(optimizer)]
    if inner is not None:
        inner.check_groups()
        inner.reserve_gpu_memory()
        hooks += _hooks_with_state(optimizer, inner, api)
        allow_loading(optimizer)
    setattr(optimizer, _ADAPTED, hooks)


def _hooks_with_state(optimizer: Any, inner: MegatronAdam, api: MegatronApi) -> list[Any]:
    if not isinstance(optimizer, api.distrib.DistributedOptimizer):
        return [UndistributedHooks(optimizer)]
    hooks: list[Any] = []
    if uses_fsdp(getattr(optimizer, "model_chunks", [])):
        hooks.append(FsdpHooks(optimizer))
    else:
        hooks.append(DistributedHooks(optimizer, api))
        write_in_place()
    if inner.offload.window_bytes:
        hooks.append(Overlap(optimizer, inner))
    return hooks
