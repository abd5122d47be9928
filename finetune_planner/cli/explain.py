"""`plan explain WORD`: what a word of a plan means, in two sentences. The words are `planner/data/glossary.csv`."""

import csv
from importlib.resources import files
from typing import Annotated

import typer

from planner.core.errors import UsageError
from planner.options.absent import absent

WIDTH = 80


def glossary() -> dict[str, str]:
    """Word -> what it means."""
    text = (files("planner.data") / "glossary.csv").read_text(encoding="utf-8")
    return {row["word"]: row["meaning"] for row in csv.DictReader(text.splitlines())}


def plain(word: str) -> str:
    """A word as it is compared: "Chunked loss" and "chunked-loss" are one."""
    return "".join(letter for letter in word.lower() if letter.isalnum())


def explain(
    word: Annotated[
        list[str] | None, typer.Argument(metavar="[WORD]", help="A word of a plan; none lists them.")
    ] = None,
) -> None:
    """What a word of a plan means."""
    import textwrap

    words = glossary()
    if not word:
        typer.echo(textwrap.fill(", ".join(sorted(words)), WIDTH))
        return
    asked = plain(" ".join(word))
    found = [one for one in words if plain(one) == asked]
    if not found and (row := absent(" ".join(word))):
        text = f"{' '.join(word)}: no plan has it: {row[0]}. Use {row[1]}."
        typer.echo(textwrap.fill(text, WIDTH, subsequent_indent="  "))
        return
    found = found or [one for one in words if asked in plain(one)]
    if not found or not asked:
        from rapidfuzz import process

        near = [one for one, score, _ in process.extract(" ".join(word), list(words), limit=3) if score > 55]
        hint = f"near it: {', '.join(near)}" if near else "plan explain lists the words"
        raise UsageError(f"no word {' '.join(word)!r} in the glossary", hint=hint)
    for one in found:
        typer.echo(textwrap.fill(f"{one}: {words[one]}", WIDTH, subsequent_indent="  "))
