"""Starts the prefetch of the window from a model's own forward and backward passes."""

from __future__ import annotations

import contextlib
import math
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from .weak_hook import WeakHook

_ASSUMED_BYTES_PER_S = 40e9  # until a prefetch was timed
_MARGIN = 1.25  # on the copy time: beside forward and backward, copies are slower than alone
_MEMORY_CHECKS = 32  # per backward pass; each costs the host as much as launching a few kernels
_CALM_STEPS = 100  # steps without an allocator retry before a reduced window grows again


class Streams(Protocol):
    """Current streams at one point in time, one per device."""

    def again(self) -> AbstractContextManager[None]:
        """Makes these streams current within the context."""


class Prefetching(Protocol):
    """Methods of an optimizer that `AutoPrefetch` calls."""

    def prefetch(self) -> None:
        """Starts or continues the prefetch."""

    def cancel_prefetch(self) -> None:
        """Drops prefetched state."""

    def register_step_post_hook(self, hook: Callable[..., None]) -> Any:
        """Calls ``hook`` after each step."""

    def window_seconds(self, assumed_bytes_per_s: float) -> float:
        """Copy time of the window to the GPU, at an assumed rate until one was measured."""

    def allocated_bytes(self) -> int:
        """GPU bytes that are allocated now."""

    def allocation_retries(self) -> int:
        """Number of times so far that the allocator ran out of GPU memory and waited for some."""

    def window_bytes(self) -> int:
        """Bytes of state that is on the GPU or on its way there."""

    def _current_streams(self) -> Streams:
        """The current streams of the devices in use."""


def check_attach_arguments(models: Sequence[Any], microbatches: Any) -> None:
    """Refuses bad arguments of `OffloadOptimizer.attach` before anything is changed.

    Args:
        models: should be modules, at least one.
        microbatches: should be a positive integer or None.

    Raises:
        TypeError: for a model that is no ``torch.nn.Module``.
        ValueError: without a model, and for microbatches below 1.
    """
    if not models:
        raise ValueError("attach() needs the model: the module that the training loop calls for every microbatch")
    for model in models:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"attach() takes modules, one by one, but got {type(model).__name__}")
    if microbatches is not None and (
        isinstance(microbatches, bool) or not isinstance(microbatches, int) or microbatches < 1
    ):
        raise ValueError(f"Invalid microbatches: {microbatches!r}, it should be an integer of at least 1 or None")


class AutoPrefetch:
    """Prefetches from a model's own passes, so that copies end with the last backward pass.

    A fixed window is prefetched at once, at the beginning of the microbatch that leaves enough
    time. An ``"auto"`` window grows during the backward pass of the last microbatch, into memory
    that activations have freed. It never exceeds the peak memory of an iteration without a window.

    The window's memory stays in use until the write-back, under the next forward pass. Where the
    GPU has too little for both, torch's allocator waits for the write-back, and the window is
    halved.

    The model's hooks do not keep the optimizer alive: when it is gone, they do nothing.

    Attributes:
        budget_bytes: GPU bytes that the window may take now, or None for the configured size.
    """

    def __init__(
        self,
        optimizer: Prefetching,
        models: Sequence[torch.nn.Module],
        *,
        microbatches: int | None,
        window_bytes: int | str,
    ) -> None:
        """Registers hooks.

        Args:
            optimizer: starts the prefetch.
            models: modules that the training loop calls for every microbatch; all calls count.
            microbatches: number of calls before each step, or None for the number of the last step.
            window_bytes: as in OffloadConfig.
        """
        self.budget_bytes: int | None = 0 if window_bytes == "auto" else None
        self._optimizer_ref = weakref.ref(optimizer)
        self._given = microbatches is not None
        self._microbatches = microbatches or 1
        self._seen = 0
        self._steps = 0
        self._began: float | None = None
        self._iteration_seconds: float | None = None
        self._peak_bytes = 0
        self._limit = WindowLimit()
        self._warned = False
        self._forward_streams: Streams | None = None
        self._handles = [optimizer.register_step_post_hook(self._stepped)]
        begins, is_ready = WeakHook(self._forward_begins), WeakHook(self._grad_is_ready)
        self._handles += [model.register_forward_pre_hook(begins) for model in models]
        if window_bytes == "auto":
            self._handles += [param.register_post_accumulate_grad_hook(is_ready) for param in _evenly_spaced(models)]

    def detach(self) -> None:
        """Removes the hooks. The optimizer streams within its steps again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._optimizer is not None:
            self._optimizer.cancel_prefetch()

    @property
    def is_active(self) -> bool:
        """True while the hooks are registered."""
        return bool(self._handles)

    @property
    def _optimizer(self) -> Prefetching | None:
        return self._optimizer_ref()

    def _forward_begins(self, module: torch.nn.Module, _: Any) -> None:
        optimizer = self._optimizer
        if optimizer is None or not (module.training and torch.is_grad_enabled()):
            return  # the optimizer is gone, or this is an evaluation
        if self._given and self._seen >= self._microbatches:
            self.begin_iteration()  # no step came: it was skipped
        self._seen += 1
        self._forward_streams = optimizer._current_streams()
        if self._seen == 1:
            now = time.perf_counter()
            if self._began is not None:
                self._iteration_seconds = now - self._began
            self._began = now
        if self.budget_bytes is None and self._seen > self._microbatches - self._lead(optimizer):
            self.prefetch()

    def prefetch(self) -> None:
        """Starts or continues the prefetch, with memory from the streams of the last forward pass.

        Activations free memory of these streams. Gradient hooks may run under other streams: FSDP
        calls them under the one that reduces gradients.
        """
        optimizer, streams = self._optimizer, self._forward_streams
        if optimizer is not None:
            with contextlib.nullcontext() if streams is None else streams.again():
                optimizer.prefetch()

    def begin_iteration(self) -> None:
        """Drops microbatches and prefetched state of an iteration that ends without a step."""
        if self._optimizer is not None:
            self._optimizer.cancel_prefetch()
        self._seen = 0

    def _lead(self, optimizer: Prefetching) -> int:
        """Number of microbatches that the copies take."""
        if self._iteration_seconds is None:
            return 1
        needed = _MARGIN * optimizer.window_seconds(_ASSUMED_BYTES_PER_S)
        return max(1, math.ceil(needed / (self._iteration_seconds / self._microbatches)))

    def _grad_is_ready(self, _: torch.Tensor) -> None:
        optimizer = self._optimizer
        if optimizer is None:
            return
        window_bytes = optimizer.window_bytes()
        is_last = self._steps > 1 and self._seen >= self._microbatches
        if self._steps == 0 or (window_bytes and not is_last):
            return  # there is no state yet, or nothing to learn or to do
        allocated_bytes = optimizer.allocated_bytes()
        if not window_bytes:
            self._peak_bytes = max(self._peak_bytes, allocated_bytes)
        if is_last:
            self.budget_bytes = min(self._peak_bytes - allocated_bytes, self._limit.limit_bytes - window_bytes)
            self.prefetch()
            self._limit.used_bytes = optimizer.window_bytes()

    def _stepped(self, *_: Any) -> None:
        if self._given and self._seen != self._microbatches and self._steps > 1 and not self._warned:
            self._warned = True
            warnings.warn(
                f"attach(microbatches={self._microbatches}), but the model was called {self._seen} times before a "
                "step, so the prefetch starts at the wrong time. The results are the same.",
                stacklevel=2,
            )
        if not self._given and self._seen:
            self._microbatches = self._seen
        self._seen = 0
        self._steps += 1
        if self.budget_bytes is not None and self._optimizer is not None:
            self._limit.stepped(self._optimizer.allocation_retries())


class WindowLimit:
    """Size up to which a window may grow, adapted so that the allocator never waits for memory.

    Attributes:
        limit_bytes: maximum size of the window.
        used_bytes: its size now.
    """

    def __init__(self) -> None:
        """Starts without a limit."""
        self.limit_bytes = sys.maxsize
        self.used_bytes = 0
        self._retries: int | None = None
        self._calm_steps = 0

    def stepped(self, retries: int) -> None:
        """Limits the window to half its size if the allocator had to wait.

        The limit doubles after many steps without waiting.

        Args:
            retries: number of allocator retries so far.
        """
        if self._retries is not None and retries > self._retries and self.used_bytes:
            self.limit_bytes = self.used_bytes // 2
            self._calm_steps = 0
        else:
            self._calm_steps += 1
            if self._calm_steps >= _CALM_STEPS:
                self.limit_bytes = min(2 * self.limit_bytes, sys.maxsize)
                self._calm_steps = 0
        self._retries = retries


def _evenly_spaced(models: Sequence[torch.nn.Module]) -> list[torch.nn.Parameter]:
    """Parameters whose gradients arrive at about even distances in a backward pass."""
    params = [param for model in models for param in model.parameters() if param.requires_grad]
    distance = sum(param.numel() for param in params) / _MEMORY_CHECKS
    chosen = []
    since = math.inf
    for param in reversed(params):
        since += param.numel()
        if since >= distance:
            chosen.append(param)
            since = 0
    return chosen
