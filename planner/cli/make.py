"""`plan MODEL --gpu GPU`: the main job."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.cli import options, spread
from planner.cli.output import console, print_json
from planner.cli.wish import resolve_gpu, workload
from planner.errors import EXIT_NOTHING_FITS

if TYPE_CHECKING:
    from planner.dataset import LengthChoice
    from planner.models.spec import ModelSpec


def make(
    model: options.Model,
    gpu: options.Gpu,
    gpus: spread.Gpus = None,
    nodes: spread.Nodes = None,
    interconnect: spread.Interconnect = None,
    seq_len: options.SeqLen = None,
    global_batch: Annotated[
        int | None, typer.Option("--global-batch", help="Sequences per optimizer step, kept constant. Default 32.")
    ] = None,
    parallel: spread.Parallels = None,
    tensor_degree: spread.TensorDegrees = None,
    pipeline_degree: spread.PipelineDegrees = None,
    schedule: spread.Schedule = None,
    shard_degree: spread.ShardDegree = None,
    reshard: spread.Reshard = None,
    offload: spread.Offloads = None,
    method: options.Methods = None,
    rank: options.Rank = None,
    min_rank: Annotated[int | None, typer.Option("--min-rank", help="LoRA rank never falls below this.")] = None,
    targets: options.Targets = None,
    optimizer: options.Optimizer = None,
    precision: options.Precision = None,
    quantization: options.Quantization = None,
    attention: options.Attention = None,
    checkpointing: options.Checkpointing = None,
    checkpoint_every: options.CheckpointEvery = None,
    packing: options.Packing = None,
    loss: options.Loss = None,
    memory_gib: options.MemoryGib = None,
    headroom: options.Headroom = None,
    dataset_tokens: Annotated[
        int | None, typer.Option("--dataset-tokens", help="Tokens of one epoch: gives rank floor, time and cost.")
    ] = None,
    price: Annotated[float | None, typer.Option("--price", help="US dollars per GPU hour.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Directory for plan.json, report.md, launch files.")] = None,
    target: Annotated[
        list[str] | None, typer.Option("--target", help="Launch targets to write; repeatable. Default: all.")
    ] = None,
    dataset: Annotated[str | None, typer.Option("--dataset", help="Hub id or local file for the launch files.")] = None,
    no_dry_run: options.NoDryRun = False,
    no_probe: Annotated[bool, typer.Option("--no-probe", help="No GPU probes, even with --gpu local.")] = False,
    revision: options.Revision = None,
    hub: options.AskHub = False,
    as_json: options.Json = False,
) -> None:
    """Plan MODEL on a GPU, or on several: the fastest setup that fits, why, and what stands beside it."""
    from planner.models.resolve import resolve_model
    from planner.plan import NoPlan, Plan
    from planner.planning import plan_workload

    fixed = options.fixed_fields(
        targets=targets,
        rank=rank,
        checkpointing=options.checkpointing_value(checkpointing, checkpoint_every),
        packing=packing,
        method=method,
        optimizer=optimizer,
        precision=precision,
        quantization=quantization,
        attention=attention,
        loss=loss,
    )
    options.check_ranks(rank, min_rank)
    fixed |= spread.spread_fields(
        gpus or 1,
        parallel=parallel,
        tensor_degree=tensor_degree,
        pipeline_degree=pipeline_degree,
        schedule=schedule,
        shard_degree=shard_degree,
        reshard=reshard,
        offload=offload,
    )
    spec = resolve_model(model, revision=revision, ask_hub=hub)
    card = resolve_gpu(gpu)
    cluster = spread.cluster_of(card, gpus, nodes, interconnect)
    lengths = _lengths(dataset, spec) if dataset is not None else None
    if lengths is not None:
        seq_len = seq_len or lengths.seq_len_tokens
        dataset_tokens = dataset_tokens or lengths.epoch_tokens
        fixed.setdefault("packing", (lengths.packing,))
    wish = workload(
        spec,
        card,
        fixed=fixed,
        seq_len=seq_len,
        global_batch=global_batch,
        memory_gib=memory_gib,
        headroom_gib=headroom,
        min_rank=min_rank,
        dataset_tokens=dataset_tokens,
        price=price,
        cluster=cluster,
    )
    if no_dry_run:
        plan = plan_workload(wish)
    else:
        from planner.cli.rungs import climb_dry_run

        plan = climb_dry_run(wish)
    if isinstance(plan, Plan) and gpu.lower() == "local" and not no_probe:
        if cluster is None:
            from planner.cli.rungs import climb_probe

            plan = climb_probe(plan)
        else:
            print("no probes: the search with probes uses one GPU", file=sys.stderr)
    if out is not None:
        from planner.cli.rungs import chosen_timeline
        from planner.cli.writing import write_out

        write_out(
            plan,
            out,
            targets=target,
            dataset=dataset,
            command=_command(model, gpu),
            timeline=chosen_timeline(plan),
        )
    if as_json:
        from reports.plan_json import plan_to_dict

        print_json(plan_to_dict(plan))
    else:
        from reports.terminal import render_no_plan, render_plan

        if isinstance(plan, NoPlan):
            render_no_plan(plan, console())
        else:
            render_plan(plan, console(), next_command=_next(plan, out) if out else "")
    if isinstance(plan, NoPlan):
        raise typer.Exit(EXIT_NOTHING_FITS)


def _lengths(dataset: str, spec: "ModelSpec") -> "LengthChoice | None":
    """Sequence length, packing and tokens per epoch of a local data set; None for one on the hub."""
    from planner.dataset import choose_length, measure, tokenizer_file

    path = Path(dataset)
    if not path.exists():
        return None
    stats = measure(path, tokenizer=tokenizer_file(spec.model_id))
    choice = choose_length(stats, max_tokens=spec.max_position_embeddings)
    print(f"{dataset}: {stats.num_samples:,} samples, {stats.counted_with}; {choice.reason}", file=sys.stderr)
    return choice


def _command(model: str, gpu: str) -> list[str]:
    """The command for the report: the words after `plan`, secrets never (there are none among the options)."""
    words = sys.argv[1:]
    return words if model in words else [model, "--gpu", gpu]


def _next(plan: Any, out: Path) -> str:
    """The command that starts the first launch target that can run the plan."""
    from planner.cli.writing import launch_files

    targets = ["trl"] if plan.workload.num_gpus == 1 else None
    commands = [launch.command for launch in launch_files(plan, targets, None, out) if launch.command]
    return f"cd {out} && {commands[0]}" if commands else f"open {out}/report.html"
