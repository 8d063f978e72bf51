"""Placement of a parameter: the device that steps it, and whether its memory is elsewhere."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .dtensors import is_offloaded_by_fsdp, local_of


class Placement(NamedTuple):
    """Place of one parameter's step, and of the parameter.

    Attributes:
        device: device that steps the parameter.
        on_host: parameter and gradient are in host memory, and are copied to ``device`` for the
            step.
    """

    device: torch.device
    on_host: bool


def placement_of(param: torch.Tensor) -> Placement:
    """Placement of a parameter as it is now.

    A parameter that FSDP keeps in page-locked host memory (``CPUOffloadPolicy``) is stepped by the
    GPU of its mesh, every other one by the device that it is on.
    """
    local = local_of(param)
    if is_offloaded_by_fsdp(param) and local.is_pinned():
        return Placement(torch.device("cuda", torch.cuda.current_device()), on_host=True)
    return Placement(local.device, on_host=False)
