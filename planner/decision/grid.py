"""Every setting that a person may slide through for one model on one GPU, with memory and speed by the formula."""

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from planner.choices.precisions import PRECISIONS
from planner.decision.candidates import candidate
from planner.errors import SetupError
from planner.hardware.kernels import missing_kernels
from planner.outcome import Candidate
from planner.planning.space import branches, dimension_values
from planner.records import dataclass
from planner.setup import TrainSetup
from planner.workload import Workload

RANKS = (8, 16, 32, 64, 128)
LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The settings in the order of `cells`: methods (method, rank; rank 0: full), then lengths, batches, checkpointing.

    `cells` are None where a setup cannot be.
    """

    workload: Workload
    methods: tuple[tuple[str, int], ...]
    lengths: tuple[int, ...]
    batches: tuple[int, ...]
    checkpointing: tuple[int, ...]
    cells: tuple[Candidate | None, ...]


def grid_of(workload: Workload) -> Grid:
    """The grid of a workload's model and GPU: 4-bit for QLoRA, 8-bit AdamW, the loss, attention and kernels that a plan
    tries first; global batch as in the workload."""
    most = workload.model.max_position_embeddings
    lengths = tuple(length for length in LENGTHS if most is None or length <= most) or LENGTHS[:1]
    methods = (("full", 0), *product(("lora", "qlora"), RANKS))
    checkpointing = (0, 1)
    setups = _setups(workload, methods, lengths, MICRO_BATCHES, checkpointing)
    cells = tuple(None if setup is None else candidate(workload, setup) for setup in setups)
    return Grid(
        workload=workload, methods=methods, lengths=lengths, batches=MICRO_BATCHES, checkpointing=checkpointing,
        cells=cells,
    )  # fmt: skip


def _setups(
    workload: Workload,
    methods: tuple[tuple[str, int], ...],
    lengths: tuple[int, ...],
    batches: tuple[int, ...],
    checkpointing: tuple[int, ...],
) -> Iterator[TrainSetup | None]:
    values = dimension_values(workload)
    eight_bit = [name for name in values["optimizer"] if name == "adamw-8bit"]
    common = {
        "attention": values["attention"][0],
        "loss": values["loss"][0],
        "kernels": values["kernels"][0],
        "optimizer": (eight_bit or list(values["optimizer"]))[0],
    }
    for method, rank in methods:
        branch = _branch(workload, values, method, rank)
        for length, batch, every in product(lengths, batches, checkpointing):
            if branch is None:
                yield None
                continue
            try:
                setup = branch.with_(
                    **common,
                    seq_len_tokens=length,
                    micro_batch_seqs=batch,
                    accumulation_steps=max(1, workload.global_batch_seqs // batch),
                    checkpointing=every,
                )
            except SetupError:
                yield None
                continue
            yield None if missing_kernels(workload.model, workload.gpu, setup) else setup


def _branch(workload: Workload, values: Mapping[str, tuple[Any, ...]], method: str, rank: int) -> TrainSetup | None:
    """The method as a plan would first walk it, under autocast; None where the workload rules it out."""
    if method not in values["method"]:
        return None
    kept = ("nf4-double",) if method == "qlora" else ("none",)
    if not set(kept) <= set(values["quantization"]):
        return None
    narrowed = {**values, "method": (method,), "quantization": kept, "kbit_fp32_cast": (False,), "lora_rank": (rank,)}
    found = list(branches(workload, narrowed))
    return next((one for one in found if PRECISIONS[one.precision].autocast), found[0] if found else None)
