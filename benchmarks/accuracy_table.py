"""Predicted against measured: how wrong a level is, per source, with the noise between software versions beside it."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from statistics import median

from benchmarks.measured import MeasuredRow, Quantity, version_noise
from benchmarks.shared import percentile
from planner.core.errors import PlannerError
from planner.core.records import dataclass
from planner.hardware.gpu import GpuSpec
from planner.models.spec import ModelSpec
from planner.setup import TrainSetup
from planner.setup.outcome import Prediction, ProbeFailure

Predict = Callable[[ModelSpec, GpuSpec, TrainSetup], Prediction | ProbeFailure | None]
Lookup = Callable[[MeasuredRow], tuple[ModelSpec, GpuSpec]]


@dataclass(frozen=True, kw_only=True, slots=True)
class AccuracyCase:
    """One recorded run with what was predicted for it, in base units.

    Attributes:
        ran: False for a run that went out of memory (it then has no measured figure).
        measured, predicted: bytes or tokens/s; `predicted_device_bytes` against `capacity_bytes` says whether it was
            predicted to fit.
    """

    row: MeasuredRow
    setup: TrainSetup
    measured: float | None
    predicted: float
    predicted_device_bytes: int
    capacity_bytes: int

    @property
    def ran(self) -> bool:
        return self.row.status == "ok"

    @property
    def predicted_fits(self) -> bool:
        """Whether the prediction says that the card is large enough."""
        return self.predicted_device_bytes <= self.capacity_bytes

    @property
    def error_fraction(self) -> float:
        """Predicted above measured, as a fraction of measured; negative when too low, NaN where none was measured."""
        return self.predicted / self.measured - 1.0 if self.measured is not None else math.nan


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupStats:
    """Errors of one group of cases; all as fractions.

    `noise_median`, `noise_p90`: spread of the same configurations under other software versions, None without
    repeats: no prediction can be tested more tightly than that.
    """

    name: str
    num_cases: int
    num_configs: int
    bias: float
    median_error: float
    p90_error: float
    p95_error: float
    worst_error: float
    worst_id: str
    noise_median: float | None
    noise_p90: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class FitStats:
    """Does it fit, said and seen: the error that costs a person a night.

    `num_false_fits`: predicted to fit on a card where the run went out of memory; `num_false_rejects`: predicted not to
    fit although it ran.
    """

    num_out_of_memory: int
    num_false_fits: int
    num_ran: int
    num_false_rejects: int

    @property
    def false_fit_fraction(self) -> float:
        total = self.num_out_of_memory + self.num_ran
        return self.num_false_fits / total if total else 0.0


@dataclass(frozen=True, kw_only=True)
class AccuracyTable:
    """The accuracy of one level on one quantity.

    Attributes:
        groups: one per source, in order of name; `exact`: cases that the setup expresses fully against those with a
            known difference of the stack.
        not_predicted: row id and the level's reason, for rows it had no answer for.
    """

    level: str
    what: Quantity
    cases: tuple[AccuracyCase, ...]
    overall: GroupStats | None
    groups: tuple[GroupStats, ...]
    exact: tuple[GroupStats, ...]
    fit: FitStats
    not_predicted: tuple[tuple[str, str], ...] = ()

    def worst(self, num: int) -> tuple[AccuracyCase, ...]:
        """The cases with the largest errors, one per configuration, worst first."""
        seen: dict[tuple[str, str], AccuracyCase] = {}
        measured = (case for case in self.cases if case.measured is not None)
        for case in sorted(measured, key=lambda case: abs(case.error_fraction), reverse=True):
            seen.setdefault((case.row.group, case.row.config_id), case)
        return tuple(seen.values())[:num]


def accuracy_table(
    rows: Iterable[MeasuredRow], predict: Predict, *, what: Quantity, lookup: Lookup, level: str
) -> AccuracyTable:
    """Every comparable row through `predict`, and the statistics of its errors.

    Args:
        rows: recorded runs; those that cannot be compared on `what` are skipped.
        predict: one setup's prediction; None or a failure counts as not predicted.
        lookup: the model and the card of a row.
        level: the name in the headline.
    """
    rows = tuple(rows)
    cases: list[AccuracyCase] = []
    missing: list[tuple[str, str]] = []
    for row in rows:
        setup = row.speed_setup if what == "tokens_per_s" else row.setup
        if setup is None or not row.comparable(what) or (what == "tokens_per_s" and row.status != "ok"):
            continue
        try:
            model, gpu = lookup(row)
            answer = predict(model, gpu, setup)
        except PlannerError as error:  # a module tree, read where torch is
            missing.append((row.id, error.message))
            continue
        predicted = predicted_figure(answer, what) if isinstance(answer, Prediction) else None
        if not isinstance(answer, Prediction) or predicted is None:
            missing.append((row.id, answer.message if isinstance(answer, ProbeFailure) else "no prediction"))
            continue
        cases.append(
            AccuracyCase(
                row=row,
                setup=setup,
                measured=row.measured(what) if row.status == "ok" else None,
                predicted=predicted,
                predicted_device_bytes=answer.peak_device_bytes,
                capacity_bytes=gpu.memory_bytes,
            )
        )
    measured = [case for case in cases if case.measured is not None]
    by_group: dict[str, list[AccuracyCase]] = defaultdict(list)
    by_exact: dict[str, list[AccuracyCase]] = defaultdict(list)
    for case in measured:
        by_group[case.row.group].append(case)
        by_exact["known differences of the stack" if case.row.differs else "expressed fully"].append(case)
    return AccuracyTable(
        level=level,
        what=what,
        cases=tuple(cases),
        overall=_stats("all sources", measured, rows, what) if measured else None,
        groups=tuple(_stats(name, of_group, rows, what) for name, of_group in sorted(by_group.items())),
        exact=tuple(_stats(name, of_kind, rows, what) for name, of_kind in sorted(by_exact.items())),
        fit=FitStats(
            num_out_of_memory=sum(not case.ran for case in cases),
            num_false_fits=sum(not case.ran and case.predicted_fits for case in cases),
            num_ran=sum(case.ran for case in cases),
            num_false_rejects=sum(case.ran and not case.predicted_fits for case in cases),
        ),
        not_predicted=tuple(missing),
    )


def predicted_figure(prediction: Prediction, what: Quantity) -> float | None:
    """The figure of a prediction that a quantity is compared with."""
    figure: float | None = getattr(prediction, what if what == "tokens_per_s" else f"peak_{what}_bytes")
    return figure


def _stats(name: str, cases: Sequence[AccuracyCase], rows: Iterable[MeasuredRow], what: Quantity) -> GroupStats:
    """Per configuration first (its runs' median), then over configurations: a run repeated often counts once."""
    configs: dict[tuple[str, str], list[AccuracyCase]] = defaultdict(list)
    for case in cases:
        configs[case.row.group, case.row.config_id].append(case)
    signed = [median(case.error_fraction for case in repeats) for repeats in configs.values()]
    errors = [abs(error) for error in signed]
    worst = max(cases, key=lambda case: abs(case.error_fraction))
    noise = version_noise((row for row in rows if (row.group, row.config_id) in configs), what)
    return GroupStats(
        name=name,
        num_cases=len(cases),
        num_configs=len(configs),
        bias=median(signed),
        median_error=median(errors),
        p90_error=percentile(errors, 0.90),
        p95_error=percentile(errors, 0.95),
        worst_error=abs(worst.error_fraction),
        worst_id=worst.row.id,
        noise_median=median(noise) if noise else None,
        noise_p90=percentile(noise, 0.90) if noise else None,
    )
