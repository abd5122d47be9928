"""`plan estimate`: one setup from flags, or many as JSON lines."""

import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import typer

from planner.cli import options, spread
from planner.cli.completion import complete_gpu, complete_model
from planner.cli.output import console, json_text, print_json
from planner.cli.wish import memory_and_headroom, positive, resolve_gpu
from planner.cluster import Cluster
from planner.errors import ConfigError, PlannerError, UsageError
from planner.gpu import GpuSpec
from planner.inputs import open_regular, parse_object, read_lines
from planner.interchange import asked_setup
from planner.kernels import default_attention
from planner.models.spec import ModelSpec
from planner.outcome import Candidate
from planner.setup import STACK_NAMES, TrainSetup

MAX_LINE_CHARS = 1_000_000


def estimate(
    model: Annotated[
        str | None, typer.Argument(help="Hub id, directory or catalogue name.", autocompletion=complete_model)
    ] = None,
    gpu: Annotated[
        str | None, typer.Option("--gpu", help="GPU: key, name, or 'local'.", autocompletion=complete_gpu)
    ] = None,
    gpus: spread.Gpus = None,
    nodes: spread.Nodes = None,
    interconnect: spread.Interconnect = None,
    parallel: spread.Parallel = None,
    tensor_degree: spread.TensorDegree = None,
    pipeline_degree: spread.PipelineDegree = None,
    schedule: spread.Schedule = None,
    shard_degree: spread.ShardDegree = None,
    reshard: spread.Reshard = None,
    offload: spread.Offload = None,
    setups: Annotated[Path | None, typer.Option("--setups", help="JSON lines, one setup each ('-': stdin).")] = None,
    method: Annotated[str | None, typer.Option("--method", help="full, lora or qlora.")] = None,
    rank: options.Rank = None,
    targets: options.Targets = None,
    optimizer: Annotated[str | None, typer.Option("--optimizer")] = None,
    precision: Annotated[str | None, typer.Option("--precision")] = None,
    quantization: Annotated[str | None, typer.Option("--quantization")] = None,
    kbit_fp32_cast: Annotated[
        bool | None, typer.Option("--kbit-fp32-cast/--no-kbit-fp32-cast", help="peft's k-bit preparation.")
    ] = None,
    adapter_dtype: Annotated[str | None, typer.Option("--adapter-dtype", help="auto, fp32, bf16 or fp16.")] = None,
    lora_dropout: Annotated[float | None, typer.Option("--lora-dropout")] = None,
    attention: Annotated[str | None, typer.Option("--attention")] = None,
    checkpointing: options.Checkpointing = None,
    checkpoint_every: options.CheckpointEvery = None,
    loss: Annotated[str | None, typer.Option("--loss")] = None,
    kernels: options.OneKernels = None,
    activation_offload: options.ActivationOffload = None,
    seq_len: options.SeqLen = None,
    micro_batch: Annotated[int | None, typer.Option("--micro-batch", help="Sequences per forward.")] = None,
    accumulation: Annotated[int | None, typer.Option("--accumulation", help="Micro-batches per step.")] = None,
    packing: options.Packing = None,
    memory_gib: options.MemoryGib = None,
    headroom: options.Headroom = None,
    no_dry_run: options.NoDryRun = False,
    full_depth: Annotated[
        bool, typer.Option("--full-depth", help="Dry run every layer instead of truncating.")
    ] = False,
    stack: Annotated[
        str | None, typer.Option("--stack", help="Whose training step: " + ", ".join(STACK_NAMES) + ".")
    ] = None,
    expandable_segments: Annotated[
        bool | None,
        typer.Option(
            "--expandable-segments/--no-expandable-segments",
            help="As in PYTORCH_ALLOC_CONF; the stack's own default otherwise.",
        ),
    ] = None,
    reentrant: Annotated[
        bool | None,
        typer.Option("--reentrant/--no-reentrant", help="use_reentrant of checkpointing; the stack's own otherwise."),
    ] = None,
    revision: options.Revision = None,
    hub: options.AskHub = False,
    as_json: options.Json = False,
) -> None:
    """Memory and speed of one setup: formula beside dry run."""
    if setups is not None:
        if model is not None:
            raise UsageError("--setups names the models itself", hint="leave MODEL out, or leave --setups out")
        _many(setups, memory_gib, headroom, dry=not no_dry_run, as_json=as_json)
        return
    if model is None or gpu is None:
        raise UsageError(
            "plan estimate needs MODEL and --gpu, or --setups FILE", hint="plan estimate MODEL --gpu rtx-4090"
        )
    given = {
        "method": method,
        "lora_rank": positive("rank", rank, maximum=65_536),
        "lora_targets": targets,
        "optimizer": optimizer,
        "precision": precision,
        "quantization": quantization,
        "kbit_fp32_cast": kbit_fp32_cast,
        "adapter_dtype": adapter_dtype,
        "lora_dropout": lora_dropout,
        "attention": attention,
        "checkpointing": options.checkpointing_value(checkpointing, checkpoint_every),
        "loss": loss,
        "kernels": kernels,
        "activation_offload": activation_offload,
        "seq_len_tokens": positive("seq-len", seq_len),
        "micro_batch_seqs": positive("micro-batch", micro_batch),
        "accumulation_steps": positive("accumulation", accumulation),
        "packing": packing,
        "stack": stack,
        "expandable_segments": expandable_segments,
        "reentrant_checkpointing": reentrant,
    }
    values: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if "lora_targets" in values:
        from planner.cli.wish import parse_targets

        values["lora_targets"] = parse_targets(str(values["lora_targets"]))
    if "method" not in values and values.get("quantization", "none") != "none":
        values["method"] = "qlora"
    num_gpus = positive("gpus", gpus, maximum=spread.MAX_GPUS) or 1
    wanted = spread.spread_fields(
        num_gpus,
        parallel=[parallel] if parallel is not None else None,
        tensor_degree=[tensor_degree] if tensor_degree is not None else None,
        pipeline_degree=[pipeline_degree] if pipeline_degree is not None else None,
        schedule=schedule,
        shard_degree=shard_degree,
        reshard=reshard,
        offload=[offload] if offload is not None else None,
    )
    setup = asked_setup({**values, **spread.one_setup(num_gpus, wanted)})
    spec, card = _resolve(model, gpu, revision, hub)
    if attention is None:
        setup = setup.with_(attention=default_attention(spec))
    cluster = spread.cluster_of(card, num_gpus, nodes, interconnect)
    result = candidate_of(spec, card, setup, memory_gib, headroom, dry=False, cluster=cluster)
    if not no_dry_run:
        from planner.cli.rungs import with_dry_run

        result = with_dry_run(
            result,
            spec,
            card,
            full_depth=full_depth,
            memory_bytes=memory_and_headroom(card, memory_gib, headroom)[0],
        )
    if as_json:
        from reports.plan_json import candidate_to_dict

        document = candidate_to_dict(result, spec.model_id, card.key, detail=True)
        print_json(document | ({} if cluster is None else {"cluster": cluster_to_dict(cluster)}))
    else:
        from reports.terminal import render_estimate

        memory, _ = memory_and_headroom(card, memory_gib, headroom)
        notes: tuple[str, ...] = ()
        if cluster is not None:
            from planner.planning import cluster_notes

            notes = cluster_notes(cluster)
        render_estimate(result, spec, card, console(), memory_bytes=memory, notes=notes)


@lru_cache(maxsize=64)
def _resolve(model: str, gpu: str, revision: str | None = None, hub: bool = False) -> tuple[ModelSpec, GpuSpec]:
    from planner.models.resolve import resolve_model

    spec = resolve_model(model, revision=revision, ask_hub=hub)
    return spec, resolve_gpu(gpu)


def candidate_of(
    spec: ModelSpec,
    card: GpuSpec,
    setup: TrainSetup,
    memory_gib: float | None,
    headroom: float | None,
    *,
    dry: bool,
    cluster: Cluster | None = None,
) -> Candidate:
    """One setup against a card's budget: formula, with `dry` the dry run too.

    Raises:
        UsageError: no engine runs it, or sizes that make no sense.
    """
    from planner.predict import predict

    memory, reserve = memory_and_headroom(card, memory_gib, headroom)
    spread.check_vendor(card, setup.num_gpus)
    refused = why_not_run(spec, setup)
    if refused:
        raise UsageError(f"no engine runs this setup: {refused}", hint="change what the sentence names")
    result = Candidate(setup=setup, budget_bytes=memory - reserve, formula=predict(spec, card, setup, cluster))
    if dry:
        from planner.cli.rungs import with_dry_run

        result = with_dry_run(result, spec, card, memory_bytes=memory)
    return result


def cluster_to_dict(cluster: Cluster) -> dict[str, Any]:
    """The links that the speed was predicted over."""
    between = None if cluster.between is None else cluster.between.key
    return {"num_nodes": cluster.num_nodes, "within": cluster.within.key, "between": between}


def why_not_run(model: ModelSpec, setup: TrainSetup) -> str:
    """Why no engine runs a setup on several GPUs, "" where one does, and on one GPU."""
    if setup.num_gpus == 1:
        return ""
    from planner.engines import why_not

    return why_not(model, setup)


def _many(path: Path, memory_gib: float | None, headroom: float | None, *, dry: bool, as_json: bool) -> None:
    """One JSON line out per line in, in order; a bad line gives an "error" line and the rest goes on."""
    from reports.plan_json import candidate_to_dict

    for number, line in _lines(path):
        try:
            model, gpu, setup = parse_line(line)
            spec, card = _resolve(model, gpu)
            result = candidate_of(spec, card, setup, memory_gib, headroom, dry=dry)
            answer: Mapping[str, Any] = candidate_to_dict(result, spec.model_id, card.key)
        except PlannerError as error:
            answer = {"error": error.message, "hint": error.hint, "line": number}
        sys.stdout.write(json_text(answer) + "\n")
        sys.stdout.flush()


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    if str(path) == "-":
        lines = iter(lambda: sys.stdin.readline(MAX_LINE_CHARS + 1), "")
        yield from ((number, line) for number, line in enumerate(lines, 1) if line.strip())
        return
    hint = "give a file of JSON lines, one setup each"
    with open_regular(path, hint=hint) as file:
        for number, line in read_lines(file, str(path), max_line_bytes=4 * MAX_LINE_CHARS, hint=hint):
            yield number, line.decode("utf-8", "replace")


def parse_line(line: str) -> tuple[str, str, TrainSetup]:
    """(model, gpu, setup) from one line of the interchange form.

    Raises:
        ConfigError: not a JSON object, or model or gpu missing.
        SetupError: a setup that cannot exist.
    """
    if len(line) > MAX_LINE_CHARS:
        raise ConfigError(f"line is longer than {MAX_LINE_CHARS} characters", hint="one small JSON object per line")
    values = parse_object(line, "the line", hint="one JSON object per line")
    model, gpu = values.pop("model", None), values.pop("gpu", None)
    if not isinstance(model, str) or not isinstance(gpu, str):
        raise ConfigError(
            "a setup line needs the strings 'model' and 'gpu'", hint='{"model": "...", "gpu": "...", ...}'
        )
    return model, gpu, asked_setup(values)
