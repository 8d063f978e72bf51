"""Amount of work of each benchmark: full on a GPU, less on a CPU, the least in a smoke test."""

from __future__ import annotations

from dataclasses import dataclass

from fused_offload import OffloadConfig
from fused_offload.config import DEFAULT_CHUNK_BYTES, DEFAULT_DEPTH

MIB = 2**20

COPY_MIB = (1, 4, 8, 16, 24, 48, 64)
# Sizes at which a link is fastest; smaller copies are bound by their launches.
DUPLEX_MIB = (4, 8, 16, 24, 48, 64)
SWEEP_CHUNK_MIB = (8, 16, 24, 48, 96)
SWEEP_DEPTHS = (2, 3, 4)


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Sizes and repetitions.

    Attributes:
        numel: parameters in all.
        tensors: how many tensors they are split into.
        rounds: timed repetitions; rows give their median.
        compared_rounds: the same for a step and the copies that it is compared with, whose times
            differ from one round to the next by more than what is looked for.
        warmup_rounds: repetitions before them: compilation, allocation, clocks.
        launches: kernels timed as one, so that what the host does before the first does not count.
        link_bytes: bytes that one measurement of the link moves each way, at least.
        small_tensors: tensors of the many-small-tensors case.
        small_numel: elements of each of them.
        few_tensors: tensors that the same elements are in for comparison.
        drift_steps: steps in a row when looking for a slow-down.
        sweep_rounds: timed repetitions of each point of the sweep.
        offload: how state is streamed.
        smoke: whether only running counts, not the numbers.
    """

    numel: int
    tensors: int = 64
    rounds: int = 5
    compared_rounds: int = 15
    warmup_rounds: int = 3
    launches: int = 10
    link_bytes: int = 2_000_000_000
    small_tensors: int = 20_000
    small_numel: int = 512
    few_tensors: int = 20
    drift_steps: int = 200
    sweep_rounds: int = 2
    offload: OffloadConfig = OffloadConfig(  # noqa: RUF009 - immutable
        chunk_bytes=DEFAULT_CHUNK_BYTES, depth=DEFAULT_DEPTH, transport="copy"
    )
    smoke: bool = False

    @property
    def tensor_numel(self) -> int:
        """Elements of each tensor."""
        return max(1, self.numel // self.tensors)

    def bytes_of(self, mib: int) -> int:
        """Size of a chunk or a copy, smaller by as much as the chunks of a smoke test are."""
        return mib * self.offload.chunk_bytes // 48


def full_scale(numel: int) -> Scale:
    """Scale of the published numbers."""
    return Scale(numel=numel)


def cpu_scale(numel: int) -> Scale:
    """Without a GPU: plain torch does the steps, so fewer and smaller ones."""
    return Scale(numel=numel, compared_rounds=5, launches=1, small_tensors=1_000, drift_steps=20)


def smoke_scale(numel: int) -> Scale:
    """Each benchmark once, as small as it can be with several chunks and several programs."""
    return Scale(
        numel=numel,
        tensors=4,
        rounds=1,
        compared_rounds=1,
        warmup_rounds=0,
        launches=1,
        link_bytes=4 * MIB,
        small_tensors=20,
        few_tensors=2,
        drift_steps=8,
        sweep_rounds=1,
        offload=OffloadConfig(chunk_bytes=12 * 1024, depth=DEFAULT_DEPTH, transport="copy"),
        smoke=True,
    )
