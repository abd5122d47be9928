"""The LoRA rank floor: rank trades quality for speed, so a search for the fastest setup must not choose it freely."""

from planner.memory.workload import MIN_RANK_GIVEN, Workload
from planner.models.spec import ModelSpec
from planner.models.targets import lora_linears, num_lora_params

DEFAULT_RANK = 16
BITS_PER_PARAMETER = 2.0
BITS_PER_TOKEN = 1.0
MAX_RANK = 256


def active_experts(model: ModelSpec, targets: str | tuple[str, ...]) -> int:
    """Experts that a token passes in a layer whose stacks get adapters of their own; 1 where none do."""
    if not model.expert_stacks:
        return 1
    stacks = [linear for _, _, linears in lora_linears(model, targets) for linear in linears if linear.is_stack]
    return max((stack.num_active for stack in stacks), default=1)


def rank_floor(model: ModelSpec, targets: str | tuple[str, ...], dataset_tokens: int | None) -> tuple[int, str]:
    """The smallest rank a plan may use, and the rule that gave it.

    An adapter stores about 2 bits per trainable parameter; training text carries about 1 bit per token. The rank is
    the smallest power of two whose adapter can hold the data set, between TRL's default of 16, which costs under 1 % of
    the speed of 8, and 256. Where every expert of a mixture gets its own adapter, a token passes as many of them as are
    active: the smallest rank is divided by their number.

    Source: Schulman et al. 2025, LoRA Without Regret, https://thinkingmachines.ai/blog/lora/ (of mixtures too); TRL
    1.16 ModelConfig.
    """
    active = active_experts(model, targets)
    rank = least = 1 << max(0, ((DEFAULT_RANK - 1) // active).bit_length())  # the next power of two
    words = f"TRL's default rank {DEFAULT_RANK}"
    if active > 1:
        words += f", over the {active} experts that a token passes: {least}"
    if dataset_tokens is None:
        return least, f"no data set size given: {words}; --dataset-tokens gives a rule"
    per_rank = num_lora_params(model, targets, 1)
    while rank < MAX_RANK and BITS_PER_PARAMETER * per_rank * rank < BITS_PER_TOKEN * dataset_tokens:
        rank *= 2
    capacity = BITS_PER_PARAMETER * per_rank * rank
    enough = "holds" if capacity >= dataset_tokens else "still falls short of"
    reason = (
        f"rank {rank} gives {per_rank * rank:,} adapter parameters, whose ~2 bits each {enough} "
        f"the ~1 bit of each of {dataset_tokens:,} tokens"
    )
    return rank, reason


def floor_of(workload: Workload, targets: str | tuple[str, ...]) -> tuple[int, str]:
    """The rank floor of a workload where these matrices are adapted, and the rule that gave it: the workload's own is
    of those that it was made for, or was asked for."""
    made_for = workload.fixed.get("lora_targets", ("all-linear",))[0]
    asked_for = "lora_rank" in workload.fixed or workload.min_rank_reason in ("", MIN_RANK_GIVEN)
    if targets == made_for or asked_for:
        return workload.min_rank, workload.min_rank_reason
    return rank_floor(workload.model, targets, workload.data.epoch_tokens)


def planned_ranks(workload: Workload, targets: str | tuple[str, ...]) -> tuple[int, ...]:
    """The ranks that are open where these matrices are adapted: the user's, or the floor and its double, which a search
    tries alone (`planner.planning.space.planned_values`)."""
    floor, _ = floor_of(workload, targets)
    return workload.fixed.get("lora_rank") or tuple(rank for rank in (floor, 2 * floor) if rank <= 4096) or (floor,)
