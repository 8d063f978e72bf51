"""Facts about the machine and the versions, without which a number means nothing."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from fused_offload.memory import host_limits

_PACKAGES = (
    "fused-offload",
    "torch",
    "triton",
    "transformer-engine",
    "transformer-engine-torch",
    "torchao",
    "deepspeed",
    "bitsandbytes",
    "megatron-core",
    "pytest-benchmark",
)


def machine_facts() -> dict[str, Any]:
    """Everything, None where this machine does not say.

    Taken right after the benchmarks: an idle link slows down.
    """
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": _commit(),
        "gpu": _gpu_facts() if torch.cuda.is_available() else None,
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "torch_threads": torch.get_num_threads(),
        "numa_nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or None,
        "host_memory_bytes": host_limits.host_bytes(),
        "os": platform.platform(),
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "versions": {name: _version(name) for name in _PACKAGES},
    }


def check_device(parser: argparse.ArgumentParser, device: str) -> None:
    """Ends a program that should run on what is no device, or on a GPU that is not there."""
    try:
        chosen = torch.device(device)
    except RuntimeError:
        chosen = None
    if chosen is None or chosen.type not in ("cuda", "cpu"):
        parser.error(f"--device {device} should be cpu, cuda or cuda:N")
    if chosen.type == "cpu":
        return
    if not torch.cuda.is_available():
        parser.error("there is no CUDA GPU; --tiny --device cpu runs without one, and says nothing about speed")
    if (chosen.index or 0) >= torch.cuda.device_count():
        parser.error(f"--device {device}: there are {torch.cuda.device_count()} GPUs, counted from 0")


def check_writable(parser: argparse.ArgumentParser, path: Path) -> None:
    """Ends the program before it has measured anything if the results could not be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        path.open("a").close()
        if is_new:
            path.unlink()  # an empty file is no results
    except OSError as error:
        parser.error(f"--results {path} cannot be written: {error}")


def make_current(device: torch.device) -> None:
    """Makes a GPU that was named by its number the current device.

    Streams, limits of memory and `machine_facts` are the current device's.

    Args:
        device: a CPU, or a GPU.
    """
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The checkout's commit, marked if it has changes.

    GIT_COMMIT where the tree came without its history.
    """

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("GIT_COMMIT")


def _cpu_name() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _gpu_facts() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "name": properties.name,
        "count": torch.cuda.device_count(),
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        **_nvml_facts(str(getattr(properties, "uuid", ""))),
    }


def _nvml_facts(uuid: str) -> dict[str, Any]:
    """Facts from NVML; empty without nvidia-ml-py, None for values that a virtual machine hides."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:  # the package without a usable library behind it
        return {"nvml": f"not usable: {error}"}
    try:
        # By UUID: NVML counts devices that CUDA_VISIBLE_DEVICES hides.
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())
    except pynvml.NVMLError:
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    questions = {
        "pcie_generation": pynvml.nvmlDeviceGetCurrPcieLinkGeneration,
        "pcie_generation_max": pynvml.nvmlDeviceGetMaxPcieLinkGeneration,
        "pcie_width": pynvml.nvmlDeviceGetCurrPcieLinkWidth,
        "pcie_width_max": pynvml.nvmlDeviceGetMaxPcieLinkWidth,
    }
    facts: dict[str, Any] = {"driver": _text(pynvml.nvmlSystemGetDriverVersion())}
    for name, question in questions.items():
        try:
            facts[name] = question(handle)
        except pynvml.NVMLError:
            facts[name] = None
    pynvml.nvmlShutdown()
    return facts


def _text(value: str | bytes) -> str:
    # Older releases of nvidia-ml-py return bytes.
    return value.decode() if isinstance(value, bytes) else value
