"""The slice of each model parameter that a DistributedOptimizer updates on this rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from fused_offload.params.dense import has_own_memory
from fused_offload.params.dtensors import local_of


class Shard(NamedTuple):
    """One model parameter's part on this rank.

    Attributes:
        model_param: the whole parameter of the model.
        param: the tensor that the inner optimizer updates, ``[stop - start]``.
        start: first element of the part in the flattened parameter.
        stop: one past the last element.
        aliases: True if ``param`` shares the memory of ``model_param``, False if it is a master.
    """

    model_param: torch.Tensor
    param: torch.Tensor
    start: int
    stop: int
    aliases: bool

    def slice_of(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor shaped like the model parameter, ``[stop - start]``."""
        return whole.detach().reshape(-1)[self.start : self.stop]

    def weights(self) -> torch.Tensor:
        """This rank's part of the model parameter, ``[stop - start]``; float32 if quantised."""
        plain = has_own_memory(local_of(self.model_param))
        return self.slice_of(self.model_param if plain else self.model_param.detach().float())


class Shards:
    """All shards of one DistributedOptimizer, in the order of its groups.

    Parameters and shards are paired by the lists that the groups were made of. Megatron's own index
    from model parameters to positions in groups is wrong if a group mixes fp32 and 16-bit
    parameters (releases up to 0.20).
    """

    def __init__(self, distributed: Any) -> None:
        """Pairs parameters and shards.

        Args:
            distributed: a DistributedOptimizer that was just built, with an inner optimizer.
        """
        owns_masters = bool(distributed.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8)
        sixteen_bit = distributed.shard_float16_groups if owns_masters else distributed.shard_fp32_from_float16_groups
        pairs = [
            *_zipped(distributed.model_float16_groups, sixteen_bit, aliases=owns_masters),
            *_zipped(distributed.model_fp32_groups, distributed.shard_fp32_groups, aliases=True),
        ]
        self._lists = [(group, list(group)) for group in (*sixteen_bit, *distributed.shard_fp32_groups)]
        self._shards: dict[int, Shard] = {}
        for model_param, param, aliases in pairs:
            place = distributed._get_model_param_range_map(model_param)["param"]
            self._shards[id(model_param)] = Shard(model_param, param, place.start, place.end, aliases)
        self._aliases = [shard for shard in self._shards.values() if shard.aliases]

    def __iter__(self) -> Iterator[Shard]:
        """All shards."""
        return iter(self._shards.values())

    def __len__(self) -> int:
        """Number of shards."""
        return len(self._shards)

    def of(self, model_param: torch.Tensor) -> Shard:
        """The shard of one model parameter; raises KeyError if this rank has no part of it."""
        return self._shards[id(model_param)]

    def follow_model_params(self) -> None:
        """Points every shard at its slice of the live model parameter again.

        When a model or its optimizer is moved away and back (``param.data = param.data.cpu()``),
        shards become copies. The optimizer would go on updating them, and the model would never
        change again.

        Megatron gives gradients to the shards in its lists. If these were replaced, the optimizer's
        parameters would get none, so the lists are restored as well.
        """
        for group, members in self._lists:
            if any(new is not member for new, member in zip(group, members, strict=True)):
                group[:] = members
        for shard in self._aliases:
            model_param, param = shard.model_param, shard.param
            expected = model_param.data_ptr() + shard.start * model_param.element_size()
            if param.data_ptr() != expected or param.device != model_param.device:
                param.data = model_param.detach().view(-1)[shard.start : shard.stop]


def _zipped(
    model_groups: Sequence[Sequence[torch.Tensor]], groups: Sequence[Sequence[torch.Tensor | None]], *, aliases: bool
) -> Iterator[tuple[torch.Tensor, torch.Tensor, bool]]:
    for model_group, group in zip(model_groups, groups, strict=True):
        for model_param, param in zip(model_group, group, strict=True):
            if param is not None:  # quantised parameters have no shard
                yield model_param, param, aliases and has_own_memory(param)
