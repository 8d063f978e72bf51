"""Synchronous distributed checkpoints, written without a copy of the state."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import Any

import torch

_STRATEGIES = "megatron.core.dist_checkpointing.strategies"
_WRAPPED = "_writes_in_place"


def write_in_place() -> None:
    """Makes Megatron's synchronous saves write state without a copy in host memory.

    Further calls do nothing, and the method stays replaced.

    Megatron's writer first copies every CPU tensor that is a view of a larger storage. An
    asynchronous save needs that copy, since training goes on meanwhile. A synchronous save has
    written everything when it returns. So it gets tensors over the same memory whose storage has
    the size of the tensor.

    Releases whose writer may run in other processes, which cannot read the memory, are left alone.
    """
    try:
        strategy = importlib.import_module(f"{_STRATEGIES}.torch").TorchDistSaveShardedStrategy
        writer = importlib.import_module(f"{_STRATEGIES}.filesystem_async").FileSystemWriterAsync
    except (ImportError, AttributeError):
        return
    in_threads = hasattr(writer, "write_preloaded_data_multithread")
    in_processes = hasattr(writer, "write_preloaded_data_multiproc")
    if in_threads and not in_processes and not hasattr(strategy.save, _WRAPPED):
        strategy.save = _wrapped_save(strategy.save)


def _wrapped_save(save: Any) -> Any:
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.dict_utils import nested_values

    @functools.wraps(save)
    def save_in_place(strategy: Any, sharded_state_dict: Any, checkpoint_dir: Path) -> None:
        all_sharded = [value for value in nested_values(sharded_state_dict) if isinstance(value, ShardedTensor)]
        views = [(sharded, sharded.data) for sharded in all_sharded if _would_be_copied(sharded.data)]
        for sharded, data in views:
            sharded.data = torch.from_numpy(data.detach().numpy())
        try:
            save(strategy, sharded_state_dict, checkpoint_dir)
        finally:
            for sharded, data in views:
                sharded.data = data

    setattr(save_in_place, _WRAPPED, True)
    return save_in_place


def _would_be_copied(data: Any) -> bool:
    return (
        isinstance(data, torch.Tensor)
        and data.device.type == "cpu"
        and data.dtype == torch.float32  # the dtype of live state tensors
        and data.is_contiguous()
        and data.untyped_storage().nbytes() != data.nbytes
    )
