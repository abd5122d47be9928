"""Paragraphs, headings and tables on a console, in ASCII where the console takes nothing else."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from reports.plain import clean, to_ascii

PADDING = 2
"""Cells beside each column of a table."""
WORDS = 6
"""Cells that a column of words has at least, where it has so many."""


class Page:
    """Writes lines and tables to a console, in ASCII where the console takes nothing else."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.ascii = not console.encoding.startswith("utf")

    def text(self, words: str) -> str:
        return to_ascii(words) if self.ascii else words

    def line(self, words: str = "", style: str = "", indent: int = 0) -> None:
        """One paragraph, wrapped with a hanging indent."""
        if not words:
            self.console.print()
            return
        text, width = Text(self.text(words), style=style), max(20, self.console.width - indent)
        short = text.cell_len <= width and words.isprintable()  # nothing to wrap, which takes longer than to print
        for part in [text] if short else text.wrap(self.console, width):
            part.rstrip()
            self.console.print(Text(" " * indent) + part, no_wrap=True, overflow="ignore", crop=False)

    def head(self, words: str, mark: str = "") -> None:
        self.console.print()
        text = Text(self.text(clean(words)), style="bold")
        if mark:
            text.append(self.text(f"  [{mark}]"), style="not bold dim")
        self.console.print(text)

    def command(self, words: str) -> None:
        """A command to copy: never wrapped, because a broken line cannot be pasted."""
        self.console.print(Text("  " + self.text(words)), soft_wrap=True)

    def table(self, *columns: str, right: Sequence[str] = (), fixed: Sequence[str] = (), header: bool = True) -> Table:
        """A table without lines; `right` columns are aligned right, those and `fixed` ones are never wrapped."""
        table = Table(
            box=None, show_header=header, padding=(0, PADDING, 0, 0), pad_edge=False, header_style="underline"
        )
        for name in columns:
            table.add_column(
                Text(self.text(name)),
                justify="right" if name in right else "left",
                no_wrap=name in right or name in fixed,
                overflow="fold",
            )
        return table

    def whole(
        self,
        header: Sequence[str],
        rows: Iterable[Sequence[str]],
        *,
        right: Sequence[str] = (),
        fixed: Sequence[str] = (),
    ) -> None:
        table = self.table(*header, right=right, fixed=fixed)
        for row in rows:
            self.row(table, *row)
        self.show(table)

    def show(self, table: Table) -> None:
        """Prints a table, wider than a terminal that is too narrow for its figures: a cut figure is a wrong one."""
        needed = 0
        for column in table.columns:
            width = max(cell.cell_len for cell in (column.header, *column.cells) if isinstance(cell, Text))
            needed += PADDING + (width if column.no_wrap else min(width, WORDS))
        if needed > self.console.width:
            table.width = needed
        self.console.print(table, crop=False)

    def row(self, table: Table, *cells: str | Text, style: str = "") -> None:
        table.add_row(*(cell if isinstance(cell, Text) else Text(self.text(cell)) for cell in cells), style=style)


class Sheet(ABC):
    """An answer that is a table, with what to make of it."""

    @abstractmethod
    def render(self, console: Console) -> None:
        """On a terminal."""

    @abstractmethod
    def markdown(self) -> str:
        """As Markdown, whole."""

    @abstractmethod
    def document(self) -> Any:
        """As JSON values."""
