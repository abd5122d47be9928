"""Where a study lives: memory, or a database that Optuna keeps (SQLite's file, PostgreSQL, MySQL), its heartbeat and
retries included."""

import os
import random
import re
import stat
import time
import warnings
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import BaseStorage

from planner.core.errors import EnvironmentProblem, UsageError
from planner.core.install import packages_command

# heartbeat and retries; nobody who runs a search can act on it
warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)

STUDY_NAME = "study.db"
"""The file of a study in a directory."""
OPEN_ATTEMPTS = 6
SQLITE_WAIT_S = 60.0
"""How long a worker waits for another's transaction; a commit takes milliseconds, a disk under load a second."""
HEARTBEAT_S, GRACE_S = 20, 60
"""Between two signs of life of a worker; without one for so long, its trial is lost and waits again."""
MAX_RETRIES = 2
"""A candidate whose worker died this often, and once more, is left to the next call. A planner that is killed says
nothing about the setup: its probe is a process of its own, whose end would have been told."""


def open_storage(target: str | Path | None) -> BaseStorage:
    """The storage that `target` names, ready to use by many workers at once.

    Raises:
        UsageError: a URL of no known kind.
        EnvironmentProblem: the database does not answer or its driver is missing.
    """
    if target is None:
        return optuna.storages.InMemoryStorage()
    text = str(target)
    if "://" not in text:
        directory = Path(target)
        directory.mkdir(parents=True, exist_ok=True)
        path = directory.absolute() / STUDY_NAME
        # a folder from a stranger may hold a link to a file of one's own, or a pipe that hangs whoever opens it
        if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
            raise EnvironmentProblem(f"{path} is not a regular file", hint="give another --storage, or move it away")
        return _database("sqlite", "sqlite", f"/{path}", str(path))
    scheme, _, rest = text.partition("://")
    kind = scheme.partition("+")[0]
    if kind not in ("sqlite", "postgresql", "postgres", "mysql"):
        raise UsageError(
            f"storage must be a directory or a URL of sqlite, postgresql or mysql; got {shown(text)!r}",
            hint="for example --storage postgresql://user@host/database",
        )
    return _database(kind, scheme, rest, shown(text))


def shown(url: str) -> str:
    """A storage's URL without its password."""
    return re.sub(r"(password=)[^&]*", r"\1...", re.sub(r"(://[^/@:]*):.*@", r"\1:...@", url))


def close_storage(storage: BaseStorage) -> None:
    if isinstance(storage, optuna.storages.RDBStorage):
        storage.remove_session()
        storage.engine.dispose()


def first_line(error: BaseException) -> str:
    lines = str(error.__cause__ or error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


def place(target: str | Path | None) -> str:
    """Where a study of `open_storage` lies, for a person."""
    return shown(str(target)) if "://" in str(target) else str(Path(target or ".").absolute() / STUDY_NAME)


def what_to_do(error: BaseException, where: str, otherwise: str) -> str:
    """How a storage that does not work is mended."""
    reason = first_line(error)
    if _damaged(error):
        return f"move {where} away: the next call makes a new study and takes what the store of measurements holds"
    return "free some disk space, then call it again" if "disk is full" in reason else otherwise


def _damaged(error: BaseException) -> bool:
    return any(words in first_line(error) for words in ("image is malformed", "not a database"))


def _database(kind: str, scheme: str, rest: str, where: str) -> BaseStorage:
    import sqlalchemy.exc

    problem: Exception = RuntimeError("not tried")
    if kind in ("postgresql", "postgres") and "+" not in scheme:
        scheme = "postgresql+psycopg"
    url = f"{scheme}://{rest}"
    _check_names_a_database(kind, url)
    engine = {"connect_args": {"timeout": SQLITE_WAIT_S}} if kind == "sqlite" else {"pool_pre_ping": True}
    for attempt in range(OPEN_ATTEMPTS):
        try:
            database = optuna.storages.RDBStorage(
                url,
                heartbeat_interval=HEARTBEAT_S,
                grace_period=GRACE_S,
                heartbeat_stale_trial_callback=optuna.storages.RetryHeartbeatStaleTrialCallback(max_retry=MAX_RETRIES),
                engine_kwargs=engine,
            )
        except ImportError as error:
            raise EnvironmentProblem(
                f"no driver for {kind}: {error}", hint=packages_command("psycopg[binary]") if "postgres" in kind else ""
            ) from error
        except (sqlalchemy.exc.SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
            problem = error
            final = isinstance(error, sqlalchemy.exc.OperationalError) and "already exists" not in str(error)
            if final or _damaged(error):
                break
            # Workers that start at once on an empty database create the same tables; all but one must come again.
            time.sleep(random.uniform(0.1, 0.4) * (attempt + 1))
            continue
        if kind == "sqlite":
            _lock_whole_transactions(database.engine)
        return database
    raise EnvironmentProblem(
        f"the study's storage {where} does not answer: {first_line(problem)}",
        hint=what_to_do(problem, where, "can the file be read and written?" if kind == "sqlite" else "check the URL"),
    ) from problem


def _check_names_a_database(kind: str, url: str) -> None:
    """Raises:
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
    if kind == "sqlite" and (name == ":memory:" or not Path(name or "").name):
        raise UsageError(f"{shown(url)} names no file", hint="for example --storage sqlite:///study.db")


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
