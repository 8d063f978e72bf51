"""Shards of quantised model parameters whose masters belong to the inner optimizer.

The optimizer steps a stand-in for each shard. What it writes is rounded to the dtype that the
parameter stands for, as Megatron's own masters are before they are cast. Megatron's functions then
find amaxes and scales, cast, and gather.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fused_offload.params.dense import has_own_memory
from fused_offload.params.dtensors import local_of

from .adam import MegatronAdam
from .api_probe import MegatronApi

_OWNED = "_fused_offload_owns_quantised"
_COPIED = ("copy_tensor_model_parallel_attributes", "copy_gtp_attributes")


class QuantisedShard(torch.Tensor):
    """Stand-in for this rank's part of a quantised model parameter, ``[stop - start]``.

    Attributes:
        model_param: the parameter.
        start: first element of the part in the flattened parameter.
        stop: one past the last element.
        rounded: ``[stop - start]`` memory for the updated values in the parameter's nominal dtype,
            or None between steps.
        is_written: True if `rounded` holds the values of the last step.
    """

    model_param: torch.Tensor
    start: int
    stop: int
    rounded: torch.Tensor | None
    is_written: bool

    @staticmethod
    def __new__(cls, model_param: torch.Tensor, start: int, stop: int) -> Any:
        """Makes a stand-in without memory."""
        made = torch.Tensor._make_wrapper_subclass(
            cls, (stop - start,), dtype=model_param.dtype, device=model_param.device
        )
        made.model_param, made.start, made.stop = model_param, start, stop
        made.rounded, made.is_written = None, False
        return made

    def quantize_(self, values: torch.Tensor) -> QuantisedShard:
        """Takes the updated values, ``[stop - start]`` float32."""
        assert self.rounded is not None
        self.rounded.copy_(values)
        self.is_written = True
        return self

    def dequantize(self, *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The parameter's present values, ``[stop - start]``."""
        return self.model_param.detach().float().to(dtype).reshape(-1)[self.start : self.stop]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Class, dtype and place; there are no elements."""
        return f"QuantisedShard({self.dtype}, [{self.start}, {self.stop}))"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuses every operation: there are no elements."""
        if func is torch.ops.aten.detach.default:
            made = cls(args[0].model_param, args[0].start, args[0].stop)
            made.__dict__.update(args[0].__dict__)
            return made
        raise NotImplementedError(f"{func} of a shard of a quantised parameter")


def is_quantised_param(param: torch.Tensor) -> bool:
    """True if a model parameter's class stands for other tensors."""
    return not has_own_memory(local_of(param))


def own_masters(config: Any, model_chunks: Sequence[Any], api: MegatronApi) -> None:
    """Makes a precision-aware optimizer own all masters, whatever the FP8 recipe.

    Megatron keeps masters of 16-bit parameters, too, on the GPU with a recipe other than delayed,
    because TransformerEngine's FusedAdam could not write quantised parameters. They stay there for
    ``qk_clip``, which writes them, and where Megatron hands quantised values on in gradients'
    memory.

    Args:
        config: Megatron's OptimizerConfig, whose flag is set.
        model_chunks: the wrapped model, not by Megatron-FSDP.
        api: the installed Megatron-Core.
    """
    has_quantised = any(
        param.requires_grad and is_quantised_param(param) for chunk in model_chunks for param in chunk.parameters()
    )
    reuses_grads = bool(getattr(config, "reuse_grad_buf_for_mxfp8_param_ag", False))
    gathers = all(getattr(getattr(chunk, "ddp_config", None), "fp8_param_gather", False) for chunk in model_chunks)
    clips = any(getattr(getattr(chunk, "config", None), "qk_clip", False) for chunk in model_chunks)
    owns = has_quantised and gathers and not (reuses_grads or clips) and api.casts_shards
    setattr(config, _OWNED, owns)
    if owns or not (has_quantised or reuses_grads or clips):
        config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True


def owns_quantised(config: Any) -> bool:
    """True if the optimizer that is built for this configuration owns masters of quantised parameters."""
    return bool(getattr(config, _OWNED, False))


def with_stand_ins(build: Callable[..., Any], api: MegatronApi) -> classmethod[Any, Any, Any]:
    """``DistributedOptimizer._build_model_and_main_param_groups`` with stand-ins in its groups.

    Args:
        build: the function of Megatron's own class method.
        api: the installed Megatron-Core.
    """

    def build_with_stand_ins(cls: Any, gbuf_ranges: Any, param_gbuf_map: Any, ranges: Any, config: Any) -> Any:
        groups = build(cls, gbuf_ranges, param_gbuf_map, ranges, config)
        if owns_quantised(config):
            model_groups, _, shard_groups, fp32_groups, _ = groups
            for model_group, shards, fp32, group_range in zip(
                model_groups, shard_groups, fp32_groups, ranges, strict=True
            ):
                for index, model_param in enumerate(model_group):
                    if is_quantised_param(model_param):
                        gbuf_index, dtype, bucket = param_gbuf_map[model_param]
                        place = gbuf_ranges[gbuf_index][dtype][bucket]["param_map"][model_param]["param"]
                        shards[index] = _stand_in(model_param, place, api)
                group_range["orig_group"]["params"] = [*fp32, *shards]
        return groups

    return classmethod(build_with_stand_ins)


def _stand_in(model_param: torch.Tensor, place: Any, api: MegatronApi) -> QuantisedShard:
    stand_in: QuantisedShard = QuantisedShard(model_param, place.start, place.end)
    stand_in._fp8_dtype = getattr(model_param, "_fp8_dtype", None)  # type: ignore[attr-defined]
    copies = [getattr(api.distrib.tensor_parallel, name, None) for name in _COPIED]
    for copy in (*copies, getattr(api.distrib, "copy_optimizer_param_metadata", None)):
        if copy is not None:
            copy(stand_in, model_param)
    return stand_in


class QuantisedShards:
    """The stand-ins of one DistributedOptimizer."""

    def __init__(self, distributed: Any, inner: MegatronAdam, api: MegatronApi) -> None:
        """Fills in the masters: from the values before quantisation where the model has kept them.

        Args:
            distributed: a DistributedOptimizer that was just built.
            inner: its inner optimizer.
            api: the installed Megatron-Core.
        """
        self._distributed = distributed
        self._inner = inner
        self._api = api
        self._stand_ins = [
            shard for group in distributed.shard_float16_groups for shard in group if isinstance(shard, QuantisedShard)
        ]
        for stand_in in self._stand_ins:
            _seed(inner, stand_in)
        for group in distributed.model_float16_groups:
            for param in group:
                if hasattr(param, "clear_high_precision_init_val"):
                    param.clear_high_precision_init_val()

    def __bool__(self) -> bool:
        """True if there are any."""
        return bool(self._stand_ins)

    def take_memory(self) -> None:
        """Allocates memory for the values of a step, before anything changes."""
        for dtype in {stand_in.dtype for stand_in in self._stand_ins}:
            mine = [stand_in for stand_in in self._stand_ins if stand_in.dtype == dtype]
            sizes = [stand_in.numel() for stand_in in mine]
            whole = torch.empty(sum(sizes), dtype=dtype, device=mine[0].device)
            for stand_in, rounded in zip(mine, whole.split(sizes), strict=True):
                stand_in.rounded, stand_in.is_written = rounded, False

    def release_memory(self) -> None:
        """Drops it."""
        for stand_in in self._stand_ins:
            stand_in.rounded, stand_in.is_written = None, False

    def cast(self) -> None:
        """Writes the model's quantised parameters, as Megatron does from its own masters.

        All ranks of the data-parallel group take part. Outside of a step the values are those of
        the masters in host memory.
        """
        distributed = self._distributed
        with torch.no_grad():
            params: list[Any] = []
            masters: list[Any] = []
            starts: list[Any] = []
            for param, shard, start in zip(*self._shards_of_all(), strict=True):
                expand = getattr(distributed, "_expand_quantized_param_shard_for_cast", None)
                parts = ([param], [shard], [start]) if expand is None else expand(param, shard, start)
                for whole, part in zip((params, masters, starts), parts, strict=True):
                    whole.extend(part)
            self._api.distrib.quantize_param_shard(params, masters, starts, distributed.data_parallel_group)

    def _shards_of_all(self) -> Any:
        """Every quantised parameter of the buffers, this rank's values or None, and their start."""
        groups = self._distributed.shard_fp32_from_float16_groups
        before = [list(group) for group in groups]
        try:
            for group, shards in zip(groups, self._distributed.shard_float16_groups, strict=True):
                group[:] = [self._values(shard) if isinstance(shard, QuantisedShard) else None for shard in shards]
            return self._distributed._get_fp8_params_and_shard_fp32_from_fp8()
        finally:
            for group, members in zip(groups, before, strict=True):
                group[:] = members

    def _values(self, stand_in: QuantisedShard) -> torch.Tensor:
        if stand_in.is_written and stand_in.rounded is not None:
            return stand_in.rounded
        master = self._inner.get_unscaled_state(stand_in, "master_param")
        return master.to(stand_in.device).to(stand_in.dtype)


def _seed(inner: MegatronAdam, stand_in: QuantisedShard) -> None:
    param: Any = stand_in.model_param
    if hasattr(param, "get_high_precision_init_val"):
        values = param.get_high_precision_init_val().detach().reshape(-1)[stand_in.start : stand_in.stop].float()
    else:
        values = stand_in.dequantize()
    inner.set_scaled_state(stand_in, "master_param", values)


def quantised_names(chunk: Any) -> Iterator[tuple[str, str]]:
    """Name and class of each trainable quantised parameter of a wrapped model."""
    for name, param in chunk.named_parameters():
        if param.requires_grad and is_quantised_param(param):
            yield name, type(local_of(param)).__name__
