"""A small script in the place of Megatron-LM's pretrain_gpt.py, on Megatron's own arguments and
training loop.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random tokens, the same in every run."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        args = get_args()
        generator = torch.Generator().manual_seed(int(index))
        return {"tokens": torch.randint(0, args.vocab_size, (args.seq_length + 1,), generator=generator)}


def datasets(*_: Any, **__: Any) -> tuple[Any, None, None]:
    return Tokens(), None, None


def forward_step(data: Any, model: Any) -> Any:
    args = get_args()
    tokens = next(data)["tokens"].cuda()
    positions = torch.arange(args.seq_length, device=tokens.device).expand(len(tokens), -1)
    future = torch.ones(1, 1, args.seq_length, args.seq_length, dtype=torch.bool, device=tokens.device).triu(1)
    losses = model(tokens[:, :-1].contiguous(), positions, future, labels=tokens[:, 1:].contiguous())

    def loss_of(losses: torch.Tensor) -> Any:
        total = losses.float().sum()
        count = torch.tensor(losses.numel(), dtype=torch.int, device=losses.device)
        return total, count, {"lm loss": torch.stack([total.detach(), count.float()])}

    return losses, loss_of


if __name__ == "__main__":
    args = parse_and_validate_args()
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, datasets, ModelType.encoder_or_decoder, forward_step)
