"""What all results say, in a line each: the first part of docs/benchmarks.md, which `page.py`
writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import plots
from table import Record, number


class Source(Protocol):
    """A results file, as `page.Results` reads it.

    Attributes:
        path: the file.
        record: its content.
    """

    path: Path
    record: Record

    @property
    def is_smoke(self) -> bool:
        """True if its numbers say nothing about speed."""

    @property
    def rows(self) -> dict[str, Record]:
        """Rows of the benchmark suite by name."""

    @property
    def loop(self) -> dict[str, Record]:
        """Cases of `train_loop.py` by name."""

    @property
    def gpu(self) -> str:
        """Name of the GPU."""


AnySource = TypeVar("AnySource", bound=Source)

PEAK_TFLOPS = {"NVIDIA H100 80GB HBM3": 989.4, "NVIDIA H200": 989.4}
"""Dense bfloat16 operations of the data sheets, in TFLOP/s, by the name that the driver gives."""


def model_tflops(case: Record) -> tuple[float, float]:
    """TFLOP/s of forward and backward passes, and those with the second forward pass of each
    block.
    """
    forward = 2 * case["param_numel"] * case["tokens_per_s"] / 1e12
    return 3 * forward, 4 * forward


def pictured(everything: Sequence[AnySource]) -> dict[str, AnySource]:
    """The newest file for each picture."""
    found = {}
    for name, picture in plots.PICTURES.items():
        with_it = [results for results in everything if not results.is_smoke and picture.has(results.record)]
        if with_it:
            found[name] = with_it[0]
    return found


def summary(everything: Sequence[Source]) -> Iterator[str]:
    """What the results say, in a line each; the newest file with all that a line needs."""
    found = pictured(everything)
    if "step" in found:
        yield _step_summary(found["step"])
    if "peers" in found:
        yield from _peers_summary(found["peers"])
    if "training" in found:
        yield from _loop_summary(found["training"])
    for cases in _large_cases(everything):
        yield _large_summary(cases)
    for results in everything:
        if {"stock", *_WHOLE_CASES} <= results.record.get("whole", {}).keys():
            yield _whole_summary(results)
            break
    for results in everything:
        if "12B" in results.record.get("together", {}).get("forms", {}):
            yield _together_summary(results)
            break
    for results in everything:
        if "runs" in results.record:
            yield from _quality_summary(results)
            break


def link(results: Source) -> str:
    return f"[{results.path.stem}](#{results.path.stem.lower()})"


def _ms(results: Source, name: str) -> str:
    return number(results.rows[name]["median_ms"])


def _step_summary(results: Source) -> str:
    formats = [one for one in ("12B", "10B", "6B", "4B") if f"step/{one}/whole-step" in results.rows]
    steps = [_ms(results, f"step/{one}/whole-step") for one in formats]
    copies = [_ms(results, f"step/{one}/plain-duplex") for one in formats]
    widths = [{"4B": "4.06"}.get(one, one[:-1]) for one in formats]
    return (
        f"**A step** of a billion parameters with {_listed(widths)} bytes of state each takes {_listed(steps)} ms, "
        f"where plain copies of the same bytes take {_listed(copies)} ms ({link(results)})."
    )


def _peers_summary(results: Source) -> Iterator[str]:
    names = ("torchao-cpu-offload", "deepspeed-cpu-adam", "megatron-hybrid")
    if all(f"peers/{name}" in results.rows for name in (*names, "te-fused-adam-12B")):
        others = "; ".join(f"{plots.people_name(name)}: {_ms(results, f'peers/{name}')} ms" for name in names)
        yield (
            f"**The same step by others** with state on the host: {others}. TransformerEngine's FusedAdam on the GPU "
            f"takes {_ms(results, 'peers/te-fused-adam-12B')} ms ({link(results)})."
        )


def _loop_summary(results: Source) -> Iterator[str]:
    cases = results.loop

    def added(name: str) -> str:
        return f"{cases[name]['over_none_ms']:.0f} ms"

    def peak(name: str) -> str:
        return f"{plots.peak_gb(cases[name]):.1f} GB"

    names = ("auto-6B-4", "stream-6B-4", "te-fused-adam-6B-4", "torchao-cpu-offload-4", "megatron-hybrid-overlap-4")
    if all(name in cases for name in names):
        yield (
            f"**In a training loop** of {cases['none-4']['iteration_ms']:.0f} ms an iteration, a step with 6 bytes a "
            f"parameter adds {added('auto-6B-4')} with a window in freed memory and {added('stream-6B-4')} without, at "
            f"a peak of {peak('auto-6B-4')}. TransformerEngine's FusedAdam adds {added('te-fused-adam-6B-4')} at "
            f"{peak('te-fused-adam-6B-4')}, torchao {added('torchao-cpu-offload-4')}, Megatron's "
            f"HybridDeviceOptimizer {added('megatron-hybrid-overlap-4')} ({link(results)})."
        )


def _large_cases(everything: Sequence[Source]) -> Iterator[list[tuple[Source, Record]]]:
    """Cases of `large_model.py` that trained, a list for each model; of several runs the newest."""
    models: dict[tuple[int, int | None], dict[tuple[str, int], tuple[Source, Record]]] = {}
    for results in everything:
        for case in results.record.get("large", {}).values():
            if "tokens_per_s" in case and not case.get("failed") and len(case["iterations"]) > 1:
                runs = models.setdefault((case["param_numel"], case.get("gpu_limit_bytes")), {})
                runs.setdefault((case.get("optimizer", "ours"), case["tokens"]), (results, case))
    for _, runs in sorted(models.items(), key=lambda model: -model[0][0]):
        yield [run for _, run in sorted(runs.items(), key=lambda item: item[0])]


def _large_summary(cases: Sequence[tuple[Source, Record]]) -> str:
    case = cases[0][1]
    within = f" within {case['gpu_limit_bytes'] / 1e9:.0f} GB" if case.get("gpu_limit_bytes") else ""
    place, host = "", f"{case['host_bytes'] / 1e9:.1f} GB of state on the host"
    if case.get("params_on_host"):
        place = ", parameters and gradients on the host by FSDP2"
        host = f"{case['process_peak_bytes'] / 1e9:.1f} GB of the host, {case['host_bytes'] / 1e9:.1f} of them state"
    clipping = "no clipping by norm, gradients applied in backward" if case["in_backward"] else "clipping by norm"
    runs = "; ".join(_large_run(*run) for run in cases)
    return (
        f"**{case['param_numel'] / 1e9:.1f} billion parameters on one GPU{within}**{place}: at most "
        f"{case['peak_bytes'] / 1e9:.1f} GB of the GPU and {host}; {clipping}; {runs}."
    )


def _large_run(results: Source, case: Record) -> str:
    if case.get("optimizer") == "torch":
        [ours] = (
            one
            for one in results.record["large"].values()
            if one["optimizer"] == "ours" and one["param_numel"] == case["param_numel"]
        )
        return (
            f"with torch's fused AdamW on the CPU, all in bfloat16, {case['tokens_per_s']:,.0f} tokens/s, where "
            f"FusedOffloadAdam has {ours['tokens_per_s']:,.0f} on the same machine ({link(results)})"
        )
    peak = PEAK_TFLOPS.get(results.gpu)
    tflops, recomputed = model_tflops(case)
    share = "" if peak is None else f" ({tflops / peak:.0%} and {recomputed / peak:.0%} of the peak)"
    losses = [one["loss"] for one in case["iterations"]]
    return (
        f"{case['tokens_per_s']:,.0f} tokens/s at {case['tokens']:,} tokens a step, {tflops:.0f} TFLOP/s, "
        f"{recomputed:.0f} with recomputation{share}, loss {losses[0]:.2f} to {losses[-1]:.2f} in {len(losses)} "
        f"iterations ({link(results)})"
    )


_WHOLE_CASES = {
    "ours-100-12B-full": "12 bytes and a window of all state",
    "ours-100-6B-auto": "6 bytes and a window in freed memory",
    "ours-100-4.06B-auto": "4.06 bytes and such a window",
}

_WHOLE_OTHERS = {"stock-6B": "At 6 bytes:", "hybrid-100": "With HybridDeviceOptimizer, all on the CPU:"}


def _whole_summary(results: Source) -> str:
    cases = results.record["whole"]

    def iteration(name: str) -> str:
        return f"{cases[name]['iteration_ms']:,.0f} ms at a peak of {cases[name]['peak_bytes'] / 1e9:.1f} GB"

    ours = "; ".join(f"{words} {iteration(name)}" for name, words in _WHOLE_CASES.items())
    others = "".join(f"{words} {iteration(name)}. " for name, words in _WHOLE_OTHERS.items() if name in cases)
    return (
        f"**A whole iteration of Megatron-LM's `pretrain_gpt.py`**, unmodified, "
        f"{cases['ours-100-12B-full']['host_bytes'] / 12e9:.2f} billion parameters, with TransformerEngine's "
        f"FusedAdam: {iteration('stock')}. {others}With FusedOffloadAdam and all state on the host: {ours} "
        f"({link(results)})."
    )


def _together_summary(results: Source) -> str:
    together = results.record["together"]
    form = together["forms"]["12B"]
    all_ms, alone_ms = form["all_ranks_ms"], form["alone_ms"]
    return (
        f"**{together['ranks']} GPUs of one host at once**, a billion parameters on each, 12 bytes: "
        f"{all_ms['whole-step']:.0f} ms until all are done, plain copies {all_ms['plain-duplex']:.0f} ms; one GPU "
        f"alone {alone_ms['whole-step']:.0f} ms ({link(results)})."
    )


def _quality_summary(results: Source) -> Iterator[str]:
    """Mean losses over float32 of runs with the same seed and beta2."""
    runs = results.record["runs"]
    base = {(run["seed"], run["beta2"]): run["held_out"] for run in runs if run["form"] == "fp32"}
    over = {
        form: [
            run["held_out"] / base[run["seed"], run["beta2"]] - 1
            for run in runs
            if run["form"] == form and (run["seed"], run["beta2"]) in base
        ]
        for form in ("bf16", "uint8")
    }
    if base and all(over.values()):
        bf16, eight = (f"{100 * sum(shares) / len(shares):+.2f} %" for shares in over.values())
        spread = max(base.values()) / min(base.values()) - 1
        yield (
            f"**Held-out loss** of a small GPT against float32 moments, mean of {len(over['uint8'])} runs: {bf16} with "
            f"bfloat16 and {eight} with 8-bit moments; float32 runs differ by {100 * spread:.2f} % ({link(results)})."
        )


def _listed(texts: list[str]) -> str:
    return f"{', '.join(texts[:-1])} and {texts[-1]}"
