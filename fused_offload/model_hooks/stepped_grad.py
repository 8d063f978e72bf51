"""Placeholder for gradients that the backward pass has applied, and the error that it raises."""

from __future__ import annotations

from typing import Any

import torch

GONE = (
    "step_in_backward applies each gradient during the backward pass and frees it, so nothing can "
    "look at all gradients afterwards, or add to them: no clipping by global norm (clip by value: "
    "step_in_backward(model, clip_value=...)), no gradient scaler, no gradient accumulation. Call optimizer.step() "
    "after every backward pass. A parameter that several reentrant checkpoints use gets several gradients in one pass: "
    "checkpoint with use_reentrant=False. For any of these use the ordinary step: call detach() on the object that "
    "step_in_backward returned, or optimizer.step_in_backward(model).detach() where it was not kept."
)
"""Error message for computing with gradients that were applied during the backward pass."""


class SteppedGrad(torch.Tensor):
    """Placeholder without memory for a gradient that was taken over; computing with it raises."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, param: torch.Tensor) -> SteppedGrad:
        """Makes a placeholder that fits ``param.grad``."""
        result: SteppedGrad = torch.Tensor._make_wrapper_subclass(
            cls, param.shape, strides=param.stride(), dtype=param.dtype, device=param.device
        )
        return result

    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> Any:
        """Raises RuntimeError: nothing can be computed with the placeholder."""
        raise RuntimeError(GONE)

    @property
    def _local_tensor(self) -> torch.Tensor:
        """Raises RuntimeError where FSDP would add to the gradient in place."""
        raise RuntimeError(GONE)

    def __repr__(self) -> str:  # type: ignore[override]
        """Class, shape and dtype."""
        return f"SteppedGrad(shape={tuple(self.shape)}, dtype={self.dtype})"

    def fits(self, param: torch.Tensor) -> bool:
        """True if ``param.grad`` can be this placeholder."""
        return (self.shape, self.dtype, self.device) == (param.shape, param.dtype, param.device)
