"""One step on a real GPU: device-side signals, threads, devices, sizes, processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_training import FORMATS, make_params, set_grads

from fused_offload import FusedOffloadAdam, OffloadConfig
from fused_offload.kernels.adam import launch as adam

pytestmark = pytest.mark.gpu

MIB = 2**20
SMALL = OffloadConfig(chunk_bytes=MIB)


def state_bits(optimizer: FusedOffloadAdam) -> list[torch.Tensor]:
    return [value.cpu().clone() for entry in optimizer.state_dict()["state"].values() for value in entry.values()]


def copies(params: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    return [param.detach().clone() for param in params]


def all_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize(("fraction", "window_bytes"), [(0.0, 0), (1.0, 0), (1.0, 2**40)])
def test_skipped_on_the_device_without_a_sync(formats: str, fraction: float, window_bytes: int) -> None:
    """Six steps, the first and the third flagged: the result is that of the other four, and nothing
    waits.
    """
    flags = [1.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    params, clean = make_params(), make_params()
    config = OffloadConfig(chunk_bytes=MIB, fraction=fraction, window_bytes=window_bytes)
    optimizer = FusedOffloadAdam(params, lr=1e-2, offload=config, **FORMATS[formats])
    reference = FusedOffloadAdam(clean, lr=1e-2, offload=config, **FORMATS[formats])
    # Compile and allocate outside the check: one step on the same data for both.
    for opt, tensors in ((optimizer, params), (reference, clean)):
        set_grads(tensors, 99)
        opt.found_inf = torch.zeros(1, device="cuda")
        opt.grad_scale = torch.full((1,), 4.0, device="cuda")
        opt.step()
        opt.synchronize()
    signals = [torch.full((1,), flag, device="cuda") for flag in flags]
    for step, flag in enumerate(flags):
        set_grads(params, step)
        if flag:
            for param in params:
                if param.grad is not None:
                    param.grad.fill_(float("inf"))
        optimizer.found_inf = signals[step]
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            optimizer.prefetch()
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        if not flag:
            set_grads(clean, step)
            reference.found_inf = signals[step]
            reference.step()
    assert all_equal(copies(params), copies(clean))
    assert all_equal(state_bits(optimizer), state_bits(reference))
    assert optimizer.param_groups[0]["step"] == reference.param_groups[0]["step"] == 5


def test_a_step_without_a_signal_knows_which_steps_before_it_were_skipped() -> None:
    """Its number must not depend on how far the device has got when it is enqueued."""
    params, clean = make_params(), make_params()
    optimizer = FusedOffloadAdam(params, lr=1e-2, offload=SMALL, **FORMATS["fp32"])
    reference = FusedOffloadAdam(clean, lr=1e-2, offload=SMALL, **FORMATS["fp32"])
    flag = torch.ones(1, device="cuda")
    for step in range(4):
        set_grads(params, step)
        if step == 2:
            torch.cuda.synchronize()
            torch.cuda._sleep(200_000_000)  # so that the skip is not known at the next step
            optimizer.found_inf = flag  # type: ignore[attr-defined]
            optimizer.step()
            del optimizer.found_inf  # type: ignore[attr-defined]
        else:
            optimizer.step()
            set_grads(clean, step)
            reference.step()
    assert all_equal(copies(params), copies(clean))
    assert all_equal(state_bits(optimizer), state_bits(reference))
    assert optimizer.param_groups[0]["step"] == 3


def test_a_skipped_first_step_leaves_the_parameter_as_master() -> None:
    params = make_params(((1000, 1000),))
    optimizer = FusedOffloadAdam(params, lr=0.0, offload=SMALL, **FORMATS["fp32"])
    before = copies(params)
    set_grads(params, 0)
    optimizer.found_inf = torch.ones(1, device="cuda")
    optimizer.step()
    assert all_equal(copies(params), before)
    assert optimizer.state_dict()["param_groups"][0]["step"] == 0
    with torch.no_grad():
        params[0].add_(1.0)
    changed = copies(params)
    del optimizer.found_inf
    set_grads(params, 1)
    optimizer.step()
    assert all_equal(copies(params), changed)
    assert optimizer.param_groups[0]["step"] == 1


def test_grad_scaler() -> None:
    """torch's scaler: an overflow halves the scale and changes nothing; the next step counts as the
    first.
    """
    params = make_params(((300, 300),), torch.float32)
    optimizer = FusedOffloadAdam(params, lr=1e-2, offload=SMALL)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
    before = copies(params)
    (scaler.scale((params[0] * float("inf")).sum())).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**9
    assert all_equal(copies(params), before)
    optimizer.zero_grad()
    scaler.scale((params[0] * 3.0).sum()).backward()
    grad = params[0].grad.clone()
    scaler.step(optimizer)
    assert torch.equal(params[0].grad, grad), "gradients are only read"
    optimizer.synchronize()
    assert optimizer.param_groups[0]["step"] == 1
    plain = torch.nn.Parameter(before[0].clone())
    plain.grad = torch.full_like(plain, 3.0)
    torch.optim.AdamW([plain], lr=1e-2, weight_decay=0.0).step()
    torch.testing.assert_close(params[0], plain, rtol=0, atol=2e-7)


def test_learning_rate_on_the_device_is_read_by_the_kernel() -> None:
    params, plain = make_params(), make_params()
    lr = torch.tensor(1e-3, device="cuda")
    optimizer = FusedOffloadAdam(params, lr=lr, offload=SMALL)
    reference = FusedOffloadAdam(plain, lr=1e-3, offload=SMALL)
    for step in range(4):
        value = 1e-3 * (step + 1)
        set_grads(params, step)
        set_grads(plain, step)
        reference.param_groups[0]["lr"] = value
        reference.step()
        lr.fill_(value)
        torch.cuda.synchronize()
        if step >= 2:
            torch.cuda.set_sync_debug_mode("error")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert all_equal(copies(params), copies(plain))


def test_new_learning_rates_compile_nothing() -> None:
    from fused_offload.kernels.adam import launch as adam

    params = make_params(((1000, 1000), (17,)))
    optimizer = FusedOffloadAdam(params, offload=SMALL)
    for step in range(2):
        set_grads(params, step)
        optimizer.step()

    def cached() -> int:
        return sum(
            len(entry[0] if isinstance(entry, tuple) else entry) for entry in adam.adam_kernel.device_caches.values()
        )

    compiled = cached()
    for lr in (0.0, 1.0, 16.0, 1e-45, *(1e-4 * i for i in range(196))):
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
    optimizer.synchronize()
    assert cached() == compiled


def test_threads_and_streams() -> None:
    """Two optimizers stepped by two threads, each on a stream of its own, sharing the ring."""
    alone, together = [], []
    for threaded in (False, True):
        runs = [make_params(((2000, 999), (77,))) for _ in range(2)]
        optimizers = [FusedOffloadAdam(params, lr=1e-2, offload=SMALL, **FORMATS["fp32"]) for params in runs]

        def work(params, optimizer) -> None:  # type: ignore[no-untyped-def]
            with torch.cuda.stream(torch.cuda.Stream()):
                for step in range(6):
                    set_grads(params, step)
                    optimizer.step()
                torch.cuda.current_stream().synchronize()

        torch.cuda.synchronize()
        if threaded:
            threads = [threading.Thread(target=work, args=pair) for pair in zip(runs, optimizers, strict=True)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        else:
            for pair in zip(runs, optimizers, strict=True):
                work(*pair)
        target = together if threaded else alone
        for params, optimizer in zip(runs, optimizers, strict=True):
            target += copies(params) + state_bits(optimizer)
    assert all_equal([t.cpu() for t in alone], [t.cpu() for t in together])


@pytest.mark.parametrize("window_bytes", [0, 2**40])
def test_state_dict_right_after_step_is_complete(window_bytes: int) -> None:
    params = make_params(((16 * MIB,),) * 4)
    config = OffloadConfig(chunk_bytes=24 * MIB, window_bytes=window_bytes)
    optimizer = FusedOffloadAdam(params, offload=config, **FORMATS["fp32"])
    for step in range(20):
        if window_bytes:
            optimizer.prefetch()
        set_grads(params, step)
        optimizer.step()
        entry = optimizer.state_dict()["state"][3]["exp_avg"]
        early = entry.clone()
        torch.cuda.synchronize()
        assert torch.equal(early, entry)
    optimizer.close()


def test_copies_of_a_failed_step_do_not_reach_what_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    params = make_params(((16 * MIB,),))
    optimizer = FusedOffloadAdam(params, offload=OffloadConfig(chunk_bytes=24 * MIB), **FORMATS["fp32"])
    set_grads(params, 0)
    optimizer.step()
    saved = optimizer.state_dict()
    saved["state"] = {0: {key: value.clone() for key, value in saved["state"][0].items()}}
    launch, launches = adam.adam_step_, []

    def fail_at_the_fifth(*args: Any) -> None:
        launches.append(args)
        if len(launches) == 5:
            raise RuntimeError("no launch")
        launch(*args)

    set_grads(params, 1)
    torch.cuda.synchronize()
    # Kernels and write-backs are still to come when the state is loaded.
    torch.cuda._sleep(500_000_000)
    with monkeypatch.context() as patched:
        patched.setattr(adam, "adam_step_", fail_at_the_fifth)
        with pytest.raises(RuntimeError, match="no launch"):
            optimizer.step()
    optimizer.load_state_dict(saved)
    torch.cuda.synchronize()
    for key, value in saved["state"][0].items():
        assert torch.equal(optimizer.state[params[0]][key], value)


def test_autograd_notices_the_update() -> None:
    weight = torch.nn.Parameter(torch.ones(1000, device="cuda"))
    optimizer = FusedOffloadAdam([weight], offload=SMALL)
    loss = (weight * weight).sum()
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_parameters_that_moved_are_refused() -> None:
    params = make_params(((1000,),))
    optimizer = FusedOffloadAdam(params, offload=SMALL)
    set_grads(params, 0)
    optimizer.step()
    bits = state_bits(optimizer)
    params[0].data = params[0].data.cpu()
    params[0].grad = torch.ones_like(params[0])
    with pytest.raises(RuntimeError, match="moved from cuda:0 to cpu"):
        optimizer.step()
    assert all_equal(state_bits(optimizer), bits)
    assert optimizer.param_groups[0]["step"] == 1


def test_more_than_two_to_the_31_elements() -> None:
    """Offsets beyond 32 bits, checked at both ends; memory around the parameter stays untouched."""
    numel, guard, ends = 2**31 + 4096, 4096, 8192
    buffer = torch.full((numel + 2 * guard,), 7.0, dtype=torch.bfloat16, device="cuda")
    param = torch.nn.Parameter(buffer[guard : guard + numel])
    with torch.no_grad():
        param.fill_(1.0)
    param.grad = torch.full_like(param, 0.5)
    param.grad[-ends:] = torch.randn(ends, device="cuda")
    small = torch.nn.Parameter(torch.cat([param.detach()[:ends], param.detach()[-ends:]]))
    small.grad = torch.cat([param.grad[:ends], param.grad[-ends:]])
    config = OffloadConfig(chunk_bytes=48 * MIB)
    results = []
    for tensor in (param, small):
        optimizer = FusedOffloadAdam([tensor], lr=1e-2, offload=config, **FORMATS["remainder_bf16"])
        optimizer.step()
        optimizer.step()
        entry = optimizer.state[tensor]
        results.append(
            [torch.cat([t.detach().cpu()[:ends], t.detach().cpu()[-ends:]]) for t in (tensor, *entry.values())]
        )
        optimizer.close()
    assert all_equal(*results)
    assert (buffer[:guard] == 7).all()
    assert (buffer[-guard:] == 7).all()


_CHILD = """
import torch
from fused_offload import FusedOffloadAdam
p = torch.nn.Parameter(torch.ones(1000, device="cuda")); p.grad = torch.ones_like(p)
o = FusedOffloadAdam([p], lr=0.5); o.step(); o.step()
assert abs(p[0].item()) < 1e-6, p[0].item()
"""


def child(environment: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", _CHILD], env={**os.environ, **environment}, stderr=subprocess.PIPE)


def test_many_processes_compile_into_one_cache(tmp_path: Path) -> None:
    for round_ in range(2):
        children = [child({"TRITON_CACHE_DIR": str(tmp_path / str(round_))}) for _ in range(8)]
        for process in children:
            _, errors = process.communicate(timeout=120)
            assert process.returncode == 0, errors.decode()[-2000:]


def test_a_home_that_cannot_be_written() -> None:
    process = child({"HOME": "/proc/no-home", "TRITON_CACHE_DIR": ""})
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors.decode()[-2000:]


@pytest.mark.multi_gpu
def test_a_skip_counts_once_however_many_devices_there_are() -> None:
    params = [torch.nn.Parameter(torch.ones(99, device=f"cuda:{index}")) for index in range(2)]
    optimizer = FusedOffloadAdam([{"params": [param]} for param in params], lr=0.5, offload=SMALL)
    for param in params:
        param.grad = torch.ones_like(param)
    for flag in (0.0, 1.0, 0.0):
        optimizer.found_inf = torch.full((1,), flag, device="cuda:0")
        optimizer.step()
    assert [group["step"] for group in optimizer.state_dict()["param_groups"]] == [2, 2]
    assert params[1].abs().max().item() < 1e-6


@pytest.mark.multi_gpu
def test_every_device_of_the_process() -> None:
    """Parameters on both devices while the first is current; the current device stays as it was."""
    torch.cuda.set_device(0)
    params = [*make_params(((500, 500),)), torch.nn.Parameter(torch.ones(999, device="cuda:1"))]
    optimizer = FusedOffloadAdam([{"params": [param]} for param in params], lr=0.5, offload=SMALL)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.step()
    torch.cuda.synchronize(1)
    assert torch.cuda.current_device() == 0
    assert params[1].abs().max().item() < 1e-6
