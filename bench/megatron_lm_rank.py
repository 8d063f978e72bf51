"""One rank of a run of `megatron_lm.py`: runs a Megatron-LM script as it is and watches it.

    torchrun ... bench/megatron_lm_rank.py CASE.json pretrain_gpt.py [arguments of the script ...]

The script is executed as ``__main__``, unmodified. Around Megatron's ``train_step`` a CUDA event is
recorded and the loss and the gradient norm are kept; nothing waits for the GPU. What was seen is
written at the end, one file a rank.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import runpy
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from clock import mark, ms_between

import fused_offload.megatron
from fused_offload import OffloadConfig
from fused_offload.megatron.after_import import call_after_import
from fused_offload.optimizer import OffloadOptimizer
from fused_offload.params.quantised import plain_values


class Watch:
    """Observations of one rank's training.

    Attributes:
        case: the case's settings, see `megatron_lm.Case.spec`.
    """

    def __init__(self, case: dict[str, Any]) -> None:
        self.case = case
        self._device = torch.device("cpu")
        self._held = 0
        self._begins: list[Any] = []
        self._losses: list[Any] = []
        self._norms: list[Any] = []
        self._reports: list[dict[str, Any]] = []
        self._model: Any = ()
        self._optimizer: Any = None
        self._profiler: Any = None

    def wrap_train_step(self) -> None:
        """Puts this object around Megatron's ``train_step``."""
        from megatron.training import training

        train_step = training.train_step

        @functools.wraps(train_step)
        def watched(step_func: Any, data: Any, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            self._device = next(model[0].parameters()).device
            self._model, self._optimizer = model, optimizer
            self._profile()
            if self._device.type == "cuda":
                self._held = torch.cuda.memory_allocated(self._device)
            self._begins.append(mark(self._device))
            result = train_step(step_func, data, model, optimizer, *args, **kwargs)
            losses, norm = result[0], result[5]
            self._losses.append(losses.get("lm loss"))
            self._norms.append(norm)
            self._reports += self._report()
            return result

        training.train_step = watched

    @property
    def _ours(self) -> list[OffloadOptimizer]:
        chained = getattr(self._optimizer, "chained_optimizers", [self._optimizer])
        inner = [getattr(one, "optimizer", None) for one in chained]
        return [one for one in inner if isinstance(one, OffloadOptimizer)]

    def _report(self) -> list[dict[str, float]]:
        """The latest completed step, summed over optimizers, which step one after the other; empty
        without one.
        """
        reports = [dataclasses.asdict(one) for one in (opt.last_step_report() for opt in self._ours) if one is not None]
        if not reports:
            return []
        summed = [name for name in reports[0] if name.endswith("_ms") or "bytes" in name]
        return [{name: sum(one[name] or 0.0 for one in reports) for name in summed}]

    def _profile(self) -> None:
        """Profiles the last but two iterations, and the one behind it."""
        iteration = len(self._begins)
        if not self.case["profile"] or os.environ.get("RANK", "0") != "0":
            return
        if iteration == self.case["iterations"] - 3:
            self._profiler = torch.profiler.profile()
            self._profiler.start()
        elif iteration == self.case["iterations"] - 1 and self._profiler is not None:
            self._profiler.stop()
            prefix = self.case["profile"]
            averages = self._profiler.key_averages()
            keys = ("self_cuda_time_total", "self_cpu_time_total", "cpu_time_total")
            tables = [averages.table(sort_by=key, row_limit=40, max_name_column_width=70) for key in keys]
            Path(f"{prefix}.txt").write_text("\n".join(tables))
            self._profiler.export_chrome_trace(f"{prefix}.json.gz")

    def write(self) -> None:
        """Writes the rank's file."""
        seen: dict[str, Any] = {
            "iterations_ms": [ms_between(begin, end) for begin, end in pairwise(self._begins)],
            "losses": [_number(value) for value in self._losses],
            "grad_norms": [_number(value) for value in self._norms],
            "reports": self._reports,
            "weights": _digest(self._model),
        }
        if self._device.type == "cuda":
            seen |= {
                "peak_bytes": torch.cuda.max_memory_allocated(self._device),
                "peak_reserved_bytes": torch.cuda.max_memory_reserved(self._device),
                "held_bytes": self._held,
            }
        if self._optimizer is not None:
            chained = getattr(self._optimizer, "chained_optimizers", [self._optimizer])
            seen["inner"] = type(getattr(chained[0], "optimizer", chained[0])).__name__
        if self._ours:
            memory = [one.memory_report() for one in self._ours]
            seen["host_bytes"] = sum(sum(one.host_bytes.values()) for one in memory)
        path = Path(self.case["seen"]) / f"{os.environ.get('RANK', '0')}.json"
        path.write_text(json.dumps(seen))


def _digest(model: Any) -> str:
    """SHA-256 of the values of this rank's parameters."""
    digest = hashlib.sha256()
    for chunk in model:
        for param in chunk.parameters():
            digest.update(plain_values(param).contiguous().view(torch.uint8).cpu().numpy())
    return digest.hexdigest()


def _number(value: Any) -> float | None:
    """A loss or a norm; Megatron's losses are sums beside their number of tokens, or means."""
    if isinstance(value, torch.Tensor) and value.numel() == 2:
        value = value.flatten()[0] / value.flatten()[1]
    return None if value is None else float(value)


def _keep_whole_masters() -> None:
    """Switches ``store_param_remainders`` off, for which Megatron has no argument."""
    from megatron.core.optimizer import OptimizerConfig

    prepared = OptimizerConfig.__post_init__

    def without_remainders(config: Any) -> None:
        config.store_param_remainders = False
        prepared(config)

    OptimizerConfig.__post_init__ = without_remainders


def main() -> None:
    """Runs the script."""
    case = json.loads(Path(sys.argv[1]).read_text())
    script = sys.argv[2]
    sys.argv[:] = sys.argv[2:]
    sys.path[0] = str(Path(script).resolve().parent)
    if case["ours"]:
        offload = OffloadConfig(fraction=case["fraction"], window_bytes=case["window_bytes"])
        fused_offload.megatron.install(offload, log_interval=case["log_interval"], muon=case["muon"])
    if case["whole_masters"]:
        call_after_import("megatron.core.optimizer", _keep_whole_masters)
    watch = Watch(case)
    call_after_import("megatron.training.training", watch.wrap_train_step)
    runpy.run_path(script, run_name="__main__")
    watch.write()


if __name__ == "__main__":
    main()
