"""What the functions return: frozen values that show themselves in a terminal and in a notebook."""

import html
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.core.errors import EnvironmentProblem
from planner.core.records import dataclass
from planner.hardware.gpu import GpuSpec
from planner.models.spec import ModelSpec
from planner.planning.plan import NoPlan, Plan
from planner.setup.outcome import Candidate, speed_level

if TYPE_CHECKING:
    import pandas
    from rich.console import Console

    from planner.frameworks.exporters import ExportRequest, Launch
    from planner.hardware.cluster import Cluster
    from planner.planning.check import CheckResult
    from reports.page import Sheet


COLUMNS = 100
"""Width of an answer in a notebook."""


class _Answer(ABC):
    """An answer that prints as on the terminal, in a notebook too."""

    @abstractmethod
    def _print(self, console: "Console") -> None: ...

    @abstractmethod
    def to_dict(self) -> Any:
        """The document that `--json` prints."""

    def __str__(self) -> str:
        return self._text().rstrip()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {' '.join(str(self).split(chr(10), 1)[0].split())}>"

    def _text(self) -> str:
        from finetune_planner.cli.output import console

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
        targets: as they were asked for: `write` takes them where it is told nothing else.
    """

    answer: Plan | NoPlan
    targets: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return isinstance(self.answer, Plan) and self.answer.chosen.fits

    @property
    def chosen(self) -> Candidate:
        """The setup to train with, or the one that comes nearest to fitting; its figures by level."""
        return self.answer.subject

    @property
    def peak_device_bytes(self) -> int:
        """Predicted or measured peak on the device, from the highest level."""
        return self.chosen.memory_evidence.peak_device_bytes

    @property
    def tokens_per_s(self) -> float:
        """Predicted or measured training speed of the chosen setup, from the highest level."""
        return self.chosen.tokens_per_s

    def to_dict(self) -> dict[str, Any]:
        from reports.plan_json import plan_to_dict

        return plan_to_dict(self.answer)

    def to_dataframe(self) -> "pandas.DataFrame":
        """The chosen setup and the alternatives, one row each: label, every setting, bytes, tokens/s, level, trade.

        Raises:
            EnvironmentProblem: pandas is not installed.
        """
        alternatives = self.answer.alternatives if isinstance(self.answer, Plan) else ()
        rows = [_row("chosen" if self.fits else "nearest", self.chosen, "")]
        rows += [_row(alternative.label, alternative.candidate, alternative.trade) for alternative in alternatives]
        return _frame(rows)

    def write(
        self,
        folder: str | Path,
        *,
        targets: str | Sequence[str] | None = None,
        dataset: str | Path | None = None,
        force: bool = False,
    ) -> "tuple[Launch, ...]":
        """Write plan.json, the reports and the launch files, as `--out` does; what was written or refused, by target.

        Args:
            targets: launch targets, None for those that were planned for, else all; those that cannot run the setup
                say why in `Launch.refused`.
            dataset: hub id or local file for the launch files; None for what was planned with.
            force: launch files that are predicted to run out of memory too.

        Raises:
            UsageError: an unknown target. EnvironmentProblem: the folder cannot be written.
        """
        from dataclasses import replace

        from finetune_planner.app.levels import chosen_timeline
        from finetune_planner.cli.writing import check_launch_words, write_out
        from planner.memory.workload import NO_DATA
        from reports.command import request_words

        place, workload = Path(folder), self.answer.workload
        data = workload.data if dataset is None else replace(NO_DATA, file=str(dataset), loss_on=workload.data.loss_on)
        names = [targets] if isinstance(targets, str) else targets or self.targets or None
        check_launch_words(names, place)
        return write_out(
            self.answer,
            place,
            targets=names,
            data=data,
            command=request_words(replace(workload, data=data)),
            timeline=chosen_timeline(self.answer),
            force=force,
        )

    def trl(self) -> dict[str, Any]:
        """Arguments of TRL's configuration for the objective (`SFTConfig(**plan(...).trl())`, DPOConfig, ...), with
        what the model is loaded with, quantization included, in `model_init_kwargs`; the adapter is `peft()`.

        Raises:
            UsageError: TRL cannot run the setup.
        """
        from planner.frameworks.exporters.keywords import trainer_keywords

        return trainer_keywords(self._request(), "trl")

    def hf(self) -> dict[str, Any]:
        """Arguments of transformers' `TrainingArguments`.

        Raises:
            UsageError: the Trainer cannot run the setup.
        """
        from planner.frameworks.exporters.keywords import trainer_keywords

        return trainer_keywords(self._request(), "hf")

    def model_kwargs(self) -> dict[str, Any]:
        """Arguments of `from_pretrained`: dtype, attention, quantization as a dictionary."""
        from planner.frameworks.exporters.keywords import model_keywords

        return model_keywords(self._request())

    def peft(self) -> dict[str, Any]:
        """Arguments of peft's configuration (`LoraConfig`); empty for full fine-tuning."""
        from planner.frameworks.exporters.keywords import adapter_keywords

        return adapter_keywords(self._request())

    def bitsandbytes(self) -> dict[str, Any]:
        """Arguments of `BitsAndBytesConfig`; empty where nothing is quantized."""
        from planner.frameworks.exporters.keywords import quantization_keywords

        return quantization_keywords(self.chosen.setup)

    def _request(self) -> "ExportRequest":
        """What the launch files are made of; nothing is held out, which is the trainer's own affair."""
        from dataclasses import replace

        from finetune_planner.cli.writing import request_of

        workload = self.answer.workload
        return replace(request_of(workload, self.chosen, workload.data, Path()), held_out=0)

    def _print(self, console: "Console") -> None:
        from reports.terminal import render_plan

        render_plan(self.answer, console, show=())


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
    cluster: "Cluster | None" = None

    @property
    def fits(self) -> bool:
        return self.candidate.fits

    def to_dict(self) -> dict[str, Any]:
        from reports.plan_json import estimate_to_dict

        return estimate_to_dict(self.candidate, self.model.model_id, self.gpu.key, cluster=self.cluster)

    def to_dataframe(self) -> "pandas.DataFrame":
        """The terms of memory at the peak, largest first: category, name, bytes.

        Raises:
            EnvironmentProblem: pandas is not installed.
        """
        from reports.rows import best_terms

        terms = sorted(best_terms(self.candidate).terms, key=lambda term: -term.size_bytes)
        return _frame([{"category": term.category, "name": term.name, "size_bytes": term.size_bytes} for term in terms])

    def _print(self, console: "Console") -> None:
        from reports.terminal import render_estimate

        render_estimate(self.candidate, self.model, self.gpu, console, memory_bytes=self.memory_bytes, notes=())


@dataclass(frozen=True, repr=False)
class Checked(_Answer):
    """The answer to `check`: what a training config needs, and what would help."""

    result: "CheckResult"

    @property
    def verdict(self) -> str:
        """ "fits", "does_not_fit", "cannot_run" or "uncertain" (the error band straddles the limit)."""
        return self.result.verdict.value

    def to_dict(self) -> dict[str, Any]:
        from finetune_planner.cli.checking import as_document

        return as_document(self.result, None)

    def _print(self, console: "Console") -> None:
        from reports.check import render_check

        render_check(self.result, None, console)


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
class Table(_Answer):
    """The answer to `which_gpu`, `which_model`, `which_cluster`, `compare_targets`: a table of plans by the formula.

    Attributes:
        sheet: its rows, and how it is shown.
    """

    sheet: "Sheet"

    def to_dict(self) -> Any:
        return self.sheet.document()

    def to_dataframe(self) -> "pandas.DataFrame":
        """One row for every row of the document; what is nested has dotted names.

        Raises:
            EnvironmentProblem: pandas is not installed.
        """
        document = self.to_dict()
        if isinstance(document, Mapping):
            document = next(value for value in document.values() if isinstance(value, list))
        return _frame([dict(_flat(row)) for row in document])

    def _print(self, console: "Console") -> None:
        self.sheet.render(console)


@dataclass(frozen=True, repr=False)
class Comparison(_Answer):
    """Several plans side by side, each with its name."""

    plans: tuple[tuple[str, Planned], ...]

    def to_dict(self) -> list[dict[str, Any]]:
        return [{"name": name, **planned.to_dict()} for name, planned in self.plans]

    def to_dataframe(self) -> "pandas.DataFrame":
        """One row a plan: model, GPU, every setting, bytes, tokens/s, level.

        Raises:
            EnvironmentProblem: pandas is not installed.
        """
        return _frame(
            [
                {
                    "model": planned.answer.workload.model.model_id,
                    "gpu": planned.answer.workload.gpu.key,
                    **_row(name, planned.chosen, ""),
                    "fits": planned.fits,
                }
                for name, planned in self.plans
            ]
        )

    def _print(self, console: "Console") -> None:
        from reports.compare import render_comparison

        render_comparison([(name, planned.answer) for name, planned in self.plans], console)


def _row(label: str, candidate: Candidate, trade: str) -> dict[str, Any]:
    from planner.setup.interchange import setup_to_dict

    memory, speed = candidate.memory_evidence, candidate.speed_evidence
    return {
        "label": label,
        "fits": candidate.fits,
        "peak_device_bytes": memory.peak_device_bytes,
        "memory_level": memory.level.value,
        "tokens_per_s": speed.tokens_per_s,
        "speed_level": speed_level(speed).value,
        "trade": trade,
        **setup_to_dict(candidate.setup),
    }


def _flat(row: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def _frame(rows: list[dict[str, Any]]) -> "pandas.DataFrame":
    try:
        import pandas
    except ImportError as error:
        from planner.core.install import packages_command

        raise EnvironmentProblem("pandas is not installed", hint=packages_command("pandas")) from error
    return pandas.DataFrame(rows)
