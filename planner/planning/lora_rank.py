"""The LoRA rank floor: rank trades quality for speed, so a search for the fastest setup must not choose it freely."""

from planner.models.spec import ModelSpec
from planner.models.targets import num_lora_params

DEFAULT_RANK = 16
BITS_PER_PARAMETER = 2.0
BITS_PER_TOKEN = 1.0
MAX_RANK = 256


def rank_floor(model: ModelSpec, targets: str | tuple[str, ...], dataset_tokens: int | None) -> tuple[int, str]:
    """The smallest rank a plan may use, and the rule that gave it.

    An adapter stores about 2 bits per trainable parameter; training text carries about 1 bit per token. The rank is
    the smallest power of two whose adapter can hold the data set, between TRL's default of 16, which costs under 1 % of
    the speed of 8, and 256.

    Source: Schulman et al. 2025, LoRA Without Regret, https://thinkingmachines.ai/blog/lora/; TRL 1.16 ModelConfig.
    """
    if dataset_tokens is None:
        return DEFAULT_RANK, f"no data set size given: TRL's default rank {DEFAULT_RANK}; --dataset-tokens gives a rule"
    per_rank = num_lora_params(model, targets, 1)
    rank = DEFAULT_RANK
    while rank < MAX_RANK and BITS_PER_PARAMETER * per_rank * rank < BITS_PER_TOKEN * dataset_tokens:
        rank *= 2
    capacity = BITS_PER_PARAMETER * per_rank * rank
    enough = "holds" if capacity >= dataset_tokens else "still falls short of"
    reason = (
        f"rank {rank} gives {per_rank * rank:,} adapter parameters, whose ~2 bits each {enough} "
        f"the ~1 bit of each of {dataset_tokens:,} tokens"
    )
    return rank, reason
