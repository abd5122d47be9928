"""Hostile inputs to every command that reads something: no traceback, no hang, no gigabyte; then honest requests.

    python tools/fuzz.py                    the whole corpus (7,500 inputs, 500 requests, 2,000 for each later door)
    python tools/fuzz.py --from 7500 --first 500    the requests: plans of any model on any card
    python tools/fuzz.py --from 8000        an agent's calls; then failed runs, races, plans whose files are run
    python tools/fuzz.py --spread --first 40        a part of all kinds, as the default tests take one
    python tools/fuzz.py --seed 4711        one input, its files kept, everything shown

Input number n is made by `random.Random(n)` alone: a failure is repeated by its number. Each runs in a forked child of
its own with a limit of 10 CPU seconds (300 of the wall) and an address space of 4 GB; a report counts tracebacks (exit
code 70, or a signal), hangs and peaks above 1 GB.
"""

import argparse
import contextlib
import io
import json
import os
import pkgutil
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.fuzz_doors import DOORS, planned
from tools.fuzz_inputs import MAKERS, Case, request_case, seeds

NUM_HOSTILE = 7_500
NUM_DOOR = 2_000
"""For each of the doors that came later (`fuzz_doors`): their inputs follow the requests."""
FIRST_DOOR = NUM_HOSTILE + 500
NUM_INPUTS = FIRST_DOOR + 6 * NUM_DOOR
STRIDE = 6_007
"""Prime to the number of inputs: `--spread` goes through all of them in steps of it."""
LIMIT_S = 10
"""CPU seconds; of the wall, thirty times as many: a busy machine is no hang."""
MAX_BYTES = 1 << 30
ADDRESS_SPACE_BYTES = 4 << 30


def case_of(number: int, folder: Path) -> Case:
    """Input `number`; its files lie in `folder`."""
    dice = random.Random(number)
    if number >= FIRST_DOOR:
        return DOORS[(number - FIRST_DOOR) // NUM_DOOR](folder, dice)
    if number >= NUM_HOSTILE:
        return request_case(folder, dice)
    (maker,) = dice.choices([maker for maker, _ in MAKERS], [weight for _, weight in MAKERS])
    return maker(folder, dice)


@dataclass(frozen=True)
class Outcome:
    """What became of one input."""

    number: int
    kind: str
    words: tuple[str, ...]
    status: int
    text: str
    seconds: float
    cpu_s: float
    peak_bytes: int
    hung: bool
    wrote_victim: bool

    @property
    def fault(self) -> str:
        if self.hung:
            return "hang"
        if self.wrote_victim:
            return "wrote through a link"
        if self.peak_bytes > MAX_BYTES:
            return "memory"
        if self.status == 70 or self.status < 0 or "Traceback (most recent call last)" in self.text:
            return "traceback"
        return ""


@cache
def preload() -> None:
    """What most children would import, once: six tenths of an input's time."""
    for package in ("planner", "reports", "search", "mcp"):
        modules = pkgutil.walk_packages(import_module(package).__path__, f"{package}.")
        for name in (*(module.name for module in modules), "probes.store", "probes.phantom.runner"):
            with contextlib.suppress(ImportError):  # an extra that is not installed
                import_module(name)


def run_one(number: int, *, keep: bool = False) -> Outcome:
    """Makes the input and runs it in a child of this process."""
    folder = Path(tempfile.mkdtemp(prefix=f"fuzz-{number}-"))
    seeds()
    preload()
    door = (number - FIRST_DOOR) // NUM_DOOR
    if door == 3:
        planned()
    elif door == 5:
        with contextlib.suppress(ImportError):
            import_module("finetune_planner.callback")
    start = time.monotonic()
    own_bytes = _resident_bytes()  # a fork starts with what this process holds
    child = os.fork()
    if child == 0:
        _child(number, folder)
    hung = False
    while True:
        done, status, usage = os.wait4(child, os.WNOHANG)
        if done:
            break
        if time.monotonic() - start > 30 * LIMIT_S:
            hung = True
            os.kill(child, signal.SIGKILL)
            _, status, usage = os.wait4(child, 0)
            break
        time.sleep(0.001)
    log_path = folder / "told"
    lines = log_path.read_text("utf-8", "replace") if log_path.exists() else ""
    kind, _, rest = lines.partition("\n")
    words, _, text = rest.partition("\n")
    outcome = Outcome(
        number=number,
        kind=kind,
        words=tuple(json.loads(words)) if words else (),
        status=os.waitstatus_to_exitcode(status),
        text=text[-4000:],
        seconds=time.monotonic() - start,
        cpu_s=usage.ru_utime + usage.ru_stime,
        peak_bytes=max(0, usage.ru_maxrss * 1024 - own_bytes),
        hung=hung or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU),
        wrote_victim=(folder / "victim").exists(),
    )
    if not keep:
        shutil.rmtree(folder, ignore_errors=True)
    return outcome


def _resident_bytes() -> int:
    """What a fork holds at once of this process: its own pages, not those of files, which are mapped anew when used."""
    _, resident, of_files, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (resident - of_files) * os.sysconf("SC_PAGE_SIZE")


def _child(number: int, folder: Path) -> None:
    """Never returns."""
    code = 70
    with open(folder / "told", "w", encoding="utf-8", errors="backslashreplace") as log:
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S + 1))
            resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))
            os.environ["XDG_DATA_HOME"] = str(folder / "home")
            os.chdir(folder)
            warnings.simplefilter("default")  # pytest makes errors of them
            case = case_of(number, folder)
            os.environ.update(case.environment or {})
            log.write(f"{case.kind}\n{json.dumps(case.words)}\n")
            log.flush()
            os.dup2(log.fileno(), 2)
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, 1)
            sys.stdin = io.TextIOWrapper(io.BytesIO(case.stdin), encoding="utf-8", errors="replace")
            code = _run(case)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            log.flush()
            os._exit(code)


def _run(case: Case) -> int:
    from finetune_planner.cli.app import run
    from planner.core.errors import PlannerError

    tempfile.tempdir = os.getcwd()
    if case.call is None:
        try:
            code = run(case.words)
        except SystemExit as ended:
            return ended.code if isinstance(ended.code, int) else 2
        for file in Path.cwd().glob("finetune-planner-fault-*.txt"):
            sys.stderr.write(file.read_text("utf-8", "replace"))
        return code
    try:
        case.call()
    except PlannerError as error:
        return error.exit_code
    except OSError:
        return 3
    return 0


def main() -> int:
    """0 when nothing was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--first", type=int, default=NUM_INPUTS, help="how many inputs")
    parser.add_argument("--from", dest="start", type=int, default=0, help="the first input's number")
    parser.add_argument("--seed", type=int, default=None, help="one input: show everything, keep its files")
    parser.add_argument("--cpu-seconds", type=float, default=1e9, help="stop after so many CPU seconds of the inputs")
    parser.add_argument("--spread", action="store_true", help="in an order in which any part is of all kinds")
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    if options.seed is not None:
        outcome = run_one(options.seed, keep=True)
        print(outcome.kind, outcome.words, f"status {outcome.status}, {outcome.seconds:.2f} s", sep="\n")
        print(outcome.text)
        print(outcome.fault or "nothing found")
        return 1 if outcome.fault else 0
    faults: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    answers: Counter[int] = Counter()
    slowest, largest = 0.0, 0
    cpu_s = 0.0
    end = min(options.start + options.first, NUM_INPUTS)
    for place in range(options.start, end):
        if cpu_s > options.cpu_seconds:
            more = " --spread" if options.spread else ""
            print(f"left out: {end - place:,} of {end - options.start:,} inputs; go on with{more} --from {place}")
            break
        number = place * STRIDE % NUM_INPUTS if options.spread else place
        outcome = run_one(number)
        kinds[outcome.kind] += 1
        answers[outcome.status] += 1
        slowest, largest = max(slowest, outcome.cpu_s), max(largest, outcome.peak_bytes)
        cpu_s += outcome.cpu_s
        if outcome.fault:
            faults[outcome.fault] += 1
            last = outcome.text.strip().splitlines()[-1:] or [""]
            where = [line.strip() for line in outcome.text.splitlines() if line.strip().startswith('File "')][-1:]
            print(f"{outcome.fault}: --seed {number} ({outcome.kind}) {last[0][:160]} {''.join(where)}", flush=True)
    for kind, num in sorted(kinds.items()):
        print(f"{kind:<14}{num:>6}")
    print("exit codes:", ", ".join(f"{status} ({num})" for status, num in sorted(answers.items())))
    summary = ", ".join(f"{num} {name}" for name, num in faults.items()) or "0 tracebacks, 0 hangs, 0 above 1 GB"
    print(
        f"{sum(kinds.values())} inputs: {summary}; {cpu_s:.0f} CPU seconds, slowest {slowest:.1f} s, "
        f"largest {largest / 2**20:.0f} MiB"
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
