"""Quantised parameters: tensors of a class that quantises given values itself.

A class is recognised by its methods ``quantize_(values)`` and ``dequantize(dtype=...)``, which
TransformerEngine's have. What else such tensors keep (``_quantizer``, scales, copies in other
orders) belongs to their class.
"""

from __future__ import annotations

from typing import Any

import torch

from .dense import has_own_memory
from .dtensors import PLAIN_TENSORS, is_distributed, local_of


def is_quantised(tensor: torch.Tensor) -> bool:
    """True if a tensor, or this rank's part of it, holds codes that its class makes from values."""
    if type(tensor) in PLAIN_TENSORS:
        return False
    local = local_of(tensor)
    return not has_own_memory(local) and callable(getattr(local, "quantize_", None))


def plain_values(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without autograd; the values of a quantised one, in float32."""
    if not is_quantised(tensor):
        return tensor.detach()
    with torch.no_grad():
        values: torch.Tensor = tensor.dequantize(dtype=torch.float32)  # type: ignore[call-arg]
    return values.detach()


def half_step_of(param: torch.Tensor) -> float:
    """Largest share of a value that rounding takes away; near zero it takes more.

    8 bits have 3 bits of mantissa (E4M3) unless their class says E5M2, and 4 bits have one.
    """
    local: Any = local_of(param)
    if getattr(local, "_fp4_dtype", None) is not None:
        return 2.0**-2
    is_e5m2 = "E5M2" in getattr(getattr(local, "_fp8_dtype", None), "name", "")
    return 2.0**-3 if is_e5m2 else 2.0**-4


def reduces_amax(param: torch.Tensor) -> bool:
    """True if ``quantize_`` may be a collective operation, by which ranks agree on a scale."""
    local = local_of(param)
    quantizer = getattr(local, "_quantizer", None)
    if getattr(local, "amax_reduction_group", None) is not None or getattr(quantizer, "with_amax_reduction", False):
        return True
    # FSDP2 sets the group of such a parameter when it gathers it first.
    return _is_shared(param) and hasattr(quantizer, "with_amax_reduction")


def _is_shared(param: Any) -> bool:
    return is_distributed(param) and int(param._spec.mesh.size()) > 1


def why_unusable(param: torch.Tensor) -> str | None:
    """The reason why a quantised parameter cannot be stepped, to follow its name, or None."""
    local: Any = local_of(param)
    module = type(local).__module__
    if module.startswith("transformer_engine.") and local.device.type == "cpu":
        return "on the CPU, where its class cannot quantise. Move the model to the GPU before building the optimizer."
    if hasattr(local, "_quantizer"):
        quantizer = local._quantizer
        if quantizer is None:
            return (
                "without a quantizer, as after unpickling, so nothing says how it is quantised. Build the model anew "
                "(quantized_model_init) and load a state dict into it."
            )
        if getattr(quantizer, "with_rht", False):
            return (
                "whose quantizer transforms its values first (with_rht), which takes bfloat16 values only. Quantise "
                "weights without it."
            )
    if not _usages(local).get("rowwise", True):
        return "without rowwise values, from which it is dequantised. Keep them: update_usage(rowwise_usage=True)."
    if reduces_amax(param) and not local.numel():
        return (
            "of which this rank holds no element, so it would be missing when the ranks agree on a scale. Shard it "
            "over at most as many ranks as its first dimension has elements."
        )
    return None


def prepare_to_quantise(param: torch.Tensor) -> None:
    """Makes a parameter's columnwise copy where its quantizer wants one and it is missing.

    ``quantize_`` would allocate it behind the kernels of a step, where running out of memory fails
    the step half-way.
    """
    wants = getattr(getattr(param, "_quantizer", None), "columnwise_usage", False)
    if not wants or _usages(param).get("columnwise", True):
        return
    try:
        param.update_usage(columnwise_usage=True)  # type: ignore[attr-defined]
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, AssertionError):
        pass  # it cannot be made from the rowwise values; quantize_ makes it


def _usages(tensor: Any) -> dict[str, bool]:
    return tensor.get_usages() if hasattr(tensor, "get_usages") else {}
