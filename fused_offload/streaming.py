"""How the state of one extent is streamed: the configuration with every ``"auto"`` settled."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .config import DEFAULT_CHUNK_BYTES, DEFAULT_DEPTH, DEFAULT_PROGRAMS, OffloadConfig


class Streaming(NamedTuple):
    """How state streams.

    Attributes:
        chunk_bytes: state bytes of a chunk; says nothing with programs.
        depth: chunks in flight; says nothing with programs.
        programs: programs at most of a kernel that works on host memory itself, or None for copies through the ring.
    """

    chunk_bytes: int = DEFAULT_CHUNK_BYTES
    depth: int = DEFAULT_DEPTH
    programs: int | None = None


def streaming_of(config: OffloadConfig, device: torch.device, state_bytes: int) -> Streaming:
    """How state of a device's parameters streams.

    Args:
        config: what the caller asked for.
        device: of the parameters.
        state_bytes: of the extent.
    """
    if config.transport == "zero_copy":
        programs = config.zero_copy_programs
        return Streaming(programs=DEFAULT_PROGRAMS if programs == "auto" else programs)
    return Streaming(
        DEFAULT_CHUNK_BYTES if config.chunk_bytes == "auto" else config.chunk_bytes,
        DEFAULT_DEPTH if config.depth == "auto" else config.depth,
    )
