"""The ``fused-offload`` command: plans models, tunes and examines this machine.

Commands are imported when they run, since help should not wait for the import of torch.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

from fused_offload.profiles.units import MIB
from fused_offload.tuning.cli_choices import (
    DEFAULT_LINK_GBPS,
    DEFAULT_TUNING_SECONDS,
    DTYPES,
    MASTERS,
    MOMENT_DTYPES,
)
from fused_offload.tuning.recipes import RECIPES
from fused_offload.tuning.sizes import MEGATRON_SIZES

from . import __version__
from .config import DEFAULT_CHUNK_BYTES, DEFAULT_DEPTH, LEAST_DEFAULT_CHUNK_BYTES, OffloadConfig
from .profiles import units

_PLAN_EXAMPLES = """\
GB = 1e9 bytes, GiB = 2^30, MiB = 2^20. Counts may end in K, M, B or T, bytes in any of kB, MB, GB, TB, KiB, MiB, GiB,
TiB. Exit codes: 0 planned, also what does not fit (the table and the JSON say so), 2 it cannot be. Examples:
  fused-offload plan --params 13B --master remainder --moments bf16 --gpu-memory 80 --host-memory 128GiB --other-gpu 12
  fused-offload plan --config config.json --master remainder --moments bf16 --data-parallel 8 --ranks-per-node 8
  fused-offload plan --layers 32 --hidden 4096 --ffn 14336 --heads 32 --kv-heads 8 --vocab 128256 --json
"""
_DOCTOR_EXAMPLES = """\
Exit codes: 0 nothing to do, 1 warnings, 2 problems. Examples:
  fused-offload doctor
  fused-offload doctor --json | python -m json.tool
"""
_TUNE_EXAMPLES = """\
GB = 1e9 bytes, MiB = 2^20 bytes. Exit codes: 0 done, 2 it cannot be measured. Examples:
  fused-offload tune
  fused-offload tune --device 1 --json --plot tuning.png > tuning.json
"""
_SIZE_HELP = {
    "layers": "decoder layers",
    "hidden": "width of the model",
    "heads": "attention heads",
    "vocab": "rows of the embedding",
    "ffn": "width of the MLP, and of each expert",
    "kv-heads": "default: --heads",
    "head-dim": "default: --hidden / --heads",
    "experts": "of every layer; default: a dense model",
}


class _Parser(argparse.ArgumentParser):
    """Reports errors in one line, and accepts no abbreviated options.

    A new option could change the meaning of an abbreviation.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As `argparse.ArgumentParser`."""
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def error(self, message: str) -> NoReturn:
        """Ends the process with exit code 2."""
        self.exit(2, f"{self.prog}: error: {units.printable(message)} (see {self.prog} --help)\n")

    def _print_message(self, message: str, file: Any = None) -> None:
        """Writes a message; unlike in argparse, a failure to write help is an error."""
        (file or sys.stderr).write(message)

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """Refuses ``--option=--``, on which argparse of Python 3.11 fails."""
        if action.option_strings and arg_strings == ["--"]:
            raise argparse.ArgumentError(action, "expected one argument")
        return super()._get_values(action, arg_strings)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: the command line without the program's name; that of this process if None.

    Returns:
        The exit code.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the parent process: print would fail or use the other stream
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - as long as the process
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # for letters that the terminal lacks
    parser, commands = _build_parser()
    program = parser.prog
    try:
        try:
            options, unknown = parser.parse_known_args(arguments)
            program = commands[options.command].prog
            if unknown:
                commands[options.command].error(f"unrecognized arguments: {' '.join(unknown)}")
            return _run(options)
        finally:
            sys.stdout.flush()  # a failure at exit would print a traceback and end with code 120
    except BrokenPipeError:  # the reader closed the pipe, as `head` does
        _discard(sys.stdout)
        return _end(1)
    except (ValueError, OSError, MemoryError) as error:
        return _end(2, f"{program}: error: {_in_one_line(error)}")
    except KeyboardInterrupt:
        return _end(130, f"{program}: interrupted")


def _end(code: int, line: str = "") -> int:
    """Writes a last line if possible; returns the exit code."""
    for stream, text in ((sys.stdout, ""), (sys.stderr, line and f"{line}\n")):
        try:
            stream.write(text)
            stream.flush()
        except OSError:
            _discard(stream)
    return code


def _discard(stream: TextIO) -> None:
    """Redirects a stream to /dev/null, with the rest of its buffer."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _in_one_line(error: Exception) -> str:
    """Message of an error in one line; its type if the message is empty."""
    lines = (line.strip() for line in str(error).splitlines())
    return units.printable(" ".join(line for line in lines if line) or type(error).__name__)


def _run(options: argparse.Namespace) -> int:
    try:
        command = _import_command(options.command)
    except (ImportError, OSError) as error:  # torch raises OSError where its libraries are damaged
        package = _package_of(error)
        if package is None:
            raise
        why = f"{type(error).__name__}: {error}"
        raise ValueError(f"{package} cannot be imported ({why}): install {package} again") from error
    return command(options)


def _import_command(name: str) -> Callable[[argparse.Namespace], int]:
    if name == "doctor":
        from fused_offload.tuning.doctor_command import doctor

        return doctor
    if name == "tune":
        from fused_offload.tuning.tune_command import tune

        return tune
    from fused_offload.tuning.plan_command import plan

    return plan


def _package_of(error: ImportError | OSError) -> str | None:
    """Package whose import failed, or None if the fault is in this package."""
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules.append(getattr(error, "name", None) or "")  # a missing module has no frame
    never = {"", "__main__", "fused_offload", *sys.stdlib_module_names}
    packages = (module.partition(".")[0] for module in modules)
    return next((package for package in packages if package not in never), None)


def _build_parser() -> tuple[_Parser, Mapping[str, argparse.ArgumentParser]]:
    """The parser, and the parser of each command by its name."""
    parser = _Parser(
        prog="fused-offload",
        description="For training with optimizer state in host memory: says what will fit and how long a step takes, "
        "measures what is fastest on this machine, and finds what makes it slow.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser, metavar="COMMAND")
    _add_plan(commands)
    _add_tune(commands)
    doctor = commands.add_parser(
        "doctor",
        help="find what would make this machine slow",
        description="Looks at everything that decides how fast state streams here, and says what to do about it.",
        epilog=_DOCTOR_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    doctor.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser, commands.choices


def _add_plan(commands: Any) -> None:
    plan = commands.add_parser(
        "plan",
        help="memory and step time of a model, before it is run",
        description="Memory on GPU and host, and a prediction of the step's time. Needs no GPU.",
        epilog=_PLAN_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_model(plan)
    _add_dtypes(plan)
    _add_ranks(plan)
    _add_offload(plan)
    _add_machine(plan)
    plan.add_argument("--json", action="store_true", help="print JSON instead of a table")


def _add_model(plan: argparse.ArgumentParser) -> None:
    model = plan.add_argument_group("model: one of --params, --config, or Megatron's sizes")
    model.add_argument(
        "--params", type=units.count, metavar="N", help="parameters of the whole model, such as 13e9 or 13B"
    )
    model.add_argument("--config", type=Path, metavar="FILE", help="a Hugging Face config.json on this machine")
    for name in (*MEGATRON_SIZES, "kv-heads", "head-dim", "experts"):
        model.add_argument(f"--{name}", type=units.positive_int, metavar="N", help=_SIZE_HELP.get(name))
    model.add_argument("--tied", action="store_true", help="the output layer is the embedding")
    model.add_argument("--no-gated", action="store_true", help="MLPs of two matrices instead of SwiGLU's three")
    model.add_argument(
        "--muon",
        type=units.matrix,
        metavar="ROWSxCOLUMNS",
        help="all parameters are matrices under Muon, the largest on a rank of this size, such as 4096x11008; "
        "--moments is then the dtype of the momentum",
    )


def _add_dtypes(plan: argparse.ArgumentParser) -> None:
    dtypes = plan.add_argument_group("dtypes")
    dtypes.add_argument("--param-dtype", choices=DTYPES, default="bf16", help="default: %(default)s")
    dtypes.add_argument(
        "--quantised",
        choices=RECIPES,
        help="all parameters are TransformerEngine's of this recipe, and stand for --param-dtype; give --largest-param",
    )
    dtypes.add_argument(
        "--largest-param",
        type=units.matrix,
        metavar="ROWSxCOLUMNS",
        help="largest quantised parameter on a rank, such as 28672x4096; a step takes its size in fp32",
    )
    dtypes.add_argument(
        "--fp8-param-gather",
        action="store_true",
        help="the quantised parameters are Megatron's, whose distributed optimizer divides the state",
    )
    dtypes.add_argument(
        "--grad-dtype", choices=DTYPES, help="default: --param-dtype; Megatron's are fp32 unless it is told otherwise"
    )
    dtypes.add_argument(
        "--master",
        choices=MASTERS,
        help="dtype of the master weights; remainder: of fp32 masters the 16 bits that a bf16 parameter lacks "
        "(store_param_remainders=True); default: fp32, and none for fp32 parameters",
    )
    dtypes.add_argument(
        "--moments", choices=MOMENT_DTYPES, default="fp32", help="stored dtype of both moments; default: %(default)s"
    )


def _add_ranks(plan: argparse.ArgumentParser) -> None:
    ranks = plan.add_argument_group("ranks")
    ranks.add_argument(
        "--data-parallel",
        type=units.positive_int,
        default=1,
        metavar="N",
        help="ranks that the state is divided among, Muon's only with --layer-wise; default: 1",
    )
    ranks.add_argument(
        "--model-parallel",
        type=units.positive_int,
        default=1,
        metavar="N",
        help="tensor x pipeline ranks; default: 1",
    )
    ranks.add_argument(
        "--layer-wise",
        action="store_true",
        help="Megatron's layer-wise Muon: data-parallel ranks share the matrices of --muon",
    )
    ranks.add_argument("--shard-params", action="store_true", help="FSDP: parameters and gradients are divided, too")
    ranks.add_argument(
        "--ranks-per-node",
        type=units.positive_int,
        default=1,
        metavar="N",
        help="with state in one host's memory, each with a GPU of its own; the time is that of so many GPUs at once "
        "if tune measured it; default: 1",
    )


def _add_offload(plan: argparse.ArgumentParser) -> None:
    defaults = OffloadConfig()
    offload = plan.add_argument_group("offload, as in OffloadConfig")
    offload.add_argument(
        "--fraction",
        type=units.share,
        default=defaults.fraction,
        metavar="SHARE",
        help="offloaded share of the state, 0 to 1; default: %(default)g",
    )
    offload.add_argument(
        "--window-bytes",
        type=units.window_bytes,
        default=0,
        metavar="BYTES",
        help="state prefetched under backward, or auto: what activations gave back, of --other-gpu at most; default: 0",
    )
    offload.add_argument(
        "--step-in-backward", action="store_true", help="gradients are applied and freed during the backward pass"
    )
    offload.add_argument(
        "--params-on-host",
        action="store_true",
        help="FSDP2's CPUOffloadPolicy: parameters and gradients are in host memory, too",
    )
    offload.add_argument(
        "--chunk-bytes",
        type=units.chunk_bytes,
        default="auto",
        metavar="BYTES",
        help="such as 24MiB, or auto, the default: what tune chose on this machine (not with --link-gbps), or a "
        f"sixteenth of the state, from {LEAST_DEFAULT_CHUNK_BYTES // MIB}MiB to {DEFAULT_CHUNK_BYTES // MIB}MiB",
    )
    offload.add_argument(
        "--depth",
        type=units.positive_int,
        metavar="N",
        help=f"default: what tune chose on this machine (not with --link-gbps), or {DEFAULT_DEPTH}",
    )


def _add_machine(plan: argparse.ArgumentParser) -> None:
    machine = plan.add_argument_group("machine")
    machine.add_argument("--gpu-memory", type=units.positive_gb, metavar="GB", help="of one GPU, such as 80 or 79GiB")
    machine.add_argument(
        "--host-memory", type=units.positive_gb, metavar="GB", help="of one node, what training may take"
    )
    machine.add_argument(
        "--other-gpu",
        type=units.gb,
        default=0.0,
        metavar="GB",
        help="your estimate of activations, CUDA context and all else; default: 0",
    )
    machine.add_argument(
        "--link-gbps",
        type=units.link_gbps,
        metavar="GB/s",
        help="each way, both directions busy; default: this machine's profile (fused-offload tune), or else "
        f"{DEFAULT_LINK_GBPS:g}, an H100 over PCIe 5 x16, an assumption",
    )


def _add_tune(commands: Any) -> None:
    tune = commands.add_parser(
        "tune",
        help="measure this machine, and keep what is fastest",
        description="Measures the link, and optimizer steps over chunk sizes, depths and transports. Keeps the fastest "
        "as\nthis user's profile, which OffloadConfig's \"auto\" takes from then on. Needs a CUDA GPU. Copies of all "
        "visible\nGPUs at once are measured, too, for plan --ranks-per-node.",
        epilog=_TUNE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    tune.add_argument("--device", type=units.index, default=0, metavar="N", help="CUDA device; default: %(default)s")
    tune.add_argument(
        "--seconds",
        type=units.positive,
        default=DEFAULT_TUNING_SECONDS,
        metavar="S",
        help="compare for about so long, but time every way once in any case; starting and a few last steps come on "
        "top; default: %(default)g",
    )
    tune.add_argument("--no-save", action="store_true", help="keep no profile")
    tune.add_argument("--json", action="store_true", help="print JSON with every measured step instead of tables")
    tune.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the measurements; needs matplotlib")


if __name__ == "__main__":
    sys.exit(main())
