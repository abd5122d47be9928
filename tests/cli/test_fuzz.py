"""A part of the corpus of hostile inputs (tools/fuzz.py has 16,000), of all kinds.

Every run is a process of its own: a fork of a test process with torch in it holds gigabytes of address space at once.
"""

import re
import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[2] / "tools" / "fuzz.py"
FIRST = 16
"""Inputs of the default tests: some three CPU seconds."""
PATIENCE_S = 1800
"""What takes this long hangs."""

LOAD = f"import sys; sys.path.insert(0, {str(TOOL.parent)!r}); import fuzz; from pathlib import Path\n"


def _python(code: str) -> str:
    run = subprocess.run([sys.executable, "-c", LOAD + code], capture_output=True, text=True, timeout=PATIENCE_S)
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout


def test_the_first_hostile_inputs_end_in_an_answer_or_a_clear_error() -> None:
    run = subprocess.run(
        [sys.executable, str(TOOL), "--spread", "--first", str(FIRST)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-1000:]
    kinds = re.findall(r"(?m)^[\w. ]+ \d+$", run.stdout)
    assert len(kinds) >= 8, run.stdout
    answers = {int(status): int(num) for status, num in re.findall(r"(\d+) \((\d+)\)", run.stdout)}
    assert set(answers) <= {0, 1, 2, 3}
    assert sum(answers.values()) == FIRST
    assert answers[0] >= FIRST // 8  # the inputs are near enough to ordinary ones


def test_an_input_is_the_same_every_time(tmp_path: Path) -> None:
    words = [
        _python(f"case = fuzz.case_of(17, Path({str(tmp_path / name)!r})); print(case.kind, case.words)")
        for name in ("a", "b")
    ]
    assert words[0].replace("/a/", "/b/") == words[1]


def test_a_traceback_a_hang_and_a_gigabyte_are_found() -> None:
    found = _python("""
def broken():
    raise ZeroDivisionError

def endless():
    while True:
        pass

def greedy():
    return len(bytearray(fuzz.MAX_BYTES + (64 << 20)))

fuzz.seeds = fuzz.preload = lambda: None  # of which these have no need
fuzz.MAX_BYTES = 256 << 20
for call in (broken, endless, greedy):
    fuzz.LIMIT_S = 1 if call is endless else 60  # so many bytes take a busy machine its time
    fuzz.case_of = lambda number, folder: fuzz.Case("x", [], call=call)
    print(fuzz.run_one(1).fault)
""")
    assert found.split() == ["traceback", "hang", "memory"]
