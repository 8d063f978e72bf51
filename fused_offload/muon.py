"""FusedOffloadMuon: the arguments of torch.optim.Muon."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from fused_offload.rules.arguments import check_stored_dtypes, refuse_unknown
from fused_offload.rules.muon import MOMENTUM_FORMATS, MUON_ARGUMENTS, MuonRule

from .config import OffloadConfig
from .optimizer import OffloadOptimizer


class FusedOffloadMuon(OffloadOptimizer):
    """``torch.optim.Muon`` whose state lives in host memory.

    The update of a matrix is its momentum, orthogonalised by a Newton-Schulz iteration (Jordan et
    al. 2024, https://kellerjordan.github.io/posts/muon/). The momentum streams through the GPU in
    chunks, then the iteration works on the whole matrix in work memory, then masters and parameters
    follow in chunks. The arithmetic is that of ``torch.optim.Muon``, bit for bit on a GPU: for
    float32 parameters, and for bfloat16 parameters with a bfloat16 momentum and without masters.

    It is for the matrices of hidden layers. Give embeddings, the output layer, norms and biases to
    a `FusedOffloadAdam`; both share the staging memory (docs/muon.md).

    Differs from ``torch.optim.Muon`` in three ways. The dtype of the momentum is
    ``momentum_dtype``, not that of the gradients. With a bfloat16 momentum and ``nesterov=False``
    torch normalises the momentum that it stores, by mistake; here it stays as it is. A learning
    rate tensor on a GPU is multiplied in float32.

    Gradients are only read: under a gradient scaler, unscaled gradients are not written back.

    Args:
        params: two-dimensional parameters (float32, bfloat16 or float16) or groups of them, one
            device a group. Parameters with gaps in their memory are stepped through a copy.
        lr: learning rate, a float or a one-element tensor on the CPU or on the parameters' device,
            which the kernel reads without a synchronisation.
        weight_decay: decoupled weight decay.
        momentum: decay of the momentum.
        nesterov: orthogonalise the gradient, interpolated to the momentum, instead of the momentum.
        ns_coefficients: coefficients of the iteration's polynomial.
        eps: smallest norm that a momentum is divided by.
        ns_steps: iterations, less than 100.
        adjust_lr_fn: scale of the learning rate for a matrix ``[A, B]``: ``"original"`` (also
            None), ``sqrt(max(1, A / B))``; ``"match_rms_adamw"``, ``0.2 sqrt(max(A, B))``;
            ``"spectral_unclamped"``, ``sqrt(A / B)``.
        momentum_dtype: stored dtype of the momentum, float32 or bfloat16.
        master_weights: keep ``master_param``, the copy of each parameter that updates apply to.
        master_weight_dtype: dtype of the masters, float32 or float16 (block-scaled).
        store_param_remainders: keep float32 masters of bfloat16 parameters as 16 bits beside the
            parameter. Nothing is lost; the parameter is then the master rounded half away from
            zero.
        use_decoupled_grad: read gradients from ``param.decoupled_grad`` instead of ``param.grad``.
        offload: share of state in host memory, and its transfer by copies.
        **unsupported: none; arguments of other optimizers are refused by name.

    Raises:
        ValueError: for parameters that are not two-dimensional or of which a rank has a part, for
            hyperparameters out of range, parameters given twice, a window and zero copy.
        TypeError: for parameters that cannot be updated, and for arguments that do not exist.
        RuntimeError: for dtypes that are not supported.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float | torch.Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        momentum_dtype: torch.dtype = torch.float32,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        store_param_remainders: bool = False,
        use_decoupled_grad: bool = False,
        offload: OffloadConfig = OffloadConfig(),  # noqa: B008 - immutable
        **unsupported: Any,
    ) -> None:
        refuse_unknown(unsupported, type(self).__name__, MUON_ARGUMENTS)
        check_stored_dtypes(type(self).__name__, MOMENTUM_FORMATS, momentum_dtype=momentum_dtype)
        self.momentum_dtype = momentum_dtype
        super().__init__(
            params,
            {
                "lr": lr,
                "weight_decay": weight_decay,
                "momentum": momentum,
                "nesterov": nesterov,
                "ns_coefficients": ns_coefficients,
                "eps": eps,
                "ns_steps": ns_steps,
                "adjust_lr_fn": adjust_lr_fn,
            },
            offload=offload,
            master_weights=master_weights,
            master_weight_dtype=master_weight_dtype,
            store_param_remainders=store_param_remainders,
            use_decoupled_grad=use_decoupled_grad,
        )

    def _rule(self) -> MuonRule:
        return MuonRule(momentum_dtype=self.momentum_dtype)
