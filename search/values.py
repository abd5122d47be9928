"""What a study writes of a candidate and its evidence: parameters, constraints, value and description."""

import json
from collections.abc import Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution

from planner.setup import TrainSetup
from planner.setup.allowed import (
    ADAPTER_DTYPES,
    ATTENTIONS,
    KERNEL_FAMILIES,
    LOSSES,
    METHODS,
    OFFLOADS,
    OPTIMIZERS,
    PARALLELS,
    PIPELINE_SCHEDULES,
    PRECISIONS,
    QUANTIZATIONS,
    TARGET_SETS,
)
from planner.setup.outcome import Candidate, Evidence, FailureKind, Measurement, ProbeFailure
from search.dimensions import NAMES, value_of
from search.problem import Problem, memory_excess

_MAX = 1 << 40


_OTHER_TARGETS = "listed"


_SWITCH = CategoricalDistribution((False, True))
SPACE: dict[str, BaseDistribution] = {
    "method": CategoricalDistribution(METHODS),
    "precision": CategoricalDistribution(PRECISIONS),
    "quantization": CategoricalDistribution(QUANTIZATIONS),
    "lora_rank": IntDistribution(0, _MAX),
    "lora_targets": CategoricalDistribution((*TARGET_SETS, _OTHER_TARGETS)),
    "lora_dropout": optuna.distributions.FloatDistribution(0.0, 1.0),
    "adapter_dtype": CategoricalDistribution(ADAPTER_DTYPES),
    "optimizer": CategoricalDistribution(OPTIMIZERS),
    "attention": CategoricalDistribution(ATTENTIONS[:3]),  # those that transformers has, which a probe runs
    "checkpointing": IntDistribution(0, _MAX),
    "loss": CategoricalDistribution(LOSSES),
    **dict.fromkeys(
        ("micro_batch_seqs", "num_gpus", "tensor_degree", "context_degree", "expert_degree", "pipeline_degree"),
        IntDistribution(1, _MAX),
    ),
    **dict.fromkeys(("kbit_fp32_cast", "packing", "compile", "reshard_after_forward"), _SWITCH),
    **dict.fromkeys(("activation_offload", "selective_checkpointing"), _SWITCH),
    "kernels": CategoricalDistribution(KERNEL_FAMILIES),
    "parallel": CategoricalDistribution(PARALLELS),
    "pipeline_schedule": CategoricalDistribution(PIPELINE_SCHEDULES),
    "shard_degree": IntDistribution(0, _MAX),
    "offload": CategoricalDistribution(OFFLOADS),
}
"""Wide, and the same for every study: a later search with other candidates may join."""


def params_of(setup: TrainSetup, names: Sequence[str] = NAMES) -> dict[str, Any]:
    """The setup as parameters for Optuna and its dashboard; the exact setup is in the trial's attributes."""
    params = {name: value_of(setup, name) for name in names}
    if params.get("lora_targets", TARGET_SETS[0]) not in TARGET_SETS:
        params["lora_targets"] = _OTHER_TARGETS
    return params


def predicted_values(candidate: Candidate) -> dict[str, Any]:
    """The formula's figures as attributes of a trial."""
    return {f"predicted_{name}": getattr(candidate.formula, name) for name in ("tokens_per_s", "peak_device_bytes")}


def constraint_values(
    problem: Problem, candidate: Candidate | None, setup: TrainSetup, evidence: Evidence
) -> dict[str, float]:
    """All at most 0 exactly when the trial is feasible: memory (share of the budget); runs, requests where violated."""
    failed = isinstance(evidence, ProbeFailure)
    out_of_memory = isinstance(evidence, ProbeFailure) and evidence.kind is FailureKind.OUT_OF_MEMORY
    memory = memory_excess(problem, candidate, evidence)
    broken = 1.0 if problem.broken_request(setup) else 0.0
    if problem.min_tokens_per_s and not failed and not problem.feasible(setup, evidence) and memory <= 0:
        broken = 1.0
    violated = {"runs": 1.0 if failed and not out_of_memory else 0.0, "requests": broken}
    return {"memory": memory, **{name: value for name, value in violated.items() if value > 0}}


def objective_value(
    problem: Problem, candidate: Candidate | None, setup: TrainSetup, evidence: Evidence
) -> float | None:
    """The study's value: tokens/s, GPU seconds per million tokens, or GiB; None for what brought no figure."""
    if isinstance(evidence, ProbeFailure):
        return None
    if problem.objective == "memory":
        return evidence.peak_device_bytes / 1024**3
    if isinstance(evidence, Measurement) and evidence.tokens_per_s is None:
        return None
    speed = evidence.tokens_per_s or (candidate.formula.tokens_per_s if candidate else None)
    if speed is None:
        return None
    return 1e6 * setup.num_gpus / speed if problem.objective == "cost" else speed


def describe_problem(problem: Problem, excluded: int) -> dict[str, Any]:
    """What the study is about, as JSON values."""
    num_gpus = max(candidate.setup.num_gpus for candidate in problem.candidates)
    return {
        "subject": problem.subject,
        **({"num_gpus": num_gpus} if num_gpus > 1 else {}),
        "objective": problem.objective,
        "budget_bytes": problem.budget_bytes,
        "num_candidates": len(problem.candidates),
        "num_excluded_by_formula": excluded,
        "min_rank": problem.min_rank,
        "fixed": json.loads(json.dumps(dict(problem.fixed), default=str)),
    }
