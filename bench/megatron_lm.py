r"""Runs Megatron-LM's own pretrain_gpt.py with one optimizer after the other.

    python bench/megatron_lm.py --megatron-lm DIR --results FILE.json [--cases NAME ...] \
        [--gpus 2 --tp 2]
    python bench/megatron_lm.py --megatron-lm DIR --results FILE.json \
        --tiny --device cpu    # says nothing about speed

Each case is a process of its own per GPU, started by torchrun from that checkout, with mock data,
without checkpoints and without a network. `stock` is TransformerEngine's FusedAdam as Megatron uses
it by default; `stock-10B` and `stock-6B` are precision-aware, with remainders and moments in
float32 or bfloat16. `hybrid-F` is Megatron's HybridDeviceOptimizer with F percent offloaded.
`ours-F-FORMAT-WINDOW` is FusedOffloadAdam.

Times are those between the beginnings of iterations on the GPU, the median of the later half.
`held_bytes` is the GPU memory that is allocated where the last iteration begins.
Nothing is waited for between two lines of Megatron's log, as in training.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from machine import check_device, check_writable, machine_facts

RANK = Path(__file__).with_name("megatron_lm_rank.py")
MOMENTS = {"12B": "fp32", "10B": "fp32", "6B": "bf16", "4.06B": "fp8"}
"""Dtype of both moments by format. Megatron calls 8 bits fp8. At 12 bytes masters are whole,
otherwise remainders.
"""
WINDOWS: dict[str, int | str] = {"none": 0, "auto": "auto", "full": 2**50}
FRACTIONS = (25, 50, 100)
TINY = {
    "layers": 2,
    "width": 128,
    "length": 32,
    "vocab": 127,
    "micro_batch": 1,
    "microbatches": 2,
    "iterations": 6,
    "log_interval": 3,
    "impl": "local",
    "place": "hybrid",
}
ON_CPU = (
    *("--distributed-backend", "gloo", "--use-cpu-initialization", "--no-bias-swiglu-fusion"),
    *("--no-masked-softmax-fusion", "--no-bias-dropout-fusion", "--no-rope-fusion", "--no-persist-layer-norm"),
)
_LINE = re.compile(r"iteration +(\d+)/ *\d+ \|(.*)")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One optimizer.

    Attributes:
        kind: ``"stock"``, ``"hybrid"`` or ``"ours"``.
        percent: share of the state on the host.
        format: key of `MOMENTS`.
        window: key of `WINDOWS`.
        same_as: case that has the same bits, if one has.
    """

    kind: str
    percent: int = 0
    format: str = "12B"
    window: str = "none"
    same_as: str | None = None

    def arguments(self, place: str, *, muon: bool) -> list[str]:
        """Arguments of the script.

        Args:
            place: ``"fused-adam"`` or ``"hybrid"``, of ours.
            muon: whether matrices are Muon's, whose formats Megatron does not let choose.
        """
        if muon or (self.kind == "stock" and self.format == "12B"):
            return []
        arguments = ["--use-precision-aware-optimizer"]
        if self.kind == "hybrid" or (self.kind == "ours" and place == "hybrid"):
            arguments += ["--optimizer-cpu-offload", "--optimizer-offload-fraction", str(self.percent / 100)]
        if self.kind == "hybrid":
            return [*arguments, "--overlap-cpu-optimizer-d2h-h2d"]
        dtype = MOMENTS[self.format]
        return [*arguments, "--exp-avg-dtype", dtype, "--exp-avg-sq-dtype", dtype]

    def spec(self) -> dict[str, Any]:
        """Settings of `megatron_lm_rank.py`."""
        return {
            "ours": self.kind == "ours",
            "fraction": self.percent / 100,
            "window_bytes": WINDOWS[self.window],
            "whole_masters": self.kind == "ours" and self.format == "12B",
        }


def all_cases() -> dict[str, Case]:
    """Every case by name."""
    cases = {"stock": Case(kind="stock")}
    cases |= {f"stock-{format}": Case(kind="stock", format=format) for format in ("10B", "6B")}
    cases |= {f"hybrid-{percent}": Case(kind="hybrid", percent=percent) for percent in FRACTIONS}
    same = {"12B": "stock", "10B": "stock-10B", "6B": "stock-6B"}
    for percent, format, window in itertools.product(FRACTIONS, MOMENTS, WINDOWS):
        cases[f"ours-{percent}-{format}-{window}"] = Case(
            kind="ours", percent=percent, format=format, window=window, same_as=same.get(format)
        )
    return cases


DEFAULT_CASES = (
    *("stock", "ours-100-12B-none", "ours-100-12B-auto", "ours-100-12B-full", "stock-6B", "ours-100-6B-auto"),
    *("ours-100-4.06B-auto", "hybrid-100", "hybrid-50", "ours-50-12B-auto"),
)


def script_arguments(options: argparse.Namespace) -> list[str]:
    """Arguments of pretrain_gpt.py that all cases share."""
    data_parallel = options.gpus // (options.tp * options.pp)
    arguments = [
        *("--num-layers", options.layers, "--hidden-size", options.width),
        *("--num-attention-heads", max(options.tp, options.width // 128)),
        *("--seq-length", options.length, "--max-position-embeddings", options.length),
        *("--position-embedding-type", "rope", "--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear"),
        *("--untie-embeddings-and-output-weights", "--attention-dropout", 0, "--hidden-dropout", 0),
        *("--micro-batch-size", options.micro_batch),
        *("--global-batch-size", options.micro_batch * options.microbatches * data_parallel),
        *("--train-iters", options.iterations, "--log-interval", options.log_interval, "--log-throughput"),
        *("--lr", 1e-4, "--min-lr", 1e-5, "--lr-decay-style", "constant", "--weight-decay", 0.1, "--clip-grad", 1.0),
        *("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", options.vocab, "--split", "100,0,0"),
        *("--eval-iters", 0, "--eval-interval", 10**6, "--bf16"),
        *(("--optimizer", "muon") if options.muon else ("--use-distributed-optimizer",)),
        *("--transformer-impl", options.impl, "--no-gradient-accumulation-fusion"),
        *("--tensor-model-parallel-size", options.tp, "--pipeline-model-parallel-size", options.pp),
    ]
    if options.tp > 1 and options.impl == "transformer_engine":  # local norms do not take it
        arguments += ["--sequence-parallel"]
    if options.vpp > 1:
        arguments += ["--num-virtual-stages-per-pipeline-rank", options.vpp]
    if data_parallel > 1:
        arguments += ["--overlap-grad-reduce", *([] if options.muon else ["--overlap-param-gather"])]
    if options.experts:
        arguments += [
            *("--num-experts", options.experts, "--moe-router-topk", options.top_k),
            *("--moe-ffn-hidden-size", options.expert_width, "--expert-model-parallel-size", options.ep),
            *("--moe-token-dispatcher-type", "alltoall", "--moe-router-load-balancing-type", "aux_loss"),
            *("--moe-aux-loss-coeff", 1e-3),
            *(["--moe-grouped-gemm"] if options.impl == "transformer_engine" else []),
        ]
    if options.deterministic:
        arguments += ["--deterministic-mode"]
    if options.device == "cpu":
        arguments += ON_CPU
    return [*map(str, arguments), *options.extra]


def run_case(case: Case, options: argparse.Namespace, profile: Path | None) -> dict[str, Any]:
    """Runs one case once.

    Args:
        case: which.
        options: the command line.
        profile: path without ending for a profile of the first rank, or None.

    Raises:
        RuntimeError: if the script fails, with the end of what it printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        spec = {
            **case.spec(),
            "seen": folder,
            "muon": options.muon,
            "iterations": options.iterations,
            "log_interval": options.log_interval,
            "profile": None if profile is None else str(profile.resolve()),
        }
        if options.place == "hybrid":
            spec["fraction"] = 1.0  # the script's argument counts
        path = Path(folder) / "case"
        path.write_text(json.dumps(spec))
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.gpus)),
            *(str(RANK), str(path), str(options.megatron_lm.resolve() / "pretrain_gpt.py")),
            *(script_arguments(options) + case.arguments(options.place, muon=options.muon)),
        ]
        log = _output_of(command, _environment(options), options.seconds)
        ranks = [json.loads(one.read_text()) for one in sorted(Path(folder).glob("*.json"))]
    if len(ranks) != options.gpus or "iteration" not in log:
        raise RuntimeError(f"{len(ranks)} of {options.gpus} ranks came to their end\n{_tail(log)}")
    return {**what_ranks_saw(ranks), **what_log_says(log)}


def _environment(options: argparse.Namespace) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FUSED_OFFLOAD_")}
    paths = (str(options.megatron_lm.resolve()), environment.get("PYTHONPATH", ""))
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    environment.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // options.gpus)))
    if options.tp > 1:
        # Megatron requires it on GPUs before Blackwell.
        environment.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    return environment


def _output_of(command: Sequence[str], environment: dict[str, str], seconds: float) -> str:
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # so that it ends with all that it started
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise RuntimeError(f"it took more than {seconds:g} seconds\n{_tail(output)}") from None
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    if process.returncode:
        raise RuntimeError(f"exit status {process.returncode}\n{_tail(output)}")
    return output


def _tail(output: str) -> str:
    """The first error of a rank, and the last lines before torchrun's own report."""
    lines = output.splitlines()
    ends = [
        index for index, line in enumerate(lines) if "torch.distributed.elastic" in line or "failed (exitcode" in line
    ]
    return "\n".join(lines[: ends[0] if ends else None][-30:])


def what_ranks_saw(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A case's record from the files of its ranks; the slowest and the largest rank count."""
    times = [one["iterations_ms"] for one in ranks]
    slowest = max(range(len(ranks)), key=lambda rank: median(later(times[rank])))
    losses = next((one["losses"] for one in ranks if any(one["losses"])), [])
    record = {
        "inner": ranks[0]["inner"],
        "iteration_ms": median(later(times[slowest])),
        "iterations_ms": times[slowest],
        "losses": losses,
        "grad_norms": ranks[0]["grad_norms"],
        "weights": [one["weights"] for one in ranks],
    }
    for name in ("peak_bytes", "peak_reserved_bytes", "held_bytes", "host_bytes"):
        if name in ranks[0]:
            record[name] = max(one[name] for one in ranks)
    if ranks[0]["reports"]:
        reports = [later(one["reports"]) for one in ranks]
        names = reports[0][-1]
        record["report"] = {name: max(median(each[name] for each in one) for one in reports) for name in names}
    return record


def later(values: Sequence[Any]) -> Sequence[Any]:
    """The later half."""
    return values[len(values) // 2 :]


def what_log_says(log: str) -> dict[str, Any]:
    """The lines of the script that count: Megatron's about iterations, and ours."""
    lines = []
    for found in _LINE.finditer(log):
        line: dict[str, float] = {"iteration": int(found[1])}
        for part in found[2].split("|"):
            name, _, value = part.strip().rpartition(":")
            if not name:
                continue
            with contextlib.suppress(ValueError):  # another rank's words behind a line of this one
                line[name] = float(value)
        lines.append(line)
    ours = [line.strip() for line in log.splitlines() if line.strip().startswith("fused-offload:")]
    record: dict[str, Any] = {"log": lines, "said": ours}
    speed, ms = "throughput per GPU (TFLOP/s/GPU)", "elapsed time per iteration (ms)"
    if lines and lines[-1].get(speed) and ms in lines[-1]:
        record["tflop_per_iteration"] = lines[-1][speed] * lines[-1][ms] / 1e3
    return record


def equal_digits(ours: Sequence[float | None], theirs: Sequence[float | None]) -> float | None:
    """Fewest decimal digits in which two series agree; infinite for equal bits, None without
    values.
    """
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=False) if a is not None and b is not None]
    if not pairs:
        return None
    return min(math.inf if a == b else -math.log10(abs(a - b) / max(abs(a), abs(b))) for a, b in pairs)


def compare(results: dict[str, dict[str, Any]], options: argparse.Namespace) -> None:
    """Adds to each case what depends on others and on the command line."""
    stock = results.get("stock")
    data_parallel = options.gpus // (options.tp * options.pp)
    tokens = options.micro_batch * options.microbatches * data_parallel * options.length
    for name, record in results.items():
        record["tokens_per_s"] = tokens / record["iteration_ms"] * 1e3
        if "tflop_per_iteration" in record:
            record["tflops"] = record["tflop_per_iteration"] / record["iteration_ms"] * 1e3
        if stock is not None:
            record["over_stock"] = record["iteration_ms"] / stock["iteration_ms"]
            record["added_ms"] = record["iteration_ms"] - stock["iteration_ms"]
        same_as = all_cases()[name].same_as
        if same_as in results:
            for values in ("losses", "grad_norms"):
                digits = equal_digits(record[values], results[same_as][values])
                record[f"{values}_digits"] = "all" if digits == math.inf else digits
            record["same_weights"] = record["weights"] == results[same_as]["weights"]


def merged(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One record of several runs of a case: the last, with the median of their times."""
    times = [run["iteration_ms"] for run in runs]
    return {**runs[-1], "iteration_ms": median(times), "rounds_ms": times}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megatron-lm", type=Path, required=True, metavar="DIR", help="checkout of Megatron-LM")
    parser.add_argument("--results", type=Path, required=True, metavar="FILE.json")
    parser.add_argument("--cases", nargs="+", choices=list(all_cases()), default=list(DEFAULT_CASES), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=1, help="times that all cases run, in turn")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs of this host")
    for name, what in (("tp", "tensor"), ("pp", "pipeline"), ("ep", "expert")):
        parser.add_argument(f"--{name}", type=int, default=1, help=f"{what} parallel size")
    parser.add_argument("--vpp", type=int, default=1, help="virtual stages of a pipeline rank")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=50304)
    parser.add_argument("--experts", type=int, default=0, help="experts of each layer; 0 for a dense model")
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--expert-width", type=int, default=768)
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--log-interval", type=int, default=10, help="iterations between two waits for the GPU")
    parser.add_argument("--impl", choices=("transformer_engine", "local"), default="transformer_engine", help="layers")
    parser.add_argument("--place", choices=("fused-adam", "hybrid"), default="fused-adam", help="of ours in Megatron")
    parser.add_argument("--muon", action="store_true", help="matrices by Muon, the rest by Adam; stock and ours only")
    parser.add_argument("--deterministic", action="store_true", help="Megatron's --deterministic-mode")
    parser.add_argument("--profile", action="store_true", help="profile two iterations, beside the results file")
    parser.add_argument("--seconds", type=float, default=600, help="limit of a case")
    parser.add_argument("--tiny", action="store_true", help="a model that trains in seconds")
    parser.add_argument("extra", nargs="*", metavar="-- ARGUMENT", help="further arguments of pretrain_gpt.py")
    if parser.parse_args(arguments).tiny:
        parser.set_defaults(**TINY)  # what the command line says counts more
    options = parser.parse_args(arguments)
    check(parser, options)
    return options


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Ends the program with one line if the cases cannot run."""
    folder = options.megatron_lm
    missing = [
        name for name in ("pretrain_gpt.py", "megatron/training", "megatron/core") if not (folder / name).exists()
    ]
    if missing:
        parser.error(f"--megatron-lm {folder} is no checkout of Megatron-LM: it has no {', '.join(missing)}")
    counts = ("gpus", "tp", "pp", "vpp", "ep", "rounds", "layers", "micro_batch", "microbatches", "log_interval")
    for name in counts:
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} should be at least 1")
    if options.iterations < 4:
        parser.error("--iterations should be at least 4: the later half is timed")
    if options.gpus % (options.tp * options.pp):
        parser.error(f"--gpus {options.gpus} should be a multiple of --tp times --pp, {options.tp * options.pp}")
    if options.vpp > 1 and options.pp == 1:
        parser.error("--vpp needs --pp 2 or more")
    if options.layers % (options.pp * options.vpp):
        parser.error(f"--layers {options.layers} should be a multiple of --pp times --vpp")
    if options.experts % options.ep or (options.ep > 1 and not options.experts):
        parser.error(f"--ep {options.ep} should divide --experts, which is {options.experts}")
    if options.muon:
        wrong = [name for name in options.cases if name not in ("stock", "ours-100-12B-none")]
        if wrong:
            parser.error(f"--muon goes with --cases stock ours-100-12B-none, and not with {wrong[0]}")
    if options.device == "cuda":
        check_device(parser, "cuda")
        if torch.cuda.device_count() < options.gpus:
            parser.error(f"--gpus {options.gpus}: there are {torch.cuda.device_count()}")
    needs_te = [
        name
        for name in options.cases
        if (all_cases()[name].kind == "stock" and all_cases()[name].format != "12B")
        or (all_cases()[name].kind == "ours" and options.place == "fused-adam")
    ]
    if importlib.util.find_spec("transformer_engine") is None and (options.impl != "local" or needs_te):
        why = "--impl transformer_engine needs" if options.impl != "local" else f"{needs_te[0]} needs"
        parser.error(f"{why} TransformerEngine, which is not installed; --impl local --place hybrid run without it")
    check_writable(parser, options.results)


def main(arguments: list[str] | None = None) -> int:
    """Runs the cases and writes the results.

    Exit codes: 0 all ran, 1 some failed.
    """
    options = parse(arguments)
    runs: dict[str, list[dict[str, Any]]] = {}
    failed: dict[str, str] = {}
    for round_, name in itertools.product(range(options.rounds), options.cases):
        profile = options.results.with_name(f"{options.results.stem}-{name}") if options.profile else None
        try:
            runs.setdefault(name, []).append(run_case(all_cases()[name], options, profile))
        except RuntimeError as error:  # the other cases are worth running
            failed[name] = str(error)
            print(f"{name} failed: {error}", flush=True)
        whole = {one: merged(done) for one, done in runs.items() if done}
        compare(whole, options)
        shown = {key: str(value) for key, value in vars(options).items() if key != "megatron_lm"}
        results = {"arguments": shown, "whole": whole, "failed": failed, "machine": machine_facts()}
        options.results.write_text(json.dumps(results, indent=1) + "\n")
        if name in whole and name not in failed:
            print(f"round {round_ + 1}, {summary_line(name, whole[name])}", flush=True)
    return 1 if failed else 0


def summary_line(name: str, record: dict[str, Any]) -> str:
    """A case in one line."""
    parts = [f"{name}: {record['iteration_ms']:.1f} ms", f"{record['tokens_per_s']:.0f} tokens/s"]
    if "over_stock" in record:
        parts.append(f"{record['over_stock']:.3f} of stock")
    if "tflops" in record:
        parts.append(f"{record['tflops']:.0f} TFLOP/s")
    if "peak_bytes" in record:
        parts.append(f"peak {record['peak_bytes'] / 1e9:.2f} GB, reserved {record['peak_reserved_bytes'] / 1e9:.2f}")
    if "losses_digits" in record:
        parts.append(f"digits {record['losses_digits']}, {record['grad_norms_digits']}")
    if "report" in record:
        parts.append(", ".join(f"{key} {value:.1f}" for key, value in record["report"].items() if key.endswith("_ms")))
    return ", ".join(parts)


if __name__ == "__main__":
    sys.exit(main())
