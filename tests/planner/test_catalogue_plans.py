"""Every catalogue model gets a plan or an explained refusal, without a traceback.

The test plans one model of every fourth type on one of the four cards in rotation, with TESTS_WHOLE=1 every model;
`python -m tests.planner.test_catalogue_plans` runs all 660 combinations and prints a summary.
"""

import pytest

from planner.models import catalogue
from planner.planning.answer import plan_workload
from planner.planning.plan import NoPlan
from tests.planner.helpers import plan_request
from tests.whole import these

CARDS = ("t4", "rtx-4090", "a100-80gb", "h200")
ONE_OF_EACH_TYPE = {entry.model_type: entry.names[0] for entry in catalogue.entries()}
NAMES = these([*ONE_OF_EACH_TYPE.values()][::7], catalogue.names())


def check(model: str, card: str) -> str:
    """Plan one combination; "plan" or "no plan"."""
    spec = catalogue.load(model)
    fixed = {"objective": ("classification",)} if spec.reads_both_ways else {}
    plan = plan_workload(plan_request(model, card, fixed=fixed))
    if isinstance(plan, NoPlan):
        assert plan.missing_bytes > 0
        assert plan.nearest.formula.peak_device_bytes > plan.workload.budget_bytes
        assert plan.tree
        return "no plan"
    assert plan.chosen.fits
    assert plan.chosen.tokens_per_s > 0
    assert plan.chosen.setup.attention in plan.workload.model.attentions
    return "plan"


@pytest.mark.slow
@pytest.mark.parametrize(("model", "card"), [(name, CARDS[index % len(CARDS)]) for index, name in enumerate(NAMES)])
def test_every_catalogue_model_is_planned_or_refused_with_reasons(model: str, card: str) -> None:
    assert check(model, card) in ("plan", "no plan")


if __name__ == "__main__":
    for gpu in CARDS:
        answers = [check(name, gpu) for name in catalogue.names()]
        print(f"{gpu:10} {answers.count('plan'):4} plans, {answers.count('no plan'):4} refusals")
