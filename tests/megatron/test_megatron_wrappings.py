"""Every place, kind of Megatron's optimizer, dtype and format: resumes and loaded weights lose no
bit.
"""

from __future__ import annotations

from typing import Any

import pytest
from comparison import assert_same
from registry import BOTH_WORLDS, Phase, Results
from scenarios_wrappings import BEFORE, is_large, wrapping_name
from small import WRAPPINGS, Wrapping

EVERY = [(wrapping, phase) for wrapping in WRAPPINGS for phase in BOTH_WORLDS]


def param(wrapping: Wrapping, phase: Phase, *kind: str) -> Any:
    marks = pytest.mark.large if is_large(wrapping, phase) else ()
    return pytest.param(wrapping, phase, *kind, marks=marks, id="-".join((wrapping.name, phase.value, *kind)))


@pytest.mark.parametrize(
    ("wrapping", "phase", "kind"),
    [param(wrapping, phase, kind) for wrapping, phase in EVERY for kind in wrapping.formats],
)
def test_a_resume_loses_no_bit(results: Results, wrapping: Wrapping, phase: Phase, kind: str) -> None:
    for rank, run in enumerate(results.ranks(wrapping_name(wrapping), phase)):
        resume = run["resumes"][kind]
        if isinstance(resume, str):
            pytest.skip(f"Megatron does not save whole parameters of several dtypes in one group: {resume}")
        assert set(resume["saved"]["steps"]) == {BEFORE}
        assert_same(resume["loaded"], resume["saved"], f"rank {rank}, loaded")
        assert_same(resume["refreshed"], resume["saved"], f"rank {rank}, refreshed")
        assert_same(resume["resumed"], resume["went on"], f"rank {rank}")
        assert any(step.updated for step in resume["resumed"]["log"])


@pytest.mark.parametrize(("wrapping", "phase"), [param(*run) for run in EVERY])
def test_loaded_weights_outlive_the_next_step(results: Results, wrapping: Wrapping, phase: Phase) -> None:
    for rank, run in enumerate(results.ranks(wrapping_name(wrapping), phase)):
        assert set(run["reloaded"]) == {"parameters", "state dict"} if wrapping.distributed else {"parameters"}
        for how, after in run["reloaded"].items():
            assert_same(after["weights"], after["wanted"], f"rank {rank}, {how}")
            assert_same(after["moments after"], after["moments"], f"rank {rank}, {how}, moments")
            for master, wanted in zip(after["masters"], after["wanted masters"], strict=True):
                # One that rounds to the loaded weight already is kept: a resume would lose bits
                # otherwise.
                assert_same(master.to(wanted.dtype), wanted, f"rank {rank}, {how}, masters")
