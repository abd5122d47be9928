"""`Settings`: typed access to a config's keys that remembers what was read, what was assumed and what is unknown."""

import json
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from planner.core.errors import ConfigError
from planner.frameworks.readers.context import FileContext
from planner.frameworks.tools import Tool
from planner.models.spec import ModelSpec

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
        """What trains, where it is at hand."""
        return self.outside.model

    def has(self, key: str) -> bool:
        """Whether a key is there and not null."""
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
        for key in keys:
            if self.has(key):
                return key
        return keys[0]

    def flag(self, key: str, default: bool) -> bool:
        """A truth value; the words that YAML 1.1 and the tools accept."""
        value = self.raw(key, default)
        if isinstance(value, bool):
            return value
        if isinstance(value, (int, str)) and str(value).strip().lower() in _TRUE | _FALSE:
            return str(value).strip().lower() in _TRUE
        raise self.error(key, "true or false", value)

    def integer(self, key: str, default: int, *, at_least: int = 0) -> int:
        """A whole number."""
        value = self.raw(key, default)
        number = self._number(key, value, "a whole number")
        if number != int(number):
            raise self.error(key, "a whole number", value)
        if int(number) < at_least:
            raise self.error(key, f"at least {at_least}", value)
        return int(number)

    def real(self, key: str, default: float) -> float:
        """A number."""
        return self._number(key, self.raw(key, default), "a number")

    def text(self, key: str, default: str) -> str:
        """A word."""
        value = self.raw(key, default)
        if not isinstance(value, str):
            raise self.error(key, "text", value)
        return value

    def optional_text(self, key: str) -> str | None:
        """A word or None."""
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
        return (value,) if isinstance(value, str) else self.names(key)

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
        """What a wrong value is answered with."""
        return ConfigError(
            f"{self.name}: {key} must be {expected}, got {_short(got)}", hint=f"correct {key} in the file"
        )

    def refuse_unknown(self, accepted: Iterable[str], tool: str) -> None:
        """For tools that refuse to start with a key they do not know.

        Raises:
            ConfigError: with the closest known name as a hint.
        """
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
