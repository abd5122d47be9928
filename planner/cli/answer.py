"""From names and wishes to a `Workload`, for the command line and for `finetune_planner` alike."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from planner.app.progress import say
from planner.choices.objectives import OBJECTIVES, Objective, aim_of, seqs_per_sample
from planner.choices.packages import absent_packages
from planner.choices.rollouts import Rollout
from planner.cli.options import Lookup
from planner.cli.wish_options import WishOptions
from planner.errors import UsageError
from planner.hardware.gpus import find_gpu
from planner.hardware.kernels import packs_apart
from planner.workload import Data, Workload

if TYPE_CHECKING:
    from planner.models.spec import ModelSpec
    from planner.samples.dataset import LengthChoice

HERE = Lookup()
"""The catalogue and the cache before the hub."""


def workload_for(
    model: str,
    gpu: str,
    wish: WishOptions,
    *,
    dataset: str | None = None,
    targets: Sequence[str] = (),
    lookup: Lookup = HERE,
) -> Workload:
    """The workload that the words mean; a local `dataset` decides what of length, packing and batch was left open.

    Raises:
        PlannerError: a name that is not known, or a wish that contradicts itself.
    """
    spec = lookup.model(model)
    card = find_gpu(gpu)
    wish = wish.on_links_of(gpu, card)
    aim = aim_of(wish.fixed())
    lengths = _lengths(dataset, spec, aim, wish) if dataset is not None else None
    if lengths is not None and aim.rolls_out:
        lengths = _with_completions(lengths, wish)
    if lengths is not None and wish.packing is None:
        wish = replace(wish, packing=lengths.packing)
    here = gpu.lower() == "local" and "axolotl" not in targets[:1]  # which brings its packages along
    asked = replace(wish.wish(), targets=tuple(targets), absent_packages=absent_packages() if here else ())
    if lengths is not None:
        data = Data(
            epoch_tokens=wish.dataset_tokens or lengths.epoch_tokens * seqs_per_sample(asked.fixed),
            epoch_seqs=lengths.epoch_seqs,
            samples_per_seq=lengths.samples_per_seq,
            real_fractions=lengths.real_fractions,
            file=str(dataset),
        )
        asked = replace(asked, seq_len=wish.seq_len or lengths.seq_len_tokens, data=data)
    return asked.workload(spec, card, wish.cluster(card))


def _with_completions(prompts: "LengthChoice", wish: WishOptions) -> "LengthChoice":
    """Lengths of prompts as those of the samples that are made of them."""
    rollout = wish.fixed().get("rollout", (Rollout(),))[0]
    more = rollout.num_generations * prompts.epoch_seqs
    return replace(
        prompts,
        real_fractions=(),  # of prompts alone
        seq_len_tokens=prompts.seq_len_tokens + rollout.completion_tokens,
        epoch_seqs=more,
        epoch_tokens=rollout.num_generations * prompts.epoch_tokens + more * rollout.completion_tokens,
    )


def _lengths(dataset: str, spec: "ModelSpec", aim: Objective, wish: WishOptions) -> "LengthChoice | None":
    """Sequence length, packing and tokens per epoch of a local data set; None for one on the hub.

    Raises:
        UsageError: data of another objective, or a number of samples beside the file that has them.
    """
    from planner.samples.dataset import choose_length, measure, tokenizer_file

    path = Path(dataset)
    if not path.exists():
        return None
    stats = measure(path, tokenizer=tokenizer_file(spec.model_id))
    if stats.columns not in aim.data:
        fitting = next(row for row in OBJECTIVES.values() if stats.columns in row.data)
        raise UsageError(
            f"{dataset} has {stats.columns} columns, --objective {aim.name} trains on {aim.columns}",
            hint=f"--objective {fitting.name} is for such data",
        )
    if wish.samples is not None:
        raise UsageError(f"{dataset} has {stats.num_samples:,} samples", hint="leave --samples out")
    seq_len = None if aim.rolls_out else wish.seq_len
    choice = choose_length(
        stats,
        max_tokens=spec.max_position_embeddings,
        packs=aim.packs and packs_apart(spec, "sdpa"),
        seq_len_tokens=seq_len,
        packing=wish.packing,
    )
    say(f"{dataset}: {stats.num_samples:,} samples, {stats.counted_with}; {choice.reason}")
    return choice
