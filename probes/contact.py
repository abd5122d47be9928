"""First contact with a GPU: `python -m probes.contact CALL`, on a bare machine, in calls of at most ten minutes.

Four calls, each useful alone: 1 guards, raw readings and three smoke probes; 2 every model by every method; 3 one axis
at a time; 4 a search, its plan and the confirmation. A call is a list of jobs with limits of their own, run one after
another until the call's budget is spent. What is done is written down at once: a call that was cut short, or that is
made again on another machine with the kept files, goes on where it stopped. Every call begins with the guard: where
torch, driver, NF4 or Triton do not work, it ends at once with exit 3.

    python -m probes.contact 2 --out OUT --budget 540     results in OUT, at most eight files
    python -m probes.contact 2 --out OUT --rehearse        the same jobs on the CPU with a tiny model
    python -m probes.contact_plan h200                     what each call would do and take
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from planner.children import ROOT, child_environment, python_argv
from planner.errors import EXIT_BAD_INPUT, EXIT_ENVIRONMENT
from probes.environment import child_settings

CAMPAIGNS = ROOT / "campaigns"
GIVE_UP_S = 10.0
"""A job that would have less than this is left to the next call."""
LOG_BYTES = 4 << 20
COMMAND = "from planner.cli.app import main; main()"
MODEL = "Qwen/Qwen3-8B"
NEEDED = ("gpus", "triton", "nf4")
"""The doctor's checks without which nothing here is worth the machine's time."""

Clock = Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One thing a call does.

    Attributes:
        words: of the child's command after the interpreter.
        limit_s: it is ended after this long; a campaign is given it as its budget.
        resumes: it knows itself what is done already (a campaign, a study): it is run in every call.
    """

    name: str
    words: tuple[str, ...]
    limit_s: float
    resumes: bool = False


@dataclass(frozen=True, slots=True)
class Kept:
    """The files of a first contact; they travel back, are committed, and come along with the next call."""

    folder: Path

    @property
    def store(self) -> Path:
        """Every probe's outcome."""
        return self.folder / "store.jsonl"

    @property
    def readings(self) -> Path:
        """Raw readings, one JSON line each."""
        return self.folder / "readings.jsonl"

    @property
    def jobs(self) -> Path:
        """What was run, how it ended and what it took."""
        return self.folder / "jobs.jsonl"

    @property
    def log(self) -> Path:
        """What the jobs printed, its latest part."""
        return self.folder / "log.txt"

    @property
    def plan(self) -> Path:
        """The searched plan."""
        return self.folder / "plan.json"

    @property
    def confirmed(self) -> Path:
        """The plan held to its promise."""
        return self.folder / "confirmed.json"

    def all(self) -> tuple[Path, ...]:
        """At most eight."""
        return (self.store, self.readings, self.jobs, self.log, self.plan, self.confirmed)

    def done(self) -> set[str]:
        """Names of the jobs that ended well."""
        if not self.jobs.exists():
            return set()
        lines = [json.loads(line) for line in self.jobs.read_text(encoding="utf-8").splitlines() if line.strip()]
        return {one["job"] for one in lines if one["status"] == 0}


def plan_words(*words: str) -> tuple[str, ...]:
    """A command of this project, for `python_argv`."""
    return ("-c", COMMAND, *words)


def jobs_of(call: int, kept: Kept, *, rehearse: bool = False) -> tuple[Job, ...]:
    """What one call does, in order. Limits add up to less than ten minutes; the budget cuts what is left."""
    device = ("--device", "cpu") if rehearse else ()

    def campaign(name: str, limit_s: float) -> Job:
        spec = CAMPAIGNS / f"contact-{'rehearsal' if rehearse else name}.yaml"
        words = plan_words("campaign", str(spec), "--store", str(kept.store), "--ahead", "3", *device)
        return Job(name=name, words=words, limit_s=limit_s, resumes=True)

    def reading(name: str, limit_s: float) -> Job:
        words = ("-m", "probes.contact_readings", name, "cpu" if rehearse else "cuda:0")
        return Job(name=name, words=words, limit_s=limit_s)

    if call == 1:
        names = ("rates",) if rehearse else ("known", "teardown", "refusals", "attention", "rates")
        limits = {"known": 30.0, "teardown": 40.0, "refusals": 90.0, "attention": 40.0, "rates": 30.0}
        return (*(reading(name, limits[name]) for name in names), campaign("smoke", 120.0))
    if call == 2:
        return (campaign("models", 540.0),)
    if call == 3:
        return (campaign("axes", 540.0),)
    out = kept.folder / "tuned"
    gpu = ("--gpu", "rtx-4090", "--seq-len", "64", "--global-batch", "4") if rehearse else ("--gpu", "local")
    model = _tiny_model(kept.folder) if rehearse else MODEL
    search = ("--out", str(out), "--store", str(kept.store), *(("--max-probes", "2") if rehearse else ()))
    return (
        Job(
            name="tune",
            words=plan_words("tune", model, *gpu, *search, "--budget", "300s", *device),
            limit_s=360.0,
        ),
        Job(
            name="confirm",
            words=plan_words("confirm", str(out), "--store", str(kept.store), "--json", *device),
            limit_s=180.0,
        ),
    )


def _tiny_model(folder: Path) -> str:
    place = folder / "tiny"
    place.mkdir(parents=True, exist_ok=True)
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 10, "vocab_size": 4096}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **sizes, **heads}
    (place / "config.json").write_text(json.dumps(config))
    return str(place)


def guard(rehearse: bool) -> str:
    """Why nothing should be measured here; empty where all that is needed works."""
    from probes.doctor import ask_torch

    facts = ask_torch()
    if rehearse:
        return "" if facts.get("torch") else str(facts["problems"])
    missing = [name for name in NEEDED if not facts.get(name)]
    words = [f"{name}: {facts['problems'].get(name, facts.get('driver_says') or 'does not work')}" for name in missing]
    return "; ".join(words)


def run_call(
    call: int,
    kept: Kept,
    *,
    budget_s: float,
    rehearse: bool = False,
    run: Callable[[Job, float, Kept], int] | None = None,
    clock: Clock = time.monotonic,
    say: Callable[[str], None] = print,
) -> int:
    """Runs what of a call is left until its budget is spent; 0, or 3 where guard or campaign find the machine unfit."""
    started = clock()
    kept.folder.mkdir(parents=True, exist_ok=True)
    problem = guard(rehearse)
    if problem:
        say(f"this machine cannot measure: {problem}")
        return EXIT_ENVIRONMENT
    done = kept.done()
    for job in jobs_of(call, kept, rehearse=rehearse):
        left_s = budget_s - (clock() - started)
        if job.name in done and not job.resumes:
            say(f"{job.name}: done before")
            continue
        if left_s < GIVE_UP_S:
            say(f"{job.name}: left to the next call")
            continue
        began = clock()
        status = (run or run_job)(job, min(job.limit_s, left_s), kept)
        took_s = clock() - began
        _append(kept.jobs, {"job": job.name, "call": call, "status": status, "seconds": round(took_s, 1)})
        say(f"{job.name}: status {status}, {took_s:.0f} s")
        if status == EXIT_ENVIRONMENT and job.resumes:
            return EXIT_ENVIRONMENT
    return 0


def run_job(job: Job, limit_s: float, kept: Kept) -> int:
    """One job in a process group of its own, ended at its limit; its exit status, 124 when it was ended.

    A campaign is told its limit as a budget less the time a last probe may take to be given up.
    """
    words = job.words
    if "campaign" in words:
        words = (*words, "--budget", f"{max(5.0, limit_s - GIVE_UP_S):g}s")
    reading = "probes.contact_readings" in words
    environment = {**child_environment(), **child_settings(), "PYTHONUNBUFFERED": "1"}
    with open(kept.log, "ab") as log:
        log.write(f"\n== {job.name}\n".encode())
        log.flush()
        answer = kept.readings if reading else kept.confirmed if job.name == "confirm" else None
        out = open(answer, "ab") if answer is not None else log  # noqa: SIM115
        try:
            child = subprocess.Popen(
                python_argv(*words), stdin=subprocess.DEVNULL, stdout=out, stderr=log, env=environment,
                start_new_session=True,
            )  # fmt: skip
            try:
                return child.wait(limit_s)
            except subprocess.TimeoutExpired:
                return 124
            finally:
                if child.poll() is None:
                    os.killpg(child.pid, signal.SIGINT)  # a campaign ends its own children then
                    try:
                        child.wait(GIVE_UP_S / 2)
                    except subprocess.TimeoutExpired:
                        os.killpg(child.pid, signal.SIGKILL)
                        child.wait()
        finally:
            if answer is not None:
                out.close()


def _append(path: Path, value: dict[str, object]) -> None:
    with open(path, "a", encoding="utf-8") as handle:
        handle.write(json.dumps(value) + "\n")


def deliver(kept: Kept, out: Path) -> list[Path]:
    """Copies what there is into the folder that travels back; the log's latest part."""
    found = kept.folder / "tuned" / "plan.json"
    if found.exists():
        shutil.copyfile(found, kept.plan)
    out.mkdir(parents=True, exist_ok=True)
    sent = []
    for path in kept.all():
        if path.exists() and path.stat().st_size:
            data = path.read_bytes()
            (out / path.name).write_bytes(data[-LOG_BYTES:] if path == kept.log else data)
            sent.append(out / path.name)
    return sent


def bring(kept: Kept, earlier: Path) -> None:
    """Takes over what earlier calls brought back, where this machine has none of it."""
    kept.folder.mkdir(parents=True, exist_ok=True)
    for path in kept.all():
        if (earlier / path.name).exists() and not path.exists():
            shutil.copyfile(earlier / path.name, path)


def main(arguments: Sequence[str] | None = None) -> int:
    """One call."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("call", choices=["1", "2", "3", "4"])
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "out")) / "contact")
    parser.add_argument("--work", type=Path, default=Path("out") / "contact-work", help="kept on a warm machine")
    parser.add_argument("--earlier", type=Path, default=ROOT / "benchmarks" / "data" / "contact")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds of this call")
    parser.add_argument("--rehearse", action="store_true")
    args = parser.parse_args(arguments)
    if args.budget <= GIVE_UP_S:
        print(f"--budget must be above {GIVE_UP_S:g} s", file=sys.stderr)
        return EXIT_BAD_INPUT
    kept = Kept(args.work)
    bring(kept, args.earlier)
    try:
        return run_call(int(args.call), kept, budget_s=args.budget, rehearse=args.rehearse)
    finally:
        for path in deliver(kept, args.out):
            print(path)


if __name__ == "__main__":
    sys.exit(main())
