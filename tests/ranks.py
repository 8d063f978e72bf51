"""Runs scenarios on several ranks: one process for each, which runs many of them, since starting it
takes longer.
"""

from __future__ import annotations

import datetime
import gc
import os
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

# Time for other ranks to fail, too, and say why; those that wait for the failed one are killed.
_GRACE_S = 2


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def run_ranks(
    script: str,
    ranks: int,
    folder: Path,
    names: Sequence[str],
    *,
    limit_s: float,
    environment: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Starts ``script FOLDER NAME...`` for every rank, which calls `main`; again after each
    scenario that failed.

    Returns:
        Output of all ranks for each scenario that did not pass on all of them.
    """
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "MASTER_ADDR": "127.0.0.1",
        "WORLD_SIZE": str(ranks),
        **(environment or {}),
    }
    deadline = time.monotonic() + limit_s
    failed: dict[str, str] = {}
    waiting = list(names)
    while waiting:
        if time.monotonic() > deadline:
            failed |= dict.fromkeys(waiting, f"not run: the {limit_s} s of all scenarios were over")
            break
        logs = [folder / f"{waiting[0]}-{ranks}-{rank}.log" for rank in range(ranks)]
        _run_once([sys.executable, script, str(folder), *waiting], logs, environment, deadline)
        texts = [log.read_text() for log in logs]
        passed = set.intersection(*(set(text.splitlines()) for text in texts))
        waiting = [name for name in waiting if name not in passed]
        if waiting:
            failed[waiting.pop(0)] = "\n".join(f"rank {rank}:\n{text}" for rank, text in enumerate(texts))
    return failed


def _run_once(command: list[str], logs: Sequence[Path], environment: Mapping[str, str], deadline: float) -> None:
    """Runs one process a rank, until all have ended, one of them has failed or time is up."""
    port = str(free_port())
    processes = []
    for rank, log in enumerate(logs):
        with log.open("w") as output:
            processes.append(
                subprocess.Popen(
                    command,
                    env={**environment, "MASTER_PORT": port, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            if any(process.poll() for process in processes):
                time.sleep(_GRACE_S)
                break
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main(scenarios: Mapping[str, Callable[[], None]], names: Sequence[str], *, backend: str, limit_s: float) -> None:
    """Runs scenarios on this rank, and prints the name of each that passed on all."""
    try:
        torch.set_num_threads(1)
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=limit_s))
        gc.freeze()  # modules, which the collections below and those of checkpoints would look at
        for name in names:
            scenarios[name]()
            gc.collect()
            dist.barrier()
            print(name, flush=True)
        dist.destroy_process_group()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # other ranks may wait for this one
