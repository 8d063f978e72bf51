"""Pictures of docs/benchmarks.md and of the README, drawn by `page.py` from results files.

Optimizers have the names that people know them by. Each kind has a colour of Okabe and Ito's
palette, which colour-blind people can tell apart, and a marker of its own. The background is
opaque, so that text is readable on dark pages.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

Record = dict[str, Any]


class Kind(NamedTuple):
    """A kind of optimizer in a picture.

    Attributes:
        label: in the legend.
        colour: of bars and points.
        marker: of points.
    """

    label: str
    colour: str
    marker: str


OURS = Kind("this project, state in host memory", "#D55E00", "o")
OTHERS = Kind("others, state in host memory", "#0072B2", "s")
RESIDENT = Kind("state in GPU memory", "#666666", "^")
KINDS = (OURS, OTHERS, RESIDENT)

NAMES = {
    "none": ("no optimizer", RESIDENT),
    "stream-12B": ("this project, 12 bytes a parameter", OURS),
    "stream-6B": ("this project, 6 bytes a parameter", OURS),
    "auto-6B": ("this project, 6 bytes, window of freed memory", OURS),
    "half-6B": ("this project, 6 bytes, window of half the state", OURS),
    "window-12B": ("this project, 12 bytes, window of all state", OURS),
    "window-10B": ("this project, 10 bytes, window of all state", OURS),
    "window-6B": ("this project, 6 bytes, window of all state", OURS),
    "fraction-25-6B": ("this project, 6 bytes, a quarter in host memory", OURS),
    "fraction-50-6B": ("this project, 6 bytes, half in host memory", OURS),
    "fraction-75-6B": ("this project, 6 bytes, three quarters in host memory", OURS),
    "resident-12B": ("this project, nothing offloaded, 12 bytes", RESIDENT),
    "resident-10B": ("this project, nothing offloaded, 10 bytes", RESIDENT),
    "resident-6B": ("this project, nothing offloaded, 6 bytes", RESIDENT),
    "12B/whole-step": ("this project, 12 bytes a parameter", OURS),
    "10B/whole-step": ("this project, 10 bytes a parameter", OURS),
    "6B/whole-step": ("this project, 6 bytes a parameter", OURS),
    "4B/whole-step": ("this project, 4.06 bytes a parameter", OURS),
    "te-fused-adam-12B": ("TE FusedAdam, on the GPU, 12 bytes", RESIDENT),
    "te-fused-adam-10B": ("TE FusedAdam, on the GPU, 10 bytes", RESIDENT),
    "te-fused-adam-6B": ("TE FusedAdam, on the GPU, 6 bytes", RESIDENT),
    "torch-fused-resident": ("torch fused AdamW, on the GPU, 12 bytes", RESIDENT),
    "torch-fused-cpu": ("torch fused AdamW, on the CPU, 12 bytes", OTHERS),
    "torchao-cpu-offload": ("torchao CPUOffloadOptimizer, 4 bytes, no masters", OTHERS),
    "deepspeed-cpu-adam": ("DeepSpeed CPUAdam, 12 bytes", OTHERS),
    "megatron-hybrid": ("Megatron HybridDeviceOptimizer, 12 bytes", OTHERS),
    "megatron-hybrid-overlap": ("Megatron HybridDeviceOptimizer, overlapped, 12 bytes", OTHERS),
    "bitsandbytes-paged-32bit": ("bitsandbytes PagedAdamW, 8 bytes, no masters", RESIDENT),
    "bitsandbytes-paged-8bit": ("bitsandbytes PagedAdamW8bit, 2 bytes, no masters", RESIDENT),
}
"""Name for people and kind of each case, less the number of microbatches."""


def case_key(name: str) -> str:
    """A case's name in `NAMES`: without suite, number of microbatches and repetition."""
    name = name.removeprefix("peers/").removeprefix("step/").removesuffix("-again").removesuffix("-full-gpu")
    head, _, microbatches = name.rpartition("-")
    return head if microbatches in ("4", "8") else name


def people_name(name: str) -> str:
    """What people call a case; "" for an unknown one."""
    return NAMES.get(case_key(name), ("", None))[0]


def _kind(name: str) -> Kind:
    return NAMES[case_key(name)][1]


def caption(record: Record) -> str:
    """Hardware, commit and day of a results file."""
    machine = record["machine"]
    gpu = machine["gpu"] or {}
    width, generation = gpu.get("pcie_width") or gpu.get("pcie_width_max"), gpu.get("pcie_generation_max")
    return (
        f"{gpu.get('name', 'no GPU')}, PCIe {generation} x{width}, {machine['cores']} CPU cores; torch "
        f"{machine['versions']['torch']}; commit {str(machine['commit'])[:7]}, {machine['date'][:10]}"
    )


def peak_gb(case: Record) -> float:
    """Peak of GPU memory in GB, without what another case left behind (``foreign_bytes``)."""
    return float(case["peak_bytes"] - case.get("foreign_bytes", 0)) / 1e9


# -- added time and memory -------------------------------------------------------------------------

_SPACING = 1.16
"""Least ratio of the heights of two labels in the same column, on the logarithmic axis."""


def label_heights(values: list[float]) -> list[float]:
    """Heights of labels near their values, in order, at least `_SPACING` apart."""
    heights = list(values)
    order = sorted(range(len(values)), key=lambda index: values[index])
    for lower, upper in pairwise(order):
        heights[upper] = max(heights[upper], heights[lower] * _SPACING)
    return heights


_COMPARED = (
    *("auto-6B-4", "stream-6B-4", "stream-12B-4", "window-6B-4", "window-12B-4"),
    *("torchao-cpu-offload-4", "torch-fused-cpu-4", "deepspeed-cpu-adam-4", "megatron-hybrid-overlap-4"),
    *("te-fused-adam-6B-4", "te-fused-adam-12B-4", "torch-fused-resident-4"),
)
"""Cases of the picture; bitsandbytes' managed memory is in no peak that torch counts."""


def draw_added(axis: Any, record: Record) -> None:
    """Time that an optimizer adds to an iteration, against the peak of GPU memory."""
    cases = {name: record["cases"][name] for name in _COMPARED if "over_none_ms" in record["cases"].get(name, {})}
    for kind in KINDS:
        shown = [case for name, case in cases.items() if _kind(name) is kind]
        axis.scatter(
            [peak_gb(case) for case in shown],
            [case["over_none_ms"] for case in shown],
            s=45,
            color=kind.colour,
            marker=kind.marker,
            label=kind.label,
            zorder=3,
        )
    for column in ("left", "middle", "right"):
        names = [name for name, case in cases.items() if _column(case) == column]
        heights = label_heights([cases[name]["over_none_ms"] for name in names])
        for name, height in zip(names, heights, strict=True):
            case, text = cases[name], people_name(name)
            axis.annotate(
                f"{text}: {case['over_none_ms']:.0f} ms",
                (peak_gb(case), case["over_none_ms"]),
                xytext=(peak_gb(case) + 0.45, height),
                fontsize=8,
                color=_kind(name).colour,
                va="center",
            )
    axis.set_yscale("log")
    axis.set(xlim=(20, 57), ylim=(8, 2200))
    axis.set_yticks([10, 30, 100, 300, 1000], ["10", "30", "100", "300", "1,000"])
    axis.grid(alpha=0.3, which="major", zorder=0)
    axis.set_ylabel(f"ms added to an iteration of {record['cases']['none-4']['iteration_ms']:.0f} ms without optimizer")
    axis.set_xlabel("peak of GPU memory, GB")
    axis.set_title("Training a GPT of 1.4 billion parameters: time and memory of the optimizer")
    axis.legend(loc="upper right", fontsize=8)


def _column(case: Record) -> str:
    gb = peak_gb(case)
    return "left" if gb < 25 else "middle" if gb < 33 else "right"


def has_added(record: Record) -> bool:
    """Tells whether all optimizers were compared."""
    return {"none-4", "torch-fused-resident-4"} <= record.get("cases", {}).keys()


# -- the step --------------------------------------------------------------------------------------

FORMATS = ("12B", "10B", "6B")
_WAYS = {
    "plain-duplex": ("the same bytes, plain copies both ways at once", "#999999"),
    "copies-only": ("the same chunks, without kernels", "#56B4E9"),
    "whole-step": ("the optimizer step", OURS.colour),
}


def _rows(record: Record) -> dict[str, Record]:
    return {row["name"]: row for row in record.get("rows", [])}


def has_steps(record: Record, *ways: str) -> bool:
    """Tells whether there are rows of these ways for each stored format."""
    rows = _rows(record)
    return all(f"step/{format}/{way}" in rows for format in FORMATS for way in ways)


def draw_steps(axis: Any, record: Record) -> None:
    """Whole steps beside copies of the same bytes, by stored format."""
    all_rows = _rows(record)
    formats = [format for format in (*FORMATS, "4B") if f"step/{format}/whole-step" in all_rows]
    for offset, (way, (label, colour)) in enumerate(_WAYS.items()):
        rows = [all_rows[f"step/{format}/{way}"] for format in formats]
        middle = [row["median_ms"] for row in rows]
        spread = [
            [row["median_ms"] - row["min_ms"] for row in rows],
            [row["max_ms"] - row["median_ms"] for row in rows],
        ]
        places = [index + 0.28 * (offset - 1) for index in range(len(formats))]
        axis.bar(places, middle, 0.26, yerr=spread, label=label, color=colour, error_kw={"elinewidth": 0.8})
        for place, row in zip(places, rows, strict=True):
            axis.annotate(
                f"{row['median_ms']:.0f}", (place, row["max_ms"]), ha="center", va="bottom", fontsize=8, xytext=(0, 1),
                textcoords="offset points",
            )  # fmt: skip
    bytes_of = {"4B": "4.06"}
    axis.set_xticks(
        range(len(formats)), [f"{bytes_of.get(format, format[:-1])} bytes a parameter" for format in formats]
    )
    axis.set_ylabel("ms: medians, shortest and longest")
    axis.set_title("An optimizer step of a billion parameters, and the copies that it needs")
    axis.legend(fontsize=8)


def draw_peers(axis: Any, record: Record) -> None:
    """The same step by others, and ours from the same file."""
    rows = {name: row for name, row in _rows(record).items() if name.startswith("peers/")}
    rows |= {name: row for name, row in _rows(record).items() if name.endswith("/whole-step")}
    ordered = sorted((name for name in rows if people_name(name)), key=lambda name: -rows[name]["median_ms"])
    remarks = {"peers/torch-fused-cpu": ", nothing copied"}
    _draw_bars(
        axis, [(people_name(name) + remarks.get(name, ""), rows[name]["median_ms"], _kind(name)) for name in ordered]
    )
    axis.set(xlabel="ms, from gradients on the GPU to final parameters")
    axis.set_title("The same step of a billion parameters by others")


def _draw_bars(axis: Any, bars: list[tuple[str, float, Kind]]) -> None:
    for kind in KINDS:
        shown = [(place, ms) for place, (_, ms, its) in enumerate(bars) if its is kind]
        axis.barh([place for place, _ in shown], [ms for _, ms in shown], color=kind.colour, label=kind.label)
    for place, (_, ms, _) in enumerate(bars):
        axis.annotate(f"{ms:.0f}", (ms, place), xytext=(3, 0), textcoords="offset points", va="center", fontsize=8)
    axis.set_yticks(range(len(bars)), [name for name, _, _ in bars], fontsize=8)
    axis.margins(x=0.08)
    axis.legend(fontsize=8)


# -- the window ------------------------------------------------------------------------------------

_WINDOWS = {"stream": "none", "auto": "freed memory (auto)", "half": "half of the state", "window": "all of the state"}


def has_windows(record: Record) -> bool:
    """Tells whether windows were compared with 4 and 8 microbatches."""
    cases = record.get("cases", {})
    return all(
        "added_ms" in cases.get(f"{window}-6B-{n}", {}) for window in ("stream", "auto", "window") for n in (4, 8)
    )


def draw_windows(axis: Any, record: Record) -> None:
    """Time that the window leaves of a step, by its size."""
    cases = record["cases"]
    for offset, (microbatches, colour) in enumerate({4: OURS.colour, 8: "#E69F00"}.items()):
        shown = {
            place: cases[f"{window}-6B-{microbatches}"]
            for place, window in enumerate(_WINDOWS)
            if f"{window}-6B-{microbatches}" in cases
        }
        baseline = cases[f"resident-6B-{microbatches}"]["iteration_ms"]
        places = [place + 0.38 * (offset - 0.5) for place in shown]
        label = f"{microbatches} microbatches, iteration of {baseline:.0f} ms"
        axis.bar(places, [case["added_ms"] for case in shown.values()], 0.36, color=colour, label=label)
        for place, case in zip(places, shown.values(), strict=True):
            axis.annotate(
                f"{case['added_ms']:.0f} ms\n{peak_gb(case):.1f} GB", (place, case["added_ms"]), ha="center",
                va="bottom", fontsize=8, xytext=(0, 1), textcoords="offset points",
            )  # fmt: skip
    axis.set_xticks(range(len(_WINDOWS)), list(_WINDOWS.values()))
    axis.margins(y=0.18)
    axis.set(xlabel="state that moves under forward and backward", ylabel="ms added to an iteration")
    axis.set_title("1.4 billion parameters, 6 bytes each: time added, and peak of GPU memory")
    axis.legend(fontsize=8)


class Picture(NamedTuple):
    """A picture of one results file.

    Attributes:
        title: for the page, and for those who do not see it.
        draw: draws it on an axis of matplotlib.
        has: tells whether a results file has what it shows.
        size: in inches.
    """

    title: str
    draw: Callable[[Any, Record], None]
    has: Callable[[Record], bool]
    size: tuple[float, float]


PICTURES: Mapping[str, Picture] = {
    "training": Picture(
        "Time that optimizers add to an iteration, against the peak of GPU memory", draw_added, has_added, (9, 5)
    ),
    "step": Picture(
        "Step of a billion parameters, beside copies of the same bytes",
        draw_steps,
        lambda record: has_steps(record, *_WAYS),
        (9, 4),
    ),
    "peers": Picture(
        "The same step of a billion parameters by other optimizers",
        draw_peers,
        lambda record: has_steps(record, "whole-step") and "peers/torch-fused-cpu" in _rows(record),
        (9, 5),
    ),
    "window": Picture("Time added to an iteration, by the size of the window", draw_windows, has_windows, (9, 4)),
}


def draw(name: str, record: Record, path: Path) -> None:
    """Writes one picture. Needs matplotlib."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    picture = PICTURES[name]
    with rc_context({"font.family": "DejaVu Sans", "font.size": 10}):
        figure = Figure(figsize=picture.size, layout="constrained", facecolor="white")
        axis = figure.subplots()
        axis.spines[["top", "right"]].set_visible(False)
        picture.draw(axis, record)
        figure.supxlabel(textwrap.fill(caption(record), 130), fontsize=7.5, color="#444444")
        figure.savefig(path, dpi=130, metadata={"Software": None})
