"""A storage that is gone for a while: a database that restarts, a network that is down. Every call waits and says so.

A finished measurement costs GPU minutes; a restarted server costs seconds. So every call to a shared storage is
repeated for up to `OUTAGE_S` while the storage does not answer. A call whose answer got lost may have happened: a trial
added twice is a duplicate (the smaller number wins), a state set twice is refused the second time, and a trial taken
without knowing it is found lost when nobody beats for it.
"""

import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage

from planner.core.errors import EnvironmentProblem

OUTAGE_S = 120.0
"""A server restarts in seconds, a failover takes a minute; what is away for longer needs a person."""
FIRST_WAIT_S, LONGEST_WAIT_S = 0.2, 5.0
_MORE = (
    "record_heartbeat",
    "_get_stale_trial_ids",
    "_create_new_trial",
    "_get_best_trial_id",
    "_get_trials",
    "_set_trial_param",
)
"""Calls of single storages beside those that every one has: what Optuna's own cache before a database asks it for."""
_FOR_GOOD = ("disk is full", "readonly database", "malformed", "not a database", "no space left")
"""What waiting does not mend."""
GO_ON = "what was measured is in the store of measurements: once it is mended, call it again to go on"

_here = threading.local()


def say_on_stderr(text: str) -> None:
    """One line for a person."""
    print(text, file=sys.stderr, flush=True)


def is_outage(error: BaseException) -> bool:
    """Whether a storage's error means that it does not answer now, and may later."""
    grpc = sys.modules.get("grpc")
    if grpc is not None and isinstance(error, grpc.RpcError):
        status = getattr(error, "code", lambda: None)()
        # UNKNOWN: the proxy's own database failed; it told so by raising.
        return getattr(status, "name", "") in ("UNAVAILABLE", "DEADLINE_EXCEEDED", "UNKNOWN", "INTERNAL", "CANCELLED")
    return _is_a_databases(error) and not is_for_good(error)


def is_for_good(error: BaseException) -> bool:
    """Whether a database's error is one that waiting does not mend: a full disk, a file that is none of its own."""
    reason = f"{error} {error.__cause__}".lower()
    return _is_a_databases(error) and any(word in reason for word in _FOR_GOOD)


def _is_a_databases(error: BaseException) -> bool:
    sqlalchemy = sys.modules.get("sqlalchemy.exc")
    known: tuple[type[BaseException], ...] = (StorageInternalError,)
    if sqlalchemy is not None:
        known += (sqlalchemy.OperationalError, sqlalchemy.InterfaceError, sqlalchemy.InternalError)
    return isinstance(error, known)


@contextmanager
def at_once() -> Iterator[None]:
    """Inside, this thread's calls are tried once: for what is done again soon anyway (heartbeats)."""
    before, _here.at_once = getattr(_here, "at_once", False), True
    try:
        yield
    finally:
        _here.at_once = before


def make_patient(
    storage: BaseStorage, *, limit_s: float | None = None, say: Callable[[str], None] = say_on_stderr
) -> None:
    """From here on, every call to this storage outlasts an outage of `limit_s` (default OUTAGE_S)."""
    everybody = [name for name in dir(BaseStorage) if not name.startswith("_") and name != "remove_session"]
    for name in (*everybody, *_MORE):
        call = getattr(storage, name, None)
        if call is not None:
            setattr(storage, name, _patient(call, limit_s, say))


def _patient(call: Callable[..., Any], limit_s: float | None, say: Callable[[str], None]) -> Callable[..., Any]:
    @functools.wraps(call)
    def patiently(*arguments: Any, **named: Any) -> Any:
        if getattr(_here, "at_once", False):  # also within another call, which is repeated as a whole
            return call(*arguments, **named)
        limit = OUTAGE_S if limit_s is None else limit_s
        since, wait_s = time.monotonic(), FIRST_WAIT_S
        said = False
        while True:
            try:
                with at_once():
                    result = call(*arguments, **named)
            except Exception as error:
                if is_for_good(error):
                    raise EnvironmentProblem(
                        f"the study's storage does not work: {first_line(error)}", hint=GO_ON
                    ) from error
                if not is_outage(error):
                    raise
                away_s = time.monotonic() - since
                if away_s >= limit:
                    raise EnvironmentProblem(
                        f"the study's storage has not answered for {away_s:.0f} s: {first_line(error)}", hint=GO_ON
                    ) from error
                if not said:
                    say(f"the study's storage does not answer ({first_line(error)}): trying for {limit:.0f} s")
                    said = True
                time.sleep(min(wait_s, max(limit - away_s, 0.0)))
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)
                continue
            if said:
                say("the study's storage answers again")
            return result

    return patiently


def first_line(error: BaseException) -> str:
    """What a person needs of a driver's message."""
    told = getattr(error, "details", lambda: None)() or str(error.__cause__ or error)
    lines = told.strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
