"""Megatron-FSDP, version 1: a DistributedOptimizer over its shards, with moments in host memory.

Megatron-FSDP owns the master weights: its fp32 shards are the optimizer's parameters. After each
step it makes the model's parameters from them. So the optimizer keeps moments only. Checkpoints
save and load them in host memory.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fused_offload.params.dtensors import distributed_like, is_distributed, local_of

from .adam import MegatronAdam, inner_of

_SPLITS = "megatron.core.transformer.fsdp_dtensor_checkpoint"
_CHUNKS = "megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor"
_WRAPPED = "_leaves_state_on_host"
_KNOWN_CHUNK = "_fused_offload_chunk"
_CHUNK_METHODS = ("__create_chunk_list__", "__create_write_items__")


def uses_fsdp(model_chunks: Sequence[Any]) -> bool:
    """True if Megatron-FSDP, version 1, wraps the model."""
    return any(getattr(getattr(chunk, "ddp_config", None), "use_megatron_fsdp", False) for chunk in model_chunks)


def take_flags(inner: MegatronAdam, config: Any) -> None:
    """Sets flags that Megatron itself sets too late, and only with TransformerEngine.

    Args:
        inner: the inner optimizer; updated.
        config: Megatron's OptimizerConfig.
    """
    inner.master_weights, inner.master_owner = False, "Megatron-FSDP"
    inner.use_decoupled_grad = bool(config.use_precision_aware_optimizer)


class FsdpHooks:
    """Replaces methods of one DistributedOptimizer that updates shards of Megatron-FSDP."""

    def __init__(self, distributed: Any) -> None:
        """Binds the methods.

        Args:
            distributed: a DistributedOptimizer whose inner optimizer is a `MegatronAdam`.

        Raises:
            RuntimeError: if this release of Megatron-Core lacks one of the methods or functions.
        """
        self._distributed = distributed
        leave_state_on_host()
        # Megatron-Bridge and NeMo-RL copy tensors between these lists after every load.
        distributed.model_float16_groups, distributed.shard_fp32_from_float16_groups = [], []
        distributed.reload_model_params = self.reload_model_params
        for name in ("sharded_param_state_fsdp_dtensor", "_init_optimizer_states_with_dummy_values"):
            if not hasattr(distributed, name):
                raise RuntimeError(_unknown(f"DistributedOptimizer.{name}"))
            setattr(distributed, name, getattr(self, name))

    @property
    def inner(self) -> MegatronAdam:
        """The inner optimizer."""
        return inner_of(self._distributed)

    def reload_model_params(self, state_dict: Any = None) -> None:
        """Does nothing: Megatron-FSDP owns the masters.

        Args:
            state_dict: not used.
        """

    def _init_optimizer_states_with_dummy_values(self) -> None:
        """Creates state and step counts to load into. Changes no parameter."""
        self.inner.dummy_step()
        for group in self.inner.param_groups:
            group.setdefault("step", 0)

    def sharded_param_state_fsdp_dtensor(self, is_loading: bool = False) -> dict[str, Any]:
        """State and settings by parameter name, in the order of the groups, equal on all ranks.

        Args:
            is_loading: not used. Missing state is always created, so that a checkpoint is complete.

        Returns:
            Dictionaries like those of Megatron's own method. Moments are DTensors over their
            storage, for a reader to fill in, or new ones if the stored format has scales. Each
            parameter's state also has a ``step``, as in torch's optimizers.
        """
        self._init_optimizer_states_with_dummy_values()
        packed = self.inner.packed_with_steps()
        params = [param for group in self.inner.param_groups for param in group["params"]]
        names = [self._distributed._param_name(param) for param in params]
        for index, values in packed["state"].items():
            for value in values.values():
                if is_distributed(value):
                    setattr(local_of(value), _KNOWN_CHUNK, _chunk_of(params[index]))
        settings = {
            names[index]: {key: value for key, value in group.items() if key != "params"}
            for group in packed["param_groups"]
            for index in group["params"]
        }
        state = {names[index]: values for index, values in packed["state"].items()}
        return {"state": state, "param_to_group_meta": settings}


def _chunk_of(param: Any) -> Any:
    """This rank's chunk of a parameter, or None if the chunk depends on the other ranks.

    Megatron-FSDP notes which elements of the flat parameter each shard has. They determine the
    chunk if nothing else divides the parameter.
    """
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
    from torch.distributed.tensor import Shard

    part = getattr(param, "megatron_fsdp_slice", None)
    divided = [placement for placement in param._spec.placements if not placement.is_replicate()]
    if part is None or len(divided) != 1 or type(divided[0]) is not Shard or divided[0].dim != 0:
        return None
    sizes = local_of(param).shape
    row_numel = param.shape[1:].numel()
    if part.start % row_numel or part.stop - part.start != sizes.numel():
        raise RuntimeError(
            f"Megatron-FSDP says that this rank has elements {part.start} to {part.stop} of a parameter of shape "
            f"{tuple(param.shape)}, but its shard has shape {tuple(sizes)}. Use a release that is listed in "
            "docs/megatron.md."
        )
    return ChunkStorageMetadata(offsets=torch.Size((part.start // row_numel, *(0 for _ in sizes[1:]))), sizes=sizes)


# -- Megatron's functions --------------------------------------------------------------------------


def leave_state_on_host() -> None:
    """Replaces functions of Megatron-FSDP, so that its checkpoints use state in host memory.

    Further calls do nothing, and the functions stay replaced.

    Gated MLPs, gated delta nets and fused projections of latent attention are saved in parts. Each
    part becomes a DTensor, which torch puts on the device of the mesh. A load would then fill in a
    copy on the GPU, and the moments in host memory would keep their old values.

    A rank's chunk is computed from its parameter where possible, without communication.

    Raises:
        RuntimeError: if this release of Megatron-Core lacks one of the functions.
    """
    for module_name, name, wrapped in (
        (_SPLITS, "make_fsdp_dtensor", _wrapped_make),
        (_SPLITS, "split_dtensor", _wrapped_split),
        (_CHUNKS, "gather_and_compute_chunk_metadata", _wrapped_gather),
    ):
        try:
            module = importlib.import_module(module_name)
            if name == "split_dtensor" and not hasattr(module, name):
                continue  # releases up to 0.18 split with make_fsdp_dtensor only
            function = getattr(module, name)
        except (ImportError, AttributeError):
            raise RuntimeError(_unknown(f"{module_name}.{name}")) from None
        if not hasattr(function, _WRAPPED):
            replacement = wrapped(function)
            setattr(replacement, _WRAPPED, True)
            setattr(module, name, replacement)


def _unknown(name: str) -> str:
    return (
        f"FusedOffloadAdam does not know this Megatron-FSDP: Megatron-Core lacks {name}. Releases that work are listed "
        "in docs/megatron.md."
    )


def _wrapped_make(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def make_over_host_memory(local_tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        made = make(local_tensor, *args, **kwargs)
        return _over(made, local_tensor.view(made._local_tensor.shape))

    return make_over_host_memory


def _wrapped_split(split: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    @functools.wraps(split)
    def split_over_host_memory(dtensor: Any, sections: Any, dim: int = 0, **kwargs: Any) -> Iterator[Any]:
        start = 0
        for part in split(dtensor, sections, dim=dim, **kwargs):
            size = part._local_tensor.shape[dim]
            yield _over(part, local_of(dtensor).narrow(dim, start, size))
            start += size

    return split_over_host_memory


def _over(made: Any, local: torch.Tensor) -> Any:
    """A DTensor over ``local`` if ``made`` is a copy of it on the GPU, else ``made``.

    The copy cannot be avoided: other ranks may keep this state on their GPUs, and all ranks take
    part in the checks among ranks that Megatron makes with it.
    """
    moved = made._local_tensor
    if local.device.type != "cpu" or moved.untyped_storage().data_ptr() == local.untyped_storage().data_ptr():
        return made
    kept = distributed_like(made, local)
    for name in _CHUNK_METHODS:
        if hasattr(moved, name):
            setattr(local, name, getattr(moved, name))
    return kept


def _wrapped_gather(gather: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(gather)
    def known_or_gathered(dtensor: Any) -> Any:
        known = getattr(dtensor._local_tensor, _KNOWN_CHUNK, None)
        return gather(dtensor) if known is None else known

    return known_or_gathered
