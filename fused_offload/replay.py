"""What changes between replays of a captured step, at addresses that do not, and what must not change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .kernels.adam import AmpSignals
from .kernels.reference import AdamScalars


class Cells:
    """One-element tensors at addresses of their own, for what kernels of a replayed step read."""

    def __init__(self, device: torch.device) -> None:
        """Takes no memory yet."""
        self._device = device
        self._cells: dict[str, torch.Tensor] = {}

    def hold(self, name: str, value: torch.Tensor | None, default: float | None = None) -> torch.Tensor | None:
        """A value in its cell, on the current stream.

        Args:
            name: which cell.
            value: one-element tensor on the device, or None.
            default: what a missing value is; without one there is no cell.
        """
        if value is None and default is None:
            return None
        if name not in self._cells:
            with torch.inference_mode(False):  # steps outside that mode write it too
                self._cells[name] = torch.empty(1, dtype=torch.float32, device=self._device)
        cell = self._cells[name]
        return cell.copy_(value.view(1)) if value is not None else cell.fill_(default or 0.0)


def with_lr_rows(
    corrections: Mapping[int, list[tuple[float, float]]], scalars: Mapping[int, AdamScalars], most: int
) -> dict[int, list[tuple[float, float]]]:
    """Each group's learning rate, step and corrections, as many rows in every step, so that they stay where they are.

    Args:
        corrections: both bias corrections by the number of skips.
        scalars: with the learning rate, which is not in the rows where it is a tensor on the device, and the step.
        most: rows of corrections.
    """
    rows = {}
    for group, pairs in corrections.items():
        lr, step = scalars[group].lr, scalars[group].step
        first = (0.0 if isinstance(lr, torch.Tensor) else lr, float(step))
        rows[group] = [first, *pairs, *[(1.0, 1.0)] * (most - len(pairs))]
    return rows


def with_lr_in(rows: torch.Tensor, scalars: AdamScalars) -> AdamScalars:
    """Learning rate, unless it is a tensor already, and step as the kernel finds them in the rows of `with_lr_rows`."""
    lr = scalars.lr if isinstance(scalars.lr, torch.Tensor) else rows.view(-1)[:1]
    return scalars._replace(lr=lr, step=rows.view(-1)[1:2])


def launch_key(scalars: Mapping[int, AdamScalars], signals: Mapping[int | None, AmpSignals]) -> Any:
    """All values that launches are given, and addresses of what they read; equal for steps that replay each other.

    Args:
        scalars: hyperparameters of each group, learning rate and step in device memory.
        signals: of each group.
    """
    values = []
    for group, given in scalars.items():
        assert isinstance(given.lr, torch.Tensor)
        assert isinstance(given.step, torch.Tensor)
        fixed = given._replace(lr=0.0, bias_correction1=0.0, bias_correction2=0.0, step=0)
        values.append((group, given.lr.data_ptr(), given.lr.dtype, given.step.data_ptr(), fixed))
    addresses = [
        (group, [None if cell is None else cell.data_ptr() for cell in given[:4]], given.skips_before)
        for group, given in signals.items()
    ]
    return values, addresses
