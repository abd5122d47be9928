"""How many optimizer steps a data set gives: the global batch and the epochs of small data.

A step more is worth more than a sequence more in the batch once batches are small: models of every kind trained best
with 2 to 32 samples a step in Masters and Luschi 2018, https://arxiv.org/abs/1804.07612, and LoRA bears large batches
less well than full fine-tuning (Schulman et al. 2025, LoRA Without Regret). How many steps are enough nobody has
measured for all data: MIN_STEPS is a judgement (warmup over 3 % of 100 steps is 3 steps).
"""

from math import ceil, inf

DEFAULT_GLOBAL_BATCH = 32
LEAST_GLOBAL_BATCH = 8
"""In samples: below this, gradients of different lengths average badly. A judgement."""
MIN_STEPS = 100
MAX_EPOCHS = 3
"""Epochs that small data is given. Source: Taori et al. 2023, Stanford Alpaca: 3 epochs; repeated data is worth as much
as new for about 4 (Muennighoff et al. 2023, https://arxiv.org/abs/2305.16264)."""

MOST_TOKENS = 1 << 19
"""Tokens of a default batch: 524,288, the 128 sequences of 4,096 of Tulu 3's supervised stage (Lambert et al. 2024,
https://arxiv.org/abs/2411.15124)."""
PADDING_LIMIT = 0.1
"""Share of padded batches that may be padding before samples are packed. Packing changes which samples share a row, and
takes a kernel that keeps them apart: a judgement."""


def global_batch(
    epoch_seqs: int | None, num_gpus: int = 1, *, samples_per_seq: float = 1.0, seq_len_tokens: int = 0
) -> int:
    """Sequences per step where nobody says: DEFAULT_GLOBAL_BATCH, halved while an epoch has fewer than MIN_STEPS steps,
    or a step more than MOST_TOKENS, down to LEAST_GLOBAL_BATCH samples, of which a packed row holds several; a multiple
    of the number of GPUs."""
    batch, least = DEFAULT_GLOBAL_BATCH, max(1, round(LEAST_GLOBAL_BATCH / samples_per_seq))
    enough = inf if epoch_seqs is None else epoch_seqs
    while batch // 2 >= least and (enough < MIN_STEPS * batch or batch * seq_len_tokens > MOST_TOKENS):
        batch //= 2
    return num_gpus * ceil(batch / num_gpus)


def steps_per_epoch(epoch_seqs: int, global_batch_seqs: int) -> int:
    return max(1, ceil(epoch_seqs / global_batch_seqs))


def steps_of_run(epoch_seqs: int, global_batch_seqs: int, epochs: float) -> int:
    """Optimizer steps of so many passes; a part of a step is one.

    Source: transformers 5.23 `trainer.py` (set_initial_training_values).
    """
    return max(1, ceil(epochs * steps_per_epoch(epoch_seqs, global_batch_seqs)))


def num_epochs(epoch_seqs: int | None, global_batch_seqs: int) -> int:
    """Passes over the data that give MIN_STEPS steps, at most MAX_EPOCHS; 1 where the data's size is not known."""
    if epoch_seqs is None:
        return 1
    return min(MAX_EPOCHS, ceil(MIN_STEPS / steps_per_epoch(epoch_seqs, global_batch_seqs)))


def small_data_note(epoch_seqs: int | None, global_batch_seqs: int, epochs: float | None = None) -> str:
    """What so little data means for a run of `epochs` (None: by the rule), "" where an epoch has enough steps."""
    if epoch_seqs is None or steps_per_epoch(epoch_seqs, global_batch_seqs) >= MIN_STEPS:
        return ""
    steps, epochs = steps_per_epoch(epoch_seqs, global_batch_seqs), epochs or num_epochs(epoch_seqs, global_batch_seqs)
    note = (
        f"{steps} optimizer step{'s' * (steps != 1)} an epoch at {global_batch_seqs} "
        f"sequence{'s' * (global_batch_seqs != 1)}: the launch files train {epochs:g} epoch{'s' * (epochs != 1)}"
    )
    if (steps := steps_of_run(epoch_seqs, global_batch_seqs, epochs)) < MIN_STEPS:
        note += f", {steps} step{'s' * (steps != 1)}, still fewer than {MIN_STEPS}: more data helps most"
    return note


MOST_STEPS_UNSAVED = 500
SAVES, MOST_S_UNSAVED = 4, 3600
"""Checkpoints, and evaluations, of a run that is not too long: a crash, or a job's time limit, costs at most a quarter
of it, and an hour. A judgement."""


def steps_between_saves(num_steps: int | None, step_s: float = 0.0) -> float:
    """Optimizer steps from one checkpoint, and one evaluation, to the next; of a run of unknown length a share of it
    (transformers reads what is below 1 so). `step_s`: seconds that a step is predicted to take, 0 where none are."""
    if num_steps is None:
        return 0.1
    most = min(MOST_STEPS_UNSAVED, int(MOST_S_UNSAVED / step_s)) if step_s else MOST_STEPS_UNSAVED
    return max(1, min(most, ceil(num_steps / SAVES)))


def steps_between_logs(num_steps: int | None) -> int:
    """Optimizer steps from one logged loss to the next: every tenth, oftener in a run with fewer than a hundred."""
    return 10 if num_steps is None else max(1, min(10, num_steps // 10))
