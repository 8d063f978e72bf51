"""A step that fails half-way: what it still has under way must not reach what is loaded
afterwards.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import cpu_pipeline
import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from simulated_device import SimulatedDevice

from fused_offload import FusedOffloadAdam, OffloadConfig
from fused_offload.kernels.adam import launch as adam
from fused_offload.memory import cuda_driver
from fused_offload.stream import step_upload

pipeline_on_the_cpu, specified_kernels = cpu_pipeline.pipeline_on_the_cpu, cpu_pipeline.specified_kernels


class LaunchError(Exception):
    pass


def test_loading_waits_for_the_copies_of_a_failed_step(monkeypatch: pytest.MonkeyPatch) -> None:
    param = torch.nn.Parameter(torch.arange(1024.0))
    optimizer = FusedOffloadAdam([param], offload=OffloadConfig(chunk_bytes=1024))
    param.grad = torch.ones_like(param)
    optimizer.step()
    live = optimizer.state[param]["exp_avg"]
    saved = copy.deepcopy(optimizer.state_dict())
    launched, waits = [], []
    launch = adam.adam_step_

    def fail_at_the_third(*args: Any) -> None:
        if len(launched) == 2:
            raise LaunchError
        launched.append(args)
        launch(*args)

    with monkeypatch.context() as patched:
        patched.setattr(adam, "adam_step_", fail_at_the_third)
        with pytest.raises(LaunchError):
            optimizer.step()
    with pytest.raises(RuntimeError, match="failed half-way"):
        optimizer.step()
    left_behind = live.clone()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: waits.append(torch.equal(live, left_behind)))
    optimizer.load_state_dict(saved)
    assert waits == [True]  # before anything was written
    for key, value in saved["state"][0].items():
        assert torch.equal(optimizer.state[param][key], value)
    waits.clear()
    optimizer.step()
    optimizer.state_dict()
    assert waits == []  # once is enough
    launched.clear()
    optimizer.close()


def test_another_optimizer_waits_for_what_a_failed_step_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies and kernels may be under way that no event stands for, in the ring that both share."""
    failing, other = (
        FusedOffloadAdam([torch.nn.Parameter(torch.zeros(1024))], offload=OffloadConfig(chunk_bytes=1024))
        for _ in range(2)
    )
    for optimizer in (failing, other):
        optimizer.param_groups[0]["params"][0].grad = torch.ones(1024)
        optimizer.step()
    waits: list[Any] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    with monkeypatch.context() as patched:
        patched.setattr(adam, "adam_step_", fail_to_launch)
        with pytest.raises(LaunchError):
            failing.step()
    assert waits == []
    other.step()
    assert waits == [torch.device("cpu")]
    other.step()
    assert len(waits) == 1


def fail_to_launch(*_: Any) -> None:
    raise LaunchError


@pytest.mark.usefixtures("specified_kernels")
@pytest.mark.parametrize("fails", ["empty", "PinnedSlab"])
def test_a_table_that_found_no_memory_is_found_some_later(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was there before is used as long as it was, and not beyond its end."""
    for name in ("_LEAST_BYTES", "_SLAB_BYTES"):
        monkeypatch.setattr(step_upload, name, 1)
    optimizer = FusedOffloadAdam([torch.nn.Parameter(torch.zeros(1024))], offload=OffloadConfig(chunk_bytes=1024))
    upload_copies(optimizer, monkeypatch)
    first = optimizer.param_groups[0]["params"]
    first[0].grad = torch.ones(1024)
    optimizer.step()
    more = [torch.nn.Parameter(torch.zeros(50)) for _ in range(300)]
    optimizer.add_param_group({"params": more})
    for param in more:
        param.grad = torch.ones(50)

    def no_memory(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    class Torch:
        """As `step_upload` sees it."""

        empty = staticmethod(no_memory)

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    with monkeypatch.context() as patched:
        patched.setattr(step_upload, *{"empty": ("torch", Torch()), "PinnedSlab": ("PinnedSlab", no_memory)}[fails])
        with pytest.raises(torch.OutOfMemoryError):
            optimizer.step()
    assert not more[0].any()
    optimizer.step()
    assert (more[0] != 0).all()
    assert optimizer.param_groups[0]["step"] == 2


def upload_copies(optimizer: FusedOffloadAdam, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets every copy to the address table check that it fits."""
    copy_ = cuda_driver.copy_to_device_async

    def checked(target: int, source: int, nbytes: int, stream: int) -> None:
        for pipeline in optimizer._stepper.devices.pipelines.values():
            memory = pipeline._upload._memory
            if target == memory.data_ptr():
                assert nbytes <= memory.nbytes
        copy_(target, source, nbytes, stream)

    monkeypatch.setattr(cuda_driver, "copy_to_device_async", checked)


@pytest.mark.parametrize("fails", ["full", "empty"])
def test_a_count_of_skips_that_found_no_memory_is_made_later(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    param = torch.nn.Parameter(torch.zeros(1024))
    optimizer = FusedOffloadAdam([param], offload=OffloadConfig(chunk_bytes=1024))
    param.grad = torch.ones(1024)
    optimizer.grad_scale, optimizer.found_inf = torch.ones(1), torch.zeros(1)  # type: ignore[attr-defined]
    make = getattr(torch, fails)

    def no_memory(*args: Any, **options: Any) -> Any:
        if args in (((1,), 0), (1,)):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return make(*args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(torch, fails, no_memory)
        with pytest.raises(torch.OutOfMemoryError):
            optimizer.step()
    assert not param.any()
    for step in (1, 2):
        optimizer.found_inf = torch.full((1,), float(step == 2))  # type: ignore[attr-defined]
        optimizer.step()
    assert optimizer.state_dict()["param_groups"][0]["step"] == 1
    assert param.all()


def test_an_interrupted_table_or_copy_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal may arrive anywhere; what was written half is not taken for whole."""
    optimizer = FusedOffloadAdam([torch.nn.Parameter(torch.zeros(300)) for _ in range(2)])
    params = optimizer.param_groups[0]["params"]
    for param in params:
        param.grad = torch.ones(300)
    optimizer.step()
    [plan] = optimizer._stepper.planner._plans.values()
    [derived] = plan.derived.values()
    table = derived.table

    class Interrupting:
        """Updates whose addresses of gradients are interrupted."""

        version = 10**6
        param_addresses = np.zeros(2, np.int64)

        @property
        def grad_addresses(self) -> Any:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        table.fill(Interrupting(), None, ())  # type: ignore[arg-type]
    assert table.version != Interrupting.version

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    sent: list[int] = []
    buffer = step_upload.UploadBuffer(torch.device("cpu"))
    monkeypatch.setattr(step_upload.cuda_driver, "copy_to_device_async", lambda *arguments: sent.append(1))
    record = SimulatedDevice().current.record_event
    buffer.send(table, {}, 0, record)
    other = SimpleNamespace(
        version=5, nbytes=table.nbytes, rows=table.rows, chunks=table.chunks, write_to=table.write_to
    )
    with monkeypatch.context() as patched:
        patched.setattr(step_upload.cuda_driver, "copy_to_device_async", interrupted)
        with pytest.raises(KeyboardInterrupt):
            buffer.send(other, {}, 0, record)  # type: ignore[arg-type]
    buffer.send(table, {}, 0, record)
    assert len(sent) == 2


def test_the_host_runs_ahead_of_the_copies_of_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step in parts sends many; pieces whose copies are complete are written again, and only
    those.
    """
    done: list[bool] = []

    class Event:
        def __init__(self) -> None:
            self.number = len(done)
            done.append(False)

        def query(self) -> bool:
            return done[self.number]

        def synchronize(self) -> None:
            done[self.number] = True

    monkeypatch.setattr(step_upload, "_SLAB_BYTES", 4096)
    monkeypatch.setattr(step_upload, "_MOST_BYTES", 6 * 4096)
    sources: list[int] = []
    monkeypatch.setattr(
        step_upload.cuda_driver, "copy_to_device_async", lambda *arguments: sources.append(arguments[1])
    )
    buffer = step_upload.UploadBuffer(torch.device("cpu"))

    def send(numel: int = 1) -> int:
        rows = np.zeros((numel, 6), np.int64)
        table = SimpleNamespace(version=1, nbytes=rows.nbytes, rows=rows, chunks=[], write_to=lambda host: None)
        buffer.send(table, {}, 0, Event)  # type: ignore[arg-type]
        return sources[-1]

    first = [send() for _ in range(5)]
    assert len(set(first)) == 5
    assert not any(done)
    done[:2] = [True, True]
    assert [send(), send()] == first[:2]
    assert send() not in first
    assert done.count(True) == 2
    assert send() == first[2]  # the limit is reached: the oldest copy is waited for
    assert done[2]
    assert not done[3]
    assert send(200) not in sources[:-1]  # a larger table than any before
