"""The link by itself: each direction alone and both at once, by size of the copies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pytest
import torch
from clock import measure
from duplex import Copy, CopyStreams, cut
from pytest_benchmark.fixture import BenchmarkFixture
from rows import Rows, make_row
from scale import COPY_MIB, MIB, Scale

from fused_offload.memory.pinned import PinnedSlab

pytestmark = pytest.mark.gpu


class End(NamedTuple):
    """Both ends of one direction, of one size."""

    host: torch.Tensor
    device: torch.Tensor

    def copies(self, copy_bytes: int, nbytes: int) -> Sequence[Copy]:
        return cut(self.host[:nbytes], self.device[:nbytes], copy_bytes)


@pytest.fixture(scope="module")
def ends(scale: Scale, device: torch.device) -> Iterator[tuple[End, End]]:
    """Host and GPU memory for both directions, of different random bytes."""
    nbytes = max(_total_bytes(scale, mib) for mib in COPY_MIB)
    slabs = [PinnedSlab(nbytes, pin=True) for _ in range(2)]
    pairs = []
    for slab in slabs:
        slab.bytes.copy_(torch.randint(256, (nbytes,), dtype=torch.uint8, device=device))
        pairs.append(End(slab.bytes, torch.randint(256, (nbytes,), dtype=torch.uint8, device=device)))
    yield pairs[0], pairs[1]
    pairs.clear()
    for slab in slabs:
        slab.close()


def _total_bytes(scale: Scale, mib: int) -> int:
    """Whole copies, at least ``link_bytes`` of them."""
    return -(-scale.link_bytes // (mib * MIB)) * mib * MIB


@pytest.mark.parametrize("mib", COPY_MIB)
@pytest.mark.parametrize("direction", ["h2d", "d2h", "duplex"])
def test_link(
    direction: str,
    mib: int,
    ends: tuple[End, End],
    benchmark: BenchmarkFixture,
    scale: Scale,
    rows: Rows,
    device: torch.device,
) -> None:
    down, up = ends
    nbytes = _total_bytes(scale, mib)
    to_device = down.copies(mib * MIB, nbytes) if direction != "d2h" else []
    to_host = up.copies(mib * MIB, nbytes) if direction != "h2d" else []
    streams = CopyStreams(device)

    samples = measure(
        benchmark,
        lambda: streams.time_ms(to_device, to_host),
        rounds=scale.rounds,
        warmup_rounds=scale.warmup_rounds,
    )

    for end, copies in ((down, to_device), (up, to_host)):
        for copy in (copies[0], copies[-1]) if copies else ():
            start = copy.host_address - end.host.data_ptr()
            part = slice(start, start + copy.nbytes)
            assert torch.equal(end.host[part], end.device[part].cpu()), "a copy did not arrive"
    row = make_row(
        f"link/{direction}/{mib}MiB",
        samples,
        params={"direction": direction, "copy_mib": mib},
        bytes_to_device=nbytes if to_device else None,
        bytes_to_host=nbytes if to_host else None,
    )
    rows.add(benchmark, row)
