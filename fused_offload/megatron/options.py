"""What Megatron's OptimizerConfig asks for, as arguments of FusedOffloadAdam, and what of it cannot be had."""

from __future__ import annotations

import argparse
import dataclasses
import os
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from fused_offload.config import OffloadConfig
from fused_offload.params.dense import has_own_memory
from fused_offload.params.dtensors import local_of
from fused_offload.profiles import units
from fused_offload.rules.arguments import check_master_dtype, check_modes, check_rounding

_OTHER_OFFLOADERS = ("chunked_optimizer_state_offload", "offload_optimizer_states")
_REQUESTED = "_fused_offload_store_param_remainders"
ROUNDING_VARIABLE = "FUSED_OFFLOAD_STOCHASTIC_ROUNDING"
WINDOW_VARIABLE = "FUSED_OFFLOAD_WINDOW_BYTES"
"""Environment variables that stand in for arguments of `install`, where its call cannot be changed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamOptions:
    """Arguments of FusedOffloadAdam that Megatron's configuration decides; see there.

    Attributes:
        adam_w_mode: decoupled weight decay.
        master_weights: whether the optimizer owns the master weights. If not, Megatron keeps them on the GPU.
        master_weight_dtype: dtype of the masters.
        exp_avg_dtype: stored dtype of the first moment.
        exp_avg_sq_dtype: stored dtype of the second moment.
        use_decoupled_grad: whether gradients come in ``decoupled_grad``.
        store_param_remainders: whether masters of bfloat16 parameters are kept as 16-bit remainders.
        numerics: ``"ieee"`` or ``"te"``.
        stochastic_rounding: whether bfloat16 moments are rounded stochastically.
        offload: what lives in host memory and how it moves.
    """

    adam_w_mode: bool = True
    master_weights: bool = False
    master_weight_dtype: torch.dtype = torch.float32
    exp_avg_dtype: torch.dtype = torch.float32
    exp_avg_sq_dtype: torch.dtype = torch.float32
    use_decoupled_grad: bool = False
    store_param_remainders: bool = False
    numerics: str = "ieee"
    stochastic_rounding: bool = False
    offload: OffloadConfig = OffloadConfig()  # noqa: RUF009 - immutable

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for FusedOffloadAdam."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


def remember_remainders(config: Any) -> None:
    """Notes the requested ``store_param_remainders``: Megatron switches it off where TransformerEngine is missing."""
    setattr(config, _REQUESTED, bool(getattr(config, "store_param_remainders", False)))


def restore_remainders(config: Any) -> None:
    """Puts the requested ``store_param_remainders`` back for a configuration whose optimizer is ours."""
    config.store_param_remainders = getattr(config, _REQUESTED, config.store_param_remainders)


def takes_hybrid_place(config: Any) -> bool:
    """Whether Megatron would build a HybridDeviceOptimizer with Adam in it."""
    return bool(config.optimizer_cpu_offload) and config.optimizer == "adam"


def rounds_stochastically(given: bool | None) -> bool:
    """Whether bfloat16 moments are rounded stochastically.

    Args:
        given: what `install` was given; None goes by the environment.

    Raises:
        TypeError: for what is no bool.
        ValueError: for another value of the variable than 0 and 1.
    """
    if given is not None:
        check_rounding(given, 0)
        return given
    value = os.environ.get(ROUNDING_VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"Invalid {ROUNDING_VARIABLE}: {value!r}, it should be '1' to round stochastically, or '0'")
    return value == "1"


def window_bytes() -> Any:
    """``OffloadConfig.window_bytes`` by the environment, for who gives none: 0 where the variable is not set.

    Raises:
        ValueError: for a value of the variable that is none.
    """
    try:
        return units.window_bytes(os.environ.get(WINDOW_VARIABLE) or "0")
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"Invalid {WINDOW_VARIABLE}: {error}") from None


def options_of(config: Any, offload: OffloadConfig, numerics: str, *, stochastic_rounding: bool = False) -> AdamOptions:
    """Options for the place of HybridDeviceOptimizer.

    Args:
        config: Megatron's OptimizerConfig.
        offload: chunks, depth and pinning; the fraction is Megatron's ``optimizer_offload_fraction``, and its
            ``pin_cpu_params`` can switch pinning off.
        numerics: ``"ieee"`` or ``"te"``.
        stochastic_rounding: whether bfloat16 moments are rounded stochastically.
    """
    owns_masters = bool(config.use_precision_aware_optimizer_no_fp8_or_ds_fp8)
    return AdamOptions(
        adam_w_mode=bool(config.decoupled_weight_decay),
        master_weights=owns_masters,
        master_weight_dtype=config.main_params_dtype,
        exp_avg_dtype=config.exp_avg_dtype,
        exp_avg_sq_dtype=config.exp_avg_sq_dtype,
        use_decoupled_grad=owns_masters,
        store_param_remainders=owns_masters and bool(config.store_param_remainders),
        numerics=numerics,
        stochastic_rounding=stochastic_rounding,
        offload=dataclasses.replace(
            offload,
            fraction=float(config.optimizer_offload_fraction),
            pin=offload.pin and bool(getattr(config, "pin_cpu_params", True)),
        ),
    )


def check_config(config: Any) -> None:
    """Raises for a configuration that the optimizer cannot serve, as early as Megatron's own checks.

    Args:
        config: Megatron's OptimizerConfig, after its own ``__post_init__``; its optimizer is going to be ours.

    Raises:
        ValueError: names the field and what to change.
        RuntimeError: for stored dtypes that are not supported.
    """
    fraction = config.optimizer_offload_fraction
    if config.optimizer_cpu_offload and (isinstance(fraction, bool) or not 0.0 <= fraction <= 1.0):
        raise ValueError(f"Invalid optimizer_offload_fraction: {fraction!r}, it should be a number in [0, 1]")
    if getattr(config, "optimizer_cuda_graph", False):
        raise ValueError(
            "FusedOffloadAdam does not support optimizer_cuda_graph: its step copies state to and from the host. "
            "Leave --optimizer-cuda-graph out."
        )
    others = [name for name in _OTHER_OFFLOADERS if getattr(config, name, False)]
    if others:
        raise ValueError(
            f"{others[0]} and FusedOffloadAdam both move the optimizer's state to the host. Leave {others[0]} out, or "
            "do not install FusedOffloadAdam."
        )
    if config.use_precision_aware_optimizer:
        check_master_dtype(config.main_params_dtype)
        check_modes(
            amsgrad=False,
            capturable=False,
            exp_avg_dtype=config.exp_avg_dtype,
            exp_avg_sq_dtype=config.exp_avg_sq_dtype,
            numerics="ieee",
        )


def check_model(config: Any, model_chunks: Sequence[Any]) -> None:
    """Raises for models that the optimizer cannot serve.

    Args:
        config: Megatron's OptimizerConfig.
        model_chunks: the wrapped model.

    Raises:
        ValueError: says what to change.
    """
    for chunk in model_chunks:
        if type(chunk).__name__ == "FullyShardedDataParallelV2":
            raise ValueError(
                "FusedOffloadAdam supports version 1 of Megatron-FSDP, but not version 2. Use version 1 "
                "(megatron_fsdp_version=1) or the distributed optimizer alone, or do not install FusedOffloadAdam."
            )
        if uses_fsdp([chunk]):
            _check_fsdp(config, chunk.ddp_config)
        elif config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:
            _refuse_quantised(chunk)
        model_config = getattr(chunk, "config", None)
        if getattr(model_config, "qk_clip", False) and config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:
            raise ValueError(
                "qk_clip rewrites Megatron's own master weights, and with a precision-aware optimizer there are none: "
                "the masters belong to the optimizer. Leave --qk-clip or --use-precision-aware-optimizer out."
            )


def _refuse_quantised(chunk: Any) -> None:
    """Raises if the optimizer, which owns the masters, would have to write quantised parameters itself."""
    for name, param in chunk.named_parameters():
        local = local_of(param)
        if param.requires_grad and not has_own_memory(local):
            raise ValueError(
                f"{name} is a {type(local).__name__}, which FusedOffloadAdam cannot write. With a precision-aware "
                "optimizer it would have to, since the master weights are its own: those of parameters in FP8 are "
                "Megatron's only with --fp8-recipe blockwise, tensorwise or mxfp8 and without "
                "--optimizer-cpu-offload. Change that, or leave --use-precision-aware-optimizer or "
                "--fp8-param-gather out."
            )


def uses_fsdp(model_chunks: Sequence[Any]) -> bool:
    """Whether a model is wrapped by Megatron-FSDP, version 1."""
    return any(getattr(getattr(chunk, "ddp_config", None), "use_megatron_fsdp", False) for chunk in model_chunks)


def _check_fsdp(config: Any, ddp_config: Any) -> None:
    handed, read = "megatron_fsdp_use_decoupled_grad", "use_precision_aware_optimizer"
    if not hasattr(ddp_config, handed):
        raise ValueError(
            f"This Megatron-Core has no DistributedDataParallelConfig.{handed}, and its Megatron-FSDP leaves gradients "
            "where no precision-aware step reads them. Use 0.18.2 or newer, or the distributed optimizer alone, or do "
            "not install FusedOffloadAdam."
        )
    if bool(getattr(ddp_config, handed)) != bool(getattr(config, read)):
        raise ValueError(
            f"DistributedDataParallelConfig.{handed}={getattr(ddp_config, handed)}, but OptimizerConfig.{read}="
            f"{getattr(config, read)}: Megatron-FSDP would leave gradients where no step reads them. Set both alike."
        )


def warn_if_copies_drift(config: Any, model_chunks: Sequence[Any], *, stochastic_rounding: bool) -> None:
    """One warning where a weight has copies on several pipeline stages that are not rounded alike.

    Args:
        config: Megatron's OptimizerConfig.
        model_chunks: the wrapped model.
        stochastic_rounding: whether bfloat16 moments are rounded stochastically.
    """
    if not config.use_precision_aware_optimizer:
        return
    dtypes = {"exp_avg_dtype": config.exp_avg_dtype, "exp_avg_sq_dtype": config.exp_avg_sq_dtype}
    dtypes["main_params_dtype"] = config.main_params_dtype
    by_place = [
        f"{name} {str(dtype).removeprefix('torch.')}"
        for name, dtype in dtypes.items()
        if dtype in (torch.uint8, torch.float16) or (stochastic_rounding and dtype == torch.bfloat16)
    ]
    has_copies = any(
        getattr(param, "shared_embedding", False) for chunk in model_chunks for param in chunk.parameters()
    )
    if by_place and has_copies:
        warnings.warn(
            f"With {', '.join(by_place)}, rounding depends on where a weight lies in its rank's shard, and the "
            "embedding and the output layer, which share their weights, lie on two pipeline stages: their copies drift "
            "apart. "
            "Untie them (--untie-embeddings-and-output-weights), or store moments in bf16 without stochastic rounding "
            "or in fp32.",
            stacklevel=2,
        )


def warn_if_nothing_moves(config: Any) -> None:
    """One warning where the flags say to offload nothing."""
    if takes_hybrid_place(config) and config.optimizer_offload_fraction == 0:
        warnings.warn(
            "optimizer_offload_fraction is 0: FusedOffloadAdam keeps all optimizer state on the GPU. Set "
            "--optimizer-offload-fraction 1.0 to move it to host memory.",
            stacklevel=2,
        )
