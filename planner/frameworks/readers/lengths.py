"""To how many tokens a program cuts its sequences."""

import ast
from collections.abc import Iterator

from planner.frameworks.readers.program import Known, Program, Undecided, Unknown
from planner.frameworks.readers.program.reading import LENGTH_NAMES
from planner.frameworks.readers.program.source import Source, tree_of
from planner.frameworks.readers.values import Settings

TRL_LENGTH = 1024
"""Where TRL's trainer cuts unless told."""


def of_program(
    program: Program, name: str, arguments: Settings, loader: Settings, *, by_trainer: int, source: Source
) -> tuple[int, str]:
    """(tokens, why they are open, "" where they are known).

    Args:
        by_trainer: to how many tokens the trainer cuts by itself, as TRL's does, 0: it does not;
            source: the program's text.
    """
    for settings in (arguments, loader):
        key = settings.first("max_length", "max_seq_length")
        if settings.has(key):
            return settings.integer(key, TRL_LENGTH, at_least=1), ""
    if by_trainer and "max_length" in arguments.values:  # None: since it has that name, TRL cuts nothing then
        return TRL_LENGTH, f"{arguments.where.get('max_length', name)}: max_length None: nothing is cut"
    prepared = arguments.raw("dataset_kwargs", {})
    untouched = isinstance(prepared, dict) and prepared.get("skip_prepare_dataset") is True
    if by_trainer and not arguments.more and not untouched:
        cuts = [*program.cuts, *_prepared(program, name, source)]
        longest = min(by_trainer, max((int(value.data) for value in cuts), default=by_trainer))
        arguments.assume(f"max_length absent: {longest} tokens (TRL's default is {by_trainer})")
        return longest, ""
    cut = list(told(program))
    if not cut and (why := open_length(program)):
        return TRL_LENGTH, why
    here = [value for value in program.lengths if value.where.startswith(f"{name}:")]
    return _one_of(cut, program, here or program.lengths, name, arguments)


def _one_of(cut: list[Known], program: Program, named: list[Known], name: str, arguments: Settings) -> tuple[int, str]:
    """The length by the surest of what the program shows: what a tokenizer is told, slices, names."""
    for found in (cut, program.cuts, _named(program), named):
        distinct = sorted({int(value.data) for value in found})
        if len(distinct) > 1 and found is named:
            places = ", ".join(dict.fromkeys(f"{value.data} ({value.where})" for value in found))
            return distinct[-1], f"{name} names several lengths: {places[:200]}"
        whole = [value for value in named if int(value.data) > distinct[-1]] if len(distinct) > 1 else []
        if whole:  # prompt and answer are cut one by one, and their sum has a name
            found, distinct = whole, [max(int(value.data) for value in whole)]
        if distinct:
            longest = max(found, key=lambda value: int(value.data))
            arguments.where.setdefault("max_length", longest.where)
            return distinct[-1], ""
    prepared = f"{name}: the length of the sequences is decided while the data is prepared"
    return TRL_LENGTH, arguments.more or open_length(program, Unknown) or prepared


def _named(program: Program) -> list[Known]:
    """Values of the main module's names for a length."""
    names = ((name.lower(), value) for name, value in program.module.names.items())
    return [
        value
        for name, value in names
        if name in LENGTH_NAMES and isinstance(value, Known) and type(value.data) is int and value.data >= 16
    ]


def _prepared(program: Program, name: str, source: Source) -> Iterator[Known]:
    """The lengths to which functions of the main file cut what they give back: rows that are tokenized before the
    trainer gets them, which leaves them as they are."""
    label = source.label or str
    lines = {f"{name}:{label(line)}" for line in _given_back(source.text)}
    for made in program.made:
        value = made.keywords.get("max_length")
        cuts = made.where in lines and "truncation" in made.keywords
        if cuts and isinstance(value, Known) and type(value.data) is int:
            yield value


def _given_back(text: str) -> Iterator[int]:
    """Lines of the calls whose result a function or lambda gives back."""
    for function in ast.walk(tree_of(text)):
        if isinstance(function, ast.Lambda) and isinstance(function.body, ast.Call):
            yield function.body.lineno
        if not isinstance(function, ast.FunctionDef):
            continue
        inside = list(ast.walk(function))
        returned = [one.value for one in inside if isinstance(one, ast.Return)]
        names = {one.id for one in returned if isinstance(one, ast.Name)}
        made = [one for one in inside if isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name)]
        values = [*returned, *(one.value for one in made if one.targets[0].id in names)]  # type: ignore[attr-defined]
        yield from (one.lineno for one in values if isinstance(one, ast.Call))


def told(program: Program) -> Iterator[Known]:
    """The lengths to which a tokenizer was told to cut, in order."""
    for made in program.made:
        value = made.keywords.get("max_length")
        if value is None or made.name in ("generate", "pipeline"):
            continue
        truncates = "truncation" in made.keywords or "padding" in made.keywords
        if truncates and isinstance(value, Known) and isinstance(value.data, int):
            yield value
    for made in program.made:
        value = made.keywords.get("model_max_length")
        if made.name == "from_pretrained" and isinstance(value, Known) and isinstance(value.data, int):
            yield value


def open_length(program: Program, kind: type[Unknown] = Undecided) -> str:
    """Why it is not known to what a tokenizer cuts, where a condition (`kind`: anything of that kind) decides it; ""
    where none does."""
    for made in program.made:
        value = made.keywords.get("max_length")
        cuts = "truncation" in made.keywords and made.name not in ("generate", "pipeline")
        if cuts and isinstance(value, kind):
            return value.reason
    return ""
