"""Classes of quantised parameters in plain torch, in place of TransformerEngine's, which need a GPU.

They have its methods, and intercept every operation as its classes do: whatever the package does
with such a tensor besides calling them raises. Each call of ``quantize_`` is noted.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from fused_offload import OffloadConfig
from fused_offload.kernels.adam.reference import AdamState, adam_scalars, adam_step_
from fused_offload.kernels.formats import Stored, encode_, rounding_counter
from fused_offload.params.dense import flat
from fused_offload.params.quantised import plain_values

TILE = 128
LARGEST = 448.0  # number of E4M3


class Call(NamedTuple):
    """One call of ``quantize_``.

    Attributes:
        label: of the parameter.
        dtype: of the given values.
        shape: of the given values.
        is_contiguous: whether they are.
        is_plain: whether they are a plain tensor without autograd, given while autograd is off.
    """

    label: Any
    dtype: torch.dtype
    shape: tuple[int, ...]
    is_contiguous: bool
    is_plain: bool


class Quantised(torch.Tensor):
    """Codes in E4M3; says that it is of another dtype.

    Attributes:
        calls: calls of all parameters, in order.
        fails: name of a parameter whose calls raise.
    """

    calls: ClassVar[list[Call]] = []
    fails: ClassVar[Any] = None
    codes: torch.Tensor
    scale: torch.Tensor
    label: Any
    _quantizer: Any

    @staticmethod
    def __new__(cls, values: torch.Tensor, name: Any = None, dtype: torch.dtype = torch.bfloat16) -> Any:
        made = _wrapper(cls, values.shape, dtype, values.device)
        made.label = name
        made._quantizer = SimpleNamespace(columnwise_usage=False)
        made._write(values.contiguous())
        return made

    def _write(self, values: torch.Tensor) -> None:
        raise NotImplementedError

    def _values(self) -> torch.Tensor:
        raise NotImplementedError

    def quantize_(self, values: torch.Tensor) -> Any:
        is_plain = type(values) is torch.Tensor and not values.requires_grad and not torch.is_grad_enabled()
        self.calls.append(Call(self.label, values.dtype, tuple(values.shape), values.is_contiguous(), is_plain))
        if self.label is not None and self.label == Quantised.fails:
            raise torch.OutOfMemoryError("mine")
        self._write(values)
        return self

    def dequantize(self, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self._values().to(dtype or self.dtype)

    def internals(self) -> list[torch.Tensor]:
        """Every tensor that the parameter is made of."""
        return [self.codes, self.scale]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            old = args[0]
            made = _wrapper(cls, old.shape, old.dtype, old.device)
            made.__dict__.update(old.__dict__)
            return made
        raise NotImplementedError(f"{func} of a quantised tensor")


def _wrapper(cls: Any, shape: Any, dtype: torch.dtype, device: torch.device) -> Any:
    return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)


def encoded(values: torch.Tensor) -> torch.Tensor:
    """Codes of values in units of their scale."""
    return values.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)


def _decoded(codes: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.float8_e4m3fn).float()


class Current(Quantised):
    """One scale from the largest magnitude of the whole tensor."""

    def _write(self, values: torch.Tensor) -> None:
        self.scale = values.float().abs().amax().clamp(min=1e-30) / LARGEST
        self.codes = encoded(values.float() / self.scale)

    def _values(self) -> torch.Tensor:
        return _decoded(self.codes) * self.scale


class Blockwise(Quantised):
    """A scale for each tile of 128 x 128 elements."""

    def _tiles(self, per_tile: torch.Tensor) -> torch.Tensor:
        rows, columns = self._matrix()
        return per_tile.repeat_interleave(TILE, 0)[:rows].repeat_interleave(TILE, 1)[:, :columns].reshape(self.shape)

    def _matrix(self) -> tuple[int, int]:
        columns = self.shape[-1] if self.dim() else 1
        return self.numel() // columns, columns

    def _write(self, values: torch.Tensor) -> None:
        rows, columns = self._matrix()
        padded = torch.nn.functional.pad(values.float().reshape(rows, columns), (0, -columns % TILE, 0, -rows % TILE))
        tiled = padded.view(-(-rows // TILE), TILE, -(-columns // TILE), TILE)
        self.scale = tiled.abs().amax(dim=(1, 3)).clamp(min=1e-30) / LARGEST
        self.codes = encoded(values.float() / self._tiles(self.scale))

    def _values(self) -> torch.Tensor:
        return _decoded(self.codes) * self._tiles(self.scale)


class Delayed(Quantised):
    """A scale that is known before, the largest magnitude so far, and a copy in the other order."""

    columnwise: torch.Tensor | None
    made_columnwise: int

    @staticmethod
    def __new__(cls, values: torch.Tensor, name: Any = None, dtype: torch.dtype = torch.bfloat16) -> Any:
        made = _wrapper(cls, values.shape, dtype, values.device)
        made.label, made.made_columnwise = name, 0
        made._quantizer = SimpleNamespace(
            columnwise_usage=True,
            scale=values.new_full((1,), 31.0, dtype=torch.float32),
            amax=values.new_zeros((1,), dtype=torch.float32),
        )
        made._write(values.contiguous())
        return made

    def _write(self, values: torch.Tensor) -> None:
        quantizer = self._quantizer
        self.codes = encoded(values.float() * quantizer.scale)
        self.scale = 1 / quantizer.scale
        if values.numel():
            quantizer.amax = torch.maximum(quantizer.amax, values.float().abs().amax())
        self._transpose()

    def _transpose(self) -> None:
        self.columnwise = self.codes.reshape(-1, self.shape[-1] if self.dim() else 1).t().contiguous()

    def get_usages(self) -> dict[str, bool]:
        return {"rowwise": True, "columnwise": self.columnwise is not None}

    def update_usage(self, *, columnwise_usage: bool) -> None:
        assert columnwise_usage
        self.made_columnwise += 1
        self._transpose()

    def _values(self) -> torch.Tensor:
        return _decoded(self.codes) * self.scale

    def internals(self) -> list[torch.Tensor]:
        columnwise = [] if self.columnwise is None else [self.columnwise]
        return [*super().internals(), self._quantizer.amax, *columnwise]


CLASSES: dict[str, type[Quantised]] = {"current": Current, "blockwise": Blockwise, "delayed": Delayed}


def param_of(cls: type[Quantised], values: torch.Tensor, name: Any = None, **options: Any) -> Any:
    """A trainable parameter of one of the classes."""
    return nn.Parameter(cls(values, name, **options))  # type: ignore[arg-type]


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("mine")


class Whole:
    """The same steps without an engine: whole parameters, one after the other."""

    def __init__(self, params: list[Any], *, formats: dict[str, Any], master: Any) -> None:
        """Takes formats of ``exp_avg`` and ``exp_avg_sq``, and of the masters."""
        self.params, self.state = params, []
        for param in params:
            numel = param.numel()
            stored = [_empty(format, numel) for format in (*formats.values(), master._replace(of_quantised=True))]
            encode_(stored[2], flat(plain_values(param).contiguous()))
            self.state.append(AdamState(*stored, init_moments=True))

    def step(self, grads: list[Any], settings: list[dict[str, Any]], number: int, grad_scale: float | None) -> None:
        """One step; each parameter has settings of its own, and a ``position`` in the optimizer."""
        for index, (param, grad, own) in enumerate(zip(self.params, grads, settings, strict=True)):
            if grad is None:
                continue
            scalars = adam_scalars(
                lr=own["lr"],
                betas=(0.9, 0.999),
                eps=1e-8,
                weight_decay=own["weight_decay"],
                step=number,
                bias_corrected=True,
                adam_w_mode=True,
            )
            values = torch.full((param.numel(),), torch.nan)
            counter = rounding_counter(own["position"], 0)
            adam_step_(values, flat(grad), self.state[index], scalars, grad_scale=grad_scale, counter=counter)
            with torch.no_grad():
                param.quantize_(values.view(param.shape))
            self.state[index] = self.state[index]._replace(init_moments=False)


def _empty(format: Any, numel: int) -> Stored:
    scale = torch.zeros(-(-numel // 128)) if format.scaled else None
    return Stored(format, torch.zeros(numel, dtype=format.dtype), scale)


def config(**options: Any) -> OffloadConfig:
    """A small ring."""
    return OffloadConfig(**{"chunk_bytes": 4096, "depth": 2, **options})
