"""The ``fused-offload`` command: what a model will take, and whether this machine is fit for it."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .config import DEFAULT_CHUNK_BYTES, DEFAULT_DEPTH, MIB, OffloadConfig
from .tuning.budget import (
    DEFAULT_LINK_GBPS,
    MASTERS,
    PARAM_DTYPES,
    Memory,
    Training,
    largest_model,
    memory_of,
    step_time,
)
from .tuning.doctor import examine, exit_code
from .tuning.machine import read_machine
from .tuning.sizes import Decoder, count_config

_PLAN_EXAMPLES = """\
GB = 1e9 bytes, MiB = 2^20 bytes. Examples:
  fused-offload plan --params 13e9 --gpu-memory 80 --host-memory 512
  fused-offload plan --config config.json --master remainder --moments bf16 --data-parallel 8 --ranks-per-node 8
  fused-offload plan --layers 32 --hidden 4096 --ffn 14336 --heads 32 --kv-heads 8 --vocab 128256 --json
"""
_DOCTOR_EXAMPLES = """\
Exit codes: 0 nothing to do, 1 warnings, 2 problems. Examples:
  fused-offload doctor
  fused-offload doctor --json | python -m json.tool
"""
_MEGATRON_SIZES = ("layers", "hidden", "ffn", "heads", "vocab")
_SIZE_HELP = {
    "ffn": "width of the MLP, and of each expert",
    "kv-heads": "default: --heads",
    "head-dim": "default: --hidden / --heads",
    "experts": "of every layer; default: a dense model",
}


class _Parser(argparse.ArgumentParser):
    """Reports errors in one line."""

    def error(self, message: str) -> NoReturn:
        """Ends the process with exit code 2."""
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: the command line without the program's name; that of this process if None.

    Returns:
        The exit code.
    """
    parser = _build_parser()
    options = parser.parse_args(arguments)
    try:
        return _doctor(options) if options.command == "doctor" else _plan(options)
    except ValueError as error:
        print(f"fused-offload {options.command}: error: {error}", file=sys.stderr)
        return 2


def _build_parser() -> _Parser:
    parser = _Parser(prog="fused-offload", description="Adam with its state in host memory: plans and checks.")
    parser.add_argument("--version", action="version", version=importlib.metadata.version("fused-offload"))
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser, metavar="COMMAND")
    _add_plan(commands)
    doctor = commands.add_parser(
        "doctor",
        help="check this machine",
        description="Looks at everything that decides how fast state streams here, and says what to do about it.",
        epilog=_DOCTOR_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    doctor.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


def _add_plan(commands: Any) -> None:
    plan = commands.add_parser(
        "plan",
        help="memory and step time of a model, before it is run",
        description="Memory on GPU and host, and a prediction of the step's time. Needs no GPU.",
        epilog=_PLAN_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    model = plan.add_argument_group("model: one of --params, --config, or Megatron's sizes")
    model.add_argument("--params", type=_positive, metavar="N", help="parameters of the whole model, such as 13e9")
    model.add_argument("--config", type=Path, metavar="FILE", help="a Hugging Face config.json on this machine")
    for name in (*_MEGATRON_SIZES, "kv-heads", "head-dim", "experts"):
        model.add_argument(f"--{name}", type=_positive_int, metavar="N", help=_SIZE_HELP.get(name))
    model.add_argument("--tied", action="store_true", help="the output layer is the embedding")
    model.add_argument("--no-gated", action="store_true", help="MLPs of two matrices instead of SwiGLU's three")
    forms = plan.add_argument_group("dtypes")
    forms.add_argument("--param-dtype", choices=PARAM_DTYPES, default="bf16")
    forms.add_argument("--grad-dtype", choices=PARAM_DTYPES, default="bf16")
    forms.add_argument("--master", choices=MASTERS, help="default: fp32, and none for fp32 parameters")
    forms.add_argument("--moments", choices=PARAM_DTYPES, default="fp32", help="stored dtype of both moments")
    ranks = plan.add_argument_group("ranks")
    ranks.add_argument("--data-parallel", type=_positive_int, default=1, metavar="N", help="ranks that share the state")
    ranks.add_argument("--model-parallel", type=_positive_int, default=1, metavar="N", help="tensor x pipeline ranks")
    ranks.add_argument("--shard-params", action="store_true", help="FSDP: parameters and gradients are shared as well")
    ranks.add_argument("--ranks-per-node", type=_positive_int, default=1, metavar="N", help="default: 1")
    defaults = OffloadConfig()
    offload = plan.add_argument_group("offload, as in OffloadConfig")
    offload.add_argument("--fraction", type=float, default=defaults.fraction, help="offloaded share of the state")
    offload.add_argument(
        "--window-bytes", type=_bytes, default=0, metavar="BYTES", help="state prefetched under backward"
    )
    offload.add_argument(
        "--chunk-bytes", type=_bytes, default=DEFAULT_CHUNK_BYTES, metavar="BYTES", help="default: %(default)s"
    )
    offload.add_argument("--depth", type=_positive_int, default=DEFAULT_DEPTH, metavar="N", help="default: %(default)s")
    machine = plan.add_argument_group("machine")
    machine.add_argument("--gpu-memory", type=_positive, metavar="GB", help="of one GPU")
    machine.add_argument("--host-memory", type=_positive, metavar="GB", help="of one node, what training may take")
    machine.add_argument("--other-gpu", type=_not_negative, default=0.0, metavar="GB", help="activations and others")
    machine.add_argument(
        "--link-gbps",
        type=_positive,
        metavar="GB/s",
        help=f"each way, both directions busy; default {DEFAULT_LINK_GBPS:g}, an H100 over PCIe 5 x16, an assumption",
    )
    plan.add_argument("--json", action="store_true", help="print JSON instead of a table")


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 <= value < 1e18:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0 and below 1e18")
    return value


def _not_negative(text: str) -> float:
    return _number(text)


def _positive(text: str) -> float:
    value = _number(text)
    if not value:
        raise argparse.ArgumentTypeError("it should be larger than 0")
    return value


def _bytes(text: str) -> int:
    return int(_number(text))


def _positive_int(text: str) -> int:
    value = _positive(text)
    if not value.is_integer():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(value)


# -- plan ------------------------------------------------------------------------------------------------------------


def _param_numel(options: argparse.Namespace) -> int:
    sizes = [name for name in (*_MEGATRON_SIZES, "kv_heads", "head_dim", "experts") if getattr(options, name)]
    ways = [options.params is not None, options.config is not None, bool(sizes)]
    if sum(ways) != 1:
        raise ValueError("give the model by one of --params, --config, or --layers, --hidden, --ffn, --heads, --vocab")
    if options.params is not None:
        return max(1, int(options.params))
    if options.config is not None:
        return count_config(options.config)
    missing = [f"--{name}" for name in _MEGATRON_SIZES if name not in sizes]
    if missing:
        raise ValueError(f"Megatron's sizes lack {', '.join(missing)}")
    return Decoder(
        layers=options.layers,
        hidden=options.hidden,
        ffn=options.ffn,
        heads=options.heads,
        kv_heads=options.kv_heads or options.heads,
        head_dim=options.head_dim or options.hidden // options.heads,
        vocab=options.vocab,
        tied=options.tied,
        gated=not options.no_gated,
        experts=options.experts or 0,
    ).param_numel()


def _training(options: argparse.Namespace) -> Training:
    return Training(
        param_dtype=options.param_dtype,
        grad_dtype=options.grad_dtype,
        master=options.master or ("none" if options.param_dtype == "fp32" else "fp32"),
        exp_avg=options.moments,
        exp_avg_sq=options.moments,
        data_parallel=options.data_parallel,
        model_parallel=options.model_parallel,
        shard_params=options.shard_params,
        offload=OffloadConfig(
            fraction=options.fraction,
            chunk_bytes=options.chunk_bytes,
            depth=options.depth,
            window_bytes=options.window_bytes,
        ),
        ranks_per_node=options.ranks_per_node,
        other_gpu_bytes=int(options.other_gpu * 1e9),
    )


def _plan(options: argparse.Namespace) -> int:
    numel, training = _param_numel(options), _training(options)
    memory = memory_of(numel, training)
    link_gbps = options.link_gbps or DEFAULT_LINK_GBPS
    time = step_time(memory, link_gbps)
    gpu_bytes = None if options.gpu_memory is None else int(options.gpu_memory * 1e9)
    node_bytes = None if options.host_memory is None else int(options.host_memory * 1e9)
    limits = {"gpu_bytes": gpu_bytes, "node_bytes": node_bytes}
    report = {
        "param_numel": numel,
        "training": dataclasses.asdict(training),
        "gpu_bytes": {
            **{
                name: getattr(memory, name) for name in ("params", "grads", "resident_state", "ring", "window", "other")
            },
            "total": memory.gpu,
        },
        "host_bytes": {
            "rank": memory.host_state,
            "rank_in_save": memory.host_in_save,
            "node": memory.node,
            "node_in_save": memory.node_in_save,
        },
        "fits": {
            "gpu": None if gpu_bytes is None else memory.gpu <= gpu_bytes,
            "host": None if node_bytes is None else memory.node <= node_bytes,
            "host_in_save": None if node_bytes is None else memory.node_in_save <= node_bytes,
        },
        "largest_param_numel": {
            "training": largest_model(training, saving=False, **limits),
            "with_save": largest_model(training, saving=True, **limits),
        },
        "predicted": {
            "alone_ms": time.alone_ms,
            "exposed_ms_at_least": time.exposed_ms,
            "link_gbps": link_gbps,
            "link_assumed": options.link_gbps is None,
        },
        "notes": _notes(options, memory, link_gbps),
    }
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        _show_plan(report, training)
    return 0


def _notes(options: argparse.Namespace, memory: Memory, link_gbps: float) -> list[str]:
    link = "given by --link-gbps"
    if options.link_gbps is None:
        link = "an assumption: what an H100 over PCIe 5 x16 reaches; give your own with --link-gbps"
    notes = [
        f"Times are predictions, from bytes / {link_gbps:g} GB/s each way ({link}). Kernels, launches and the slowdown "
        "of what runs beside the copies are not counted.",
        "Activations and the CUDA context are counted only as --other-gpu says.",
    ]
    if options.ranks_per_node > 1 and memory.host_state:
        notes.append(
            "GPUs of a node share its host memory: two H100s at once reached 35 GB/s each way each, one alone 47. "
            "--link-gbps should be what one GPU reaches while all stream."
        )
    return notes


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.3f} GB"


def _show_plan(report: dict[str, Any], training: Training) -> None:
    console = Console()
    table = Table(title=f"{report['param_numel'] / 1e9:.3f} billion parameters", title_justify="left")
    table.add_column("")
    table.add_column("bytes or time", justify="right")
    table.add_column("fits")
    words = {True: "yes", False: "no", None: "no limit given"}
    ring = report["training"]["offload"]
    fits, gpu, host = report["fits"], report["gpu_bytes"], report["host_bytes"]
    names = {
        "params": f"parameters, {training.param_dtype}",
        "grads": f"gradients, {training.grad_dtype}",
        "resident_state": "state that stays",
        "ring": f"staging ring, {ring['depth']} x {ring['chunk_bytes'] / MIB:g} MiB at most",
        "window": "window",
        "other": "other",
    }
    for name, label in names.items():
        table.add_row(f"GPU: {label}", _gb(gpu[name]))
    table.add_row("GPU in all", _gb(gpu["total"]), words[fits["gpu"]], end_section=True)
    table.add_row("host, one rank", _gb(host["rank"]))
    table.add_row("host, one rank, during an asynchronous save", _gb(host["rank_in_save"]))
    table.add_row(f"host, node of {training.ranks_per_node}", _gb(host["node"]), words[fits["host"]])
    table.add_row(
        f"host, node of {training.ranks_per_node}, during an asynchronous save",
        _gb(host["node_in_save"]),
        words[fits["host_in_save"]],
        end_section=True,
    )
    predicted, largest = report["predicted"], report["largest_param_numel"]
    table.add_row("step alone (prediction)", f"{predicted['alone_ms']:.0f} ms")
    table.add_row(
        "added to an iteration, at least (prediction)", f"{predicted['exposed_ms_at_least']:.0f} ms", end_section=True
    )
    if largest["training"] is not None:
        table.add_row("largest model", f"{largest['training'] / 1e9:.2f} billion")
        table.add_row("largest model with an asynchronous save", f"{largest['with_save'] / 1e9:.2f} billion")
    console.print(table)
    for note in report["notes"]:
        console.print(note, highlight=False, markup=False, soft_wrap=True)


# -- doctor ----------------------------------------------------------------------------------------------------------


def _doctor(options: argparse.Namespace) -> int:
    findings = examine(read_machine())
    if options.json:
        print(json.dumps([finding._asdict() for finding in findings], indent=2))
        return exit_code(findings)
    table = Table()
    for column in ("", "what", "found", "what to do"):
        table.add_column(column)
    colours = {"ok": "green", "warning": "yellow", "problem": "red"}
    for finding in findings:
        level = f"[{colours[finding.level]}]{finding.level}[/]"
        table.add_row(level, *(escape(text) for text in (finding.what, finding.found, finding.advice)))
    Console().print(table)
    return exit_code(findings)


if __name__ == "__main__":
    sys.exit(main())
