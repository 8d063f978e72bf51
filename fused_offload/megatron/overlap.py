"""Prefetch of a Megatron optimizer's window under backward passes, in every pipeline schedule."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from fused_offload.model_hooks.auto_prefetch import AutoPrefetch

from .adam import MegatronAdam

_OWNER = "_fused_offload_owner"


class Overlap:
    """Starts the prefetch from the forward passes of the model chunks.

    Forward passes are counted per rank and step, which works for all pipeline schedules, virtual
    stages and any number of microbatches.

    In the first steps, and in loops that call the chunks in another way, the prefetch starts with
    the reduction of the last microbatch's gradients. That is detected at the bucket groups and at
    ``finish_grad_sync``, since frameworks overwrite ``finalize_model_grads_func``.
    """

    def __init__(self, distributed: Any, inner: MegatronAdam) -> None:
        """Wraps methods of model chunks and bucket groups, and the optimizer's ``zero_grad``.

        Args:
            distributed: a DistributedOptimizer.
            inner: its inner optimizer, configured with a window.
        """
        self._inner = weakref.ref(inner)  # the model may outlive the optimizer
        self._prefetch: AutoPrefetch = inner.attach(*distributed.model_chunks)
        for chunk in distributed.model_chunks:
            chunk.finish_grad_sync = self._after_prefetch(chunk.finish_grad_sync, lambda: True)
            groups = [*getattr(chunk, "bucket_groups", []), *getattr(chunk, "expert_parallel_bucket_groups", [])]
            for group in groups:
                group.start_grad_sync = self._after_prefetch(group.start_grad_sync, functools.partial(_is_last, group))
        zero_grad = distributed.zero_grad

        @functools.wraps(zero_grad)
        def begin_iteration(*args: Any, **kwargs: Any) -> Any:
            self._prefetch.begin_iteration()  # the previous iteration may have ended without a step
            return zero_grad(*args, **kwargs)

        distributed.zero_grad = begin_iteration

    def _after_prefetch(self, method: Any, is_last: Callable[[], bool]) -> Callable[..., Any]:
        while (owner := getattr(method, _OWNER, None)) is not None and owner() is None:
            method = method.__wrapped__  # removes the wrapper of an optimizer that was freed

        @functools.wraps(method)
        def prefetch_first(*args: Any, **kwargs: Any) -> Any:
            inner = self._inner()
            if (
                inner is not None
                and inner.is_attached
                and self._prefetch.budget_bytes is None
                and is_last()
                and not inner.window_bytes()  # else a forward pass has started it
            ):
                self._prefetch.prefetch()
            return method(*args, **kwargs)

        setattr(prefetch_first, _OWNER, self._inner)
        return prefetch_first


def _is_last(bucket_group: Any) -> bool:
    return bool(getattr(bucket_group, "is_last_microbatch", True))
