"""Settings of a program, read through the program of the same project that reads them.

A file whose settings no tool owns says what its program makes of it: the loss, what is absent, which words stand above.
The program is found by the file's name in the project's texts: in its own, or in a launch that somebody wrote down.
"""

import os
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from planner.core.errors import ConfigError, NotPlanned
from planner.frameworks.readers.loading import read_bounded
from planner.frameworks.readers.types import ReadConfig
from planner.frameworks.readers.values import FileContext

TOPS = (".git", "pyproject.toml", "requirements.txt", "setup.py", "README.md")
"""What lies in a project's topmost folder."""
TELLS = (".py", ".sh", ".md", ".slurm", ".sbatch", "Makefile")
"""Ends of the names of texts in which a launch may stand."""
NOT_THE_PROJECTS = re.compile(r"^\.|^(?:node_modules|site-packages|venv|env|tests?|build|dist)$")
MAX_FILES = 1500
MAX_READ, MAX_TRIED = 12, 2
"""Readings of programs in all, and of one with different words."""
MAX_ABOVE = 5
Words = tuple[str, ...] | None


def read(path: Path, file_reading: ReadConfig, of_program: Callable[[Path, Words], ReadConfig]) -> ReadConfig:
    """The reading of a file by the one program of its project that takes its settings from it, or `file_reading` where
    none, or several that train otherwise, do, or where the program leaves more open than the file's own words.

    Args:
        of_program: reads a program that is launched with these words (None: nobody says).
    """
    readings: dict[Path, tuple[Words, ReadConfig]] = {}
    tried: Counter[Path] = Counter()
    refused: NotPlanned | None = None
    tier = 0
    for of, program, words in dict.fromkeys(programs(path)):
        if of > tier and (readings or refused is not None):
            break
        tier = of
        if program in readings or tried[program] >= MAX_TRIED or tried.total() >= MAX_READ:
            continue
        tried[program] += 1
        try:
            reading = of_program(program, words)
        except NotPlanned as error:
            if of:
                return file_reading
            command = shlex.join([str(program), *(words or ())])
            hint = f"plan trace -- python {command} runs it on a phantom GPU and says what it needs"
            refused = NotPlanned(f"{path.name} is the settings of {program.name}: {error.message}", hint=hint)
            continue
        except ConfigError:
            continue
        context = FileContext(roots=(program.parent, *program.parents[1:MAX_ABOVE]))
        if any(context.find(source) == path.absolute() for source in reading.sources):
            readings[program] = words, reading
    setups = {reading.setup for _, reading in readings.values()}
    if refused is not None and not readings:
        raise refused
    if len(setups) != 1 or refused is not None:
        return file_reading
    program, (words, reading) = next(iter(readings.items()))
    if len(reading.missing) > len(file_reading.missing):
        return file_reading
    assumption = f"read through {program.name}, which takes its settings from {path.name}"
    return replace(
        reading, path=file_reading.path, assumptions=(assumption, *reading.assumptions), through=(program, words)
    )


def programs(path: Path) -> Iterator[tuple[int, Path, Words]]:
    """Programs of the project that may read a file, with the words that they are launched with: (0) those of whose
    launch with it somebody wrote, (1) those that name it, (2) those that are launched with another of its folder."""
    tops = (
        above
        for above in path.absolute().parents[:MAX_ABOVE]
        if above != Path.home() and any((above / name).exists() for name in TOPS)
    )
    top = next(tops, path.absolute().parent)
    texts = {file: text for file in _files(top) if (text := _text(file)) and file != path.absolute()}
    for file, text in texts.items():
        if path.name in text:
            yield from ((0, *launch) for launch in _launched(text, file, top, path, path.name))
    for file, text in texts.items():
        if file.suffix == ".py" and (path.name in text or f'"{path.stem}"' in text):
            yield 1, file, None
    for sibling in sorted(path.absolute().parent.glob(f"*{path.suffix}"))[:20]:
        for file, text in texts.items():
            if sibling.name != path.name and sibling.name in text:
                yield from ((2, *launch) for launch in _launched(text, file, top, path, sibling.name))


def _files(top: Path) -> Iterator[Path]:
    waiting, num = [top], 0
    while waiting and num < MAX_FILES:
        folder = waiting.pop(0)
        try:
            inside = sorted(folder.iterdir())
        except OSError:
            continue
        for entry in inside:
            num += 1
            if entry.is_symlink() or NOT_THE_PROJECTS.search(entry.name):
                continue
            if entry.is_dir():
                waiting.append(entry)
            elif entry.name.endswith(TELLS):
                yield entry


def _text(file: Path) -> str:
    try:
        return read_bounded(file)
    except ConfigError:
        return ""


def _launched(text: str, file: Path, top: Path, path: Path, name: str) -> Iterator[tuple[Path, Words]]:
    """Programs that a text's lines start with the words in which a file's name stands, that being `path`."""
    for line in text.replace("\\\n", " ").splitlines():
        if name not in line or (".py" not in line and " -m " not in line):
            continue
        try:
            words = shlex.split(re.split(r"[|;&>`]", line.strip("`$ "))[0], comments=True)
        except ValueError:
            continue
        module = next((at for at, word in enumerate(words[:-1]) if word == "-m" and "." in words[at + 1]), None)
        start = next((at for at, word in enumerate(words) if word.endswith(".py")), None)
        if start is None and module is not None:
            start, words[module + 1] = module + 1, words[module + 1].replace(".", "/") + ".py"
        if start is None or not any(name in word for word in words[start + 1 :]):
            continue
        program = next((candidate for root in (file.parent, top) if (candidate := root / words[start]).is_file()), None)
        if program is not None:
            relative = os.path.relpath(path.absolute(), top)
            given = (
                re.sub(r"[^=]*$", relative, word, count=1) if word.endswith(name) else word
                for word in words[start + 1 :]
            )
            yield program.resolve(), tuple(given)
