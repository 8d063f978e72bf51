"""Scenarios: functions that run in the processes of a job and return results for tests.

Starting a process with Megatron in it takes many times longer than training the tiny model, so all
scenarios share two processes. They go through the phases below together.
"""

from __future__ import annotations

import enum
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1]))  # scenarios import pairs.py from there


class Phase(enum.Enum):
    """When a scenario runs, in this order."""

    BEFORE_IMPORT = "before Megatron is imported"
    TWO_RANKS = "two ranks"
    ONE_RANK = "one rank"
    TWO_RANKS_AGAIN = "two ranks again"

    @property
    def alone(self) -> bool:
        """True if each scenario runs in a single process, as a world of its own."""
        return self in (Phase.BEFORE_IMPORT, Phase.ONE_RANK)


BOTH_WORLDS = (Phase.TWO_RANKS, Phase.ONE_RANK)


class NotInReleaseError(Exception):
    """A scenario raises this where the installed Megatron-Core lacks what it needs; tests of it are
    skipped.
    """


class Context(NamedTuple):
    """Arguments of a scenario.

    ``directory`` is the same for all processes and phases, so that one phase can read what another
    saved.
    """

    directory: Path
    phase: Phase


class Scenario(NamedTuple):
    name: str
    phase: Phase
    function: Callable[[Context], Any]
    large: bool


_scenarios: list[Scenario] = []


def scenario(
    name: str, function: Callable[[Context], Any], phases: tuple[Phase, ...] = BOTH_WORLDS, *, large: bool = False
) -> None:
    """Adds a scenario. Its function returns anything that ``torch.save`` takes.

    A large one belongs to tests marked ``large`` and is left out unless one of them runs.
    """
    for phase in phases:
        if any((other.name, other.phase) == (name, phase) for other in _scenarios):
            raise ValueError(f"there are two scenarios {name!r} in phase {phase.value!r}")
        _scenarios.append(Scenario(name, phase, function, large))


def scenarios_of(phase: Phase, process: int, selected: str, *, large: bool) -> list[tuple[int, Scenario]]:
    """Numbered scenarios that a process runs in a phase."""
    chosen = [s.phase is phase and (large or not s.large) and re.search(selected, s.name) for s in _scenarios]
    numbered = [(i, s) for i, s in enumerate(_scenarios) if chosen[i]]
    return numbered[process::2] if phase.alone else numbered


class Outcome(NamedTuple):
    """Result or error of a scenario in one process.

    ``error`` is the traceback of what it raised; if there is none, ``value`` reads what it
    returned. ``lacks`` says what the release does not have.
    """

    name: str
    phase: Phase
    process: int
    error: str | None
    lacks: str | None
    seconds: float
    value: Callable[[], Any]


class Results:
    """Outcomes of all scenarios."""

    def __init__(self, outcomes: list[Outcome], log: str) -> None:
        self._outcomes: Mapping[tuple[str, Phase], list[Outcome]] = {}
        for outcome in sorted(outcomes, key=lambda outcome: outcome.process):
            self._outcomes.setdefault((outcome.name, outcome.phase), []).append(outcome)
        self.log = log

    def ranks(self, name: str, phase: Phase) -> list[Any]:
        """A scenario's values, one a rank."""
        outcomes = self._outcomes.get((name, phase), [])
        lacks = [outcome.lacks for outcome in outcomes if outcome.lacks is not None]
        if lacks:
            pytest.skip(lacks[0])
        errors = [f"process {o.process}: {o.error}" for o in outcomes if o.error is not None]
        if errors:
            raise AssertionError(f"scenario {name!r} ({phase.value}) failed\n" + "\n".join(errors))
        if len(outcomes) < (1 if phase.alone else 2):
            raise AssertionError(f"scenario {name!r} ({phase.value}) has no result. The processes said:\n{self.log}")
        return [outcome.value() for outcome in outcomes]

    def slowest(self) -> list[Outcome]:
        """All outcomes, the slowest first."""
        every = [outcome for outcomes in self._outcomes.values() for outcome in outcomes]
        return sorted(every, key=lambda outcome: -outcome.seconds)
