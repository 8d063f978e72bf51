"""Ways to stream state with made-up times, for the tests of fused-offload tune."""

from __future__ import annotations

from fused_offload.plan.transfer_settings import Streaming
from fused_offload.profiles.units import MIB
from fused_offload.tuning.candidates import Timed


def timed(**ms: float) -> list[Timed]:
    """Ways by name: ``c48x3`` is 48 MiB x 3, ``z64`` zero-copy with 64 programs."""
    ways = []
    for name, value in ms.items():
        if name[0] == "z":
            way = Streaming(programs=int(name[1:]))
        else:
            size, _, depth = name[1:].partition("x")
            way = Streaming(int(size) * MIB, int(depth))
        ways.append(Timed(way, (value, value * 2, value, value * 0.9, value)))
    return ways
