"""Small forms of products: few cases, in which every pair of values occurs that occurs in all of
them.

The other cases are the large form.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import pytest

Case = TypeVar("Case", bound=tuple[Any, ...])


def covering(cases: Sequence[Case], values: Callable[[Case], Iterable[Any]] = tuple) -> list[Case]:
    """The first cases that add most pairs of values to those before them, until no pair is
    missing.
    """
    pairs = [set(itertools.combinations(enumerate(values(case)), 2)) for case in cases]
    missing, chosen = set().union(*pairs), []
    while missing:
        best = max(range(len(cases)), key=lambda number: len(pairs[number] & missing))
        missing -= pairs[best]
        chosen.append(cases[best])
    return chosen


def in_two_forms(cases: Sequence[Case], small: Sequence[Case] | None = None) -> list[Any]:
    """Parameters of a test: cases, of which those that are not small are marked ``large``.

    By default the small ones cover all pairs.
    """
    small = covering(cases) if small is None else small
    return [
        pytest.param(case, marks=() if case in small else pytest.mark.large, id=getattr(case, "name", None))
        for case in cases
    ]


def combinations(
    names: Sequence[str], cases: Iterable[Case], values: Callable[[Case], Iterable[Any]] = tuple, **options: Any
) -> pytest.MarkDecorator:
    """Runs a test with each case, whose parts are arguments of these names.

    Only those that cover all pairs of values are small.
    """
    cases = list(cases)
    small = covering(cases, values)
    params = [pytest.param(*case, marks=() if case in small else pytest.mark.large) for case in cases]
    return pytest.mark.parametrize(names, params, **options)
