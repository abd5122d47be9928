"""`Settings`: typed access to a config's keys that remembers what was read, what was assumed and what is unknown.
`FileContext`: what is known from outside the file."""

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from planner.core.errors import ConfigError
from planner.core.records import dataclass
from planner.frameworks.readers.loading import read_bounded
from planner.frameworks.tools import Tool
from planner.hardware.gpu import GpuSpec
from planner.models.spec import ModelSpec
from planner.setup import TrainSetup


@dataclass(frozen=True, kw_only=True)
class FileContext:
    """What is known from outside the file.

    Attributes:
        model: that it trains, where it is at hand; base: the setup of what a launcher's file does not say.
        num_gpus: processes of the run; roots: where files that it names may lie.
        gpu: the card, for programs that ask it; None: one that computes in bf16.
        arguments: the words behind a program's name on its command line; None: nobody said.
        versions: package -> version that the run is said or pinned to use.
        objective: that a person named, "" where nobody did.
        depth: shell scripts that started one another on the way here.
        environment: variables that the launch sets.
        written: text of files that the checked one writes before it trains, by their paths.
        read: files beside it that were found so far.
        decided: of a program, conditions that nothing in it decides -> how they are taken this time; others: both ways.
        uncalled: whether functions are read that nothing calls, where nothing trains otherwise.
        open_switches: whether flags that nobody gave are not known (else they are off).
    """

    model: ModelSpec | None = None
    base: TrainSetup | None = None
    num_gpus: int = 1
    roots: tuple[Path, ...] = field(default=())
    gpu: GpuSpec | None = None
    arguments: tuple[str, ...] | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    objective: str = ""
    depth: int = 0
    written: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    read: set[Path] = field(default_factory=set)
    decided: Mapping[str, bool] = field(default_factory=dict)
    uncalled: bool = True
    open_switches: bool = False

    @property
    def half(self) -> str:
        """The 16-bit type that a tool takes which asks the card: bf16 where its units compute it."""
        return "bf16" if self.gpu is None or self.gpu.bf16 else "fp16"

    def below(self, folder: str) -> "FileContext":
        """As this, from a folder that a script goes to first: those of it that lie within the folders known here."""
        tops = [root.absolute() for root in self.roots]
        parts = Path(folder).parts
        ends = [Path(*parts[start:]) for start in range(len(parts))]  # its beginning may be above what is here
        places = [Path(os.path.normpath(root / end)) for end in ends for root in tops]
        places = [place for place in places if place not in tops and place.is_dir()]
        inner = [place for place in places if any(place.is_relative_to(top) for top in tops)]
        return replace(self, roots=(*inner, *self.roots)) if inner else self

    def read_by_suffix(self, path: str) -> str | None:
        """As `read_relative`, by the end of the path where another machine, or only the shell, knows its beginning."""
        parts = path.split("/")
        if (not path.startswith("/") and "$" not in path) or path in self.written:
            return self.read_relative(path)
        ends = ("/".join(parts[start:]) for start in range(1, len(parts)))
        return next(
            (text for end in ends if end and "$" not in end and (text := self.read_relative(end)) is not None), None
        )

    def of_program(self) -> "FileContext":
        """As the first process of the run sees it."""
        of_launch = {"WORLD_SIZE": str(self.num_gpus), "LOCAL_RANK": "0", "RANK": "0"}
        return replace(self, environment={**self.environment, **of_launch})

    def read_exact(self, path: str) -> str | None:
        """As `read_relative`, by no other path than this."""
        return self.read_relative(path, exact=True)

    def read_relative(self, path: str, *, exact: bool = False) -> str | None:
        """The text of a file that lies beside the config by a relative path, None where there is none."""
        if (text := self.written.get(path, self.written.get(path.rpartition("/")[2]))) is not None:
            return text
        with suppress(ConfigError):
            return read_bounded(file) if (file := self.find(path, exact=exact)) is not None else None
        return None

    def find(self, value: str, *, exact: bool = False) -> Path | None:
        """Where a file lies that is named by a relative path, None where there is none. As text: a program's imports
        ask hundreds of times."""
        named = Path(value)
        if not self.roots or named.is_absolute() or value.startswith("~"):
            return None
        tops = [os.path.abspath(root) for root in self.roots]
        candidates = [os.path.normpath(os.path.join(top, value)) for top in tops]
        above = ".." in named.parts
        if above:
            candidates = [path for path in candidates if any(Path(path).is_relative_to(top) for top in tops)]
        if value.endswith(".py"):  # packages may lie in `src`
            candidates += [os.path.join(top, "src", value) for top in tops]
        if not above and not exact:
            candidates += [os.path.join(top, named.name) for top in (*tops[:2], tops[-1])]
        file = next((Path(path) for path in candidates if os.path.isfile(path) and not os.path.islink(path)), None)
        self.read.update([file] if file is not None else ())
        return file


_TRUE = {"true", "yes", "on", "1"}
_FALSE = {"false", "no", "off", "0"}


class Settings:
    """The keys of one config. A getter coerces as the tools do ("2e-4" is a number) and notes defaults taken.

    `outside` is what is known beside the file; `blocks` are its blocks that were asked for.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        name: str,
        context: FileContext | None = None,
        *,
        unknown: Mapping[str, str] | None = None,
        more: str = "",
        where: Mapping[str, str] | None = None,
    ) -> None:
        self.values = values
        self.name = name
        self.outside = context or FileContext()
        self.blocks: dict[str, Settings] = {}
        self.assumptions: list[str] = []
        self.approximations: list[str] = []
        self.refusals: list[str] = []
        self.unknown = dict(unknown or {})
        """key -> why its value is not known, though the file sets it."""
        self.more = more
        """Why there may be keys beside those known; "" where there are none."""
        self.where = dict(where or {})
        """key -> where its value was written."""
        self.unknown_keys: tuple[str, ...] = ()
        self.tables: tuple[str, ...] = ()
        """Token tables among the LoRA targets."""
        self.undetermined: dict[str, str] = {}
        """key -> why, of those that were asked for and are not known."""
        self.missing: dict[str, str] = {}
        """Field of a setup -> why the settings do not determine it."""

    @property
    def model(self) -> ModelSpec | None:
        return self.outside.model

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None or key in self.unknown

    def raw(self, key: str, default: Any = None) -> Any:
        """The value as it is, the default where absent or null. What is not known is noted in `undetermined`."""
        value = self.values.get(key)
        if value is None and key in self.unknown:
            self.undetermined[key] = self.unknown[key]
        elif value is None and self.more and key not in self.values:
            self.undetermined[key] = self.more
        return default if value is None else value

    def first(self, *keys: str) -> str:
        """The first of several names of one setting that is there; the first name where none is."""
        return next(filter(self.has, keys), keys[0])

    def flag(self, key: str, default: bool) -> bool:
        """A truth value; the words that YAML 1.1 and the tools accept."""
        value = self.raw(key, default)
        if isinstance(value, bool):
            return value
        if isinstance(value, (int, str)) and str(value).strip().lower() in _TRUE | _FALSE:
            return str(value).strip().lower() in _TRUE
        raise self.error(key, "true or false", value)

    def integer(self, key: str, default: int, *, at_least: int = 0) -> int:
        value = self.raw(key, default)
        number = self._number(key, value, "a whole number")
        if number != int(number):
            raise self.error(key, "a whole number", value)
        if int(number) < at_least:
            raise self.error(key, f"at least {at_least}", value)
        return int(number)

    def real(self, key: str, default: float) -> float:
        return self._number(key, self.raw(key, default), "a number")

    def text(self, key: str, default: str) -> str:
        value = self.raw(key, default)
        if not isinstance(value, str):
            raise self.error(key, "text", value)
        return value

    def optional_text(self, key: str) -> str | None:
        return self.text(key, "") or None if self.has(key) else self.raw(key)

    def names(self, key: str) -> tuple[str, ...]:
        """A list of names: a YAML list or words with commas between; () where absent."""
        value = self.raw(key, [])
        if isinstance(value, str):
            value = [part.strip() for part in value.split(",")]
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(key, "a list of names", value)
        return tuple(item for item in value if item)

    def text_or_names(self, key: str) -> tuple[str, ...]:
        """A list of names, or one text that is a name or a pattern as a whole ("all-linear", a regular expression)."""
        value = self.raw(key, [])
        return ((value,) if value else ()) if isinstance(value, str) else self.names(key)

    def mapping(self, key: str) -> dict[str, Any]:
        """A block of settings; {} where absent."""
        value = self.raw(key, {})
        if isinstance(value, str) and value.lstrip().startswith("{"):  # a block on a command line
            try:
                value = json.loads(value)
            except ValueError:
                raise self.error(key, "a block of settings in JSON", value) from None
        if not isinstance(value, dict):
            raise self.error(key, "a block of settings", value)
        return value

    def block(self, key: str) -> "Settings":
        """A block's settings, which answer by its name."""
        if key not in self.blocks:
            self.blocks[key] = Settings(self.mapping(key), f"{self.name}: {key}", self.outside)
        return self.blocks[key]

    def ask(self, field: str, reason: str) -> None:
        """Notes that a field of the setup has to be asked for, and why."""
        self.missing[field] = f"{self.name}{reason}"

    def assume(self, sentence: str) -> None:
        """Notes what the config leaves open."""
        if sentence not in self.assumptions:
            self.assumptions.append(sentence)

    def approximate(self, sentence: str) -> None:
        """Notes what the memory model does not follow exactly."""
        if sentence not in self.approximations:
            self.approximations.append(sentence)

    def leave_out(self, sentences: Mapping[str, str]) -> None:
        """Notes those settings of a table (key -> sentence) that are on and that the memory model does not follow."""
        for key, sentence in sentences.items():
            if self.raw(key) not in (None, False, 0, "", "0", "false", "none", [], {}):
                self.approximate(sentence)

    def error(self, key: str, expected: str, got: Any) -> ConfigError:
        return ConfigError(
            f"{self.name}: {key} must be {expected}, got {_short(got)}", hint=f"correct {key} in the file"
        )

    def refuse_unknown(self, accepted: Iterable[str], tool: str) -> None:
        """For tools that refuse to start with a key they do not know."""
        names = set(accepted)
        for key in self.values:
            if key not in names:
                close = get_close_matches(key, sorted(names), n=1, cutoff=0.75)
                hint = f"did you mean {close[0]}?" if close else f"remove it, or check which {tool} version it is for"
                raise ConfigError(f"{self.name}: {tool} has no setting {_short(key)}", hint=hint)

    def note_unknown(self, accepted: Iterable[str], tool: Tool) -> None:
        """Notes keys that the tool does not know: other tools' and wrappers' keys stand in many files that run.

        Raises:
            ConfigError: one that is nearly a key on which memory hangs: the tool would take a default for that.
        """
        names = set(accepted)
        deciding = names & set(tool.names)
        strangers = [key for key in self.values if key not in names]
        for key in strangers:
            close = get_close_matches(key, sorted(deciding - set(self.values)), n=1, cutoff=0.84)
            if close:
                raise ConfigError(
                    f"{self.name}: {tool.name} has no setting {_short(key)}", hint=f"did you mean {close[0]}?"
                )
        if strangers:
            shown = ", ".join(_short(key) for key in strangers)
            self.assume(f"no setting{'s' if len(strangers) > 1 else ''} of {tool.name}, left out here: {shown}")
            self.unknown_keys += tuple(strangers)

    def _number(self, key: str, value: Any, expected: str) -> float:
        if isinstance(value, str):
            try:
                value = float(value)
            except ValueError:
                raise self.error(key, expected, value) from None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.error(key, expected, value)
        if value != value or abs(value) > 1e15:
            raise self.error(key, f"{expected} of a reasonable size", value)
        return float(value) if isinstance(value, float) else value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
