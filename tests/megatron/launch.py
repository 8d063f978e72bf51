"""Runs all scenarios in two processes and collects their outcomes.

``python launch.py DIRECTORY [REGULAR EXPRESSION]`` runs those with such names, large ones too, and
shows what they take and raise. Where the variable `OUTCOMES` names that directory, tests look at what is in it and
run nothing.
"""

from __future__ import annotations

import functools
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from registry import Outcome, Results

_HERE = Path(__file__).resolve().parent
_LIMIT_S = 600
OUTCOMES = "MEGATRON_OUTCOMES"


def run(directory: Path, selected: str = "", *, large: bool) -> None:
    """Leaves the scenarios' outcomes in an empty directory; of the large ones on request."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONUNBUFFERED": "1",
    }
    form = "large" if large else "small"
    logs = [directory / f"{process}.log" for process in range(2)]
    processes = []
    for process, log in enumerate(logs):
        with log.open("wb") as output:
            processes.append(
                subprocess.Popen(
                    [sys.executable, str(_HERE / "worker.py"), str(directory), str(process), form, selected],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,  # so that it ends with whatever it started
                )
            )
    deadline = time.monotonic() + _LIMIT_S
    ends = [_end_of(process, deadline) for process in processes]
    for log, end in zip(logs, ends, strict=True):
        with log.open("a") as output:
            output.write(f"\n{end}\n")


def collect(directory: Path) -> Results:
    """Outcomes of the scenarios; of processes that died or took too long, as far as they came."""
    outcomes = [Outcome(*pickle.loads(path.read_bytes()), _value_of(path)) for path in directory.glob("*.outcome")]
    log = "\n".join(f"-- {path.name}\n{path.read_text()[-6000:]}" for path in sorted(directory.glob("*.log")))
    return Results(outcomes, log)


def _value_of(path: Path) -> Callable[[], Any]:
    """Reads a value when it is asked for the first time: each of pytest's workers needs only some
    of them.
    """
    return functools.cache(lambda: torch.load(path.with_suffix(".value"), weights_only=False))


def _end_of(process: subprocess.Popen[bytes], deadline: float) -> str:
    try:
        return f"exit status {process.wait(max(0.0, deadline - time.monotonic()))}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return "killed: it took too long"


def main() -> None:
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True)
    run(directory, " ".join(sys.argv[2:]), large=True)
    results = collect(directory)
    for outcome in results.slowest():
        print(f"{outcome.seconds:6.2f} s  {outcome.name} ({outcome.phase.value}, process {outcome.process})")
        if outcome.error is not None:
            print(outcome.error)
    if not results.slowest():
        print(results.log)


if __name__ == "__main__":
    main()
