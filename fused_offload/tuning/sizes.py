"""Number of parameters of a decoder, from a Hugging Face configuration or Megatron's sizes."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fused_offload.profiles.units import MIB


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """Sizes of a Llama, Mistral, Qwen or Mixtral decoder: no position table, norms without bias.

    Attributes:
        layers: number of decoder layers.
        hidden: width.
        ffn: width of the MLP, and of each expert.
        heads: number of attention heads.
        kv_heads: number of heads of keys and values.
        head_dim: width of a head.
        vocab: rows of the embedding.
        tied: True if the output layer is the embedding.
        gated: True if the MLP has three matrices (SwiGLU) instead of two.
        qkv_bias: True if queries, keys and values have biases.
        output_bias: True if attention's output has a bias.
        mlp_bias: True if the MLP has biases.
        qk_norm: True if queries and keys of a head are normalized.
        experts: number of experts of each sparse layer, 0 for a dense model.
        dense_layers: number of layers with a dense MLP in a model with experts.
        dense_ffn: width of the MLP of those layers.
        shared_ffn: width of the gated shared expert, 0 for none.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool = False
    gated: bool = True
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    experts: int = 0
    dense_layers: int = 0
    dense_ffn: int = 0
    shared_ffn: int = 0

    def __post_init__(self) -> None:
        if self.head_dim < 1:
            raise ValueError(f"a width of {self.hidden} is too small for {self.heads} heads")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads cannot share {self.kv_heads} heads of keys and values evenly")

    def param_numel(self) -> int:
        """Total number of parameters; shared ones count once."""
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        per_layer = self._attention() + 2 * self.hidden
        dense = self.dense_layers if self.experts else self.layers
        dense_ffn = self.dense_ffn if self.experts else self.ffn
        sparse = self.experts * (self._mlp(self.ffn) + self.hidden)  # a row of the router for each
        if self.shared_ffn:
            sparse += self._mlp(self.shared_ffn) + self.hidden
        mlps = dense * self._mlp(dense_ffn) + (self.layers - dense) * sparse
        return embeddings + self.layers * per_layer + mlps + self.hidden

    def _attention(self) -> int:
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        numel = self.hidden * (2 * queries + 2 * keys)
        numel += queries + 2 * keys if self.qkv_bias else 0
        numel += self.hidden if self.output_bias else 0
        return numel + (2 * self.head_dim if self.qk_norm else 0)

    def _mlp(self, ffn: int) -> int:
        inputs = 2 if self.gated else 1
        bias = inputs * ffn + self.hidden if self.mlp_bias else 0
        return (inputs + 1) * self.hidden * ffn + bias


MEGATRON_SIZES = ("layers", "hidden", "ffn", "heads", "vocab")
"""Sizes that describe a `Decoder` on the command line; the others have defaults."""

_MOST_LAYERS = 10**5
_MOST_BYTES = 16 * MIB

LLAMA_LIKE = ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
"""Values of ``model_type`` that are counted as a `Decoder`."""


def count_config(path: Path) -> int:
    """Parameters of the model that a ``config.json`` describes.

    Args:
        path: the file.

    Raises:
        ValueError: if the file cannot be read, or describes an unknown architecture.
    """
    try:
        _check_file(path)
        config = json.loads(_read(path))
    except OSError as error:
        raise ValueError(f"{str(path)!r} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} is not a Hugging Face configuration: it should be a JSON object")
    kind = config.get("model_type")
    try:
        if kind == "gpt2":
            return _count_gpt2(config)
        if kind in LLAMA_LIKE:
            return _decoder(config).param_numel()
    except KeyError as error:
        raise ValueError(f"{path} lacks {error.args[0]}, so its parameters cannot be counted; use --params") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}; correct it, or use --params") from error
    known = ", ".join(("gpt2", *LLAMA_LIKE))
    if kind is None:
        raise ValueError(f"{path} has no model_type (known: {known}); give the count with --params")
    raise ValueError(f"{path}: model_type {kind!r:.100} is not known (known: {known}); give the count with --params")


def _read(path: Path) -> str:
    with path.open("rb") as file:
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise OSError(errno.EFBIG, f"it is larger than {_MOST_BYTES // MIB} MiB; give a config.json")
    return content.decode("utf-8-sig")


def _check_file(path: Path) -> None:
    """Refuses paths that are neither files nor pipes."""
    if path.is_dir():
        raise OSError(errno.EISDIR, f"it is a folder; give {str(path / 'config.json')!r}")
    if path.exists() and not (path.is_file() or path.is_fifo()):  # <(...) in a shell is a pipe
        raise OSError(errno.EINVAL, "it is a device; give a file")
    is_like_a_hub_name = re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", str(path)) and path.suffix != ".json"
    if is_like_a_hub_name and not path.exists():
        raise OSError(errno.ENOENT, "no such file; give a config.json on this machine, not a name on the hub")


def _whole(config: Mapping[str, Any], key: str, *default: int, least: int = 1, most: int = 10**9) -> int:
    """Reads a size. A missing key or null gives the default, or raises if there is none."""
    value = config[key] if not default else config.get(key)
    if value is None and default:
        return default[0]
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{key} is {value!r:.100}, it should be a whole number from {least} to {most:,}")
    return value


def _flag(config: Mapping[str, Any], key: str, default: bool) -> bool:
    """Reads a switch; a missing key or null gives the default."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ValueError(f"{key} is {value!r:.100}, it should be true or false")
    return value


def head_dim_of(hidden: int, heads: int) -> int:
    """Default width of a head."""
    if hidden % heads:
        raise ValueError(
            f"a width of {hidden} is not a multiple of {heads} heads, and no width of a head (head_dim) is given"
        )
    return hidden // heads


def _count_gpt2(config: Mapping[str, Any]) -> int:
    hidden, layers = _whole(config, "n_embd"), _whole(config, "n_layer", most=_MOST_LAYERS)
    ffn = _whole(config, "n_inner", 4 * hidden)
    attention = 4 * hidden * hidden + 4 * hidden
    mlp = 2 * hidden * ffn + ffn + hidden
    vocab, positions = _whole(config, "vocab_size"), _whole(config, "n_positions", 1024)
    tables = vocab * hidden * (1 if _flag(config, "tie_word_embeddings", True) else 2) + positions * hidden
    return int(tables + layers * (attention + mlp + 4 * hidden) + 2 * hidden)


def _decoder(config: Mapping[str, Any]) -> Decoder:
    kind, layers = config["model_type"], _whole(config, "num_hidden_layers", most=_MOST_LAYERS)
    hidden, heads = _whole(config, "hidden_size"), _whole(config, "num_attention_heads")
    attention_bias = _flag(config, "attention_bias", False)
    experts_of = {  # two names: releases of transformers differ
        "mixtral": ("num_local_experts", "num_experts", 8),
        "qwen2_moe": ("num_experts", "num_local_experts", 60),
        "qwen3_moe": ("num_experts", "num_local_experts", 128),
    }
    experts = 0
    if kind in experts_of:
        key, other, default = experts_of[kind]
        experts = _whole(config, other if key not in config and other in config else key, default, least=0)
    ffn = _whole(config, "intermediate_size")
    dense_layers = _dense_layers(config) if kind in ("qwen2_moe", "qwen3_moe") else 0
    return Decoder(
        layers=layers,
        hidden=hidden,
        ffn=_whole(config, "moe_intermediate_size") if experts and kind in ("qwen2_moe", "qwen3_moe") else ffn,
        heads=heads,
        kv_heads=_kv_heads(config, heads),
        head_dim=_whole(config, "head_dim", 128 if kind == "qwen3" else 0) or head_dim_of(hidden, heads),
        vocab=_whole(config, "vocab_size"),
        tied=_flag(config, "tie_word_embeddings", False),
        # Qwen2 always has these biases.
        qkv_bias=attention_bias or kind in ("qwen2", "qwen2_moe"),
        output_bias=attention_bias and kind in ("llama", "qwen3", "qwen3_moe"),
        mlp_bias=_flag(config, "mlp_bias", False) and kind == "llama",
        qk_norm=kind in ("qwen3", "qwen3_moe"),
        experts=experts,
        dense_layers=dense_layers,
        dense_ffn=ffn,
        shared_ffn=_whole(config, "shared_expert_intermediate_size") if experts and kind == "qwen2_moe" else 0,
    )


_KV_HEADS = {"mistral": 8, "mixtral": 8, "qwen2": 32, "qwen2_moe": 16, "qwen3": 32, "qwen3_moe": 4}
"""Defaults of transformers for a missing key. For null, and for other models, it is all heads."""


def _kv_heads(config: Mapping[str, Any], heads: int) -> int:
    if "num_key_value_heads" not in config:
        return _KV_HEADS.get(config["model_type"], heads)
    return _whole(config, "num_key_value_heads", heads)


def _dense_layers(config: Mapping[str, Any]) -> int:
    dense, every = config.get("mlp_only_layers") or [], _whole(config, "decoder_sparse_step", 1)
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise ValueError(f"mlp_only_layers is {dense!r:.100}, it should be a list of whole numbers")
    dense = set(dense)
    return sum(layer in dense or (layer + 1) % every != 0 for layer in range(config["num_hidden_layers"]))
