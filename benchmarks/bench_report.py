"""How long a report of 2,000 candidates takes against the plan itself, cold processes, best of several.

    python -m benchmarks.bench_report [--runs 5]

Four processes are timed: one that only imports typer and rich, `plan MODEL --gpu GPU --no-dry-run` (the plan), one
that reads a plan.json of 2,000 candidates, and one that also writes report.html and report.md from it. The bound of the
project: building the report takes less than 3 times the plan.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
NUM_CANDIDATES = 2000
BOUND = 3.0

READ = """
import sys
from pathlib import Path
from reports.plan_json import plan_from_dict, read_plan_json
plan_from_dict(read_plan_json(Path(sys.argv[1])))
"""
BUILD = """
import sys
from pathlib import Path
from reports.plan_json import read_plan_json
from reports.write import entry_of, report_files
folder = Path(sys.argv[1])
for name, text in report_files([entry_of(read_plan_json(folder))]).items():
    (folder / name).write_text(text, encoding="utf-8")
"""


def best_s(command: list[str], runs: int) -> float:
    """The shortest wall time of `runs` runs, in seconds."""
    times = []
    for _ in range(runs):
        started = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
        times.append(time.perf_counter() - started)
    return min(times)


def main() -> None:
    """Print the table as Markdown; exit 1 where the bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    from reports.plan_json import plan_to_dict
    from tests.reports.many import make_many

    python, plan = sys.executable, str(Path(sys.executable).with_name("plan"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = json.dumps(plan_to_dict(make_many(NUM_CANDIDATES)))
        (folder / "plan.json").write_text(text, encoding="utf-8")
        times = {
            "import typer, rich": best_s([python, "-c", "import typer, rich.console, rich.table"], runs),
            "the plan itself (formula, Qwen2.5-7B on RTX 4090)": best_s(
                [plan, "Qwen/Qwen2.5-7B", "--gpu", "rtx-4090", "--no-dry-run"], runs
            ),
            f"read plan.json ({NUM_CANDIDATES:,} candidates)": best_s([python, "-c", READ, name], runs),
            f"report.html + report.md ({NUM_CANDIDATES:,} candidates)": best_s([python, "-c", BUILD, name], runs),
        }
        size = (folder / "report.html").stat().st_size
    reference = list(times.values())[1]
    print("| process, cold | best of runs | times the plan |\n| --- | ---: | ---: |")
    for words, duration_s in times.items():
        print(f"| {words} | {1000 * duration_s:.0f} ms | {duration_s / reference:.2f} |")
    print(f"\nplan.json {len(text) / 1e6:.1f} MB, report.html {size / 1e6:.2f} MB.")
    sys.exit(0 if list(times.values())[3] < BOUND * reference else 1)


if __name__ == "__main__":
    main()
