"""Scenarios of tests/test_quantised_fsdp_gpu.py, run by every rank:
``quantised_fsdp_scenarios.py FOLDER NAME...``.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

import ranks
import torch
import torch.distributed as dist
from fsdp_scenarios import local
from quantised_te import RECIPES, differing, is_stale, parts_of, recipe_of, transposes_are_right
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fused_offload import FusedOffloadAdam, OffloadConfig

STEPS = 20
WIDTH = 512  # each rank's rows are whole tiles of 128
HYPER = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.95), "master_weights": True}
WAYS = {
    "streamed": OffloadConfig(chunk_bytes=2**20, depth=2),
    "half": OffloadConfig(chunk_bytes=2**20, depth=2, fraction=0.5),
    "resident": OffloadConfig(fraction=0.0),
    "window": OffloadConfig(chunk_bytes=2**20, depth=2, window_bytes=2**30),
}


def build(recipe: str) -> Any:
    """A sharded model with quantised weights, made on the GPU after sharding, as block scales need
    it.
    """
    import transformer_engine.pytorch as te

    torch.manual_seed(1)
    with te.quantized_model_init(enabled=True, recipe=recipe_of(recipe)):
        layers = [te.Linear(WIDTH, WIDTH, params_dtype=torch.bfloat16, device="meta") for _ in range(3)]
        model: Any = torch.nn.Sequential(*layers)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for layer in model:
        layer.reset_parameters()
    return model


def gradient(param: Any, step: int, index: int) -> DTensor:
    """This rank's gradient of a parameter."""
    seed = 10_000 * step + 100 * index + dist.get_rank()
    generator = torch.Generator("cuda").manual_seed(seed)
    own = torch.randn(local(param).shape, device="cuda", generator=generator).bfloat16()
    return DTensor.from_local(own, param.device_mesh, param.placements, shape=param.shape, stride=param.stride())


def train(recipe: str, config: OffloadConfig | None) -> tuple[dict[str, torch.Tensor], bool]:
    """Passes as in training, steps with given gradients.

    Args:
        recipe: key of `RECIPES`.
        config: None for TransformerEngine's FusedAdam.

    Returns:
        Every byte of parameters and state behind the last step, and whether the copies in the
        other order are right.
    """
    import transformer_engine.pytorch as te

    model = build(recipe)
    params = list(model.parameters())
    if config is None:
        optimizer = te.optimizers.FusedAdam(params, **HYPER)
    else:
        optimizer = FusedOffloadAdam(params, numerics="te", offload=config, **HYPER)
    for step in range(STEPS):
        x = torch.randn(128, WIDTH, device="cuda", generator=torch.Generator("cuda").manual_seed(step)).bfloat16()
        with te.autocast(enabled=True, recipe=recipe_of(recipe)):
            out = model(x)
        out.float().square().mean().backward()
        for index, param in enumerate(params):
            assert param.grad is not None
            param.grad = gradient(param, step, index)
        if config is not None and config.window_bytes:
            optimizer.prefetch()
            assert (optimizer.window_bytes() > 0) == (step > 0)
        optimizer.step()
        optimizer.zero_grad()
    shards = [local(param) for param in params]
    assert sum(hasattr(shard, "_quantizer") for shard in shards) == len(model)
    found = {key: value for key, value in parts_of(shards).items() if not is_stale(recipe, key)}
    for index, param in enumerate(params):
        for key in ("exp_avg", "exp_avg_sq", "master_param"):
            found[f"{key} of {index}"] = local(optimizer.state[param][key]).detach().float().cpu().clone()
    return found, transposes_are_right([shard for shard in shards if hasattr(shard, "_quantizer")])


@functools.cache
def of_te(recipe: str) -> dict[str, torch.Tensor]:
    """What TransformerEngine's own steps leave."""
    return train(recipe, None)[0]


def same_bytes(recipe: str, way: str) -> None:
    """Steps of ours beside TransformerEngine's."""
    ours, are_right = train(recipe, WAYS[way])
    assert are_right
    assert differing(of_te(recipe), ours) == {}


SCENARIOS = {f"{recipe}-{way}": functools.partial(same_bytes, recipe, way) for recipe in RECIPES for way in WAYS}

if __name__ == "__main__":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    ranks.main(SCENARIOS, sys.argv[2:], backend="cpu:gloo,cuda:nccl", limit_s=240)
