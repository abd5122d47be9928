"""docs/accuracy/operators.md: the dry run's speed against real runs, and its prices against profiled kernels.

python -m benchmarks.operator_speed --write        # needs the torch extra; a few minutes, less from the dry run's cache
"""

import math
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

from benchmarks.accuracy_summary import FOLDER
from benchmarks.measured import own_rows
from benchmarks.multi_gpu_points import load_points as load_layouts
from benchmarks.shared import DATA, rows_of
from benchmarks.speed_points import load_points
from planner.hardware.gpu import GpuSpec
from planner.hardware.gpus import find_gpu
from planner.models import catalogue
from planner.models.spec import ModelSpec
from planner.planning.run_speed import rank_speed, run_speed
from planner.setup import TrainSetup
from planner.setup.interchange import setup_from_dict
from planner.speed.operators import Program
from planner.speed.prices import price
from planner.speed.rates import card_rates
from planner.speed.roofline import Conditions, conditions_of, throughput_profile
from planner.speed.several_gpus.speed import layout_step_time
from planner.speed.sized import program_speed
from planner.speed.timeline import loop_of
from probes.dryrun import DryRunReport, dry_run_report

H100 = DATA / "h100"
COMPILED = ("l1-lora-compiled", "l1-lora-compiled-4", "l1-full-compiled")
PAGE = """# Seconds from the operators of a run

Written by `python -m benchmarks.operator_speed --write`. The dry run's speed: every operator that the real step
issues, priced by the card's measured rates (`planner/speed/prices.py`), issued by a host of the measured class
(`planner/speed/host.py`). Beside it the program of the setup's structure (docs/step-profiles.md: the same without a dry
run; empty where none ships) and the hand-made formula, which stands where there is none. Errors are of the step's
seconds, predicted / measured - 1.
Measured steps are medians after the first, begin to end; the few milliseconds between two steps are in neither.
"waits": share of the step that the device waits for the host.

## H200, TRL's own trainer

No price and no host time was read off these runs; one was chosen while they were watched: 9 us
for the launches of a product, of the 7 to 11 that the H100's profiles leave open.

{h200}
## H100, TRL's own trainers

The machine that prices and host times were read off. While `q8-lora-mb1` to `qwen35` ran, another process condensed \
the trace of the case before: host-bound steps vary by a third (`q05-lora-mb8-ck-liger`: 0.36 to 0.50 s).

{h100}
## Published runs of others

All whose setup says their program whole; the formula was fitted to them, the prices were not.

| card | runs | dry run: median | mean | worst | formula: median | worst |
|---|---:|---:|---:|---:|---:|---:|
{published}

## Published runs on several GPUs

The dry run of a rank: what it exchanges on a third clock (`planner/speed/rank_timeline.py`), over its cluster's links.
Of samples of a thousand tokens and more, in the plain form of each job: FSDP 1 is run as FSDP2, older stacks as
today's. The formula was fitted to these runs and knows what each ran on; the ranks' prices were fitted to none.

| source | card | engine | runs | dry run: median | mean | worst | formula: median | worst |
|---|---|---|---:|---:|---:|---:|---:|---:|
{ranks}

## Device time, kernel by kernel

The rows' shares of the rates were read off these profiles, whatever the model.

{kernels}

## What falls short

- LLM.int8() multiplies outlier columns apart, as many as the values give: with random weights 11,800 to 12,285 of
  12,288 in 88 of 504 products (`q8-int8-mb2-ck-liger`: 0.24 of its 0.84 s on the device: addmm 0.17, index 0.03,
  index_put 0.01, unpacking and copies); none are counted, real weights have a handful.
- The host is the class of machine that was measured, a rented virtual one. A bare server's CPU is up to twice as fast
  (a B200's published runs at 512 tokens); the band says what 30 % do.
- What a setup keeps on the host, `torch.compile`, generation, tensor, expert and pipeline parallelism are not priced:
  there the formula's speed stands.
- Host-bound steps wander: the H200's QLoRA with eager kernels took 1.23 (the first, which warms up), 1.37, 1.42 and
  1.67 s, its LoRA with Liger's 1.99, 1.85 and 1.77. The H100's, beside the other process, are slower than the same
  on the H200.
"""


class Row(NamedTuple):
    """One run: measured seconds, the lowest and highest, the dry run's, the program's (None: it has none), the
    formula's, and the share that waits."""

    case: str
    measured_s: float
    low_s: float
    high_s: float
    run_s: float
    program_s: float | None
    formula_s: float
    waits: float


def program_of(model: ModelSpec, gpu: GpuSpec, setup: TrainSetup) -> Program | None:
    """The operators of a dry run, None where it cannot follow."""
    report = dry_run_report(model, gpu, setup)
    return report.program if isinstance(report, DryRunReport) else None


def row_of(case: str, steps_s: Sequence[float], model: ModelSpec, gpu: GpuSpec, setup: TrainSetup) -> Row | None:
    operators = program_of(model, gpu, setup)
    if operators is None:
        return None
    run = run_speed(operators, model, gpu, setup)
    formula = throughput_profile(model, gpu, setup, conditions=conditions_of(setup)).step_time(setup).step_time_s
    between = run.parts_s["trainer"]  # of all three
    shipped = program_speed(model, gpu, setup)
    program = None if shipped is None else shipped.step_time(setup).step_time_s
    return Row(
        case, median(steps_s), min(steps_s), max(steps_s), run.step_s - between,
        None if program is None else program - between, formula - between, run.parts_s["host"] / run.step_s,
    )  # fmt: skip


def h200_rows() -> Iterator[Row]:
    """The runs on an H200, to which nothing here was fitted."""
    for row in own_rows():
        model = catalogue.load(row.model or "")
        if row.setup is None or not row.step_time_s or row.gpu != "h200" or model is None:
            continue
        compared = row_of(row.config_id, [row.step_time_s], model, find_gpu("h200"), row.setup)
        if compared is not None:
            yield compared


def h100_steps() -> Iterator[tuple[dict[str, Any], ModelSpec, TrainSetup]]:
    """The runs on an H100, compiled and generating ones left out."""
    for row in rows_of(H100 / "steps.jsonl"):
        values = dict(row["setup"])
        model = catalogue.load(values.pop("model"))
        if row["case"] not in COMPILED and model is not None:
            yield row, model, setup_from_dict(values)


def h100_rows() -> Iterator[Row]:
    for row, model, setup in h100_steps():
        compared = row_of(row["case"], row["step_s"][1:], model, find_gpu("h100-sxm"), setup)
        if compared is not None:
            yield compared


def published_rows() -> Iterator[tuple[str, float, float]]:
    """(card, error of the dry run, error of the formula) of the published single-GPU runs that a setup says whole: no
    kernels of the source's own, no padding, no experts in a loop, nothing compiled."""
    plain = Conditions()
    for point in load_points():
        conditions = point.conditions
        experts = any(linear.num > 1 for kind in point.model.layer_kinds for linear in kind.linears)
        like = replace(
            conditions,
            reentrant_checkpointing=False,
            loop_experts=False,
            cudnn_attention=False,
            gradient_clipping=True,
            trainer_overhead=True,
        )
        if like != plain or experts or point.setup.compile or point.labels["num_gpus"] != "1":
            continue
        setup = point.setup
        if conditions.reentrant_checkpointing and setup.checkpointing:
            setup = setup.replace_trusted(reentrant_checkpointing=True)
        if point.group in ("ms_swift_benchmark", "llamafactory_wiki"):  # how long their samples were is not known
            continue
        program = program_of(point.model, point.gpu, setup)
        if program is None:
            continue
        measured = setup.tokens_per_step / point.tokens_per_s
        formula = throughput_profile(point.model, point.gpu, setup, conditions=conditions).step_time(setup).step_time_s
        loop = loop_of(setup)
        if not conditions.trainer_overhead:
            loop = replace(loop, waits=False, trainer=False)
        step_s = run_speed(program, point.model, point.gpu, setup, loop=loop).step_s
        yield point.gpu.name, step_s / measured - 1, formula / measured - 1


def rank_rows() -> Iterator[tuple[str, float, float]]:
    """(source, card and engine, error of a rank's dry run, error of the formula) of published jobs on several GPUs."""
    for point in load_layouts():
        setup = point.speed_setup
        own_code = point.source in ("llm_foundry", "tinyllama")  # MPT's and TinyLlama's own model code
        if own_code or point.tokens_per_s is None or setup.offload != "none" or setup.seq_len_tokens < 1000:
            continue
        program = program_of(point.model, point.gpu, setup)
        if program is None:
            continue
        measured_s = setup.tokens_per_step / setup.num_gpus / point.tokens_per_s
        job = point.model, point.gpu, setup, point.cluster
        formula = layout_step_time(*job, conditions=point.conditions).step_time_s
        engine = "FSDP 1" if point.conditions.fsdp_1 and setup.parallel == "fsdp2" else point.strategy
        step_s = rank_speed(program, point.model, point.gpu, setup, point.cluster).step_s
        yield f"{point.source} | {point.gpu.name} | {engine}", step_s / measured_s - 1, formula / measured_s - 1


# Kernels

FAMILIES: Mapping[str, str] = {
    "_to_copy": "copy_", "clone": "copy_", "zeros": "fill_", "new_zeros": "fill_", "zero_": "fill_", "zeros_like":
    "fill_", "_scaled_dot_product_flash_attention": "attention", "_scaled_dot_product_efficient_attention": "attention",
    "_scaled_dot_product_flash_attention_backward": "attention backward",
    "_scaled_dot_product_efficient_attention_backward": "attention backward",
    "_cudnn_attention_forward": "attention", "_cudnn_attention_backward": "attention backward",
    "LigerSiLUMulFunction": "swiglu", "LigerSiLUMulFunctionBackward": "swiglu_backward",
    "LigerRMSNormFunction": "rms_norm", "LigerRMSNormFunctionBackward": "rms_norm_backward",
    "LigerRopeFunction": "rope", "LigerRopeFunctionBackward": "rope",
    "ChunkedLogProbFunction": "logprob_tile", "ChunkedLogProbFunctionBackward": "logprob_tile_backward",
    "gemm_4bit": "mm with its dequantization", "dequantize_4bit": "mm with its dequantization",
    "dequantize_blockwise": "mm with its dequantization", "mm": "mm with its dequantization",
}  # fmt: skip
"""Operators of either side under one name: bitsandbytes' products launch cuBLAS through `aten::mm`."""


def predicted_device_s(program: Program, gpu: GpuSpec, setup: TrainSetup) -> dict[str, float]:
    """Device seconds of a step by family of operators."""
    rates, by_family = card_rates(gpu, setup.attention), defaultdict[str, float](float)
    times = Counter({place: setup.accumulation_steps * n for place, n in Counter(program.micro_batch).items()})
    times.update(program.step)
    for place, repeats in times.items():
        for number, count in Counter(call // 5 for call in program.segments[place].calls).items():
            name = program.operators[number].name.partition(".")[2].partition(".")[0]
            by_family[FAMILIES.get(name, name)] += repeats * count * price(program.operators[number], rates).seconds
    return by_family


def kernel_table() -> Iterator[str]:
    steps = {row["case"]: (model, setup) for row, model, setup in h100_steps()}
    gpu = find_gpu("h100-sxm")
    by_family: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    yield "| profiled step | device ms | predicted | |"
    yield "|---|---:|---:|---:|"
    for profile in rows_of(H100 / "profiles.jsonl.gz"):
        model, setup = steps.get(profile["case"], (None, None))
        program = program_of(model, gpu, setup) if model is not None and setup is not None else None
        if program is None or setup is None:
            continue
        mine = predicted_device_s(program, gpu, setup)
        theirs = defaultdict[str, float](float)
        for operator, *_, micros in profile["kernels"]:
            name = operator.rpartition(":")[2]
            theirs[FAMILIES.get(name, name)] += micros / 1e6
        theirs["copies"] = sum(micros for *_, micros in profile["copies"]) / 1e6
        for name in mine.keys() | theirs.keys():
            by_family[name][0] += mine[name]
            by_family[name][1] += theirs[name]
        total, truth = sum(mine.values()), sum(theirs.values())
        error = 100 * (total / truth - 1)
        yield f"| {profile['case']} | {1e3 * truth:.1f} | {1e3 * total:.1f} | {error:+.1f} % |"
    yield ""
    yield "| operators, all steps together | device ms | predicted |"
    yield "|---|---:|---:|"
    for name, (mine_s, theirs_s) in sorted(by_family.items(), key=lambda entry: -max(entry[1]))[:24]:
        yield f"| {name or '(no operator)'} | {1e3 * theirs_s:.1f} | {1e3 * mine_s:.1f} |"


def table(rows: Sequence[Row]) -> str:
    lines = ["| case | measured s | of its steps | dry run | program | formula | waits |"]
    lines.append("|---|---:|---:|---:|---:|---:|---:|")
    for row in rows:
        layout = f"{row.low_s:.3f} to {row.high_s:.3f}" if row.high_s > row.low_s else ""
        errors = ["" if step_s is None else f"{100 * (step_s / row.measured_s - 1):+.1f} %" for step_s in row[4:7]]
        cells = [row.case, f"{row.measured_s:.3f}", layout, *errors]
        lines.append(f"| {' | '.join(cells)} | {100 * row.waits:.0f} % |")
    levels = [[abs(row[level] / row.measured_s - 1) for row in rows if row[level] is not None] for level in (4, 5, 6)]
    for name, of in (("median", median), ("worst", max)):
        cells = [f"{100 * of(errors):.1f} %" if errors else "" for errors in levels]
        lines.append(f"| {name} | | | {' | '.join(cells)} | |")
    return "\n".join(lines) + "\n"


def published_table(rows: Iterable[tuple[str, float, float]]) -> Iterator[str]:
    cards: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for card, run, formula in rows:
        cards[card].append((run, formula))
    for card, errors in sorted(cards.items()):
        runs, formulas = [abs(error) for error, _ in errors], [abs(error) for _, error in errors]
        mean = math.fsum(error for error, _ in errors) / len(errors)
        figures = (f"{100 * median(runs):.1f}", f"{100 * mean:+.1f}", f"{100 * max(runs):.1f}")
        figures += (f"{100 * median(formulas):.1f}", f"{100 * max(formulas):.1f}")
        yield f"| {card} | {len(errors)} | {' % | '.join(figures)} % |"


def page() -> str:
    of = {"h200": table([*h200_rows()]), "h100": table([*h100_rows()])}
    of |= {"published": "\n".join(published_table(published_rows())), "ranks": "\n".join(published_table(rank_rows()))}
    return PAGE.format(**of, kernels="\n".join(kernel_table()))


if __name__ == "__main__":
    made = page()
    if "--write" in sys.argv:
        (FOLDER / "operators.md").write_text(made, encoding="utf-8")
    print(made, end="")
