"""The options that say what is trained on."""

from collections.abc import Mapping
from typing import Annotated

import typer

from planner.core.errors import UsageError
from planner.core.records import dataclass
from planner.planning.option_values import choices

NAMES = (
    "messages", "question", "answer", "context", "system", "prompt", "completion", "text", "chosen", "rejected",
    "anchor", "positive", "negative",
)  # fmt: skip
"""What `--columns` gives a column to."""


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """A data set, its columns, and what of it the loss is on."""

    dataset: Annotated[
        str | None, typer.Option(help="File (.jsonl .json .csv .parquet .txt, .gz), directory or hub id to train on.")
    ] = None
    columns: Annotated[
        str | None, typer.Option(help="Columns with other names: question=Frage,answer=Antwort; text=NAME; ...")
    ] = None
    loss_on: Annotated[str | None, typer.Option(help="answers (default where the data have any) or all tokens.")] = None

    @property
    def words(self) -> tuple[str, ...]:
        """As they were typed."""
        given = (("--dataset", self.dataset), ("--columns", self.columns), ("--loss-on", self.loss_on))
        return tuple(word for option, value in given if value is not None for word in (option, value))

    def checked(self) -> "DataOptions":
        """These options.

        Raises:
            UsageError: one that makes no sense.
        """
        if self.loss_on is not None:
            choices("loss-on", (self.loss_on,), ("answers", "all"))
        if self.columns is not None and self.dataset is None:
            raise UsageError("--columns names columns of a data set", hint="add --dataset FILE")
        _ = self.names
        return self

    @property
    def names(self) -> Mapping[str, str]:
        """Known name -> the column that has it, empty where every column says what it is.

        Raises:
            UsageError: something else than NAME=COLUMN,..., or a name that is not known.
        """
        if not self.columns:
            return {}
        pairs = [part.partition("=") for part in self.columns.split(",")]
        for name, _, column in pairs:
            if name.strip() not in NAMES or not column.strip():
                raise UsageError(
                    f"--columns takes NAME=COLUMN,... of the names {', '.join(NAMES)}; got {self.columns!r}",
                    hint="for example --columns question=Frage,answer=Antwort",
                )
        return {name.strip(): column.strip() for name, _, column in pairs}


NO_DATA_OPTIONS = DataOptions()
