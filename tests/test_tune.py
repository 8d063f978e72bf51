"""fused-offload tune: the command, the profiles that it keeps, and what goes by them."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import pwd
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import only_error
from tune_ways import timed

from fused_offload import OffloadConfig
from fused_offload.cli import main
from fused_offload.config import DEFAULT_CHUNK_BYTES, DEFAULT_DEPTH
from fused_offload.memory import cuda_driver
from fused_offload.plan.transfer_settings import Streaming, streaming_of
from fused_offload.profiles import machine_key
from fused_offload.profiles import profile_files as profiles
from fused_offload.profiles.machine_key import MachineKey
from fused_offload.profiles.profile import CHOICES, Choice, Profile, SharedLink, Timing, as_json, from_json
from fused_offload.profiles.profile_files import Found
from fused_offload.profiles.units import MIB
from fused_offload.step import devices
from fused_offload.tuning import candidates

KEY = MachineKey("NVIDIA H100 80GB HBM3", "32.0 GT/s PCIe x16", "Xeon, 16 CPUs, 1 NUMA nodes", {"torch": "2.11"})
SMALL = Choice(240_000_000, "zero_copy", 8 * MIB, 3, 32, 7.0, "because")
LARGE = Choice(3_000_000_000, "copy", 32 * MIB, 4, 64, 72.0, "because")
TIMINGS = (Timing(20_000_000, 240_000_000, 7.0), Timing(250_000_000, 3_000_000_000, 72.0))
NARROW_TIMINGS = (Timing(20_000_000, 120_000_000, 3.5), Timing(250_000_000, 1_500_000_000, 33.0))
SHARED_LINK = (SharedLink(2, 36.0), SharedLink(4, 20.0))
PROFILE = Profile(KEY, "2026-11-28T08:00+00:00", 47.0, (SMALL, LARGE), TIMINGS, NARROW_TIMINGS, SHARED_LINK)
ALONE = dataclasses.replace(PROFILE, shared_link=())
CUDA = torch.device("cuda", 0)


# -- profiles --------------------------------------------------------------------------------------


def test_a_profile_comes_back(tmp_path: Path) -> None:
    path = profiles.save(PROFILE, tmp_path / "new")
    assert profiles.load(path) == PROFILE
    assert profiles.find(KEY, tmp_path / "new") == Found(PROFILE, f"of {PROFILE.measured}, {path}")
    newer = dataclasses.replace(PROFILE, measured="2026-12-01")
    profiles.save(newer, tmp_path / "new")
    assert [file.name for file in (tmp_path / "new").iterdir()] == [path.name]
    assert profiles.find(KEY, tmp_path / "new").profile == newer


def test_a_profile_from_before_several_gpus_were_measured_is_taken(tmp_path: Path) -> None:
    path = profiles.save(PROFILE, tmp_path)
    record = json.loads(path.read_text())
    assert record.pop("shared_link") == [{"gpus": 2, "gbps": 36.0}, {"gpus": 4, "gbps": 20.0}]
    path.write_text(json.dumps(record))
    assert profiles.find(KEY, tmp_path).profile == ALONE


def test_a_folder_of_profiles_may_be_shared_and_is_left_clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = profiles.save(PROFILE, tmp_path)
    assert path.stat().st_mode & 0o777 == 0o644
    monkeypatch.setattr(profiles, "_FORMAT", 99)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(profiles.os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        profiles.save(PROFILE, tmp_path)
    assert list(tmp_path.iterdir()) == [path]
    monkeypatch.undo()
    assert profiles.load(path) == PROFILE


def test_no_profile(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        found = profiles.find(KEY, folder)
        assert found.profile is None
        assert not found.is_outdated
        assert "fused-offload tune" in found.reason


def test_a_profile_of_other_versions_is_ignored(tmp_path: Path) -> None:
    profiles.save(PROFILE, tmp_path)
    found = profiles.find(dataclasses.replace(KEY, versions={"torch": "2.12", "triton": "3.6"}), tmp_path)
    assert found == Found(None, "ignored: made with torch 2.11, now 2.12; triton none, now 3.6", is_outdated=True)


@pytest.mark.parametrize("field", ["gpu", "link", "host"])
def test_a_profile_of_another_machine_is_ignored(tmp_path: Path, field: str) -> None:
    profiles.save(PROFILE, tmp_path)
    found = profiles.find(dataclasses.replace(KEY, **{field: "another"}), tmp_path)
    assert found.profile is None
    assert f"there is one of {field} {getattr(KEY, field)}, here another" in found.reason


def test_a_profile_by_another_name(tmp_path: Path) -> None:
    path = profiles.save(PROFILE, tmp_path)
    path.rename(tmp_path / "mine.json")
    other = dataclasses.replace(KEY, gpu="another")
    profiles.save(dataclasses.replace(PROFILE, key=other), tmp_path).rename(tmp_path / "a.json")
    reason = profiles.find(KEY, tmp_path).reason
    assert reason == f"none of this machine; there is one, but it is called mine.json, not {KEY.file_name}"
    (tmp_path / "mine.json").rename(tmp_path / other.file_name)
    found = profiles.find(other, tmp_path)
    assert found.is_outdated
    assert f"is of gpu {KEY.gpu}, here another" in found.reason


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda record: record.update(format=1), "format is 1, not 2"),
        (lambda record: record.update(duplex_gbps=0), "duplex_gbps"),
        (lambda record: record.update(duplex_gbps=10**400), "duplex_gbps"),
        (lambda record: record.update(duplex_gbps="47"), "duplex_gbps"),
        (lambda record: record.update(duplex_gbps=5e-324), "duplex_gbps is not a number of at least 0.001"),
        (lambda record: record["key"].update(versions="2.11"), "versions"),
        (lambda record: record["key"].update(gpu=8), "texts"),
        (lambda record: record.pop("choices"), "choices"),
        (lambda record: record["choices"].clear(), "lacks choices"),
        (lambda record: record["choices"][0].update(depth=0), "whole numbers"),
        (lambda record: record["choices"][0].update(chunk_bytes="8"), "whole numbers"),
        (lambda record: record["choices"][0].update(transport="rdma"), "rdma"),
        (lambda record: record["choices"][0].update(state_bytes=10**400), "below 2^63"),
        (lambda record: record["choices"][0].update(ms=float("nan")), "lacks its time"),
        (lambda record: record["choices"][0].update(why=None), "its reason"),
        (lambda record: record["choices"][0].update(depth=2**62), "a choice has depth"),
        (lambda record: record["choices"][0].update(chunk_bytes=1), "a choice has chunk_bytes 1, fused-offload tune"),
        (lambda record: record["choices"][0].update(why="\x1b[2Jgone"), "not printable"),
        (lambda record: record["key"].update(gpu="H100\nok"), "not printable"),
        (lambda record: record["key"]["versions"].update({"\x1b": "1"}), "not printable"),
        (lambda record: record.update(measured="\x9b31m"), "not printable"),
        (lambda record: record["choices"][0].update({"\x1b[2J": 1}), r"argument '\x1b[2J'"),
        (lambda record: record["timings"][1].update(state_bytes=240_000_000), "ascending"),
        (lambda record: record["narrow_timings"][1].update(state_bytes=120_000_000), "ascending"),
        (lambda record: record["narrow_timings"][1].update(state_bytes=3_000_000_000), "fewer bytes a parameter"),
        (lambda record: record["timings"][0].update(ms=5e-324), "takes no time"),
        (lambda record: record["timings"][1].update(state_bytes=2**62), "more bytes than any machine"),
        (lambda record: record["timings"][1].update(state_bytes=3e9 + 0.5), "numbers above 0"),
        (lambda record: record["timings"][0].update(ms=None), "numbers above 0"),
        (lambda record: record["timings"][0].update(ms=True), "numbers above 0"),
        (lambda record: record["timings"][0].update(ms=float("inf")), "numbers above 0"),
        (lambda record: record["timings"][1].update(state_bytes=10**400), "below 2^63"),
        (lambda record: record["timings"].reverse(), "ascending"),
        (lambda record: record.update(narrow_timings=record["timings"]), "fewer bytes a parameter"),
        (lambda record: record["narrow_timings"].reverse(), "ascending"),
        (lambda record: record["narrow_timings"].pop(), "timings"),
        (lambda record: record.pop("narrow_timings"), "narrow_timings"),
        (lambda record: record["timings"].insert(0, record["timings"][1]), "ascending"),
        (lambda record: record["timings"].pop(), "timings"),
        (lambda record: record.update(shared_link=None), "NoneType"),
        (lambda record: record.update(shared_link=[20.0]), "must be a mapping"),
        (lambda record: record["shared_link"][0].pop("gbps"), "gbps"),
        (lambda record: record["shared_link"][0].update(gpus=1), "whole numbers of GPUs, at least 2"),
        (lambda record: record["shared_link"][0].update(gpus=2.0), "whole numbers of GPUs"),
        (lambda record: record["shared_link"][0].update(gpus=True), "whole numbers of GPUs"),
        (lambda record: record["shared_link"][0].update(gbps="36"), "a speed of shared_link is not a number"),
        (lambda record: record["shared_link"][1].update(gbps=float("nan")), "a speed of shared_link is not a number"),
        (lambda record: record["shared_link"][1].update(gpus=2), "shared_link is not by ascending"),
        (lambda record: record["shared_link"].reverse(), "shared_link is not by ascending"),
    ],
)
def test_a_damaged_profile_is_ignored(tmp_path: Path, damage: Any, words: str) -> None:
    path = profiles.save(PROFILE, tmp_path)
    record = json.loads(path.read_text())
    damage(record)
    path.write_text(json.dumps(record))
    found = profiles.find(KEY, tmp_path)
    assert found.profile is None
    assert found.is_outdated
    assert words in found.reason
    for text in ("{", "[" * 100_000):
        path.write_text(text)
        assert "no profile of this release" in profiles.find(KEY, tmp_path).reason


@pytest.mark.parametrize(
    ("change", "below", "least", "most", "above"),
    [
        (
            lambda record, value, name=name: record["choices"][0].update({name: value}),
            *(least - 1, least, most, most + 1),
        )
        for name, (least, most) in CHOICES.items()
    ]
    + [
        (lambda record, value: record.update(duplex_gbps=value), 9e-4, 1e-3, 2**63 - 1, 2**63),
        (
            lambda record, value: record["timings"][1].update(state_bytes=value),
            240_000_000,
            3 * 10**9,
            2**50 - 1,
            2**50,
        ),
        (lambda record, value: record["timings"][0].update(ms=value), 9e-7, 1e-6, 2**63 - 1, 2**63),
        (lambda record, value: record["shared_link"][1].update(gbps=value), 9e-4, 1e-3, 2**63 - 1, 2**63),
        (lambda record, value: record["shared_link"][1].update(gpus=value), 2, 3, 2**63 - 1, 2**63),
    ],
    ids=[*CHOICES, "link", "size", "time", "shared link", "GPUs"],
)
def test_bounds_of_a_profile(change: Any, below: Any, least: Any, most: Any, above: Any, tmp_path: Path) -> None:
    path = profiles.save(PROFILE, tmp_path)
    for value, is_taken in ((below, False), (least, True), (most, True), (above, False)):
        record = {"format": 2, **as_json(PROFILE)}
        change(record, value)
        path.write_text(json.dumps(record))
        assert (profiles.find(KEY, tmp_path).profile is not None) == is_taken, value


def test_whatever_tune_tries_is_within_the_bounds() -> None:
    tried = {
        "chunk_bytes": [mib * MIB for mib in candidates.CHUNK_MIB],
        "depth": candidates.DEPTHS,
        "programs": candidates.PROGRAMS,
    }
    assert {name: (min(values), max(values)) for name, values in tried.items()} == CHOICES


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (os.mkfifo, "no regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "no regular file"),
        (lambda path: path.mkdir(), "Is a directory"),
        (lambda path: path.symlink_to(path.name), "symbolic links"),
        (lambda path: path.write_bytes(b" " * (MIB + 1)), "larger than 1 MiB"),
        (lambda path: path.write_bytes(b"\xff"), "can't decode"),
    ],
    ids=["a pipe", "a device", "a folder", "a link to itself", "large", "no text"],
)
def test_what_is_no_file_is_neither_waited_for_nor_read(make: Any, words: str, tmp_path: Path) -> None:
    make(tmp_path / "mine.json")
    with pytest.raises(ValueError, match=words):
        profiles.load(tmp_path / "mine.json")
    assert profiles.find(KEY, tmp_path).reason.endswith("the others cannot be read")


@pytest.mark.parametrize(("folder", "file", "is_taken"), [(0, 0, True), (1, 1, True), (1, 0, False), (0, 1, True)])
def test_a_profile_of_another_user_is_not_trusted(
    folder: int, file: int, is_taken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But one in a folder of theirs, which was named, and one of root's."""
    me, owners = 4_242, {0: 1_717, 1: 4_242}
    path = profiles.save(PROFILE, tmp_path)
    real_stat, real_fstat = os.stat, os.fstat

    def owned(status: os.stat_result, owner: int) -> os.stat_result:
        return os.stat_result([*status[:4], owner, *status[5:]])

    monkeypatch.setattr(os, "geteuid", lambda: me)
    monkeypatch.setattr(os, "fstat", lambda number: owned(real_fstat(number), owners[file]))
    monkeypatch.setattr(
        Path, "stat", lambda self, **how: owned(real_stat(self, **how), owners[folder] if self == tmp_path else me)
    )
    found = profiles.find(KEY, tmp_path)
    monkeypatch.undo()
    assert (found.profile is not None) == is_taken
    assert is_taken or "belongs to another user" in found.reason
    assert path.exists()


@pytest.mark.parametrize(("mask", "is_named", "mode"), [(0o077, False, 0o600), (0, False, 0o644), (0o077, True, 0o644)])
def test_who_may_read_a_profile(
    mask: int, is_named: bool, mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("platformdirs")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setenv(profiles.FOLDER_VARIABLE, str(tmp_path) if is_named else "")
    before = os.umask(mask)
    try:
        path = profiles.save(PROFILE)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == mode


@pytest.mark.parametrize("when", ["open", "replace"])
def test_a_link_in_place_of_the_new_profile_changes_no_other_file(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another user of a shared folder could put it there at any time."""
    other = tmp_path / "other"
    other.write_text("secret")
    other.chmod(0o600)
    shared = tmp_path / "shared"
    original = getattr(os, when)

    def swap(*arguments: Any) -> Any:
        if when == "open":
            result = original(*arguments)
        for new in shared.glob("*.tmp"):
            new.unlink()
            new.symlink_to(other)
        return result if when == "open" else original(*arguments)

    monkeypatch.setattr(os, when, swap)
    profiles.save(PROFILE, shared)
    assert other.read_text() == "secret"
    assert other.stat().st_mode & 0o777 == 0o600


def test_a_profile_is_not_written_through_a_link_that_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    other.write_text("secret")
    monkeypatch.setattr(profiles.secrets, "token_hex", lambda size: "known")
    (tmp_path / "known.tmp").symlink_to(other)
    with pytest.raises(FileExistsError):
        profiles.save(PROFILE, tmp_path)
    assert other.read_text() == "secret"


def test_the_users_name_is_in_no_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    where = tmp_path / "profiles"
    path = profiles.save(PROFILE, where)
    shown = f"~/profiles/{path.name}"
    assert profiles.find(KEY, where).reason.endswith(shown)
    path.write_text("{")
    assert f"ignored: {shown} is no profile" in profiles.find(KEY, where).reason
    path.unlink()
    path.symlink_to(path.name)
    with pytest.raises(ValueError, match=re.escape(shown)) as refused:
        profiles.load(path)
    assert str(tmp_path) not in str(refused.value)
    for home, given, words in (
        ("/", "/profiles/a", "/profiles/a"),
        ("/home/u", "/home/user/a", "/home/user/a"),
        ("relative", "relative/a", "relative/a"),
        ("/home/u", "/home/u", "~"),
    ):
        monkeypatch.setenv("HOME", home)
        assert profiles.shown(Path(given)) == words


def test_the_key_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "device_name", lambda index: f"GPU {index}")
    monkeypatch.setattr(cuda_driver, "pci_bus_id", lambda index: "0000:3B:00.0")
    monkeypatch.setattr(cuda_driver, "driver_version", lambda: "13.0")
    assert machine_key.read_key(1, tmp_path).link == "unknown"
    device = tmp_path / "bus" / "pci" / "devices" / "0000:3b:00.0"
    device.mkdir(parents=True)
    (device / "max_link_speed").write_text("32.0 GT/s PCIe\n")
    (device / "current_link_width").write_text("8\n")
    key = machine_key.read_key(1, tmp_path)
    assert (key.gpu, key.link) == ("GPU 1", "32.0 GT/s PCIe x8")
    monkeypatch.setattr(cuda_driver, "device_name", lambda index: "GPU\x1b[2J")
    assert machine_key.read_key(1, tmp_path).gpu == r"GPU\x1b[2J"
    assert key.host.endswith("1 NUMA nodes")
    assert key.versions["CUDA driver"] == "13.0"
    assert key.versions["torch"] != "none"


def test_the_name_of_a_cpu_may_be_anything(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_bytes(b"model name\t: Xe\xffon\n")
    monkeypatch.setattr(machine_key, "_CPUINFO", tmp_path / "cpuinfo")
    assert machine_key._cpu_name() == "Xe\ufffdon"


def test_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(profiles.FOLDER_VARIABLE, str(tmp_path))
    assert profiles.folder() == tmp_path
    monkeypatch.delenv(profiles.FOLDER_VARIABLE)
    pytest.importorskip("platformdirs")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert profiles.folder() == tmp_path / "fused-offload" / "profiles"


def test_the_folder_may_be_in_the_users_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(profiles.FOLDER_VARIABLE, "~/profiles")
    assert profiles.folder() == tmp_path / "profiles"
    monkeypatch.setenv(profiles.FOLDER_VARIABLE, "~nobody-of-this-name/profiles")
    with pytest.raises(OSError, match=r"FUSED_OFFLOAD_PROFILES is '~nobody-of-this-name/profiles', .* whole path"):
        profiles.folder()


def test_a_user_without_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in containers that run as any number: not a folder called ~ below wherever the program was
    started.
    """
    pytest.importorskip("platformdirs")

    def unknown(number: int) -> None:
        raise KeyError(number)

    for name in ("HOME", "XDG_DATA_HOME", profiles.FOLDER_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(OSError, match=r"no home folder .* set FUSED_OFFLOAD_PROFILES"):
        profiles.folder()
    monkeypatch.setattr(profiles, "read_key", lambda index: KEY)
    profiles.of_device.cache_clear()
    try:
        assert profiles.of_device(0).reason.startswith("none: this user has no home folder")
    finally:
        profiles.of_device.cache_clear()


@pytest.fixture
def fresh_lookup() -> Iterator[None]:
    profiles.of_device.cache_clear()
    yield
    profiles.of_device.cache_clear()


@pytest.mark.usefixtures("fresh_lookup")
def test_the_log_says_what_is_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(profiles.FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(profiles, "read_key", lambda index: KEY)
    profiles.save(PROFILE)
    with caplog.at_level(logging.INFO, "fused_offload"):
        assert profiles.of_device(0).profile == PROFILE
        assert profiles.of_device(0).profile == PROFILE
    [record] = caplog.records
    assert record.levelno == logging.INFO
    monkeypatch.setattr(profiles, "read_key", lambda index: dataclasses.replace(KEY, versions={"torch": "3"}))
    assert profiles.of_device(1).profile is None
    assert caplog.records[-1].levelno == logging.WARNING
    assert "made with torch 2.11, now 3 (fused-offload tune" in caplog.records[-1].getMessage()

    def no_driver(index: int) -> MachineKey:
        raise OSError("libcuda.so.1 is missing")

    monkeypatch.setattr(profiles, "read_key", no_driver)
    assert "libcuda.so.1 is missing" in profiles.of_device(2).reason
    monkeypatch.setattr(profiles, "read_key", lambda index: int("????", 16))
    assert "invalid literal" in profiles.of_device(3).reason


# -- what goes by them -----------------------------------------------------------------------------


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles, "of_device", lambda index: Found(PROFILE, "made up"))


@pytest.mark.usefixtures("tuned")
@pytest.mark.parametrize(
    ("config", "state_bytes", "expected"),
    [
        (OffloadConfig(), 10**10, Streaming(32 * MIB, 4)),
        (OffloadConfig(), 1000, Streaming(programs=32)),
        (OffloadConfig(), 800_000_000, Streaming(programs=32)),  # nearer to 0.24 than to 3 GB
        (OffloadConfig(), 900_000_000, Streaming(32 * MIB, 4)),
        # What is said wins, and nothing that is said is overruled by a transport that has no use
        # for it.
        (OffloadConfig(chunk_bytes=5), 1000, Streaming(5, 3)),
        (OffloadConfig(depth=7), 1000, Streaming(8 * MIB, 7)),
        (OffloadConfig(chunk_bytes=5, depth=7), 10**10, Streaming(5, 7)),
        (OffloadConfig(transport="copy"), 1000, Streaming(8 * MIB, 3)),
        (OffloadConfig(pin=False), 1000, Streaming(8 * MIB, 3)),
        (OffloadConfig(transport="zero_copy"), 10**10, Streaming(programs=64)),
        (OffloadConfig(transport="zero_copy", zero_copy_programs=5), 10**10, Streaming(programs=5)),
    ],
)
def test_auto_takes_the_profile(config: OffloadConfig, state_bytes: int, expected: Streaming) -> None:
    assert streaming_of(config, CUDA, state_bytes) == expected


@pytest.mark.usefixtures("tuned")
def test_the_cpu_has_no_profile() -> None:
    expected = Streaming(DEFAULT_CHUNK_BYTES, DEFAULT_DEPTH)
    assert streaming_of(OffloadConfig(), torch.device("cpu"), LARGE.state_bytes) == expected


@pytest.mark.usefixtures("tuned")
def test_steps_report_their_share_of_the_measured_link() -> None:
    assert devices._link_gbps(CUDA, 1) == 47.0
    assert devices._link_gbps(torch.device("cpu"), 1) is None


@pytest.mark.parametrize(
    ("world", "ranks", "devices_of_rank", "gbps"),
    [
        (None, "4", 1, 47.0),  # torch.distributed is not in use
        (None, None, 2, 36.0),  # one process with two GPUs
        (None, None, 5, None),  # more than were measured
        (8, "1", 1, 47.0),
        (8, "2", 1, 36.0),
        (8, "3", 1, 20.0),
        (8, "2", 2, 20.0),
        (8, "4", 1, 20.0),
        (8, "8", 1, None),
        (1, None, 1, 47.0),
        (8, None, 1, None),  # one rank of a host, or all of them
        (8, "0", 1, None),
        (8, "many", 1, None),
    ],
)
@pytest.mark.usefixtures("tuned")
def test_the_share_is_of_what_all_ranks_of_the_host_have_at_once(
    world: int | None, ranks: str | None, devices_of_rank: int, gbps: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: world is not None)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: world)
    if ranks is None:
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    else:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert devices._link_gbps(CUDA, devices_of_rank) == gbps
    monkeypatch.setattr(profiles, "of_device", lambda index: Found(ALONE, "made up"))
    assert devices._link_gbps(CUDA, devices_of_rank) == (47.0 if gbps == 47.0 else None)
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    assert devices._link_gbps(CUDA, 1) == 47.0


def test_predictions_meet_what_was_measured() -> None:
    for timing in (*PROFILE.timings, *PROFILE.narrow_timings):
        assert PROFILE.step_ms(timing.state_bytes, timing.param_numel) == pytest.approx(timing.ms)
    assert PROFILE.step_ms(12 * 10**9, 10**9) == pytest.approx(72 + 9 * 65 / 2.76, rel=1e-6)
    assert PROFILE.step_ms(6 * 10**9, 10**9) < PROFILE.step_ms(10 * 10**9, 10**9) < PROFILE.step_ms(12 * 10**9, 10**9)
    assert PROFILE.step_ms(0, 0) == 0


@pytest.mark.parametrize(
    ("gpus", "link"),
    [(1, (1, 47.0)), (2, (2, 36.0)), (3, (4, 20.0)), (4, (4, 20.0)), (5, (4, 20.0)), (8, (4, 20.0))],
)
def test_the_speed_of_several_gpus_is_that_of_no_fewer_if_it_was_measured(gpus: int, link: tuple[int, float]) -> None:
    assert PROFILE.link_of(gpus) == link
    assert ALONE.link_of(gpus) == (1, 47.0)
    faster = dataclasses.replace(PROFILE, shared_link=(SharedLink(2, 48.0),))  # as a drift of the link may make it
    assert faster.link_of(gpus) == (min(gpus, 2), 47.0)


def test_several_gpus_at_once_take_longer_by_what_their_copies_do() -> None:
    for nbytes, numel in ((1, 1), (240_000_000, 20_000_000), (2_400_000_000, 200_000_000), (12 * 10**9, 10**9)):
        alone_ms = PROFILE.step_ms(nbytes, numel)
        by_gpus = [PROFILE.step_ms(nbytes, numel, gpus) for gpus in (1, 2, 3, 4, 8)]
        assert by_gpus[0] == alone_ms
        assert ALONE.step_ms(nbytes, numel, 8) == alone_ms
        if numel < LARGE.state_bytes // 12:
            assert by_gpus[1] == pytest.approx(alone_ms + nbytes / 36e6 - nbytes / 47e6)
            assert by_gpus[2:] == pytest.approx([alone_ms + nbytes / 20e6 - nbytes / 47e6] * 3)
        else:
            largest_ms = 72 + 3e9 / 20e6 - 3e9 / 47e6
            assert by_gpus[2:] == pytest.approx([largest_ms + 9e9 / 20e6] * 3)
    assert PROFILE.step_ms(0, 0, 8) == 0
    for gpus in (2, 4):
        by_size = [PROFILE.step_ms(12 * numel, numel, gpus) for numel in range(1, 400_000_000, 1_000_000)]
        assert by_size == sorted(by_size)
    # The link is no limit to steps that are slower than it by themselves.
    slow = dataclasses.replace(PROFILE, timings=(TIMINGS[0], Timing(250_000_000, 3_000_000_000, 300.0)))
    more_ms = [slow.step_ms(24 * 10**9, 2 * 10**9, gpus) - slow.step_ms(12 * 10**9, 10**9, gpus) for gpus in (1, 4)]
    assert more_ms[0] == pytest.approx(more_ms[1])


def test_what_two_gpus_took_at_once_is_predicted() -> None:
    """By the profile of one H100, and the speed that two others reached at once: kept measurements
    of steps of a billion parameters.
    """
    results = Path(__file__).parents[1] / "bench" / "results"
    together = json.loads((results / "2xh100-2026-11-28-two.json").read_text())["together"]["forms"]
    gbps = [form["bytes_each_way"] / form["all_ranks_ms"]["plain-duplex"] / 1e6 for form in together.values()]
    for name in ("h100-2026-11-28-tune.json", "h100-2026-11-28-tune-again.json"):
        tuned = from_json(json.loads((results / name).read_text())["profile"])
        profile = dataclasses.replace(tuned, shared_link=(SharedLink(2, sum(gbps) / len(gbps)),))
        for form in together.values():
            predicted_ms = profile.step_ms(form["bytes_each_way"], form["param_numel"], 2)
            assert predicted_ms == pytest.approx(form["all_ranks_ms"]["whole-step"], rel=0.05)


def test_predictions_for_small_state_follow_what_was_measured_there() -> None:
    small = Timing(1_000_000, 12_000_000, 0.7), Timing(5_000_000, 60_000_000, 1.9)
    narrow = Timing(1_000_000, 6_000_000, 0.6), Timing(5_000_000, 30_000_000, 1.2)
    profile = dataclasses.replace(
        PROFILE, timings=(*small, *PROFILE.timings), narrow_timings=(*narrow, *PROFILE.narrow_timings)
    )
    for timing in (*profile.timings, *profile.narrow_timings):
        assert profile.step_ms(timing.state_bytes, timing.param_numel) == pytest.approx(timing.ms)
    assert profile.step_ms(36_000_000, 3_000_000) == pytest.approx((0.7 + 1.9) / 2)
    assert profile.step_ms(12 * 10**9, 10**9) == pytest.approx(PROFILE.step_ms(12 * 10**9, 10**9))
    assert profile.step_ms(12, 1) == pytest.approx(0.7 - 12 * 1.2 / 48, rel=1e-3)
    by_size = [profile.step_ms(12 * numel, numel) for numel in range(1, 400_000_000, 1_000_000)]
    assert by_size == sorted(by_size)


@pytest.mark.parametrize(
    "ms", [(2.5, 1.9, 7.0, 72.0), (0.1, 1.9, 7.0, 72.0), (0.7, 9.0, 7.0, 72.0), (0.7, 1.9, 80.0, 72.0)]
)
def test_more_bytes_are_never_predicted_to_take_less(ms: tuple[float, ...]) -> None:
    """Whatever disturbed one of the measured steps."""
    sizes = 1_000_000, 5_000_000, 20_000_000, 250_000_000
    wide = [Timing(numel, 12 * numel, value) for numel, value in zip(sizes, ms, strict=True)]
    narrow = [Timing(numel, 6 * numel, 0.6 * value) for numel, value in zip(sizes, ms, strict=True)]
    profile = dataclasses.replace(PROFILE, timings=tuple(wide), narrow_timings=tuple(narrow))
    for bytes_per_param in (6, 10, 12):
        by_size = [profile.step_ms(bytes_per_param * n, n) for n in (1, 10**4, *range(10**6, 400_000_000, 10**6))]
        assert by_size == sorted(by_size)
        assert by_size[0] >= 0
        # Nor is a larger state than any that was measured predicted to beat the link.
        more_ms = profile.step_ms(bytes_per_param * 2 * 10**9, 2 * 10**9) - profile.step_ms(
            bytes_per_param * 10**9, 10**9
        )
        assert more_ms >= bytes_per_param * 1e9 / 47e6 * 0.999


@pytest.mark.usefixtures("tuned")
@pytest.mark.parametrize(
    ("arguments", "is_short"), [(["1e6"], True), (["20e6"], False), (["1e6", "--link-gbps", "9"], False)]
)
def test_plan_says_what_its_time_is_worth_where_the_host_decides(
    arguments: list[str], is_short: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--params", *arguments, "--json"]) == 0
    notes = " ".join(json.loads(capsys.readouterr().out)["notes"])
    assert ("depends on the host's speed" in notes) == is_short


@pytest.mark.usefixtures("tuned")
def test_plan_predicts_from_the_profile(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--params", "250e6", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["predicted"]["alone_ms"] == pytest.approx(72.0, rel=1e-3)
    assert report["predicted"]["source"] == "profile"
    assert not report["predicted"]["link_assumed"]
    assert report["training"]["offload"]["chunk_bytes"] == 32 * MIB
    assert report["gpu_bytes"]["ring"] == pytest.approx(4 * 32 * MIB, rel=1e-3)
    assert main(["plan", "--params", "20e6"]) == 0
    assert "zero-copy has none" in capsys.readouterr().out
    assert main(["plan", "--params", "20e6", "--window-bytes", "1e12", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["predicted"]["exposed_ms_at_least"] == 0
    assert main(["plan", "--params", "20e6", "--chunk-bytes", "4MiB"]) == 0
    assert "not of --chunk-bytes and --depth" in capsys.readouterr().out
    assert main(["plan", "--params", "1e6"]) == 0
    assert re.search(r"step alone \(prediction\) +│ +1\.6 ms", capsys.readouterr().out)
    assert main(["plan", "--params", "250e6", "--link-gbps", "10", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["predicted"]["source"] == "link_gbps"
    assert report["training"]["offload"]["chunk_bytes"] == DEFAULT_CHUNK_BYTES


@pytest.mark.parametrize(
    ("ranks", "sentence", "note"),
    [
        (1, "; a step takes about 72 ms.", None),
        (2, "; with 2 GPUs of a host at once a step takes about 92 ms.", None),
        (3, "; with 3 GPUs of a host at once, by the speed of 4, a step takes about 158 ms.", None),
        (4, "; with 4 GPUs of a host at once a step takes about 158 ms.", None),
        (
            8,
            "; with 8 GPUs of a host at once, by the speed of 4, a step takes about 158 ms.",
            "--ranks-per-node says 8, the profile has 4 GPUs at once at most: expect a longer step. To measure all at "
            "once, run fused-offload tune on a host with all its GPUs visible.",
        ),
    ],
)
@pytest.mark.usefixtures("tuned")
def test_plan_goes_by_the_gpus_of_a_host(
    ranks: int, sentence: str, note: str | None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def planned(*more: str) -> dict[str, Any]:
        model = ("--params", str(250_000_000 * ranks), "--data-parallel", str(ranks), "--ranks-per-node", str(ranks))
        assert main(["plan", *model, *more, "--json"]) == 0
        report: dict[str, Any] = json.loads(capsys.readouterr().out)
        return report

    report = planned()
    shared = PROFILE.link_of(ranks)
    assert report["answer"].endswith(sentence)
    assert report["predicted"]["gpus_at_once"] == shared.gpus
    assert report["predicted"]["alone_ms"] == pytest.approx(72 + 3000 / shared.gbps - 3000 / 47, rel=1e-3)
    assert (f"copies of {shared.gpus} GPUs at once, {shared.gbps:.1f} GB/s" in report["notes"][0]) == (ranks > 1)
    about_sharing = [text for text in report["notes"][1:] if "at once" in text]
    assert about_sharing == ([] if note is None else [note])
    # A window hides bytes at the same speed.
    half = planned("--window-bytes", "1.5GB")["predicted"]
    assert half["exposed_ms_at_least"] == pytest.approx(PROFILE.step_ms(1_500_000_000, 125_000_000, ranks), rel=1e-3)
    nothing = planned("--fraction", "0")
    assert nothing["answer"].endswith("; a step moves nothing.")
    assert not any("at once" in text for text in nothing["notes"][1:])
    if ranks == 1:
        return
    # Whoever gives a speed has to know what it is of.
    given = planned("--link-gbps", "20")
    assert given["answer"].endswith("; a step takes about 150 ms.")
    assert given["predicted"]["gpus_at_once"] is None
    assert given["notes"][-1].endswith("--link-gbps should be what one GPU reaches while all copy.")
    for found in (Found(ALONE, "made up"), Found(None, "none yet")):
        monkeypatch.setattr(profiles, "of_device", lambda index, found=found: found)
        report = planned()
        ms = 64 if found.profile is None else 72
        assert report["answer"].endswith(f"; on one GPU alone a step takes about {ms} ms.")
        assert report["predicted"]["gpus_at_once"] == 1
        assert report["notes"][-1].startswith("The time is that of one GPU alone.")
        assert "run fused-offload tune on a host with all its GPUs visible" in report["notes"][-1]


@pytest.mark.usefixtures("tuned")
def test_plan_of_muon_goes_by_the_gpus_of_a_host(capsys: pytest.CaptureFixture[str]) -> None:
    model = ("--params", "4e9", "--muon", "1024x1024", "--master", "remainder", "--moments", "bf16")
    for ranks, gbps, words in (("1", 47.0, "this machine's profile)"), ("4", 20.0, "profile, 4 GPUs at once)")):
        assert main(["plan", *model, "--data-parallel", "4", "--layer-wise", "--ranks-per-node", ranks, "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["predicted"]["alone_ms"] == pytest.approx(4e9 / gbps / 1e6, rel=1e-3)
        assert report["predicted"]["gpus_at_once"] == int(ranks)
        assert words in report["notes"][0]


@pytest.mark.usefixtures("tuned")
def test_plan_of_parameters_on_the_host_goes_by_the_gpus_of_a_host(capsys: pytest.CaptureFixture[str]) -> None:
    model = ("--params", "4e9", "--params-on-host", "--shard-params", "--data-parallel", "4")
    for ranks, gbps in (("1", 47.0), ("4", 20.0)):
        assert main(["plan", *model, "--ranks-per-node", ranks, "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["predicted"]["alone_ms"] == pytest.approx(16e9 / gbps / 1e6, rel=1e-3)
        assert ("with 4 GPUs of a host at once a step takes" in report["answer"]) == (ranks == "4")


def test_where_nothing_moves_the_link_is_the_profiles(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = dataclasses.replace(PROFILE, duplex_gbps=12.5)
    monkeypatch.setattr(profiles, "of_device", lambda index: Found(slow, "made up"))
    assert main(["plan", "--params", "1e9", "--fraction", "0", "--json"]) == 0
    predicted = json.loads(capsys.readouterr().out)["predicted"]
    assert (predicted["source"], predicted["link_gbps"]) == ("profile", 12.5)


@pytest.mark.usefixtures("tuned")
def test_the_largest_model_goes_by_what_was_chosen_for_its_own_size(capsys: pytest.CaptureFixture[str]) -> None:
    """Zero-copy, chosen for small state, takes no ring; 4 x 32 MiB of one are most of what there is
    here.
    """

    def plan(params: int, gigabytes: float) -> dict[str, Any]:
        assert main(["plan", "--params", str(params), "--gpu-memory", str(gigabytes), "--json"]) == 0
        report: dict[str, Any] = json.loads(capsys.readouterr().out)
        return report

    for gigabytes in (0.2, 0.3, 0.4, 1.0):
        largest = {plan(params, gigabytes)["largest_param_numel"]["training"] for params in (10**6, 10**8, 10**11)}
        assert len(largest) == 1
        (numel,) = largest
        assert plan(numel, gigabytes)["fits"]["gpu"]
        for more in (numel + 1000, 2 * numel, 10 * numel):
            assert not plan(more, gigabytes)["fits"]["gpu"]


def test_plan_says_why_a_profile_is_ignored(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(profiles, "of_device", lambda index: Found(None, "ignored: too old", is_outdated=True))
    assert main(["plan", "--params", "1e9"]) == 0
    out = capsys.readouterr().out
    assert "Profile of this machine ignored: too old." in out
    assert "an assumption" in out


# -- the command -----------------------------------------------------------------------------------


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with a GPU whose measurements are made up; the folder of its profiles."""
    measure = pytest.importorskip("fused_offload.tuning.measure")
    link = pytest.importorskip("fused_offload.tuning.link")
    monkeypatch.setenv(profiles.FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr("fused_offload.tuning.tune_command.read_key", lambda index: KEY)

    def tune(key: MachineKey, device: torch.device, seconds: float, report: Any) -> Any:
        assert (key, device, seconds) == (KEY, CUDA, 40.0)
        report("link", 1, 1)
        ways = timed(c8x3=75.0, c48x3=73.0, c32x4=72.0, z32=90.0, z64=85.0)
        swept = (
            measure.Swept(20_000_000, SMALL.state_bytes, tuple(ways), SMALL),
            measure.Swept(250_000_000, LARGE.state_bytes, tuple(ways), LARGE),
        )
        return measure.Tuning(PROFILE, (link.LinkRate(16, 54.0, 53.0, 47.0),), 3.0, swept, 44.0, "8 GPUs at once: lost")

    monkeypatch.setattr(measure, "tune", tune)
    return tmp_path


def test_tune_shows_and_keeps(measured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune"]) == 0
    captured = capsys.readouterr()
    for words in (
        "H100",
        "47.0",
        "depth 4",
        "72.00",
        "zero-copy, 64 programs",
        "Chosen: because",
        "3.00 ms",
        "44 s",
        "At once, GB/s each way and GPU: 2 GPUs 36.0, 4 GPUs 20.0.\nNot measured: 8 GPUs at once: lost.",
    ):
        assert words in captured.out
    assert profiles.find(KEY, measured).profile == PROFILE


def test_tune_as_json_and_without_keeping(measured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--json", "--no-save"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["saved_as"] is None
    assert report["shared_link_error"] == "8 GPUs at once: lost"
    assert report["profile"]["shared_link"][1] == {"gpus": 4, "gbps": 20.0}
    assert report["profile"]["choices"][1]["chunk_bytes"] == 32 * MIB
    assert report["steps"][0]["timed"][0] == {
        "chunk_bytes": 8 * MIB,
        "depth": 3,
        "programs": None,
        "ms": 75.0,
        "samples_ms": [75.0, 150.0, 75.0, 67.5, 75.0],
    }
    assert list(measured.iterdir()) == []


def test_tune_draws(measured: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert main(["tune", "--json", "--plot", str(tmp_path / "tuning.png")]) == 0
    assert (tmp_path / "tuning.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "1"], "no CUDA device 1"),
        (["--device", "0.5"], "whole number"),
        (["--seconds", "0"], "larger than 0"),
        (["--plot", "/nowhere/at/all.png"], "there is no folder"),
        (["--plot", "all.xyz"], "should end in .png, .svg or .pdf"),
        (["--plot", "all.pgf"], "should end in"),
    ],
)
def test_tune_refuses_before_it_measures(
    measured: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    if "--plot" in arguments:
        pytest.importorskip("matplotlib")
    try:
        code = main(["tune", *arguments])
    except SystemExit as stop:
        code = stop.code  # type: ignore[assignment]
    assert code == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.out == ""
    assert list(measured.iterdir()) == []


def test_tune_checks_where_the_profile_is_kept(
    measured: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = measured / "file"
    file.touch()
    monkeypatch.setenv(profiles.FOLDER_VARIABLE, str(file / "folder"))
    assert main(["tune"]) == 2
    assert f"profiles cannot be kept in {file / 'folder'}" in only_error(capsys)
    assert main(["tune", "--no-save"]) == 0


def test_tune_checks_whose_profile_it_would_replace(
    measured: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured.chmod(0o1777)
    me, another = os.geteuid(), os.geteuid() + 1
    assert main(["tune"]) == 0
    assert main(["tune"]) == 0
    monkeypatch.setattr(os, "geteuid", lambda: another)
    capsys.readouterr()
    assert main(["tune"]) == 2
    words = f"({KEY.file_name} is another user's, and the folder is sticky): set FUSED_OFFLOAD_PROFILES"
    assert words in only_error(capsys)
    assert main(["tune", "--no-save"]) == 0
    measured.chmod(0o777)
    assert main(["tune"]) == 0
    (measured / KEY.file_name).unlink()
    measured.chmod(0o1777)
    assert main(["tune"]) == 0
    assert (measured / KEY.file_name).stat().st_uid == me


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (OSError(28, "No space left on device"), 2, "No space left"),
        (subprocess.CalledProcessError(1, ["gcc"]), 2, "CalledProcessError: Command"),
        (ImportError("libcuda"), 2, "ImportError: libcuda"),
        (RuntimeError("out of memory"), 2, "out of memory"),
        (RuntimeError("CUDA error: out of memory\n  Compile with it.\n\n"), 2, "out of memory Compile with it.\n"),
        (RuntimeError(), 2, "error: RuntimeError\n"),
    ],
)
@pytest.mark.usefixtures("measured")
def test_tune_ends_in_one_line(
    error: BaseException, code: int, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr("fused_offload.tuning.measure.tune", fail)
    assert main(["tune"]) == code
    captured = capsys.readouterr()
    assert f"fused-offload tune: {'error: ' if code == 2 else ''}" in captured.err
    assert words in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""


def test_what_tune_kept_is_used_at_once(measured: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles, "read_key", lambda index: KEY)
    profiles.of_device.cache_clear()
    try:
        assert profiles.of_device(0).profile is None
        assert main(["tune"]) == 0
        assert profiles.of_device(0).profile == PROFILE
    finally:
        profiles.of_device.cache_clear()


@pytest.mark.parametrize("fails", ["the profile was not kept", "was not drawn"])
def test_what_was_measured_is_printed_also_where_it_cannot_be_kept(
    fails: str, measured: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = measured / KEY.file_name
    arguments = ["tune", "--json"]
    if fails == "was not drawn":
        pytest.importorskip("matplotlib")
        monkeypatch.setattr("fused_offload.tuning.plot.draw", lambda *_: 1 / 0)
        arguments += ["--plot", str(measured / "tuning.png")]
    else:
        path.mkdir()
    assert main(arguments) == 2
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert report["seconds"] == 44.0
    assert fails in captured.err
    assert captured.err.rstrip().splitlines()[-1].startswith("fused-offload tune: error: ")
    assert (report["saved_as"] is None) == path.is_dir()
    assert not (measured / "tuning.png").exists()


def test_tune_needs_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["tune"]) == 2
    assert "there is no CUDA GPU to measure" in capsys.readouterr().err


def test_help_does_not_wait_for_torch() -> None:
    program = (
        "import sys\nfrom fused_offload.cli import main\n"
        "try:\n    main(['plan', '--help'])\nexcept SystemExit:\n    sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True).returncode == 0


@pytest.mark.gpu
def test_a_gpu_is_tuned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from fused_offload.tuning import measure

    monkeypatch.setenv(profiles.FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(measure, "sizes", lambda *arguments: [500_000, 1_000_000, 2_000_000, 8_000_000])
    assert main(["tune", "--json", "--seconds", "1"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["saved_as"]
    assert all(rate["duplex_gbps"] > 1 for rate in report["link"])
    stepped = [step["state_bytes"] for step in report["steps"]]
    assert stepped == pytest.approx([6_000_000, 12_000_000, 24_000_000, 96_000_000], rel=0.01)
    profile = profiles.find(machine_key.read_key(0)).profile
    assert profile is not None
    assert report["shared_link_error"] is None
    visible = torch.cuda.device_count()
    assert profile.link_of(visible).gpus == visible
    assert all(1 < link.gbps < 1.2 * profile.duplex_gbps for link in profile.shared_link)
