"""Checks of checkpoints in Megatron's legacy format, which one rank reads and scatters."""

from __future__ import annotations

from typing import Any

import torch

from fused_offload.kernels.formats import FP32
from fused_offload.state.convert import check_storable

from .adam import inner_of
from .refusal import SAME_MODEL, refusal
from .remainders import REFUSED_REMAINDERS, are_remainders


def check_on_first_rank(distributed: Any, state_dict: Any) -> None:
    """Checks loaded state on the first rank, which alone has read the file. All ranks raise alike.

    Args:
        distributed: a DistributedOptimizer whose inner optimizer is a `MegatronAdam`.
        state_dict: the loaded state on the first rank of its data-parallel group.

    Raises:
        ValueError: for state that does not fit, and for remainders in the place of masters.
        TypeError: for values that cannot be stored.
    """
    group = distributed.data_parallel_group_gloo
    first = torch.distributed.get_process_group_ranks(group)[0]
    refused: list[Exception | None] = [None]
    if torch.distributed.get_rank() == first:
        try:
            distributed.split_state_dict_if_needed(state_dict)
            _check(distributed, state_dict)
        except Exception as error:
            refused = [refusal(error)]
    torch.distributed.broadcast_object_list(refused, src=first, group=group)
    if refused[0] is not None:
        raise refused[0]


def _check(distributed: Any, state: Any) -> None:
    masters = []
    for index, buffer in enumerate(distributed.buffers):
        for dtype in distributed.gbuf_ranges[index]:
            tensors, numel = state[index][dtype], buffer.numel_unpadded
            if tensors["numel_unpadded"] != numel:
                raise ValueError(
                    f"loaded state dict has {tensors['numel_unpadded']} elements in buffer {index}, but this optimizer "
                    f"has {numel}; {SAME_MODEL}"
                )
            for key in ("param", "exp_avg", "exp_avg_sq"):
                if not isinstance(tensors[key], torch.Tensor) or tensors[key].shape != (numel,):
                    raise ValueError(f"loaded state dict has no tensor of {numel} elements as {key}; {SAME_MODEL}")
                check_storable(key, FP32, tensors[key], nonnegative=key == "exp_avg_sq")
            if buffer.param_dtype == torch.bfloat16:
                masters.append((tensors["param"], None))
    if inner_of(distributed).master_weights and are_remainders(masters):
        raise ValueError(REFUSED_REMAINDERS.format(format="legacy"))
