"""Replacement methods of one DistributedOptimizer, bound to the instance."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from fused_offload.params.dense import has_own_memory
from fused_offload.rules.arguments import checked_step

from .adam import MegatronAdam, inner_of
from .api_probe import REPLACED_METHODS, MegatronApi
from .bucket_padding import insert_bucket_padding, slices_unpadded_buffers
from .legacy_format import check_on_first_rank
from .param_checkpoint import check_values, read_values, refresh_megatrons_master, write_master, write_values
from .quantised_shards import QuantisedShards
from .refusal import refusal, tensors_in
from .remainders import holds_remainders
from .shards import Shards


class DistributedHooks:
    """Replaces methods of one DistributedOptimizer.

    All checkpoint formats go through `read_values` and `write_values`. A load puts only parameters
    on the GPU.
    """

    def __init__(self, distributed: Any, api: MegatronApi) -> None:
        """Binds the methods.

        Args:
            distributed: a DistributedOptimizer that was just built, whose inner optimizer is a
                `MegatronAdam`.
            api: the Megatron-Core that built it.
        """
        self._distributed = distributed
        self._api = api
        self._stock: dict[str, Any] = {}
        self._masters_are_remainders = False
        self._loaded: list[tuple[torch.Tensor, dict[str, Any]]] | None = None  # within a load
        self._gathers_for_slicing = False
        self.shards = Shards(distributed)
        self._quantised = QuantisedShards(distributed, self.inner, api)
        for name in REPLACED_METHODS:
            self._stock[name] = getattr(distributed, name)
            setattr(distributed, name, getattr(self, name))
        if self._quantised:
            distributed._copy_main_params_to_model_params = self._quantised.cast

    @property
    def inner(self) -> MegatronAdam:
        """The inner optimizer."""
        return inner_of(self._distributed)

    # -- training ----------------------------------------------------------------------------------

    def step_with_ready_grads(self) -> bool:
        """Steps the live model parameters, also after they were moved."""
        self.shards.follow_model_params()
        self._quantised.take_memory()
        try:
            return bool(self._stock["step_with_ready_grads"]())
        finally:
            self._quantised.release_memory()

    def prepare_grads(self) -> bool:
        """Hands the gradients to the inner optimizer, also after shards were replaced."""
        self.shards.follow_model_params()
        return bool(self._stock["prepare_grads"]())

    def reload_model_params(self, state_dict: Any = None) -> None:
        """Updates masters from loaded model weights; moments and step counts stay.

        Args:
            state_dict: a model's state dict with fp32 values for the masters; None takes the values
                of the parameters.
        """
        self.shards.follow_model_params()
        if state_dict is not None:
            values = self._distributed._build_model_param_to_state_dict_param_map(state_dict)
            for shard in self.shards:
                write_master(self.inner, shard.param, shard.slice_of(values[shard.model_param]))
        elif self.inner.master_weights:
            self.inner.reload_model_params()
        else:
            for shard in self.shards:
                if not shard.aliases:
                    refresh_megatrons_master(shard.param, shard.weights())

    # -- checkpoints -------------------------------------------------------------------------------

    def _get_main_param_and_optimizer_states(self, model_param: torch.Tensor) -> dict[str, torch.Tensor]:
        return read_values(self.inner, self.shards.of(model_param).param)

    def _set_main_param_and_optimizer_states(self, model_param: torch.Tensor, tensors: dict[str, Any]) -> None:
        param = self.shards.of(model_param).param
        if self._masters_are_remainders and param.dtype == torch.bfloat16 and has_own_memory(param):
            tensors = {**tensors, "param": tensors["param"].to(torch.int16)}
        check_values(self.inner, param, tensors)
        if self._loaded is None:
            write_values(self.inner, param, tensors)
        else:
            self._loaded.append((param, tensors))

    @contextlib.contextmanager
    def _all_or_nothing(self, given: Any) -> Iterator[None]:
        """Context that collects and checks loaded state, and stores it at the end.

        Args:
            given: the loaded state dict. Its tensors may be the live state, which the reader of the
                checkpoint has filled.

        Raises:
            ValueError: in the place of Megatron's errors for a state dict that does not fit.
                Nothing is changed then.
        """
        if self._loaded is not None:  # within another load
            yield
            return
        inner, scaler = self.inner, self._distributed.grad_scaler
        groups, scale = inner.param_groups, scaler.state_dict() if scaler else {}
        loaded: list[tuple[torch.Tensor, dict[str, Any]]] = []
        self._loaded = loaded
        try:
            with inner.failure_set_aside():
                yield
        except BaseException as error:
            inner.param_groups = groups
            if scaler:
                scaler.load_state_dict(scale)
            if inner.has_live_state(tensors_in(given)):
                inner.failure = repr(error)
            if isinstance(error, Exception):
                raise refusal(error) from error
            raise
        finally:
            self._loaded, self._masters_are_remainders = None, False
        if not loaded and len(self.shards):  # the state dict has groups only
            return
        try:
            for param, tensors in loaded:
                write_values(inner, param, tensors)
        except BaseException as error:
            inner.failure = repr(error)
            raise
        inner.failure = None

    def state_dict(self) -> Any:
        """Groups and gradient scaler, as in Megatron's own state dict."""
        with self.inner.only_groups(step_per_param=not self._api.distrib.HAVE_APEX_OR_TE):
            return self._stock["state_dict"]()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads groups, gradient scaler and, if the state dict has it, the parameters' state.

        Nothing is changed when it raises. If the reader of the checkpoint has already filled live
        state, steps are refused until a load succeeds.

        Raises:
            ValueError: for a state dict that does not belong to this optimizer, or that holds
                remainders without their parameters.
            TypeError: for values that cannot be stored.
        """
        self.shards.follow_model_params()
        self.inner.dummy_step()  # Megatron would create missing state on the GPU
        step_per_param = not self._api.distrib.HAVE_APEX_OR_TE
        with self._all_or_nothing(state_dict), self.inner.only_groups(step_per_param=step_per_param):
            self._masters_are_remainders = holds_remainders(self._distributed, self.shards, state_dict)
            groups = [dict(group) for group in state_dict["optimizer"]["param_groups"]]
            if step_per_param:
                # Megatron then reads every group's step. Groups of TransformerEngine's FusedAdam
                # have none before their first step.
                groups = [{"step": 0, **group} for group in groups]
            for index, group in enumerate(groups):
                checked_step(group.get("step", 0), f" in group {index}")
            state_dict = {**state_dict, "optimizer": {**state_dict["optimizer"], "param_groups": groups}}
            self._stock["load_state_dict"](state_dict)

    def load_parameter_state_from_dp_zero(self, state_dict: Any, *, update_legacy_format: bool = False) -> None:
        """Loads the parameters' state in the legacy format.

        Raises:
            ValueError: for remainders in the place of masters, for the format before 2024, which
                has no masters, and for state that does not fit. All ranks raise it, before anything
                is changed.
        """
        if self.inner.master_weights and update_legacy_format:
            raise ValueError(
                "update_legacy_format cannot be loaded with a precision-aware optimizer: that format has no master "
                "weights. Load and save it once without --use-precision-aware-optimizer."
            )
        self.shards.follow_model_params()
        with self._all_or_nothing(state_dict):
            if not update_legacy_format:
                check_on_first_rank(self._distributed, state_dict)
            self._stock["load_parameter_state_from_dp_zero"](state_dict, update_legacy_format=update_legacy_format)

    def sharded_param_state_fully_reshardable(self, *args: Any, **kwargs: Any) -> Any:
        """As Megatron's own method, but correct with several padded buckets in a buffer, too."""
        self._gathers_for_slicing = slices_unpadded_buffers(self._stock["sharded_param_state_fully_reshardable"])
        try:
            return self._stock["sharded_param_state_fully_reshardable"](*args, **kwargs)
        finally:
            self._gathers_for_slicing = False

    def get_parameter_state_dp_zero(self, *args: Any, **kwargs: Any) -> Any:
        """As Megatron's own method; with bucket padding where the caller relies on it."""
        state = self._stock["get_parameter_state_dp_zero"](*args, **kwargs)
        if self._gathers_for_slicing and state is not None:
            insert_bucket_padding(state, self._distributed.buffers)
        return state
