"""TRL's settings of online objectives (GRPO) as a `Rollout`."""

from collections.abc import Mapping
from typing import Any

from planner.choices.rollouts import COMPLETION_TOKENS, VLLM_FRACTION, Rollout
from planner.readers.values import Settings

PROMPT_TOKENS = 512
"""What is counted where nothing says how long prompts are: the default of TRL's former `max_prompt_length`."""

UNCOUNTED = (
    "reward_model_name_or_path",
    "cast_lm_head_to_fp32",
    "use_transformers_continuous_batching",
    "cache_implementation",
)


def rollout_fields(settings: Settings, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The rollout and the length of a sequence, which is asked for where nothing says it.

    Raises:
        ConfigError: a value that makes no sense.

    Source: trl 1.16 trainer/grpo_config.py.
    """
    completion = settings.integer("max_completion_length", COMPLETION_TOKENS, at_least=1)
    micro, steps = fields["micro_batch_seqs"], fields["accumulation_steps"]
    batch = settings.integer("generation_batch_size", 0) or micro * settings.integer("steps_per_generation", 0)
    if settings.integer("num_iterations", 1) > 1:
        settings.approximate("each generation trains several times (num_iterations): its speed is counted as if once")
    for key in UNCOUNTED:
        if settings.raw(key) not in (None, False, ""):
            settings.approximate(f"{key} is not counted")
    generator = "transformers"
    if settings.flag("use_vllm", False):
        sleeps = settings.flag("vllm_enable_sleep_mode", False)
        server = settings.text("vllm_mode", "colocate") == "server"
        generator = "vllm-server" if server else "vllm-sleep" if sleeps else "vllm"
    rollout = Rollout(
        num_generations=settings.integer("num_generations", 8),
        completion_tokens=completion,
        generation_batch_seqs=0 if batch == micro * steps else batch,
        generator=generator,
        vllm_fraction=settings.real("vllm_gpu_memory_utilization", VLLM_FRACTION),
        reference=settings.real("beta", 0.0) != 0.0,
    )
    length = settings.integer("vllm_max_model_length", 0)
    if length <= completion:
        length = completion + PROMPT_TOKENS
        taken = f"({PROMPT_TOKENS} tokens taken, then {completion} generated)"
        settings.ask("seq_len_tokens", f" does not say how long prompts are {taken}")
    return {"seq_len_tokens": length, "rollout": rollout}
