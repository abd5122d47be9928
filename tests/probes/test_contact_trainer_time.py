"""The trainer's own time, as the contact measures it."""

from benchmarks.contact import trainer_time


def test_the_trainers_own_time_is_measured() -> None:
    host_times = trainer_time.trainer_host_times(steps=40)  # medians of thirty: no single disturbed step decides
    assert set(host_times["added_s"]) == {"1", "4"}
    assert 0.0 < host_times["added_s"]["1"] < 1.0
    assert min(host_times["per_step_s"], host_times["per_micro_batch_s"]) >= 0.0
