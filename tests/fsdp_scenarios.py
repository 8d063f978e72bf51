"""Scenarios of tests/test_fsdp.py, run by every rank of a gloo group:
``fsdp_scenarios.py FOLDER NAME...``.

One process runs many of them, since starting it takes longer than most. Each line of output is the
name of one that passed.
"""

from __future__ import annotations

import copy
import gc
import itertools
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from quantised_stand_ins import LARGEST, Current, Delayed, encoded
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from fused_offload import FusedOffloadAdam, FusedOffloadLion, OffloadConfig
from fused_offload import optimizer as optimizer_module
from fused_offload.checkpoint.torch_dcp import Wanted
from fused_offload.model_hooks import backward_step
from fused_offload.params import placement as device_placement

FOLDER = Path()
SCENARIOS: dict[str, Callable[[], None]] = {}
Settings = dict[str, Any]
HYPER: Settings = {"lr": 1e-2, "weight_decay": 0.1}
DONE_S = 60


def scenario(function: Callable[[], None]) -> Callable[[], None]:
    SCENARIOS[function.__name__] = function
    return function


# -- a small GPT -----------------------------------------------------------------------------------


class Block(torch.nn.Module):
    def __init__(self, width: int, odd: int = 1) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)
        self.up = torch.nn.Linear(width, 2 * width + odd)
        self.down = torch.nn.Linear(2 * width + odd, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class GPT(torch.nn.Module):
    """With tied embeddings, a one-element gain that only one rank can have, and odd sizes or not."""

    def __init__(self, width: int = 15, tokens: int = 31, odd: int = 1) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(tokens, width)
        self.blocks = torch.nn.ModuleList(Block(width, odd) for _ in range(2))
        self.gain = torch.nn.Parameter(torch.ones(1))
        self.head = torch.nn.Linear(width, tokens, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.gain)


def gpt(seed: int = 0, **options: Any) -> GPT:
    torch.manual_seed(seed)
    return shard(GPT(), **options)


def shard(model: Any, *, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    model = model.to(dtype)
    for block in getattr(model, "blocks", ()):
        fully_shard(block, **options)
    return fully_shard(model, **options)


def adam(model: torch.nn.Module, **settings: Any) -> FusedOffloadAdam:
    return FusedOffloadAdam(model.parameters(), **{**HYPER, **settings})


def loss_of(model: torch.nn.Module, step: int, rows: slice = slice(None)) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    tokens = torch.randint(31, (4, 9), generator=generator)[rows]
    logits = model(tokens[:, :-1]).float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range, clip: float | None = None) -> None:
    for step in steps:
        loss_of(model, step).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        with alone() if isinstance(optimizer, FusedOffloadAdam | FusedOffloadLion) else warnings.catch_warnings():
            optimizer.step()
        optimizer.zero_grad()


class _Alone(TorchDispatchMode):
    """Refuses collectives and everything that torch would dispatch through DTensor, which may
    communicate.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace or any(issubclass(kind, DTensor) for kind in types):
            raise AssertionError(f"{func} of {types}")
        return func(*args, **(kwargs or {}))


@contextmanager
def alone() -> Iterator[None]:
    with _Alone():
        yield


# -- comparing -------------------------------------------------------------------------------------


def local(tensor: Any) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor).detach()


def same(one: Any, other: Any) -> None:
    one, other = local(one), local(other)
    assert one.dtype == other.dtype, (one.dtype, other.dtype)
    assert torch.equal(one, other), (one, other)


def same_training(one: Any, a: FusedOffloadAdam, other: Any, b: FusedOffloadAdam) -> None:
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        same(p, q)
        assert a.state[p].keys() == b.state[q].keys()
        for key in a.state[p]:
            same(a.state[p][key], b.state[q][key])
    assert [group.get("step") for group in a.param_groups] == [group.get("step") for group in b.param_groups]


FORMATS: dict[str, Settings] = {
    "plain": {},
    "masters": {"master_weights": True, "exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.float16},
    "remainders": {"master_weights": True, "store_param_remainders": True},
}
EIGHT_BIT = ("exp_avg_dtype", "exp_avg_sq_dtype")


# -- training --------------------------------------------------------------------------------------


@scenario
def equals_the_resident_run() -> None:
    for name, formats in FORMATS.items():
        dtype = torch.float32 if name == "plain" else torch.bfloat16
        runs = []
        for offload in (OffloadConfig(chunk_bytes=3000), OffloadConfig(fraction=0.0)):
            model = gpt(dtype=dtype)
            optimizer = adam(model, offload=offload, **formats)
            train(model, optimizer, range(5), clip=0.5)
            runs += [model, optimizer]
        same_training(*runs)


@scenario
def lion_equals_its_resident_run() -> None:
    runs = []
    for offload in (OffloadConfig(chunk_bytes=3000), OffloadConfig(fraction=0.0)):
        model = gpt(dtype=torch.bfloat16)
        settings = {"master_weights": True, "store_param_remainders": True, "exp_avg_dtype": torch.uint8}
        optimizer = FusedOffloadLion(model.parameters(), **HYPER, **settings, offload=offload)
        train(model, optimizer, range(3), clip=0.5)
        runs += [model, optimizer]
    same_training(*runs)
    assert isinstance(runs[1].state[runs[0].gain]["exp_avg"], DTensor)


@scenario
def is_near_adamw() -> None:
    # The same gradients for both: those of key biases are nothing but rounding, which Adam makes as
    # large as any.
    ours, theirs = gpt(), gpt()
    optimizer, reference = adam(ours), torch.optim.AdamW(theirs.parameters(), **HYPER)
    for step in range(10):
        loss_of(ours, step).backward()
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            q.grad = p.grad
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(local(p), local(q))


@scenario
def hybrid_sharding_and_a_second_dimension() -> None:
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("replicate", "shard"))
    other = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard"))
    for options in ({"mesh": mesh}, {"mesh": other}, {"shard_placement_fn": by_columns}):
        runs = []
        for offload in (OffloadConfig(), OffloadConfig(fraction=0.0)):
            model = gpt(**options)
            optimizer = adam(model, offload=offload)
            train(model, optimizer, range(3))
            runs += [model, optimizer]
        same_training(*runs)
        for param in runs[0].parameters():
            value = runs[1].state[param]["exp_avg"]
            assert (value.placements, value.device_mesh) == (param.placements, param.device_mesh)


def by_columns(param: torch.nn.Parameter) -> Shard | None:
    return Shard(1) if param.dim() == 2 and param.shape[1] % dist.get_world_size() == 0 else None


@scenario
def state_is_distributed_like_the_parameters() -> None:
    model = gpt()
    optimizer = adam(model, master_weights=True)
    train(model, optimizer, range(2))
    for param in model.parameters():
        entry = optimizer.state[param]
        assert list(entry) == ["exp_avg", "exp_avg_sq", "master_param"]
        for key in entry:
            value = entry[key]
            assert isinstance(value, DTensor)
            assert (value.shape, value.stride()) == (param.shape, param.stride())
            assert (value.placements, value.device_mesh) == (param.placements, param.device_mesh)
            assert local(value).shape == local(param).shape
            assert local(value).device.type == "cpu"
            assert entry[key] is value
            assert entry.get(key) is value
            assert dict(entry)[key] is value
            assert dict(entry.items())[key] is value
            assert value._local_tensor is entry.peek(key)
        copied = entry.copy()
        assert copied["exp_avg"] is entry["exp_avg"]
    train(model, optimizer, range(2, 3))
    assert entry["exp_avg"] is copied["exp_avg"]
    assert optimizer.memory_report().param_numel == sum(local(param).numel() for param in model.parameters())


@scenario
def values_written_into_state_are_copied() -> None:
    model = gpt()
    optimizer = adam(model)
    train(model, optimizer, range(1))
    param = model.embed.weight
    entry = optimizer.state[param]
    view = entry["exp_avg"]
    address = local(view).data_ptr()
    entry["exp_avg"] = torch.full_like(view, 3.0)
    assert entry["exp_avg"] is view
    assert local(view).eq(3).all()
    entry["exp_avg"] = torch.full_like(local(view), 4.0)
    assert local(view).eq(4).all()
    view._local_tensor = torch.full_like(local(view), 5.0)  # pointed elsewhere
    optimizer.state_dict()
    assert entry["exp_avg"] is view
    assert local(view).eq(5).all()
    assert local(view).data_ptr() == address
    optimizer.set_scaled_state(param, "exp_avg", torch.full_like(local(view), 6.0))
    assert optimizer.get_unscaled_state(param, "exp_avg") is view
    assert local(view).eq(6).all()
    replicated = distribute_tensor(torch.zeros(param.shape), param.device_mesh, [Replicate()])
    if dist.get_world_size() > 1:
        refused(ValueError, "sharded like its parameter", entry.__setitem__, "exp_avg", replicated)
        refused(ValueError, "sharded like its parameter", optimizer.set_scaled_state, param, "exp_avg", replicated)
        refused(ValueError, "should have shape", entry.__setitem__, "exp_avg", torch.zeros(param.shape))
    plain = torch.nn.Parameter(torch.zeros(param.shape))
    other = FusedOffloadAdam([plain])
    other.initialize_state(plain)
    refused(TypeError, "its parameter is not", other.state[plain].__setitem__, "exp_avg", replicated)
    assert local(view).eq(6).all()


def refused(kind: type[BaseException], words: str, function: Callable[..., Any], *arguments: Any) -> None:
    with pytest.raises(kind, match=re.escape(words)):
        function(*arguments)


@scenario
def what_cannot_be_stepped_is_refused() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    partial = DTensor.from_local(torch.zeros(3), mesh, [Partial()])
    refused(TypeError, "partial values", FusedOffloadAdam, [partial])
    param = torch.nn.Parameter(distribute_tensor(torch.ones(5, 2), mesh, [Shard(0)]))
    optimizer = FusedOffloadAdam([param], use_decoupled_grad=True)
    # Of another mesh, and of a global shape that only some ranks could tell from theirs.
    ranks = torch.arange(dist.get_world_size()).view(1, -1)
    other_mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("replicate", "shard"))
    misfits = (
        distribute_tensor(torch.ones(5, 2), other_mesh, [Replicate(), Shard(0)]),
        distribute_tensor(torch.ones(6, 2), mesh, [Shard(0)]),
        distribute_tensor(torch.ones(6, 2), mesh, [Replicate()]),
        DTensor.from_local(torch.ones(6, 2), mesh, [Partial()]),
        torch.ones(5, 2),
    )
    for grad in misfits:
        param.decoupled_grad = grad
        refused(RuntimeError, "distributed over the mesh of its parameter (shape (5, 2)", optimizer.step)
    param.decoupled_grad = 3
    refused(TypeError, "should be a tensor", optimizer.step)
    assert local(param).eq(1).all()
    assert "step" not in optimizer.param_groups[0]
    param.decoupled_grad = distribute_tensor(torch.ones(5, 2), mesh, [Shard(0)])
    optimizer.step()
    stepped = local(param).clone()
    assert stepped.ne(1).all()
    for grad in misfits:  # after a step that was fine
        param.decoupled_grad = grad
        refused(RuntimeError, "distributed over the mesh of its parameter", optimizer.step)
    assert local(param).equal(stepped)
    plain = torch.nn.Parameter(torch.ones(3))
    plain.decoupled_grad = distribute_tensor(torch.ones(3), mesh, [Replicate()])
    refused(
        RuntimeError,
        "its parameter is a plain tensor",
        FusedOffloadAdam([plain], use_decoupled_grad=True).step,
    )


# -- gradients in other placements -----------------------------------------------------------------


def random_grad(mesh: DeviceMesh, placements: tuple[Placement, ...], seed: int) -> DTensor:
    """A gradient whose sum over ranks is not one rank's."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(5, 3, generator=generator)
    spread = [Replicate() if placement.is_partial() else placement for placement in placements]
    part = distribute_tensor(whole, mesh, spread).to_local()
    for dim, placement in enumerate(placements):
        if placement.is_partial():
            part = part * (1 + mesh.get_local_rank(dim))
    return DTensor.from_local(part, mesh, placements, shape=(5, 3), stride=(3, 1), run_check=False)


@scenario
def gradients_in_other_placements_are_redistributed() -> None:
    kinds = (Shard(0), Shard(1), Replicate())
    for shape in ((4,), (2, 2)):
        mesh = init_device_mesh("cpu", shape)
        of_params = itertools.product(kinds, repeat=mesh.ndim)
        of_grads = itertools.product((*kinds, Partial()), repeat=mesh.ndim)
        pairs = list(itertools.product(of_params, of_grads))
        params = [torch.nn.Parameter(distribute_tensor(torch.ones(5, 3), mesh, to)) for to, _ in pairs]
        wholes = [torch.nn.Parameter(torch.ones(5, 3)) for _ in pairs]
        optimizer, reference = FusedOffloadAdam(params, **HYPER), torch.optim.AdamW(wholes, **HYPER)
        for step in range(3 - mesh.ndim):
            for index, (_, given) in enumerate(pairs):
                grad = params[index].grad = random_grad(mesh, given, 1000 * step + index)
                wholes[index].grad = grad.full_tensor()
            optimizer.step()
            reference.step()
        for param, whole in zip(params, wholes, strict=True):
            assert param.placements == optimizer.state[param]["exp_avg"].placements
            torch.testing.assert_close(param.full_tensor(), whole)
            torch.testing.assert_close(
                optimizer.state[param]["exp_avg"].full_tensor(), reference.state[whole]["exp_avg"]
            )


class Tokens(torch.nn.Module):
    """Parallelised so that gradients of the embedding come replicated, and those of the norm as
    partial sums.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = torch.nn.Embedding(12, 8), torch.nn.LayerNorm(8)
        self.up, self.down = torch.nn.Linear(8, 16, bias=False), torch.nn.Linear(16, 12)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.norm(self.embed(tokens))))


def tensor_parallel() -> Tokens:
    torch.manual_seed(0)
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Replicate()),
    }
    return parallelize_module(Tokens(), init_device_mesh("cpu", (dist.get_world_size(),)), plan)


def train_tokens(model: Tokens, optimizer: torch.optim.Optimizer, clip_value: float | None = None) -> None:
    for step in range(4):
        tokens = torch.randint(0, 12, (2, 4), generator=torch.Generator().manual_seed(step))
        torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        if clip_value is not None:
            for param in model.parameters():
                param.grad = param.grad.redistribute(placements=param.placements)
                local(param.grad).clamp_(-clip_value, clip_value)
        optimizer.step()
        optimizer.zero_grad()


@scenario
def tensor_parallelism_trains_as_adamw_does() -> None:
    ours, theirs = tensor_parallel(), tensor_parallel()
    optimizer, reference = adam(ours, eps=1e-3), torch.optim.AdamW(theirs.parameters(), **HYPER, eps=1e-3)
    train_tokens(ours, optimizer)
    train_tokens(theirs, reference)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(local(p), local(q))


@scenario
def tensor_parallelism_steps_in_backward() -> None:
    for part_bytes, clip_value in itertools.product((1, 300, 10**9), (None, 0.01)):
        backward_step.PART_BYTES = part_bytes
        early, late = tensor_parallel(), tensor_parallel()
        optimizer, reference = adam(early), adam(late)
        optimizer.step_in_backward(early, clip_value=clip_value)
        train_tokens(early, optimizer)
        train_tokens(late, reference, clip_value)
        same_training(early, optimizer, late, reference)


@scenario
def a_rank_with_only_empty_shards() -> None:
    torch.manual_seed(0)
    model = fully_shard(torch.nn.Linear(7, 1))
    optimizer = adam(model, master_weights=True)
    for step in range(3):
        model(torch.full((2, 7), 1.0 + step)).sum().backward()
        with alone():
            optimizer.step()
        optimizer.zero_grad()
    empty = dist.get_rank() > 0
    torch.manual_seed(0)
    early = fully_shard(torch.nn.Linear(7, 1))
    other = adam(early, master_weights=True)
    other.step_in_backward(early)
    for step in range(3):
        early(torch.full((2, 7), 1.0 + step)).sum().backward()
        other.step()
    same_training(model, optimizer, early, other)
    for param in model.parameters():
        assert (local(param).numel() == 0) == empty
        assert list(optimizer.state[param]) == ["exp_avg", "exp_avg_sq", "master_param"]
        assert optimizer.state[param]["exp_avg"].shape == param.shape
    assert optimizer.param_groups[0]["step"] == 3
    round_trip("empty", model, optimizer, fully_shard(torch.nn.Linear(7, 1)))


@scenario
def cpu_offload_policy() -> None:
    runs = []
    for options in ({}, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}):
        model = gpt(**options)
        optimizer = adam(model)
        train(model, optimizer, range(2))
        runs += [model, optimizer]
    same_training(*runs)
    # On a mesh of CPUs the policy moves nothing; a mesh of GPUs makes the same parameters offloaded
    # ones.
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cuda")
    params = list(model.parameters())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        FusedOffloadAdam(params)
        assert not caught
        for param in params:
            param._spec = copy.copy(param._spec)  # others share it
            param._spec.mesh = mesh
        optimizer = FusedOffloadAdam([{"params": params[:3]}, {"params": params[3:]}])
        placed = device_placement.placement_of
        with pytest.MonkeyPatch.context() as patch:  # the others of a group may be page-locked
            patch.setattr(device_placement, "placement_of", lambda p: placed(p)._replace(on_host=p is params[0]))
            FusedOffloadAdam(params).close()
    assert ["CPUOffloadPolicy(pin_memory=True)" in str(warning.message) for warning in caught] == [True, True]
    for param in params:
        optimizer.initialize_state(param)
        assert optimizer.state[param]["exp_avg"].device.type == "cpu"


@scenario
def plain_and_distributed_parameters_together() -> None:
    model, reference = gpt(), gpt()
    plain, alone_ = (torch.nn.Parameter(torch.linspace(-1, 1, 300)) for _ in range(2))
    optimizer = FusedOffloadAdam([{"params": [plain]}, {"params": list(model.parameters())}], **HYPER)
    expected, expected_alone = adam(reference), FusedOffloadAdam([alone_], **HYPER)
    for step in range(3):
        for param, current in ((plain, optimizer), (alone_, expected_alone)):
            param.grad = torch.linspace(1, 2, 300) * step
            if current is expected_alone:
                current.step()
        train(model, optimizer, range(step, step + 1))
        train(reference, expected, range(step, step + 1))
    same(plain, alone_)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        same(p, q)
        same(optimizer.state[p]["exp_avg_sq"], expected.state[q]["exp_avg_sq"])


@scenario
def an_optimizer_may_be_built_before_the_model_is_sharded() -> None:
    """As Accelerate and the Trainer do: they put the shards in the place of the parameters, in
    every group.
    """
    expected = gpt()
    train(expected, a := adam(expected), range(4))
    torch.manual_seed(0)
    other = GPT()
    b = adam(other)
    (group,) = b.param_groups
    names = {id(param): name for name, param in other.named_parameters()}
    order = [names[id(param)] for param in group["params"]]
    # Nothing keeps the whole parameters alive while they are sharded.
    group["params"] = [torch.empty(1) for _ in order]
    shard(other)
    shards = dict(other.named_parameters())
    group["params"] = [shards[name] for name in order]
    train(other, b, range(4))
    same_training(expected, a, other, b)


@scenario
def groups_added_and_parameters_replaced() -> None:
    model = gpt()
    params = list(model.parameters())
    optimizer = FusedOffloadAdam(params[:3], **HYPER)
    train(model, optimizer, range(2))
    before = [local(optimizer.state[param]["exp_avg"]).clone() for param in params[:3]]
    optimizer.add_param_group({"params": params[3:], "lr": 1e-3})
    for param, values in zip(params, before, strict=False):
        same(optimizer.state[param]["exp_avg"], values)
    train(model, optimizer, range(2, 4))
    assert [group["step"] for group in optimizer.param_groups] == [4, 2]
    old = params[0]
    new = torch.nn.Parameter(old.detach().clone())
    kept = local(optimizer.state[old]["exp_avg"])
    optimizer.state[new] = optimizer.state.pop(old)
    optimizer.param_groups[0]["params"][0] = new
    assert local(optimizer.state[new]["exp_avg"]).data_ptr() == kept.data_ptr()


# -- checkpoints -----------------------------------------------------------------------------------


def fresh(like: Any, **settings: Any) -> tuple[Any, FusedOffloadAdam]:
    model = gpt(seed=99, dtype=next(like.parameters()).dtype)
    return model, adam(model, **settings)


def round_trip(
    name: str, model: Any, optimizer: FusedOffloadAdam, other: Any, **settings: Any
) -> tuple[Any, FusedOffloadAdam]:
    """Saves and loads into new objects through dcp; loading writes into the storage that is
    there.
    """
    saved = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    path = FOLDER / f"{name}-{dist.get_world_size()}"
    dcp.save(saved, checkpoint_id=path)
    new = adam(other, **settings) if settings else adam(other, master_weights=optimizer.master_weights)
    load(path, other, new)
    same_training(model, optimizer, other, new)
    return other, new


def load(path: Path, model: Any, optimizer: FusedOffloadAdam) -> None:
    target = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    views = [local(value) for entry in optimizer.state.values() for value in entry.values()]
    addresses = [view.data_ptr() for view in views]
    dcp.load(target, checkpoint_id=path)
    set_model_state_dict(model, target["model"])
    set_optimizer_state_dict(model, optimizer, target["optimizer"])
    assert [local(value).data_ptr() for entry in optimizer.state.values() for value in entry.values()] == addresses


@scenario
def dcp_round_trips() -> None:
    for name, formats in FORMATS.items():
        dtype = torch.float32 if name == "plain" else torch.bfloat16
        model = gpt(dtype=dtype)
        optimizer = adam(model, **formats)
        train(model, optimizer, range(3))
        other, new = round_trip(name, model, optimizer, gpt(seed=99, dtype=dtype), **(formats or {"eps": 1e-8}))
        train(model, optimizer, range(3, 5))
        train(other, new, range(3, 5))
        same_training(model, optimizer, other, new)


@scenario
def a_new_optimizer_is_not_stepped_by_saving() -> None:
    for formats in FORMATS.values():
        model = gpt(dtype=torch.float32 if not formats else torch.bfloat16)
        before = [local(param).clone() for param in model.parameters()]
        optimizer = adam(model, **formats)
        saved = get_optimizer_state_dict(model, optimizer)
        assert len(saved["state"]) == len(before)
        for param, values in zip(model.parameters(), before, strict=True):
            same(param, values)
            assert param.grad is None
            assert not local(optimizer.state[param]["exp_avg_sq"]).any()
        assert optimizer.param_groups[0]["step"] == 0
        assert optimizer.param_groups[0]["lr"] == HYPER["lr"]
        set_optimizer_state_dict(model, optimizer, saved)
        other = gpt(dtype=before[0].dtype)
        reference = adam(other, **formats)
        train(model, optimizer, range(2))
        train(other, reference, range(2))
        same_training(model, optimizer, other, reference)
    # A true first step at a learning rate of zero counts, whatever its gradients are.
    model = gpt()
    optimizer = adam(model, lr=0.0)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    assert optimizer.param_groups[0]["step"] == 1


@scenario
def every_kind_of_state_dict() -> None:
    eight_bit = {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8}
    for dtype, formats in (
        (torch.float32, {"master_weights": True}),
        (torch.bfloat16, FORMATS["remainders"]),
        (torch.bfloat16, FORMATS["masters"]),
        (torch.float32, eight_bit),
    ):
        every_kind(gpt(dtype=dtype), formats)


def every_kind(model: GPT, formats: Settings) -> None:
    optimizer = adam(model, **formats)
    train(model, optimizer, range(3))
    # torch cannot load full ones that are flat, of any optimizer.
    kinds = ((False, False, False), (False, True, True), (True, False, False), (True, True, False))
    options = [
        StateDictOptions(full_state_dict=full, cpu_offload=cpu, flatten_optimizer_state_dict=flat)
        for full, cpu, flat in kinds
    ]
    for option in options:
        saved = get_optimizer_state_dict(model, optimizer, options=option)
        keys: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(keys, sorted(saved.get("state", saved)))
        if not (option.full_state_dict and option.cpu_offload):  # which rank 0 alone gets
            assert all(one == keys[0] for one in keys)
        if option.full_state_dict and option.cpu_offload and dist.get_rank():
            assert not saved or not saved.get("state")
        loaded = StateDictOptions(
            full_state_dict=option.full_state_dict,
            broadcast_from_rank0=option.full_state_dict and option.cpu_offload,
            flatten_optimizer_state_dict=option.flatten_optimizer_state_dict,
        )
        other, new = fresh(model, **formats)
        set_model_state_dict(other, get_model_state_dict(model))
        set_optimizer_state_dict(other, new, saved, options=loaded)
        same_training(model, optimizer, other, new)
        train(other, new, range(3, 4))


@scenario
def full_state_dicts_are_loaded_through_host_memory() -> None:
    model = gpt()
    optimizer = adam(model)
    train(model, optimizer, range(1))
    asked = []
    pack = optimizer_module.pack
    optimizer_module.pack = lambda groups, state, wanted: asked.append(wanted) or pack(groups, state, wanted)
    try:
        optimizer.state_dict()
        full = StateDictOptions(full_state_dict=True)
        saved = get_optimizer_state_dict(model, optimizer, options=full)
        set_optimizer_state_dict(model, optimizer, saved, options=full)
    finally:
        optimizer_module.pack = pack
    ordinary, to_save, to_load = asked
    assert ordinary == Wanted()
    assert to_save == Wanted(with_steps=True, gathered=True)
    assert to_load == Wanted(with_steps=True, on_host=True)


@scenario
def checkpoints_of_torch_adamw_and_back() -> None:
    partly = dcp.DefaultLoadPlanner(allow_partial_load=True)  # its groups have no bias_correction
    for dtype, formats in (
        (torch.float32, {}),
        (torch.bfloat16, FORMATS["masters"]),
        (torch.bfloat16, FORMATS["remainders"]),
    ):
        theirs, ours = gpt(dtype=dtype), gpt(seed=99, dtype=dtype)
        reference, optimizer = torch.optim.AdamW(theirs.parameters(), **HYPER), adam(ours, **formats)
        train(theirs, reference, range(3))
        path = FOLDER / f"adamw-{dtype}-{optimizer.store_param_remainders}-{dist.get_world_size()}"
        saved = {"model": get_model_state_dict(theirs), "optimizer": get_optimizer_state_dict(theirs, reference)}
        dcp.save(saved, checkpoint_id=path)
        target = {"model": get_model_state_dict(ours), "optimizer": get_optimizer_state_dict(ours, optimizer)}
        dcp.load(target, checkpoint_id=path, planner=partly)
        set_model_state_dict(ours, target["model"])
        set_optimizer_state_dict(ours, optimizer, target["optimizer"])
        assert optimizer.param_groups[0]["step"] == 3
        for p, q in zip(theirs.parameters(), ours.parameters(), strict=True):
            same(p, q)
            for key in ("exp_avg", "exp_avg_sq"):
                value = local(optimizer.get_unscaled_state(q, key))
                torch.testing.assert_close(value, local(reference.state[p][key]).float(), rtol=1e-2, atol=1e-6)
            if formats:  # not what it was before the parameters were loaded
                assert_master_is_param(optimizer, q)
        train(ours, optimizer, range(3, 4))
        assert optimizer.param_groups[0]["step"] == 4

    saved = {"model": get_model_state_dict(ours), "optimizer": get_optimizer_state_dict(ours, optimizer)}
    dcp.save(saved, checkpoint_id=path / "back")
    target = {"model": get_model_state_dict(theirs), "optimizer": get_optimizer_state_dict(theirs, reference)}
    dcp.load(target, checkpoint_id=path / "back", planner=partly)
    set_optimizer_state_dict(theirs, reference, target["optimizer"])
    for p, q in zip(theirs.parameters(), ours.parameters(), strict=True):
        same(p, q)
        assert reference.state[p]["step"] == 4
    loaded = get_optimizer_state_dict(ours, optimizer)
    loaded["param_groups"][0]["step"] = 7
    for entry in loaded["state"].values():
        entry["step"].fill_(8)
    refused(ValueError, "step 7 in group 0, but step 8", set_optimizer_state_dict, ours, optimizer, loaded)


def assert_master_is_param(optimizer: FusedOffloadAdam, param: torch.Tensor) -> None:
    master = local(optimizer.get_unscaled_state(param, "master_param"))
    assert torch.equal(master, torch.zeros_like(master) if master.dtype == torch.int16 else local(param).float())


@scenario
def asynchronous_saves_are_not_torn() -> None:
    # The saving thread's collectives must not meet those of training.
    group = dist.new_group(backend="gloo")
    for wait_between in (False, True):
        model = gpt()
        optimizer = adam(model)
        train(model, optimizer, range(2))
        path = FOLDER / f"async-{wait_between}-{dist.get_world_size()}"
        expected = gpt()
        reference = adam(expected)
        train(expected, reference, range(2))
        state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
        future = dcp.async_save(state, checkpoint_id=path, process_group=group)
        if wait_between:
            future.result()
        train(model, optimizer, range(2, 6))
        future.result()
        other, new = fresh(model)
        load(path, other, new)
        same_training(other, new, expected, reference)
        # The next save holds what is true then, not what the first one held.
        state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.async_save(state, checkpoint_id=FOLDER / f"{path.name}-later", process_group=group).result()
        load(FOLDER / f"{path.name}-later", other, new)
        same_training(other, new, model, optimizer)


@scenario
def packing_does_not_communicate() -> None:
    model = gpt()
    optimizer = adam(model, **FORMATS["masters"])
    with alone():
        saved = optimizer.state_dict()
        optimizer.load_state_dict(saved)
    train(model, optimizer, range(1))
    with alone():
        saved = optimizer.state_dict()
        optimizer.torch_state_dict()
        optimizer.load_state_dict(saved)
        optimizer.reload_model_params()


@scenario
def saves_for_another_number_of_ranks() -> None:
    model = gpt()
    optimizer = adam(model, master_weights=True)
    train(model, optimizer, range(2))
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=FOLDER / "resharded")


@scenario
def loads_and_saves_on_another_number_of_ranks() -> None:
    model = gpt(seed=5)
    optimizer = adam(model, master_weights=True)
    load(FOLDER / "resharded", model, optimizer)
    assert optimizer.param_groups[0]["step"] == 2
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=FOLDER / "resharded-again")


@scenario
def is_the_same_after_resharding() -> None:
    model, expected = gpt(seed=5), gpt()
    optimizer, reference = adam(model, master_weights=True), adam(expected, master_weights=True)
    load(FOLDER / "resharded-again", model, optimizer)
    train(expected, reference, range(2))
    same_training(model, optimizer, expected, reference)
    train(model, optimizer, range(2, 4))
    train(expected, reference, range(2, 4))
    same_training(model, optimizer, expected, reference)


# -- what training loops do ------------------------------------------------------------------------


@scenario
def gradients_accumulate() -> None:
    model, whole = gpt(), gpt()
    optimizer, reference = adam(model), adam(whole)
    for row in range(4):
        (loss_of(model, 0, slice(row, row + 1)) / 4).backward()
    loss_of(whole, 0).backward()
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(local(p.grad), local(q.grad), rtol=1e-4, atol=1e-6)
        q.grad = p.grad.clone()
    optimizer.step()
    reference.step()
    same_training(model, optimizer, whole, reference)


@scenario
def clipping_is_applied() -> None:
    model, other = gpt(), gpt()
    optimizer, reference = adam(model), adam(other)
    loss_of(model, 0).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    assert norm.full_tensor() > 1e-3
    squares = torch.stack([local(param.grad).square().sum() for param in model.parameters()]).sum()
    dist.all_reduce(squares)
    assert abs(squares.sqrt() - 1e-3) < 1e-6
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        q.grad = p.grad
    optimizer.step()
    reference.step()
    same_training(model, optimizer, other, reference)
    torch.testing.assert_close(
        local(optimizer.state[model.embed.weight]["exp_avg"]), 0.1 * local(model.embed.weight.grad)
    )


@scenario
def only_adapters_train() -> None:
    class Adapted(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = torch.nn.Linear(9, 9)
            self.base.requires_grad_(False)
            self.a, self.b = torch.nn.Linear(9, 1, bias=False), torch.nn.Linear(1, 9, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + self.b(self.a(x))

    torch.manual_seed(0)
    model = fully_shard(Adapted())
    optimizer = adam(model)
    base = local(model.base.weight).clone()
    for _ in range(3):
        model(torch.ones(2, 9)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    same(model.base.weight, base)
    assert [param for param in model.parameters() if param in optimizer.state] == [model.a.weight, model.b.weight]
    saved = get_optimizer_state_dict(model, optimizer)
    assert sorted(saved["state"]) == ["a.weight", "b.weight"]
    torch.manual_seed(1)
    other = fully_shard(Adapted())
    new = adam(other)
    path = FOLDER / f"adapters-{dist.get_world_size()}"
    dcp.save({"model": get_model_state_dict(model), "optimizer": saved}, checkpoint_id=path)
    target = {"model": get_model_state_dict(other), "optimizer": get_optimizer_state_dict(other, new)}
    dcp.load(target, checkpoint_id=path)
    set_model_state_dict(other, target["model"])
    set_optimizer_state_dict(other, new, target["optimizer"])
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        same(p, q)
        assert (p in optimizer.state) == (q in new.state)
        if p in optimizer.state:
            same(optimizer.state[p]["exp_avg"], new.state[q]["exp_avg"])


@scenario
def mixed_precision() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for dtype in (torch.float32, torch.bfloat16):
        runs = []
        for offload in (OffloadConfig(), OffloadConfig(fraction=0.0)):
            model = gpt(dtype=dtype, mp_policy=policy)
            optimizer = adam(model, offload=offload, **(FORMATS["remainders"] if dtype == torch.bfloat16 else {}))
            train(model, optimizer, range(3), clip=1.0)
            assert local(model.embed.weight).dtype == dtype
            runs += [model, optimizer]
        same_training(*runs)


class Agreeing(Current):
    """A scale from the largest magnitude on all ranks, as current scaling takes it of shards."""

    def _write(self, values: torch.Tensor) -> None:
        self.scale = values.abs().amax().reshape(1)
        dist.all_reduce(self.scale, dist.ReduceOp.MAX)
        self.scale /= LARGEST
        self.codes = encoded(values / self.scale)


def quantised_shards(seed: int) -> list[Any]:
    """Quantised DTensors, some with unequal shards, and a plain quantised tensor between them."""
    generator = torch.Generator().manual_seed(seed)
    mesh, params = init_device_mesh("cpu", (dist.get_world_size(),)), []
    for label, shape in enumerate(((5, 64), (300,), (17, 40), (4, 3))):
        whole = distribute_tensor(torch.randn(shape, generator=generator), mesh, [Shard(0)])
        if label == 1:
            params.append(torch.nn.Parameter(Agreeing(whole.full_tensor(), label)))
            continue
        local = Agreeing(whole.to_local(), label, torch.float32 if label == 2 else torch.bfloat16)
        shard: Any = DTensor(whole.to_local(), whole._spec, requires_grad=False)
        shard._local_tensor = local
        params.append(torch.nn.Parameter(shard))
    return params


def step_quantised(params: list[Any], optimizer: FusedOffloadAdam, number: int) -> None:
    """A step with gradients of this rank's own, but of parameters that all have."""
    for index, param in enumerate(params):
        own = dist.get_rank() if isinstance(param, DTensor) else 0
        generator = torch.Generator().manual_seed(1000 * number + 10 * index + own)
        mine = torch.randn(local(param).shape, generator=generator).to(local(param).dtype)
        param.grad = None if index == number else _like(param, mine)
    optimizer.step()


def _like(param: Any, local_part: torch.Tensor) -> Any:
    if not isinstance(param, DTensor):
        return local_part
    return DTensor.from_local(local_part, param.device_mesh, param.placements, shape=param.shape, stride=param.stride())


@scenario
def quantised_parameters_agree_on_scales() -> None:
    """Collectives of quantize_ come in the order of the groups, wherever a rank has its state."""
    ways = [
        OffloadConfig(chunk_bytes=2048, depth=2),
        OffloadConfig(fraction=0.5, chunk_bytes=2**20, depth=2),
        OffloadConfig(fraction=0.0),
    ]
    rank = dist.get_rank()
    runs = []
    for way in (ways[rank % 3], ways[(rank + 1) % 3], ways[0]):
        params = quantised_shards(0)
        optimizer = FusedOffloadAdam(params, **HYPER, master_weights=True, offload=way)
        Agreeing.calls.clear()
        for number in range(4):
            step_quantised(params, optimizer, number)
        assert [call.label for call in Agreeing.calls] == [i for number in range(4) for i in range(4) if i != number]
        for param in params:
            master = local(optimizer.state[param]["master_param"])
            wanted = master.abs().amax().reshape(1)
            dist.all_reduce(wanted, dist.ReduceOp.MAX)
            assert torch.equal(local(param).scale, wanted / LARGEST)
            assert isinstance(optimizer.state[param]["exp_avg"], DTensor) == isinstance(param, DTensor)
        runs.append((params, optimizer))
    for params, optimizer in runs[1:]:
        for ours, theirs in zip(params, runs[0][0], strict=True):
            assert all(map(torch.equal, local(ours).internals(), local(theirs).internals()))
            for key in optimizer.state[ours]:
                same(optimizer.state[ours][key], runs[0][1].state[theirs][key])


@scenario
def quantised_parameters_go_on_behind_a_checkpoint() -> None:
    """Through torch.distributed.checkpoint, into an optimizer whose state is elsewhere."""
    params, others = quantised_shards(0), quantised_shards(7)
    one = FusedOffloadAdam(params, **HYPER, master_weights=True)
    other = FusedOffloadAdam(others, **HYPER, master_weights=True, offload=OffloadConfig(fraction=0.5))
    step_quantised(params, one, 5)
    dcp.save({"optimizer": one.state_dict()}, checkpoint_id=FOLDER / "quantised")
    step_quantised(others, other, 6)
    loaded = {"optimizer": other.state_dict()}
    dcp.load(loaded, checkpoint_id=FOLDER / "quantised")
    other.load_state_dict(loaded["optimizer"])
    step_quantised(params, one, 7)
    step_quantised(others, other, 7)
    for ours, theirs in zip(others, params, strict=True):
        assert all(map(torch.equal, local(ours).internals(), local(theirs).internals()))
        for key in other.state[ours]:
            same(other.state[ours][key], one.state[theirs][key])


@scenario
def quantised_parameters_that_a_rank_has_nothing_of() -> None:
    """Such a rank would not take part in the agreement on a scale."""
    mesh, ranks = init_device_mesh("cpu", (dist.get_world_size(),)), dist.get_world_size()
    whole = distribute_tensor(torch.randn(ranks - 1, 8), mesh, [Shard(0)])
    shard: Any = DTensor(whole.to_local(), whole._spec, requires_grad=False)
    shard._local_tensor = quantised = Delayed(whole.to_local(), 0)
    param = torch.nn.Parameter(shard)
    FusedOffloadAdam([param], master_weights=True)  # its scale is known before
    quantised._quantizer.with_amax_reduction = False  # FSDP2 sets the group later
    if ranks == 1:
        FusedOffloadAdam([param], master_weights=True)
    elif whole.to_local().numel():
        with pytest.raises(RuntimeError, match="agree with other ranks on a scale"):
            FusedOffloadAdam([param], master_weights=True).step_in_backward(torch.nn.ParameterList([param]))
    else:
        with pytest.raises(TypeError, match="group 0 is a Delayed of which this rank holds no element"):
            FusedOffloadAdam([param], master_weights=True)


@scenario
def steps_in_backward() -> None:
    for part_bytes in (1, 2000):
        backward_step.PART_BYTES = part_bytes
        runs = []
        for steps_early in (True, False):
            model = gpt()
            optimizer = adam(model, master_weights=True)
            if steps_early:
                optimizer.step_in_backward(model)
            train(model, optimizer, range(3))
            # FSDP keeps a microbatch's gradients until it reduces them, so this is one pass.
            for last in (False, True):
                model.set_requires_gradient_sync(last)
                loss_of(model, 3).backward()
            optimizer.step()
            runs += [model, optimizer]
        same_training(*runs)
        assert runs[1].param_groups[0]["step"] == 4
        model, optimizer = runs[:2]
        assert all(param.grad is None for param in model.parameters())
        loss_of(model, 4).backward()
        refused(RuntimeError, "global norm", torch.nn.utils.clip_grad_norm_, model.parameters(), 1.0)
        refused(RuntimeError, "accumulation", loss_of, model, 4)
        refused(RuntimeError, "two steps", get_optimizer_state_dict, model, optimizer)
        model.eval()
        loss_of(model, 4)
        optimizer.step()
        model.train()
        train(model, optimizer, range(5, 6))


@contextmanager
def stepped_by_a_device() -> Iterator[None]:
    """Parameters of gloo ranks go through the GPU's pipeline, as those in the host memory of a mesh of GPUs do."""
    from simulated_device import SimulatedDevice, installed

    from fused_offload.stream.launches import Launches

    place = device_placement.Placement(torch.device("cpu"), on_host=True)
    sim = SimulatedDevice()
    with pytest.MonkeyPatch.context() as patch, installed(sim, patch):
        patch.setattr(device_placement, "placement_of", lambda param: place)
        # Kernels run as their specification; in Triton's interpreter they take many times longer.
        patch.setattr(Launches, "launch", lambda self, index, slot=0: sim.launch(self, index, slot))
        yield
        gc.collect()


@scenario
def parameters_on_the_host_of_a_device() -> None:
    """Every format, clipped: the bits of parameters that are stepped where they are; checkpoints both ways."""

    def clipped(model: torch.nn.Module, optimizer: FusedOffloadAdam, steps: range, norms: list[torch.Tensor]) -> None:
        for step in steps:
            loss_of(model, step).backward()
            norms.append(optimizer.clip_grad_norm_(0.5))
            with alone():
                optimizer.step()
            optimizer.zero_grad()

    offload = OffloadConfig(chunk_bytes=30_000)
    formats = {**FORMATS, "8 bits": {**FORMATS["remainders"], **dict.fromkeys(EIGHT_BIT, torch.uint8)}}
    for name, settings in formats.items():
        settings, options = {**settings, "offload": offload}, {"dtype": torch.float32}
        if name != "plain":
            options = {"dtype": torch.bfloat16}
        expected, reference = gpt(**options), None
        reference = adam(expected, **settings)
        norms: list[torch.Tensor] = []
        clipped(expected, reference, range(2), norms)
        theirs = get_model_state_dict(expected), get_optimizer_state_dict(expected, reference)
        full = StateDictOptions(full_state_dict=True)
        whole = (
            get_model_state_dict(expected, options=full),
            get_optimizer_state_dict(expected, reference, options=full),
        )
        folder = FOLDER / f"{name} on {dist.get_world_size()} ranks"
        dcp.save(dict(zip(("model", "optimizer"), theirs, strict=True)), checkpoint_id=folder / "theirs")
        whole = copy.deepcopy(whole)
        clipped(expected, reference, range(2, 4), norms)
        with stepped_by_a_device():
            model = gpt(**options)
            optimizer = adam(model, **settings)
            ours: list[torch.Tensor] = []
            clipped(model, optimizer, range(2), ours)
            state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
            dcp.save(state, checkpoint_id=folder / "ours")
            clipped(model, optimizer, range(2, 4), ours)
            same_training(model, optimizer, expected, reference)
            assert [norm.full_tensor().item() for norm in ours] == [norm.full_tensor().item() for norm in norms]
            for source in ("theirs", "whole"):
                other = gpt(seed=1, **options)
                resumed = adam(other, **settings)
                if source == "whole":
                    load = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
                    set_model_state_dict(other, whole[0], options=load)
                    set_optimizer_state_dict(other, resumed, whole[1], options=load)
                else:
                    load_sharded(other, resumed, folder / source)
                clipped(other, resumed, range(2, 4), [])
                same_training(other, resumed, expected, reference)
                resumed.close()
            optimizer.close()
        other = gpt(seed=1, **options)
        resumed = adam(other, **settings)
        load_sharded(other, resumed, folder / "ours")
        clipped(other, resumed, range(2, 4), [])
        same_training(other, resumed, expected, reference)


@scenario
def loops_with_parameters_on_the_host_of_a_device() -> None:
    """HSDP, several microbatches, zeroed and missing gradients: the bits of parameters stepped where they are."""
    settings = {**FORMATS["remainders"], **dict.fromkeys(EIGHT_BIT, torch.uint8)}
    settings["offload"] = OffloadConfig(chunk_bytes=30_000)
    ranks = dist.get_world_size()
    for shape, set_to_none in (((ranks, 1), True), ((1, ranks), False)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))

        def run(optimizer_of: Callable[[Any], Any], mesh: Any = mesh, set_to_none: bool = set_to_none) -> list[Any]:
            model = gpt(dtype=torch.bfloat16, mesh=mesh)
            optimizer = optimizer_of(model)
            for step in range(3):
                for microbatch in range(2):
                    loss_of(model, 2 * step + microbatch).backward()
                if step == 1:
                    model.gain.grad = None
                optimizer.clip_grad_norm_(0.5)
                optimizer.step()
                optimizer.zero_grad(set_to_none)
            return [model, optimizer]

        expected = run(lambda model: adam(model, **settings))
        with stepped_by_a_device():
            model, optimizer = run(lambda model: adam(model, **settings))
            same_training(model, optimizer, *expected)
            changes: tuple[Callable[[], Any], ...] = (
                lambda model=model: model.zero_grad(set_to_none=False),
                lambda model=model: model.embed.weight.grad.add_(1.0),
                lambda model=model: local(model.embed.weight.grad).add_(1.0),
                lambda model=model: loss_of(model, 9).backward(),
            )
            for change in changes:
                loss_of(model, 9).backward()
                optimizer.clip_grad_norm_(0.5)
                change()
                refused(RuntimeError, "Zero gradients with optimizer.zero_grad", optimizer.step)
                optimizer.zero_grad()
            optimizer.close()


def load_sharded(model: torch.nn.Module, optimizer: FusedOffloadAdam, folder: Path) -> None:
    target = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(target, checkpoint_id=folder)
    set_model_state_dict(model, target["model"])
    set_optimizer_state_dict(model, optimizer, target["optimizer"])


@scenario
def steps_in_backward_are_refused() -> None:
    model = torch.nn.Linear(3, 3)
    optimizer = FusedOffloadAdam(model.parameters())
    replicas = torch.nn.parallel.DistributedDataParallel(model)
    refused(RuntimeError, "DistributedDataParallel reduces gradients", optimizer.step_in_backward, replicas)
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cuda")
    model = gpt(offload_policy=CPUOffloadPolicy(pin_memory=False))
    for param in model.parameters():
        param._spec = copy.copy(param._spec)
        param._spec.mesh = mesh
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        refused(RuntimeError, "CPUOffloadPolicy", adam(model).step_in_backward, model)


if __name__ == "__main__":
    FOLDER = Path(sys.argv[1])
    ranks.main(SCENARIOS, sys.argv[2:], backend="gloo", limit_s=DONE_S)
