"""docs/benchmarks.md is what the results say, and steps that got slower are found."""

from __future__ import annotations

import copy
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest

ROOT = Path(__file__).resolve().parents[1]
STORED = ROOT / "bench" / "results" / "h100-2026-11-28-quiet.json"
WHOLE = STORED.with_name("h100-2026-11-28-bench.json")  # has peers, too


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"bench_{name}", ROOT / "bench" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_results_say() -> None:
    command = [sys.executable, "bench/page.py", "--check"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    for path in (ROOT / "bench" / "results").glob("*.json"):
        assert f"(../bench/results/{path.name})" in text
    for line in text.splitlines():
        if line.startswith("!["):
            assert (ROOT / "docs" / line.rpartition("(")[2].rstrip(")")).is_file()


def changed(factor: float) -> dict[str, Any]:
    results = copy.deepcopy(json.loads(STORED.read_text()))
    for row in results["rows"]:
        if row["ratio_to_link"] is not None:
            row["ratio_to_link"] *= factor
    return results


@pytest.mark.parametrize(("factor", "code"), [(1.0, 0), (1.14, 0), (1.16, 1), (0.5, 0)])
def test_slower_steps_are_found(
    factor: float, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check = load("check")
    stored = tmp_path / "stored"
    stored.mkdir()
    (stored / "then.json").write_text(STORED.read_text())
    monkeypatch.setattr(check, "STORED", stored)
    now = tmp_path / "now.json"
    now.write_text(json.dumps(changed(factor)))
    assert check.main([str(now)]) == code
    out = capsys.readouterr().out
    assert out.count("then.json") == 3
    assert ("SLOWER" in out) == (code == 1)


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        (lambda results: results.update(failed=["bench/test_step.py::test_whole_step[12B]"]), 3, "not whole"),
        (lambda results: results["scale"].update(smoke=True), 3, "smoke test"),
        (lambda results: [row.update(numel=4612) for row in results["rows"]], 2, "nothing to compare"),
        (lambda results: results["rows"].clear(), 2, "nothing to compare"),
        (lambda results: [row.update(ratio_to_link=float("nan")) for row in results["rows"]], 1, "SLOWER"),
        (lambda results: results.update(rows=None), 3, "not written by pytest"),
        (lambda results: results.update(machine=None), 3, "not written by pytest"),
        (lambda results: [row.pop("ratio_to_link") for row in results["rows"]], 3, "not written by pytest"),
        (lambda results: [row.update(ratio_to_link="1.0") for row in results["rows"]], 3, "not written by pytest"),
        (lambda results: results.pop("rows"), 3, "not written by pytest"),
        (lambda results: None, 1, "step/4B/whole-step: not measured now, it is in h100"),
    ],
)
def test_what_cannot_be_compared_is_not_called_fine(
    change: Any, code: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check, now = load("check"), tmp_path / "now.json"
    results = changed(1.0)
    change(results)
    now.write_text(json.dumps(results))
    assert check.main([str(now)]) == code
    assert words in capsys.readouterr().out
    assert check.main([str(tmp_path / "missing.json")]) == 3
    assert "cannot be read" in capsys.readouterr().out


@pytest.mark.parametrize(("factor", "code"), [(1.0, 0), (2.0, 1)])
def test_a_part_of_the_steps_is_compared_where_that_was_asked_for(factor: float, code: int, tmp_path: Path) -> None:
    check, now = load("check"), tmp_path / "now.json"
    now.write_text(json.dumps(changed(factor)))
    assert check.main([str(now), "--partial"]) == code
    assert check.main([str(now)]) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda results: results["scale"].update(smoke=True), "smoke test"),
        (lambda results: results.update(failed=["bench/test_step.py::test_whole_step[12B]"]), "not whole"),
        (lambda results: results["machine"].pop("date"), "not written by pytest"),
        (lambda results: results["rows"][0].update(name=None, ratio_to_link=1.0), "not written by pytest"),
        (lambda results: [row.update(ratio_to_link="9") for row in results["rows"]], "not written by pytest"),
        (lambda results: [results], "not written by pytest"),
    ],
)
def test_stored_files_that_say_nothing_are_left_out_by_name(
    change: Any, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check, stored, now = load("check"), tmp_path / "stored", tmp_path / "now.json"
    stored.mkdir()
    monkeypatch.setattr(check, "STORED", stored)
    (stored / "then.json").write_text(STORED.read_text())
    bad = changed(9.0)
    bad["machine"]["date"] = "2030-01-01"
    instead = change(bad)
    (stored / "bad.json").write_text(json.dumps(instead if isinstance(instead, list) else bad))
    (stored / "cut.json").write_text('{"rows": [')
    (stored / "loop.json").write_text(json.dumps({"cases": {}, "failed": {"none-4": "out of memory"}}))
    now.write_text(json.dumps(changed(2.0)))
    assert check.main([str(now)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("bad.json is left out") and words in line]
    assert [line for line in lines if line.startswith("cut.json is left out: it cannot be read")]
    assert not [line for line in lines if "loop.json" in line]


def test_the_newest_file_of_the_same_card_counts() -> None:
    check = load("check")
    older, newer, other = changed(1.0), changed(2.0), changed(3.0)
    newer["machine"]["date"] = "2027-01-01"
    other["machine"]["date"] = "2028-01-01"
    other["machine"]["gpu"]["name"] = "another"
    comparisons = check.compare(changed(2.0), [("newer", newer), ("older", older), ("other", other)])
    assert {one.source for one in comparisons} == {"newer"}
    assert not any(one.is_slower for one in comparisons)
    assert check.compare(changed(1.0), [("other", other)]) == []


@pytest.mark.parametrize(("now", "slower"), [(1.14, False), (1.16, True)])
def test_a_step_beside_disturbed_copies_is_not_what_later_ones_are_held_to(now: float, slower: bool) -> None:
    check = load("check")
    assert check.Comparison("step", now, stored=0.8, source="then").is_slower == slower


def test_results_of_tune_have_a_section(tmp_path: Path) -> None:
    page = load("page")
    key = {"gpu": "H100", "link": "x16", "host": "Xeon", "versions": {"torch": "2.11"}}
    path = tmp_path / "tune.json"
    path.write_text(
        json.dumps(
            {
                "profile": {
                    "key": key,
                    "measured": "2026-11-28",
                    "choices": [{"why": "it is the fastest"}],
                    "shared_link": [{"gpus": 2, "gbps": 35.0}, {"gpus": 4, "gbps": 20.0}],
                },
                "link": [{"copy_mib": 4, "h2d_gbps": 54.0, "d2h_gbps": 53.0, "duplex_gbps": 47.0}],
                "steps": [
                    {
                        "param_numel": 1000,
                        "state_bytes": 12_000,
                        "timed": [
                            {"chunk_bytes": 8 * 2**20, "depth": 3, "programs": None, "ms": 71.234},
                            {"chunk_bytes": 0, "depth": 0, "programs": 64, "ms": 80.0},
                        ],
                    }
                ],
            }
        )
    )
    text = "\n".join(page.Results(path).lines())
    for words in (
        "| 4 | 54.0 | 53.0 | 47.0 |",
        "each way and GPU: 2 GPUs 35.0, 4 GPUs 20.0.",
        "| 8 | 71.23 |",
        "| 64 | 80.00 |",
        "Chosen: it is the fastest.",
    ):
        assert words in text


def results_of(page: ModuleType, tmp_path: Path, record: dict[str, Any]) -> Any:
    path = tmp_path / "results.json"
    path.write_text(json.dumps(record))
    return page.Results(path)


def without(*parts: str) -> dict[str, Any]:
    """Results of the whole suite, less the rows that have one of these parts in their name."""
    results: dict[str, Any] = json.loads(WHOLE.read_text())
    results["rows"] = [row for row in results["rows"] if not any(part in row["name"] for part in parts)]
    return results


def loop(**cases: dict[str, Any]) -> dict[str, Any]:
    filled = {name: {"microbatches": 8, "iteration_ms": 900.0, **case} for name, case in cases.items()}
    return {**{key: changed(1.0)[key] for key in ("machine", "scale")}, "cases": filled, "skipped": {}, "failed": {}}


def window_cases(*left_out: str) -> dict[str, dict[str, Any]]:
    cases = {f"{name}-6B-{n}": ADDED for name in ("resident", "stream", "auto", "window") for n in (4, 8)}
    return {name: case for name, case in cases.items() if name not in left_out}


ADDED = {"host_bytes": 8, "added_ms": 20.0, "peak_bytes": 10**9}
PEER = {"note": "state on the GPU", "over_none_ms": 9.0, "peak_bytes": 10**9}


@pytest.mark.parametrize(
    ("record", "pictures"),
    [
        (without(), {"step", "peers"}),
        (without("step/"), set()),
        (without("plain-duplex"), {"peers"}),
        (without("6B/whole-step"), set()),
        (without("peers/torch-fused-cpu"), {"step"}),
        (loop(**window_cases()), {"window"}),
        (loop(**window_cases("auto-6B-8")), set()),
        (loop(**{"none-4": {}, "torch-fused-resident-4": PEER}), {"training"}),
        (loop(**{"none-4": {}}), set()),
    ],
)
def test_pictures_are_drawn_of_what_has_all_that_they_show(
    record: dict[str, Any], pictures: set[str], tmp_path: Path
) -> None:
    page, plots = load("page"), load("plots")
    found = page.pictured([results_of(page, tmp_path, record)])
    assert found.keys() == pictures
    for name, results in found.items():
        plots.PICTURES[name].draw(MagicMock(), results.record)
    text = page.page([results_of(page, tmp_path, record)])
    assert "[results](#results)" in text  # in the table of contents


def test_pictures_name_optimizers_as_people_do(tmp_path: Path) -> None:
    page, plots = load("page"), load("plots")
    everything = [page.Results(path) for path in (ROOT / "bench" / "results").glob("*.json")]
    names = {case for results in everything for case in results.loop} | {
        row for results in everything for row in results.rows if row.startswith("peers/") or row.endswith("whole-step")
    }
    narrow = {"step/6B-fp16/whole-step", "step/6B-stochastic/whole-step"}
    assert {name for name in names - narrow if not plots.people_name(name)} == set()
    axis = MagicMock()
    record = json.loads(WHOLE.with_name("h100-2026-11-28-loop-peers.json").read_text())
    plots.draw_added(axis, record)
    labels = [call.args[0] for call in axis.annotate.call_args_list]
    assert "TE FusedAdam, on the GPU, 12 bytes: 12 ms" in labels
    assert "this project, 12 bytes a parameter: 347 ms" in labels
    # Such labels would be read as billions.
    assert not [label for label in labels if re.search(r"\b\d+B\b", label)]


def test_labels_of_near_points_stand_apart() -> None:
    heights = load("plots").label_heights([540.0, 466.0, 1344.0])
    assert heights[1:] == [466.0, 1344.0]
    assert heights[0] > 540.0


def test_what_another_case_left_behind_is_no_memory_of_a_case() -> None:
    assert load("plots").peak_gb({"peak_bytes": 7 * 10**9, "foreign_bytes": 2 * 10**9}) == 5.0


def test_the_summary_says_what_the_results_say() -> None:
    page = load("page")
    everything = [page.Results(path) for path in sorted((ROOT / "bench" / "results").glob("*.json"))]
    lines = list(page.summary(sorted(everything, key=lambda results: results.date, reverse=True)))
    text = "\n".join(lines)
    assert len(lines) <= 10
    for words in (
        "takes 264, 223, 139 and 96.0 ms",
        "13.1 billion parameters on one GPU",
        "with torch's fused AdamW on the CPU",
        "With HybridDeviceOptimizer",
    ):
        assert words in text
    assert text.count("tokens/s at 32,768 tokens a step") == 2  # one of each model, of several runs the newest


def test_a_case_of_megatron_that_failed_has_no_line(tmp_path: Path) -> None:
    page = load("page")
    record = {"machine": changed(1.0)["machine"], "cases": {"te": [None, None]}, "failed": {"te": "out of memory"}}
    assert "**Failed: te**: out of memory" in list(results_of(page, tmp_path, record).lines())


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""),
        (float("inf"), "inf"),
        (float("-inf"), "-inf"),
        (float("nan"), "nan"),
        (1234.5, "1,234"),
        (0.5, "0.500"),
    ],
)
def test_numbers_are_shown_also_if_they_are_not_finite(value: float | None, text: str) -> None:
    assert load("table").number(value) == text


@pytest.mark.parametrize("record", [changed(1.0), loop(**{"none-4": {}})])
def test_remarks_end_a_section_of_any_kind(record: dict[str, Any], tmp_path: Path) -> None:
    page = load("page")
    remarks = ["the host was busy", "and so was the link"]
    lines = list(results_of(page, tmp_path, {**record, "remarks": remarks}).lines())
    assert lines[-4:] == ["", remarks[0], "", remarks[1]]
    for wrong in ("the host was busy", [1], {"a": "b"}, None):
        with pytest.raises(SystemExit, match=r"results\.json: remarks should be a list of texts, not"):
            list(results_of(page, tmp_path, {**record, "remarks": wrong}).lines())
