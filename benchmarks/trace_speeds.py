"""The speeds that `plan trace` says of programs, against what was measured.

    python -m benchmarks.trace_speeds [--only WORDS] [--checkout FOLDER] [--write]

Programs: a model of somebody's own with its own operations, eager and with SDPA (FOLDER: a checkout of
starbeeva/LLM-Training-Efficiency-Benchmark@8c6b0b4, whose figures are of Colab's T4; needs einops, pyrallis, pandas and
matplotlib), the plain loops of benchmarks/trace_published.py (can-i-finetune-this's, RTX 4080 on Windows; tokens/s in
benchmarks/data/measured_published.jsonl), and the launch files that this project wrote for its own runs on an H200 and
an H100, run by TRL (benchmarks/data/measured_own.jsonl), of texts that fill the length. Each is traced at full depth,
two optimizer steps, in a process of its own: Liger's patches stay in one. What a tool's file cannot say of a run's
setup leaves the run out. A second call goes on where the first one ended (benchmarks/data/trace_speeds.json); `--write`
writes docs/accuracy/trace-speeds.md.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks import trace_published
from benchmarks.accuracy_summary import FOLDER
from benchmarks.measured import MeasuredRow, own_rows, row_of
from benchmarks.shared import DATA, rows_of
from benchmarks.trace_vs_dryrun import config_of, prepared, traced
from planner.hardware.gpus import find_gpu
from planner.planning.trace_result import TraceResult
from planner.speed.traced import traced_speed
from probes.phantom.card import card_of

FORKS = get_context("fork")
OUT = DATA / "trace_speeds.json"
PAGE = FOLDER / "trace-speeds.md"
HEAD = """# Speeds of traced programs

Written by `python -m benchmarks.trace_speeds --write`: tokens/s that `plan trace` says of a program's own step (its
operators priced by the card's measured rates, issued by a rented machine's host) against tokens/s that were measured.
"band": half of the band that the trace states. Nothing was fitted to the loops on the RTX 4080; prices and host times
were read off the H100. Of the H100 six rows shared their CPU with another process (operators.md). The own model's rate
of fused attention and of narrow elementwise kernels is a T4's, read off the same source (planner/speed/rates.py).

The RTX 4080's measured figure is the mean of two or three steps with the first among them (can-i-finetune-this
`bench/runner.py`: no warm-up), on Windows with a display: what a first step takes longer, kernels to load and memory to
ask for, is in no price. On the H100 it is 1.3 to 1.6 s (TRL, eager, `steps.jsonl`); were it {first_s} s here (the
median of what is missing, times the steps), the median error would be {left}.

| program | card | measured tokens/s | traced | error | band |
|---|---|---:|---:|---:|---:|
"""


def loops() -> Iterator[tuple[str, str, float, Callable[[], TraceResult]]]:
    """Name, card, measured tokens/s and trace of each published loop."""
    published = map(row_of, rows_of(DATA / "measured_published.jsonl"))
    rows = [row for row in published if row.group.startswith("canifinetune")]
    for run in trace_published.RUNS:
        model = trace_published.QWEN.format(run.size).removesuffix("-Instruct")
        matches = [
            row
            for row in rows
            if row.setup is not None
            and row.config_id.startswith(f"{model}|")
            and (row.setup.method, bool(row.setup.checkpointing)) == (run.method, run.checkpointing)
            and (row.setup.micro_batch_seqs, row.setup.seq_len_tokens) == (run.num_seqs, run.num_tokens)
        ]
        if len(matches) == 1 and matches[0].tokens_per_s is not None:
            yield (
                f"plain loop, {run.name}",
                trace_published.GPU,
                matches[0].tokens_per_s,
                lambda run=run: trace_published.traced(run),
            )


def launched(row: MeasuredRow) -> TraceResult:
    """The trace of TRL's launch file for a run's setup.

    Raises:
        NotImplementedError: the file cannot say all of the setup.
    """
    assert row.setup is not None
    assert row.model is not None
    assert row.gpu is not None
    if row.setup.packing or row.setup.objective != "sft":
        raise NotImplementedError("its data (packed samples, pairs) is not made here")
    with tempfile.TemporaryDirectory() as name:
        folder, config = Path(name), config_of(None, row.model)
        with prepared("trl", row.setup, config, folder, row.gpu) as words:
            trace: TraceResult = traced(words, folder, expandable_segments=row.setup.expandable_segments, gpu=row.gpu)
            return trace


def of_sweep(module: str) -> Any:
    """A module of the checkout."""
    return import_module(f"src.{module}")


def swept(config: Any) -> TraceResult:
    """The trace of a run of the sweep: what its `bench` does, step by step."""
    import torch

    from probes.phantom.session import phantom_gpu
    from probes.phantom.summary import summary

    train_step, build_model = of_sweep("bench_single_gpu").train_step, of_sweep("utils").build_model
    with phantom_gpu(card_of(find_gpu("t4"))) as phantom:
        ids = torch.randint(0, config.vocab_size, (config.batch_size, config.seq_len), device="cuda")
        model = build_model(config).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        scaler = torch.amp.GradScaler("cuda", enabled=config.use_scaler)
        for _ in range(3):
            train_step(model, optimizer, scaler, ids, ids.clone(), config)
            torch.cuda.synchronize()
        return summary(phantom, "ended")


def sweep(checkout: Path) -> Iterator[tuple[str, str, float, Callable[[], TraceResult]]]:
    """Name, card, measured tokens/s and trace of the runs of a checkout that were not compiled."""
    sys.path.insert(0, str(checkout))
    rows = [json.loads(path.read_text()) for path in sorted((checkout / "results/single_gpu_sweep").glob("*.json"))]
    for row in json.loads((checkout / "results/attn_sweep/attention_sweep.json").read_text())["results"]:
        config = {"batch_size": 1, "attention_impl": row["attn_impl"], **{n: row[n] for n in ("seq_len", "precision")}}
        rows.append({**row, "run_name": f"{row['attn_impl']} 1 x {row['seq_len']}", "config": config})
    for row in rows:
        if row["tok_s"] and not row["compile"]:
            config = of_sweep("config").BenchConfig(**row["config"])
            yield f"own model, {row['run_name']}", "t4", row["tok_s"], lambda config=config: swept(config)


def programs(checkout: Path | None) -> Iterator[tuple[str, str, float, Callable[[], TraceResult]]]:
    """Name, card, measured tokens/s and trace of every program."""
    if checkout is not None:
        yield from sweep(checkout)
    yield from loops()
    for row in own_rows():
        if row.gpu is not None and row.tokens_per_s is not None and row.setup is not None and not row.unmapped:
            yield f"TRL, {row.id}", row.gpu, row.tokens_per_s, lambda row=row: launched(row)


def _row(gpu: str, measured: float, trace: Callable[[], TraceResult]) -> dict[str, Any]:
    began = time.process_time()
    try:
        traced_run = trace()
    except NotImplementedError as error:
        return {"not_run": str(error)}
    speed = traced_speed(traced_run.program, find_gpu(gpu)) if traced_run.program else None
    if speed is None or speed.tokens_per_s is None:
        return {"not_run": "the trace says no speed of it"}
    return {
        "gpu": gpu,
        "measured": measured,
        "traced": round(speed.tokens_per_s, 1),
        "error": round(speed.tokens_per_s / measured - 1, 4),
        "band": round(speed.band_fraction, 3),
        "cpu_s": round(time.process_time() - began, 1),
    }


def _send(giving: Connection, gpu: str, measured: float, trace: Callable[[], TraceResult]) -> None:
    giving.send(_row(gpu, measured, trace))


def first_step(rows: dict[str, dict[str, Any]]) -> tuple[float, float]:
    """Seconds that a loop's first step would take longer, were that what its mean of few steps misses (median), and the
    median error that would be left."""
    timed = [
        (run.num_steps, run.num_seqs * run.num_tokens / row["measured"], run.num_seqs * run.num_tokens / row["traced"])
        for run in trace_published.RUNS
        if "error" in (row := rows.get(f"plain loop, {run.name}", {}))
    ]
    longer_s = statistics.median(num * (measured_s - traced_s) for num, measured_s, traced_s in timed)
    left = [measured_s / (traced_s + longer_s / num) - 1 for num, measured_s, traced_s in timed]
    return longer_s, statistics.median(map(abs, left))


def page(rows: dict[str, dict[str, Any]]) -> str:
    first_s, left = first_step(rows)
    text = HEAD.format(first_s=f"{first_s:.2f}", left=f"{left:.1%}")
    for name, row in rows.items():
        if "error" in row:
            cells = (f"{row['measured']:,.0f}", f"{row['traced']:,.0f}", f"{row['error']:+.1%}", f"±{row['band']:.0%}")
            text += f"| {name} | {row['gpu']} | {' | '.join(cells)} |\n"
    for group in ("own model", "plain loop", "TRL, h200", "TRL, h100"):
        some = [row for name, row in rows.items() if name.startswith(group) and "error" in row]
        if some:
            errors = sorted(abs(row["error"]) for row in some)
            inside = sum(abs(row["error"]) <= row["band"] for row in some)
            text += f"\n{group}: {len(some)} programs, median {statistics.median(errors):.1%}, worst {errors[-1]:.1%}; "
            text += f"{inside} inside their bands.\n"
    left = {name: row["not_run"] for name, row in rows.items() if "not_run" in row}
    return text + ("\nNot traced:\n\n" + "".join(f"- {name}: {why}.\n" for name, why in left.items()) if left else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="programs whose name has these words")
    parser.add_argument("--checkout", type=Path, help="folder of the sweep")
    parser.add_argument("--write", action="store_true", help="write the page")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    os.environ["HF_HUB_OFFLINE"] = "1"
    rows: dict[str, dict[str, Any]] = json.loads(OUT.read_text()) if OUT.exists() else {}
    for name, gpu, measured, trace in programs(arguments.checkout):
        if arguments.only not in name or name in rows:
            continue
        taking, giving = FORKS.Pipe(duplex=False)
        child = FORKS.Process(target=_send, args=(giving, gpu, measured, trace))
        child.start()
        giving.close()
        try:
            rows[name] = taking.recv()
        except EOFError:
            rows[name] = {"not_run": "its trace ended with an error"}
        child.join()
        print(name, rows[name], flush=True)
        OUT.write_text(json.dumps(rows, indent=1) + "\n")
    if arguments.write:
        PAGE.write_text(page(rows))


if __name__ == "__main__":
    main()
