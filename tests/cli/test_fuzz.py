"""A part of the corpus of hostile inputs (tools/fuzz.py has 16,000), of all kinds.

Every run is a process of its own: a fork of a test process with torch in it holds gigabytes of address space at once.
"""

import re
import subprocess
from pathlib import Path

TOOL = Path(__file__).parents[2] / "tools" / "fuzz.py"
FIRST = 8
"""Inputs of the default tests; `make fuzz` takes 2,800."""
PATIENCE_S = 1800
"""What takes this long hangs."""

LOAD = f"import sys; sys.path.insert(0, {str(TOOL.parents[1])!r}); from tools import fuzz; from pathlib import Path\n"


def _python(python: Path, code: str) -> str:
    run = subprocess.run([str(python), "-c", LOAD + code], capture_output=True, text=True, timeout=PATIENCE_S)
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout


def test_the_first_hostile_inputs_end_in_an_answer_or_a_clear_error(warm_programs: Path) -> None:
    run = subprocess.run(
        [str(warm_programs / "python"), str(TOOL), "--spread", "--first", str(FIRST)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-1000:]
    kinds = re.findall(r"(?m)^[\w. ]+ \d+$", run.stdout)
    assert len(kinds) >= FIRST // 4, run.stdout
    answers = {int(status): int(num) for status, num in re.findall(r"(\d+) \((\d+)\)", run.stdout)}
    assert set(answers) <= {0, 1, 2, 3}
    assert sum(answers.values()) == FIRST
    assert answers[0] >= FIRST // 8  # the inputs are near enough to ordinary ones


def test_an_input_is_the_same_every_time_and_a_traceback_a_hang_and_a_gigabyte_are_found(
    tmp_path: Path, warm_programs: Path
) -> None:
    first, second, *faults = _python(
        warm_programs / "python",
        f"""
for name in "ab":
    case = fuzz.case_of(17, Path({str(tmp_path)!r}, name))
    print(case.kind, case.words)

def broken():
    raise ZeroDivisionError

def endless():
    while True:
        pass

def greedy():
    return len(bytearray(fuzz.MAX_BYTES + (64 << 20)))

fuzz.seeds = fuzz.preload = lambda: None  # of which these have no need
fuzz.MAX_BYTES = 128 << 20
for call in (broken, endless, greedy):
    fuzz.LIMIT_S = 1 if call is endless else 60  # so many bytes take a busy machine its time
    fuzz.case_of = lambda number, folder: fuzz.Case("x", [], call=call)
    print(fuzz.run_one(1).fault)
""",
    ).splitlines()
    assert first.replace("/a/", "/b/") == second
    assert faults == ["traceback", "hang", "memory"]
