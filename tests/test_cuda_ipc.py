"""Parts of an allocation are sent to other processes as views of all of it. On the CPU, which can
share any part, with torch's receiver.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from torch.multiprocessing import reductions

from fused_offload.memory import cuda_ipc
from fused_offload.memory.cuda_ipc import make_parts_shareable, over_allocation

NBYTES = 4096


@pytest.fixture(autouse=True)
def reducers() -> Iterator[dict[Any, Any]]:
    """Reducers of this process, as they are put back."""
    known: dict[Any, Any] = ForkingPickler._extra_reducers  # type: ignore[attr-defined]
    before = dict(known)
    yield known
    known.clear()
    known.update(before)


def allocation() -> torch.Tensor:
    memory = torch.arange(NBYTES // 4, dtype=torch.int32).view(torch.uint8)
    make_parts_shareable(memory)
    return memory


def part(memory: torch.Tensor, start: int, numel: int) -> torch.Tensor:
    """int32 elements with a storage of their own, one element longer, as values of state have."""
    storage = memory.untyped_storage()[start : start + 4 * (numel + 1)]
    return torch.empty(0, dtype=torch.int32).set_(storage, 0, (numel,), (1,))


class Mapped:
    """Storage of a receiver, which finds the allocation at another address."""

    memory: torch.Tensor

    @classmethod
    def _new_shared_cuda(cls, device: Any, handle: Any, nbytes: int, first: int, *_: Any) -> torch.UntypedStorage:
        return cls.memory.untyped_storage()[first : first + nbytes]

    @staticmethod
    def _release_ipc_counter(*_: Any, **__: Any) -> None: ...


def received(tensor: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """What torch makes in another process of a tensor that was sent."""
    sent = over_allocation(tensor)
    storage = sent.untyped_storage()
    first = storage.data_ptr() - memory.data_ptr()
    place = (Mapped, sent.dtype, 0, b"handle", storage.nbytes(), first, False, b"counter", 0, b"event", False)
    arrived: torch.Tensor = reductions.rebuild_cuda_tensor(
        torch.Tensor, sent.shape, sent.stride(), sent.storage_offset(), *place
    )
    return arrived


def test_a_receiver_gets_every_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those behind the first part, whose storage has the address of the whole one."""
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    monkeypatch.setattr(reductions, "shared_cache", reductions.SharedCache())
    memory = allocation()
    monkeypatch.setattr(Mapped, "memory", memory.clone(), raising=False)
    parts = [part(memory, start, numel) for start, numel in ((0, 5), (256, 60), (2048, 500))]
    sent = [*parts, parts[1][7:30], parts[1][2:2], parts[2].view(4, 125).t()]
    arrived = [received(tensor, memory) for tensor in sent]
    for tensor, copied in zip(sent, arrived, strict=True):
        assert torch.equal(tensor, copied)
        assert tensor.stride() == copied.stride()
    assert len({tensor.untyped_storage().data_ptr() for tensor in arrived}) == 1


def test_nothing_is_kept_with_the_memory_for_each_send() -> None:
    """torch stacks records of sends in the storage that was sent: tens of thousands of them, behind
    some checkpoints, end the process that frees it.
    """
    memory = allocation()
    sent = [over_allocation(part(memory, 256, 60)) for _ in range(3)]
    assert len({tensor.untyped_storage()._cdata for tensor in (memory, *sent)}) == 4


def test_parts_can_be_sent_while_they_are_there() -> None:
    memory, other = allocation(), allocation()
    address, value = memory.data_ptr(), part(memory, 256, 60)
    reference = cuda_ipc._ALLOCATIONS[address]
    del memory
    gc.collect()
    sent = over_allocation(value)
    assert (sent.untyped_storage().data_ptr(), sent.untyped_storage().nbytes()) == (address, NBYTES)
    assert torch.equal(sent, value)
    del sent, value
    gc.collect()
    assert reference.expired()
    make_parts_shareable(other)
    assert reference not in cuda_ipc._ALLOCATIONS.values()


def test_sends_keep_the_memory_no_longer_than_receivers_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch keeps what was sent until it next looks which receivers are done."""
    unclaimed: list[torch.Tensor] = []

    def torchs(tensor: torch.Tensor) -> Any:
        unclaimed.append(tensor)
        return str, ("in another process",)

    ForkingPickler.register(torch.Tensor, torchs)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "ipc_collect", unclaimed.clear)
    memory = allocation()
    reference, value = cuda_ipc._ALLOCATIONS[memory.data_ptr()], part(memory, 256, 60)
    ForkingPickler.dumps(value)
    del memory, value
    gc.collect()
    assert reference.expired()


def test_forked_processes_leave_torchs_records_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no CUDA in them, and looking for it would raise."""
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    monkeypatch.setattr(torch.cuda, "_initialized", True)
    calls: list[bool] = []
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: calls.append(True))
    memory = allocation()
    del memory
    gc.collect()
    assert not calls


class Elsewhere:
    """GPU memory at addresses at which this process has memory of its own."""

    device = torch.device("cuda", 0)

    def __init__(self, memory: torch.Tensor) -> None:
        self.data_ptr, self.nbytes = memory.data_ptr, lambda: memory.nbytes


def test_memory_of_another_device_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forked worker may have its own memory at an address that was the GPU's."""
    memory = allocation()
    monkeypatch.setattr(torch.UntypedStorage, "_new_with_weak_ptr", lambda cdata: Elsewhere(memory))
    value = part(memory, 256, 60)
    assert over_allocation(value) is value


def test_one_thread_sends_while_another_allocates() -> None:
    """Queues send from a thread of their own. Here something is allocated before each of its lines."""
    kept, elsewhere, tracer = [allocation() for _ in range(3)], torch.zeros(3), sys.gettrace()

    def allocate(*_: Any) -> Any:
        kept.append(allocation())
        return allocate

    sys.settrace(allocate)
    try:
        assert over_allocation(elsewhere) is elsewhere
    finally:
        sys.settrace(tracer)
    assert len(kept) > 3


def test_reducers_of_others_are_called(reducers: dict[Any, Any]) -> None:
    reduced: list[torch.Tensor] = []

    def of_others(tensor: torch.Tensor) -> Any:
        reduced.append(tensor)
        return reductions.reduce_tensor(tensor.clone())

    ForkingPickler.register(torch.Tensor, of_others)
    memory = allocation()
    ours = reducers[torch.Tensor]
    make_parts_shareable(memory)
    assert reducers[torch.Tensor] is ours
    value, elsewhere = part(memory, 256, 60), torch.zeros(3)
    ForkingPickler.dumps([elsewhere, value])
    assert reduced[0] is elsewhere
    assert reduced[1].untyped_storage().nbytes() == NBYTES
    assert len(reduced) == 2
