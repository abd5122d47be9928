"""A cold formula-only plan against a process that only imports typer and rich, side by side.

    python -m benchmarks.bench_startup [--rounds 15]

Both run as fresh processes in turn; least and median CPU seconds of each and their ratios are printed: wall time says
more of a busy machine than of the program. The aim is a ratio of at most 3.
Bytecode is cached as in an installed package (the first, uncounted round writes it).
"""

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
IMPORTS = [sys.executable, "-c", "import typer, rich, rich.console, rich.table"]
MODELS = ("meta-llama/Llama-3.1-8B", "Qwen/Qwen2.5-1.5B", "mistralai/Mixtral-8x7B-v0.1")


def seconds(command: list[str], environment: dict[str, str]) -> float:
    """CPU time of one process, user and system."""
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment, cwd=ROOT)
    _, child.returncode, used = os.wait4(child.pid, 0)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Measures and prints one line per model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = str(Path(os.environ.get("TMPDIR", "/tmp")) / "planner-pycache")
    for model in MODELS:
        code = f"from finetune_planner.cli.app import main; main(['{model}', '--gpu', 'a100-80gb', '--no-dry-run'])"
        command = [sys.executable, "-c", code]
        seconds(IMPORTS, environment)
        seconds(command, environment)
        imports, plans = [], []
        for _ in range(rounds):
            imports.append(seconds(IMPORTS, environment))
            plans.append(seconds(command, environment))
        for name, of in (("least", min), ("median", statistics.median)):
            base, plan = of(imports), of(plans)
            print(f"{model:32} {name:6} imports {base:.3f} s   plan {plan:.3f} s   ratio {plan / base:.2f}")


if __name__ == "__main__":
    main()
