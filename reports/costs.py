"""What the work costs."""

from planner.plan import NoPlan, Plan


def cost_per_million(plan: Plan | NoPlan) -> float | None:
    """US dollars for a million tokens, None without a plan or a price."""
    if isinstance(plan, NoPlan) or plan.workload.price_per_hour is None or not plan.chosen.tokens_per_s:
        return None
    hours = 1e6 / plan.chosen.tokens_per_s / 3600
    return hours * plan.workload.price_per_hour * plan.workload.num_gpus


def cost_words(plan: Plan | NoPlan) -> str:
    """The cost of a million tokens as text."""
    cost = cost_per_million(plan)
    return "-" if cost is None else f"${cost:,.3f}"
