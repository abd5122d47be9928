"""The first answer for a type without an adapter: by the sizes in its config.json, while its layers are read."""

from collections.abc import Callable, Mapping
from typing import Any

from finetune_planner.app.progress import say
from planner.core.errors import PlannerError
from planner.memory.workload import Workload
from planner.models.adapters import spec_from_sizes
from planner.models.spec import ModelSpec
from planner.planning.plan import NoPlan, Plan

FOLLOWS = "what transformers' own layers and a dry run say follows in some ten seconds"


def say_first(config: Mapping[str, Any], workload: Callable[[ModelSpec], Workload]) -> None:
    """Says on stderr what the closed forms give for a configuration's sizes, with the band of a stranger, or that they
    tell too little; `workload`: what is asked for, of a model."""
    name = str(config.get("model_type"))
    plan = _by_sizes(config, workload)
    if plan is None:
        say(f"{name} has no adapter and its sizes alone tell too little: {FOLLOWS}.")
        return
    from reports.text import nothing_sentence, short_verdict

    verdict = short_verdict(plan) if isinstance(plan, Plan) else nothing_sentence(plan)
    say(f"{name} has no adapter. By the sizes in its config.json alone: {verdict}")
    say(f"{FOLLOWS[0].upper()}{FOLLOWS[1:]}.")


def _by_sizes(config: Mapping[str, Any], workload: Callable[[ModelSpec], Workload]) -> Plan | NoPlan | None:
    """The formula's plan; None where the sizes tell of no kind, or of what the whole reading has yet to refuse."""
    from planner.planning.answer import plan_workload

    try:
        spec = spec_from_sizes(config, model_id="", source="its sizes alone")
        return plan_workload(workload(spec)) if spec is not None else None
    except PlannerError:
        return None
