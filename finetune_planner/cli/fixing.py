"""`plan check --fix`: the texts that say a changed setup, of the file and of what it takes its settings from."""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from finetune_planner.cli.checking import CheckRequest
from finetune_planner.improvement import Improved
from planner.core.errors import ConfigError
from planner.frameworks.readers import FileContext, ReadConfig, canonical, read_text
from planner.frameworks.readers.evaluating import setting_of
from planner.frameworks.readers.loading import read_bounded
from planner.frameworks.readers.program.source import of_cells
from planner.frameworks.readers.read import pinned, roots_of
from planner.frameworks.readers.rewrite import in_cells, rewrite
from planner.frameworks.readers.shell import SUFFIXES, commands
from planner.frameworks.readers.types import overrides
from planner.frameworks.tools import PROGRAMS, tool_of
from planner.frameworks.tools.field import changed_fields
from planner.frameworks.tools.transformers import HANDED
from planner.hardware.gpu import GpuSpec
from planner.models.spec import ModelSpec

MAX_NAMED = 20
"""Files that a file names, and those that these name."""
_WORD = re.compile(r"(?<![\w./${}-])[\w./${}-]+\.(?:py|ya?ml|json|sh)(?![\w-])")


class Fixed(NamedTuple):
    """Texts by the files that they are of; `notes`: what a person has to do, that the run takes them; `read`: every
    file that was read for it."""

    texts: dict[Path, str]
    notes: tuple[str, ...] = ()
    read: tuple[Path, ...] = ()


def fixed_path(file: Path) -> Path:
    """Where the fixed text of a file goes."""
    return file.with_name(f"{file.stem}.fixed{file.suffix}")


def fixed_files(
    file: Path,
    config: ReadConfig,
    improved: Improved,
    spec: ModelSpec,
    *,
    card: GpuSpec | None = None,
    request: CheckRequest | None = None,
) -> Fixed:
    """The texts of a file, and of those that it takes its settings from, with the setup's changes written in and their
    names in what names them, proven by reading them back.

    Raises:
        ConfigError: their form does not allow it.
    """
    if "loop" in config.setup.stack:
        raise ConfigError(f"{file.name} trains in a loop of its own, which has no settings to change")
    return _Fixing(file, config, improved, spec, card, request or CheckRequest()).fixed()


class _Fixing:
    """One file's way to the texts that say a changed setup."""

    def __init__(
        self,
        file: Path,
        config: ReadConfig,
        improved: Improved,
        spec: ModelSpec,
        card: GpuSpec | None,
        request: CheckRequest,
    ) -> None:
        self.file, self.config, self.improved, self.spec, self.request = file, config, improved, spec, request
        self.edits = edits_of(config, improved)
        named = {config.keys.get(field.of, field.key): field.of for field in tool_of(config.format).fields}
        self.places = {
            key: place for key, of in named.items() if key != HANDED and (place := config.origins.get(of))
        }  # what hands the weights' type on stands nowhere yet, autocast's switch does
        self.around = FileContext(
            num_gpus=improved.setup.num_gpus,
            roots=roots_of(file),
            gpu=card,
            arguments=request.arguments,
            versions={**pinned(file), **request.versions},
        )
        self.texts = {file: read_bounded(file)}
        self.named_by: dict[Path, Path] = {}
        for path, parent in self._named():
            self.named_by[path] = parent

    def fixed(self) -> Fixed:
        """The texts; new settings stand in the file itself, else where most of the others do."""
        standing = [path for place in self.places.values() if (path := self._path(place)) is not None]
        destinations = sorted({*standing} - {self.file}, key=lambda file: (-standing.count(file), str(file)))
        problems: list[ConfigError] = []
        for destination in (self.file, *destinations):
            try:
                return self._written(destination)
            except ConfigError as error:
                problems.append(error)
        raise problems[-1 if self.file.name.endswith(SUFFIXES) else 0]

    def _named(self) -> Iterator[tuple[Path, Path]]:
        """(file, the file that names it) of what stands in the file's text as a path, and of what stands in those."""
        waiting = [self.file]
        while waiting:
            parent = waiting.pop(0)
            inside = self.around
            for folder in re.findall(r"\bcd[ \t]+[\"']?([\w./-]+)", self.texts[parent]):
                inside = inside.below(folder)
            for word in dict.fromkeys(_WORD.findall(self.texts[parent])):
                parts = word.split("/")
                ends = ["/".join(parts[at:]) for at in range(len(parts))]
                path = next((resolved for end in ends if end and (resolved := inside.find(end)) is not None), None)
                if path is None or _same(path, self.texts) is not None or len(self.texts) > MAX_NAMED:
                    continue
                try:
                    self.texts[path] = read_bounded(path)
                except ConfigError:
                    continue
                waiting.append(path)
                yield path, parent

    def _naming(self, path: Path) -> Path | None:
        """The file, or one that it names, where the last part of a path stands."""
        ways = {file: text for file, text in self.texts.items() if file == self.file or file in self.named_by}
        return next((file for file, text in ways.items() if _renamed(text, path.name, "", file) != text), None)

    def _path(self, place: str) -> Path | None:
        """The file that a place names; None where the checked one writes it, or nobody does."""
        name = place.rpartition(":")[0] if ":" in place else ""
        if name in ("", self.file.name):
            return self.file if name else None
        ends = [path for path in self.texts if f"/{path.as_posix()}".endswith(f"/{name}") and path != self.file]
        if len(ends) == 1:
            return ends[0]
        path = self.around.find(name) if not ends else None
        if path is not None:
            self.texts[path] = read_bounded(path)
        return path

    def _written(self, destination: Path) -> Fixed:
        """The texts, where new settings go into one of the files.

        Raises:
            ConfigError: as `fixed_files`.
        """
        groups: dict[Path | str, dict[str, Any]] = {}
        inner = self._inner()
        for key, value in self.edits.items():
            place = self.places.get(key, "")
            name = place.rpartition(":")[0]
            groups.setdefault(name if name in inner else self._path(place) or destination, {})[key] = value
        imported = [path for path in groups if isinstance(path, Path) and path.suffix == ".py"]
        for path in imported:
            if path != self.file and path not in self.named_by:
                raise ConfigError(f"{path.name} is imported: no name to change", hint="make the changes by hand")
        texts = dict(self.texts)
        for of, edits in sorted(groups.items(), key=lambda group: isinstance(group[0], Path)):
            if isinstance(of, str):
                texts[self.file] = _put(texts[self.file], inner[of], self._rewritten(inner[of], of, edits), self.file)
            else:
                texts[of] = self._rewritten(texts[of], of.name, edits)
        notes: list[str] = []
        names: dict[Path, str] = {}
        for path in [edited for edited in groups if isinstance(edited, Path)]:
            while path != self.file:
                parent = self.named_by.get(path) or self._naming(path)
                names[path] = fixed_path(path).name if parent is not None else path.name
                if parent is None:
                    notes.append(f"{self.file.name} names {path.name} by no literal: hand it {fixed_path(path).name}")
                    break
                texts[parent] = _renamed(texts[parent], path.name, fixed_path(path).name, parent)
                path = parent
        if len({*names.values()}) < len(names):
            raise ConfigError("two files of one name would change", hint="make the changes by hand")
        request, improved = self.request, self.improved
        launcher = read_bounded(request.accelerate) if request.accelerate is not None else None
        around = replace(self.around, written={name: texts[path] for path, name in names.items()})
        back = read_text(
            texts[self.file], self.file.name, model=self.spec, base=improved.setup, around=around, launcher=launcher
        )
        back = overrides(back, request.sets)
        if canonical(back.setup) != canonical(improved.setup) or (
            improved.eval_seqs and back.eval_seqs != improved.eval_seqs
        ):
            raise ConfigError(
                f"{self.file.name} is written in a form that --fix cannot change safely",
                hint="make the changes that plan check lists by hand",
            )
        return Fixed({path: text for path, text in texts.items() if text != self.texts[path]}, tuple(notes), (*texts,))

    def _inner(self) -> dict[str, str]:
        """Text of the files that the file itself writes before it trains, by the names that places have for them."""
        if self.file.suffix == ".ipynb":
            written = of_cells(self.texts[self.file])[1]
        elif self.file.name.endswith(SUFFIXES):
            written = {
                path: text
                for command in commands(self.texts[self.file], self.file.name, self.around.num_gpus, ())
                for path, text in command.written.items()
            }
        else:
            return {}
        return written | {path.rpartition("/")[2]: text for path, text in written.items()}

    def _rewritten(self, text: str, name: str, edits: dict[str, Any]) -> str:
        program = self.config.format in PROGRAMS
        now = {key: value for key, value in self.config.values.items() if key in self.places} if program else {}
        return rewrite(text, name, edits, call_line=self.config.call_line, places=self.places, now=now)


def _same(path: Path, among: Mapping[Path, Any]) -> Path | None:
    return next((other for other in among if os.path.abspath(other) == os.path.abspath(path)), None)


def _put(text: str, before: str, after: str, file: Path) -> str:
    """The text with a part of it changed: of a notebook, the rest of a cell.

    Raises:
        ConfigError: that part stands there not just once.
    """
    if file.suffix == ".ipynb":
        return in_cells(
            text, lambda cells: [_put(cell, before, after, Path()) if before in cell else cell for cell in cells]
        )
    if not before.strip() or text.count(before) != 1:
        raise ConfigError(f"{file.name} writes a file in no one place", hint="make the changes by hand")
    return text.replace(before, after)


def _renamed(text: str, name: str, new: str, file: Path) -> str:
    """The text with another file named, outside comments (of a notebook, in its code); as it was where nothing does."""
    if file.suffix == ".ipynb":
        return in_cells(text, lambda cells: [_renamed(cell, name, new, Path()) for cell in cells])
    word = re.compile(rf"(?<![\w.-]){re.escape(name)}(?![\w-]|\.\w)")
    return "".join(
        word.sub(new, line[: line.find("#")]) + line[line.find("#") :] if "#" in line else word.sub(new, line)
        for line in text.splitlines(keepends=True)
    )


def edits_of(config: ReadConfig, improved: Improved) -> dict[str, Any]:
    """The settings (nested ones dotted) that make a file say what was found for it.

    Raises:
        ConfigError: a field that cannot be changed in place.
    """
    edits = tool_of(config.format).edits(config.keys, config.setup, improved.setup, config.path)
    edits = {key: value for key, value in edits.items() if key not in config.lacks}
    return edits | ({setting_of(config): improved.eval_seqs} if improved.eval_seqs else {})


def by_hand(config: ReadConfig, improved: Improved) -> list[str]:
    """The settings that would make a file say a changed setup, with where each stands today: for a person to write."""
    tool = tool_of(config.format)
    places = {
        config.keys.get(of, field.key): config.origins[of]
        for of in changed_fields(config.setup, improved.setup)
        if (field := tool.field(of)) is not None and of in config.origins
    }
    edits = edits_of(config, improved)
    return [f"{key}: {value}" + (f" (now {places[key]})" if key in places else "") for key, value in edits.items()]
