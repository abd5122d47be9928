"""Traces emitted launch files by their own tools and holds the dry run against them.

    python -m benchmarks.trace_vs_dryrun [--tool trl --tool hf] [--layers 4] [--only WORDS] [--kernels liger]

For every method x precision x quantization x loss, with and without checkpointing, on a truncated Llama-3.2-1B: the
launch file that `plan --out` would write is run by TRL or as the plain script on a phantom GPU, two optimizer steps,
and compared with the dry run of the same setup. Both count the same rounding and workspaces, so a difference is a
difference of the step. With `--kernels liger` the file switches Liger's layers on: the trace runs liger-kernel's own
Python (it and Triton have to be installed, for Liger's loss too), the dry run our functions with the same tensors. What
a tool cannot run stands in the results with the reason. Results: benchmarks/data/trace_vs_dryrun.json and
trace_liger_vs_dryrun.json; rows of points that were left out stay.
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
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

from planner.frameworks.exporters import EXPORTERS, DatasetChoice, ExportRequest, prepare
from planner.frameworks.hyperparameters import choose
from planner.hardware.gpus import find_gpu
from planner.models import catalogue
from planner.models.families import spec_from_config
from planner.setup import TrainSetup
from planner.setup.allowed import LOSSES, METHODS, PRECISIONS, QUANTIZATIONS
from probes.dryrun.api import report_for_config
from probes.dryrun.report import DryRunReport
from probes.phantom.card import TraceOptions, card_of

OUT = Path(__file__).parent / "data" / "trace_vs_dryrun.json"
MODEL = "meta-llama/Llama-3.2-1B"
GPU = "a100-80gb"
TOOLS = ("hf", "trl")
SEQ_LEN = 512
ROWS: dict[str, Callable[[int], dict[str, Any]]] = {"sft": lambda num: {"text": "a" * num}}
"""Objective -> a row of its data that is so many letters long."""


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


@contextlib.contextmanager
def prepared(
    tool: str,
    setup: TrainSetup,
    config: dict[str, Any],
    folder: Path,
    rows: Mapping[str, Callable[[int], dict[str, Any]]] = ROWS,
    gpu: str = GPU,
) -> Iterator[list[str]]:
    """The launch file's command in `folder`, with a model of configuration alone and texts longer than the length."""
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config))
    row = json.dumps(rows[setup.objective](2 * setup.seq_len_tokens))
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


def compare(tool: str, setup: TrainSetup, num_layers: int) -> dict[str, Any]:
    """Both peaks of one setup, and how long each took."""
    if "liger" in (setup.loss, setup.kernels) and not (find_spec("liger_kernel") and find_spec("triton")):
        raise NotImplementedError("liger-kernel and Triton are not installed")
    config = config_of(num_layers)
    with tempfile.TemporaryDirectory() as name, prepared(tool, setup, config, Path(name)) as words:
        began = time.monotonic()
        trace = traced(words, Path(name), expandable_segments=setup.expandable_segments)
        trace_s = time.monotonic() - began
    capability = find_gpu(GPU).compute_capability
    assert capability is not None
    report = report_for_config(config, capability, setup)
    assert isinstance(report, DryRunReport), report
    dry = report.prediction
    return {
        "traced_bytes": trace.peak_allocated_bytes,
        "dry_run_bytes": dry.peak_allocated_bytes,
        "error_fraction": dry.peak_allocated_bytes / trace.peak_allocated_bytes - 1,
        "traced_reserved_bytes": trace.peak_reserved_bytes,
        "dry_run_reserved_bytes": dry.peak_reserved_bytes,
        "traced_phases": dict(trace.phase_peaks_bytes),
        "dry_run_phases": dict(dry.phase_peaks_bytes),
        "trace_s": round(trace_s, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", action="append", choices=TOOLS)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--only", default="")
    parser.add_argument("--point", action="append", help="exact name of a point; repeatable")
    parser.add_argument("--json", action="store_true", help="the rows on stdout instead of the file")
    parser.add_argument("--kernels", choices=("eager", "liger"), default="eager")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    rows: dict[str, Any] = {}
    for (name, setup), tool in product(setups(arguments.kernels), arguments.tool or TOOLS):
        key = f"{tool}: {name}"
        if arguments.only not in name or (arguments.point and key not in arguments.point):
            continue
        try:
            row = compare(tool, setup, arguments.layers)
        except NotImplementedError as error:
            rows[key] = {"not_run": str(error)}
            print(f"{key}: not run: {error}", flush=True)
            continue
        rows[key] = row
        print(
            f"{key:75s} traced {row['traced_bytes'] / 2**20:9.1f} MiB  dry run {row['dry_run_bytes'] / 2**20:9.1f} MiB"
            f"  {100 * row['error_fraction']:+6.2f} %  {row['trace_s']} s",
            file=sys.stderr if arguments.json else None,
            flush=True,
        )
    if arguments.json:
        print(json.dumps(rows))
        return
    out = OUT if arguments.kernels == "eager" else OUT.with_name("trace_liger_vs_dryrun.json")
    rows = {**(json.loads(out.read_text())["rows"] if out.exists() else {}), **rows}
    errors = sorted(abs(point["error_fraction"]) for point in rows.values() if "error_fraction" in point)
    print(f"{len(errors)} points: median {100 * statistics.median(errors):.2f} %, worst {100 * errors[-1]:.2f} %")
    out.write_text(json.dumps({"model": MODEL, "layers": arguments.layers, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
