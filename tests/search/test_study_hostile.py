"""A study that others wrote to: another model's, another search's candidates, attributes without sense."""

from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.distributions import CategoricalDistribution
from optuna.trial import TrialState, create_trial
from search_cases import empty_study, exact, problem

from planner.core.errors import UsageError
from planner.setup import TrainSetup
from planner.setup.interchange import setup_to_dict
from search.dimensions import key_of
from search.run import search
from search.stopping import Budget
from search.storage import close_storage, open_storage
from search.study import Study, record_of

NASTY: tuple[Any, ...] = (
    None, True, "", "x", "a\0b", "x" * 5000, -1, 0, 0.5, 10**30, float("inf"), float("nan"), [], [[1]], {}, {"a": []},
)  # fmt: skip
NAMES = ("key", "setup", "origin", "excluded", "evidence", "duration_s")
BUDGET = Budget(max_probes=2)


def measure(setup: TrainSetup) -> Any:
    return exact(problem().candidates[problem().index[key_of(setup)]])


def left_in(study: optuna.Study, state: TrialState, **attributes: Any) -> None:
    attrs = {"setup": setup_to_dict(problem().candidates[0].setup), "origin": "plan", **attributes}
    study.add_trial(create_trial(state=TrialState.WAITING, user_attrs=attrs))
    if state is not TrialState.WAITING:
        study._storage.set_trial_state_values(study.trials[-1]._trial_id, state=state)


@pytest.mark.parametrize("state", [TrialState.WAITING, TrialState.RUNNING, TrialState.FAIL])
def test_no_attribute_of_a_trial_stops_a_search(state: TrialState) -> None:
    storage = optuna.storages.InMemoryStorage()
    study = optuna.create_study(storage=storage, study_name="plan", direction="maximize")
    for name in NAMES:
        for value in NASTY:
            left_in(study, state, **{name: value})
    ours = Study(problem(), storage, "plan")
    ours.rescue()
    ours.enqueue(problem().candidates[1], "plan")
    while (claimed := ours.claim()) is not None:
        assert ours.tell(claimed[0], measure(claimed[1]))
    ours.given_up()
    assert ours.exclude([(problem().candidates[2], "too large")]) == 1
    answered = {key_of(record.setup) for record in ours.answered()}
    assert key_of(problem().candidates[1].setup) in answered
    for trial in study.trials:
        record = record_of(trial)
        assert record is None or record.duration_s >= 0


def test_another_searchs_waiting_trial_waits_for_who_knows_it_and_costs_this_one_no_probe(tmp_path: Path) -> None:
    stranger = TrainSetup(seq_len_tokens=77)
    assert key_of(stranger) not in problem().index
    storage = open_storage(empty_study(tmp_path))
    study = optuna.create_study(storage=storage, study_name="plan", direction="maximize")
    left_in(study, TrialState.WAITING, key=key_of(stranger), setup=setup_to_dict(stranger))
    close_storage(storage)
    result = search(problem(), measure, storage=tmp_path, budget=BUDGET)
    assert result.best is not None
    assert result.num_probes == BUDGET.max_probes
    assert stranger not in {trial.setup for trial in result.trials}
    storage = open_storage(tmp_path)
    study = optuna.load_study(storage=storage, study_name="plan")
    waiting = [trial.user_attrs["key"] for trial in study.trials if trial.state is TrialState.WAITING]
    close_storage(storage)
    assert waiting == [key_of(stranger)]


def test_trials_under_other_conditions_are_none_of_this_search() -> None:
    """A rehearsal on the CPU, or a model of as many parameters: measured anew, counted apart, each found again."""
    storage = optuna.storages.InMemoryStorage()
    first, second = (Study(problem(conditions=name), storage, "plan") for name in ("cpu", "card"))
    candidate = problem().candidates[0]
    first.enqueue(candidate, "plan")
    assert second.claim() is None
    claimed = first.claim()
    assert first.tell(claimed[0], exact(candidate))
    assert second.records() == []
    second.enqueue(candidate, "plan")
    assert second.claim(max_probes=1) is not None
    assert [len(study.records()) for study in (first, second)] == [1, 1]
    assert second.exclude([(problem().candidates[1], "too large")]) == 1
    assert first.exclude([(problem().candidates[1], "too large")]) == 1


def test_a_study_of_another_model_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    search(problem(subject="llama on a 4090"), measure, storage=empty_study(tmp_path), budget=BUDGET)
    with pytest.raises(UsageError, match=r"measured 'llama on a 4090', this search is about qwen on a 4090") as caught:
        search(problem(subject="qwen on a 4090"), measure, storage=tmp_path, budget=BUDGET)
    assert "--study" in caught.value.hint
    resumed = search(problem(subject="llama on a 4090"), measure, storage=tmp_path, budget=BUDGET)
    assert [trial.state for trial in resumed.trials if trial.probed] == [TrialState.COMPLETE] * 2  # nothing came in


def test_a_study_from_before_it_said_what_it_measures_goes_on() -> None:
    storage = optuna.storages.InMemoryStorage()
    optuna.create_study(storage=storage, study_name="plan", direction="maximize")
    Study(problem(subject="llama"), storage, "plan")


def test_a_study_whose_version_knew_other_choices_goes_on() -> None:
    """As one made at 674960cc, whose optimizers were 8: Optuna takes no other choices under a name that has some."""
    by_attention = {candidate.setup.attention: candidate for candidate in problem().candidates}
    (known, new), old_batch = sorted(by_attention), CategoricalDistribution(("other",))
    old = {"attention": CategoricalDistribution((known, "older")), "micro_batch_seqs": old_batch}
    storage = optuna.storages.InMemoryStorage()
    study = optuna.create_study(storage=storage, study_name="plan", direction="maximize")
    params = {"attention": known, "micro_batch_seqs": "other"}
    study.add_trial(create_trial(state=TrialState.FAIL, params=params, distributions=old))
    ours = Study(problem(), storage, "plan")
    for attention in (known, new):
        ours.enqueue(by_attention[attention], "plan")
    assert [trial.params.get("attention") for trial in study.trials[1:]] == [known, None]
    assert not any("micro_batch_seqs" in trial.params for trial in study.trials[1:])
    assert [record.setup.attention for record in ours.records()] == [known, new]
