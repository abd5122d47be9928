"""Fifteen minutes of one lent GPU: `python -m benchmarks.contact.lease OUT [--seconds 520] [--only a,b]`.

In order of worth, each useful alone, written down at once: the prices of single operators, TRL's own trainers by setup
with one step of each profiled (`steps.CASES`), `plan tune` that ends with its own file's run. Children import while
others measure (`staged`). What comes back: steps.jsonl, prices.jsonl, profiles.jsonl.gz, tuned/, log.txt, facts.json.
"""

import argparse
import gzip
import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from benchmarks.contact.staged import Stage
from benchmarks.contact.steps import CASES, FLA
from planner.core.children import child_environment, python_argv
from planner.core.errors import EXIT_ENVIRONMENT

WORK = Path("/tmp/contact-work")
OFFLINE = {
    "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
}  # fmt: skip
TUNED_S = 130.0
"""Kept for `plan tune` with the run of its own file, which follows the steps."""
TUNED = ("tune", "Qwen/Qwen3-0.6B", "--seq-len", "2048", "--max-probes", "4", "--budget", "110s", "--confirm-run")


def facts(device: str) -> dict[str, object]:
    """On what this runs; `problem` where it cannot."""
    code = (
        "import json,torch,platform;d=torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None;"
        "torch.ones(8,device='cuda:0').sum().item() if d else None;"
        "import transformers,trl,peft,bitsandbytes,accelerate,datasets;"
        "v=__import__('importlib.metadata',fromlist=['version']).version;"
        "n=['torch','transformers','trl','peft','bitsandbytes','accelerate','datasets'];"
        "n+=['liger-kernel','triton'] if d else [];"
        "print(json.dumps({'gpu':d.name if d else 'cpu','memory_bytes':d.total_memory if d else 0,"
        "'versions':{x:v(x) for x in n},'python':platform.python_version()}))"
    )
    done = subprocess.run(
        python_argv("-c", code), capture_output=True, text=True, env={**child_environment(), **OFFLINE}
    )
    if done.returncode:
        return {"problem": done.stderr[-1500:]}
    machine: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    smi = "timestamp,name,driver_version,clocks.sm,clocks.mem,power.limit,temperature.gpu"
    if device != "cpu":
        seen = subprocess.run(
            ["nvidia-smi", f"--query-gpu={smi}", "--format=csv,noheader"], capture_output=True, text=True
        )
        machine["nvidia_smi"] = seen.stdout.strip()
    machine["cpus"] = os.cpu_count()
    with open("/proc/cpuinfo", encoding="utf-8") as handle:
        machine["cpu"] = next((line.partition(":")[2].strip() for line in handle if line.startswith("model name")), "")
    return machine


ENDING_S = 20.0
"""For `plan tune` to end its child and put its trial back."""


def _tune(out: Path, device: str, limit_s: float) -> int:
    """The status of `plan tune`, 124 at its limit; its answer lies in `out`."""
    card = ("--gpu", "rtx-4090" if device == "cpu" else "local", "--device", device)
    words = (*TUNED, *card, "--out", str(out.resolve() / "tuned"))
    command = python_argv("-c", "from finetune_planner import main; main()", *words)
    environment = {**child_environment(), **OFFLINE}
    with (
        open(out / "log.txt", "ab") as log,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment) as child,
    ):
        try:
            return child.wait(limit_s)
        except subprocess.TimeoutExpired:
            child.terminate()  # it ends what it started, which would keep the card: killed, it could not
            with suppress(subprocess.TimeoutExpired):
                child.wait(ENDING_S)
            child.kill()
            return 124


def gather(out: Path) -> int:
    """Packs the profiles that are condensed so far; their number."""
    tables = sorted(WORK.glob("profile-*.json"))
    with gzip.open(out / "profiles.jsonl.gz", "wt", encoding="utf-8") as handle:
        for table in tables:
            handle.write(table.read_text(encoding="utf-8") + "\n")
    return len(tables)


def main() -> int:
    """Runs what the time allows; 3 where the machine cannot measure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=520.0)
    parser.add_argument("--only", default="")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--fla", default="")
    given = parser.parse_args()
    began = time.monotonic()
    deadline = began + given.seconds
    out: Path = given.out
    out.mkdir(parents=True, exist_ok=True)
    WORK.mkdir(parents=True, exist_ok=True)
    machine = facts(given.device)
    (out / "facts.json").write_text(json.dumps(machine, indent=1), encoding="utf-8")
    print(json.dumps(machine), flush=True)
    if "problem" in machine:
        return EXIT_ENVIRONMENT
    steps = WORK / "steps.jsonl"
    steps.unlink(missing_ok=True)
    (out / "steps.jsonl").unlink(missing_ok=True)
    steps.symlink_to((out / "steps.jsonl").resolve())
    names = [name for name in given.only.split(",") if name] or ["prices", *CASES, "tuned"]
    children = []
    for name in names:
        if name.startswith("prices"):
            parts = name.split(":")[1:]  # prices, prices:host, ...
            words = ("-m", "benchmarks.contact.price_readings", str(out.resolve() / "prices.jsonl"), *parts)
            children.append((name, words, OFFLINE, 110.0))
        elif name in CASES and (name != FLA or given.fla):
            variables = dict(OFFLINE)
            if name == FLA:
                variables["FLA_PATH"] = given.fla
            words = ("-m", "benchmarks.contact.steps", name, str(WORK), given.device)
            children.append((name, words, variables, float(CASES[name]["limit_s"])))
    tunes = "tuned" in names
    Stage(out / "log.txt").run(children, deadline - TUNED_S * tunes - 6.0)
    if tunes and deadline - time.monotonic() > 25:
        print(f"tuned: status {_tune(out, given.device, deadline - time.monotonic() - 8.0)}", flush=True)
    while time.monotonic() < deadline and list(WORK.glob("work-*/trace.json")):
        time.sleep(0.5)
    print(f"{gather(out)} profiles, {time.monotonic() - began:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
