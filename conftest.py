"""Test set-up that has to happen before the first test module is imported."""

from __future__ import annotations

import gc
import importlib.metadata
import importlib.util
import os
import platform
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

_ROOT = Path(__file__).resolve().parent

# pytest puts the folder of this file on sys.path. From there `import kernels` would find our
# top-level folder instead of Hugging Face's `kernels` package, which transformers imports. Tests
# use the installed package, as users do.
sys.path[:] = [entry for entry in sys.path if Path(entry or os.curdir).resolve() != _ROOT]

# Tests go by the defaults, not by what was measured on this machine. The folder need not exist.
os.environ["FUSED_OFFLOAD_PROFILES"] = str(_ROOT / ".no-profiles")

os.environ["COLUMNS"] = "200"  # of the tables that are looked at, whatever terminal this is

if not torch.cuda.is_available():
    # Read by Triton when it decorates a kernel, so it must be set before any module of ours is
    # imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_configure() -> None:
    """Mends indices in the interpreters of Triton 3.4 to 3.6, which NumPy 2.4 and newer refuse."""
    if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
        return
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_and_mend(tensor: Any, *scope: Any) -> None:
        patch(tensor, *scope)
        tensor.__index__ = lambda self: self.handle.data.item()

    interpreter._patch_lang_tensor = patch_and_mend


_PACKAGES = ("torch", "triton", "numpy", "megatron-core", "transformer-engine")


def pytest_report_header() -> str:
    """Versions that a line of docs/support.md names."""
    installed = {dist.metadata["Name"].lower(): dist.version for dist in importlib.metadata.distributions()}
    versions = [f"{name} {installed.get(name, 'not installed')}" for name in _PACKAGES]
    return f"versions: Python {platform.python_version()}, {', '.join(versions)}"


def pytest_collection_finish() -> None:
    """Hides tests and modules, which stay until the end, from the garbage collector.

    Tests collect garbage thousands of times, and each time would look at a million objects.
    """
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Lets Triton's module go, which complains at exit of what nobody has freed."""
    gc.unfreeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    device_count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        if item.get_closest_marker("gpu") and device_count == 0:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
        if item.get_closest_marker("multi_gpu") and device_count < 2:
            item.add_marker(pytest.mark.skip(reason=f"needs 2 CUDA GPUs, found {device_count}"))
