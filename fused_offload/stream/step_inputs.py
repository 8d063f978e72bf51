"""The inputs of one step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fused_offload.params.tracker import Updates
from fused_offload.rules.base import UpdateRule


class ScalerInputs(NamedTuple):
    """Signals of a gradient scaler for one step.

    Attributes:
        grad_scale: one-element tensor that divides the gradients, or None.
        found_inf: one-element tensor, nonzero to skip the step, or None.
    """

    grad_scale: torch.Tensor | None = None
    found_inf: torch.Tensor | None = None

    def on(self, device: torch.device) -> ScalerInputs:
        """The same signals on a device; does not wait for GPUs unless ``device`` is the CPU."""
        if device.type == "cpu":
            return ScalerInputs(*[None if signal is None else signal.cpu() for signal in self])
        return ScalerInputs(*[None if signal is None else signal.to(device, non_blocking=True) for signal in self])

    def skipped_on_host(self) -> bool:
        """True if the host knows already that the step is skipped; never waits for a GPU."""
        found_inf = self.found_inf
        return found_inf is not None and found_inf.device.type == "cpu" and bool(found_inf.item())

    def grad_scale_on_host(self) -> float | None:
        """The scale as a float, for parameters on the CPU."""
        return None if self.grad_scale is None else float(self.grad_scale.item())


class StepInputs(NamedTuple):
    """All that a step needs apart from its plan.

    Attributes:
        rule: the update rule.
        updates: parameters and gradients.
        values: `UpdateRule.step_values` by group.
        skip_rows: `UpdateRule.skip_rows` by group.
        scaler: a gradient scaler's signals.
        grad_factors: one-element tensors that gradients in host memory are multiplied by on the
            device, one after the other, each time rounded to the gradients' dtype.
    """

    rule: UpdateRule
    updates: Updates
    values: Mapping[int, Any]
    skip_rows: Mapping[int, Sequence[tuple[float, ...]]]
    scaler: ScalerInputs
    grad_factors: tuple[torch.Tensor, ...] = ()

    def on(self, device: torch.device) -> StepInputs:
        """The same inputs with the tensors of values and scaler on ``device``."""
        values = {group: self.rule.values_on(values, device) for group, values in self.values.items()}
        return self._replace(values=values, scaler=self.scaler.on(device))
