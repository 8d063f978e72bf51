"""Patches of Megatron-Core's modules and classes that make it build FusedOffloadAdam."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from .adam import MegatronAdam
from .adaptation import adapt
from .announcement import announce, announce_muon, announce_stock
from .api_probe import FACTORY, MegatronApi, UnknownApiError, find_api
from .checks import check_config, check_model, check_quantised, warn_if_copies_drift, warn_if_nothing_moves
from .fsdp import take_flags, uses_fsdp
from .muon import counts_of, muon_in_place
from .options import remember_remainders, restore_remainders, takes_hybrid_place
from .quantised_shards import own_masters, with_stand_ins
from .replacements import FusedAdamPlaceAdam, Settings, building, hybrid_place, methods_that_name
from .step_log import log_steps
from .te_check import warn_where_bits_differ

_EMERGING_FACTORY = "_get_megatron_emerging_optimizer"


class Installation:
    """The patches of one call of `install`.

    Attributes:
        settings: arguments of the latest call of `install`.
        replaced: objects, attribute names and former values, in the order of replacement.
        announced: places that were announced to the user.
        warned: places whose configuration was checked for warnings.
    """

    def __init__(self, settings: Settings) -> None:
        """Patches nothing yet."""
        self.settings = settings
        self.replaced: list[tuple[Any, str, Any]] = []
        self.announced: set[str] = set()
        self.warned: set[str] = set()

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Sets an attribute, and keeps its former value for `undo`."""
        self.replaced.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def undo(self) -> None:
        """Restores all attributes."""
        for owner, name, value in reversed(self.replaced):
            setattr(owner, name, value)
        self.replaced.clear()

    def fill_places(self) -> None:
        """Patches the imported Megatron-Core; warns and does nothing for an unknown release."""
        try:
            api = find_api()
        except UnknownApiError as error:
            warnings.warn(str(error), stacklevel=3)
            return
        self.check_muon(api)
        stock = api.package.HybridDeviceOptimizer
        place = hybrid_place(stock)
        for name, method in methods_that_name(stock, "HybridDeviceOptimizer").items():
            self.replace(stock, name, method)
        for module in api.hybrid_holders:
            self.replace(module, "HybridDeviceOptimizer", place)
        if api.uses_te:
            for module in api.adam_holders:
                self.replace(module, "Adam", FusedAdamPlaceAdam)
        factory = getattr(api.package, FACTORY)
        self.replace(api.package, FACTORY, _wrapped_factory(factory, api, self))
        if hasattr(api.package, _EMERGING_FACTORY):
            emerging = getattr(api.package, _EMERGING_FACTORY)
            self.replace(api.package, _EMERGING_FACTORY, _wrapped_emerging(emerging, self))
        chain = api.package.ChainedOptimizer
        self.replace(chain, "__init__", _wrapped_chain(chain.__init__, api, self))
        if api.casts_shards:
            distributed, name = api.distrib.DistributedOptimizer, "_build_model_and_main_param_groups"
            groups = vars(distributed)[name]  # not the bound method, which getattr gives
            self.replaced.append((distributed, name, groups))
            setattr(distributed, name, with_stand_ins(groups.__func__, api))
        post_init = api.config.__post_init__
        self.replace(api.config, "__post_init__", _wrapped_post_init(post_init, api))

    def check_muon(self, api: MegatronApi) -> None:
        """Refuses Muon with a Megatron-Core whose Muon is not known.

        Raises:
            RuntimeError: names the release.
        """
        if self.settings.muon and not hasattr(api.package, _EMERGING_FACTORY):
            raise RuntimeError(
                f"muon=True needs the Muon of Megatron-Core 0.19.2, which {api.version} does not have under its name. "
                "Leave muon=True and FUSED_OFFLOAD_MUON=1 out, or use that release."
            )


def _is_ours(config: Any, api: MegatronApi) -> bool:
    return takes_hybrid_place(config) or (
        config.optimizer == "adam" and api.uses_te and not config.optimizer_cpu_offload
    )


def _wrapped_post_init(post_init: Callable[[Any], None], api: MegatronApi) -> Callable[[Any], None]:
    @functools.wraps(post_init)
    def checked_post_init(config: Any) -> None:
        remember_remainders(config)
        post_init(config)
        if _is_ours(config, api):
            if takes_hybrid_place(config):
                restore_remainders(config)
            check_config(config)

    return checked_post_init


def _wrapped_factory(factory: Callable[..., Any], api: MegatronApi, installation: Installation) -> Callable[..., Any]:
    @functools.wraps(factory)
    def build(config: Any, model_chunks: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_ours(config, api):
            return factory(config, model_chunks, *args, **kwargs)
        check_config(config)  # fields may have been set since the configuration was made
        # Releases up to 0.17 pass a Megatron-FSDP chunk outside of a list.
        chunks = model_chunks if isinstance(model_chunks, (list, tuple)) else [model_chunks]
        check_model(config, chunks)
        with_fsdp = uses_fsdp(chunks)
        if config.use_precision_aware_optimizer and not with_fsdp:
            own_masters(config, chunks, api)
            check_quantised(config, chunks)
        if not takes_hybrid_place(config) and (installation.settings.numerics or "te") == "te":
            warn_where_bits_differ()
        with building(config, installation.settings):
            optimizer = factory(config, model_chunks, *args, **kwargs)
        inner = getattr(optimizer, "optimizer", None)
        if with_fsdp and isinstance(inner, MegatronAdam):
            take_flags(inner, config)
        adapt(optimizer, api)
        if with_fsdp and not _is_virtual_stage(chunks):
            _introduce([optimizer], api, installation)  # Megatron does not chain it
        if isinstance(inner, MegatronAdam) and inner.place not in installation.warned:
            installation.warned.add(inner.place)
            warn_if_nothing_moves(config)
            warn_if_copies_drift(config, chunks, stochastic_rounding=inner.stochastic_rounding)
        return optimizer

    return build


def _wrapped_emerging(factory: Callable[..., Any], installation: Installation) -> Callable[..., Any]:
    """Puts Muon's momentum into host memory, where `install` was asked to."""

    @functools.wraps(factory)
    def build(config: Any, model_chunks: Any, *args: Any, **kwargs: Any) -> Any:
        settings = installation.settings
        if not settings.muon:
            return factory(config, model_chunks, *args, **kwargs)
        if config.optimizer.removeprefix("dist_") != "muon":
            announce_stock(config.optimizer)
            return factory(config, model_chunks, *args, **kwargs)
        registry = importlib.import_module("megatron.core.optimizer.emerging_optimizers")
        with building(config, settings), muon_in_place(registry) as made:
            optimizer = factory(config, model_chunks, *args, **kwargs)
        announce_muon(counts_of(made, model_chunks), config.muon_scalar_optimizer)
        return optimizer

    return build


def _wrapped_chain(init: Callable[..., None], api: MegatronApi, installation: Installation) -> Callable[..., None]:
    """Announces a model's optimizers when all are built; Megatron chains even a single one."""

    @functools.wraps(init)
    def announcing_init(chain: Any, *args: Any, **kwargs: Any) -> None:
        init(chain, *args, **kwargs)
        _introduce(chain.chained_optimizers, api, installation)

    return announcing_init


def _introduce(optimizers: Sequence[Any], api: MegatronApi, installation: Installation) -> None:
    """Announces the optimizers, once for each place, and starts the log of steps."""
    inners = [getattr(optimizer, "optimizer", None) for optimizer in optimizers]
    ours = [inner for inner in inners if isinstance(inner, MegatronAdam)]
    if ours and ours[0].place not in installation.announced:
        installation.announced.add(ours[0].place)
        announce(ours, api.version)
    if ours and installation.settings.log_interval is not None:
        log_steps(ours, installation.settings.log_interval)


def _is_virtual_stage(model_chunks: Sequence[Any]) -> bool:
    """True if Megatron builds several optimizers for this rank, and chains them."""
    size = getattr(getattr(model_chunks[0], "config", None), "virtual_pipeline_model_parallel_size", None)
    return (size or 1) > 1
