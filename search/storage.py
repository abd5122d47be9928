"""Where a study lives: a journal file on one machine, a database or a gRPC proxy past it.

| target                       | Optuna storage            | how a dead worker is noticed                            |
|------------------------------|---------------------------|---------------------------------------------------------|
| None                         | memory                    | no need                                                 |
| a directory                  | journal file in it        | the system drops the lock a worker holds on its own file |
| sqlite:///FILE               | RDBStorage                | the same, beside the file                               |
| postgresql:// mysql://       | RDBStorage                | Optuna's heartbeat                                      |
| grpc://host:port             | GrpcStorageProxy          | a heartbeat in the trial's attributes                   |
"""

import random
import re
import time
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import BaseStorage

from planner.core.errors import EnvironmentProblem, UsageError
from planner.core.install import packages_command
from search.heartbeat import (
    HEARTBEAT_TIMING,
    AttributeHeartbeat,
    DatabaseHeartbeat,
    Heartbeat,
    HeartbeatTiming,
    LockHeartbeat,
)
from search.journal import open_journal
from search.outage import first_line, make_patient

OPEN_ATTEMPTS = 6
PROXY_WAIT_S = 30.0
SQLITE_WAIT_S = 60.0
"""How long a worker waits for another's transaction; a commit takes milliseconds, a disk under load a second."""


def open_storage(
    target: str | Path | None, heartbeat_timing: HeartbeatTiming = HEARTBEAT_TIMING
) -> tuple[BaseStorage, Heartbeat]:
    """The storage that `target` names, ready to use by many workers at once.

    Raises:
        UsageError: a URL of no known kind.
        EnvironmentProblem: the database does not answer or its driver is missing.
    """
    if target is None:
        return optuna.storages.InMemoryStorage(), Heartbeat()
    text = str(target)
    if "://" not in text:
        return open_journal(Path(target))
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
            hint = packages_command("grpcio", "protobuf")
            raise EnvironmentProblem("the gRPC proxy needs grpcio", hint=hint) from error
        except ConnectionError as error:
            raise EnvironmentProblem(
                f"the gRPC proxy at {rest} does not answer", hint="start optuna.storages.run_grpc_proxy_server there"
            ) from error
        make_patient(proxy)
        return proxy, AttributeHeartbeat(
            proxy, interval_s=heartbeat_timing.heartbeat_s, grace_s=heartbeat_timing.grace_s
        )
    if kind not in ("sqlite", "postgresql", "postgres", "mysql"):
        raise UsageError(
            f"storage must be a directory or a URL of sqlite, postgresql, mysql or grpc; got {shown(text)!r}",
            hint="for example --storage postgresql://user@host/database",
        )
    return _database(kind, scheme, rest, heartbeat_timing)


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


def _database(kind: str, scheme: str, rest: str, heartbeat_timing: HeartbeatTiming) -> tuple[BaseStorage, Heartbeat]:
    import sqlalchemy.exc

    problem: Exception = RuntimeError("not tried")
    if kind in ("postgresql", "postgres") and "+" not in scheme:
        scheme = "postgresql+psycopg"
    url = f"{scheme}://{rest}"
    file = _database_file(kind, url)
    locks = file.with_name(f"{file.name}.workers") if kind == "sqlite" else None
    engine = {"connect_args": {"timeout": SQLITE_WAIT_S}} if kind == "sqlite" else {"pool_pre_ping": True}
    for attempt in range(OPEN_ATTEMPTS):
        try:
            database = optuna.storages.RDBStorage(
                url,
                heartbeat_interval=heartbeat_timing.heartbeat_s if locks is None else None,
                grace_period=heartbeat_timing.grace_s if locks is None else None,
                engine_kwargs=engine,
            )
        except ImportError as error:
            raise EnvironmentProblem(
                f"no driver for {kind}: {error}", hint=packages_command("psycopg[binary]") if "postgres" in kind else ""
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
        return database, LockHeartbeat(locks) if locks is not None else DatabaseHeartbeat(database)
    raise EnvironmentProblem(
        f"the {kind} storage does not answer: {first_line(problem)}", hint="check the URL"
    ) from problem


def _database_file(kind: str, url: str) -> Path:
    """The file of SQLite; elsewhere the database's name.

    Raises:
        UsageError: no URL, or one of SQLite that names no file.
    """
    import sqlalchemy.engine
    import sqlalchemy.exc

    try:
        name = sqlalchemy.engine.make_url(url).database
    except (sqlalchemy.exc.ArgumentError, ValueError) as error:
        raise UsageError(
            f"{shown(url)} is no URL of a database", hint="for example --storage postgresql://user@host:5432/database"
        ) from error
    file = Path(name or "")
    if kind == "sqlite" and (name == ":memory:" or not file.name):
        raise UsageError(f"{shown(url)} names no file", hint="for example --storage sqlite:///study.db")
    return file


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
