"""Installing and uninstalling, before and after Megatron is imported; what is refused and what is
said.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import itertools
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from job import Job, JobSpec, build_model, build_optimizer, optimizer_config, replaced, te_branches
from registry import Context, Phase, scenario
from scenarios_training import LAYOUTS, STORED_FORMATS
from small import PLACES

import fused_offload.megatron as fom
from fused_offload import OffloadConfig
from fused_offload.megatron.options import WINDOW_VARIABLE
from fused_offload.megatron.step_log import VARIABLE

_ONE, _TWO, _EARLY = (Phase.ONE_RANK,), (Phase.TWO_RANKS,), (Phase.BEFORE_IMPORT,)
_ENTRY = "megatron.core.optimizer"


def _globals() -> dict[str, Any]:
    """Everything that is defined in Megatron's optimizer package, module by module and class by
    class.
    """
    found = {}
    for name in sorted(sys.modules):
        if name == _ENTRY or name.startswith(f"{_ENTRY}."):
            for key, value in vars(sys.modules[name]).items():
                found[f"{name}.{key}"] = value
                if isinstance(value, type) and value.__module__ == name:
                    found |= {f"{name}.{key}.{attribute}": member for attribute, member in vars(value).items()}
    return found


def _changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return sorted(key for key in before.keys() | after.keys() if before.get(key) is not after.get(key))


# -- before and after the import -------------------------------------------------------------------


def _before_import(context: Context) -> dict[str, Any]:
    early = _ENTRY in sys.modules
    fom.install()
    fom.install()
    loaded = _ENTRY in sys.modules
    package = importlib.import_module(_ENTRY)
    installed = _globals()
    fom.uninstall()
    return {
        "imported": (early, loaded),
        "finders": [type(finder).__name__ for finder in sys.meta_path if "AfterImport" in type(finder).__name__],
        "changed": _changed(_globals(), installed),
        "restored": package.HybridDeviceOptimizer.__module__,
    }


def _uninstalled_before_import(context: Context) -> dict[str, Any]:
    fom.install()
    fom.uninstall()
    package = importlib.import_module(_ENTRY)
    return {"class": package.HybridDeviceOptimizer.__module__, "installed": fom.is_installed()}


scenario("installed before the import", _before_import, _EARLY)
scenario("uninstalled before the import", _uninstalled_before_import, _EARLY)


def _after_import(context: Context) -> dict[str, Any]:
    before = _globals()
    fom.install()
    once = _globals()
    fom.install(OffloadConfig(chunk_bytes=12345))
    twice = _globals()
    with fom.installed(OffloadConfig(chunk_bytes=54321)):
        within = build_optimizer_of_ours().offload.chunk_bytes
    outside = build_optimizer_of_ours().offload.chunk_bytes
    fom.uninstall()
    after = _globals()
    fom.uninstall()
    with contextlib.suppress(RuntimeError), fom.installed():
        raise RuntimeError
    return {
        "changed by the first": _changed(before, once),
        "changed by the second": _changed(once, twice),
        "left behind": _changed(before, after) + _changed(before, _globals()),
        "chunk bytes": (within, outside),
        "installed": fom.is_installed(),
    }


def build_optimizer_of_ours() -> Any:
    """The inner optimizer that Megatron builds now, without the place that jobs make for it."""
    from megatron.core.optimizer import get_megatron_optimizer

    spec = JobSpec()
    return get_megatron_optimizer(optimizer_config(spec), [build_model(spec)]).chained_optimizers[0].optimizer


scenario("installed after the import", _after_import, _ONE)


# -- for good, and not at all ----------------------------------------------------------------------


def _for_good(context: Context) -> dict[str, Any]:
    """Jobs install only while they build; here it stays installed while they train."""
    results = {}
    for name in ("within", "for good"):
        with fom.installed() if name == "for good" else contextlib.nullcontext():
            job = Job(JobSpec(stored_formats=STORED_FORMATS["remainders"], layout=LAYOUTS["dense and experts"]))
            results[name] = {"log": job.train(3), **job.snapshot()}
            job.optimizer.reload_model_params()
            job.optimizer.state_dict()
    return results


def _flags_off(context: Context) -> dict[str, Any]:
    results = {}
    for name in ("stock", "installed"):
        with fom.installed() if name == "installed" else contextlib.nullcontext():
            job = Job(JobSpec("stock", layout=LAYOUTS["dense and experts"]))
            results[name] = {
                "log": job.train(5),
                **job.snapshot(),
                "classes": [type(inner).__name__ for inner in job.inners],
                "attributes": [sorted(vars(child)) for child in job.children],
            }
    return results


scenario("installed for good", _for_good, _TWO)
scenario("flags are off", _flags_off, _TWO)


def _other_optimizers(context: Context) -> dict[str, Any]:
    """HybridDeviceOptimizer around SGD is not ours to replace."""
    from megatron.core import optimizer as package

    stock = package.HybridDeviceOptimizer
    settings = (("optimizer", "sgd"), ("optimizer_offload_fraction", 1.0), ("pin_cpu_grads", False))
    spec = JobSpec("stock", config=(("optimizer_cpu_offload", True), *settings))
    with fom.installed():
        inner = build_optimizer(spec, build_model(spec)).chained_optimizers[0].optimizer
        return {"stock": type(inner) is stock, "is an instance": isinstance(inner, package.HybridDeviceOptimizer)}


scenario("HybridDeviceOptimizer with SGD", _other_optimizers, _ONE)


# -- a Megatron of another shape -------------------------------------------------------------------

MISSING = (
    (f"{_ENTRY}.distrib_optimizer", "DistributedOptimizer._get_model_param_range_map"),
    (f"{_ENTRY}.cpu_offloading.hybrid_optimizer", "HybridDeviceOptimizer"),
)


@contextlib.contextmanager
def _without(module: str, path: str) -> Iterator[None]:
    owner: Any = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    value = getattr(owner, name)
    delattr(owner, name)
    try:
        yield
    finally:
        setattr(owner, name, value)


def _unknown_layout(context: Context) -> dict[str, Any]:
    results = {}
    for module, path in MISSING:
        with _without(module, path), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            before = _globals()
            fom.install()
            fom.install()
            changed = _changed(before, _globals())
        try:
            job = Job(JobSpec("stock"))
            classes = [type(inner).__name__ for inner in job.inners]
        finally:
            fom.uninstall()
        results[path] = {"warnings": [str(w.message) for w in caught], "changed": changed, "classes": classes}
    return results


scenario("unknown layout", _unknown_layout, _ONE)


# -- what is refused -------------------------------------------------------------------------------

REFUSED_CONFIGS: dict[str, dict[str, Any]] = {
    "fraction below 0": {"optimizer_offload_fraction": -0.1},
    "fraction above 1": {"optimizer_offload_fraction": 1.1},
    "fraction not a number": {"optimizer_offload_fraction": float("nan")},
    "CUDA graph": {"optimizer_cuda_graph": True},
    "moments in fp64": {"exp_avg_dtype": torch.float64},
    "second moments in fp64": {"exp_avg_sq_dtype": torch.float64},
    "masters in bf16": {"main_params_dtype": torch.bfloat16},
}


def _message(function: Any, *args: Any) -> str:
    try:
        function(*args)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def _refused_configs(context: Context) -> dict[str, dict[str, str]]:
    """Messages when the configuration is made with installed optimizer, and when it is changed
    before building.
    """
    from megatron.core.optimizer import get_megatron_optimizer

    results = {}
    model = build_model(JobSpec())
    with fom.installed():
        for name, fields in REFUSED_CONFIGS.items():
            made = _message(optimizer_config, JobSpec(config=tuple(fields.items())))
            config = optimizer_config(JobSpec())
            for field, value in fields.items():
                setattr(config, field, value)
            results[name] = {"made": made, "built": _message(get_megatron_optimizer, config, [model])}
    return results


OTHER_OFFLOADERS = ("offload_optimizer_states", "chunked_optimizer_state_offload")


def _refused_offloaders(context: Context) -> dict[str, dict[str, str]]:
    """As for configurations; only Megatron's development branch has the fields, so the class gets
    them.
    """
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    results = {}
    model = build_model(JobSpec())
    with fom.installed():
        for name in OTHER_OFFLOADERS:
            config = optimizer_config(JobSpec())
            setattr(OptimizerConfig, name, True)
            try:
                made = _message(optimizer_config, JobSpec())
                results[name] = {"made": made, "built": _message(get_megatron_optimizer, config, [model])}
            finally:
                delattr(OptimizerConfig, name)
    return results


REFUSED_BUILDS = ("FullyShardedDataParallelV2", "qk_clip")


def _refused_builds(context: Context) -> dict[str, str]:
    from megatron.core import optimizer as package

    results = {}
    model = build_model(JobSpec())
    with fom.installed():
        build = package._get_megatron_optimizer_based_on_param_groups
        for name in REFUSED_BUILDS:
            config, chunk = optimizer_config(JobSpec()), model
            if name == "FullyShardedDataParallelV2":
                chunk, change = type(name, (), {})(), ()
            else:
                change = ((model.config, name, True),)
            with replaced(*change):
                results[name] = _message(build, config, [chunk], [{"params": []}])
    return results


scenario("refused configurations", _refused_configs, _ONE)
scenario("refused offloaders", _refused_offloaders, _ONE)
scenario("refused builds", _refused_builds, _ONE)
scenario("refused arguments", lambda context: [_message(fom.install, None, "fast"), fom.is_installed()], _ONE)


# -- what is said ----------------------------------------------------------------------------------


def _said(context: Context) -> dict[str, Any]:
    results = {}
    for name, fraction, layout, stored_formats, config in (
        ("all", 1.0, "one bucket", "remainders", ()),
        ("nothing", 0.0, "one bucket", "remainders", ()),
        ("experts", 0.5, "dense and experts", "remainders", ()),
        ("default mode", 1.0, "one bucket", "fp32", (("use_precision_aware_optimizer", False),)),
    ):
        spec = JobSpec(
            stored_formats=STORED_FORMATS[stored_formats], fraction=fraction, layout=LAYOUTS[layout], config=config
        )
        output = io.StringIO()
        with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(output), fom.installed():
            warnings.simplefilter("always")
            optimizers = [build_optimizer(spec, build_model(spec)) for _ in range(2)]
        results[name] = {
            "printed": output.getvalue(),
            "warnings": [str(w.message) for w in caught if "offload" in str(w.message)],
            "bytes": sum(child.optimizer.planned_bytes() for child in optimizers[0].chained_optimizers),
        }
    return results


scenario("what is said", _said, _TWO)


def _logged(context: Context) -> dict[str, str]:
    """Five calls of each optimizer's step, with an interval from either place."""
    from megatron.core.optimizer import get_megatron_optimizer

    spec = JobSpec(stored_formats=STORED_FORMATS["remainders"], layout=LAYOUTS["dense and experts"])
    printed = {}
    for name, interval, variable in (("argument", 2, "1"), ("variable", None, "3"), ("neither", None, "")):
        output = io.StringIO()
        os.environ[VARIABLE] = variable
        try:
            with contextlib.redirect_stdout(output), fom.installed(log_interval=interval):
                optimizer = get_megatron_optimizer(optimizer_config(spec), [build_model(spec)])
                type(optimizer)(optimizer.chained_optimizers)  # chains the same ones again
                for _ in range(5):
                    for child in optimizer.chained_optimizers:
                        child.optimizer.step()
        finally:
            del os.environ[VARIABLE]
        printed[name] = output.getvalue()
    return printed


scenario("steps are logged", _logged, _TWO)

# -- the window ------------------------------------------------------------------------------------

WINDOWS: tuple[tuple[OffloadConfig | None, str, bool], ...] = (
    (None, "", True),
    (None, "auto", True),
    (None, "60KB", True),
    (OffloadConfig(), "auto", True),
    (OffloadConfig(window_bytes=60000), "", True),
    (None, "auto", False),
)
"""Argument of `install`, value of the variable, and whether the optimizer is Megatron's distributed
one.
"""


def _windows(context: Context) -> list[tuple[Any, bool, str]]:
    """Configured window, attached or not, and the printed lines, for each case.

    Where the variable asks for a window, the driver has one queue for the copies of a direction.
    """
    from megatron.core.optimizer import get_megatron_optimizer

    results = []
    for offload, variable, distributed in WINDOWS:
        fields = () if distributed else (("use_precision_aware_optimizer", False), ("use_distributed_optimizer", False))
        spec = JobSpec(config=fields)
        output = io.StringIO()
        os.environ[WINDOW_VARIABLE] = variable
        try:
            with (
                contextlib.redirect_stdout(output),
                fom.installed(offload),
                replaced((os, "environ", {**os.environ, **({"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if variable else {})})),
            ):
                optimizer = get_megatron_optimizer(optimizer_config(spec), [build_model(spec)])
        finally:
            del os.environ[WINDOW_VARIABLE]
        inner = optimizer.chained_optimizers[0].optimizer
        results.append((inner.offload.window_bytes, inner.is_attached, output.getvalue()))
    return results


def _refused_windows(context: Context) -> dict[str, Any]:
    messages = {}
    for value in ("-1", "8 GBit", "all", "1.5"):
        os.environ[WINDOW_VARIABLE] = value
        try:
            messages[value] = _message(fom.install)
        finally:
            del os.environ[WINDOW_VARIABLE]
    return {"messages": messages, "installed": fom.is_installed()}


def _shares(context: Context) -> dict[tuple[str, float, float], float]:
    """Share of the state on the host, by place, Megatron's field, and argument of `install`."""
    from megatron.core.optimizer import get_megatron_optimizer

    shares = {}
    for place, field, argument in itertools.product(PLACES, (0.0, 0.5, 1.0), (1.0, 0.25)):
        spec = JobSpec(place, fraction=field)
        with (
            te_branches() if place == "ours as FusedAdam" else contextlib.nullcontext(),
            contextlib.redirect_stdout(io.StringIO()),
            warnings.catch_warnings(),
            fom.installed(OffloadConfig(fraction=argument), "ieee"),
        ):
            warnings.simplefilter("ignore")  # a share of 0 is warned about
            optimizer = get_megatron_optimizer(optimizer_config(spec), [build_model(spec)])
        shares[place, field, argument] = optimizer.chained_optimizers[0].optimizer.offload.fraction
    return shares


def _begun(context: Context) -> dict[str, list[int]]:
    """Number of times that an iteration drops prefetched state, after one without a step."""
    calls: dict[str, list[int]] = {}
    for name, window_bytes in (("window", 60000), ("none", 0)):
        job = Job(JobSpec(window_bytes=window_bytes))
        job.train(2)
        (inner,) = job.inners
        job.forward_backward()
        made = calls.setdefault(name, [])
        with replaced((inner, "cancel_prefetch", lambda made=made: made.append(1))):
            job.optimizer.zero_grad()
        del inner.cancel_prefetch
    return calls


scenario("an iteration begins", _begun, _ONE)
scenario("windows", _windows, _TWO)
scenario("shares", _shares, _ONE)
scenario("refused windows", _refused_windows, _ONE)
