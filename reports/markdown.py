"""Markdown that reads well as plain text too."""

import re
from collections.abc import Iterable, Sequence

from reports.plain import clean

_SPECIAL = re.compile(r"([\\`*_\[\]<>|~#&])")


def escape(words: str) -> str:
    """Text from outside, so that Markdown shows it as it is."""
    return _SPECIAL.sub(r"\\\1", clean(words))


def table(header: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[str] = ()) -> str:
    """A Markdown table with aligned columns; its cells are plain text."""
    body = [list(header), *([escape(cell) for cell in row] for row in rows)]
    widths = [max(3, *(len(row[column]) for row in body)) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if name in right else cell.ljust(width)
            for cell, width, name in zip(cells, widths, header, strict=True)
        )
        return f"| {' | '.join(padded)} |"

    rule = (
        ("-" * (width - 1) + ":") if name in right else "-" * width for width, name in zip(widths, header, strict=True)
    )
    return "\n".join([line(header), f"| {' | '.join(rule)} |", *(line(row) for row in body[1:])])


def document(title: str, *blocks: str) -> str:
    return "\n\n".join([f"# {escape(title)}", *filter(None, blocks)]) + "\n"


def bullets(items: Iterable[str]) -> str:
    return "\n".join(f"- {escape(item)}" for item in items)


def fenced(code: str, language: str = "") -> str:
    """A code block that its own content cannot close."""
    longest = max((len(run) for run in re.findall(r"`+", code)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{code.rstrip()}\n{fence}"
