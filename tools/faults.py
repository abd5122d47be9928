"""Faults under real searches: what is lost, measured twice or answered wrongly when planners, disks and databases fail.

    python tools/faults.py                     everything: 200 kills, full disks, a read-only home, restarted servers
    python tools/faults.py --kills 20 --only folder --only "full disk"
    python tools/faults.py --record FILE --cpu-seconds 240  in slices: each study's outcome is a line of FILE and stands

Every run is the command `plan tune` in a process of its own on a model of two layers; its probes are real children
(`probes.gpu.worker`) that answer from a table instead of training, so that the undisturbed answer is known. Killed with
SIGKILL at start-up, in the middle of a probe and while a result is told, and called again until it ends.

A measurement is lost when the undisturbed search has it and the resumed one does not; it is measured twice when the
store holds it twice. A probe that was under way when its planner was killed has no result, and is no loss.
"""

import argparse
import contextlib
import errno
import hashlib
import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
if TYPE_CHECKING:
    from tests.servers import Postgres

SEED = 22
NUM_KILLS = 200
MOST_KILLS = 12
"""In one study; then it may end."""
ROWS = ["folder", "postgresql", "database restarted", "full disk", "read-only disk", "read-only home"]
MAX_PROBES = 5
PATIENCE_S = 300.0
PROBE_S = 0.2
HEARTBEAT_S, GRACE_S = 1, 3
"""Instead of 20 and 60 s: a killed worker is found out by its silence."""
LOG, FAULT_AT, FAULT = "FAULTS_LOG", "FAULTS_FAIL_WRITE", "FAULTS_DISK"
LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "vocab_size": 512,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
WORDS = ["--gpu", "rtx-4090", "--device", "cpu", "--method", "full", "--precision", "fp32", "--no-checkpointing"]
WORDS += ["--optimizer", "adamw", "--optimizer", "adamw-fused", "--attention", "sdpa", "--attention", "eager"]
WORDS += ["--loss", "full", "--loss", "chunked", "--seq-len", "64", "--global-batch", "4", "--no-dry-run"]
WORDS += ["--max-probes", str(MAX_PROBES), "--budget", "10h", "--json=full"]


@dataclass(frozen=True)
class Disk:
    """How a disk refuses: so many writes, with this error, and with these words of SQLite's."""

    errno: int
    num_writes: int
    words: str


DISKS = {
    "full": Disk(errno.ENOSPC, 3, "database or disk is full"),
    "read-only": Disk(errno.EROFS, 10**9, "attempt to write a readonly database"),
}


# The two programs: the command, and a probe's child


def tune(words: list[str]) -> int:
    """`plan tune` with probes that answer from a table, and with a disk that is full at one write."""
    from functools import partial

    import search.storage
    from finetune_planner.cli.app import run
    from probes.gpu import executors

    argv = (sys.executable, "-P", __file__, "--probe")
    executors.LocalExecutor = partial(executors.LocalExecutor, argv=argv)  # type: ignore[assignment, misc]
    search.storage.HEARTBEAT_S, search.storage.GRACE_S = HEARTBEAT_S, GRACE_S
    if FAULT_AT in os.environ:
        fail_at(int(os.environ[FAULT_AT]), DISKS[os.environ.get(FAULT, "full")])
    return run(["tune", *words])


def fail_at(number: int, disk: Disk) -> None:
    """From write `number` on (0: never) the disk takes no more."""
    import sqlite3

    from sqlalchemy import Engine, event

    import planner.core.outputs
    import probes.gpu.runner
    import probes.gpu.worker
    import probes.store

    count = [0]

    def fails() -> bool:
        count[0] += 1
        note("write", str(count[0]))
        return 0 < number <= count[0] < number + disk.num_writes

    def guarded(write: Callable[..., Any]) -> Callable[..., Any]:
        def guard(*arguments: Any, **named: Any) -> Any:
            if fails():
                raise OSError(disk.errno, os.strerror(disk.errno))
            return write(*arguments, **named)

        return guard

    probes.store._append_bytes = guarded(probes.store._append_bytes)
    whole = guarded(planner.core.outputs.write_whole)
    for module in (planner.core.outputs, probes.gpu.runner, probes.gpu.worker, probes.store):
        module.write_whole = whole  # type: ignore[attr-defined]

    @event.listens_for(Engine, "do_execute")
    def _statement(cursor: Any, statement: str, parameters: Any, context: Any) -> None:
        if statement.split(None, 1)[0] in ("INSERT", "UPDATE", "DELETE", "CREATE", "COMMIT") and fails():
            raise sqlite3.OperationalError(disk.words)


def probe() -> int:
    """A probe's child: says that it began, takes a while, says that it ended, answers."""

    from planner.setup.codec import Outcome
    from planner.setup.interchange import setup_to_dict
    from planner.setup.outcome import Measurement
    from probes.gpu import worker
    from probes.gpu.environment import read_environment
    from probes.gpu.request import ProbeRequest, StatusPipe

    def answer(request: ProbeRequest, status: StatusPipe) -> Outcome:
        setup = request.setup
        text = json.dumps(setup_to_dict(setup), sort_keys=True)
        note("start", text)
        time.sleep(PROBE_S)
        tokens_per_s = 1000.0 + int(hashlib.sha256(text.encode()).hexdigest()[:6], 16) % 1000
        note("end", text)
        return Measurement(
            level=request.level, peak_allocated_bytes=10**9, peak_reserved_bytes=10**9, peak_device_bytes=10**9,
            phase_peaks_bytes={"backward": 10**9}, step_times_s=(setup.tokens_per_step / tokens_per_s,) * 3,
            tokens_per_step=setup.tokens_per_step, layers_measured=(2,), environment=read_environment("cpu", None),
        )  # fmt: skip

    return worker.main(measure=answer)


def note(word: str, text: str) -> None:
    handle = os.open(os.environ[LOG], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(handle, f"{word} {hashlib.sha256(text.encode()).hexdigest()[:12]}\n".encode())
    os.close(handle)


# The driver


@dataclass
class Row:
    """One line of the table."""

    name: str
    kills: int = 0
    resumes: int = 0
    lost: int = 0
    twice: int = 0
    wrong: int = 0
    notes: list[str] = field(default_factory=list)

    def add(self, part: "Row") -> None:
        for name in ("kills", "resumes", "lost", "twice", "wrong", "notes"):
            setattr(self, name, getattr(self, name) + getattr(part, name))

    def fault(self, code: int, errors: str, where: str = "") -> None:
        self.wrong += 1
        self.notes.append(f"{self.name}: {where}exit code {code}: {errors.strip().splitlines()[-2:]}")


class Record:
    """What every study showed, a line each; what stands in the file is not run again.

    Args:
        cpu_seconds: after so many no new study begins.
    """

    def __init__(self, path: Path | None, cpu_seconds: float) -> None:
        self._path, self._cpu_seconds = path, cpu_seconds
        self._known: dict[tuple[str, int], Row] = {}
        if path is not None and path.exists():
            for line in map(json.loads, path.read_text().splitlines()):
                number = line.pop("number")
                self._known[line["name"], number] = Row(**line)

    def each(self, name: str, study: Callable[[Row, int], None], go_on: Callable[[Row, int], bool]) -> Row:
        """The row of all studies of this name: `study(row, number)` for every number while `go_on(row, number)`."""
        whole, number = Row(name), 0
        while go_on(whole, number):
            part = self._known.get((name, number))
            if part is None:
                if sum(os.times()[:4]) > self._cpu_seconds:
                    raise TimeoutError(f"left out: {name} from study {number} on, and the rows below; --record goes on")
                study(part := Row(name), number)
                if self._path is not None:
                    with self._path.open("a") as file:
                        file.write(json.dumps({**vars(part), "number": number}) + "\n")
            whole.add(part)
            number += 1
        return whole


@dataclass(frozen=True)
class Answer:
    """What a search that ended said: the chosen setup, its figures, the setups it measured."""

    chosen: str
    tokens_per_s: float
    measured: frozenset[str]
    fastest: float


class Search:
    """One study with its store and the log of its probes."""

    def __init__(self, folder: Path, storage: str | None = None) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(LLAMA))
        self.storage = storage or str(folder / "study")
        self.store, self.log = folder / "store.jsonl", folder / "log"
        self.running: dict[subprocess.Popen[str], int] = {}
        self.number = 0

    def start(self, **environment: str) -> "subprocess.Popen[str]":
        self.number += 1
        with self._said("out", self.number).open("w") as out, self._said("errors", self.number).open("w") as errors:
            process = subprocess.Popen(  # files: nobody reads a pipe while it is waited for, and a plan fills one
                [sys.executable, "-P", __file__, "--tune", *self._words()],
                env=self._environment(environment), stdout=out, stderr=errors, text=True, cwd=self.folder,
            )  # fmt: skip
        self.running[process] = self.number
        return process

    def run(self, **environment: str) -> tuple[int, str, str]:
        """The command to its end, in a fork of this process, which has imported it: (exit code, stdout, stderr).

        Only for rows that start no server and no thread: half the CPU seconds of a process of its own.
        """
        imports()
        self.number += 1
        out, errors = self._said("out", self.number), self._said("errors", self.number)
        child = os.fork()
        if child == 0:
            code = 70
            try:
                os.environ.update(self._environment(environment))
                os.chdir(self.folder)
                for path, number in ((out, 1), (errors, 2)):
                    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), number)
                warnings.simplefilter("ignore")
                code = tune(self._words())
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status), out.read_text(), errors.read_text()

    def _words(self) -> list[str]:
        return [str(self.folder / "model"), *WORDS, "--storage", self.storage, "--store", str(self.store)]

    def _environment(self, more: dict[str, str]) -> dict[str, str]:
        return {
            **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore",
            LOG: str(self.log),
            "XDG_DATA_HOME": str(self.folder / "home"), "TMPDIR": str(self.folder), **more,
        }  # fmt: skip

    def _said(self, what: str, number: int) -> Path:
        return self.folder / f"{what}-{number}"

    def lines(self, word: str) -> int:
        """How many probes have begun ("start") or ended ("end")."""
        return self.log.read_text().count(f"{word} ") if self.log.exists() else 0

    def wait_for(self, word: str, num: int, process: "subprocess.Popen[str]") -> bool:
        """Until so many have; False when the command ended first."""
        deadline = time.monotonic() + PATIENCE_S
        while self.lines(word) < num and process.poll() is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"nothing happened for {PATIENCE_S:g} s in {self.folder}")
            time.sleep(0.005)
        return process.poll() is None

    def end(self, process: "subprocess.Popen[str]") -> tuple[int, str, str]:
        """(exit code, stdout, stderr) when it has ended."""
        process.wait(PATIENCE_S)
        number = self.running.pop(process)
        return process.returncode, self._said("out", number).read_text(), self._said("errors", number).read_text()

    def kill(self, process: "subprocess.Popen[str]") -> None:
        process.send_signal(signal.SIGKILL)
        process.wait()
        del self.running[process]

    def stored(self) -> frozenset[str]:
        """The setups whose measurements the store holds."""
        from probes.store import Store

        return frozenset(json.dumps(dict(record.setup), sort_keys=True) for record in Store(self.store).records())

    def repeated(self) -> int:
        """Measurements that the store holds more than once."""
        from probes.store import Store

        return sum(num - 1 for num in Counter(record.key for record in Store(self.store).records()).values())

    def close(self) -> None:
        for process in list(self.running):
            self.kill(process)
        shutil.rmtree(self.folder, ignore_errors=True)


def answer_of(out: str) -> Answer:
    plan = json.loads(out)
    trials = plan["search"]["trials"]
    done = [trial for trial in trials if trial.get("tokens_per_s") and trial["level"] == "probe"]
    measured = {json.dumps(trial["setup"], sort_keys=True) for trial in done}
    fastest = max(trial["tokens_per_s"] for trial in done)
    chosen = {name: value for name, value in plan["chosen"]["setup"].items() if name not in ("model", "gpu")}
    probe = plan["chosen"]["probe"] or {"tokens_per_s": fastest}  # rehearsed on a CPU the plan stands by itself
    return Answer(json.dumps(chosen, sort_keys=True), probe["tokens_per_s"], frozenset(measured), fastest)


def judge(row: Row, search: Search, out: str, calm: Answer, *, same: bool) -> None:
    """Counts what went wrong in a search that ended.

    Args:
        same: one planner at a time that sees at once who died: it must measure and choose what the undisturbed one did.
            Where a death shows by silence, or two work together, others are measured meanwhile: then the choice must be
            the fastest of what was measured.
    """
    answer = answer_of(out)
    lost = len(search.stored() - answer.measured)
    if same:
        lost += len(calm.measured - answer.measured - search.stored())
        wrong = (answer.chosen, answer.tokens_per_s) != (calm.chosen, calm.tokens_per_s)
    else:
        wrong = answer.tokens_per_s < answer.fastest or len(answer.measured) < MAX_PROBES
    row.lost += lost
    row.wrong += wrong
    twice = search.repeated()
    row.twice += twice
    if lost or wrong or twice:
        row.notes.append(f"{row.name}: lost {lost}, twice {twice}, wrong {wrong} in {search.folder.name}")


@cache
def imports() -> None:
    """What `Search.run`'s forks would import, each."""
    for name in (
        "finetune_planner.cli.tune", "finetune_planner.app.tuning", "search.run", "probes.gpu.executors",
        "sqlalchemy.dialects.sqlite", "alembic.command", "optuna.storages._rdb.storage", "reports.terminal",
    ):  # fmt: skip
        importlib.import_module(name)


def undisturbed(base: Path) -> tuple[Answer, float, int]:
    """The answer that nothing disturbed, the seconds until its first probe, and how often it wrote."""
    search = Search(base / "calm")
    start = time.monotonic()
    process = search.start(**{FAULT_AT: "0"})
    search.wait_for("start", 1, process)
    until_probe_s = time.monotonic() - start
    code, out, errors = search.end(process)
    if code != 0:
        raise SystemExit(f"the undisturbed search ended with {code}:\n{errors}")
    calm, writes = answer_of(out), search.lines("write")
    search.close()
    return calm, until_probe_s, writes


def killed(row: Row, search: Search, calm: Answer, start_s: float, most: int, dice: random.Random) -> None:
    """One study whose planners are killed, at most so often, until one of them ends."""
    while True:
        process = search.start()
        phase = dice.choice(("start-up", "probing", "telling")) if row.kills < most else ""
        if phase == "start-up":
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(dice.uniform(0.0, 1.1 * start_s))
        elif phase:
            word = "start" if phase == "probing" else "end"
            search.wait_for(word, search.lines(word) + 1, process)
            time.sleep(dice.uniform(0.0, PROBE_S if phase == "probing" else 0.3))
        if not phase or process.poll() is not None:
            break
        search.kill(process)
        row.kills += 1
        row.resumes += 1
    code, out, errors = search.end(process)
    if code == 0:
        judge(row, search, out, calm, same=False)
    else:
        row.fault(code, errors)


def refused(row: Row, search: Search, number: int, disk: str, calm: Answer) -> None:
    """The disk takes nothing more from this write on; what is called again loses nothing."""
    code, out, errors = search.run(**{FAULT_AT: str(number), FAULT: disk})
    row.kills += 1
    if code not in (0, 3):
        row.fault(code, errors, f"at write {number}: ")
    if code != 0:
        row.resumes += 1
        code, out, errors = search.run()
    if code == 0:
        judge(row, search, out, calm, same=False)
    else:
        row.fault(code, errors, f"after write {number}: ")


def read_only_home(row: Row, search: Search, calm: Answer) -> None:
    """Home, data and cache cannot be written; study and store lie elsewhere."""
    nowhere = dict.fromkeys(("HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"), "/dev/null/x")
    code, out, errors = search.run(**nowhere)
    row.kills += 1
    if code == 0:
        judge(row, search, out, calm, same=True)
    else:
        row.fault(code, errors)


def restarted(row: Row, search: Search, server: "Postgres", calm: Answer, dice: random.Random) -> None:
    """Two planners on one study; their server is killed in the middle and comes back after three seconds; who ended
    over it is called again."""
    processes = [search.start(), search.start()]
    search.wait_for(dice.choice(("start", "end")), dice.randint(1, 3), processes[0])
    time.sleep(dice.uniform(0.0, PROBE_S))
    server.stop()
    row.kills += 1
    time.sleep(3.0)
    server.start()
    for process in processes:
        code, out, errors = search.end(process)
        if code == 3:
            row.resumes += 1
            code, out, errors = search.end(search.start())
        if code != 0:
            row.fault(code, errors)
        elif process is processes[-1]:
            judge(row, search, out, calm, same=False)


def rows(options: argparse.Namespace, base: Path) -> Iterator[Row]:
    calm, start_s, writes = undisturbed(base)
    each: int = -(-options.kills // 2)
    record = Record(options.record, options.cpu_seconds)
    wanted = set(options.only or ROWS)
    Study = Callable[[Row, Search, int, random.Random], None]
    GoOn = Callable[[Row, int], bool]

    def of(name: str, study: Study, go_on: GoOn, storage: Callable[[], str] | None = None) -> Row:
        """The row of one name; each study has a folder, or a database, and dice of its own."""

        def one(row: Row, number: int) -> None:
            search = Search(base / f"{name.replace(' ', '-')}-{number}", storage() if storage else None)
            with contextlib.closing(search):
                study(row, search, number, random.Random(f"{SEED} {name} {number}"))

        return record.each(name, one, go_on)

    def kill(row: Row, search: Search, number: int, dice: random.Random) -> None:
        killed(row, search, calm, start_s, MOST_KILLS, dice)

    def until(most: int, every: int = 1) -> GoOn:
        return lambda row, number: number * every < most

    def refusing(disk: str) -> Study:
        return lambda row, search, number, dice: refused(row, search, 1 + number * options.every, disk, calm)

    if "folder" in wanted:
        yield of("folder", kill, lambda row, number: row.kills < each)
    if wanted & {"postgresql", "database restarted"}:
        from tests.servers import Postgres

        with contextlib.closing(Postgres()) as server:
            if "postgresql" in wanted:
                yield of("postgresql", kill, lambda row, number: row.kills < each, server.fresh)
            if "database restarted" in wanted:
                yield of(
                    "database restarted",
                    lambda row, search, number, dice: restarted(row, search, server, calm, dice),
                    until(options.restarts),
                    server.fresh,
                )
    for disk in DISKS:
        if f"{disk} disk" in wanted:
            yield of(f"{disk} disk", refusing(disk), until(writes, options.every))
    if "read-only home" in wanted:
        yield of("read-only home", lambda row, search, number, dice: read_only_home(row, search, calm), until(1))


def main() -> int:
    """0 when the last three columns are 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=NUM_KILLS, help="over a folder and PostgreSQL")
    parser.add_argument("--every", type=int, default=1, help="only every so many writes find it full (or read-only)")
    parser.add_argument("--restarts", type=int, default=5, help="of the database")
    parser.add_argument("--only", action="append", default=[], choices=ROWS, help="a line; repeat for several")
    parser.add_argument("--record", type=Path, default=None, help="JSON lines of the studies; those in it stand")
    parser.add_argument("--cpu-seconds", type=float, default=1e9, help="begin no study after so many CPU seconds")
    options = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="faults-"))
    total = 0
    print(f"{'':<20}{'faults':>7}{'resumes':>9}{'lost':>6}{'measured twice':>16}{'wrong answers':>15}", flush=True)
    try:
        for row in rows(options, base):
            print(f"{row.name:<20}{row.kills:>7}{row.resumes:>9}{row.lost:>6}{row.twice:>16}{row.wrong:>15}")
            for text in row.notes:
                print(f"  {text}")
            sys.stdout.flush()
            total += row.lost + row.twice + row.wrong
    except TimeoutError as stopped:
        print(stopped)
        return 1
    finally:
        shutil.rmtree(base, ignore_errors=True)
    return 1 if total else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--tune"]:
        sys.exit(tune(sys.argv[2:]))
    if sys.argv[1:2] and (sys.argv[1] == "--probe"):
        del sys.argv[1]
        from probes.gpu.worker import leave

        leave(probe())
    sys.exit(main())
