"""Diagnosis of a machine: findings with advice."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from .machine import NOT_FOUND, Gpu, Machine

_LANE_GBPS = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
_GOOD_SHARE = 0.7
"""Acceptable share of the lanes' capacity. An H100 over PCIe 5 x16 reaches 54 of 63 GB/s."""

_GOOD_NODE_SHARE = 0.6
"""Acceptable share of the speed at which the GPU reads from the best NUMA node."""

_GOOD_SHARED = 0.9
"""Acceptable speed of a GPU's copies while all GPUs copy, as a share of its speed alone."""

_GOOD_ROOM = 0.5
"""Share of the host's memory that should be free, since state takes most of a host."""

_BLACKWELL, _BLACKWELL_TRITON = (10, 0), "3.3"
"""Lowest compute capability of Blackwell GPUs, and the oldest Triton that compiles for them."""

OLDEST = {"torch": "2.8", "triton": "3.4", "megatron-core": "0.17"}
"""Oldest tested releases, see docs/support.md. pip requires them, except with ``--no-deps``."""

Level = Literal["ok", "warning", "problem"]


class Finding(NamedTuple):
    """Result of one examination.

    Attributes:
        level: ``"ok"``, ``"warning"`` (slow, or little room) or ``"problem"`` (a step would fail).
        what: subject of the examination.
        found: result of the examination.
        advice: recommended action; empty if none.
    """

    level: Level
    what: str
    found: str
    advice: str = ""


def exit_code(findings: Iterable[Finding]) -> int:
    """Exit code: 0 if all is fine, 1 with warnings, 2 with problems."""
    codes = {"ok": 0, "warning": 1, "problem": 2}
    return max((codes[finding.level] for finding in findings), default=0)


def examine(machine: Machine) -> list[Finding]:
    """Examines a machine.

    Args:
        machine: facts of the machine.
    """
    return [
        *_versions(machine),
        *_gpus(machine),
        *_together(machine),
        *_numa(machine),
        *_host(machine),
        *_megatron(machine),
    ]


def _versions(machine: Machine) -> list[Finding]:
    versions = machine.versions
    found = ", ".join(f"{name} {versions[name]}" for name in versions if versions[name] is not None)
    findings = [Finding("ok", "versions", found)]
    if machine.gpus and versions.get("triton") is None:
        findings.append(Finding("problem", "triton", "not installed", "pip install triton: the GPU's kernels need it"))
    for name in ("torch", "triton"):
        if _is_older(versions.get(name), OLDEST[name]):
            advice = f"pip install 'torch>={OLDEST['torch']}', which brings its Triton"
            findings.append(Finding("warning", name, f"{versions[name]}; {OLDEST[name]} is the oldest tested", advice))
    return findings


def _is_older(version: str | None, than: str) -> bool:
    """Compares the first two numbers of versions; False if a version is unknown."""
    found, lowest = (re.match(r"(\d+)\.(\d+)", text) for text in (version or "", than))
    return (
        found is not None and lowest is not None and tuple(map(int, found.groups())) < tuple(map(int, lowest.groups()))
    )


def _gpus(machine: Machine) -> list[Finding]:
    if not machine.gpus:
        if machine.cuda is None:
            advice = "Install a torch built for CUDA to stream; on the CPU the step runs in plain torch."
        else:
            advice = "Check the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES; on the CPU the step runs in plain torch."
        built = f"torch is built for CUDA {machine.cuda}" if machine.cuda else "torch is built without CUDA"
        return [Finding("warning", "GPU", f"none; {built}", advice)]
    findings = []
    for index, gpu in enumerate(machine.gpus):
        name = f"GPU {index}"
        if gpu.error is not None:
            advice = "Look at nvidia-smi and dmesg; reset or restart, or leave it out (CUDA_VISIBLE_DEVICES)"
            findings.append(Finding("problem", name, gpu.error, advice))
            continue
        driver = f", driver {gpu.driver}" if gpu.driver else ""
        found = f"{gpu.name}, {gpu.memory_bytes / 1e9:.1f} GB, CUDA {machine.cuda}{driver}"
        findings += [Finding("ok", name, found), *_compiler(name, gpu, machine.versions.get("triton"))]
        findings += [_link(name, gpu), _pinning(name, gpu), *_bandwidth(name, gpu)]
        findings += _profile(name, gpu)
    return findings


def _compiler(name: str, gpu: Gpu, triton: str | None) -> list[Finding]:
    """Finding if Triton does not compile for the GPU."""
    if gpu.capability is None or gpu.capability < _BLACKWELL or not _is_older(triton, _BLACKWELL_TRITON):
        return []
    found = f"compute capability {gpu.capability[0]}.{gpu.capability[1]}, Triton {triton}"
    advice = f"Blackwell needs Triton {_BLACKWELL_TRITON} or newer: pip install 'torch>={OLDEST['torch']}' brings one"
    return [Finding("problem", f"{name}: compiler", found, advice)]


def _link(name: str, gpu: Gpu) -> Finding:
    what, link = f"{name}: link", gpu.link
    if gpu.nvml_error is not None:
        return Finding(
            "warning", what, f"unknown: {gpu.nvml_error}", "Look at nvidia-smi -q, or pip install nvidia-ml-py"
        )
    if link.generation is None or link.width is None:
        return Finding("ok", what, "hidden, as virtual machines do; the measured bandwidth counts")
    found = f"PCIe {link.generation} x{link.width}"
    full = f"PCIe {link.generation_max or link.generation} x{link.width_max or link.width}"
    advice = None
    if link.width < (link.width_max or link.width):
        advice = "Reseat the card, or put it into a slot with all lanes; see lspci -vv"
    elif link.generation < (link.generation_max or link.generation):
        advice = "Allow the higher generation in the firmware; look at risers and ASPM"
    return Finding("ok", what, found) if advice is None else Finding("warning", what, f"{found} of {full}", advice)


def _pinning(name: str, gpu: Gpu) -> Finding:
    if gpu.pin_error is None:
        return Finding("ok", f"{name}: page-locking", "64 MiB were page-locked")
    return Finding(
        "problem",
        f"{name}: page-locking",
        gpu.pin_error,
        "ulimit -l unlimited (containers: --ulimit memlock=-1), and free memory on host and GPU",
    )


def _bandwidth(name: str, gpu: Gpu) -> list[Finding]:
    expected = None
    if gpu.link.generation in _LANE_GBPS and gpu.link.width is not None:
        expected = _LANE_GBPS[gpu.link.generation] * gpu.link.width
    findings = []
    for direction, measured in (("host to device", gpu.h2d_gbps), ("device to host", gpu.d2h_gbps)):
        if measured is None:
            continue
        what, found = f"{name}: {direction}", f"{measured:.1f} GB/s alone"
        if expected is None:
            findings.append(Finding("ok", what, found))
            continue
        found += f", the link carries {expected:.1f}"
        if measured >= _GOOD_SHARE * expected:
            findings.append(Finding("ok", what, found))
        else:
            advice = "Stop what else uses the link or host memory; run on the GPU's NUMA node (numactl)"
            findings.append(Finding("warning", what, found, advice))
    return findings


def _together(machine: Machine) -> list[Finding]:
    """Finding about several GPUs of a host, which share its memory."""
    if machine.duplex_gbps is None:
        return []
    alone, together = machine.duplex_gbps
    what, found = "all GPUs at once", f"{together:.1f} GB/s each way and GPU, one by itself {alone:.1f}"
    if together >= _GOOD_SHARED * alone:
        return [Finding("ok", what, found)]
    advice = (
        f"They share the host's memory: fused-offload plan --link-gbps {together:.0f}, or --ranks-per-node after "
        "fused-offload tune. Fewer bytes a parameter, a share of the state on the GPU (fraction), a window and more "
        "tokens a step help"
    )
    return [Finding("warning", what, found, advice)]


def _profile(name: str, gpu: Gpu) -> list[Finding]:
    if not gpu.profile:
        return []
    if gpu.profile_is_outdated:
        return [Finding("warning", f"{name}: profile", gpu.profile, "fused-offload tune measures this machine again")]
    return [Finding("ok", f"{name}: profile", gpu.profile)]


def _numa(machine: Machine) -> list[Finding]:
    nodes = machine.numa_nodes
    if len(nodes) < 2:
        return [Finding("ok", "NUMA", "one node" if nodes else "not shown by the kernel")]
    free = ", ".join(f"node {node} {free / 1e9:.1f} GB free" for node, free in nodes.items())
    findings = [Finding("ok", "NUMA", f"{free}; this process runs on {_listed(sorted(machine.cpu_nodes))}")]
    for index, gpu in enumerate(machine.gpus):
        what = f"GPU {index}: NUMA node"
        if gpu.error is not None:
            continue
        if gpu.numa_node is None:
            findings.append(Finding("ok", what, "unknown"))
        elif gpu.numa_error is None:
            room = f"state is put there while it has room, {nodes.get(gpu.numa_node, 0) / 1e9:.1f} GB are free"
            findings.append(Finding("ok", what, f"{gpu.numa_node}; {room}"))
        elif machine.cpu_nodes == {gpu.numa_node}:
            findings.append(Finding("ok", what, f"{gpu.numa_node}, where this process runs"))
        else:
            advice = (
                f"numactl --cpunodebind={gpu.numa_node} --preferred={gpu.numa_node} for the process of this GPU, or "
                "allow it to choose (containers: --cap-add SYS_NICE)"
            )
            found = f"{gpu.numa_node}, memory may lie elsewhere: {gpu.numa_error}"
            findings.append(Finding("warning", what, found, advice))
        findings += _by_node(f"GPU {index}: memory by node", gpu)
    return findings


def _by_node(what: str, gpu: Gpu) -> list[Finding]:
    """Finding about the GPU's speed of reading from each NUMA node."""
    speeds = gpu.gbps_by_node
    if len(speeds) < 2:
        return []
    best = max(speeds, key=lambda node: speeds[node])
    found = ", ".join(f"node {node} {gbps:.1f} GB/s" for node, gbps in speeds.items())
    used = [gpu.numa_node] if gpu.numa_node in speeds else list(speeds)  # unknown: it may be any
    slow = [node for node in used if node is not None and speeds[node] < _GOOD_NODE_SHARE * speeds[best]]
    if not slow:
        return [Finding("ok", what, found)]
    advice = (
        f"State may lie on {_listed(slow)}: numactl --cpunodebind={best} --membind={best} for the process of this GPU"
    )
    return [Finding("warning", what, found, advice)]


def _listed(nodes: Sequence[int]) -> str:
    return "nodes " + ", ".join(map(str, nodes)) if len(nodes) != 1 else f"node {nodes[0]}"


def _host(machine: Machine) -> list[Finding]:
    free, total = machine.free_host_bytes, machine.host_bytes
    size = "" if total is None else f" of {total / 1e9:.1f} GB"
    if free is None:
        advice = "Nothing is checked before state is allocated: see that it fits (fused-offload plan), or mount /proc"
        findings = [Finding("warning", "host memory", "unknown: /proc/meminfo says nothing", advice)]
    else:
        found = f"{free / 1e9:.1f} GB{size} may be taken, limited by the {machine.host_limit}"
        level: Level = "ok"
        advice = ""
        if total is not None and free < _GOOD_ROOM * total:
            level, advice = "warning", "State has to fit into this (fused-offload plan); stop what else takes memory"
            if machine.host_limit == "cgroup":
                advice = (
                    "State has to fit into this (fused-offload plan); raise the memory limit of the container or job"
                )
        findings = [Finding(level, "host memory", found, advice)]
    limit = machine.memlock_bytes
    if limit is None:
        findings.append(Finding("ok", "RLIMIT_MEMLOCK", "unlimited"))
    elif total is not None and limit >= total:
        findings.append(Finding("ok", "RLIMIT_MEMLOCK", f"{limit / 1e9:.3f} GB, all of the host"))
    else:
        found = f"{limit / 2**10:.0f} KiB" if limit < 2**20 else f"{limit / 1e9:.3f} GB"
        if machine.gpus:
            advice = "If page-locking fails: ulimit -l unlimited (containers: --ulimit memlock=-1)"
            findings.append(Finding("warning", "RLIMIT_MEMLOCK", found, advice))
        else:
            findings.append(Finding("ok", "RLIMIT_MEMLOCK", f"{found}; nothing is page-locked without a GPU"))
    return findings


def _megatron(machine: Machine) -> list[Finding]:
    findings = []
    for what, module in (("TransformerEngine", "transformer_engine"), ("Megatron-Core", "megatron.core")):
        why = machine.missing[module]
        version, oldest = machine.versions.get("megatron-core"), OLDEST["megatron-core"]
        if module == "megatron.core" and why is None and _is_older(version, oldest):
            found = f"megatron-core {version}; {oldest} is the oldest tested"
            advice = f"pip install 'megatron-core>={oldest}', with Python 3.12 or newer"
            findings.append(Finding("warning", what, found, advice))
        elif why in (None, NOT_FOUND):
            findings.append(Finding("ok", what, f"{why or 'found'} (optional)"))
        else:
            found = f"found, but it cannot be imported: {why}"
            findings.append(
                Finding("warning", what, found, f"Install it again, or remove it: python -c 'import {module}'")
            )
    what, value = "FUSED_OFFLOAD_ADAM", machine.autoload
    if value in ("", "0"):
        findings.append(Finding("ok", what, "not set: Megatron is left as it is unless install() is called"))
    elif value != "1":
        findings.append(Finding("problem", what, repr(value), "Set it to 1 or 0; Megatron's import fails otherwise"))
    elif not machine.autoload_present:
        advice = "Install fused-offload again: _fused_offload_autoload is missing beside the package"
        findings.append(Finding("problem", what, "1, but it has no effect", advice))
    elif machine.missing["megatron.core"] == NOT_FOUND:
        findings.append(Finding("warning", what, "1, but there is no Megatron-Core", "pip install megatron-core"))
    else:
        findings.append(Finding("ok", what, "1: fused_offload.megatron is installed when Megatron is imported"))
    return findings
