"""Checks of Megatron's configuration and model: errors for the unsupported, warnings for risks."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from fused_offload.rules.adam import check_modes, moment_formats
from fused_offload.rules.arguments import MASTER_FORMATS, check_stored_dtypes

from .fsdp import uses_fsdp
from .options import takes_hybrid_place
from .quantised_shards import owns_quantised, quantised_names

_OTHER_OFFLOADERS = ("chunked_optimizer_state_offload", "offload_optimizer_states")


def check_config(config: Any) -> None:
    """Refuses an unsupported configuration, as early as Megatron's own checks.

    Args:
        config: Megatron's OptimizerConfig, after its own ``__post_init__``, for which a
            FusedOffloadAdam will be built.

    Raises:
        ValueError: for an unsupported field; the message says what to change.
        RuntimeError: for unsupported stored dtypes.
    """
    fraction = config.optimizer_offload_fraction
    if isinstance(fraction, bool) or not 0.0 <= fraction <= 1.0:
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
        check_stored_dtypes(
            "FusedOffloadAdam", MASTER_FORMATS, "master weights", master_weight_dtype=config.main_params_dtype
        )
        check_modes(
            amsgrad=False,
            capturable=False,
            exp_avg_dtype=config.exp_avg_dtype,
            exp_avg_sq_dtype=config.exp_avg_sq_dtype,
            numerics="ieee",
            optimizer="FusedOffloadAdam",
        )


def check_model(config: Any, model_chunks: Sequence[Any]) -> None:
    """Refuses unsupported models.

    Args:
        config: Megatron's OptimizerConfig.
        model_chunks: the wrapped model.

    Raises:
        ValueError: for an unsupported model or setting; the message says what to change.
    """
    for chunk in model_chunks:
        if type(chunk).__name__ == "FullyShardedDataParallelV2":
            raise ValueError(
                "FusedOffloadAdam supports version 1 of Megatron-FSDP, but not version 2. Use version 1 "
                "(megatron_fsdp_version=1) or the distributed optimizer alone, or do not install FusedOffloadAdam."
            )
        if uses_fsdp([chunk]):
            _check_fsdp(config, chunk.ddp_config)
        model_config = getattr(chunk, "config", None)
        if getattr(model_config, "qk_clip", False) and config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:
            raise ValueError(
                "qk_clip rewrites Megatron's own master weights, and with a precision-aware optimizer there are none: "
                "the masters belong to the optimizer. Leave --qk-clip or --use-precision-aware-optimizer out."
            )


def check_quantised(config: Any, model_chunks: Sequence[Any]) -> None:
    """Refuses quantised parameters that nobody would write: the optimizer owns the masters.

    Args:
        config: Megatron's OptimizerConfig, after `own_masters`.
        model_chunks: the wrapped model.

    Raises:
        ValueError: for such a parameter; the message says what to change.
    """
    if not config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 or owns_quantised(config):
        return
    for name, kind in (found for chunk in model_chunks for found in quantised_names(chunk)):
        raise ValueError(
            f"{name} is a {kind}, and with a precision-aware optimizer its master weights are FusedOffloadAdam's. "
            "Megatron writes such parameters from them with --fp8-param-gather, and without "
            "--reuse-grad-buf-for-mxfp8-param-ag. Change that, or leave --use-precision-aware-optimizer out."
        )


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
            f"{getattr(config, read)}: Megatron-FSDP would leave gradients where no step reads them. Set both to the "
            "same value."
        )


def warn_if_copies_drift(config: Any, model_chunks: Sequence[Any], *, stochastic_rounding: bool) -> None:
    """Warns if copies of a weight on several pipeline stages will be rounded differently.

    Args:
        config: Megatron's OptimizerConfig.
        model_chunks: the wrapped model.
        stochastic_rounding: True if bfloat16 moments are rounded stochastically.
    """
    if not config.use_precision_aware_optimizer:
        return
    moments = moment_formats(config.exp_avg_dtype, config.exp_avg_sq_dtype, stochastic_rounding=stochastic_rounding)
    formats = {f"{key}_dtype": format for key, format in moments.items()}
    formats["main_params_dtype"] = MASTER_FORMATS[config.main_params_dtype]
    place_dependent = [
        f"{name} {str(format.dtype).removeprefix('torch.')}"
        for name, format in formats.items()
        if format.scaled or format.stochastic
    ]
    has_copies = any(
        getattr(param, "shared_embedding", False) for chunk in model_chunks for param in chunk.parameters()
    )
    if place_dependent and has_copies:
        warnings.warn(
            f"With {', '.join(place_dependent)}, rounding depends on where a weight lies in its rank's shard. The "
            "embedding and the output layer share their weights but lie on two pipeline stages, so their copies drift "
            "apart. Untie them (--untie-embeddings-and-output-weights), or store moments in bf16 without stochastic "
            "rounding or in fp32.",
            stacklevel=2,
        )


def warn_if_nothing_moves(config: Any) -> None:
    """Warns if the flags offload nothing."""
    if takes_hybrid_place(config) and config.optimizer_offload_fraction == 0:
        warnings.warn(
            "optimizer_offload_fraction is 0: FusedOffloadAdam keeps all optimizer state on the GPU. Set "
            "--optimizer-offload-fraction 1.0 to move it to host memory.",
            stacklevel=2,
        )
