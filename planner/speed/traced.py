"""The speed of a traced program: what its last step issued, priced; and which of its lines and modules take the
time."""

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from planner.core.notes import measured
from planner.core.records import dataclass
from planner.core.units import seconds
from planner.hardware.cluster import Cluster, make_cluster
from planner.hardware.gpu import GpuSpec
from planner.speed.host import SLOW_HOST_BAND, host_of, issued_s, moving_words
from planner.speed.operators import COLLECTIVE, HOST, ISSUERS, TRAINER, Program, program_of
from planner.speed.prices import Price, needed_flops, price
from planner.speed.rank_timeline import rank_program
from planner.speed.rates import CardRates, card_rates
from planner.speed.roofline.bands import Uncertainty, base_of
from planner.speed.roofline.calibration import load_calibration
from planner.speed.roofline.rented import BETWEEN_S, COLLATED_TOKEN_S
from planner.speed.several_gpus.collectives import at_spread
from planner.speed.timeline import Loop, host_notes, run_time

_FORWARD, _RECOMPUTE, _NUM = ISSUERS.index("forward"), ISSUERS.index("recompute"), len(ISSUERS)
_SHOWN = 20


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a line or a module takes of a step: seconds of the device and of the host, and its calls."""

    name: str
    device_s: float
    host_s: float
    num_calls: int


@dataclass(frozen=True, kw_only=True)
class TracedSpeed:
    """The predicted speed of a program's own step.

    Attributes:
        tokens_per_s: by the rows that it looks up in its largest embedding to train on; None where it looks up none.
        num_gpus: whose tokens are counted together: ranks that are alike.
        mfu_fraction: products and attention but what is recomputed, over the data sheet's 16-bit rate.
        parts_s, phases_s: see `planner.speed.timeline.RunTime`.
        by_line, by_module: the dearest first; modules of equal layers together.
    """

    step_time_s: float
    tokens_per_s: float | None
    num_gpus: int
    mfu_fraction: float
    band_fraction: float
    parts_s: Mapping[str, float]
    phases_s: Mapping[str, float]
    by_line: tuple[Cost, ...]
    by_module: tuple[Cost, ...]
    notes: tuple[str, ...]


def traced_speed(rows: Mapping[str, Any], gpu: GpuSpec, cluster: Cluster | None = None) -> TracedSpeed:
    """The speed of the program whose `rows` a trace wrote (`TraceResult.program`); of all ranks together.

    Args:
        cluster: the machines of several GPUs, None: those that their number suggests.

    Raises:
        ValueError: it exchanges what its forward goes on with (tensor parallelism): DTensor's Python decides, whose
            time nobody measured.
    """
    program, num_ranks = program_of(rows), int(rows.get("num_ranks", 1))
    rates, used = card_rates(gpu), load_calibration()
    loop = Loop(accumulation=1, tokens=0, waits=False, trainer=False)
    times, slower = _times(program), tuple[float, ...]()
    if num_ranks > 1:
        if _exchanges_within(program):
            raise ValueError("no speed is said of tensor parallelism")
        cluster = cluster or make_cluster(gpu, num_ranks)
        run = rank_program(program, rates, cluster, reduces_each=True).time(loop, host_of(gpu))
        slow = rank_program(program, rates, at_spread(cluster, slow=True), reduces_each=True).time(loop, host_of(gpu))
        slower = run.host_sides[0], slow.step_s / run.step_s
    else:
        run = run_time(program, rates, loop, host_of(gpu))
        slower = (run.host_sides[0],)
    flops = tokens = 0.0
    for call, count in times.items():
        operator = program.operators[call // _NUM]
        flops += 0.0 if call % _NUM == _RECOMPUTE else count * needed_flops(operator)
    tokens = _tokens(program, times) * num_ranks
    trained = any(operator.name.startswith(TRAINER) for operator in program.operators)
    behind_s = max(0.0, _aside_s(program, times, rates) - run.step_s)
    between = BETWEEN_S + COLLATED_TOKEN_S * tokens / num_ranks if trained else 0.0
    step_s = run.step_s + behind_s + between
    hosted_s, notes = _hosted_s(program, times), host_notes(run)
    if hosted_s > 0.5 * run.parts_s["host"]:
        moving = moving_words(load_calibration().layout_constants.cpu_adam_bytes_per_s)
        notes = (measured(f"{seconds(hosted_s)} are the CPU's work on tensors in the host's memory, {moving}"),)
    nominal = gpu.bf16_flops_per_s or gpu.fp16_flops_per_s or gpu.fp32_flops_per_s or 0.0
    prices = [price(operator, rates) for operator in program.operators]
    return TracedSpeed(
        step_time_s=step_s,
        tokens_per_s=tokens / step_s if tokens else None,
        num_gpus=num_ranks,
        mfu_fraction=flops / step_s / nominal if nominal else 0.0,
        band_fraction=Uncertainty(
            base=base_of("operators", gpu, used, several=num_ranks > 1),
            slower=slower,
            unmeasured=SLOW_HOST_BAND * hosted_s / step_s,
        ).slower_fraction,
        parts_s={**run.parts_s, "copies": run.parts_s.get("copies", 0.0) + behind_s, "trainer": between},
        phases_s=run.phases_s,
        by_line=_costs(rows, program, prices, lambda line, module: line or "(libraries)"),
        by_module=_costs(
            rows, program, prices, lambda line, module: re.sub(r"\.\d+(?=\.|$)", ".*", module) or "(none)"
        ),
        notes=notes,
    )


def _exchanges_within(program: Program) -> bool:
    """Whether a micro-batch's own values come from other ranks, as DTensor's do."""
    names = (
        program.operators[call // _NUM].name
        for place in {*program.micro_batch}
        for call in program.segments[place].calls
    )
    return any(name.startswith((f"{COLLECTIVE}all_", f"{COLLECTIVE}reduce_scatter_tensor")) for name in names)


def _times(program: Program) -> dict[int, int]:
    """How often each call comes in the step."""
    counts: dict[int, int] = defaultdict(int)
    for place in (*program.micro_batch, *program.step):
        for call in program.segments[place].calls:
            counts[call] += 1
    return counts


def _hosted_s(program: Program, times: Mapping[int, int]) -> float:
    """Seconds of operators on tensors in the host's memory, such as the step of an optimizer there."""
    calls = ((program.operators[call // _NUM], call % _NUM, count) for call, count in times.items())
    hosted = ((operator, issuer, count) for operator, issuer, count in calls if operator.name.startswith(HOST))
    return sum(count * issued_s(operator, issuer, False, checkpointed=False) for operator, issuer, count in hosted)


def _aside_s(program: Program, times: Mapping[int, int], rates: CardRates) -> float:
    """The least that copies on streams of their own take, which run beside all else: those of the fuller direction."""
    moved: dict[str, float] = defaultdict(float)
    for call, count in times.items():
        operator = program.operators[call // _NUM]
        if operator.name.startswith("pcie.") and operator.name.endswith("_pinned_aside"):
            moved[operator.name] += count * operator.inputs[0].size_bytes
    return max(moved.values()) / rates.pcie if moved else 0.0


def _tokens(program: Program, times: Mapping[int, int]) -> float:
    """Rows that forwards which record a graph look up in the embedding with the most of them, or, where a program has
    none of PyTorch's, in a matrix by its rows' numbers: what a reference or a generation reads is not trained on."""
    for name in ("aten.embedding.", "aten.index.Tensor"):
        rows: dict[tuple[int, ...], float] = defaultdict(float)
        for call, count in times.items():
            operator = program.operators[call // _NUM]
            if operator.name.startswith(name) and call % _NUM == _FORWARD and len(operator.inputs) == 2:
                table, numbers = operator.inputs
                if len(table.shape) == 2 and numbers.dtype == "int64":
                    rows[table.shape] += count * numbers.numel
        if rows:
            return rows[max(rows)]
    return 0.0


def _costs(rows: Mapping[str, Any], program: Program, prices: list[Price], name_of: Any) -> tuple[Cost, ...]:
    device: dict[str, float] = defaultdict(float)
    host: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    names = [name_of(line, module) for line, module in rows["names"]]
    checkpointed = any(call % _NUM == _RECOMPUTE for segment in program.segments for call in segment.calls)
    for segment in (*program.micro_batch, *program.step):
        for call, place in zip(program.segments[segment].calls, rows["places"][segment], strict=True):
            number, issuer = divmod(call, _NUM)
            name = names[place]
            device[name] += prices[number].seconds
            host[name] += issued_s(
                program.operators[number], issuer, bool(prices[number].kernels), checkpointed=checkpointed
            )
            calls[name] += 1
    ordered = sorted(device, key=lambda name: -max(device[name], host[name]))
    return tuple(
        Cost(name=name, device_s=device[name], host_s=host[name], num_calls=calls[name]) for name in ordered[:_SHOWN]
    )
