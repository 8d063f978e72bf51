"""What a DistributedOptimizer with FusedOffloadAdam inside does differently; bound to the instance, not the class."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from fused_offload.rules.arguments import checked_step
from fused_offload.state.entry import check_storable

from .adam import MegatronAdam, inner_of
from .api_probe import REPLACED_METHODS, Layout
from .bucket_padding import insert_bucket_padding, slices_unpadded_buffers
from .param_checkpoint import (
    are_remainders,
    check_values,
    read_values,
    refresh_megatrons_master,
    write_master,
    write_values,
)
from .refusal import refusal, tensors_in
from .shards import Shards

_REFUSED_REMAINDERS = (
    "This checkpoint's optimizer state holds the 16-bit remainders of TransformerEngine's store_param_remainders under "
    "the name of the fp32 master weights, turned into floats. In the {format} format they were gathered without the "
    "parameters that they belong to. Save it with OptimizerConfig.store_param_remainders=False or in the "
    "dp_reshardable format, or load it with the optimizer that wrote it."
)


class DistributedHooks:
    """Replaces methods of one DistributedOptimizer.

    Tensors of state go in and out as `read_values` and `write_values` say, in every format; nothing but parameters is
    ever put on the GPU for a load.
    """

    def __init__(self, distributed: Any, layout: Layout) -> None:
        """Binds the methods.

        Args:
            distributed: a DistributedOptimizer whose inner optimizer is a `MegatronAdam`, as it leaves its constructor.
            layout: the Megatron-Core it comes from.
        """
        self._distributed = distributed
        self._layout = layout
        self._stock: dict[str, Any] = {}
        self._masters_are_remainders = False
        self._loaded: list[tuple[torch.Tensor, dict[str, Any]]] | None = None  # within a load
        self._gathers_for_slicing = False
        self.shards = Shards(distributed)
        for name in REPLACED_METHODS:
            self._stock[name] = getattr(distributed, name)
            setattr(distributed, name, getattr(self, name))

    @property
    def inner(self) -> MegatronAdam:
        """The inner optimizer."""
        return inner_of(self._distributed)

    # -- training ------------------------------------------------------------------------------------------------

    def step_with_ready_grads(self) -> bool:
        """Steps the live model parameters, wherever they were moved since the last step."""
        self.shards.follow_model_params()
        return bool(self._stock["step_with_ready_grads"]())

    def prepare_grads(self) -> bool:
        """Hands the gradients to the parameters of the inner optimizer, whatever was put in their place."""
        self.shards.follow_model_params()
        return bool(self._stock["prepare_grads"]())

    def reload_model_params(self, state_dict: Any = None) -> None:
        """Takes over weights that were loaded into the model; moments and step counts stay.

        Args:
            state_dict: a model's state dict with fp32 values for the masters, or None to take the parameters.
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

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def _get_main_param_and_optimizer_states(self, model_param: torch.Tensor) -> dict[str, torch.Tensor]:
        return read_values(self.inner, self.shards.of(model_param).param)

    def _set_main_param_and_optimizer_states(self, model_param: torch.Tensor, tensors: dict[str, Any]) -> None:
        param = self.shards.of(model_param).param
        if self._masters_are_remainders and param.dtype == torch.bfloat16:
            tensors = {**tensors, "param": tensors["param"].to(torch.int16)}
        check_values(self.inner, param, tensors)
        if self._loaded is None:
            write_values(self.inner, param, tensors)
        else:
            self._loaded.append((param, tensors))

    @contextlib.contextmanager
    def _all_or_nothing(self, given: Any) -> Iterator[None]:
        """Collects and checks within the context what Megatron loads, and takes it over at the end.

        Args:
            given: what is loaded. Tensors of it may be the live state, which the reader of the checkpoint has filled.

        Raises:
            ValueError: in place of what Megatron raises for a state dict that does not fit; nothing is changed then.
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
        if not loaded and len(self.shards):  # groups alone
            return
        try:
            for param, tensors in loaded:
                write_values(inner, param, tensors)
        except BaseException as error:
            inner.failure = repr(error)
            raise
        inner.failure = None

    def state_dict(self) -> Any:
        """Groups and grad scaler, as Megatron's own."""
        with self.inner.only_groups(step_per_param=not self._layout.distrib.HAVE_APEX_OR_TE):
            return self._stock["state_dict"]()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Groups, grad scaler and, where they are part of it, the parameters' state.

        Raises:
            ValueError: for a state dict that does not belong to this optimizer, or whose masters cannot be told.
            TypeError: for values that cannot be stored. Nothing is changed in both cases. If the reader of the
                checkpoint has filled state in place, steps are refused until a load succeeds.
        """
        self.shards.follow_model_params()
        self.inner.dummy_step()  # where there is no state, Megatron would make all of it up on the GPU
        step_per_param = not self._layout.distrib.HAVE_APEX_OR_TE
        with self._all_or_nothing(state_dict), self.inner.only_groups(step_per_param=step_per_param):
            self._masters_are_remainders = self._holds_remainders(state_dict)
            groups = [dict(group) for group in state_dict["optimizer"]["param_groups"]]
            if step_per_param:  # Megatron then reads the step of every group; before the first step
                groups = [{"step": 0, **group} for group in groups]  # TransformerEngine's groups have none
            for group in groups:
                checked_step(group.get("step", 0))
            state_dict = {**state_dict, "optimizer": {**state_dict["optimizer"], "param_groups": groups}}
            self._stock["load_state_dict"](state_dict)

    def _holds_remainders(self, state_dict: dict[str, Any]) -> bool:
        if not self.inner.master_weights or "param_state" not in state_dict:
            return False
        state, kind = state_dict["param_state"], state_dict.get("param_state_sharding_type")
        if kind == "dp_reshardable":
            return are_remainders(self._loaded_shards(state))
        if kind == "fully_reshardable" and are_remainders(self._loaded_params(state)):
            raise ValueError(_REFUSED_REMAINDERS.format(format=kind))
        return False

    def _loaded_shards(self, state: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Masters and parameters out of the buckets of the dp_reshardable format."""
        for index, ranges in enumerate(self._distributed.gbuf_ranges):
            for dtype, buckets in ranges.items():
                for bucket, loaded in zip(buckets, state[index][dtype], strict=True):
                    whole = [tensors for tensors in loaded if not tensors["padding"]]
                    for model_param, tensors in zip(bucket["param_map"], whole, strict=False):
                        if model_param.dtype == torch.bfloat16 and isinstance(tensors.get("param"), torch.Tensor):
                            yield tensors["param"], self.shards.of(model_param).param

    def _loaded_params(self, state: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Masters and parameters of the fully_reshardable format, whole."""
        index = 0
        for buffer in self._distributed.buffers:
            for model_param in buffer.param_index_map:
                values = state[index].get("param", state[index].get("fp32_param"))
                index += 1
                if model_param.dtype == torch.bfloat16 and isinstance(values, torch.Tensor):
                    yield values, model_param

    def load_parameter_state_from_dp_zero(self, state_dict: Any, *, update_legacy_format: bool = False) -> None:
        """Takes over the parameters' state in the legacy format.

        Raises:
            ValueError: for remainders in place of masters, for the format before 2024, which names the parameters as
                masters, and for what does not fit; on all ranks, before anything is changed.
        """
        if self.inner.master_weights and update_legacy_format:
            raise ValueError(
                "update_legacy_format cannot be loaded with a precision-aware optimizer: that format has no master "
                "weights. Load and save it once without --use-precision-aware-optimizer."
            )
        self.shards.follow_model_params()
        with self._all_or_nothing(state_dict):
            if not update_legacy_format:
                self._agree_on(state_dict)
            self._stock["load_parameter_state_from_dp_zero"](state_dict, update_legacy_format=update_legacy_format)

    def _agree_on(self, state_dict: Any) -> None:
        """Checks on the first rank, which alone has read the file, what it is about to scatter; all raise alike."""
        group = self._distributed.data_parallel_group_gloo
        first = torch.distributed.get_process_group_ranks(group)[0]
        refused: list[Exception | None] = [None]
        if torch.distributed.get_rank() == first:
            try:
                self._distributed.split_state_dict_if_needed(state_dict)
                self._check_legacy(state_dict)
            except Exception as error:
                refused = [refusal(error)]
        torch.distributed.broadcast_object_list(refused, src=first, group=group)
        if refused[0] is not None:
            raise refused[0]

    def _check_legacy(self, state: Any) -> None:
        masters = []
        for index, buffer in enumerate(self._distributed.buffers):
            for dtype in self._distributed.gbuf_ranges[index]:
                tensors, numel = state[index][dtype], buffer.numel_unpadded
                if tensors["numel_unpadded"] != numel:
                    raise ValueError(
                        f"loaded state dict has {tensors['numel_unpadded']} elements in buffer {index}, here {numel}"
                    )
                for key in ("param", "exp_avg", "exp_avg_sq"):
                    if not isinstance(tensors[key], torch.Tensor) or tensors[key].shape != (numel,):
                        raise ValueError(f"loaded state dict has no tensor of {numel} elements as {key}")
                    check_storable(key, torch.float32, tensors[key], nonnegative=key == "exp_avg_sq")
                if buffer.param_dtype == torch.bfloat16:
                    masters.append((tensors["param"], None))
        if self.inner.master_weights and are_remainders(masters):
            raise ValueError(_REFUSED_REMAINDERS.format(format="legacy"))

    def sharded_param_state_fully_reshardable(self, *args: Any, **kwargs: Any) -> Any:
        """As Megatron's own; right also where a buffer has several padded buckets."""
        self._gathers_for_slicing = slices_unpadded_buffers(self._stock["sharded_param_state_fully_reshardable"])
        try:
            return self._stock["sharded_param_state_fully_reshardable"](*args, **kwargs)
        finally:
            self._gathers_for_slicing = False

    def get_parameter_state_dp_zero(self, *args: Any, **kwargs: Any) -> Any:
        """The state of all ranks, gathered."""
        state = self._stock["get_parameter_state_dp_zero"](*args, **kwargs)
        if self._gathers_for_slicing and state is not None:
            insert_bucket_padding(state, self._distributed.buffers)
        return state
