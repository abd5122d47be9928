"""Planted faults: does a test notice when a number or a comparison of the formulas changes?

    python tools/mutation.py                      all of tools/planted_faults.jsonl, each against its room's tests
    python tools/mutation.py --room search -n 20  some of them
    python tools/mutation.py --record FILE        writes each answer there, and goes on where FILE ends
    python tools/mutation.py --collect            replaces the faults whose line is gone (fixed seed)

A fault is one line changed in a copy of the tree. It is killed when a test of its room fails; all of them are tests of
the default suite, run in order of cost up to the first failure, in a fork of this process, which has imported the
libraries (never the project). Each room's tests must pass without a fault first. Who survives is explained in
docs/faults.md.
"""

import argparse
import ast
import contextlib
import importlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "tools" / "planted_faults.jsonl"
SEED = 20261122
SLOWER, AT_LEAST_S = 3, 60
"""A fault whose tests take so many times the CPU seconds of the room without a fault (and at least so many) never ends:
that is noticed too. CPU seconds of one process, so that a busy machine kills nobody."""
WAITS, WAITS_S = 10, 240.0
"""The same by the clock, for a fault that sleeps for ever."""
COPIED = ["planner", "probes", "search", "reports", "finetune_planner", "tests", "tools", "benchmarks", "docs"]
COPIED += ["pyproject.toml", "README.md", "CHANGELOG.md"]
LIBRARIES = ("numpy", "yaml", "typer", "rich", "jinja2", "sqlalchemy", "optuna")
"""No plugin of pytest: it rewrites them as it imports them."""
HEAVY_LIBRARIES = ("torch", "transformers", "transformers.modeling_utils", "peft")
HEAVY_ROOMS = ("dry run",)
QUIET = ("-W", "ignore::pytest.PytestAssertRewriteWarning")
"""The libraries have imported anyio, whose plugin pytest would have rewritten."""

ROOMS: dict[str, tuple[tuple[str, ...], tuple[str, ...], int]] = {
    # room: (files, tests in order of cost, how many faults)
    "memory": (
        ("planner/memory/*.py", "planner/options/losses.py", "planner/options/optimizers.py"),
        (
            "tests/planner/test_on_record.py",
            "tests/planner/test_by_hand.py",
            "tests/planner/test_memory_terms.py",
            "tests/planner/test_memory_textbook.py",
            "tests/planner/test_space_memory.py",
            "tests/planner/test_formula_grid.py",
            "tests/planner/test_stated_facts.py",
        ),
        50,
    ),
    "throughput": (
        (
            "planner/speed/roofline/counts.py",
            "planner/speed/roofline/family.py",
            "planner/speed/roofline/model.py",
            "planner/speed/roofline/profile.py",
            "planner/speed/roofline/types.py",
        ),
        (
            "tests/planner/test_on_record.py",
            "tests/planner/test_by_hand.py",
            "tests/planner/test_throughput.py",
            "tests/planner/test_throughput_accuracy.py",
            "tests/planner/test_stated_facts.py",
        ),
        36,
    ),
    "search": (
        (
            "search/problem.py",
            "search/sampler.py",
            "search/residual.py",
            "search/residual.py",
            "search/stopping.py",
            "search/study.py",
            "search/corrections.py",
        ),
        (
            "tests/search/test_on_record.py",
            "tests/search/test_problem.py",
            "tests/search/test_blame.py",
            "tests/search/test_residual.py",
            "tests/search/test_sampler.py",
            "tests/search/test_pareto.py",
            "tests/search/test_corrections.py",
            "tests/search/test_study.py",
        ),
        36,
    ),
    "seconds": (
        ("planner/speed/*.py",),
        (
            "tests/planner/test_stated_seconds.py",
            "tests/planner/test_speed_prices.py",
            "tests/planner/test_step_programs.py",
            "tests/planner/test_on_record.py",
        ),
        20,
    ),
    "profiles": (
        (
            "planner/memory/profiles.py",
            "planner/memory/profiles.py",
            "planner/memory/profiles.py",
            "planner/core/packed.py",
        ),
        ("tests/planner/test_stated_seconds.py", "tests/planner/test_step_profiles.py"),
        20,
    ),
    "policy": (
        (
            "planner/planning/decision/policy.py",
            "planner/planning/decision/tree.py",
            "planner/planning/decision/alternatives.py",
        ),
        ("tests/planner/test_stated_policy.py", "tests/planner/test_preference.py", "tests/planner/test_planning.py"),
        20,
    ),
    "written": (
        ("planner/frameworks/exporters/*.py",),
        (
            "tests/planner/test_written.py",
            "tests/planner/test_readers_roundtrip.py",
            "tests/planner/test_exporters_targets.py::test_the_plain_script_imports_peft_where_adapters_train",
        ),
        14,
    ),
    "read": (
        ("planner/frameworks/readers/*.py", "planner/samples/dataset.py"),
        (
            "tests/planner/test_stated_facts.py",
            "tests/planner/test_readers_spread.py",
            "tests/planner/test_readers_roundtrip.py",
        ),
        10,
    ),
    "allocator": (
        ("probes/allocator/*.py",),
        ("tests/probes/test_allocator.py", "tests/probes/test_allocator_properties.py"),
        20,
    ),
    "dry run": (
        ("probes/dryrun/repeat_layers.py", "probes/dryrun/tracker.py", "probes/dryrun/workspaces.py"),
        (
            "tests/probes/test_dryrun_on_record.py",
            "tests/probes/test_dryrun_depth.py::test_every_event_is_that_of_the_full_depth",
            "tests/probes/test_dryrun_depth.py::test_fewest_layers_of_patterns",
            "tests/probes/test_dryrun_depth.py::test_period_of_patterns",
            "tests/probes/test_dryrun_kernels.py",
            "tests/probes/test_dryrun_gradient_sums.py",
        ),
        20,
    ),
}
_SWAPS: dict[type[ast.AST], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.FloorDiv: "*", ast.Div: "*", ast.And: "or", ast.Or: "and",
}  # fmt: skip
_SYMBOLS: dict[type[ast.AST], str] = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "//", ast.Div: "/", ast.And: "and", ast.Or: "or",
}  # fmt: skip
_NO_FIGURES = ("lru_cache", "slots", "raise ", 'f"', "assert ", "maxsize", "encoding", "indent=", "__", "hint=")
"""Lines that say something to people or to Python, not to a plan."""


def candidates(path: Path, room: str) -> Iterator[dict[str, Any]]:
    """Every fault of one line that this file could have: an operator swapped, a number or a truth value changed."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        edit: tuple[int, int, int, str] | None = None
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _SWAPS:
            edit = _between(lines, node.left, node.comparators[0], node.ops[0])
        elif isinstance(node, ast.BinOp) and type(node.op) in _SWAPS:
            edit = _between(lines, node.left, node.right, node.op)
        elif isinstance(node, ast.BoolOp):
            edit = _between(lines, node.values[0], node.values[1], node.op)
        elif isinstance(node, ast.Constant) and node.lineno == node.end_lineno:
            value, new = node.value, ""
            if isinstance(value, bool):
                new = str(not value)
            elif isinstance(value, int):
                new = str(value + 1 if value < 2 else value // 2)
            elif isinstance(value, float):
                new = repr(value / 2 if value else 1.0)
            if new:
                edit = (node.lineno, node.col_offset, node.end_col_offset or 0, new)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("max", "min"):
            other = "min" if node.func.id == "max" else "max"
            edit = (node.func.lineno, node.func.col_offset, node.func.end_col_offset or 0, other)
        if edit is None:
            continue
        number, start, end, new = edit
        old = lines[number - 1]
        if any(mark in old for mark in _NO_FIGURES) or not old.isascii():
            continue
        yield {
            "room": room,
            "file": path.relative_to(ROOT).as_posix(),
            "old": old,
            "new": old[:start] + new + old[end:],
            "nth": lines[: number - 1].count(old),
        }


def _between(lines: list[str], left: ast.expr, right: ast.expr, op: ast.AST) -> tuple[int, int, int, str] | None:
    if left.end_lineno != right.lineno or left.end_col_offset is None:
        return None
    between = lines[right.lineno - 1][left.end_col_offset : right.col_offset]
    at = between.find(_SYMBOLS[type(op)])
    if at < 0:
        return None
    start = left.end_col_offset + at
    return right.lineno, start, start + len(_SYMBOLS[type(op)]), _SWAPS[type(op)]


def is_stale(fault: dict[str, Any], root: Path = ROOT) -> bool:
    """Whether the line that the fault changes is gone."""
    path = root / fault["file"]
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return lines.count(fault["old"]) < 1 + int(fault.get("nth", 0))


def collect() -> list[dict[str, Any]]:
    """The list's faults whose lines are still there, and the rest of each room's number drawn from all that its files
    could have."""
    listed = read() if LIST.exists() else []
    kept = [fault for fault in listed if not is_stale(fault)]
    for fault in listed:
        if fault.get("name") and fault not in kept:
            print(f"gone, to be planted by hand: {fault['name']}: {fault['file']}: {fault['old'].strip()}")
    dice = random.Random(SEED)
    taken = {(fault["file"], fault["old"], fault["new"]) for fault in kept}
    result = list(kept)
    for room, (patterns, _, num) in ROOMS.items():
        every = [
            candidate
            for pattern in patterns
            for path in sorted(ROOT.glob(pattern))
            for candidate in candidates(path, room)
        ]
        dice.shuffle(every)
        fresh = [
            candidate for candidate in every if (candidate["file"], candidate["old"], candidate["new"]) not in taken
        ]
        result += fresh[: max(0, num - sum(fault["room"] == room for fault in kept))]
    return result


def read(path: Path = LIST) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


class Copy:
    """A copy of the tree in which one fault at a time is planted."""

    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="planted-"))
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, self.root / name, ignore=shutil.ignore_patterns("__pycache__"))
            elif source.exists():
                shutil.copy(source, self.root / name)
        self._times = 0
        self._cpu_s: dict[str, int] = {}
        self._limit_s: dict[str, float] = {}

    def check(self, room: str) -> str:
        """The test of the room that fails without a fault, "" where all pass; then how long they take is known."""
        before = os.times()
        failed = self.failing(room)
        after = os.times()
        cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
        self._cpu_s[room] = int(max(SLOWER * cpu_s, AT_LEAST_S))
        self._limit_s[room] = max(WAITS * (after.elapsed - before.elapsed), WAITS_S)
        return failed

    def answer(self, fault: dict[str, Any]) -> tuple[str, str]:
        """("killed", the test that noticed), ("survived", "") or ("stale", "") where the line is gone."""
        if is_stale(fault, self.root):
            return "stale", ""
        path = self.root / fault["file"]
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines(keepends=True)
        places = [index for index, line in enumerate(lines) if line.rstrip("\n") == fault["old"]]
        lines[places[fault.get("nth", 0)]] = fault["new"] + "\n"
        try:
            self._write(path, "".join(lines))
            failed = self.failing(fault["room"])
        finally:
            self._write(path, text)
        return ("killed", failed) if failed else ("survived", "")

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text, encoding="utf-8")
        self._times += 1  # byte code is kept by time and size: two faults of one second would be taken for one
        os.utime(path, (1_700_000_000 + self._times, 1_700_000_000 + self._times))

    def failing(self, room: str) -> str:
        """The first test of the room that fails, "" where all pass."""
        tests = [name for name in ROOMS[room][1] if (self.root / name.partition("::")[0]).exists()]
        log_path = self.root / "told"
        child = os.fork()
        if child == 0:
            code = 2
            try:
                if room in self._cpu_s:
                    resource.setrlimit(resource.RLIMIT_CPU, (self._cpu_s[room], self._cpu_s[room] + 5))
                code = self._run(tests, log_path)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        code = self._wait(child, self._limit_s.get(room))
        if code == 0:
            return ""
        lines = log_path.read_text("utf-8", "replace").splitlines()
        named = [line.split(" - ")[0].split(maxsplit=1)[1] for line in lines if line.startswith(("FAILED ", "ERROR "))]
        if code in (-signal.SIGXCPU, -signal.SIGKILL):
            return "no end"
        return named[0] if named else f"the tests ended with {code}"

    def _run(self, tests: list[str], log_path: Path) -> int:
        """In the child: the copy's tests, with the copy's modules."""
        os.setsid()  # what the tests start ends with them
        handle = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        os.chdir(self.root)
        os.environ["PYTHONPATH"] = str(self.root)
        hidden = {str(ROOT), str(ROOT / "tools")}
        sys.path[:] = [str(self.root), *(place for place in sys.path if place not in hidden)]
        import pytest

        code = pytest.main(["-q", "-x", *QUIET, "-p", "no:cacheprovider", "--no-header", "--tb=line", "-rfE", *tests])
        sys.stdout.flush()
        return int(code)

    @property
    def cpu_s(self) -> float:
        """CPU seconds of all tests so far."""
        return os.times().children_user + os.times().children_system

    def _wait(self, child: int, limit_s: float | None) -> int:
        end = None if limit_s is None else time.monotonic() + limit_s
        while True:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                break
            if end is not None and time.monotonic() > end:
                os.kill(child, signal.SIGKILL)
                _, status = os.waitpid(child, 0)
                break
            time.sleep(0.02)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)
        return os.waitstatus_to_exitcode(status)

    def close(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)


def main() -> int:
    """0 when at least nine in ten were noticed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--collect", action="store_true", help="draw the list anew")
    parser.add_argument("--room", choices=list(ROOMS), help="only this room")
    parser.add_argument("-n", type=int, default=None, help="only the first N")
    parser.add_argument("--cpu-seconds", type=float, default=1e9, help="stop after so many CPU seconds of tests")
    parser.add_argument("--record", type=Path, default=None, help="JSON lines of the answers; those in it stand")
    options = parser.parse_args()
    if options.collect:
        faults = collect()
        LIST.write_text("".join(json.dumps(fault) + "\n" for fault in faults), encoding="utf-8")
        print(f"{len(faults)} faults in {LIST.relative_to(ROOT)}")
        return 0
    faults = in_turn([fault for fault in read() if options.room in (None, fault["room"])])[: options.n]
    record = options.record
    answered = {}
    if record is not None and record.exists():
        answered = {_key(entry): entry for entry in map(json.loads, record.read_text(encoding="utf-8").splitlines())}
    rooms = {fault["room"] for fault in faults if _key(fault) not in answered}
    _import(LIBRARIES + (HEAVY_LIBRARIES if rooms & set(HEAVY_ROOMS) else ()))
    copy = Copy()
    counts = {room: [0, 0, 0] for room in ROOMS}
    try:
        for room in sorted(rooms):  # also what the CPU seconds and the time of each fault are held against
            if failed := copy.check(room):
                print((copy.root / "told").read_text("utf-8", "replace"))
                print(f"{room}: {failed} fails without any fault")
                return 2
        for number, fault in enumerate(faults):
            outcome = answered.get(_key(fault))
            if outcome is None:
                if copy.cpu_s > options.cpu_seconds:
                    left = len([other for other in faults[number:] if _key(other) not in answered])
                    print(f"left out: {left} of {len(faults)} faults; the same command with --record goes on")
                    break
                begun = time.monotonic()
                answer, by = copy.answer(fault)
                outcome = {**fault, "answer": answer, "by": by, "seconds": round(time.monotonic() - begun, 1)}
                if record is not None:
                    with record.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(outcome) + "\n")
            counts[fault["room"]][("killed", "survived", "stale").index(outcome["answer"])] += 1
            if outcome["answer"] != "killed":
                where = f"{fault['file']}: {fault['old'].strip()}  ->  {fault['new'].strip()}"
                print(f"{outcome['answer']} ({outcome['seconds']:.0f} s): {where}", flush=True)
    finally:
        copy.close()
    print(f"{'room':<12}{'killed':>8}{'survived':>10}{'stale':>7}")
    for room, (killed, survived, stale) in counts.items():
        if killed + survived + stale:
            print(f"{room:<12}{killed:>8}{survived:>10}{stale:>7}")
    killed, survived = (sum(row[place] for row in counts.values()) for place in (0, 1))
    total = killed + survived
    print(f"{killed} of {total} killed ({killed / total:.0%})" if total else "nothing was run")
    gone = [fault for fault in faults if is_stale(fault)]
    for stale_fault in gone:
        print(f"no longer applies: {stale_fault['file']}: {stale_fault['old'].strip()}")
    if gone:
        print(f"{len(gone)} of {len(faults)} no longer apply: --collect draws others in their place")
    return 0 if killed >= 0.9 * total and not gone else 1


def in_turn(faults: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One of each room in turn, those with a name first: any part of them is of all rooms."""
    rooms: dict[str, list[dict[str, Any]]] = {}
    for entry in sorted(faults, key=lambda fault: "name" not in fault):
        rooms.setdefault(entry["room"], []).append(entry)
    turns = [(place, number, entry) for number, each in enumerate(rooms.values()) for place, entry in enumerate(each)]
    return [entry for _, _, entry in sorted(turns, key=lambda slot: slot[:2])]


def _key(fault: dict[str, Any]) -> tuple[str, str, str, int]:
    return fault["file"], fault["old"], fault["new"], fault.get("nth", 0)


def _import(names: tuple[str, ...]) -> None:
    """What every test process would import first; with the settings of tests/conftest.py, which libraries read once."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    for name in names:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


if __name__ == "__main__":
    sys.exit(main())
