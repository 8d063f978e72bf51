"""fused-offload doctor: findings on made-up machines, reading of made-up sysfs and NVML, exit
codes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fused_offload import cli
from fused_offload.memory import numa
from fused_offload.memory.pinned import PinnedSlab
from fused_offload.profiles import profile_files as profiles
from fused_offload.profiles.profile_files import Found
from fused_offload.tuning import doctor, doctor_command, machine
from fused_offload.tuning.doctor import Finding, examine, exit_code
from fused_offload.tuning.machine import NOT_FOUND, Gpu, Link, Machine, read_machine

PCIE_5_X16 = Link(generation=5, generation_max=5, width=16, width_max=16)
H100 = Gpu(name="H100", memory_bytes=85 * 10**9, driver="580", link=PCIE_5_X16, h2d_gbps=54.0, d2h_gbps=54.5)
GOOD = Machine(
    cuda="13.0",
    gpus=(H100,),
    memlock_bytes=None,
    host_bytes=128 * 10**9,
    free_host_bytes=120 * 10**9,
    host_limit="machine",
    numa_nodes={0: 120 * 10**9},
    cpu_nodes=frozenset({0}),
    versions={"fused-offload": "0.1.0", "torch": "2.11", "triton": "3.6", "megatron-core": None},
    missing={"transformer_engine": NOT_FOUND, "megatron.core": None},
    autoload="",
    autoload_present=True,
)


def with_gpu(**changes: Any) -> Machine:
    return dataclasses.replace(GOOD, gpus=(dataclasses.replace(H100, **changes),))


def found(subject: Machine, what: str) -> Finding:
    [finding] = [finding for finding in examine(subject) if finding.what == what]
    return finding


def test_a_good_machine() -> None:
    findings = examine(GOOD)
    assert {finding.level for finding in findings} == {"ok"}
    assert exit_code(findings) == 0


def test_gpus_that_do_not_disturb_each_other() -> None:
    assert found(dataclasses.replace(GOOD, duplex_gbps=(47.0, 46.0)), "all GPUs at once").level == "ok"


def test_only_gpus_that_work_are_measured_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "duplex_gbps", lambda devices: 60.0 / len(devices) - 10 * (devices[0].index == 2))
    broken = dataclasses.replace(H100, error="lost")
    assert machine._alone_and_together([H100, broken]) is None
    assert machine._alone_and_together([H100, broken, H100]) == (50.0, 30.0)


BAD = [
    (with_gpu(link=Link(generation=3, generation_max=5, width=16, width_max=16)), "GPU 0: link", "warning", "PCIe 3"),
    (with_gpu(link=Link(generation=3, generation_max=3, width=8, width_max=16)), "GPU 0: link", "warning", "x8"),
    (with_gpu(nvml_error="No module named 'pynvml'"), "GPU 0: link", "warning", "pynvml"),
    (with_gpu(h2d_gbps=20.0), "GPU 0: host to device", "warning", "20.0 GB/s"),
    (with_gpu(d2h_gbps=20.0), "GPU 0: device to host", "warning", "20.0 GB/s"),
    (dataclasses.replace(GOOD, duplex_gbps=(47.0, 19.4)), "all GPUs at once", "warning", "19.4 GB/s each way and GPU"),
    (with_gpu(error="RuntimeError: uncorrectable ECC error"), "GPU 0", "problem", "ECC"),
    (
        dataclasses.replace(
            with_gpu(numa_node=0, gbps_by_node={0: 20.0, 1: 50.0}), numa_nodes={0: 10**9, 1: 2 * 10**9}
        ),
        "GPU 0: memory by node",
        "warning",
        "node 0 20.0 GB/s, node 1 50.0 GB/s",
    ),
    (
        dataclasses.replace(with_gpu(gbps_by_node={0: 50.0, 1: 20.0}), numa_nodes={0: 10**9, 1: 2 * 10**9}),
        "GPU 0: memory by node",
        "warning",
        "node 1 20.0 GB/s",
    ),
    (
        dataclasses.replace(GOOD, missing={"transformer_engine": "OSError: libcudnn", "megatron.core": None}),
        "TransformerEngine",
        "warning",
        "cannot be imported: OSError: libcudnn",
    ),
    (
        dataclasses.replace(GOOD, versions={**GOOD.versions, "megatron-core": "0.16.1"}),
        "Megatron-Core",
        "warning",
        "megatron-core 0.16.1; 0.17 is the oldest tested",
    ),
    (with_gpu(pin_error="refused [why]", h2d_gbps=None), "GPU 0: page-locking", "problem", "refused"),
    (dataclasses.replace(GOOD, memlock_bytes=64 * 2**10), "RLIMIT_MEMLOCK", "warning", "64 KiB"),
    (
        dataclasses.replace(GOOD, free_host_bytes=16 * 10**9, host_limit="cgroup"),
        "host memory",
        "warning",
        "limited by the cgroup",
    ),
    (
        dataclasses.replace(GOOD, host_bytes=None, free_host_bytes=None, host_limit="unknown"),
        "host memory",
        "warning",
        "unknown",
    ),
    (
        dataclasses.replace(GOOD, host_bytes=None, free_host_bytes=None, host_limit="unknown", memlock_bytes=2**16),
        "RLIMIT_MEMLOCK",
        "warning",
        "64 KiB",
    ),
    (
        dataclasses.replace(with_gpu(capability=(10, 0)), versions={"triton": "3.2.0"}),
        "GPU 0: compiler",
        "problem",
        "compute capability 10.0, Triton 3.2.0",
    ),
    (
        dataclasses.replace(with_gpu(capability=(12, 1)), versions={"triton": "3.2.0+git"}),
        "GPU 0: compiler",
        "problem",
        "compute capability 12.1, Triton 3.2.0+git",
    ),
    (with_gpu(profile="ignored: too old", profile_is_outdated=True), "GPU 0: profile", "warning", "too old"),
    (dataclasses.replace(GOOD, gpus=()), "GPU", "warning", "built for CUDA 13.0"),
    (dataclasses.replace(GOOD, gpus=(), cuda=None), "GPU", "warning", "without CUDA"),
    (dataclasses.replace(GOOD, versions={"torch": "2.11", "triton": None}), "triton", "problem", "not installed"),
    (
        dataclasses.replace(GOOD, versions={"torch": "2.7.1+cu128", "triton": "3.4.0"}),
        "torch",
        "warning",
        "2.7.1+cu128; 2.8 is the oldest tested",
    ),
    (
        dataclasses.replace(GOOD, versions={"torch": "2.8.0", "triton": "3.3.1"}),
        "triton",
        "warning",
        "3.3.1; 3.4 is the oldest tested",
    ),
    (dataclasses.replace(GOOD, autoload="yes"), "FUSED_OFFLOAD_ADAM", "problem", "'yes'"),
    (dataclasses.replace(GOOD, autoload="1", autoload_present=False), "FUSED_OFFLOAD_ADAM", "problem", "no effect"),
    (
        dataclasses.replace(
            GOOD, autoload="1", missing=dict.fromkeys(("transformer_engine", "megatron.core"), NOT_FOUND)
        ),
        "FUSED_OFFLOAD_ADAM",
        "warning",
        "no Megatron-Core",
    ),
    (
        dataclasses.replace(
            with_gpu(numa_node=1, numa_error="Operation not permitted"), numa_nodes={0: 10**9, 1: 2 * 10**9}
        ),
        "GPU 0: NUMA node",
        "warning",
        "1, memory may lie elsewhere: Operation not permitted",
    ),
]


@pytest.mark.parametrize(("subject", "what", "level", "words"), BAD)
def test_bad_machines(subject: Machine, what: str, level: str, words: str) -> None:
    finding = found(subject, what)
    assert finding.level == level
    assert words in finding.found
    assert finding.advice
    assert exit_code(examine(subject)) == {"warning": 1, "problem": 2}[level]


@pytest.mark.parametrize(
    ("capability", "triton"), [((9, 0), "3.2.0"), ((8, 0), "2.9"), ((10, 0), "3.3.0"), ((12, 0), "4.0"), (None, "3.2")]
)
def test_triton_compiles_for_these(capability: tuple[int, int] | None, triton: str) -> None:
    subject = dataclasses.replace(with_gpu(capability=capability), versions={"triton": triton})
    assert "problem" not in {finding.level for finding in examine(subject)}


@pytest.mark.parametrize("version", ["0.17.0", "0.17", "0.20.1rc1", "1.0", "unknown", "dev.7"])
def test_a_megatron_that_is_not_old(version: str) -> None:
    subject = dataclasses.replace(GOOD, versions={**GOOD.versions, "megatron-core": version})
    assert found(subject, "Megatron-Core").level == "ok"


def test_half_of_the_host_is_enough() -> None:
    for free, level in ((GOOD.host_bytes // 2, "ok"), (GOOD.host_bytes // 2 - 1, "warning")):
        assert found(dataclasses.replace(GOOD, free_host_bytes=free), "host memory").level == level
    unknown = dataclasses.replace(GOOD, host_bytes=None)
    assert found(unknown, "host memory").found == "120.0 GB may be taken, limited by the machine"


@pytest.mark.parametrize("name", doctor.OLDEST)
def test_the_oldest_releases_are_those_that_pip_asks_for(name: str) -> None:
    required = [re.match(rf"{name}>=([\d.]+)", text) for text in importlib.metadata.requires("fused-offload") or []]
    assert [match[1] for match in required if match] == [doctor.OLDEST[name]]
    oldest = dataclasses.replace(GOOD, versions={**GOOD.versions, name: doctor.OLDEST[name]})
    assert exit_code(examine(oldest)) == 0
    # For instance 3.40.1.
    newer = dataclasses.replace(GOOD, versions={**GOOD.versions, name: f"{doctor.OLDEST[name]}0.1"})
    assert exit_code(examine(newer)) == 0


def test_what_is_as_good_as_it_gets() -> None:
    nodes = {0: 10**9, 1: 2 * 10**9}
    assert found(with_gpu(profile="none yet"), "GPU 0: profile").level == "ok"
    near = dataclasses.replace(with_gpu(numa_node=1, numa_error="no"), numa_nodes=nodes, cpu_nodes=frozenset({1}))
    assert found(near, "GPU 0: NUMA node").level == "ok"
    preferred = dataclasses.replace(with_gpu(numa_node=1), numa_nodes=nodes)
    assert "while it has room, 2.0 GB are free" in found(preferred, "GPU 0: NUMA node").found
    assert "node 1 2.0 GB free" in found(near, "NUMA").found
    fast = dataclasses.replace(with_gpu(numa_node=1, gbps_by_node={0: 20.0, 1: 50.0}), numa_nodes=nodes)
    assert found(fast, "GPU 0: memory by node").level == "ok"
    assert not [finding for finding in examine(preferred) if finding.what.endswith("by node")]
    hidden = with_gpu(link=Link())  # a virtual machine: nothing to compare the measured speed with
    assert exit_code(examine(hidden)) == 0
    # A link that is slow and known to be: the measured speed is what it gives.
    slow = with_gpu(link=Link(generation=3, generation_max=3, width=8, width_max=8), h2d_gbps=6.5, d2h_gbps=6.6)
    assert exit_code(examine(slow)) == 0
    active = dataclasses.replace(GOOD, autoload="1")
    assert "installed when Megatron is imported" in found(active, "FUSED_OFFLOAD_ADAM").found
    assert found(dataclasses.replace(GOOD, gpus=(), memlock_bytes=65536), "RLIMIT_MEMLOCK").level == "ok"


def test_advice_comes_with_everything_that_is_not_ok() -> None:
    for subject, *_ in BAD:
        assert all(bool(finding.advice) == (finding.level != "ok") for finding in examine(subject))


# -- reading ---------------------------------------------------------------------------------------


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """Two nodes of two CPUs, and a device on the second."""
    for node in (0, 1):
        folder = tmp_path / "devices" / "system" / "node" / f"node{node}"
        for cpu in (2 * node, 2 * node + 1):
            (folder / f"cpu{cpu}").mkdir(parents=True)
        (folder / "meminfo").write_text(f"Node {node} MemTotal: 9999 kB\nNode {node} MemFree:   {node + 1}000 kB\n")
    device = tmp_path / "bus" / "pci" / "devices" / "0000:3b:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    return tmp_path


def test_numa_nodes_are_read(sysfs: Path, tmp_path: Path) -> None:
    assert machine.read_numa_nodes(sysfs) == {0: 1_024_000, 1: 2_048_000}
    assert machine.read_cpu_nodes(sysfs, {2, 3}) == {1}
    assert machine.read_cpu_nodes(sysfs, {0, 3}) == {0, 1}
    assert numa.device_node("00000000:3B:00.0", sysfs) == 1
    assert numa.device_node("00000000:3C:00.0", sysfs) is None
    assert numa.pci_folder("10000:3B:00.0", sysfs).name == "10000:3b:00.0"  # of a VMD controller
    (sysfs / "bus/pci/devices/0000:3b:00.0/numa_node").write_text("-1\n")
    assert numa.device_node("00000000:3B:00.0", sysfs) is None
    assert machine.read_numa_nodes(tmp_path / "nothing") == {}


class FakeNvml:
    """The calls of ``pynvml`` that are used."""

    class NVMLError(Exception):
        """What the library raises."""

    def __init__(self, *, hides_width: bool = False, knows: str = "GPU-abc") -> None:
        self.hides_width = hides_width
        self.knows = knows
        self.is_open = False

    def nvmlInit(self) -> None:
        self.is_open = True

    def nvmlShutdown(self) -> None:
        self.is_open = False

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes) -> str:
        if uuid.decode() != self.knows:
            raise self.NVMLError("Not Found")
        return "handle"

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"580.1"

    def nvmlDeviceGetCurrPcieLinkGeneration(self, handle: str) -> int:
        return 3

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: str) -> int:
        return 5

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: str) -> int:
        if self.hides_width:
            raise self.NVMLError("Not Supported")
        return 8

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: str) -> int:
        return 16


def test_nvml_is_read() -> None:
    nvml = FakeNvml()
    facts = machine.read_nvml(lambda: nvml, "abc")
    link = Link(generation=3, generation_max=5, width=8, width_max=16)
    assert facts == {"driver": "580.1", "link": link}
    assert not nvml.is_open
    hidden = machine.read_nvml(lambda: FakeNvml(hides_width=True), "abc")
    assert hidden["link"].width is None


def test_nvml_may_be_missing_or_refuse() -> None:
    assert machine.read_nvml(no_nvml, "abc") == {"nvml_error": "No module named 'pynvml'"}
    nvml = FakeNvml()
    assert machine.read_nvml(lambda: nvml, "other") == {"nvml_error": "Not Found"}
    assert not nvml.is_open


def raising(error: Exception) -> Any:
    def fail(*_: Any) -> Any:
        raise error

    return fail


@pytest.mark.parametrize(
    ("name", "fails", "words"),
    [
        ("nvmlShutdown", raising(FakeNvml.NVMLError("Uninitialized")), "Uninitialized"),
        ("nvmlDeviceGetMaxPcieLinkWidth", raising(AttributeError("no such function")), "no such function"),
        ("nvmlSystemGetDriverVersion", lambda: b"\xff", "can't decode"),
        ("nvmlDeviceGetHandleByUUID", raising(AssertionError()), "AssertionError"),
    ],
)
def test_nvml_may_fail_in_any_way(name: str, fails: Any, words: str) -> None:
    nvml = FakeNvml()
    setattr(nvml, name, fails)
    assert words in machine.read_nvml(lambda: nvml, "abc")["nvml_error"]


def test_another_package_may_be_called_pynvml() -> None:
    other = SimpleNamespace(nvmlInit=lambda: None, nvmlShutdown=lambda: None)
    other.nvmlDeviceGetHandleByUUID = raising(RuntimeError("odd"))
    assert machine.read_nvml(lambda: other, "abc") == {"nvml_error": "odd"}


def test_this_machine_is_read(sysfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSED_OFFLOAD_ADAM", "1")
    monkeypatch.setattr(machine, "available_host_bytes", lambda: (123, "cgroup"))
    monkeypatch.setattr(machine.resource, "getrlimit", lambda _: (65536, 65536))
    monkeypatch.setattr(machine, "host_bytes", lambda: None)
    read = read_machine(sysfs)
    assert read.host_bytes is None
    assert (read.free_host_bytes, read.host_limit, read.memlock_bytes) == (123, "cgroup", 65536)
    assert read.autoload == "1"
    assert list(read.numa_nodes) == [0, 1]
    assert read.versions["torch"]
    assert examine(read)


def no_nvml() -> Any:
    raise ModuleNotFoundError("No module named 'pynvml'")


@pytest.mark.parametrize("nvml", [FakeNvml, no_nvml])
def test_every_gpu_is_read(nvml: Any, sysfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.cuda_driver, "pci_bus_id", lambda index: "0000:3B:00.0")
    monkeypatch.setattr(numa, "try_to_prefer", lambda node: f"refused {node}")
    monkeypatch.setattr(profiles, "of_device", lambda index: Found(None, "none yet"))
    properties = SimpleNamespace(name="H100", total_memory=85 * 10**9, uuid="abc", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    asked = []
    monkeypatch.setattr(machine, "_measure", lambda device, seconds, node: asked.append(seconds) or (None, 50.0, 51.0))
    gpus = read_machine(sysfs, nvml).gpus
    facts: dict[str, Any] = {"nvml_error": "No module named 'pynvml'"}
    if nvml is FakeNvml:
        facts = {"driver": "580.1", "link": Link(generation=3, generation_max=5, width=8, width_max=16)}
    expected = Gpu(
        name="H100",
        capability=(9, 0),
        memory_bytes=85 * 10**9,
        **facts,
        numa_node=1,
        numa_error="refused 1",
        h2d_gbps=50.0,
        d2h_gbps=51.0,
        profile="none yet",
    )
    assert gpus == (expected, expected)
    assert 2 * sum(asked) <= 1  # seconds, both directions of all GPUs


def test_each_node_is_measured_where_there_are_several(monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = {0: 20.0, 1: None, 2: 50.0}  # node 1 is full, say
    monkeypatch.setattr(machine, "_measure", lambda device, seconds, node: (None, speeds[node], 1.0))
    device = torch.device("cuda", 0)
    assert machine._gbps_by_node(device, 0.3, [0, 1, 2]) == {0: 20.0, 2: 50.0}
    assert machine._gbps_by_node(device, 0.3, [0]) == {}


def test_the_memory_of_a_gpu_is_no_host_memory(sysfs: Path) -> None:
    (sysfs / "devices/system/node/node2").mkdir()  # no CPU is on it
    assert machine._nodes_with_cpus(sysfs) == [0, 1]


@pytest.mark.parametrize(
    ("error", "bus", "words"),
    [
        (RuntimeError("uncorrectable ECC error"), "0000:3B:00.0", "ECC"),
        (torch.cuda.DeferredCudaCallError("failed lazily"), "0000:3B:00.0", "failed lazily"),
        (AssertionError("Invalid device id"), "0000:3B:00.0", "AssertionError: Invalid device id"),
        (None, "????:3B:00.0", "ValueError: invalid literal"),
    ],
)
def test_a_gpu_that_cannot_be_asked_hides_no_other(
    error: Exception | None, bus: str, words: str, sysfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def properties(index: int) -> Any:
        if index == 0 and error is not None:
            raise error
        return SimpleNamespace(name="H100", total_memory=85 * 10**9, uuid="abc", major=9, minor=0)

    monkeypatch.setattr(machine.cuda_driver, "pci_bus_id", lambda index: "0000:3B:00.0" if index else bus)
    monkeypatch.setattr(profiles, "of_device", lambda index: Found(None, "none yet"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(machine, "_measure", lambda device, seconds, node: (None, 50.0, 51.0))
    read = read_machine(sysfs, FakeNvml)
    assert [gpu.name for gpu in read.gpus] == ["cuda:0", "H100"]
    assert words in found(read, "GPU 0").found
    assert exit_code(examine(read)) == 2


def test_packages_that_fail_are_not_taken_for_missing_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = {
        "fails_in_its_way": "raise AttributeError('odd')",
        "lacks_another": "import is_not_there",
        "ends_the_process": "import sys; sys.exit(0)",
    }
    for name, body in bodies.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    assert machine._why_missing("is_not_there.part") == machine._why_missing("is_not_there") == NOT_FOUND
    assert machine._why_missing("fails_in_its_way.part") == "AttributeError: odd"
    assert machine._why_missing("lacks_another.part") == "ModuleNotFoundError: No module named 'is_not_there'"
    assert machine._why_missing("ends_the_process.part") == "SystemExit: 0"
    assert machine._why_missing("torch.cuda") is None


def test_what_packages_print_is_not_in_the_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prints_when_imported.py").write_text("print('hello')")
    monkeypatch.syspath_prepend(tmp_path)
    assert machine._why_missing("prints_when_imported") is None
    assert capsys.readouterr() == ("", "hello\n")


def test_no_word_of_the_table_is_cut(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = "/home/someuser/.local/share/fused-offload/profiles/NVIDIA-H100-80GB-HBM3-b9e0f0a47f29.json"
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(doctor_command, "read_machine", lambda: with_gpu(profile=f"of today, {path}"))
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "…" not in out
    column = "".join(line.split("│")[3].strip() for line in out.splitlines() if line.count("│") == 5)
    assert path in column


def test_copies_are_timed_and_refusals_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    # The CPU in the GPU's place: the copies are real, their speed means nothing.
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    slabs = []

    def slab(nbytes: int, *, pin: bool, numa_node: int | None, device: torch.device) -> PinnedSlab:
        assert pin
        assert device == torch.device("cpu")
        slabs.append(PinnedSlab(nbytes, pin=False))
        return slabs[-1]

    monkeypatch.setattr(machine, "PinnedSlab", slab)
    error, h2d, d2h = machine._measure(torch.device("cpu"), 0.01, None)
    assert error is None
    assert h2d is not None
    assert d2h is not None
    assert min(h2d, d2h) > 0
    assert len(slabs) == 1

    def refuse(nbytes: int, *, pin: bool, numa_node: int | None, device: torch.device) -> PinnedSlab:
        raise RuntimeError("The CUDA driver refused")

    monkeypatch.setattr(machine, "PinnedSlab", refuse)
    assert machine._measure(torch.device("cpu"), 0.01, None) == ("The CUDA driver refused", None, None)

    def no_memory(nbytes: int, *, pin: bool, numa_node: int | None, device: torch.device) -> PinnedSlab:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(machine, "PinnedSlab", no_memory)
    assert "Cannot allocate memory" in str(machine._measure(torch.device("cpu"), 0.01, None)[0])


@pytest.mark.gpu
def test_the_link_is_measured() -> None:
    gpu = read_machine().gpus[0]
    assert gpu.pin_error is None
    assert gpu.h2d_gbps
    assert gpu.h2d_gbps > 1
    assert gpu.d2h_gbps
    assert gpu.d2h_gbps > 1


# -- the command -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("subject", "code"), [(GOOD, 0), (with_gpu(h2d_gbps=20.0), 1), (with_gpu(pin_error="refused [why]"), 2)]
)
def test_exit_codes(
    subject: Machine, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor_command, "read_machine", lambda: subject)
    assert cli.main(["doctor"]) == code
    table = capsys.readouterr().out
    assert "H100" in table
    assert ("[why]" in table) == (code == 2)  # not taken for the markup of the table
    assert cli.main(["doctor", "--json"]) == code
    findings = [Finding(**finding) for finding in json.loads(capsys.readouterr().out)]
    assert findings == doctor.examine(subject)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_need_not_have_every_letter(encoding: str) -> None:
    program = (
        "import sys; from fused_offload import cli; from fused_offload.tuning import doctor_command as command\n"
        "from fused_offload.tuning.doctor import Finding\n"
        "command.read_machine = lambda: None; command.examine = lambda _: [Finding('ok', 'name', '\\u0159')]\n"
        "sys.exit(cli.main(['doctor']))"
    )
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert r"\u0159" in run.stdout
