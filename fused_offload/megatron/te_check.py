"""Bitwise comparison of TransformerEngine's FusedAdam and FusedOffloadAdam on this machine."""

from __future__ import annotations

import functools
import warnings
from importlib.metadata import PackageNotFoundError, version

import torch

from fused_offload.adam import FusedOffloadAdam

_COMPARED_RELEASE = "2.20.2"
_COMPARED_CAPABILITY = (9, 0)


@functools.cache
def warn_where_bits_differ() -> None:
    """Steps a small tensor with both optimizers, once a process, and warns if the results differ.

    Does nothing for the release and the GPU that were compared exhaustively, or without a GPU or
    TransformerEngine.
    """
    if not torch.cuda.is_available():
        return
    try:
        release = version("transformer-engine")
    except PackageNotFoundError:
        return
    if release == _COMPARED_RELEASE and torch.cuda.get_device_capability() == _COMPARED_CAPABILITY:
        return
    from transformer_engine.pytorch.optimizers import FusedAdam

    generator = torch.Generator("cuda").manual_seed(0)
    start = torch.randn(4096, device="cuda", generator=generator).bfloat16()
    grads = [torch.randn(4096, device="cuda", generator=generator).bfloat16() for _ in range(3)]
    results = []
    for build in (FusedAdam, functools.partial(FusedOffloadAdam, numerics="te")):
        param = torch.nn.Parameter(start.clone())
        optimizer = build([param], lr=1e-2, weight_decay=0.1, master_weights=True)
        for grad in grads:
            param.grad = grad.clone()
            optimizer.step()
        state = optimizer.state[param]
        results.append([param.detach(), *(state[key].to("cuda") for key in ("exp_avg", "exp_avg_sq", "master_param"))])
    if not all(torch.equal(theirs, ours) for theirs, ours in zip(*results, strict=True)):
        warnings.warn(
            f"On this GPU the FusedAdam of TransformerEngine {release} and FusedOffloadAdam(numerics='te') round "
            f"differently (compared bit for bit: {_COMPARED_RELEASE} on an H100). Training is as exact as before, but "
            "switching from one to the other is visible in the last bits.",
            stacklevel=2,
        )
