"""Other ways to take the same step, each built the way its own project builds it."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from cases import FORMAT_6B, FORMAT_12B, LR, WEIGHT_DECAY, StoredFormat
from clock import synchronize

BETAS = (0.9, 0.999)
EPS = 1e-8
CPU_THREADS = 16


def import_peer(module: str, name: str) -> Any:
    """A peer's class; skips the benchmark, by name and with the reason, where it cannot be
    imported.
    """
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:  # packages built for another CUDA or torch fail in their own ways
        pytest.skip(f"{module}.{name} cannot be imported: {type(error).__name__}: {error}")


def te_fused_adam() -> Any:
    """TransformerEngine's FusedAdam."""
    return import_peer("transformer_engine.pytorch.optimizers", "FusedAdam")


class Ready(NamedTuple):
    """A peer that is built.

    Attributes:
        step: everything from gradients to final parameters.
        params: where the result is.
        extra_is_gpu_state: whether GPU memory at the peak is the optimizer's own; not if ``step``
            makes gradients.
    """

    step: Callable[[], Any]
    params: Sequence[torch.Tensor]
    extra_is_gpu_state: bool = True


class Peer(NamedTuple):
    """One way to take the step.

    Attributes:
        name: of its row.
        note: what it keeps, and where.
        build: makes it from bfloat16 parameters with gradients.
        build_to_train: the same for a training loop, which makes the gradients; None where
            ``build`` serves it, too.
        note_to_train: the note there, where it is another.
    """

    name: str
    note: str
    build: Callable[[list[torch.nn.Parameter]], Ready]
    build_to_train: Callable[[list[torch.nn.Parameter]], Ready] | None = None
    note_to_train: str = ""

    def __str__(self) -> str:
        return self.name


def _torch_resident(params: list[torch.nn.Parameter]) -> Ready:
    # torch's fused kernel wants gradients of the parameters' dtype, so masters in float32 mean a
    # cast each way.
    masters = [param.detach().float().requires_grad_() for param in params]
    for master in masters:
        master.grad = torch.empty_like(master)
    optimizer = torch.optim.AdamW(
        masters, lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, foreach=False, fused=True
    )

    @torch.no_grad()
    def step() -> None:
        torch._foreach_copy_([master.grad for master in masters], [param.grad for param in params])
        optimizer.step()
        torch._foreach_copy_(params, masters)

    return Ready(step, params)


def _torch_cpu(params: list[torch.nn.Parameter]) -> Ready:
    on_cpu = [param.detach().cpu().float().requires_grad_() for param in params]
    for param, original in zip(on_cpu, params, strict=True):
        assert original.grad is not None
        param.grad = original.grad.cpu().float()
    optimizer = torch.optim.AdamW(on_cpu, lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True)

    def step() -> None:
        with cpu_threads():
            optimizer.step()

    return Ready(step, on_cpu)


@contextlib.contextmanager
def cpu_threads() -> Iterator[None]:
    """Whatever OMP_NUM_THREADS says."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(CPU_THREADS, len(os.sched_getaffinity(0))))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _te(format: StoredFormat) -> Callable[[list[torch.nn.Parameter]], Ready]:
    def build(params: list[torch.nn.Parameter]) -> Ready:
        return Ready(te_fused_adam()(params, betas=BETAS, eps=EPS, **format.arguments).step, params)

    return build


def _torchao_optimizer(params: list[torch.nn.Parameter]) -> Any:
    return import_peer("torchao.optim", "CPUOffloadOptimizer")(
        params, torch.optim.AdamW, lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True
    )


def _torchao(params: list[torch.nn.Parameter]) -> Ready:
    grads = [param.grad for param in params]
    optimizer = _torchao_optimizer(params)

    def step() -> None:
        optimizer.zero_grad()
        # It copies each gradient to the host in a hook of backward. This is the cheapest backward
        # there is: every parameter is its own loss, and gets its gradient as a copy.
        torch.autograd.backward(params, grads)
        optimizer.step()

    return Ready(step, params, extra_is_gpu_state=False)


def _deepspeed(params: list[torch.nn.Parameter]) -> Ready:
    optimizer_class = import_peer("deepspeed.ops.adam", "DeepSpeedCPUAdam")

    def make(masters: list[torch.Tensor]) -> Any:
        try:
            return optimizer_class(masters, lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, adamw_mode=True)
        # It is compiled now, for which a compiler and ninja are needed.
        except Exception as error:
            pytest.skip(f"DeepSpeedCPUAdam cannot be built: {type(error).__name__}: {error}")

    return _with_masters_on_the_cpu(params, make)


def _torch_cpu_in_training(params: list[torch.nn.Parameter]) -> Ready:
    return _with_masters_on_the_cpu(
        params,
        lambda masters: torch.optim.AdamW(
            masters, lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, foreach=False, fused=True
        ),
    )


def _with_masters_on_the_cpu(params: list[torch.nn.Parameter], make: Callable[[list[torch.Tensor]], Any]) -> Ready:
    """As ZeRO-Offload does it.

    Float32 masters and gradients in page-locked memory, parameters cast and copied back.
    """
    device = params[0].device
    pin = device.type == "cuda"
    masters = []
    for param in params:
        master = torch.empty(param.shape, dtype=torch.float32, pin_memory=pin).copy_(param.detach()).requires_grad_()
        master.grad = torch.empty_like(master, pin_memory=pin)
        masters.append(master)
    optimizer = make(masters)

    @torch.no_grad()
    def step() -> None:
        for master, param in zip(masters, params, strict=True):
            assert master.grad is not None
            assert param.grad is not None
            master.grad.copy_(param.grad, non_blocking=True)
        synchronize(device)
        with cpu_threads():
            optimizer.step()
        for master, param in zip(masters, params, strict=True):
            param.copy_(master, non_blocking=True)

    return Ready(step, params, extra_is_gpu_state=False)


def _bitsandbytes(name: str) -> Callable[[list[torch.nn.Parameter]], Ready]:
    def build(params: list[torch.nn.Parameter]) -> Ready:
        optimizer_class = import_peer("bitsandbytes.optim", name)
        optimizer = optimizer_class(params, lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)
        return Ready(optimizer.step, params, extra_is_gpu_state=False)

    return build


def _megatron_hybrid(*, overlap: bool) -> Callable[[list[torch.nn.Parameter]], Ready]:
    def build(params: list[torch.nn.Parameter]) -> Ready:
        optimizer_class = import_peer("megatron.core.optimizer.cpu_offloading", "HybridDeviceOptimizer")
        # As megatron.core.optimizer makes it for --optimizer-cpu-offload. All is offloaded, so the
        # GPU's class is idle.
        optimizer = optimizer_class(
            [{"params": params}],
            offload_fraction=1.0,
            cpu_optimizer_cls=torch.optim.AdamW,
            gpu_optimizer_cls=torch.optim.AdamW,
            overlap_cpu_optimizer_d2h_h2d=overlap,
            pin_cpu_grads=True,
            pin_cpu_params=True,
            param_update_in_fp32=True,
            lr=LR,
            weight_decay=WEIGHT_DECAY,
            betas=BETAS,
            eps=EPS,
            bias_correction=True,
            fused=True,
        )
        return Ready(optimizer.step, params)

    return build


PEERS = (
    Peer("torch-fused-resident", "on the GPU: float32 master, gradients and moments; casts each way", _torch_resident),
    Peer(
        "torch-fused-cpu",
        f"on the CPU, {CPU_THREADS} threads or all cores, float32 everything; nothing is moved",
        _torch_cpu,
        _torch_cpu_in_training,
        f"on the CPU, {CPU_THREADS} threads or all cores, float32 everything; gradients and parameters are copied",
    ),
    Peer("te-fused-adam-12B", "TransformerEngine, on the GPU: float32 master and moments", _te(FORMAT_12B)),
    Peer("te-fused-adam-6B", "TransformerEngine, on the GPU: remainder, bfloat16 moments", _te(FORMAT_6B)),
    Peer(
        "torchao-cpu-offload",
        "on the CPU: bfloat16 moments, no master; includes the copy of backward",
        _torchao,
        lambda params: Ready(_torchao_optimizer(params).step, params, extra_is_gpu_state=False),
        "on the CPU: bfloat16 moments, no master; copies gradients before they are clipped",
    ),
    Peer(
        "deepspeed-cpu-adam", "on the CPU: float32 master and moments; gradients and parameters are copied", _deepspeed
    ),
    Peer(
        "bitsandbytes-paged-32bit",
        "managed memory, which stays on the GPU while there is room: float32 moments, no master",
        _bitsandbytes("PagedAdamW32bit"),
    ),
    Peer(
        "bitsandbytes-paged-8bit",
        "managed memory, which stays on the GPU while there is room: 8-bit moments, no master",
        _bitsandbytes("PagedAdamW8bit"),
    ),
    Peer("megatron-hybrid-overlap", "on the CPU: float32 master and moments", _megatron_hybrid(overlap=True)),
    Peer("megatron-hybrid", "on the CPU: float32 master and moments; no overlap", _megatron_hybrid(overlap=False)),
)
NEEDS_NO_GPU = {"torch-fused-resident", "torch-fused-cpu"}
