"""`plan estimate`: one setup from flags, or many as JSON lines; the flags of one setup (`plan probe` has them too)."""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from finetune_planner.app.levels import over_samples, with_dry_run
from finetune_planner.cli import options, setup_flags
from finetune_planner.cli.completion import complete_model
from finetune_planner.cli.output import console, json_text, print_json
from finetune_planner.cli.setup_flags import Flag, given, takes_flags, takes_options
from planner.core.errors import ConfigError, PlannerError, UsageError
from planner.core.inputs import open_regular, parse_object, read_lines
from planner.core.records import dataclass
from planner.core.units import gib
from planner.hardware.cluster import Cluster
from planner.hardware.gpu import GpuSpec
from planner.hardware.gpus import find_gpu
from planner.memory.around import evaluating_bytes
from planner.memory.attention_kernels import default_attention
from planner.models.spec import ModelSpec
from planner.options.sound import HALVES_STACK, TEXT_TOKENS
from planner.planning.option_values import positive
from planner.planning.predict import predict, predict_with_padding
from planner.planning.single_changes import enough_alone
from planner.setup import TrainSetup
from planner.setup.interchange import setup_from_request
from planner.setup.outcome import Candidate, Prediction
from reports.plan_json import candidate_to_dict, estimate_to_dict
from reports.terminal import render_estimate

if TYPE_CHECKING:
    from planner.samples.lengths import OverLengths

MAX_LINE_CHARS = 1_000_000
_ONE = (*setup_flags.SPACE, *setup_flags.RUN)
_ANY = (*setup_flags.SPLIT, setup_flags.ADAPTER, *setup_flags.AIM, *setup_flags.FORMULA_ALONE)


@takes_flags(*_ONE, *setup_flags.SHARED, several=False)
class SetupOptions:
    """One setup as flags; None: the setup's own default."""

    attention: str | None = None
    seq_len: int | None = None
    gpus: options.Gpus = None
    rows: ClassVar[tuple[Flag, ...]] = (*_ONE, *setup_flags.SHARED)

    def values(self) -> dict[str, Any]:
        """What was given, as fields of the interchange form; a quantized base is QLoRA's.

        Raises:
            UsageError: values out of range, or flags that contradict each other.
        """
        flags = given(self, self.rows)
        fields = {row.of: row.read(row.word, value) for row, value in flags.items() if row not in setup_flags.LAYOUT}
        fields |= self._more()
        if "method" not in fields and fields.get("quantization", "none") != "none":
            fields["method"] = "qlora"
        num_gpus = positive("gpus", self.gpus, maximum=setup_flags.MAX_GPUS) or 1
        shared = {row.key: [value] if row.many else value for row, value in flags.items() if row in setup_flags.LAYOUT}
        return fields | _spread(num_gpus, options.layout_fields(num_gpus, one_setup=True, **shared))

    def _more(self) -> dict[str, Any]:
        return {}


@takes_flags(*_ANY, several=False)
class AnySetupOptions(SetupOptions, options.RolloutOptions, options.ImageOptions):
    """With what a formula can say and no probe here runs: split matrices and layers, other stacks."""

    objective: options.Objective = None
    rows: ClassVar[tuple[Flag, ...]] = (*SetupOptions.rows, *_ANY)

    def _more(self) -> dict[str, Any]:
        rollout = self.rollout(self.objective, self.seq_len)
        fields = {"objective": self.objective, "rollout": rollout, "images": self.images()}
        return {name: value for name, value in fields.items() if value is not None}


def _spread(num_gpus: int, layout: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """The layout's fields of one setup: what was not said is plain DDP over the copies that are left.

    FSDP2 where a flag belongs to it alone, and beside tensor parallelism and pipelines, where Accelerate and torchtitan
    know no other.
    """
    if num_gpus == 1 and not {"offload", "parallel"} & set(layout):
        return {}
    values = {name: allowed[0] for name, allowed in layout.items()}
    if "parallel" not in values:
        split = values.get("tensor_degree", 1) * values.get("pipeline_degree", 1)
        within = values.get("context_degree", 1) * values.get("expert_degree", 1)
        only_fsdp2 = "shard_degree" in values or "reshard_after_forward" in values
        fsdp2 = only_fsdp2 or values.get("offload") == "parameters" or split * within > 1
        offloaded = values.get("offload") == "optimizer"
        values["parallel"] = "none" if split == num_gpus > 1 else "fsdp2" if fsdp2 else "zero2" if offloaded else "ddp"
    return {"num_gpus": num_gpus, **values}


@dataclass(frozen=True, kw_only=True)
class DryRunOptions:
    """Whether and over which lengths the step is dry-run."""

    no_dry_run: options.NoDryRun = False
    full_depth: Annotated[bool, typer.Option("--full-depth", help="Dry run every layer instead of truncating.")] = False
    dataset: Annotated[
        Path | None, typer.Option(help="Also memory over shuffled micro-batches of this file's lengths.")
    ] = None
    lengths: Annotated[
        str | None, typer.Option(help="As --dataset, of lengths given as MEAN:SD or MEAN:SD:MIN:MAX tokens.")
    ] = None
    seed: Annotated[int, typer.Option(help="Of the shuffling.")] = 0

    def samples(self, spec: ModelSpec) -> tuple[tuple[int, ...], str] | None:
        """Lengths of the samples in tokens and where they come from; None where none are given.

        Raises:
            UsageError: given twice, or without a dry run.
        """
        if self.dataset is None and self.lengths is None:
            return None
        if self.no_dry_run or (self.dataset is not None and self.lengths is not None):
            raise UsageError(
                "lengths are followed by the dry run, and come from one place",
                hint="give --dataset FILE or --lengths MEAN:SD, and leave --no-dry-run out",
            )
        if self.dataset is not None:
            from planner.frameworks.exporters.chat import splits
            from planner.samples.dataset import measure, tokenizer_file

            split = splits(spec.model_id)
            stats = measure(self.dataset, tokenizer=tokenizer_file(spec.model_id), row_per_answer=split)
            return stats.lengths_tokens, f"{self.dataset.name}, {stats.counted_with}"
        from planner.samples.lengths import stated_lengths

        assert self.lengths is not None
        return stated_lengths(self.lengths), f"lognormal, {self.lengths}"


@takes_options
def estimate(
    model: Annotated[
        str | None, typer.Argument(help="Hub id, directory or catalogue name.", autocompletion=complete_model)
    ] = None,
    gpu: options.GpuOrNone = None,
    *,
    setup_options: AnySetupOptions,
    setups: Annotated[Path | None, typer.Option(help="JSON lines, one setup each ('-': stdin).")] = None,
    links: options.Links,
    memory: options.Memory,
    dry: DryRunOptions,
    lookup: options.Lookup,
    eval_batch: Annotated[int | None, typer.Option(help="Sequences evaluated at once between steps.")] = None,
    as_json: options.Json = False,
) -> None:
    """Memory and speed of one setup: formula beside dry run."""
    if setups is not None:
        if model is not None:
            raise UsageError("--setups names the models itself", hint="leave MODEL out, or leave --setups out")
        _many(setups, memory, dry=not dry.no_dry_run)
        return
    if model is None or gpu is None:
        raise UsageError(
            "plan estimate needs MODEL and --gpu, or --setups FILE", hint="plan estimate MODEL --gpu rtx-4090"
        )
    spec, card = _resolve(model, gpu, lookup)
    usual: dict[str, Any] = {"stack": HALVES_STACK} if spec.is_encoder_decoder else {}
    usual |= {"seq_len_tokens": TEXT_TOKENS} if spec.front_end is not None else {}
    setup = setup_from_request({**usual, **setup_options.values()})
    if setup_options.attention is None:
        setup = setup.replace(attention=default_attention(spec))
    cluster = options.cluster_of(card, setup.num_gpus, links.nodes, links.interconnect)
    result = candidate_of(spec, card, setup, memory, dry=False, cluster=cluster)
    over: OverLengths | None = None
    samples = dry.samples(spec)
    if not dry.no_dry_run:
        run_options: dict[str, Any] = {"full_depth": dry.full_depth, "memory_bytes": memory.of(card)[0]}
        result = with_dry_run(result, spec, card, cluster=cluster, **run_options)
        if samples is not None:
            over = over_samples(result, spec, card, *samples, seed=dry.seed, memory_bytes=memory.of(card)[0])
    result = with_evaluation(result, spec, card, eval_batch)
    if as_json:
        print_json(estimate_to_dict(result, spec.model_id, card.key, cluster=cluster, over=over))
        return
    notes: tuple[str, ...] = ()
    step = result.formula if eval_batch is None else predict(spec, card, result.setup, cluster)
    decides = result.formula.peak_device_bytes > step.peak_device_bytes
    if cluster is not None:
        from planner.planning.answer import cluster_notes

        notes = cluster_notes(cluster)
    if decides:
        step_peak = gib(step.peak_device_bytes)
        notes += (f"the evaluation of {eval_batch} at once decides the device peak; a step's is {step_peak}",)
    enough: tuple[str, ...] | None = None
    if not result.fits and decides and step.peak_device_bytes <= result.budget_bytes:
        enough = (f"evaluation of {result.setup.micro_batch_seqs} at once",)
    elif not result.fits and not result.cannot_run:
        enough = enough_alone(
            result.setup, spec, card, result.budget_bytes, lambda setup: predict(spec, card, setup, cluster)
        )
    render_estimate(
        result, spec, card, console(), memory_bytes=memory.of(card)[0], notes=notes, enough=enough, over=over
    )


@lru_cache(maxsize=64)
def _resolve(model: str, gpu: str, lookup: options.Lookup) -> tuple[ModelSpec, GpuSpec]:
    return options.announced(lookup.model(model)), options.announced(find_gpu(gpu))


def candidate_of(
    spec: ModelSpec,
    card: GpuSpec,
    setup: TrainSetup,
    limits: options.Memory,
    *,
    dry: bool,
    cluster: Cluster | None = None,
    eval_seqs: int | None = None,
) -> Candidate:
    """One setup against a card's budget: formula, with `dry` the dry run too; `eval_seqs` are evaluated at once between
    its steps.

    Raises:
        UsageError: no engine runs it, or sizes that make no sense.
    """
    memory, reserve = limits.of(card)
    options.check_vendor(card, setup.num_gpus)
    if not setup.single_gpu:
        from planner.memory.engines import why_not  # late: one GPU needs none of it

        if refused := why_not(spec, setup):
            raise UsageError(f"no engine runs this setup: {refused}", hint="change what the sentence names")
    formula = predict_with_padding(spec, card, setup, cluster)
    result = Candidate(setup=setup, budget_bytes=memory - reserve, formula=formula)
    if dry:
        result = with_dry_run(result, spec, card, memory_bytes=memory, cluster=cluster)
    return with_evaluation(result, spec, card, eval_seqs)


def with_evaluation(result: Candidate, spec: ModelSpec, card: GpuSpec, eval_seqs: int | None) -> Candidate:
    """A candidate whose device peak is at least that of the evaluation between two steps; without one the same."""
    evaluation_bytes = evaluating_bytes(spec, card, result.setup, positive("eval-batch", eval_seqs) or 0)
    if evaluation_bytes <= result.formula.peak_device_bytes:
        return result
    ran = result.dry_run
    if isinstance(ran, Prediction):
        ran = replace(ran, peak_device_bytes=max(evaluation_bytes, ran.peak_device_bytes))
    return replace(result, formula=replace(result.formula, peak_device_bytes=evaluation_bytes), dry_run=ran)


def _many(path: Path, memory: options.Memory, *, dry: bool) -> None:
    """One JSON line out per line in, in order; a bad line gives an "error" line and the rest goes on."""
    num_lines = num_answered = 0
    for number, line in _lines(path):
        try:
            model, gpu, setup, around = parse_line(line)
            spec, card = _resolve(model, gpu, options.Lookup())
            eval_seqs = around.pop("eval_batch")
            cluster = options.cluster_of(card, setup.num_gpus, **around)
            result = candidate_of(spec, card, setup, memory, dry=dry, cluster=cluster, eval_seqs=eval_seqs)
            answer: Mapping[str, Any] = candidate_to_dict(result, spec.model_id, card.key)
            num_answered += 1
        except PlannerError as error:
            answer = {"error": error.message, "hint": error.hint, "line": number}
        sys.stdout.write(json_text(answer) + "\n")
        sys.stdout.flush()
        num_lines += 1
    if not num_answered:
        what = f"none of its {num_lines} lines is a setup that can be estimated" if num_lines else "it has no lines"
        raise ConfigError(
            f"--setups {path}: {what}", hint='one JSON object a line: {"model": "...", "gpu": "...", ...}'
        )


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    if str(path) == "-":
        lines = iter(lambda: sys.stdin.readline(MAX_LINE_CHARS + 1), "")
        yield from ((number, line) for number, line in enumerate(lines, 1) if line.strip())
        return
    hint = "give a file of JSON lines, one setup each"
    with open_regular(path, hint=hint) as file:
        for number, line in read_lines(file, str(path), max_line_bytes=4 * MAX_LINE_CHARS, hint=hint):
            yield number, line.decode("utf-8", "replace")


def parse_line(line: str) -> tuple[str, str, TrainSetup, dict[str, Any]]:
    """(model, gpu, setup, what is around it) from one line of the interchange form: beside a setup's keys it takes
    those of `--nodes`, `--interconnect` and `--eval-batch`.

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
    around = {name: values.pop(name, None) for name in ("nodes", "interconnect", "eval_batch")}
    for name, kind in (("nodes", int), ("interconnect", str), ("eval_batch", int)):
        if around[name] is not None and type(around[name]) is not kind:
            raise ConfigError(f"{name} must be a {'number' if kind is int else 'name'}, got {around[name]!r:.80}")
    return model, gpu, setup_from_request(values), around
