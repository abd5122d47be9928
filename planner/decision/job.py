"""The job around the step: optimizer steps and checkpoints on disk, what evaluating, saving and merging take."""

from collections.abc import Iterator

from planner.memory.around import DEFAULT_EVAL_SEQS, evaluation_bytes, logits_bytes
from planner.memory.dtypes import SIZE_BYTES
from planner.memory.optimizer import paged_bytes, state_bytes
from planner.memory.trained import trained_parameters
from planner.notes import risk, usual
from planner.outcome import Candidate
from planner.samples.steps import PADDING_LIMIT, small_data_note, steps_per_epoch
from planner.setup import TrainSetup
from planner.units import gib
from planner.workload import Workload


def job_notes(workload: Workload, chosen: Candidate) -> Iterator[str]:
    """One sentence each: steps and disk where the data is known, small data, evaluation, merging."""
    weights, states = checkpoint_bytes(workload, chosen.setup)
    disk = f"a checkpoint takes {gib(weights + states)} on disk, {gib(states)} of it the optimizer's states"
    epoch_seqs, batch = workload.data.epoch_seqs, workload.global_batch_seqs
    if epoch_seqs is not None:
        epochs = workload.epochs
        steps = max(1, round(epochs * steps_per_epoch(epoch_seqs, batch)))
        disk = f"the job: {steps:,} optimizer steps, {epochs:g} epoch{'s' if epochs != 1 else ''}; {disk}"
    yield usual(disk)
    if note := small_data_note(epoch_seqs, batch, workload.epochs):
        yield risk(note)
    if note := unknown_padding_note(workload):
        yield note
    if chosen.setup.num_gpus == 1:
        yield usual(evaluation_note(workload, chosen.setup))
    if chosen.setup.method != "full":
        whole = SIZE_BYTES["bf16"] * workload.model.num_params
        words = f"merging the adapter needs the base in 16 bits, {gib(whole)}, on the GPU or in the host's memory"
        yield usual(words)


def unknown_padding_note(workload: Workload) -> str:
    """What is not known of samples that are given as numbers and do not fill their rows; else ""."""
    if not workload.data.num_samples or workload.data.file or workload.data.samples_per_seq != 1:
        return ""
    mean = (workload.data.epoch_tokens or 0) / (workload.data.epoch_seqs or 1)
    if mean >= (1 - PADDING_LIMIT) * workload.seq_len_tokens * workload.seqs_per_sample:
        return ""
    return (
        f"samples of {mean:,.0f} tokens on average in rows of {workload.seq_len_tokens:,}: time and cost count no "
        "padding, whose share --dataset FILE measures; --packing takes it away"
    )


def checkpoint_bytes(workload: Workload, setup: TrainSetup) -> tuple[int, int]:
    """Bytes on disk of (what is trained, its optimizer's states) in one checkpoint of transformers' Trainer.

    Source: transformers 5.23 `Trainer._save_checkpoint`: the model (peft: its adapters) and `optimizer.pt`.
    Not counted: tokenizer, random states and the scheduler, a few MB.
    """
    trained = trained_parameters(workload.model, setup)
    states = state_bytes(trained.num, trained.dtype, setup.optimizer, wide=trained.wide)
    states += paged_bytes(trained.num, setup.optimizer, wide=trained.wide)
    return trained.size_bytes, states


def evaluation_note(workload: Workload, setup: TrainSetup) -> str:
    """What evaluating takes, and the settings that keep it below the training peak."""
    micro = setup.micro_batch_seqs
    words = f"evaluation at {micro} at once (per_device_eval_batch_size, set in the launch files) stays below the peak"
    model, gpu = workload.model, workload.gpu
    usual = evaluation_bytes(model, gpu, setup, DEFAULT_EVAL_SEQS)
    if micro < DEFAULT_EVAL_SEQS and usual > workload.budget_bytes:
        words += f"; transformers' default of {DEFAULT_EVAL_SEQS} could take {gib(usual)}"
    return (
        f"{words}; with compute_metrics {gib(2 * logits_bytes(model, setup))} for every sequence evaluated, unless "
        "eval_accumulation_steps sends each batch's logits to the host, as the launch files do (--memory)"
    )
