"""The study's storage fails under the search: a full disk, damaged files, a database that is away for a while."""

import contextlib
import errno
import inspect
import os
import re
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.exceptions import StorageInternalError
from optuna.storages._cached_storage import _CachedStorage
from optuna.trial import TrialState, create_trial
from sqlalchemy.exc import OperationalError

import search.outage
from planner.core.errors import EnvironmentProblem, PlannerError, UsageError
from search.journal import JOURNAL_NAME
from search.outage import at_once, make_patient
from search.storage import close_storage, open_storage, shown


def journal(tmp_path: Path) -> optuna.storages.BaseStorage:
    storage, heartbeat = open_storage(tmp_path)
    heartbeat.close()
    return storage


def study_with_trials(tmp_path: Path, num: int) -> optuna.study.Study:
    study = optuna.create_study(storage=journal(tmp_path), study_name="plan")
    for number in range(num):
        study.add_trial(create_trial(state=TrialState.WAITING, user_attrs={"number": number}))
    return study


def numbers(tmp_path: Path) -> list[int]:
    return [
        trial.user_attrs["number"] for trial in optuna.load_study(storage=journal(tmp_path), study_name="plan").trials
    ]


@contextlib.contextmanager
def full_disk_after(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> Any:
    """Inside, a write to a journal puts down so many bytes and fails; nothing can be added."""

    class Full:
        def __init__(self, path: Any) -> None:
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)

        def __enter__(self) -> "Full":
            return self

        def __exit__(self, *exc: object) -> None:
            os.close(self._descriptor)

        def write(self, data: bytes) -> int:
            os.write(self._descriptor, data[:num_bytes])
            raise OSError(errno.ENOSPC, "No space left on device")

    import optuna.storages.journal._file as file

    def opened(path: Any, mode: str = "r", *arguments: Any, **named: Any) -> Any:
        return Full(path) if mode == "ab" else open(path, mode, *arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(file, "open", opened, raising=False)
        yield


@pytest.mark.parametrize("name", [JOURNAL_NAME, f"{JOURNAL_NAME}.lock"])
def test_a_storage_folder_from_a_stranger_leads_nowhere(tmp_path: Path, name: str) -> None:
    victim, folder = tmp_path / "victim", tmp_path / "study"
    victim.write_text("mine\n")
    folder.mkdir()
    (folder / name).symlink_to(victim)
    with pytest.raises(EnvironmentProblem, match="not a regular file"):
        open_storage(folder)
    assert victim.read_text() == "mine\n"
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(EnvironmentProblem, match="not a regular file"):
        open_storage(folder)


@pytest.mark.parametrize("torn_bytes", [0, 1, 20, 100])
def test_a_full_disk_of_one_worker_leaves_the_journal_to_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torn_bytes: int
) -> None:
    one, two = study_with_trials(tmp_path, 2), optuna.load_study(storage=journal(tmp_path), study_name="plan")
    with full_disk_after(monkeypatch, torn_bytes), pytest.raises(OSError, match="No space"):
        one.add_trial(create_trial(state=TrialState.WAITING, user_attrs={"number": 2}))
    two.add_trial(create_trial(state=TrialState.WAITING, user_attrs={"number": 3}))
    assert numbers(tmp_path) == [0, 1, 3]
    assert [trial.user_attrs["number"] for trial in one.trials] == [0, 1, 3]  # the first one goes on too
    one.add_trial(create_trial(state=TrialState.WAITING, user_attrs={"number": 4}))
    assert [trial.user_attrs["number"] for trial in two.trials] == [0, 1, 3, 4]


def test_a_torn_end_that_appears_while_a_worker_lives_is_cut_before_it_writes(tmp_path: Path) -> None:
    study = study_with_trials(tmp_path, 1)
    with open(tmp_path / JOURNAL_NAME, "a") as file:
        file.write('{"op_code":4,"worker_id":"x","stu')  # another worker, killed in its write
    study.add_trial(create_trial(state=TrialState.WAITING, user_attrs={"number": 1}))
    assert numbers(tmp_path) == [0, 1]


def test_a_line_torn_in_the_middle_of_an_old_journal_costs_that_line_only(tmp_path: Path) -> None:
    study_with_trials(tmp_path, 3)
    path = tmp_path / JOURNAL_NAME
    *before, last = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(before) + b'{"op_code":4,"worker' + last)  # as Optuna appends behind half a line
    assert numbers(tmp_path) == [0, 1, 2]


DAMAGES = {
    "binary": lambda lines: [lines[0], b"\x00\xff\x80" * 9 + b"\n", *lines[1:]],
    "empty line": lambda lines: [lines[0], b"\n", *lines[1:]],
    "other JSON": lambda lines: [lines[0], b"[1, 2]\n", b"3\n", b"null\n", *lines[1:]],
    "unknown operation": lambda lines: [lines[0], b'{"op_code": 77}\n', b'{"op_code": "4"}\n', *lines[1:]],
    "deep": lambda lines: [lines[0], b"[" * 100_000 + b"\n", *lines[1:]],
    "text": lambda lines: [b"# a comment\n", *lines],
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.filterwarnings("ignore::search.journal.StudyWarning")
def test_lines_that_are_no_operation_are_passed_over(tmp_path: Path, damage: str) -> None:
    study_with_trials(tmp_path, 3)
    path = tmp_path / JOURNAL_NAME
    path.write_bytes(b"".join(DAMAGES[damage](path.read_bytes().splitlines(keepends=True))))
    assert numbers(tmp_path) == [0, 1, 2]
    optuna.load_study(storage=journal(tmp_path), study_name="plan").add_trial(
        create_trial(state=TrialState.WAITING, user_attrs={"number": 3})
    )
    assert numbers(tmp_path) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "line", [b'{"op_code": 0}', b'{"op_code": 4, "study_id": 0, "worker_id": 3}', b'{"op_code":2,"study_id":[]}']
)
def test_an_operation_without_sense_is_an_error_that_names_the_file(tmp_path: Path, line: bytes) -> None:
    study_with_trials(tmp_path, 1)
    path = tmp_path / JOURNAL_NAME
    path.write_bytes(path.read_bytes() + line + b"\n")
    with pytest.raises(EnvironmentProblem, match=r"study\.journal cannot be read"):
        journal(tmp_path)


def away(times: int, error: Exception) -> Any:
    """A call that fails so often before it works."""
    left = [times]

    def call(*arguments: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise error
        return arguments

    return call


def storage_with(call: Any, said: list[str], limit_s: float = 60.0) -> optuna.storages.BaseStorage:
    storage = optuna.storages.InMemoryStorage()
    storage.set_trial_user_attr = call  # type: ignore[method-assign]
    make_patient(storage, limit_s=limit_s, say=said.append)
    return storage


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search.outage, "FIRST_WAIT_S", 0.0)
    monkeypatch.setattr(search.outage, "LONGEST_WAIT_S", 0.001)


def test_an_outage_is_waited_for_and_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    storage = storage_with(away(5, StorageInternalError("server closed the connection")), said)
    assert storage.set_trial_user_attr(1, "evidence", "x") == (1, "evidence", "x")  # type: ignore[func-returns-value]
    assert len(said) == 2
    assert "does not answer (server closed the connection)" in said[0]
    assert "answers again" in said[1]


def test_every_call_of_a_database_is_patient(tmp_path: Path) -> None:
    """Also those that Optuna's cache makes behind the public ones: a restart of the server may meet any."""
    storage, heartbeat = open_storage(f"sqlite:///{tmp_path}/s.db")
    heartbeat.close()
    public = {name for name in dir(optuna.storages.BaseStorage) if not name.startswith("_")} - {"remove_session"}
    behind = set(re.findall(r"self\._backend\.(\w+)\(", inspect.getsource(_CachedStorage))) - {"remove_session"}
    asks_nobody = {name for name in behind if "callback" in name or name == "get_heartbeat_interval"}
    for name in public | behind - asks_nobody:
        assert hasattr(getattr(storage, name), "__wrapped__"), name
    close_storage(storage)


def test_patience_is_bounded() -> None:
    storage = storage_with(away(10**9, StorageInternalError("down")), [], limit_s=0.01)
    with pytest.raises(EnvironmentProblem, match="has not answered for") as caught:
        storage.set_trial_user_attr(1, "evidence", "x")
    assert "store of measurements" in caught.value.hint


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (KeyError("no trial"), KeyError),
        (StorageInternalError("database or disk is full"), EnvironmentProblem),
        (OperationalError("UPDATE", {}, Exception("attempt to write a readonly database")), EnvironmentProblem),
    ],
)
def test_what_waiting_does_not_mend_is_raised_at_once(error: Exception, raised: type[Exception]) -> None:
    """Before: a full disk under SQLite was an internal error (exit 70) that spoke of values too long to commit."""
    said: list[str] = []
    storage = storage_with(away(1, error), said)
    with pytest.raises(raised) as caught:
        storage.set_trial_user_attr(1, "evidence", "x")
    assert said == []
    if isinstance(caught.value, EnvironmentProblem):
        assert re.search("does not work: .*(disk is full|readonly database)", caught.value.message)
        assert "store of measurements" in caught.value.hint


def test_a_heartbeat_is_tried_once() -> None:
    storage = storage_with(away(1, StorageInternalError("down")), [])
    with at_once(), pytest.raises(StorageInternalError):
        storage.set_trial_user_attr(1, "alive", 1.0)


@pytest.mark.parametrize(
    "url",
    [
        "grpc://h:abc",
        "grpc://h:99999999",
        "postgresql://u:secret@h:notaport/d",
        "sqlite:///",
        "sqlite://",
        "sqlite:///:memory:",
        "sqlite+x:////",
        "redis://u:secret@h/0",
        "foo+bar://u:secret@x@h/d?password=secret",
        "mysql://u:secret@h:1:2/d",
        "://",
    ],
)
def test_a_storage_that_cannot_be_meant_is_an_error_without_the_password(url: str) -> None:
    with pytest.raises(PlannerError) as caught:
        open_storage(url)
    assert isinstance(caught.value, UsageError)
    assert "secret" not in caught.value.message + caught.value.hint


def test_a_shown_url_keeps_everything_but_the_password() -> None:
    assert shown("postgresql://me:pass:w@rd@host:5432/d") == "postgresql://me:...@host:5432/d"
    assert shown("postgresql://me@host/d") == "postgresql://me@host/d"
