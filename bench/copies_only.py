"""The same chunks through the same ring without kernels.

What the pipeline would cost if computing were free.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from fused_offload import FusedOffloadAdam
from fused_offload.kernels.adam import launch as adam


@contextlib.contextmanager
def copies_only() -> Iterator[None]:
    """Steps taken inside launch no kernel.

    Plan, slots, copies, streams and events are those of a real step.
    """
    launch = adam.adam_step_

    def no_launch(*_: Any, **__: Any) -> None:
        """Replacement of the launch in the pipeline."""

    adam.adam_step_ = no_launch
    try:
        yield
    finally:
        adam.adam_step_ = launch


def run_copies_only(optimizer: FusedOffloadAdam) -> None:
    """Streams the state through the GPU and back, bit for bit, and waits.

    Parameters stay as they are.

    The optimizer has stepped before: a first step reads no state and would write back whatever its
    slots hold.
    """
    assert all(int(group.get("step", 0)) > 0 for group in optimizer.param_groups), "take a real step first"
    steps = [group["step"] for group in optimizer.param_groups]
    with copies_only():
        optimizer.step()
    optimizer.synchronize()
    # Nothing was trained, so nothing may have advanced the bias corrections.
    for group, step in zip(optimizer.param_groups, steps, strict=True):
        group["step"] = step
