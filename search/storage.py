"""Where a study lives, and who is alive: a journal file on one machine, a database or a gRPC proxy past it.

| target                       | Optuna storage            | how a dead worker is noticed                            |
|------------------------------|---------------------------|---------------------------------------------------------|
| None                         | memory                    | no need                                                 |
| a directory                  | journal file in it        | the system drops the lock a worker holds on its own file |
| sqlite:///FILE               | RDBStorage                | the same, beside the file                               |
| postgresql:// mysql://       | RDBStorage                | Optuna's heartbeat                                      |
| grpc://host:port             | GrpcStorageProxy          | a heartbeat in the trial's attributes                   |
"""

import contextlib
import json
import os
import random
import re
import secrets
import socket
import stat
import threading
import time
import warnings
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, Protocol

import optuna
from optuna.storages import BaseStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.storages.journal._storage import JournalOperation
from optuna.trial import FrozenTrial

from planner.errors import EnvironmentProblem, UsageError
from planner.locks import lock, open_lock, try_lock
from search.outage import at_once, first_line, is_outage, make_patient
from search.trials import ALIVE_ATTR, marks_of

JOURNAL_NAME = "study.journal"
MAX_JOURNAL_BYTES = 1 << 28
"""A trial takes some 5 kB, a search some hundred trials."""
HEARTBEAT_S = 20
GRACE_S = 60
OPEN_ATTEMPTS = 6
PROXY_WAIT_S = 30.0
SQLITE_WAIT_S = 60.0
"""How long a worker waits for another's transaction; a commit takes milliseconds, a disk under load a second."""
BEATS_TO_COME = 1.5
"""A trial that looks stale is lost when it still does after so many intervals of its heartbeat."""
UNNAMED_GRACE_S = 5.0
"""A running trial without signature and without any trace of who took it is lost after this long (foreign programs)."""


class Liveness(Protocol):
    """Tells which running trials have lost their worker, and keeps this worker's own trial alive."""

    worker: str

    def join(self, study_id: int) -> None:
        """This worker works on that study."""
        ...

    def announce(self, trial_id: int) -> None:
        """This worker is about to take that waiting trial: from here on others see it alive."""
        ...

    def keep_alive(self, trial_id: int) -> contextlib.AbstractContextManager[None]:
        """While inside, others see that this trial is being worked on."""
        ...

    def is_lost(self, trial: FrozenTrial) -> bool:
        """Whether the worker of this running trial is gone."""
        ...

    def close(self) -> None:
        """This worker leaves."""
        ...


def worker_name() -> str:
    """A name that no other worker has: host, process id and a random part."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"


def _unsigned_and_old(trial: FrozenTrial) -> bool:
    start = trial.datetime_start
    return start is None or time.time() - start.timestamp() > UNNAMED_GRACE_S


class NoLiveness:
    """One process, memory only: nobody can be lost."""

    def __init__(self) -> None:
        self.worker = worker_name()

    def join(self, study_id: int) -> None:
        pass

    def announce(self, trial_id: int) -> None:
        pass

    @contextlib.contextmanager
    def keep_alive(self, trial_id: int) -> Iterator[None]:
        yield

    def is_lost(self, trial: FrozenTrial) -> bool:
        return False

    def close(self) -> None:
        pass


class LockLiveness:
    """Every worker holds an exclusive lock on a file of its own; kill -9 releases it at once, no clock involved."""

    def __init__(self, directory: Path) -> None:
        self.worker = worker_name()
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / f"{self.worker}.lock"
        self._file = open_lock(self._path)
        lock(self._file.fileno())

    def join(self, study_id: int) -> None:
        pass

    def announce(self, trial_id: int) -> None:
        pass

    @contextlib.contextmanager
    def keep_alive(self, trial_id: int) -> Iterator[None]:
        yield  # the lock is held as long as the process lives

    def is_lost(self, trial: FrozenTrial) -> bool:
        marks = marks_of(trial)
        if marks.worker is not None:
            return self._is_gone(marks.worker)
        if marks.intents:
            return all(self._is_gone(name) for name in marks.intents)
        return _unsigned_and_old(trial)

    def _is_gone(self, worker: str) -> bool:
        """Whether nobody holds that worker's lock."""
        if worker == self.worker:
            return False
        path = self._directory / f"{Path(worker).name}.lock"
        try:
            with open_lock(path, make=False) as file:
                return try_lock(file.fileno())
        except PermissionError:
            return False  # another user's, who may be at work
        except OSError:
            return True  # none, or something else of that name: no worker of ours

    def close(self) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)


class _BeatLiveness:
    """A thread that beats while a trial runs."""

    interval_s: float

    def __init__(self) -> None:
        self.worker = worker_name()
        self._study_id = -1
        self._stale_since: dict[int, float] = {}

    def join(self, study_id: int) -> None:
        self._study_id = study_id

    def is_lost(self, trial: FrozenTrial) -> bool:
        """Stale at two looks, more than a beat apart: after an outage of the storage all beats are old, and those who
        live have to get a turn to beat again."""
        if not self._is_stale(trial):
            self._stale_since.pop(trial._trial_id, None)
            return False
        since = self._stale_since.setdefault(trial._trial_id, time.monotonic())
        return time.monotonic() - since > BEATS_TO_COME * self.interval_s

    def _is_stale(self, trial: FrozenTrial) -> bool:
        raise NotImplementedError

    def announce(self, trial_id: int) -> None:
        # Before the trial is taken, so that no running trial is ever without a beat.
        self._beat(trial_id)

    def _beat(self, trial_id: int) -> None:
        raise NotImplementedError

    @contextlib.contextmanager
    def keep_alive(self, trial_id: int) -> Iterator[None]:
        stop = threading.Event()

        def beats() -> None:
            while not stop.wait(self.interval_s):
                try:
                    with at_once():
                        self._beat(trial_id)
                except Exception as error:  # a beat that fails is made up by the next; a trial that is over needs none
                    if not (is_outage(error) or isinstance(error, optuna.exceptions.OptunaError)):
                        raise

        self._beat(trial_id)
        thread = threading.Thread(target=beats, name="heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def close(self) -> None:
        pass


class DatabaseLiveness(_BeatLiveness):
    """Optuna's heartbeat, by the database server's clock."""

    def __init__(self, storage: optuna.storages.RDBStorage) -> None:
        super().__init__()
        self._storage = storage
        self.interval_s = float(storage.heartbeat_interval or HEARTBEAT_S)

    def _beat(self, trial_id: int) -> None:
        self._storage.record_heartbeat(trial_id)

    def _is_stale(self, trial: FrozenTrial) -> bool:
        return trial._trial_id in self._storage._get_stale_trial_ids(self._study_id)


class AttributeLiveness(_BeatLiveness):
    """A heartbeat in the trial's own attributes, for storages without one; workers' clocks must agree to seconds."""

    def __init__(self, storage: BaseStorage, *, interval_s: float = HEARTBEAT_S, grace_s: float = GRACE_S) -> None:
        super().__init__()
        self._storage = storage
        self.interval_s = interval_s
        self._grace_s = grace_s

    def _beat(self, trial_id: int) -> None:
        self._storage.set_trial_user_attr(trial_id, ALIVE_ATTR, time.time())

    def _is_stale(self, trial: FrozenTrial) -> bool:
        alive_at_s = marks_of(trial).alive_at_s
        if alive_at_s is None:
            return _unsigned_and_old(trial)
        return time.time() - alive_at_s > self._grace_s


class FlockLock(JournalFileOpenLock):
    """A lock that dies with its holder: a worker killed while writing delays nobody. Its holder may take it again.

    (Optuna's own lock files outlive their holder and are broken only after 30 s.)
    """

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._path = path
        self._file: Any = None
        self._depth = 0

    def acquire(self) -> bool:
        if self._depth == 0:
            self._file = open_lock(self._path)
            lock(self._file.fileno())
        self._depth += 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._file.close()


class StudyWarning(UserWarning):
    """Something about a study's files a person should know."""


class Journal(JournalFileBackend):
    """Optuna's journal file, whole after every append and readable past lines that are none.

    A full disk, a kill or a power cut leaves half a line. Optuna appends behind it, and from then on nobody can read
    the file. Here a torn end is cut off under the lock before anything is added, and a line that is no operation is
    passed over by every reader alike.
    """

    def __init__(self, path: Path, lock: FlockLock) -> None:
        super().__init__(str(path), lock_obj=lock)
        self._told = False

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Adds the operations, or nothing.

        Raises:
            OSError: no space, no permission; the file is as it was.
        """
        path = Path(self._file_path)
        self._lock.acquire()
        try:
            repair_journal(path)
            try:
                super().append_logs(logs)
            except OSError:
                repair_journal(path)
                raise
        finally:
            self._lock.release()

    def read_logs(self, log_number_from: int) -> Generator[dict[str, Any], None, None]:
        """The operations from that number on; what a writer is still writing comes next time."""
        number = log_number_from if log_number_from in self._log_number_offset else 0
        with open(self._file_path, "rb") as file:
            offset = self._log_number_offset[number]
            file.seek(offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                offset += len(line)
                operation = _operation(line)
                if operation is None:
                    self._log_number_offset[number] = offset
                    self._tell(line)
                    continue
                number += 1
                self._log_number_offset[number] = offset
                if number > log_number_from:
                    yield operation

    def _tell(self, line: bytes) -> None:
        if not self._told and line.strip():
            self._told = True
            warnings.warn(
                f"{self._file_path} holds a damaged line, which is passed over: {line[:60]!r}",
                StudyWarning,
                stacklevel=2,
            )


def _operation(line: bytes) -> dict[str, Any] | None:
    """The operation of a line; of one that begins with the torn half of another, the whole one at its end."""
    for text in (line, line[max(line.rfind(_OPERATION), 0) :]):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict) and value.get("op_code") in _OPERATIONS:
            return value
    return None


_OPERATION = b'{"op_code":'
_OPERATIONS = frozenset(int(code) for code in JournalOperation)


def open_storage(
    target: str | Path | None, *, heartbeat_s: int = HEARTBEAT_S, grace_s: int = GRACE_S
) -> tuple[BaseStorage, Liveness]:
    """The storage that `target` names, ready to use by many workers at once.

    Raises:
        UsageError: a URL of no known kind.
        EnvironmentProblem: the database does not answer or its driver is missing.
    """
    if target is None:
        return optuna.storages.InMemoryStorage(), NoLiveness()
    text = str(target)
    if "://" not in text:
        return _journal(Path(target))
    scheme, _, rest = text.partition("://")
    kind = scheme.partition("+")[0]
    if kind == "grpc":
        host, _, port = rest.partition(":")
        if port and not (port.isascii() and port.isdecimal() and 0 < int(port) < 65536):
            raise UsageError(
                f"{shown(text)}: expected a port between 1 and 65535", hint="for example --storage grpc://host:13000"
            )
        try:
            proxy = optuna.storages.GrpcStorageProxy(host=host or "localhost", port=int(port or 13000))
            proxy.wait_server_ready(timeout=PROXY_WAIT_S)
        except ImportError as error:
            raise EnvironmentProblem("the gRPC proxy needs grpcio", hint="pip install grpcio protobuf") from error
        except ConnectionError as error:
            raise EnvironmentProblem(
                f"the gRPC proxy at {rest} does not answer", hint="start optuna.storages.run_grpc_proxy_server there"
            ) from error
        make_patient(proxy)
        return proxy, AttributeLiveness(proxy, interval_s=heartbeat_s, grace_s=grace_s)
    if kind not in ("sqlite", "postgresql", "postgres", "mysql"):
        raise UsageError(
            f"storage must be a directory or a URL of sqlite, postgresql, mysql or grpc; got {shown(text)!r}",
            hint="for example --storage postgresql://user@host/database",
        )
    return _database(kind, scheme, rest, heartbeat_s=heartbeat_s, grace_s=grace_s)


def shown(url: str) -> str:
    """A storage's URL without its password."""
    return re.sub(r"(password=)[^&]*", r"\1...", re.sub(r"(://[^/@:]*):.*@", r"\1:...@", url))


def close_storage(storage: BaseStorage) -> None:
    """Gives connections back."""
    if isinstance(storage, optuna.storages.RDBStorage):
        storage.remove_session()
        storage.engine.dispose()
    elif isinstance(storage, optuna.storages.GrpcStorageProxy):
        storage.close()


def _journal(directory: Path) -> tuple[BaseStorage, Liveness]:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / JOURNAL_NAME
    for one in (path, directory / f"{JOURNAL_NAME}.lock"):
        # a folder from a stranger may hold a link to a file of one's own, or a pipe that hangs whoever opens it
        if os.path.lexists(one) and not stat.S_ISREG(os.lstat(one).st_mode):
            raise EnvironmentProblem(f"{one} is not a regular file", hint="give another --storage, or move it away")
    if path.exists() and path.stat().st_size > MAX_JOURNAL_BYTES:
        raise EnvironmentProblem(
            f"{path} has more than the {MAX_JOURNAL_BYTES:,} bytes that are read of a study", hint="move the file away"
        )
    held = FlockLock(directory / f"{JOURNAL_NAME}.lock")
    liveness = LockLiveness(directory / "workers")
    held.acquire()
    try:
        repair_journal(path)
    finally:
        held.release()
    backend = Journal(path, held)
    try:
        return optuna.storages.JournalStorage(backend), liveness
    except (LookupError, TypeError, ValueError, AttributeError, AssertionError, RecursionError) as error:
        liveness.close()
        raise EnvironmentProblem(
            f"the study in {path} cannot be read: {type(error).__name__}: {error}",
            hint="move the file away: what was measured is in the store of measurements and is not measured again",
        ) from error


def repair_journal(path: Path) -> int:
    """Cuts off a last line that a crash left unfinished; returns how many bytes. Call with the journal's lock held.

    Optuna reads a journal up to its first broken line only; one torn write would hide everything after it.
    """
    if not path.exists():
        return 0
    with open(path, "rb+") as file:
        size = keep = file.seek(0, os.SEEK_END)
        while keep:
            start = max(keep - _BLOCK_BYTES, 0)
            file.seek(start)
            if (last := file.read(keep - start).rfind(b"\n")) >= 0:
                keep = start + last + 1
                break
            keep = start
        if keep < size:
            file.truncate(keep)
        return size - keep


_BLOCK_BYTES = 1 << 16


def _database(kind: str, scheme: str, rest: str, *, heartbeat_s: int, grace_s: int) -> tuple[BaseStorage, Liveness]:
    import sqlalchemy.engine
    import sqlalchemy.exc

    problem: Exception = RuntimeError("not tried")
    if kind in ("postgresql", "postgres") and "+" not in scheme:
        scheme = "postgresql+psycopg"
    url = f"{scheme}://{rest}"
    try:
        name = sqlalchemy.engine.make_url(url).database
    except (sqlalchemy.exc.ArgumentError, ValueError) as error:
        raise UsageError(
            f"{shown(url)} is no URL of a database", hint="for example --storage postgresql://user@host:5432/database"
        ) from error
    if kind == "sqlite" and (not name or name == ":memory:"):
        raise UsageError(f"{shown(url)} names no file", hint="for example --storage sqlite:///study.db")
    file = Path(str(name))
    locks = file.with_name(f"{file.name}.workers") if kind == "sqlite" else None
    engine = {"connect_args": {"timeout": SQLITE_WAIT_S}} if kind == "sqlite" else {"pool_pre_ping": True}
    for attempt in range(OPEN_ATTEMPTS):
        try:
            database = optuna.storages.RDBStorage(
                url,
                heartbeat_interval=heartbeat_s if locks is None else None,
                grace_period=grace_s if locks is None else None,
                engine_kwargs=engine,
            )
        except ImportError as error:
            raise EnvironmentProblem(
                f"no driver for {kind}: {error}", hint="pip install 'psycopg[binary]'" if "postgres" in kind else ""
            ) from error
        except (sqlalchemy.exc.SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
            problem = error
            if isinstance(error, sqlalchemy.exc.OperationalError) and "already exists" not in str(error):
                break
            # Workers that start at once on an empty database create the same tables; all but one must come again.
            time.sleep(random.uniform(0.1, 0.4) * (attempt + 1))
            continue
        if kind == "sqlite":
            _lock_whole_transactions(database.engine)
        make_patient(database)
        return database, LockLiveness(locks) if locks is not None else DatabaseLiveness(database)
    raise EnvironmentProblem(
        f"the {kind} storage does not answer: {first_line(problem)}", hint="check the URL"
    ) from problem


def _lock_whole_transactions(engine: Any) -> None:
    """Makes SQLite transactions lock from their first read on.

    Python's driver begins one at the first write only: two workers that both read "waiting" would both take the trial.

    Source: SQLAlchemy, dialects, SQLite, "Enabling Non-Legacy SQLite Transactional Modes with the sqlite3 driver".
    """
    from sqlalchemy import event

    @event.listens_for(engine, "connect")
    def _manual(connection: Any, record: Any) -> None:
        connection.isolation_level = None

    @event.listens_for(engine, "begin")
    def _begin(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    engine.dispose()  # connections made before now do not know of it
