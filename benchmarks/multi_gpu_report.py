"""Writes docs/accuracy/multi-gpu.md from the figures of `benchmarks.multi_gpu_accuracy`."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.multi_gpu_points import left_out
from benchmarks.multi_gpu_scaling import PUBLISHED, weak_scaling

Rows = Mapping[str, Mapping[str, Any]]


def percent(value: float, *, signed: bool = False) -> str:
    """0.123 as "12.3 %"."""
    return f"{100 * value:+.1f} %" if signed else f"{100 * value:.1f} %"


def figures(row: Mapping[str, Any]) -> list[str]:
    """Median, 90th percentile, worst and bias of a row."""
    return [percent(row["median"]), percent(row["p90"]), percent(row["worst"]), percent(row["bias"], signed=True)]


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]], words: int) -> str:
    """A table whose first `words` columns are text."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * words + "--:|" * (len(head) - words)]
    return "\n".join(lines + ["| " + " | ".join(cells) + " |" for cells in rows])


def table(rows: Rows, labels: Sequence[str], other: Sequence[str]) -> str:
    """Rows by `labels`; `other` heads the median and 90th percentile of the second figure."""
    head = [*labels, "n", "median", "90th pct.", "worst", "bias", *other]
    cells = []
    for key, row in rows.items():
        beside = [percent(row["other"]["median"]), percent(row["other"]["p90"])][: len(other)]
        cells.append([*[part.strip() for part in key.split(" | ")], str(row["n"]), *figures(row), *beside])
    return markdown(head, cells, len(labels))


def _headline(report: Mapping[str, Any]) -> str:
    speed, memory = report["speed"], report["memory"]
    lines = (
        ("tokens/s, source held out", speed["other"], "12 %"),
        ("tokens/s, constants in use", speed, ""),
        ("peak memory of the worst rank", memory, "8 %"),
        ("the same without what FSDP 1 is known to keep", memory["other"], ""),
    )
    cells = [[name, str(one["n"]), *figures(one)[:3], aim] for name, one, aim in lines]
    return markdown(["", "configurations", "median", "90th pct.", "worst", "aim for the median"], cells, 1)


HELD = ("held out: median", "held out: 90th")
PLAIN = ("as FSDP2: median", "as FSDP2: 90th")


def render(report: Mapping[str, Any]) -> str:
    """The whole document."""
    worst = markdown(
        ["run", "error"], [[one["point"], percent(one["error"], signed=True)] for one in report["speed_worst"]], 1
    )
    worst_memory = markdown(
        ["run", "error"], [[one["point"], percent(one["error"], signed=True)] for one in report["memory_worst"]], 1
    )
    constants = markdown(
        ["constant", "stated", "in use"],
        [[f"`{name}`", f"{one['stated']:.4g}", f"{one['used']:.4g}"] for name, one in report["constants"].items()],
        1,
    )
    scaling = markdown(
        ["GPUs", "published", "predicted"],
        [[str(gpus), percent(PUBLISHED[gpus]), percent(share)] for gpus, share in weak_scaling().items()],
        0,
    )
    missing = left_out()
    gone = report["out_of_memory"]
    missed = markdown(
        ["run", "error"], [[one["point"], percent(one["error"], signed=True)] for one in gone["missed"]], 1
    )
    rows = markdown(
        ["source", "reason", "rows"], [[one["source"], one["reason"], str(one["rows"])] for one in missing], 2
    )
    return f"""# Several GPUs: predictions against published runs

Made by `python -m benchmarks.multi_gpu_accuracy` on {report["date"]}, from `benchmarks/data/multi_gpu_points.jsonl`
({report["points"]} configurations run by others, each with its source, its assumptions and its repeats;
`tools/build_multi_gpu_points.py` says how each source maps onto a setup and a cluster). Nobody here has run a job on
several GPUs: everything below is other people's figures. Errors are predicted / measured - 1.

{_headline(report)}

What these figures do not say. Almost all runs are FSDP **version 1** of 2023 and 2024; of what the planner emits today
there are {_count(report, "torchtitan")} configurations under FSDP2 (torchtitan), {_count(report, "xtuner")} under
ZeRO-3 (xtuner) and {_count(report, "ml_engineering")} under ZeRO-2 or offloaded ZeRO-3 (ml_engineering).
No pipeline-parallel run can be said as a setup; tensor parallelism is compared as a ratio only (below). Most runs hide
their communication, so they test the compute model more than the links. The structure was chosen with these points in
view (an overlap constant for FSDP 1 of its own, its units per adapter); held out means only that the constants were
fitted without the source. The compute constants were themselves fitted on llm_foundry's runs on eight GPUs and
fsdp_qlora's DDP runs, as if those had no communication.

## Throughput

tokens/s are per GPU: HF's counter counts one process, global figures were divided by the GPUs.
"held out": the constants of communication fitted without the row's source.

### By strategy

{table(report["speed_by_strategy"], ["strategy"], HELD)}

### By source

{table(report["speed_by_source"], ["source"], HELD)}

### By strategy, source and card

{table(report["speed_by_strategy_source"], ["strategy", "source", "card"], HELD)}

### llm_foundry by number of GPUs

{table(report["speed_by_gpus"], ["card", "GPUs"], HELD)}

### The worst

{worst}

- RTX 6000 Ada: no run on that card was ever fitted; its share of peak is its family's, and the 300 W card is slower.
- MPT-30b with one sequence of 8,192 tokens fills an 80 GB card to the brim: allocator retries are not predicted.
- LoRA and QLoRA of small micro-batches on two GPUs: every adapter matrix was a unit of its own under FSDP 1.

### Tensor parallelism

Share of linear weak scaling on V100s, Megatron-LM's table against ours (`benchmarks/multi_gpu_scaling.py`; the shapes
differ a little, and only the ratio is comparable).

{scaling}

### Shown apart

Figures that rest on a guess that matters, each named in the points' `assumed`: sample lengths known by their mean only
(every rank waits for the longest batch), flash attention 3 and 4 at lengths where attention is most of the step, links
and networks that nobody names, a 500 W H100 that is not in the table, selective checkpointing under torch.compile. They
are neither fitted on nor counted above.

{table(report["speed_loose"], ["strategy", "source", "card"], HELD)}

## Memory

The worst rank's peak in the source's own count (`allocated`: max_memory_allocated, `reserved`: max_memory_reserved).
No constant is fitted. "as FSDP2" is the plan's figure as it stands. The other columns add what FSDP **version 1** keeps
with frozen weights under reentrant checkpointing: each layer's recomputed input and its gradient, until the backward
ends, since its hooks on inputs hold them. Counted in PyTorch 2.13: 24 live hidden
states of eight blocks, 2 under FSDP2 (benchmarks/fsdp1_kept_inputs.py at e34acc15); Llama-2-70B in QLoRA with
4 x 4,096 tokens held 20 GiB so.

### By strategy

{table(report["memory_by_strategy"], ["strategy"], PLAIN)}

### By strategy and source

{table(report["memory_by_strategy_source"], ["strategy", "source", "method", "figure"], PLAIN)}

### The worst

{worst_memory}

- fsdp_qlora is Answer.AI's own script with its own LoRA modules on transformers of March 2024; its DDP runs, which
  shard nothing, are as far off as its FSDP runs.
- Mixtral: transformers 4 ran experts one by one and freed between them; the formula is for the grouped experts of 5.

### Runs that went out of memory

{gone["n"]} configurations; {gone["predicted"]} are predicted to need more than the card has
({gone["predicted_as_fsdp2"]} without what FSDP 1 keeps). Missed, with the predicted peak against the card:

{missed}

The same setup ran at 67 to 68 GiB allocated under other versions, so cached but unusable memory decided; nothing had
set `expandable_segments`.

### Shown apart

Liger's kernels keep other activations than the formula's (ZeRO-3 runs), and `device_map` under ms-swift 1.x cut the
model by size with lengths that vary.

{table(report["memory_loose"], ["strategy", "source", "method", "figure"], PLAIN)}

## Constants

Stated before any point was seen (`overlap_cost_fsdp_1` after a look at them), and in use (`spread` in
`planner/data/calibration.json`). 90 % of the held-out errors
lie within x or / {1 + report["band"]:.2f}: the band of a prediction for several GPUs. `cpu_adam_bytes_per_s` is what a
node's CPUs move in an optimizer step; the stated value is ZeRO-Offload's (10B parameters in 2.6 s).

{constants}

## What was left out

Rows of the collected data on several GPUs that are no point above ({sum(one["rows"] for one in missing)} rows).

{rows}
"""


def _count(report: Mapping[str, Any], source: str) -> int:
    found: int = report["speed_by_source"].get(source, {"n": 0})["n"]
    return found
