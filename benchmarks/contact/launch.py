"""The emitted TRL file, run by TRL for 20 steps on a machine without network: its peak against the plan's figures.

    python -m benchmarks.contact.launch PLAN_FOLDER OUT [cpu]

The file is run as it was written. What the machine lacks is made on the spot and named on the command line, where TRL's
options win over its file's: a folder with the model's configuration and random weights, a tokenizer of a thousand
words, and texts that fill every sequence.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.contact.launched import VARIABLE, site_folder
from benchmarks.contact.readings import driver_view
from planner.children import child_environment, python_argv
from planner.models.resolve import resolve_model
from probes.gpu.environment import child_settings

FILE = "launch/trl/trl-sft.yaml"
STEPS = 20
LIMIT_S = 165.0
WORDS = 1000
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def make_model(config: Mapping[str, Any], folder: Path, device: str) -> None:
    """A model folder as `from_pretrained` reads it: random 16-bit weights, made on the device."""
    import torch
    from transformers import AutoModelForCausalLM

    from probes.stack.configs import load_config

    with torch.device(device):
        model = AutoModelForCausalLM.from_config(load_config(config), dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="5GB")
    make_tokenizer(folder)


def make_tokenizer(folder: Path) -> None:
    """A tokenizer that knows the words w0, w1, ...; every word is one token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<unk>", "<pad>", "<|end|>"]
    words = {word: number for number, word in enumerate([*special, *(f"w{index}" for index in range(WORDS))])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", pad_token="<pad>", eos_token="<|end|>"
    ).save_pretrained(folder)


def make_texts(folder: Path, num: int, num_tokens: int) -> None:
    """`num` texts, each longer than a sequence: every batch is the worst one."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "train.jsonl", "w", encoding="utf-8") as handle:
        for row in range(num):
            words = " ".join(f"w{(row * 31 + index * 7) % WORDS}" for index in range(num_tokens + 8))
            handle.write(json.dumps({"text": words}) + "\n")


def command(model: Path, texts: Path, out: Path, steps: int, device: str) -> list[str]:
    """The file's own command (its header says it), with what this machine lacks named beside. `trl` itself is started
    as its program would: wheels unpacked into a folder bring none."""
    program = python_argv("-c", "import sys; from trl.cli.main import main; sys.exit(main())")
    named = {"model_name_or_path": model, "dataset_name": texts, "output_dir": out, "max_steps": steps}
    extra: dict[str, object] = {"logging_steps": 1, "save_strategy": "no", "num_processes": 1}
    if device == "cpu":
        extra["use_cpu"] = True
    words = [word for name, value in {**named, **extra}.items() for word in (f"--{name}", str(value))]
    return [*program, "sft", "--config", FILE, *words]


def run_launched(
    plan: Path, work: Path, device: str, *, steps: int = STEPS, limit_s: float = LIMIT_S
) -> dict[str, Any]:
    """What the run showed beside what the plan said; `problem` where it did not end well."""
    document = json.loads((plan / "plan.json").read_text(encoding="utf-8"))
    chosen = document["chosen"]
    setup = chosen["setup"]
    model, texts, watched = work / "model", work / "texts", work / "watched"
    watched.mkdir(parents=True, exist_ok=True)
    spec = resolve_model(document["workload"]["model"]["model_id"])
    make_model(spec.config, model, device)
    seqs = setup["micro_batch_seqs"] * setup["accumulation_steps"] * steps
    make_texts(texts, seqs, setup["seq_len_tokens"])
    before = {} if device == "cpu" else driver_view()
    inherited = child_environment()
    environment = {
        **inherited,
        **child_settings(),
        **OFFLINE,
        "PYTHONPATH": os.pathsep.join([str(site_folder(work / "site")), inherited["PYTHONPATH"]]),
        VARIABLE: str(watched),
        **({"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"} if device == "cpu" else {}),
    }
    try:
        problem = _run(command(model, texts, work / "outputs", steps, device), plan, environment, limit_s)
    finally:
        for large in (model, work / "outputs"):
            shutil.rmtree(large, ignore_errors=True)
    seen = watched / "watched.json"
    return {
        "reading": "launched",
        "file": FILE,
        "setup": setup,
        "promised": promised(chosen),
        "driver_before": before,
        "seen": json.loads(seen.read_text(encoding="utf-8")) if seen.exists() else {},
        **({"problem": problem} if problem else {}),
    }


def _run(words: list[str], folder: Path, environment: Mapping[str, str], limit_s: float) -> str:
    child = subprocess.Popen(
        words, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=sys.stderr, stderr=sys.stderr,
        start_new_session=True,
    )  # fmt: skip
    try:
        status = child.wait(limit_s)
        return f"trl sft ended with status {status}" if status else ""
    except subprocess.TimeoutExpired:
        return f"trl sft did not end within {limit_s:g} s"
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def promised(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of every rung that the plan has."""
    keys = ("peak_allocated_bytes", "peak_reserved_bytes", "peak_device_bytes", "tokens_per_s")
    rungs = {name: one for name, one in chosen.items() if isinstance(one, dict) and one.get("peak_device_bytes")}
    return {name: {key: one.get(key) for key in keys} for name, one in rungs.items()}


def told(found: Mapping[str, Any]) -> list[str]:
    """For a person: what was seen over what was promised."""
    seen = found["seen"]
    lines = [f"the launch file did not run: {found['problem']}"] if "problem" in found else []
    if seen.get("step_s"):
        setup = found["setup"]
        step_s = median(seen["step_s"][len(seen["step_s"]) // 2 :])
        tokens = setup["micro_batch_seqs"] * setup["accumulation_steps"] * setup["seq_len_tokens"]
        between_s = median(seen["between_s"]) if seen["between_s"] else 0.0
        lines.append(
            f"{len(seen['step_s'])} steps: {step_s:.4f} s, {between_s * 1e3:.1f} ms of the trainer between two, "
            f"{tokens / (step_s + between_s):,.0f} tokens/s"
        )
    measured = dict(seen)
    if "used_bytes" in seen and "used_bytes" in found["driver_before"]:
        measured["peak_device_bytes"] = seen["used_bytes"] - found["driver_before"]["used_bytes"]
    for rung, figures in found["promised"].items():
        for key in ("peak_allocated_bytes", "peak_reserved_bytes", "peak_device_bytes"):
            if measured.get(key) and figures[key]:
                lines.append(
                    f"{key} {measured[key]}, {rung} said {figures[key]} ({figures[key] / measured[key] - 1:+.2%})"
                )
    return lines


def main(arguments: list[str]) -> int:
    """Prints the reading as one JSON line; the words for a person go to stderr."""
    plan, work = Path(arguments[0]).resolve(), Path(arguments[1]).resolve()
    device = arguments[2] if len(arguments) > 2 else "cuda:0"
    found = run_launched(plan, work, device)
    print("\n".join(told(found)), file=sys.stderr)
    print(json.dumps(found), flush=True)
    return 1 if "problem" in found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
