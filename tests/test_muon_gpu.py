"""Muon on a GPU: the bits of torch.optim.Muon for any chunks, memory, gradient scalers,
checkpoints, other streams.
"""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import helpers
import pytest
import torch
from gpu_training import gpu_rise

from fused_offload import FusedOffloadAdam, FusedOffloadMuon, OffloadConfig
from fused_offload.kernels.formats import join_remainder
from fused_offload.kernels.muon.newton_schulz import scratch_bytes

torchs = pytest.importorskip("torch.optim._muon")  # from torch 2.9 on

pytestmark = pytest.mark.gpu

MIB = 2**20
SHAPES = ((2048, 1500), (768, 2048), (1024, 1024), (1, 4096), (4096, 1), (129, 257), (1000, 333), (300, 300))
"""Tall, wide, square, of one row or column, odd; the first is larger than a chunk of 8 MiB."""

CHUNKS = {"8 MiB": 8 * MIB, "odd": 3 * 2**18 + 4 * 128 * 5 + 3, "whole": 2**40}
FRACTIONS = (0.0, 0.5, 1.0)
STEPS = 10
BFLOAT16 = {"momentum_dtype": torch.bfloat16}


@pytest.fixture(autouse=True)
def no_ring_of_others() -> Iterator[None]:
    """The ring is sized to the largest need of all that live."""
    gc.collect()
    yield
    gc.collect()


def tensors(seed: int, dtype: torch.dtype, shapes: Sequence[tuple[int, int]] = SHAPES) -> list[torch.Tensor]:
    """One of each shape; the second and the third in another memory order."""
    generator = torch.Generator("cuda").manual_seed(seed)
    made = [torch.randn(shape, generator=generator, device="cuda").to(dtype) for shape in shapes]
    return [t.t().contiguous().t() if index in (1, 2) else t for index, t in enumerate(made)]


def params_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def set_grads(optimizer: torch.optim.Optimizer, grads: Sequence[torch.Tensor | None]) -> None:
    for param, grad in zip(params_of(optimizer), grads, strict=True):
        helpers.set_grad(param, grad)


class Outcome(NamedTuple):
    """Everything that training decides, on the CPU."""

    params: list[torch.Tensor]
    momenta: list[torch.Tensor]
    masters: list[torch.Tensor]


def assert_same(actual: Outcome, expected: Outcome) -> None:
    for what, found, wanted in zip(Outcome._fields, actual, expected, strict=True):
        for index, (one, other) in enumerate(zip(found, wanted, strict=True)):
            helpers.assert_same_bits(one, other, f"{what} {index}")


def outcome(optimizer: torch.optim.Optimizer) -> Outcome:
    torch.cuda.synchronize()
    state = [optimizer.state[param] for param in params_of(optimizer)]
    return Outcome(
        [param.detach().cpu() for param in params_of(optimizer)],
        [entry["momentum_buffer"].cpu() for entry in state],
        [entry["master_param"].cpu() for entry in state if "master_param" in entry],
    )


def train(optimizer: Any, dtype: torch.dtype, grad_dtype: torch.dtype | None = None) -> Any:
    """Steps with a learning rate that changes, and a matrix without a gradient in two of them."""
    for step in range(STEPS):
        grads: list[torch.Tensor | None] = [grad.to(grad_dtype or dtype) for grad in tensors(1 + step, dtype)]
        if step in (3, 5):
            grads[step] = None
        set_grads(optimizer, grads)
        optimizer.param_groups[0]["lr"] = 0.02 / (1 + step)
        optimizer.step()
    return optimizer


def ours(dtype: torch.dtype, *, chunk_bytes: int = 8 * MIB, fraction: float = 1.0, **options: Any) -> FusedOffloadMuon:
    config = OffloadConfig(chunk_bytes=chunk_bytes, fraction=fraction)
    return FusedOffloadMuon(map(torch.nn.Parameter, tensors(0, dtype)), lr=0.02, offload=config, **options)


@functools.cache
def of_torch(dtype: torch.dtype, settings: tuple[tuple[str, Any], ...] = ()) -> Outcome:
    return outcome(train(torch.optim.Muon(map(torch.nn.Parameter, tensors(0, dtype)), **dict(settings)), dtype))


# -- bits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fraction", FRACTIONS)
@pytest.mark.parametrize("chunk_bytes", CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_are_those_of_torch(dtype: torch.dtype, chunk_bytes: int, fraction: float) -> None:
    options = BFLOAT16 if dtype == torch.bfloat16 else {}
    optimizer = train(ours(dtype, chunk_bytes=chunk_bytes, fraction=fraction, **options), dtype)
    assert_same(outcome(optimizer), of_torch(dtype))
    optimizer.close()


@pytest.mark.parametrize(
    ("dtype", "settings"),
    [
        (torch.float32, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw", "ns_steps": 4, "weight_decay": 0.0}),
        (torch.bfloat16, {"momentum": 0.3, "adjust_lr_fn": "original", "eps": 0.1}),
        (torch.bfloat16, {"momentum": 0.5, "ns_steps": 2, "ns_coefficients": (2.0, -1.5, 0.5)}),
    ],
)
def test_bits_are_those_of_torch_with_other_settings(dtype: torch.dtype, settings: dict[str, Any]) -> None:
    options = BFLOAT16 if dtype == torch.bfloat16 else {}
    optimizer = train(ours(dtype, **options, **settings), dtype)
    assert_same(outcome(optimizer), of_torch(dtype, tuple(settings.items())))
    optimizer.close()


REMAINDER: dict[str, Any] = {"master_weights": True, "store_param_remainders": True}


@pytest.mark.parametrize("fraction", FRACTIONS)
@pytest.mark.parametrize("chunk_bytes", CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize(
    "options", [REMAINDER, {"master_weights": True}, {**REMAINDER, **BFLOAT16}], ids=["6 bytes", "8 bytes", "4 bytes"]
)
def test_masters_are_float32_parameters_of_torch(options: dict[str, Any], chunk_bytes: int, fraction: float) -> None:
    """With a momentum in float32; with one in bfloat16 at least the same for all chunks."""
    optimizer = train(ours(torch.bfloat16, chunk_bytes=chunk_bytes, fraction=fraction, **options), torch.bfloat16)
    found = outcome(optimizer)
    if "momentum_dtype" in options:
        whole = train(ours(torch.bfloat16, fraction=0.0, **options), torch.bfloat16)
        assert_same(found, outcome(whole))
        whole.close()
    else:
        assert_same(_with_whole_masters(found), _float32_of_torch("store_param_remainders" in options))
    optimizer.close()


def _with_whole_masters(found: Outcome) -> Outcome:
    if found.masters[0].dtype == torch.float32:
        return found
    return found._replace(
        masters=[
            join_remainder(param.reshape(-1), master.reshape(-1)).view(param.shape)
            for param, master in zip(found.params, found.masters, strict=True)
        ],
        params=[],
    )


@functools.cache
def _float32_of_torch(remainders: bool) -> Outcome:
    params = [torch.nn.Parameter(param.float()) for param in tensors(0, torch.bfloat16)]
    found = outcome(train(torch.optim.Muon(params), torch.bfloat16, torch.float32))
    params = [] if remainders else [param.bfloat16() for param in found.params]
    return Outcome(params, found.momenta, found.params)


def test_another_stream_and_an_adam_on_the_same_ring() -> None:
    """Each step on a stream of its own, beside steps of an Adam; the ring grows in between."""
    dtype = torch.bfloat16
    optimizer = ours(dtype, chunk_bytes=MIB, **BFLOAT16)
    other = torch.nn.Parameter(torch.ones(3_000_000, device="cuda"))
    adam = FusedOffloadAdam([other], offload=OffloadConfig(chunk_bytes=2 * MIB, depth=4))
    step, streams = optimizer.step, [torch.cuda.Stream() for _ in range(2)]
    count = 0

    def step_elsewhere() -> None:
        nonlocal count
        stream = streams[count % 2]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            other.grad = torch.ones_like(other)
            step()
            adam.step()
        torch.cuda.current_stream().wait_stream(stream)
        count += 1

    optimizer.step = step_elsewhere  # type: ignore[method-assign, assignment]
    assert_same(outcome(train(optimizer, dtype)), of_torch(dtype))
    optimizer.close()
    adam.close()


@pytest.mark.parametrize("steps", [5, 4])
@pytest.mark.parametrize("shape", [*SHAPES[:4], SHAPES[6]], ids=str)
def test_newton_schulz_gives_the_bits_of_torch(shape: tuple[int, int], steps: int) -> None:
    """At any address that is a multiple of 256 bytes."""
    from fused_offload.kernels.muon.newton_schulz import newton_schulz_parts
    from fused_offload.kernels.muon.reference import NewtonSchulz

    settings = NewtonSchulz((3.4445, -4.7750, 2.0315), 1e-7, steps)
    matrix = tensors(3, torch.bfloat16, [shape])[0]
    for order in (matrix, matrix.t().contiguous().t()):
        wanted = torchs._zeropower_via_newtonschulz(order.clone(), settings.coefficients, steps, settings.eps)
        for offset in (0, 256, 1024):
            nbytes = 2 * matrix.numel()
            memory = torch.full((offset + 2 * nbytes + scratch_bytes(matrix),), 0xFF, dtype=torch.uint8, device="cuda")
            array = memory[offset : offset + nbytes].view(torch.bfloat16).as_strided(order.shape, order.stride())
            array.copy_(order)
            for part in newton_schulz_parts(array, memory[offset + -(-nbytes // 512) * 512 :], settings):
                part()
            helpers.assert_same_bits(array, wanted, f"offset {offset}")


# -- memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_extra_memory_is_the_ring_and_the_work_memory(fraction: float) -> None:
    """As reported and as the formula says; a steady step takes no more than what reductions
    need.
    """
    shapes = [(1024, 4096)] * 4 + [(512, 512)]
    params = [torch.nn.Parameter(param) for param in tensors(0, torch.bfloat16, shapes)]
    torch.mm(params[0], params[0].T)  # cuBLAS has its memory
    optimizer = FusedOffloadMuon(params, **REMAINDER, offload=OffloadConfig(chunk_bytes=4 * MIB, fraction=fraction))
    for param in params:
        optimizer.initialize_state(param)
        param.grad = torch.ones_like(param)
    torch.cuda.empty_cache()  # of blocks that are a little larger, and would be taken whole
    reserving = gpu_rise(optimizer.reserve_gpu_memory)
    report = optimizer.memory_report()
    numel = 1024 * 4096
    work_bytes = 2 * 2 * numel + scratch_bytes(params[0])
    assert report.work_bytes == work_bytes
    assert scratch_bytes(params[0]) == 2 * numel + 4 * 1024**2 + 512
    assert report.ring_bytes == (3 * 4 * MIB if fraction else 0)
    assert reserving == report.ring_bytes + report.work_bytes
    first = gpu_rise(optimizer.step)
    assert first <= MIB
    reserved = torch.cuda.memory_reserved()
    for _ in range(3):
        assert gpu_rise(optimizer.step) <= 64 * 1024
    assert torch.cuda.memory_reserved() == reserved
    total = sum(param.numel() for param in params)
    for key, size in (("momentum_buffer", 4), ("master_param", 2)):
        bytes_of = report.host_bytes if fraction else report.resident_bytes
        assert total * size <= bytes_of[key] <= total * size + 4096
    moved = optimizer.last_step_report()
    assert moved is not None
    assert (moved.bytes_to_device, moved.bytes_to_host) == (6 * total * fraction,) * 2
    optimizer.release_gpu_memory()
    assert optimizer.memory_report().work_bytes == 0
    optimizer.close()


def test_work_memory_that_does_not_fit_is_refused_with_numbers() -> None:
    matrix, large = (torch.nn.Parameter(p) for p in tensors(0, torch.bfloat16, [(64, 1024), (5000, 5000)]))
    optimizer = FusedOffloadMuon([matrix], offload=OffloadConfig(chunk_bytes=MIB))
    for param in (matrix, large):
        param.grad = torch.ones_like(param)
    optimizer.step()
    before = matrix.detach().clone()
    optimizer.add_param_group({"params": [large]})
    optimizer.release_gpu_memory()  # the ring may have grown in earlier tests
    torch.cuda.empty_cache()
    # A limit of this process; other tests may run on the same GPU.
    total = torch.cuda.get_device_properties("cuda").total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 64 * MIB) / total)
    try:
        with pytest.raises(RuntimeError, match=r"bytes of work memory for its largest parameters.*but about \d+"):
            optimizer.step()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert torch.equal(matrix, before)
    optimizer.step()
    assert not torch.equal(matrix, before)
    optimizer.close()


# -- gradient scalers, checkpoints -----------------------------------------------------------------


def test_a_gradient_scaler_skips_on_the_device() -> None:
    """The first step and a later one are skipped; the host never waits in a steady step."""

    def run(skipped: tuple[int, ...]) -> Outcome:
        optimizer = ours(torch.bfloat16, chunk_bytes=MIB, **REMAINDER)
        scale = torch.full((1,), 8.0, device="cuda")
        flags = [torch.full((1,), float(step in skipped), device="cuda") for step in range(6)]
        for step in range(6):
            if skipped or step not in (0, 3):
                set_grads(optimizer, [grad * 8 for grad in tensors(step, torch.bfloat16)])
                optimizer.grad_scale = scale  # type: ignore[attr-defined]
                if skipped:
                    optimizer.found_inf = flags[step]  # type: ignore[attr-defined]
                with helpers.no_host_sync("cuda") if step > 4 else torch.no_grad():
                    optimizer.step()
        found = outcome(optimizer)
        assert optimizer.param_groups[0]["step"] == 4
        optimizer.close()
        return found

    assert_same(run(skipped=(0, 3)), run(skipped=()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("from_ours", [True, False], ids=["from ours", "from torch"])
def test_state_dicts_are_exchanged_with_torch(from_ours: bool, dtype: torch.dtype) -> None:
    """Both ways, and the next steps are the same."""
    options = BFLOAT16 if dtype == torch.bfloat16 else {}
    made: dict[bool, Any] = {
        True: ours(dtype, **options),
        False: torch.optim.Muon(map(torch.nn.Parameter, tensors(0, dtype)), lr=0.02),
    }
    one, other = train(made[from_ours], dtype), made[not from_ours]
    saved = copy.deepcopy(one.torch_state_dict() if from_ours else one.state_dict())
    with torch.no_grad():
        for param, value in zip(params_of(other), params_of(one), strict=True):
            param.copy_(value)
    other.load_state_dict(saved)
    assert_same(outcome(train(other, dtype)), outcome(train(one, dtype)))
    made[True].close()


def test_a_resumed_run_goes_on_with_the_same_bits() -> None:
    """With other chunks, another fraction."""
    one = train(ours(torch.bfloat16, **REMAINDER), torch.bfloat16)
    other = ours(torch.bfloat16, chunk_bytes=MIB, fraction=0.3, **REMAINDER)
    saved = copy.deepcopy(one.state_dict())
    with torch.no_grad():
        for param, value in zip(params_of(other), params_of(one), strict=True):
            param.copy_(value)
    other.load_state_dict(saved)
    assert_same(outcome(train(other, torch.bfloat16)), outcome(train(one, torch.bfloat16)))
    one.close()
    other.close()
