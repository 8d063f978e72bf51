"""Options of `fused-offload plan`, read as a model and its training."""

from __future__ import annotations

import argparse
from typing import NamedTuple

from fused_offload.config import OffloadConfig
from fused_offload.profiles.units import MOST_PARAMS

from .sizes import MEGATRON_SIZES, Decoder, count_config, head_dim_of
from .training import Training


class Request(NamedTuple):
    """A model and its training, as the options give them.

    Attributes:
        param_numel: parameters of the whole model.
        training: training settings; transfer settings that are not given are ``"auto"``.
        limits: ``gpu_bytes`` and ``node_bytes``, the memory of a GPU and of a host; None for no
            limit.
        link_gbps: GB/s each way with both directions busy, or None.
    """

    param_numel: int
    training: Training
    limits: dict[str, int | None]
    link_gbps: float | None


def request_of(options: argparse.Namespace) -> Request:
    """Reads the options.

    Raises:
        ValueError: for options that contradict each other; names them.
    """
    if options.ranks_per_node > options.data_parallel * options.model_parallel:
        raise ValueError(
            f"--ranks-per-node is {options.ranks_per_node}, but there are {options.data_parallel} x "
            f"{options.model_parallel} ranks in all; see --data-parallel and --model-parallel"
        )
    numel = _count(options)
    if numel >= MOST_PARAMS:
        raise ValueError(f"a model of {numel:.3g} parameters is beyond what can be planned, {MOST_PARAMS:g}")
    limits: dict[str, int | None] = {
        "gpu_bytes": None if options.gpu_memory is None else int(options.gpu_memory * 1e9),
        "node_bytes": None if options.host_memory is None else int(options.host_memory * 1e9),
    }
    return Request(numel, _training(options), limits, options.link_gbps)


def _count(options: argparse.Namespace) -> int:
    names = (*MEGATRON_SIZES, "kv_heads", "head_dim", "experts", "tied", "no_gated")
    sizes = [name for name in names if getattr(options, name)]
    given = [f"--{name}" for name in ("params", "config") if getattr(options, name) is not None]
    if len(given) + bool(sizes) != 1:
        given += [f"--{name}".replace("_", "-") for name in sizes]
        raise ValueError(
            "give the model by one of --params, --config, or --layers, --hidden, --ffn, --heads, --vocab"
            + (f", not by {' and '.join(given)} at once" if given else "")
        )
    if options.params is not None:
        return int(options.params)
    if options.config is not None:
        return count_config(options.config)
    missing = [f"--{name}" for name in MEGATRON_SIZES if name not in sizes]
    if missing:
        raise ValueError(f"Megatron's sizes lack {', '.join(missing)}; give them, too, or the count with --params")
    return Decoder(
        layers=options.layers,
        hidden=options.hidden,
        ffn=options.ffn,
        heads=options.heads,
        kv_heads=options.kv_heads or options.heads,
        head_dim=options.head_dim or head_dim_of(options.hidden, options.heads),
        vocab=options.vocab,
        tied=options.tied,
        gated=not options.no_gated,
        experts=options.experts or 0,
    ).param_numel()


def _training(options: argparse.Namespace) -> Training:
    is_plain = options.muon is None and options.quantised is None and not options.params_on_host
    offload = OffloadConfig(
        fraction=options.fraction,
        window_bytes=options.window_bytes,
        chunk_bytes=options.chunk_bytes,
        depth=options.depth or "auto",
        transport="auto" if is_plain else "copy",
    )
    return Training(
        param_dtype=options.param_dtype,
        grad_dtype=options.grad_dtype or options.param_dtype,
        master=options.master or ("none" if options.param_dtype == "fp32" else "fp32"),
        exp_avg=options.moments,
        exp_avg_sq=options.moments,
        data_parallel=options.data_parallel,
        model_parallel=options.model_parallel,
        shard_params=options.shard_params,
        offload=offload,
        ranks_per_node=options.ranks_per_node,
        other_gpu_bytes=int(options.other_gpu * 1e9),
        in_backward=options.step_in_backward,
        largest_matrix=options.muon,
        layer_wise=options.layer_wise,
        params_on_host=options.params_on_host,
        quantised=options.quantised,
        largest_quantised=options.largest_param,
        fp8_param_gather=options.fp8_param_gather,
    )
