"""The forty plans of docs/choices.md are what is planned, each with the sentence that explains it."""

import pytest

from benchmarks.listed_plans import BEGIN, END, PAGE, PLANS, row

HOW = "the page is written by: python benchmarks/listed_plans.py --write"
LISTED = PAGE.read_text().partition(BEGIN)[2].partition(END)[0].splitlines()
SOME = range(0, len(PLANS), 6)


def test_forty_plans_are_listed() -> None:
    assert len(LISTED) == len(PLANS) + 2 >= 42
    assert len({line.split("|")[1] for line in LISTED}) == len(LISTED)


@pytest.mark.parametrize("number", SOME)
def test_a_listed_plan_is_what_is_planned(number: int) -> None:
    assert row(*PLANS[number]) == LISTED[number + 2], HOW


@pytest.mark.slow
@pytest.mark.parametrize("number", [number for number in range(len(PLANS)) if number not in SOME])
def test_every_listed_plan_is_what_is_planned(number: int) -> None:
    assert row(*PLANS[number]) == LISTED[number + 2], HOW
