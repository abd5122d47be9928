"""Tests that are a product (models x cards x targets) take some of its cases; `TESTS_WHOLE=1` takes them all.

What is left out goes the same way through the code as what is kept; `make whole` runs it, before a release.
"""

import os
from collections.abc import Iterable, Sequence
from itertools import product
from typing import TypeVar

WHOLE = bool(os.environ.get("TESTS_WHOLE"))
Case = TypeVar("Case")
Other = TypeVar("Other")


def some(cases: Sequence[Case], step: int) -> Sequence[Case]:
    """Every `step`-th case."""
    return cases if WHOLE else cases[::step]


def these(chosen: Iterable[Case], cases: Sequence[Case]) -> Sequence[Case]:
    """The cases that were chosen by hand, in their order."""
    if WHOLE:
        return cases
    selected = list(chosen)
    assert all(case in cases for case in selected), selected
    return [case for case in cases if case in selected]


def paired(ones: Iterable[Case], others: Iterable[Other], num: int) -> Sequence[tuple[Case, Other]]:
    """Of a product, diagonals: each value of the longer side meets `num` of the shorter, all of which are met."""
    left, right = [*ones], [*others]
    shorter = min(len(left), len(right))
    every = [*product(range(len(left)), range(len(right)))]
    return [(left[i], right[j]) for i, j in every if WHOLE or (i + j) % shorter < num]
