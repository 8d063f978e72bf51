"""Quantised parameters on a real GPU: TransformerEngine's FusedAdam and ours, byte for byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import no_host_sync
from quantised_te import RECIPES, differing, is_stale, parts_of, recipe_of, transposes_are_right
from torch import nn

from fused_offload import FusedOffloadAdam, OffloadConfig
from fused_offload.model_hooks import backward_step
from fused_offload.plan import planner
from fused_offload.plan.window_blocks import blocks_of

pytestmark = pytest.mark.gpu

MIB = 2**20
STEPS = 20
SHAPES = ((256, 512), (128, 128), (1024, 2048), (384, 256), (64, 1024))
HYPER = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.95)}
WAYS: dict[str, OffloadConfig] = {
    "streamed": OffloadConfig(chunk_bytes=MIB, depth=2),
    "uneven chunks": OffloadConfig(chunk_bytes=12 * 128 * 77, depth=3),
    "one chunk": OffloadConfig(chunk_bytes=2**30, depth=2),
    "half": OffloadConfig(chunk_bytes=MIB, depth=2, fraction=0.5),
    "resident": OffloadConfig(fraction=0.0),
    "window": OffloadConfig(chunk_bytes=MIB, depth=2, window_bytes=2**30),
    "small window": OffloadConfig(chunk_bytes=MIB, depth=2, window_bytes=8 * MIB),
    "zero copy": OffloadConfig(transport="zero_copy"),
}


@pytest.fixture
def te() -> Any:
    return pytest.importorskip("transformer_engine.pytorch", reason="needs TransformerEngine")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes at which these parameters take several parts and window blocks, and one fits no block."""
    monkeypatch.setattr(backward_step, "PART_BYTES", 256 * 1024)
    monkeypatch.setattr(planner, "blocks_of", lambda extents: blocks_of(extents, 4 * MIB))


def make_params(te: Any, recipe: str) -> list[Any]:
    """Weights of one recipe and plain biases beside them, the same at every call."""
    torch.manual_seed(1)
    params: list[Any] = []
    with te.quantized_model_init(enabled=True, recipe=recipe_of(recipe)):
        for rows, columns in SHAPES:
            linear = te.Linear(columns, rows, bias=True, params_dtype=torch.bfloat16, device="cuda")
            params += [linear.weight, linear.bias]
    with torch.no_grad():
        for param in params[1::2]:
            param.copy_(torch.linspace(-1, 1, param.numel(), device="cuda"))
    return params


def set_scales(params: list[Any], step: int) -> None:
    """The scale of the next cast with delayed scaling, which a forward pass would set."""
    for index, param in enumerate(params[::2]):
        quantizer = param._quantizer
        if isinstance(getattr(quantizer, "scale", None), torch.Tensor):
            quantizer.scale.fill_(37.0 + 3 * index + step)
            if step % 3 == 0:
                quantizer.amax.zero_()


def grads_of(step: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(100 + step)
    shapes = [shape for rows, columns in SHAPES for shape in ((rows, columns), (rows,))]
    return [torch.randn(shape, device="cuda", generator=generator).to(dtype) for shape in shapes]


def state_of(optimizer: Any, params: list[Any]) -> dict[str, torch.Tensor]:
    return {
        f"{key} of {index}": optimizer.state[param][key].detach().cpu().float().clone()
        for index, param in enumerate(params)
        for key in ("exp_avg", "exp_avg_sq", "master_param")
    }


THEIRS: dict[tuple[str, torch.dtype], tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]] = {}


def steps_of_te(te: Any, recipe: str, dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Parts and state after TransformerEngine's own steps, computed once."""
    if (recipe, dtype) not in THEIRS:
        params = make_params(te, recipe)
        optimizer = te.optimizers.FusedAdam(params, master_weights=True, use_decoupled_grad=True, **HYPER)
        for step in range(STEPS):
            set_scales(params, step)
            for param, grad in zip(params, grads_of(step, dtype), strict=True):
                param.decoupled_grad = grad
            optimizer.step()
        parts = {key: value for key, value in parts_of(params).items() if not is_stale(recipe, key)}
        THEIRS[recipe, dtype] = parts, state_of(optimizer, params)
    return THEIRS[recipe, dtype]


def compare(te: Any, recipe: str, dtype: torch.dtype, params: list[Any], optimizer: FusedOffloadAdam) -> None:
    parts, state = steps_of_te(te, recipe, dtype)
    ours = {key: value for key, value in parts_of(params).items() if not is_stale(recipe, key)}
    assert transposes_are_right(params)
    assert differing(parts, ours) == {}
    assert differing(state, state_of(optimizer, params)) == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32 grads", "bf16 grads"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_steps_give_the_bytes_of_transformer_engine(te: Any, recipe: str, way: str, dtype: torch.dtype) -> None:
    params = make_params(te, recipe)
    config = WAYS[way]
    optimizer = FusedOffloadAdam(
        params, numerics="te", master_weights=True, use_decoupled_grad=True, offload=config, **HYPER
    )
    for step in range(STEPS):
        set_scales(params, step)
        for param, grad in zip(params, grads_of(step, dtype), strict=True):
            param.decoupled_grad = grad
        if config.window_bytes:
            optimizer.prefetch()
            assert (optimizer.window_bytes() > 0) == (step > 0)
        optimizer.step()
    compare(te, recipe, dtype, params, optimizer)
    optimizer.close()


class Product(torch.autograd.Function):
    """A loss whose gradient of the parameter is given."""

    @staticmethod
    def forward(ctx: Any, param: Any, grad: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(grad)
        return grad.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return ctx.saved_tensors[0].clone(), None


@pytest.mark.parametrize("recipe", RECIPES)
def test_steps_in_the_backward_pass_give_the_bytes_of_transformer_engine(te: Any, recipe: str) -> None:
    params = make_params(te, recipe)
    optimizer = FusedOffloadAdam(params, numerics="te", master_weights=True, offload=WAYS["streamed"], **HYPER)
    optimizer.step_in_backward(nn.ParameterList(params))
    for step in range(STEPS):
        set_scales(params, step)
        grads = grads_of(step, torch.bfloat16)
        torch.stack([Product.apply(param, grad) for param, grad in zip(params, grads, strict=True)]).sum().backward()
        optimizer.step()
    compare(te, recipe, torch.bfloat16, params, optimizer)
    optimizer.close()


@pytest.mark.parametrize("formats", ["bf16", "fp16", "uint8"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_narrow_state_has_the_same_bits_wherever_it_is(te: Any, recipe: str, formats: str) -> None:
    """Also with delayed scaling, where TransformerEngine takes float32 moments only."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "uint8": torch.uint8}[formats]
    arguments = {"exp_avg_dtype": dtype, "exp_avg_sq_dtype": dtype, "store_param_remainders": True}
    if formats == "fp16":
        arguments["master_weight_dtype"] = torch.float16
    results = []
    for way in ("resident", "streamed", "window"):
        params = make_params(te, recipe)
        optimizer = FusedOffloadAdam(
            params, master_weights=True, use_decoupled_grad=True, offload=WAYS[way], **HYPER, **arguments
        )
        for step in range(5):
            set_scales(params, step)
            for param, grad in zip(params, grads_of(step, torch.bfloat16), strict=True):
                param.decoupled_grad = grad
            if way == "window":
                optimizer.prefetch()
            optimizer.step()
        saved = optimizer.state_dict()["state"]
        state = {f"{key} of {index}": value for index, entry in saved.items() for key, value in entry.items()}
        results.append({**parts_of(params), **{key: value.cpu().clone() for key, value in state.items()}})
        optimizer.close()
    assert differing(results[0], results[1]) == {}
    assert differing(results[0], results[2]) == {}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_steady_step_waits_for_nothing_and_takes_one_buffer(te: Any, recipe: str) -> None:
    params = make_params(te, recipe)
    optimizer = FusedOffloadAdam(
        params, numerics="te", master_weights=True, use_decoupled_grad=True, offload=WAYS["streamed"], **HYPER
    )

    def set_grads(step: int) -> None:
        for param, grad in zip(params, grads_of(step, torch.bfloat16), strict=True):
            param.decoupled_grad = grad

    for step in range(2):
        set_grads(step)
        optimizer.step()
    set_grads(2)
    optimizer.synchronize()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with no_host_sync("cuda"):
        optimizer.step()
    torch.cuda.synchronize()
    report = optimizer.memory_report()
    assert report.step_bytes == 4 * 1024 * 2048
    assert torch.cuda.max_memory_allocated() - before <= report.step_bytes + MIB
    assert torch.cuda.memory_allocated() == before
    optimizer.close()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_skip_is_known_before_anything_is_quantised(te: Any, recipe: str) -> None:
    params = make_params(te, recipe)
    optimizer = FusedOffloadAdam(
        params, master_weights=True, use_decoupled_grad=True, offload=WAYS["streamed"], **HYPER
    )
    for step, flag in enumerate((1.0, 0.0, 1.0)):
        for param, grad in zip(params, grads_of(step, torch.bfloat16), strict=True):
            param.decoupled_grad = grad
        optimizer.grad_scale = torch.full((1,), 2.0, device="cuda")  # type: ignore[attr-defined]
        optimizer.found_inf = torch.full((1,), flag, device="cuda")  # type: ignore[attr-defined]
        before = parts_of(params)
        optimizer.step()
        assert bool(differing(before, parts_of(params))) == (flag == 0)
    assert optimizer.param_groups[0]["step"] == 1
    optimizer.close()


@pytest.mark.parametrize("recipe", RECIPES)
def test_training_goes_on_behind_a_step(te: Any, recipe: str) -> None:
    """Passes of the model itself: gradients of the input are those of the new weights."""
    chosen = recipe_of(recipe)
    torch.manual_seed(1)
    with te.quantized_model_init(enabled=True, recipe=chosen):
        layer = te.Linear(512, 256, bias=False, params_dtype=torch.bfloat16, device="cuda")
    optimizer = FusedOffloadAdam(layer.parameters(), lr=0.1, master_weights=True, offload=WAYS["streamed"])
    for _ in range(4):
        x = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        with te.autocast(enabled=True, recipe=chosen):
            layer(x).sum().backward()
        wanted = torch.ones(256, 256, device="cuda") @ layer.weight.dequantize(dtype=torch.float32)
        error = (x.grad.float() - wanted).norm() / wanted.norm()  # type: ignore[union-attr]
        assert error < 0.05
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()


@pytest.mark.parametrize("recipe", RECIPES)
def test_checkpoints_of_either_optimizer_load_into_the_other(te: Any, recipe: str) -> None:
    grads = [grads_of(step, torch.float32) for step in range(4)]

    def steps(optimizer: Any, params: list[Any], numbers: range) -> None:
        for number in numbers:
            set_scales(params, number)
            for param, grad in zip(params, grads[number], strict=True):
                param.decoupled_grad = grad.clone()
            optimizer.step()

    def build(ours: bool) -> tuple[list[Any], Any]:
        params = make_params(te, recipe)
        if ours:
            options = {"numerics": "te", "offload": WAYS["streamed"]}
            return params, FusedOffloadAdam(params, master_weights=True, use_decoupled_grad=True, **HYPER, **options)
        return params, te.optimizers.FusedAdam(params, master_weights=True, use_decoupled_grad=True, **HYPER)

    params, optimizer = build(ours=False)
    steps(optimizer, params, range(4))
    wanted = {key: value for key, value in parts_of(params).items() if not is_stale(recipe, key)}
    for first_is_ours in (True, False):
        params, optimizer = build(first_is_ours)
        steps(optimizer, params, range(2))
        saved = optimizer.state_dict()
        saved = {**saved, "state": {k: {n: v.clone() for n, v in e.items()} for k, e in saved["state"].items()}}
        others, other = build(not first_is_ours)
        other.load_state_dict(saved)
        for source, target in zip(params[::2], others[::2], strict=True):  # a step writes everything else
            if hasattr(source._quantizer, "amax") and isinstance(source._quantizer.amax, torch.Tensor):
                target._quantizer.amax.copy_(source._quantizer.amax)
        steps(other, others, range(2, 4))
        found = {key: value for key, value in parts_of(others).items() if not is_stale(recipe, key)}
        assert differing(wanted, found) == {}
