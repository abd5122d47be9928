"""A setup with its prediction against a workload's budget."""

from planner.outcome import Candidate
from planner.predict import predict
from planner.setup import TrainSetup
from planner.workload import Workload


def candidate(workload: Workload, setup: TrainSetup) -> Candidate:
    """A setup with its formula prediction against the workload's budget."""
    prediction = predict(workload.model, workload.gpu, setup, workload.cluster, planned=True)
    return Candidate(setup=setup, budget_bytes=workload.budget_bytes, formula=prediction)


def communication_share(one: Candidate) -> float:
    """Share of the step that waits for communication."""
    return one.formula.time_parts_s.get("communication", 0.0) / (one.formula.step_time_s or 1.0)
