"""The four questions of the command line as functions, and a comparison of plans."""

import html
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from planner.errors import EnvironmentProblem, UsageError
from planner.gpu import GpuSpec
from planner.models.spec import ModelSpec
from planner.outcome import Candidate
from planner.plan import NoPlan, Plan

if TYPE_CHECKING:
    import pandas
    from rich.console import Console

    from planner.check import CheckResult
    from planner.exporters import Launch

COLUMNS = 100
"""Width of an answer in a notebook."""


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
    adapter: str
    quantize_experts: bool
    activation_offload: bool
    selective_checkpointing: bool
    compile: bool
    no_extra_packages: bool
    memory_gib: float
    headroom: float
    dataset_tokens: int
    samples: int
    price: float
    epochs: float
    lr: float
    images_per_sample: int
    image_size: str


class _Answer(ABC):
    """An answer that prints as on the terminal, in a notebook too."""

    @abstractmethod
    def _print(self, console: "Console") -> None: ...

    @abstractmethod
    def to_dict(self) -> Any:
        """The document that `--json` prints."""

    def __str__(self) -> str:
        return self._text().rstrip()

    def _text(self) -> str:
        from planner.cli.output import console

        out = console(width=COLUMNS, file=StringIO())
        self._print(out)
        return str(out.file.getvalue())

    def _repr_html_(self) -> str:
        return f"<pre style='line-height:1.2;white-space:pre'>{html.escape(self._text())}</pre>"


@dataclass(frozen=True, repr=False)
class Planned(_Answer):
    """The answer to `plan`.

    Attributes:
        answer: the frozen `Plan`, or the `NoPlan` that says what is missing.
    """

    answer: Plan | NoPlan

    @property
    def fits(self) -> bool:
        """Whether a setup was found that fits."""
        return isinstance(self.answer, Plan) and self.answer.chosen.fits

    @property
    def chosen(self) -> Candidate:
        """The setup to train with, or the one that comes nearest to fitting; its figures by rung."""
        return self.answer.chosen if isinstance(self.answer, Plan) else self.answer.nearest

    @property
    def peak_device_bytes(self) -> int:
        """Predicted or measured peak on the device, from the highest rung."""
        return self.chosen.memory_evidence.peak_device_bytes

    @property
    def tokens_per_s(self) -> float:
        """Predicted or measured training speed of the chosen setup, from the highest rung."""
        return self.chosen.tokens_per_s

    def to_dict(self) -> dict[str, Any]:
        from reports.plan_json import plan_to_dict

        return plan_to_dict(self.answer)

    def to_dataframe(self) -> "pandas.DataFrame":
        """The chosen setup and the alternatives, one row each: label, every setting, bytes, tokens/s, rung, trade.

        Raises:
            EnvironmentProblem: pandas is not installed.
        """
        beside = self.answer.alternatives if isinstance(self.answer, Plan) else ()
        rows = [_row("chosen" if self.fits else "nearest", self.chosen, "")]
        rows += [_row(one.label, one.candidate, one.trade) for one in beside]
        return _frame(rows)

    def write(
        self,
        folder: str | Path,
        *,
        targets: Sequence[str] | None = None,
        dataset: str | None = None,
        force: bool = False,
    ) -> "tuple[Launch, ...]":
        """Write plan.json, the reports and the launch files, as `--out` does; what was written or refused, by target.

        Args:
            targets: launch targets, None for all; those that cannot run the setup say why in `Launch.refused`.
            dataset: hub id or local file for the launch files.
            force: launch files that are predicted to run out of memory too.

        Raises:
            UsageError: an unknown target. EnvironmentProblem: the folder cannot be written.
        """
        from planner.app.climb import chosen_timeline
        from planner.cli.writing import check_launch_words, write_out

        place, wish = Path(folder), self.answer.workload
        check_launch_words(targets, dataset, place)
        return write_out(
            self.answer,
            place,
            targets=targets,
            dataset=dataset,
            command=[wish.model.model_id, "--gpu", wish.gpu.key],
            timeline=chosen_timeline(self.answer),
            force=force,
        )

    def _print(self, console: "Console") -> None:
        from reports.terminal import render_no_plan, render_plan

        if isinstance(self.answer, Plan):
            render_plan(self.answer, console, show=())
        else:
            render_no_plan(self.answer, console, show=())


@dataclass(frozen=True, repr=False)
class Estimate(_Answer):
    """The answer to `estimate`: one setup's memory and speed.

    Attributes:
        candidate: formula and, where asked for, dry run.
    """

    candidate: Candidate
    model: ModelSpec
    gpu: GpuSpec
    memory_bytes: int

    @property
    def fits(self) -> bool:
        """Whether the highest rung's peak stays inside the budget."""
        return self.candidate.fits

    def to_dict(self) -> dict[str, Any]:
        from reports.plan_json import candidate_to_dict

        return candidate_to_dict(self.candidate, self.model.model_id, self.gpu.key, detail=True)

    def to_dataframe(self) -> "pandas.DataFrame":
        """The terms of memory at the peak, largest first: category, name, bytes.

        Raises:
            EnvironmentProblem: pandas is not installed.
        """
        from reports.rows import best_terms

        terms = sorted(best_terms(self.candidate).terms, key=lambda term: -term.size_bytes)
        return _frame([{"category": one.category, "name": one.name, "size_bytes": one.size_bytes} for one in terms])

    def _print(self, console: "Console") -> None:
        from reports.terminal import render_estimate

        render_estimate(self.candidate, self.model, self.gpu, console, memory_bytes=self.memory_bytes, notes=())


@dataclass(frozen=True, repr=False)
class Checked(_Answer):
    """The answer to `check`: what a training config needs, and what would help."""

    result: "CheckResult"

    @property
    def verdict(self) -> str:
        """ "fits", "does_not_fit" or "uncertain" (the error band straddles the limit)."""
        return self.result.verdict.value

    def to_dict(self) -> dict[str, Any]:
        from planner.cli.checking import as_document

        return as_document(self.result, None)

    def _print(self, console: "Console") -> None:
        from planner.cli.check import text_lines

        for line in text_lines(self.result, None):
            console.print(line, markup=False, soft_wrap=True)


@dataclass(frozen=True, repr=False)
class Traced(_Answer):
    """The answer to `trace`: the document that `plan trace --json` prints."""

    document: Mapping[str, Any]

    @property
    def verdict(self) -> str:
        """ "fits" or "does not fit"."""
        return str(self.document["verdict"])

    def to_dict(self) -> dict[str, Any]:
        return dict(self.document)

    def _print(self, console: "Console") -> None:
        from reports.trace import text_lines

        for line in text_lines(self.to_dict()):
            console.print(line, markup=False, soft_wrap=True)


@dataclass(frozen=True, repr=False)
class Comparison(_Answer):
    """Several plans side by side, each with its name."""

    plans: tuple[tuple[str, Planned], ...]

    def to_dict(self) -> list[dict[str, Any]]:
        return [{"name": name, **one.to_dict()} for name, one in self.plans]

    def to_dataframe(self) -> "pandas.DataFrame":
        """One row a plan: model, GPU, every setting, bytes, tokens/s, rung.

        Raises:
            EnvironmentProblem: pandas is not installed.
        """
        return _frame(
            [
                {
                    "model": one.answer.workload.model.model_id,
                    "gpu": one.answer.workload.gpu.key,
                    **_row(name, one.chosen, ""),
                    "fits": one.fits,
                }
                for name, one in self.plans
            ]
        )

    def _print(self, console: "Console") -> None:
        from reports.comparison_text import render_comparison

        render_comparison([(name, one.answer) for name, one in self.plans], console)


def plan(model: str, gpu: str, *, dry_run: bool = True, dataset: str | None = None, **wish: Unpack[Options]) -> Planned:
    """The fastest setup that fits: `plan MODEL --gpu GPU`.

    Args:
        model: hub id, directory with config.json, or catalogue name.
        gpu: key of the GPU table, marketing name, or "local".
        dry_run: prove the choice with a dry run where torch is installed; False: formula only.
        dataset: a local file: its lengths decide sequence length, packing, batch and epochs.

    Raises:
        PlannerError: a model, GPU or option that cannot be meant, with a hint.
    """
    from planner.app.climb import answered
    from planner.cli.answer import workload_for
    from planner.cli.wish_options import WishOptions

    asked = WishOptions(**_options(wish))
    asked.fixed()  # what the wish alone contradicts is said before anything is looked up
    return Planned(answered(workload_for(model, gpu, asked, dataset=dataset), dry_run=dry_run))


def estimate(
    model: str,
    gpu: str,
    *,
    dry_run: bool = True,
    memory_gib: float | None = None,
    headroom: float | None = None,
    **setup: Any,
) -> Estimate:
    """Memory and speed of one setup on one GPU: `plan estimate`.

    Args:
        setup: fields of `planner.setup.TrainSetup` (the interchange form): method, lora_rank, quantization,
            micro_batch_seqs, seq_len_tokens, ...; what is not given takes its default.

    Raises:
        PlannerError: a name that is not known, or a setup that cannot exist.
    """
    from planner.cli.estimate import candidate_of
    from planner.cli.options import Memory
    from planner.gpus import find_gpu
    from planner.interchange import asked_setup
    from planner.kernels import default_attention
    from planner.models.resolve import resolve_model

    spec, card, wanted = resolve_model(model), find_gpu(gpu), asked_setup(setup)
    if wanted.num_gpus > 1:
        raise UsageError("estimate answers for one GPU", hint="plan(MODEL, GPU, gpus=N), or plan estimate --gpus N")
    if "attention" not in setup:
        wanted = wanted.with_(attention=default_attention(spec))
    memory = Memory(memory_gib=memory_gib, headroom=headroom)
    found = candidate_of(spec, card, wanted, memory, dry=dry_run)
    return Estimate(found, spec, card, memory.of(card)[0])


def check(
    file: str | Path, gpu: str, *, model: str | None = None, dry_run: bool = True, settings: Sequence[str] = ()
) -> Checked:
    """Does an existing training config, script or notebook fit: `plan check`. The file is read, never executed.

    Args:
        settings: "name=value" for what the file leaves open, as `--set`.

    Raises:
        Undetermined: the file leaves open what decides; `ConfigError`: it cannot be read.
    """
    from planner.check import check as judged
    from planner.cli.checking import Asked, corrected, load, predictor
    from planner.option_values import memory_and_headroom

    asked = Asked.of(list(settings), None, None, strict=False)
    config, spec, card = load(Path(file), gpu, model=model, asked=asked)
    memory, reserve = memory_and_headroom(card, None, None)
    predicted = predictor(spec, card)
    if dry_run:
        predicted = corrected(predicted, config.setup, spec, card, memory)
    return Checked(judged(config, spec, card, memory - reserve, predicted))


def trace(command: Sequence[str], gpu: str, *, steps: int = 2, network: bool = False) -> Traced:
    """What a training program needs, found by running it on a GPU that computes nothing: `plan trace`.

    It EXECUTES the program, on the CPU alone: trace only what you would run.

    Args:
        command: as on a command line: ["python", "train.py", "--lr", "1e-4"].
        steps: optimizer steps after which it is stopped.
        network: let the program use the network.

    Raises:
        EnvironmentProblem: it cannot be followed. UsageError: its own error.
    """
    from planner.cli.trace import answer_of, order_of
    from planner.gpus import find_gpu
    from planner.option_values import memory_and_headroom
    from probes.phantom.card import TraceOptions

    card = find_gpu(gpu)
    order = order_of(command, card, options=TraceOptions(num_steps=steps), network=network)
    return Traced(answer_of(order, card, memory_and_headroom(card, None, None)))


def compare(plans: Mapping[str, Planned] | Sequence[Planned]) -> Comparison:
    """Several answers of `plan` side by side: `plan compare`.

    Raises:
        UsageError: fewer than two.
    """
    if not isinstance(plans, Mapping):
        plans = {f"plan {number}": one for number, one in enumerate(plans, 1)}
    if len(plans) < 2:
        raise UsageError("a comparison needs at least two plans", hint="compare([plan(...), plan(...)])")
    return Comparison(tuple(plans.items()))


def _options(wish: Mapping[str, Any]) -> dict[str, Any]:
    """The wish as the command line's options have it: one value of a repeatable option is a list of one.

    Raises:
        UsageError: a name that is no option.
    """
    from planner.cli.wish_options import WishOptions

    listed = {one.name: "list[" in str(one.type) for one in fields(WishOptions)}
    for name in wish:
        if name not in listed:
            close = get_close_matches(name, listed, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(listed)}"
            raise UsageError(f"plan() has no option {name!r}", hint=hint)
    return {
        name: ([value] if isinstance(value, (str, int)) else list(value))
        if listed[name] and value is not None
        else value
        for name, value in wish.items()
    }


def _row(label: str, candidate: Candidate, trade: str) -> dict[str, Any]:
    """One line of a table: base units, and the rung that each figure stands on."""
    from planner.interchange import setup_to_dict

    memory, speed = candidate.memory_evidence, candidate.speed_evidence
    return {
        "label": label,
        "fits": candidate.fits,
        "peak_device_bytes": memory.peak_device_bytes,
        "memory_rung": memory.rung.value,
        "tokens_per_s": speed.tokens_per_s,
        "speed_rung": speed.rung.value,
        "trade": trade,
        **setup_to_dict(candidate.setup),
    }


def _frame(rows: list[dict[str, Any]]) -> "pandas.DataFrame":
    try:
        import pandas
    except ImportError as error:
        raise EnvironmentProblem("pandas is not installed", hint="pip install pandas") from error
    return pandas.DataFrame(rows)
