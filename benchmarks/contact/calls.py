"""First contact with a GPU: `python -m benchmarks.contact.calls CALL` on a bare machine, ten minutes a call at most.

Four calls, each useful alone: 1 guards, raw readings and three smoke probes; 2 every model by every method; 3 one axis
at a time, and torch.compile; 4 a search, its plan and the confirmation. A call is a list of jobs with limits of their
own, run one after another until the call's budget is spent. What is done is written down at once: a call that was cut
short, or that is made again on another machine with the kept files, goes on where it stopped. Every call begins with
the guard: where torch, driver, NF4 or Triton do not work, it ends at once with exit 3.

    python -m benchmarks.contact.calls 2 --out OUT --budget 540     results in OUT, at most eight files
    python -m benchmarks.contact.calls 2 --out OUT --rehearse        the same jobs on the CPU with a tiny model
    python -m benchmarks.contact.calls 0 --out OUT --rehearse        all four calls, one after another
    python -m benchmarks.contact.plan h200                     what each call would do and take
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
from pathlib import Path

from benchmarks.contact.readings import BESIDE, IMPORT_S, LIMITS_S, TINY
from benchmarks.contact.recording import REHEARSAL, header
from benchmarks.last_run import describe_run
from planner.children import ROOT, child_environment, python_argv
from planner.errors import EXIT_BAD_INPUT, EXIT_ENVIRONMENT
from planner.records import dataclass
from probes.gpu.environment import child_settings, device_status, library_versions

CAMPAIGNS = ROOT / "campaigns"
GIVE_UP_S = 10.0
"""A job that would have less than this is left to the next call."""
LOG_BYTES = 4 << 20
COMMAND = "from planner.cli.app import main; main()"
MODEL = "Qwen/Qwen3-8B"
WISH = ("--seq-len", "2048", "--global-batch", "8")
"""Of the search and its file: 20 steps of 16,384 tokens take less than a minute."""
READINGS = ("trainer", "known", "teardown", "refusals", "attention", "rates", "traces")
"""Raw readings of the first call (`benchmarks.contact.readings`); of the third it is "compile"."""
ON_A_CPU = ("trainer", "refusals", "rates", "traces")
NEEDED = ("gpus", "triton", "nf4")
"""The doctor's checks without which nothing here is worth the machine's time."""

Clock = Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One thing a call does.

    Attributes:
        words: of the child's command after the interpreter.
        limit_s: it is ended after this long; a campaign is given it as its budget.
        resumes: it knows itself what is done already (a campaign, readings by name): it is run in every call.
        makes: what later jobs need of it and does not travel: without it here, it is not done.
    """

    name: str
    words: tuple[str, ...]
    limit_s: float
    resumes: bool = False
    makes: Path | None = None


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
        """Raw readings, one JSON line each (`benchmarks.contact.recording`)."""
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

    @property
    def snapshot(self) -> Path:
        """PyTorch's own memory snapshot of the launch file's run."""
        return self.folder / "snapshot.pickle.gz"

    @property
    def last_run(self) -> Path:
        """On what, and of which files, the latest call ran (`benchmarks.last_run`)."""
        return self.folder / "last_gpu_run.json"

    def all(self) -> tuple[Path, ...]:
        """At most eight."""
        return (
            self.store,
            self.readings,
            self.jobs,
            self.log,
            self.plan,
            self.confirmed,
            self.snapshot,
            self.last_run,
        )

    def read(self) -> set[str]:
        """Names of the readings that ended well."""
        if not self.readings.exists():
            return set()
        lines = [json.loads(line) for line in self.readings.read_text(encoding="utf-8").splitlines() if line.strip()]
        return {one["reading"] for one in lines if one.get("ended") == 0}

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
    device = "cpu" if rehearse else "cuda:0"
    on = ("--device", "cpu") if rehearse else ()

    def campaign(name: str, limit_s: float) -> Job:
        spec = rehearsed_spec(name, kept.folder) if rehearse else CAMPAIGNS / f"contact-{name}.yaml"
        words = plan_words("campaign", str(spec), "--store", str(kept.store), "--ahead", "3", *on)
        return Job(name=name, words=words, limit_s=limit_s, resumes=True)

    def readings(name: str, wanted: Sequence[str]) -> tuple[Job, ...]:
        left = [one for one in wanted if one not in kept.read()]
        limit_s = IMPORT_S + sum(LIMITS_S[one] for one in left if one not in BESIDE)
        words = ("-m", "benchmarks.contact.readings", ",".join(left), device, str(REHEARSED_SLOWER if rehearse else 1))
        return (Job(name=name, words=words, limit_s=limit_s, resumes=True),) if left else ()

    if call == 1:
        return (*readings("readings", ON_A_CPU if rehearse else READINGS), campaign("smoke", 110.0))
    if call == 2:
        return (campaign("models", 540.0),)
    if call == 3:
        return (campaign("axes", 370.0), *readings("compile", ("compile",)))
    return _tuning(kept, rehearse, device)


def _tuning(kept: Kept, rehearse: bool, device: str) -> tuple[Job, ...]:
    """The fourth call: a tune, its choice confirmed, and its launch file run."""
    on = ("--device", "cpu") if rehearse else ()
    out = str(kept.folder / "tuned")
    gpu = ("--gpu", "rtx-4090", "--seq-len", "64", "--global-batch", "4") if rehearse else (*WISH, "--gpu", "local")
    model = _tiny_model(kept.folder) if rehearse else MODEL
    search = ("--out", out, "--store", str(kept.store), *(("--max-probes", "2") if rehearse else ()))
    store = ("--store", str(kept.store))
    return (
        Job(
            name="tune",
            words=plan_words("tune", model, *gpu, *search, "--budget", "190s", *on),
            limit_s=235.0,
            makes=Path(out) / "plan.json",
        ),
        Job(name="confirm", words=plan_words("confirm", out, *store, "--json", *on), limit_s=100.0),
        Job(
            name="launched",
            words=("-m", "benchmarks.contact.launch", out, str(kept.folder / "launched"), device),
            limit_s=175.0,
        ),
    )


REHEARSED_SLOWER = 4
"""A rehearsal's limits over those of a GPU machine: two cores may be all there is, and busy."""


def rehearsed_spec(name: str, folder: Path) -> Path:
    """A campaign's own file with the tiny model in place of every other, short sequences and short limits."""
    import yaml

    text = (CAMPAIGNS / f"contact-{name}.yaml").read_text(encoding="utf-8")
    spec = json.loads(json.dumps(yaml.safe_load(text)))  # what the file names twice is two things from here on
    spec["limits"] = {"time_s": 120, "measure_s": 0.4, "min_measure_s": 0.1, "window_steps": 1, "max_steps": 4}
    for block in spec["blocks"]:
        block["models"] = [{"name": "tiny", **TINY}]
        block.pop("memory_gib", None)
        for fields in (block["base"], *block["variants"]):
            if "seq_len_tokens" in fields:
                fields["seq_len_tokens"] //= 16
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rehearsed-{name}.yaml"
    path.write_text(yaml.safe_dump(spec), encoding="utf-8")
    return path


def _tiny_model(folder: Path) -> str:
    place = folder / "tiny"
    place.mkdir(parents=True, exist_ok=True)
    (place / "config.json").write_text(json.dumps(TINY))
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


def source_of(rehearse: bool) -> str:
    """On what this call runs, for the header of its readings."""
    if rehearse:
        return REHEARSAL
    from planner.hardware.driver import nvml, text

    status = device_status("cuda:0")
    with nvml() as module:
        driver = text(module.nvmlSystemGetDriverVersion()) if module is not None else "unknown"
    return f"{status.name if status else 'unknown GPU'}, driver {driver}, torch {library_versions().get('torch', '')}"


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
    if rehearse:
        budget_s *= REHEARSED_SLOWER
    started = clock()
    kept.folder.mkdir(parents=True, exist_ok=True)
    problem = guard(rehearse)
    if problem:
        say(f"this machine cannot measure: {problem}")
        return EXIT_ENVIRONMENT
    source = source_of(rehearse)
    _append(kept.readings, header(source, call=call, libraries=library_versions()))
    if not rehearse:
        kept.last_run.write_text(json.dumps(describe_run(source), indent=1) + "\n", encoding="utf-8")
    done = kept.done()
    for job in jobs_of(call, kept, rehearse=rehearse):
        left_s = budget_s - (clock() - started)
        if job.name in done and not job.resumes and (job.makes is None or job.makes.exists()):
            say(f"{job.name}: done before")
            continue
        if left_s < GIVE_UP_S:
            say(f"{job.name}: left to the next call")
            continue
        began, limit_s = clock(), job.limit_s * (REHEARSED_SLOWER if rehearse else 1)
        status = (run or run_job)(job, min(limit_s, left_s), kept)
        took_s = clock() - began
        _append(kept.jobs, {"job": job.name, "call": call, "status": status, "seconds": round(took_s, 1)})
        say(f"{job.name}: status {status}, {took_s:.0f} s")
        if status == EXIT_ENVIRONMENT and "campaign" in job.words:
            return EXIT_ENVIRONMENT
    return 0


def run_job(job: Job, limit_s: float, kept: Kept) -> int:
    """One job in a process group of its own, ended at its limit; its exit status, 124 when it was ended.

    A campaign is told its limit as a budget less the time a last probe may take to be given up.
    """
    words = job.words
    if "campaign" in words:
        words = (*words, "--budget", f"{max(5.0, limit_s - GIVE_UP_S):g}s")
    reading = words[:1] == ("-m",)
    environment = {**child_environment(), **child_settings(), "PYTHONUNBUFFERED": "1"}
    environment |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
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
    made = {"tuned/plan.json": kept.plan, "launched/watched/snapshot.pickle.gz": kept.snapshot}
    for name, place in made.items():
        if (kept.folder / name).exists():
            shutil.copyfile(kept.folder / name, place)
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
    parser.add_argument("call", choices=["0", "1", "2", "3", "4"], help="0: all four, for a rehearsal")
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
    calls = (1, 2, 3, 4) if args.call == "0" else (int(args.call),)
    try:
        return max(run_call(call, kept, budget_s=args.budget, rehearse=args.rehearse) for call in calls)
    finally:
        for path in deliver(kept, args.out):
            print(path)


if __name__ == "__main__":
    sys.exit(main())
