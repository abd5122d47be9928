"""`Rollout`: how the completions that an online objective (GRPO) trains on come about."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any, Self, final

from planner.core.errors import SetupError
from planner.core.records import dataclass
from planner.options.nested import read_record, values_of

GENERATORS = ("transformers", "vllm", "vllm-sleep", "vllm-server")
"""Who generates: the model itself by transformers, vLLM beside it on the same card for good or asleep while the model
trains, or a vLLM server on other cards."""
COLOCATED = ("vllm", "vllm-sleep")
COMPLETION_TOKENS = 512
"""TRL's `max_completion_length`."""
VLLM_FRACTION = 0.3
"""TRL's `vllm_gpu_memory_utilization`."""
VLLM_FRACTIONS = tuple(twentieths / 20 for twentieths in range(1, 19))
"""What a plan chooses of it, in rising order."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """One rollout, with the defaults of TRL's GRPOConfig.

    Attributes:
        num_generations: completions of a prompt; the samples of a generation are whole groups of them.
        completion_tokens: longest completion; what is left of a sequence is the prompt.
        generation_batch_seqs: completions that are made at once; 0: those of an optimizer step.
        generator: one of GENERATORS.
        vllm_fraction: share of the card that a colocated vLLM takes (`vllm_gpu_memory_utilization`).
        reference: whether the loss holds the policy near the model as it was (`beta` above 0).

    Source: trl 1.16 trainer/grpo_config.py.
    """

    num_generations: int = 8
    completion_tokens: int = COMPLETION_TOKENS
    generation_batch_seqs: int = 0
    generator: str = GENERATORS[0]
    vllm_fraction: float = VLLM_FRACTION
    reference: bool = False

    def __post_init__(self) -> None:
        for name, least in (("num_generations", 2), ("completion_tokens", 1), ("generation_batch_seqs", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise SetupError(f"{name} must be a whole number of at least {least}, got {value!r}")
        if self.generator not in GENERATORS:
            raise SetupError(f"generator must be one of {', '.join(GENERATORS)}; got {self.generator!r}")
        if not isinstance(self.reference, bool):
            raise SetupError(f"reference must be true or false, got {self.reference!r}")
        if isinstance(self.vllm_fraction, bool) or not 0.0 < float(self.vllm_fraction) < 1.0:
            raise SetupError(f"vllm_fraction must be above 0 and below 1, got {self.vllm_fraction!r}")
        if self.generation_batch_seqs % self.num_generations:
            raise SetupError(
                f"a generation of {self.generation_batch_seqs} completions is not whole groups of "
                f"{self.num_generations} (num_generations)"
            )

    @classmethod
    def usual(cls, seq_len_tokens: int) -> Self:
        """The defaults; completions take half of a sequence that has no room for a prompt beside TRL's length."""
        return cls(completion_tokens=max(1, min(COMPLETION_TOKENS, seq_len_tokens // 2)))

    @classmethod
    def read(cls, values: Any, seq_len_tokens: int) -> Self:
        """From JSON values, or one as it is; what is not there is usual.

        Raises:
            SetupError: an unknown key or a wrong value.
        """
        usual = cls.usual(seq_len_tokens).completion_tokens
        return read_record(cls, values, "rollout", completion_tokens=usual)

    @property
    def values(self) -> dict[str, Any]:
        return values_of(self)

    @property
    def colocated(self) -> bool:
        """Whether vLLM has a share of the card."""
        return self.generator in COLOCATED

    @property
    def by_vllm(self) -> bool:
        """Whether vLLM generates, wherever it is."""
        return self.generator != GENERATORS[0]

    def at_once(self, step_seqs: int) -> int:
        """Completions of one generation: those of an optimizer step where nothing else was said."""
        return self.generation_batch_seqs or step_seqs

    def within_a_step(self, step_seqs: int) -> bool:
        """Whether some generation falls between the micro-batches of an optimizer step, beside its gradients."""
        return bool(self.at_once(step_seqs) % step_seqs)

    def old_log_probs(self, step_seqs: int) -> bool:
        """Whether a forward without gradients asks the policy as it generated: of vLLM's completions always, of its own
        where they serve more than one optimizer step.

        Source: trl 1.16 GRPOTrainer._generate_and_score_completions (num_iterations 1).
        """
        return self.generator != GENERATORS[0] or bool(step_seqs % self.at_once(step_seqs))


def open_rollouts(rollout: Rollout, stated_fields: Collection[str] = ()) -> tuple[Rollout, ...]:
    """Every rollout that a plan may choose where these fields of one were said. A server is not among them: it takes
    cards beside the plan's, and shared cards were faster in TRL's own comparison at as many of them in all.

    Source: "No GPU left behind: Unlocking Efficiency with Co-located vLLM in TRL", 2025: 1.43 times a server's speed
    for a 1.5B, 1.35 to 1.73 for a 7B; https://huggingface.co/blog/vllm-colocate.
    """
    names = [rollout.generator] if "generator" in stated_fields else list(GENERATORS[:-1])
    if "vllm_fraction" in stated_fields:
        names = [name for name in names if name in COLOCATED]
    shares = (rollout.vllm_fraction,) if "vllm_fraction" in stated_fields else VLLM_FRACTIONS
    return tuple(
        replace(rollout, generator=name, vllm_fraction=share)
        for name in names
        for share in (shares if name in COLOCATED else (rollout.vllm_fraction,))
    )
