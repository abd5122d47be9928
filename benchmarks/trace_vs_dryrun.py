"""Traces emitted launch files by their own tools and holds the dry run and the formula against them.

    python -m benchmarks.trace_vs_dryrun [--layers 4] [--only WORDS] [--kernels liger]
    python -m benchmarks.trace_vs_dryrun --objectives [--only WORDS] [--no-trace]

For every tool, method, precision, quantization and loss, with and without checkpointing, on a truncated Llama-3.2-1B:
the launch file that `plan --out` would write is run by TRL or as the plain script on a phantom GPU, two optimizer
steps, and compared with the dry run of the same setup. Both count the same rounding and workspaces: a difference is a
difference of the step. With `--kernels liger` the file switches Liger's layers on: the trace runs liger-kernel's own
Python (it and Triton have to be installed, for Liger's loss too), the dry run our functions with the same tensors. What
a tool cannot run stands in the results with the reason.

With `--objectives`, for every other objective than supervised training x {1B, 8B} x {24, 80 GB} x {full, LoRA, QLoRA}:
the setup that `plan MODEL --gpu GPU --objective NAME --method METHOD` chooses, its launch file, and that file's own
trainer at full depth; without traces formula and dry run alone, in seconds. A cell without a plan says so.
Results: benchmarks/data/trace_vs_dryrun.json, trace_liger_vs_dryrun.json and trace_objectives.json; rows of points that
were left out stay.
"""

import argparse
import contextlib
import io
import json
import os
import runpy
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.shared import DATA, percentile
from planner.frameworks.exporters import EXPORTERS, DatasetChoice, ExportRequest, prepare
from planner.frameworks.hyperparameters import choose
from planner.hardware.gpus import find_gpu
from planner.models import catalogue
from planner.models.families import spec_from_config
from planner.options.objectives import OBJECTIVES
from planner.options.rollouts import Rollout
from planner.planning.answer import plan_workload
from planner.planning.plan import Plan
from planner.planning.plan_request import PlanRequest
from planner.planning.predict import predict
from planner.setup import TrainSetup
from planner.setup.allowed import LOSSES, METHODS, PRECISIONS, QUANTIZATIONS
from planner.setup.interchange import setup_to_dict
from probes.dryrun.api import report_for_config
from probes.dryrun.report import DryRunReport
from probes.phantom.card import TraceOptions, card_of

MODEL = "meta-llama/Llama-3.2-1B"
GPU = "a100-80gb"
TOOLS = ("hf", "trl")
SEQ_LEN = 512
ROWS: dict[str, Callable[[int], dict[str, Any]]] = {
    "sft": lambda num: {"text": "a" * num},
    **dict.fromkeys(("dpo", "orpo"), lambda num: {"prompt": "a", "chosen": "b" * num, "rejected": "c" * num}),
    "kto": lambda num: {"prompt": "a", "completion": "b" * num, "label": True},
    # its trainer leaves out what is too long instead of cutting it; a token ends each
    "reward": lambda num: {"chosen": "b" * (num // 2 - 1), "rejected": "c" * (num // 2 - 1)},
    # room for TRL's longest completion is left; prompts are not cut
    **dict.fromkeys(
        ("grpo", "rloo"),
        lambda num: {"prompt": "a" * (num // 2 - Rollout.usual(num // 2).completion_tokens), "answer": "b"},
    ),
    "classification": lambda num: {"text": "a" * num, "label": "b"},
    "embedding": lambda num: {"anchor": "a" * num, "positive": "b" * num, "negative": "c" * num},
}
"""Objective -> a row of its data that is so many letters long."""
MODELS = {"1b": MODEL, "8b": "meta-llama/Llama-3.1-8B"}
PLANNED_GPUS = ("rtx-4090", "a100-80gb")
PLANNED_SEQ_LEN, PLANNED_BATCH = 1024, 16
VARIANTS: dict[str, dict[str, Any]] = {"embedding cached": {"cached_seqs": (4,), "hard_negatives": (1,)}}
"""Settings of an objective (the first word) that a grid of their own holds."""


def config_of(num_layers: int | None, model: str = MODEL) -> dict[str, Any]:
    """The model's configuration, at another depth where one is given."""
    entry = catalogue.find(model)
    assert entry is not None
    depth = {} if num_layers is None else {"num_hidden_layers": num_layers}
    config = {**entry.config, **depth, "architectures": [entry.built_class]}
    return {**config, "dtype": config.get("dtype") or config.get("torch_dtype") or "bfloat16"}


def variants(method: str) -> Iterator[dict[str, Any]]:
    """Every precision that the method can have; for QLoRA every quantization, with peft's fp32 cast and without."""
    if method != "qlora":
        yield from (
            {"precision": precision} for precision in PRECISIONS if (method, precision) != ("full", "fp16-autocast")
        )
        return
    for quantization in QUANTIZATIONS[1:]:
        yield {"quantization": quantization, "precision": "bf16-autocast"}
    yield {"quantization": "nf4-double", "precision": "fp16-autocast"}
    yield {"quantization": "nf4-double", "precision": "bf16-autocast", "kbit_fp32_cast": True}


def setups(kernels: str) -> Iterator[tuple[str, TrainSetup]]:
    for method, loss, checkpointing in product(METHODS, LOSSES, (1, 0)):
        for variant in variants(method):
            quantization = variant.pop("quantization", "none")
            setup = TrainSetup(
                method=method,
                quantization=quantization,
                lora_rank=0 if method == "full" else 16,
                loss=loss,
                checkpointing=checkpointing,
                micro_batch_seqs=4,
                accumulation_steps=2,
                seq_len_tokens=SEQ_LEN,
                kernels=kernels,
                **variant,
            )
            bits = "" if quantization in ("none", "nf4-double") else f" {quantization}"
            cast = " + fp32 cast" if setup.kbit_fp32_cast else ""
            name = f"{method} {setup.precision}{bits}{cast}, {loss} loss, {'' if checkpointing else 'no '}checkpointing"
            yield name, setup


class Point(NamedTuple):
    """A setup that a tool runs, of a model's configuration, on a card."""

    tool: str
    setup: TrainSetup
    config: dict[str, Any]
    gpu: str


@contextlib.contextmanager
def prepared(
    tool: str,
    setup: TrainSetup,
    config: dict[str, Any],
    folder: Path,
    gpu: str = GPU,
) -> Iterator[list[str]]:
    """The launch file's command in `folder`, with a model of configuration alone and texts longer than the length."""
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config))
    row = json.dumps(ROWS[setup.objective](2 * setup.seq_len_tokens))
    (folder / "train.jsonl").write_text((row + "\n") * 64)
    request = ExportRequest(
        model_id="./model",
        model=spec_from_config(config, model_id="./model", source="benchmark"),
        setup=setup,
        hyper=choose(setup, max_steps=4),
        dataset=DatasetChoice(path="./train.jsonl", columns="text", local=True),
        gpu=find_gpu(gpu),
        held_out=0,
        save=False,
    )
    emitted = EXPORTERS[tool](request)
    if emitted.unsupported:
        raise NotImplementedError("; ".join(map(str, emitted.unsupported)))
    for file in emitted.files:
        path = folder / "launch" / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(file.text)
    if not setup.objective_spec.supervised and prepare.needed(request):  # these rows are prepared as they are
        made = folder / prepare.folder(request, tool) / "train.jsonl"
        made.parent.mkdir(parents=True, exist_ok=True)
        made.write_text((row + "\n") * 64)
    yield emitted.command.split("&&")[-1].split()


def traced(words: list[str], folder: Path, *, expandable_segments: bool, gpu: str = GPU) -> Any:
    """The summary of the command's program in this process, under the allocator that its launch sets."""
    from accelerate.state import AcceleratorState

    from probes.phantom.session import phantom_gpu
    from probes.phantom.steps import Done
    from probes.phantom.summary import summary

    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        os.environ[name] = value
    before, argv = Path.cwd(), sys.argv
    os.chdir(folder)
    try:
        card = card_of(find_gpu(gpu))
        with phantom_gpu(
            card, TraceOptions(limited=False, num_steps=2), expandable_segments=expandable_segments
        ) as phantom:
            AcceleratorState._reset_state(True)
            with contextlib.suppress(Done), contextlib.redirect_stdout(io.StringIO()):
                if words[0] == "trl":
                    at = words.index("--config")
                    sys.argv = [words[1], *words[at : at + 2]]  # what is left is Accelerate's
                    runpy.run_module(f"trl.scripts.{words[1]}", run_name="__main__")
                else:
                    sys.argv = words[1:]
                    if words[1] == "-m":
                        sys.argv = words[2:]
                        runpy.run_module(words[2], run_name="__main__")
                    else:
                        runpy.run_path(words[1], run_name="__main__")
            return summary(phantom, "done")
    finally:
        os.chdir(before)
        sys.argv = argv


def by_kernels(kernels: str, layers: int) -> Iterator[tuple[str, Callable[[], Point | None]]]:
    """Every setup of a truncated model by every tool."""
    for (name, setup), tool in product(setups(kernels), TOOLS):
        yield f"{tool}: {name}", partial(Point, tool, setup, config_of(layers), GPU)


def by_objective(layers: int | None) -> Iterator[tuple[str, Callable[[], Point | None]]]:
    """What plans of other objectives choose, by the tool whose own trainer is the truth."""
    names = [*(name for name, row in OBJECTIVES.items() if not row.supervised), *VARIANTS]
    for name, model, gpu, method in product(names, MODELS, PLANNED_GPUS, METHODS):
        yield f"{name}: {model}, {gpu}, {method}", partial(planned, name, MODELS[model], gpu, method, layers)


def planned(name: str, model: str, gpu: str, method: str, layers: int | None) -> Point | None:
    """The setup that a plan chooses by the formula, None where nothing fits."""
    objective, config = name.split()[0], config_of(layers, model)
    tool = OBJECTIVES[objective].stack("trl")
    fixed: dict[str, tuple[Any, ...]] = {"objective": (objective,), "method": (method,), **VARIANTS.get(name, {})}
    if OBJECTIVES[objective].rolls_out:  # vLLM beside the trainer is in no dry run
        fixed["rollout"] = (replace(Rollout.usual(PLANNED_SEQ_LEN), generator="transformers"),)
    if find_spec("liger_kernel") is None:
        fixed["kernels"] = ("eager",)  # the trainer would refuse the file
    spec = spec_from_config(config, model_id="./model", source="benchmark")
    request = PlanRequest(fixed=fixed, seq_len=PLANNED_SEQ_LEN, global_batch=PLANNED_BATCH, targets=(tool,))
    plan = plan_workload(request.workload(spec, find_gpu(gpu)))
    return Point(tool, plan.chosen.setup, config, gpu) if isinstance(plan, Plan) else None


def compare(point: Point, *, trace: bool) -> dict[str, Any]:
    """The peaks of one setup by formula and dry run, and by its own trainer."""
    tool, setup, config, gpu = point
    if "liger" in (setup.loss, setup.kernels) and not (find_spec("liger_kernel") and find_spec("triton")):
        raise NotImplementedError("liger-kernel and Triton are not installed")
    card = find_gpu(gpu)
    assert card.compute_capability is not None
    formula = predict(spec_from_config(config, model_id="./model", source="benchmark"), card, setup)
    report = report_for_config(config, card.compute_capability, setup)
    assert isinstance(report, DryRunReport), report
    dry = report.prediction
    row = {
        "setup": setup_to_dict(setup),
        "formula_bytes": formula.peak_allocated_bytes,
        "dry_run_bytes": dry.peak_allocated_bytes,
        "dry_run_reserved_bytes": dry.peak_reserved_bytes,
        "dry_run_phases": dict(dry.phase_peaks_bytes),
        "formula_over_dry_run": formula.peak_allocated_bytes / dry.peak_allocated_bytes - 1,
    }
    if not trace:
        return row
    with tempfile.TemporaryDirectory() as name, prepared(tool, setup, config, Path(name), gpu) as words:
        began = time.monotonic()
        result = traced(words, Path(name), expandable_segments=setup.expandable_segments, gpu=gpu)
    return row | {
        "traced_bytes": result.peak_allocated_bytes,
        "traced_reserved_bytes": result.peak_reserved_bytes,
        "traced_phases": dict(result.phase_peaks_bytes),
        "formula_over_trace": formula.peak_allocated_bytes / result.peak_allocated_bytes - 1,
        "error_fraction": dry.peak_allocated_bytes / result.peak_allocated_bytes - 1,
        "trace_s": round(time.monotonic() - began, 1),
    }


PAIRS = {
    "formula_over_trace": "formula against the trainer itself",
    "error_fraction": "dry run against the trainer itself",
    "formula_over_dry_run": "formula against the dry run",
}


def summary(rows: dict[str, Any]) -> Iterator[str]:
    """One line for each pair that was compared."""
    for name, words in PAIRS.items():
        errors = [abs(row[name]) for row in rows.values() if name in row]
        if errors:
            yield (
                f"{words}: {len(errors)} points, median {100 * statistics.median(errors):.2f} %, "
                f"95th percentile {100 * percentile(errors, 0.95):.2f} %, worst {100 * max(errors):.2f} %"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, help="default: 4, of other objectives all")
    parser.add_argument("--only", default="", help="points whose name has these words")
    parser.add_argument("--point", action="append", help="exact name of a point; repeatable")
    parser.add_argument("--json", action="store_true", help="the rows on stdout instead of the file")
    parser.add_argument("--kernels", choices=("eager", "liger"), default="eager")
    parser.add_argument("--objectives", action="store_true", help="what plans of other objectives choose")
    parser.add_argument("--no-trace", action="store_true", help="formula and dry run alone")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    rows: dict[str, Any] = {}
    grid = (
        by_objective(arguments.layers) if arguments.objectives else by_kernels(arguments.kernels, arguments.layers or 4)
    )
    for key, point_of in grid:
        if arguments.only not in key or (arguments.point and key not in arguments.point):
            continue
        try:
            point = point_of()
            rows[key] = {"not_run": "no setup fits"} if point is None else compare(point, trace=not arguments.no_trace)
        except NotImplementedError as error:
            rows[key] = {"not_run": str(error)}
        differences = "  ".join(f"{name} {100 * rows[key][name]:+6.2f} %" for name in PAIRS if name in rows[key])
        print(f"{key:75s} {differences or rows[key]['not_run']}", file=sys.stderr, flush=True)
    if arguments.json:
        print(json.dumps(rows))
        return
    out = DATA / f"trace_{'objectives' if arguments.objectives else FILES[arguments.kernels]}.json"
    stored = json.loads(out.read_text()) if out.exists() else {"rows": {}}
    for key, row in rows.items():
        stored["rows"][key] = (stored["rows"].get(key, {}) if arguments.no_trace else {}) | row
    out.write_text(json.dumps(stored, indent=1) + "\n")
    print(*summary(stored["rows"]), sep="\n")


FILES = {"eager": "vs_dryrun", "liger": "liger_vs_dryrun"}

if __name__ == "__main__":
    main()
