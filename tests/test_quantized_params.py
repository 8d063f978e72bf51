"""Parameters whose class stands for other tensors, as quantised ones do: refused by name, and what
to do instead works.

Real quantised classes are TransformerEngine's, which needs a GPU to be imported.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import param_of, unchanged
from torch import nn

from fused_offload import FusedOffloadAdam, OffloadConfig

HINTS = {
    "somebody.tensors": "Pass plain tensors, and quantise what they hold",
    "transformer_engine.pytorch.tensor": "outside of quantized_model_init",
}


def stand_in_class(module: str) -> type[torch.Tensor]:
    """A class of one byte an element that says it is bfloat16, as quantised ones do."""

    class Quantized(torch.Tensor):
        _data: torch.Tensor

        @staticmethod
        def __new__(cls, data: torch.Tensor, requires_grad: bool = False) -> Any:
            made = torch.Tensor._make_wrapper_subclass(
                cls, data.shape, dtype=torch.bfloat16, device=data.device, requires_grad=requires_grad
            )
            made._data = data
            return made

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.detach.default:
                return cls(args[0]._data)
            raise NotImplementedError(func)

    Quantized.__module__ = module
    return Quantized


def quantized(module: str = "somebody.tensors", *, frozen: bool = False) -> Any:
    return nn.Parameter(stand_in_class(module)(torch.zeros(4, 8, dtype=torch.uint8)), requires_grad=not frozen)


def running() -> tuple[FusedOffloadAdam, nn.Parameter]:
    param = param_of(torch.ones(300))
    optimizer = FusedOffloadAdam([param], lr=1e-2, master_weights=True, offload=OffloadConfig(chunk_bytes=1))
    param.grad = torch.ones(300)
    optimizer.step()
    return optimizer, param


@pytest.mark.parametrize("module", list(HINTS))
def test_refused_by_name_with_what_to_do(module: str) -> None:
    optimizer, plain = running()
    message = f"Parameter {{}} of parameter group {{}} is a Quantized, .*{HINTS[module]}"
    with pytest.raises(TypeError, match=message.format(1, 0)):
        FusedOffloadAdam([plain, quantized(module)], master_weights=True)
    with unchanged(optimizer), pytest.raises(TypeError, match=message.format(0, 1)):
        optimizer.add_param_group({"params": [quantized(module)]})
    assert len(optimizer.param_groups) == 1
    late = quantized(module)
    late.grad = None
    optimizer.param_groups[0]["params"].append(late)  # behind the optimizer's back
    before = plain.detach().clone()
    for _ in range(2):
        with pytest.raises(TypeError, match=message.format(1, 0)):
            optimizer.step()
    assert torch.equal(plain, before)
    assert optimizer.param_groups[0]["step"] == 1


def test_frozen_ones_are_to_be_left_out() -> None:
    """As beside adapters; a frozen base in 4 or 8 bits is often a plain tensor of bytes."""
    of_bytes = nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)
    for param, message in (
        (quantized(frozen=True), "is a Quantized, .* It is frozen, so leave it out"),
        (of_bytes, "parameter 0 of parameter group 0 has torch.uint8. It is frozen, so leave it out"),
    ):
        with pytest.raises(TypeError, match=message):
            FusedOffloadAdam([param])


def test_class_of_a_bad_dtype_is_named() -> None:
    class Params4bit(nn.Parameter):
        pass

    with pytest.raises(TypeError, match=r"has torch.uint8 \(Params4bit\)"):
        FusedOffloadAdam([Params4bit(torch.zeros(4, dtype=torch.uint8), requires_grad=False)])


def test_shards_of_such_a_class_are_refused() -> None:
    class Sharded(torch.Tensor):  # has of a DTensor what it is told by
        _local_tensor = quantized()
        _spec = SimpleNamespace(placements=())

    with pytest.raises(TypeError, match="Parameter 0 of parameter group 0 is a Quantized"):
        FusedOffloadAdam([Sharded(torch.zeros(4, 8))])


def test_gradients_are_refused_too() -> None:
    optimizer, param = running()
    optimizer.use_decoupled_grad = True
    param.decoupled_grad = stand_in_class("somebody.tensors")(torch.zeros(300, dtype=torch.uint8))
    for _ in range(2):
        with unchanged(optimizer), pytest.raises(TypeError, match="A gradient in parameter group 0 is a Quantized"):
            optimizer.step()


def test_subclasses_with_memory_of_their_own_are_stepped() -> None:
    class Named(nn.Parameter):
        pass

    params = [Named(torch.ones(300)), nn.Parameter(torch.ones(300))]
    optimizer = FusedOffloadAdam(params, lr=1e-2)
    for param in params:
        param.grad = torch.full((300,), 0.5)
    optimizer.step()
    assert torch.equal(params[0], params[1])
    assert not torch.equal(params[1], torch.ones(300))


# -- TransformerEngine's ---------------------------------------------------------------------------


@pytest.fixture
def te() -> Any:
    return pytest.importorskip("transformer_engine.pytorch", reason="needs TransformerEngine")


def te_param(te: Any, name: str) -> Any:
    """A parameter of 256 x 512 elements of one of TransformerEngine's classes, the same at every
    call.
    """
    from transformer_engine.common import recipe

    if name == "MXFP8Tensor":  # made without a GPU that multiplies them
        from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer

        empty = MXFP8Quantizer(te.DType.kFloat8E4M3).make_empty((256, 512), dtype=torch.bfloat16, device="cuda")
        return nn.Parameter(empty)
    torch.manual_seed(1)
    with te.quantized_model_init(enabled=True, recipe=getattr(recipe, RECIPES[name])()):
        linear = te.Linear(512, 256, bias=False, params_dtype=torch.bfloat16, device="cuda")
    if name == "Float8Tensor":
        linear.weight._quantizer.scale.fill_(37.0)  # what the next cast multiplies by
    return linear.weight


RECIPES = {
    "Float8Tensor": "DelayedScaling",
    "Float8Tensor, current scaling": "Float8CurrentScaling",
    "Float8BlockwiseQTensor": "Float8BlockScaling",
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*RECIPES, "MXFP8Tensor"])
def test_classes_of_transformer_engine_are_refused(te: Any, name: str) -> None:
    param = te_param(te, name)
    kind = name.split(",")[0]
    assert type(param).__name__ == kind
    message = f"Parameter 0 of parameter group 0 is a {kind}, .*outside of quantized_model_init"
    with pytest.raises(TypeError, match=message):
        FusedOffloadAdam([param], master_weights=True, numerics="te")
    with pytest.raises(TypeError, match=f"is a {kind}, .*It is frozen"):
        FusedOffloadAdam([param.requires_grad_(False)])


def quantized_parts(param: Any) -> dict[str, torch.Tensor]:
    """What a quantised parameter's values are made of."""
    parts = {"values": param.dequantize()}
    for name in ("_data", "_scale_inv", "_rowwise_data", "_rowwise_scale_inv"):
        if isinstance(getattr(param, name, None), torch.Tensor):
            parts[name] = getattr(param, name).clone()
    assert len(parts) == 3
    return parts


def step_with_te(te: Any, name: str, grads: list[torch.Tensor], options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Parameter and state after TransformerEngine's own steps."""
    param = te_param(te, name)
    optimizer = te.optimizers.FusedAdam([param], master_weights=True, use_decoupled_grad=True, **options)
    for grad in grads:
        param.decoupled_grad = grad.clone()
        optimizer.step()
    state = optimizer.state[param]
    return {**quantized_parts(param), **{key: state[key] for key in ("exp_avg", "exp_avg_sq", "master_param")}}


def step_masters(te: Any, name: str, grads: list[torch.Tensor], options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The same by what docs/eight_bit.md says."""
    param = te_param(te, name)
    master = nn.Parameter(param.dequantize(dtype=torch.float32).detach().clone())
    optimizer = FusedOffloadAdam([master], numerics="te", **options)
    for grad in grads:
        master.grad = grad.float()
        optimizer.step()
        with torch.no_grad():
            param.quantize_(master)
    state = optimizer.state[master]
    moments = {key: state[key].cuda() for key in ("exp_avg", "exp_avg_sq")}
    result = {**quantized_parts(param), **moments, "master_param": master.detach()}
    optimizer.close()
    return result


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(RECIPES))
def test_masters_in_their_place_give_the_bits_of_transformer_engine(te: Any, name: str) -> None:
    generator = torch.Generator("cuda").manual_seed(2)
    grads = [torch.randn(256, 512, device="cuda", generator=generator) for _ in range(5)]
    options = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.95)}
    theirs, ours = step_with_te(te, name, grads, options), step_masters(te, name, grads, options)
    differing = {key: int((theirs[key] != ours[key]).sum()) for key in theirs}
    assert differing == dict.fromkeys(theirs, 0)
