"""The forty plans of docs/choices.md are what is planned, each with the sentence that explains it.

`UPDATE_DOCS=1 pytest tests/planner/test_listed_plans.py`, like that of `tests/test_docs.py`, writes the page anew.
"""

import os

import pytest

from benchmarks.listed_plans import PLANS, listed, row, table
from tests.whole import some

LISTED = listed(table() if os.environ.get("UPDATE_DOCS") else None).splitlines()


def test_forty_plans_are_listed() -> None:
    assert len(LISTED) == len(PLANS) + 2 >= 42
    assert len({line.split("|")[1] for line in LISTED}) == len(LISTED)


@pytest.mark.parametrize("number", some(range(len(PLANS)), 8))
def test_a_listed_plan_is_what_is_planned(number: int) -> None:
    assert row(*PLANS[number]) == LISTED[number + 2], __doc__
