"""A cold formula-only plan against a process that only imports typer and rich, side by side.

    python benchmarks/bench_startup.py [--rounds 15]

Both run as fresh processes in turn; the median of each and their ratio are printed. The aim is a ratio of at most 3.
Bytecode is cached as in an installed package (the first, uncounted round writes it).
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
IMPORTS = [sys.executable, "-c", "import typer, rich, rich.console, rich.table"]
MODELS = ("meta-llama/Llama-3.1-8B", "Qwen/Qwen2.5-1.5B", "mistralai/Mixtral-8x7B-v0.1")


def seconds(command: list[str], environment: dict[str, str]) -> float:
    """Wall time of one process."""
    started = time.perf_counter()
    subprocess.run(command, check=False, capture_output=True, env=environment, cwd=ROOT)
    return time.perf_counter() - started


def main() -> None:
    """Measures and prints one line per model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = str(Path(os.environ.get("TMPDIR", "/tmp")) / "planner-pycache")
    for model in MODELS:
        code = f"from planner.cli.app import main; main(['{model}', '--gpu', 'a100-80gb', '--no-dry-run'])"
        command = [sys.executable, "-c", code]
        seconds(IMPORTS, environment)
        seconds(command, environment)
        imports, plans = [], []
        for _ in range(rounds):
            imports.append(seconds(IMPORTS, environment))
            plans.append(seconds(command, environment))
        base, plan = statistics.median(imports), statistics.median(plans)
        print(f"{model:32} imports {1000 * base:6.0f} ms   plan {1000 * plan:6.0f} ms   ratio {plan / base:.2f}")


if __name__ == "__main__":
    main()
