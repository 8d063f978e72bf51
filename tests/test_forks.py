"""Forked children: they give nothing back that they inherited, and reading what they did not
inherit is refused.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import mmap
import os
import sys
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cpu_pipeline import pipeline_on_the_cpu  # noqa: F401

from fused_offload import FusedOffloadAdam
from fused_offload.memory.pinned import PinnedSlab
from fused_offload.state import storage

BYTES = 2**16


@pytest.fixture(autouse=True)
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def in_child(function: Callable[[], bool]) -> bool:
    """Whether ``function`` is true in a forked child, which then ends without cleaning up."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of forks beside threads
        child = os.fork()
    if child == 0:
        try:
            passed = function()
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
            passed = False
        os._exit(0 if passed else 1)
    return os.waitpid(child, 0)[1] == 0


def fill_hole(address: int) -> bytes:
    """Maps memory where a slab is in the parent, as a child's allocator may."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_size_t]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x100000  # MAP_FIXED_NOREPLACE
    assert libc.mmap(address, BYTES, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) == address
    ctypes.memset(address, 7, BYTES)
    return b"\7" * BYTES


class Owner:
    """In a cycle with itself, as an optimizer is."""

    def __init__(self, slab: PinnedSlab) -> None:
        self.slab = slab
        self.itself = self


def close(owner: list[Owner]) -> None:
    owner[0].slab.close()
    owner.clear()


LETTING_GO: dict[str, Callable[[list[Owner]], Any]] = {
    "drops it": list.clear,
    "closes it": close,
    "exits": lambda owner: atexit._run_exitfuncs(),
    "keeps a view": lambda owner: owner.append(owner.pop().slab.bytes[:1]),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("let_go", LETTING_GO.values(), ids=LETTING_GO)
@pytest.mark.parametrize("is_garbage", [False, True], ids=["reachable", "garbage"])
def test_a_child_never_unmaps_what_it_did_not_inherit(is_garbage: bool, let_go: Callable[[list[Owner]], Any]) -> None:
    owner = [Owner(PinnedSlab(BYTES, pin=True))]
    address = owner[0].slab.bytes.data_ptr()
    if is_garbage:
        owner = [Owner(PinnedSlab(BYTES, pin=True))]

    def child() -> bool:
        data = fill_hole(address)
        let_go(owner)
        owner.clear()
        gc.collect()
        return ctypes.string_at(address, BYTES) == data

    assert in_child(child)
    assert in_child(lambda: in_child(child))


def test_a_child_keeps_the_gpu_memory_of_an_optimizer_that_is_garbage() -> None:
    param = torch.nn.Parameter(torch.ones(300))
    param.grad = torch.ones(300)
    optimizer: Any = FusedOffloadAdam([param])
    optimizer.step()
    [pipeline] = optimizer._stepper.devices.pipelines.values()
    kept = [weakref.ref(thing) for thing in (pipeline, pipeline.queues, pipeline._upload, pipeline.skips)]
    del optimizer, pipeline

    def child() -> bool:
        gc.collect()
        return all(thing() is not None for thing in kept)

    assert in_child(child)
    gc.collect()
    assert all(thing() is None for thing in kept)  # the parent frees them


def test_closed_memory_is_inherited() -> None:
    slab = PinnedSlab(BYTES, pin=True)
    slab.bytes.fill_(3)
    slab.close()
    assert in_child(lambda: bool((slab.bytes == 3).all()))


READING: dict[str, Callable[[FusedOffloadAdam, Any], Any]] = {
    "an entry": lambda optimizer, param: optimizer.state[param]["exp_avg"],
    "a value": lambda optimizer, param: optimizer.get_unscaled_state(param, "exp_avg"),
    "a state dict": lambda optimizer, param: optimizer.state_dict(),
    "torch's state dict": lambda optimizer, param: optimizer.torch_state_dict(),
    "writing": lambda optimizer, param: optimizer.set_scaled_state(param, "exp_avg", torch.zeros(300)),
}


@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "page-locked"])
@pytest.mark.parametrize("read", READING.values(), ids=READING)
def test_reading_in_a_child(
    monkeypatch: pytest.MonkeyPatch, read: Callable[[FusedOffloadAdam, Any], Any], pinned: bool
) -> None:
    monkeypatch.setattr(
        storage, "PinnedSlab", lambda nbytes, **options: PinnedSlab(nbytes, **{**options, "pin": pinned})
    )
    param = torch.nn.Parameter(torch.ones(300))
    param.grad = torch.ones(300)
    optimizer = FusedOffloadAdam([param])
    optimizer.step()

    def child() -> bool:
        if not pinned:
            read(optimizer, param)
            return True
        with pytest.raises(RuntimeError, match=r"forked .* not inherited.*before the fork .* spawn"):
            read(optimizer, param)
        return True

    assert in_child(child)
    copied = optimizer.state_dict()["state"][0]["exp_avg"].clone()
    assert in_child(lambda: bool(copied.sum() > 0))
