"""Kills of `plan trace` at random instants: what outlives it, what it leaves behind, what it changed.

    python tools/trace_kills.py 60      needs Linux; as root also as the user nobody

Each time a traced program does harm (tests/probes/phantom/test_isolation.py) in a tree of its own while the planner or
the process that keeps the program gets a signal, under either protection.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.probes.phantom.test_isolation import EACH, HARM, USERS, WITHOUT, Machine, running

SEED = 5
LONGEST_S = 2.0
"""Until a kill: start, set-up and half of the harm."""
PATIENCE_S = 60.0
KINDS = ("namespaces", "landlock")
SIGNALS = (signal.SIGKILL, signal.SIGHUP, signal.SIGTERM, signal.SIGINT)


def killed(folder: Path, dice: random.Random) -> list[str]:
    harm = dict(list(HARM.items())[:8])
    for name in ("homes", "homes-tmp"):
        (folder / name).mkdir()
    machine = Machine(folder / "homes", dice.choice(USERS), harm)
    mark = f"mark-{folder.name}"
    program = f"HARM = {harm!r}{EACH}\ntime.sleep(60)"
    command, how = machine.command(sys.executable, "-c", program, mark)
    kind = dice.choice(KINDS)
    planner = subprocess.Popen(
        [*WITHOUT[kind], *command], **how, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )  # fmt: skip
    time.sleep(dice.uniform(0, LONGEST_S))
    children = Path(f"/proc/{planner.pid}/task/{planner.pid}/children").read_text().split()
    if children and dice.random() < 0.3:
        os.kill(int(children[0]), signal.SIGKILL)
    else:
        planner.send_signal(dice.choice(SIGNALS))
    planner.wait()
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until and (running(mark) or os.listdir(machine.temporary)):
        time.sleep(0.05)
    problems = {
        "it outlived": running(mark),
        "left behind": len(os.listdir(machine.temporary)),
        "changed": int(machine.now() != machine.before),
    }
    return [f"{kind}, {machine.user or 'own user'}: {word}" for word, number in problems.items() if number]


def main() -> int:
    """Exit code 1 where anything was wrong."""
    dice, wrong, number = random.Random(SEED), [], int(sys.argv[1])
    for _ in range(number):
        folder = Path(tempfile.mkdtemp(dir="/var/tmp", prefix="kills-"))
        folder.chmod(0o755)
        try:
            wrong += killed(folder, dice)
        finally:
            subprocess.run(["chmod", "-R", "u+rwx", str(folder)], check=False)
            shutil.rmtree(folder, ignore_errors=True)
    print(f"{number} kills, {len(wrong)} faults", *wrong, sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
