"""Replacement methods of one Megatron optimizer of whole parameters, bound to the instance."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from fused_offload.kernels.formats import FP32
from fused_offload.state.convert import check_storable

from .adam import MegatronAdam
from .param_checkpoint import refresh_megatrons_master
from .refusal import SAME_MODEL, refusal, tensors_in


class UndistributedHooks:
    """Replaces methods of one Float16OptimizerWithFloat16Params or FP32Optimizer.

    The former keeps fp32 masters of 16-bit parameters on the GPU; the latter has none.
    """

    def __init__(self, optimizer: Any) -> None:
        """Binds the methods.

        Args:
            optimizer: one of these, with a `MegatronAdam` as its inner optimizer.
        """
        self._optimizer = optimizer
        self._inner: MegatronAdam = optimizer.optimizer
        self._load = optimizer.load_state_dict
        optimizer.init_state_fn = self.make_state
        optimizer.load_state_dict = self.load_state_dict
        optimizer.reload_model_params = self.reload_model_params

    def make_state(self, inner: MegatronAdam, config: Any = None) -> None:
        """Creates state in host memory, to load a checkpoint into.

        Args:
            inner: the inner optimizer.
            config: not used.
        """
        inner.dummy_step()

    def _masters(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """16-bit parameters of the model, each with its master."""
        groups = getattr(self._optimizer, "float16_groups", [])
        for params, masters in zip(groups, getattr(self._optimizer, "fp32_from_float16_groups", []), strict=True):
            yield from zip(params, masters, strict=True)

    def reload_model_params(self, state_dict: Any = None) -> None:
        """Updates masters from loaded model weights; moments and step counts stay.

        Args:
            state_dict: must be None, as for Megatron's own method.

        Raises:
            ValueError: with a state dict.
        """
        if state_dict is not None:
            raise ValueError(
                "reload_model_params takes masters from a state dict only with --use-distributed-optimizer. Add it, or "
                "leave --load-main-params-from-ckpt out."
            )
        for param, master in self._masters():
            refresh_megatrons_master(master, param.detach())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads state, masters and gradient scaler.

        If it raises after a first change, steps are refused until a load succeeds.

        Raises:
            ValueError: for a state dict that does not belong to this optimizer.
            TypeError: for values that cannot be stored.
        """
        inner = self._inner
        groups = inner.param_groups
        try:
            self._check_masters(state_dict)
            self._load(state_dict)
        except BaseException as error:
            if inner.param_groups is not groups or inner.has_live_state(tensors_in(state_dict)):
                inner.failure = repr(error)
            if isinstance(error, Exception):
                raise refusal(error) from error
            raise

    def _check_masters(self, state_dict: dict[str, Any]) -> None:
        """Checks masters before anything is changed; Megatron copies them last, unchecked."""
        groups = getattr(self._optimizer, "fp32_from_float16_groups", None)
        if groups is None:
            return
        saved = state_dict.get("fp32_from_fp16_params", state_dict.get("fp32_from_fp16", ()))
        if [len(group) for group in saved] != [len(group) for group in groups]:
            raise ValueError(
                f"loaded state dict has master weights of {[len(group) for group in saved]} parameters in its groups, "
                f"but this optimizer has {[len(group) for group in groups]}; {SAME_MODEL}"
            )
        for given, master in zip(itertools.chain(*saved), itertools.chain(*groups), strict=True):
            if not isinstance(given, torch.Tensor):
                raise TypeError(f"loaded state dict has a {type(given).__name__} as master weights, not a tensor")
            check_storable("master weights", FP32, given)
            if given.shape != master.shape:
                raise ValueError(
                    f"loaded state dict has master weights of shape {tuple(given.shape)}, but the parameter has "
                    f"{tuple(master.shape)}; {SAME_MODEL}"
                )
