"""Makes docs/benchmarks.md and its pictures from bench/results/*.json: ``python bench/page.py``.

``--check`` writes nothing and fails if the page is not what the results say. The pictures need
matplotlib; the page is made from JSON alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from statistics import median

_HERE = Path(__file__).resolve().parent
if str(_HERE) not in sys.path:
    sys.path.append(str(_HERE))

import plots  # noqa: E402
from megatron_lm_table import whole_lines  # noqa: E402
from quality_table import quality_lines  # noqa: E402
from summary import PEAK_TFLOPS, link, model_tflops, pictured, summary  # noqa: E402
from table import Column, Record, machine_lines, markdown, number, plain_table, report  # noqa: E402

RESULTS = _HERE / "results"
DOCS = _HERE.parent / "docs"
PAGE = DOCS / "benchmarks.md"
IMAGES = DOCS / "images"

_HEAD = """# Benchmarks

Made by `python bench/page.py` from `bench/results/*.json`; change those, not this page.
[bench/README.md](../bench/README.md) describes each case, each column and how to run them:
`make bench` on a machine with a GPU. Do not compare times of different files: the speed of a link
differs from run to run, so each file measures its own baselines.
"""

_WIDTH = 100


class Results:
    """One results file.

    Attributes:
        path: the file.
        record: what is in it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.record: Record = json.loads(path.read_text())

    @property
    def date(self) -> str:
        """When it was measured, ISO 8601."""
        return str(self.record["machine"]["date"]) if "machine" in self.record else str(self._profile()["measured"])

    def _profile(self) -> Record:
        profile: Record = self.record["profile"]
        return profile

    @property
    def is_smoke(self) -> bool:
        """True if its numbers say nothing about speed."""
        return bool(self.record.get("scale", {}).get("smoke"))

    @property
    def subject(self) -> str:
        """What was measured."""
        record = self.record
        if "rows" in record:
            suites = {row["name"].partition("/")[0]: None for row in record["rows"]}
            return f"benchmark suite ({', '.join(suites)})"
        if "profile" in record:
            return "fused-offload tune"
        if "large" in record:
            return "large models on one GPU"
        if "params_on_host" in record:
            return "parameters and gradients in host memory"
        if "together" in record:
            return "several GPUs of one host"
        if "whole" in record:
            return "Megatron-LM's pretrain_gpt.py"
        if "runs" in record:
            return "held-out loss by stored format"
        return "training loop" if self.loop else "training in Megatron-Core"

    @property
    def gpu(self) -> str:
        """Name of the GPU."""
        if "profile" in self.record:
            return str(self._profile()["key"]["gpu"])
        return str((self.record["machine"]["gpu"] or {}).get("name", "no GPU"))

    @property
    def rows(self) -> dict[str, Record]:
        """Rows of the benchmark suite by name; empty for other files."""
        return {row["name"]: row for row in self.record.get("rows", [])}

    @property
    def loop(self) -> dict[str, Record]:
        """Cases of `train_loop.py` by name; empty for other files."""
        cases = self.record.get("cases", {})
        return {name: case for name, case in cases.items() if isinstance(case, dict) and "iteration_ms" in case}

    @property
    def remarks(self) -> list[str]:
        """Later remarks on the numbers, written into the file by hand."""
        remarks = self.record.get("remarks", [])
        if not isinstance(remarks, list) or not all(isinstance(remark, str) for remark in remarks):
            sys.exit(f"{self.path}: remarks should be a list of texts, not {remarks!r}")
        return remarks

    def lines(self) -> Iterator[str]:
        """Its section of the page."""
        yield from ("", f"## {self.path.stem}", "", f"[{self.path.name}](../bench/results/{self.path.name})", "")
        if "rows" in self.record:
            yield from report(self.record)
        elif "profile" in self.record:
            yield from _tuning_lines(self.record)
        else:
            yield from machine_lines(self.record)
            if "arguments" in self.record:
                arguments = (f"{name} {value}" for name, value in self.record["arguments"].items() if name != "results")
                yield from ("", f"Arguments: {', '.join(arguments)}")
            yield ""
            if "large" in self.record:
                yield from _large_lines(self.record)
            elif "params_on_host" in self.record:
                yield from _host_params_lines(self.record["params_on_host"])
            elif "together" in self.record:
                yield from _together_lines(self.record["together"])
            elif "whole" in self.record:
                yield from whole_lines(self.record)
            elif "runs" in self.record:
                yield from quality_lines(self.record["runs"])
            else:
                yield from _loop_lines(self.record, self.loop) if self.loop else _megatron_lines(self.record)
        for remark in self.remarks:
            yield from ("", remark)


_LOOP_COLUMNS = (
    Column("optimizer", lambda case: plots.people_name(case["name"])),
    Column("case", lambda case: case["name"]),
    Column("microbatches", lambda case: str(case["microbatches"])),
    Column("iteration, ms", lambda case: number(case["iteration_ms"], 4)),
    Column(
        "over no optimizer, ms", lambda case: "" if case["name"][:4] == "none" else number(case.get("over_none_ms"))
    ),
    Column("added, ms", lambda case: number(case.get("added_ms")) if case.get("host_bytes") else ""),
    Column("step alone, ms", lambda case: number(case.get("step_alone_ms"))),
    Column("host GB", lambda case: number(case["host_bytes"] / 1e9) if case.get("host_bytes") else ""),
    Column("peak GPU GB", lambda case: number(plots.peak_gb(case)) if "peak_bytes" in case else ""),
    Column("note", lambda case: str(case.get("note", ""))),
)


def _loop_lines(record: Record, cases: dict[str, Record]) -> Iterator[str]:
    yield from plain_table([{"name": name, **case} for name, case in cases.items()], _LOOP_COLUMNS)
    for name, reason in record.get("skipped", {}).items():
        yield from ("", f"Not measured: {name} ({reason})")
    for name, reason in record.get("failed", {}).items():
        yield from ("", f"**Failed: {name}**: {reason}")


def _large_lines(record: Record) -> Iterator[str]:
    """Cases of `large_model.py`, and where its search for the largest model ended."""
    header = (
        *("case", "parameters", "tokens an iteration", "tokens/s", "TFLOP/s", "with recomputation", "of peak"),
        *("passes, ms", "step adds, ms", "planned at least"),
        *("step alone, ms", "planned", "/ copies alone", "host GB", "planned", "peak GPU GB", "planned"),
        "loss, first to last",
    )

    def line(name: str, case: Record) -> tuple[str, ...]:
        planned, losses = case["predicted"], [one["loss"] for one in case["iterations"]]
        alone_ms = case.get("alone_ms")
        tflops, recomputed = model_tflops(case)
        return (
            name,
            f"{case['param_numel']:,}",
            f"{case['tokens']:,}",
            number(case["tokens_per_s"]),
            number(tflops),
            number(recomputed),
            "" if peak is None else f"{tflops / peak:.0%}, {recomputed / peak:.0%}",
            number(case["passes_ms"], 4),
            number(case["exposed_step_ms"], 4),
            number(planned["predicted"]["exposed_ms_at_least"], 4),
            number(alone_ms, 4),
            number(planned["predicted"]["alone_ms"], 4),
            f"{alone_ms / case['copies_only_ms']:.3f}" if alone_ms else "",
            number(case["host_bytes"] / 1e9),
            number(planned["host_bytes"]["rank"] / 1e9),
            number(case["peak_bytes"] / 1e9) if "peak_bytes" in case else "",
            number(planned["gpu_bytes"]["total"] / 1e9),
            f"{losses[0]:.2f} to {losses[-1]:.2f}",
        )

    peak = PEAK_TFLOPS.get((record["machine"]["gpu"] or {}).get("name"))
    trained = {name: case for name, case in record["large"].items() if "tokens_per_s" in case}
    yield from markdown(header, (line(name, case) for name, case in trained.items()))
    yield ""
    yield (
        "TFLOP/s count 6 operations for each parameter and token, with recomputation 8: blocks are computed twice in "
        "the forward direction. Attention's own products are not counted. The peak is that of dense bfloat16, 989."
    )
    for name, case in record["large"].items():
        if case.get("failed"):
            yield from ("", f"**Failed: {name}**: {case['failed']}")
    for way, search in record.get("largest", {}).items():
        found = search.get("param_numel")
        ended = "none of those tried trained" if found is None else f"{found / 1e9:.2f} billion trained"
        tried = ", ".join(f"{one['param_numel'] / 1e9:.2f}" for one in search["tried"])
        yield from (
            "",
            f"Largest model, {way}: {ended}; {search['predicted_numel'] / 1e9:.2f} billion should fit into "
            f"{search['gpu_bytes'] / 1e9:.1f} GB of GPU and {search['host_bytes'] / 1e9:.1f} GB of host memory "
            f"(tried: {tried}).",
        )


def _host_params_lines(cases: Record) -> Iterator[str]:
    """Results of `params_on_host.py`."""

    def on_gpu(name: str, case: Record) -> tuple[str, ...]:
        plain = min(map(median, case["plain_ms"].values())) if "plain_ms" in case else None
        step, numel = median(case["step_ms"]), case["numel"]
        return (
            name,
            f"{numel:,}",
            number(step, 4),
            number(plain, 4),
            "" if plain is None else f"{step / plain:.3f}",
            number(median(case["until_params_ms"]), 4),
            number(median(case["clipped_ms"]), 4),
            number(step / numel * 1e9, 4),
        )

    header = (
        *("state", "parameters", "step, ms", "plain copies, ms", "/ plain", "until `step()` returns, ms"),
        *("with clipping, ms", "step, ms a billion"),
    )
    yield from markdown(header, (on_gpu(name, case) for name, case in cases.items() if name != "cpu"))
    if "cpu" in cases:
        yield ""
        rows = ((name, case["numel"], median(case["step_ms"])) for name, case in cases["cpu"].items())
        lines = ((name, f"{numel:,}", number(ms, 4), number(ms / numel * 1e9, 4)) for name, numel, ms in rows)
        yield from markdown(("on the CPU", "parameters", "step, ms", "ms a billion"), lines)


def _together_lines(together: Record) -> Iterator[str]:
    """Results of `two_gpus.py`."""
    ranks = range(together["ranks"])
    for format, record in together["forms"].items():
        yield from ("", f"### {format}: {record['param_numel']:,} parameters on each of {len(ranks)} GPUs, ms", "")
        yield from markdown(
            ("", *(f"rank {rank}" for rank in ranks), "until all are done", "rank 0 alone"),
            (
                (
                    name,
                    *(number(one["median_ms"][name], 4) for one in record["ranks"]),
                    number(all_ms, 4),
                    number(record["alone_ms"].get(name), 4),
                )
                for name, all_ms in record["all_ranks_ms"].items()
            ),
        )
        if record.get("planned_ms") is not None:
            yield from ("", f"Planned: {number(record['planned_ms'], 4)} ms until all are done.")
        if record["turns_win"] is not None:
            shares = ", ".join(f"{one['step_share_of_plain']:.3f}" for one in record["ranks"])
            verdict = "Turns are faster" if record["turns_win"] else "No way of taking turns is faster"
            yield from (
                "",
                f"Plain duplex copies over the step, by rank: {shares}. {verdict} than plain duplex copies.",
            )


def _megatron_lines(record: Record) -> Iterator[str]:
    header = (
        *("case", "ranks", "parameters", "inner step, ms", "iteration, ms", "/ copies alone", "host GB"),
        *("peak GPU GB", "weights", "state"),
    )

    def line(name: str, ranks: list[Record]) -> tuple[str, ...]:
        first = ranks[0]
        return (
            name,
            str(len(ranks)),
            f"{first['param_numel']:,}",
            number(first["median_step_ms"]) if first["median_step_ms"] else "",
            number(first.get("median_iteration_ms")),
            f"{first['ratio_to_copies']:.3f}" if "ratio_to_copies" in first else "",
            number(first["host_bytes"] / 1e9) if first.get("host_bytes") else "",
            number(max(first["peak_bytes"]) / 1e9),
            _checksum(first.get("params_checksum")),
            _checksum(first.get("state_checksum")),
        )

    # A rank that failed has no result.
    yield from markdown(header, (line(name, ranks) for name, ranks in record["cases"].items() if ranks[0]))
    yield from ("", "Equal checksums are equal bits, of all weights and of all masters and moments at the end.")
    for name, reason in record["failed"].items():
        yield from ("", f"**Failed: {name}**: {reason}")


def _checksum(value: int | None) -> str:
    return "" if value is None else f"`{value:016x}`"[:9] + "`"


def _tuning_lines(record: Record) -> Iterator[str]:
    """Output of ``fused-offload tune --json``."""
    key = record["profile"]["key"]
    versions = ", ".join(f"{name} {version}" for name, version in key["versions"].items())
    yield f"{key['gpu']}, link {key['link']}; {key['host']}; {versions}; {record['profile']['measured']}"
    yield from ("", "### The link alone, GB/s each way", "")
    yield from markdown(
        ("MiB a copy", "h2d", "d2h", "duplex"),
        (
            (str(rate["copy_mib"]), *(number(rate[f"{way}_gbps"]) for way in ("h2d", "d2h", "duplex")))
            for rate in record["link"]
        ),
    )
    if shared := record["profile"].get("shared_link"):
        speeds = ", ".join(f"{link['gpus']} GPUs {number(link['gbps'])}" for link in shared)
        yield from ("", f"Duplex copies on several GPUs at once, each way and GPU: {speeds}.")
    for steps, choice in zip(record["steps"], record["profile"]["choices"], strict=True):
        numel, size = steps["param_numel"], number(steps["state_bytes"] / 1e9)
        yield from ("", f"### A step of {numel:,} parameters, {size} GB each way, ms", "")
        copies = [one for one in steps["timed"] if one["programs"] is None]
        depths = sorted({one["depth"] for one in copies})
        cells = {(one["chunk_bytes"], one["depth"]): number(one["ms"], 4) for one in copies}
        yield from markdown(
            ("MiB a chunk", *(f"depth {depth}" for depth in depths)),
            (
                (f"{size / 2**20:g}", *(cells.get((size, depth), "") for depth in depths))
                for size in sorted({size for size, _ in cells})
            ),
        )
        zero_copies = [one for one in steps["timed"] if one["programs"] is not None]
        yield ""
        yield from markdown(
            ("zero-copy programs", "ms"), ((str(one["programs"]), number(one["ms"], 4)) for one in zero_copies)
        )
        yield from ("", f"Chosen: {choice['why']}.")


# -- pictures --------------------------------------------------------------------------------------


def draw_all(everything: list[Results]) -> None:
    """Writes the pictures."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        print(f"the pictures stay as they are, since matplotlib is missing ({error})", file=sys.stderr)
        return
    IMAGES.mkdir(exist_ok=True)
    for name, results in pictured(everything).items():
        plots.draw(name, results.record, IMAGES / f"{name}.png")


# -- the page --------------------------------------------------------------------------------------


def page(everything: list[Results]) -> str:
    """The whole page."""
    lines = [_HEAD.rstrip(), "", "## In short", ""]
    lines += [f"- {line}" for line in summary(everything)]
    lines += ["", "## Contents", ""]
    lines += [f"- {link(results)}: {results.subject}, {results.gpu}" for results in everything]
    lines += ["", "## Pictures"]
    for name, results in pictured(everything).items():
        title = plots.PICTURES[name].title
        lines += [
            "",
            f"![{title}](images/{name}.png)",
            "",
            f"{title}. {plots.caption(results.record)}; {link(results)}.",
        ]
    for results in everything:
        lines += results.lines()
    return "\n".join(map(_wrapped, lines)) + "\n"


def _wrapped(line: str) -> str:
    """A line of prose at the page's width.

    Tables, headings and pictures are one line in Markdown.
    """
    if len(line) <= _WIDTH or line.startswith(("|", "#", "![")) or "\n" in line:
        return line
    indent = "  " if line.startswith("- ") else ""
    return textwrap.fill(line, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing, fail if the page is out of date")
    check = parser.parse_args().check
    everything = sorted(map(Results, RESULTS.glob("*.json")), key=lambda results: results.date, reverse=True)
    text = page(everything)
    if check:
        if not PAGE.exists() or PAGE.read_text() != text:
            print(f"{PAGE} is not what {RESULTS} says: run python bench/page.py", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(text)
    draw_all(everything)
    return 0


if __name__ == "__main__":
    sys.exit(main())
