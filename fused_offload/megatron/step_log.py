"""Optional log of steps on the first rank: bytes moved and time taken."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from .adam import MegatronAdam

VARIABLE = "FUSED_OFFLOAD_LOG_INTERVAL"
"""Environment variable in the place of ``log_interval`` where no call can be changed."""


def checked_interval(log_interval: int | None) -> int | None:
    """Steps between two lines, or None for no lines.

    Args:
        log_interval: the argument of `install`; None reads the environment variable.

    Raises:
        ValueError: unless it is an integer of at least 1.
    """
    given: Any = os.environ.get(VARIABLE) or None if log_interval is None else log_interval
    if given is None:
        return None
    name = VARIABLE if log_interval is None else "log_interval"
    if isinstance(given, str) and given.isdecimal():
        given = int(given)
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise ValueError(f"Invalid {name}: {given!r}, it should be a number of steps, at least 1")
    return given


def log_steps(inners: Sequence[MegatronAdam], interval: int) -> None:
    """Prints one line for each optimizer after every ``interval`` calls of its ``step``.

    A line reports the latest completed step, some calls back, so nothing waits for the device.

    Args:
        inners: inner optimizers of one model, in order.
        interval: calls of ``step`` between two lines.
    """
    if torch.distributed.is_initialized() and torch.distributed.get_rank() != 0:
        return
    for index, inner in enumerate(inners):
        if any(isinstance(hook, _Printer) for hook in inner._optimizer_step_post_hooks.values()):
            continue  # another chain contains and logs it
        name = f"optimizer {index + 1} of {len(inners)}, " if len(inners) > 1 else ""
        inner.register_step_post_hook(_Printer(name, interval))


class _Printer:
    def __init__(self, name: str, interval: int) -> None:
        self._name = name
        self._interval = interval
        self._calls = 0

    def __call__(self, optimizer: Any, *_: Any) -> None:
        self._calls += 1
        if self._calls % self._interval:
            return
        report = optimizer.last_step_report()
        text = "no step has ended on the GPU yet, or all state is on the CPU" if report is None else str(report)
        masters = f"; masters stay on the GPU with {optimizer.master_owner}" if optimizer.master_owner else ""
        print(f"fused-offload: {self._name}at step {self._calls}: {text}{masters}", flush=True)
