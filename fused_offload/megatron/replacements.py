"""The classes that Megatron builds in the places of HybridDeviceOptimizer and of TE's FusedAdam."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from contextvars import ContextVar
from types import FunctionType
from typing import Any, NamedTuple

import torch

from fused_offload.config import OffloadConfig

from .adam import MegatronAdam
from .options import AdamOptions, options_of


class Settings(NamedTuple):
    """Arguments of `install`.

    Attributes:
        offload: chunks, depth, window and pinning; in the place of FusedAdam also the fraction,
            where Megatron's is 0 or 1.
        numerics: ``"ieee"``, ``"te"``, or None for the default of each place.
        log_interval: steps between two printed reports, or None.
        stochastic_rounding: as for `FusedOffloadAdam`.
        muon: whether Muon's momentum moves.
    """

    offload: OffloadConfig
    numerics: str | None
    log_interval: int | None = None
    stochastic_rounding: bool = False
    muon: bool = False


class _Build(NamedTuple):
    config: Any
    settings: Settings


_current: ContextVar[_Build | None] = ContextVar("fused_offload_megatron_build", default=None)


@contextlib.contextmanager
def building(config: Any, settings: Settings) -> Iterator[None]:
    """Context in which optimizers are built for one OptimizerConfig.

    HybridDeviceOptimizer's constructor has no arguments for stored dtypes and remainders, so the
    class in its place reads them from this configuration.
    """
    token = _current.set(_Build(config, settings))
    try:
        yield
    finally:
        _current.reset(token)


def current_settings() -> Settings:
    """Settings of the optimizer that is being built; the defaults outside of `building`."""
    build = _current.get()
    return build.settings if build is not None else Settings(OffloadConfig(), None)


def hybrid_place(stock: type[torch.optim.Optimizer]) -> type:
    """The class that replaces Megatron's HybridDeviceOptimizer.

    A call of the class builds a `HybridPlaceAdam`, or ``stock`` if the CPU part would not be Adam.
    Both are instances of the class, so Megatron's ``isinstance`` checks hold for either.

    Args:
        stock: Megatron's HybridDeviceOptimizer.
    """

    class HybridPlace(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            wanted = kwargs.get("cpu_optimizer_cls")
            if wanted is not None and not issubclass(wanted, (torch.optim.Adam, torch.optim.AdamW)):
                return stock(*args, **kwargs)
            return HybridPlaceAdam(*args, **kwargs)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, (HybridPlaceAdam, stock))

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, (HybridPlaceAdam, stock))

    return HybridPlace("HybridDeviceOptimizer", (), {"__doc__": HybridPlaceAdam.__doc__})


def methods_that_name(stock: type, name: str) -> dict[str, FunctionType]:
    """Copies of a class's methods in which a global name still refers to the class.

    ``super(HybridDeviceOptimizer, self)`` fails once the name refers to another class. The copies
    keep the present values of the module's other globals.

    Args:
        stock: the class.
        name: the class's global name in the module, which is about to be replaced.
    """
    return {
        key: FunctionType(
            method.__code__,
            {**method.__globals__, name: stock},
            method.__name__,
            method.__defaults__,
            method.__closure__,
        )
        for key, method in vars(stock).items()
        if isinstance(method, FunctionType) and name in method.__code__.co_names
    }


class HybridPlaceAdam(MegatronAdam):
    """FusedOffloadAdam with the constructor of HybridDeviceOptimizer.

    Args:
        params: parameters or groups of them.
        offload_fraction: share of the state bytes in host memory. Megatron's OptimizerConfig
            overrides it when Megatron builds the optimizer.
        cpu_optimizer_cls: torch's AdamW for decoupled weight decay, or Adam for L2. Neither of them
            is used to step.
        gpu_optimizer_cls: not used.
        param_update_in_fp32: keep fp32 masters of 16-bit parameters.
        pin_cpu_grads: not used; gradients stay where they are.
        pin_cpu_params: page-lock state in host memory.
        overlap_cpu_optimizer_d2h_h2d: not used; copies always overlap.
        options: arguments of the optimizer, in the place of those from Megatron's configuration.
        fused: not used.
        **kwargs: hyperparameters, as for `FusedOffloadAdam`.
    """

    place = "HybridDeviceOptimizer"

    def __init__(
        self,
        params: Any,
        offload_fraction: float = 0.5,
        cpu_optimizer_cls: type | None = None,
        gpu_optimizer_cls: type | None = None,
        param_update_in_fp32: bool = False,
        pin_cpu_grads: bool = True,
        pin_cpu_params: bool = True,
        overlap_cpu_optimizer_d2h_h2d: bool = True,
        options: AdamOptions | None = None,
        fused: bool | None = None,
        **kwargs: Any,
    ) -> None:
        build = _current.get()
        if options is None and build is not None:
            options = options_of(
                build.config,
                build.settings.offload,
                build.settings.numerics or "ieee",
                stochastic_rounding=build.settings.stochastic_rounding,
            )
        if options is None:
            options = AdamOptions(
                adam_w_mode=cpu_optimizer_cls is None or issubclass(cpu_optimizer_cls, torch.optim.AdamW),
                master_weights=param_update_in_fp32,
                offload=OffloadConfig(fraction=offload_fraction, pin=pin_cpu_params),
            )
        super().__init__(params, **kwargs, **vars(options))
        # DistributedOptimizer builds the object again from `defaults`, with its own shards. Set
        # only now, since groups copy the defaults, and go into checkpoints.
        self.defaults["options"] = options

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As `FusedOffloadAdam.add_param_group`, but also accepts views as parameters.

        DistributedOptimizer's shards are views.
        """
        for param in param_group["params"]:
            if not param.is_leaf and param.requires_grad:
                param.retain_grad()  # torch's check of new groups demands it of non-leaf tensors
        options = self.defaults.pop("options", None)
        try:
            super().add_param_group(param_group)
        finally:
            if options is not None:
                self.defaults["options"] = options


def _with_share_of_config(offload: OffloadConfig) -> OffloadConfig:
    """``offload`` with Megatron's ``optimizer_offload_fraction``, unless that is 0 or 1, its defaults."""
    build = _current.get()
    share = 1.0 if build is None else float(build.config.optimizer_offload_fraction)
    return offload if share in (0.0, 1.0) else dataclasses.replace(offload, fraction=share)


class FusedAdamPlaceAdam(MegatronAdam):
    """FusedOffloadAdam with the constructor and, by default, the bits of TE's FusedAdam.

    Args:
        *args: as for `FusedOffloadAdam`.
        **kwargs: as for `FusedOffloadAdam`.
    """

    place = "FusedAdam"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        settings = current_settings()
        kwargs.setdefault("numerics", settings.numerics or "te")
        kwargs.setdefault("offload", _with_share_of_config(settings.offload))
        kwargs.setdefault("stochastic_rounding", settings.stochastic_rounding)
        super().__init__(*args, **kwargs)
