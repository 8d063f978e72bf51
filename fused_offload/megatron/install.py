"""Puts FusedOffloadAdam in the places of Megatron-Core's optimizers, and takes it out again."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fused_offload.config import OffloadConfig

from .adam import MegatronAdam
from .api_probe import Layout, UnknownLayoutError, find_layout
from .distributed import DistributedHooks
from .fsdp import FsdpHooks, take_flags
from .lifecycle import Lifecycle
from .options import (
    check_config,
    check_model,
    remember_remainders,
    restore_remainders,
    rounds_stochastically,
    takes_hybrid_place,
    uses_fsdp,
    warn_if_copies_drift,
    warn_if_nothing_moves,
    window_bytes,
)
from .overlap import Overlap
from .refusal import allow_loading
from .replacements import FusedAdamPlaceAdam, Settings, building, hybrid_place, methods_that_name
from .saving import write_in_place
from .step_log import checked_interval, log_steps
from .te_check import warn_where_bits_differ
from .undistributed import UndistributedHooks

_ENTRY = "megatron.core.optimizer"
_ADAPTED = "_fused_offload_hooks"


class _Installation:
    """What is installed now.

    Attributes:
        settings: what was asked for.
        replaced: objects, attribute names and what they were, in the order they were replaced.
        announced: places that were named to the user.
        warned: places about whose configuration the user was warned.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.replaced: list[tuple[Any, str, Any]] = []
        self.announced: set[str] = set()
        self.warned: set[str] = set()

    def replace(self, owner: Any, name: str, value: Any) -> None:
        self.replaced.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def undo(self) -> None:
        for owner, name, value in reversed(self.replaced):
            setattr(owner, name, value)
        self.replaced.clear()


_installation: _Installation | None = None


def install(
    offload: OffloadConfig | None = None,
    numerics: str | None = None,
    *,
    stochastic_rounding: bool | None = None,
    log_interval: int | None = None,
) -> None:
    """Makes Megatron-Core build FusedOffloadAdam; call it before the optimizer is built.

    It takes two places. That of HybridDeviceOptimizer, which the flags ``--optimizer-cpu-offload
    --optimizer-offload-fraction F --use-precision-aware-optimizer`` ask for; it needs no TransformerEngine. And that of
    TransformerEngine's FusedAdam, where that is installed. Without those flags and without TransformerEngine nothing
    changes. May be called before Megatron is imported, and again: the last call's arguments count.

    Args:
        offload: chunks, depth, window and pinning. The fraction counts in the place of FusedAdam; in that of
            HybridDeviceOptimizer it is ``optimizer_offload_fraction``. By default an `OffloadConfig` with the window
            that FUSED_OFFLOAD_WINDOW_BYTES says, and none where it is not set.
        numerics: ``"ieee"`` or ``"te"``; by default that of the place: ``"te"`` for FusedAdam, else ``"ieee"``.
        stochastic_rounding: as for `FusedOffloadAdam`, for moments in bfloat16. By default what
            FUSED_OFFLOAD_STOCHASTIC_ROUNDING says, and False where it is not set.
        log_interval: print what a step moved and cost on the first rank, once in so many steps (see
            ``last_step_report``). By default what FUSED_OFFLOAD_LOG_INTERVAL says, and nothing where it is not set.

    Raises:
        TypeError: if ``offload`` is no OffloadConfig, or ``stochastic_rounding`` no bool.
        ValueError: for unknown numerics, a bad ``log_interval``, and bad values of the variables.
        ModuleNotFoundError: if Megatron-Core is not installed.
    """
    global _installation
    if offload is not None and not isinstance(offload, OffloadConfig):
        raise TypeError(f"offload should be an OffloadConfig(...), but got {type(offload).__name__}")
    if numerics not in (None, "ieee", "te"):
        raise ValueError(f"Invalid numerics: {numerics!r}, it should be 'ieee', 'te' or None")
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
        raise ModuleNotFoundError(
            "fused_offload.megatron needs Megatron-Core: pip install 'megatron-core>=0.19.2' (Python 3.12 or newer)"
        )
    if offload is None:
        offload = OffloadConfig(window_bytes=window_bytes())
    settings = Settings(offload, numerics, checked_interval(log_interval), rounds_stochastically(stochastic_rounding))
    if _installation is not None:
        _installation.settings = settings
        return
    _installation = _Installation(settings)
    if _ENTRY in sys.modules:
        _fill_places(_installation)
    else:
        call_after_import(_ENTRY, _fill_pending)


def _fill_pending() -> None:
    if _installation is not None and not _installation.replaced:
        _fill_places(_installation)


def uninstall() -> None:
    """Gives Megatron's own optimizers their places back. Optimizers that were built stay as they are."""
    global _installation
    if _installation is not None:
        _installation.undo()
        _installation = None


def is_installed() -> bool:
    """Whether the next optimizer that Megatron builds may be FusedOffloadAdam."""
    return _installation is not None


@contextlib.contextmanager
def installed(
    offload: OffloadConfig | None = None,
    numerics: str | None = None,
    *,
    stochastic_rounding: bool | None = None,
    log_interval: int | None = None,
) -> Iterator[None]:
    """`install` for the duration of a ``with`` block, in which the optimizer is built.

    Args:
        offload: as for `install`.
        numerics: as for `install`.
        stochastic_rounding: as for `install`.
        log_interval: as for `install`.
    """
    before = _installation.settings if _installation is not None else None
    install(offload, numerics, stochastic_rounding=stochastic_rounding, log_interval=log_interval)
    try:
        yield
    finally:
        if before is None:
            uninstall()
        else:
            install(
                before.offload,
                before.numerics,
                stochastic_rounding=before.stochastic_rounding,
                log_interval=before.log_interval,
            )


# -- places ------------------------------------------------------------------------------------------------------


def _fill_places(installation: _Installation) -> None:
    try:
        layout = find_layout()
    except UnknownLayoutError as error:
        warnings.warn(str(error), stacklevel=3)
        return
    stock = layout.package.HybridDeviceOptimizer
    place = hybrid_place(stock)
    for name, method in methods_that_name(stock, "HybridDeviceOptimizer").items():
        installation.replace(stock, name, method)
    for module in layout.hybrid_holders:
        installation.replace(module, "HybridDeviceOptimizer", place)
    if layout.uses_te:
        for module in layout.adam_holders:
            installation.replace(module, "Adam", FusedAdamPlaceAdam)
    factory = getattr(layout.package, layout.factory_name)
    installation.replace(layout.package, layout.factory_name, _wrapped_factory(factory, layout, installation))
    chain = layout.package.ChainedOptimizer
    installation.replace(chain, "__init__", _wrapped_chain(chain.__init__, layout, installation))
    post_init = layout.config.__post_init__
    installation.replace(layout.config, "__post_init__", _wrapped_post_init(post_init, layout))


def _is_ours(config: Any, layout: Layout) -> bool:
    return takes_hybrid_place(config) or (
        config.optimizer == "adam" and layout.uses_te and not config.optimizer_cpu_offload
    )


def _wrapped_post_init(post_init: Callable[[Any], None], layout: Layout) -> Callable[[Any], None]:
    @functools.wraps(post_init)
    def checked_post_init(config: Any) -> None:
        remember_remainders(config)
        post_init(config)
        if _is_ours(config, layout):
            if takes_hybrid_place(config):
                restore_remainders(config)
            check_config(config)

    return checked_post_init


def _wrapped_factory(factory: Callable[..., Any], layout: Layout, installation: _Installation) -> Callable[..., Any]:
    @functools.wraps(factory)
    def build(config: Any, model_chunks: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_ours(config, layout):
            return factory(config, model_chunks, *args, **kwargs)
        check_config(config)  # fields may have been set since the configuration was made
        # Releases up to 0.17 hand over a chunk of Megatron-FSDP by itself.
        check_model(config, model_chunks if isinstance(model_chunks, (list, tuple)) else [model_chunks])
        if not takes_hybrid_place(config) and (installation.settings.numerics or "te") == "te":
            warn_where_bits_differ()
        with building(config, installation.settings):
            optimizer = factory(config, model_chunks, *args, **kwargs)
        inner = getattr(optimizer, "optimizer", None)
        with_fsdp = uses_fsdp(model_chunks)
        if with_fsdp and isinstance(inner, MegatronAdam):
            take_flags(inner, config)
        adapt(optimizer, layout)
        if with_fsdp and not _is_virtual_stage(model_chunks):
            _introduce([optimizer], layout, installation)  # Megatron makes no chain of it
        if isinstance(inner, MegatronAdam) and inner.place not in installation.warned:
            installation.warned.add(inner.place)
            warn_if_nothing_moves(config)
            warn_if_copies_drift(config, model_chunks, stochastic_rounding=inner.stochastic_rounding)
        return optimizer

    return build


def _wrapped_chain(init: Callable[..., None], layout: Layout, installation: _Installation) -> Callable[..., None]:
    """Says what is active once all optimizers of a model are built: Megatron makes a chain of them, even of one."""

    @functools.wraps(init)
    def announcing_init(chain: Any, *args: Any, **kwargs: Any) -> None:
        init(chain, *args, **kwargs)
        _introduce(chain.chained_optimizers, layout, installation)

    return announcing_init


def _introduce(optimizers: Sequence[Any], layout: Layout, installation: _Installation) -> None:
    """Says what is active, once for each place, and starts the log of steps."""
    inners = [getattr(optimizer, "optimizer", None) for optimizer in optimizers]
    ours = [inner for inner in inners if isinstance(inner, MegatronAdam)]
    if ours and ours[0].place not in installation.announced:
        installation.announced.add(ours[0].place)
        _announce(ours, layout)
    if ours and installation.settings.log_interval is not None:
        log_steps(ours, installation.settings.log_interval)


def _has_fsdp(optimizer: Any) -> bool:
    return uses_fsdp(getattr(optimizer, "model_chunks", []))


def _is_virtual_stage(model_chunks: Sequence[Any]) -> bool:
    """Whether Megatron builds further optimizers for this rank, and a chain of all."""
    size = getattr(getattr(model_chunks[0], "config", None), "virtual_pipeline_model_parallel_size", None)
    return (size or 1) > 1


def adapt(optimizer: Any, layout: Layout) -> None:
    """Gives one Megatron optimizer the checkpoints and the lifecycle of its FusedOffloadAdam; once.

    Args:
        optimizer: what Megatron's factory returned; left alone unless it is a MegatronOptimizer with a `MegatronAdam`
            inside, or one without parameters.
        layout: the Megatron-Core it comes from.
    """
    inner = getattr(optimizer, "optimizer", None)
    without_params = inner is None and getattr(optimizer, "is_stub_optimizer", False)
    if not isinstance(inner, MegatronAdam) and not without_params:
        return
    if getattr(optimizer, _ADAPTED, None) is not None:
        return
    hooks: list[Any] = [Lifecycle(optimizer)]
    if inner is not None:
        inner.check_groups()
        inner.reserve_gpu_memory()
        if isinstance(optimizer, layout.distrib.DistributedOptimizer):
            if _has_fsdp(optimizer):
                hooks.append(FsdpHooks(optimizer))
            else:
                hooks.append(DistributedHooks(optimizer, layout))
                write_in_place()
            if inner.offload.window_bytes:
                hooks.append(Overlap(optimizer, inner))
        else:
            hooks.append(UndistributedHooks(optimizer))
        allow_loading(optimizer)
    setattr(optimizer, _ADAPTED, hooks)


def _announce(inners: list[MegatronAdam], layout: Layout) -> None:
    """Tells the user on the first rank what is active and where state lives."""
    if torch.distributed.is_initialized() and torch.distributed.get_rank() != 0:
        return
    inner, planned_bytes = inners[0], sum(inner.planned_bytes() for inner in inners)
    stored = ", ".join(f"{key} as {format}" for key, format in inner.planned_formats().items())
    lines = [
        f"fused-offload: FusedOffloadAdam in the place of {inner.place} (megatron-core {layout.version}), "
        f"numerics={inner.numerics}.",
        f"fused-offload: {inner.offload.fraction:.0%} of {planned_bytes / 1e9:.3g} GB of optimizer state on "
        f"this rank ({stored}) in host memory; an asynchronous checkpoint copies it there once more.",
    ]
    if inner.master_owner is not None:
        lines.append(
            f"fused-offload: {inner.master_owner} owns the master weights and keeps them on the GPU; moments move."
        )
    elif not inner.master_weights:
        lines.append(
            "fused-offload: Megatron keeps the fp32 master weights on the GPU in this mode. "
            "--use-precision-aware-optimizer moves them to the host, too."
        )
    if inner.offload.window_bytes and inner.is_attached:
        size = inner.offload.window_bytes
        most = "what activations gave back" if isinstance(size, str) else f"{size / 1e9:.3g} GB"
        lines.append(f"fused-offload: up to {most} of it moves under the backward and the next forward pass.")
    elif inner.offload.window_bytes:
        lines.append(
            "fused-offload: no state moves under backward: window_bytes needs Megatron's distributed optimizer "
            "(--use-distributed-optimizer)."
        )
    print("\n".join(lines), flush=True)


# -- before Megatron is imported ---------------------------------------------------------------------------------


def call_after_import(name: str, function: Callable[[], None]) -> None:
    """Calls a function right after a module that is not imported yet has been executed.

    Args:
        name: dotted name of the module.
        function: what to call; if it raises, the import fails, and the next one calls it again.
    """
    sys.meta_path.insert(0, _AfterImport(name, function))


class _AfterImport:
    """A finder that finds nothing itself, but wraps the loader that the finders behind it find.

    It stays until the module was executed: a search alone (``importlib.util.find_spec``) may come before the import,
    and an import may fail.
    """

    def __init__(self, name: str, function: Callable[[], None]) -> None:
        self._name = name
        self._function = function

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self._name or self not in sys.meta_path:
            return None
        behind = sys.meta_path[sys.meta_path.index(self) + 1 :]
        found = (finder.find_spec(name, path, target) for finder in behind if hasattr(finder, "find_spec"))
        spec = next((spec for spec in found if spec is not None), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            if self in sys.meta_path:
                self._function()
                sys.meta_path.remove(self)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
