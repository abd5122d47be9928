"""SIGKILL at random instants of the commands that write a folder: what is torn, and whether the next call mends it.

    python tools/command_kills.py 60

Each command is run undisturbed first; then it is killed into a folder of its own and called again. Every file must be
missing or whole after the kill, and after the next call all of them as undisturbed, with nothing beside them.
"""

import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MOMENT = re.compile(rb"20\d\d-\d\d-\d\dT[\d:]{8}[+\d:Z]*")
ROOT = Path(__file__).resolve().parent.parent
SEED = 9
MODEL = "HuggingFaceTB/SmolLM2-135M"
RUN = "import sys; from finetune_planner.cli.app import run; sys.exit(run(sys.argv[1:]))"
CONFIG = (
    f"model_name_or_path: {MODEL}\ndataset_name: x/y\nper_device_train_batch_size: 2\nmax_length: 512\nbf16: true\n"
    "use_peft: true\nlora_r: 8\n"
)
COMMANDS = (
    [MODEL, "--gpu", "rtx-4090", "--no-dry-run"],
    ["which-gpu", MODEL, "--vendor", "Apple"],
    ["which-cluster", MODEL, "--gpu", "rtx-4090", "--max-gpus", "2", "--dataset-tokens", "1000000"],
    ["compare-adapters", MODEL, "--gpu", "rtx-4090"],
    ["compare-targets", MODEL, "--gpu", "rtx-4090"],
    ["race", "a.yaml", "--gpu", "rtx-4090", "--no-dry-run"],
    ["ui", "--model", MODEL, "--gpu", "rtx-4090"],
)


def start(words: list[str], out: Path) -> "subprocess.Popen[bytes]":
    place = "--static" if words[0] == "ui" else "--out"
    return subprocess.Popen(
        [sys.executable, "-P", "-c", RUN, *words, place, out.name],
        cwd=out.parent, env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def files(folder: Path) -> dict[str, bytes]:
    """What a folder holds, but for the moment at which it was made."""
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): MOMENT.sub(b"", path.read_bytes()) for path in paths}


def killed(words: list[str], place: Path, calm: dict[str, bytes], took_s: float, dice: random.Random) -> list[str]:
    """What was wrong after one kill and one more call."""
    out = place / "out"
    process = start(words, out)
    time.sleep(dice.uniform(0.4, 1.1) * took_s)
    process.kill()
    process.wait()
    after = files(out) if out.exists() else {}
    torn = [name for name, content in after.items() if name in calm and content != calm[name]]
    code = start(words, out).wait()
    repeated = files(out)
    changed = [name for name in calm if repeated.get(name) != calm[name]]
    left = sorted({*repeated} - {*calm})
    problems = {"torn": torn, "lost or changed": changed, "left behind": left, "exit code": [code] if code else []}
    return [f"{words[0]}: {what}: {names}" for what, names in problems.items() if names]


def main() -> int:
    """Exit code 1 where anything was wrong."""
    dice, wrong, calm = random.Random(SEED), list[str](), dict[int, tuple[dict[str, bytes], float]]()
    for number in range(int(sys.argv[1])):
        which = number % len(COMMANDS)
        place = Path(tempfile.mkdtemp(prefix="kills-"))
        (place / "a.yaml").write_text(CONFIG)
        try:
            if which not in calm:
                begun = time.monotonic()
                code = start(COMMANDS[which], place / "out").wait()
                assert code == 0, (COMMANDS[which], code)
                calm[which] = files(place / "out"), time.monotonic() - begun
                shutil.rmtree(place / "out")
            wrong += killed(COMMANDS[which], place, *calm[which], dice)
        finally:
            shutil.rmtree(place)
    print(f"{int(sys.argv[1])} kills, {len(wrong)} faults", *wrong, sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
