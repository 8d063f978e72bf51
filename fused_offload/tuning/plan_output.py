"""Words of `fused-offload plan`: its answer in a sentence, its table, its notes."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from fused_offload.model_hooks.backward_step import PART_BYTES
from fused_offload.profiles.profile_files import Found
from fused_offload.profiles.units import MIB

from .budget import Memory
from .output import duration, gb, ms, new_console, print_line
from .prediction import Prediction
from .training import Training

_HOST_MS = 3.0
"""Step time below which host time dominates, which has varied by two thirds."""

_MEASURE = "To measure all at once, run fused-offload tune on a host with all its GPUs visible"


def notes_on(training: Training, memory: Memory, prediction: Prediction, found: Found | None) -> list[str]:
    """Sentences on how the numbers were found, and on what they leave out.

    Args:
        training: training settings as the user gave them.
        memory: memory of the model.
        prediction: the predicted step.
        found: profile that was looked for, or None.
    """
    notes = [
        f"Times are predictions, {prediction.how}.",
        "Activations and the CUDA context are counted only as --other-gpu says.",
    ]
    if prediction.source == "profile" and 0 < prediction.time.alone_ms < _HOST_MS:
        notes.append(
            "A step this short depends on the host's speed, which changes from one minute to the next: expect the time "
            "to be right within some tens of percent."
        )
    if prediction.source == "profile" and (training.offload.chunk_bytes != "auto" or training.offload.depth != "auto"):
        notes.append("They are of the chunks that fused-offload tune chose, not of --chunk-bytes and --depth.")
    if training.offload.window_bytes == "auto":
        notes.append(
            f"A window of 'auto' takes what activations gave back, and no more GPU memory: up to {gb(memory.hidden)} "
            "of state, for activations are no more than --other-gpu. How much it is, only a run can tell."
        )
    if training.largest_matrix is not None:
        notes.append(
            "All parameters are counted as matrices under Muon, and for the iteration as of the size of the largest; "
            "plan embeddings, the output layer and all others by themselves, without --muon."
        )
    if training.quantised is not None:
        notes.append(
            "All parameters are counted as quantised, with codes by rows and by columns; plan embeddings, the output "
            "layer and all others by themselves, without --quantised. The step takes its memory for exact values and "
            "gives it back."
        )
    if training.state_parallel < training.data_parallel:
        divided = (
            "Megatron's layer-wise optimizer divides it: plan that with --layer-wise"
            if training.quantised is None
            else "plan FSDP2 with --shard-params, and Megatron with --fp8-param-gather"
        )
        notes.append(f"Each data-parallel rank keeps the state of all its parameters; {divided}.")
    if training.in_backward:
        size = f"{PART_BYTES / MIB:g} MiB"
        notes.append(f"Gradients wait on the GPU until there are {size} of them; a larger one counts by itself.")
    if training.params_on_host:
        notes.append(
            "FSDP2 brings parameters to the GPU layer by layer: --other-gpu should count the largest layer four times "
            "(itself, its gradients, and both once more while gradients are reduced and copied), and what is outside "
            "of layers. torch's page-locked memory rounds each tensor up to a power of two, which is not counted."
        )
    if found is not None and found.is_outdated:
        notes.append(f"Profile of this machine {found.reason}.")
    if training.ranks_per_node > 1 and memory.host_state:
        notes += _notes_on_sharing(training.ranks_per_node, prediction)
    return notes


def _notes_on_sharing(ranks: int, prediction: Prediction) -> list[str]:
    """Notes on a time that may not be that of all GPUs of a host at once."""
    if prediction.gpus is not None and prediction.gpus >= ranks:
        return []
    if prediction.gpus is not None and prediction.gpus > 1:
        return [
            f"--ranks-per-node says {ranks}, the profile has {prediction.gpus} GPUs at once at most: expect a longer "
            f"step. {_MEASURE}."
        ]
    shared = "GPUs of a host share its memory: each of two H100s at once reached 35 GB/s each way, one alone 47. "
    if prediction.source == "link_gbps":
        return [f"{shared}--link-gbps should be what one GPU reaches while all copy."]
    return [f"The time is that of one GPU alone. {shared}{_MEASURE}, or give --link-gbps what one reaches meanwhile."]


def answer(report: dict[str, Any]) -> str:
    """The plan in a sentence."""
    fits, limits = report["fits"], report["limits"]
    places = (
        ("GPU", report["gpu_bytes"]["total"], limits["gpu_bytes"], fits["gpu"]),
        ("host", report["host_bytes"]["node"], limits["node_bytes"], fits["host"]),
    )
    known = [fit for _, _, _, fit in places if fit is not None]
    verdict = "Takes" if not known else "Fits:" if all(known) else "Does not fit:"
    memory = ", ".join(f"{_of_limit(needed, limit)} on the {place}" for place, needed, limit, _ in places)
    predicted = report["predicted"]
    alone_ms, exposed_ms = predicted["alone_ms"], predicted["exposed_ms_at_least"]
    time = "a step moves nothing"
    if alone_ms:
        gpus = _gpus_in_words(report["training"]["ranks_per_node"], predicted["gpus_at_once"])
        time = f"{gpus}a step takes about {duration(alone_ms)}"
    if alone_ms and not exposed_ms:
        time += ", which may all run under forward and backward passes"
    elif exposed_ms < alone_ms:
        time += f" and adds at least {duration(exposed_ms)} to an iteration"
    return f"{verdict} {memory}; {time}."


def _gpus_in_words(ranks: int, measured: int | None) -> str:
    """Number of GPUs of a host that a time holds for; empty if there is one, or the user knows."""
    if ranks == 1 or measured is None:
        return ""
    if measured == 1:
        return "on one GPU alone "
    by = "" if measured == ranks else f", by the speed of {measured},"
    return f"with {ranks} GPUs of a host at once{by} "


def _of_limit(needed: int, limit: int | None) -> str:
    """Bytes in GB beside their limit, with enough digits to show which is larger."""
    if limit is None:
        return f"{_short_gb(needed, 0)} GB"
    digits = next((n for n in range(9) if needed == limit or _short_gb(needed, n) != _short_gb(limit, n)), 9)
    return f"{_short_gb(needed, digits)} of {_short_gb(limit, digits)} GB"


def _short_gb(nbytes: int, digits: int) -> str:
    """GB with at least two significant digits, and at least ``digits`` after the point."""
    value = nbytes / 1e9
    return f"{value:,.{max(digits, 0 if value >= 9.95 or not nbytes else 1 if value >= 0.995 else 2)}f}"


def _params(numel: int) -> str:
    return f"{numel / 1e9:.3f} billion" if numel >= 10**7 else f"{numel:,}"


def _largest(numel: int | None) -> str:
    if numel is None:
        return "no limit"
    return _params(numel // 10**6 * 10**6 if numel >= 10**7 else numel)  # down, so that it fits


def _ring_label(training: Training) -> str:
    chunk_bytes, depth = training.offload.chunk_bytes, training.offload.depth
    if isinstance(chunk_bytes, str) or depth == "auto":
        return "staging ring (zero-copy has none)"
    return f"staging ring, {depth} x {chunk_bytes / MIB:g} MiB at most"


def show(report: dict[str, Any], training: Training) -> None:
    """Prints the report.

    Args:
        report: the whole report.
        training: training settings with the transfer settings that are planned for.
    """
    console = new_console()
    print_line(console, report["answer"])
    table = Table(title=f"{_params(report['param_numel'])} parameters", title_justify="left")
    table.add_column("")
    table.add_column("bytes or time", justify="right")
    table.add_column("fits")
    words = {True: "yes", False: "no", None: "not given"}
    fits, gpu, host = report["fits"], report["gpu_bytes"], report["host_bytes"]
    names = {
        "params": f"parameters, {training.quantised or training.param_dtype}",
        "grads": f"gradients, {training.grad_dtype}" + (", those that wait" if training.in_backward else ""),
        "resident_state": "state that stays",
        "ring": _ring_label(training),
        "work": "work memory of Muon" if training.quantised is None else "exact values in a step",
        "window": "window, in place of activations" if training.offload.window_bytes == "auto" else "window",
        "other": "other",
    }
    if training.largest_matrix is None and training.quantised is None:
        del names["work"]
    for name, label in names.items():
        table.add_row(f"GPU: {label}", gb(gpu[name]))
    table.add_row("GPU in all", gb(gpu["total"]), words[fits["gpu"]], end_section=True)
    if training.params_on_host:
        table.add_row("host, one rank: parameters and gradients", gb(host["rank_params_and_grads"]))
    table.add_row("host, one rank: state" if training.params_on_host else "host, one rank", gb(host["rank"]))
    table.add_row("host, one rank, during an asynchronous save", gb(host["rank_in_save"]))
    table.add_row(f"host, node of {training.ranks_per_node}", gb(host["node"]), words[fits["host"]])
    table.add_row(
        f"host, node of {training.ranks_per_node}, during an asynchronous save",
        gb(host["node_in_save"]),
        words[fits["host_in_save"]],
        end_section=True,
    )
    predicted, largest = report["predicted"], report["largest_param_numel"]
    table.add_row("step alone (prediction)", ms(predicted["alone_ms"]))
    exposed = ms(predicted["exposed_ms_at_least"])
    table.add_row("added to an iteration, at least (prediction)", exposed, end_section=True)
    if any(value is not None for value in fits.values()):
        table.add_row("largest model", _largest(largest["training"]))
        table.add_row("largest model with an asynchronous save", _largest(largest["with_save"]))
    console.print(table)
    for note in report["notes"]:
        print_line(console, note)
