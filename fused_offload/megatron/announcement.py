"""Log lines about the active optimizer and the location of its state."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from .adam import MegatronAdam
from .muon import MuonCounts


def announce(inners: Sequence[MegatronAdam], megatron_version: str) -> None:
    """Prints the active class, the stored state, its share on the host, and the window.

    Only the first rank prints.

    Args:
        inners: inner optimizers of one model, at least one, all in the same place.
        megatron_version: release of Megatron-Core.
    """
    if not _is_first_rank():
        return
    inner, planned_bytes = inners[0], sum(inner.planned_bytes() for inner in inners)
    stored = ", ".join(f"{key} as {format}" for key, format in inner.planned_formats().items())
    lines = [
        f"fused-offload: FusedOffloadAdam in the place of {inner.place} (megatron-core {megatron_version}), "
        f"numerics={inner.numerics}.",
        f"fused-offload: {inner.offload.fraction:.0%} of {planned_bytes / 1e9:.3g} GB of optimizer state on "
        f"this rank ({stored}) in host memory; an asynchronous checkpoint copies it there once more.",
        *_about_masters(inner),
        *_about_window(inner, planned_bytes),
    ]
    print("\n".join(lines), flush=True)


def _is_first_rank() -> bool:
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


def announce_muon(counts: MuonCounts, others: str) -> None:
    """Prints how many parameters of the first rank's model are on Muon, and how many elsewhere.

    Args:
        counts: parameters by their optimizer.
        others: name of the optimizer of the other parameters.
    """
    if _is_first_rank():
        print(
            f"fused-offload: {counts.matrices} matrices ({counts.numel:,} elements) on Muon, their float32 momentum in "
            f"host memory, masters on the GPU; {counts.others} other parameters on {others}.",
            flush=True,
        )


def announce_stock(name: str) -> None:
    """Prints that an optimizer beside Muon stays Megatron's own."""
    if _is_first_rank():
        print(f"fused-offload: --optimizer {name} keeps Megatron's own optimizer; only muon moves.", flush=True)


def _about_masters(inner: MegatronAdam) -> list[str]:
    if inner.master_owner is not None:
        return [f"fused-offload: {inner.master_owner} owns the master weights and keeps them on the GPU; moments move."]
    if not inner.master_weights:
        return [
            "fused-offload: Megatron keeps the fp32 master weights on the GPU in this mode. "
            "--use-precision-aware-optimizer moves them to the host, too."
        ]
    return []


def _about_window(inner: MegatronAdam, planned_bytes: int) -> list[str]:
    size = inner.offload.window_bytes
    if not size:
        return []
    if not inner.is_attached:
        return [
            "fused-offload: no state moves under backward: window_bytes needs Megatron's distributed optimizer "
            "(--use-distributed-optimizer)."
        ]
    most = "what activations gave back" if isinstance(size, str) else f"{min(size, planned_bytes) / 1e9:.3g} GB"
    lines = [f"fused-offload: up to {most} of it moves under the backward and the next forward pass."]
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        lines.append(
            "fused-offload: with CUDA_DEVICE_MAX_CONNECTIONS=1 whatever Megatron copies or reads waits until the "
            "window is copied. Leave the variable unset where Megatron does not ask for it."
        )
    return lines
