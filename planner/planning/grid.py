"""Every setting that a person may slide through for one model on one GPU, with memory and speed by the formula: around
what `plan` chooses at each sequence length, which is one of them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import product
from typing import Any

from planner.core.errors import PlannerError, SetupError
from planner.core.records import dataclass
from planner.memory.attention_kernels import missing_kernels
from planner.memory.workload import Workload
from planner.options.precisions import PRECISIONS
from planner.planning.answer import best_by_method, plan_workload
from planner.planning.decision.candidates import candidate
from planner.planning.groups import WalkCache
from planner.planning.plan import NoPlan, Plan
from planner.planning.space import branches, dimension_values
from planner.setup import TrainSetup
from planner.setup.outcome import Candidate

RANKS = (8, 16, 32, 64)
LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
METHODS = ("full", "lora", "qlora")


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The settings in the order of `cells`: methods (method, rank; rank 0: full), then lengths, batches, checkpointing.

    Attributes:
        workloads: one for each length; `usual`: the place of the one that a plan takes where nobody says.
        answers: what `plan` answers at each length, None where it refuses.
        cells: None where a setup cannot be, and of checkpointing every n-th layer at lengths of which no plan takes it.
    """

    workloads: tuple[Workload, ...]
    usual: int
    answers: tuple[Plan | NoPlan | None, ...]
    methods: tuple[tuple[str, int], ...]
    lengths: tuple[int, ...]
    batches: tuple[int, ...]
    checkpointing: tuple[int, ...]
    cells: tuple[Candidate | None, ...]

    @property
    def workload(self) -> Workload:
        return self.workloads[self.usual]

    def workload_of(self, at: int) -> Workload:
        return self.workloads[at // (len(self.batches) * len(self.checkpointing)) % len(self.lengths)]

    def fastest(self) -> tuple[int | None, ...]:
        """The cell that `plan` chooses, of each length; None where nothing fits."""
        indices: list[int | None] = []
        for at, answer in enumerate(self.answers):
            if not isinstance(answer, Plan):
                indices.append(None)
                continue
            setup = answer.chosen.setup
            place = self.methods.index((setup.method, setup.lora_rank if setup.method != "full" else 0))
            place = place * len(self.lengths) + at
            place = place * len(self.batches) + self.batches.index(setup.micro_batch_seqs)
            indices.append(place * len(self.checkpointing) + self.checkpointing.index(setup.checkpointing))
        return tuple(indices)


def grid_of(workloads: Sequence[Workload], usual: int) -> Grid:
    """The grid of a model's workloads on one GPU, which differ in their length alone.

    What no slider changes (optimizer, loss, attention, kernels, ...) is what a plan takes of the method at that length;
    of a method that does not fit, what it takes of the chosen one.
    """
    cache, answers = WalkCache(), list[Plan | NoPlan | None]()
    for workload in workloads:
        try:
            answers.append(plan_workload(workload, cache=cache, num_ranked=1))
        except PlannerError:
            answers.append(None)
    chosen = [answer.chosen.setup for answer in answers if isinstance(answer, Plan)]
    ranks = sorted({*RANKS, *(setup.lora_rank for setup in chosen if setup.method != "full")})
    methods = (("full", 0), *product(METHODS[1:], ranks))
    batches = tuple(sorted({*MICRO_BATCHES, *(setup.micro_batch_seqs for setup in chosen)}))
    checkpointing = tuple(sorted({0, 1, *(setup.checkpointing for setup in chosen)}))
    of_lengths = [
        (workload, _bases(workload, answer), {0, 1, answer.subject.setup.checkpointing if answer is not None else 1})
        for workload, answer in zip(workloads, answers, strict=True)
    ]
    cells = (
        _cell(workload, base.get(method) if every in offered else None, rank, batch, every)
        for method, rank in methods
        for workload, base, offered in of_lengths
        for batch, every in product(batches, checkpointing)
    )
    return Grid(
        workloads=tuple(workloads),
        usual=usual,
        answers=tuple(answers),
        methods=methods,
        lengths=tuple(workload.seq_len_tokens for workload in workloads),
        batches=batches,
        checkpointing=checkpointing,
        cells=tuple(cells),
    )


def _cell(workload: Workload, base: TrainSetup | None, rank: int, batch: int, every: int) -> Candidate | None:
    if base is None:
        return None
    steps = max(1, workload.global_batch_seqs // batch)
    fields: dict[str, Any] = {"micro_batch_seqs": batch, "accumulation_steps": steps, "checkpointing": every}
    if rank:
        fields["lora_rank"] = rank
    if not every:  # nothing is recomputed, so nothing of it is offloaded or kept
        fields |= {"activation_offload": False, "selective_checkpointing": False}
    elif base.attention == "flash-attention-2":  # which leaves the graph of a checkpointed layer
        fields["compile"] = False
    try:
        setup = base.replace(**fields)
    except SetupError:
        return None
    return None if missing_kernels(workload.model, workload.gpu, setup) else candidate(workload, setup)


def _bases(workload: Workload, answer: Plan | NoPlan | None) -> dict[str, TrainSetup]:
    """Method -> the setup whose other settings its cells have."""
    best: dict[str, TrainSetup] = {}
    if isinstance(answer, Plan):
        best = {option.setup.method: option.setup for option in best_by_method(answer).values()}
        best[answer.chosen.setup.method] = answer.chosen.setup
    try:
        values = dimension_values(workload)
    except PlannerError:
        return best
    others = dict(_usual_bases(workload, values, answer.subject.setup if answer is not None else None))
    return {**others, **best}


def _usual_bases(
    workload: Workload, values: Mapping[str, tuple[Any, ...]], like: TrainSetup | None
) -> Iterator[tuple[str, TrainSetup]]:
    """(method, setup as a plan would first walk it), with the optimizer, loss, ... of `like` where it may have them."""
    common = {}
    for name in ("attention", "loss", "kernels", "optimizer"):
        wanted = getattr(like, name, None)
        common[name] = wanted if wanted in values[name] else values[name][0]
    for method in METHODS:
        bits = "nf4-double" if method == "qlora" else "none"
        if method not in values["method"] or bits not in values["quantization"]:
            continue
        rank = RANKS[0] if method != "full" else 0
        fields = {"method": (method,), "quantization": (bits,), "kbit_fp32_cast": (False,), "lora_rank": (rank,)}
        setups = sorted(
            branches(workload, {**values, **fields}), key=lambda each: not PRECISIONS[each.precision].autocast
        )
        for first in setups[:1]:
            with suppress(SetupError):
                yield method, first.replace(**common, seq_len_tokens=workload.seq_len_tokens)
