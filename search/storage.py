"""Where a study lives, and who is alive: a journal file on one machine, a database or a gRPC proxy past it.

| target                       | Optuna storage            | how a dead worker is noticed                            |
|------------------------------|---------------------------|---------------------------------------------------------|
| None                         | memory                    | no need                                                 |
| a directory                  | journal file in it        | the kernel drops the lock a worker holds on its own file |
| sqlite:///FILE               | RDBStorage                | the same, beside the file                               |
| postgresql:// mysql://       | RDBStorage                | Optuna's heartbeat                                      |
| grpc://host:port             | GrpcStorageProxy          | a heartbeat in the trial's attributes                   |
"""

import contextlib
import os
import random
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import optuna
from optuna.storages import BaseStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import FrozenTrial

from planner.errors import EnvironmentProblem, UsageError

JOURNAL_NAME = "study.journal"
HEARTBEAT_S = 20
GRACE_S = 60
OPEN_ATTEMPTS = 6
PROXY_WAIT_S = 30.0
SQLITE_WAIT_S = 60.0
"""How long a worker waits for another's transaction; a commit takes milliseconds, a disk under load a second."""
UNNAMED_GRACE_S = 5.0
"""A running trial without signature and without any trace of who took it is lost after this long (foreign programs)."""

WORKER_ATTR = "worker"
ALIVE_ATTR = "alive_at_s"
INTENT_ATTR = "intent:"
"""Prefix: who was about to take a waiting trial, written before it is taken, false once another was quicker. A worker
killed between taking a trial and signing it would else leave one that everybody believes to be running."""


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
        import fcntl

        self._fcntl = fcntl
        self.worker = worker_name()
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._file = open(directory / f"{self.worker}.lock", "w")  # noqa: SIM115
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def join(self, study_id: int) -> None:
        pass

    def announce(self, trial_id: int) -> None:
        pass

    @contextlib.contextmanager
    def keep_alive(self, trial_id: int) -> Iterator[None]:
        yield  # the lock is held as long as the process lives

    def is_lost(self, trial: FrozenTrial) -> bool:
        worker = trial.user_attrs.get(WORKER_ATTR)
        if worker is not None:
            return self._is_gone(str(worker))
        intents = [
            name.removeprefix(INTENT_ATTR)
            for name, open_ in trial.user_attrs.items()
            if name.startswith(INTENT_ATTR) and open_
        ]
        if intents:
            return all(self._is_gone(name) for name in intents)
        return _unsigned_and_old(trial)

    def _is_gone(self, worker: str) -> bool:
        """Whether nobody holds that worker's lock."""
        if worker == self.worker:
            return False
        path = self._directory / f"{Path(worker).name}.lock"
        try:
            with open(path) as file:
                self._fcntl.flock(file, self._fcntl.LOCK_EX | self._fcntl.LOCK_NB)
                return True
        except FileNotFoundError:
            return True
        except BlockingIOError:
            return False

    def close(self) -> None:
        Path(self._file.name).unlink(missing_ok=True)
        self._file.close()


class _BeatLiveness:
    """A thread that beats while a trial runs."""

    interval_s: float

    def __init__(self) -> None:
        self.worker = worker_name()
        self._study_id = -1

    def join(self, study_id: int) -> None:
        self._study_id = study_id

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
                # A beat that fails is made up by the next; a trial that is over needs none.
                with contextlib.suppress(optuna.exceptions.StorageInternalError, optuna.exceptions.OptunaError):
                    self._beat(trial_id)

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

    def is_lost(self, trial: FrozenTrial) -> bool:
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

    def is_lost(self, trial: FrozenTrial) -> bool:
        alive_at = trial.user_attrs.get(ALIVE_ATTR)
        if alive_at is None:
            return _unsigned_and_old(trial)
        return time.time() - float(alive_at) > self._grace_s


class FlockLock(JournalFileOpenLock):
    """A lock that dies with its holder: a worker killed while writing delays nobody.

    (Optuna's own lock files outlive their holder and are broken only after 30 s.)
    """

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._path = path
        self._file: Any = None

    def acquire(self) -> bool:
        import fcntl

        self._file = open(self._path, "w")  # noqa: SIM115
        fcntl.flock(self._file, fcntl.LOCK_EX)
        return True

    def release(self) -> None:
        self._file.close()


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
        try:
            proxy = optuna.storages.GrpcStorageProxy(host=host or "localhost", port=int(port or 13000))
            proxy.wait_server_ready(timeout=PROXY_WAIT_S)
        except ImportError as error:
            raise EnvironmentProblem("the gRPC proxy needs grpcio", hint="pip install grpcio protobuf") from error
        except ConnectionError as error:
            raise EnvironmentProblem(
                f"the gRPC proxy at {rest} does not answer", hint="start optuna.storages.run_grpc_proxy_server there"
            ) from error
        return proxy, AttributeLiveness(proxy, interval_s=heartbeat_s, grace_s=grace_s)
    if kind not in ("sqlite", "postgresql", "postgres", "mysql"):
        raise UsageError(
            f"storage must be a directory or a URL of sqlite, postgresql, mysql or grpc; got {text!r}",
            hint="for example --storage postgresql://user@host/database",
        )
    return _database(kind, scheme, rest, heartbeat_s=heartbeat_s, grace_s=grace_s)


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
    lock: JournalFileOpenLock
    try:
        import fcntl  # noqa: F401

        lock = FlockLock(directory / f"{JOURNAL_NAME}.lock")
        liveness: Liveness = LockLiveness(directory / "workers")
    except ImportError:  # Windows
        lock = JournalFileOpenLock(str(path))
        liveness = NoLiveness()
    lock.acquire()
    try:
        repair_journal(path)
    finally:
        lock.release()
    storage: BaseStorage = optuna.storages.JournalStorage(JournalFileBackend(str(path), lock_obj=lock))
    if isinstance(liveness, NoLiveness):
        liveness = AttributeLiveness(storage)
    return storage, liveness


def repair_journal(path: Path) -> int:
    """Cuts off a last line that a crash left unfinished; returns how many bytes. Call with the journal's lock held.

    Optuna reads a journal up to its first broken line only; one torn write would hide everything after it.
    """
    if not path.exists():
        return 0
    with open(path, "rb+") as file:
        content = file.read()
        if not content or content.endswith(b"\n"):
            return 0
        keep = content.rfind(b"\n") + 1
        file.truncate(keep)
        return len(content) - keep


def _database(kind: str, scheme: str, rest: str, *, heartbeat_s: int, grace_s: int) -> tuple[BaseStorage, Liveness]:
    import sqlalchemy.exc

    problem: Exception = RuntimeError("not tried")
    if kind in ("postgresql", "postgres") and "+" not in scheme:
        scheme = "postgresql+psycopg"
    url = f"{scheme}://{rest}"
    locks = _lock_directory(url) if kind == "sqlite" else None
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
        return database, LockLiveness(locks) if locks is not None else DatabaseLiveness(database)
    reason = str(problem.__cause__ or problem).strip().splitlines()[0]
    raise EnvironmentProblem(f"the {kind} storage does not answer: {reason}", hint="check the URL") from problem


def _lock_directory(url: str) -> Path | None:
    """Where the workers of an SQLite file keep their locks; None in memory and where there are no such locks."""
    import sqlalchemy.engine

    name = sqlalchemy.engine.make_url(url).database
    if not name or name == ":memory:" or find_spec("fcntl") is None:
        return None
    return Path(name).with_name(f"{Path(name).name}.workers")


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
