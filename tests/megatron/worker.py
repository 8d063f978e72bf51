"""One of the two processes that run all scenarios:
``python worker.py DIRECTORY PROCESS {small|large} REGULAR-EXPRESSION``.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import pickle
import sys
import threading
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

import registry
import stand_in
import torch
from registry import Context, Phase

MODULES = (
    "scenarios_install",
    "scenarios_training",
    "scenarios_checkpoint",
    "scenarios_async",
    "scenarios_foreign",
    "scenarios_lifecycle",
    "scenarios_reload",
    "scenarios_skips",
    "scenarios_fp8",
    "scenarios_rounding",
    "scenarios_wrappings",
    "scenarios_damage",
    # Megatron-FSDP imports einops.
    *(["scenarios_fsdp"] if importlib.util.find_spec("einops") else []),
)
_PATIENCE = timedelta(seconds=60)
"""How long a rank waits for the other one, which may be compiling, importing or writing a
checkpoint.
"""


class Worker:
    def __init__(self, directory: Path, process: int, selected: str, *, large: bool) -> None:
        self._directory = directory
        self._process = process
        self._selected = selected
        self._large = large
        # Agreement between the processes does not go through the process groups, which a failed
        # scenario may break.
        self._meeting = torch.distributed.FileStore(str(directory / "meeting"), 2)
        self._meeting.set_timeout(_PATIENCE)
        self._groups_made = 0

    def run(self) -> None:
        for phase in Phase:
            self._meet(f"start of {phase.value}", ok=True)
            chosen = registry.scenarios_of(phase, self._process, self._selected, large=self._large)
            for number, scenario in chosen:
                ok = self._run(scenario, self._directory / f"{number}.{self._process}")
                if not ok:
                    _leave_groups()  # also lets a rank go on that waits for this one
                if not phase.alone and not self._meet(f"end of {number}", ok=ok):
                    _leave_groups()
            _leave_groups()

    def _run(self, scenario: registry.Scenario, path: Path) -> bool:
        """Leaves the outcome in files; whether there was no error."""
        started, value, error, lacks = time.monotonic(), None, None, None
        try:
            if scenario.phase is not Phase.BEFORE_IMPORT:
                self._join_groups(scenario.phase)
            value = scenario.function(Context(self._directory, scenario.phase))
        except registry.NotInReleaseError as reason:
            lacks = str(reason)
        except Exception:
            error = traceback.format_exc()
        seconds = time.monotonic() - started
        torch.save(value, path.with_suffix(path.suffix + ".value"))
        outcome = (scenario.name, scenario.phase, self._process, error, lacks, seconds)
        path.with_suffix(path.suffix + ".outcome").write_bytes(pickle.dumps(outcome))
        return error is None

    def _join_groups(self, phase: Phase) -> None:
        if torch.distributed.is_initialized():
            return
        from megatron.core import parallel_state, tensor_parallel

        if self._groups_made == 0:
            stand_in.install_in_megatron()
            gc.collect()
            # Checkpoints collect garbage, which would take long with all that was imported.
            gc.freeze()
        self._groups_made += 1
        world = f"{phase.name}.{self._process if phase.alone else 'both'}.{self._groups_made}"
        ranks = 1 if phase.alone else 2
        torch.distributed.init_process_group(
            "gloo",
            store=torch.distributed.FileStore(str(self._directory / world), ranks),
            rank=0 if phase.alone else self._process,
            world_size=ranks,
            timeout=_PATIENCE,
        )
        parallel_state.initialize_model_parallel(create_gloo_process_groups=True)
        tensor_parallel.model_parallel_cuda_manual_seed(1)

    def _meet(self, where: str, *, ok: bool) -> bool:
        """Waits for the other process; whether both are well."""
        self._meeting.set(f"{where}.{self._process}", "well" if ok else "failed")
        return ok & (self._meeting.get(f"{where}.{1 - self._process}") == b"well")


def _leave_groups() -> None:
    if torch.distributed.is_initialized():
        from megatron.core import parallel_state

        # Models and optimizers have many cycles, and process groups live as long as they do.
        gc.collect()
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def _end_with_parent() -> None:
    """Nobody looks at the outcomes after whoever started this process has ended."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    _end_with_parent()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    stand_in.install()
    for module in MODULES:
        importlib.import_module(module)
    directory, process, form, selected = sys.argv[1:]
    Worker(Path(directory), int(process), selected, large=form == "large").run()


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":  # in a process that Megatron starts to write checkpoints
    stand_in.install()
