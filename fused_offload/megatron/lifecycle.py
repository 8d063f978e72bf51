"""Methods by which training loops move optimizer state; here it stays in host memory."""

from __future__ import annotations

from typing import Any

import torch

from fused_offload.params.dtensors import is_distributed

from .adam import MegatronAdam


class Lifecycle:
    """Binds these methods to one Megatron optimizer.

    They may be called in any order, any number of times.

    Between steps the state is in host memory, so there is nothing to move, and all tensors stay
    valid. The staging ring stays allocated between iterations, since allocating it again would cost
    more than keeping it.
    """

    def __init__(self, optimizer: Any) -> None:
        """Binds the methods.

        Args:
            optimizer: a MegatronOptimizer whose inner optimizer is a `MegatronAdam`, or None if it
                has no parameters.
        """
        self._optimizer = optimizer
        for name in (
            "offload_states",
            "release_offloaded_gpu_states",
            "reload_offloaded_states",
            "offload_optimizer_state_for_forward",
            "prefetch_optimizer_state_for_step",
            "prefetch_optimizer_state_for_gradient_finalization",
            "prefetch_optimizer_master_weights_for_step",
            "ensure_master_weights_for_param_sync",
            "ensure_master_weights_for_pre_forward_param_sync",
            "assert_master_weights_resident",
        ):
            setattr(optimizer, name, self.already_on_host)
        optimizer.synchronize_optimizer_state_for_checkpoint = self.synchronize
        optimizer.optimizer_state_offload_requires_pre_forward_param_sync = self.requires_param_sync
        optimizer.offload_to_cpu = self.release
        optimizer.restore_from_cpu = self.restore

    @property
    def _inner(self) -> MegatronAdam | None:
        inner = getattr(self._optimizer, "optimizer", None)
        return inner if isinstance(inner, MegatronAdam) else None

    def already_on_host(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing.

        Args:
            *args: not used. Callers name the part of the state to move.
            **kwargs: not used.
        """

    def synchronize(self, *args: Any, **kwargs: Any) -> None:
        """Waits until the last step's state has arrived in host memory.

        Args:
            *args: not used.
            **kwargs: not used.
        """
        if self._inner is not None:
            self._inner.synchronize()

    def release(self) -> None:
        """Waits, then frees the staging ring, for other uses of the GPU such as rollouts.

        As with Megatron's own optimizers, master weights that Megatron keeps on the GPU move to the
        host, and torch's cache of free GPU memory is emptied.
        """
        if self._inner is not None:
            self._inner.release_gpu_memory()
            self._move_megatrons_masters("cpu")
            torch.cuda.empty_cache()

    def restore(self) -> None:
        """Moves Megatron's master weights back to the GPU. State stays in host memory."""
        if self._inner is not None:
            self._move_megatrons_masters("cuda")

    def _move_megatrons_masters(self, device: str) -> None:
        inner = self._inner
        if inner is None or inner.master_weights:
            return
        for group in inner.param_groups:
            for param in group["params"]:
                if not is_distributed(param):  # a DTensor is a view of Megatron-FSDP's buffers
                    param.data = param.data.to(device)

    def requires_param_sync(self) -> bool:
        """Always False: a step writes both parameters and masters."""
        return False
