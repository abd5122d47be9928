"""The Optuna study of one search: many workers, each candidate run once, nothing lost when one dies.

How a candidate is claimed, with nothing but what every Optuna storage guarantees:

1. A worker that wants candidate c adds a WAITING trial that carries c. Trial numbers are given in one order that all
   workers see.
2. Any worker takes the first WAITING trial by the storage's atomic WAITING -> RUNNING.
3. Before it runs, it looks at all trials with a smaller number. If one of them holds the same candidate and has not
   failed, its own is a duplicate: FAIL, no probe, next. The smallest number always wins, and it is always visible.

A worker that dies leaves a RUNNING trial whose heartbeat ends. Whoever notices fails it (one succeeds) and adds it
again as WAITING: Optuna's `fail_stale_trials` and `RetryHeartbeatStaleTrialCallback`. One that dies between the two
leaves a candidate that nobody holds, which the sampler proposes like any other.

Trials are read as what others wrote (a foreign program, an older version, a damaged file): `record_of` takes every
attribute by its type and its bounds, so that none can stop a search.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import BaseStorage, fail_stale_trials
from optuna.storages._heartbeat import BaseHeartbeat, BaseHeartbeatThread, get_heartbeat_thread, is_heartbeat_enabled
from optuna.trial import FrozenTrial, TrialState, create_trial

from planner.core.errors import SetupError, UsageError
from planner.core.inputs import number as checked_number
from planner.setup import TrainSetup, allowed
from planner.setup.codec import evidence_from_text, evidence_to_dict
from planner.setup.interchange import setup_from_dict, setup_to_dict
from planner.setup.outcome import Candidate, Evidence, FailureKind, Measurement, Prediction, ProbeFailure
from search.dimensions import NAMES, key_of, value_of
from search.problem import Problem, memory_excess, with_evidence
from search.storage import MAX_RETRIES

EXCLUDED = "excluded"
"""Origin of a trial that the formula excluded."""

MAX_TEXT = 4 << 20
"""Characters of an attribute; the evidence of a large model takes some thousands."""


@dataclass(frozen=True, kw_only=True)
class TrialRecord:
    """One trial of the study in the project's own types.

    Attributes:
        origin: "plan", "residual" (the sampler), or "excluded" (before any probe).
        probed: whether it cost a probe.
        excluded: why it was left out without one; empty otherwise.
        evidence: None while it runs, and for those that the formula excluded.
    """

    number: int
    setup: TrainSetup
    state: TrialState
    origin: str
    evidence: Evidence | None = None
    excluded: str = ""
    probed: bool = False
    duration_s: float = 0.0
    completed_at_s: float = 0.0


def record_of(trial: FrozenTrial) -> TrialRecord | None:
    """The trial in our terms; None where it is none of ours (a foreign program's, a damaged attribute)."""
    attrs = trial.user_attrs
    origin, excluded = (_text(attrs.get(name, "")) for name in ("origin", "excluded"))
    text, duration_s = attrs.get("evidence"), _time(attrs.get("duration_s", 0.0))
    if origin is None or excluded is None or duration_s is None:
        return None
    if not isinstance(attrs.get("setup"), dict) or (text and _text(text) is None):
        return None
    try:
        setup = setup_from_dict(attrs["setup"])
        evidence = evidence_from_text(text) if text else None
    except (SetupError, ValueError, LookupError, TypeError, AttributeError, OverflowError):
        return None
    completed = trial.datetime_complete
    return TrialRecord(
        number=trial.number,
        setup=setup,
        state=trial.state,
        origin=origin,
        evidence=evidence,
        excluded=excluded,
        probed=evidence is not None and not excluded,
        duration_s=duration_s,
        completed_at_s=completed.timestamp() if completed else 0.0,
    )


def _text(value: Any) -> str | None:
    """Text of a bounded length that a file name may hold."""
    return value if isinstance(value, str) and len(value) <= MAX_TEXT and "\0" not in value else None


def _time(value: Any) -> float | None:
    try:
        return checked_number(value, "a time", least=0.0)
    except ValueError:
        return None


_MAX = 1 << 40
_OTHER_TARGETS = "listed"
_SWITCH = CategoricalDistribution((False, True))
SPACE: dict[str, BaseDistribution] = {
    "method": CategoricalDistribution(allowed.METHODS),
    "precision": CategoricalDistribution(allowed.PRECISIONS),
    "quantization": CategoricalDistribution(allowed.QUANTIZATIONS),
    "lora_rank": IntDistribution(0, _MAX),
    "lora_targets": CategoricalDistribution((*allowed.TARGET_SETS, _OTHER_TARGETS)),
    "lora_dropout": FloatDistribution(0.0, 1.0),
    "adapter_dtype": CategoricalDistribution(allowed.ADAPTER_DTYPES),
    "optimizer": CategoricalDistribution(allowed.OPTIMIZERS),
    "attention": CategoricalDistribution(allowed.ATTENTIONS[:3]),  # those that transformers has, which a probe runs
    "checkpointing": IntDistribution(0, _MAX),
    "loss": CategoricalDistribution(allowed.LOSSES),
    **dict.fromkeys(
        ("micro_batch_seqs", "num_gpus", "tensor_degree", "context_degree", "expert_degree", "pipeline_degree"),
        IntDistribution(1, _MAX),
    ),
    **dict.fromkeys(("kbit_fp32_cast", "packing", "compile", "reshard_after_forward"), _SWITCH),
    **dict.fromkeys(("activation_offload", "selective_checkpointing"), _SWITCH),
    "kernels": CategoricalDistribution(allowed.KERNEL_FAMILIES),
    "parallel": CategoricalDistribution(allowed.PARALLELS),
    "pipeline_schedule": CategoricalDistribution(allowed.PIPELINE_SCHEDULES),
    "shard_degree": IntDistribution(0, _MAX),
    "offload": CategoricalDistribution(allowed.OFFLOADS),
}
"""Wide, and the same for every new study: a later search with other candidates may join. An older study keeps its own
(`Study._parameters`): Optuna takes no other choices under a name that has some."""


def params_of(setup: TrainSetup, names: Sequence[str] = NAMES) -> dict[str, Any]:
    """The setup as parameters for Optuna and its dashboard; the exact setup is in the trial's attributes."""
    params = {name: value_of(setup, name) for name in names}
    if params.get("lora_targets", allowed.TARGET_SETS[0]) not in allowed.TARGET_SETS:
        params["lora_targets"] = _OTHER_TARGETS
    return params


def _holds(distribution: BaseDistribution, value: Any) -> bool:
    try:
        return distribution._contains(distribution.to_internal_repr(value))
    except (ValueError, TypeError):
        return False


def predicted_values(candidate: Candidate) -> dict[str, Any]:
    return {f"predicted_{name}": getattr(candidate.formula, name) for name in ("tokens_per_s", "peak_device_bytes")}


def constraint_values(
    problem: Problem, candidate: Candidate | None, setup: TrainSetup, evidence: Evidence
) -> dict[str, float]:
    """All at most 0 exactly when the trial is feasible: memory (share of the budget); runs, requests where violated."""
    failed = isinstance(evidence, ProbeFailure)
    out_of_memory = isinstance(evidence, ProbeFailure) and evidence.kind is FailureKind.OUT_OF_MEMORY
    violated = {"runs": failed and not out_of_memory, "requests": bool(problem.broken_request(setup))}
    memory = memory_excess(problem, candidate, evidence)
    return {"memory": memory, **{name: 1.0 for name, is_so in violated.items() if is_so}}


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


class Study:
    """One study, as seen by one worker."""

    def __init__(self, problem: Problem, storage: BaseStorage, name: str) -> None:
        self._problem = problem
        self._storage = storage
        self._opened = datetime.now()  # naive, as Optuna's
        direction: Literal["minimize", "maximize"] = "maximize" if problem.objective == "tokens" else "minimize"
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.study = optuna.create_study(
            storage=storage,
            study_name=name,
            direction=direction,
            load_if_exists=True,
            sampler=optuna.samplers.RandomSampler(seed=0),
        )
        if self.study.direction.name.lower() != direction:
            raise UsageError(
                f"study {name!r} was made to {self.study.direction.name.lower()}, objective {problem.objective!r} must "
                f"{direction}",
                hint="give another study name",
            )
        subject = self.study.user_attrs.get("subject", problem.subject)
        if subject != problem.subject:
            raise UsageError(
                f"study {name!r} there measured {subject!a:.200}, this search is about {problem.subject}",
                hint="give another --study name, or another --out or --storage",
            )
        self._records: dict[int, TrialRecord] = {}
        setups = [candidate.setup for candidate in problem.candidates]
        self._names = [name for name in NAMES if len({value_of(setup, name) for setup in setups}) > 1]
        """What varies becomes a parameter; what does not would only fill the dashboard."""

    # Reading

    def records(self) -> list[TrialRecord]:
        """All trials of this search's candidates under its conditions that anyone made, in order; those of duplicates
        and lost workers left out."""
        result = []
        seen: set[str] = set()
        for trial in self.study.get_trials(deepcopy=False):
            if not self._same_conditions(trial):
                continue
            record = self._records.get(trial.number) or record_of(trial)
            if record is None:
                continue
            if trial.state.is_finished():
                self._records[trial.number] = record
            if key_of(record.setup) not in self._problem.index:
                continue
            if record.state is TrialState.FAIL:
                continue
            if record.origin == EXCLUDED:
                if (key := key_of(record.setup)) in seen:
                    continue  # two workers that started at once both wrote it
                seen.add(key)
            result.append(record)
        return result

    def _same_conditions(self, trial: FrozenTrial) -> bool:
        return bool(trial.user_attrs.get("conditions", "") == self._problem.conditions)

    def _ours(self, trial: FrozenTrial, record: TrialRecord) -> bool:
        return self._same_conditions(trial) and key_of(record.setup) in self._problem.index

    def answered(self) -> list[TrialRecord]:
        done = [record for record in self.records() if record.evidence is not None and record.state.is_finished()]
        return sorted(done, key=lambda record: (record.completed_at_s, record.number))

    # Writing

    def enqueue(self, candidate: Candidate, origin: str) -> None:
        """One more candidate for whoever is free."""
        self._add(candidate.setup, TrialState.WAITING, {"origin": origin, **predicted_values(candidate)})

    def _add(
        self,
        setup: TrainSetup,
        state: TrialState,
        attributes: Mapping[str, Any],
        constraints: dict[str, float] | None = None,
    ) -> None:
        """One more trial; `attributes` are those beside the setup's own."""
        params, space = self._parameters(setup)
        self.study.add_trial(
            create_trial(
                state=state,
                params=params,
                distributions=space,
                user_attrs={
                    "key": key_of(setup),
                    "setup": setup_to_dict(setup),
                    "conditions": self._problem.conditions,
                    **attributes,
                },
                constraints=constraints,
            )
        )

    def _parameters(self, setup: TrainSetup) -> tuple[dict[str, Any], dict[str, BaseDistribution]]:
        """(values, distributions) of a trial's parameters; left out is a value that the study, made by another version,
        has no choice for. The exact setup is in the attributes either way."""
        space = {name: SPACE[name] for name in self._names}
        for trial in self.study.get_trials(deepcopy=False):
            space |= {name: trial.distributions[name] for name in space.keys() & trial.distributions.keys()}
        params = {name: value for name, value in params_of(setup, self._names).items() if _holds(space[name], value)}
        return params, {name: space[name] for name in params}

    def exclude(self, candidates: Iterable[tuple[Candidate, str]]) -> int:
        """Records candidates that are out before any probe, with the reason; returns how many were new."""
        recorded = {
            key_of(record.setup)
            for trial in self.study.get_trials(deepcopy=False)
            if (record := record_of(trial)) is not None and self._ours(trial, record)
        }
        new = 0
        for candidate, reason in candidates:
            if key_of(candidate.setup) in recorded:
                continue
            new += 1
            excess = memory_excess(self._problem, candidate, candidate.memory_evidence)
            constraints = {"memory": max(excess, 0.0), "requests": 0.0}
            if self._problem.broken_request(candidate.setup):
                constraints["requests"] = 1.0
            predicted: dict[str, Any] = {}
            if self._problem.unprobed(candidate.setup):
                constraints["runs"] = 1.0
                predicted = predicted_values(candidate)  # all that will ever be known of it here
            attributes = {"origin": EXCLUDED, "excluded": reason, **predicted}
            self._add(candidate.setup, TrialState.PRUNED, attributes, constraints)
        return new

    def claim(self, max_probes: int | None = None) -> tuple[int, TrainSetup] | None:
        """Takes the first waiting trial that is no duplicate: its number and setup; None when none waits."""
        waiting = self.study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
        for trial in waiting:
            record = record_of(trial)
            if record is not None and not self._ours(trial, record):
                continue  # another search's: it waits for who knows it
            if not self._take(trial):
                continue
            if record is None:  # of a foreign program
                self._fail(trial)
                continue
            earlier = [r for r in self.records() if r.number < trial.number]
            over = max_probes is not None and sum(map(self._costs_probe, earlier)) >= max_probes
            # an earlier trial answers the candidate, or will: of two the same one must lose for everybody
            same = [r for r in earlier if key_of(r.setup) == key_of(record.setup)]
            if over or any(self._costs_probe(r) or still_excluded(self._problem, r) for r in same):
                self._fail(trial)
                continue
            return trial.number, record.setup
        return None

    def _costs_probe(self, record: TrialRecord) -> bool:
        """Whether it cost a probe, or will."""
        return record.probed or record.state in (TrialState.RUNNING, TrialState.WAITING)

    def _fail(self, trial: FrozenTrial) -> bool:
        try:
            return self._storage.set_trial_state_values(trial._trial_id, state=TrialState.FAIL)
        except UpdateFinishedTrialError:
            return False

    def _take(self, trial: FrozenTrial) -> bool:
        """WAITING -> RUNNING by this worker and no other, with a heartbeat before: without one no death is noticed."""
        try:
            if is_heartbeat_enabled(self._storage) and isinstance(self._storage, BaseHeartbeat):
                self._storage.record_heartbeat(trial._trial_id)
            return self._storage.set_trial_state_values(trial._trial_id, state=TrialState.RUNNING)
        except UpdateFinishedTrialError:
            return False

    def keep_alive(self, number: int) -> BaseHeartbeatThread:
        """While inside, others see that this trial is being worked on."""
        return get_heartbeat_thread(self.trial_id(number), self._storage)

    def trial_id(self, number: int) -> int:
        return self._storage.get_trial_id_from_study_id_trial_number(self.study._study_id, number)

    def tell(self, number: int, evidence: Evidence, *, duration_s: float = 0.0, excluded: str = "") -> bool:
        """Finishes a trial with what came back; False when somebody else had given it up for lost."""
        problem, trial_id = self._problem, self.trial_id(number)
        stored = self._storage.get_trial(trial_id)
        setup = setup_from_dict(stored.user_attrs["setup"])
        candidate = problem.candidates[problem.index[key_of(setup)]] if key_of(setup) in problem.index else None
        value = None if excluded else objective_value(problem, candidate, setup, evidence)
        trial = optuna.trial.Trial(self.study, trial_id)
        try:
            if excluded:
                self._storage.set_trial_user_attr(trial_id, "excluded", excluded)
            if duration_s:
                self._storage.set_trial_user_attr(trial_id, "duration_s", round(duration_s, 3))
            self._storage.set_trial_user_attr(trial_id, "evidence", json.dumps(evidence_to_dict(evidence)))
            for name, excess in constraint_values(problem, candidate, setup, evidence).items():
                if name not in (stored.constraints or {}):  # a retry has those of the first try
                    trial.set_constraint(name, excess)
            if value is None:
                return self._storage.set_trial_state_values(trial_id, state=TrialState.PRUNED)
            return self._storage.set_trial_state_values(trial_id, state=TrialState.COMPLETE, values=[value])
        except UpdateFinishedTrialError:
            return False

    def rescue(self) -> None:
        """Gives trials of dead workers to the living."""
        fail_stale_trials(self.study)

    def set_aside(self, number: int) -> None:
        """This call cannot measure it, which is no fault of the setup: it waits again, and no try is counted."""
        trial = self._storage.get_trial(self.trial_id(number))
        if self._fail(trial) and (record := record_of(trial)) is not None:
            self.enqueue(self._problem.candidates[self._problem.index[key_of(record.setup)]], record.origin)

    def given_up(self) -> list[TrainSetup]:
        """Setups without an answer because every planner that measured them was killed, the last since this call began:
        the next one tries again."""
        trials = self.study.get_trials(deepcopy=False)
        recorded = {key_of(record.setup) for record in self.records()}
        lost = [
            record.setup
            for trial in trials
            if trial.state is TrialState.FAIL
            and len(trial.system_attrs.get("retry_history", ())) >= MAX_RETRIES
            and trial.datetime_start is not None
            and trial.datetime_start >= self._opened
            and (record := record_of(trial)) is not None
            and self._ours(trial, record)
        ]
        return [setup for setup in lost if key_of(setup) not in recorded]

    def describe(self, values: Mapping[str, Any]) -> None:
        """Facts about the search, for the dashboard and for a resumed run; unchanged ones are not written again."""
        stored = self.study.user_attrs
        for name, value in values.items():
            if stored.get(name) != value:
                self.study.set_user_attr(name, value)


def still_excluded(problem: Problem, record: TrialRecord) -> bool:
    """Whether a dry run's exclusion stands: an earlier call may have had less memory."""
    if not record.excluded or record.evidence is None:
        return False
    candidate = with_evidence(problem.candidates[problem.index[key_of(record.setup)]], record.evidence)
    return not isinstance(record.evidence, Prediction) or bool(problem.too_large(candidate))
