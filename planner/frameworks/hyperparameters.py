"""Hyper-parameters by stated rules. Memory and speed do not depend on them; quality does, so each rule has a source.

The rules give a starting point, not a tuned value: the reasons travel with the numbers into every emitted file.
"""

from collections.abc import Mapping
from dataclasses import field
from math import sqrt

from planner.core.records import dataclass
from planner.options.optimizers import OPTIMIZERS
from planner.setup import TrainSetup

BASE_LEARNING_RATE = 2e-5
"""Adam's rate for full fine-tuning at PUBLISHED_BATCH_SEQS sequences per step.

Source: Taori et al. 2023, Stanford Alpaca (https://github.com/tatsu-lab/stanford_alpaca): 2e-5, 128 sequences, 3 %
warmup, cosine; also the default of TRL's SFTConfig (1.16).
"""

PUBLISHED_BATCH_SEQS = (16, 128)
"""The batches behind the two published rates used here, LORA_FACTOR apart: QLoRA's and Alpaca's. No rate is scaled
between them."""

LORA_FACTOR = 10.0
"""LoRA's best rate over full fine-tuning's.

Source: Schulman et al. 2025, LoRA Without Regret, https://thinkingmachines.ai/blog/lora/ (about 10 times, whatever
the rank, with alpha fixed and the update scaled by alpha / rank).
"""

LORA_ALPHA = 32
"""Fixed over ranks, so that the rate need not change with the rank. Source: LoRA Without Regret, as above."""

LARGE_MODEL_PARAMS = 30_000_000_000
LARGE_MODEL_FACTOR = 0.5
"""Source: Dettmers et al. 2023, QLoRA, appendix B.2, https://arxiv.org/abs/2305.14314: 2e-4 up to 13B, 1e-4 at 33B
and 65B (batch 16)."""

RULE_FACTORS = {"Lion": 0.2, "SGD": 100.0}
"""An optimizer's rate over Adam's. Lion: 3 to 10 times smaller (Chen et al. 2023, https://arxiv.org/abs/2302.06675).
Plain SGD: no published standard for language models exists, a starting point to tune."""

WARMUP_FRACTION = 0.03
"""Share of the steps. Source: Alpaca and QLoRA, as above, both 0.03."""

SCHEDULE = "cosine"
"""Down to zero, so that the run ends with a cooldown. Sources: Alpaca (cosine); Bergsma et al. 2025, Straight to Zero,
https://arxiv.org/abs/2502.15938 (decay all the way to zero beats stopping at 10 %)."""

TOKENS_PER_PARAM_PRETRAINING = 20.0
"""Source: Hoffmann et al. 2022, Chinchilla, https://arxiv.org/abs/2203.15556: about 20 tokens per parameter."""

LORA_BITS_PER_PARAM = 2.0
BITS_PER_TOKEN = 1.0
"""Source: LoRA Without Regret, as above: about 2 bits per trained parameter hold about 1 bit per completion token."""

OVERFITTING_TOKENS_PER_PARAM = 1e-4
"""With less data than this, full fine-tuning overfits within a few epochs. A judgement: 800,000 tokens for
8B."""

PRETRAINING_WEIGHT_DECAY, PRETRAINING_BETA2 = 0.1, 0.95
"""Of AdamW in pretraining, whose batches are large and noisy beside fine-tuning's. Sources: Brown et al. 2020, appendix
B, https://arxiv.org/abs/2005.14165; Touvron et al. 2023, LLaMA, section 2.3, https://arxiv.org/abs/2302.13971."""
ADAM_BETA2 = 0.999
"""Of AdamW in fine-tuning: PyTorch's and transformers' default, and QLoRA's."""

LORA_METHODS = ("lora", "qlora")


@dataclass(frozen=True, kw_only=True)
class Hyperparameters:
    """What the launch files need beyond the setup. `reasons` says for each field which rule gave it."""

    learning_rate: float
    lora_alpha: int = LORA_ALPHA
    warmup_fraction: float = WARMUP_FRACTION
    lr_schedule: str = SCHEDULE
    weight_decay: float = 0.0
    adam_beta2: float = ADAM_BETA2
    max_grad_norm: float = 1.0
    num_epochs: float = 1.0
    max_steps: int | None = None
    seed: int = 42
    reasons: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def batch_factor(optimizer: str, global_batch_seqs: int) -> float:
    """Factor on the learning rate for a batch outside PUBLISHED_BATCH_SEQS.

    Adaptive optimizers: square root of the batch over the nearer of them; plain SGD: the ratio itself.

    Sources: Malladi et al. 2022, On the SDEs and Scaling Rules for Adaptive Gradient Algorithms,
    https://arxiv.org/abs/2205.10287 (square root); Goyal et al. 2017, https://arxiv.org/abs/1706.02677 (linear, SGD).
    """
    least, most = PUBLISHED_BATCH_SEQS
    ratio = global_batch_seqs / min(max(global_batch_seqs, least), most)
    return ratio if optimizer == "sgd" else sqrt(ratio)


def rate_batch(global_batch_seqs: int, samples_per_seq: float) -> int:
    """Samples per step that the rate follows. A row of packed samples counts as them up to the larger published batch:
    the published rates are for samples, and no rate is raised for packing."""
    samples = round(global_batch_seqs * samples_per_seq)
    return max(global_batch_seqs, min(PUBLISHED_BATCH_SEQS[1], samples))


def choose(
    setup: TrainSetup,
    *,
    num_params: int | None = None,
    num_trained_params: int | None = None,
    dataset_tokens: int | None = None,
    samples_per_seq: float = 1.0,
    num_epochs: float = 1.0,
    max_steps: int | None = None,
    seed: int = 42,
    learning_rate: float | None = None,
) -> Hyperparameters:
    """Hyper-parameters for a setup by the rules above.

    `num_params` is the model's size, `num_trained_params` what the optimizer updates, `dataset_tokens` the tokens of
    one epoch; each only sharpens the rate or adds a note. A `learning_rate` that the user decided stays as it is.
    """
    rate, why = _rate(setup, num_params, samples_per_seq)
    pretrains = setup.objective == "pretrain" and setup.method == "full"
    as_pretrained = "as GPT-3 and LLaMA were pretrained"
    reasons = {
        "learning_rate": why if learning_rate is None else "given with --lr",
        "lora_alpha": "fixed over ranks, so the rate does not move with the rank",
        "warmup_fraction": f"{WARMUP_FRACTION:.0%} of the steps, as Alpaca and QLoRA",
        "lr_schedule": "decays to zero: the run ends with a cooldown",
        "weight_decay": as_pretrained if pretrains else "none, as Alpaca and QLoRA",
        "adam_beta2": as_pretrained,
    }
    notes = []  # what the scaling literature says about this much data for this many parameters
    if dataset_tokens and setup.method in LORA_METHODS and num_trained_params:
        capacity_tokens = num_trained_params * LORA_BITS_PER_PARAM / BITS_PER_TOKEN
        if dataset_tokens > capacity_tokens:
            rank = -(-setup.lora_rank * dataset_tokens // capacity_tokens)
            notes.append(
                f"{dataset_tokens:,} tokens are more than rank {setup.lora_rank} can store (about "
                f"{capacity_tokens:,.0f} at 2 bits per parameter and 1 bit per token): rank {rank:.0f} or full "
                "fine-tuning would hold them."
            )
    if dataset_tokens and setup.method == "full" and num_params:
        per_param = dataset_tokens * num_epochs / num_params
        if per_param > TOKENS_PER_PARAM_PRETRAINING:
            notes.append(
                f"{per_param:.0f} tokens per parameter is more than compute-optimal pretraining uses "
                f"({TOKENS_PER_PARAM_PRETRAINING:.0f}): a larger model would use this much data better."
            )
        elif dataset_tokens / num_params < OVERFITTING_TOKENS_PER_PARAM:
            notes.append(
                f"{dataset_tokens / num_params:.1g} tokens per parameter in one epoch: full fine-tuning overfits so "
                "little data within a few epochs; LoRA keeps more of what the model knows."
            )
    if dataset_tokens and num_epochs > 4:
        notes.append(
            f"{num_epochs:g} epochs: repeated data is worth as much as new data for about 4 epochs, then little "
            "(Muennighoff et al. 2023, https://arxiv.org/abs/2305.16264)."
        )
    return Hyperparameters(
        learning_rate=float(f"{rate:.3g}") if learning_rate is None else learning_rate,
        weight_decay=PRETRAINING_WEIGHT_DECAY if pretrains else 0.0,
        adam_beta2=PRETRAINING_BETA2 if pretrains else ADAM_BETA2,
        num_epochs=num_epochs,
        max_steps=max_steps,
        seed=seed,
        reasons=reasons,
        notes=tuple(notes),
    )


def _rate(setup: TrainSetup, num_params: int | None, samples_per_seq: float) -> tuple[float, str]:
    objective, rule = setup.objective_spec, OPTIMIZERS[setup.optimizer].rate_rule
    rate, why = BASE_LEARNING_RATE, [f"{BASE_LEARNING_RATE:g} (Adam, full)"]
    for applies, factor, reason in (
        (setup.method in LORA_METHODS, objective.lora_factor or LORA_FACTOR, "LoRA"),
        (objective.rate_factor != 1.0, objective.rate_factor, objective.rate_reason),
        (rule in RULE_FACTORS, RULE_FACTORS.get(rule, 1.0), rule),
    ):
        if applies:
            rate *= factor
            why.append(f"x {factor:g} for {reason}")
    if num_params is not None and num_params >= LARGE_MODEL_PARAMS:
        rate *= LARGE_MODEL_FACTOR
        why.append(f"x {LARGE_MODEL_FACTOR:g} from 30B parameters")
    batch = rate_batch(setup.global_batch_seqs, samples_per_seq)
    factor = batch_factor(setup.optimizer, batch)
    if factor != 1.0:
        rule = "linear" if setup.optimizer == "sgd" else "square root"
        why.append(f"x {factor:.3g} for a batch of {batch} ({rule})")
    return rate * factor, " ".join(why)
