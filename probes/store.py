"""The store of measurements: one append-only file of JSON lines that survives crashes and several writers.

One line is `{"sha256": ..., "record": {...}}`, written by one `os.write` on a descriptor opened O_APPEND under `flock`,
then flushed to disk. A line that was torn (power cut, full disk) or damaged is skipped with a warning and stays where
it is; the lines around it stay readable. Order in the file is the order of time: clocks may go
backwards, so `recorded_at` is for people only, and of several records under one key the last one holds.
"""

import errno
import hashlib
import json
import os
import shlex
import stat
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from planner.core.errors import ConfigError, EnvironmentProblem, UsageError
from planner.core.inputs import number, parse_json
from planner.core.locks import NO_LINK, OPEN_FLAGS, lock, unlock
from planner.core.outputs import private_directory, write_whole
from planner.setup.codec import BadOutcome, Outcome, evidence_to_dict, outcome_from_dict
from planner.setup.outcome import FailureKind, Measurement

MAX_STORE_BYTES = 256 * 1024 * 1024
"""Read at a time: some 80,000 outcomes; a larger file is something else."""
WHICH_STORE = "name another file with --store; `plan store show` names the usual one"
MAX_CRASHES_BEFORE_FINAL = 2
"""A crash or a timeout may be bad luck: it is tried again until it happened this often under the same key."""


RECORD_SCHEMA = 1
_TEXTS = ("key", "model_id", "config_digest", "recorded_at")
_OBJECTS = ("setup", "request")


@dataclass(frozen=True, kw_only=True)
class Record:
    """One stored outcome.

    Attributes:
        key: fingerprint of model shape, setup and environment.
        request: the request's JSON without the model's configuration (its digest stands for it).
        recorded_at: ISO time of the writer's clock, informational.
    """

    key: str
    model_id: str
    config_digest: str
    setup: Mapping[str, Any]
    request: Mapping[str, Any] = field(repr=False)
    outcome: Outcome
    recorded_at: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The record as JSON values."""
        texts = {name: getattr(self, name) for name in _TEXTS}
        objects = {name: dict(getattr(self, name)) for name in _OBJECTS}
        return {"schema": RECORD_SCHEMA, **texts, **objects, "outcome": evidence_to_dict(self.outcome)}


def record_from_dict(values: Mapping[str, Any]) -> Record:
    """The record that `Record.to_dict` wrote.

    Raises:
        BadOutcome: another schema, or a field that is missing or of the wrong type.
    """
    if not isinstance(values, Mapping):
        raise BadOutcome(f"a record must be an object, got {type(values).__name__}")
    if values.get("schema") != RECORD_SCHEMA:
        raise BadOutcome(f"record schema must be {RECORD_SCHEMA}, got {values.get('schema')!r}")
    try:
        limits = values["request"].get("limits", {})
        number(limits.get("time_s", 0.0), "request.limits.time_s")
        texts: dict[str, Any] = {name: str(values[name]) for name in _TEXTS}
        objects: dict[str, Any] = {name: dict(values[name]) for name in _OBJECTS}
        return Record(**texts, **objects, outcome=outcome_from_dict(values["outcome"]))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise BadOutcome(f"record cannot be read: {type(error).__name__}: {error}") from error


def encode_line(record: Record) -> bytes:
    """The record as one line with its checksum."""
    body = json.dumps(record.to_dict(), sort_keys=True, separators=(",", ":"))
    return f'{{"sha256":"{_checksum(body)}","record":{body}}}\n'.encode()


def decode_line(line: bytes) -> Record:
    """The record of one line.

    Raises:
        BadOutcome: not JSON, a wrong checksum, another schema.
    """
    try:
        values = parse_json(line, "line")
        body = json.dumps(values["record"], sort_keys=True, separators=(",", ":"))
        expected = values["sha256"]
    except (ConfigError, ValueError, KeyError, TypeError) as error:
        raise BadOutcome(f"line is not a stored record: {error}") from error
    if _checksum(body) != expected:
        raise BadOutcome("checksum does not match")
    return record_from_dict(values["record"])


def _checksum(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()[:16]


class StoreWarning(UserWarning):
    """Something about the store a person should know; nothing measured was lost."""


def now_text() -> str:
    """The wall clock as ISO text, to the second, UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


class Store:
    """All outcomes measured so far, in a file that other processes may be writing too.

    `path` need not exist. Nothing is read or written when the object is made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._records: list[Record] = []
        self._by_key: dict[str, list[Record]] = {}
        self._offset = 0
        self._seen_lines: set[bytes] = set()
        self._torn = b""
        self._num_damaged = 0

    @property
    def fallback_path(self) -> Path:
        """Where a measurement goes when the store itself cannot be written."""
        name = hashlib.sha256(str(self.path.absolute()).encode()).hexdigest()[:12]
        return private_directory() / f"{name}.jsonl"

    def records(self) -> tuple[Record, ...]:
        """Every readable record, in the order they were written (other writers' new lines included)."""
        self._refresh()
        return tuple(self._records)

    def latest(self) -> tuple[Record, ...]:
        """The last record of each key, in the order of first appearance."""
        self._refresh()
        return tuple(records[-1] for records in self._by_key.values())

    def get(self, key: str) -> Record | None:
        """The last record under `key`."""
        self._refresh()
        records = self._by_key.get(key)
        return records[-1] if records else None

    def reusable(self, key: str, *, time_s: float = 0.0) -> Record | None:
        """The record that makes measuring `key` again pointless, or None.

        A measurement, an out-of-memory and an unsupported setup stay true; a measurement on a shared GPU does not. A
        timeout says nothing about a longer limit than its own (`time_s`), and a crash may not happen again.
        """
        self._refresh()
        records = self._by_key.get(key, [])
        if not records:
            return None
        last = records[-1]
        if isinstance(last.outcome, Measurement):
            return None if "device-shared" in last.outcome.flags else last
        if last.outcome.kind in (FailureKind.OUT_OF_MEMORY, FailureKind.UNSUPPORTED):
            return last
        if last.outcome.kind is FailureKind.TIMEOUT:
            limits = last.request.get("limits", {})
            return last if limits.get("time_s", 0.0) >= time_s else None
        crashes = [record for record in records if getattr(record.outcome, "kind", None) is FailureKind.CRASHED]
        return last if len(crashes) >= MAX_CRASHES_BEFORE_FINAL else None

    def append(self, record: Record) -> Path:
        """Writes one record and returns the file that now holds it.

        When the store cannot be written (full disk, read-only) the record goes to a file in the temporary directory and
        a `StoreWarning` says so; it is also kept in this object, so that a search goes on either way.

        Raises:
            EnvironmentProblem: not even the fallback could be written. The record is still in this object.
        """
        return self.extend((record,))

    def extend(self, records: Iterable[Record]) -> Path:
        """`append` for several records at once, in one write."""
        added = tuple(records)
        lines = b"".join(encode_line(record) for record in added)
        if not lines:
            return self.path
        try:
            _append_bytes(self.path, lines)
        except OSError as error:
            for record in added:
                self._remember(record)
            return self._to_fallback(lines, error)
        self._refresh()
        return self.path

    def merge(self, source: Path) -> tuple[int, int]:
        """Imports another store's readable lines that are not here yet: (added, already here).

        Raises:
            EnvironmentProblem: `source` cannot be read, or this store not written.
        """
        self._refresh()
        other = Store(source)
        hint = "name a file that `plan store export` wrote"
        if not source.exists():
            raise EnvironmentProblem(f"no such file: {source}", hint=hint)
        other._refresh()
        if not other._records and other._num_damaged:
            raise ConfigError(f"{source} holds no line that a store wrote", hint=hint)
        fresh, num_present = [], 0
        for record in other.records():
            if encode_line(record) in self._seen_lines:
                num_present += 1
            else:
                fresh.append(record)
        try:
            if fresh:
                _append_bytes(self.path, b"".join(map(encode_line, fresh)))
        except OSError as error:  # nothing was measured just now: all of it is still in `source`
            raise EnvironmentProblem(
                f"the store {self.path} cannot be written ({error.strerror}); nothing was added",
                hint="free some disk space or give another file with --store",
            ) from error
        return len(fresh), num_present

    def export(self, target: Path) -> int:
        """Writes the last record of each key as a new file of the same form, whole or not at all; returns how many.

        Raises:
            EnvironmentProblem: the target cannot be written, or there is nothing to write: what it holds stays.
            UsageError: it is this store, whose earlier outcomes an export leaves out.
        """
        if target.resolve() == self.path.resolve():
            raise UsageError(f"{target} is the store itself", hint="export into another file")
        records = self.latest()
        if not records:
            raise EnvironmentProblem(f"no outcomes to export from {self.path}", hint=WHICH_STORE)
        try:
            write_whole(target, b"".join(encode_line(record) for record in records))
        except OSError as error:
            raise EnvironmentProblem(
                f"cannot write {target}: {error.strerror}", hint="choose a directory with free space that you may write"
            ) from error
        return len(records)

    # Reading: only what was added since the last look, whole lines only.

    def _refresh(self) -> None:
        data = self._unread()
        whole, _, torn = data.rpartition(b"\n")
        # Under the shared lock no writer is in the middle of a line: an end without a newline is a torn line, and the
        # next writer will close it. It is looked at again then.
        self._offset += len(whole) + 1 if whole or data.startswith(b"\n") else 0
        damaged = []
        for line in whole.split(b"\n") if whole else ():
            if not line.strip() or line == self._torn:
                continue
            try:
                self._remember(decode_line(line), line + b"\n")
            except BadOutcome as error:
                damaged.append(str(error))
        if torn and torn != self._torn:
            self._torn = torn
            try:
                self._remember(decode_line(torn), torn + b"\n")  # only its newline is missing
            except BadOutcome:
                damaged.append("torn: the writer was stopped in the middle of it")
        if damaged:
            self._num_damaged += len(damaged)
            text = f"{len(damaged)} damaged line(s) in {self.path} skipped; first reason: {damaged[0]}"
            warnings.warn(text, StoreWarning, stacklevel=3)

    def _unread(self) -> bytes:
        """What was added since the last look."""
        try:
            # O_NONBLOCK: opening a named pipe that nobody writes to would wait for ever.
            with open(os.open(self.path, os.O_RDONLY | OPEN_FLAGS), "rb") as handle:
                _refuse_special(handle.fileno(), self.path)
                size = os.fstat(handle.fileno()).st_size
                if size < self._offset:  # replaced or cut by a person: read it anew
                    self._records, self._by_key, self._offset, self._seen_lines, self._torn = [], {}, 0, set(), b""
                if size == self._offset:
                    return b""
                handle.seek(self._offset)
                with _locked(handle.fileno(), shared=True):
                    data = handle.read(MAX_STORE_BYTES + 1)
                if len(data) > MAX_STORE_BYTES:
                    raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
                return data
        except (FileNotFoundError, NotADirectoryError):
            return b""
        except OSError as error:
            raise EnvironmentProblem(
                f"cannot read the store {self.path}: {error.strerror}", hint="give another file with --store"
            ) from error

    def _remember(self, record: Record, line: bytes | None = None) -> None:
        if line is not None:  # on disk; what only memory holds may still be brought back by `merge`
            self._seen_lines.add(line)
        self._records.append(record)
        self._by_key.setdefault(record.key, []).append(record)

    def _to_fallback(self, lines: bytes, error: OSError) -> Path:
        try:
            fallback = self.fallback_path
            _append_bytes(fallback, lines)
        except OSError as second:
            raise EnvironmentProblem(
                f"the measurement could be written neither to {self.path} ({error.strerror}) "
                f"nor to {second.filename or tempfile.gettempdir()} ({second.strerror})",
                hint="free some disk space or give another file with --store; it is kept in memory until this run ends",
            ) from error
        warnings.warn(
            f"the store {self.path} cannot be written ({error.strerror}); the measurement is in {fallback} "
            f"(bring it back with `plan store import {shlex.quote(str(fallback))} "
            f"--store {shlex.quote(str(self.path))}`)",
            StoreWarning,
            stacklevel=4,
        )
        return fallback


def _append_bytes(path: Path, lines: bytes) -> None:
    """Appends whole lines or nothing. A torn last line of a dead writer is closed first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # A link of that name is not followed: somebody else may have placed it, to a file that a shell runs.
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | NO_LINK | OPEN_FLAGS
    descriptor = os.open(path, flags, 0o666)
    try:
        _refuse_special(descriptor, path)
        with _locked(descriptor):
            size = os.fstat(descriptor).st_size
            os.lseek(
                descriptor, max(0, size - 1), os.SEEK_SET
            )  # O_APPEND: what is written goes to the end all the same
            if os.read(descriptor, 1) not in (b"", b"\n"):
                lines = b"\n" + lines
            try:
                written = os.write(descriptor, lines)
                if written != len(lines):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(descriptor)
            except OSError:
                os.ftruncate(descriptor, size)  # nobody else can have written: the lock is ours
                raise
    finally:
        os.close(descriptor)


def _refuse_special(descriptor: int, path: Path) -> None:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise OSError(errno.EINVAL, f"not a regular file: {path}")


@contextmanager
def _locked(descriptor: int, *, shared: bool = False) -> Iterator[None]:
    """Holds a lock; file systems without locks (some network mounts) go on unlocked, O_APPEND still holds there."""
    try:
        lock(descriptor, shared=shared)
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        yield
        return
    try:
        yield
    finally:
        unlock(descriptor)
