"""Actions of Megatron's frameworks on a model and its optimizer between two iterations.

Each function goes its framework's way through the objects. There is no GPU, so a move is a copy to
new memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from job import Job


def moved(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


def _inner_states(job: Job) -> Iterator[Any]:
    for inner in job.inners:
        yield from inner.state.values()


def _buffers(job: Job) -> list[Any]:
    return job.model.buffers + job.model.expert_parallel_buffers


# -- optimizer state -------------------------------------------------------------------------------


def nemo_rl_moves_state(job: Job) -> None:
    """Every tensor in the chain's state, to the GPU and back."""
    for _ in ("cuda", "cpu"):
        for _, state in job.optimizer.state.items():
            for key, value in state.items():
                if torch.is_tensor(value):
                    state[key] = moved(value)


def _verl_moves(job: Job, keys: tuple[str, ...]) -> None:
    for child in job.children:
        for group in child.shard_fp32_from_float16_groups:
            for shard in group:
                if shard is not None:
                    shard.data = moved(shard)
        inner = child.optimizer
        if hasattr(inner, "sub_optimizers") and hasattr(inner, "inner_param_to_orig_param"):
            states = [state for sub in inner.sub_optimizers for state in sub.state.values()]
        else:
            states = list(inner.state.values())
        for state in states:
            for key in keys:
                if key in state:
                    state[key] = moved(state[key])
        inner._move_new_state_to_right_device()


def verl_moves_state(job: Job) -> None:
    _verl_moves(job, ("exp_avg", "exp_avg_sq", "master_param"))


def ms_swift_moves_state(job: Job) -> None:
    _verl_moves(job, ("exp_avg", "exp_avg_sq"))


def skyrl_moves_state(job: Job) -> None:
    """Away without asking what the optimizer is, back by the name of HybridDeviceOptimizer's."""
    for state in _inner_states(job):
        for key in ("exp_avg", "exp_avg_sq"):
            if key in state:
                state[key] = moved(state[key])
    for inner in job.inners:
        inner._move_new_state_to_right_device()


def roll_flattens_state(job: Job) -> None:
    """Points the moments, the same tensor objects, into one buffer and then into another."""
    for _ in ("cpu", "cuda"):
        for key in ("exp_avg", "exp_avg_sq"):
            tensors = [state[key] for state in _inner_states(job)]
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
            for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
                tensor.data = part.view(tensor.shape)


def slime_resets_state(job: Job) -> None:
    """Zeroes moments and step counts in place and keeps the masters."""
    for child in job.children:
        for group in child.optimizer.param_groups:
            if "step" in group:
                group["step"] = 0
        for state in child.optimizer.state.values():
            for key in ("exp_avg", "exp_avg_sq", "step"):
                if isinstance(state.get(key), torch.Tensor):
                    state[key].zero_()


# -- parameters and buffers ------------------------------------------------------------------------


def megatron_offloads_for_rollouts(job: Job) -> None:
    job.optimizer.offload_to_cpu()
    job.model.offload_grad_buffers()
    job.model.restore_grad_buffers()
    job.optimizer.restore_from_cpu()


def groups_get_copies_of_their_parameters(job: Job) -> None:
    """Effect of Megatron's own `offload_to_cpu` and `restore_from_cpu` on a GPU."""
    for inner in job.inners:
        for group in inner.param_groups:
            for param in group["params"]:
                param.data = moved(param)


def verl_frees_buffers(job: Job) -> None:
    """Keeps a copy of the parameters, frees the memory under all views of them, and takes it
    again.
    """
    for buffer in _buffers(job):
        copy, size = moved(buffer.param_data), buffer.param_data.untyped_storage().size()
        buffer.param_data.untyped_storage().resize_(0)
        buffer.param_data.untyped_storage().resize_(size)
        buffer.param_data.copy_(copy)


def nemo_rl_moves_model(job: Job) -> None:
    for buffer in _buffers(job):
        buffer.param_data_cpu = moved(buffer.param_data)  # its own copy would be the tensor itself
        buffer.offload_to_cpu()
    for buffer in _buffers(job):
        buffer.reload_from_cpu()


def _bucket_groups(job: Job) -> list[Any]:
    return job.model.bucket_groups + job.model.expert_parallel_bucket_groups


def _get_another_buffer(job: Job, kind: str, attribute: str) -> None:
    """Puts other memory under all buffers of one kind, their buckets, and one attribute of each
    parameter.
    """
    from megatron.core.distributed.param_and_grad_buffer import BufferType

    buffer_type, data = BufferType[kind.upper()], f"{kind}_data"
    for buffer in _buffers(job):
        getattr(buffer, data).data = moved(getattr(buffer, data))
        for param, (start, _, _) in buffer.param_index_map.items():
            setattr(param, attribute, buffer._get(param.shape, start, buffer_type=buffer_type))
        for bucket in buffer.buckets:
            start, stop = buffer.bucket_indices[bucket.bucket_id]
            getattr(bucket, data).data = buffer._get(torch.Size([stop - start]), start, buffer_type=buffer_type)
    for group in _bucket_groups(job):
        setattr(group, f"cached_{kind}_buffer_shard_list", [None] * len(group.buckets))


def gradients_get_another_buffer(job: Job) -> None:
    _get_another_buffer(job, "grad", "main_grad")


def roll_replaces_parameters(job: Job) -> None:
    """Puts other memory under buffer, buckets and parameters, and makes new shards, but not in
    groups.
    """
    _get_another_buffer(job, "param", "data")
    for child in job.children:
        for model_group, shard_group in zip(child.model_float16_groups, child.shard_float16_groups, strict=True):
            for index, model_param in enumerate(model_group):
                place = child._get_model_param_range_map(model_param)["param"]
                shard_group[index] = model_param.detach().view(-1)[place.start : place.end]


def roll_replaces_all_buffers(job: Job) -> None:
    gradients_get_another_buffer(job)
    roll_replaces_parameters(job)


# -- masters after a load of weights ---------------------------------------------------------------


def bridge_syncs_masters(job: Job) -> None:
    """Copies masters as Megatron-Bridge and NeMo-RL do after every load, resumes too."""
    for child in job.children:
        for model_group, group in zip(child.model_float16_groups, child.shard_fp32_from_float16_groups, strict=True):
            for model_param, shard in zip(model_group, group, strict=True):
                if shard is not None:
                    place = child._get_model_param_range_map(model_param)["param"]
                    shard.data.copy_(model_param.view(-1)[place.start : place.end])
        for param, copy in child.optimizer.gpu_params_map_cpu_copy.items():
            copy.data.copy_(param.data)
        child.optimizer.update_fp32_param_by_new_param()


def megatron_reloads_masters(job: Job) -> None:
    job.optimizer.reload_model_params()


def masters_are_refreshed_twice(job: Job) -> None:
    for inner in (*job.inners, *job.inners):
        inner.update_fp32_param_by_new_param()


REFRESHES: tuple[Callable[[Job], None], ...] = (
    bridge_syncs_masters,
    megatron_reloads_masters,
    masters_are_refreshed_twice,
)
BEFORE_STATE: tuple[Callable[[Job], None], ...] = (
    megatron_offloads_for_rollouts,
    groups_get_copies_of_their_parameters,
    verl_frees_buffers,
    nemo_rl_moves_model,
    gradients_get_another_buffer,
    roll_replaces_all_buffers,
    *REFRESHES,
)
"""Those that may also come before the first step."""
HARMLESS: tuple[Callable[[Job], None], ...] = (
    nemo_rl_moves_state,
    verl_moves_state,
    ms_swift_moves_state,
    skyrl_moves_state,
    roll_flattens_state,
    roll_replaces_parameters,
    *BEFORE_STATE,
)
"""After these, training goes on as if nothing had happened."""
