"""Workloads for tests, from catalogue facts; what a reading of a file says."""

from collections import defaultdict
from typing import Any

from planner.frameworks.readers import ReadConfig
from planner.hardware.gpus import find_gpu
from planner.memory.dtypes import SIZE_BYTES
from planner.memory.workload import Workload
from planner.models import catalogue
from planner.models.spec import ModelSpec
from planner.options.losses import LOSSES, LossChain, LossShape
from planner.planning.answer import plan_workload
from planner.planning.groups import WalkCache
from planner.planning.plan import NoPlan, Plan
from planner.planning.plan_request import PlanRequest


def loaded(name: str = "meta-llama/llama-3.1-8b") -> ModelSpec:
    """A model of the catalogue."""
    spec = catalogue.load(name)
    assert spec is not None
    return spec


def plan_request(model: str = "Qwen/Qwen2.5-1.5B", gpu: str = "rtx-4090", **options: Any) -> Workload:
    """A workload as the command line would make it."""
    cluster = options.pop("cluster", None)
    return PlanRequest(**options).workload(loaded(model), find_gpu(gpu), cluster)


def planned(workload: Workload, *given: Any, **options: Any) -> Plan:
    """The plan of a workload for which something fits."""
    plan = plan_workload(workload, *given, **options)
    assert isinstance(plan, Plan)
    return plan


def refusal_of(workload: Workload, *given: Any) -> NoPlan:
    """The answer to a workload for which nothing fits."""
    answer = plan_workload(workload, *given)
    assert isinstance(answer, NoPlan)
    return answer


def known_of(workload: Workload) -> WalkCache:
    """What plans for the same model walked before, as whoever plans for it again keeps it."""
    return _KNOWN[workload.model.model_id]


_KNOWN: dict[str, WalkCache] = defaultdict(WalkCache)


def loss_chain(
    *, loss: str, logits_dtype: str, hidden_dtype: str, head_cast: bool = False, upcast: bool = True, **shape: Any
) -> LossChain:
    """The loss chain of one micro-batch, with data types by their names."""
    whole = LossShape(
        logit_bytes=SIZE_BYTES[logits_dtype],
        hidden_bytes=SIZE_BYTES[hidden_dtype],
        head_cast=head_cast,
        upcast=upcast,
        **shape,
    )
    return LOSSES[loss].memory(whole)


def open_fields(config: ReadConfig) -> set[str]:
    """Fields that a reading leaves open."""
    return {gap.field for gap in config.missing}


def says(config: ReadConfig, names: str, value: object) -> None:
    """Asserts what a reading or its setup has under names (of several a tuple), and that nothing is left open unless
    that is "missing"."""
    holders = {name: config.setup if hasattr(config.setup, name) else config for name in names.split()}
    read_values = [open_fields(config) if name == "missing" else getattr(of, name) for name, of in holders.items()]
    assert (tuple(read_values) if " " in names else read_values[0]) == value
    assert "missing" in names or not config.missing
