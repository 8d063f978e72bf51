"""Looks up the parts of Megatron-Core that are replaced or called, and detects unknown releases."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any, NamedTuple

FACTORY = "_get_megatron_optimizer_based_on_param_groups"
_HYBRID = "HybridDeviceOptimizer"
_NEEDED = {
    "megatron.core.optimizer": (FACTORY, _HYBRID, "ChainedOptimizer"),
    "megatron.core.optimizer.distrib_optimizer": (_HYBRID, "DistributedOptimizer", "HAVE_APEX_OR_TE"),
    "megatron.core.optimizer.optimizer": ("MegatronOptimizer", "ChainedOptimizer"),
    "megatron.core.optimizer.optimizer_config": ("OptimizerConfig",),
    "megatron.core.optimizer.cpu_offloading": (_HYBRID,),
    "megatron.core.optimizer.cpu_offloading.hybrid_optimizer": (_HYBRID,),
}
REPLACED_METHODS = (
    "_get_main_param_and_optimizer_states",
    "_set_main_param_and_optimizer_states",
    "get_parameter_state_dp_zero",
    "sharded_param_state_fully_reshardable",
    "load_parameter_state_from_dp_zero",
    "state_dict",
    "load_state_dict",
    "reload_model_params",
    "prepare_grads",
    "step_with_ready_grads",
)
"""Methods of DistributedOptimizer that are replaced when a FusedOffloadAdam is inside."""
CASTING_METHODS = (
    "_build_model_and_main_param_groups",
    "_copy_main_params_to_model_params",
    "_get_fp8_params_and_shard_fp32_from_fp8",
)
"""Methods of DistributedOptimizer by which quantised parameters get their masters' values. Where
they are missing, such masters stay Megatron's."""
_NEEDED_METHODS = (
    *REPLACED_METHODS,
    "_get_model_param_range_map",
    "_build_model_param_to_state_dict_param_map",
)


class UnknownApiError(RuntimeError):
    """This Megatron-Core lacks a part that the optimizer needs; the message names it."""


class MegatronApi(NamedTuple):
    """The parts of the installed Megatron-Core that are replaced or called.

    Attributes:
        package: ``megatron.core.optimizer``, the module that chooses and builds optimizers.
        distrib: the module that defines ``DistributedOptimizer``.
        config: the class ``OptimizerConfig``.
        version: release, for messages.
    """

    package: ModuleType
    distrib: ModuleType
    config: Any
    version: str

    @property
    def hybrid_holders(self) -> list[ModuleType]:
        """Modules with a global ``HybridDeviceOptimizer``; Megatron uses all of them."""
        return [importlib.import_module(name) for name, names in _NEEDED.items() if _HYBRID in names]

    @property
    def adam_holders(self) -> list[ModuleType]:
        """Modules with a global ``Adam``, used to build optimizers and in ``isinstance`` checks."""
        return [self.package, self.distrib]

    @property
    def casts_shards(self) -> bool:
        """True if this release has the functions that cast masters into quantised parameters."""
        return hasattr(self.distrib, "quantize_param_shard") and all(
            hasattr(self.distrib.DistributedOptimizer, name) for name in CASTING_METHODS
        )

    @property
    def uses_te(self) -> bool:
        """True if Megatron's Adam is TransformerEngine's."""
        return bool(getattr(self.distrib, "USING_TE_OPTIMIZER", False))


def _version() -> str:
    # Not read from `megatron.core`, whose import may not be complete when this is called.
    try:
        return str(importlib.import_module("megatron.core.package_info").__version__)
    except (ModuleNotFoundError, AttributeError):
        return "of unknown version"


def find_api() -> MegatronApi:
    """Looks up the parts of the installed Megatron-Core.

    Raises:
        ImportError: if a module of Megatron-Core exists but fails to import.
        UnknownApiError: if a needed part is missing, or has another name or module.
    """
    version = _version()
    missing = []
    modules = {}
    for name, names in _NEEDED.items():
        try:
            modules[name] = importlib.import_module(name)
        except ModuleNotFoundError:
            missing.append(name)
            continue
        missing += [f"{name}.{wanted}" for wanted in names if not hasattr(modules[name], wanted)]
    distrib = modules.get("megatron.core.optimizer.distrib_optimizer")
    distributed = getattr(distrib, "DistributedOptimizer", None)
    if distributed is not None:
        missing += [f"DistributedOptimizer.{name}" for name in _NEEDED_METHODS if not hasattr(distributed, name)]
    if missing:
        raise UnknownApiError(
            f"Megatron-Core {version} is not laid out as FusedOffloadAdam expects: it lacks {', '.join(missing)}. "
            "Its own optimizer is left in place. Releases that work are listed in docs/megatron.md."
        )
    return MegatronApi(
        package=modules["megatron.core.optimizer"],
        distrib=modules["megatron.core.optimizer.distrib_optimizer"],
        config=modules["megatron.core.optimizer.optimizer_config"].OptimizerConfig,
        version=version,
    )
