"""From names and requests to a `Workload`, for the command line and for `finetune_planner` alike."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from finetune_planner.app.progress import say
from finetune_planner.cli.options import Lookup
from finetune_planner.cli.request_options import NO_DATA_OPTIONS, DataOptions, RequestOptions
from planner.core.errors import UsageError
from planner.core.redaction import without_secrets
from planner.hardware.gpus import find_gpu
from planner.memory.attention_kernels import packs_apart
from planner.memory.workload import Data, Workload
from planner.options.objectives import OBJECTIVES, Objective, objective_spec_of, seqs_per_sample
from planner.options.rollouts import Rollout
from planner.planning.plan_request import PlanRequest
from planner.setup import TrainSetup
from planner.setup.packages import absent_packages

if TYPE_CHECKING:
    from planner.models.spec import ModelSpec
    from planner.samples.dataset import DatasetStats, LengthChoice

HERE = Lookup()
"""The catalogue and the cache before the hub."""


def workload_for(
    model: str,
    gpu: str,
    request: RequestOptions,
    *,
    data: DataOptions = NO_DATA_OPTIONS,
    targets: Sequence[str] = (),
    lookup: Lookup = HERE,
    spec: "ModelSpec | None" = None,
) -> Workload:
    """The workload that the words mean; a data set that is on this machine decides what of length, packing and batch
    was left open.

    Args:
        spec: stands for the model that `model` names, which is then not looked up.

    Raises:
        PlannerError: a name that is not known, or a request that contradicts itself.
    """
    spec = lookup.model(model) if spec is None else spec
    card = find_gpu(gpu)
    request = request.on_links_of(gpu, card)
    if data.dataset is not None and request.packing is None:
        # Whether the first target packs whatever is said, None where it does what is said.
        from planner.frameworks.exporters import TARGETS

        for setup in (TrainSetup(), TrainSetup(packing=True)) if targets else ():
            for difference in TARGETS[targets[0]].differences(setup):
                if difference.field == "packing":
                    request = replace(request, packing=bool(difference.runs_as))
    here = gpu.lower() == "local" and "axolotl" not in targets[:1]  # which brings its packages along
    plan_request = request_for(spec, request, data)
    plan_request = replace(plan_request, targets=tuple(targets))
    plan_request = plan_request.probed(absent_packages()) if here else plan_request
    return plan_request.workload(spec, card, request.cluster(card))


def request_for(spec: "ModelSpec", request: RequestOptions, data: DataOptions) -> PlanRequest:
    """The request that options and data mean for a model on any card; what the data are is told.

    Raises:
        UsageError: what makes no sense, or contradicts itself.
    """
    return request_of(spec, request, data, read_data(data, spec, objective_spec_of(request.fixed())), say)


def request_of(
    spec: "ModelSpec",
    request: RequestOptions,
    data: DataOptions,
    stats: "DatasetStats | None",
    tell: Callable[[str], None] = lambda words: None,
) -> PlanRequest:
    """The same of data that were read (`read_data`); `tell` gets what is worth knowing of their lengths."""
    objective = objective_spec_of(request.fixed())
    if stats is None:
        plan_request, file = request.request(), data.dataset or ""
        return replace(
            plan_request, data=replace(plan_request.data, file=file, names=data.names, loss_on=data.loss_on or "")
        )
    # The sequence length, packing and tokens per epoch that follow from a data set.
    from planner.samples.dataset import choose_length

    if request.samples is not None:
        raise UsageError(f"{data.dataset} has {stats.num_samples:,} samples", hint="leave --samples out")
    if (images := request.images()) is not None:
        from planner.models.encoders import image_tokens

        stats = stats.with_pictures(image_tokens(spec, images))
    loss_on = _loss_on(data, stats, objective)
    # cut sequences are packed by torchtitan alone, which has no loss on answers
    unpacked = loss_on == "answers" and min(request.fixed().get("context_degree", (1,))) > 1
    choice = choose_length(
        stats,
        max_tokens=spec.max_position_embeddings,
        packs=objective.packs and packs_apart(spec, "sdpa") and not unpacked,
        seq_len_tokens=None if objective.rolls_out else request.seq_len,
        packing=request.packing,
        held_out=_held_out(stats, objective, spec, request),
    )
    num = stats.num_left_out
    left_out = f", {num:,} row{'s' * (num > 1)} without any left out" if num else ""
    rows = ""
    if stats.rows_per_sample > 1:
        rows = (
            f", prepared as {stats.num_rows:,} rows as the chat template writes earlier answers otherwise than the last"
        )
    tell(f"{data.dataset}: {stats.num_samples:,} samples{left_out}{rows}, {stats.counted_with}; {choice.reason}")
    if stats.refused:
        tell(f"warning: {data.dataset}, {stats.refused}; launch files stop there")
    lengths = choice
    if objective.rolls_out:  # the samples that are made of the prompts
        usual = Rollout.usual(request.seq_len) if request.seq_len else Rollout()
        rollout = request.fixed().get("rollout", (usual,))[0]
        if request.seq_len is None:  # the prompts' length beside the completions', which would be half of both
            flags: dict[str, Any] = {"completion_len": rollout.completion_tokens}
            request = replace(request, **flags)
        more = rollout.num_generations * choice.epoch_seqs
        lengths = replace(
            choice,
            real_fractions=(),  # of prompts alone
            seq_len_tokens=choice.seq_len_tokens + rollout.completion_tokens,
            epoch_seqs=more,
            epoch_tokens=rollout.num_generations * choice.epoch_tokens + more * rollout.completion_tokens,
        )
    if request.packing is None:
        request = replace(request, packing=lengths.packing)
    plan_request = request.request()
    of_lengths = data_of(lengths, plan_request.fixed)
    training_data = replace(
        of_lengths,
        epoch_tokens=request.dataset_tokens or of_lengths.epoch_tokens,
        file=data.dataset or "",
        names=data.names,
        kind=stats.columns,
        loss_on=loss_on,
        answers_fraction=stats.answers_fraction,
        held_out=_held_out(stats, objective, spec, request),
    )
    return replace(plan_request, seq_len=request.seq_len or lengths.seq_len_tokens, data=training_data)


def data_of(lengths: "LengthChoice", fixed: Mapping[str, tuple[Any, ...]]) -> Data:
    """What a plan knows of data of such lengths, of whose samples the options say how many sequences each is."""
    return Data(
        epoch_tokens=lengths.epoch_tokens * seqs_per_sample(fixed),
        epoch_seqs=lengths.epoch_seqs,
        samples_per_seq=lengths.samples_per_seq,
        real_fractions=lengths.real_fractions,
    )


def _loss_on(data: DataOptions, stats: "DatasetStats", objective: Objective) -> str:
    """What the loss is on: the answers, where the data have any and nobody says otherwise; "" of other objectives."""
    if not objective.supervised:
        return ""
    answered = stats.answers_fraction is not None
    if data.loss_on == "answers" and not answered:
        raise UsageError(
            f"{data.dataset} has {stats.columns} and no answers to train on alone",
            hint="leave --loss-on out, or say which columns ask and answer: --columns question=NAME,answer=NAME",
        )
    return (data.loss_on or "answers") if answered else "all"


def _held_out(stats: "DatasetStats", objective: Objective, spec: "ModelSpec", request: RequestOptions) -> int:
    from planner.samples.rows import num_held_out

    evaluated = objective.supervised and spec.front_end is None and request.images() is None
    return num_held_out(stats.num_samples) if evaluated else 0


def read_data(data: DataOptions, spec: "ModelSpec", objective: Objective) -> "DatasetStats | None":
    """What is known of a data set that is on this machine, None of another.

    Raises:
        UsageError: data of another objective.
    """
    if data.dataset is None:
        return None
    from planner.frameworks.exporters.chat import splits
    from planner.frameworks.exporters.trl import REWARDED_BY, REWARDS
    from planner.samples.dataset import first_row, kind_of_data, measure, not_read, path_of, tokenizer_file

    path = path_of(data.dataset)
    if path is None:
        how = f"; `hf download --repo-type dataset {data.dataset}` brings it here to be planned for"
        words = "is not on this machine, so its lengths are not known: the launch files fetch it"
        say(f"{without_secrets(data.dataset)} {words}{'' if '://' in data.dataset else how}")
        return None
    if spec.front_end is not None and "audio" not in first_row(path, data.names):
        raise UsageError(
            f"{spec.model_id} turns sound into text: {data.dataset} has no column audio",
            hint="give a data set of clips with what is said in them (columns audio and text)",
        )
    kind = kind_of_data(path, objective.data, data.names)
    if kind not in objective.data:
        fitting = next(row for row in OBJECTIVES.values() if kind in row.data)
        columns = {"pairs": "anchor=NAME,positive=NAME", "labelled": "text=NAME,label=NAME"}.get(objective.data[0])
        named = f"; or --columns {columns}" if columns else ""
        raise UsageError(
            f"{data.dataset} has {kind} columns, --objective {objective.name} trains on {objective.columns}",
            hint=f"--objective {fitting.name} is for such data{named}",
        )
    if names := not_read(path):
        others = f" and {len(names) - 3} others" if len(names) > 3 else ""
        say(f"warning: {data.dataset}: {', '.join(names[:3])}{others} not read: files of the commonest kind are")
    if objective.rolls_out and not set(REWARDED_BY) & set(first_row(path, data.names)):
        wanted = ", ".join(REWARDED_BY)
        say(
            f"{without_secrets(data.dataset)} has no column {wanted}, of which the launch files' stand-in for a "
            f"reward asks for one: launch/{REWARDS} needs one of your own, and run.sh stops until then"
        )
    return measure(
        path,
        tokenizer=tokenizer_file(spec.model_id),
        columns=data.names,
        kinds=objective.data,
        loss_on=data.loss_on or "answers",
        row_per_answer=splits(spec.model_id),
    )
