"""The questions of the command line as functions, and a comparison of plans."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, get_args, get_origin, get_type_hints

from finetune_planner.answers import Checked, Comparison, Estimate, Planned, Table, Traced
from planner.core.close import close_names
from planner.core.errors import UsageError

if TYPE_CHECKING:
    from finetune_planner.cli.request_options import DataOptions, RequestOptions


class Options(TypedDict, total=False):
    """What may be asked for beside model and GPU: the options of `plan MODEL`, with the same names and defaults.

    `method`, `optimizer`, `precision`, `quantization`, `attention`, `loss`, `parallel` and `offload` take one value or
    several to choose from.
    """

    gpus: int
    nodes: int
    interconnect: str
    seq_len: int
    global_batch: int
    parallel: str | Sequence[str]
    tensor_degree: int | Sequence[int]
    context_degree: int | Sequence[int]
    expert_degree: int | Sequence[int]
    pipeline_degree: int | Sequence[int]
    schedule: str
    shard_degree: int
    reshard: bool
    offload: str | Sequence[str]
    objective: str
    num_generations: int
    completion_len: int
    generation_batch: int
    generator: str
    vllm_fraction: float
    reference: bool
    precomputed_reference: bool
    hard_negatives: int
    cached_seqs: int
    method: str | Sequence[str]
    prefer: str
    rank: int
    min_rank: int
    targets: str
    optimizer: str | Sequence[str]
    precision: str | Sequence[str]
    quantization: str | Sequence[str]
    attention: str | Sequence[str]
    checkpointing: bool
    checkpoint_every: int
    packing: bool
    loss: str | Sequence[str]
    kernels: str | Sequence[str]
    linear_attention: str | Sequence[str]
    adapter: str
    micro_batch: int
    frozen_encoder: bool
    trained_layers: int
    quantize_experts: bool
    activation_offload: bool
    selective_checkpointing: bool
    compile: bool
    no_extra_packages: bool
    memory_gib: float
    headroom: float
    host_memory: float
    dataset_tokens: int
    samples: int
    price: float
    spot: bool
    epochs: float
    lr: float
    images_per_sample: int
    image_size: str


def plan(
    model: str | Path,
    gpu: str,
    *,
    dry_run: bool = True,
    dataset: str | Path | None = None,
    columns: str | None = None,
    loss_on: str | None = None,
    target: str | Sequence[str] = (),
    like: str | None = None,
    **request: Unpack[Options],
) -> Planned:
    """The fastest setup that fits: `plan MODEL --gpu GPU`.

    Args:
        model: hub id, directory with config.json, or what people call it ("llama 3.1 8b").
        gpu: key of the GPU table, marketing name ("8xH100" is eight), "NAME:12GiB:360GB/s:29TFLOPS", or "local".
        dry_run: prove the choice with a dry run where torch is installed; False: formula only.
        dataset: file, directory or hub id to train on; one on this machine decides length, packing, batch and epochs.
        columns: which columns have other names: "question=Frage,answer=Antwort".
        loss_on: "answers" (where the data have any) or "all" tokens.
        target: one launch target or several: what is planned is what the first of them runs, and the others run too.
        like: "llama" or "mixture": the geometry of a model_type that nobody knows, with a wide band.

    Raises:
        PlannerError: a model, GPU or option that cannot be meant, with a hint.
    """
    from finetune_planner.app.levels import answered
    from finetune_planner.cli.answer import workload_for
    from finetune_planner.cli.options import Lookup
    from finetune_planner.cli.request_options import RequestOptions
    from planner.hardware.gpus import card_and_count

    gpu, num_gpus = card_and_count(gpu, request.get("gpus"))
    request_options = RequestOptions(**(_options(request) | {"gpus": num_gpus}))
    request_options.fixed()  # what the request alone contradicts is said before anything is looked up
    names = (target,) if isinstance(target, str) else tuple(target)
    data = replace(_data(dataset), columns=columns, loss_on=loss_on).checked()
    if names:
        from finetune_planner.cli.writing import known_targets

        names = known_targets(names)
    workload = workload_for(str(model), gpu, request_options, data=data, targets=names, lookup=Lookup(like=like))
    return Planned(answered(workload, dry_run=dry_run), targets=names)


def estimate(
    model: str | Path,
    gpu: str,
    *,
    dry_run: bool = True,
    memory_gib: float | None = None,
    headroom: float | None = None,
    nodes: int | None = None,
    interconnect: str | None = None,
    **setup: Any,
) -> Estimate:
    """Memory and speed of one setup: `plan estimate`.

    Args:
        nodes, interconnect: of several GPUs (`num_gpus` and `parallel` are the setup's), as in `plan`.
        setup: fields of `planner.setup.TrainSetup` (the interchange form): method, lora_rank, quantization,
            micro_batch_seqs, seq_len_tokens, ..., or what trainers call them (lora_r, batch_size, max_length, ...);
            what is not given takes its default.

    Raises:
        PlannerError: a name that is not known, or a setup that cannot exist.
    """
    from finetune_planner.cli.estimate import candidate_of
    from finetune_planner.cli.options import Memory, cluster_of
    from planner.frameworks.readers.types import SHORT_NAMES
    from planner.hardware.gpus import find_gpu
    from planner.memory.attention_kernels import default_attention
    from planner.models.resolve import resolve_model
    from planner.setup.interchange import setup_from_request

    setup = _named(setup, SHORT_NAMES)
    spec, card, wanted = resolve_model(str(model)), find_gpu(gpu), setup_from_request(setup)
    if "attention" not in setup:
        wanted = wanted.replace(attention=default_attention(spec))
    memory = Memory(memory_gib=memory_gib, headroom=headroom)
    cluster = cluster_of(card, wanted.num_gpus, nodes, interconnect)
    candidate = candidate_of(spec, card, wanted, memory, dry=dry_run, cluster=cluster)
    return Estimate(candidate, spec, card, memory.of(card)[0], cluster)


def check(
    file: str | Path,
    gpu: str,
    *,
    model: str | None = None,
    dataset: str | Path | None = None,
    dry_run: bool = True,
    settings: Sequence[str] = (),
) -> Checked:
    """Does an existing training config, script or notebook fit: `plan check`. The file is read, never executed.

    Args:
        dataset: what it trains on: memory and speed are those of its samples.
        settings: "name=value" for what the file leaves open, as `--set`.

    Raises:
        Undetermined: the file leaves open what decides; `ConfigError`: it cannot be read.
    """
    from finetune_planner.cli.checking import CheckRequest, checked

    request = CheckRequest.of(sets=settings, model=model)
    return Checked(checked(Path(file), gpu, request, data=_data(dataset), dry_run=dry_run)[0])


def trace(
    command: Sequence[str], gpu: str, *, steps: int = 2, network: bool = False, unsafe_writes: bool = False
) -> Traced:
    """What a training program needs, found by running it on a GPU that computes nothing: `plan trace`.

    It EXECUTES the program, on the CPU alone and on private copies of your files: trace only what you would run.

    Args:
        command: as on a command line: ["python", "train.py", "--lr", "1e-4"].
        steps: optimizer steps after which it is stopped.
        network: let the program use the network.
        unsafe_writes: run it also where nothing can keep it from writing and deleting your files.

    Raises:
        EnvironmentProblem: it cannot be followed. UsageError: its own error.
    """
    from finetune_planner.cli.trace import FollowOptions, StandIns, answer_of
    from planner.hardware.gpus import find_gpu
    from planner.planning.option_values import memory_and_headroom

    if isinstance(command, str) or not command:
        raise UsageError(f"a command is a list of words, got {command!r}", hint='for example ["python", "train.py"]')
    card = find_gpu(gpu)
    memory = memory_and_headroom(card, None, None)
    order = FollowOptions(steps=steps, network=network, unsafe_writes=unsafe_writes).order(
        command, card, StandIns(), memory[0]
    )
    return Traced(answer_of(order, card, memory))


def which_gpu(
    model: str | Path,
    *,
    sort: str = "size",
    vendor: str | None = None,
    fitting: bool = True,
    dataset: str | Path | None = None,
    **request: Unpack[Options],
) -> Table:
    """The cards that can fine-tune a model, by the formula: `plan which-gpu`.

    Args:
        sort: "size" (smallest that fits first), "speed" or "cost".
        fitting: the shown table leaves out cards that do not fit; the document has them all.
        request: as `plan`'s; with `gpus` every card stands for so many of them.

    Raises:
        PlannerError: a model or option that cannot be meant.
    """
    from finetune_planner.cli.options import JobGpus, Lookup
    from finetune_planner.cli.tables import TableOptions, gpus_sheet

    request_options, links = _without(request, "gpus", "nodes", "interconnect")
    table = TableOptions(vendor=vendor, sort=sort, fitting=fitting)
    return Table(gpus_sheet(str(model), request_options, _data(dataset), table, JobGpus(**links), Lookup()))


def which_model(gpu: str, match: str = "", *, every: bool = False, **request: Unpack[Options]) -> Table:
    """What a card can fine-tune, up to which length and how fast, by the formula: `plan which-model`.

    Args:
        match: only models whose names contain this.
        every: show models that do not fit too.

    Raises:
        PlannerError: a card or option that cannot be meant.
    """
    from finetune_planner.cli.tables import models_rows
    from reports.which import ModelsSheet

    request_options, _ = _without(request)
    rows, job = models_rows(request_options.request(), gpu, match)
    return Table(ModelsSheet(rows, job, every))


def which_cluster(
    model: str | Path,
    *,
    deadline: str | None = None,
    budget: float | None = None,
    gpu: str | Sequence[str] = (),
    max_gpus: int = 64,
    dataset: str | Path | None = None,
    **request: Unpack[Options],
) -> Table:
    """The smallest, the cheapest and the fastest set of GPUs for a job, by the formula: `plan which-cluster`.

    Args:
        deadline: longest time of the training: "90m", "24h", "3d".
        budget: most that it may cost, in US dollars.
        gpu: cards to consider; none: those that a cloud rents on demand.
        request: as `plan`'s; `dataset_tokens` or `samples` say how much work it is where no `dataset` does.

    Raises:
        PlannerError: nothing says how much work it is; what cannot be meant.
    """
    from finetune_planner.cli.options import Lookup
    from finetune_planner.cli.which_cluster import ClustersOptions, LimitOptions, clusters_sheet

    request_options, links = _without(request, "interconnect")
    cards = [gpu] if isinstance(gpu, str) else list(gpu)
    clusters = ClustersOptions(gpu=cards or None, max_gpus=max_gpus, **links)
    limits = LimitOptions(deadline=deadline, budget=budget)
    return Table(clusters_sheet(str(model), request_options, _data(dataset), limits, clusters, Lookup()))


def compare_targets(model: str | Path, gpu: str, **request: Unpack[Options]) -> Table:
    """The fastest plan of every launch target, by the formula: `plan compare-targets`.

    Raises:
        PlannerError: a model, GPU or option that cannot be meant.
    """
    from finetune_planner.cli.options import Lookup
    from finetune_planner.cli.tables import targets_sheet

    request_options, _ = _without(request)
    return Table(targets_sheet(str(model), gpu, request_options, Lookup()))


def compare(plans: Mapping[str, Planned] | Sequence[Planned]) -> Comparison:
    """Several answers of `plan` side by side: `plan compare`.

    Raises:
        UsageError: fewer than two.
    """
    if not isinstance(plans, Mapping):
        plans = {f"plan {number}": planned for number, planned in enumerate(plans, 1)}
    if len(plans) < 2:
        raise UsageError("a comparison needs at least two plans", hint="compare([plan(...), plan(...)])")
    return Comparison(tuple(plans.items()))


KNOWN_AS = {
    "batch_size": "global_batch",
    "lora_r": "rank",
    "lora_rank": "rank",
    "r": "rank",
    "lora_target_modules": "targets",
    "max_length": "seq_len",
    "max_seq_length": "seq_len",
    "learning_rate": "lr",
    "num_train_epochs": "epochs",
    "gradient_checkpointing": "checkpointing",
    "attn_implementation": "attention",
}
"""What trainers call options of a plan; a batch is the effective one, as `--batch-size`."""


def _named(values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    by_name: dict[str, Any] = {}
    first_names: dict[str, str] = {}
    for name, value in values.items():
        canonical_name = names.get(name, name)
        if canonical_name in by_name:
            raise UsageError(f"{first_names[canonical_name]} and {name} are one option", hint="give one of the two")
        by_name[canonical_name], first_names[canonical_name] = value, name
    return by_name


def _data(dataset: str | Path | None) -> "DataOptions":
    from finetune_planner.cli.request_options import DataOptions

    return DataOptions(dataset=None if dataset is None else str(dataset))


def _without(request: Mapping[str, Any], *names: str) -> "tuple[RequestOptions, dict[str, Any]]":
    """The request, and those of its options that a command takes apart from it."""
    from finetune_planner.cli.request_options import RequestOptions

    options = _options(request)
    apart = {name: options.pop(name) for name in names if name in options}
    return RequestOptions(**options), apart


def _options(request: Mapping[str, Any]) -> dict[str, Any]:
    """The request as the command line's options have it: one value of a repeatable option is a list of one."""
    from finetune_planner.cli.request_options import RequestOptions

    kinds = get_type_hints(RequestOptions)
    request = _named(request, KNOWN_AS)
    for name in request:
        if name not in kinds:
            close = close_names(name, (*kinds, "dry_run"), num=1)
            hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(kinds)}"
            raise UsageError(f"plan() has no option {name!r}", hint=hint)
    return {name: None if value is None else _taken(name, value, kinds[name]) for name, value in request.items()}


def _taken(name: str, value: Any, kind: Any) -> Any:
    """The value of an option of this kind (`int | None`, `list[str] | None`, ...)."""
    kind = next((arg for arg in get_args(kind) if arg is not NoneType), kind) if get_origin(kind) is not list else kind
    if get_origin(kind) is not list:
        return _as_typed(name, value, kind)
    several = value if isinstance(value, (list, tuple, set, frozenset)) else [value]
    return [_as_typed(name, each, get_args(kind)[0]) for each in several]


def _as_typed(name: str, value: Any, kind: type) -> Any:
    """One value as the command line would have read it; NumPy's numbers and whole floats (2e7) are taken."""
    plain = value.item() if hasattr(value, "item") else value
    if isinstance(plain, bool) == (kind is bool):
        if kind is int and isinstance(plain, float) and plain.is_integer():
            return int(plain)
        if isinstance(plain, (int, float) if kind is float else kind):
            return kind(plain)
    words, usual = _KINDS[kind]
    usual = plain if kind is int and isinstance(plain, str) and plain.isdecimal() else usual
    raise UsageError(f"{name} must be {words}, got {value!r:.60}", hint=f"for example {name}={usual}")


_KINDS = {
    bool: ("True or False", "True"),
    int: ("a whole number", "2048"),
    float: ("a number", "1.5"),
    str: ("a string", "'...'"),
}
