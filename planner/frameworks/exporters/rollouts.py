"""What an objective that generates its completions is told in TRL's file: the rollout, and who rewards it."""

from planner.frameworks.exporters.text import Line, Section, section
from planner.setup import TrainSetup

REWARDS = "trl/rewards.py"
REWARD = "launch.trl.rewards.contains_answer"
BETA = 0.04
"""Weight of the distance to the reference where there is one: Shao et al. 2024, DeepSeekMath, section 4.2."""


def refusal(setup: TrainSetup) -> str:
    """Why TRL cannot generate as the setup says, "" when it can."""
    if not setup.objective_spec.rolls_out:
        return ""
    roll, batch = setup.rollout_settings, setup.generation_seqs
    at_once = setup.micro_batch_seqs * setup.data_degree
    if batch % roll.num_generations or batch % at_once:
        return (
            f"a generation of {batch} completions is not whole groups of {roll.num_generations} in micro-batches of "
            f"{at_once}"
        )
    return ""


def sections(setup: TrainSetup) -> list[Section]:
    """The rollout as the settings of GRPOConfig or RLOOConfig."""
    roll = setup.rollout_settings
    reference = "a second copy of the weights" if setup.method == "full" else "the base with its adapters switched off"
    beta = 0.05 if setup.objective == "rloo" else BETA  # RLOOConfig's own
    engine = [
        Line("use_vllm", roll.generator != "transformers"),
        Line("vllm_mode", "server" if roll.generator == "vllm-server" else "colocate"),
    ]
    if roll.colocated:
        engine += [
            Line("vllm_gpu_memory_utilization", roll.vllm_fraction, "of the whole card"),
            Line("vllm_enable_sleep_mode", roll.generator == "vllm-sleep"),
            Line("vllm_max_model_length", setup.seq_len_tokens),
        ]
    return [
        section(
            "objective",
            Line("reward_funcs", [REWARD], "an example: needs a column `answer`"),
            Line("loss_type", "dapo", "TRL's default") if setup.objective == "grpo" else None,
            Line("normalize_advantages", False, "TRL's default") if setup.objective == "rloo" else None,
            Line(
                "beta", beta if roll.reference else 0.0, f"the reference is {reference}" if roll.reference else "none"
            ),
        ),
        section(
            "completions",
            Line("num_generations", roll.num_generations, "of each prompt"),
            Line("generation_batch_size", setup.generation_seqs, "made at once"),
            *(engine if roll.generator != "transformers" else engine[:1]),
        ),
    ]
