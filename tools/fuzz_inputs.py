"""Ordinary inputs of every command, and what is hostile of them: one maker a kind (`fuzz`)."""

import contextlib
import io
import json
import os
import random
import shutil
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

MODEL = "HuggingFaceTB/SmolLM2-135M"
GPU = "rtx-4090"
NASTY: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 4, 64, "yes", "bf16", "4", 2**31, 2**63, 10**30, -(10**30), 0.5, -0.0, 1e308,
    float("nan"), float("inf"), "", " ", "no", "auto", "\ud800", "\x00", "\x1b]0;x\x07\x1b[2J", "\u202e",
    "'; rm -rf ~ #", "$(id)", "../../etc/passwd",
    "x" * 10_000, "9" * 5_000, [], {}, [[]], {"a": 1}, [None], [{"a": []}], ["\ud800"], {"\ud800": 1}, {"": ""},
    list(range(50)), "2024-13-45", "0x" + "f" * 3000, "!!python/name:os.system", "1e999", "https://u:p@h/",
)  # fmt: skip
RAW = (
    b"NaN",
    b"1e999",
    b"9" * 5000,
    b'"\\ud800"',
    b"\xff\xfe",
    b"\x00",
    b"[" * 3000,
    b"{" * 3000,
    b"\xef\xbb\xbf",
    b"]",
)


def mutate(value: Any, dice: random.Random) -> Any:
    """The value with one to three places changed: replaced, removed, renamed, doubled or nested."""
    value = json.loads(json.dumps(value))
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        places = list(_places(value))
        if not places:
            return deepcopy(dice.choice(NASTY))
        parent, key = dice.choice(places)
        what = dice.random()
        if what < 0.6:
            parent[key] = deepcopy(dice.choice(NASTY))  # else the next change may put it into itself
        elif what < 0.75 and isinstance(parent, dict):
            del parent[key]
        elif what < 0.85 and isinstance(parent, dict):
            parent[str(dice.choice(NASTY))[:200]] = parent.pop(key)
        elif what < 0.93:
            parent[key] = [parent[key]] * dice.choice((0, 1, 2, 300))
        else:
            nested: Any = parent[key]
            for _ in range(dice.choice((1, 50, 300))):
                nested = {"x": nested} if dice.random() < 0.5 else [nested]
            parent[key] = nested
    return value


def _places(value: Any) -> Any:
    if isinstance(value, dict):
        for key in list(value):
            yield value, key
            yield from _places(value[key])
    elif isinstance(value, list):
        for index in range(len(value)):
            yield value, index
            yield from _places(value[index])


def damage(content: bytes, dice: random.Random) -> bytes:
    """The bytes cut, doubled, swapped, or with something raw in them."""
    at = dice.randrange(len(content) + 1)
    what = dice.randrange(6)
    if what == 0:
        return content[:at]
    if what == 1:
        return content[:at] + dice.choice(RAW) + content[at:]
    if what == 2:
        return content[:at] + bytes(dice.randrange(256) for _ in range(dice.randint(1, 30))) + content[at:]
    if what == 3:
        return content[:at] + content[at + dice.randint(1, 40) :]
    if what == 4:
        return content + content[:at]
    return content.decode("utf-8", "replace").encode(dice.choice(("utf-16", "utf-32", "latin-1", "cp037")), "replace")


def put(path: Path, content: bytes, dice: random.Random) -> Path:
    """Writes the file; one in twenty is something else of that name: a pipe, a device, a folder, a link, a hole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    odd = dice.randrange(160)
    if odd == 0:
        os.mkfifo(path)
    elif odd == 1:
        path.symlink_to("/dev/zero")
    elif odd == 2:
        path.mkdir()
    elif odd == 3:
        path.symlink_to(path.name)
    elif odd == 4:
        with open(path, "wb") as file:
            file.truncate(3 << 30)
    elif odd == 5:
        path.symlink_to("/dev/tty")
    elif odd == 6:
        path.symlink_to("/proc/self/mem")
    else:
        path.write_bytes(content)
    return path


def as_json(value: Any, dice: random.Random) -> bytes:
    """JSON text, sometimes damaged."""
    text = json.dumps(value, indent=dice.choice((None, 1))).encode()
    return damage(text, dice) if dice.random() < 0.3 else text


def as_yaml(value: Any, dice: random.Random) -> bytes:
    """YAML text with tags, anchors and bombs here and there, sometimes damaged."""
    import yaml

    with contextlib.suppress(Exception):
        text = yaml.safe_dump(value, sort_keys=False, allow_unicode=True).encode("utf-8", "backslashreplace")
        extra = dice.random()
        if extra < 0.12:
            levels = [b"b0: &b0 {x: 1}"]
            levels += [
                f"b{n}: &b{n} {{<<: [{', '.join([f'*b{n - 1}'] * 9)}], k{n}: 1}}".encode()
                for n in range(1, dice.randint(2, 12))
            ]
            text += b"\n".join(levels) + b"\n"
        elif extra < 0.3:
            tag = dice.choice(
                ("!!bool x", "!!int x", "!!float x", "!!timestamp x", "!!binary x", "!!set {a}", "!!omap [a]",
                 "!!null x",
                 "!!python/object/apply:os.system [id]", "&a [*a]", "*missing", "!foo bar", "0b12", "1:60:60",
                 "2024-13-01",
                 "0x" + "f" * 4000, "? [a]", "|\n  x", ".inf", "-.nan", "<<: 3", "\t- x")
            )  # fmt: skip
            text += f"extra: {tag}\n".encode()
        return damage(text, dice) if dice.random() < 0.25 else text
    return as_json(value, dice)


@dataclass
class Case:
    """One input: the words of a command, or a function to call; what the environment adds."""

    kind: str
    words: list[str]
    call: Callable[[], object] | None = None
    environment: dict[str, str] | None = None
    stdin: bytes = b""


Maker = Callable[[Path, random.Random], Case]


class Seeds:
    """Ordinary inputs, made once; everything hostile is made of these."""

    def __init__(self) -> None:
        from planner.models import catalogue

        names = ["HuggingFaceTB/SmolLM2-135M", "google/gemma-3-4b-it", "Qwen/Qwen3-30B-A3B", "openai-community/gpt2"]
        names += ["google-t5/t5-small", "bigscience/bloom-560m", "openai/gpt-oss-20b", "deepseek-ai/DeepSeek-V3"]
        names += ["tiiuae/falcon-7b", "meta-llama/Llama-4-Scout-17B-16E", "Qwen/Qwen3-Next-80B-A3B-Instruct"]
        self.configs = [dict(spec.config) for name in names if (spec := catalogue.load(name)) is not None]
        self.setup: dict[str, Any] = {
            "model": MODEL, "gpu": GPU, "method": "lora", "lora_rank": 8, "lora_targets": ["q_proj", "v_proj"],
            "optimizer": "adamw-8bit", "attention": "sdpa", "checkpointing": True, "seq_len_tokens": 512,
            "micro_batch_seqs": 2, "lora_dropout": 0.1, "packing": False, "precision": "bf16-autocast",
            "objective": "dpo", "adapter": "rslora", "kernels": "liger", "activation_offload": True,
            "quantize_experts": False, "modules_to_save": ["lm_head"],
        }  # fmt: skip
        self.trl = {
            "model_name_or_path": MODEL, "use_peft": True, "lora_r": 16, "lora_target_modules": ["q_proj"],
            "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "max_length": 1024, "bf16": True,
            "optim": "adamw_torch_fused", "gradient_checkpointing": True, "dtype": "bfloat16", "packing": False,
            "model_init_kwargs": {"attn_implementation": "sdpa", "quantization_config": {"load_in_4bit": True}},
            "fsdp": "full_shard", "fsdp_config": {"version": 2}, "deepspeed": "ds.json", "dataset_name": "x/y",
        }  # fmt: skip
        self.axolotl = {
            "base_model": MODEL, "adapter": "qlora", "load_in_4bit": True, "lora_r": 16, "lora_target_linear": True,
            "datasets": [{"path": "x/y", "type": "alpaca"}], "sequence_len": 2048, "micro_batch_size": 1,
            "gradient_accumulation_steps": 8, "optimizer": "adamw_bnb_8bit", "bf16": "auto", "tf32": True,
            "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False},
            "plugins": ["axolotl.integrations.liger.LigerPlugin"], "fsdp_config": {"fsdp_version": 2},
            "learning_rate": 2e-4, "rl": "dpo", "rl_beta": 0.1, "quantize_moe_experts": True, "peft_use_dora": True,
            "lora_mlp_kernel": True, "activation_offloading": "legacy", "val_set_size": 0.05, "sample_packing": False,
        }  # fmt: skip
        self.llamafactory = {
            "model_name_or_path": MODEL, "stage": "sft", "finetuning_type": "lora", "lora_rank": 8,
            "lora_target": "all",
            "dataset": "alpaca", "template": "qwen", "cutoff_len": 1024, "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 8, "bf16": True, "quantization_bit": 4, "optim": "adamw_torch",
            "pref_beta": 0.1, "pref_loss": "sigmoid", "use_dora": False, "enable_liger_kernel": True,
        }  # fmt: skip
        self.accelerate = {
            "compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "mixed_precision": "bf16",
            "num_processes": 4, "num_machines": 1, "fsdp_config": {"fsdp_version": 2, "fsdp_offload_params": False},
        }  # fmt: skip
        self.deepspeed = {
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}, "bf16": {"enabled": True},
            "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "optimizer": {"type": "AdamW"},
        }  # fmt: skip
        self.preferences = (
            "from trl import DPOConfig, DPOTrainer\nargs = DPOConfig(per_device_train_batch_size=2, beta=0.1,\n"
            f"    max_length=512, bf16=True)\nDPOTrainer(model={MODEL!r}, args=args).train()\n"
        )
        self.script = (
            "from trl import SFTConfig, SFTTrainer\nargs = SFTConfig(per_device_train_batch_size=2, bf16=True,\n"
            f"    optim='adamw_torch', max_length=512)\ntrainer = SFTTrainer(model={MODEL!r}, args=args)\n"
            "trainer.train()\n"
        )
        self.toml = (
            '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 2\nseq_len = 2048\nsteps = 10\n'
            '[parallelism]\ndata_parallel_shard_degree = -1\ntensor_parallel_degree = 2\n[optimizer]\nname = "AdamW"\n'
        )
        self.record = self._record()
        self.plan = self._plan()
        self.preference_plan = self._plan("--objective", "dpo")

    def _record(self) -> dict[str, Any]:
        from planner.setup.interchange import setup_from_dict, setup_to_dict
        from planner.setup.outcome import Environment, Fidelity, Measurement
        from probes.store import Record

        environment = Environment(
            gpu_name="NVIDIA GeForce RTX 4090", gpu_key=GPU, driver="570", cuda="12.8", python="3.11", platform="Linux",
            libraries={"torch": "2.13.0"}, power_limit_w=450.0,
        )  # fmt: skip
        outcome = Measurement(
            level=Fidelity.PROBE, peak_allocated_bytes=10**9, peak_reserved_bytes=2 * 10**9,
            peak_device_bytes=3 * 10**9, phase_peaks_bytes={"forward": 10**8}, step_times_s=(0.5, 0.51),
            tokens_per_step=1024, layers_measured=(2, 4), environment=environment,
        )  # fmt: skip
        setup = setup_to_dict(setup_from_dict({"method": "lora"}))
        request = {"level": "probe", "depths": [], "limits": {"time_s": 60.0}, "gpu_key": GPU, "gpu_name": "x"}
        return Record(
            key="k", model_id=MODEL, config_digest="d", setup=setup, request=request, outcome=outcome, recorded_at="now"
        ).to_dict()

    def _plan(self, *options: str) -> dict[str, Any]:
        from finetune_planner.cli.app import run

        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
            run([MODEL, "--gpu", GPU, "--no-dry-run", "--json", *options])
        document: dict[str, Any] = json.loads(out.getvalue())
        return document


seeds = cache(Seeds)
"""The ordinary inputs."""


def store_line(record: Any) -> bytes:
    """A line whose checksum is right, whatever the record says."""
    from probes.store import _checksum

    body = json.dumps(record, sort_keys=True, separators=(",", ":"))
    return f'{{"sha256":"{_checksum(body)}","record":{body}}}\n'.encode()


def config_case(folder: Path, dice: random.Random) -> Case:
    config = mutate(dice.choice(seeds().configs), dice)
    put(folder / "m" / "config.json", as_json(config, dice), dice)
    if dice.random() < 0.2:
        index = {"metadata": {"total_size": 2 * 10**9}, "weight_map": {}}
        put(folder / "m" / "model.safetensors.index.json", as_json(mutate(index, dice), dice), dice)
    options = dice.choice(([], ["--method", "qlora"], ["--method", "full"], ["--attention", "eager"]))
    return Case("config.json", ["estimate", str(folder / "m"), "--gpu", GPU, "--json", "--no-dry-run", *options])


def check_case(folder: Path, dice: random.Random) -> Case:
    base = seeds()
    kind = dice.randrange(8)
    more = ["--gpus", dice.choice(("1", "2", "8"))] if dice.random() < 0.3 else []
    if kind < 3:
        content = as_yaml(mutate((base.trl, base.axolotl, base.llamafactory)[kind], dice), dice)
        file = put(folder / "config.yaml", content, dice)
    elif kind == 3:
        file = put(folder / "ds.json", as_json(mutate(base.deepspeed, dice), dice), dice)
    elif kind == 4:
        file = put(folder / "accelerate.yaml", as_yaml(mutate(base.accelerate, dice), dice), dice)
    elif kind == 5:
        file = put(folder / "train.py", damage(dice.choice((base.script, base.preferences)).encode(), dice), dice)
    elif kind == 6:
        file = put(folder / "job.toml", damage(base.toml.encode(), dice), dice)
    else:
        file = put(folder / "config.yaml", as_yaml(base.trl, dice), dice)
        accelerate = put(folder / "acc.yaml", as_yaml(mutate(base.accelerate, dice), dice), dice)
        more += ["--accelerate", str(accelerate)]
    if dice.random() < 0.1:
        (folder / "config.fixed.yaml").symlink_to(folder / "victim")
        more += ["--fix"]
    return Case("check", ["check", str(file), "--gpu", GPU, "--model", MODEL, "--no-dry-run", "--json", *more])


def notebook(dice: random.Random) -> dict[str, Any]:
    """A notebook whose cells are the script's lines, with what notebooks add."""
    lines = seeds().script.splitlines(keepends=True)
    cut = dice.randrange(len(lines))
    magic = dice.choice(("!pip install -q trl\n", "%%bash\naccelerate launch train.py\n", "%matplotlib inline\n", ""))
    cells = [["# Title\n"], [magic], lines[:cut], "".join(lines[cut:])]
    kinds = ("markdown", "code", "code", "code")
    return {
        "cells": [
            {"cell_type": kind, "source": source, "metadata": {}, "outputs": [], "execution_count": None}
            for kind, source in zip(kinds, cells, strict=True)
        ],
        "metadata": {"kernelspec": {"language": "python", "name": "python3"}}, "nbformat": 4, "nbformat_minor": 5,
    }  # fmt: skip


def shell_script(dice: random.Random) -> bytes:
    """A launch by a shell script, with what shells allow."""
    words = f"--model_name_or_path {MODEL} --max_length 512 --per_device_train_batch_size $BATCH --bf16 true"
    extra = dice.choice((
        "", "ARGS=(--optim adamw_torch\n  --use_peft true)\n", "for i in 1 2 3; do echo $i; done\n",
        "exec > log 2>&1\n",
        "cat > ds.json <<'EOF'\n{\"zero_optimization\": {\"stage\": 2}}\nEOF\n", "A=$A$A\n" * 40,
        "export A=${A:-${B:-${C}}}\n",
        "if [ -z \"$1\" ]; then exit 1; fi\n", "N=$((2**62 * 4))\n", "cd $(dirname $0)\n", "x='\n", "a" + "\\\n" * 3000,
        "A=" + "${" * 400 + "\n", "N=$((" + "(" * 400 + "\n", "source $0\n", "bash run.sh\n",
        "A=(" + "x " * 20_000 + ")\n",
    ))  # fmt: skip
    launch = dice.choice(("python", "accelerate launch --num_processes 2", "torchrun --nproc_per_node 2", "trl sft"))
    program = "" if launch == "trl sft" else "train.py"
    text = f"#!/bin/bash\nset -e\nBATCH=2\n{extra}{launch} {program} {words} ${{ARGS[@]}} \\\n  --lora_r 8 $@\n"
    return damage(text.encode(), dice) if dice.random() < 0.6 else text.encode()


def program_case(folder: Path, dice: random.Random) -> Case:
    """Notebooks, shell scripts with their programs, and programs whose values are hard to follow."""
    kind = dice.randrange(3)
    if kind == 0:
        file = put(folder / "train.ipynb", as_json(mutate(notebook(dice), dice), dice), dice)
    elif kind == 1:
        put(folder / "train.py", damage(seeds().script.encode(), dice), dice)
        file = put(folder / "run.sh", shell_script(dice), dice)
    else:
        before = dice.choice((
            "x = " + "(" * 500 + "1" + ")" * 500 + "\n", "x = 10 ** 10 ** 10\n", "x = 'a' * 10 ** 12\n",
            "x = [0] * 10 ** 11\n",
            "while True:\n    pass\n", "for i in range(10 ** 12):\n    x = i\n", "def f():\n    return f()\nx = f()\n",
            "x = 1\n" + "x = x + x\n" * 2000, "x = '%999999999d' % 1\n", "x = f'{1:999999999}'\n",
            "x = 1 << 10 ** 10\n",
            "import os\nos.system('touch victim')\n", "open('victim', 'w')\n", "x = {}\nx['x'] = x\n",
            "x = [1]\nx += [x]\n" * 50,
            "import json\nx = json.load(open('/dev/zero'))\n", "x = 'a'.ljust(10 ** 12)\n",
            "x = 'aa'.replace('a', 'a' * 10 ** 6) * 10 ** 6\n",
            "from train import *\n", "x = -" + "-" * 5000 + "1\n", "x = " + "not " * 3000 + "1\n", "class A(A): pass\n",
            "x = " + "+".join(["1"] * 5000) + "\n", "x = int('9' * 10 ** 5)\n", "x = 1 % 0\n", "x = [1, 2][10 ** 30]\n",
        ))  # fmt: skip
        text = before + seeds().script.replace("=512", "=x").replace(
            "=2,", f"={dice.choice(('x', 'len(str(x))', '2'))},"
        )
        file = put(folder / "train.py", damage(text.encode(), dice) if dice.random() < 0.3 else text.encode(), dice)
    more = ["--args", dice.choice(("--x 1", "'", "$(id)", "--max_length " + "9" * 5000))] if dice.random() < 0.2 else []
    return Case("program", ["check", str(file), "--gpu", GPU, "--model", MODEL, "--no-dry-run", "--json", *more])


def folder_case(folder: Path, dice: random.Random) -> Case:
    """A folder with trainings, as `plan check DIR` in CI finds it."""
    base, place = seeds(), folder / "repo"
    put(place / "a.yaml", as_yaml(mutate(base.trl, dice), dice), dice)
    put(place / "sub" / "b.ipynb", as_json(mutate(notebook(dice), dice), dice), dice)
    put(place / "run.sh", shell_script(dice), dice)
    put(place / dice.choice(("job.toml", "\x1b[2Jx.yaml", "a\nb.yaml", "x%0A::error::.yaml")), base.toml.encode(), dice)
    odd = dice.randrange(6)
    if odd == 0:
        (place / "loop").symlink_to(place)
    elif odd == 1:
        (place / "up").symlink_to("/")
    elif odd == 2:
        deep = place / "/".join(["d"] * 300)
        deep.mkdir(parents=True)
    elif odd == 3:
        for number in range(200):
            (place / f"{number}.yaml").write_text("a: 1\n")
    elif odd == 4 and hasattr(os, "fsencode"):
        (place / os.fsdecode(b"\xff\xfe.yaml")).write_bytes(as_yaml(base.trl, dice))
    form = dice.choice((["--json"], [], ["--annotations", "github"]))
    return Case("folder", ["check", str(place), "--gpu", GPU, "--no-dry-run", *form])


def trace_case(folder: Path, dice: random.Random) -> Case:
    """What a traced program left behind as its result."""
    part = {"name": "weights", "size_bytes": 10**9, "num_allocations": 3}
    result = {
        "status": "done", "error": "", "num_steps": 2, "num_events": 9, "peak_allocated_bytes": 10**9,
        "peak_reserved_bytes": 10**9, "context_bytes": 10**8, "peak_phase": "forward", "phase_peaks_bytes": {"load": 1},
        "by_category": [part], "by_module": [part], "by_line": [part], "by_code": [part],
        "by_op": [part], "refusal": None, "notes": ["x"],
        "questions": [["x", "train.py:1", 1]], "kernels": {"a": 1}, "timeline": [[0.0, 1, "forward"]], "libraries": {},
        "elapsed_s": 1.0,
    }  # fmt: skip
    results = folder / "results"
    put(results / "1.json", as_json(mutate(result, dice), dice), dice)

    def call() -> object:
        from probes.phantom.runner import results_in

        return results_in(results)

    return Case("trace result", ["read", str(results)], call=call)


def setups_case(folder: Path, dice: random.Random) -> Case:
    lines = b"\n".join(as_json(mutate(seeds().setup, dice), dice).replace(b"\n", b" ") for _ in range(3))
    if dice.random() < 0.3:
        return Case("setups", ["estimate", "--setups", "-", "--no-dry-run"], stdin=lines)
    file = put(folder / "setups.jsonl", lines, dice)
    return Case("setups", ["estimate", "--setups", str(file), "--no-dry-run"])


def store_case(folder: Path, dice: random.Random) -> Case:
    good = store_line(seeds().record)
    bad = b"".join(store_line(mutate(seeds().record, dice)) for _ in range(dice.randint(1, 3)))
    content = good + (damage(bad, dice) if dice.random() < 0.4 else bad)
    if dice.random() < 0.5:
        source = put(folder / "other.jsonl", content, dice)
        return Case("store", ["store", "import", str(source), "--store", str(folder / "store.jsonl")])
    store = put(folder / "store.jsonl", content, dice)
    if dice.random() < 0.5:
        return Case("store", ["store", "show", "--store", str(store)])
    return Case("store", ["store", "export", str(folder / "out" / "x.jsonl"), "--store", str(store)])


def report_case(folder: Path, dice: random.Random) -> Case:
    plan = seeds().preference_plan if dice.random() < 0.4 else seeds().plan
    file = put(folder / "p" / "plan.json", as_json(mutate(plan, dice), dice), dice)
    if dice.random() < 0.5:
        return Case("report", ["compare", str(file), str(file), *dice.choice(([], ["--json"]))])
    if dice.random() < 0.4:
        return Case("report", ["confirm", str(folder / "p"), "--device", "cuda:9", "--store", str(folder / "s.jsonl")])
    if dice.random() < 0.2:
        (folder / "p" / "report.md").symlink_to(folder / "victim")
    return Case("report", ["report", str(folder / "p")])


def calibration_case(folder: Path, dice: random.Random) -> Case:
    from planner.speed.roofline.calibration import calibration_to_dict, load_calibration

    values = calibration_to_dict(load_calibration())
    file = put(folder / "calibration.json", as_json(mutate(values, dice), dice), dice)
    if dice.random() < 0.6:
        return Case(
            "calibration", ["estimate", MODEL, "--gpu", GPU, "--json", "--no-dry-run"],
            environment={"FINETUNE_PLANNER_CALIBRATION": str(file)},
        )  # fmt: skip
    points = b"\n".join(as_json(mutate(seeds().record, dice), dice).replace(b"\n", b" ") for _ in range(4))
    lines = put(folder / "points.jsonl", points, dice)
    return Case("calibration", ["calibrate", str(lines), *dice.choice(([], ["--json"]))])


def dataset_case(folder: Path, dice: random.Random) -> Case:
    rows: list[Any] = [
        {"messages": [{"role": "user", "content": "hello " * 20}, {"role": "assistant", "content": "x"}]},
        {"prompt": "a", "completion": "b"}, {"instruction": "a", "input": "", "output": "c"}, {"text": "word " * 50},
        {"prompt": "a", "chosen": "b " * 9, "rejected": "c"}, {"prompt": "a", "completion": "b", "label": True},
        {"chosen": [{"role": "user", "content": "a"}], "rejected": [{"role": "assistant", "content": "c"}]},
    ]  # fmt: skip
    row = dice.choice(rows)
    good = json.dumps(row).encode()
    bad = [as_json(mutate(row, dice), dice).replace(b"\n", b" ") for _ in range(3)]
    suffix = dice.choice((".jsonl", ".json", ".parquet", ".csv"))
    content = b"\n".join([good, *bad]) if dice.random() < 0.7 else b"[" + b",".join([good, *bad]) + b"]"
    file = put(folder / f"train{suffix}", content, dice)

    def call() -> object:
        from planner.samples.dataset import choose_length, measure

        return choose_length(measure(file))

    return Case("data set", ["measure", str(file)], call=call)


def cache_case(folder: Path, dice: random.Random) -> Case:
    hub = folder / "hub"
    place = hub / "models--a--b"
    commit = "0123456789abcdef0123456789abcdef01234567"
    put(place / "refs" / "main", damage(commit.encode(), dice) if dice.random() < 0.4 else commit.encode(), dice)
    config = mutate(dice.choice(seeds().configs), dice)
    put(place / "snapshots" / commit / "config.json", as_json(config, dice), dice)
    return Case(
        "hub cache", ["estimate", "a/b", "--gpu", GPU, "--json", "--no-dry-run"], environment={"HF_HUB_CACHE": str(hub)}
    )


def storage_url_case(folder: Path, dice: random.Random) -> Case:
    kinds = ("sqlite", "postgresql", "mysql", "redis", "foo", "", "sqlite+x", "file")
    rests = (
        "",
        "/",
        f"/{folder}/s.db",
        "u:p@h:x/d",
        "h:abc",
        ":memory:",
        "h:99999",
        "//",
        "u:p@/d?x=y",
        "[::1",
        "\x00",
    )
    url = f"{dice.choice(kinds)}://{dice.choice(rests)}"

    def call() -> object:
        from search.storage import close_storage, open_storage

        storage = open_storage(url)
        close_storage(storage)
        return storage

    return Case("storage URL", ["open", url], call=call)


def words_case(folder: Path, dice: random.Random) -> Case:
    from finetune_planner.cli.app import COMMANDS

    command = dice.choice([name for name in COMMANDS if name not in ("doctor", "tune", "probe", "ui")])
    options = [
        "--gpu", "--rank", "--seq-len", "--global-batch", "--micro-batch", "--json", "--method", "--precision",
        "--memory-gib", "--headroom", "--targets", "--gpus", "--nodes", "--price", "--budget", "--deadline",
        "--objective", "--adapter", "--kernels", "--quantize-experts", "-x",
    ]  # fmt: skip
    words = [command]
    for _ in range(dice.randint(0, 5)):
        words.append(dice.choice(options))
        if dice.random() < 0.8:
            words.append(str(dice.choice(NASTY))[:300].replace("\x00", "").encode("utf-8", "replace").decode())
    if dice.random() < 0.5:
        words.insert(1, str(dice.choice(NASTY))[:300].replace("\x00", "").encode("utf-8", "replace").decode())
    return Case("words", words)


CHOICES: tuple[tuple[str, ...], ...] = (
    ("--objective", "sft", "dpo", "kto", "orpo", "reward", "pretrain", "ppo", ""),
    ("--adapter", "lora", "dora", "pissa", "loftq", "adalora", "vera", "oft", "ia3", "prompt", "p-tuning", "prefix",
     "ln-tuning", "trainable-tokens", "boft"),
    ("--quantize-experts",), ("--no-quantize-experts",), ("--activation-offload",), ("--no-extra-packages",),
    ("--kernels", "eager", "liger", "fused", "x"), ("--method", "full", "lora", "qlora"),
    ("--quantization", "nf4", "nf4-double", "int8", "none"), ("--checkpoint-every", "0", "2", "3", "-1"),
    ("--global-batch", "1", "2", "1000", "997", "0"), ("--seq-len", "1", "7", "512", "131072", "99999999"),
    ("--rank", "1", "64", "4096", "0"), ("--loss", "full", "chunked", "liger"), ("--headroom", "0", "1", "nan", "23"),
    ("--precision", "fp32", "bf16-pure", "fp16-mixed"), ("--targets", "attention", "all-linear", "q_proj,lm_head"),
)  # fmt: skip
"""Options of the space with values that are allowed, now and then, together."""
FAMILIES = (MODEL, "Qwen/Qwen3-30B-A3B", "openai/gpt-oss-20b", "google-t5/t5-small", "openai-community/gpt2")
OUTPUTS = (
    "plan.json", "report.md", "report.html", "trl.yaml", "trl_dpo.yaml", "run.sh", "axolotl.yaml", "llamafactory.yaml",
    "index.html", "grid", "README.md", "requirements.txt", "config.fixed.yaml", "accelerate.yaml", "x.jsonl",
)  # fmt: skip
"""Names that commands write."""


def options_case(folder: Path, dice: random.Random) -> Case:
    """Options of the space against each other, in every command that takes them."""
    model = dice.choice(FAMILIES)
    words = dice.choice((
        [model, "--gpu", GPU, "--no-dry-run"], ["estimate", model, "--gpu", GPU, "--no-dry-run"],
        ["compare-adapters", model, "--gpu", dice.choice(("t4", GPU, "h200"))],
        ["which-gpu", model, "--vendor", dice.choice(("Apple", "x"))],
        [model, "--gpu", GPU, "--gpus", "2", "--no-dry-run"],
    ))  # fmt: skip
    for option, *values in dice.sample(CHOICES, dice.randint(1, 4)):
        words = [*words, option, *([dice.choice(values)] if values else [])]
    return Case("options", [*words, *dice.choice(([], ["--json"]))])


def places_case(folder: Path, dice: random.Random) -> Case:
    """A folder to write to in which links, folders and pipes have the names of what is written."""
    out = folder / "out"
    out.mkdir()
    for name in dice.sample(OUTPUTS, dice.randint(1, 6)):
        what = dice.randrange(4)
        if what < 2:
            (out / name).symlink_to(folder / "victim")
        elif what == 2:
            (out / name).mkdir()
        else:
            os.mkfifo(out / name)
    if dice.random() < 0.1:
        shutil.rmtree(out)
        out.symlink_to(folder / "elsewhere")
    config = put(folder / "config.yaml", as_yaml(seeds().axolotl, dice), dice)
    plan = put(folder / "p" / "plan.json", json.dumps(seeds().plan).encode(), random.Random(7))
    words = dice.choice((
        [MODEL, "--gpu", GPU, "--no-dry-run"], [MODEL, "--gpu", GPU, "--no-dry-run", "--target", "axolotl"],
        [MODEL, "--gpu", GPU, "--no-dry-run", "--objective", "dpo"], ["which-gpu", MODEL, "--vendor", "Apple"],
        ["compare-adapters", MODEL, "--gpu", GPU],
        ["which-cluster", MODEL, "--gpu", GPU, "--max-gpus", "2", "--dataset-tokens", "1000000"],
        ["compare", str(plan), str(plan)], ["check", str(config), "--gpu", GPU, "--no-dry-run"],
        ["store", "export"], ["ui", "--model", MODEL, "--gpu", GPU],
    ))  # fmt: skip
    place = {"store": [str(out / "x.jsonl")], "ui": ["--static", str(out)], "check": ["--fix"]}
    return Case("places", [*words, *place.get(words[0], ["--out", str(out)])])


def page_case(folder: Path, dice: random.Random) -> Case:
    """What a stranger sends to the page's server."""
    import socket
    import threading

    from finetune_planner.cli.ui import Catalog, Server

    paths = (
        "/", "/grid/smollm2.js", "/grid/../../etc/passwd.js", "/launch/x/0.zip", "/launch/x/999999.zip", "/%00",
        "/" + "a" * 70_000, "//", "/grid/%2e%2e%2f.js", "http://evil/", "/\xff", "*", "", "/launch/x/-1.zip",
        "/?" + "&" * 999,
    )  # fmt: skip

    def call() -> object:
        server = Server(("127.0.0.1", 0), Catalog([MODEL], [GPU]))
        port = server.server_address[1]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        host = dice.choice((f"127.0.0.1:{port}", "evil.example", "", "localhost", "\x00"))
        path = dice.choice((*paths, f"/grid/{_grid_name()}.js", f"/launch/{_grid_name()}/{dice.randrange(99)}.zip"))
        verb, version = dice.choice(("GET", "GET", "POST", "HEAD", "X" * 300, "")), dice.choice(("1.1", "1.0", "9"))
        more = dice.choice(("Sec-Fetch-Site: cross-site", "X: " + "y" * 70_000, ": ", "Host: x", "Accept: */*"))
        lines = [f"{verb} {path} HTTP/{version}", f"Host: {host}", more]
        request = "\r\n".join(lines).encode("latin-1", "replace") + b"\r\n\r\n"
        request = damage(request, dice) if dice.random() < 0.4 else request
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            answer = b""
            with contextlib.suppress(OSError):  # refused before all of it was said
                connection.sendall(request)
                connection.shutdown(socket.SHUT_WR)
                while part := connection.recv(1 << 16):
                    answer += part
        server.shutdown()
        return answer

    return Case("page", ["GET"], call=call)


def request_case(folder: Path, dice: random.Random) -> Case:
    """What a user may ask for: the plan keeps to its budget and its request, and has a launch file or says why not."""
    from planner.models import catalogue
    from planner.options.adapters import ADAPTERS
    from planner.options.objectives import OBJECTIVES
    from planner.options.optimizers import OPTIMIZERS

    cards = ("t4", "rtx-3060", "v100-32gb", "rtx-3090", GPU, "l40s", "a100-80gb", "h100-sxm", "h200", "mi300x")
    words = [dice.choice(sorted(catalogue.names())), "--gpu", dice.choice(cards), "--no-dry-run", "--out", "out"]
    several = dice.choice((1, 1, 1, 2, 4, 8))
    options: dict[str, Any] = {"gpus": several, "seq-len": dice.choice((128, 512, 2048, 8192, 32768))}
    wishes: tuple[tuple[float, str, tuple[Any, ...]], ...] = (
        (0.4, "global-batch", (1, 2, 3, 8, 32, 100, 512)), (0.4, "method", ("full", "lora", "qlora")),
        (0.4, "objective", tuple(OBJECTIVES)), (0.2, "optimizer", tuple(OPTIMIZERS)), (0.2, "adapter", tuple(ADAPTERS)),
        (0.2, "target", ("hf", "trl", "axolotl", "llamafactory", "unsloth", "torchtitan")),
        (0.1, "precision", ("bf16-pure", "bf16-mixed", "bf16-autocast", "fp16-autocast")),
        (0.1, "loss", ("full", "chunked", "liger")), (0.1, "quantization", ("nf4", "nf4-double", "int8")),
        (0.3 * (several > 1), dice.choice(("tensor", "context", "expert", "pipeline")) + "-degree", (2,)),
        (0.1, "prefer", ("speed",)),
    )  # fmt: skip
    for chance, option, values in wishes:
        if dice.random() < chance:
            options[option] = dice.choice(values)
    words += [word for option, value in options.items() for word in (f"--{option}", str(value))]
    return Case("wish", words, call=lambda: _keep_promises(words, options))


def _keep_promises(words: list[str], options: dict[str, Any]) -> None:
    from finetune_planner.cli.app import run
    from planner.setup.interchange import setup_from_dict

    if run(words):
        return
    plan = json.loads(Path("out/plan.json").read_text())
    chosen, setup = plan["chosen"], setup_from_dict(plan["chosen"]["setup"])
    assert chosen["formula"]["peak_device_bytes"] <= chosen["budget_bytes"], "over its budget"
    for option, value in options.items():
        field = "num_gpus" if option == "gpus" else option.replace("-", "_")
        assert getattr(setup, field, value) == value, f"--{option} {value}: {getattr(setup, field)}"
    explained = any("no launch file can be written" in note for note in plan["notes"])
    assert any(Path("out/launch").glob("*/*")) != explained, (
        "no launch file, and nothing said" if not explained else "both"
    )


def _grid_name() -> str:
    from reports.ui import grid_name

    return str(grid_name(MODEL, GPU))


MAKERS: tuple[tuple[Maker, int], ...] = (
    (config_case, 20), (check_case, 20), (program_case, 12), (folder_case, 6), (trace_case, 2),
    (setups_case, 8), (store_case, 12), (report_case, 8),
    (calibration_case, 8), (dataset_case, 8), (cache_case, 3),
    (storage_url_case, 2), (words_case, 8), (options_case, 12), (places_case, 8), (page_case, 4),
)  # fmt: skip
