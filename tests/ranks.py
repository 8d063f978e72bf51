"""Runs scenarios on several ranks: one process for each, which runs all of them, since starting it takes longer."""

from __future__ import annotations

import datetime
import gc
import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist


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
) -> tuple[set[str], str]:
    """Starts ``script FOLDER NAME...`` for every rank, which calls `main`.

    Returns:
        Names that passed on every rank, and what all ranks said.
    """
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(ranks),
        **(environment or {}),
    }
    logs = [folder / f"{names[0]}-{ranks}-{rank}.log" for rank in range(ranks)]
    processes = []
    for rank, log in enumerate(logs):
        with log.open("w") as output:
            processes.append(
                subprocess.Popen(
                    [sys.executable, script, str(folder), *names],
                    env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        for process in processes:
            process.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        pass  # what did not finish did not pass
    finally:
        for process in processes:
            process.kill()
            process.wait()
    texts = [log.read_text() for log in logs]
    passed = set.intersection(*(set(text.splitlines()) for text in texts)) & set(names)
    return passed, "\n".join(f"rank {rank}:\n{text}" for rank, text in enumerate(texts))


def main(scenarios: Mapping[str, Callable[[], None]], names: Sequence[str], *, backend: str, limit_s: float) -> None:
    """Runs scenarios on this rank, and prints the name of each that passed on all."""
    try:
        torch.set_num_threads(1)
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=limit_s))
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
