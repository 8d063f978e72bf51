"""`fused-offload plan`: memory and step time of a model, as a table or as JSON."""

from __future__ import annotations

import argparse
import dataclasses
import json
from functools import partial
from typing import Any, NamedTuple

from rich.table import Table

from fused_offload.config import OffloadConfig
from fused_offload.model_hooks.backward_step import PART_BYTES
from fused_offload.plan.transfer_settings import settle
from fused_offload.profiles import profile_files as profiles
from fused_offload.profiles.profile import Choice, Profile
from fused_offload.profiles.profile_files import Found
from fused_offload.profiles.units import MIB, MOST_PARAMS

from .advice import advice
from .budget import (
    NEWTON_SCHULZ_TFLOPS,
    Memory,
    StepTime,
    Training,
    fits_into,
    largest_model,
    memory_of,
    newton_schulz_ms,
    profile_step_time,
    step_time,
)
from .cli_choices import DEFAULT_LINK_GBPS
from .output import new_console
from .sizes import MEGATRON_SIZES, Decoder, count_config, head_dim_of


def _param_numel(options: argparse.Namespace) -> int:
    numel = _count(options)
    if numel >= MOST_PARAMS:
        raise ValueError(f"a model of {numel:.3g} parameters is beyond what can be planned, {MOST_PARAMS:g}")
    return numel


def _count(options: argparse.Namespace) -> int:
    names = (*MEGATRON_SIZES, "kv_heads", "head_dim", "experts", "tied", "no_gated")
    sizes = [name for name in names if getattr(options, name)]
    given = [f"--{name}" for name in ("params", "config") if getattr(options, name) is not None]
    if len(given) + bool(sizes) != 1:
        given += [f"--{name}".replace("_", "-") for name in sizes]
        raise ValueError(
            "give the model by one of --params, --config, or --layers, --hidden, --ffn, --heads, --vocab"
            + (f", not by {' and '.join(given)} at once" if given else "")
        )
    if options.params is not None:
        return int(options.params)
    if options.config is not None:
        return count_config(options.config)
    missing = [f"--{name}" for name in MEGATRON_SIZES if name not in sizes]
    if missing:
        raise ValueError(f"Megatron's sizes lack {', '.join(missing)}; give them, too, or the count with --params")
    return Decoder(
        layers=options.layers,
        hidden=options.hidden,
        ffn=options.ffn,
        heads=options.heads,
        kv_heads=options.kv_heads or options.heads,
        head_dim=options.head_dim or head_dim_of(options.hidden, options.heads),
        vocab=options.vocab,
        tied=options.tied,
        gated=not options.no_gated,
        experts=options.experts or 0,
    ).param_numel()


def _training(options: argparse.Namespace) -> Training:
    """Training settings from the options; transfer settings that are not given are ``"auto"``."""
    offload = OffloadConfig(
        fraction=options.fraction,
        window_bytes=options.window_bytes,
        chunk_bytes=options.chunk_bytes,
        depth=options.depth or "auto",
        transport="auto" if options.muon is None else "copy",
    )
    return Training(
        param_dtype=options.param_dtype,
        grad_dtype=options.grad_dtype or options.param_dtype,
        master=options.master or ("none" if options.param_dtype == "fp32" else "fp32"),
        exp_avg=options.moments,
        exp_avg_sq=options.moments,
        data_parallel=options.data_parallel,
        model_parallel=options.model_parallel,
        shard_params=options.shard_params,
        offload=offload,
        ranks_per_node=options.ranks_per_node,
        other_gpu_bytes=int(options.other_gpu * 1e9),
        in_backward=options.step_in_backward,
        largest_matrix=options.muon,
        params_on_host=options.params_on_host,
    )


class _Tuning:
    """Sets transfer settings by a profile's choice for the size of the state.

    Without a profile it leaves them as they are.
    """

    def __init__(self, profile: Profile | None) -> None:
        self._profile = profile
        self._known: dict[tuple[Training, Choice], Training] = {}

    def settle(self, training: Training, numel: int) -> Training:
        """Sets transport, chunks and depth. Returns the same object for the same choice.

        Args:
            training: training settings; transfer settings may be ``"auto"``.
            numel: parameters of the whole model.
        """
        if self._profile is None:
            return training
        state_bytes = memory_of(numel, training).host_state
        key = training, self._profile.choice_for(state_bytes)
        if key not in self._known:
            self._known[key] = _streaming_by(key[1], training, state_bytes)
        return self._known[key]


def _streaming_by(choice: Choice | None, training: Training, state_bytes: int) -> Training:
    """Replaces ``"auto"`` by transport, chunks and depth for a size of state.

    Args:
        choice: choice of a profile, or None without one.
        training: training settings.
        state_bytes: bytes of a rank's state.
    """
    streaming = settle(training.offload, choice, state_bytes)
    if streaming.programs is not None:
        how: dict[str, Any] = {"transport": "zero_copy", "zero_copy_programs": streaming.programs}
    else:
        how = {"transport": "copy", "chunk_bytes": streaming.chunk_bytes, "depth": streaming.depth}
    return dataclasses.replace(training, offload=dataclasses.replace(training.offload, **how))


_HOST_MS = 3.0
"""Step time below which host time dominates, which has varied by two thirds."""


class _Prediction(NamedTuple):
    """A predicted step.

    Attributes:
        time: the time of the step.
        link_gbps: bytes over time, each way.
        source: ``"profile"``, ``"link_gbps"`` for the option, or ``"assumption"``.
        how: derivation in words.
        gpus: number of GPUs of a host that copy at once at this speed; None if the option says it.
    """

    time: StepTime
    link_gbps: float
    source: str
    how: str
    gpus: int | None


def _predict(
    options: argparse.Namespace, numel: int, training: Training, memory: Memory, profile: Profile | None
) -> _Prediction:
    gpus: int | None = 1
    link_gbps = DEFAULT_LINK_GBPS
    source, where = "assumption", "an assumption: what an H100 over PCIe 5 x16 reaches; give your own with --link-gbps"
    if options.link_gbps is not None:
        gpus, link_gbps = None, options.link_gbps
        source, where = "link_gbps", "given by --link-gbps"
    elif profile is not None:
        gpus, link_gbps = profile.link_of(training.ranks_per_node)
        source, where = "profile", "of this machine's profile" + (f", {gpus} GPUs at once" if gpus > 1 else "")
        if training.largest_matrix is None:
            time = profile_step_time(memory, training, profile)
            moved = memory.host_state + memory.host_params
            rate = moved / time.alone_ms / 1e6 if moved else link_gbps
            how = f"from steps that fused-offload tune measured on this machine, {profile.measured}"
            if gpus > 1:
                how += f", and copies of {gpus} GPUs at once, {link_gbps:.1f} GB/s each way and GPU"
            return _Prediction(time, rate, source, how, gpus)
    compute_ms = newton_schulz_ms(numel, training)
    bounds = f"bytes / {link_gbps:g} GB/s each way ({where})"
    if compute_ms:
        bounds = (
            f"the longer of {bounds} and Newton-Schulz at {NEWTON_SCHULZ_TFLOPS:g} TFLOP/s, {_duration(compute_ms)} "
            "(an assumption for large matrices on an H100)"
        )
    how = f"from {bounds}. Kernels, launches and the slowdown of what runs beside the copies are not counted"
    return _Prediction(step_time(memory, link_gbps, compute_ms), link_gbps, source, how, gpus)


def plan(options: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    if options.ranks_per_node > options.data_parallel * options.model_parallel:
        raise ValueError(
            f"--ranks-per-node is {options.ranks_per_node}, but there are {options.data_parallel} x "
            f"{options.model_parallel} ranks in all; see --data-parallel and --model-parallel"
        )
    numel, training = _param_numel(options), _training(options)
    found = profiles.of_device(0) if options.link_gbps is None else None
    profile = None if found is None else found.profile
    tuning, untuned = _Tuning(profile), training
    training_of = partial(tuning.settle, untuned)
    training = training_of(numel)
    memory = memory_of(numel, training)
    settled = _streaming_by(None, training, memory.host_state)
    prediction = _predict(options, numel, training, memory, profile)
    time = prediction.time
    limits: dict[str, int | None] = {
        "gpu_bytes": None if options.gpu_memory is None else int(options.gpu_memory * 1e9),
        "node_bytes": None if options.host_memory is None else int(options.host_memory * 1e9),
    }
    report: dict[str, Any] = {
        "param_numel": numel,
        "limits": limits,
        "training": dataclasses.asdict(settled),
        "gpu_bytes": {
            **{
                name: getattr(memory, name)
                for name in ("params", "grads", "resident_state", "ring", "work", "window", "other")
            },
            "total": memory.gpu,
        },
        "host_bytes": {
            "rank": memory.host_state,
            "rank_params_and_grads": memory.host_params,
            "rank_in_save": memory.host_in_save,
            "node": memory.node,
            "node_in_save": memory.node_in_save,
        },
        "fits": fits_into(memory, **limits)._asdict(),
        "largest_param_numel": {
            "training": largest_model(training_of, saving=False, **limits),
            "with_save": largest_model(training_of, saving=True, **limits),
        },
        "predicted": {
            "alone_ms": time.alone_ms,
            "exposed_ms_at_least": time.exposed_ms,
            "hidden_bytes": memory.hidden,
            "link_gbps": prediction.link_gbps,
            "link_assumed": prediction.source == "assumption",
            "gpus_at_once": prediction.gpus,
            "source": prediction.source,
        },
        "notes": [*_notes(options, memory, prediction, found), *advice(numel, untuned, tuning.settle, **limits)],
    }
    report["answer"] = _answer(report)
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        _show_plan(report, settled)
    return 0


def _notes(options: argparse.Namespace, memory: Memory, prediction: _Prediction, found: Found | None) -> list[str]:
    notes = [
        f"Times are predictions, {prediction.how}.",
        "Activations and the CUDA context are counted only as --other-gpu says.",
    ]
    if prediction.source == "profile" and 0 < prediction.time.alone_ms < _HOST_MS:
        notes.append(
            "A step this short depends on the host's speed, which changes from one minute to the next: expect the time "
            "to be right within some tens of percent."
        )
    if prediction.source == "profile" and (options.chunk_bytes != "auto" or options.depth):
        notes.append("They are of the chunks that fused-offload tune chose, not of --chunk-bytes and --depth.")
    if options.window_bytes == "auto":
        notes.append(
            f"A window of 'auto' takes what activations gave back, and no more GPU memory: up to {_gb(memory.hidden)} "
            "of state, for activations are no more than --other-gpu. How much it is, only a run can tell."
        )
    if options.muon is not None:
        notes.append(
            "All parameters are counted as matrices under Muon, and for the iteration as of the size of the largest; "
            "plan embeddings, the output layer and all others by themselves, without --muon."
        )
    if options.step_in_backward:
        size = f"{PART_BYTES / MIB:g} MiB"
        notes.append(f"Gradients wait on the GPU until there are {size} of them; a larger one counts by itself.")
    if options.params_on_host:
        notes.append(
            "FSDP2 brings parameters to the GPU layer by layer: --other-gpu should count the largest layer four times "
            "(itself, its gradients, and both once more while gradients are reduced and copied), and what is outside "
            "of layers. torch's page-locked memory rounds each tensor up to a power of two, which is not counted."
        )
    if found is not None and found.is_outdated:
        notes.append(f"Profile of this machine {found.reason}.")
    if options.ranks_per_node > 1 and memory.host_state:
        notes += _notes_on_sharing(options.ranks_per_node, prediction)
    return notes


def _notes_on_sharing(ranks: int, prediction: _Prediction) -> list[str]:
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


_MEASURE = "To measure all at once, run fused-offload tune on a host with all its GPUs visible"


def _answer(report: dict[str, Any]) -> str:
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
        time = f"{gpus}a step takes about {_duration(alone_ms)}"
    if alone_ms and not exposed_ms:
        time += ", which may all run under forward and backward passes"
    elif exposed_ms < alone_ms:
        time += f" and adds at least {_duration(exposed_ms)} to an iteration"
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


def _duration(ms: float) -> str:
    if ms >= 1000:
        return f"{ms / 1e3:,.{0 if ms >= 9950 else 1}f} s"
    return _ms(ms)


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.3f} GB"


def _ms(value: float) -> str:
    return f"{value:.0f} ms" if value >= 10 else f"{value:.2g} ms"


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


def _show_plan(report: dict[str, Any], training: Training) -> None:
    console = new_console()
    console.print(report["answer"], highlight=False, markup=False, soft_wrap=True)
    table = Table(title=f"{_params(report['param_numel'])} parameters", title_justify="left")
    table.add_column("")
    table.add_column("bytes or time", justify="right")
    table.add_column("fits")
    words = {True: "yes", False: "no", None: "not given"}
    fits, gpu, host = report["fits"], report["gpu_bytes"], report["host_bytes"]
    names = {
        "params": f"parameters, {training.param_dtype}",
        "grads": f"gradients, {training.grad_dtype}" + (", those that wait" if training.in_backward else ""),
        "resident_state": "state that stays",
        "ring": _ring_label(training),
        "work": "work memory of Muon",
        "window": "window, in place of activations" if training.offload.window_bytes == "auto" else "window",
        "other": "other",
    }
    if training.largest_matrix is None:
        del names["work"]
    for name, label in names.items():
        table.add_row(f"GPU: {label}", _gb(gpu[name]))
    table.add_row("GPU in all", _gb(gpu["total"]), words[fits["gpu"]], end_section=True)
    if training.params_on_host:
        table.add_row("host, one rank: parameters and gradients", _gb(host["rank_params_and_grads"]))
    table.add_row("host, one rank: state" if training.params_on_host else "host, one rank", _gb(host["rank"]))
    table.add_row("host, one rank, during an asynchronous save", _gb(host["rank_in_save"]))
    table.add_row(f"host, node of {training.ranks_per_node}", _gb(host["node"]), words[fits["host"]])
    table.add_row(
        f"host, node of {training.ranks_per_node}, during an asynchronous save",
        _gb(host["node_in_save"]),
        words[fits["host_in_save"]],
        end_section=True,
    )
    predicted, largest = report["predicted"], report["largest_param_numel"]
    table.add_row("step alone (prediction)", _ms(predicted["alone_ms"]))
    exposed = _ms(predicted["exposed_ms_at_least"])
    table.add_row("added to an iteration, at least (prediction)", exposed, end_section=True)
    if any(value is not None for value in fits.values()):
        table.add_row("largest model", _largest(largest["training"]))
        table.add_row("largest model with an asynchronous save", _largest(largest["with_save"]))
    console.print(table)
    for note in report["notes"]:
        console.print(note, highlight=False, markup=False, soft_wrap=True)
