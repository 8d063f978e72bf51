"""State takes its own size of host memory: no second copy at any time, nothing that cannot fit, all
given back.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fused_offload import FusedOffloadAdam, OffloadConfig
from fused_offload.memory import host_limits, pinned
from fused_offload.memory.pinned import PinnedSlab
from fused_offload.state import storage

MB = 10**6


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def make_params(device: torch.device, numels: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> list[Any]:
    return [torch.nn.Parameter(torch.ones(numel, dtype=dtype, device=device)) for numel in numels]


def step(optimizer: FusedOffloadAdam, params: list[Any]) -> None:
    for param in params:
        param.grad = torch.full_like(param, 0.5)
    optimizer.step()


# -- measured in processes of their own ------------------------------------------------------------

_PRELUDE = """
import gc, json, re, sys
import torch
from fused_offload import FusedOffloadAdam

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

def mb(field):
    with open("/proc/self/status") as status:
        return int(re.search(field + r":\\s+(\\d+) kB", status.read())[1]) * 1024 / 1e6

def make(numel, count=4):
    params = [torch.nn.Parameter(torch.ones(numel, dtype=torch.bfloat16, device=DEVICE)) for _ in range(count)]
    for param in params:
        param.grad = torch.full_like(param, 0.5)
    return params

def values(params, dtypes):
    # what a checkpoint holds
    state = {
        index: {key: torch.ones(param.shape, dtype=dtype) for key, dtype in dtypes.items()}
        for index, param in enumerate(params)
    }
    group = FusedOffloadAdam(params).state_dict()["param_groups"][0]
    return {"state": state, "param_groups": [{**group, "step": 1}]}

FORMATS = {
    "fp32": dict(master_weights=True),
    "remainder-bf16": dict(
        master_weights=True,
        store_param_remainders=True,
        exp_avg_dtype=torch.bfloat16,
        exp_avg_sq_dtype=torch.bfloat16,
    ),
    "fp16": dict(
        master_weights=True,
        master_weight_dtype=torch.float16,
        exp_avg_dtype=torch.float16,
        exp_avg_sq_dtype=torch.float16,
    ),
}
FORMAT = FORMATS[sys.argv[1]]
warm = make(200_000, count=1)
optimizer = FusedOffloadAdam(warm, **FORMAT)
optimizer.step()
FusedOffloadAdam(warm, **FORMAT).load_state_dict(optimizer.state_dict())  # loads and compiles whatever a step needs
optimizer.close()
gc.disable()
found = {}
"""


def measure(script: str, format: str) -> dict[str, float]:
    code = _PRELUDE + script + "\nprint(json.dumps(found))\n"
    # Freed blocks go back to the system at once, so that what is measured does not depend on what
    # ran before.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", code, format]
    run = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment)
    assert run.returncode == 0, run.stderr
    found: dict[str, float] = json.loads(run.stdout.splitlines()[-1])
    return found


_LIFE = """
params = make({step_numel})
before = mb("VmRSS")
optimizer = FusedOffloadAdam(params, **FORMAT)
found["build"] = mb("VmRSS") - before
optimizer.step()
found["step"], found["step_peak"] = mb("VmRSS") - before, mb("VmHWM") - before
optimizer.close()
found["closed"] = mb("VmRSS") - before

del optimizer, params
gc.collect()
params = make({load_numel})
for param in params:
    param.grad = None
saved = values(params, {{"exp_avg": torch.float32, "exp_avg_sq": torch.float32, "master_param": torch.{master}}})
before = mb("VmRSS")
optimizer = FusedOffloadAdam(params, **FORMAT)
optimizer.load_state_dict(saved)
found["load"], found["load_peak"] = mb("VmRSS") - before, mb("VmHWM") - before
peak = mb("VmHWM")
again = optimizer.state_dict()
optimizer.load_state_dict(again)
found["save"] = mb("VmRSS") - before - found["load"]
found["save_peak"] = mb("VmHWM") - peak
del again
optimizer.state.clear()
found["cleared"] = mb("VmRSS") - before
optimizer.load_state_dict(saved)
found["restart"], found["restart_peak"] = mb("VmRSS") - before, mb("VmHWM") - before
del optimizer
gc.collect()
found["deleted"] = mb("VmRSS") - before

rounds = []
for _ in range(4):
    optimizer = FusedOffloadAdam(params, **FORMAT)
    optimizer.load_state_dict(saved)
    optimizer.close()
    rounds.append(mb("VmRSS"))
found["growth"] = rounds[-1] - rounds[0]
"""

BYTES_PER_PARAMETER = {"fp32": 12.0, "remainder-bf16": 6.0, "fp16": 6.0 + 3 * 4 / 128}
LOADED_NUMEL = {"fp32": 5_000_000, "remainder-bf16": 5_000_000, "fp16": 2_500_000}


@pytest.mark.parametrize("format", BYTES_PER_PARAMETER)
def test_state_is_never_held_twice(format: str) -> None:
    step_numel = 750_000
    load_numel = LOADED_NUMEL[format]
    master = "int16" if format == "remainder-bf16" else "float32"
    found = measure(_LIFE.format(step_numel=step_numel, load_numel=load_numel, master=master), format)
    stepped = BYTES_PER_PARAMETER[format] * 4 * step_numel / MB
    loaded = BYTES_PER_PARAMETER[format] * 4 * load_numel / MB
    noise = 4  # MB: allocator, threads, transparent huge pages at the ends of mappings
    blocks = 9 if format == "fp16" else 0  # MB, for converting 2**20 elements
    assert noise < stepped / 3 * 0.98  # a second copy of even one key would be larger
    assert blocks + noise < loaded / 3 * 0.98

    assert found["build"] < noise
    assert stepped * 0.98 < found["step"] < stepped * 1.02 + noise
    assert found["step_peak"] < stepped * 1.02 + noise
    assert found["closed"] < stepped * 0.1 + noise

    assert loaded * 0.98 < found["load"] < loaded * 1.02 + noise
    assert found["load_peak"] < loaded * 1.02 + noise + blocks
    if format != "fp16":  # which is saved as float32
        assert found["save"] < noise
        assert found["save_peak"] < noise
    assert found["cleared"] < loaded * 0.1 + noise
    if format != "fp16":
        assert found["restart_peak"] < loaded * 1.02 + noise + blocks
    assert found["deleted"] < loaded * 0.1 + noise
    assert found["growth"] < loaded * 0.1


# -- what is allocated -----------------------------------------------------------------------------


class Slabs:
    """Sizes of the slabs that were made, and which of them is refused."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.refused: int | None = None

    def make(self, nbytes: int, *, pin: bool, **_: Any) -> PinnedSlab:
        if self.refused == len(self.sizes):
            raise RuntimeError("no more memory")
        self.sizes.append(nbytes)
        return PinnedSlab(nbytes, pin=pin)


@pytest.fixture
def slabs(monkeypatch: pytest.MonkeyPatch) -> Slabs:
    slabs = Slabs()
    monkeypatch.setattr(storage, "PinnedSlab", slabs.make)
    return slabs


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("exp_avg_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("exp_avg_sq_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("master", ["none", "fp32", "fp16", "remainder"])
def test_bytes_of_each_format(
    device: torch.device, slabs: Slabs, exp_avg_dtype: torch.dtype, exp_avg_sq_dtype: torch.dtype, master: str
) -> None:
    numels = (1, 127, 20_000, 70_001)
    params = make_params(device, numels)
    optimizer = FusedOffloadAdam(
        params,
        master_weights=master != "none",
        master_weight_dtype=torch.float16 if master == "fp16" else torch.float32,
        store_param_remainders=master == "remainder",
        exp_avg_dtype=exp_avg_dtype,
        exp_avg_sq_dtype=exp_avg_sq_dtype,
    )
    step(optimizer, params)
    report = optimizer.memory_report()
    assert sum(report.host_bytes.values()) == sum(slabs.sizes)
    assert report.resident_bytes == {}
    assert report.param_numel == sum(numels)
    assert report.pinned == (device.type == "cuda")
    itemsize = {"exp_avg": exp_avg_dtype.itemsize, "exp_avg_sq": exp_avg_sq_dtype.itemsize}
    if master != "none":
        itemsize["master_param"] = 4 if master == "fp32" else 2
    assert report.host_bytes.keys() == itemsize.keys()
    for key, size in itemsize.items():
        smallest = sum(numels) * size
        assert smallest <= report.host_bytes[key] <= smallest * 1.02 + 256 * size * len(numels)


def test_nothing_is_allocated_before_it_is_needed(device: torch.device, slabs: Slabs) -> None:
    params = make_params(device, (1000, 2000))
    optimizer = FusedOffloadAdam(params)
    optimizer.state_dict()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()
    assert slabs.sizes == []
    assert optimizer.memory_report().host_bytes == {}
    step(optimizer, params)
    assert len(slabs.sizes) == 1
    for _ in range(3):
        step(optimizer, params)
    assert len(slabs.sizes) == 1


@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.5, 1.0])
def test_fraction_divides_the_bytes(device: torch.device, slabs: Slabs, fraction: float) -> None:
    params = make_params(device, (10_000,) * 10)
    optimizer = FusedOffloadAdam(params, offload=OffloadConfig(fraction=fraction))
    step(optimizer, params)
    report = optimizer.memory_report()
    host, resident = sum(report.host_bytes.values()), sum(report.resident_bytes.values())
    assert host == sum(slabs.sizes)
    assert host + resident == pytest.approx(10 * 10_000 * 8, rel=0.02)
    assert host / (host + resident) == pytest.approx(fraction, abs=0.01)


def test_late_groups_get_storage_of_their_own(device: torch.device, slabs: Slabs) -> None:
    first, second = make_params(device, (10_000,)), make_params(device, (20_000,))
    optimizer = FusedOffloadAdam(first)
    step(optimizer, first)
    address = optimizer.state[first[0]]["exp_avg"].data_ptr()
    optimizer.add_param_group({"params": second})
    step(optimizer, first + second)
    assert len(slabs.sizes) == 2
    assert optimizer.state[first[0]]["exp_avg"].data_ptr() == address
    assert optimizer.memory_report().param_numel == 30_000


def test_state_without_elements_takes_nothing(device: torch.device, slabs: Slabs) -> None:
    params = [torch.nn.Parameter(torch.empty(shape, device=device)) for shape in ((0,), (4, 0))]
    optimizer = FusedOffloadAdam(params, master_weights=True, exp_avg_dtype=torch.float16)
    step(optimizer, params)
    optimizer.load_state_dict(optimizer.state_dict())
    step(optimizer, params)
    assert slabs.sizes == []
    report = optimizer.memory_report()
    assert (report.host_bytes, report.resident_bytes, report.param_numel, report.pinned) == ({}, {}, 0, False)
    assert optimizer.state[params[1]]["exp_avg"].shape == (4, 0)
    optimizer.close()


def test_views_stay_readable_after_all_else_is_gone(device: torch.device) -> None:
    params = make_params(device, (5000,))
    optimizer = FusedOffloadAdam(params)
    step(optimizer, params)
    view = optimizer.state[params[0]]["exp_avg"]
    expected = view.clone()
    optimizer.close()
    del optimizer, params
    gc.collect()
    other = make_params(device, (5000,))
    step(FusedOffloadAdam(other), other)
    assert torch.equal(view, expected)
    view.fill_(3.0)
    assert (view == 3.0).all()


@pytest.mark.parametrize("partly", [True, False], ids=["one parameter of two", "all"])
def test_close_keeps_nothing(device: torch.device, slabs: Slabs, partly: bool) -> None:
    params = make_params(device, (5000, 6000))
    optimizer = FusedOffloadAdam(params)
    for param in params[:1] if partly else params:
        optimizer.initialize_state(param)
    assert len(slabs.sizes) == 1
    optimizer.close()
    assert optimizer.memory_report().host_bytes == {}
    assert len(optimizer.state) == 0


# -- refusing in time ------------------------------------------------------------------------------


def limit_host(monkeypatch: pytest.MonkeyPatch, left: int) -> None:
    monkeypatch.setattr(host_limits, "available_host_bytes", lambda: (left, "cgroup"))


ALLOCATIONS: dict[str, Callable[[FusedOffloadAdam, list[Any]], Any]] = {
    "step": step,
    "load_state_dict": lambda optimizer, params: optimizer.load_state_dict(
        {
            "state": {
                index: {"exp_avg": torch.ones(param.shape), "exp_avg_sq": torch.ones(param.shape)}
                for index, param in enumerate(params)
            },
            "param_groups": [{**optimizer.state_dict()["param_groups"][0], "step": 3}],
        }
    ),
    "initialize_state": lambda optimizer, params: optimizer.initialize_state(params[0]),
    "set_scaled_state": lambda optimizer, params: optimizer.set_scaled_state(params[0], "exp_avg", torch.ones(100_000)),
    "writing to state": lambda optimizer, params: optimizer.state[params[0]].update(exp_avg=torch.ones(100_000)),
}


@pytest.mark.parametrize("way", ALLOCATIONS)
def test_too_little_memory_is_told_before_allocating(
    device: torch.device, slabs: Slabs, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    params = make_params(device, (100_000, 400_000))
    optimizer = FusedOffloadAdam(params, lr=0.1)
    groups = [dict(group) for group in optimizer.param_groups]
    with monkeypatch.context() as limited:
        limit_host(limited, 3_000_000)
        with pytest.raises(RuntimeError, match=r"needs 4\.00\d GB|needs 0\.004 GB") as raised:
            ALLOCATIONS[way](optimizer, params)
    assert "only 0.003 GB are left (limited by the cgroup)" in str(raised.value)
    assert slabs.sizes == []
    assert [dict(group) for group in optimizer.param_groups] == groups
    assert optimizer.memory_report().host_bytes == {}
    assert all((param == 1).all() for param in params)
    ALLOCATIONS[way](optimizer, params)  # once there is enough
    assert len(slabs.sizes) == 1
    step(optimizer, params)
    assert not (params[1] == 1).any()


def test_what_fits_exactly_is_taken(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    params = make_params(device, (128 * 100,))
    twins = make_params(device, (128 * 100,))
    measured = FusedOffloadAdam(twins)
    step(measured, twins)
    needed = sum(measured.memory_report().host_bytes.values())
    limit_host(monkeypatch, needed)
    step(FusedOffloadAdam(params), params)


def test_an_allocation_that_fails_half_way_leaves_nothing(device: torch.device, slabs: Slabs) -> None:
    halves = make_params(device, (5000,), torch.float16)
    params = make_params(device, (5000,)) + halves  # two layouts, so two slabs
    optimizer = FusedOffloadAdam(params)
    slabs.refused = 1
    with pytest.raises(RuntimeError, match="no more memory"):
        step(optimizer, params)
    assert optimizer.memory_report().host_bytes == {}
    assert "step" not in optimizer.param_groups[0]
    slabs.refused = None
    step(optimizer, params)
    assert optimizer.param_groups[0]["step"] == 1
    assert optimizer.memory_report().param_numel == 10_000


@pytest.fixture
def cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty tree of cgroups, and a process in the root of it."""
    root = tmp_path / "cgroup"
    root.mkdir()
    own = tmp_path / "self"
    own.write_text("0::/\n")
    monkeypatch.setattr(host_limits, "_CGROUP_ROOT", root)
    monkeypatch.setattr(host_limits, "_OWN_CGROUPS", own)
    return root


def write_cgroup(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


def test_without_a_cgroup_the_machine_is_the_limit(cgroups: Path) -> None:
    left, limit = host_limits.available_host_bytes()
    assert limit == "machine"
    assert left > 10**6


@pytest.mark.parametrize("stat", ["anon 3000\nfile 900\ninactive_file 250\n", None])
def test_limit_of_a_cgroup_v2(cgroups: Path, stat: str | None) -> None:
    write_cgroup(cgroups, memory__max=10_000, memory__current=4_000)
    if stat is not None:
        write_cgroup(cgroups, memory__stat=stat)
    assert host_limits.available_host_bytes() == (6_000 if stat is None else 6_250, "cgroup")


def test_limit_of_a_cgroup_v1(cgroups: Path) -> None:
    write_cgroup(
        cgroups / "memory",
        memory__limit_in_bytes=10_000,
        memory__usage_in_bytes=4_000,
        memory__stat="inactive_file 1\ntotal_inactive_file 500\n",
    )
    assert host_limits.available_host_bytes() == (6_500, "cgroup")


@pytest.mark.parametrize(
    ("own", "base"),
    [
        ("0::/job/task\n", "."),
        ("12:cpu,cpuacct:/elsewhere\n5:memory:/job/task\n", "memory"),
        ("3:cpu,memory:/job/task\n", "memory"),
    ],
    ids=["v2", "v1", "v1, mounted together"],
)
def test_the_tightest_cgroup_above_the_process_counts(
    cgroups: Path, monkeypatch: pytest.MonkeyPatch, own: str, base: str
) -> None:
    (cgroups.parent / "self").write_text(own)
    names = ("memory__max", "memory__current") if base == "." else ("memory__limit_in_bytes", "memory__usage_in_bytes")

    def write(folder: Path, limit: object, usage: int) -> None:
        write_cgroup(folder, **dict(zip(names, (limit, usage), strict=True)))

    unlimited = "max" if base == "." else 9223372036854771712
    write(cgroups / base / "job" / "task", unlimited, 10)
    write(cgroups / base / "other", 5, 0)
    assert host_limits.available_host_bytes()[1] == "machine"
    write(cgroups / base / "job", 9_000, 1_000)
    assert host_limits.available_host_bytes() == (8_000, "cgroup")
    write(cgroups / base / "job" / "task", 5_000, 700)
    assert host_limits.available_host_bytes() == (4_300, "cgroup")
    write(cgroups / base / "job", 9_000, 9_500)  # over its limit
    assert host_limits.available_host_bytes() == (0, "cgroup")


def test_a_cgroup_that_is_slowed_down_is_as_good_as_full(cgroups: Path) -> None:
    write_cgroup(cgroups, memory__max=10_000, memory__high=7_000, memory__current=4_000)
    assert host_limits.available_host_bytes() == (3_000, "cgroup")


def test_what_the_kernel_says_otherwise_is_passed_over(cgroups: Path) -> None:
    odd = b"no colons\n4:memory\n0::/a\xff/job\n"
    (cgroups.parent / "self").write_bytes(odd)
    write_cgroup(cgroups, memory__max=10_000, memory__current=4_000, memory__stat="inactive_file many\nnothing\n")
    assert host_limits.available_host_bytes() == (6_000, "cgroup")
    own = Path(os.fsdecode(os.fsencode(cgroups) + b"/a\xff/job"))
    write_cgroup(own, memory__max=9_000, memory__current=4_000)
    assert host_limits.available_host_bytes() == (5_000, "cgroup")


@pytest.mark.parametrize("meminfo", [None, "", "MemTotal: 32 kB\n", "MemTotal: 8 kB\nMemAvailable: many kB\n"])
def test_where_the_kernel_says_nothing_nothing_is_checked(
    cgroups: Path, device: torch.device, slabs: Slabs, meminfo: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = cgroups.parent / "meminfo"
    if meminfo is not None:
        path.write_text(meminfo)
    monkeypatch.setattr(host_limits, "_MEMINFO", path)
    assert host_limits.available_host_bytes() == (None, "unknown")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    params = make_params(device, (1_000,))
    step(FusedOffloadAdam(params), params)
    assert len(slabs.sizes) == 1
    write_cgroup(cgroups, memory__max=10_000, memory__current=4_000)
    assert host_limits.available_host_bytes() == (6_000, "cgroup")


def test_the_machine_is_read(cgroups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = cgroups.parent / "meminfo"
    path.write_text("MemTotal:       32000 kB\nMemFree:  9 kB\nMemAvailable:   8000 kB\nVmallocUsed: 7 kB\n")
    monkeypatch.setattr(host_limits, "_MEMINFO", path)
    assert host_limits.available_host_bytes() == (8_000 * 1024, "machine")
    assert host_limits.host_bytes() == 32_000 * 1024


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("used_by_others", [0, 900])
@pytest.mark.parametrize("cache", [0, 3_000])
def test_equal_ranks_are_refused_where_they_do_not_fit_together_and_only_there(
    cgroups: Path, ranks: int, used_by_others: int, cache: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many of them have already taken theirs."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    limit = 80_000
    fits = (limit - used_by_others) // ranks
    for has_theirs in range(ranks):
        for needed, is_taken in ((fits, True), (fits + 1, False)):
            used = used_by_others + has_theirs * needed
            write_cgroup(
                cgroups, memory__max=limit, memory__current=used + cache, memory__stat=f"inactive_file {cache}"
            )
            if is_taken:
                host_limits.check_host_bytes(needed)
                continue
            with pytest.raises(RuntimeError, match="of host memory, but only") as refused:
                host_limits.check_host_bytes(needed)
            told = f"for {ranks - has_theirs} ranks that allocate at the same time (LOCAL_WORLD_SIZE is {ranks};"
            assert (told in str(refused.value)) == (has_theirs < ranks - 1)


@pytest.mark.parametrize("ranks", ["", "0", "one", "-3", "1"])
def test_a_process_that_is_alone_may_take_all(cgroups: Path, ranks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    write_cgroup(cgroups, memory__max=10_000, memory__current=0)
    host_limits.check_host_bytes(10_000)
    host_limits.check_host_bytes(0)
    with pytest.raises(RuntimeError, match="are left \\(limited by the cgroup"):
        host_limits.check_host_bytes(10_001)


def test_an_address_space_that_is_too_small_is_told_with_its_limit() -> None:
    """In a process of its own: the limit is for all that it does."""
    program = """
import resource, torch
from fused_offload.memory.pinned import PinnedSlab
torch.zeros(1)
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + 10**7, resource.RLIM_INFINITY))
try:
    PinnedSlab(10**8, pin=False)
except RuntimeError as error:
    print(error)
"""
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "Linux refused to map 0.100 GB of host memory: Cannot allocate memory." in told
    assert "ulimit -v unlimited" in told


def test_a_cgroup_limit_reaches_the_optimizer(device: torch.device, cgroups: Path, slabs: Slabs) -> None:
    write_cgroup(cgroups, memory__max=2_000_000_000, memory__current=1_999_000_000)
    params = make_params(device, (500_000,))
    with pytest.raises(RuntimeError, match=r"needs 0\.004 GB .* only 0\.001 GB are left \(limited by the cgroup\)"):
        step(FusedOffloadAdam(params), params)
    assert slabs.sizes == []


def test_what_only_garbage_holds_is_collected_before_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cycle:
        def __init__(self) -> None:
            self.itself = self

    was_enabled = gc.isenabled()
    gc.disable()
    try:
        garbage = weakref.ref(Cycle())
        monkeypatch.setattr(host_limits, "available_host_bytes", lambda: (100 if garbage() is None else 10, "machine"))
        host_limits.check_host_bytes(50)
        with pytest.raises(RuntimeError, match="host memory"):
            host_limits.check_host_bytes(500)
    finally:
        if was_enabled:
            gc.enable()


def test_memory_that_is_dropped_in_a_capture_stays_locked_until_it_may_be_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Waiting for the device, as giving back does, would end the capture; garbage is collected at
    any time.
    """
    given_back: list[int] = []

    def unregister(address: int, device: torch.device | None) -> None:
        ranges = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
        # Otherwise it may belong to another slab.
        assert any(int(begin, 16) <= address < int(end, 16) for begin, end in ranges)
        given_back.append(address)

    gc.collect()
    monkeypatch.setattr(pinned, "_registered", [])
    monkeypatch.setattr(pinned.cuda_driver, "register_host_memory", lambda *_: None)
    monkeypatch.setattr(pinned.cuda_driver, "unregister_host_memory", unregister)
    slabs = [pinned.PinnedSlab(2**22 + 4096, pin=True) for _ in range(3)]
    addresses = [slab.bytes.data_ptr() for slab in slabs]
    with monkeypatch.context() as capturing:
        capturing.setattr(torch.cuda, "is_available", lambda: True)
        capturing.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        del slabs[0]
        slabs[0].close()
    assert given_back == []
    assert len(pinned._registered) == 2  # and held
    slabs.pop().close()
    assert sorted(given_back) == sorted(addresses)
    assert pinned._registered == []


def test_memory_is_given_back_also_where_nothing_can_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an error of the device every question raises that error again."""
    given_back: list[int] = []
    monkeypatch.setattr(pinned.cuda_driver, "register_host_memory", lambda *_: None)
    monkeypatch.setattr(
        pinned.cuda_driver, "unregister_host_memory", lambda address, device: given_back.append(address)
    )
    slab = pinned.PinnedSlab(4096, pin=True)
    address = slab.bytes.data_ptr()

    def raises() -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with monkeypatch.context() as broken:
        broken.setattr(torch.cuda, "is_available", lambda: True)
        broken.setattr(torch.cuda, "is_current_stream_capturing", raises)
        slab.close()
    assert given_back == [address]


def test_memory_is_page_locked_and_given_back_in_the_context_of_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of the current one, which may have no context yet and gets none. Locking waits for
    nothing.
    """
    current, seen = [torch.device("cuda", 0)], []

    class Driver:
        def cuMemHostRegister_v2(self, *_: int) -> int:
            seen.append(("register", current[-1]))
            return 0

        def cuMemHostUnregister(self, _: int) -> int:
            seen.append(("unregister", current[-1]))
            return 0

    @contextlib.contextmanager
    def device_context(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    device = torch.device("cuda", 1)
    monkeypatch.setattr(pinned.cuda_driver, "_driver", Driver)
    monkeypatch.setattr(torch.cuda, "device", device_context)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: seen.append(("bind", device)))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: seen.append(("wait", device)))
    pinned.PinnedSlab(4096, pin=True, device=device).close()
    assert seen == [(name, device) for name in ("bind", "register", "wait", "unregister")]
