"""The kinds of adapters side by side: each in the place of LoRA in one setup."""

from typing import Any

from planner.choices.adapters import ADAPTERS, Adapter
from planner.decision.candidates import candidate
from planner.errors import SetupError
from planner.memory.trained import trained_parameters
from planner.models.spec import ModelSpec
from planner.models.targets import scaling_targets
from planner.outcome import Candidate
from planner.records import dataclass
from planner.setup import TrainSetup
from planner.workload import Workload


@dataclass(frozen=True, kw_only=True)
class KindChoice:
    """One kind of adapter.

    Attributes:
        num_trained: trained parameters; 0 where it was refused.
        candidate: its setup with memory and speed, None where it was refused.
        changed: what had to differ from LoRA's setup, beside kind and size.
        refused: why there is no such setup.
    """

    kind: Adapter
    num_trained: int = 0
    candidate: Candidate | None = None
    changed: tuple[str, ...] = ()
    refused: str = ""


def compare_kinds(workload: Workload, lora: TrainSetup) -> list[KindChoice]:
    """Every kind in the place of LoRA: the same base, length, micro-batch and optimizer, so that what differs is the
    adapter's. A kind whose size is a rank takes LoRA's; any other its usual one.
    """
    return [_choice(workload, lora, row) for row in ADAPTERS.values()]


def _choice(workload: Workload, lora: TrainSetup, row: Adapter) -> KindChoice:
    changes, changed = _changes(workload.model, lora, row)
    try:
        setup = lora.replace(**changes)
        num = trained_parameters(workload.model, setup).num
    except SetupError as error:
        return KindChoice(kind=row, refused=error.message)
    return KindChoice(kind=row, num_trained=num, candidate=candidate(workload, setup), changed=changed)


def _changes(model: ModelSpec, lora: TrainSetup, row: Adapter) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The fields in which a kind's setup differs from LoRA's, and what a person must know of them."""
    changes: dict[str, Any] = {"adapter": row.name}
    said = []
    if row.form != "low-rank":
        changes["lora_rank"] = row.usual_size
    if row.form == "scales":
        changes["lora_targets"] = scaling_targets(model)
    elif not row.adapts_matrices:
        changes["lora_targets"] = "all-linear"
    if row.name == "ln-tuning" and lora.quantized:
        changes["adapter_dtype"] = "auto"
    if lora.checkpointing and not row.checkpointing:
        changes |= {"checkpointing": 0, "activation_offload": False, "selective_checkpointing": False}
        said.append("checkpointing off")
    return changes, tuple(said)
