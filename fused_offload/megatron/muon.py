"""Megatron-Core's Muon with its momentum in host memory."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch

from fused_offload.config import OffloadConfig
from fused_offload.kernels.muon.reference import MuonScalars, muon_scalars
from fused_offload.optimizer import OffloadOptimizer
from fused_offload.params.dense import has_own_memory
from fused_offload.rules.arguments import check_learning_rate, check_number, checked_step, readable_lr
from fused_offload.rules.base import Phase, WholeOperation
from fused_offload.rules.muon import MuonRule

from .replacements import current_settings

_REGISTRY = "_EMERGING_OPTIMIZERS"


def _no_scratch(param: torch.Tensor) -> int:
    return 0


def _minus_lr(shape: torch.Size, values: MuonScalars) -> float:
    return -1.0 if isinstance(values.lr, torch.Tensor) else -values.lr


@dataclass(frozen=True, kw_only=True)
class MegatronMuonRule(MuonRule):
    """Muon with the arithmetic of emerging-optimizers, and its orthogonalisation.

    That allocates its own temporary tensors, as it does under the stock optimizer.

    Attributes:
        nesterov: interpolate between gradient and momentum.
        orthogonalize: ``(param, update)``, returns the scaled orthogonal update, float32.
    """

    nesterov: bool
    orthogonalize: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    numerics: ClassVar[str] = "megatron"
    settings: ClassVar[tuple[str, ...]] = ("lr", "weight_decay", "momentum")

    @property
    def phases(self) -> tuple[Phase, ...]:  # type: ignore[override]
        """Those of `MuonRule`, with Megatron's operation between them."""
        first, second = MuonRule.phases
        then = WholeOperation(torch.float32, _no_scratch, self._parts, _minus_lr, is_collective=True)
        return first._replace(then=then), second

    def _parts(
        self, param: torch.Tensor, array: torch.Tensor, scratch: torch.Tensor, values: MuonScalars
    ) -> Sequence[Callable[[], Any]]:
        return [partial(self._orthogonalize_, param, array)]

    def _orthogonalize_(self, param: torch.Tensor, array: torch.Tensor) -> None:
        array.copy_(self.orthogonalize(param, array))

    def check_group(self, group: Mapping[str, Any], *, lr_required: bool = False) -> None:
        """Raises for hyperparameters that no step can use."""
        check_learning_rate(group["lr"], required=lr_required)
        check_number(group["weight_decay"], "weight_decay value", nonnegative=True)
        check_number(group["momentum"], "momentum value", nonnegative=True)
        checked_step(group.get("step", 0))

    def check_new_group(self, group: Mapping[str, Any]) -> None:
        """`check_group`; Megatron's groups have settings of its own."""
        self.check_group(group)

    def step_values(self, group: Mapping[str, Any], step: int) -> MuonScalars:
        """Hyperparameters, rounded as in emerging-optimizers."""
        return muon_scalars(
            lr=readable_lr(group["lr"]),
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            nesterov=self.nesterov,
            newton_schulz=None,
            adjust_lr_fn=None,
            step=step,
            numerics="megatron",
        )


class MegatronMuon(OffloadOptimizer):
    """Megatron's ``TensorParallelMuon`` with its momentum in host memory.

    The momentum streams through the GPU in chunks. Megatron's own ``orthogonalize`` works on the
    whole update of a matrix, so the split of queries, keys and values, tensor parallelism,
    coefficients and scales are its own. Float32 masters stay on the GPU, where Megatron keeps them.

    Args:
        params: parameters or groups of them.
        offload: share of the momentum in host memory and its transfer; by default that of
            `install`, without a window.
        **kwargs: arguments of ``TensorParallelMuon``.

    Attributes:
        matrices: number of matrices that it was built for.
        numel: elements of them.

    Raises:
        ValueError: for weight decay that is not decoupled, and parameters that are no matrices.
    """

    def __init__(self, params: Any, *, offload: OffloadConfig | None = None, **kwargs: Any) -> None:
        from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon

        # It has the settings and the methods; its parameter is never stepped.
        self._stock = TensorParallelMuon([torch.nn.Parameter(torch.zeros(1, 1, device="cpu"))], **kwargs)
        if self._stock.weight_decay_method != "decoupled":
            raise ValueError(
                f"Muon with its momentum in host memory decays weights decoupled, but got "
                f"weight_decay_method={self._stock.weight_decay_method!r}; leave the setting out"
            )
        self._groups: dict[int, dict[str, Any]] = {}
        offload = current_settings().offload if offload is None else offload
        super().__init__(
            params,
            dict(self._stock.defaults),
            offload=dataclasses.replace(offload, window_bytes=0, transport="copy", zero_copy_programs="auto"),
        )

        # The layer-wise optimizer takes parameters of other ranks away later.
        given = self._all_params()
        self.matrices, self.numel = len(given), sum(param.numel() for param in given)

    def _check_given(self, params: list[torch.Tensor]) -> None:
        # Megatron puts its masters in the place of quantised parameters later.
        super()._check_given([param for param in params if has_own_memory(param)])

    def _rule(self) -> MegatronMuonRule:
        return MegatronMuonRule(nesterov=bool(self._stock.nesterov), orthogonalize=self._orthogonalize)

    def _orthogonalize(self, param: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        precision = importlib.import_module("emerging_optimizers.utils").fp32_matmul_precision
        group = {key: value for key, value in self._groups[id(param)].items() if key != "params"}
        with precision(self._stock.fp32_matmul_prec):
            orthogonal: torch.Tensor = self._stock.orthogonalize(param, update, **group)
        return orthogonal

    def step(self, closure: Any = None, **kwargs: Any) -> Any:
        """Updates all parameters that have a gradient, and their momentum.

        Raises:
            ValueError: with a closure, as Megatron's.
        """
        if closure is not None:
            raise ValueError("closure is not supported")
        self._groups = {id(param): group for group in self.param_groups for param in group["params"]}
        return super().step(**kwargs)

    def _init_group(self, group: dict[str, Any], skip_non_grad_params: bool = True) -> None:
        """Creates the state of a group's parameters, to load a checkpoint into; Megatron calls it."""
        for param in group["params"]:
            if not skip_non_grad_params or self._grad_of(param) is not None:
                self.initialize_state(param)


@contextlib.contextmanager
def muon_in_place(registry: Any) -> Iterator[list[MegatronMuon]]:
    """Context in which Megatron builds `MegatronMuon` for ``--optimizer muon``.

    Args:
        registry: the module ``megatron.core.optimizer.emerging_optimizers``.

    Yields:
        The optimizers that were built.
    """
    entries = getattr(registry, _REGISTRY)
    stock, made = entries["muon"], []

    def build(params: Any, **kwargs: Any) -> MegatronMuon:
        made.append(MegatronMuon(params, **kwargs))
        return made[-1]

    entries["muon"] = dataclasses.replace(stock, optimizer_cls=build)
    try:
        yield made
    finally:
        entries["muon"] = stock


class MuonCounts(NamedTuple):
    """Trainable parameters of this rank's model by their optimizer.

    Attributes:
        matrices: matrices on Muon.
        numel: elements of them.
        others: parameters elsewhere.
    """

    matrices: int
    numel: int
    others: int


def counts_of(made: Sequence[MegatronMuon], model_chunks: Sequence[Any]) -> MuonCounts:
    """Counts the parameters of this rank's model.

    Args:
        made: optimizers of the model, from `muon_in_place`.
        model_chunks: the wrapped model.

    Raises:
        RuntimeError: if none of them is on Muon, unless other pipeline stages may have matrices.
    """
    params = {id(param) for chunk in model_chunks for param in chunk.parameters() if param.requires_grad}
    matrices = sum(optimizer.matrices for optimizer in made)
    found = MuonCounts(matrices, sum(optimizer.numel for optimizer in made), len(params) - matrices)
    stages = getattr(getattr(model_chunks[0], "config", None), "pipeline_model_parallel_size", 1)
    if not matrices and params and stages == 1:
        raise RuntimeError(
            f"--optimizer muon, but none of the {len(params)} trainable parameters of this model is a matrix of a "
            "hidden layer, so Muon would update nothing. Use --optimizer adam, or look why all parameters have other "
            "than two dimensions or are tagged is_embedding_or_output_parameter."
        )
    return found
