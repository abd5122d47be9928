"""Who is alive: which running trials have lost their worker, and a sign of life for one's own."""

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import optuna
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial

from planner.core.locks import lock, open_lock, try_lock
from planner.core.records import dataclass
from search.outage import at_once, is_outage
from search.trials import ALIVE_ATTR, marks_of

BEATS_TO_COME = 1.5
"""A trial that looks stale is lost when it still does after so many intervals of its heartbeat."""
UNNAMED_GRACE_S = 5.0
"""A running trial without signature and without any trace of who took it is lost after this long (foreign programs)."""


@dataclass(frozen=True, kw_only=True)
class HeartbeatTiming:
    """How a worker on a database shows that it lives.

    Attributes:
        heartbeat_s: between two signs of life.
        grace_s: without one for so long, its trial is lost.
    """

    heartbeat_s: int = 20
    grace_s: int = 60


HEARTBEAT_TIMING = HeartbeatTiming()


def worker_name() -> str:
    """A name that no other worker has: host, process id and a random part."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"


def _unsigned_and_old(trial: FrozenTrial) -> bool:
    start = trial.datetime_start
    return start is None or time.time() - start.timestamp() > UNNAMED_GRACE_S


class Heartbeat:
    """Tells which running trials have lost their worker, and keeps this worker's own trial alive. As it is: of one
    process, in memory, where nobody can be lost."""

    def __init__(self) -> None:
        self.worker = worker_name()

    def join(self, study_id: int) -> None:
        """This worker works on that study."""

    def announce(self, trial_id: int) -> None:
        """This worker is about to take that waiting trial: from here on others see it alive."""

    @contextlib.contextmanager
    def keep_alive(self, trial_id: int) -> Iterator[None]:
        """While inside, others see that this trial is being worked on."""
        yield

    def is_lost(self, trial: FrozenTrial) -> bool:
        """Whether the worker of this running trial is gone."""
        return False

    def close(self) -> None:
        """This worker leaves."""


class LockHeartbeat(Heartbeat):
    """Every worker holds an exclusive lock on a file of its own; kill -9 releases it at once, no clock involved."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / f"{self.worker}.lock"
        self._file = open_lock(self._path)
        lock(self._file.fileno())

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


class _BeatHeartbeat(Heartbeat):
    """A thread that beats while a trial runs."""

    interval_s: float

    def __init__(self) -> None:
        super().__init__()
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


class DatabaseHeartbeat(_BeatHeartbeat):
    """Optuna's heartbeat, by the database server's clock."""

    def __init__(self, storage: optuna.storages.RDBStorage) -> None:
        super().__init__()
        self._storage = storage
        self.interval_s = float(storage.heartbeat_interval or HEARTBEAT_TIMING.heartbeat_s)

    def _beat(self, trial_id: int) -> None:
        self._storage.record_heartbeat(trial_id)

    def _is_stale(self, trial: FrozenTrial) -> bool:
        return trial._trial_id in self._storage._get_stale_trial_ids(self._study_id)


class AttributeHeartbeat(_BeatHeartbeat):
    """A heartbeat in the trial's own attributes, for storages without one; workers' clocks must agree to seconds."""

    def __init__(
        self,
        storage: BaseStorage,
        *,
        interval_s: float = HEARTBEAT_TIMING.heartbeat_s,
        grace_s: float = HEARTBEAT_TIMING.grace_s,
    ) -> None:
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
