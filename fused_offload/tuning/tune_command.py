"""`fused-offload tune`: measures with a progress bar, saves the profile, and shows the results."""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib.util
import json
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from fused_offload.profiles import profile_files as profiles
from fused_offload.profiles.machine_key import read_key
from fused_offload.profiles.profile import as_json as profile_as_json
from fused_offload.profiles.units import MIB

from . import measure
from .candidates import Timed, chosen, gigabytes
from .measure import Swept, Tuning
from .output import new_console, print_line

_SECONDS_BETWEEN_DRAWINGS = 0.2
_PICTURES = (".png", ".svg", ".pdf")  # formats that matplotlib writes by itself


def tune(options: argparse.Namespace) -> int:
    """Runs the command; returns its exit code.

    Raises:
        ValueError: if there is no such GPU, if it cannot be measured, or if a package is missing.
    """
    _check(options)
    with _failing_in_words():
        key = read_key(options.device)
    if not options.no_save:
        _check_profile(key.file_name)
    with _failing_in_words(), _ProgressBar() as bar:
        tuning = measure.tune(key, torch.device("cuda", options.device), options.seconds, bar.report)
    failed: list[str] = []
    path = _tried(failed, "the profile was not kept", partial(_save, options, tuning))
    if options.plot is not None:
        _tried(failed, f"{options.plot} was not drawn", partial(_draw, options.plot, tuning))
    # Also after a failure: the measurements took a minute.
    if options.json:
        print(json.dumps(as_json(tuning, path), indent=2))
    else:
        show(tuning, path)
    if failed:
        raise ValueError("; ".join(failed))
    return 0


@contextlib.contextmanager
def _failing_in_words() -> Iterator[None]:
    """Context that turns errors into a ValueError with their message."""
    try:
        yield
    except RuntimeError as error:  # too little memory, or the driver refuses
        raise ValueError(str(error) or type(error).__name__) from error
    except Exception as error:  # Triton, its C compiler and damaged packages raise many kinds
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _tried(failed: list[str], what: str, do: Callable[[], Path | None]) -> Path | None:
    """Result of a call; None if it fails, with the reason appended to ``failed``."""
    try:
        return do()
    except Exception as error:
        failed.append(f"{what} ({type(error).__name__}: {error})")
        return None


def _save(options: argparse.Namespace, tuning: Tuning) -> Path | None:
    if options.no_save:
        return None
    path = profiles.save(tuning.profile)
    profiles.of_device.cache_clear()
    return path


def _draw(path: Path, tuning: Tuning) -> None:
    from .plot import draw

    draw(tuning, path)


def _check(options: argparse.Namespace) -> None:
    """Refuses options that would fail after the measurements."""
    if options.plot is not None:
        _check_plot(options.plot)
    if not torch.cuda.is_available():
        built = f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch is built without CUDA"
        raise ValueError(f"there is no CUDA GPU to measure ({built}); fused-offload doctor says more")
    if options.device >= torch.cuda.device_count():
        raise ValueError(
            f"there is no CUDA device {options.device}: --device should be from 0 to {torch.cuda.device_count() - 1}"
        )
    if importlib.util.find_spec("triton") is None:
        raise ValueError("the GPU's kernels need Triton: pip install triton")
    if options.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install matplotlib")


def _check_plot(path: Path) -> None:
    if path.suffix.lower() not in _PICTURES:
        raise ValueError(f"--plot {path}: its name should end in {', '.join(_PICTURES[:-1])} or {_PICTURES[-1]}")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ValueError(f"--plot {path}: there is no folder {folder}")
    if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise ValueError(f"--plot {path} cannot be written: give a path that this user may write to")


def _check_profile(file_name: str) -> None:
    """Refuses a folder that the profile cannot be written to."""
    try:
        _check_folder(profiles.folder(), file_name)
    except ImportError as error:
        raise ValueError(
            f"keeping a profile needs platformdirs ({error}): pip install platformdirs, set "
            f"{profiles.FOLDER_VARIABLE} to a folder, or add --no-save"
        ) from error


def _check_folder(path: Path, file_name: str) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
        if _belongs_to_another(path / file_name):
            raise PermissionError(errno.EPERM, f"{file_name} is another user's, and the folder is sticky")
    except OSError as error:
        raise ValueError(
            f"profiles cannot be kept in {profiles.shown(path)} ({error.strerror}): set {profiles.FOLDER_VARIABLE} to "
            "another folder, or add --no-save"
        ) from error


def _belongs_to_another(path: Path) -> bool:
    """True if the folder's sticky bit forbids this user to replace a file.

    It lets only the owners of the file and of the folder do so.
    """
    folder = path.parent.stat()
    if not folder.st_mode & stat.S_ISVTX or not os.path.lexists(path):
        return False
    return os.geteuid() not in (0, folder.st_uid, path.lstat().st_uid)


class _ProgressBar:
    """A bar for each phase on standard error; drawn between measurements, not by a thread."""

    def __init__(self) -> None:
        columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
        self._progress = Progress(*columns, console=Console(stderr=True), auto_refresh=False)
        self._tasks: dict[str, TaskID] = {}
        self._drawn = 0.0

    def __enter__(self) -> _ProgressBar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def report(self, phase: str, done: int, total: int) -> None:
        """Updates a phase's bar; a `link.Report`."""
        if phase not in self._tasks:
            self._tasks[phase] = self._progress.add_task(phase, total=total)
        self._progress.update(self._tasks[phase], completed=done, total=total)
        if done == total or time.monotonic() - self._drawn > _SECONDS_BETWEEN_DRAWINGS:
            self._progress.refresh()
            self._drawn = time.monotonic()


def as_json(tuning: Tuning, path: Any = None) -> dict[str, Any]:
    """All measurements, as `json.dumps` takes them."""
    return {
        "profile": profile_as_json(tuning.profile),
        "saved_as": None if path is None else profiles.shown(path),
        "seconds": tuning.seconds,
        "link": [rate._asdict() for rate in tuning.link],
        "shared_link_error": tuning.shared_link_error,
        "kernel_ms": tuning.kernel_ms,
        "steps": [
            {
                "param_numel": swept.param_numel,
                "state_bytes": swept.state_bytes,
                "timed": [_timed_as_json(one) for one in swept.timed],
            }
            for swept in tuning.swept
        ],
    }


def _timed_as_json(one: Timed) -> dict[str, Any]:
    return {**one.streaming._asdict(), "ms": one.ms, "samples_ms": one.samples_ms}


def show(tuning: Tuning, path: Any) -> None:
    """Prints tables, choices and reasons."""
    console = new_console()
    key = tuning.profile.key
    print_line(console, f"{key.gpu}, link {key.link}; {key.host}")
    link = Table(title="The link, GB/s", title_justify="left")
    for column in ("MiB a copy", "host to device", "device to host", "each way, both at once"):
        link.add_column(column, justify="right")
    for rate in tuning.link:
        link.add_row(str(rate.copy_mib), *(f"{value:.1f}" for value in rate[1:]))
    console.print(link)
    for text in _shared_link(tuning):
        print_line(console, text)
    for swept in tuning.swept:
        console.print(_steps_table(swept))
        print_line(console, f"Chosen: {swept.choice.why}.")
    if tuning.kernel_ms is not None:
        numel = tuning.swept[-1].param_numel
        step = f"a step of {numel:,} parameters takes {tuning.kernel_ms:.2f} ms"
        print_line(console, f"With all state on the GPU {step}.")
    kept = (
        "No profile was kept."
        if path is None
        else f'Kept as {profiles.shown(path)}; OffloadConfig\'s "auto" takes it from now on.'
    )
    print_line(console, f"{kept} {tuning.seconds:.0f} s.")


def _shared_link(tuning: Tuning) -> Iterator[str]:
    shared = tuning.profile.shared_link
    if shared:
        speeds = ", ".join(f"{link.gpus} GPUs {link.gbps:.1f}" for link in shared)
        yield f"At once, GB/s each way and GPU: {speeds}."
    if tuning.shared_link_error is not None:
        yield f"Not measured: {tuning.shared_link_error}."


def _steps_table(swept: Swept) -> Table:
    title = f"A step of {swept.param_numel:,} parameters, {gigabytes(swept.state_bytes)} each way: ms"
    table = Table(title=title, title_justify="left")
    copies = [one for one in swept.timed if one.streaming.programs is None]
    depths = sorted({one.streaming.depth for one in copies})
    table.add_column("MiB a chunk", justify="right")
    for depth in depths:
        table.add_column(f"depth {depth}", justify="right")
    for chunk_bytes in sorted({one.streaming.chunk_bytes for one in copies}):
        row = {one.streaming.depth: one for one in copies if one.streaming.chunk_bytes == chunk_bytes}
        cells = [_cell(row.get(depth), swept) for depth in depths]
        table.add_row(f"{chunk_bytes / MIB:g}", *cells, end_section=chunk_bytes == _largest(copies))
    zero_copies = [one for one in swept.timed if one.streaming.programs is not None]
    for one in sorted(zero_copies, key=lambda one: one.streaming.programs or 0):
        table.add_row(f"zero-copy, {one.streaming.programs} programs", _cell(one, swept))
    return table


def _largest(copies: Iterable[Timed]) -> int:
    return max(one.streaming.chunk_bytes for one in copies)


def _cell(one: Timed | None, swept: Swept) -> str:
    if one is None:
        return ""
    return f"[bold green]{one.ms:.2f}[/]" if one.streaming == chosen(swept.choice) else f"{one.ms:.2f}"
