"""`plan gpus` and `plan models`: the tables that come with the package; `plan doctor`: what this machine can do."""

import csv
from importlib.resources import files
from typing import Annotated

import typer

from finetune_planner.cli import options
from finetune_planner.cli.output import console, print_json, tell
from planner.core.errors import EXIT_ENVIRONMENT, UsageError
from planner.hardware.gpus import all_gpus
from planner.models import catalogue
from planner.options.absent import absent
from planner.options.adapters import ADAPTERS
from planner.options.objectives import OBJECTIVES, Objective
from planner.setup.interchange import to_jsonable
from reports.terminal import render_gpus, render_models

_SIGNS = {"ok": "ok     ", "warning": "warning", "missing": "missing"}


def gpus(as_json: options.Json = False) -> None:
    """The GPU table."""
    rows = all_gpus()
    if as_json:
        print_json([to_jsonable(row) for row in rows])
        return

    render_gpus(rows, console())


def models(
    match: str = typer.Argument("", help="Show only names that contain this."), as_json: options.Json = False
) -> None:
    """The built-in model catalogue; every name works with no network."""
    specs = map(catalogue.load, catalogue.names_with(match))
    rows = [spec for spec in specs if spec is not None]
    if as_json:
        columns = ("model_id", "model_type", "num_params", "max_position_embeddings")
        print_json([{name: getattr(row, name) for name in columns} for row in rows])
        return
    if not rows:
        raise UsageError(
            f"no model of the catalogue has {match!r} in its name",
            hint="`plan models` lists all; other hub ids are looked up on the hub",
        )
    render_models(rows, console())


def doctor(as_json: options.Json = False) -> int:
    """Check driver, GPUs, torch, bitsandbytes kernels, flash attention, versions, disk; 3 if probes cannot run."""
    from probes.doctor import can_probe, examine, findings_to_dict

    findings = examine()
    lines = []
    for finding in findings:
        lines.append(f"{_SIGNS[finding.level]} {finding.name}: {finding.text}")
        lines += [f"        mend: {finding.mend}"] if finding.mend else []
    lines.append("GPU probes can run here" if can_probe(findings) else "GPU probes cannot run here; planning can")
    tell(findings_to_dict(findings), lines, as_json=as_json)
    return 0 if can_probe(findings) else EXIT_ENVIRONMENT


WIDTH = 80


def glossary() -> dict[str, str]:
    """Word -> what it means; kinds of adapters by their own table."""
    text = (files("planner.data") / "glossary.csv").read_text(encoding="utf-8")
    words = {row["word"]: row["meaning"] for row in csv.DictReader(text.splitlines())}
    for row in ADAPTERS.values():
        if row.name != "lora":
            named = row.title if plain(row.title).startswith(plain(row.name)) else f"{row.name} ({row.title})"
            published = f"Published: {row.quality}. " if row.quality else ""
            words[named] = f"An adapter: {row.what}. {published}Source: {row.source}."
    for objective in OBJECTIVES.values():
        named = f"{objective.name} ({objective.title})"
        words[named] = f"An objective, of {objective.sample}s{_asks(objective)}. Data: {objective.columns}."
    return words


def _asks(objective: Objective) -> str:
    """What a step of an objective is beside a supervised one, for people."""
    rows = (
        (objective.rolls_out, "its step begins by generating them (--generator)"),
        (objective.reference, "a reference model is asked about them"),
        (objective.head == "score", "the model scores them in the place of predicting tokens"),
        (objective.whole_batch, "those of a batch are contrasted with each other"),
    )
    return "".join(f"; {words}" for holds, words in rows if holds)


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
    phrase = plain(" ".join(word))
    matches = [term for term in words if plain(term) == phrase]
    if not matches and (row := absent(" ".join(word))):
        text = f"{' '.join(word)}: no plan has it: {row[0]}. Use {row[1]}."
        typer.echo(textwrap.fill(text, WIDTH, subsequent_indent="  "))
        return
    matches = matches or [term for term in words if phrase in plain(term)]
    given = set(map(plain, " ".join(word).split()))
    matches = matches or [term for term in words if {*map(plain, term.split())} <= given]
    if not matches:
        holding = [term for term, meaning in words.items() if phrase in map(plain, meaning.split())][:3]
        if holding and phrase:
            typer.echo(f"no entry {' '.join(word)!r}; it stands in that of")
        matches = holding
    if not matches or not phrase:
        from rapidfuzz import process

        near = [term for term, score, _ in process.extract(" ".join(word), list(words), limit=3) if score > 55]
        hint = f"near it: {', '.join(near)}" if near else "plan explain lists the words"
        raise UsageError(f"no word {' '.join(word)!r} in the glossary", hint=hint)
    for term in matches:
        typer.echo(textwrap.fill(f"{term}: {words[term]}", WIDTH, subsequent_indent="  "))
