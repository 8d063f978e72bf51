"""FusedOffloadAdam: the arguments of Adam and AdamW."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch

from fused_offload.rules.adam import ADAM_ARGUMENTS, AdamRule, check_modes, check_numerics
from fused_offload.rules.arguments import (
    check_rounding,
    check_switches,
    refuse_unknown,
    shown_rounding,
    warn_if_nothing_rounds,
)

from .config import OffloadConfig
from .optimizer import OffloadOptimizer


class FusedOffloadAdam(OffloadOptimizer):
    """Adam and AdamW whose state lives in host memory.

    A drop-in for TransformerEngine's FusedAdam and torch's AdamW.

    Each `step` cuts the parameters into chunks, and for each chunk copies the state to the
    parameters' device, updates parameters and state there in one fused kernel, and copies the state
    back. For parameters on the CPU the same chunks are updated in place. The arithmetic is that of
    `kernels.adam.reference.adam_step_`.

    Gradients are only read: unlike torch's fused optimizers under a gradient scaler, unscaled
    gradients are not written back.

    Args:
        params: parameters (float32, bfloat16 or float16) or groups of them, dense in memory, one
            device a group.
        lr: learning rate, a float or a one-element tensor on the CPU or on the parameters' device,
            which the kernel reads without a synchronisation.
        betas: decay of the first and the second moment, in [0, 1).
        eps: added to the denominator.
        weight_decay: decoupled decay, or L2 with ``adam_w_mode=False``. May be negative, as in
            TransformerEngine.
        amsgrad: must be False.
        bias_correction: divide the moments by ``1 - beta**step``.
        adam_w_mode: decoupled weight decay (AdamW) if True, L2 (Adam) if False.
        capturable: must be False.
        master_weights: keep ``master_param``, the copy of each parameter that updates apply to.
        master_weight_dtype: dtype of the masters, float32 or float16 (block-scaled).
        exp_avg_dtype: stored dtype of the first moment: float32, bfloat16, float16 (block-scaled)
            or uint8 (block-scaled and stochastically rounded, docs/eight_bit.md).
        exp_avg_sq_dtype: stored dtype of the second moment, likewise.
        use_decoupled_grad: read gradients from ``param.decoupled_grad`` instead of ``param.grad``.
        store_param_remainders: keep float32 masters of bfloat16 parameters as 16 bits beside the
            parameter. Nothing is lost; the parameter is then the master rounded half away from
            zero.
        set_grad_none: deprecated, use ``zero_grad(set_to_none=...)``.
        numerics: ``"ieee"`` for correctly rounded operations, the same everywhere; ``"te"`` for the
            bits of TransformerEngine's fast-math kernel, on NVIDIA GPUs only.
        stochastic_rounding: round bfloat16 moments to either neighbour, to the nearer one more
            often. Rounded to the nearest, an average that moves by less than half of a bfloat16
            step stands still, as ``exp_avg_sq`` does with beta2 = 0.999. 8-bit moments are always
            rounded so.
        rounding_seed: seed of that rounding, in [0, 2^31). The same seed and steps give the same
            bits, whatever the chunks; a resumed run goes on with the same numbers.
        offload: share of state in host memory, and its transfer.
        **unsupported: none; arguments of ``torch.optim.AdamW`` that do not exist here are refused
            by name.

    Raises:
        ValueError: for hyperparameters out of range and parameters given twice.
        TypeError: for parameters that cannot be updated, and for arguments that do not exist.
        RuntimeError: for modes that are not supported.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        set_grad_none: bool | None = None,
        numerics: str = "ieee",
        stochastic_rounding: bool = False,
        rounding_seed: int = 0,
        offload: OffloadConfig = OffloadConfig(),  # noqa: B008 - immutable
        **unsupported: Any,
    ) -> None:
        name = type(self).__name__
        refuse_unknown(unsupported, name, ADAM_ARGUMENTS)
        check_switches(amsgrad=amsgrad, adam_w_mode=adam_w_mode, capturable=capturable)
        check_modes(
            amsgrad=amsgrad,
            capturable=capturable,
            exp_avg_dtype=exp_avg_dtype,
            exp_avg_sq_dtype=exp_avg_sq_dtype,
            numerics=numerics,
            optimizer=name,
        )
        check_rounding(stochastic_rounding, rounding_seed)
        warn_if_nothing_rounds(stochastic_rounding, exp_avg_dtype=exp_avg_dtype, exp_avg_sq_dtype=exp_avg_sq_dtype)
        if set_grad_none is not None:
            warnings.warn(
                "set_grad_none is deprecated; use zero_grad(set_to_none=...)", DeprecationWarning, stacklevel=2
            )
        # Wrappers set some of these after construction, so they are read where they are used.
        self.adam_w_mode = adam_w_mode
        self.capturable = capturable
        self.exp_avg_dtype = exp_avg_dtype
        self.exp_avg_sq_dtype = exp_avg_sq_dtype
        self.set_grad_none = set_grad_none
        self.numerics = numerics
        self.stochastic_rounding = stochastic_rounding
        self.rounding_seed = rounding_seed
        self.name_to_dtype_map = {
            "exp_avg": exp_avg_dtype,
            "exp_avg_sq": exp_avg_sq_dtype,
            "master_param": master_weight_dtype,
        }
        super().__init__(
            params,
            {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay},
            offload=offload,
            master_weights=master_weights,
            master_weight_dtype=master_weight_dtype,
            store_param_remainders=store_param_remainders,
            use_decoupled_grad=use_decoupled_grad,
        )

    def _rule(self) -> AdamRule:
        check_numerics(self.numerics, ())
        check_rounding(self.stochastic_rounding, self.rounding_seed)
        return AdamRule(
            adam_w_mode=bool(self.adam_w_mode),
            bias_correction=bool(self.defaults["bias_correction"]),
            numerics=self.numerics,
            exp_avg_dtype=self.exp_avg_dtype,
            exp_avg_sq_dtype=self.exp_avg_sq_dtype,
            stochastic_rounding=self.stochastic_rounding,
            rounding_seed=self.rounding_seed,
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops or zeroes the gradients that `step` reads.

        Args:
            set_to_none: drop them; otherwise they are set to zero in place.

        Raises:
            ValueError: if it contradicts ``set_grad_none``.
        """
        if self.set_grad_none is not None and self.set_grad_none != set_to_none:
            raise ValueError("set_grad_none of the constructor and set_to_none of zero_grad disagree")
        super().zero_grad(set_to_none)

    def _shown_settings(self) -> dict[str, str]:
        return {"numerics": self.numerics, **shown_rounding(self.stochastic_rounding, self.rounding_seed)}
